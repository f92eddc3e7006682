"""A map from the episode numbers of one stream to integers."""

from __future__ import annotations

import numpy as np
import torch

from trajstore.cache.growable_array import GrowableArray
from trajstore.schema import Array

_DENSE, _MIN_DENSE = 4, 1 << 16
_CPU = torch.device("cpu")


class EpisodeNumberMap:
    """An integer for each episode number of a stream; episodes that were never put have a default.

    Writers number episodes without large gaps, so most values lie in a table that begins at episode `base`.
    Episode numbers far beyond the table, and old ones before it, are kept in a dict, because a table that
    covered them could take any amount of memory.
    """

    def __init__(self, default: int = -1) -> None:
        self._default = default
        self.base = 0  # episode number of the table's first value
        self._table = GrowableArray(np.int64, _CPU)
        self._sparse: dict[int, int] = {}  # values of episodes outside the table
        self._n_beyond = 0  # episodes that lay beyond the table when they were put

    def __len__(self) -> int:
        """Size of the table."""
        return self._table.n

    def get(self, episode: Array) -> Array:
        """Values of episodes; any episode number is allowed, negative ones included."""
        table, at = self._table.host, episode - self.base if self.base else episode
        in_table = (at >= 0) & (at < len(table))
        if in_table.all():
            values: Array = table[at]
        else:
            values = np.full(len(episode), self._default)
            values[in_table] = table[at[in_table]]
        if self._sparse:
            for i in np.flatnonzero(~in_table):
                values[i] = self._sparse.get(int(episode[i]), self._default)
        return values

    def put(self, episode: Array, values: Array) -> None:
        """Set the values of episodes."""
        if not len(episode):
            return
        at = episode - self.base
        outside = (at < 0) | (at >= self._table.n)
        if outside.any():
            self._n_beyond += int((self.get(episode) == self._default).sum())
            far = outside & ((at < 0) | (at >= _DENSE * self._n_beyond + _MIN_DENSE))
            self._put_sparse(episode[far], values[far])
            episode, values = episode[~far], values[~far]
            self._grow_table(int(episode.max()) + 1 - self.base if len(episode) else 0)
        self._table.put(episode - self.base, values)

    def _put_sparse(self, episode: Array, values: Array) -> None:
        for e, value in zip(episode.tolist(), values.tolist(), strict=True):
            if value == self._default:
                self._sparse.pop(e, None)
            else:
                self._sparse[e] = value

    def _grow_table(self, n: int) -> None:
        if n > self._table.n:
            first = self.base + self._table.n
            self._table.rewrite(self._table.n, np.full(n - self._table.n, self._default))
            for episode in [e for e in self._sparse if first <= e < self.base + n]:  # the table covers these now
                self._table.host[episode - self.base] = self._sparse.pop(episode)

    def keep(self, episode: Array) -> None:
        """Forget all episodes but these.

        The table then begins with the oldest of them, except for a few that are much older than the others:
        those move to the dict.
        """
        episode = np.unique(episode)
        values = self.get(episode)
        recent = episode[-1] - episode < _DENSE * len(episode) + _MIN_DENSE if len(episode) else episode > 0
        base = int(episode[recent][0]) if recent.any() else self.base + self._table.n
        self._table.rewrite(0, self._table.host[:0])
        self.base, self._n_beyond, self._sparse = base, len(episode), {}
        self.put(episode, values)

    def add_to_all(self, change: int) -> None:
        """Add to every value that is not the default."""
        table = self._table.host
        table[table != self._default] += change
        self._sparse = {e: v + change for e, v in self._sparse.items()}

    def clear(self) -> None:
        self._table.rewrite(0, self._table.host[:0])
        self.base, self._sparse = 0, {}

    @property
    def table(self) -> Array | None:
        """All values, from episode `base` on; None if some episodes lie outside the table."""
        return None if self._sparse else self._table.host

    @property
    def nbytes(self) -> int:
        return self._table.nbytes
