"""Writes some episodes of a stream to another store, as a stream of the same id: their handles stay valid."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from trajstore.format.commit_record import CommitRecord, SessionView
from trajstore.format.spans import End, VisibleSpans, expand_ranges
from trajstore.schema import Array, Schema
from trajstore.storage import Storage
from trajstore.store.array_writing import put_array, put_rows
from trajstore.store.flat_streams import ColumnValues, column_values, put_columns
from trajstore.store.recent_chunks import RecentChunks
from trajstore.store.snapshot import Snapshot
from trajstore.store.stream_reader import StreamReader

EPISODE, T_START, ROW_START, ROW_STOP, END, HAS_FINAL, PRESENT, TEXT_STOP = 0, 2, 3, 4, 5, 6, 7, 8


@dataclass(frozen=True, slots=True)
class StreamPart:
    """Some episodes of a stream.

    Attributes:
        record: The record of the new stream.
        source_rows: By row of the new stream, from `CommitRecord.first_row` on: its row in the old one.
        spans: Positions of the spans in the old table, in the order of the new one.
        pieces: By span of the new stream: its rows ``[start, stop)`` in the old one.
        is_evicted: Which of these rows are evicted.
    """

    record: CommitRecord
    source_rows: Array
    spans: Array
    pieces: Array
    is_evicted: Array

    @property
    def decoded_bytes(self) -> int:
        """Bytes of the steps to copy."""
        steps = (layout for path, layout in self.record.layouts.items() if path.startswith("steps/"))
        return sum(layout.row_bytes for layout in steps) * len(self.source_rows)


def plan_part(part: VisibleSpans, record: CommitRecord, chosen: Array) -> StreamPart:
    """How some episodes of a stream are laid out as a stream of their own.

    Evicted rows of headless episodes come first, as rows that are evicted there too; so steps keep their t.

    Args:
        part: The spans of the stream, as a view shows them.
        record: The stream's flat record.
        chosen: Numbers of the episodes.
    """
    ints = part.spans.ints
    spans = np.flatnonzero(np.isin(ints[:, EPISODE], chosen))
    start, stop = ints[spans, ROW_START], ints[spans, ROW_STOP]
    cut = np.clip(part.first_row, start, stop)
    gone = np.flatnonzero(cut > start)
    left = np.flatnonzero((cut < stop) | (cut == start))
    order = np.concatenate([gone, left])
    is_evicted = np.arange(len(order)) < len(gone)
    pieces = np.stack([np.concatenate([start[gone], cut[left]]), np.concatenate([cut[gone], stop[left]])], 1)
    n_rows = pieces[:, 1] - pieces[:, 0]
    _, rows = expand_ranges(pieces[~is_evicted, 0], pieces[~is_evicted, 1])
    new = replace(
        record,
        rows=int(n_rows.sum()),
        spans=len(order),
        text_bytes=0,
        first_row=int(n_rows[is_evicted].sum()),
        view=SessionView(),
    )
    return StreamPart(new, rows, spans[order], pieces, is_evicted)


class PartWriter:
    """Writes the chosen episodes of streams of one view.

    Args:
        snapshot: The view.
        target: The store to write to.
        report: Called with the decoded bytes of every block that was copied.
    """

    def __init__(self, snapshot: Snapshot, target: Storage, report: Callable[[int], None]) -> None:
        self._snapshot, self._target, self._report = snapshot, target, report
        self._shown = {record.id: record for record in snapshot.streams}

    def put(self, spans: VisibleSpans, part: StreamPart) -> CommitRecord:
        """Put everything but the metadata of a stream; returns its record."""
        reader = StreamReader(self._snapshot.storage, self._shown[part.record.id])
        record = self._put_spans(reader, spans, part)
        for path, layout in record.layouts.items():
            if path.startswith("steps/"):
                rows = GatheredRows(reader, path, part)
                put_rows(
                    self._target,
                    record.folder,
                    path,
                    layout,
                    record.first_row,
                    record.rows,
                    rows.read,
                    self._report,
                )
        return put_columns(self._target, record, self._columns(record, part))

    def _put_spans(self, reader: StreamReader, spans: VisibleSpans, part: StreamPart) -> CommitRecord:
        ints, floats, text = _new_spans(reader, spans, part)
        record = replace(part.record, text_bytes=len(text))
        for name, values in (("ints", ints), ("floats", floats), ("text", text)):
            put_array(self._target, record.folder, f"spans/{name}", record.layouts[f"spans/{name}"], values)
        return record

    def _columns(self, record: CommitRecord, part: StreamPart) -> Iterator[ColumnValues]:
        """The derived columns of the chosen rows."""
        for column in column_values(self._snapshot, record.id, self._shown[record.id].rows):
            first, last = np.searchsorted(part.source_rows, [column.state.first, column.state.stop])
            if first < last:
                values = column.values[part.source_rows[first:last] - column.state.first]
                start = record.first_row + int(first)
                state = replace(column.state, first=start, stop=start + len(values))
                yield ColumnValues(column.name, state, values)


class GatheredRows:
    """Reads rows of a new stream from the old one, in order, each chunk about once."""

    def __init__(self, reader: StreamReader, path: str, part: StreamPart) -> None:
        self._reader, self._path, self._first = reader, path, part.record.first_row
        self._rows = part.source_rows
        self._recent = RecentChunks()

    def read(self, start: int, stop: int) -> Array:
        rows = self._rows[start - self._first : stop - self._first]
        bounds = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
        runs = [
            self._reader.read_rows(self._path, int(rows[a]), int(rows[b - 1]) + 1, self._recent)
            for a, b in itertools.pairwise(bounds)
        ]
        return runs[0] if len(runs) == 1 else np.concatenate(runs)


def _new_spans(reader: StreamReader, spans: VisibleSpans, part: StreamPart) -> tuple[Array, Array, Array]:
    """The span table and text of the new stream."""
    old, pieces = spans.spans.ints, part.pieces
    ints, floats = old[part.spans].copy(), spans.spans.floats[part.spans].copy()
    offset = pieces[:, 0] - ints[:, ROW_START]
    is_head = part.is_evicted & (pieces[:, 1] < ints[:, ROW_STOP])  # the rest of the span is a piece of its own
    floats[is_head, 0] = [_evicted_return(reader, i, a, b) for i, a, b in _heads(spans, part, is_head)]
    ints[:, T_START] += offset
    ints[:, ROW_STOP] = np.cumsum(pieces[:, 1] - pieces[:, 0])
    ints[:, ROW_START] = ints[:, ROW_STOP] - (pieces[:, 1] - pieces[:, 0])
    ints[is_head, END], ints[is_head, HAS_FINAL], ints[is_head, PRESENT] = End.OPEN, 0, 0
    text_stop = old[part.spans, TEXT_STOP]
    text_start = np.concatenate([[0], old[:-1, TEXT_STOP]])[part.spans]
    text_start = np.where(is_head, text_stop, text_start)
    n_bytes = text_stop - text_start
    ints[:, TEXT_STOP] = np.cumsum(n_bytes)
    _, positions = expand_ranges(text_start, text_stop)
    text = np.empty(0, np.uint8)
    if len(positions):
        low, high = int(positions.min()), int(positions.max()) + 1
        text = np.frombuffer(reader.read_text(low, high), np.uint8)[positions - low]
    return ints, floats, text


def _heads(spans: VisibleSpans, part: StreamPart, is_head: Array) -> Iterator[tuple[float, int, int]]:
    """Of spans whose first rows are evicted: the return at their end, and their rows that are left."""
    for i in np.flatnonzero(is_head):
        row = part.spans[i]
        yield float(spans.spans.floats[row, 0]), int(part.pieces[i, 1]), int(spans.spans.ints[row, ROW_STOP])


def _evicted_return(reader: StreamReader, whole: float, start: int, stop: int) -> float:
    """The return of an episode up to row ``start``, given that up to ``stop``."""
    path = summed_reward(reader.record.schema)
    if path is None:
        return whole
    with np.errstate(all="ignore"):
        return whole - float(reader.read_rows(f"steps/{path}", start, stop).astype(np.float64).sum())


def summed_reward(schema: Schema) -> str | None:
    """The field whose sum is the return of an episode; None if there is none."""
    spec = schema.fields.get(schema.reward) if schema.reward else None
    if spec is None or np.prod(spec.shape) != 1 or spec.dtype in ("bool", "bfloat16"):
        return None
    return schema.reward
