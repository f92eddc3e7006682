"""Reads chunks from storage or from the tier of compressed chunks, and decodes them in threads."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from trajstore.cache.cache_stats import CacheStats
from trajstore.cache.column_pages import ColumnPages
from trajstore.cache.compressed_tier import ChunkKey, CompressedTier
from trajstore.cache.object_maps import ObjectMaps
from trajstore.errors import CorruptionError, StorageError
from trajstore.format.codec import is_intact
from trajstore.schema import Array
from trajstore.storage import Storage
from trajstore.store.read_ahead import ReadAhead
from trajstore.store.stream_reader import ChunkError, StreamReader

_N_CPUS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
_WAVE_BYTES = 128 << 20  # of encoded chunks that are held in memory at once when they come over a network
_MIN_TASK_CHUNKS = 4  # a thread gets at least this many chunks

StoredChunk = tuple[StreamReader, str, int]  # the reader of its stream, path of the field, chunk number
Job = TypeVar("Job")


class DecodeBuffers:
    """Memory that one thread uses again for every chunk that it reads."""

    def __init__(self) -> None:
        self.encoded = bytearray()
        self._pages: dict[tuple[str, int], Array] = {}

    def pages(self, column: ColumnPages, n_pages: int) -> Array:
        """Return memory for one decoded chunk of a column."""
        pages = self._pages.get((column.path, n_pages))
        if pages is None or pages.shape[1] != column.page_rows:
            pages = self._pages[column.path, n_pages] = column.arena.new_host_pages(n_pages)
        return pages


class ChunkFetcher:
    """Fetches and decodes chunks.

    Args:
        storage: Reads objects, and lends its threads.
        tier: Compressed chunks in RAM.
        maps: Mapped objects; chunks of shards in local files are read from them.
        stats: Where reads and decoded bytes are counted.

    Attributes:
        scans: What fetches chunks ahead of scans.
    """

    def __init__(self, storage: Storage, tier: CompressedTier, maps: ObjectMaps, stats: CacheStats) -> None:
        self._storage = storage
        self._maps = maps
        self._tier = tier
        self._stats = stats
        self._counting = threading.Lock()
        self._idle_buffers: list[DecodeBuffers] = []  # one for each thread that has worked
        self._fetched: dict[ChunkKey, memoryview] = {}  # chunks of the current wave that are not decoded yet
        self.scans: weakref.WeakSet[ReadAhead] = weakref.WeakSet()

    def for_each(
        self,
        jobs: Sequence[Job],
        work: Callable[[Job, DecodeBuffers], None],
        chunk_of: Callable[[Job], StoredChunk],
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Call ``work(job, buffers)`` for every job, in threads.

        ``work`` calls `decode` for the chunk that ``chunk_of`` returns. If the storage is remote, the encoded
        chunks are fetched first, many at a time, and ``meanwhile`` is called during the first wave.
        """
        if not self._storage.is_remote:
            self._run(jobs, work)
            return
        chunks = [chunk_of(job) for job in jobs]
        for wave in _waves(chunks):
            with _beside(meanwhile):
                self._fetch(chunks[wave])
            meanwhile = None
            try:
                self._run(jobs[wave], work)
            finally:
                self._fetched.clear()

    def _fetch(self, chunks: Sequence[StoredChunk]) -> None:
        """Read encoded chunks that the compressed tier does not have, all at once.

        Those that are being fetched ahead are waited for.
        """
        wanted = [
            (reader, f"steps/{path}", number, key)
            for reader, path, number in chunks
            if (key := (reader.record.folder, path, number)) not in self._tier
        ]
        ahead = {
            key: scan
            for reader, array, number, key in wanted
            for scan in self.scans
            if (reader.record.folder, array, number) in scan
        }
        self._fetch_now([chunk for chunk in wanted if chunk[3] not in ahead])
        for (folder, path, number), scan in ahead.items():
            data = scan.take((folder, f"steps/{path}", number))
            if data is not None:
                self._fetched[folder, path, number] = data

    def _fetch_now(self, wanted: Sequence[tuple[StreamReader, str, int, ChunkKey]]) -> None:
        try:
            self._fetch_indexes([(reader, array, number) for reader, array, number, _ in wanted])
            found = [(key, *p) for reader, array, number, key in wanted if (p := reader.chunk_place(array, number))]
            read = self._storage.get_ranges([place for _, place, _ in found])
        except (OSError, StorageError, CorruptionError):
            return  # `decode` reads each chunk alone, and its error says which chunk failed
        for (key, _, stays), data in zip(found, read, strict=True):
            if stays or is_intact(data):  # else a commit has moved the chunk, and `decode` finds it
                self._fetched[key] = memoryview(data)

    def _fetch_indexes(self, chunks: Sequence[StoredChunk]) -> None:
        """Read the indexes of shards that are not known yet, all at once."""
        places = {
            place: (reader, array, number)
            for reader, array, number in chunks
            if (place := reader.index_place(array, number)) is not None
        }
        for data, (reader, array, number) in zip(
            self._storage.get_ranges(list(places)), places.values(), strict=True
        ):
            reader.set_index(array, number, data)

    def _run(self, jobs: Sequence[Job], work: Callable[[Job, DecodeBuffers], None]) -> None:
        # One task for each processor, because a task costs as much as decoding a chunk.
        n_tasks = min(len(jobs) // _MIN_TASK_CHUNKS, _N_CPUS) or 1

        def run_task(task: int) -> None:
            buffers = self._take_buffers()
            for job in jobs[task::n_tasks]:
                work(job, buffers)
            self._idle_buffers.append(buffers)

        self._storage.map(run_task, range(n_tasks))

    def _take_buffers(self) -> DecodeBuffers:
        try:
            return self._idle_buffers.pop()
        except IndexError:  # not asked before: another thread may take the last ones in between
            return DecodeBuffers()

    def _count(self, n_decoded: int, *, n_read: int = 0, n_host_hits: int = 0) -> None:
        with self._counting:  # several threads decode at a time
            self._stats.bytes_decoded += n_decoded
            self._stats.bytes_read += n_read
            self._stats.host_hits += n_host_hits

    def decode(self, chunk: StoredChunk, encoded: bytearray, out: Array) -> None:
        """Decode a chunk into ``out``, from the compressed tier or from storage.

        ``encoded`` is memory that the encoded chunk may be read into.

        Raises:
            ChunkError: The chunk is damaged or missing.
        """
        reader, path, number = chunk
        key, array = (reader.record.folder, path, number), f"steps/{path}"
        if reader.fill(array, out):
            return
        kept = self._tier.get(key) if self._tier.budget else None
        if kept is not None:
            reader.decode_chunk(array, number, kept, out)
            self._count(out.nbytes, n_host_hits=1)
            return
        fetched = self._fetched.pop(key, None)
        if reader.are_shards_mapped(array):
            data = self._decode_mapped(chunk, out)
        else:
            data = reader.chunk(array, number, encoded) if fetched is None else fetched
            reader.decode_chunk(array, number, data, out)
        self._count(out.nbytes, n_read=len(data))
        if self._tier.budget:  # after decoding: only chunks that passed their checksum are kept
            self._tier.put(key, data, is_shared=fetched is None or _is_part(fetched))

    def _decode_mapped(self, chunk: StoredChunk, out: Array) -> memoryview:
        """Decode a chunk of a mapped shard into ``out``; returns the encoded chunk."""
        reader, path, number = chunk
        array = f"steps/{path}"
        mapped = self._maps.get(reader, path, number)  # also keeps it mapped during this call
        assert mapped is not None  # this is not called for copies of objects
        try:
            data = mapped.chunk(*reader.find_chunk(array, number, mapped), is_raw=reader.can_map(array))
            reader.decode_chunk(array, number, data, out)
        except ChunkError:  # the file may be replaced by a good one
            self._maps.drop(reader.record.folder, path, reader.object_number(array, number))
            raise
        return data


@contextlib.contextmanager
def _beside(call: Callable[[], None] | None) -> Iterator[None]:
    """Make a call in a thread while the block runs; both have ended at its end."""
    thread = threading.Thread(target=call, name="trajstore-cache", daemon=True)
    if call is not None:
        thread.start()
    try:
        yield
    finally:
        if call is not None:
            thread.join()


def _is_part(data: memoryview) -> bool:
    """Whether the memory that a view shows holds more than that."""
    return len(data) < memoryview(data.obj).nbytes


def _waves(chunks: Sequence[StoredChunk]) -> Iterator[slice]:
    """Cut chunks into waves of at most `_WAVE_BYTES`, as if no chunk were smaller for being compressed."""
    start, n_bytes = 0, 0
    for i, (reader, path, _) in enumerate(chunks):
        layout = reader.record.layouts.get(f"steps/{path}")
        size = 0 if layout is None else layout.chunk_bytes  # no layout: a field that the stream lacks
        if n_bytes + size > _WAVE_BYTES and i > start:
            yield slice(start, i)
            start, n_bytes = i, 0
        n_bytes += size
    yield slice(start, len(chunks))
