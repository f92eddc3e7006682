"""Gathers batches that need more pages of a column than the column has slots."""

from __future__ import annotations

import time
from collections.abc import Mapping
from operator import itemgetter
from types import ModuleType

import numpy as np
import torch

from trajstore.cache.cache_stats import CacheStats
from trajstore.cache.chunk_fetcher import ChunkFetcher, DecodeBuffers, StoredChunk
from trajstore.cache.column_pages import ColumnPages
from trajstore.cache.page_loader import PageLoader
from trajstore.cache.row_request import RowRequest
from trajstore.cache.tensor_dtypes import index_copy
from trajstore.schema import Array

_REPLACED_FRACTION = 8  # such a batch replaces the pages of one slot in eight


class OversizedBatches:
    """Gathers rows of one column in several parts."""

    def __init__(
        self, loader: PageLoader, fetcher: ChunkFetcher, stats: CacheStats, kernels: ModuleType | None
    ) -> None:
        self._loader = loader
        self._fetcher = fetcher
        self._stats = stats
        self._kernels = kernels

    def gather(
        self, column: ColumnPages, wanted: Mapping[str, RowRequest], outs: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the values of all requests for one column, by key; written to ``outs`` where it has the key."""
        self._stats.n_parts += 1
        source = torch.cat([w.source.expand(w.row.shape).reshape(-1) for w in wanted.values()])
        row = torch.cat([w.row.reshape(-1) for w in wanted.values()])
        virtual = column.table.virtual_rows(source, row).cpu().numpy()
        page_of = virtual // column.page_rows
        flat = column.arena.empty((len(virtual),))
        if self._kernels is not None:
            self._pass_through(column, virtual, page_of, flat)
        else:
            self._take_turns(column, source, row, page_of, flat)
        results, start = {}, 0
        for key, w in wanted.items():
            values = flat[start : start + w.row.numel()].view(*w.row.shape, *column.arena.row_shape)
            start += w.row.numel()
            results[key] = outs[key].copy_(values) if key in outs else values
        return results

    def _take_turns(
        self, column: ColumnPages, source: torch.Tensor, row: torch.Tensor, page_of: Array, flat: torch.Tensor
    ) -> None:
        """Load as many pages as fit and copy their rows, until all are done; resident pages come first."""
        pages = np.unique(page_of)
        missing = column.table.missing(pages)
        pages = np.concatenate([np.setdiff1d(pages, missing), missing])
        n_fit = max(1, column.n_unpinned)
        for first in range(0, len(pages), n_fit):
            part = pages[first : first + n_fit]
            self._loader.tick += 1
            self._loader.touch_and_load([(column, part)])
            chosen = torch.from_numpy(np.flatnonzero(np.isin(page_of, part))).to(flat.device)
            values = column.gather(source[chosen], row[chosen], column.arena.empty(chosen.shape))
            index_copy(flat, chosen, values)

    def _pass_through(self, column: ColumnPages, virtual: Array, page_of: Array, flat: torch.Tensor) -> None:
        """Make some missing pages resident, and decode the others only to copy the rows of this batch.

        Loading all of them would replace the whole cache with every batch.
        """
        table, pages = column.table, np.unique(page_of)
        missing = table.missing(pages)
        self._stats.hits += len(pages) - len(missing)
        table.touch(pages, self._loader.tick)
        loaded = missing[: max(table.n_empty, column.n_unpinned // _REPLACED_FRACTION)]
        if len(loaded):
            self._loader.load([(column, loaded)])
        out, slots = flat.view(torch.uint8).numpy().reshape(-1), table.slots(page_of)
        resident = np.flatnonzero(slots >= 0)
        arena_rows = slots[resident] * column.page_rows + virtual[resident] % column.page_rows
        column.arena.scatter(arena_rows, resident, out)
        absent = np.flatnonzero(slots < 0)  # includes pages that were evicted by the load above
        if len(absent):
            order = absent[np.argsort(page_of[absent], kind="stable")]
            self._decode_rows(column, np.unique(page_of[absent]), virtual, page_of, order, out)

    def _decode_rows(
        self, column: ColumnPages, missing: Array, virtual: Array, page_of: Array, order: Array, out: Array
    ) -> None:
        """Decode absent pages chunk by chunk, and copy the rows of the batch out of each.

        Every thread decodes into one buffer, which stays in the processor's cache.

        Args:
            column: The column.
            missing: The absent pages, each once, rising.
            virtual: The virtual row of each position of the batch.
            page_of: The page of each position.
            order: The positions whose pages are absent, sorted by page.
            out: The batch as flat bytes.
        """
        start = time.perf_counter()
        self._stats.misses += len(missing)
        source, page = column.table.locate(missing)
        bounds = np.append(np.searchsorted(page_of[order], missing), len(order))
        jobs: dict[tuple[int, int], tuple[StoredChunk, int, list[int]]] = {}  # a chunk, its size, and its pages
        for i, (s, p) in enumerate(zip(source.tolist(), page.tolist(), strict=True)):
            reader = self._loader.readers[s]
            assert reader is not None  # the index has rows of this stream, so it exists
            size = reader.pages_per_chunk(f"steps/{column.path}", column.page_rows)
            job = jobs.get((s, p // size))
            if job is None:
                job = jobs[s, p // size] = ((reader, column.path, p // size), size, [])
            job[2].append(i)

        def copy_chunk(job: tuple[StoredChunk, int, list[int]], buffers: DecodeBuffers) -> None:
            chunk, size, members = job
            pages = buffers.pages(column, size)
            self._fetcher.decode(chunk, buffers.encoded, pages)
            for i in members:
                positions = order[bounds[i] : bounds[i + 1]]
                first_row = (int(missing[i]) - int(page[i]) % size) * column.page_rows  # of the chunk, virtual
                column.arena.scatter(virtual[positions] - first_row, positions, out, pages)

        self._fetcher.for_each(list(jobs.values()), copy_chunk, itemgetter(0))
        self._stats.seconds["load"] += time.perf_counter() - start
