"""Steps that are appended and not yet placed: plain host arrays in order of arrival.

Placing sorts them by episode (stably), so that each episode's new steps form one span however many
environments were interleaved.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trajstore.format.spans import End, EpisodeValues, float_columns, int_columns
from trajstore.schema import Array, Schema
from trajstore.writing.stream_appender import CommitBatch, NewRows

_FIRST_ENDS = 64
ROW_OVERHEAD_BYTES = 48  # episode, env and dropped of each row, and what placing it takes for a moment


@dataclass(slots=True)
class EndEvent:
    """An episode's end, waiting to be put on its last span."""

    env: int
    end: End
    has_final: bool
    values: EpisodeValues


@dataclass(slots=True)
class _Ends:
    """Ends of many episodes at once, as vectorised appends report them."""

    episode: Array
    env: Array
    end: Array
    has_final: bool
    values: EpisodeValues  # of each of them


def staged_rows(buffer_bytes: int, row_bytes: int) -> int:
    """Rows that each of a buffer's two stagings holds: the most that one call may append."""
    return max(1, buffer_bytes // 2 // (row_bytes + ROW_OVERHEAD_BYTES))


class Staging:
    """A bounded block of appended rows, reused once its batch is durable.

    Attributes:
        n: Rows staged.
        capacity: Rows it can hold at most.
    """

    def __init__(self, schema: Schema, capacity: int) -> None:
        self.capacity = capacity
        self.n = 0
        self.n_text = 0  # bytes of text that came with ends
        # Allocated whole: the system gives out memory as it is touched, and growing would copy.
        self.columns = {
            path: np.empty((capacity, *spec.shape), spec.storage_dtype) for path, spec in schema.fields.items()
        }
        self.episode = np.empty(capacity, np.int64)
        self.env = np.empty(capacity, np.int64)
        self.dropped = np.empty(capacity, bool)
        self.any_dropped = False
        self._ends: dict[int, EndEvent] = {}
        self._many_ends: list[_Ends] = []
        self._n_calls = 0  # that ended episodes
        self._end_rows = np.empty((_FIRST_ENDS, 5), np.int64)
        self.n_ends = 0

    @property
    def room(self) -> int:
        return self.capacity - self.n

    @property
    def is_empty(self) -> bool:
        return self.n == 0 and not self._ends and not self._many_ends

    def clear(self) -> None:
        self.n = self.n_text = 0
        self.any_dropped = False
        self._ends.clear()
        self._many_ends.clear()
        self.n_ends = 0

    def reserve(self, n: int) -> slice:
        """Take the next ``n`` rows, for which there is room; says where they are."""
        where = slice(self.n, self.n + n)
        self.dropped[where] = False
        self.n += n
        return where

    def extend(self, rows: dict[str, Array], episode: Array, env: Array) -> None:
        """Append rows, one for each of ``episode`` and ``env``."""
        where = self.reserve(len(episode))
        for path, values in rows.items():
            self.columns[path][where] = values
        self.episode[where], self.env[where] = episode, env

    def end(self, episode: int, event: EndEvent) -> None:
        self._ends[episode] = event
        self.n_text += len(event.values.text)
        self._note_ends(1, episode, event.env, event.end, event.has_final)

    def end_many(self, episode: Array, env: Array, end: Array, has_final: bool, values: EpisodeValues) -> None:
        self._many_ends.append(_Ends(episode, env, end, has_final, values))
        self.n_text += len(values.text) * len(episode)
        self._note_ends(len(episode), episode, env, end, has_final)

    def _note_ends(self, n: int, *facts: Any) -> None:
        stop = self.n_ends + n
        if stop > len(self._end_rows):
            grown = np.empty((2 * stop, 5), np.int64)
            grown[: self.n_ends] = self._end_rows[: self.n_ends]
            self._end_rows = grown
        for column, values in enumerate((self._n_calls, *facts)):
            self._end_rows[self.n_ends : stop, column] = values
        self._n_calls += 1
        self.n_ends = stop

    def ends(self, first: int = 0) -> Array:
        """Ends in order of time, but for the first ones, as rows of (call, episode, env, end, has_final)."""
        return self._end_rows[first : self.n_ends].copy()

    def drop(self, episode: int) -> int:
        """Forget the staged rows of an episode; returns how many."""
        rows = np.flatnonzero(self.episode[: self.n] == episode)
        self.dropped[rows] = True
        self.any_dropped = self.any_dropped or bool(len(rows))
        return len(rows)

    def find(self, episode: int, t_in_staging: int) -> int | None:
        """The staged row of an episode's n-th staged step."""
        rows = np.flatnonzero(self.episode[: self.n] == episode)
        return int(rows[t_in_staging]) if 0 <= t_in_staging < len(rows) else None


@dataclass(slots=True)
class Placement:
    """What is placed so far of each environment's open episode, and where the next rows go."""

    row: int = 0
    text_stop: int = 0
    episode: Array = field(default_factory=lambda: np.empty(0, np.int64))  # by env; -1 where none is open
    n_rows: Array = field(default_factory=lambda: np.empty(0, np.int64))
    return_: Array = field(default_factory=lambda: np.empty(0, np.float64))

    def cover(self, n_envs: int) -> None:
        missing = n_envs - len(self.episode)
        if missing > 0:
            self.episode = np.append(self.episode, np.full(missing, -1))
            self.n_rows = np.append(self.n_rows, np.zeros(missing, np.int64))
            self.return_ = np.append(self.return_, np.zeros(missing))


def place(staging: Staging, placement: Placement, schema: Schema) -> CommitBatch:
    """Give every staged row its place: one span an episode, episodes in order of their start.

    Changes ``placement``; call it once for a staging, in order.
    """
    now = time.time()
    order = _row_order(staging)
    episode = staging.episode[: staging.n] if order is None else staging.episode[order]
    ids, first, count = _runs(episode)
    env = (staging.env if order is None else staging.env[order])[first]
    ids, env, count = _with_rowless_ends(staging, ids, env, count)
    placement.cover(int(env.max()) + 1 if len(env) else 0)
    rows = {path: NewRows(column[: staging.n], order) for path, column in staging.columns.items()}
    row_start = placement.row + np.cumsum(count) - count
    continued = placement.episode[env] == ids
    ints = np.zeros((len(ids), len(int_columns(schema))), np.int64)
    floats = np.zeros((len(ids), len(float_columns(schema))), np.float64)
    ints[:, 0], ints[:, 1] = ids, env
    ints[:, 2] = np.where(continued, placement.n_rows[env], 0)
    ints[:, 3], ints[:, 4] = row_start, row_start + count
    with np.errstate(all="ignore"):  # rewards may be infinite or NaN, and their sum as well
        earned = _rewards(rows, schema, ints[:, 2], count)
        floats[:, 0] = np.where(continued, placement.return_[env], 0.0) + earned
    floats[:, 1] = now
    text = _apply_ends(staging, schema, ints, floats, placement.text_stop)
    _advance(placement, ints, floats)
    return CommitBatch(rows, ints, floats, text, now)


def empty_batch(schema: Schema) -> CommitBatch:
    """A batch without rows, for commits of nothing but columns."""
    ints = np.zeros((0, len(int_columns(schema))), np.int64)
    return CommitBatch({}, ints, np.zeros((0, len(float_columns(schema)))), b"", time.time())


def steps_of(batch: CommitBatch, schema: Schema) -> dict[str, Array]:
    """The values that a batch adds, by field: final rows count for fields that have a final value."""
    spans, start = batch.span_ints, int(batch.span_ints[0, 3]) if len(batch.span_ints) else 0
    finals = spans[spans[:, 6] > 0, 4] - 1 - start
    found = {}
    for path, rows in batch.rows.items():
        values = rows.source if rows.order is None else rows.source[rows.order]
        found[path] = values if schema[path].final or not len(finals) else np.delete(values, finals, 0)
    return found


def _row_order(staging: Staging) -> Array | None:
    """Staged rows by episode, in order of arrival within it; None where they lie so already."""
    episode = staging.episode[: staging.n]
    if not staging.any_dropped and (episode[1:] >= episode[:-1]).all():
        return None
    order = np.argsort(episode, kind="stable")
    return order[~staging.dropped[order]] if staging.any_dropped else order


def _runs(values: Array) -> tuple[Array, Array, Array]:
    """Distinct values of a sorted array, where each starts and how often it stands."""
    if not len(values):
        return values, np.empty(0, np.int64), np.empty(0, np.int64)
    first = np.flatnonzero(np.append(True, values[1:] != values[:-1]))
    return values[first], first, np.diff(np.append(first, len(values)))


def _with_rowless_ends(staging: Staging, ids: Array, env: Array, count: Array) -> tuple[Array, Array, Array]:
    """Add spans of zero rows for episodes that ended although none of their rows is staged."""
    ended = np.concatenate(
        [np.fromiter(staging._ends, np.int64, len(staging._ends)), *(e.episode for e in staging._many_ends)]
    )
    ended_env = np.concatenate(
        [
            np.array([event.env for event in staging._ends.values()], np.int64),
            *(e.env for e in staging._many_ends),
        ]
    )
    rowless = ~np.isin(ended, ids)
    if not rowless.any():
        return ids, env, count
    ids, env = np.append(ids, ended[rowless]), np.append(env, ended_env[rowless])
    count = np.append(count, np.zeros(int(rowless.sum()), np.int64))
    # Rows are laid out by episode id as well, so inserting zero-row spans keeps the row ranges right.
    order = np.argsort(ids, kind="stable")
    return ids[order], env[order], count[order]


def _rewards(rows: dict[str, NewRows], schema: Schema, t_start: Array, count: Array) -> Array:
    """Sum of rewards of each span; NaN where the schema has no scalar reward."""
    spec = schema.fields.get(schema.reward) if schema.reward else None
    if spec is None or np.prod(spec.shape) != 1 or spec.dtype in ("bool", "bfloat16"):
        return np.full(len(count), np.nan)
    reward = rows[schema.reward]  # type: ignore[index]
    values = (reward.source if reward.order is None else reward.source[reward.order]).reshape(-1)
    values = np.append(values.astype(np.float64), 0.0)  # reduceat needs a place even for spans of no rows
    start = np.cumsum(count) - count
    if schema.reward_alignment == "observation":
        # The reward that came with an episode's first observation was not earned in it.
        values[start[(count > 0) & (t_start == 0)]] = 0.0
    return np.where(count > 0, np.add.reduceat(values, start), 0.0) if len(count) else values[:0]


def _apply_ends(staging: Staging, schema: Schema, ints: Array, floats: Array, text_stop: int) -> bytes:
    """Put the staged ends on their spans; returns the text that belongs to them, in order of the spans."""
    ids = ints[:, 0]
    columns = {name: (ints, i) for i, name in enumerate(int_columns(schema))}
    columns |= {name: (floats, i) for i, name in enumerate(float_columns(schema))}
    sizes = np.zeros(len(ids), np.int64)
    texts: dict[int, bytes] = {}

    def put(at: Any, ends: _Ends | EndEvent) -> None:
        ints[at, 5], ints[at, 6], ints[at, 7] = ends.end, ends.has_final, ends.values.present
        for name, value in ends.values.numbers:
            array, column = columns[name]
            array[at, column] = value
        sizes[at] = len(ends.values.text)

    for ends in staging._many_ends:
        spans = np.searchsorted(ids, ends.episode)
        put(spans, ends)
        if ends.values.text:
            texts |= dict.fromkeys(spans.tolist(), ends.values.text)
    for episode, event in staging._ends.items():
        span = int(np.searchsorted(ids, episode))
        put(span, event)
        texts[span] = event.values.text
    ints[:, 8] = text_stop + np.cumsum(sizes)
    return b"".join(texts[span] for span in sorted(texts))


def _advance(placement: Placement, ints: Array, floats: Array) -> None:
    if not len(ints):
        return
    placement.row, placement.text_stop = int(ints[-1, 4]), int(ints[-1, 8])
    # Ids rise within an environment, so with repeated indices the newest episode is written last.
    env, is_open = ints[:, 1], ints[:, 5] == End.OPEN
    placement.episode[env] = np.where(is_open, ints[:, 0], -1)
    placement.n_rows[env] = ints[:, 2] + ints[:, 4] - ints[:, 3]
    placement.return_[env] = floats[:, 0]
