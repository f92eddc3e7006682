"""The chunk cache: decoded chunks of all columns on the training device, within one byte budget.

Every column has an arena of slots on the device and a page table that says which slot holds which page. A page is
a piece of a chunk, or a whole one. Finding missing pages, choosing pages to evict and gathering rows are operations
on whole batches. A column that fits its share of the budget has a slot for every page; once all of them are
resident, a gather needs nothing from the host. On the CPU, the pages of a column that does not fit are mapped from
their files if the column is stored raw, or in blocks that can be decoded alone: they take no slots, and are never
evicted. If at least half of such a column of blocks fits, that part of it is decoded and kept in slots.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType

import numpy as np
import torch

from trajstore.cache.block_decoders import BlockDecoders
from trajstore.cache.budget import share_budget, slots_without_maps
from trajstore.cache.cache_stats import CacheStats
from trajstore.cache.cache_version import CacheVersion
from trajstore.cache.chunk_fetcher import ChunkFetcher
from trajstore.cache.column_pages import ColumnPages
from trajstore.cache.compressed_tier import CompressedTier
from trajstore.cache.object_maps import TOUCH_S, ObjectMaps
from trajstore.cache.oversized_batches import OversizedBatches
from trajstore.cache.page_loader import PageLoader
from trajstore.cache.page_mapper import PageMapper
from trajstore.cache.page_table import MIN_STORED_SLOTS
from trajstore.cache.row_copier import DamagedBlockError, RowCopier
from trajstore.cache.row_request import RowRequest
from trajstore.cache.tensor_row_copier import TensorRowCopier
from trajstore.errors import DataError
from trajstore.format.array_layout import ArrayLayout
from trajstore.schema import Array, Schema, selected_paths
from trajstore.storage import Storage
from trajstore.store.chunk_requests import MAX_BYTES, request_chunks
from trajstore.store.read_ahead import ReadAhead
from trajstore.store.stream_reader import StreamReader

_COMPLETING_PAGES = 16  # pages that no batch asked for, loaded with a batch to complete a column


class ChunkCache:
    """Columns on the device, with a tier of compressed chunks in RAM behind them.

    Not thread-safe: its owner calls it with a lock held.

    Args:
        schema: The fields.
        device: Where the arenas are.
        budget: Bytes for all arenas together.
        host_budget: Bytes for compressed chunks in RAM.
        storage: Reads chunks; its threads decode and copy.
        live_rows: Number of rows that `write_live` can address.
        kernels: Compiled loops, for the CPU.

    Attributes:
        stats: Counters.
        tier: Compressed chunks in RAM.
        n_live_used: Live rows from this one on hold nothing. By default all may hold something; their owner lowers
            the number, so that the others take no memory.
    """

    def __init__(
        self,
        schema: Schema,
        device: torch.device,
        budget: int,
        host_budget: int,
        storage: Storage,
        *,
        live_rows: int = 0,
        kernels: ModuleType | None = None,
    ) -> None:
        self.stats = CacheStats()
        self.tier = CompressedTier(host_budget)
        self._schema = schema
        self._device = device
        self._budget = budget
        self._live_rows = live_rows
        self.n_live_used = live_rows
        self._kernels = kernels
        self._columns: dict[str, ColumnPages] = {}
        self._version = CacheVersion()
        self._live_columns: tuple[Mapping[str, int], Array] | None = None
        self._storage = storage
        self._has_copies = storage.may_map and not storage.can_map  # mapped files may be removed by others
        self._tend_at = 0.0
        self._maps = ObjectMaps()
        self._decoders = BlockDecoders()
        self._mapper = PageMapper(storage, self._maps, self._decoders, self.stats)
        self._marks: dict[str, int] = {}  # by stream: the first row whose files are still mapped
        self._fetcher = fetcher = ChunkFetcher(storage, self.tier, self._maps, self.stats)
        self._loader = PageLoader(fetcher, self.stats)
        self._oversized = OversizedBatches(self._loader, fetcher, self.stats, kernels)
        self._copier = TensorRowCopier() if kernels is None else RowCopier(kernels, storage, self._decoders)

    # ---- what the cache may hold

    def set_sources(
        self, readers: Sequence[StreamReader | None], marks: Sequence[int] = (), written: int = -1
    ) -> None:
        """Set the readers of all streams, and forget pages whose rows have changed.

        Args:
            readers: By stream number: the newest reader, or None if the stream is gone.
            marks: By source: the first row that was not evicted.
            written: The source whose new rows come from live rows, or -1. Its partly filled last page is not
                forgotten: `move_live` adds the rows that it lacks.
        """
        self._live_columns = None
        readers = [None, *readers]  # source 0 holds live rows
        self._drop_grown_chunks(readers)
        self._drop_grown_maps(readers)
        self._loader.readers = readers
        present = [reader for reader in readers if reader is not None]
        n_rows = [self._live_rows, *(reader.record.rows if reader else 0 for reader in readers[1:])]
        replaced: dict[str, ColumnPages] = {}
        for path, spec in self._schema.fields.items():
            chunk_rows = (reader.chunk_rows(f"steps/{path}") for reader in present)
            page_rows = math.gcd(*filter(None, chunk_rows)) or ArrayLayout.of(spec).chunk_rows
            column = self._columns.get(path)
            if column is None or column.page_rows != page_rows:
                if column is not None:
                    replaced[path] = column
                column = ColumnPages(
                    path, spec, page_rows, self._device, self._version, self._live_rows, self._kernels
                )
                self._columns[path] = column
            blocked = self._can_map_blocks(path, page_rows)
            can_map = self._can_map(path) | blocked
            column.note_blocks(bool(blocked.any()))
            column.may_need_slots, column.is_far = self._has_copies, self._storage.is_remote
            column.table.set_rows(n_rows, marks, written, can_map.tolist())
            column.n_live_used = self.n_live_used
        share_budget(self._columns.values(), self._budget)
        self._drop_evicted_maps(marks)
        for path, old in replaced.items():
            self._columns[path].adopt_live_rows(old, self.n_live_used)

    def _drop_grown_chunks(self, readers: Sequence[StreamReader | None]) -> None:
        """Drop partly filled chunks from the compressed tier if their streams have another length now."""
        for old, new in zip(self._loader.readers, readers, strict=False):
            if old is None or new is None or old.record.rows == new.record.rows:
                continue
            for path in self._schema.fields:
                if (chunk_rows := old.chunk_rows(f"steps/{path}")) is None:
                    continue
                chunk, n_filled = divmod(old.record.rows, chunk_rows)
                if n_filled:
                    self.tier.drop((old.record.folder, path, chunk))

    def _can_map(self, path: str) -> Array:
        """By source: whether pages of a field can be mapped from files and are raw."""
        readers, array = self._loader.readers if self._kernels is not None else [], f"steps/{path}"
        return np.array([reader is not None and reader.can_map(array) for reader in readers], bool)

    def _can_map_blocks(self, path: str, page_rows: int) -> Array:
        """By source: whether pages of a field can be mapped and decoded in blocks; they are whole chunks then."""
        readers, array = self._loader.readers if self._kernels is not None else [], f"steps/{path}"
        return np.array(
            [
                reader is not None and reader.can_map_blocks(array) and reader.chunk_rows(array) == page_rows
                for reader in readers
            ],
            bool,
        )

    def _drop_grown_maps(self, readers: Sequence[StreamReader | None]) -> None:
        """Unmap the objects that were replaced because their streams grew, were packed, or are gone."""
        for source, old in enumerate(self._loader.readers):
            new = readers[source]
            is_same = old is not None and new is not None and old.record.folder == new.record.folder
            if old is None or (new is not None and is_same and old.record.rows == new.record.rows):
                continue
            for path, column in self._columns.items():
                if chunk_rows := old.chunk_rows(f"steps/{path}"):
                    number = old.object_number(f"steps/{path}", old.record.rows // chunk_rows)
                    first = number * old.record.layouts[f"steps/{path}"].object_rows if is_same else 0
                    column.forget_mapped(source, first, old.record.rows)
                    self._maps.drop(old.record.folder, path, number)
            if not is_same:
                self._maps.drop_folder(old.record.folder)

    def _drop_evicted_maps(self, marks: Sequence[int]) -> None:
        """Unmap objects whose rows are all evicted. Their pages are forgotten already."""
        for reader, mark in zip(self._loader.readers, marks, strict=False):
            if reader is None or self._marks.get(reader.record.folder, 0) == mark:
                continue
            self._marks[reader.record.folder] = mark
            for path in self._columns:
                if chunk_rows := reader.chunk_rows(f"steps/{path}"):
                    number = reader.object_number(f"steps/{path}", mark // chunk_rows)
                    self._maps.drop_below(reader.record.folder, path, number)

    def resize(self, budget: int, host_budget: int) -> None:
        """Change the budgets; chunks that no longer fit are dropped."""
        self._budget = budget
        self._live_columns = None
        for column in self._columns.values():
            column.n_live_used = self.n_live_used
        share_budget(self._columns.values(), budget)
        self.tier.resize(host_budget)

    def invalidate(self) -> None:
        """Drop everything that was read from storage. Live rows stay."""
        for column in self._columns.values():
            column.table.forget(np.arange(column.table.n_live_pages, column.table.n_pages))
        self._maps.clear()
        self.tier.clear()

    def room(self, fields: Sequence[str] | None) -> int:
        """Return how many stored rows of the chosen fields fit in the cache together, were none of them mapped."""
        chosen = [self._columns[path] for path in selected_paths(self._schema, fields)]
        if not chosen:
            raise DataError("fields: staged draws need at least one field, got none")
        slots = slots_without_maps(self._columns.values(), self._budget)
        return min((slots[c.path] - c.table.n_live_pages) * c.page_rows for c in chosen)

    @property
    def version(self) -> int:
        """Rises when memory of a column moves, a column is replaced, or one becomes complete or incomplete.

        Memory addresses of columns are valid until it does.
        """
        return self._version.number

    @property
    def nbytes(self) -> int:
        """Bytes of all arenas."""
        return sum(column.nbytes for column in self._columns.values())

    # ---- loading ahead of time

    def load(self, wanted: Iterable[RowRequest]) -> None:
        """Load the pages of rows ahead of time. Columns with too few slots for all of them are left out."""
        self._loader.tick += 1
        self._make_resident({str(i): w for i, w in enumerate(wanted)})

    @property
    def ahead_bytes(self) -> int:
        """Bytes of chunks that are fetched ahead of a scan: a quarter of the budget, and at most 64 MiB."""
        return max(1, min(self._budget // 4, MAX_BYTES))

    def fetch_ahead(self, ahead: ReadAhead, paths: Iterable[str], ranges: Array, position: int) -> None:
        """Fetch the chunks that a scan reads next, in the background; those that are here already are left out.

        Args:
            ahead: Holds them until they are read.
            paths: Fields.
            ranges: ``[n, 3]``: source, first row, and row after the last.
            position: See `ReadAhead.request`.
        """
        self._fetcher.scans.add(ahead)
        arrays = [f"steps/{path}" for path in paths]
        request_chunks(ahead, self._loader.readers, arrays, ranges, position, self._absent_chunks)

    def _absent_chunks(self, array: str, source: int, numbers: Array) -> Array:
        """Those of the chunks of a source that are neither resident nor in the compressed tier."""
        path, reader = array.removeprefix("steps/"), self._loader.readers[source]
        table = self._columns[path].table
        if reader is None or table.is_complete:
            return numbers[:0]
        per_chunk = reader.pages_per_chunk(array, table.page_rows)
        n_pages = -(-reader.record.rows // table.page_rows)
        pages = np.minimum(numbers[:, None] * per_chunk + np.arange(per_chunk), n_pages - 1)
        is_absent = table.are_absent(table.first_page(source) + pages).any(axis=1)
        kept = [(reader.record.folder, path, number) in self.tier for number in numbers.tolist()]
        absent: Array = numbers[is_absent & ~np.array(kept, bool)]
        return absent

    def pin(self, wanted: Iterable[RowRequest]) -> None:
        """Load the pages of these rows, and keep them until `unpin`.

        Raises:
            ValueError: They do not fit in the cache together with room for others; nothing is pinned.
        """
        self._loader.tick += 1
        self._limit_maps()
        pages: dict[str, Array] = {}
        for w in wanted:
            found = self._columns[w.path].table.distinct_pages(w.source, w.row, self._loader.tick)
            pages[w.path] = np.union1d(pages.get(w.path, found[:0]), found)
        for path, needed in pages.items():
            table = self._columns[path].table
            needed = pages[path] = self._map_missing(self._columns[path], needed)
            if self._columns[path].is_mapped:  # nothing is evicted, so nothing has to be kept
                self._loader.touch_and_load([(self._columns[path], needed)])
                pages[path] = needed[:0]
                continue
            n_more = len(needed) - table.count_pinned(needed)
            if n_more + table.n_pinned + MIN_STORED_SLOTS > table.n_slots < table.n_pages:
                raise ValueError(
                    f"field '{path}': {len(needed)} chunks can't be pinned, the cache holds {table.n_slots};"
                    " pin fewer windows or raise cache_bytes"
                )
        for path, needed in pages.items():
            self._loader.touch_and_load([(self._columns[path], needed)])
            self._columns[path].table.pin(needed)

    def unpin(self) -> None:
        """Release all pinned pages."""
        for column in self._columns.values():
            column.table.unpin(self._loader.tick)

    # ---- live rows

    def live_columns(self, addresses: Mapping[str, int]) -> Array:
        """By field: where rows are copied from, where live rows begin, and bytes of a row; for compiled loops.

        Args:
            addresses: By field: the memory address of the rows to copy. Pass the same object each time.
        """
        if self._live_columns is None or self._live_columns[0] is not addresses:
            arenas = [self._columns[path].arena for path in addresses]
            columns = zip(addresses.values(), arenas, strict=True)
            rows = [(address, arena.data_ptr, arena.row_bytes) for address, arena in columns]
            self._live_columns = addresses, np.array(rows, np.int64).reshape(-1, 3)
        return self._live_columns[1]

    def write_live(self, rows: Array, values: Mapping[str, Array]) -> None:
        """Overwrite live rows. From now on `gather` returns the new values for source 0."""
        for path, value in values.items():
            self._columns[path].arena.write(rows, value)

    def discard_live(self) -> None:
        """Forget all live rows, and give their memory back to the system."""
        for column in self._columns.values():
            column.arena.discard(self.n_live_used)
        self.n_live_used = 0

    def move_live(self, source: int, live: Array, rows: Array, start: int, stop: int) -> None:
        """Copy live rows that were committed to the pages of their source, instead of reading them back.

        Args:
            source: The source whose rows ``[start, stop)`` were committed.
            live: Live rows.
            rows: The row of the source that each of them became.
            start: First new row of the source.
            stop: End of its new rows.
        """
        for column in self._columns.values():
            column.move_live_rows(source, live, rows, start, stop)

    # ---- gathering

    def shapes(self, wanted: Mapping[str, RowRequest]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return the shapes and dtypes of the tensors that `gather` returns."""
        columns = self._columns
        return {
            key: ((*w.row.shape, *columns[w.path].arena.row_shape), columns[w.path].arena.dtype)
            for key, w in wanted.items()
        }

    def gather(self, wanted: Mapping[str, RowRequest], outs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the values of rows by key, each ``[*row.shape, *field shape]``; missing pages are loaded first.

        Values are written to the tensors in ``outs``, and to new tensors for keys that it lacks.
        """
        start = time.perf_counter()
        self.tend_maps()
        self._loader.tick += 1
        oversized = self._make_resident(wanted)
        planned = time.perf_counter()
        results: dict[str, torch.Tensor] = {}
        for path in oversized:
            of_column = {key: w for key, w in wanted.items() if w.path == path}
            results |= self._oversized.gather(self._columns[path], of_column, outs)
        rest = {key: w for key, w in wanted.items() if w.path not in oversized}
        for key, w in rest.items():
            out = outs.get(key)
            results[key] = self._columns[w.path].arena.empty(w.row.shape) if out is None else out
        self._copy(rest, results)
        self.stats.seconds["gather"] += time.perf_counter() - planned
        self.stats.seconds["plan"] += planned - start
        return results

    def _copy(self, wanted: Mapping[str, RowRequest], outs: Mapping[str, torch.Tensor]) -> None:
        try:
            self._copier.copy(self._columns, wanted, outs)
        except DamagedBlockError as error:
            column = self._columns[error.path]
            self._maps.drop_field(error.path)
            self._mapper.find_damage(column, self._loader.readers, np.unique(error.virtual // column.page_rows))

    def decoders(self, n_threads: int) -> tuple[int, int]:
        """Memory address of decoders of blocks for so many threads, and bytes of each.

        Valid until the next call.
        """
        return self._decoders.address(n_threads), self._decoders.stride

    def resident_columns(self, paths: Iterable[str]) -> list[ColumnPages] | None:
        """Return the columns of fields if every page of them is resident or can be mapped; else None.

        Valid for this `version`. Pages that can be mapped are absent until a batch asked for them.
        """
        columns = [self._columns[path] for path in paths]
        return columns if all(column.table.is_complete or column.is_mapped for column in columns) else None

    def _make_resident(self, wanted: Mapping[str, RowRequest]) -> set[str]:
        """Load missing pages; returns the columns that have fewer slots than the batch needs, left as they are."""
        pages: dict[str, list[Array]] = {}
        for w in wanted.values():
            table = self._columns[w.path].table
            if not table.is_complete:
                pages.setdefault(w.path, []).append(table.distinct_pages(w.source, w.row, self._loader.tick))
        if not pages:
            return set()
        self._limit_maps()
        self.stats.n_syncs += self._device.type != "cpu"
        needed = []
        for path, parts in pages.items():
            column, asked = self._columns[path], self._with_completing(path, _union(parts))
            if len(in_slots := self._map_missing(column, asked)):
                needed.append((column, in_slots))
        oversized = {
            column.path
            for column, distinct in needed
            if len(distinct) - column.table.count_pinned(distinct) > column.n_unpinned
        }
        self._loader.touch_and_load(
            [(column, distinct) for column, distinct in needed if column.path not in oversized]
        )
        return oversized

    def _map_missing(self, column: ColumnPages, pages: Array) -> Array:
        """Map those of the pages that can be mapped; returns the others, which need slots."""
        if not column.table.maps_pages:
            return pages
        can_map = column.table.mappable(pages) & (column.table.slots(pages) < 0)
        missing = column.table.missing(pages[can_map])
        self.stats.hits += int(can_map.sum()) - len(missing)
        n_filled, absent = column.table.n_empty if column.fills_slots else 0, missing[:0]
        if len(missing) > n_filled:
            absent = self._mapper.map_pages(column, self._loader.readers, missing[n_filled:])
        return np.concatenate([pages[~can_map], missing[:n_filled], absent])

    def tend_maps(self) -> None:
        """Twice a minute, note that mapped copies are used, and unmap those that others have removed.

        Called with every batch.
        """
        if not self._has_copies or (now := time.monotonic()) < self._tend_at:
            return
        self._tend_at = now + TOUCH_S
        sources = {reader.record.folder: i for i, reader in enumerate(self._loader.readers) if reader is not None}
        for folder, path, number in self._maps.drop_gone():
            if (source := sources.get(folder)) is not None and (reader := self._loader.readers[source]) is not None:
                n_rows = reader.record.layouts[f"steps/{path}"].object_rows
                stop = min((number + 1) * n_rows, reader.record.rows)
                self._columns[path].forget_mapped(source, number * n_rows, stop)

    def _limit_maps(self) -> None:
        """Unmap all files if there are too many; called before a batch maps what it needs."""
        if not self._maps.is_full:
            return
        for column in self._columns.values():
            column.table.forget_mapped(np.arange(column.table.n_pages))
        self._maps.clear()

    def _with_completing(self, path: str, pages: Array) -> Array:
        """Add some absent pages, if the column has slots for all its pages and the batch misses none.

        Pages that no window touches, such as those of aborted episodes, would otherwise keep the column incomplete.
        A scan that fetches ahead comes to most of them by itself.
        """
        table = self._columns[path].table
        if (
            not self._fetcher.scans
            and table.n_empty
            and table.has_slot_for_every_page
            and not len(table.missing(pages))
        ):
            pages = np.concatenate([pages, table.absent_pages(_COMPLETING_PAGES)])
        return pages


def _union(parts: Sequence[Array]) -> Array:
    return parts[0] if len(parts) == 1 else np.unique(np.concatenate(parts))
