"""Turns rows that a scan reads next into requests for chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter

import numpy as np

from trajstore.format.commit_record import CommitRecord
from trajstore.format.spans import expand_counts
from trajstore.schema import Array
from trajstore.store.read_ahead import ReadAhead
from trajstore.store.shard_pieces import ShardPiece, scan_pieces
from trajstore.store.stream_reader import StreamReader

MAX_BYTES = 64 << 20  # that a scan fetches ahead
_PIECES_AHEAD = 4  # of every column

Absent = Callable[[str, int, Array], Array]


def request_chunks(
    ahead: ReadAhead,
    readers: Sequence[StreamReader | None],
    paths: Sequence[str],
    ranges: Array,
    position: int,
    absent: Absent | None = None,
) -> None:
    """Request the chunks that hold rows, in the order of the rows.

    Chunks that later commits may change are left out, and those that were requested before.

    Args:
        ahead: Fetches the chunks.
        readers: By source.
        paths: Paths of arrays.
        ranges: ``[n, 3]``: source, first row, and row after the last.
        position: See `ReadAhead.request`.
        absent: Returns those of the chunks of an array and source that the caller does not have.
    """
    found: list[tuple[int, StreamReader, str, ShardPiece]] = []
    sources = np.unique(ranges[:, 0]).tolist()
    n_bytes = ahead.most_bytes // (_PIECES_AHEAD * max(1, len(paths)))  # so that no column takes all the room
    for path in paths:
        for source in sources:
            reader = readers[source]
            if reader is not None and (n := _n_final_chunks(reader.record, path)):
                layout = reader.record.layouts[path]
                numbers, ranks = _chunks(layout.chunk_rows, ranges, source, n)
                needed = numbers if absent is None else absent(path, source, numbers)
                rank_of = dict(zip(numbers.tolist(), ranks.tolist(), strict=True))
                new = [i for i in needed.tolist() if not ahead.keep((reader.record.folder, path, i), position)]
                found += [(rank_of[first], reader, path, p) for first, p in scan_pieces(layout, new, n, n_bytes)]
    for _, reader, path, piece in sorted(found, key=itemgetter(0)):
        keys = [(reader.record.folder, path, i) for i in range(piece.start, piece.stop)]
        n_bytes = reader.record.layouts[path].chunk_bytes * len(keys)
        ahead.request(keys, n_bytes, position, partial(reader.read_chunks, path, piece))


def _chunks(chunk_rows: int, ranges: Array, source: int, n_chunks: int) -> tuple[Array, Array]:
    """The chunks of one source that hold rows, rising, and the number of the first range that needs each."""
    mine = np.flatnonzero(ranges[:, 0] == source)
    first, last = ranges[mine, 1] // chunk_rows, (ranges[mine, 2] - 1) // chunk_rows
    owner, number = expand_counts(last - first + 1)
    chunks, at = np.unique(first[owner] + number, return_index=True)
    is_final = chunks < n_chunks
    return chunks[is_final], mine[owner[at]][is_final]


def _n_final_chunks(record: CommitRecord, path: str) -> int:
    """Chunks of an array that no later commit changes; 0 if the stream lacks the field."""
    layout = record.layouts.get(path)
    if layout is None:
        return 0
    n = record.length(path)
    return -(-n // layout.chunk_rows) if record.is_sealed else n // layout.chunk_rows
