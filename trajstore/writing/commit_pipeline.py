"""Takes appended rows to disk: the writer fills one staging while the commit thread commits the other."""

from __future__ import annotations

import copy
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from trajstore.errors import DataError
from trajstore.format.commit_record import CommitRecord, SessionView
from trajstore.format.step_bytes import StepBytes
from trajstore.schema import Array, Schema
from trajstore.writing.commit_batch import CommitBatch, DerivedColumnChange
from trajstore.writing.commit_thread import CommitThread
from trajstore.writing.placement import Placement, added_values, empty_batch, place
from trajstore.writing.staging import Staging, bytes_for_rows, staged_rows
from trajstore.writing.stream_appender import StreamAppender

_log = logging.getLogger(__name__)

RecordCallback = Callable[[CommitRecord | None], None]  # called with the newest record
CommitObserver = Callable[[Schema, Mapping[str, Array]], None]  # called with the steps of every commit


@dataclass(slots=True)
class _Job:
    """One hand-off: placed once, committed until that succeeds; then ``on_durable`` is called, once."""

    schema: Schema | None = None  # None: nothing to commit
    staging: Staging | None = None  # None: no steps
    columns: list[DerivedColumnChange] = field(default_factory=list)
    first_row: int = 0
    view: SessionView = field(default_factory=SessionView)
    on_durable: RecordCallback | None = None
    batch: CommitBatch | None = None
    is_committed: bool = False


class AppendListener(Protocol):
    """Follows appended rows from the staging to the disk."""

    def handed_off(self, staging: Staging) -> None:
        """A staging is complete and will be committed. Called with the writer's lock held.

        The listener may read its rows until `committed` is called for it.
        """

    def committed(self, spans: Array) -> bool:
        """The spans of a staging are durable. Called from the background thread, in order.

        Returns:
            Whether the listener is still reading the staging's rows, so that it must not be filled again.
        """

    def amended(self, episode: int, t: int, values: Mapping[str, Array]) -> None:
        """A staged step got other values. Called with the writer's lock held."""

    def dropped(self) -> None:
        """The staged rows were dropped; no other call follows."""


