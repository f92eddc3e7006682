"""Places staged rows in the stream: each episode's new rows become one span.

Rows are sorted by episode, stably, so interleaved environments do not split an episode's rows.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trajstore.format.spans import End, float_columns, int_columns
from trajstore.schema import Array, Schema
from trajstore.writing.commit_batch import CommitBatch, NewRows
from trajstore.writing.staging import EpisodeEnds, Staging


@dataclass(slots=True)
class Placement:
    """How far a stream is placed.

    Attributes:
        row: Row of the stream where the next staged row goes.
        text_stop: End of the placed text.
        episode: By environment, the open episode, or -1.
        n_rows: By environment, placed rows of that episode.
        return_: By environment, sum of the rewards of those rows.
    """

    row: int = 0
    text_stop: int = 0
    episode: Array = field(default_factory=lambda: np.empty(0, np.int64))
    n_rows: Array = field(default_factory=lambda: np.empty(0, np.int64))
    return_: Array = field(default_factory=lambda: np.empty(0, np.float64))

    def cover(self, n_envs: int) -> None:
        """Make room for environments 0 to ``n_envs`` - 1."""
        missing = n_envs - len(self.episode)
        if missing > 0:
            self.episode = np.append(self.episode, np.full(missing, -1))
            self.n_rows = np.append(self.n_rows, np.zeros(missing, np.int64))
            self.return_ = np.append(self.return_, np.zeros(missing))

    def advance(self, ints: Array, floats: Array) -> None:
        """Count these spans as placed."""
        if not len(ints):
            return
        self.row, self.text_stop = int(ints[-1, 4]), int(ints[-1, 8])
        # Ids rise within an environment, so with repeated indices the newest episode is written last.
        env, is_open = ints[:, 1], ints[:, 5] == End.OPEN
        self.episode[env] = np.where(is_open, ints[:, 0], -1)
        self.n_rows[env] = ints[:, 2] + ints[:, 4] - ints[:, 3]
        self.return_[env] = floats[:, 0]


def place(staging: Staging, placement: Placement, schema: Schema) -> CommitBatch:
    """Give every staged row its place: one span per episode, episodes in order of their start.

    Changes ``placement``: call it once for each staging, in order.
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
    placement.advance(ints, floats)
    return CommitBatch(rows, ints, floats, text, now)


def empty_batch(schema: Schema) -> CommitBatch:
    """A batch without rows, for commits that change only derived columns or the view."""
    ints = np.zeros((0, len(int_columns(schema))), np.int64)
    return CommitBatch({}, ints, np.zeros((0, len(float_columns(schema)))), b"", time.time())


def added_values(batch: CommitBatch, schema: Schema) -> dict[str, Array]:
    """The values that a batch adds, by field, without the final rows of fields that have no final value."""
    spans, start = batch.span_ints, int(batch.span_ints[0, 3]) if len(batch.span_ints) else 0
    finals = spans[spans[:, 6] > 0, 4] - 1 - start
    found = {}
    for path, rows in batch.rows.items():
        values = rows.to_array()
        found[path] = values if schema[path].final or not len(finals) else np.delete(values, finals, 0)
    return found


def _row_order(staging: Staging) -> Array | None:
    """Staged rows by episode, in order of arrival within it; None if they are in that order already."""
    episode = staging.episode[: staging.n]
    if not staging.any_dropped and (episode[1:] >= episode[:-1]).all():
        return None
    order = np.argsort(episode, kind="stable")
    return order[~staging.dropped[order]] if staging.any_dropped else order


def _runs(values: Array) -> tuple[Array, Array, Array]:
    """Distinct values of a sorted array, the position of the first of each, and their counts."""
    if not len(values):
        return values, np.empty(0, np.int64), np.empty(0, np.int64)
    first = np.flatnonzero(np.append(True, values[1:] != values[:-1]))
    return values[first], first, np.diff(np.append(first, len(values)))


def _with_rowless_ends(staging: Staging, ids: Array, env: Array, count: Array) -> tuple[Array, Array, Array]:
    """Add spans of zero rows for episodes that ended although none of their rows is staged."""
    ends = staging.ends()
    ended, ended_env = ends[:, 1], ends[:, 2]
    rowless = ~np.isin(ended, ids)
    if not rowless.any():
        return ids, env, count
    ids, env = np.append(ids, ended[rowless]), np.append(env, ended_env[rowless])
    count = np.append(count, np.zeros(int(rowless.sum()), np.int64))
    # Rows are laid out by episode id as well, so inserting zero-row spans keeps the row ranges right.
    order = np.argsort(ids, kind="stable")
    return ids[order], env[order], count[order]


def _rewards(rows: dict[str, NewRows], schema: Schema, t_start: Array, count: Array) -> Array:
    """Sum of rewards of each span; NaN if the schema has no scalar reward."""
    spec = schema.fields.get(schema.reward) if schema.reward else None
    if spec is None or np.prod(spec.shape) != 1 or spec.dtype in ("bool", "bfloat16"):
        return np.full(len(count), np.nan)
    values = rows[schema.reward].to_array().reshape(-1)  # type: ignore[index]
    values = np.append(values.astype(np.float64), 0.0)  # reduceat needs a position even for spans of no rows
    start = np.cumsum(count) - count
    if schema.reward_alignment == "observation":
        # The reward that came with an episode's first observation was not earned in it.
        values[start[(count > 0) & (t_start == 0)]] = 0.0
    return np.where(count > 0, np.add.reduceat(values, start), 0.0) if len(count) else values[:0]


def _apply_ends(staging: Staging, schema: Schema, ints: Array, floats: Array, text_stop: int) -> bytes:
    """Write the reported ends into their spans; return the text that belongs to them, in order of the spans."""
    ids = ints[:, 0]
    columns = {name: (ints, i) for i, name in enumerate(int_columns(schema))}
    columns |= {name: (floats, i) for i, name in enumerate(float_columns(schema))}
    sizes = np.zeros(len(ids), np.int64)
    texts: dict[int, bytes] = {}
    for ends in staging.reported_ends:
        spans: Any = np.searchsorted(ids, ends.episode)  # an array, or one number
        _write_ends(ends, spans, ints, columns)
        if ends.values.text:
            sizes[spans] = len(ends.values.text)
            texts |= dict.fromkeys(np.atleast_1d(spans).tolist(), ends.values.text)
    ints[:, 8] = text_stop + np.cumsum(sizes)
    return b"".join(texts[span] for span in sorted(texts))


def _write_ends(ends: EpisodeEnds, spans: Any, ints: Array, columns: dict[str, tuple[Array, int]]) -> None:
    ints[spans, 5], ints[spans, 6], ints[spans, 7] = ends.end, ends.has_final, ends.values.present
    for name, value in ends.values.numbers:
        array, column = columns[name]
        array[spans, column] = value
