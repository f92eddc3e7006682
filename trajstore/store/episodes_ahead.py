"""Fetches the episodes that come next, if episodes are read one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trajstore.format.episode_table import EpisodeTable
from trajstore.store.chunk_requests import MAX_BYTES, request_chunks
from trajstore.store.read_ahead import ReadAhead
from trajstore.store.stream_reader import StreamReader

_MAX_EPISODES = 256  # that are looked at in one call
_Place = tuple[int, int]  # an episode's row in the table, and a row of the episode


class EpisodesAhead:
    """Recognises that episodes are read in order, and requests the chunks of the next ones.

    Starts with the second episode that follows another one, with little, and doubles with each of them.

    Args:
        readers: Of the snapshot's streams, in order.
        table: The episodes.

    Attributes:
        ahead: The chunks.
    """

    def __init__(self, readers: Sequence[StreamReader], table: EpisodeTable) -> None:
        self.ahead = ReadAhead(MAX_BYTES)
        self._readers = readers
        self._table = table
        self._expected: _Place = -1, 0  # where a read in order starts
        self._next: _Place = 0, 0  # rows before this were requested
        self._n_in_order = 0

    def follow(self, i: int, start: int, stop: int, paths: Sequence[str]) -> None:
        """Note that rows ``[start, stop)`` of arrays of an episode are read now."""
        is_in_order = (i, start) == self._expected
        self._expected = (i + 1, 0) if stop == self._table.n_rows(i) else (i, stop)
        if not is_in_order:
            self._n_in_order = 0
            self.ahead.clear()
            return
        self._n_in_order += 1
        self.ahead.forget_before(i)
        row_bytes = sum(self._row_bytes(path) for path in paths) or 1
        self.ahead.max_bytes = min(MAX_BYTES, (stop - start) * row_bytes << min(self._n_in_order, 32))
        self._next = max(self._next, self._expected) if self._n_in_order > 1 else self._expected
        n = -(-self.ahead.room // row_bytes)
        if self._next == self._expected:  # what was requested before for the next episode is kept
            n = max(n, stop - start)
        if n:
            self._request(paths, n)

    def _row_bytes(self, path: str) -> int:
        layouts = (reader.record.layouts.get(path) for reader in self._readers)
        return next((layout.row_bytes for layout in layouts if layout is not None), 0)

    def _request(self, paths: Sequence[str], n: int) -> None:
        """Request the chunks of the next ``n`` rows."""
        ranges = []
        episode, row = self._next
        last = min(len(self._table), episode + _MAX_EPISODES)
        while n > 0 and episode < last:
            n_rows = self._table.n_rows(episode)
            stop = min(n_rows, row + n)
            ranges += self._ranges(episode, row, stop)
            n -= stop - row
            episode, row = (episode + 1, 0) if stop == n_rows else (episode, stop)
        self._next = episode, row
        if ranges:
            request_chunks(self.ahead, self._readers, paths, np.array(ranges, np.int64), episode)

    def _ranges(self, episode: int, start: int, stop: int) -> list[tuple[int, int, int]]:
        """The sources, first rows and ends of some rows of an episode."""
        ranges, offset = [], 0
        for span in self._table.spans(episode):
            low, high = span.row_start + max(start - offset, 0), min(span.row_stop, span.row_start + stop - offset)
            offset += span.row_stop - span.row_start
            if low < high:
                ranges.append((span.source, low, high))
        return ranges
