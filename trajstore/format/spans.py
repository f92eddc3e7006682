"""Spans: which rows of a stream belong to which episode, and how it ended.

A span is a run of consecutive rows of one episode in one stream. What is known only at the end of an
episode (how it ended, return, metadata, whether it has a final row) stands on its last span.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np

from trajstore.errors import CorruptionError, DataError
from trajstore.schema import MAX_METADATA_BYTES, Array, Schema

SPAN_INTS = ("episode", "env", "t_start", "row_start", "row_stop", "end", "has_final", "present", "text_stop")
SPAN_FLOATS = ("return", "time")
MAX_ENV = 1 << 20


class End(IntEnum):
    """How an episode ended; the number is what stands on disk."""

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
    """An episode's own values, checked and split into what goes where on disk."""

    present: int = 0
    numbers: tuple[tuple[str, int | float], ...] = ()
    text: bytes = b""


def check_metadata(schema: Schema, metadata: Mapping[str, Any] | None) -> EpisodeValues:
    """Split metadata into declared columns and free JSON.

    Raises:
        DataError: A value does not fit its column, or is not JSON.
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
            rest[name] = _checked_value(name, kind, value)
        else:
            numbers.append((name, _checked_value(name, kind, value)))
    rest.update({name: value for name, value in metadata.items() if name not in schema.episode})
    return EpisodeValues(present, tuple(numbers), _to_json(rest))


def _checked_value(name: str, kind: str, value: Any) -> Any:
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
    """Refuse keys that JSON would turn into strings, at any depth."""
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                raise DataError(f"metadata: keys are strings, got {name!r}")
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    for item in inner:
        _check_keys(item)


def _to_json(values: dict[str, Any]) -> bytes:
    if not values:
        return b""
    try:
        text = json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"metadata {sorted(values)}: not storable as JSON: {error}") from error
    _check_keys(values)
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


def check_spans(spans: Spans, rows: int, text_bytes: int) -> None:
    """Refuse span values that could address anything outside the stream's committed rows.

    Raises:
        CorruptionError: They do.
    """
    ints = spans.ints
    start, stop, text_stop = ints[:, 3], ints[:, 4], ints[:, 8]
    good = (
        (ints[:, [0, 1, 2]] >= 0).all()
        and (start >= 0).all()
        and (start <= stop).all()
        and (stop <= rows).all()
        and ((ints[:, 5] >= 0) & (ints[:, 5] < len(End))).all()
        and ((ints[:, 6] == 0) | (ints[:, 6] == 1)).all()
        and ((ints[:, 6] == 0) | (stop > start)).all()
        and (start[1:] >= stop[:-1]).all()  # spans share no rows, so all of them together fit the stream
        and (text_stop >= 0).all()
        and (text_stop[1:] >= text_stop[:-1]).all()
        and (text_stop <= text_bytes).all()
    )
    if not good:
        raise CorruptionError("span table holds values that no writer makes")


@dataclass(frozen=True, slots=True)
class VisibleSpans:
    """The spans of one physical stream that a view shows, and how to read them."""

    stream: int  # index of the logical stream whose handles these are
    source: int  # index of the physical stream that holds the rows
    spans: Spans
    columns: tuple[tuple[str, ...], tuple[str, ...]]
    first_row: int  # rows below are evicted
    is_finished: bool  # sealed or declared dead: its open episodes read as cut
    hidden: tuple[tuple[int, int], ...] = ()  # row ranges that other streams replace
    discarded: frozenset[int] = frozenset()

    def after(self, n: int) -> VisibleSpans:
        """The same without the first ``n`` spans."""
        return replace(self, spans=Spans(self.spans.ints[n:], self.spans.floats[n:])) if n else self


@dataclass(frozen=True, slots=True)
class EpisodeSpans:
    """Spans brought together by episode: episode i has the spans ``first[i]`` to ``last[i]``, both included."""

    columns: dict[str, Array]
    first: Array
    last: Array
    n_rows: Array  # by episode: rows that are left
    first_t: Array  # by episode: t of the first of them

    def select(self, chosen: Array) -> dict[str, Array]:
        """The spans of the chosen episodes."""
        spans = self.span_numbers(chosen)
        return {name: column[spans] for name, column in self.columns.items()}

    def span_numbers(self, chosen: Array) -> Array:
        owner, number = expand_counts((self.last - self.first + 1)[chosen])
        found: Array = self.first[chosen][owner] + number
        return found


def expand_counts(count: Array) -> tuple[Array, Array]:
    """For so many of each: which it is of, and its number there."""
    owner = np.repeat(np.arange(len(count)), count)
    return owner, np.arange(len(owner)) - (np.cumsum(count) - count)[owner]


def expand_ranges(start: Array, stop: Array) -> tuple[Array, Array]:
    """All numbers from start to stop, range after range, and the range that each is of."""
    owner, number = expand_counts(np.maximum(stop - start, 0))
    return owner, number + start[owner]


def join_spans_by_episode(columns: dict[str, Array]) -> EpisodeSpans:
    """Bring the spans of each episode together, in order of time; leaves out episodes that are evicted entirely."""
    order = _episode_order(columns)
    if order is not None:
        columns = {name: column[order] for name, column in columns.items()}
    n_rows = columns["row_stop"] - columns["row_start"]
    if not len(n_rows):
        return EpisodeSpans(columns, n_rows, n_rows, n_rows, n_rows)
    is_first = np.ones(len(n_rows), bool)
    is_first[1:] = (np.diff(columns["stream"]) != 0) | (np.diff(columns["episode"]) != 0)
    first = np.flatnonzero(is_first)
    last = np.append(first[1:], len(n_rows)) - 1
    rows, n_evicted = np.add.reduceat(n_rows, first), np.add.reduceat(columns["n_evicted"], first)
    is_left = (rows > 0) | (n_evicted == 0)
    # Rows of an episode go from the front, from one span after the other.
    first_t = (columns["t_start"] - columns["n_evicted"])[first] + n_evicted
    return EpisodeSpans(columns, first[is_left], last[is_left], rows[is_left], first_t[is_left])


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
    """Columns of one stream's spans, without what is evicted, replaced or discarded."""
    ints, floats = part.spans.ints, part.spans.floats
    columns = {name: ints[:, i] for i, name in enumerate(part.columns[0])}
    columns |= {name: floats[:, i] for i, name in enumerate(part.columns[1])}
    columns["text_start"] = np.concatenate([[0], columns["text_stop"][:-1]]) if len(ints) else ints[:, 8]
    n = len(ints)
    columns["stream"] = np.full(n, part.stream, np.int64)
    columns["source"] = np.full(n, part.source, np.int64)
    keep = np.ones(n, bool)
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


def _episode_order(s: dict[str, Array]) -> Array | None:
    """The order that brings the spans of an episode together; None where they are in order already."""
    stream, episode, t_start = s["stream"], s["episode"], s["t_start"]
    step = np.diff(stream)
    same_stream, same_episode = step == 0, np.diff(episode) == 0
    in_order = (step > 0) | (same_stream & (np.diff(episode) > 0))
    in_order |= same_stream & same_episode & (np.diff(t_start) >= 0)
    if in_order.all():
        return None
    return np.lexsort((np.arange(len(stream)), t_start, episode, stream))


def span_columns(schema: Schema) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return int_columns(schema), float_columns(schema)
