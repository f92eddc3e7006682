"""The parts of a batch that different actors give, and how they are joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from trajstore.ray.batch_memory import MemoryLease
from trajstore.ray.direct_connections import ActorConnections
from trajstore.ray.draw_restrictions import DrawRestrictions
from trajstore.ray.draw_weights import DrawWeight
from trajstore.sampling.windows import Windows
from trajstore.schema import Array

FlatBatch = dict[str, torch.Tensor]  # tensors by flat key


@dataclass(frozen=True)
class BatchRequest:
    """What a learner asks for. Batches of equal requests have the same layout, so it is the key for those."""

    n_windows: int
    windows: Windows | None
    restrictions: DrawRestrictions


@dataclass
class RequestedPart:
    """The windows ``start`` to ``stop`` of a batch, which one actor gives.

    Attributes:
        ref: The call through Ray; None: requested over a direct connection.
    """

    rank: int
    start: int
    stop: int
    ref: Any = None

    @property
    def n_windows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class ReceivedPart:
    """What an actor gave.

    Attributes:
        actor: Number of the actor.
        weight: Its weight for the next draw.
        tensors: The windows.
        lost_connection: They were requested over a direct connection first, which was lost.
    """

    actor: int
    weight: DrawWeight
    tensors: FlatBatch
    lost_connection: bool = False


@dataclass
class PendingBatch:
    """A batch that was requested from the actors.

    Attributes:
        request: What was asked for.
        probabilities: By rank, the probability that a window is drawn from this actor.
        weights: By rank, the newest draw weight that is known.
        connections: Direct connections; None: there are none.
        lease: The memory of the batch; None: it has none.
        parts: The parts, by rank; actors that give no windows are left out.
    """

    request: BatchRequest
    probabilities: Array
    weights: list[DrawWeight]
    connections: ActorConnections | None
    lease: MemoryLease | None
    parts: list[RequestedPart] = field(default_factory=list)


def join_parts(whole: FlatBatch, parts: Sequence[RequestedPart], received: Sequence[FlatBatch]) -> FlatBatch:
    """Join parts: in the memory of the batch, or else in the memory of its only part, or else in new memory."""
    if not whole or whole.keys() != received[0].keys():
        if len(received) == 1:
            return received[0]
        return {key: torch.cat([tensors[key] for tensors in received]) for key in received[0]}
    for part, tensors in zip(parts, received, strict=True):
        for key, value in tensors.items():
            target = whole[key][part.start : part.stop]
            if target.data_ptr() != value.data_ptr():
                target.copy_(value)
    return whole


def weigh_whole_draw(flat: FlatBatch, pending: PendingBatch, counts: torch.Tensor) -> None:
    """Replace probabilities and weights by those of the whole draw: first an actor, then one of its windows."""
    by_rank = torch.from_numpy(pending.probabilities)
    ranks = torch.tensor([part.rank for part in pending.parts])
    probability = flat["priority/probability"] * by_rank[ranks].repeat_interleave(counts)
    least = float(probability.min())
    drawn = [(weight, float(p)) for weight, p in zip(pending.weights, by_rank, strict=True) if p]
    if all(weight.is_by_buffer for weight, _ in drawn):
        least = min(least, *(weight.least_probability * p for weight, p in drawn))
    beta = max(weight.beta for weight, _ in drawn)
    flat["priority/probability"] = probability
    flat["priority/weight"] = (least / probability).pow(beta).clamp(max=1.0).to(torch.float32)
