"""Fills the arenas: what a batch misses is planned at once, fetched once, decoded in threads."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch

from trajstore.cache import UNSIGNED, CacheStats, Column, HostTier
from trajstore.schema import Array, Schema
from trajstore.snapshot import selected_paths
from trajstore.storage import Storage
from trajstore.stream import StreamReader

_MIN_SLOTS = 2


@dataclass(frozen=True, slots=True)
class Wanted:
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
        self.tier = HostTier(host_budget)
        self._schema = schema
        self._device = device
        self._budget = budget
        self._storage = storage
        self._live_rows = live_rows
        self._kernels = kernels
        self._readers: list[StreamReader | None] = []
        self._columns: dict[str, Column] = {}
        self._tick = 0
        self._buffers: list[bytearray] = []  # what encoded chunks are read into, one for each thread at work

    def set_sources(self, readers: Sequence[StreamReader | None]) -> None:
        """Take over the newest readers, by stream number; pages whose rows changed are dropped."""
        readers = [None, *readers]  # source 0 is live
        self._drop_stale_tails(readers)
        self._readers = readers
        present = [reader for reader in readers if reader is not None]
        for path, spec in self._schema.fields.items():
            page_rows = math.gcd(*(reader.record.layouts[f"steps/{path}"].chunk_rows for reader in present)) or 1
            column = self._columns.get(path)
            if column is None or column.page_rows != page_rows:
                column = Column(path, spec, page_rows, self._device, self._live_rows, self._kernels)
                self._columns[path] = column
            column.set_rows([self._live_rows, *(reader.record.rows if reader else 0 for reader in readers[1:])])
        self._share_budget()

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
            if column.n_pages * column.page_bytes <= left:
                slots = column.n_pages
            else:
                share = left * (column.n_pages * column.page_bytes) // sum(c.n_pages * c.page_bytes for c in rest)
                least = column.n_live_pages + _MIN_SLOTS
                slots = min(column.n_pages, max(least, share // column.page_bytes))
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

    def load(self, wanted: Iterable[Wanted]) -> None:
        """Read the pages of rows ahead of time, as far as the cache holds them at once."""
        self._tick += 1
        self._make_resident({str(i): w for i, w in enumerate(wanted)})

    def pin(self, wanted: Iterable[Wanted]) -> None:
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
            if len(needed) + column.n_pinned + _MIN_SLOTS > column.n_slots < column.n_pages:
                raise ValueError(
                    f"field '{path}': {len(needed)} chunks can't be pinned, the cache holds {column.n_slots}"
                )
        for path, needed in pages.items():
            self._touch_and_load([(self._columns[path], needed)])
            self._columns[path].pin(needed)

    def unpin(self) -> None:
        for column in self._columns.values():
            column.unpin(self._tick)

    def write_live(self, rows: torch.Tensor, values: Mapping[str, torch.Tensor]) -> None:
        """Overwrite live rows of all columns; can be gathered at once, from source 0."""
        for path, value in values.items():
            self._columns[path].write_live(rows, value)

    def room(self, fields: Sequence[str] | None) -> int:
        """Rows of the chosen fields that fit the cache together."""
        chosen = [self._columns[path] for path in selected_paths(self._schema, fields)]
        return min((c.n_slots - c.n_live_pages) * c.page_rows for c in chosen)

    @property
    def nbytes(self) -> int:
        return sum(column.nbytes for column in self._columns.values())

    def shapes(self, wanted: Mapping[str, Wanted]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of what `gather` gives."""
        columns = self._columns
        return {
            key: ((*w.row.shape, *columns[w.path].row_shape), columns[w.path].dtype) for key, w in wanted.items()
        }

    def gather(self, wanted: Mapping[str, Wanted], outs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Values of rows, each as ``[*row.shape, *field shape]``; everything missing is loaded in one wave."""
        start = time.perf_counter()
        self._tick += 1
        parted = self._make_resident(wanted)
        planned = time.perf_counter()
        results = {}
        for key, w in wanted.items():
            column, out = self._columns[w.path], outs.get(key)
            if w.path in parted:
                results[key] = self._gather_in_parts(column, w, out)
            else:
                results[key] = column.gather(w.source, w.row, out, self._storage.map)
        self.stats.seconds["gather"] += time.perf_counter() - planned
        self.stats.seconds["plan"] += planned - start
        return results

    def _make_resident(self, wanted: Mapping[str, Wanted]) -> set[str]:
        """Load what is missing; returns the columns that have too few slots for the batch."""
        pages: dict[str, list[Array]] = {}
        for w in wanted.values():
            column = self._columns[w.path]
            if not column.is_complete:
                pages.setdefault(w.path, []).append(column.distinct_pages(w.source, w.row, self._tick))
        if not pages:
            return set()
        self.stats.n_syncs += self._device.type != "cpu"
        found = [(self._columns[path], _joined(parts)) for path, parts in pages.items()]
        fits = [(column, distinct) for column, distinct in found if len(distinct) <= column.n_free]
        self._touch_and_load(fits)
        return {column.path for column, distinct in found if len(distinct) > column.n_free}

    def _touch_and_load(self, found: Sequence[tuple[Column, Array]]) -> None:
        load = []
        for column, distinct in found:
            missing = column.missing(distinct)
            self.stats.hits += len(distinct) - len(missing)
            column.touch(distinct, self._tick)
            if len(missing):
                load.append((column, missing))
        if load:
            self._load(load)

    def _gather_in_parts(self, column: Column, w: Wanted, out: torch.Tensor | None) -> torch.Tensor:
        """Assemble a batch that needs more pages than there are slots, some pages at a time."""
        self.stats.n_parts += 1
        address = column.addresses(w.source, w.row).reshape(-1)
        page_of = address.cpu().numpy() // column.page_rows
        pages = np.unique(page_of)
        source, row = w.source.expand(w.row.shape).reshape(-1), w.row.reshape(-1)
        shape, flat = (*w.row.shape, *column.row_shape), None if out is None else out.view(-1, *column.row_shape)
        for first in range(0, len(pages), column.n_free):
            part = pages[first : first + column.n_free]
            self._tick += 1
            self._touch_and_load([(column, part)])
            chosen = torch.from_numpy(np.flatnonzero(np.isin(page_of, part))).to(self._device)
            values = column.gather(source[chosen], row[chosen], None)
            if flat is None:
                flat = values.new_empty((len(address), *column.row_shape))
            _index_copy(flat, chosen, values)
        assert flat is not None
        return flat.view(shape)

    def _load(self, load: Sequence[tuple[Column, Array]]) -> None:
        """Fetch, decode and place absent pages of several columns in one wave."""
        start = time.perf_counter()
        claims = []
        for column, pages in load:
            slots, n_evicted = column.claim(pages)
            self.stats.misses += len(pages)
            self.stats.evictions += n_evicted
            claims.append(_Claim(column, pages, slots))
        jobs = [job for claim in claims for job in claim.jobs(self._readers)]
        n_parts = min(len(jobs), self._storage.n_threads)
        # One task a thread: a chunk takes some fifty microseconds, a future costs as much.
        self._storage.map(lambda k: self._do_all(jobs[k::n_parts]), range(n_parts))
        for claim in claims:
            claim.settle(self._tick)
        self.stats.seconds["load"] += time.perf_counter() - start

    def _do_all(self, jobs: Sequence[_Job]) -> None:
        buffer = self._buffers.pop() if self._buffers else bytearray()
        for job in jobs:
            self._do(job, buffer)
        self._buffers.append(buffer)

    def _do(self, job: _Job, buffer: bytearray) -> None:
        """Fetch one chunk and decode it to where its pages belong."""
        record = job.reader.record
        key = (record.id, job.path, job.chunk)
        kept = self.tier.get(key)
        if kept is not None:
            self.stats.host_hits += 1
            job.decode(kept)
        else:
            data = job.reader.chunk(f"steps/{job.path}", job.chunk, buffer)
            self.stats.bytes_read += len(data)
            self.tier.put(key, data)
            job.decode(data)
        self.stats.bytes_decoded += job.nbytes


def _joined(parts: Sequence[Array]) -> Array:
    return parts[0] if len(parts) == 1 else np.unique(np.concatenate(parts))


def _index_copy(result: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> None:
    """index_copy_ for dtypes that torch has it for, by their bits for the others."""
    if result.dtype in UNSIGNED:
        result, values = result.view(UNSIGNED[result.dtype]), values.view(UNSIGNED[values.dtype])
    result.index_copy_(0, index, values)


class _Claim:
    """Absent pages of one column and the slots they get."""

    def __init__(self, column: Column, pages: Array, slots: Array) -> None:
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

    @property
    def nbytes(self) -> int:
        return self.pages_per_chunk * int(self.targets[0][1].nbytes)

    def decode(self, data: bytes | memoryview) -> None:
        first = self.targets[0][1]
        if self.pages_per_chunk == 1:
            self.reader.decode_chunk(f"steps/{self.path}", self.chunk, data, first)
            return
        block = np.empty((self.pages_per_chunk, *first.shape), first.dtype)
        self.reader.decode_chunk(f"steps/{self.path}", self.chunk, data, block)
        for part, view in self.targets:
            view[...] = block[part]
