"""A model of a store: lists of dicts in memory, with the methods of a writer.

Make the same calls on a real store and on a `ModelStore`, and compare them with `ModelStore.check`:

    store = trajstore.create(url, schema)
    model = ModelStore(schema)
    writer = store.writer()
    model_writer = model.writer(writer.stream)
    writer.append(step)
    model_writer.append(step)
    writer.commit()
    model_writer.commit()
    model.check(store.refresh())

A writer may commit without a call, because its buffer is bounded and a background thread commits by time. A reader
may then see any state between the last requested commit and the last append. Of every episode it sees the first
rows, without gaps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trajstore.schema import Array, Schema, as_array, flatten
from trajstore.store.snapshot import Snapshot

Step = Mapping[str, Any]


@dataclass(slots=True)
class ModelEpisode:
    """One episode as appended, and how much of it readers must see.

    Attributes:
        env: The environment.
        rows: Values of each step by path. A final row only has the fields with a final value.
        end: ``open``, ``terminated``, ``truncated``, ``cut`` or ``aborted``.
        has_final: Whether the last row is a final row.
        metadata: The metadata given at the end.
        n_durable: Rows that every reader sees from now on.
        is_durable: Whether readers must see the episode at all.
        is_end_durable: Whether readers must see its end.
    """

    env: int
    rows: list[dict[str, Array]] = field(default_factory=list)
    end: str = "open"
    has_final: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)
    n_durable: int = 0
    is_durable: bool = False
    is_end_durable: bool = False

    def settle(self, n_rows: int, is_ended: bool) -> None:
        """Record that readers must see at least this many rows, and the end if ``is_ended``."""
        self.is_durable = True
        self.n_durable = max(self.n_durable, n_rows)
        self.is_end_durable = self.is_end_durable or is_ended


class ModelWriter:
    """What a `trajstore.Writer` writes when it gets the same calls.

    Attributes:
        episodes: All episodes, in the order in which they began.
        is_finished: The stream is sealed, so open episodes read as cut.
        is_gone: The writer was closed, discarded, or crashed, so it writes nothing more.
    """

    def __init__(self, schema: Schema, *, commits_by_itself: bool) -> None:
        self.episodes: list[ModelEpisode] = []
        self.is_finished = False
        self.is_gone = False
        self._schema = schema
        self._commits_by_itself = commits_by_itself
        self._open: dict[int, ModelEpisode] = {}

    @property
    def open_envs(self) -> dict[int, ModelEpisode]:
        """The open episode of each environment that has one. A copy."""
        return dict(self._open)

    def append(
        self,
        step: Step,
        *,
        env: int = 0,
        end: str | None = None,
        final: Step | None = None,
        metadata: Step | None = None,
    ) -> None:
        """Append a step to an environment. ``end`` ends the episode, with ``final`` values and ``metadata``."""
        episode = self._episode(env)
        episode.rows.append(_copy_step(step))
        if end is not None:
            self._end(env, end, None if final is None else _copy_step(final), dict(metadata or {}))

    def append_many(
        self,
        step: Step,
        envs: Sequence[int],
        ends: Sequence[str | None],
        final: Step | None = None,
        metadata: Step | None = None,
    ) -> None:
        """Append a step to several environments. Values have a leading axis over the environments."""
        for i, env in enumerate(envs):
            last = None if final is None else _select(final, i)
            self.append(_select(step, i), env=env, end=ends[i], final=last, metadata=metadata)

    def append_rollout(
        self,
        data: Step,
        envs: Sequence[int],
        ends: Sequence[Sequence[str | None]],
        final: Step | None = None,
        metadata: Step | None = None,
    ) -> None:
        """Append a ``[T, B]`` block: T steps of B environments."""
        for t, row in enumerate(ends):
            self.append_many(_select(data, t), envs, row, None if final is None else _select(final, t), metadata)

    def append_episode(self, data: Step, *, env: int = 0, end: str = "cut", metadata: Step | None = None) -> None:
        """Append a whole episode. Arrays with one row more than the steps give the final row."""
        columns = {path: _copy_bits(value) for path, value in flatten(data).items()}
        n_steps = min(len(column) for column in columns.values())
        if len(columns) == len(self._schema.final_fields):
            n_steps -= 1
        for t in range(n_steps):
            self._episode(env).rows.append({path: column[t] for path, column in columns.items()})
        last = {path: column[n_steps] for path, column in columns.items() if len(column) > n_steps}
        self._end(env, end, last or None, dict(metadata or {}))

    def end_episode(
        self, env: int = 0, *, end: str, final: Step | None = None, metadata: Step | None = None
    ) -> None:
        self._end(env, end, None if final is None else _copy_step(final), dict(metadata or {}))

    def abort_episode(self, env: int = 0) -> None:
        """Abort an episode. Rows that the writer has not written to storage are dropped."""
        episode = self._open[env]
        if not self._commits_by_itself:
            del episode.rows[episode.n_durable :]
        self._end(env, "aborted", None, {})

    def amend(self, values: Step, *, env: int = 0, t: int) -> None:
        """Replace values of a step that the writer has not written to storage."""
        self._open[env].rows[t] |= _copy_step(values)

    def commit(self) -> None:
        """Make everything appended so far durable."""
        for episode in self.episodes:
            # Only a snapshot shows how many rows of an aborted episode a background commit wrote before the abort.
            unknown = episode.end == "aborted" and self._commits_by_itself
            episode.settle(0 if unknown else len(episode.rows), episode.end != "open")

    def close(self) -> None:
        """Cut the open episodes, commit, and seal the stream."""
        for env in list(self._open):
            self._end(env, "cut", None, {})
        self.commit()
        self.is_finished = self.is_gone = True

    def crash(self) -> None:
        """Lose everything that is not durable, without sealing the stream: open episodes stay open."""
        self._forget_staged()

    def discard(self) -> None:
        """Drop everything that is not durable, and seal the stream."""
        self._forget_staged()
        self.is_finished = True

    def _forget_staged(self) -> None:
        self.is_gone = True
        self._open.clear()

    def _episode(self, env: int) -> ModelEpisode:
        if env not in self._open:
            self._open[env] = ModelEpisode(env)
            self.episodes.append(self._open[env])
        return self._open[env]

    def _end(self, env: int, end: str, final: dict[str, Array] | None, metadata: dict[str, Any]) -> None:
        episode = self._open.pop(env)
        episode.end, episode.metadata, episode.has_final = end, metadata, final is not None
        if final is not None:
            episode.rows.append(final)


class ModelStore:
    """What a store must show, by stream.

    Args:
        schema: The store's schema.
        commits_by_itself: Whether writers may commit without a call: by count, by time or because the buffer is
            full. If False, `check` also fails if the store shows anything that no call committed.

    Attributes:
        writers: The model of the writer of each stream.
    """

    def __init__(self, schema: Schema, *, commits_by_itself: bool = True) -> None:
        self.schema = schema
        self.writers: dict[str, ModelWriter] = {}
        self._commits_by_itself = commits_by_itself

    def writer(self, stream: str) -> ModelWriter:
        """Add the model of the writer of a stream."""
        writer = ModelWriter(self.schema, commits_by_itself=self._commits_by_itself)
        self.writers[stream] = writer
        return writer

    def check(self, snapshot: Snapshot) -> None:
        """Compare the episode table and every value bit by bit.

        A later snapshot must show everything that an earlier one showed. So pass snapshots in the order in which
        they were taken.

        Raises:
            AssertionError: The snapshot differs from the model.
        """
        shown = {snapshot.episodes.key(i): i for i in range(len(snapshot.episodes))}
        assert list(shown) == sorted(shown, key=_table_order(snapshot)), "episodes are out of order"
        for stream, writer in self.writers.items():
            for number, episode in enumerate(writer.episodes):
                i = shown.pop((stream, number), None)  # type: ignore[call-overload]
                assert i is not None or not episode.is_durable, f"episode {number} of {stream} is missing"
                if i is not None:
                    self._check_episode(snapshot, i, episode, writer)
        assert not shown, f"the store shows episodes that were never written: {list(shown)}"

    def _check_episode(self, snapshot: Snapshot, i: int, episode: ModelEpisode, writer: ModelWriter) -> None:
        row, n_rows = snapshot.episodes.row(i), snapshot.episodes.n_rows(i)
        self._check_end(row, n_rows, episode, writer)
        assert episode.n_durable <= n_rows <= len(episode.rows), f"{row}: {n_rows} rows"
        if not self._commits_by_itself:
            assert episode.is_durable, f"{row}: visible without a commit"
            assert n_rows == episode.n_durable, f"{row}: {n_rows} rows, committed {episode.n_durable}"
        assert row["env"] == episode.env
        assert row["length"] == n_rows - row["has_final"]
        assert not row["is_headless"]
        _check_spans(snapshot, i)
        _check_return(self.schema, row["return"], episode.rows[:n_rows])
        self._check_values(snapshot, i, episode.rows[:n_rows], row["has_final"])

    def _check_end(self, row: dict[str, Any], n_rows: int, episode: ModelEpisode, writer: ModelWriter) -> None:
        unended = "cut" if writer.is_finished else "open"
        is_ended = episode.end != "open" and row["end"] == episode.end and self._may_end(n_rows, episode)
        assert is_ended or row["end"] == unended, f"{row}: expected {episode.end}"
        assert is_ended or not episode.is_end_durable, f"{row}: the durable end is missing"
        if not self._commits_by_itself:
            is_ended = is_ended and episode.is_end_durable
        assert row["has_final"] == (is_ended and episode.has_final)
        _check_metadata(self.schema, row, episode.metadata if is_ended else {})
        if is_ended and episode.end == "aborted":
            del episode.rows[n_rows:]
        if self._commits_by_itself:
            episode.settle(n_rows, is_ended)

    def _may_end(self, n_rows: int, episode: ModelEpisode) -> bool:
        return n_rows == len(episode.rows) or episode.end == "aborted"

    def _check_values(self, snapshot: Snapshot, i: int, rows: Sequence[dict[str, Array]], has_final: bool) -> None:
        read = flatten(snapshot.read_episode(i))
        assert list(read) == list(self.schema), f"fields {list(read)}, expected {list(self.schema)}"
        for path, spec in self.schema.fields.items():
            kept = rows if spec.final or not has_final else rows[:-1]
            expected = np.empty((len(kept), *spec.shape), spec.storage_dtype)
            for t, row in enumerate(kept):
                expected[t] = row[path]
            assert_same_bits(read[path], stored_as(expected, spec.dtype), f"episode {i}, field '{path}'")


def stored_as(bits: Array, dtype: str) -> Array:
    """Return the array that a store returns for these stored bits: bfloat16 as float32, anything else unchanged."""
    return (bits.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else bits


def assert_same_bits(read: Array, expected: Array, what: str) -> None:
    """Compare dtype, shape and bytes. NaNs with different bits differ, and so do 0.0 and -0.0.

    Args:
        read: The array to check.
        expected: The array it must equal.
        what: Names the array in the message.

    Raises:
        AssertionError: They differ.
    """
    assert (read.dtype, read.shape) == (expected.dtype, expected.shape), (
        f"{what}: {read.dtype} {read.shape}, expected {expected.dtype} {expected.shape}"
    )
    assert read.tobytes() == expected.tobytes(), f"{what}: values differ"


def _check_spans(snapshot: Snapshot, i: int) -> None:
    t = 0
    for span in snapshot.episodes.spans(i):
        assert span.t_start == t, f"episode {i}: a span starts at step {span.t_start}, expected {t}"
        t += span.row_stop - span.row_start


def _check_return(schema: Schema, value: float, rows: Sequence[dict[str, Array]]) -> None:
    spec = schema.fields.get(schema.reward or "")
    if spec is None or math.prod(spec.shape) != 1 or spec.dtype in ("bool", "bfloat16"):
        assert math.isnan(value), f"return {value} without a scalar reward"
        return
    earned = rows if schema.reward_alignment == "action" else rows[1:]
    rewards = [float(row[schema.reward].item()) for row in earned if schema.reward in row]
    size = sum(abs(r) for r in rewards)
    if math.isfinite(size) and size < 1e300:
        assert abs(value - math.fsum(rewards)) <= 1e-9 * size, f"return {value}, expected {math.fsum(rewards)}"


def _check_metadata(schema: Schema, row: dict[str, Any], metadata: dict[str, Any]) -> None:
    for name in schema.episode:
        value, expected = row[name], metadata.get(name)
        same = value == expected or (value != value and expected != expected)  # NaN equals NaN
        assert same, f"{name}: {value!r}, expected {expected!r}"
    free = {name: value for name, value in metadata.items() if name not in schema.episode}
    assert row["metadata"] == json.loads(json.dumps(free)), f"metadata {row['metadata']}, expected {free}"


def _table_order(snapshot: Snapshot) -> Any:
    position = {record.id: i for i, record in enumerate(snapshot.streams)}
    return lambda key: (position[key.stream], key.episode)


def _copy_bits(value: Any) -> Array:
    return as_array("", value)[0].copy()


def _copy_step(step: Step) -> dict[str, Array]:
    return {path: _copy_bits(value) for path, value in flatten(step).items()}


def _select(data: Step, i: int) -> dict[str, Any]:
    return {name: _select(value, i) if isinstance(value, Mapping) else value[i] for name, value in data.items()}


def ends_of(terminated: Iterable[Any], truncated: Iterable[Any]) -> list[str | None]:
    """Return the name of the end of each step from its flags, or None. ``terminated`` wins if both are set."""
    return ["terminated" if a else "truncated" if b else None for a, b in zip(terminated, truncated, strict=True)]
