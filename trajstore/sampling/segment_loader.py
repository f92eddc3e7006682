"""Loads the next segment of staged draws into the cache, in the background."""

from __future__ import annotations

from concurrent.futures import Future

from trajstore.background_pool import BackgroundPool
from trajstore.sampling.batches.batch_assembler import BatchAssembler
from trajstore.sampling.draws import StagedDraws
from trajstore.sampling.window_starts import DrawnWindows

_WINDOWS_AT_ONCE = 64  # windows whose chunks are loaded while the assembler's lock is held


class SegmentLoader:
    """Loads the segment that enters next, a few windows at a time, while other segments are drawn from."""

    def __init__(self, assembler: BatchAssembler, draws: StagedDraws) -> None:
        self._assembler = assembler
        self._draws = draws
        self._segment = -1
        self._threads = BackgroundPool(1, "trajstore-staged")
        self._work: Future[None] | None = None

    def follow(self) -> None:
        """Start loading if another segment is next; raises the error of the last load, if it failed."""
        if self._work is not None and self._work.done():
            work, self._work = self._work, None
            work.result()
        if self._draws.next_segment != self._segment:
            self._segment = self._draws.next_segment
            self._work = self._threads.submit(self._load, self._segment)

    def _load(self, segment: int) -> None:
        kind, index = self._draws.kind, self._assembler.index
        with self._assembler.lock:
            draw, version = self._draws.windows_of(segment, every=kind.windows.size), index.version
        for first in range(0, len(draw.entry), _WINDOWS_AT_ONCE):
            piece = slice(first, first + _WINDOWS_AT_ONCE)
            with self._assembler.lock:  # released between pieces, so that batches can be read
                if segment != self._segment or version != index.version:
                    return  # entries may have changed; the rest is read when batches need it
                n = None if draw.n is None else draw.n[piece]
                self._assembler.load(kind, DrawnWindows(draw.entry[piece], draw.start[piece], n))

    def close(self) -> None:
        self._segment = -1
        self._threads.shutdown()
