"""Reads committed rows of one stream: chunk objects to arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np

from trajstore.errors import CorruptionError
from trajstore.format.array_layout import ArrayLayout
from trajstore.format.commit_record import CommitRecord
from trajstore.format.spans import Spans, check_spans
from trajstore.schema import Array
from trajstore.storage import Storage

_WAVE_CHUNKS = 64


class ChunkError(CorruptionError):
    """A chunk is damaged: the rows ``[start, stop)`` of a stream."""

    def __init__(self, message: str, stream: str, start: int, stop: int) -> None:
        super().__init__(message)
        self.stream, self.start, self.stop = stream, start, stop


class MissingChunkError(ChunkError):
    """A committed chunk is not there: evicted since, or lost."""


class StreamReader:
    """Reads committed rows of one stream, as of one commit record; immutable and thread-safe."""

    def __init__(self, storage: Storage, record: CommitRecord) -> None:
        self.record = record
        self._storage = storage
        self._shard_indexes: dict[tuple[str, int], Array] = {}  # shards never change, so these stay true

    def advanced(self, record: CommitRecord) -> StreamReader:
        """A reader of a newer record of the same stream."""
        reader = StreamReader(self._storage, record)
        reader._shard_indexes = self._shard_indexes
        return reader

    def read_rows(self, path: str, start: int, stop: int) -> Array:
        """Committed rows ``[start, stop)`` of an array, freshly allocated.

        Raises:
            CorruptionError: A chunk is damaged or missing.
        """
        layout, n = self.record.layouts[path], self.record.length(path)
        if not 0 <= start <= stop <= n:
            raise IndexError(f"{self._name(path)}: rows {start} to {stop} of {n}")
        if start == stop:
            return np.empty((0, *layout.row_shape), layout.dtype)
        first, last = start // layout.chunk_rows, (stop - 1) // layout.chunk_rows
        # The length comes from metadata: see that the data is there before allocating for it.
        tail = self._load(path, layout, last)
        out = np.empty((stop - start, *layout.row_shape), layout.dtype)

        def place(index: int) -> None:
            self._place(path, layout, index, out, start)

        _copy_chunk(layout, last, tail, out, start)
        for wave in range(first, last, _WAVE_CHUNKS):
            self._storage.map(place, range(wave, min(last, wave + _WAVE_CHUNKS)))
        return out

    def _place(self, path: str, layout: ArrayLayout, index: int, out: Array, start: int) -> None:
        low = index * layout.chunk_rows - start
        if low >= 0 and low + layout.chunk_rows <= len(out):
            self._decode(path, layout, index, out[low : low + layout.chunk_rows])
        else:
            _copy_chunk(layout, index, self._load(path, layout, index), out, start)

    def chunk(self, path: str, index: int, buffer: bytearray) -> memoryview:
        """One chunk as it is stored, still encoded; valid until ``buffer`` is used again."""
        layout = self.record.layouts[path]
        with self._named(path, layout, index):
            if layout.shard_rows is None:
                return self._storage.get_into(f"streams/{self.record.id}/{path}/{layout.chunk_key(index)}", buffer)
            return memoryview(self._chunk_bytes(path, layout, index))

    def chunk_key(self, path: str, index: int) -> str | None:
        """The object that is one chunk; None where chunks are parts of shards."""
        layout = self.record.layouts[path]
        if layout.shard_rows is not None:
            return None
        return f"streams/{self.record.id}/{path}/{layout.chunk_key(index)}"

    def decode_chunk(self, path: str, index: int, data: bytes | memoryview, out: Array) -> None:
        """Decode what `chunk` gave into a contiguous block of a chunk's size."""
        layout = self.record.layouts[path]
        with self._named(path, layout, index):
            layout.decode(data, out)

    def _load(self, path: str, layout: ArrayLayout, index: int) -> Array:
        with self._named(path, layout, index):
            return layout.decode_new(self._chunk_bytes(path, layout, index))

    def _decode(self, path: str, layout: ArrayLayout, index: int, out: Array) -> None:
        with self._named(path, layout, index):
            layout.decode(self._chunk_bytes(path, layout, index), out)

    @contextlib.contextmanager
    def _named(self, path: str, layout: ArrayLayout, index: int) -> Iterator[None]:
        """Say which chunk is damaged or missing."""
        try:
            yield
        except FileNotFoundError as error:
            rows = index * layout.chunk_rows, (index + 1) * layout.chunk_rows
            name = self._chunk_name(path, layout, index)
            raise MissingChunkError(f"{name} is missing", self.record.id, *rows) from error
        except CorruptionError as error:
            rows = index * layout.chunk_rows, (index + 1) * layout.chunk_rows
            name = self._chunk_name(path, layout, index)
            raise ChunkError(f"{name}: {error}", self.record.id, *rows) from error

    def _chunk_bytes(self, path: str, layout: ArrayLayout, index: int) -> bytes:
        key = f"streams/{self.record.id}/{path}/{layout.chunk_key(index)}"
        if layout.shard_rows is None:
            return self._storage.get(key)
        shard, inner = divmod(index, layout.chunks_per_shard)
        offset, size = (int(n) for n in self._shard_index(path, layout, shard, key)[inner])
        if size > 2 * layout.chunk_bytes + 4096 or offset >= 1 << 62:
            raise CorruptionError(f"shard index says {size} bytes at {offset}")
        return self._storage.get_range(key, offset, offset + size)

    def _shard_index(self, path: str, layout: ArrayLayout, shard: int, key: str) -> Array:
        index = self._shard_indexes.get((path, shard))
        if index is None:
            start = 0 if layout.index_at_start else self._storage.size(key) - layout.shard_index_bytes
            data = self._storage.get_range(key, max(0, start), max(0, start) + layout.shard_index_bytes)
            index = layout.decode_shard_index(data)
            self._shard_indexes[path, shard] = index
        return index

    def read_spans(self, start: int = 0) -> Spans:
        """Spans from ``start`` on, checked."""
        ints = self.read_rows("spans/ints", start, self.record.spans)
        floats = self.read_rows("spans/floats", start, self.record.spans)
        spans = Spans(ints, floats)
        try:
            check_spans(spans, self.record.rows, self.record.text_bytes)
            last = int(ints[-1, 4]) if len(ints) else 0
            if last != self.record.rows and (len(ints) or not start):
                # Whoever makes room for rows trusts the record, so it must not claim any that no span has.
                raise CorruptionError(f"spans end at row {last}, the record says {self.record.rows}")
        except CorruptionError as error:
            raise CorruptionError(f"{self._name('spans')}: {error}") from error
        return spans

    def read_text(self, start: int, stop: int) -> bytes:
        return self.read_rows("spans/text", start, stop).tobytes()

    def _name(self, path: str) -> str:
        return f"{self._storage.display}: stream '{self.record.id}', array '{path}'"

    def _chunk_name(self, path: str, layout: ArrayLayout, index: int) -> str:
        rows = f"rows {index * layout.chunk_rows} to {(index + 1) * layout.chunk_rows}"
        return f"{self._name(path)}, chunk {index} ({rows})"


def _copy_chunk(layout: ArrayLayout, index: int, chunk: Array, out: Array, start: int) -> None:
    low = index * layout.chunk_rows
    first, stop = max(low, start), min(low + layout.chunk_rows, start + len(out))
    out[first - start : stop - start] = chunk[first - low : stop - low]


def concat_spans(blocks: Sequence[Spans]) -> Spans:
    if len(blocks) == 1:
        return blocks[0]
    return Spans(np.concatenate([b.ints for b in blocks]), np.concatenate([b.floats for b in blocks]))
