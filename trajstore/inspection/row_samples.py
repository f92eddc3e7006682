"""Choose rows of a store that stand for all of it, within a bound of bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from trajstore.format.episode_table import RowRanges
from trajstore.format.spans import expand_ranges
from trajstore.schema import Array, Field, widen_bfloat16
from trajstore.store.snapshot import Snapshot
from trajstore.store.stream_reader import MissingChunkError

_PIECES = 64  # places that rows are taken from, if not all are read
_BLOCK_BYTES = 8 << 20  # read at a time
_NEAR_ROWS = 16  # between two ranges that are read at once


@dataclass(frozen=True, slots=True)
class RowPiece:
    """Consecutive rows ``[start, stop)`` of a stream; ``is_used`` leaves out those that no episode shows."""

    source: int
    start: int
    stop: int
    is_used: Array


def sample_pieces(ranges: RowRanges, spec: Field, max_bytes: int) -> Iterator[RowPiece]:
    """Rows of one field, spread evenly over the episodes; all of them if they take at most ``max_bytes``.

    Args:
        ranges: Where the rows of the episodes are.
        spec: The field. Final rows count only if the field has final values.
        max_bytes: Limit of the decoded bytes.
    """
    stop = ranges.stop if spec.final else ranges.stop - ranges.ends_in_final
    source, start = ranges.source, ranges.start
    is_filled = stop > start
    source, start, stop = source[is_filled], start[is_filled], stop[is_filled]
    order = np.lexsort((start, source))
    source, start, stop = source[order], start[order], stop[order]
    n_rows, limit = int((stop - start).sum()), max(1, max_bytes // spec.row_bytes)
    if n_rows > limit:
        source, start, stop = _spread(source, start, stop, limit)
    yield from _merged(source, start, stop, max(1, _BLOCK_BYTES // spec.row_bytes))


def read_piece(snapshot: Snapshot, path: str, piece: RowPiece) -> Array:
    """The values of a piece; bfloat16 as float32.

    Raises:
        SnapshotExpiredError: The rows were evicted since the snapshot was made.
        CorruptionError: A chunk is damaged or missing.
    """
    try:
        rows = snapshot.readers[piece.source].read_rows(f"steps/{path}", piece.start, piece.stop)
    except MissingChunkError as missing:
        raise snapshot.reason(missing, piece.start) from missing
    assert snapshot.schema is not None  # there are rows
    values = rows if piece.is_used.all() else rows[piece.is_used]
    return widen_bfloat16(values) if snapshot.schema[path].dtype == "bfloat16" else values


def _spread(source: Array, start: Array, stop: Array, limit: int) -> tuple[Array, Array, Array]:
    """Parts of the ranges, at evenly spread places, with ``limit`` rows in all."""
    ends = np.cumsum(stop - start)
    begin = ends - (stop - start)  # running number of a range's first row
    n_pieces = min(_PIECES, limit)
    length = limit // n_pieces
    first = np.linspace(0, ends[-1] - length, n_pieces).astype(np.int64)  # apart by at least their length
    low = np.searchsorted(ends, first, "right")
    high = np.searchsorted(ends, first + length - 1, "right")
    piece, k = expand_ranges(low, high + 1)
    new_start = start[k] + np.maximum(first[piece] - begin[k], 0)
    new_stop = start[k] + np.minimum(first[piece] + length - begin[k], (stop - start)[k])
    return source[k], new_start, new_stop


def _merged(source: Array, start: Array, stop: Array, block_rows: int) -> Iterator[RowPiece]:
    """Join ranges that lie close together to pieces of at most ``block_rows`` rows."""
    is_near = (source[1:] == source[:-1]) & (start[1:] - stop[:-1] <= stop[:-1] - start[:-1] + _NEAR_ROWS)
    for group in np.split(np.arange(len(start)), np.flatnonzero(~is_near) + 1) if len(start) else ():
        low, high = int(start[group[0]]), int(stop[group[-1]])
        is_used = np.zeros(high - low, bool)
        is_used[expand_ranges(start[group], stop[group])[1] - low] = True
        for a in range(low, high, block_rows):
            b = min(a + block_rows, high)
            yield RowPiece(int(source[group[0]]), a, b, is_used[a - low : b - low])
