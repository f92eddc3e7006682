"""Arrivals of steps, oldest first: which rows arrived together, and in which order."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from trajstore.sampling.index.episode_numbers import EpisodeNumberMap
from trajstore.schema import Array

_MANY_ARRIVALS = 4096  # queue length above which evicted arrivals are looked for
_MAX_KEY = 1 << 62


class ArrivalQueue:
    """Arrivals of one stream, oldest first: order, episode, first t, number of rows and time."""

    def __init__(self) -> None:
        self._data = np.empty((5, 64))
        self._first = self._stop = 0
        self.enough = _MANY_ARRIVALS  # above this length, evicted arrivals are looked for

    def __len__(self) -> int:
        return self._stop - self._first

    def push(self, order: Array, items: Array) -> None:
        """Add arrivals: their order, and the other four facts."""
        n = len(order)
        if self._stop + n > self._data.shape[1]:
            self._make_room(n)
        where = slice(self._stop, self._stop + n)
        self._data[0, where], self._data[1:, where] = order, items
        self._stop += n

    def _make_room(self, n: int) -> None:
        """Move the arrivals to the front of the memory; of a larger one if they would fill most of it."""
        kept, data = len(self), self._data
        if 4 * (kept + n) > 3 * data.shape[1]:
            data = np.empty((5, max(64, 2 * (kept + n))))
        for old, new in zip(self._data, data, strict=True):
            new[:kept] = old[self._first : self._stop]
        self._data, self._first, self._stop = data, 0, kept

    def items(self, n: int | None = None) -> Array:
        """The oldest arrivals, a view; float64 holds their numbers exactly up to 2**53."""
        stop = self._stop if n is None else min(self._stop, self._first + n)
        return self._data[:, self._first : stop]

    def drop(self, n: int) -> None:
        self._first += n

    def keep(self, chosen: Array) -> None:
        self._data = self.items()[:, chosen]
        self._first, self._stop = 0, self._data.shape[1]
        self.enough = 2 * self._stop + _MANY_ARRIVALS

    @property
    def first_order(self) -> float:
        return float(self._data[0, self._first]) if len(self) else math.inf


class ArrivalBlock:
    """Stream and episode of the rows that arrived last, in order."""

    def __init__(self) -> None:
        self._data = np.empty((2, 64), np.int64)
        self._n = 0

    def __len__(self) -> int:
        return self._n

    def add(self, stream: int | Array, episode: Array) -> None:
        stop = self._n + len(episode)
        if stop > self._data.shape[1]:
            grown = np.empty((2, 2 * stop), np.int64)
            grown[:, : self._n] = self.rows()
            self._data = grown
        self._data[0, self._n : stop], self._data[1, self._n : stop] = stream, episode
        self._n = stop

    def rows(self) -> Array:
        """Stream and episode of all rows, a view that is valid until the next change."""
        return self._data[:, : self._n]

    def episodes(self, stream: int) -> Array:
        """Episodes of the rows of one stream."""
        found: Array = self._data[1, : self._n][self._data[0, : self._n] == stream]
        return found

    def take(self, n: int) -> Array:
        """Remove the first ``n`` rows and return them."""
        taken = self._data[:, :n].copy()
        self._data[:, : self._n - n] = self._data[:, n : self._n].copy()
        self._n -= n
        return taken


def by_number(numbers: Array) -> Iterator[tuple[Any, Any]]:
    """Each number that occurs, in order, and where; fast in the common case that all are equal."""
    if len(numbers) and (numbers == numbers[0]).all():
        yield numbers[0], slice(None)
        return
    for number in np.unique(numbers):
        yield number, np.flatnonzero(numbers == number)


def count_in_blocks(stream: Array, episode: Array, block_rows: int) -> tuple[Array, Array, Array]:
    """Count the rows of each episode in each block of ``block_rows`` rows.

    Returns:
        Stream, episode and number of rows, in order of block, stream and episode.
    """
    if not len(episode):
        return stream, episode, np.empty(0, np.int64)
    # All three in one number, which is fast to sort.
    low, low_stream = int(episode.min()), int(stream.min())
    n_episodes, n_streams = int(episode.max()) - low + 1, int(stream.max()) - low_stream + 1
    values = None
    if n_episodes * n_streams * len(episode) > _MAX_KEY:
        values, episode = np.unique(episode, return_inverse=True)
        low, n_episodes = 0, len(values)
    key = np.arange(len(episode)) // block_rows * n_streams + (stream - low_stream)
    key = key * n_episodes + (episode - low)
    key.sort()
    first = np.flatnonzero(key[1:] != key[:-1]) + 1
    count = np.diff(first, prepend=0, append=len(key))
    rest, episode = np.divmod(key[np.append(0, first)], n_episodes)
    return rest % n_streams + low_stream, values[episode] if values is not None else episode + low, count


def first_t(arrived: EpisodeNumberMap, episode: Array, count: Array) -> Array:
    """The first t of arriving rows of episodes; counts these rows as arrived."""
    if (episode[1:] > episode[:-1]).all():  # each episode once
        t = arrived.get(episode)
        arrived.put(episode, t + count)
        return t
    order = np.argsort(episode, kind="stable")
    ids, counts = episode[order], count[order]
    first = np.flatnonzero(np.append(True, ids[1:] != ids[:-1]))
    before = np.cumsum(counts) - counts
    within = before - np.repeat(before[first], np.diff(first, append=len(ids)))
    known = arrived.get(ids)
    t = np.empty(len(order), np.int64)
    t[order] = known + within
    arrived.put(ids[first], known[first] + np.add.reduceat(counts, first))
    return t
