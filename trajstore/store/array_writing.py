"""Writes whole arrays of a stream to their objects, in any layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from trajstore.format.array_layout import ArrayLayout
from trajstore.format.shard import assemble_shard
from trajstore.schema import Array
from trajstore.storage import UNSEEN, Storage

_BLOCK_BYTES = 16 << 20  # decoded rows that are held at a time, apart from those of one chunk


def put_array(storage: Storage, folder: str, path: str, layout: ArrayLayout, values: Array) -> int:
    """Put all rows of an array; returns the bytes of its objects."""
    return put_rows(storage, folder, path, layout, 0, len(values), lambda start, stop: values[start:stop])


def put_rows(
    storage: Storage,
    folder: str,
    path: str,
    layout: ArrayLayout,
    first: int,
    n_rows: int,
    read: Callable[[int, int], Array],
    report: Callable[[int], None] = lambda n_bytes: None,
) -> int:
    """Put rows of an array, one object after the other; returns the bytes of the objects.

    Args:
        storage: Where to put them.
        folder: Key prefix of the stream.
        path: The array.
        layout: Its layout.
        first: Chunks whose rows all lie below are left out; rows below in others are zeros.
        n_rows: Length of the array.
        read: Returns rows ``[start, stop)``; called in order.
        report: Called with the decoded bytes of every block of rows that was read.
    """
    n_bytes = 0
    for number in range(first // layout.object_rows, -(-n_rows // layout.object_rows)) if first < n_rows else ():
        start, stop = number * layout.object_rows, min(n_rows, (number + 1) * layout.object_rows)
        chunks: list[bytes | None] = [None] * (max(0, first - start) // layout.chunk_rows)
        chunks += _encoded(storage, layout, max(start, first), stop, read, report)
        data = chunks[0] if layout.shard_rows is None else assemble_shard(layout, chunks)
        assert data is not None  # an object that is put has rows
        name = layout.chunk_key(number * layout.chunks_per_shard)
        storage.put(f"{folder}/{path}/{name}", data, UNSEEN)
        n_bytes += len(data)
    return n_bytes


def _encoded(
    storage: Storage,
    layout: ArrayLayout,
    start: int,
    stop: int,
    read: Callable[[int, int], Array],
    report: Callable[[int], None],
) -> Iterator[bytes]:
    """The encoded chunks of rows ``[start, stop)`` of one object, from the chunk that holds ``start`` on."""
    size = layout.chunk_rows
    block_rows = size * max(1, _BLOCK_BYTES // layout.chunk_bytes)
    for low in range(start // size * size, stop, block_rows):
        high = min(stop, low + block_rows)
        rows = np.zeros((-(-(high - low) // size) * size, *layout.row_shape), layout.dtype)
        begin = max(start, low)
        rows[begin - low : high - low] = read(begin, high)
        report((high - begin) * layout.row_bytes)
        yield from storage.map(layout.encode, [rows[i : i + size] for i in range(0, len(rows), size)])
