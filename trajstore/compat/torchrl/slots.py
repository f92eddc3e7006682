"""Which row of the log each slot of a ring holds, and which part of the log is worth keeping."""

from __future__ import annotations

import numpy as np

from trajstore.schema import Array

SET = 1024  # rows whose fate is counted together


class Slots:
    """The newest place of every slot; places count the rows of a log, which only grows.

    Args:
        n_slots: How many slots there are.
    """

    def __init__(self, n_slots: int) -> None:
        self.place: Array = np.full(n_slots, -1, np.int64)
        self.n_places = 0  # rows appended so far
        self.n_live = 0
        self._live = np.zeros(16, np.int64)  # by set: rows that some slot holds
        self._front = 0  # sets before it hold none
        self._n_filled = 0
        self._floor = 0  # places below were given up all at once

    def append(self, slots: Array) -> None:
        """Rows for these slots, each at most once, have been appended."""
        first, self.n_places = self.n_places, self.n_places + len(slots)
        self._reserve()
        old = self.place[slots]
        self._count(old[old >= 0], -1)
        self.place[slots] = np.arange(first, self.n_places)
        self._count(self.place[slots], 1)
        self.n_live += int((old < 0).sum())

    def skip(self) -> None:
        """A row for no slot has been appended."""
        self.n_places += 1
        self._reserve()

    def recall(self, place: Array, n_places: int) -> None:
        """Begin with a log of so many rows, of which the first slots hold these."""
        self.place[: len(place)] = place
        self.n_places = n_places
        self._reserve()
        held = place[place >= 0]
        self._count(held, 1)
        self.n_live = len(held)

    def clear(self) -> None:
        self.place.fill(-1)
        self._live.fill(0)
        self.n_live = self._n_filled = 0
        self._floor = self.n_places

    @property
    def n_filled(self) -> int:
        """Slots before the first one that holds nothing."""
        # Only `clear` takes a row from a slot, so what was found is not looked at again.
        while (is_held := self.place[self._n_filled : self._n_filled + SET] >= 0).any() and is_held[0]:
            self._n_filled += len(is_held) if is_held.all() else int(is_held.argmin())
        return self._n_filled

    @property
    def front(self) -> int:
        """No slot holds a place below; rounded down to a set. It never goes back."""
        last = self.n_places // SET
        while self._front < last and not self._live[self._front]:
            self._front += 1
        return max(self._floor, self._front * SET) if self.n_live else self.n_places

    @property
    def is_sparse(self) -> bool:
        """Whether more than half of the log from the front on is held by no slot."""
        return self.n_places - self.front > 2 * self.n_live + 2 * SET

    def oldest(self, n_most: int) -> Array:
        """Slots of the oldest sets, in order of their places: one set, or more of at most so many rows."""
        start = self.front // SET
        counts = np.cumsum(self._live[start : self.n_places // SET])
        n_sets = max(1, int(np.searchsorted(counts, n_most, side="right")))
        held = np.flatnonzero((self.place >= 0) & (self.place < (start + n_sets) * SET))
        order: Array = held[np.argsort(self.place[held])]
        return order

    def _reserve(self) -> None:
        n = self.n_places // SET + 1
        if n > len(self._live):
            self._live = np.concatenate([self._live, np.zeros(max(n - len(self._live), len(self._live)), np.int64)])

    def _count(self, places: Array, change: int) -> None:
        np.add.at(self._live, places // SET, change)
