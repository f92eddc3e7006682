"""Evictions of a buffer: by its limits, by call, and the marks that let storage be freed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from trajstore.format.handles import EpisodeKey
from trajstore.replay.limit_evictor import LimitEvictor, unshown_rows
from trajstore.sampling.batches.batch_assembler import BatchAssembler, Where
from trajstore.sampling.reader import Reader
from trajstore.schema import Array
from trajstore.store.garbage_collection import GarbageCollector
from trajstore.store.snapshot import Snapshot
from trajstore.writing.writer import Writer

_MARK_PARTS = 64  # marks are published once this fraction of the buffer was evicted since the last time


class Eviction:
    """Decides at once what is no longer shown; storage follows later, through marks and the garbage collector.

    Args:
        evictor: Applies the limits.
        reader: Shows the steps; its priorities and columns follow each eviction.
        writer: Its record carries the marks.
        collector: Deletes chunks that no session and no checkpoint wants.
        held: Returns, by stream, the first row that checkpoints being written need.
        resumed: What the checkpoint that the session continued shows; None if it continued none.
        first_rows: By stream: the first row that was live when the session began.
    """

    def __init__(
        self,
        evictor: LimitEvictor,
        reader: Reader,
        writer: Writer,
        collector: GarbageCollector,
        held: Callable[[], Mapping[str, int]],
        resumed: Snapshot | None,
        first_rows: Mapping[str, int],
    ) -> None:
        self._evictor = evictor
        self._reader = reader
        self._assembler: BatchAssembler = reader.assembler
        self._writer = writer
        self._collector = collector
        self._held = held
        self._resumed = resumed
        self._first_rows = dict(first_rows)
        self._n_marked = 0  # evicted steps when marks were published last
        self._has_removed = False  # a call has evicted steps that may not be committed yet
        self.is_closing = False

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """Evicted steps and episodes by cause; called with the assembler's lock held."""
        return {cause: dict(counts) for cause, counts in self._evictor.evicted.items()}

    # ---- by limits

    def apply_limits(self) -> None:
        """Evict what exceeds a limit; the assembler calls this, with its lock held, after it has published."""
        if self.is_closing or not self._evictor.apply(time.time()):
            return
        self._reader.follow_priorities()
        n_evicted = self._evictor.n_evicted
        if n_evicted - self._n_marked > self._assembler.index.n_steps // _MARK_PARTS:
            self._n_marked = n_evicted
            self.publish_marks()

    # ---- by call; with the assembler's lock held, after it has published

    def evict_episodes(self, n_episodes: int | None, where: Where | None, keys: Iterable[EpisodeKey] | None) -> int:
        """Evict episodes chosen in one of three ways; returns the number of evicted steps."""
        if n_episodes is not None:
            entries = self._evictor.oldest(n_episodes)
        elif where is not None:
            first = self._assembler.index.first
            entries = np.flatnonzero(self._assembler.mask(where)[first:]) + first
        else:
            entries = self._assembler.entries_of(keys or ())
        return self._finish(self._evictor.evict_entries(entries))

    def evict_steps(self, chosen: Array) -> int:
        """Evict the chosen steps (a bool for each, in index order) and those before them in their episodes."""
        return self._finish(self._evictor.evict_where(chosen))

    def evict_below(self, stream: Array, episode: Array, t: Array) -> None:
        """Evict the steps of episodes below ``t``, counted as evictions by the limit on steps."""
        self._evictor.evict("steps", stream, episode, t)
        self._follow()

    def _finish(self, n_evicted: int) -> int:
        self._follow()
        self._has_removed = True
        return n_evicted

    def _follow(self) -> None:
        self._reader.follow_priorities()
        self._reader.follow_columns()
        self.publish_marks()

    def hide_removed(self) -> None:
        """After a commit: publish marks for steps that a call evicted before they were committed.

        Steps that limits evict are not treated here: when limits evict must not depend on commits.
        """
        if not self._has_removed:
            return
        with self._assembler.lock:
            self._assembler.publish()
            self.publish_marks()
            self._has_removed = False
        self._collector.publish()

    # ---- marks

    def publish_marks(self) -> None:
        """Let the garbage collector free rows that this session no longer wants, except those held for checkpoints.

        Called with the assembler's lock held.
        """
        held = self._held()
        marks = {name: min(row, held.get(name, row)) for name, row in self._unwanted().items()}
        marks = {name: row for name, row in marks.items() if row}
        self._assembler.set_marks(marks)
        self._writer.step_bytes.forget(marks.get(self._writer.stream, 0))
        self._collector.want(marks)

    def free_storage(self) -> None:
        """Begin to delete what neither this session nor a checkpoint wants, as after checkpoints were removed."""
        with self._assembler.lock:
            self._assembler.publish()
            self.publish_marks()
        self._collector.request_sweep()

    def write_final_marks(self) -> None:
        """Put the marks into the writer's last record: only deleting needs a grace time, publishing does not."""
        if self._writer.is_closed or not self._evictor.n_evicted:
            return
        with self._assembler.lock:
            known = self._writer.first_rows
            marks = {name: max(row, known.get(name, 0)) for name, row in self._unwanted().items()}
            own = min(marks.pop(self._writer.stream, 0), self._writer.committed_rows)
            self._writer.set_view(first_row=own, first_rows={name: row for name, row in marks.items() if row})

    def _unwanted(self) -> dict[str, int]:
        """By stream: rows below are wanted neither here nor by the session that wrote them."""
        marks = unshown_rows(self._assembler)
        for record in self._resumed.streams if self._resumed is not None else ():
            if marks.get(record.id, 0) >= record.rows:  # nothing is left of what the checkpoint shows of the stream
                marks[record.id] = max(marks[record.id], self._first_rows.get(record.id, 0))
        return marks
