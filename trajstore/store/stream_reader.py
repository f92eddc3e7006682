"""Reads the committed rows of one stream: decodes chunk objects into arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from trajstore.errors import CorruptionError
from trajstore.format.array_layout import ArrayLayout
from trajstore.format.commit_record import CommitRecord
from trajstore.format.spans import Spans, check_spans
from trajstore.schema import Array, Schema, stored_fill
from trajstore.storage import Storage

_WAVE_CHUNKS = 64  # read at a time


class ChunkError(CorruptionError):
    """A chunk of a stream, with rows ``[start, stop)``, is damaged."""

    def __init__(self, message: str, stream: str, start: int, stop: int) -> None:
        super().__init__(message)
        self.stream, self.start, self.stop = stream, start, stop


class MissingChunkError(ChunkError):
    """A committed chunk does not exist: it was evicted, or lost."""


class StreamReader:
    """Reads the rows of one stream that one commit record names. Thread-safe.

    Args:
        storage: Reads objects.
        record: The commit record.
        schema: The fields that are shown; None: those of the stream. Rows of a field that the stream lacks hold its
            fill value, and nothing is read for them.
    """

    def __init__(self, storage: Storage, record: CommitRecord, schema: Schema | None = None) -> None:
        self.record = record
        self._storage = storage
        shown = {} if schema is None else schema.fields
        self._fill_rows = {  # by path: a row of fill values, for each field that the stream lacks
            f"steps/{path}": np.broadcast_to(stored_fill(spec), spec.shape)
            for path, spec in shown.items()
            if path not in record.schema.fields
        }
        self._shard_indexes: dict[tuple[str, int], Array] = {}  # valid for good: shards never change

    def advanced(self, record: CommitRecord) -> StreamReader:
        """A reader for a newer record of the same stream; shares the cached shard indexes of the same objects."""
        reader = StreamReader(self._storage, record)
        if record.folder == self.record.folder:
            reader._shard_indexes = self._shard_indexes
        reader._fill_rows = self._fill_rows
        return reader

    def chunk_rows(self, path: str) -> int | None:
        """Rows in a chunk of an array; None if the stream lacks the field, so that it has no chunks."""
        return None if path in self._fill_rows else self.record.layouts[path].chunk_rows

    def fill(self, path: str, out: Array) -> bool:
        """Write the fill value to ``out`` if the stream lacks the field; returns whether it does."""
        row = self._fill_rows.get(path)
        if row is not None:
            out[...] = row
        return row is not None

    def read_rows(self, path: str, start: int, stop: int) -> Array:
        """Read committed rows ``[start, stop)`` of an array into a new array.

        Raises:
            IndexError: The array does not have these rows.
            CorruptionError: A chunk is damaged or missing.
        """
        n = self.record.length(path)
        if not 0 <= start <= stop <= n:
            raise IndexError(f"{self._name(path)}: rows {start} to {stop}, but it has {n} rows")
        if (row := self._fill_rows.get(path)) is not None:
            return np.broadcast_to(row, (stop - start, *row.shape)).copy()
        layout = self.record.layouts[path]
        if start == stop:
            return np.empty((0, *layout.row_shape), layout.dtype)
        first, last = start // layout.chunk_rows, (stop - 1) // layout.chunk_rows
        # The length comes from metadata: read the last chunk before allocating memory for all of them.
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
        """Read one chunk, still encoded. The result is valid until ``buffer`` is used again."""
        layout = self.record.layouts[path]
        with self._named(path, layout, index):
            if layout.shard_rows is None:
                return self._storage.get_into(f"{self.record.folder}/{path}/{layout.chunk_key(index)}", buffer)
            return memoryview(self._chunk_bytes(path, layout, index))

    def chunk_key(self, path: str, index: int) -> str | None:
        """Key of the object that holds exactly one chunk; None if the array is sharded, or the stream lacks it."""
        layout = self.record.layouts.get(path)
        if layout is None or layout.shard_rows is not None:
            return None
        return f"{self.record.folder}/{path}/{layout.chunk_key(index)}"

    def decode_chunk(self, path: str, index: int, data: bytes | memoryview, out: Array) -> None:
        """Decode the result of `chunk` into ``out``, a contiguous array of one chunk."""
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
        """Name the chunk in errors about damaged or missing chunks."""
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
        key = f"{self.record.folder}/{path}/{layout.chunk_key(index)}"
        if layout.shard_rows is None:
            return self._storage.get(key)
        shard, inner = divmod(index, layout.chunks_per_shard)
        offset, size = (int(n) for n in self._shard_index(path, layout, shard, key)[inner])
        if size > 2 * layout.chunk_bytes + 4096 or offset >= 1 << 62:
            raise CorruptionError(f"the shard index gives it {size} bytes at offset {offset}, which is impossible")
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
        """Read and check the spans from ``start`` on."""
        ints = self.read_rows("spans/ints", start, self.record.spans)
        floats = self.read_rows("spans/floats", start, self.record.spans)
        spans = Spans(ints, floats)
        try:
            check_spans(spans, self.record.rows, self.record.text_bytes)
            last = int(ints[-1, 4]) if len(ints) else 0
            if last != self.record.rows and (len(ints) or not start):
                # Readers allocate memory by the record, so it must not claim rows that no span has.
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


class SnapshotStream:
    """One stream of a snapshot. Its spans are read once; later snapshots read only new ones."""

    def __init__(self, reader: StreamReader, known: Spans | None = None) -> None:
        self.reader = reader
        self._known = known  # spans that an earlier snapshot has read: a prefix of these

    @property
    def record(self) -> CommitRecord:
        return self.reader.record

    @cached_property
    def spans(self) -> Spans:
        if self._known is None:
            return self.reader.read_spans()
        return concat_spans([self._known, self.reader.read_spans(len(self._known))])

    def advanced(self, record: CommitRecord) -> SnapshotStream:
        known = self.__dict__.get("spans", self._known)
        return SnapshotStream(self.reader.advanced(record), known)


def _copy_chunk(layout: ArrayLayout, index: int, chunk: Array, out: Array, start: int) -> None:
    low = index * layout.chunk_rows
    first, stop = max(low, start), min(low + layout.chunk_rows, start + len(out))
    out[first - start : stop - start] = chunk[first - low : stop - low]


def concat_spans(blocks: Sequence[Spans]) -> Spans:
    if len(blocks) == 1:
        return blocks[0]
    return Spans(np.concatenate([b.ints for b in blocks]), np.concatenate([b.floats for b in blocks]))
