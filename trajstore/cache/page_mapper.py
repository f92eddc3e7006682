"""Maps pages from files, so that batches copy rows from the page cache of the system.

Pages are mapped if columns are raw, or if their chunks consist of blocks that can be decoded alone. Every chunk is
checked against its checksum once, before any of its rows are used.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trajstore.cache.block_decoders import BLOCKED, BlockDecoders
from trajstore.cache.cache_stats import CacheStats
from trajstore.cache.column_pages import ColumnPages
from trajstore.cache.object_maps import ObjectMaps
from trajstore.errors import CorruptionError
from trajstore.format.codec import CRC_BYTES
from trajstore.schema import Array
from trajstore.storage import FileMap, Storage
from trajstore.store.stream_reader import ChunkError, StreamReader

_MIN_TASK_BYTES = 1 << 20  # a thread checks at least this many bytes
_N_CPUS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class _MappedChunk:
    """A chunk in a mapped file: the bytes ``[start, stop)`` of it, checksum included."""

    reader: StreamReader
    number: int
    file: FileMap
    start: int
    stop: int
    has_blocks: bool


class PageMapper:
    """Maps and checks pages. Not thread-safe: its owner calls it with a lock held, and reads pages with it held.

    Args:
        storage: Its threads check chunks.
        maps: The mapped objects.
        decoders: Gets room for the blocks of mapped chunks.
        stats: Where mapped pages and bytes are counted.
    """

    def __init__(self, storage: Storage, maps: ObjectMaps, decoders: BlockDecoders, stats: CacheStats) -> None:
        self._storage = storage
        self._maps = maps
        self._decoders = decoders
        self._stats = stats

    def map_pages(self, column: ColumnPages, readers: Sequence[StreamReader | None], pages: Array) -> Array:
        """Map absent pages of a column, and check the chunks that hold them.

        Returns:
            Those of the pages that are in no file of this machine: they need slots.

        Raises:
            ChunkError: A chunk is damaged or missing. No page of the column is mapped then, so that a file is read
                again if it was replaced by a good one.
        """
        start = time.perf_counter()
        try:
            chunks, addresses, sizes = self._find(column, readers, pages)
            self._check(column.path, chunks)
        except BaseException as error:
            column.table.forget_mapped(np.arange(column.table.n_pages))
            self._maps.drop_field(column.path)
            if isinstance(error, ChunkError) and self._storage.drop_local(error.key):
                return self.map_pages(column, readers, pages)
            raise
        found = addresses != 0
        column.table.set_mapped(pages[found], addresses[found], sizes[found])
        self._stats.misses += int(found.sum())
        self._stats.bytes_read += sum(chunk.stop - chunk.start for chunk in chunks)
        self._stats.seconds["load"] += time.perf_counter() - start
        absent: Array = pages[~found]
        return absent

    def _find(
        self, column: ColumnPages, readers: Sequence[StreamReader | None], pages: Array
    ) -> tuple[list[_MappedChunk], Array, Array]:
        """Return the chunks that hold pages, the memory address of each page, and the bytes of its chunk.

        The address of a page that is in no file of this machine is 0.
        """
        source, page = column.table.locate(pages)
        chunks: dict[tuple[int, int], _MappedChunk | None] = {}
        addresses, sizes = np.zeros((2, len(pages)), np.int64)
        for i, (s, p) in enumerate(zip(source.tolist(), page.tolist(), strict=True)):
            reader = readers[s]
            assert reader is not None  # the index has rows of this stream, so it exists
            pages_per_chunk = reader.pages_per_chunk(f"steps/{column.path}", column.page_rows)
            number, position = divmod(p, pages_per_chunk)
            if (s, number) not in chunks:
                chunks[s, number] = self._map(reader, column.path, number)
            if (chunk := chunks[s, number]) is None:
                continue
            at = 0 if chunk.has_blocks else position * column.page_bytes
            sizes[i] = chunk.stop - chunk.start - CRC_BYTES
            addresses[i] = chunk.file.address + chunk.start + at + (BLOCKED if chunk.has_blocks else 0)
        return [chunk for chunk in chunks.values() if chunk is not None], addresses, sizes

    def _map(self, reader: StreamReader, path: str, number: int) -> _MappedChunk | None:
        mapped = self._maps.get(reader, path, number)
        if mapped is None:
            return None
        start, stop = reader.find_chunk(f"steps/{path}", number, mapped)
        mapped.file.prefetch(start, stop)  # the disk reads all chunks of the batch at once
        has_blocks = reader.can_map_blocks(f"steps/{path}")
        return _MappedChunk(reader, number, mapped.file, start, stop, has_blocks)

    def _check(self, path: str, chunks: Sequence[_MappedChunk]) -> None:
        n_bytes = sum(chunk.stop - chunk.start for chunk in chunks)
        n_tasks = max(1, min(_N_CPUS, len(chunks), n_bytes // _MIN_TASK_BYTES))

        def check_part(task: int) -> None:
            for chunk in chunks[task::n_tasks]:
                data = chunk.file.view(chunk.start, chunk.stop)
                chunk.reader.check_chunk(f"steps/{path}", chunk.number, data)

        self._storage.map(check_part, range(n_tasks))
        blocked = [chunk for chunk in chunks if chunk.has_blocks]
        for chunk in blocked:
            data = chunk.file.view(chunk.start, chunk.stop)
            self._decoders.reserve(chunk.reader.block_bytes(f"steps/{path}", chunk.number, data))

    def find_damage(self, column: ColumnPages, readers: Sequence[StreamReader | None], pages: Array) -> None:
        """Read the chunks of mapped pages again, one of which could not be decoded; see `map_pages`."""
        mapped = pages[(column.table.slots(pages) < 0) & ~column.table.are_absent(pages)]
        column.table.forget_mapped(np.arange(column.table.n_pages))
        chunks, _, _ = self._find(column, readers, mapped)
        path = f"steps/{column.path}"
        for chunk in chunks:
            out = np.empty(column.page_bytes, np.uint8)
            encoded = bytes(chunk.file.view(chunk.start, chunk.stop))
            try:
                chunk.reader.decode_chunk(path, chunk.number, encoded, out)
            except ChunkError as error:
                if not self._storage.drop_local(error.key):
                    raise
        raise CorruptionError(
            f"field '{column.path}': a mapped chunk changed after it was checked, and is whole again; draw again"
        )
