"""Where the episodes are in a ring of steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from trajstore.datasets.fields import are_same
from trajstore.datasets.torchrl.storage import Leaf, Ring
from trajstore.errors import DataError
from trajstore.schema import Array

ENDS = ("done", "terminated", "truncated")
TRAJECTORY = ("collector/traj_ids", "traj_ids")
_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive steps of one episode in one lane; positions count from the oldest step."""

    lane: int
    start: int
    stop: int

    @property
    def first(self) -> Run:
        return Run(self.lane, self.start, self.start + 1)

    @property
    def last(self) -> Run:
        return Run(self.lane, self.stop - 1, self.stop)


class Trajectories:
    """The runs that episodes are made of, told by the flags of their ends and the numbers of their trajectories.

    Attributes:
        ends: Flags of what came of a step, by name.
        pairs: Entries that come twice: at the root, and of the next step.
    """

    def __init__(self, leaves: Mapping[str, Leaf], ring: Ring) -> None:
        self.ends = {name: leaves[f"next/{name}"] for name in ENDS if f"next/{name}" in leaves}
        self.pairs = {
            path: (leaf, leaves[f"next/{path}"]) for path, leaf in leaves.items() if _is_pair(path, leaves)
        }
        self._ring = ring
        self._number = next((leaves[path] for path in TRAJECTORY if path in leaves), None)
        for leaf in (*self.ends.values(), *([self._number] if self._number else ())):
            leaf.check_scalar()
        if not self.ends and self._number is None:
            raise DataError(
                "expected 'next/done' or 'collector/traj_ids', which say where episodes end,"
                f" got {', '.join(leaves)}"
            )

    def rows(self, leaf: Leaf, runs: Sequence[Run]) -> Array:
        parts = [leaf.rows(self._ring.slots(run.start, run.stop), run.lane) for run in runs]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def number(self, run: Run) -> int | None:
        """Of the trajectory, if the dump has it."""
        return None if self._number is None else int(self.rows(self._number, [run.first]).item())

    @cached_property
    def episodes(self) -> list[list[Run]]:
        """The runs of every episode, in the order in which episodes began."""
        episodes = [runs for lane in range(self._ring.n_lanes) for runs in self._episodes_of(lane)]
        return sorted(episodes, key=lambda runs: (runs[0].start, runs[0].lane))

    def may_lack_start(self, runs: Sequence[Run]) -> bool:
        """Whether steps before the first one of an episode may have been overwritten."""
        first = runs[0]
        if not self._ring.is_overwritten or first.start == 0:
            return self._ring.is_overwritten
        return self._is_interleaved and not self._is_end(Run(first.lane, first.start - 1, first.start))

    @cached_property
    def _is_interleaved(self) -> bool:
        """Whether rollouts of several environments stand one after another."""
        return any(len(runs) > 1 for runs in self.episodes)

    def _is_end(self, step: Run) -> bool:
        return any(self.rows(leaf, [step]).any() for leaf in self.ends.values())

    def _episodes_of(self, lane: int) -> list[list[Run]]:
        """Runs, joined where one goes on with the trajectory of another."""
        episodes: list[list[Run]] = []
        going_on: dict[int | None, list[Run]] = {}
        for run in self._runs_of(lane):
            number = self.number(run)
            known = going_on.get(number)
            if number is not None and known is not None and self._goes_on(known[-1], run):
                known.append(run)
            else:
                going_on[number] = [run]
                episodes.append(going_on[number])
        return episodes

    def _goes_on(self, before: Run, after: Run) -> bool:
        """Whether a run begins with the observation that the one before ended with."""
        return (
            bool(self.pairs)
            and not self._is_end(before.last)
            and all(
                are_same(self.rows(then, [before.last]), self.rows(now, [after.first]))
                for now, then in self.pairs.values()
            )
        )

    def _runs_of(self, lane: int) -> Iterator[Run]:
        start = 0
        for position in self._breaks(lane):
            yield Run(lane, start, position + 1)
            start = position + 1

    def _breaks(self, lane: int) -> Iterator[int]:
        """Positions after which something else begins, the last one included."""
        n = self._ring.n_rows
        for start in range(0, n, _BLOCK):
            stop = min(start + _BLOCK, n)
            is_end = np.zeros(stop - start, bool)
            for leaf in self.ends.values():
                is_end |= self.rows(leaf, [Run(lane, start, stop)]).reshape(-1) != 0
            if self._number is not None:
                numbers = self.rows(self._number, [Run(lane, start, min(stop + 1, n))]).reshape(-1)
                is_end[: len(numbers) - 1] |= numbers[1:] != numbers[:-1]
            is_end[-1] |= stop == n
            yield from (start + int(i) for i in np.flatnonzero(is_end))


def _is_pair(path: str, leaves: Mapping[str, Leaf]) -> bool:
    later = leaves.get(f"next/{path}")
    return path not in (*ENDS, "reward") and later is not None and leaves[path].is_like(later)
