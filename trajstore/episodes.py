"""Spans and episodes: which rows belong to which episode, and how it ended.

A span is a run of consecutive rows of one episode in one stream. What is known only at the end of an
episode (how it ended, return, metadata, whether it has a final row) stands on its last span.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from trajstore.errors import CorruptionError, DataError, EpisodeNotFoundError, MissingExtraError
from trajstore.schema import MAX_METADATA_BYTES, Array, Schema

if TYPE_CHECKING:
    import pandas as pd

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


class EpisodeKey(NamedTuple):
    """Names an episode for ever: the stream that recorded it and its number there."""

    stream: str
    episode: int


class Handle(NamedTuple):
    """Names one step for ever."""

    stream: str
    episode: int
    t: int


class Handles(NamedTuple):
    """Names many steps of one stream for ever; ``episode`` and ``t`` are int64 arrays."""

    stream: str
    episode: Array
    t: Array


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
        return np.int64(value).item() if kind == "int64" else float(value) if kind == "float64" else value
    except OverflowError as error:
        raise DataError(f"episode column '{name}': {value!r:.60} is out of range for {kind}") from error


def _to_json(values: dict[str, Any]) -> bytes:
    if not values:
        return b""
    for name in values:
        if not isinstance(name, str):
            raise DataError(f"metadata: keys are strings, got {name!r}")
    try:
        text = json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"metadata {sorted(values)}: not storable as JSON: {error}") from error
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
class StreamSpans:
    """The spans of one physical stream that a view shows, and how to read them."""

    stream: int  # index of the logical stream whose handles these are
    source: int  # index of the physical stream that holds the rows
    spans: Spans
    columns: tuple[tuple[str, ...], tuple[str, ...]]
    first_row: int  # rows below are evicted
    is_finished: bool  # sealed or declared dead: its open episodes read as cut
    hidden: tuple[tuple[int, int], ...] = ()  # row ranges that other streams replace
    discarded: frozenset[int] = frozenset()


class SpanRows(NamedTuple):
    """Rows of one span, as a reader needs them."""

    source: int
    t_start: int
    row_start: int
    row_stop: int


class EpisodeTable:
    """The episodes of a snapshot, one row each, column by column.

    Columns: ``stream``, ``episode``, ``env``, ``length`` (steps, the final row not counted), ``end``,
    ``return``, ``has_final``, ``is_headless`` (its first steps are evicted), ``time`` (UNIX seconds of the last
    span), ``metadata``, and whatever the schema declares. Rows are ordered by stream, then by episode.
    """

    def __init__(
        self,
        streams: Sequence[str],
        parts: Sequence[StreamSpans],
        schema: Schema | None,
        read_text: Callable[[int, int, int], bytes],
    ) -> None:
        self._streams = np.array(streams, dtype=object)
        self._schema = schema
        self._read_text = read_text
        self._join(_concatenate(parts, schema))

    def _join(self, s: dict[str, Array]) -> None:
        order = _episode_order(s)
        if order is not None:
            s = {name: column[order] for name, column in s.items()}
        n_rows = s["row_stop"] - s["row_start"]
        is_first = np.ones(len(n_rows), bool)
        is_first[1:] = (np.diff(s["stream"]) != 0) | (np.diff(s["episode"]) != 0)
        first = np.flatnonzero(is_first)
        last = np.append(first[1:], len(n_rows))[: len(first)] - 1
        rows = np.add.reduceat(n_rows, first) if len(first) else n_rows[:0]
        # Evicted entirely: had rows once, none is left.
        gone = (rows == 0) & (np.add.reduceat(s["n_evicted"], first) > 0) if len(first) else rows > 0
        self._spans = s
        self._first, self._last, self._rows = first[~gone], last[~gone], rows[~gone]

    def __len__(self) -> int:
        return len(self._first)

    @property
    def columns(self) -> tuple[str, ...]:
        declared = tuple(self._schema.episode) if self._schema else ()
        return (
            "stream", "episode", "env", "length", "end", "return",
            "has_final", "is_headless", "time", *declared, "metadata",
        )  # fmt: skip

    def __getitem__(self, name: str) -> Array:
        """One column as an array; declared ones are masked where an episode does not have them."""
        derived: dict[str, Callable[[], Array]] = {
            "episode": lambda: self._of_last("episode"),
            "env": lambda: self._of_last("env"),
            "return": lambda: self._of_last("return"),
            "time": lambda: self._of_last("time"),
            "stream": lambda: self._streams[self._spans["stream"][self._last]],
            "length": self._lengths,
            "end": lambda: END_LABELS[self._spans["end"][self._last]],
            "has_final": lambda: self._spans["has_final"][self._last].astype(bool),
            "is_headless": lambda: self._spans["t_start"][self._first] > 0,
            "metadata": lambda: self._objects([self._free(text) for text in self._texts()]),
        }
        if name in derived:
            return derived[name]()
        if self._schema is None or name not in self._schema.episode:
            raise KeyError(f"no episode column {name!r}; there are {', '.join(self.columns)}")
        return self._declared(name, self._schema)

    def _of_last(self, name: str) -> Array:
        column: Array = self._spans[name][self._last]
        return column

    def _lengths(self) -> Array:
        lengths: Array = self._rows - self._of_last("has_final")
        return lengths

    def _declared(self, name: str, schema: Schema) -> Array:
        bit = list(schema.episode).index(name)
        absent = (self._spans["present"][self._last] >> bit) & 1 == 0
        kind = schema.episode[name]
        if kind == "str":
            return self._objects([text.get(name) for text in self._texts()])
        values = self._spans[name][self._last]
        masked: Array = np.ma.masked_array(values.astype(bool) if kind == "bool" else values, absent)
        return masked

    def _objects(self, values: list[Any]) -> Array:
        column = np.empty(len(values), object)
        column[:] = values
        return column

    def _texts(self) -> list[dict[str, Any]]:
        """The text of every episode; each stream's is read once."""
        s, last = self._spans, self._last
        source, start, stop = s["source"][last], s["text_start"][last], s["text_stop"][last]
        has_text = stop > start
        texts: list[dict[str, Any]] = [{} for _ in range(len(self))]
        for stream in np.unique(source[has_text]):
            chosen = np.flatnonzero(has_text & (source == stream))
            low, high = int(start[chosen].min()), int(stop[chosen].max())
            data = self._read_text(int(stream), low, high)
            for i in chosen:
                texts[i] = _parse_text(data[start[i] - low : stop[i] - low])
        return texts

    def _free(self, text: dict[str, Any]) -> dict[str, Any]:
        declared = self._schema.episode if self._schema else {}
        return {name: value for name, value in text.items() if name not in declared}

    def _text(self, i: int) -> dict[str, Any]:
        k = self._last[i]
        start, stop = int(self._spans["text_start"][k]), int(self._spans["text_stop"][k])
        if start == stop:
            return {}
        return _parse_text(self._read_text(int(self._spans["source"][k]), start, stop))

    def metadata(self, i: int) -> dict[str, Any]:
        """Free-form metadata of episode ``i``; reads it from the store."""
        return self._free(self._text(self._position(i)))

    def key(self, i: int) -> EpisodeKey:
        """The name of row ``i`` that stays valid whatever is written or evicted."""
        k = self._last[self._position(i)]
        return EpisodeKey(str(self._streams[self._spans["stream"][k]]), int(self._spans["episode"][k]))

    def find(self, key: EpisodeKey) -> int:
        """The row of an episode in this table.

        Raises:
            EpisodeNotFoundError: This snapshot does not show it.
        """
        stream = np.flatnonzero(self._streams == key.stream)
        streams, episodes = self._spans["stream"][self._last], self._spans["episode"][self._last]
        if len(stream):
            low, high = np.searchsorted(streams, [stream[0], stream[0] + 1])
            i = low + int(np.searchsorted(episodes[low:high], key.episode))
            if i < high and episodes[i] == key.episode:
                return int(i)
        raise EpisodeNotFoundError(f"this snapshot has no episode {key.episode} of stream {key.stream!r}")

    def _position(self, i: int) -> int:
        if not -len(self) <= i < len(self):
            raise EpisodeNotFoundError(f"no episode {i}: this snapshot has {len(self)} episodes, counted from 0")
        return i % len(self)

    def spans(self, i: int) -> list[SpanRows]:
        """Where the rows of episode ``i`` lie, in order of time."""
        i = self._position(i)
        s = self._spans
        return [
            SpanRows(int(s["source"][k]), int(s["t_start"][k]), int(s["row_start"][k]), int(s["row_stop"][k]))
            for k in range(self._first[i], self._last[i] + 1)
            if s["row_stop"][k] > s["row_start"][k]
        ]

    def n_rows(self, i: int) -> int:
        return int(self._rows[self._position(i)])

    def has_final(self, i: int) -> bool:
        return bool(self._spans["has_final"][self._last[self._position(i)]])

    @property
    def n_spans(self) -> int:
        return int((self._last - self._first + 1).sum())

    def row(self, i: int) -> dict[str, Any]:
        """One episode as a plain dict."""
        i = self._position(i)
        k = self._last[i]
        declared = self._schema.episode if self._schema else {}
        text = self._text(i)
        values: dict[str, Any] = {
            "stream": str(self._streams[self._spans["stream"][k]]),
            "episode": int(self._spans["episode"][k]),
            "env": int(self._spans["env"][k]),
            "length": int(self._rows[i] - self._spans["has_final"][k]),
            "end": End(int(self._spans["end"][k])).label,
            "return": float(self._spans["return"][k]),
            "has_final": bool(self._spans["has_final"][k]),
            "is_headless": bool(self._spans["t_start"][self._first[i]] > 0),
            "time": float(self._spans["time"][k]),
        }
        for bit, (name, kind) in enumerate(declared.items()):
            is_present = bool((self._spans["present"][k] >> bit) & 1)
            value = text.get(name) if kind == "str" else self._spans[name][k].item()
            values[name] = (bool(value) if kind == "bool" else value) if is_present else None
        values["metadata"] = self._free(text)
        return values

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self.row(i) for i in range(len(self)))

    def to_pandas(self) -> pd.DataFrame:
        """The table as a pandas frame; absent values of declared columns become ``<NA>``.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise MissingExtraError("to_pandas needs pandas: pip install 'trajstore[pandas]'") from error
        nullable = {"bool": "boolean", "int64": "Int64", "float64": "Float64"}
        declared = self._schema.episode if self._schema else {}
        data: dict[str, Any] = {}
        for name in self.columns:
            column = self[name]
            if name in ("stream", "end"):
                data[name] = pd.Categorical(column)
            elif isinstance(column, np.ma.MaskedArray):
                series = pd.Series(column.data, dtype=nullable[declared[name]])
                data[name] = series.mask(np.ma.getmaskarray(column))
            else:
                data[name] = column
        return pd.DataFrame(data)

    def __repr__(self) -> str:
        return f"<EpisodeTable {len(self)} episodes, {int(self._lengths().sum())} steps>"


def _parse_text(data: bytes) -> dict[str, Any]:
    try:
        text = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptionError(f"episode text is not JSON: {error}") from error
    if not isinstance(text, dict):
        raise CorruptionError(f"episode text is a {type(text).__name__}, expected an object")
    return text


def _concatenate(parts: Sequence[StreamSpans], schema: Schema | None) -> dict[str, Array]:
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


def _visible(part: StreamSpans) -> dict[str, Array]:
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
