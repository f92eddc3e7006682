"""Reads the rows of an episode, which may lie in several spans and streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from trajstore.format.episode_table import SpanExtent
from trajstore.schema import Array
from trajstore.store.read_ahead import ReadAhead
from trajstore.store.recent_chunks import RecentChunks
from trajstore.store.stream_reader import StreamReader


class SpanRows:
    """Reads rows of spans, and keeps the chunks that reads ended in for the next read in order.

    Args:
        readers: Of the snapshot's streams, in order.
        explained: Calls a function that reads from a row on; if a chunk is missing, raises an error that says why.
        ahead: Chunks that were fetched for the next reads, if any are.
    """

    def __init__(
        self,
        readers: Sequence[StreamReader],
        explained: Callable[[int, Callable[[], Array]], Array],
        ahead: ReadAhead | None,
    ) -> None:
        self._readers = list(readers)
        self._explained = explained
        self._recent = RecentChunks(ahead)

    def read(self, path: str, spans: Sequence[SpanExtent], start: int, stop: int) -> Array:
        """Rows ``[start, stop)`` of an array, counted from the start of the first span, as a new array."""
        parts, offset = [], 0
        for span in spans:
            n = span.row_stop - span.row_start
            low, high = max(start - offset, 0), min(stop - offset, n)
            if low < high:
                parts.append(self._read(span.source, path, span.row_start + low, span.row_start + high))
            offset += n
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else self._readers[0].read_rows(path, 0, 0)

    def _read(self, source: int, path: str, start: int, stop: int) -> Array:
        reader = self._readers[source]
        return self._explained(start, lambda: reader.read_rows(path, start, stop, self._recent))
