"""The writer: appends steps and episodes to a stream of its own, and commits them."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

import numpy as np

from trajstore.arguments import parse_bytes
from trajstore.errors import ClosedError, DataError, StepPlacedError, TrajstoreError
from trajstore.format.array_layout import MAX_ROWS
from trajstore.format.commit_record import CommitRecord, SessionView, check_count, check_mark, stream_layouts
from trajstore.format.handles import EpisodeKey, Handle, Handles
from trajstore.format.ids import is_column_name, is_stream_id, new_id
from trajstore.format.spans import End, EpisodeValues, check_metadata
from trajstore.schema import Array, Field, Schema
from trajstore.storage import Storage
from trajstore.writing.commit_pipeline import AppendListener, CommitPipeline, Observer
from trajstore.writing.open_episodes import Flags, OpenEpisodes, check_ends, end_of
from trajstore.writing.options import WriterOptions
from trajstore.writing.staging import EndEvent, Staging
from trajstore.writing.stream_appender import DerivedColumnChange, StreamAppender, empty_record
from trajstore.writing.validation import Step, StepValidator, leading_shape

_log = logging.getLogger(__name__)


_TICK_S = 0.1


class Writer:
    """Appends to one stream; safe to use from several threads of the process that made it.

    A step is visible to readers once it is committed: by `commit`, which returns when everything appended
    before is durable, or in the background as the options say. A failure in the background is raised by the next
    call; the work that failed is kept and tried again by the next `commit` or `close`.

    Used as a context manager, leaving the block normally commits, marks open episodes as cut and seals the
    stream; leaving it by an exception drops what was appended after the last commit that was asked for.

    Attributes:
        stream: Id of the stream it writes, unique for ever.
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
        self._lock = threading.RLock()
        self._in_brief: set[int] = set()  # threads that have the lock, or want it, for a moment
        self._pid = os.getpid()
        self._is_closed = False
        self._is_ending = (
            False  # close or discard was called, or an interrupt tore a change; nothing is taken any more
        )
        self._intake = StepValidator(schema)
        self._lanes = OpenEpisodes()
        self._counts = dict.fromkeys(("steps", "dropped_steps", "aborted_episodes", "cut_episodes"), 0)
        self._put_columns: dict[tuple[str, str], tuple[int, Field]] = {}  # first row and kind of what was put
        self._pipeline = CommitPipeline(
            parse_bytes(options.buffer_bytes, "buffer_bytes"),
            lambda: self._intake.schema,
            self._settle,
            self._make_appender,
            self._lock,
            options.commit_seconds,
            SessionView(dead=tuple(dict.fromkeys(options.dead))),
        )

    @property
    def schema(self) -> Schema | None:
        """The schema; None until the first data, in a store that declared none."""
        return self._intake.known

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def rank(self) -> int | None:
        """Of this writer among those of its world, as recorded with the stream."""
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
            final: Final values (next observations) of what ends here; with ``envs``, a row for each
                environment, of which only those that end are stored.

        Returns:
            The handle of the step, or the handles of all of them.
        """
        with self._call():
            if envs is None:
                return self._append_one(step, 0 if env is None else env, terminated, truncated, final)
            if env is not None:
                raise DataError("give either env or envs, not both")
            return self._append_many(step, self._lanes.check_envs(envs), terminated, truncated, final)

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
            end = end_of(terminated, truncated, End.CUT)
            rows, n_steps, has_final = self._intake.episode(data)
            values = check_metadata(self._intake.schema, metadata)
            env = self._lanes.check_env(env)
            if self._lanes.episode[env] >= 0:
                raise DataError(f"env {env} has an open episode; end it before appending a whole one")
            n = n_steps + has_final
            self._pipeline.make_room(min(n, self._pipeline.fill().capacity), len(values.text))
            episode = self._lanes.start_one(env)
            try:
                self._stage_episode(rows, env, episode, n)
            except BaseException:  # part of an episode larger than the buffer may be on disk already
                self._abort(env)
                raise
            self._counts["steps"] += n_steps
            self._end(env, end, has_final, values)
            self._commit_by_count()
            return EpisodeKey(self.stream, episode)

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
        """Append a block of T steps of B environments, with episodes ending anywhere inside.

        It is taken whole or not at all, so it must fit half of ``buffer_bytes``.

        Args:
            data: Arrays ``[T, B, ...]`` by field. Copied.
            envs: The B environments; 0 to B - 1 by default.
            terminated: Flags ``[T, B]``: the episode ends with that step; the next step starts another.
            truncated: The same; where both are set, terminated counts.
            final: Arrays ``[T, B, ...]`` of final values; only those of steps that end an episode are stored.
            metadata: As for `append_episode`, of every episode that ends in the block.

        Returns:
            Handles with arrays ``[T, B]``.
        """
        with self._call():
            shape = leading_shape(data, 2)
            env = self._lanes.check_envs(range(shape[1]) if envs is None else envs)
            if len(env) != shape[1]:
                raise DataError(f"rollout: {len(env)} envs, but the data has {shape[1]} columns")
            rows = self._intake.steps(data, shape, final)
            finals = self._intake.finals(final, shape)
            values = check_metadata(self._intake.schema, metadata)
            return self._stage_rollout(rows, env, check_ends(terminated, truncated, shape), finals, values)

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
            episode = self._lanes.open_episode(env)
            end = end_of(terminated, truncated, End.OPEN)
            if end is End.OPEN:
                raise DataError("end_episode: expected terminated=True or truncated=True")
            finals = self._intake.finals(final, ())
            values = check_metadata(self._intake.schema, metadata)
            self._pipeline.make_room(int(finals is not None), len(values.text))
            if finals is not None:
                self._stage_final(_as_rows(finals), np.array([episode]), np.array([env]))
            self._end(env, end, finals is not None, values)
            return EpisodeKey(self.stream, episode)

    def abort_episode(self, env: int = 0) -> EpisodeKey:
        """Give up the open episode of an environment: it stays readable as far as placed, marked aborted."""
        with self._call():
            episode = self._lanes.open_episode(env)
            self._pipeline.fill()
            self._abort(env)
            return EpisodeKey(self.stream, episode)

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
            episode = self._lanes.open_episode(env)
            n = int(self._lanes.t[env])
            step = n - 1 if t is None else t
            if not isinstance(step, (int, np.integer)) or not 0 <= step < n:
                raise DataError(f"t: the open episode of env {env} has steps 0 to {n - 1}, got {t!r}")
            rows = self._intake.amendment(values)
            staging = self._pipeline.fill()
            row = staging.find(episode, step - int(self._lanes.placed[env]))
            if row is None:
                raise StepPlacedError(
                    f"step {step} of env {env} is committed; only steps appended since can be amended"
                )
            for path, value in rows.items():
                staging.columns[path][row] = value
            if self._pipeline.follower is not None:
                self._pipeline.follower.amended(episode, int(step), rows)
            return Handle(self.stream, episode, step)

    def set_append_listener(self, follower: AppendListener) -> None:
        """Tell somebody what becomes of appended rows, from now on; nothing was appended before."""
        with self._call():
            if self._pipeline.follower is not None or self._counts["steps"]:
                raise ValueError(f"writer of stream '{self.stream}' is followed already, or has begun")
            self._pipeline.follower = follower

    def set_commit_observer(self, observer: Observer) -> None:
        """Show somebody the steps of every commit, by field, on the background thread and in order.

        What it raises is logged and raised by the writer's next call; the commit stays.
        """
        with self._call():
            self._pipeline.observer = observer

    def raise_pending(self) -> None:
        """Raise what failed in the background and was not raised to anybody yet."""
        self._pipeline.raise_pending()

    @contextlib.contextmanager
    def locked_staging(self, blocking: bool = False) -> Iterator[Staging | None]:
        """The steps that are staged, while nothing is appended.

        None if somebody is appending at this moment (unless ``blocking``), if nothing was appended yet, or if the
        writer is closed.
        """
        # Background threads have the lock but for a moment: waiting for them, a reader misses nothing.
        if not self._lock.acquire(blocking=blocking) and not (
            (self._pipeline.is_ticking or self._in_brief) and self._lock.acquire(timeout=_TICK_S)
        ):
            yield None
            return
        try:
            is_ready = self._intake.known is not None and not self._is_closed
            yield self._pipeline.fill() if is_ready else None
        finally:
            self._lock.release()

    @property
    def record(self) -> CommitRecord | None:
        """The newest commit record; None before the first commit."""
        appender = self._pipeline.appender
        return appender.record if appender is not None and appender.record.commit else None

    @property
    def committed_rows(self) -> int:
        """Rows of the stream that are committed, evicted ones included."""
        appender = self._pipeline.appender
        return appender.record.rows if appender is not None else 0

    @property
    def n_bytes_put(self) -> int:
        """Size of the stream's step and span objects on the storage, if none were evicted."""
        appender = self._pipeline.appender
        return appender.n_bytes if appender is not None else 0

    @property
    def first_rows(self) -> dict[str, int]:
        """By stream, the first row that this session still wants, as far as `set_view` said; its own included."""
        with self._briefly(), self._lock:
            return {**self._pipeline.view.first_rows, self.stream: self._pipeline.first_row}

    @contextlib.contextmanager
    def _briefly(self) -> Iterator[None]:
        """This thread takes the lock for a moment only, and appends nothing."""
        self._in_brief.add(threading.get_ident())
        try:
            yield
        finally:
            self._in_brief.discard(threading.get_ident())

    def set_view(
        self,
        *,
        first_row: int | None = None,
        first_rows: Mapping[str, int] | None = None,
        discarded: Mapping[str, Iterable[int]] | None = None,
        dead: Collection[str] | None = None,
    ) -> None:
        """Say what this session still wants, from the next commit on; see `publish_view`.

        What was said before stays: marks never go back, and nothing that was discarded or dead is so no longer.
        It stands in the record, which every commit writes whole, so keep it short.

        Args:
            first_row: First row of this stream that is still wanted; at most the rows committed so far.
            first_rows: The same for other streams, by id.
            discarded: Episodes that are not to be shown, by stream.
            dead: Ids of streams whose writers are declared dead; their open episodes read as cut.

        Raises:
            ValueError: A mark would go back.
            DataError: A value is none, or names rows or streams that it can't.
        """
        with self._briefly(), self._call(raises_pending=False):
            old = self._pipeline.first_row
            new = old if first_row is None else check_count(first_row, "first_row")
            check_mark(self.stream, old, new)
            if new > self.committed_rows:
                raise DataError(f"first_row: expected at most the {self.committed_rows} rows committed, got {new}")
            view = self._pipeline.view.advanced(first_rows, discarded, dead)
            if self.stream in view.first_rows:
                raise DataError(f"first_rows: stream '{self.stream}' is the writer's own; give first_row")
            if self.stream in view.dead:
                raise DataError(f"dead: stream '{self.stream}' is the writer's own")
            self._pipeline.set_view(new, view)

    def publish_view(self) -> int:
        """Publish in the background what `set_view` said, also if nothing else is to be committed.

        Steps that are staged stay staged, unless the stream is only born by this. It comes after all commits that
        were asked for before, counts as a commit itself, and is tried again as others are where it fails.

        Returns:
            A ticket for `wait`.

        Raises:
            DataError: The store has no schema yet, so no record can be written.
        """
        with self._briefly(), self._call(raises_pending=False):
            if self._intake.known is None:
                raise DataError("publish_view: the store has no schema yet; declare one, or append first")
            return self._pipeline.publish_view()

    def capture_record(self, done: Callable[[CommitRecord | None], None]) -> int:
        """Ask for the commit record that holds exactly what is appended so far.

        Hands off what is staged and does not wait until it is durable; if the disk is so far behind that both
        halves of the buffer are full, it waits for one to be free, as an append would. No steps are copied.

        Args:
            done: Called once on the background thread when everything appended before is durable, with the record
                of that commit, whatever was appended since; with None if nothing was ever committed. Later
                commits wait for it, so it should be quick, and it must not call the writer. What it raises is
                logged and raised by the writer's next call; the commit stays. Never called if the writer is
                given up before.

        Returns:
            A ticket for `wait`.
        """
        if not callable(done):
            raise TypeError(f"done: expected something to call with the record, got {done!r:.80}")
        with self._call(raises_pending=False):
            return self._pipeline.hand_off(done)

    def wait(self, ticket: int) -> None:
        """Wait until what a ticket stands for is durable and told; gives what failed another try.

        Raises:
            BaseException: What the try ended with.
        """
        self._check_process()
        self._pipeline.wait(ticket)

    def put_column(
        self, name: str, target: str, values: Array, *, first: int = 0, rows: Array | None = None
    ) -> None:
        """Store values computed after collection for rows of a stream, with the next commit.

        They stand in this writer's own stream; the steps themselves never change. Where several writers have a
        column for the same rows, that of the newest writer counts.

        Args:
            name: Of the column.
            target: Id of the stream whose rows these are.
            values: ``[n, ...]``: a whole new generation of the column, for rows from ``first`` on; or values of
                single rows. Not copied: leave them alone until they are committed.
            first: Row of the first value.
            rows: The rows, where only some change; this writer has put the column before.
        """
        if not is_column_name(name) or not isinstance(target, str) or not is_stream_id(target):
            raise DataError(f"column {name!r} of stream {target!r}: expected a plain name and a stream id")
        if not isinstance(values, np.ndarray) or values.ndim == 0:
            raise DataError(f"column '{name}': expected an array with one value a row, got {values!r:.60}")
        if not isinstance(first, int) or isinstance(first, bool) or not 0 <= first <= MAX_ROWS - len(values):
            raise DataError(f"column '{name}': expected a row to begin with, got first={first!r}")
        kind = Field(str(values.dtype), values.shape[1:])  # raises what the schema would
        with self._call():
            if rows is not None:
                self._check_change(name, target, kind, rows, values)
            else:
                self._put_columns[target, name] = first, kind
            self._pipeline.put_column(DerivedColumnChange(target, name, values, first, rows))

    def _check_change(self, name: str, target: str, kind: Field, rows: Array, values: Array) -> None:
        if (target, name) not in self._put_columns:
            raise DataError(f"column '{name}' of stream '{target}': rows can be changed once it was put whole")
        first, known = self._put_columns[target, name]
        if not isinstance(rows, np.ndarray) or rows.dtype != np.int64 or rows.shape != values.shape[:1]:
            raise DataError(f"column '{name}': expected int64 rows of shape {values.shape[:1]}, got {rows!r:.60}")
        if (kind.dtype, kind.shape) != (known.dtype, known.shape):
            was, came = (f"{k.dtype} of shape {k.shape}" for k in (known, kind))
            raise DataError(f"column '{name}': expected values as it was put, {was}, got {came}")
        if len(rows) and not first <= rows.min() <= rows.max() < MAX_ROWS:
            raise DataError(f"column '{name}': expected rows from {first} on, got {rows.min()} to {rows.max()}")

    def commit(self) -> None:
        """Make everything appended so far durable and visible; returns when it is."""
        with self._call():
            ticket = self._pipeline.hand_off()
        self._pipeline.wait(ticket)  # others may append meanwhile

    def begin_commit(self) -> None:
        """Have everything appended so far committed in the background, unless the commit before is not finished.

        Neither waits nor raises: what fails is raised by the next call.
        """
        with self._lock:
            if not self._is_closed:
                self._pipeline.hand_off_if_free()

    def close(self) -> None:
        """Commit, mark open episodes as cut, seal the stream and release everything.

        If it fails it may be called again; until it succeeds, what was not durable stays in memory.
        """
        with self._last_call() as is_open:
            if not is_open:
                return
            if self._is_ending:  # an end that failed before, or an interrupt: nothing more is added
                self._seal()
                return
            self._is_ending = True
            if open_envs := self._lanes.open_envs():
                self._pipeline.fill()
                self._counts["cut_episodes"] += len(open_envs)
                _log.info("stream %s: %d open episodes are kept as cut", self.stream, len(open_envs))
            for env in open_envs:
                self._end(env, End.CUT, False, EpisodeValues())
            self._seal()

    def discard(self) -> None:
        """Drop what is appended and not on its way to disk yet, and seal the stream.

        What a commit took, by call or in the background, stays.
        """
        with self._last_call() as is_open:
            if is_open:
                self._is_ending = True
                self._counts["dropped_steps"] += self._pipeline.drop()
                self._seal()

    def _seal(self) -> None:
        self._pipeline.wait(self._pipeline.hand_off())
        self._pipeline.seal()
        self._release()
        self._pipeline.raise_told()

    def _release(self) -> None:
        self._is_closed = True
        self._pipeline.stop()

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close() if error is None else self.discard()
        except Exception as failure:
            self._release()
            if error is None:
                raise
            # The block's own exception matters more; this one travels with it.
            error.add_note(f"trajstore: the writer could not finish its last commit either: {failure}")

    def stats(self) -> dict[str, int]:
        """Counters: appended, dropped and committed so far."""
        with self._lock:
            appender, staging = self._pipeline.appender, self._pipeline.staging
            record = appender.record if appender else None
            return self._counts | {
                "episodes": self._lanes.n_episodes,
                "open_episodes": len(self._lanes.open_envs()),
                "staged_rows": staging.n if staging else 0,
                "commits": record.commit if record else 0,
                "committed_rows": record.rows if record else 0,
                "committed_spans": record.spans if record else 0,
            }

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "open"
        return f"<Writer {self.stream} of {self._storage.display}, {state}>"

    @contextlib.contextmanager
    def _call(self, *, raises_pending: bool = True) -> Iterator[None]:
        """Take the lock, raise what the background left, and undo a schema read off data that is refused."""
        self._check_process()
        with self._lock:
            if self._is_closed:
                raise ClosedError(f"writer of stream '{self.stream}' is closed; open another with store.writer()")
            if self._is_ending:
                raise ClosedError(f"writer of stream '{self.stream}' is being closed; call close() again")
            if raises_pending:  # not to a thread that others have for themselves
                self._pipeline.raise_pending()
            try:
                with self._intake.attempt():
                    yield
            except (TrajstoreError, ValueError, TypeError, LookupError, OSError):
                raise  # refused or failed before anything was changed
            except BaseException:
                # Ctrl-C may have come in the middle of a change: what is staged can't be trusted any more.
                self._is_ending = True
                self._counts["dropped_steps"] += self._pipeline.drop()
                raise
            finally:
                if self._intake.known is None:
                    self._pipeline.reset()

    @contextlib.contextmanager
    def _last_call(self) -> Iterator[bool]:
        self._check_process()
        with self._lock:
            yield not self._is_closed

    def _check_process(self) -> None:
        # Before the lock: in a forked child it may be held for ever.
        if self._pid != os.getpid():
            raise ClosedError(
                f"writer of stream '{self.stream}' belongs to process {self._pid}; open one in this process"
            )

    def _append_one(self, step: Step, env: int, terminated: Flags, truncated: Flags, final: Step | None) -> Handle:
        rows = self._intake.steps(step, (), final)
        env = self._lanes.check_env(env)
        end = end_of(terminated, truncated, End.OPEN)
        finals = self._intake.finals(final, ())
        if finals is not None and end is End.OPEN:
            raise DataError("final: given for a step that does not end its episode")
        staging = self._pipeline.make_room(1 + (finals is not None))
        if self._lanes.episode[env] < 0:
            self._lanes.start_one(env)
        at = staging.reserve(1).start
        for path, value in rows.items():
            staging.columns[path][at] = value
        episode, t = int(self._lanes.episode[env]), int(self._lanes.t[env])
        staging.episode[at], staging.env[at] = episode, env
        self._lanes.t[env] = t + 1
        self._counts["steps"] += 1
        if finals is not None:
            self._stage_final(_as_rows(finals), np.array([episode]), np.array([env]))
        if end is not End.OPEN:
            self._end(env, end, finals is not None, EpisodeValues())
        self._commit_by_count()
        return Handle(self.stream, episode, t)

    def _append_many(
        self, step: Step, env: Array, terminated: Flags, truncated: Flags, final: Step | None
    ) -> Handles:
        n = len(env)
        rows = self._intake.steps(step, (n,), final)
        finals = self._intake.finals(final, (n,))
        ends = check_ends(terminated, truncated, (n,))
        ending = np.flatnonzero(ends)
        staging = self._pipeline.make_room(n + (len(ending) if finals is not None else 0))
        block = self._lanes.step(env)
        staging.extend(rows, block.episode, env)
        self._counts["steps"] += n
        if len(ending):
            found = _select(finals, ending)
            self._end_many(block.episode[ending], env[ending], ends[ending], found, EpisodeValues())
            self._lanes.episode[env[ending]] = -1
        self._commit_by_count()
        return Handles(self.stream, block.episode, block.t)

    def _stage_rollout(
        self,
        rows: dict[str, Array],
        env: Array,
        ends: Array,
        finals: dict[str, Array] | None,
        values: EpisodeValues,
    ) -> Handles:
        n_ending = int((ends > 0).sum())
        n_rows = ends.size + (n_ending if finals is not None else 0)
        staging = self._pipeline.make_room(n_rows, len(values.text) * n_ending)
        block = self._lanes.block(env, ends)
        envs = np.broadcast_to(env, ends.shape)
        flat = {path: values.reshape(-1, *values.shape[2:]) for path, values in rows.items()}
        staging.extend(flat, block.episode.reshape(-1), envs.reshape(-1))
        self._counts["steps"] += ends.size
        ending = np.nonzero(ends)
        if len(ending[0]):
            self._end_many(block.episode[ending], envs[ending], ends[ending], _select(finals, ending), values)
        self._commit_by_count()
        return Handles(self.stream, block.episode, block.t)

    def _end_many(
        self, episode: Array, env: Array, ends: Array, finals: dict[str, Array] | None, values: EpisodeValues
    ) -> None:
        if finals is not None:
            self._stage_final(finals, episode, env)
        self._pipeline.fill().end_many(episode, env, ends, finals is not None, values)

    def _stage_final(self, finals: dict[str, Array], episode: Array, env: Array) -> None:
        """Stage the final row of these episodes; fields without a final value hold zeros there."""
        staging = self._pipeline.fill()
        staging.extend({path: finals.get(path, np.zeros(())) for path in staging.columns}, episode, env)

    def _stage_episode(self, rows: dict[str, Array], env: int, episode: int, n: int) -> None:
        """Stage ``n`` rows of one episode, in as many parts as the buffer asks for."""
        done = 0
        while done < n:
            staging = self._pipeline.make_room(min(n - done, self._pipeline.fill().capacity))
            part = min(n - done, staging.room)
            where = staging.reserve(part)
            for path, values in rows.items():
                given = values[done : done + part]
                column = staging.columns[path][where]
                column[: len(given)] = given
                column[len(given) :] = 0
            staging.episode[where], staging.env[where] = episode, env
            self._lanes.t[env] += part
            done += part

    def _end(self, env: int, end: End, has_final: bool, values: EpisodeValues) -> None:
        event = EndEvent(int(env), end, has_final, values)
        self._pipeline.fill().end(int(self._lanes.episode[env]), event)
        self._lanes.episode[env] = -1

    def _abort(self, env: int) -> None:
        self._counts["dropped_steps"] += self._pipeline.fill().drop(int(self._lanes.episode[env]))
        self._counts["aborted_episodes"] += 1
        self._end(env, End.ABORTED, False, EpisodeValues())

    def _commit_by_count(self) -> None:
        steps, staging = self._options.commit_steps, self._pipeline.staging
        is_due = steps is not None and staging is not None and staging.n >= steps
        if is_due or self._pipeline.is_overdue:
            self._pipeline.hand_off_if_free()

    def _settle(self) -> Schema:
        self._lanes.placed[:] = self._lanes.t
        return self._intake.settle()

    def _make_appender(self, schema: Schema) -> StreamAppender:
        options = self._options
        record = empty_record(
            self.stream,
            self._name,
            schema,
            stream_layouts(schema, options.commit_steps),
            self._created_at,
            rank=options.rank,
            world_size=options.world_size,
            world=options.world,
            checkpoint=options.checkpoint,
            view=self._pipeline.view,
        )
        return StreamAppender(self._storage, record, self._settle_schema)


def _as_rows(values: dict[str, Array]) -> dict[str, Array]:
    return {path: value[None] for path, value in values.items()}


def _select(values: dict[str, Array] | None, where: Any) -> dict[str, Array] | None:
    return None if values is None else {path: value[where] for path, value in values.items()}
