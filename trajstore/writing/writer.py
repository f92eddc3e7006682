"""The writer: appends steps and episodes to its own stream, and commits them."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

from trajstore.arguments import parse_bytes
from trajstore.errors import DataError, TrajstoreError
from trajstore.format.commit_record import CommitRecord, SessionView, stream_layouts
from trajstore.format.handles import EpisodeKey, Handle, Handles
from trajstore.format.ids import new_id
from trajstore.schema import Array, Schema
from trajstore.storage import Storage
from trajstore.writing.commit_pipeline import AppendListener, CommitObserver, CommitPipeline
from trajstore.writing.derived_columns import DerivedColumns, check_column_values
from trajstore.writing.episode_stager import EpisodeStager
from trajstore.writing.lifecycle import WriterLifecycle
from trajstore.writing.open_episodes import Flags, OpenEpisodes
from trajstore.writing.options import WriterOptions
from trajstore.writing.staging import Staging
from trajstore.writing.stream_appender import StreamAppender
from trajstore.writing.validation import Step, StepValidator
from trajstore.writing.view_changes import advance_view, check_first_row

_log = logging.getLogger(__name__)


class Writer:
    """Appends to one stream; safe to use from several threads of the process that made it.

    Readers see a step once it is committed: by `commit`, which returns when everything appended before is
    durable, or in the background as the options say. If a background commit fails, the next call raises the
    failure. The failed work is kept, and the next `commit` or `close` retries it.

    Used as a context manager, leaving the block normally commits, marks open episodes as cut and seals the
    stream. Leaving it by an exception drops the steps that no commit has taken yet.

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
        self.stream = new_id(name)
        self._created_at = time.time()
        self._name = name
        self._storage = storage
        self._settle_schema = settle_schema
        self._options = options
        self._lifecycle = WriterLifecycle(self.stream)
        self._lock = self._lifecycle.lock
        self._validator = StepValidator(schema)
        self._open_episodes = OpenEpisodes()
        self._derived_columns = DerivedColumns()
        self._pipeline = CommitPipeline(
            parse_bytes(options.buffer_bytes, "buffer_bytes"),
            lambda: self._validator.schema,
            self._settle,
            self._make_appender,
            self._lock,
            options.commit_seconds,
            SessionView(dead=tuple(dict.fromkeys(options.dead))),
        )
        self._stager = EpisodeStager(
            self.stream, self._validator, self._open_episodes, self._pipeline, options.commit_steps
        )

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

    def append(
        self,
        step: Step,
        *,
        env: int | None = None,
        envs: Iterable[int] | None = None,
        terminated: Flags = None,
        truncated: Flags = None,
        final: Step | None = None,
    ) -> Handle | Handles:
        """Append one step of one environment, or of several at once; starts an episode where none is open.

        Args:
            step: Values by field; with ``envs``, each with a leading axis over them. Copied.
            env: The environment (0 if neither is given).
            envs: Several environments, each at most once.
            terminated: Whether the episode ends with this step; with ``envs``, one flag each.
            truncated: The same, for time limits and the like. Where both are set, terminated counts.
            final: Final values (next observations) of episodes that end here; with ``envs``, a row for each
                environment, of which only those that end are stored.

        Returns:
            The handle of the step, or the handles of all of them.
        """
        with self._call():
            if envs is None:
                return self._stager.append_step(step, 0 if env is None else env, terminated, truncated, final)
            if env is not None:
                raise DataError("give either env or envs, not both")
            return self._stager.append_steps(step, envs, terminated, truncated, final)

    def append_episode(
        self,
        data: Step,
        *,
        terminated: bool = False,
        truncated: bool = False,
        env: int = 0,
        metadata: Mapping[str, Any] | None = None,
    ) -> EpisodeKey:
        """Append a whole episode of T steps.

        Args:
            data: Arrays of T rows by field; fields with a final value may have T + 1, all of them or none. Copied.
            terminated: It ended in a terminal state.
            truncated: It was stopped from outside. With neither, the recording was cut.
            env: The environment it was recorded in; must have no open episode.
            metadata: Values of declared episode columns, and anything else that JSON can hold.

        Returns:
            The episode's key, valid for ever.
        """
        with self._call():
            return self._stager.append_episode(data, env, terminated, truncated, metadata)

    def append_rollout(
        self,
        data: Step,
        *,
        envs: Iterable[int] | None = None,
        terminated: Flags = None,
        truncated: Flags = None,
        final: Step | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Handles:
        """Append a block of T steps of B environments; episodes may end anywhere in it.

        The block is stored whole or not at all, so it must fit half of ``buffer_bytes``.

        Args:
            data: Arrays ``[T, B, ...]`` by field. Copied.
            envs: The B environments; 0 to B - 1 by default.
            terminated: Flags ``[T, B]``: the episode ends with that step; the next step starts another.
            truncated: The same; where both are set, terminated counts.
            final: Arrays ``[T, B, ...]`` of final values; only those of steps that end an episode are stored.
            metadata: As for `append_episode`, for every episode that ends in the block.

        Returns:
            Handles with arrays ``[T, B]``.
        """
        with self._call():
            return self._stager.append_rollout(data, envs, terminated, truncated, final, metadata)

    def end_episode(
        self,
        env: int = 0,
        *,
        terminated: bool = False,
        truncated: bool = False,
        final: Step | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> EpisodeKey:
        """End the open episode of an environment.

        Args:
            env: Which environment.
            terminated: It ended in a terminal state.
            truncated: It was stopped from outside. One of the two must be true.
            final: Final values of the fields that have one.
            metadata: Values of declared episode columns, and anything else that JSON can hold.
        """
        with self._call():
            return self._stager.end_episode(env, terminated, truncated, final, metadata)

    def abort_episode(self, env: int = 0) -> EpisodeKey:
        """Give up the open episode of an environment. Its placed steps stay readable, marked aborted."""
        with self._call():
            return self._stager.abort_episode(env)

    def amend(self, values: Step, *, env: int = 0, t: int | None = None) -> Handle:
        """Replace values of a step that is not placed yet (a human took over and acted differently).

        Args:
            values: The fields to replace.
            env: The environment, which must have an open episode.
            t: Which step of the open episode; the newest by default.

        Raises:
            StepPlacedError: A commit has given the step its place on disk.
        """
        with self._call():
            return self._stager.amend(values, env, t)

    def set_append_listener(self, listener: AppendListener) -> None:
        """Set the object that follows appended rows from the staging to the disk.

        Call it once, before anything is appended.

        Raises:
            ValueError: A listener is set already, or steps were appended.
        """
        with self._call():
            if self._pipeline.listener is not None or self._stager.counts["steps"]:
                raise ValueError(
                    f"writer of stream '{self.stream}' has a listener already, or steps were appended before it"
                )
            self._pipeline.listener = listener

    def set_commit_observer(self, observer: CommitObserver) -> None:
        """Set the function that the background thread calls with the steps of every commit, by field and in order.

        If it raises, the commit stays; the exception is logged and raised by the writer's next call.
        """
        with self._call():
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
        if not self._lifecycle.try_lock(blocking, self._pipeline.is_ticking):
            yield None
            return
        try:
            is_ready = self._validator.known is not None and not self._lifecycle.is_closed
            yield self._pipeline.fill() if is_ready else None
        finally:
            self._lock.release()

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
    def n_bytes_put(self) -> int:
        """Size of the stream's step and span objects in the storage, as if none had been evicted."""
        appender = self._pipeline.appender
        return appender.n_bytes if appender is not None else 0

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
        with self._lifecycle.briefly(), self._call(raises_pending=False):
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
        with self._lifecycle.briefly(), self._call(raises_pending=False):
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
        with self._call(raises_pending=False):
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
        with self._call():
            change = self._derived_columns.change(name, target, value_field, values, first, rows)
            self._pipeline.put_column(change)

    def commit(self) -> None:
        """Make everything appended so far durable and visible; returns when it is."""
        with self._call():
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
        with self._last_call() as is_open:
            if not is_open:
                return
            if not self._lifecycle.is_ending:  # else an earlier close or an interrupt: add nothing more
                self._lifecycle.is_ending = True
                if n_cut := self._stager.cut_open_episodes():
                    _log.info("stream %s: %d open episodes are kept as cut", self.stream, n_cut)
            self._seal()

    def discard(self) -> None:
        """Drop the steps that no commit has taken yet, and seal the stream.

        Steps that a commit took, by call or in the background, stay.
        """
        with self._last_call() as is_open:
            if is_open:
                self._lifecycle.is_ending = True
                self._stager.drop()
                self._seal()

    def _seal(self) -> None:
        self._pipeline.wait(self._pipeline.hand_off())
        self._pipeline.seal()
        self.release()
        self._pipeline.raise_callback_failure()

    def release(self) -> None:
        """End the commit thread. Steps that are not durable are lost, and the stream stays unsealed."""
        self._lifecycle.is_closed = True
        self._pipeline.stop()

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close() if error is None else self.discard()
        except Exception as failure:
            self.release()
            if error is None:
                raise
            # The block's own exception matters more; this one travels with it.
            error.add_note(f"trajstore: the writer could not finish its last commit either: {failure}")

    def stats(self) -> dict[str, int]:
        """Counts of steps, episodes and commits: appended, dropped, staged and committed."""
        with self._lock:
            return self._stager.counts | self._open_episodes.stats() | self._pipeline.stats()

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else "open"
        return f"<Writer {self.stream} of {self._storage.display}, {state}>"

    @contextlib.contextmanager
    def _call(self, *, raises_pending: bool = True) -> Iterator[None]:
        """Take the lock, raise a pending failure, and undo a schema inferred from data that is then refused."""
        self._lifecycle.check_process()
        with self._lock:
            self._lifecycle.check_open()
            if raises_pending:  # helper threads leave the failure to the writer's user
                self._pipeline.raise_pending()
            try:
                with self._validator.attempt():
                    yield
            except (TrajstoreError, ValueError, TypeError, LookupError, OSError):
                raise  # refused or failed before anything was changed
            except BaseException:
                # Ctrl-C may have come in the middle of a change, so staged steps may be torn.
                self._lifecycle.is_ending = True
                self._stager.drop()
                raise
            finally:
                if self._validator.known is None:
                    self._pipeline.reset()

    @contextlib.contextmanager
    def _last_call(self) -> Iterator[bool]:
        self._lifecycle.check_process()
        with self._lock:
            yield not self._lifecycle.is_closed

    def _settle(self) -> Schema:
        self._open_episodes.mark_placed()
        return self._validator.settle()

    def _make_appender(self, schema: Schema) -> StreamAppender:
        options = self._options
        record = CommitRecord(
            self.stream,
            self._name,
            schema,
            stream_layouts(schema, options.commit_steps),
            created_at=self._created_at,
            committed_at=self._created_at,
            rank=options.rank,
            world_size=options.world_size,
            world=options.world,
            checkpoint=options.checkpoint,
            view=self._pipeline.view,
        )
        return StreamAppender(self._storage, record, self._settle_schema)
