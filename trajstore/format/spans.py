"""Spans: which rows of a stream belong to which episode, and how the episode ended.

A span is a run of consecutive rows of one episode in one stream. An episode's last span holds what is known
only at its end: how it ended, its return, its metadata, and whether it has a final row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np

from trajstore.credentials import credential_in
from trajstore.errors import CorruptionError, DataError
from trajstore.schema import MAX_METADATA_BYTES, Array, Schema

SPAN_INTS = ("episode", "env", "t_start", "row_start", "row_stop", "end", "has_final", "present", "text_stop")
SPAN_FLOATS = ("return", "time")
MAX_ENV = 1 << 20


class End(IntEnum):
    """How an episode ended; the numbers are those on disk."""

    OPEN = 0
    TERMINATED = 1
    TRUNCATED = 2
    CUT = 3
    ABORTED = 4

    @property
    def label(self) -> str:
        return self.name.lower()


END_LABELS: Array = np.array([end.label for end in End], dtype=object)


def int_columns(schema: Schema) -> tuple[str, ...]:
    """Names of the columns in a stream's packed int64 span array."""
    return SPAN_INTS + tuple(name for name, kind in schema.episode.items() if kind in ("bool", "int64"))


def float_columns(schema: Schema) -> tuple[str, ...]:
    """Names of the columns in a stream's packed float64 span array."""
    return SPAN_FLOATS + tuple(name for name, kind in schema.episode.items() if kind == "float64")


@dataclass(frozen=True, slots=True)
class EpisodeValues:
    """The values of an episode as a whole, checked and split as they are stored.

    Attributes:
        present: Bit i is set if the i-th episode column of the schema has a value.
        numbers: Names and values of bool, int64 and float64 columns.
        text: JSON of the str columns and the free metadata; empty if there are none.
    """

    present: int = 0
    numbers: tuple[tuple[str, int | float], ...] = ()
    text: bytes = b""


def check_metadata(schema: Schema, metadata: Mapping[str, Any] | None) -> EpisodeValues:
    """Check metadata, and split it into declared columns and free JSON.

    Raises:
        DataError: A value does not fit its column, or can't be stored as JSON.
    """
    if not metadata:
        return EpisodeValues()
    present, numbers, rest = 0, [], {}
    for bit, (name, kind) in enumerate(schema.episode.items()):
        value = metadata.get(name)
        if value is None:
            continue
        present |= 1 << bit
        if kind == "str":
            rest[name] = _check_column_value(name, kind, value)
        else:
            numbers.append((name, _check_column_value(name, kind, value)))
    rest.update({name: value for name, value in metadata.items() if name not in schema.episode})
    return EpisodeValues(present, tuple(numbers), _to_json(rest))


def _check_column_value(name: str, kind: str, value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    expected: Any = {"bool": bool, "int64": int, "float64": (int, float), "str": str}[kind]
    if not isinstance(value, expected) or (kind != "bool" and isinstance(value, bool)):
        raise DataError(f"episode column '{name}': expected {kind}, got {type(value).__name__} {value!r:.60}")
    try:
        cast = np.int64(value).item() if kind == "int64" else float(value) if kind == "float64" else value
    except OverflowError:
        cast = None
    if cast is None or (isinstance(value, int) and cast != value):
        raise DataError(f"episode column '{name}': {value!r:.60} is out of range for {kind}")
    return cast


def _check_keys(value: Any) -> None:
    """Refuse keys that are not strings, at any depth: JSON would turn them into strings."""
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                raise DataError(f"metadata: expected strings as keys, got {name!r}")
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    for item in inner:
        _check_keys(item)


def _to_json(values: dict[str, Any]) -> bytes:
    if not values:
        return b""
    try:
        shown = json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        text = shown.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"metadata {sorted(values)}: not storable as JSON: {error}") from error
    _check_keys(values)
    if (found := credential_in(shown)) is not None:
        raise DataError(
            f"metadata {sorted(values)}: a URL in it holds {found}, which would be stored; leave it out"
        )
    if len(text) > MAX_METADATA_BYTES:
        raise DataError(f"metadata takes {len(text)} bytes; at most {MAX_METADATA_BYTES}")
    return text


