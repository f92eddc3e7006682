"""What a checkpoint keeps of a buffer's session, besides the state of its reader, index and limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class RankShare:
    """Splits counts of all ranks evenly: the shares of all ranks add up to the total."""

    rank: int
    world_size: int

    def of(self, total: int) -> int:
        return int(total) // self.world_size + (self.rank < int(total) % self.world_size)

    def of_sums(self, counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
        """This rank's share of the sum of each named count."""
        return {name: self.of(sum(int(c[name]) for c in counts)) for name in counts[0]}


@dataclass(frozen=True, slots=True)
class Counters:
    """Counts of a session.

    Attributes:
        sampled: Windows drawn.
        redrawn: Batches drawn again because another session had evicted their rows.
        bytes_per_step: Bytes that a step takes on storage; None before the first commit.
        policy_version: The version of the policy that collects; None: not recorded.
    """

    sampled: int
    redrawn: int
    bytes_per_step: float | None
    policy_version: int | None

    def to_tree(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_tree(tree: Mapping[str, Any]) -> Counters:
        size, version = tree["bytes_per_step"], tree["policy_version"]
        return Counters(
            int(tree["sampled"]),
            int(tree["redrawn"]),
            None if size is None else float(size),
            None if version is None else int(version),
        )

    @staticmethod
    def merged(counters: Sequence[Counters], n_steps: Sequence[int], share: RankShare) -> Counters:
        """This rank's share of what other ranks have counted; ``n_steps`` weighs their bytes per step."""
        known = [(c.bytes_per_step, max(n, 1)) for c, n in zip(counters, n_steps, strict=True) if c.bytes_per_step]
        sizes, weights = zip(*known, strict=True) if known else ((), ())
        return Counters(
            share.of(sum(c.sampled for c in counters)),
            share.of(sum(c.redrawn for c in counters)),
            float(np.average(sizes, weights=weights)) if sizes else None,
            max((c.policy_version for c in counters if c.policy_version is not None), default=None),
        )


def as_tensors(tree: Any) -> Any:
    """A state as it was before it was stored: arrays become tensors."""
    if isinstance(tree, Mapping):
        return {name: as_tensors(value) for name, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [as_tensors(value) for value in tree]
    if hasattr(tree, "dtype") and not isinstance(tree, torch.Tensor):
        return torch.as_tensor(tree)
    return tree
