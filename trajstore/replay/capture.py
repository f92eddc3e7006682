"""Captures what a checkpoint of a buffer holds: extents of all streams, and the session's state in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from dataclasses import replace
from typing import Any

from trajstore.format.commit_record import CommitRecord, StreamExtent
from trajstore.replay.checkpoint_writer import CapturedState
from trajstore.replay.limit_evictor import unshown_rows
from trajstore.replay.turns import TurnTaking
from trajstore.sampling.batches.batch_assembler import BatchAssembler
from trajstore.writing.writer import Writer


class Capture:
    """Takes the state of one moment, under the locks of assembler and writer; nothing is written.

    Args:
        assembler: Shows the steps.
        writer: Writer of the session.
        turns: Holds back appends while a commit has to free room first.
        state: Returns the state of everything in memory; called with both locks held.
        statistics: Returns the state of the running statistics; called by the commit thread, in commit order.
        refresh: Called before, where other ranks may have evicted steps that are shown here; None: not needed.
    """

    def __init__(
        self,
        assembler: BatchAssembler,
        writer: Writer,
        turns: TurnTaking,
        state: Callable[[], dict[str, Any]],
        statistics: Callable[[], Any],
        refresh: Callable[[], None] | None,
    ) -> None:
        self._assembler = assembler
        self._writer = writer
        self._turns = turns
        self._state = state
        self._statistics = statistics
        self._refresh = refresh

    def take(self, name: str, keep_last: int | None, hold: Callable[[CapturedState], None]) -> CapturedState:
        """Capture this moment; ``hold`` gets the result before any later eviction can happen."""
        if self._refresh is not None:
            self._refresh()
        captured = self._try(name, keep_last, hold)
        if captured is not None:
            return captured
        with self._turns.no_appends():  # else other threads could append without end what there is no room for
            while captured is None:
                self._writer.commit()
                captured = self._try(name, keep_last, hold)
        return captured

    def _try(self, name: str, keep_last: int | None, hold: Callable[[CapturedState], None]) -> CapturedState | None:
        """None if some appended steps can't be shown before they are committed."""
        with self._assembler.lock, self._writer.locked_staging(blocking=True) as staging:
            self._assembler.publish(may_commit=False)
            if self._assembler.is_behind(staging):
                return None
            wanted = unshown_rows(self._assembler)
            record: Future[tuple[CommitRecord | None, Mapping[str, Any]]] = Future()
            extents, state = self._extents(wanted), self._state()
            ticket = self._writer.capture_record(lambda found: self._committed(record, found))
            own = self._writer.stream
            captured = CapturedState(name, extents, own, wanted.get(own, 0), state, record, ticket, keep_last)
            hold(captured)
            return captured

    def _committed(self, result: Future[Any], record: CommitRecord | None) -> None:
        # On the commit thread, in commit order: the statistics are those of exactly these steps.
        with contextlib.suppress(InvalidStateError):  # the checkpoint was given up
            result.set_result((record, {"statistics": self._statistics()}))

    def _extents(self, wanted: Mapping[str, int]) -> dict[str, StreamExtent]:
        """Wanted rows of every stream but the session's own; wholly evicted streams are left out."""
        records = {record.id: record for record in self._assembler.snapshot.streams}
        extents = {}
        for stream, extent in self._assembler.snapshot.cuts().items():
            first = max(extent.first, wanted.get(stream, extent.stop))
            if stream != self._writer.stream and first < extent.stop:
                extents[stream] = replace(extent, first=first, record=None)
                if records[stream].is_sealed:  # embedded, so that a resume need not read it
                    extents[stream] = replace(extents[stream], record=extents[stream].truncate(records[stream]))
        return extents
