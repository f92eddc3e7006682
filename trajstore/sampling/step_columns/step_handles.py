"""Finds the addresses of steps by handle: stream number, episode and t."""

from __future__ import annotations

from types import ModuleType

import numpy as np

from trajstore.sampling.index.episode_index import EpisodeIndex
from trajstore.sampling.step_columns.address_ranges import AddressRanges, distinct
from trajstore.schema import Array

# Returned in place of the address of a step that is not in the index; the compiled loops use the same numbers.
EVICTED, PAST_END, UNKNOWN = -1, -2, -3


def in_one_piece(array: Array) -> Array:
    """The array, or a copy if it is strided or can't be written: compiled loops are made for one kind of array."""
    return array if array.flags.carray else np.array(array, order="C")


class StepHandles:
    """Looks up steps in the ranges that a step table gave to episodes.

    Args:
        index: The episodes; every one of them has a range.
        ranges: The ranges of addresses.
        kernels: Compiled loops, for the CPU.
    """

    def __init__(self, index: EpisodeIndex, ranges: AddressRanges, kernels: ModuleType | None) -> None:
        self._index, self._ranges, self._kernels = index, ranges, kernels

    def addresses(self, entry: Array, position: Array) -> Array:
        """Addresses of the steps at positions of index entries, elementwise."""
        index = self._index
        home = self._ranges.homes(index.stream.host[entry], index.episode.host[entry])
        found: Array = home + index.t_base.host[entry] + position
        return found

    def addresses_of(self, handles: Array) -> Array:
        """Addresses of handles ``[n, 3]``; `EVICTED`, `PAST_END` or `UNKNOWN` for steps not in the index."""
        n_streams = self._ranges.n_streams
        handles = in_one_piece(handles)
        address = np.full(len(handles), UNKNOWN)
        first = int(handles[0, 0]) if len(handles) else -1
        if 0 <= first < n_streams and self._find(handles, first, address) == 0:
            return address  # all belong to one stream
        is_left = (handles[:, 0] >= 0) & (handles[:, 0] < n_streams)
        for stream in distinct(handles[:, 0]):
            if 0 <= stream < n_streams and self._find(handles, stream, address) >= 0:
                is_left &= handles[:, 0] != stream
        if is_left.any():
            address[is_left] = self._look_up(handles[is_left])
        return address

    def _find(self, handles: Array, stream: int, address: Array) -> int:
        """Find the handles of one stream by a compiled loop; returns the number of others, or -1 if it can't."""
        index, ranges = self._index, self._ranges
        entries, numbers = index.entries_of(stream), ranges.numbers_of(stream)
        table, by_episode = entries.table, numbers.table
        if self._kernels is None or table is None or by_episode is None:
            return -1
        known = entries.base, int(index.newest[stream])
        facts = index.logical.host, index.flags.host, index.t_base.host
        places = by_episode, numbers.base, ranges.home.host
        n_others: int = self._kernels.addresses_of(handles, stream, table, *known, *facts, *places, address)
        return n_others

    def _look_up(self, handles: Array) -> Array:
        """The same for handles of known streams, without compiled loops."""
        index = self._index
        stream, episode, t = handles.T
        entry = index.find(stream, episode)
        is_found = entry >= 0
        address = np.where((episode < 0) | (episode > index.newest[stream]) | (t < 0), UNKNOWN, EVICTED)
        if is_found.any():
            e, position = entry[is_found], t[is_found] - index.t_base.host[entry[is_found]]
            n = index.lengths_of(e)
            found = self.addresses(e, position.clip(0, n - 1))
            found = np.where(position < 0, EVICTED, np.where(position >= n, PAST_END, found))
            address[is_found] = np.where(t[is_found] < 0, UNKNOWN, found)
        return address
