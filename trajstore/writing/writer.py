"""The writer: appends steps and episodes to its own stream, and commits them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import TracebackType

from trajstore.errors import DataError
from trajstore.format.commit_record import CommitRecord
from trajstore.format.step_bytes import StepBytes
from trajstore.schema import Array, Schema
from trajstore.storage import Storage
from trajstore.unclosed import Registration
from trajstore.writing.append_calls import AppendCalls
from trajstore.writing.commit_batch import CommitBatch
from trajstore.writing.commit_pipeline import AppendListener, CommitObserver
from trajstore.writing.derived_columns import DerivedColumns, check_column_values
from trajstore.writing.open_stream import OpenStream
from trajstore.writing.options import WriterOptions
from trajstore.writing.staging import Staging
from trajstore.writing.view_changes import advance_view, check_first_row
from trajstore.writing.writer_call import WriterCall

_log = logging.getLogger(__name__)


class Writer(AppendCalls):
    """Appends to one stream; safe to use from several threads of the process that made it.

    Readers see a step once it is committed: by `commit`, which returns when everything appended before is
    durable, or in the background as the options say. If a background commit fails, the next call raises the
    failure. The failed work is kept, and the next `commit` or `close` retries it.

    Used as a context manager, leaving the block normally commits, marks open episodes as cut and seals the
    stream. Leaving it by an exception drops the steps that no commit has taken yet.

    A writer that is dropped unclosed, or left open at a normal end of the process, is closed then; Python shows a
    `ResourceWarning` if these are enabled.

    Attributes:
        stream: Id of the stream it writes; no other stream ever has the same id.
    """

    def __init__(
        self,
        storage: Storage,
        name: str,
        schema: Schema | None,
        settle_schema: Callable[[Schema], None],
        options: WriterOptions,
    ) -> None:
        stream = OpenStream(storage, name, schema, settle_schema, options)
        self.stream = stream.id
        self._open = stream
        self._storage = storage
        self._options = options
        self._lifecycle = stream.lifecycle
        self._lock = stream.lifecycle.lock
        self._validator = stream.validator
        self._open_episodes = stream.open_episodes
        self._derived_columns = DerivedColumns()
        self._pipeline = stream.pipeline
        self._stager = stream.stager
        parts = stream.lifecycle, stream.validator, stream.pipeline, stream.stager
        self._call = WriterCall(*parts, raises_pending=True)
        self._silent_call = WriterCall(*parts, raises_pending=False)
        where = f"Writer of {storage.display}"
        stream.registration = Registration(self, stream.close, stream.flush, where)

    @property
    def schema(self) -> Schema | None:
        """The schema; None until the first data, in a store that declared none."""
        return self._validator.known

    @property
    def is_closed(self) -> bool:
        return self._lifecycle.is_closed

    @property
    def rank(self) -> int | None:
        """Rank of this writer in its world, as recorded with the stream."""
        return self._options.rank

    def set_append_listener(self, listener: AppendListener) -> None:
        """Set the object that follows appended rows from the staging to the disk.

        Raises:
            ValueError: A listener is set already, or steps were appended.
        """
        with self._lifecycle.own_lock(), self._call:
            if self._pipeline.listener is not None or self._stager.counts["steps"]:
                raise ValueError(f"stream '{self.stream}' has a listener already, or steps were appended before it")
            self._pipeline.listener = listener

    def set_commit_observer(self, observer: CommitObserver) -> None:
        """Call this function with the steps of every commit; the next call raises what it raised."""
        with self._lifecycle.own_lock(), self._call:
            self._pipeline.observer = observer

    def raise_pending(self) -> None:
        """Raise a failure of the background that no call has raised yet."""
        self._pipeline.raise_pending()

    @contextlib.contextmanager
    def locked_staging(self, blocking: bool = False) -> Iterator[Staging | None]:
        """Hold the writer's lock, so that nothing is appended, and give access to the staged steps.

        Yields None if another thread is appending at this moment (unless ``blocking``), if nothing was appended
        yet, or if the writer is closed.
        """
        is_locked = self.lock_staging(blocking)
        try:
            yield self.staging if is_locked else None
        finally:
            if is_locked:
                self.unlock_staging()

    def lock_staging(self, blocking: bool = False) -> bool:
        """Take the writer's lock and return True; return False if another thread has it (unless ``blocking``).

        A caller that got it may look at `staging` until it calls `unlock_staging`.
        """
        return self._lifecycle.try_lock(blocking, self._pipeline.is_ticking)

    def unlock_staging(self) -> None:
        """Release the lock that `lock_staging` took."""
        self._lock.release()

    @property
    def staging(self) -> Staging | None:
        """The staged steps, for callers that hold the lock; None before the first append and once it is closed."""
        if self._validator.known is None or self._lifecycle.is_closed:
            return None
        return self._pipeline.fill()

    @property
    def staged_counts(self) -> tuple[Staging | None, int, int]:
        """The staging, its rows and its episode ends, to see without the lock whether they have changed."""
        staging = self._pipeline.staging
        return (None, 0, 0) if staging is None else (staging, staging.n, staging.n_ends)

    def staged_spans(self) -> tuple[CommitRecord | None, CommitBatch | None]:
        """The newest commit record, and what a commit would add to it now; None if nothing is staged."""
        with self._lock:
            staged = None if self._lifecycle.is_closed else self._pipeline.staged_spans()
            return self.record, staged

    @property
    def record(self) -> CommitRecord | None:
        """The newest commit record; None before the first commit."""
        return self._pipeline.record

    @property
    def committed_rows(self) -> int:
        """Committed rows of the stream, evicted ones included."""
        record = self._pipeline.record
        return record.rows if record is not None else 0

    @property
    def step_bytes(self) -> StepBytes:
        """Sizes of the stream's step objects in the storage, as if none had been evicted."""
        return self._pipeline.step_bytes

    @property
    def first_rows(self) -> dict[str, int]:
        """By stream, the first row that this session still wants, as set with `set_view`; its own included."""
        with self._lifecycle.briefly(), self._lock:
            return {**self._pipeline.view.first_rows, self.stream: self._pipeline.first_row}

    def set_view(
        self,
        *,
        first_row: int | None = None,
        first_rows: Mapping[str, int] | None = None,
        discarded: Mapping[str, Iterable[int]] | None = None,
        dead: Collection[str] | None = None,
    ) -> None:
        """Record, from the next commit on, which rows and streams this session wants; see `publish_view`.

        Adds to earlier calls: marks never move back, and a discarded episode or dead stream stays so. Every commit
        writes the whole view into the record, so keep it short.

        Args:
            first_row: First row of this stream that is still wanted; at most the rows committed so far.
            first_rows: The same for other streams, by id.
            discarded: Episodes that readers do not show, by stream.
            dead: Ids of streams whose writers are declared dead; their open episodes read as cut.

        Raises:
            ValueError: A mark would move back.
            DataError: A value is malformed, or names rows or streams that it must not.
        """
        with self._lifecycle.briefly(), self._lifecycle.own_lock(), self._silent_call:
            pipeline = self._pipeline
            row = check_first_row(self.stream, pipeline.first_row, first_row, self.committed_rows)
            pipeline.set_view(row, advance_view(self.stream, pipeline.view, first_rows, discarded, dead))

    def publish_view(self) -> int:
        """Publish in the background what `set_view` set, even if nothing else is to be committed.

        Staged steps stay staged, unless this creates the stream. The view is published after all commits that were
        requested before, counts as a commit itself, and is retried like other commits if it fails.

        Returns:
            A ticket for `wait`.

        Raises:
            DataError: The store has no schema yet, so no record can be written.
        """
        with self._lifecycle.briefly(), self._lifecycle.own_lock(), self._silent_call:
            if self._validator.known is None:
                raise DataError("publish_view: the store has no schema yet; declare one, or append first")
            return self._pipeline.publish_view()

    def capture_record(self, done: Callable[[CommitRecord | None], None]) -> int:
        """Commit everything appended so far in the background and pass the record of that commit to ``done``.

        The record holds exactly the steps appended before this call: a checkpoint uses it. The call copies no steps
        and does not wait until they are durable. If both halves of the buffer are full, it waits until one is free,
        as an append would.

        Args:
            done: The background thread calls it once, when everything appended before is durable, with the record
                of that commit, or with None if nothing was ever committed. Later commits wait for it, so it
                should be quick, and it must not call the writer. If it raises, the commit stays; the exception is
                logged and raised by the writer's next call. Never called if the writer is released before that.

        Returns:
            A ticket for `wait`.
        """
        if not callable(done):
            raise TypeError(f"done: expected a function that takes the record, got {done!r:.80}")
        with self._lifecycle.own_lock(), self._silent_call:
            return self._pipeline.hand_off(done)

    def wait(self, ticket: int) -> None:
        """Wait until the work of a ticket is durable and its callback has returned; failed work is retried first.

        Raises:
            BaseException: The retry failed again; this is its error.
        """
        self._lifecycle.check_process()
        self._pipeline.wait(ticket)

    def put_column(
        self, name: str, target: str, values: Array, *, first: int = 0, rows: Array | None = None
    ) -> None:
        """Store values of a derived column, computed after collection, with the next commit.

        This writer's own stream holds the values; the steps themselves never change. Where several writers have a
        column for the same rows, the column of the newest writer counts.

        Args:
            name: Name of the column.
            target: Id of the stream whose rows the values belong to.
            values: ``[n, ...]``: a whole new generation of the column, for rows from ``first`` on; or values of
                single rows. Not copied: do not change them until they are committed.
            first: Row of the first value.
            rows: The rows to change, if not all; this writer must have put the whole column before.
        """
        value_field = check_column_values(name, target, values, first)
        with self._lifecycle.own_lock(), self._call:
            change = self._derived_columns.change(name, target, value_field, values, first, rows)
            self._pipeline.put_column(change)

    def reserve_name(self, name: str) -> None:
        """Refuse a field of this name, if the fields are not known yet."""
        self._open.validator.reserve(name)

    def commit(self) -> None:
        """Make everything appended so far durable and visible; returns when it is."""
        with self._lifecycle.own_lock(), self._call:
            ticket = self._pipeline.hand_off()
        self._pipeline.wait(ticket)  # without the lock, so that other threads can append

    def begin_commit(self) -> None:
        """Start committing everything appended so far in the background, unless the last commit is not finished.

        Neither waits nor raises: if the commit fails, the next call raises the failure.
        """
        with self._lock:
            if not self._lifecycle.is_closed:
                self._pipeline.hand_off_if_free()

    def close(self) -> None:
        """Commit, mark open episodes as cut, seal the stream and release everything.

        If it fails, it may be called again; until it succeeds, steps that are not durable stay in memory.
        """
        self._open.close()

    def discard(self) -> None:
        """Drop the steps that no commit has taken yet, and seal the stream.

        Steps that a commit took, by call or in the background, stay.
        """
        self._open.discard()

    def release(self) -> None:
        """End the commit thread. Steps that are not durable are lost, and the stream stays unsealed."""
        self._open.release()

    def leave_to_owner(self) -> None:
        """Let the caller close the writer: it is no longer closed when it is dropped, or when the process ends."""
        self._open.leave_to_owner()

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.close()
            else:
                n_before = self._stager.counts["dropped_steps"]
                self.discard()
                self._warn_of_dropped(self._stager.counts["dropped_steps"] - n_before)
        except Exception as failure:
            self.release()
            if error is None:
                raise
            # The block's own exception matters more; this one travels with it.
            error.add_note(f"trajstore: the writer could not finish its last commit either: {failure}")

    def _warn_of_dropped(self, n_dropped: int) -> None:
        if n_dropped:
            _log.warning(
                "stream %s: an exception left the block of the writer, so %d steps that no commit had taken were"
                " dropped; to keep such steps, call commit() or close()",
                self.stream,
                n_dropped,
            )

    def stats(self) -> dict[str, int]:
        """Counts of steps, episodes and commits: appended, dropped, staged and committed."""
        with self._lock:
            return self._stager.counts | self._open_episodes.stats() | self._pipeline.stats()

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else "open"
        return f"<Writer {self.stream} of {self._storage.display}, {state}>"
