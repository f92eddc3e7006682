"""Fills the arenas: what a batch misses is planned at once, fetched once, decoded in threads."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch

from trajstore.cache.compressed_tier import CompressedTier
from trajstore.cache.page_table import MIN_SLOTS, UNSIGNED, CacheStats, ColumnPages, flat_rows
from trajstore.errors import DataError, StorageError
from trajstore.format.array_layout import ArrayLayout
from trajstore.schema import Array, Schema, selected_paths
from trajstore.storage import Storage
from trajstore.store.stream_reader import StreamReader

_N_CPUS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
_PART_BYTES = 4 << 20  # what a thread copies at least: handing over costs as much as copying half a megabyte
_WAVE_CHUNKS = 256
_FEW = 4
_FILLED = 16
_RENEWED = 8  # one slot in so many gets a new page when a batch needs more than there are


@dataclass(frozen=True, slots=True)
class RowRequest:
    """Rows of one column: stream numbers and rows, of shapes that broadcast."""

    path: str
    source: torch.Tensor
    row: torch.Tensor


class ChunkCache:
    """Columns on the device within one byte budget, a tier of compressed chunks behind them.

    Not thread-safe: the reader that owns it holds a lock.

    Args:
        schema: The fields.
        device: Where arenas live.
        budget: Bytes for all arenas together.
        host_budget: Bytes for compressed chunks in RAM.
        storage: Lends its threads.
        live_rows: Rows that `write_live` can address.
        kernels: Compiled loops, for the CPU.
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
        self._storage = storage
        self._live_rows = live_rows
        self._kernels = kernels
        self._readers: list[StreamReader | None] = []
        self._columns: dict[str, ColumnPages] = {}
        self._tick = 0
        self._buffers: list[_Buffers] = []  # one for each thread at work
        self._ahead: dict[tuple[str, str, int], memoryview] = {}  # chunks fetched in one wave, to be decoded

    def set_sources(
        self, readers: Sequence[StreamReader | None], marks: Sequence[int] = (), written: int = -1
    ) -> None:
        """Take over the newest readers, by stream number; pages whose rows changed are dropped.

        Not those of the source ``written``: `move_live` brings what they lack. ``marks`` are the rows, by source,
        below which everything was evicted.
        """
        readers = [None, *readers]  # source 0 is live
        self._drop_stale_tails(readers)
        self._readers = readers
        present = [reader for reader in readers if reader is not None]
        replaced: dict[str, ColumnPages] = {}
        for path, spec in self._schema.fields.items():
            chunk_rows = [reader.record.layouts[f"steps/{path}"].chunk_rows for reader in present]
            page_rows = math.gcd(*chunk_rows) or ArrayLayout.of(spec).chunk_rows
            column = self._columns.get(path)
            if column is None or column.page_rows != page_rows:
                if column is not None:
                    replaced[path] = column
                column = ColumnPages(path, spec, page_rows, self._device, self._live_rows, self._kernels)
                self._columns[path] = column
            rows = [self._live_rows, *(reader.record.rows if reader else 0 for reader in readers[1:])]
            column.set_rows(rows, marks, written)
        self._share_budget()
        for path, old in replaced.items():
            self._columns[path].copy_live(old, self._live_rows)

    def _drop_stale_tails(self, readers: Sequence[StreamReader | None]) -> None:
        for old, new in zip(self._readers, readers, strict=False):
            if old is None or new is None or old.record.rows == new.record.rows:
                continue
            for path in self._schema.fields:
                chunk, filled = divmod(old.record.rows, old.record.layouts[f"steps/{path}"].chunk_rows)
                if filled:
                    self.tier.drop((old.record.id, path, chunk))

    def _share_budget(self) -> None:
        """Small columns first, whole; what is left goes to the others in proportion to their size."""
        left = self._budget
        columns = sorted(self._columns.values(), key=lambda c: c.n_pages * c.page_bytes)
        for i, column in enumerate(columns):
            rest = columns[i:]
            spare = left - sum(c.least_slots * c.page_bytes for c in rest[1:])
            if column.n_pages * column.page_bytes <= spare:
                slots = column.n_pages
            else:
                share = left * (column.n_pages * column.page_bytes) // sum(c.n_pages * c.page_bytes for c in rest)
                share = min(share, spare) // column.page_bytes
                slots = min(column.n_pages, max(column.least_slots, share))
            column.set_slots(slots)
            left -= slots * column.page_bytes

    def resize(self, budget: int, host_budget: int) -> None:
        """Change the budgets; what does not fit any more is dropped."""
        self._budget = budget
        self._share_budget()
        self.tier.resize(host_budget)

    def invalidate(self) -> None:
        """Drop everything that was read; it is read again when it is asked for."""
        for column in self._columns.values():
            column.forget(np.arange(column.n_live_pages, column.n_pages))
        self.tier.clear()

    def load(self, wanted: Iterable[RowRequest]) -> None:
        """Read the pages of rows ahead of time, as far as the cache holds them at once."""
        self._tick += 1
        self._make_resident({str(i): w for i, w in enumerate(wanted)})

    def pin(self, wanted: Iterable[RowRequest]) -> None:
        """Keep the pages of these rows until `unpin`.

        Raises:
            ValueError: They do not fit the cache together with room for others; nothing is pinned.
        """
        self._tick += 1
        pages: dict[str, Array] = {}
        for w in wanted:
            found = self._columns[w.path].distinct_pages(w.source, w.row, self._tick)
            pages[w.path] = np.union1d(pages.get(w.path, found[:0]), found)
        for path, needed in pages.items():
            column = self._columns[path]
            n_more = len(needed) - column.n_pinned_of(needed)
            if n_more + column.n_pinned + MIN_SLOTS > column.n_slots < column.n_pages:
                raise ValueError(
                    f"field '{path}': {len(needed)} chunks can't be pinned, the cache holds {column.n_slots}"
                )
        for path, needed in pages.items():
            self._touch_and_load([(self._columns[path], needed)])
            self._columns[path].pin(needed)

    def unpin(self) -> None:
        for column in self._columns.values():
            column.unpin(self._tick)

    def write_live(self, rows: Array, values: Mapping[str, Array]) -> None:
        """Overwrite live rows; they can be gathered at once, from source 0."""
        for path, value in values.items():
            self._columns[path].write_live(rows, value)

    def move_live(self, source: int, live: Array, rows: Array, start: int, stop: int) -> None:
        """Live rows are rows of a source now: copy them to where it is read from."""
        for column in self._columns.values():
            column.move_live(source, live, rows, start, stop)

    def room(self, fields: Sequence[str] | None) -> int:
        """Rows of the chosen fields that fit the cache together."""
        chosen = [self._columns[path] for path in selected_paths(self._schema, fields)]
        if not chosen:
            raise DataError("fields: staged draws need at least one field")
        return min((c.n_slots - c.n_live_pages) * c.page_rows for c in chosen)

    @property
    def nbytes(self) -> int:
        return sum(column.nbytes for column in self._columns.values())

    def shapes(self, wanted: Mapping[str, RowRequest]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of what `gather` gives."""
        columns = self._columns
        return {
            key: ((*w.row.shape, *columns[w.path].row_shape), columns[w.path].dtype) for key, w in wanted.items()
        }

    def gather(self, wanted: Mapping[str, RowRequest], outs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Values of rows, each as ``[*row.shape, *field shape]``; everything missing is loaded in one wave."""
        start = time.perf_counter()
        self._tick += 1
        parted = self._make_resident(wanted)
        planned = time.perf_counter()
        results: dict[str, torch.Tensor] = {}
        for path in parted:
            results |= self._gather_in_parts(self._columns[path], _of_column(wanted, path), outs)
        rest = {key: w for key, w in wanted.items() if w.path not in parted}
        for key, w in rest.items():
            out = outs.get(key)
            results[key] = self._columns[w.path].empty(w.row.shape) if out is None else out
        if self._kernels is not None:
            self._copy(self._kernels, rest, results)
        else:
            for key, w in rest.items():
                self._columns[w.path].gather(w.source, w.row, results[key])
        self.stats.seconds["gather"] += time.perf_counter() - planned
        self.stats.seconds["plan"] += planned - start
        return results

    def _copy(
        self, kernels: ModuleType, wanted: Mapping[str, RowRequest], outs: Mapping[str, torch.Tensor]
    ) -> None:
        """Copy rows of resident pages; fields mostly share their rows, and those that do are copied in one go."""
        groups: dict[int, list[str]] = {}
        for key, w in wanted.items():
            groups.setdefault(id(w.row), []).append(key)
        for keys in groups.values():
            w = wanted[keys[0]]
            sources, rows = flat_rows(w.source, w.row)
            columns = np.array([self._columns[wanted[key].path].layout(outs[key]) for key in keys])
            for missed in self._copied(kernels, columns, sources, rows):
                if missed >= 0:
                    raise RuntimeError(f"field '{wanted[keys[missed]].path}': rows were asked for that nobody read")

    def _copied(self, kernels: ModuleType, columns: Array, sources: Array, rows: Array) -> Iterable[int]:
        """Copy, in several threads where there is much; gives what each of them returned."""
        window = columns[:, 1] * rows.shape[1]  # bytes
        n_parts = min(torch.get_num_threads(), int(window.sum()) * len(rows) // _PART_BYTES, len(rows))
        if n_parts <= 1:
            return [kernels.copy_columns(columns, sources, rows)]
        cuts = [len(rows) * i // n_parts for i in range(n_parts + 1)]

        def part(i: int) -> int:
            mine, chosen = columns.copy(), slice(cuts[i], cuts[i + 1])
            mine[:, 5] += cuts[i] * window
            missed: int = kernels.copy_columns(mine, sources[chosen], rows[chosen])
            return missed

        return self._storage.map(part, range(n_parts))

    def _make_resident(self, wanted: Mapping[str, RowRequest]) -> set[str]:
        """Load what is missing; returns the columns that have too few slots for the batch."""
        pages: dict[str, list[Array]] = {}
        for w in wanted.values():
            column = self._columns[w.path]
            if not column.is_complete:
                pages.setdefault(w.path, []).append(column.distinct_pages(w.source, w.row, self._tick))
        if not pages:
            return set()
        self.stats.n_syncs += self._device.type != "cpu"
        found = [(self._columns[path], self._filling(path, _joined(parts))) for path, parts in pages.items()]
        parted = {c.path for c, distinct in found if len(distinct) - c.n_pinned_of(distinct) > c.n_free}
        self._touch_and_load([(column, distinct) for column, distinct in found if column.path not in parted])
        return parted

    def _filling(self, path: str, pages: Array) -> Array:
        """Pages of a batch, and some more of a column that fits but is not complete though nothing is missing.

        What no window ever touches (steps of aborted episodes) would keep it from ever being so.
        """
        column = self._columns[path]
        if column.n_empty and column.fits and not len(column.missing(pages)):
            pages = np.concatenate([pages, column.some_absent(_FILLED)])
        return pages

    def _touch_and_load(self, found: Sequence[tuple[ColumnPages, Array]]) -> None:
        load = []
        for column, distinct in found:
            missing = column.missing(distinct)
            self.stats.hits += len(distinct) - len(missing)
            column.touch(distinct, self._tick)
            if len(missing):
                load.append((column, missing))
        if load:
            self._load(load)

    def _gather_in_parts(
        self, column: ColumnPages, wanted: Mapping[str, RowRequest], outs: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Assemble a batch that needs more pages than there are slots.

        Some of the missing pages take the place of those used longest ago; the others pass through.
        """
        self.stats.n_parts += 1
        source = torch.cat([w.source.expand(w.row.shape).reshape(-1) for w in wanted.values()])
        row = torch.cat([w.row.reshape(-1) for w in wanted.values()])
        address = column.addresses(source, row).cpu().numpy()
        pages = address // column.page_rows
        flat = torch.empty((len(address), *column.row_shape), dtype=column.dtype, device=self._device)
        if self._kernels is not None:
            self._pass_through(column, address, pages, flat)
        else:
            self._in_turns(column, source, row, pages, flat)
        results, start = {}, 0
        for key, w in wanted.items():
            values = flat[start : start + w.row.numel()].view(*w.row.shape, *column.row_shape)
            start += w.row.numel()
            results[key] = outs[key].copy_(values) if key in outs else values
        return results

    def _in_turns(
        self, column: ColumnPages, source: torch.Tensor, row: torch.Tensor, page_of: Array, flat: torch.Tensor
    ) -> None:
        """Some pages at a time, resident ones first."""
        pages = np.unique(page_of)
        missing = column.missing(pages)
        pages = np.concatenate([np.setdiff1d(pages, missing), missing])
        n_free = max(1, column.n_free)
        for first in range(0, len(pages), n_free):
            part = pages[first : first + n_free]
            self._tick += 1
            self._touch_and_load([(column, part)])
            chosen = torch.from_numpy(np.flatnonzero(np.isin(page_of, part))).to(self._device)
            values = column.gather(source[chosen], row[chosen], column.empty(chosen.shape))
            _index_copy(flat, chosen, values)

    def _pass_through(self, column: ColumnPages, address: Array, page_of: Array, flat: torch.Tensor) -> None:
        """Load as many missing pages as is good for the cache; decode the others only for the rows asked for."""
        pages = np.unique(page_of)
        missing = column.missing(pages)
        self.stats.hits += len(pages) - len(missing)
        column.touch(pages, self._tick)
        kept = missing[: max(column.n_empty, column.n_free // _RENEWED)]
        if len(kept):
            self._load([(column, kept)])
        out, slots = flat.view(torch.uint8).numpy().reshape(-1), column.slots(page_of)
        here = np.flatnonzero(slots >= 0)
        column.scatter(slots[here] * column.page_rows + address[here] % column.page_rows, here, out)
        absent = np.flatnonzero(slots < 0)  # also what was resident and had to make room just now
        if len(absent):
            order = absent[np.argsort(page_of[absent], kind="stable")]
            self._decode_for(column, np.unique(page_of[absent]), address, page_of, order, out)

    def _decode_for(
        self, column: ColumnPages, missing: Array, address: Array, page_of: Array, order: Array, out: Array
    ) -> None:
        """Decode absent pages, one chunk after the other in a block that stays in the processor's cache."""
        start = time.perf_counter()
        self.stats.misses += len(missing)
        source, page = column.locate(missing)
        cuts = np.append(np.searchsorted(page_of[order], missing), len(order))
        jobs: dict[tuple[int, int], list[int]] = {}
        sizes = [self._pages_per_chunk(column, s) for s in range(len(self._readers))]
        for i, (s, p) in enumerate(zip(source.tolist(), page.tolist(), strict=True)):
            jobs.setdefault((s, p // sizes[s]), []).append(i)

        def do(chunk: tuple[int, int], buffers: _Buffers) -> None:
            reader, n = self._reader(chunk[0]), sizes[chunk[0]]
            block = buffers.block(column, n)
            self._fetch(reader, column.path, chunk[1], buffers.encoded, block)
            for i in jobs[chunk]:
                rows = order[cuts[i] : cuts[i + 1]]
                within = address[rows] - (int(missing[i]) - int(page[i]) % n) * column.page_rows
                column.scatter(within, rows, out, block)
            self.stats.bytes_decoded += block.nbytes

        self._spread(do, list(jobs), lambda chunk: (self._reader(chunk[0]), column.path, chunk[1]))
        self.stats.seconds["load"] += time.perf_counter() - start

    def _reader(self, source: int) -> StreamReader:
        reader = self._readers[source]
        assert reader is not None  # its rows are in the index
        return reader

    def _pages_per_chunk(self, column: ColumnPages, source: int) -> int:
        reader = self._readers[source]
        return reader.record.layouts[f"steps/{column.path}"].chunk_rows // column.page_rows if reader else 1

    def _load(self, load: Sequence[tuple[ColumnPages, Array]]) -> None:
        """Fetch, decode and place absent pages of several columns in one wave."""
        start = time.perf_counter()
        claims = []
        for column, pages in load:
            slots, n_evicted = column.claim(pages)
            self.stats.misses += len(pages)
            self.stats.evictions += n_evicted
            claims.append(_Claim(column, pages, slots))
        jobs = [job for claim in claims for job in claim.jobs(self._readers)]
        self._spread(self._do, jobs, lambda job: (job.reader, job.path, job.chunk))
        for claim in claims:
            claim.settle(self._tick)
        self.stats.seconds["load"] += time.perf_counter() - start

    def _spread(
        self,
        do: Callable[[Any, _Buffers], None],
        jobs: Sequence[Any],
        chunk_of: Callable[[Any], tuple[StreamReader, str, int]],
    ) -> None:
        """Do all jobs; over a network, as many chunks as memory allows are fetched in one wave first."""
        if not self._storage.is_remote:
            self._do_all(do, jobs)
            return
        for start in range(0, len(jobs), _WAVE_CHUNKS):
            wave = jobs[start : start + _WAVE_CHUNKS]
            self._fetch_ahead([chunk_of(job) for job in wave])
            try:
                self._do_all(do, wave)
            finally:
                self._ahead.clear()

    def _fetch_ahead(self, chunks: Sequence[tuple[StreamReader, str, int]]) -> None:
        keys = {}
        for reader, path, chunk in chunks:
            name = (reader.record.id, path, chunk)
            if not (self.tier.budget and name in self.tier) and (key := reader.chunk_key(f"steps/{path}", chunk)):
                keys[name] = key
        try:
            found = self._storage.get_many(list(keys.values()))
        except (OSError, StorageError):
            return  # the one that fails is asked for again, on its own, and then it is known which it was
        self._ahead.update(zip(keys, (memoryview(data) for data in found), strict=True))

    def _do_all(self, do: Callable[[Any, _Buffers], None], jobs: Sequence[Any]) -> None:
        """Do jobs in one task a processor: a future costs as much as decoding a chunk, and a few are done here."""
        n_parts = min(len(jobs) // _FEW, _N_CPUS) or 1

        def part(k: int) -> None:
            buffers = self._buffers.pop() if self._buffers else _Buffers()
            for job in jobs[k::n_parts]:
                do(job, buffers)
            self._buffers.append(buffers)

        self._storage.map(part, range(n_parts))

    def _do(self, job: _Job, buffers: _Buffers) -> None:
        """Fetch one chunk and decode it to where its pages belong."""
        first = job.targets[0][1]
        if job.pages_per_chunk == 1:
            self._fetch(job.reader, job.path, job.chunk, buffers.encoded, first)
        else:
            block = np.empty((job.pages_per_chunk, *first.shape), first.dtype)
            self._fetch(job.reader, job.path, job.chunk, buffers.encoded, block)
            for part, view in job.targets:
                view[...] = block[part]
        self.stats.bytes_decoded += job.pages_per_chunk * int(first.nbytes)

    def _fetch(self, reader: StreamReader, path: str, chunk: int, encoded: bytearray, out: Array) -> None:
        """Decode a chunk, from the host tier or from storage."""
        key, array = (reader.record.id, path, chunk), f"steps/{path}"
        kept = self.tier.get(key) if self.tier.budget else None
        if kept is not None:
            self.stats.host_hits += 1
            reader.decode_chunk(array, chunk, kept, out)
            return
        data = self._ahead.pop(key, None) or reader.chunk(array, chunk, encoded)
        self.stats.bytes_read += len(data)
        reader.decode_chunk(array, chunk, data, out)
        if self.tier.budget:  # only what passed its checksum
            self.tier.put(key, data)


class _Buffers:
    """What a thread reads encoded chunks into, and decodes chunks into of which it needs but some rows."""

    def __init__(self) -> None:
        self.encoded = bytearray()
        self._blocks: dict[tuple[str, int], Array] = {}

    def block(self, column: ColumnPages, n_pages: int) -> Array:
        block = self._blocks.get((column.path, n_pages))
        if block is None or block.shape[1] != column.page_rows:
            block = self._blocks[column.path, n_pages] = column.block(n_pages)
        return block


def _of_column(wanted: Mapping[str, RowRequest], path: str) -> dict[str, RowRequest]:
    return {key: w for key, w in wanted.items() if w.path == path}


def _joined(parts: Sequence[Array]) -> Array:
    return parts[0] if len(parts) == 1 else np.unique(np.concatenate(parts))


def _index_copy(result: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> None:
    """index_copy_ for dtypes that torch has it for, by their bits for the others."""
    if result.dtype in UNSIGNED:
        result, values = result.view(UNSIGNED[result.dtype]), values.view(UNSIGNED[values.dtype])
    result.index_copy_(0, index, values)


class _Claim:
    """Absent pages of one column and the slots they get."""

    def __init__(self, column: ColumnPages, pages: Array, slots: Array) -> None:
        self._column = column
        self._pages = pages
        self._slots = slots
        self._staged: torch.Tensor | None = None

    def jobs(self, readers: Sequence[StreamReader | None]) -> list[_Job]:
        """One job a chunk; pages of one chunk are decoded together."""
        column = self._column
        views = column.host_slots(self._slots)
        if views is None:
            self._staged, views = column.stage(len(self._pages))
        source, page = column.locate(self._pages)
        jobs: dict[tuple[int, int], _Job] = {}
        for view, s, p in zip(views, source.tolist(), page.tolist(), strict=True):
            reader = readers[s]
            assert reader is not None  # its rows are in the index
            layout = reader.record.layouts[f"steps/{column.path}"]
            pages_per_chunk = layout.chunk_rows // column.page_rows
            chunk, part = divmod(p, pages_per_chunk)
            job = jobs.get((s, chunk))
            if job is None:
                job = jobs[s, chunk] = _Job(reader, column.path, chunk, pages_per_chunk, [])
            job.targets.append((part, view))
        return list(jobs.values())

    def settle(self, tick: int) -> None:
        if self._staged is not None:
            self._column.upload(self._slots, self._staged)
        self._column.settle(self._pages, self._slots, tick)


@dataclass(slots=True)
class _Job:
    """One chunk to fetch, and the page views it fills."""

    reader: StreamReader
    path: str
    chunk: int
    pages_per_chunk: int
    targets: list[tuple[int, Array]]
