"""Find the episodes in a ring of steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from trajstore.datasets.episode_arrays import rows_equal
from trajstore.datasets.torchrl.storage import Leaf, Ring
from trajstore.errors import DataError
from trajstore.schema import Array

END_FLAGS = ("done", "terminated", "truncated")
TRAJECTORY_IDS = ("collector/traj_ids", "traj_ids")
_ROWS_PER_READ = 1 << 20


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive steps of one episode in one lane. Positions count from the oldest step."""

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
    """The runs of steps that form episodes, found by end flags and trajectory ids.

    Attributes:
        ends: Entries with the end flags of steps, by name.
        pairs: Entries that are stored twice, as (entry at the root, entry of the next step), by path.
    """

    def __init__(self, leaves: Mapping[str, Leaf], ring: Ring) -> None:
        self.ends = {name: leaves[f"next/{name}"] for name in END_FLAGS if f"next/{name}" in leaves}
        self.pairs = {
            path: (leaf, leaves[f"next/{path}"]) for path, leaf in leaves.items() if _is_pair(path, leaves)
        }
        self._ring = ring
        self._trajectory_ids = next((leaves[path] for path in TRAJECTORY_IDS if path in leaves), None)
        for leaf in (*self.ends.values(), *([self._trajectory_ids] if self._trajectory_ids else ())):
            leaf.check_scalar()
        if not self.ends and self._trajectory_ids is None:
            raise DataError(
                "expected 'next/done' or 'collector/traj_ids', which state where episodes end,"
                f" got {', '.join(leaves)}"
            )

    def rows(self, leaf: Leaf, runs: Sequence[Run]) -> Array:
        parts = [leaf.rows(self._ring.slots(run.start, run.stop), run.lane) for run in runs]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def trajectory_id(self, run: Run) -> int | None:
        """Return the id of a run's trajectory; None if the dump has no ids."""
        return None if self._trajectory_ids is None else int(self.rows(self._trajectory_ids, [run.first]).item())

    @cached_property
    def episodes(self) -> list[list[Run]]:
        """The runs of every episode, in the order in which the episodes began."""
        episodes = [runs for lane in range(self._ring.n_lanes) for runs in self._episodes_of(lane)]
        return sorted(episodes, key=lambda runs: (runs[0].start, runs[0].lane))

    def may_lack_start(self, runs: Sequence[Run]) -> bool:
        """Return whether the first steps of an episode may have been overwritten."""
        first = runs[0]
        if not self._ring.is_overwritten or first.start == 0:
            return self._ring.is_overwritten
        return self._is_interleaved and not self._is_end(Run(first.lane, first.start - 1, first.start))

    @cached_property
    def _is_interleaved(self) -> bool:
        """Whether the storage holds rollouts of several environments one after another."""
        return any(len(runs) > 1 for runs in self.episodes)

    def _is_end(self, step: Run) -> bool:
        return any(self.rows(leaf, [step]).any() for leaf in self.ends.values())

    def _episodes_of(self, lane: int) -> list[list[Run]]:
        """Return the episodes of a lane: runs of one trajectory are joined if each continues the one before."""
        episodes: list[list[Run]] = []
        unfinished: dict[int | None, list[Run]] = {}
        for run in self._runs_of(lane):
            number = self.trajectory_id(run)
            runs = unfinished.get(number)
            if number is not None and runs is not None and self._continues(runs[-1], run):
                runs.append(run)
            else:
                unfinished[number] = [run]
                episodes.append(unfinished[number])
        return episodes

    def _continues(self, before: Run, after: Run) -> bool:
        """Return whether a run begins with the observation that the run before ended with."""
        return (
            bool(self.pairs)
            and not self._is_end(before.last)
            and all(
                rows_equal(self.rows(next_leaf, [before.last]), self.rows(leaf, [after.first]))
                for leaf, next_leaf in self.pairs.values()
            )
        )

    def _runs_of(self, lane: int) -> Iterator[Run]:
        start = 0
        for position in self._breaks(lane):
            yield Run(lane, start, position + 1)
            start = position + 1

    def _breaks(self, lane: int) -> Iterator[int]:
        """Yield the last position of every run."""
        n = self._ring.n_rows
        for start in range(0, n, _ROWS_PER_READ):
            stop = min(start + _ROWS_PER_READ, n)
            is_end = np.zeros(stop - start, bool)
            for leaf in self.ends.values():
                is_end |= self.rows(leaf, [Run(lane, start, stop)]).reshape(-1) != 0
            if self._trajectory_ids is not None:
                numbers = self.rows(self._trajectory_ids, [Run(lane, start, min(stop + 1, n))]).reshape(-1)
                is_end[: len(numbers) - 1] |= numbers[1:] != numbers[:-1]
            is_end[-1] |= stop == n
            yield from (start + int(i) for i in np.flatnonzero(is_end))


def _is_pair(path: str, leaves: Mapping[str, Leaf]) -> bool:
    next_leaf = leaves.get(f"next/{path}")
    return path not in (*END_FLAGS, "reward") and next_leaf is not None and leaves[path].has_same_type(next_leaf)
