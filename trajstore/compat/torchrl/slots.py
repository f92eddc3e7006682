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

    def append(self, slots: Array) -> None:
        """Rows for these slots, each at most once, have been appended."""
        first, self.n_places = self.n_places, self.n_places + len(slots)
        self._reserve()
        old = self.place[slots]
        self._count(old[old >= 0], -1)
        self.place[slots] = np.arange(first, self.n_places)
        self._count(self.place[slots], 1)
        self.n_live += int((old < 0).sum())

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
        self.n_live = 0

    @property
    def front(self) -> int:
        """No slot holds a place below; rounded down to a set."""
        last = self.n_places // SET
        while self._front < last and not self._live[self._front]:
            self._front += 1
        return self._front * SET if self.n_live else self.n_places

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
