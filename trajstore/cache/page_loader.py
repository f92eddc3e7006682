"""Makes pages resident: claims slots, decodes the chunks that hold the pages, and records where they lie."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import torch

from trajstore.cache.cache_stats import CacheStats
from trajstore.cache.chunk_fetcher import ChunkFetcher, DecodeBuffers, StoredChunk
from trajstore.cache.column_pages import ColumnPages
from trajstore.schema import Array
from trajstore.store.stream_reader import StreamReader


class PageLoader:
    """Loads pages of columns from the streams' chunks.

    Attributes:
        readers: By source: the reader of its stream. None for live rows and for streams that are gone.
        tick: Number of the current use; pages that are touched or loaded now get it.
    """

    def __init__(self, fetcher: ChunkFetcher, stats: CacheStats) -> None:
        self.readers: list[StreamReader | None] = []
        self.tick = 0
        self._fetcher = fetcher
        self._stats = stats

    def touch_and_load(self, needed: Sequence[tuple[ColumnPages, Array]]) -> None:
        """Record a use of the needed pages of columns, and load those that are missing."""
        missing_pages = []
        for column, pages in needed:
            missing = column.table.missing(pages)
            self._stats.hits += len(pages) - len(missing)
            column.table.touch(pages, self.tick)
            if len(missing):
                missing_pages.append((column, missing))
        if missing_pages:
            self.load(missing_pages)

    def load(self, missing: Sequence[tuple[ColumnPages, Array]]) -> None:
        """Load absent pages of several columns together."""
        start = time.perf_counter()
        claims = []
        for column, pages in missing:
            slots, n_evicted = column.table.claim(pages)
            self._stats.misses += len(pages)
            self._stats.evictions += n_evicted
            claims.append(_Claim(column, pages, slots))
        jobs = [job for claim in claims for job in claim.jobs(self.readers)]

        def touch() -> None:
            for claim in claims:
                claim.touch()

        self._fetcher.for_each(jobs, self._decode, attrgetter("chunk"), touch)
        for claim in claims:
            claim.finish(self.tick)
        self._stats.seconds["load"] += time.perf_counter() - start

    def _decode(self, job: _ChunkJob, buffers: DecodeBuffers) -> None:
        """Decode one chunk to where its pages belong."""
        first = job.targets[0][1]
        if job.pages_per_chunk == 1 and len(first) == job.page_rows:
            self._fetcher.decode(job.chunk, buffers.encoded, first)
        else:
            pages = np.empty((job.pages_per_chunk, job.page_rows, *first.shape[1:]), first.dtype)
            self._fetcher.decode(job.chunk, buffers.encoded, pages)
            for position, view in job.targets:
                view[...] = pages[position, : len(view)]


@dataclass(slots=True)
class _ChunkJob:
    """A chunk to decode, and the pages to fill from it: position in the chunk, and a view of the memory.

    The view of a stream's last page ends with the stream's last row, so the rest of the page takes no memory.
    """

    chunk: StoredChunk
    pages_per_chunk: int
    page_rows: int
    targets: list[tuple[int, Array]]


class _Claim:
    """Absent pages of one column, and the slots that they will lie in."""

    def __init__(self, column: ColumnPages, pages: Array, slots: Array) -> None:
        self._column = column
        self._pages = pages
        self._slots = slots
        self._upload: torch.Tensor | None = None

    def jobs(self, readers: Sequence[StreamReader | None]) -> list[_ChunkJob]:
        """Return one job for each chunk that holds some of the pages."""
        column = self._column
        views = column.arena.slot_views(self._slots)
        if views is None:
            self._upload, views = column.arena.new_upload(len(self._pages))
        source, page = column.table.locate(self._pages)
        jobs: dict[tuple[int, int], _ChunkJob] = {}
        for view, s, p in zip(views, source.tolist(), page.tolist(), strict=True):
            reader = readers[s]
            assert reader is not None  # the index has rows of this stream, so it exists
            pages_per_chunk = reader.pages_per_chunk(f"steps/{column.path}", column.page_rows)
            number, position = divmod(p, pages_per_chunk)
            job = jobs.get((s, number))
            if job is None:
                job = jobs[s, number] = _ChunkJob(
                    (reader, column.path, number), pages_per_chunk, column.page_rows, []
                )
            job.targets.append((position, view[: reader.record.rows - p * column.page_rows]))
        return list(jobs.values())

    def touch(self) -> None:
        """Make memory resident that the jobs fill. It takes as long as filling it, but nothing has to have come."""
        if self._upload is None:
            self._column.arena.touch(self._slots)

    def finish(self, tick: int) -> None:
        """Record that the pages are resident, after uploading them if the arena is not in host memory."""
        if self._upload is not None:
            self._column.arena.upload(self._slots, self._upload)
        self._column.table.set_resident(self._pages, self._slots, tick)
        self._column.note_loaded()
