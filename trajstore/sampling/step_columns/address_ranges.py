"""Ranges of addresses that a step table gives to episodes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from trajstore.cache.growable_array import GrowableArray
from trajstore.sampling.index.episode_numbers import EpisodeNumberMap
from trajstore.schema import Array

HOMELESS = -(1 << 62)  # the home of an episode that has no range
_CPU = torch.device("cpu")


class Places(NamedTuple):
    """Where episodes lie.

    Attributes:
        home: The address of step 0, or the one it would have if it was not evicted; `HOMELESS` without a range.
        limit: The t up to which the range has room.
        known: The t up to which steps have values.
    """

    home: Array
    limit: Array
    known: Array


class AddressRanges:
    """The range of each episode. Ranges are laid one after the other; an episode that moved leaves its old one.

    Attributes:
        size: Number of addresses in all ranges.
    """

    def __init__(self) -> None:
        self.size = 0
        # By stream number: home, limit and known of its episodes.
        self._places: list[tuple[EpisodeNumberMap, EpisodeNumberMap, EpisodeNumberMap]] = []
        self._starts = GrowableArray(np.int64, _CPU)  # first address of each range, rising
        self._range_stream = GrowableArray(np.int64, _CPU)
        self._range_episode = GrowableArray(np.int64, _CPU)

    @property
    def n_streams(self) -> int:
        return len(self._places)

    def set_streams(self, n: int) -> None:
        """Make room for the episodes of ``n`` streams."""
        missing = range(n - len(self._places))
        self._places += [(EpisodeNumberMap(HOMELESS), EpisodeNumberMap(), EpisodeNumberMap()) for _ in missing]

    def get(self, stream: Array, episode: Array) -> Places:
        """Places of episodes, as new arrays."""
        found = Places(*(np.empty(len(stream), np.int64) for _ in range(3)))
        for number in distinct(stream):
            mine = stream == number
            for values, table in zip(found, self._places[number], strict=True):
                values[mine] = table.get(episode[mine])
        return found

    def put(self, stream: Array, episode: Array, places: Places) -> None:
        for number in distinct(stream):
            mine = stream == number
            for values, table in zip(places, self._places[number], strict=True):
                table.put(episode[mine], values[mine])

    def homes(self, stream: Array, episode: Array) -> Array:
        home = np.empty(len(stream), np.int64)
        for number in distinct(stream):
            mine = stream == number
            home[mine] = self._places[number][0].get(episode[mine])
        return home

    def homes_of(self, stream: int) -> EpisodeNumberMap:
        """The home of each episode of a stream."""
        return self._places[stream][0]

    def add(self, stream: Array, episode: Array, room: Array) -> Array:
        """Add ranges at the end, with ``room`` addresses each; returns their first addresses."""
        start: Array = self.size + np.cumsum(room) - room
        n = self._starts.n
        self._starts.rewrite(n, start)
        self._range_stream.rewrite(n, stream)
        self._range_episode.rewrite(n, episode)
        self.size += int(room.sum())
        return start

    def owners(self, address: Array) -> tuple[Array, Array]:
        """Stream number and episode that each address was given to."""
        at = np.searchsorted(self._starts.host, address, side="right") - 1
        return self._range_stream.host[at], self._range_episode.host[at]

    def start_of(self, address: int) -> int:
        """The first address of the range that holds an address."""
        return int(self._starts.host[np.searchsorted(self._starts.host, address, side="right") - 1])

    def clear(self) -> None:
        """Remove all ranges; places stay."""
        self.size = 0
        for array in (self._starts, self._range_stream, self._range_episode):
            array.rewrite(0, array.host[:0])

    def keep_places(self, stream: Array, episode: Array) -> None:
        """Forget the places of all episodes but these."""
        for number, tables in enumerate(self._places):
            for table in tables:
                table.keep(episode[stream == number])

    def load(self, stream: Array, episode: Array, start: Array, places: Places, size: int) -> None:
        """Replace everything by these episodes, whose ranges begin at ``start``."""
        order = np.argsort(start, kind="stable")
        self._starts.rewrite(0, start[order])
        self._range_stream.rewrite(0, stream[order])
        self._range_episode.rewrite(0, episode[order])
        for tables in self._places:
            for table in tables:
                table.clear()
        self.put(stream, episode, places)
        self.size = size

    @property
    def nbytes(self) -> int:
        tables = sum(table.nbytes for places in self._places for table in places)
        return tables + sum(array.nbytes for array in (self._starts, self._range_stream, self._range_episode))


def distinct(values: Array) -> list[int]:
    """Each value once; fast in the common case that all are equal."""
    if not len(values):
        return []
    first = values[0]
    return [int(first)] if (values == first).all() else [int(v) for v in np.unique(values)]
