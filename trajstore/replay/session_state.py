"""What a checkpoint keeps of a buffer's session, besides the state of its reader, index and limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

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
        policy_version: The version of the policy that collects; None: not recorded.
    """

    sampled: int
    redrawn: int
    policy_version: int | None

    def to_tree(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_tree(tree: Mapping[str, Any]) -> Counters:
        version = tree["policy_version"]
        return Counters(int(tree["sampled"]), int(tree["redrawn"]), None if version is None else int(version))

    @staticmethod
    def merged(counters: Sequence[Counters], share: RankShare) -> Counters:
        """This rank's share of what other ranks have counted."""
        return Counters(
            share.of(sum(c.sampled for c in counters)),
            share.of(sum(c.redrawn for c in counters)),
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