@dataclass(frozen=True, slots=True)
class Spans:
    """The committed spans of one stream, in order of commit."""

    ints: Array
    floats: Array

    def __len__(self) -> int:
        return len(self.ints)

    def first(self, n: int) -> Spans:
        """The first ``n`` of them."""
        return self if n >= len(self) else Spans(self.ints[:n], self.floats[:n])


def check_spans(spans: Spans, rows: int, text_bytes: int) -> None:
    """Refuse spans that overlap, or that name rows or text outside the stream's committed ones.

    Raises:
        CorruptionError: A value is one that no writer makes.
    """
    ints = spans.ints
    start, stop, text_stop = ints[:, 3], ints[:, 4], ints[:, 8]
    is_valid = (
        (ints[:, [0, 1, 2]] >= 0).all()
        and (start >= 0).all()
        and (start <= stop).all()
        and (stop <= rows).all()
        and ((ints[:, 5] >= 0) & (ints[:, 5] < len(End))).all()
        and ((ints[:, 6] == 0) | (ints[:, 6] == 1)).all()
        and ((ints[:, 6] == 0) | (stop > start)).all()
        and (start[1:] >= stop[:-1]).all()  # spans share no rows, so together they fit the stream
        and (text_stop >= 0).all()
        and (text_stop[1:] >= text_stop[:-1]).all()
        and (text_stop <= text_bytes).all()
    )
    if not is_valid:
        raise CorruptionError("the span table has invalid values")


@dataclass(frozen=True, slots=True)
class VisibleSpans:
    """The spans of one physical stream, and what a view shows of them.

    ``source`` counts the snapshot's streams from 0. (In the sampling index, source 0 is the live rows.)
    """

    stream: int  # index of the logical stream whose handles these are
    source: int  # index of the physical stream that holds the rows
    spans: Spans
    columns: tuple[tuple[str, ...], tuple[str, ...]]  # names of the int64 and of the float64 columns
    first_row: int  # rows below it are evicted
    is_finished: bool  # sealed or declared dead: its open episodes read as cut
    hidden: tuple[tuple[int, int], ...] = ()  # row ranges that other streams replace
    discarded: frozenset[int] = frozenset()  # episodes that are not shown
    limit: int | None = None  # spans after this many are abandoned; None: none is
    n_skipped: int = 0  # spans before this many are not shown

    def after(self, n: int) -> VisibleSpans:
        """The same, without the first ``n`` spans."""
        return replace(self, spans=Spans(self.spans.ints[n:], self.spans.floats[n:])) if n else self


@dataclass(frozen=True, slots=True)
class EpisodeSpans:
    """Spans sorted by episode: episode i has the spans ``first[i]`` to ``last[i]``, both included."""

    columns: dict[str, Array]
    first: Array
    last: Array
    n_rows: Array  # by episode: rows that are not evicted
    n_evicted: Array  # by episode: rows that are
    first_t: Array  # by episode: t of the first such row

    def select(self, chosen: Array) -> dict[str, Array]:
        """The spans of the chosen episodes, by column."""
        spans = self.span_numbers(chosen)
        return {name: column[spans] for name, column in self.columns.items()}

    def span_numbers(self, chosen: Array) -> Array:
        """Positions of the spans of the chosen episodes."""
        owner, number = expand_counts((self.last - self.first + 1)[chosen])
        found: Array = self.first[chosen][owner] + number
        return found


def expand_counts(count: Array) -> tuple[Array, Array]:
    """Expand counts into (owner, position) pairs: owner i appears ``count[i]`` times, with positions from 0."""
    owner = np.repeat(np.arange(len(count)), count)
    return owner, np.arange(len(owner)) - (np.cumsum(count) - count)[owner]


def expand_ranges(start: Array, stop: Array) -> tuple[Array, Array]:
    """Expand half-open ranges into (owner, number) pairs, range after range; owner i is the i-th range."""
    owner, number = expand_counts(np.maximum(stop - start, 0))
    return owner, number + start[owner]


