"""Ranges of addresses that a step table gives to episodes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from trajstore.cache.growable_array import GrowableArray
from trajstore.sampling.index.episode_numbers import EpisodeNumberMap
from trajstore.schema import Array

HOMELESS = -(1 << 62)  # the home of an episode that has no range
NO_ENTRY = -1  # the entry of a range whose episode has moved or is not in the index
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

    def take(self, chosen: Array) -> Places:
        """The places of the chosen episodes."""
        return Places(*(values[chosen] for values in self))


class AddressRanges:
    """The range of each episode. Ranges are laid one after the other; an episode that moved leaves its old one.

    Ranges are numbered in the order of their addresses. Compiled loops read and write the arrays below.

    Attributes:
        size: Number of addresses in all ranges.
        starts: First address of each range, rising.
        stream: Stream number of the episode that each range was given to.
        episode: Its number in the stream; -1 if it has moved to another range.
        home: As in `Places`, like the next two.
        limit: See there.
        known: See there.
        entry: Index entry of the episode, as of the last `set_entries`, or `NO_ENTRY`.
        origin: Address of the first step that the episode has in the index, where it has an entry.
    """

    def __init__(self, device: torch.device = _CPU) -> None:
        self.size = 0
        self._numbers: list[EpisodeNumberMap] = []  # by stream number: the range of each episode, or -1
        self.stream, self.episode, self.home, self.limit, self.known = (
            GrowableArray(np.int64, _CPU) for _ in range(5)
        )
        self.starts, self.entry, self.origin = (GrowableArray(np.int64, device) for _ in range(3))
        self._stacked: torch.Tensor | None = None  # entries and origins, for draws on the device

    @property
    def _arrays(self) -> tuple[GrowableArray, ...]:
        return (*self._on_host, self.starts, self.entry, self.origin)

    @property
    def _on_host(self) -> tuple[GrowableArray, ...]:
        return self.stream, self.episode, self.home, self.limit, self.known

    @property
    def n_streams(self) -> int:
        return len(self._numbers)

    def set_streams(self, n: int) -> None:
        """Make room for the episodes of ``n`` streams."""
        self._numbers += [EpisodeNumberMap() for _ in range(n - len(self._numbers))]

    def find(self, stream: Array, episode: Array) -> Array:
        """The number of each episode's range; -1 for episodes without one."""
        found = np.empty(len(stream), np.int64)
        for number in distinct(stream):
            mine = stream == number
            found[mine] = self._numbers[number].get(episode[mine])
        return found

    def numbers_of(self, stream: int) -> EpisodeNumberMap:
        """The number of the range of each episode of a stream, or -1."""
        return self._numbers[stream]

    def get(self, stream: Array, episode: Array) -> Places:
        """Places of episodes, as new arrays."""
        number = self.find(stream, episode)
        if not self.home.n:
            return Places(np.full(len(number), HOMELESS), *np.full((2, len(number)), -1))
        found = Places(*(array.host[number] for array in (self.home, self.limit, self.known)))
        is_homeless = number < 0
        for values, default in zip(found, (HOMELESS, -1, -1), strict=True):
            values[is_homeless] = default
        return found

    def homes(self, stream: Array, episode: Array) -> Array:
        """The home of each episode; all of them have a range."""
        found: Array = self.home.host[self.find(stream, episode)]
        return found

    def set_extents(self, number: Array, limit: Array, known: Array) -> None:
        """Set how far ranges have room and values."""
        self.limit.host[number] = limit
        self.known.host[number] = known

    def add(self, stream: Array, episode: Array, base: Array, room: Array) -> Array:
        """Add ranges at the end, with ``room`` addresses each for the steps from ``base`` on; returns homes.

        Episodes that have a range already move to the new one.
        """
        self._stacked = None
        start: Array = self.size + np.cumsum(room) - room
        left = self.find(stream, episode)
        self.episode.host[left[left >= 0]] = -1
        self.entry.put(left[left >= 0], np.full(int((left >= 0).sum()), NO_ENTRY))
        n = self.starts.n
        columns = stream, episode, start - base, base + room, np.full(len(base), -1)
        for array, values in zip(self._on_host, columns, strict=True):
            array.rewrite(n, values)
        self.starts.rewrite(n, start)
        self.entry.rewrite(n, np.full(len(start), NO_ENTRY))
        self.origin.rewrite(n, start)
        self._set_numbers(stream, episode, n + np.arange(len(start)))
        self.size += int(room.sum())
        return start - base

    def _set_numbers(self, stream: Array, episode: Array, number: Array) -> None:
        for s in distinct(stream):
            mine = stream == s
            self._numbers[s].put(episode[mine], number[mine])

    # ---- entries of the index

    def forget_entries(self, number: Array | None = None) -> None:
        """Note that the episodes of these ranges, or of all, may have left the index."""
        self._stacked = None
        if number is None:
            self.entry.rewrite(0, np.full(self.entry.n, NO_ENTRY))
        else:
            number = number[number >= 0]
            self.entry.put(number, np.full(len(number), NO_ENTRY))

    def set_entries(self, number: Array, entry: Array, base: Array) -> None:
        """Note the index entries of ranges, and the t of the first step that each has in the index."""
        self._stacked = None
        self.entry.put(number, entry)
        self.origin.put(number, self.home.host[number] + base)

    def steps(self, address: Array) -> tuple[Array, Array]:
        """Index entries and positions of the steps at addresses; `NO_ENTRY` for steps that were removed."""
        if not self.starts.n:
            return np.full(len(address), NO_ENTRY), np.zeros(len(address), np.int64)
        number = np.searchsorted(self.starts.host, address, side="right") - 1
        return self.entry.host[number], address - self.origin.host[number]

    def steps_on_device(self, address: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same on the device, where at least one range exists."""
        if self._stacked is None:
            self._stacked = torch.stack([self.entry.device, self.origin.device])
        number = torch.searchsorted(self.starts.device[1:], address, right=True)
        entry, origin = self._stacked.index_select(1, number)
        return entry, address - origin

    def start_of(self, address: int) -> int:
        """The first address of the range that holds an address."""
        return int(self.starts.host[np.searchsorted(self.starts.host, address, side="right") - 1])

    # ---- all ranges at once

    def restart(self, stream: Array, episode: Array) -> None:
        """Remove all ranges, and get ready for those of these episodes."""
        self.size, self._stacked = 0, None
        for array in self._arrays:
            array.rewrite(0, array.host[:0])
        for number, table in enumerate(self._numbers):
            table.clear()
            table.keep(episode[stream == number])  # the table then begins with the oldest of them

    def load(self, stream: Array, episode: Array, start: Array, places: Places, size: int) -> None:
        """Replace everything by these episodes, whose ranges begin at ``start``."""
        self.restart(stream, episode)
        order = np.argsort(start, kind="stable")
        for array, values in zip(self._on_host, (stream, episode, *places), strict=True):
            array.rewrite(0, values[order])
        self.starts.rewrite(0, start[order])
        self.entry.rewrite(0, np.full(len(order), NO_ENTRY))
        self.origin.rewrite(0, start[order])
        self._set_numbers(stream[order], episode[order], np.arange(len(order)))
        self.size = size

    @property
    def nbytes(self) -> int:
        return sum(table.nbytes for table in self._numbers) + sum(array.nbytes for array in self._arrays)


def distinct(values: Array) -> list[int]:
    """Each value once; fast in the common case that all are equal."""
    if not len(values):
        return []
    first = values[0]
    return [int(first)] if (values == first).all() else [int(v) for v in np.unique(values)]
