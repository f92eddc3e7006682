"""Which row of the log each slot holds, and which part of the log is still needed."""

from __future__ import annotations

import numpy as np

from trajstore.schema import Array

GROUP_ROWS = 1024  # rows of the log whose use is counted together


class SlotMap:
    """The place of every slot's newest row. A row's place is its number in the log, which only grows.

    Args:
        n_slots: Number of slots.

    Attributes:
        place: For each slot the place of its newest row; -1: the slot holds no row.
        n_places: Number of rows appended so far.
        n_live: Number of slots that hold a row.
    """

    def __init__(self, n_slots: int) -> None:
        self.place: Array = np.full(n_slots, -1, np.int64)
        self.n_places = 0
        self.n_live = 0
        self._live = np.zeros(16, np.int64)  # for each group of rows, how many of them a slot holds
        self._front = 0  # groups before this one hold no live rows
        self._n_filled = 0
        self._cleared = 0  # `clear` dropped all places below

    def append(self, slots: Array) -> None:
        """Record that rows for these slots, each at most once, were appended to the log."""
        first, self.n_places = self.n_places, self.n_places + len(slots)
        self._reserve()
        old = self.place[slots]
        self._count(old[old >= 0], -1)
        self.place[slots] = np.arange(first, self.n_places)
        self._count(self.place[slots], 1)
        self.n_live += int((old < 0).sum())

    def append_without_slot(self) -> None:
        """Record that a row for no slot was appended."""
        self.n_places += 1
        self._reserve()

    def restore(self, place: Array, n_places: int) -> None:
        """Begin with a log of ``n_places`` rows; ``place`` is that of the first slots."""
        self.place[: len(place)] = place
        self.n_places = n_places
        self._reserve()
        held = place[place >= 0]
        self._count(held, 1)
        self.n_live = len(held)

    def clear(self) -> None:
        """Record that no slot holds a row."""
        self.place.fill(-1)
        self._live.fill(0)
        self.n_live = self._n_filled = 0
        self._cleared = self.n_places

    @property
    def n_filled(self) -> int:
        """The number of slots before the first one that holds no row."""
        # Only `clear` takes a row from a slot, so slots that were filled before need no second look.
        while (is_held := self.place[self._n_filled : self._n_filled + GROUP_ROWS] >= 0).any() and is_held[0]:
            self._n_filled += len(is_held) if is_held.all() else int(is_held.argmin())
        return self._n_filled

    @property
    def front(self) -> int:
        """A place below which no slot holds a row, rounded down to a group. It never decreases."""
        last = self.n_places // GROUP_ROWS
        while self._front < last and not self._live[self._front]:
            self._front += 1
        return max(self._cleared, self._front * GROUP_ROWS) if self.n_live else self.n_places

    @property
    def is_sparse(self) -> bool:
        """Whether no slot holds more than half of the rows from the front."""
        return self.n_places - self.front > 2 * self.n_live + 2 * GROUP_ROWS

    def oldest(self, max_rows: int) -> Array:
        """Return the slots of the oldest groups in order of their places: one group, or more up to ``max_rows``."""
        start = self.front // GROUP_ROWS
        counts = np.cumsum(self._live[start : self.n_places // GROUP_ROWS])
        n_groups = max(1, int(np.searchsorted(counts, max_rows, side="right")))
        held = np.flatnonzero((self.place >= 0) & (self.place < (start + n_groups) * GROUP_ROWS))
        order: Array = held[np.argsort(self.place[held])]
        return order

    def _reserve(self) -> None:
        n = self.n_places // GROUP_ROWS + 1
        if n > len(self._live):
            self._live = np.concatenate([self._live, np.zeros(max(n - len(self._live), len(self._live)), np.int64)])

    def _count(self, places: Array, change: int) -> None:
        np.add.at(self._live, places // GROUP_ROWS, change)
