"""Fetches the chunks of the batches that come next in order, while earlier batches are read."""

from __future__ import annotations

from collections import deque

import numpy as np

from trajstore.sampling.batches.batch_assembler import BatchAssembler
from trajstore.sampling.batches.batch_program import BatchProgram
from trajstore.sampling.draws import EpochDraws, StagedDraws
from trajstore.sampling.episode_blocks import EpisodeBlockDraws
from trajstore.sampling.segment_loader import SegmentLoader
from trajstore.store.read_ahead import ReadAhead


class ScanAhead:
    """Requests the chunks of later batches. Only a hint: a batch reads what it lacks.

    Args:
        assembler: Reads the batches, from a storage where a read is a request over the network.
        draws: Draws in order.
        n_queued: Batches that are drawn before they are read.
    """

    def __init__(self, assembler: BatchAssembler, draws: EpochDraws | EpisodeBlockDraws, n_queued: int) -> None:
        self._assembler = assembler
        self._draws = draws
        program = BatchProgram.of(assembler.schema, draws.kind.windows)
        self._paths = sorted({path for group in program.groups for path in group.fields.values()})
        self._row_bytes = sum(assembler.schema[path].row_bytes for path in self._paths) or 1
        self._ahead = ReadAhead(assembler.cache.ahead_bytes)
        self._next = draws.position  # windows or blocks below this were requested
        self._positions = deque[int](maxlen=n_queued + 2)  # of the last draws; what lies before the first was read

    def follow(self) -> None:
        """Request more chunks, if there is room for them."""
        with self._assembler.lock:
            position = self._draws.position
            if self._positions and position < self._positions[-1]:  # a state was loaded
                self._restart(position)
            if not self._positions or position > self._positions[-1]:
                self._positions.append(position)
            self._ahead.forget_before(self._positions[0])
            self._next = max(self._next, position)
            n = self._n_wanted(position)
            if self._next == position:  # what was requested before for the next batch is kept
                last = self._positions[-2] if len(self._positions) > 1 else position
                n = max(n, self._draws.steps_between(last, position), 1)
            if n > 0 and self._assembler.has_cache:  # it has none once it is closed
                self._request(n)

    def _restart(self, position: int) -> None:
        self._ahead.clear()
        self._positions.clear()
        self._next = position

    def _n_wanted(self, position: int) -> int:
        """How many more steps to request."""
        # Chunks that are in the cache now may have left it when a scan far behind comes to them.
        n_most = self._ahead.max_bytes // self._row_bytes - self._draws.steps_between(position, self._next)
        return min(self._ahead.room // self._row_bytes, n_most)

    def _request(self, n: int) -> None:
        cache = self._assembler.cache
        if cache.resident_columns(self._paths) is not None:
            return
        ranges = []
        while n > 0 and (found := self._draws.rows_ahead(self._next, n)) is not None:
            rows, after = found
            n -= max(1, self._draws.steps_between(self._next, after))
            ranges.append(rows.stored(self._assembler.index))
            self._next = after
        if ranges:
            cache.fetch_ahead(self._ahead, self._paths, np.concatenate(ranges), self._next)

    def close(self) -> None:
        self._ahead.close()


def loader_for(assembler: BatchAssembler, draws: object, prefetch: int) -> ScanAhead | SegmentLoader | None:
    """What loads ahead for an iterator: staged segments, or chunks of draws in order that come over a network."""
    if isinstance(draws, StagedDraws):
        return SegmentLoader(assembler, draws)
    if not isinstance(draws, (EpochDraws, EpisodeBlockDraws)) or not draws.is_in_order:
        return None
    return ScanAhead(assembler, draws, prefetch + 1) if assembler.snapshot.storage.is_remote else None
