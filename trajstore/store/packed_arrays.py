"""Writes the arrays of a stream again as a few large shards, one shard at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from trajstore.errors import CorruptionError
from trajstore.format.array_layout import MAX_CHUNK_BYTES, MAX_SHARD_CHUNKS, ArrayLayout, chunk_bytes_for
from trajstore.format.codec import CRC_BYTES, Codec, crc32c
from trajstore.format.commit_record import CommitRecord
from trajstore.format.shard import assemble_shard
from trajstore.schema import Array
from trajstore.storage import UNSEEN, Storage
from trajstore.store.stream_reader import StreamReader

SHARD_BYTES = 128 << 20

Pause = Callable[[], None]  # called after every few chunks; may wait, and stops the packing by raising


@dataclass(frozen=True, slots=True)
class PackSettings:
    """How the arrays of a packed stream are laid out.

    Attributes:
        shard_bytes: Size of a shard object, about: it is estimated from the size of the stored objects.
        chunk_bytes: Decoded size of a chunk inside a shard, at most; None: as writers choose it. Fields whose
            schema fixes the rows of a chunk keep these.
        codecs: By field path: the codec. Other fields keep theirs.
    """

    shard_bytes: int = SHARD_BYTES
    chunk_bytes: int | None = None
    codecs: Mapping[str, Codec] = field(default_factory=dict)


def packed_layouts(
    record: CommitRecord, sizes: Mapping[str, int], first: int, settings: PackSettings
) -> dict[str, ArrayLayout]:
    """The layouts of a packed stream, by array path.

    Args:
        record: The stream to pack.
        sizes: Bytes of its stored objects, by array path.
        first: First row that is packed.
        settings: Sizes and codecs.
    """
    layouts = {}
    for path, layout in record.layouts.items():
        start = first if path.startswith("steps/") else 0
        chunked = _rechunked(record, path, layout, settings) if path.startswith("steps/") else layout
        n_rows = record.length(path)
        decoded = (n_rows - start) * layout.row_bytes
        ratio = min(1.0, max(sizes.get(path, 0), 1) / decoded) if decoded else 1.0
        layouts[path] = _sharded(chunked, n_rows, ratio, settings.shard_bytes)
    return layouts


def _rechunked(record: CommitRecord, path: str, layout: ArrayLayout, settings: PackSettings) -> ArrayLayout:
    name = path.removeprefix("steps/")
    rows, codec = layout.chunk_rows, settings.codecs.get(name, layout.codec)
    if settings.chunk_bytes is not None or record.schema[name].chunk_rows is None:
        default = chunk_bytes_for(layout.row_bytes, is_compressed=codec.name != "none")
        rows = _scaled_rows(rows, layout.row_bytes, min(settings.chunk_bytes or default, MAX_CHUNK_BYTES))
    if codec.blocksize == layout.chunk_bytes:  # one block for each chunk
        codec = replace(codec, blocksize=rows * layout.row_bytes)
    return replace(layout, chunk_rows=rows, codec=codec)


def _scaled_rows(rows: int, row_bytes: int, target: int) -> int:
    """Rows of a chunk of at most ``target`` bytes: the old number, doubled or halved.

    A cache pages all streams by the largest common divisor of their chunks, so other factors would cost speed.
    """
    while rows % 2 == 0 and rows * row_bytes > target:
        rows //= 2
    while 2 * rows * row_bytes <= target:
        rows *= 2
    return rows


def _sharded(layout: ArrayLayout, n_rows: int, ratio: float, shard_bytes: int) -> ArrayLayout:
    n_all = max(1, -(-n_rows // layout.chunk_rows))
    n_chunks = round(shard_bytes / (layout.chunk_bytes * ratio + CRC_BYTES))
    n_chunks = max(1, min(n_chunks, n_all, MAX_SHARD_CHUNKS))
    return replace(layout, shard_rows=layout.chunk_rows * n_chunks, index_at_start=True)


def n_objects(layout: ArrayLayout, n_rows: int, first: int) -> int:
    """Number of objects that hold the rows from ``first`` to ``n_rows`` of an array."""
    size = layout.shard_rows or layout.chunk_rows
    return max(0, -(-n_rows // size) - first // size) if first < n_rows else 0


class ArrayPacker:
    """Writes one array of a stream as shards; holds one shard at a time, as encoded chunks and as an object.

    Args:
        storage: Storage of the store.
        reader: Reads the stream.
        path: The array.
        layout: The layout to write.
        first: Rows below are not copied: their objects may be gone.
        folder: Key prefix of the packed stream.
        pause: If given, chunks are read and encoded one after the other in the calling thread, with this between.
    """

    def __init__(
        self,
        storage: Storage,
        reader: StreamReader,
        path: str,
        layout: ArrayLayout,
        first: int,
        folder: str,
        *,
        pause: Pause | None = None,
    ) -> None:
        self._pause = pause
        self._storage, self._reader, self._path, self._layout = storage, reader, path, layout
        self._source = reader.record.layouts[path]
        self._n_rows = reader.record.length(path)
        self._first = min(first, self._n_rows)
        self._folder = folder
        is_same = (self._source.chunk_rows, self._source.codec) == (layout.chunk_rows, layout.codec)
        self._encoded = self._stored_chunks if is_same else self._new_chunks
        # Whole chunks of both layouts, so that none is read twice.
        larger, smaller = sorted((layout.chunk_rows, self._source.chunk_rows), reverse=True)
        self._block_rows = larger if larger % smaller == 0 else layout.chunk_rows

    def write(self, packed: Callable[[int], None]) -> int:
        """Put all shards; returns their size. Calls ``packed`` after each with the number of rows in it."""
        size, n_bytes = self._layout.shard_rows or self._layout.chunk_rows, 0
        if self._first >= self._n_rows:
            return 0
        for shard in range(self._first // size, -(-self._n_rows // size)):
            start, stop = shard * size, min(self._n_rows, (shard + 1) * size)
            data = assemble_shard(self._layout, self._chunks(start, stop))
            name = self._layout.chunk_key(shard * self._layout.chunks_per_shard)
            self._storage.put(f"{self._folder}/{self._path}/{name}", data, UNSEEN)
            n_bytes += len(data)
            packed(stop - max(start, self._first))
        return n_bytes

    def _chunks(self, start: int, stop: int) -> list[bytes | None]:
        """The encoded chunks of rows ``[start, stop)``, in order; None below the first row that is copied."""
        size = self._layout.chunk_rows
        n_absent = max(0, self._first - start) // size
        blocks = [
            (low, min(stop, low + self._block_rows))
            for low in range(start + n_absent * size, stop, self._block_rows)
        ]
        if self._pause is None:
            encoded = self._storage.map(lambda block: self._encoded(*block), blocks)
        else:
            encoded = list(self._in_turn(blocks, self._pause))
        return [*[None] * n_absent, *(chunk for block in encoded for chunk in block)]

    def _in_turn(self, blocks: list[tuple[int, int]], pause: Pause) -> Iterator[list[bytes]]:
        for block in blocks:
            yield self._encoded(*block)
            pause()

    def _stored_chunks(self, start: int, stop: int) -> list[bytes]:
        """Chunks as they are stored, after a check of their checksums."""
        size, chunks = self._layout.chunk_rows, []
        for index in range(start // size, -(-stop // size)):
            data = bytes(self._reader.chunk(self._path, index, bytearray()))
            body = memoryview(data)[:-CRC_BYTES]
            if crc32c(body).to_bytes(CRC_BYTES, "little") != data[-CRC_BYTES:]:
                self._reader.read_rows(self._path, index * size, index * size + 1)  # raises, and names the chunk
                raise CorruptionError(f"array '{self._path}', chunk {index}: checksum does not match")
            chunks.append(data)
        return chunks

    def _new_chunks(self, start: int, stop: int) -> list[bytes]:
        rows = self._rows(start, stop)
        size = self._layout.chunk_rows
        return [self._layout.encode(rows[low : low + size]) for low in range(0, stop - start, size)]

    def _rows(self, start: int, stop: int) -> Array:
        """Rows from ``start`` on, in whole new chunks; zeros where none are copied."""
        size, step = self._layout.chunk_rows, self._source.chunk_rows
        n_chunks = -(-(stop - start) // size)
        chunk = self._layout.empty_chunk()
        rows = chunk if n_chunks == 1 else chunk.repeat(n_chunks, 0)
        low = max(start, self._first)
        while low < stop:  # one chunk at a time: reading several would use the threads that call this
            high = min(stop, (low // step + 1) * step)
            rows[low - start : high - start] = self._reader.read_rows(self._path, low, high)
            low = high
        return rows
