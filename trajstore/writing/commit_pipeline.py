"""From appended rows to durable ones: two stagings, filled and committed in turn."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from trajstore.errors import DataError
from trajstore.format.commit_record import CommitRecord, SessionView
from trajstore.schema import Array, Schema
from trajstore.writing.commit_thread import CommitThread
from trajstore.writing.staging import Placement, Staging, empty_batch, place, staged_rows, steps_of
from trajstore.writing.stream_appender import CommitBatch, DerivedColumnChange, StreamAppender

_log = logging.getLogger(__name__)

Told = Callable[[CommitRecord | None], None]  # hears of the newest record
Observer = Callable[[Schema, Mapping[str, Array]], None]  # sees the steps of every commit


@dataclass(slots=True)
class _Job:
    """Work on its way to disk: placed once, committed until it succeeds, then told, once."""

    schema: Schema | None = None  # None: there is nothing to commit
    staging: Staging | None = None  # None: no steps
    columns: list[DerivedColumnChange] = field(default_factory=list)
    first_row: int = 0
    view: SessionView = field(default_factory=SessionView)
    told: Told | None = None
    batch: CommitBatch | None = None
    is_committed: bool = False


class AppendListener(Protocol):
    """Who wants to know what becomes of appended rows."""

    def handed_off(self, staging: Staging) -> None:
        """A staging is complete and goes to disk; called with the writer's lock held."""

    def committed(self, spans: Array) -> None:
        """The spans of a staging are durable; called from the background thread, in order."""

    def amended(self, episode: int, t: int, values: Mapping[str, Array]) -> None:
        """A staged step has other values now; called with the writer's lock held."""

    def dropped(self) -> None:
        """What is staged was given up; nothing comes after."""