class CommitPipeline:
    """Holds at most two stagings: one that is being filled, and one that is being committed.

    Callers hold the writer's lock, except for `wait`. The background thread takes that lock only if it is
    free, because the holder may be waiting for the thread.

    Args:
        buffer_bytes: Bound of both stagings together.
        schema: Returns the schema as far as it is known.
        settle: Called before each hand-off: staged rows get their places now, so the schema is final. Returns it.
        make_appender: Makes the stream's appender, at the first hand-off.
        lock: The writer's lock.
        commit_s: The most seconds between hand-offs; None: no hand-offs by time.
        view: Decisions about other streams that the stream's first record carries.

    Attributes:
        first_row: First row of the stream that is still wanted, for the next record.
        view: Decisions about other streams, for the next record.
        appender: The stream's appender; None before the first hand-off.
        staging: The staging that is being filled, if there is one.
        listener: Follows appended rows, if set.
        observer: Called with the steps of every commit, if set.
        is_ticking: Whether the background thread may hold the lock, for a moment.
        max_text: Bytes of text after which a staging is handed off.
        is_overdue: Whether a commit by time found the lock taken; the next append makes up for it.
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
        self.staging: Staging | None = None
        self.listener: AppendListener | None = None
        self.observer: CommitObserver | None = None
        self.is_ticking = False
        self.is_overdue = False
        self.max_text = buffer_bytes // 8
        self._buffer_bytes = buffer_bytes
        self._schema = schema
        self._settle = settle
        self._make_appender = make_appender
        self._lock = lock
        self._placement = Placement()  # only the background thread uses it
        self._free: list[Staging] = []  # the background thread puts committed stagings here
        self._n_stagings = 0
        self._columns: list[DerivedColumnChange] = []  # values of derived columns for the next commit
        self._is_view_new = False  # whether no job carries the view yet
        self._callback_failures: deque[BaseException] = deque()  # raised by callbacks, not yet by any call
        self._commit_thread: CommitThread[_Job] = CommitThread(self._run, self._hand_off_by_time, commit_s)
        self._commit_thread.start()

    @property
    def record(self) -> CommitRecord | None:
        """The newest commit record; None before the first commit."""
        record = self.appender.record if self.appender is not None else None
        return record if record is not None and record.commit else None

    @property
    def step_bytes(self) -> StepBytes:
        """Sizes of the stream's step objects."""
        return self.appender.step_bytes if self.appender is not None else StepBytes()

    def stats(self) -> dict[str, int]:
        """Counts of staged rows, and of commits and what they hold."""
        record = self.record
        return {
            "staged_rows": self.staging.n if self.staging else 0,
            "commits": record.commit if record else 0,
            "committed_rows": record.rows if record else 0,
            "committed_spans": record.spans if record else 0,
        }

    def raise_pending(self) -> None:
        """Raise a failure of the background that no call has raised yet; each failure is raised once."""
        self._commit_thread.raise_pending()
        self.raise_callback_failure()

    def raise_callback_failure(self) -> None:
        """Raise what a callback or an observer raised after a commit; each failure is raised once."""
        if self._callback_failures:
            raise self._callback_failures.popleft()

    def fill(self) -> Staging:
        """The staging to append to."""
        if self.staging is None:
            self.staging = self._next()
        return self.staging

    @property
    def _can_hand_off(self) -> bool:
        """Whether the other staging is free, so that a hand-off does not have to wait."""
        return self._n_stagings < 2 or bool(self._free)

    def make_room(self, n: int, n_text: int = 0, most: int = 0) -> Staging:
        """A staging with room for ``n`` rows and ``n_text`` bytes of text; hands off a full one first.

        Raises:
            DataError: A staging does not hold as many rows, or the ``most`` that such a call may append: what does
                not work is refused with the first call.
        """
        staging = self.fill()
        if max(n, most) > staging.capacity:
            raise DataError(
                f"one call appends up to {max(n, most)} rows, but a buffer of {self._buffer_bytes} bytes takes"
                f" {staging.capacity} at a time; raise buffer_bytes to at least"
                f" {bytes_for_rows(max(n, most), self._schema().row_bytes)}"
            )
        if staging.room < n or (staging.n_text and staging.n_text + n_text > self.max_text):
            self.hand_off()
        return self.fill()

    def reset(self) -> None:
        """Forget the empty staging that was made for an inferred schema whose data was then refused."""
        self.staging, self._n_stagings = None, 0

    def drop(self) -> int:
        """Forget staged rows, values of derived columns and an unpublished view; return the number of rows."""
        self._columns, self._is_view_new = [], False
        if self.listener is not None:
            self.listener.dropped()
        n = self.staging.n if self.staging is not None else 0
        if self.staging is not None:
            self.staging.clear()
        return n

    def hand_off(self, on_durable: RecordCallback | None = None, *, creates_stream: bool = False) -> int:
        """Give everything staged to the background thread to commit. Returns the ticket to wait for.

        Waits for the other staging if the thread is still committing that one.

        Args:
            on_durable: Called once the rows are durable, also if nothing is staged.
            creates_stream: Whether to commit even if nothing is staged, so that the stream exists.
        """
        staging = self.staging if self.staging is not None and not self.staging.is_empty else None
        is_view_due = self._is_view_new and self.appender is not None
        if staging is not None or self._columns or is_view_due or creates_stream:
            if staging is not None and not self._can_hand_off:
                self._commit_thread.wait(self._commit_thread.n_submitted)  # if this fails, nothing has changed
            schema = self._settle()
            self.is_overdue = False
            if self.appender is None:
                self.appender = self._make_appender(schema)
            if staging is not None:
                if self.listener is not None:
                    self.listener.handed_off(staging)
                self.staging = None
            columns, self._columns = self._columns, []
            self._submit(_Job(schema, staging, columns, on_durable=on_durable))
        elif on_durable is not None:
            self._commit_thread.submit(_Job(on_durable=on_durable))
        return self._commit_thread.n_submitted

    def _submit(self, job: _Job) -> None:
        job.first_row, job.view, self._is_view_new = self.first_row, self.view, False
        self._commit_thread.submit(job)

    def set_view(self, first_row: int, view: SessionView) -> None:
        """Set what records say from the next commit on."""
        self._is_view_new = self._is_view_new or (first_row, view) != (self.first_row, self.view)
        self.first_row, self.view = first_row, view

    def publish_view(self) -> int:
        """Publish the view in the background without committing staged rows. Returns the ticket to wait for.

        If the stream does not exist yet, staged rows are committed as well.
        """
        if self.appender is None:
            return self.hand_off(creates_stream=True)
        if self._is_view_new:
            self._submit(_Job(self.appender.record.schema))
        return self._commit_thread.n_submitted

    def put_column(self, change: DerivedColumnChange) -> None:
        """Commit values of a derived column with the next commit; a commit holds one change of each column."""
        if any((c.target, c.name) == (change.target, change.name) for c in self._columns):
            self.hand_off()
        self._columns.append(change)

    def hand_off_if_free(self) -> None:
        """Hand off unless the thread is still committing the other staging. Neither waits nor raises."""
        if self._can_hand_off:
            self.hand_off()

    def wait(self, ticket: int) -> None:
        """Wait until everything up to the hand-off with this ticket is durable."""
        if not 0 <= ticket <= self._commit_thread.n_submitted:
            raise ValueError(f"ticket: expected 0 to {self._commit_thread.n_submitted}, got {ticket!r}")
        self._commit_thread.wait(ticket)

    def staged_spans(self) -> CommitBatch | None:
        """What a commit of the staged rows would add to the stream; None if nothing is staged.

        Waits for the commit that is running, because its rows come first. Cost is proportional to the staged rows.
        """
        self._commit_thread.wait(self._commit_thread.n_submitted)
        if self.staging is None or self.staging.is_empty:
            return None
        return place(self.staging, copy.deepcopy(self._placement), self._schema())

    def seal(self) -> None:
        """Declare the stream finished; the caller has waited for all hand-offs."""
        if self.appender is not None:
            self.appender.seal()

    def stop(self) -> None:
        """End the background thread and free the stagings."""
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
        """Commit one job, then inform the listener, the observer and the job's callback."""
        if job.schema is not None and not job.is_committed:
            self._commit(job, job.schema)
            job.is_committed = True
        if job.staging is not None and job.schema is not None:
            is_read = False
            if self.listener is not None and job.batch is not None:
                is_read = self.listener.committed(job.batch.span_ints)
            if self.observer is not None and job.batch is not None:
                self._call_observer(self.observer, job.batch, job.schema)
            if is_read:
                self._free.append(Staging(job.schema, job.staging.capacity))
            else:
                job.staging.clear()
                self._free.append(job.staging)
        if job.on_durable is not None:
            self._call_back(job.on_durable)

    def _commit(self, job: _Job, schema: Schema) -> None:
        assert self.appender is not None
        if job.batch is None:
            if job.staging is not None:
                job.batch = place(job.staging, self._placement, schema)
            else:
                job.batch = empty_batch(schema)
            job.batch.columns, job.batch.first_row, job.batch.view = job.columns, job.first_row, job.view
        self.appender.commit(job.batch)

    def _call_observer(self, observer: CommitObserver, batch: CommitBatch, schema: Schema) -> None:
        try:
            observer(schema, added_values(batch, schema))
        except Exception as failure:
            _log.warning("an observer of committed steps failed: %s", failure)
            self._callback_failures.append(failure)

    def _call_back(self, on_durable: RecordCallback) -> None:
        try:
            on_durable(self.record)
        except BaseException as failure:  # the commit stays; the writer's next call raises this
            _log.warning("a callback after a commit failed: %s", failure)
            self._callback_failures.append(failure)
