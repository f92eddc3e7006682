"""The log of changes of an episode index, which plans and derived tables follow.

Every change has a version number, one more than the change before. A plan or a table that is derived from the index
remembers the version it was made at, and asks the log for the changes since then. The log forgets old changes. It
returns None in that case, and the caller recomputes everything. Additions only raise the version: what they added
is in the index.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from trajstore.schema import Array

Change = TypeVar("Change")

_MAX_REMOVALS = 1 << 12  # one eviction frees 1/256 of a limit, so these replace the buffer 16 times
_MAX_REMOVED_RANGES = 1 << 17
_MAX_MOVES = 1 << 14
_MAX_MOVED_ROWS = 1 << 18
_NO_RANGES = np.empty((0, 4), np.int64)


class BoundedLog(Generic[Change]):
    """Changes with rising versions, of which the oldest are forgotten.

    Args:
        max_changes: Number of changes to remember.
        max_rows: Bound of the rows of all remembered changes; the newest change is remembered in any case.
    """

    def __init__(self, max_changes: int, max_rows: int) -> None:
        self._max_changes, self._max_rows = max_changes, max_rows
        self._changes: deque[tuple[int, int, Change]] = deque()  # version, rows, change
        self._n_rows = 0
        self._forgotten = 0  # changes up to this version are forgotten

    def __len__(self) -> int:
        return len(self._changes)

    def add(self, version: int, change: Change, n_rows: int) -> None:
        """Add a change that is newer than all others and takes memory for ``n_rows`` rows."""
        self._changes.append((version, n_rows, change))
        self._n_rows += n_rows
        while len(self._changes) > 1 and (len(self._changes) > self._max_changes or self._n_rows > self._max_rows):
            self._forgotten, n_rows, _ = self._changes.popleft()
            self._n_rows -= n_rows

    @property
    def newest(self) -> int:
        """Version of the newest change, also if it is forgotten; 0 if there was none."""
        return self._changes[-1][0] if self._changes else self._forgotten

    def forget(self, version: int) -> None:
        """Forget all changes up to a version, so that followers of earlier versions start over."""
        self._changes.clear()
        self._n_rows, self._forgotten = 0, version

    def since(self, version: int) -> list[Change] | None:
        """Changes after a version, oldest first; None if some of them are forgotten."""
        if version < self._forgotten:
            return None
        found = []
        for changed_at, _, change in reversed(self._changes):
            if changed_at <= version:
                break
            found.append(change)
        return found[::-1]


@dataclass(frozen=True, slots=True)
class Removal:
    """Steps that can no longer be drawn, or entries that changed otherwise than by additions.

    Attributes:
        ranges: Evicted steps, a row each of stream, episode, first t, and the t after the last. Steps of aborted
            episodes, and those that a restart of the index left out, are not among them.
        n_rewritten: Number of entries before the last one that the removal changed. Later entries stayed as they
            were.
        is_renumbered: Whether entries got other numbers, or all were written again.
    """

    ranges: Array
    n_rewritten: int = 0
    is_renumbered: bool = False


@dataclass(frozen=True, slots=True)
class MovedRows:
    """Live rows, and the rows of the followed writer's stream that their steps have now."""

    live: Array
    rows: Array


class ChangeLog:
    """The changes of an episode index. Written and read with the assembler's lock held.

    A plan that was made at version ``v`` is valid as it is while ``touched_at <= v``. The numbers below may be read
    without the lock: they only grow, and a thread that reads an old value acts as if it had come earlier.

    Attributes:
        version: Number of changes so far.
        removed_at: Version of the last change that removed steps.
        released_at: Version of the last change that released live rows: rows of older plans may hold other steps.
        touched_at: The larger of these two.
    """

    def __init__(self) -> None:
        self.version = self.removed_at = self.released_at = self.touched_at = 0
        self._removals: BoundedLog[Removal] = BoundedLog(_MAX_REMOVALS, _MAX_REMOVED_RANGES)
        self._moves: BoundedLog[MovedRows] = BoundedLog(_MAX_MOVES, _MAX_MOVED_ROWS)

    def __len__(self) -> int:
        """Number of changes that are remembered."""
        return len(self._removals) + len(self._moves)

    def episodes_added(self) -> None:
        """Record that episodes were added or got longer."""
        self.version += 1

    def steps_removed(self, ranges: Array = _NO_RANGES, *, n_rewritten: int = 0) -> None:
        """Record that steps were removed; see `Removal`."""
        self.version += 1
        self.removed_at = self.touched_at = self.version
        self._removals.add(self.version, Removal(ranges, n_rewritten), len(ranges))

    def entries_renumbered(self) -> None:
        """Record that entries got other numbers while no step was removed."""
        self.version += 1
        self._removals.add(self.version, Removal(_NO_RANGES, is_renumbered=True), 0)

    def rows_moved(self, live: Array, rows: Array) -> None:
        """Record that a commit made live rows rows of the stream. The live rows keep their steps until released."""
        self.version += 1
        self._moves.add(self.version, MovedRows(live, rows), len(live))

    def rows_released(self) -> None:
        """Record that live rows were released and may hold other steps soon."""
        self.version += 1
        self.released_at = self.touched_at = self.version

    @property
    def reordered_at(self) -> int:
        """Version of the last removal or renumbering: later changes only added to the index."""
        return self._removals.newest

    def removals_since(self, version: int) -> list[Removal] | None:
        """Removals after a version, oldest first; None if some of them are forgotten, or for version -1."""
        return self._removals.since(version)

    def moves_since(self, version: int) -> list[MovedRows] | None:
        """Moves of live rows after a version, oldest first; None if some of them are forgotten."""
        return self._moves.since(version)
