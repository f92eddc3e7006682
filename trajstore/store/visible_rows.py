"""The rows of a snapshot's episodes, numbered through all streams, and read by these numbers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from trajstore.format.spans import EpisodeSpans, expand_counts, join_spans_by_episode, span_table
from trajstore.schema import Array, Field
from trajstore.store.snapshot import Snapshot
from trajstore.store.stream_reader import MissingChunkError


@dataclass(frozen=True, slots=True)
class RowSpans:
    """Spans of consecutive rows, in the order in which they are stored; one element for each span.

    Attributes:
        source: Position of the stream that holds the rows among the snapshot's readers.
        row: First row.
        number: Number of the first row, counted through all spans; one more element, the number of rows.
        stream: Position of the stream that recorded the episode in `Snapshot.names`.
        episode: Number of the episode in that stream.
        episode_row: Row of the episode in the snapshot's episode table.
        t: t of the first row.
        last_t: t of the episode's final row; -1 if the span does not hold it.
    """

    source: Array
    row: Array
    number: Array
    stream: Array
    episode: Array
    episode_row: Array
    t: Array
    last_t: Array


class VisibleRows:
    """The rows of the episodes that a snapshot shows, in the order in which they are stored.

    Evicted, abandoned and aborted rows are not among them. Reads the span tables; rows are read by `read`. Can be
    pickled, and is safe to share between threads.

    Args:
        snapshot: The snapshot.
        final: Whether final rows are among them, which hold only the last observation of an episode.
    """

    def __init__(self, snapshot: Snapshot, *, final: bool = False) -> None:
        self.snapshot = snapshot
        self.spans = _row_spans(join_spans_by_episode(span_table(snapshot.parts(), snapshot.schema)), final)

    def __len__(self) -> int:
        return int(self.spans.number[-1])

    def places(self, start: int, stop: int) -> tuple[Array, Array]:
        """The span and the stored row of each of the rows ``start`` to ``stop``."""
        spans = self.spans
        first = max(int(np.searchsorted(spans.number, start, side="right")) - 1, 0)
        last = int(np.searchsorted(spans.number, stop, side="left"))
        low = np.clip(spans.number[first:last], start, stop)
        counts = np.clip(spans.number[first + 1 : last + 1], start, stop) - low
        owner, offset = expand_counts(counts)
        rows: Array = (spans.row[first:last] + low - spans.number[first:last])[owner] + offset
        return owner + first, rows

    def coordinate(self, name: str, start: int, stop: int) -> Array:
        """One of ``stream`` (a position in `Snapshot.names`), ``episode``, ``episode_row``, ``t``, ``is_final``."""
        spans = self.spans
        span, row = self.places(start, stop)
        if name in ("stream", "episode", "episode_row"):
            of_span: Array = getattr(spans, name)[span]
            return of_span
        t: Array = spans.t[span] + row - spans.row[span]
        return t if name == "t" else t == spans.last_t[span]

    def read(self, path: str, start: int, stop: int) -> Array:
        """Rows ``start`` to ``stop`` of an array, such as ``steps/reward``, as a new array.

        Raises:
            SnapshotExpiredError: Rows were evicted since the snapshot was made; refresh the store.
            CorruptionError: A chunk is damaged or missing.
        """
        span, row = self.places(start, stop)
        source = self.spans.source[span]
        edges = [0, *(np.flatnonzero(np.diff(source)) + 1).tolist(), len(source)]
        if not len(source):
            spec = self._field(path)
            return np.empty((0, *spec.shape), spec.storage_dtype)
        parts = [self._rows_of(int(source[a]), path, row[a:b]) for a, b in pairwise(edges)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _rows_of(self, source: int, path: str, rows: Array) -> Array:
        """Rows of one stream, in ascending order. Rows between them are read too, unless they are very many."""
        reader = self.snapshot.readers[source]
        gap = 2 * (reader.chunk_rows(path) or 1)
        edges = [0, *(np.flatnonzero(np.diff(rows) > gap) + 1).tolist(), len(rows)]
        parts = []
        for a, b in pairwise(edges):
            low, high = (int(rows[a]), int(rows[b - 1]) + 1) if a < b else (0, 0)
            try:
                block = reader.read_rows(path, low, high)
            except MissingChunkError as missing:
                raise self.snapshot.reason(missing, low) from missing
            parts.append(block if high - low == b - a else block[rows[a:b] - low])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def chunk_edges(self, path: str, chunk_bytes: int) -> Array:
        """Numbers at which blocks of about ``chunk_bytes`` begin and end, so that no stored chunk is read twice."""
        spans, edges = self.spans, [np.zeros(1, np.int64)]
        for source in np.unique(spans.source).tolist():
            mine = np.flatnonzero(spans.source == source)
            first, end = int(mine[0]), int(mine[-1]) + 1
            rows = self._block_rows(source, path, chunk_bytes)
            start, stop = int(spans.row[first]), int(spans.row[end - 1] + np.diff(spans.number)[end - 1])
            cuts = np.arange(start // rows * rows + rows, stop, rows)
            owner = np.searchsorted(spans.row[first:end], cuts, side="right") - 1 + first
            within = np.minimum(cuts - spans.row[owner], np.diff(spans.number)[owner])
            edges += [spans.number[owner] + within, spans.number[end : end + 1]]
        return np.unique(np.concatenate(edges))

    def _field(self, path: str) -> Field:
        assert self.snapshot.schema is not None  # it has this field
        return self.snapshot.schema[path.removeprefix("steps/")]

    def _block_rows(self, source: int, path: str, chunk_bytes: int) -> int:
        reader = self.snapshot.readers[source]
        row_bytes = self._field(path).row_bytes
        stored = reader.chunk_rows(path)
        if stored is None:
            return max(1, chunk_bytes // row_bytes)
        return stored * max(1, chunk_bytes // (stored * row_bytes))


def _row_spans(joined: EpisodeSpans, final: bool) -> RowSpans:
    columns, n_episodes = joined.columns, len(joined.first)
    spans = joined.span_numbers(np.arange(n_episodes))
    episode_row = np.repeat(np.arange(n_episodes), joined.last - joined.first + 1)  # the table has this order too
    column = {
        name: columns[name][spans] for name in ("source", "row_start", "row_stop", "stream", "episode", "t_start")
    }
    is_last = np.zeros(len(columns["row_start"]), bool)
    is_last[joined.last] = columns["has_final"][joined.last] > 0
    has_final = is_last[spans]
    n_rows = column["row_stop"] - column["row_start"]
    last_t = np.where(has_final, column["t_start"] + n_rows - 1, -1)
    n_rows = n_rows if final else n_rows - has_final
    order = np.lexsort((column["row_start"], column["source"]))
    order = order[n_rows[order] > 0]
    number = np.concatenate([[0], np.cumsum(n_rows[order])]).astype(np.int64)
    names = ("source", "row_start", "stream", "episode", "t_start")
    source, row, stream, episode, t = (column[name][order] for name in names)
    return RowSpans(source, row, number, stream, episode, episode_row[order], t, last_t[order])
