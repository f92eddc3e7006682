"""A number for every episode of a stream, by the episode's own number."""

from __future__ import annotations

import numpy as np
import torch

from trajstore.cache.growable_array import GrowableArray
from trajstore.schema import Array

_DENSE, _MIN_DENSE = 4, 1 << 16
_CPU = torch.device("cpu")


class EpisodeNumberMap:
    """Numbers by episode; those never put have a default.

    Writers number episodes without large gaps, so this is a table from some episode on. A table of any other
    numbers would take any memory; outlandish ones, and old ones that are left over, are kept apart.
    """

    def __init__(self, default: int = -1) -> None:
        self._default = default
        self.base = 0  # the episode that the table begins with
        self._table = GrowableArray(np.int64, _CPU)
        self._far: dict[int, int] = {}
        self._n_put = 0  # so many lay beyond the table when they came

    def __len__(self) -> int:
        """Size of the table."""
        return self._table.n

    def get(self, episode: Array) -> Array:
        """The numbers of episodes, also of such as no writer would make."""
        known, at = self._table.host, episode - self.base if self.base else episode
        inside = (at >= 0) & (at < len(known))
        if inside.all():
            found: Array = known[at]
        else:
            found = np.full(len(episode), self._default)
            found[inside] = known[at[inside]]
        if self._far:
            for i in np.flatnonzero(~inside):
                found[i] = self._far.get(int(episode[i]), self._default)
        return found

    def put(self, episode: Array, values: Array) -> None:
        """Set the numbers of some episodes."""
        if not len(episode):
            return
        at = episode - self.base
        outside = (at < 0) | (at >= self._table.n)
        if outside.any():
            self._n_put += int((self.get(episode) == self._default).sum())
            far = outside & ((at < 0) | (at >= _DENSE * self._n_put + _MIN_DENSE))
            self._put_far(episode[far], values[far])
            episode, values = episode[~far], values[~far]
            self._cover(int(episode.max()) + 1 - self.base if len(episode) else 0)
        self._table.put(episode - self.base, values)

    def _put_far(self, episode: Array, values: Array) -> None:
        for e, value in zip(episode.tolist(), values.tolist(), strict=True):
            if value == self._default:
                self._far.pop(e, None)
            else:
                self._far[e] = value

    def _cover(self, n: int) -> None:
        if n > self._table.n:
            first = self.base + self._table.n
            self._table.rewrite(self._table.n, np.full(n - self._table.n, self._default))
            for episode in [e for e in self._far if first <= e < self.base + n]:  # what was far is not any more
                self._table.host[episode - self.base] = self._far.pop(episode)

    def keep(self, episode: Array) -> None:
        """Forget all but these; the table begins with them, but for a few that are much older than the others."""
        episode = np.unique(episode)
        values = self.get(episode)
        recent = episode[-1] - episode < _DENSE * len(episode) + _MIN_DENSE if len(episode) else episode > 0
        base = int(episode[recent][0]) if recent.any() else self.base + self._table.n
        self._table.rewrite(0, self._table.host[:0])
        self.base, self._n_put, self._far = base, len(episode), {}
        self.put(episode, values)

    def map(self, change: int) -> None:
        """Add to all numbers that are not the default."""
        known = self._table.host
        known[known != self._default] += change
        self._far = {e: v + change for e, v in self._far.items()}

    def clear(self) -> None:
        self._table.rewrite(0, self._table.host[:0])
        self.base, self._far = 0, {}

    @property
    def table(self) -> Array | None:
        """All numbers, from episode `base` on; None where some episodes are kept apart."""
        return None if self._far else self._table.host

    @property
    def nbytes(self) -> int:
        return self._table.nbytes
