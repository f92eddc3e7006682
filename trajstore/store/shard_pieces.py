"""Reads neighbouring chunks of a sharded array with few requests: a whole shard, or long ranges of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from trajstore.errors import CorruptionError
from trajstore.format.array_layout import ArrayLayout
from trajstore.schema import Array
from trajstore.storage import Storage

_MAX_PIECE_BYTES = 4 << 20  # decoded, so that a few threads hold little
_MAX_GAP_BYTES = 64 << 10  # bytes that are read in vain rather than with another request
_RUN_BYTES = 1 << 20
_MAX_OFFSET = 1 << 62
_WAVE_OBJECTS = 8  # chunks that are objects of their own are fetched ahead this many at a time


@dataclass(frozen=True, slots=True)
class ShardPiece:
    """Chunks ``[start, stop)`` of an array, all of one shard, or objects of their own."""

    start: int
    stop: int

    def gaps(self, missing: Sequence[int]) -> Iterator[ShardPiece]:
        """The parts of the piece that consist of missing chunks, which are given in order."""
        if len(missing) == self.stop - self.start:
            yield self
            return
        yield from _neighbours(missing)

    def read(
        self, storage: Storage, key: str, layout: ArrayLayout, shard_index: Callable[[], Array]
    ) -> list[memoryview]:
        """The encoded chunks, in order.

        Args:
            storage: Reads the object.
            key: Key of the shard.
            layout: The array.
            shard_index: Gives the index of the shard. Not called if most of the shard is read: its index is in it.

        Raises:
            ImpossibleChunkError: The shard index is wrong about a chunk.
            CorruptionError: The shard index is damaged.
        """
        if self._is_most_of_shard(layout):
            data = memoryview(storage.get(key))
            ranges = self._ranges(layout, layout.decode_shard_index(_index_bytes(data, layout)))
            return [data[offset : offset + size] for offset, size in ranges.tolist()]
        ranges = self._ranges(layout, shard_index())
        chunks = [memoryview(b"")] * len(ranges)
        for members in _runs(ranges):
            start, stop = int(ranges[members[0], 0]), int(ranges[members].sum(axis=1).max())
            data = memoryview(storage.get_range(key, start, stop))
            for i in members.tolist():
                low = int(ranges[i, 0]) - start
                chunks[i] = data[low : low + int(ranges[i, 1])]
        return chunks

    def read_one_by_one(
        self, layout: ArrayLayout, shard_index: Array, read: Callable[[int, int], memoryview]
    ) -> Iterator[memoryview]:
        """The encoded chunks, in order. Each is valid until the next one is asked for.

        Args:
            layout: The array.
            shard_index: The index of the shard.
            read: Reads bytes of the shard, from one place to another. Neighbouring chunks are read together, as
                many as stay in the processor's cache until they are decoded.
        """
        run: list[tuple[int, int]] = []
        for offset, size in self._ranges(layout, shard_index).tolist():
            if run and (offset != run[-1][1] or offset + size - run[0][0] > _RUN_BYTES):
                yield from _read_run(run, read)
                run = []
            run.append((offset, offset + size))
        yield from _read_run(run, read)

    def _is_most_of_shard(self, layout: ArrayLayout) -> bool:
        n = layout.chunks_per_shard
        return 2 * (self.stop - self.start) >= n and n * layout.chunk_bytes <= 2 * _MAX_PIECE_BYTES

    def _ranges(self, layout: ArrayLayout, index: Array) -> Array:
        """Offset and size of each chunk, checked."""
        first = self.start % layout.chunks_per_shard
        ranges = index[first : first + self.stop - self.start]
        for i in np.flatnonzero(~possible_ranges(layout, ranges))[:1].tolist():
            raise ImpossibleChunkError(self.start + i, *ranges[i].tolist())
        return ranges.astype(np.int64)


class ImpossibleChunkError(CorruptionError):
    """A shard index gives chunk ``number`` of the array an impossible place."""

    def __init__(self, number: int, offset: int, size: int) -> None:
        super().__init__(f"the shard index gives it {size} bytes at offset {offset}, which is impossible")
        self.number = number


def pieces(layout: ArrayLayout, start: int, stop: int) -> Iterator[ShardPiece]:
    """Divide chunks ``[start, stop)`` into pieces of at most one shard and about 4 MiB."""
    per_shard = layout.chunks_per_shard
    most = max(1, min(per_shard, _MAX_PIECE_BYTES // max(1, layout.chunk_bytes)))
    while start < stop:
        end = min(stop, start + most, (start // per_shard + 1) * per_shard)
        yield ShardPiece(start, end)
        start = end


def scan_pieces(
    layout: ArrayLayout, numbers: Sequence[int], n_chunks: int, max_bytes: int
) -> Iterator[tuple[int, ShardPiece]]:
    """The pieces to fetch ahead for a scan that needs some chunks, each with the first chunk that needs it.

    A shard is always divided in the same way, so that no part of it is fetched twice. Chunks that are objects of
    their own are fetched several at a time.

    Args:
        layout: The array.
        numbers: The needed chunks, rising.
        n_chunks: Chunks from this one on are not fetched.
        max_bytes: The most decoded bytes of a piece, unless one chunk has more.
    """
    most = max(1, min(max_bytes, _MAX_PIECE_BYTES) // max(1, layout.chunk_bytes))
    if layout.shard_rows is None:
        step = min(most, _WAVE_OBJECTS)
        for run in _neighbours(numbers):
            for start in range(run.start, run.stop, step):
                yield start, ShardPiece(start, min(start + step, run.stop))
        return
    per_shard, stop = layout.chunks_per_shard, 0
    for number in numbers:
        if number >= stop:
            shard = number // per_shard * per_shard
            start = shard + (number - shard) // most * most
            stop = min(start + most, shard + per_shard, n_chunks)
            yield number, ShardPiece(start, stop)


def _neighbours(numbers: Sequence[int]) -> Iterator[ShardPiece]:
    """Divide rising numbers into runs without gaps."""
    chunks = np.array(numbers, np.int64)
    for run in np.split(chunks, np.flatnonzero(np.diff(chunks) != 1) + 1) if len(chunks) else ():
        yield ShardPiece(int(run[0]), int(run[-1]) + 1)


def possible_ranges(layout: ArrayLayout, ranges: Array) -> Array:
    """Whether each (offset, size) can be that of a chunk; others would make a reader allocate without bound."""
    is_possible: Array = (ranges[:, 1] <= layout.max_encoded_bytes) & (ranges[:, 0] < _MAX_OFFSET)
    return is_possible


def _read_run(run: Sequence[tuple[int, int]], read: Callable[[int, int], memoryview]) -> Iterator[memoryview]:
    first = run[0][0]
    data = read(first, run[-1][1])
    for start, stop in run:
        yield data[start - first : stop - first]


def _index_bytes(shard: memoryview, layout: ArrayLayout) -> bytes:
    n = layout.shard_index_bytes
    return bytes(shard[:n] if layout.index_at_start else shard[-n:])


def _runs(ranges: Array) -> list[Array]:
    """Positions of the chunks that are read with one request each time, in order of their offsets."""
    order = np.argsort(ranges[:, 0], kind="stable")
    start, stop = ranges[order, 0], ranges[order].sum(axis=1)
    gaps = start[1:] - np.maximum.accumulate(stop)[:-1]
    return np.split(order, np.flatnonzero(gaps > _MAX_GAP_BYTES) + 1)
