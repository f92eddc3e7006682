"""The report of a redistribution: how many episodes and steps each rank gets, and what was dropped or truncated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from trajstore.distributed.incomplete_episodes import CAUSES
from trajstore.schema import Array


@dataclass(frozen=True, slots=True)
class PartitionReport:
    """Counts of the episodes and steps of a checkpoint after a redistribution.

    Attributes:
        policy: How episodes were assigned to ranks.
        n_sources: Number of ranks that saved the checkpoint.
        ranks: By new rank: ``episodes`` and ``steps``, and how many of these are ``open``, ``headless`` or ``cut``
            (an episode may be several of them).
        dropped: By cause, then by the rank that saved them: episodes and steps that were left out.
        truncated: The same for episodes that are shown as if they started or ended where their steps do.
        longest: Steps of the longest episode that was kept.
    """

    policy: str
    n_sources: int
    ranks: list[dict[str, Any]]
    dropped: dict[str, list[dict[str, int]]]
    truncated: dict[str, list[dict[str, int]]]
    longest: int

    def total(self, kind: Literal["dropped", "truncated"], cause: str | None = None) -> dict[str, int]:
        """Sum over all ranks that saved the checkpoint, for one cause or (None) for all."""
        chosen = self.dropped if kind == "dropped" else self.truncated
        counts = [c for name, by_rank in chosen.items() if cause in (None, name) for c in by_rank]
        return {unit: sum(c[unit] for c in counts) for unit in ("episodes", "steps")}

    def __str__(self) -> str:
        lines = [f"{self.n_sources} -> {len(self.ranks)} ranks, by {self.policy}; longest {self.longest} steps"]
        for rank, counts in enumerate(self.ranks):
            flagged = ", ".join(
                f"{cause} {counts[cause]['episodes']} ({counts[cause]['steps']})" for cause in CAUSES
            )
            lines.append(f"  rank {rank}: {counts['episodes']} episodes, {counts['steps']} steps; {flagged}")
        for kind in ("dropped", "truncated"):
            for cause in CAUSES:
                counts = self.total(kind, cause)
                if counts["episodes"]:
                    lines.append(f"  {kind}, {cause}: {counts['episodes']} episodes, {counts['steps']} steps")
        return "\n".join(lines)


def count_by_rank(rank: Array, length: Array, chosen: Array, n_ranks: int) -> list[dict[str, int]]:
    """Episodes and steps by rank.

    Args:
        rank: The rank of each episode.
        length: Its number of steps.
        chosen: Whether it is counted.
        n_ranks: Length of the result.
    """
    episodes = np.bincount(rank[chosen], minlength=n_ranks)
    steps = np.bincount(rank[chosen], length[chosen], minlength=n_ranks)
    return [{"episodes": int(e), "steps": int(s)} for e, s in zip(episodes, steps, strict=True)]