class CommitPipeline:
    """Holds at most two stagings: one being filled, one on its way to disk.

    Every method but `wait` is called with the writer's lock held; the background thread takes it only if it
    is free, because whoever holds it may be waiting for that thread.

    Args:
        buffer_bytes: Bound of both stagings together.
        schema: The schema as far as it is known.
        settle: Told that everything staged gets its place now; returns the schema, which is then settled.
        make_appender: Makes the stream's appender, at the first hand-off.
        lock: The writer's lock.
        commit_s: Hand off at least this often; None: never by time.
        view: What the stream's record says about others from its birth on.

    Attributes:
        first_row: First row of the stream that is still wanted, as the next record says it.
        view: What the next record says about other streams.
    """

    def __init__(
        self,
        buffer_bytes: int,
        schema: Callable[[], Schema],
        settle: Callable[[], Schema],
        make_appender: Callable[[Schema], StreamAppender],
        lock: threading.RLock,
        commit_s: float | None,
        view: SessionView,
    ) -> None:
        self.first_row = 0
        self.view = view
        self.appender: StreamAppender | None = None
        self.staging: Staging | None = None  # the one being filled
        self.follower: AppendListener | None = None
        self.observer: Observer | None = None
        self._buffer_bytes = buffer_bytes
        self._schema = schema
        self._settle = settle
        self._make_appender = make_appender
        self._lock = lock
        self._placement = Placement()  # touched by the background thread alone
        self._free: list[Staging] = []  # filled by the background thread
        self._n_stagings = 0
        self._columns: list[DerivedColumnChange] = []  # values of derived columns for the next commit
        self._is_view_new = False  # no job has it yet
        self._told_failures: deque[BaseException] = deque()  # of those who were told, not yet raised to anybody
        self.is_ticking = False  # the background thread may have the lock, for a moment
        self.is_overdue = False  # a commit by time found the writer busy; the next append makes up for it
        self._commit_thread: CommitThread[_Job] = CommitThread(self._run, self._hand_off_by_time, commit_s)
        self._commit_thread.start()

    def raise_pending(self) -> None:
        self._commit_thread.raise_pending()
        self.raise_told()

    def raise_told(self) -> None:
        """Raise what somebody raised who was told of a commit; each failure once."""
        if self._told_failures:
            raise self._told_failures.popleft()

    def fill(self) -> Staging:
        """The staging to fill."""
        if self.staging is None:
            self.staging = self._next()
        return self.staging

    @property
    def _can_hand_off(self) -> bool:
        """Whether the other staging is free, so that handing off does not have to wait."""
        return self._n_stagings < 2 or bool(self._free)

    def make_room(self, n: int, n_text: int = 0) -> Staging:
        """A staging with room for ``n`` rows and for so many bytes of text; hands off what is staged to get it."""
        staging = self.fill()
        if n > staging.capacity:
            raise DataError(
                f"one call appends {n} rows, but a buffer of {self._buffer_bytes} bytes takes {staging.capacity}"
                " at a time; raise buffer_bytes"
            )
        if staging.room < n or (staging.n_text and staging.n_text + n_text > self._buffer_bytes // 8):
            self.hand_off()
        return self.fill()

    def reset(self) -> None:
        """Forget the empty staging made for a schema that is not the one after all."""
        self.staging, self._n_stagings = None, 0

    def drop(self) -> int:
        """Forget what is staged, values of columns and an unpublished view; returns how many rows."""
        self._columns, self._is_view_new = [], False
        if self.follower is not None:
            self.follower.dropped()
        n = self.staging.n if self.staging is not None else 0
        if self.staging is not None:
            self.staging.clear()
        return n

    def hand_off(self, told: Told | None = None, *, is_birth: bool = False) -> int:
        """Let the background commit what is staged. Returns the ticket to wait for.

        Args:
            told: Called once it is durable, also if nothing is staged.
            is_birth: Whether to commit even if nothing is staged, so that the stream exists.
        """
        staging = self.staging if self.staging is not None and not self.staging.is_empty else None
        is_view_due = self._is_view_new and self.appender is not None
        if staging is not None or self._columns or is_view_due or is_birth:
            if staging is not None and not self._can_hand_off:
                self._commit_thread.wait(self._commit_thread.n_submitted)  # if this fails, nothing has changed
            schema = self._settle()
            self.is_overdue = False
            if self.appender is None:
                self.appender = self._make_appender(schema)
            if staging is not None:
                if self.follower is not None:
                    self.follower.handed_off(staging)
                self.staging = None
            columns, self._columns = self._columns, []
            self._submit(_Job(schema, staging, columns, told=told))
        elif told is not None:
            self._commit_thread.submit(_Job(told=told))
        return self._commit_thread.n_submitted

    def _submit(self, job: _Job) -> None:
        job.first_row, job.view, self._is_view_new = self.first_row, self.view, False
        self._commit_thread.submit(job)

    def set_view(self, first_row: int, view: SessionView) -> None:
        """Let records say this from the next commit on."""
        self._is_view_new = self._is_view_new or (first_row, view) != (self.first_row, self.view)
        self.first_row, self.view = first_row, view

    def publish_view(self) -> int:
        """Let the background publish the view, and leave what is staged where it is. Returns the ticket."""
        if self.appender is None:
            return self.hand_off(is_birth=True)
        if self._is_view_new:
            self._submit(_Job(self.appender.record.schema))
        return self._commit_thread.n_submitted

    def put_column(self, change: DerivedColumnChange) -> None:
        """Commit values of a derived column together with what is staged; one change of a column at a time."""
        if any((c.target, c.name) == (change.target, change.name) for c in self._columns):
            self.hand_off()
        self._columns.append(change)

    def hand_off_if_free(self) -> None:
        """Hand off unless the disk is behind; then it is done later. Neither waits nor raises."""
        if self._can_hand_off:
            self.hand_off()

    def wait(self, ticket: int) -> None:
        """Wait until everything handed off with this ticket is durable."""
        if not 0 <= ticket <= self._commit_thread.n_submitted:
            raise ValueError(f"ticket: expected one of 0 to {self._commit_thread.n_submitted}, got {ticket!r}")
        self._commit_thread.wait(ticket)

    def seal(self) -> None:
        """Declare the stream finished; nothing is in flight any more."""
        if self.appender is not None:
            self.appender.seal()

    def stop(self) -> None:
        self._commit_thread.stop()
        self.staging, self._free = None, []

    def _next(self) -> Staging:
        if self._free:
            return self._free.pop()
        assert self._n_stagings < 2  # a hand-off leaves the other one free
        schema = self._schema()
        self._n_stagings += 1
        return Staging(schema, staged_rows(self._buffer_bytes, schema.row_bytes))

    def _hand_off_by_time(self) -> None:
        # On the background thread, which must not wait for itself.
        self.is_ticking = True
        try:
            self._hand_off_if_unlocked()
        finally:
            self.is_ticking = False

    def _hand_off_if_unlocked(self) -> None:
        if self._lock.acquire(blocking=False):
            try:
                self.hand_off_if_free()
            finally:
                self._lock.release()
        else:
            self.is_overdue = True

    def _run(self, job: _Job) -> None:
        if job.schema is not None and not job.is_committed:
            self._commit(job, job.schema)
            job.is_committed = True
        if job.staging is not None:
            if self.follower is not None and job.batch is not None:
                self.follower.committed(job.batch.span_ints)
            if self.observer is not None and job.batch is not None and job.schema is not None:
                self._show(self.observer, job.batch, job.schema)
            job.staging.clear()
            self._free.append(job.staging)
        if job.told is not None:
            self._tell(job.told)

    def _commit(self, job: _Job, schema: Schema) -> None:
        assert self.appender is not None
        if job.batch is None:
            if job.staging is not None:
                job.batch = place(job.staging, self._placement, schema)
            else:
                job.batch = empty_batch(schema)
            job.batch.columns, job.batch.first_row, job.batch.view = job.columns, job.first_row, job.view
        self.appender.commit(job.batch)

    def _show(self, observer: Observer, batch: CommitBatch, schema: Schema) -> None:
        try:
            observer(schema, steps_of(batch, schema))
        except Exception as failure:
            _log.warning("somebody who looks at committed steps failed: %s", failure)
            self._told_failures.append(failure)

    def _tell(self, told: Told) -> None:
        record = self.appender.record if self.appender is not None else None
        try:
            told(record if record is not None and record.commit else None)
        except BaseException as failure:  # what is committed is committed; whoever calls next hears of it
            _log.warning("what was to follow a commit failed: %s", failure)
            self._told_failures.append(failure)