def join_spans_by_episode(columns: dict[str, Array], *, keeps_evicted: bool = False) -> EpisodeSpans:
    """Sort spans by episode and time; episodes that are evicted entirely are left out, unless they are kept."""
    order = _episode_order(columns)
    if order is not None:
        columns = {name: column[order] for name, column in columns.items()}
    n_rows = columns["row_stop"] - columns["row_start"]
    if not len(n_rows):
        return EpisodeSpans(columns, n_rows, n_rows, n_rows, n_rows, n_rows)
    is_first = np.ones(len(n_rows), bool)
    is_first[1:] = (np.diff(columns["stream"]) != 0) | (np.diff(columns["episode"]) != 0)
    first = np.flatnonzero(is_first)
    last = np.append(first[1:], len(n_rows)) - 1
    rows, n_evicted = np.add.reduceat(n_rows, first), np.add.reduceat(columns["n_evicted"], first)
    is_left = (rows > 0) | (n_evicted == 0) | keeps_evicted
    # An episode's rows are evicted from its start, span after span.
    first_t = (columns["t_start"] - columns["n_evicted"])[first] + n_evicted
    return EpisodeSpans(columns, first[is_left], last[is_left], rows[is_left], n_evicted[is_left], first_t[is_left])


def span_table(parts: Sequence[VisibleSpans], schema: Schema | None) -> dict[str, Array]:
    """Visible spans of several streams, column by column."""
    names = (
        *SPAN_INTS,
        *SPAN_FLOATS,
        *(n for n, k in (schema.episode if schema else {}).items() if k != "str"),
    )
    blocks = [_visible(part) for part in parts]
    floats = {*SPAN_FLOATS, *(n for n, k in (schema.episode if schema else {}).items() if k == "float64")}
    return {
        name: np.concatenate(
            [np.empty(0, np.float64 if name in floats else np.int64), *(block[name] for block in blocks)]
        )
        for name in (*names, "stream", "source", "text_start", "n_evicted")
    }


def _visible(part: VisibleSpans) -> dict[str, Array]:
    """Columns of one stream's spans, without rows and spans that are evicted, replaced or discarded."""
    ints, floats = part.spans.ints, part.spans.floats
    columns = {name: ints[:, i] for i, name in enumerate(part.columns[0])}
    columns |= {name: floats[:, i] for i, name in enumerate(part.columns[1])}
    columns["text_start"] = np.concatenate([[0], columns["text_stop"][:-1]]) if len(ints) else ints[:, 8]
    n = len(ints)
    columns["stream"] = np.full(n, part.stream, np.int64)
    columns["source"] = np.full(n, part.source, np.int64)
    keep = np.arange(n) >= part.n_skipped
    for start, stop in part.hidden:
        keep &= (columns["row_start"] < start) | (columns["row_start"] >= stop)
    n_evicted = np.clip(part.first_row, columns["row_start"], columns["row_stop"]) - columns["row_start"]
    columns["n_evicted"] = n_evicted
    columns["row_start"] = columns["row_start"] + n_evicted
    columns["t_start"] = columns["t_start"] + n_evicted
    if part.is_finished:
        columns["end"] = np.where(columns["end"] == End.OPEN, End.CUT, columns["end"])
    if part.discarded:
        keep &= ~np.isin(columns["episode"], list(part.discarded))
    return columns if keep.all() else {name: column[keep] for name, column in columns.items()}


def _episode_order(spans: dict[str, Array]) -> Array | None:
    """The order that sorts spans by stream, episode and time; None if they are in that order already."""
    stream, episode, t_start = spans["stream"], spans["episode"], spans["t_start"]
    step = np.diff(stream)
    same_stream, same_episode = step == 0, np.diff(episode) == 0
    in_order = (step > 0) | (same_stream & (np.diff(episode) > 0))
    in_order |= same_stream & same_episode & (np.diff(t_start) >= 0)
    if in_order.all():
        return None
    return np.lexsort((np.arange(len(stream)), t_start, episode, stream))


def span_columns(schema: Schema) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the columns in a stream's int64 and float64 span arrays."""
    return int_columns(schema), float_columns(schema)
