"""The writer: appends steps and episodes to a stream of its own, and commits them."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from trajstore.committer import Committer
from trajstore.episodes import End, EpisodeKey, EpisodeValues, Handle, Handles, check_metadata
from trajstore.errors import ClosedError, DataError, StepPlacedError
from trajstore.lanes import Flags, Lanes, check_ends, end_of
from trajstore.record import layouts_of, new_id
from trajstore.schema import Array, Schema, as_array, check_paths, checked, flatten, infer
from trajstore.sizes import parse_bytes
from trajstore.staging import EndEvent, Placement, Staging, place
from trajstore.storage import Storage
from trajstore.stream import Batch, StreamAppender, new_record

_log = logging.getLogger(__name__)

Step = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class WriterOptions:
    """How a writer behaves.

    Args:
        commit_steps: Commit in the background whenever this many steps are staged; None: not by count.
        commit_seconds: Commit in the background at least this often; None: not by time.
        buffer_bytes: Bound of the memory for steps that are appended and not yet durable; reaching half of it
            commits in the background, reaching all of it makes appends wait.
        rank: Rank of this writer, recorded with the stream.
        world_size: Number of ranks, recorded with the stream.
    """

    commit_steps: int | None = None
    commit_seconds: float | None = 10.0
    buffer_bytes: int | str = "256MiB"
    rank: int | None = None
    world_size: int | None = None

    def __post_init__(self) -> None:
        if self.commit_steps is not None and self.commit_steps < 1:
            raise ValueError(f"commit_steps: expected a positive number or None, got {self.commit_steps!r}")
        if self.commit_seconds is not None and not self.commit_seconds > 0:
            raise ValueError(f"commit_seconds: expected a positive number or None, got {self.commit_seconds!r}")
        for name in ("rank", "world_size"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 0):
                raise ValueError(f"{name}: expected a number from 0 or None, got {value!r}")
        parse_bytes(self.buffer_bytes, "buffer_bytes")


@dataclass(frozen=True, slots=True)
class _Job:
    """A staging on its way to disk; placed once, committed until it succeeds."""

    staging: Staging
    batch: Batch


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
        self._name = name
        self._storage = storage
        self._settle_schema = settle_schema
        self._options = options
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._is_closed = False
        self._schema = schema
        self._is_inferred = schema is None  # until placed, evidence may still show which fields are final
        self._lanes = Lanes()
        self._placement = Placement()
        self._appender: StreamAppender | None = None  # made at the first hand-off
        self._staging: Staging | None = None  # the one being filled
        self._free: list[Staging] = []  # filled by the background thread
        self._n_stagings = 0  # two at most: one being filled, one on its way to disk
        self._counts = dict.fromkeys(("steps", "dropped_steps", "aborted_episodes", "cut_episodes"), 0)
        self._committer: Committer[_Job] = Committer(self._run, self._commit_by_time, options.commit_seconds)
        self._committer.start()

    @property
    def schema(self) -> Schema | None:
        """The schema; None until the first data, in a store that declared none."""
        return self._schema

    @property
    def is_closed(self) -> bool:
        return self._is_closed

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
        flat = flatten(step)
        with self._call():
            if envs is None:
                return self._append_one(flat, 0 if env is None else env, terminated, truncated, final)
            if env is not None:
                raise DataError("give either env or envs, not both")
            return self._append_many(flat, self._lanes.check_envs(envs), terminated, truncated, final)

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
        flat = flatten(data)
        with self._call():
            end = end_of(terminated, truncated, End.CUT)
            lengths = _lengths(flat)
            schema = self._schema_for(flat, 1, {p for p, n in lengths.items() if n == max(lengths.values())})
            n_steps, has_final = _episode_length(schema, lengths)
            rows = _episode_rows(schema, flat, n_steps, has_final)
            values = check_metadata(schema, metadata)
            env = self._lanes.check_env(env)
            if self._lanes.episode[env] >= 0:
                raise DataError(f"env {env} has an open episode; end it before appending a whole one")
            self._any_staging()
            episode = self._lanes.start_one(env)
            try:
                self._stage_episode(rows, env, episode, n_steps + has_final)
            except BaseException:
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
    ) -> Handles:
        """Append a block of T steps of B environments, with episodes ending anywhere inside.

        Args:
            data: Arrays ``[T, B, ...]`` by field. Copied.
            envs: The B environments; 0 to B - 1 by default.
            terminated: Flags ``[T, B]``: the episode ends with that step; the next step starts another.
            truncated: The same; where both are set, terminated counts.
            final: Arrays ``[T, B, ...]`` of final values; only those of steps that end an episode are stored.

        Returns:
            Handles with arrays ``[T, B]``.
        """
        flat = flatten(data)
        with self._call():
            schema = self._schema_for(flat, 2, _paths(final))
            check_paths(schema.fields, flat)
            shape = as_array("", next(iter(flat.values())))[0].shape[:2]
            if len(shape) < 2 or not all(shape):
                raise DataError(f"rollout: expected arrays of shape (T, B, ...), got a leading shape of {shape}")
            env = self._lanes.check_envs(range(shape[1]) if envs is None else envs)
            if len(env) != shape[1]:
                raise DataError(f"rollout: {len(env)} envs, but the data has {shape[1]} columns")
            rows = {path: checked(path, spec, flat[path], shape, shape) for path, spec in schema.fields.items()}
            ends = check_ends(terminated, truncated, shape)
            return self._stage_rollout(rows, env, ends, self._checked_final(final, shape))

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
            finals = self._checked_final(final, ())
            values = check_metadata(self._known_schema(), metadata)
            if finals is not None:
                self._make_room(1)
                self._stage_final(_as_rows(finals), np.array([episode]), np.array([env]))
            self._end(env, end, finals is not None, values)
            return EpisodeKey(self.stream, episode)

    def abort_episode(self, env: int = 0) -> EpisodeKey:
        """Give up the open episode of an environment: it stays readable as far as placed, marked aborted."""
        with self._call():
            episode = self._lanes.open_episode(env)
            self._any_staging()
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
        flat = flatten(values)
        with self._call():
            episode = self._lanes.open_episode(env)
            schema = self._known_schema()
            n = int(self._lanes.t[env])
            step = n - 1 if t is None else t
            if not 0 <= step < n:
                raise DataError(f"t: the open episode of env {env} has steps 0 to {n - 1}, got {t!r}")
            if unknown := [path for path in flat if path not in schema.fields]:
                raise DataError(f"fields: unexpected {', '.join(map(repr, unknown))}")
            rows = {path: checked(path, schema[path], value, (), ()) for path, value in flat.items()}
            staging = self._any_staging()
            row = staging.find(episode, step - int(self._lanes.placed[env]))
            if row is None:
                raise StepPlacedError(
                    f"step {step} of env {env} is committed; only steps appended since can be amended"
                )
            for path, value in rows.items():
                staging.columns[path][row] = value
            return Handle(self.stream, episode, step)

    def commit(self) -> None:
        """Make everything appended so far durable and visible; returns when it is."""
        with self._call():
            self._hand_off()
            self._committer.wait()

    def close(self) -> None:
        """Commit, mark open episodes as cut, seal the stream and release everything.

        If it fails it may be called again; until it succeeds, what was not durable stays in memory.
        """
        with self._lock:
            if self._is_closed:
                return
            self._check_process()
            if open_envs := self._lanes.open_envs():
                self._any_staging()
                self._counts["cut_episodes"] += len(open_envs)
                _log.info("stream %s: %d open episodes are kept as cut", self.stream, len(open_envs))
            for env in open_envs:
                self._end(env, End.CUT, False, EpisodeValues())
            self._hand_off()
            self._committer.wait()
            self._seal()

    def discard(self) -> None:
        """Drop what was appended after the last commit that was asked for, and seal the stream."""
        with self._lock:
            if self._is_closed:
                return
            self._check_process()
            if self._staging is not None:
                self._counts["dropped_steps"] += self._staging.n
                self._staging.clear()
            self._committer.wait()
            self._seal()

    def _seal(self) -> None:
        if self._appender is not None:
            self._appender.seal()
        self._release()

    def _release(self) -> None:
        self._committer.stop()
        self._is_closed = True
        self._staging, self._free = None, []

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
            record = self._appender.record if self._appender else None
            return self._counts | {
                "episodes": self._lanes.n_episodes,
                "open_episodes": len(self._lanes.open_envs()),
                "staged_rows": self._staging.n if self._staging else 0,
                "commits": record.commit if record else 0,
                "committed_rows": record.rows if record else 0,
                "committed_spans": record.spans if record else 0,
            }

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "open"
        return f"<Writer {self.stream} of {self._storage.display}, {state}>"

    # ---- checks: nothing below changes what is staged ----------------------------------------------

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        """Take the lock, raise what the background left, and undo a schema read off data that was refused."""
        with self._lock:
            if self._is_closed:
                raise ClosedError(f"writer of stream '{self.stream}' is closed; open another with store.writer()")
            self._check_process()
            self._committer.raise_pending()
            before = self._schema
            try:
                yield
            except DataError:
                if self._is_inferred:
                    self._forget_schema(before)
                raise

    def _forget_schema(self, before: Schema | None) -> None:
        self._schema = before
        if before is None:
            self._staging, self._n_stagings = None, 0

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise ClosedError(
                f"writer of stream '{self.stream}' belongs to process {self._pid}; open one in this process"
            )

    def _known_schema(self) -> Schema:
        if self._schema is None:
            raise DataError("nothing has been appended yet, so there is no schema")
        return self._schema

    def _schema_for(self, flat: dict[str, Any], n_lead: int, finals: set[str]) -> Schema:
        """The schema, read off this data if it is the first; ``finals`` is evidence of final values."""
        evidence = finals if len(finals) < len(flat) else set()
        if self._schema is None:
            self._schema = infer(flat, n_lead).with_final(evidence)
        else:
            self._learn_finals(evidence)
        return self._schema

    def _learn_finals(self, evidence: set[str]) -> None:
        schema = self._schema
        if self._is_inferred and schema is not None and evidence and not schema.final_fields:
            self._schema = schema.with_final(evidence & set(schema.fields))

    def _checked_final(self, final: Step | None, lead: tuple[int, ...]) -> dict[str, Array] | None:
        if final is None:
            return None
        flat = flatten(final)
        self._learn_finals(set(flat))
        schema = self._known_schema()
        expected = {path: schema[path] for path in schema.final_fields}
        if not expected:
            raise DataError(
                "final: no field has a final value in the schema; declare it with Field(..., final=True)"
            )
        check_paths(expected, flat)
        return {path: checked(path, spec, flat[path], lead, lead) for path, spec in expected.items()}

    # ---- appending: everything is checked, from here on nothing is refused -------------------------

    def _append_one(
        self, flat: dict[str, Any], env: int, terminated: Flags, truncated: Flags, final: Step | None
    ) -> Handle:
        schema = self._schema_for(flat, 0, _paths(final))
        check_paths(schema.fields, flat)
        rows = {path: checked(path, spec, flat[path], (), ()) for path, spec in schema.fields.items()}
        env = self._lanes.check_env(env)
        end = end_of(terminated, truncated, End.OPEN)
        finals = self._checked_final(final, ())
        if finals is not None and end is End.OPEN:
            raise DataError("final: given for a step that does not end its episode")
        staging = self._make_room(1 + (finals is not None))
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
        self, flat: dict[str, Any], env: Array, terminated: Flags, truncated: Flags, final: Step | None
    ) -> Handles:
        n = len(env)
        schema = self._schema_for(flat, 1, _paths(final))
        check_paths(schema.fields, flat)
        rows = {path: checked(path, spec, flat[path], (n,), (n,)) for path, spec in schema.fields.items()}
        ends = check_ends(terminated, truncated, (n,))
        ending = np.flatnonzero(ends)
        finals = self._checked_final(final, (n,))
        staging = self._make_room(n + (len(ending) if finals is not None else 0))
        block = self._lanes.step(env)
        staging.extend(rows, block.episode, env)
        self._counts["steps"] += n
        if len(ending):
            self._end_many(block.episode[ending], env[ending], ends[ending], _select(finals, ending))
            self._lanes.episode[env[ending]] = -1
        self._commit_by_count()
        return Handles(self.stream, block.episode, block.t)

    def _stage_rollout(
        self, rows: dict[str, Array], env: Array, ends: Array, finals: dict[str, Array] | None
    ) -> Handles:
        """Stage a block whole where it fits the buffer, else by halves along time."""
        n = ends.size + (int((ends > 0).sum()) if finals is not None else 0)
        if n > self._any_staging().capacity and len(ends) > 1:
            half = len(ends) // 2
            parts = [
                self._stage_rollout(_select(rows, cut) or {}, env, ends[cut], _select(finals, cut))
                for cut in (slice(half), slice(half, None))
            ]
            return Handles(
                self.stream, np.concatenate([p.episode for p in parts]), np.concatenate([p.t for p in parts])
            )
        staging = self._make_room(n)
        block = self._lanes.block(env, ends)
        envs = np.broadcast_to(env, ends.shape)
        flat = {path: values.reshape(-1, *values.shape[2:]) for path, values in rows.items()}
        staging.extend(flat, block.episode.reshape(-1), envs.reshape(-1))
        self._counts["steps"] += ends.size
        ending = np.nonzero(ends)
        if len(ending[0]):
            self._end_many(block.episode[ending], envs[ending], ends[ending], _select(finals, ending))
        self._commit_by_count()
        return Handles(self.stream, block.episode, block.t)

    def _end_many(self, episode: Array, env: Array, ends: Array, finals: dict[str, Array] | None) -> None:
        if finals is not None:
            self._stage_final(finals, episode, env)
        self._any_staging().end_many(episode, env, ends, finals is not None)

    def _stage_final(self, finals: dict[str, Array], episode: Array, env: Array) -> None:
        """Stage the final row of these episodes; fields without a final value hold zeros there."""
        staging = self._any_staging()
        staging.extend({path: finals.get(path, np.zeros(())) for path in staging.columns}, episode, env)

    def _stage_episode(self, rows: dict[str, Array], env: int, episode: int, n: int) -> None:
        """Stage ``n`` rows of one episode, in as many parts as the buffer asks for."""
        done = 0
        while done < n:
            staging = self._make_room(min(n - done, self._any_staging().capacity))
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
        self._any_staging().end(int(self._lanes.episode[env]), event)
        self._lanes.episode[env] = -1

    def _abort(self, env: int) -> None:
        self._counts["dropped_steps"] += self._any_staging().drop(int(self._lanes.episode[env]))
        self._counts["aborted_episodes"] += 1
        self._end(env, End.ABORTED, False, EpisodeValues())

    # ---- handing over to the background ------------------------------------------------------------

    def _any_staging(self) -> Staging:
        if self._staging is None:
            self._staging = self._next_staging()
        return self._staging

    def _make_room(self, n: int) -> Staging:
        """A staging with room for ``n`` rows; waits for the disk when the buffer is full."""
        staging = self._any_staging()
        if n > staging.capacity:
            raise DataError(
                f"one call appends {n} rows, but buffer_bytes={self._options.buffer_bytes!r} holds"
                f" {staging.capacity} at a time; raise buffer_bytes"
            )
        if staging.room < n:
            self._hand_off()
        return self._any_staging()

    def _next_staging(self) -> Staging:
        if not self._free and self._n_stagings == 2:
            self._committer.wait(at_most=1)
        if self._free:
            return self._free.pop()
        schema = self._known_schema()
        buffer_bytes = parse_bytes(self._options.buffer_bytes, "buffer_bytes")
        self._n_stagings += 1
        return Staging(schema, max(1, buffer_bytes // 2 // schema.row_bytes))

    def _hand_off(self) -> None:
        """Give every staged row its place and let the background commit them."""
        staging = self._staging
        if staging is None or staging.is_empty:
            return
        if self._n_stagings == 2 and not self._free:
            self._committer.wait()  # both are in use: if this fails, nothing has changed
        schema = self._known_schema()
        self._is_inferred = False
        if self._appender is None:
            options = self._options
            record = new_record(
                self.stream,
                self._name,
                schema,
                layouts_of(schema, options.commit_steps),
                rank=options.rank,
                world_size=options.world_size,
            )
            self._appender = StreamAppender(self._storage, record, self._settle_schema)
        batch = place(staging, self._placement, schema)
        self._lanes.placed[:] = self._lanes.t
        self._staging = None
        self._committer.submit(_Job(staging, batch))

    def _commit_by_count(self) -> None:
        steps = self._options.commit_steps
        if steps is not None and self._staging is not None and self._staging.n >= steps:
            self._hand_off()

    def _commit_by_time(self) -> None:
        # Runs on the background thread, idle. Whoever holds the lock may be waiting for this very thread.
        if self._lock.acquire(blocking=False):
            try:
                if not self._is_closed:
                    self._hand_off()
            finally:
                self._lock.release()

    def _run(self, job: _Job) -> None:
        assert self._appender is not None
        self._appender.commit(job.batch)
        job.staging.clear()
        self._free.append(job.staging)


def _paths(final: Step | None) -> set[str]:
    return set(flatten(final)) if final is not None else set()


def _as_rows(values: dict[str, Array]) -> dict[str, Array]:
    return {path: value[None] for path, value in values.items()}


def _select(values: dict[str, Array] | None, where: Any) -> dict[str, Array] | None:
    return None if values is None else {path: value[where] for path, value in values.items()}


def _lengths(flat: dict[str, Any]) -> dict[str, int]:
    lengths: dict[str, int] = {}
    for path, value in flat.items():
        array, _ = as_array(path, value)
        if not array.ndim:
            raise DataError(f"field '{path}': expected an array with one row a step, got a scalar")
        lengths[path] = len(array)
    if not lengths:
        raise DataError("no fields given")
    return lengths


def _episode_length(schema: Schema, lengths: dict[str, int]) -> tuple[int, bool]:
    """The number of steps, and whether the fields with a final value have it."""
    check_paths(schema.fields, lengths)
    plain = {n for path, n in lengths.items() if not schema[path].final}
    final = {n for path, n in lengths.items() if schema[path].final}
    n_steps = min(plain) if plain else min(final) - 1
    if len(plain) > 1 or len(final) > 1 or (final and not final <= {n_steps, n_steps + 1}):
        raise DataError(
            "episode: expected the same number of rows in every field (one more where a final value is declared),"
            f" got {', '.join(f'{path}: {n}' for path, n in lengths.items())}"
        )
    if n_steps < 1:
        raise DataError("episode: expected at least one step, got none")
    return n_steps, bool(final) and final == {n_steps + 1}


def _episode_rows(schema: Schema, flat: dict[str, Any], n_steps: int, has_final: bool) -> dict[str, Array]:
    rows = {}
    for path, spec in schema.fields.items():
        n = n_steps + 1 if spec.final and has_final else n_steps
        rows[path] = checked(path, spec, flat[path], (n,), (n,))
    return rows
