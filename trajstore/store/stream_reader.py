"""Reads the committed rows of one stream: decodes chunk objects into arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from trajstore.errors import CorruptionError
from trajstore.format.array_layout import ArrayLayout
from trajstore.format.blosc_blocks import check_blocks
from trajstore.format.codec import is_intact
from trajstore.format.commit_record import CommitRecord
from trajstore.format.spans import Spans, check_spans
from trajstore.format.zstd_library import zstd_library
from trajstore.schema import Array, Schema, stored_fill
from trajstore.storage import Data, FileMap, Place, Storage
from trajstore.store.recent_chunks import RecentChunks
from trajstore.store.shard_indexes import ShardIndexes
from trajstore.store.shard_pieces import ImpossibleChunkError, ShardPiece, pieces

SPAN_ARRAYS = ("spans/ints", "spans/floats")
_WAVE_CHUNKS = 64  # read at a time
_WAVE_SHARDS = 16  # the same of sharded arrays
_DECODE_TASKS = 4  # threads that decode the chunks of one shard


class ChunkError(CorruptionError):
    """A chunk of a stream, with rows ``[start, stop)``, is damaged; ``key`` names its object."""

    def __init__(self, message: str, stream: str, start: int, stop: int, key: str = "") -> None:
        super().__init__(message)
        self.stream, self.start, self.stop, self.key = stream, start, stop, key


class MissingChunkError(ChunkError):
    """A committed chunk does not exist: it was evicted, or lost."""


@dataclass(frozen=True, slots=True)
class MappedObject:
    """An object in memory, and where its chunks lie in it: their (offset, size) pairs."""

    file: FileMap
    index: Array

    def chunk(self, start: int, stop: int, *, is_raw: bool) -> memoryview:
        """A chunk, still encoded, for `StreamReader.decode_chunk`.

        A compressed one is copied: another program may write to the file after its sizes were checked.
        """
        data = self.file.view(start, stop)
        return data if is_raw else memoryview(bytes(data))


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
        self._shard_indexes = ShardIndexes(storage)
        if storage.keeps_objects:
            self._note_rows()

    def _note_rows(self) -> None:
        # Derived columns are overwritten, so their objects are not noted.
        rows = {
            path: (layout.object_rows, self.record.length(path))
            for path, layout in self.record.layouts.items()
            if not path.startswith("columns/")
        }
        self._storage.note_rows(self.record.folder, rows, is_final=self.record.is_sealed)

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

    def pages_per_chunk(self, path: str, page_rows: int) -> int:
        """How many pages of a cache a chunk has; 1 if the stream lacks the field."""
        return (self.chunk_rows(path) or page_rows) // page_rows

    def fill(self, path: str, out: Array) -> bool:
        """Write the fill value to ``out`` if the stream lacks the field; returns whether it does."""
        row = self._fill_rows.get(path)
        if row is not None:
            out[...] = row
        return row is not None

    def read_rows(self, path: str, start: int, stop: int, recent: RecentChunks | None = None) -> Array:
        """Read committed rows ``[start, stop)`` of an array into a new array.

        Args:
            path: The array.
            start: First row.
            stop: Row after the last.
            recent: Chunks that earlier reads with this record began or ended in; gets those of this read. Not for
                derived columns, whose chunks are overwritten.

        Raises:
            IndexError: The array does not have these rows.
            CorruptionError: A chunk is damaged or missing.
        """
        n = self.record.length(path)
        if not 0 <= start <= stop <= n:
            raise IndexError(f"{self._name(path)}: rows {start} to {stop}, but it has {n} rows")
        if (row := self._fill_rows.get(path)) is not None:
            return np.broadcast_to(row, (stop - start, *row.shape)).copy()
        layout, recent = self.record.layouts[path], recent or RecentChunks()
        if start == stop:
            return np.empty((0, *layout.row_shape), layout.dtype)
        if layout.shard_rows is not None:
            return self._read_sharded_rows(path, layout, start, stop, recent)
        first, last = start // layout.chunk_rows, (stop - 1) // layout.chunk_rows
        # The length comes from metadata: read the last chunk before allocating memory for all of them.
        tail = self._load(path, layout, last, recent)
        out = np.empty((stop - start, *layout.row_shape), layout.dtype)

        def place(index: int) -> None:
            self._place(path, layout, index, out, start, recent)

        _copy_chunk(layout, last, tail, out, start)
        for wave in range(first, last, _WAVE_CHUNKS):
            self._storage.map(place, range(wave, min(last, wave + _WAVE_CHUNKS)))
        return out

    def _place(
        self, path: str, layout: ArrayLayout, index: int, out: Array, start: int, recent: RecentChunks
    ) -> None:
        low = index * layout.chunk_rows - start
        if low >= 0 and low + layout.chunk_rows <= len(out):
            with self._named(path, layout, index):
                layout.decode(self._scanned_bytes(path, layout, index, recent), out[low : low + layout.chunk_rows])
        else:
            _copy_chunk(layout, index, self._load(path, layout, index, recent), out, start)

    def _scanned_bytes(
        self, path: str, layout: ArrayLayout, index: int, recent: RecentChunks
    ) -> bytes | memoryview:
        data = recent.take_encoded((self.record.folder, path, index))
        return self._chunk_bytes(path, layout, index) if data is None else data

    def _read_sharded_rows(
        self, path: str, layout: ArrayLayout, start: int, stop: int, recent: RecentChunks
    ) -> Array:
        """The same for a sharded array: one request for a shard, or few."""
        first, end = start // layout.chunk_rows, -(-stop // layout.chunk_rows)
        known = recent.get((self.record.folder, path, first))
        if known is not None and end == first + 1:
            return known[start - first * layout.chunk_rows : stop - first * layout.chunk_rows].copy()
        parts = list(pieces(layout, first + (known is not None), end))
        chunks = self._scan_piece(path, layout, last := parts.pop(), recent)
        tail = self._decode_new(path, layout, end - 1, chunks.pop())  # before memory is allocated, as above
        recent.put((self.record.folder, path, end - 1), tail)
        out = np.empty((stop - start, *layout.row_shape), layout.dtype)
        _copy_chunk(layout, end - 1, tail, out, start)
        if known is not None:
            _copy_chunk(layout, first, known, out, start)

        def place_some(task: int) -> None:
            for i in range(task, len(chunks), _DECODE_TASKS):
                self._place_encoded(path, layout, last.start + i, chunks[i], out, start)

        def place_part(part: ShardPiece) -> None:
            for index, data in enumerate(self._scan_piece(path, layout, part, recent), part.start):
                self._place_encoded(path, layout, index, data, out, start)

        self._storage.map(place_some, range(min(_DECODE_TASKS, len(chunks))))
        for wave in range(0, len(parts), _WAVE_SHARDS):
            self._storage.map(place_part, parts[wave : wave + _WAVE_SHARDS])
        return out

    def _place_encoded(
        self, path: str, layout: ArrayLayout, index: int, data: memoryview, out: Array, start: int
    ) -> None:
        low = index * layout.chunk_rows - start
        if low >= 0 and low + layout.chunk_rows <= len(out):
            self.decode_chunk(path, index, data, out[low : low + layout.chunk_rows])
        else:
            _copy_chunk(layout, index, self._decode_new(path, layout, index, data), out, start)

    def _scan_piece(
        self, path: str, layout: ArrayLayout, piece: ShardPiece, recent: RecentChunks
    ) -> list[memoryview]:
        """The encoded chunks of a piece; only those that were not fetched ahead are read."""
        folder = self.record.folder
        found = {i: recent.take_encoded((folder, path, i)) for i in range(piece.start, piece.stop)}
        for gap in piece.gaps([i for i, data in found.items() if data is None]):
            found.update(zip(range(gap.start, gap.stop), self._read_piece(path, layout, gap), strict=True))
        return [data for data in found.values() if data is not None]

    def _read_piece(self, path: str, layout: ArrayLayout, piece: ShardPiece) -> list[memoryview]:
        """The encoded chunks of a piece."""
        if self._storage.can_map:
            return self._map_piece(path, layout, piece)
        key, last = self._key(path, layout, piece.start), piece.stop - 1
        try:
            with self._named(path, layout, piece.start):
                chunks = piece.read(self._storage, key, layout, lambda: self._shard_index(path, layout, last)[0])
        except ChunkError as error:
            if isinstance(error.__cause__, ImpossibleChunkError):
                with self._named(path, layout, error.__cause__.number):
                    raise error.__cause__ from None
            raise
        if piece.stop * layout.chunk_rows > self.record.length(path) and not is_intact(chunks[-1]):
            # The writer may have replaced the part-filled chunk since the index was read.
            with self._named(path, layout, last):
                chunks[-1] = memoryview(self._chunk_bytes(path, layout, last))
        return chunks

    def _map_piece(self, path: str, layout: ArrayLayout, piece: ShardPiece) -> list[memoryview]:
        mapped = self.map_object(path, piece.start // layout.chunks_per_shard)
        assert mapped is not None  # every object can be mapped
        places = [self.find_chunk(path, index, mapped) for index in range(piece.start, piece.stop)]
        mapped.file.prefetch(min(places)[0], max(stop for _, stop in places))
        return [mapped.chunk(*place, is_raw=layout.is_raw) for place in places]

    def _decode_new(self, path: str, layout: ArrayLayout, index: int, data: memoryview) -> Array:
        with self._named(path, layout, index):
            return layout.decode_new(data)

    def read_chunks(self, path: str, piece: ShardPiece) -> list[memoryview]:
        """Read neighbouring chunks, still encoded: of one shard, or objects of their own.

        Raises:
            StorageError: Reading failed.
            CorruptionError: A chunk is missing, or the index of the shard is damaged.
        """
        layout = self.record.layouts[path]
        if layout.shard_rows is not None:
            return self._read_piece(path, layout, piece)
        keys = [self._key(path, layout, i) for i in range(piece.start, piece.stop)]
        return [memoryview(data) for data in self._storage.get_many(keys)]

    def read_unmapped(
        self, path: str, piece: ShardPiece, room: Callable[[int], memoryview]
    ) -> Iterator[memoryview]:
        """Read neighbouring chunks of one shard, still encoded; each is valid until the next one is asked for.

        A disk that can't read them raises; as mapped files, they would end the process. A part-filled chunk may
        have been replaced since the index of the shard was read.

        Args:
            path: The array.
            piece: The chunks.
            room: Gives memory of a size, which the next call may give again.

        Raises:
            StorageError: Reading failed.
            CorruptionError: The index of the shard is damaged.
        """
        layout = self.record.layouts[path]
        key, index = self._key(path, layout, piece.start), self._shard_index(path, layout, piece.stop - 1)[0]
        return piece.read_one_by_one(
            layout, index, lambda a, b: self._storage.get_range_into(key, a, b, room(b - a))
        )

    def chunk(self, path: str, index: int, buffer: bytearray) -> memoryview:
        """Read one chunk, still encoded. The result is valid until ``buffer`` is used again."""
        layout = self.record.layouts[path]
        with self._named(path, layout, index):
            if layout.shard_rows is None:
                return self._storage.get_into(self._key(path, layout, index), buffer)
            return memoryview(self._chunk_bytes(path, layout, index))

    def index_place(self, path: str, index: int) -> Place | None:
        """Where the index is stored that must be read to find a chunk; None if there is none, or it is known.

        Indexes at the end of shards are not named: their place depends on the size of the shard.
        """
        layout = self.record.layouts.get(path)
        if layout is None or layout.shard_rows is None or not layout.index_at_start:
            return None
        if self._shard_indexes.known(path, layout, index, self.record.length(path)) is not None:
            return None
        return self._key(path, layout, index), 0, layout.shard_index_bytes

    def set_index(self, path: str, index: int, data: Data) -> None:
        """Note the index of the shard that holds a chunk, as it was read from `index_place`.

        Raises:
            ChunkError: It is damaged.
        """
        layout = self.record.layouts[path]
        with self._named(path, layout, index):
            self._shard_indexes.learn(path, layout, index, self.record.length(path), data)

    def chunk_place(self, path: str, index: int) -> tuple[Place, bool] | None:
        """Where a chunk is stored, and whether it stays there; None if that is not known without a request.

        A part-filled chunk of a shard may be elsewhere after the next commit: check it before you use it.
        """
        layout = self.record.layouts.get(path)
        if layout is None:
            return None
        key = self._key(path, layout, index)
        if layout.shard_rows is None:
            return (key, 0, None), True
        if self._shard_indexes.known(path, layout, index, self.record.length(path)) is None:
            return None
        with self._named(path, layout, index):
            (start, stop), is_final = self._place_in_shard(path, layout, index)
        return (key, start, stop), is_final

    def can_map(self, path: str) -> bool:
        """Whether chunks of an array may be mapped with `map_object`: they are raw, in files of this machine."""
        layout = self.record.layouts.get(path)
        return layout is not None and layout.is_raw and self._storage.may_map

    def can_map_blocks(self, path: str) -> bool:
        """Whether single blocks of the chunks of an array can be decoded where they are mapped."""
        layout = self.record.layouts.get(path)
        return layout is not None and layout.has_blocks and self._storage.may_map and zstd_library() is not None

    def are_shards_mapped(self, path: str) -> bool:
        """Whether chunks of an array should be read from mapped shards."""
        layout = self.record.layouts.get(path)
        return layout is not None and layout.shard_rows is not None and self._storage.can_map

    def object_number(self, path: str, index: int) -> int:
        """The number of the object that holds a chunk of an array."""
        return index // self.record.layouts[path].chunks_per_shard

    def map_object(self, path: str, number: int) -> MappedObject | None:
        """Map an object of an array; None if no file of this machine has all of it. No chunk is read or checked."""
        layout = self.record.layouts[path]
        first = number * layout.chunks_per_shard
        with self._named(path, layout, first):
            file = self._storage.map_if_local(self._key(path, layout, first))
            if file is None:
                return None
            if layout.shard_rows is None:
                return MappedObject(file, np.array([[0, file.size]], np.uint64))
            n_bytes = layout.shard_index_bytes
            start = 0 if layout.index_at_start else max(0, file.size - n_bytes)
            return MappedObject(file, layout.decode_shard_index(bytes(file.view(start, start + n_bytes))))

    def find_chunk(self, path: str, index: int, mapped: MappedObject) -> tuple[int, int]:
        """Where a chunk begins and ends in its mapped object, its checksum included."""
        layout = self.record.layouts[path]
        start, size = (int(n) for n in mapped.index[index % layout.chunks_per_shard])
        with self._named(path, layout, index):
            layout.check_place(start, size, mapped.file.size)
        return start, start + size

    def check_chunk(self, path: str, index: int, data: memoryview) -> None:
        """Check the checksum of a chunk that was mapped.

        Raises:
            ChunkError: It does not match.
        """
        layout = self.record.layouts[path]
        with self._named(path, layout, index):
            layout.codec.check(data, layout.chunk_bytes)

    def block_bytes(self, path: str, index: int, data: memoryview) -> int:
        """Decoded size of the blocks of a chunk that was checked; see `can_map_blocks`.

        Raises:
            ChunkError: It does not consist of such blocks.
        """
        layout = self.record.layouts[path]
        with self._named(path, layout, index):
            return check_blocks(data)

    def decode_chunk(self, path: str, index: int, data: bytes | memoryview, out: Array) -> None:
        """Decode the result of `chunk` into ``out``, a contiguous array of one chunk."""
        layout = self.record.layouts[path]
        with self._named(path, layout, index):
            layout.decode(data, out)

    def _load(self, path: str, layout: ArrayLayout, index: int, recent: RecentChunks) -> Array:
        key = (self.record.folder, path, index)
        if (known := recent.get(key)) is not None:
            return known
        with self._named(path, layout, index):
            chunk = layout.decode_new(self._scanned_bytes(path, layout, index, recent))
        recent.put(key, chunk)
        return chunk

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
            key = self._key(path, layout, index)
            raise ChunkError(f"{name}: {error}", self.record.id, *rows, key) from error

    def _chunk_bytes(self, path: str, layout: ArrayLayout, index: int) -> bytes:
        key = self._key(path, layout, index)
        if layout.shard_rows is None:
            return self._storage.get(key)
        place, is_final = self._place_in_shard(path, layout, index)
        while True:
            data = self._storage.get_range(key, *place)
            if is_final or is_intact(data):
                return data
            # The writer may have replaced the shard since its index was read. Damage is what stays in its place.
            before, (place, is_final) = place, self._place_in_shard(path, layout, index, is_fresh=True)
            if place == before:
                return self._storage.get_range(key, *place)

    def _place_in_shard(
        self, path: str, layout: ArrayLayout, index: int, *, is_fresh: bool = False
    ) -> tuple[tuple[int, int], bool]:
        """Where a chunk lies in its shard, and whether it stays there: a part-filled chunk changes with commits."""
        places, n_rows = self._shard_index(path, layout, index, is_fresh=is_fresh)
        offset, size = (int(n) for n in places[index % layout.chunks_per_shard])
        layout.check_place(offset, size)
        return (offset, offset + size), n_rows >= (index + 1) * layout.chunk_rows

    def _shard_index(
        self, path: str, layout: ArrayLayout, index: int, *, is_fresh: bool = False
    ) -> tuple[Array, int]:
        """The index of the shard that holds a chunk, and how many rows the array had when it was read."""
        length = self.record.length(path)
        known = None if is_fresh else self._shard_indexes.known(path, layout, index, length)
        if known is not None:
            return known
        return self._shard_indexes.read(path, layout, index, length, self._key(path, layout, index))

    def read_spans(self, start: int = 0, rows: tuple[Array, Array] | None = None) -> Spans:
        """Read and check the spans from ``start`` on; ``rows`` of `SPAN_ARRAYS` are given if they were read."""
        ints, floats = rows or (self.read_rows(path, start, self.record.spans) for path in SPAN_ARRAYS)
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

    def _key(self, path: str, layout: ArrayLayout, index: int) -> str:
        """Key of the object that holds a chunk."""
        return f"{self.record.folder}/{path}/{layout.chunk_key(index)}"

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
