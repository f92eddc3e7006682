"""A number for every episode of a stream, by the episode's own number."""

from __future__ import annotations

import numpy as np
import torch

from trajstore.growing import Growing
from trajstore.schema import Array

_DENSE, _MIN_DENSE = 4, 1 << 16
_CPU = torch.device("cpu")


class ByEpisode:
    """Numbers by episode; those never put have a default.

    Writers number episodes without large gaps, so this is a table. A table of any other numbers would take any
    memory; outlandish ones are kept apart.
    """

    def __init__(self, default: int = -1) -> None:
        self._default = default
        self._table = Growing(np.int64, _CPU)
        self._far: dict[int, int] = {}
        self._n_put = 0  # so many lay beyond the table when they came

    def get(self, episode: Array) -> Array:
        """The numbers of episodes, also of such as no writer would make."""
        known = self._table.host
        inside = (episode >= 0) & (episode < len(known))
        if inside.all():
            found: Array = known[episode]
        else:
            found = np.full(len(episode), self._default)
            found[inside] = known[episode[inside]]
        if self._far:
            for i in np.flatnonzero(~inside):
                found[i] = self._far.get(int(episode[i]), self._default)
        return found

    def put(self, episode: Array, values: Array) -> None:
        """Set the numbers of some episodes."""
        if not len(episode):
            return
        if int(episode.max()) >= self._table.n:
            self._n_put += int((self.get(episode) == self._default).sum())
            far = episode >= _DENSE * self._n_put + _MIN_DENSE
            far &= episode >= self._table.n
            for i in np.flatnonzero(far):
                self._far[int(episode[i])] = int(values[i])
            episode, values = episode[~far], values[~far]
            self._cover(int(episode.max()) + 1 if len(episode) else 0)
        self._table.put(episode, values)

    def _cover(self, n: int) -> None:
        if n > self._table.n:
            self._table.rewrite(self._table.n, np.full(n - self._table.n, self._default))
            for episode in [e for e in self._far if e < n]:  # what was far is not any more
                self._table.host[episode] = self._far.pop(episode)

    def map(self, change: int) -> None:
        """Add to all numbers that are not the default."""
        known = self._table.host
        known[known != self._default] += change
        self._far = {e: v + change if v != self._default else v for e, v in self._far.items()}

    def clear(self) -> None:
        self._table.rewrite(0, self._table.host[:0])
        self._far = {}

    @property
    def table(self) -> Array | None:
        """All numbers by episode; None where some episodes have outlandish numbers."""
        return None if self._far else self._table.host

    @property
    def nbytes(self) -> int:
        return self._table.nbytes
