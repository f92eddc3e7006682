"""The episode table of a snapshot: one row per episode."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from trajstore.errors import CorruptionError, EpisodeNotFoundError
from trajstore.format.derived_summaries import SUMMARIES, DerivedValues, EpisodeRows, summarize
from trajstore.format.episode_arrow import to_arrow, write_parquet
from trajstore.format.episode_frame import to_frame
from trajstore.format.episode_html import EpisodeRow, table_html
from trajstore.format.handles import EpisodeKey
from trajstore.format.spans import END_LABELS, End, VisibleSpans, expand_ranges, join_spans_by_episode, span_table
from trajstore.schema import Array, Schema

if TYPE_CHECKING:
    import os

    import pandas as pd
    import pyarrow as pa


_TEXT_GAP_BYTES = 64 << 10  # text between two episodes that is not worth a second read


class SpanExtent(NamedTuple):
    """The rows of one span: the position of its stream in the snapshot, t of its first row, and its rows."""

    source: int
    t_start: int
    row_start: int
    row_stop: int


class RowRanges(NamedTuple):
    """Where the rows of episodes are stored: range i is ``[start, stop)`` of the stream at ``source``."""

    source: Array  # position of the stream in the snapshot
    start: Array
    stop: Array
    row: Array  # row of the episode in its table
    ends_in_final: Array  # whether the last row is a final row, which holds values of some fields only


class EpisodeTable:
    """The episodes of a snapshot, one row per episode.

    Columns: ``stream``, ``episode``, ``env``, ``length`` (steps, the final row not counted), ``end``,
    ``return``, ``has_final``, ``is_headless`` (its first steps are evicted), ``time`` (UNIX seconds of the last
    span), ``metadata``, and the columns that the schema declares. Rows are ordered by stream, then by episode.

    Args:
        streams: Ids of the snapshot's streams, in order.
        parts: The visible spans of each stream.
        schema: The schema; None if the store has none yet.
        read_text: Reads bytes ``[start, stop)`` of a stream's text: called with the stream's position, start, stop.
        is_history: Also list evicted episodes, and count evicted steps in ``length``. The columns ``is_evicted``
            and ``is_abandoned`` say which these are; parts with stream numbers past the last stream are abandoned.
        derived: The derived columns; None: there are none.
    """

    def __init__(
        self,
        streams: Sequence[str],
        parts: Sequence[VisibleSpans],
        schema: Schema | None,
        read_text: Callable[[int, int, int], bytes],
        *,
        is_history: bool = False,
        derived: DerivedValues | None = None,
    ) -> None:
        self._derived = derived
        self._is_ordered = True  # by stream and episode
        self._is_history = is_history
        self._n_streams = len(streams)
        self._streams = np.array([*streams, *streams] if is_history else streams, dtype=object)
        self._schema = schema
        self._read_text = read_text
        joined = join_spans_by_episode(span_table(parts, schema), keeps_evicted=is_history)
        self._spans = joined.columns
        self._first, self._last, self._rows = joined.first, joined.last, joined.n_rows
        self._n_evicted = joined.n_evicted if is_history else np.zeros(len(joined.first), np.int64)

    def __len__(self) -> int:
        return len(self._first)

    @property
    def columns(self) -> tuple[str, ...]:
        declared = tuple(self._schema.episode) if self._schema else ()
        history = ("is_evicted", "is_abandoned") if self._is_history else ()
        return (
            "stream", "episode", "env", "length", "end", "return",
            "has_final", "is_headless", *history, "time", *declared, "metadata",
        )  # fmt: skip

    def __getitem__(self, name: str) -> Array:
        """One column as an array; a declared column is masked where an episode has no value."""
        derived: dict[str, Callable[[], Array]] = {
            "episode": lambda: self._last_span("episode"),
            "env": lambda: self._last_span("env"),
            "return": lambda: self._last_span("return"),
            "time": lambda: self._last_span("time"),
            "stream": lambda: self._streams[self._spans["stream"][self._last]],
            "length": self._lengths,
            "end": lambda: END_LABELS[self._spans["end"][self._last]],
            "has_final": lambda: self._spans["has_final"][self._last].astype(bool),
            "is_headless": lambda: self._spans["t_start"][self._first] > 0,
            "metadata": lambda: self._objects([self._without_declared(text) for text in self._texts()]),
        }
        if self._is_history:
            derived["is_evicted"] = lambda: self._is_evicted
            derived["is_abandoned"] = lambda: self._is_abandoned
        if name in derived:
            return derived[name]()
        if self._schema is not None and name in self._schema.episode:
            return self._declared(name, self._schema)
        if name in self.summaries:
            return self._summary(name)
        known = ", ".join((*self.columns, *self.summaries))
        if not isinstance(name, str):
            raise KeyError(f"expected a column ({known}), got {name!r:.80}; table.row({name!r:.80}) is one episode")
        raise KeyError(
            f"no episode column {name!r}; the table has {known}. Values of metadata= that the schema does not"
            " declare are in 'metadata', a dict for each episode; declare columns with Schema(..., episode={...})"
        )

    @property
    def summaries(self) -> tuple[str, ...]:
        """Columns computed from derived columns, such as ``priority.mean`` and ``priority.sum``.

        They are read when they are asked for, and are taken over the steps that have a stored value.
        """
        names = self._derived.names if self._derived is not None else ()
        return tuple(f"{name}.{how}" for name in names for how in SUMMARIES)

    def _summary(self, name: str) -> Array:
        assert self._derived is not None
        column, _, how = name.rpartition(".")
        spans = self._spans
        stop = spans["row_stop"].copy()
        stop[self._last] -= spans["has_final"][self._last]  # a final row is not a step
        rows = EpisodeRows(spans["source"], spans["row_start"], stop, self._first, self._last)
        return summarize(how, self._derived.numbers(column), rows)

    def take(self, rows: Sequence[int] | Array) -> EpisodeTable:
        """Some of the episodes as a table, in the given order.

        Its columns cost what these episodes cost: a page of a long table is cheap.
        """
        chosen = np.asarray(rows, np.int64)
        if len(chosen) and not (-len(self) <= chosen.min() and chosen.max() < len(self)):
            raise EpisodeNotFoundError(f"no episode {chosen.max()}: this table has {len(self)} episodes")
        part = copy.copy(self)
        part._first, part._last = self._first[chosen], self._last[chosen]
        part._rows, part._n_evicted = self._rows[chosen], self._n_evicted[chosen]
        part._is_ordered = False
        return part

    def codes(self, name: str) -> tuple[Array, Array]:
        """``stream`` or ``end`` as positions in an array of labels: quicker than text where episodes are many."""
        labels = {"stream": self._streams, "end": END_LABELS}[name]
        return self._last_span(name), labels

    @property
    def row_ranges(self) -> RowRanges:
        """Where the rows of all episodes are stored, episode after episode, in order of time."""
        s = self._spans
        owner, k = expand_ranges(self._first, self._last + 1)
        is_last = k == self._last[owner]
        return RowRanges(
            s["source"][k], s["row_start"][k], s["row_stop"][k], owner, is_last & (s["has_final"][k] != 0)
        )

    @property
    def stream_positions(self) -> Array:
        """By row, the position of its stream in the snapshot."""
        return self._last_span("stream")

    @property
    def stream_names(self) -> list[str]:
        """Ids of the snapshot's streams, in order."""
        return [str(name) for name in self._streams[: self._n_streams]]

    @property
    def first_t(self) -> Array:
        """By row, t of the first step that is still stored."""
        first_t: Array = self._spans["t_start"][self._first]
        return first_t

    def _last_span(self, name: str) -> Array:
        column: Array = self._spans[name][self._last]
        return column

    def _lengths(self) -> Array:
        lengths: Array = self._rows + self._n_evicted - self._last_span("has_final")
        return lengths

    @property
    def _is_evicted(self) -> Array:
        is_evicted: Array = (self._n_evicted > 0) & (self._rows == 0)
        return is_evicted

    @property
    def _is_abandoned(self) -> Array:
        is_abandoned: Array = self._last_span("stream") >= self._n_streams
        return is_abandoned

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
        """The text of every episode, parsed; what lies close together is read at once."""
        s, last = self._spans, self._last
        source, start, stop = s["source"][last], s["text_start"][last], s["text_stop"][last]
        has_text = stop > start
        texts: list[dict[str, Any]] = [{} for _ in range(len(self))]
        for stream in np.unique(source[has_text]):
            chosen = np.flatnonzero(has_text & (source == stream))
            chosen = chosen[np.argsort(start[chosen], kind="stable")]
            is_far = start[chosen][1:] - stop[chosen][:-1] > _TEXT_GAP_BYTES
            for near in np.split(chosen, np.flatnonzero(is_far) + 1):
                low, high = int(start[near[0]]), int(stop[near].max())
                data = self._read_text(int(stream), low, high)
                for i in near:
                    texts[i] = _parse_text(data[start[i] - low : stop[i] - low])
        return texts

    def _without_declared(self, text: dict[str, Any]) -> dict[str, Any]:
        declared = self._schema.episode if self._schema else {}
        return {name: value for name, value in text.items() if name not in declared}

    def _text(self, i: int) -> dict[str, Any]:
        k = self._last[i]
        start, stop = int(self._spans["text_start"][k]), int(self._spans["text_stop"][k])
        if start == stop:
            return {}
        return _parse_text(self._read_text(int(self._spans["source"][k]), start, stop))

    def metadata(self, i: int) -> dict[str, Any]:
        """Free-form metadata of episode ``i``, read from the store."""
        return self._without_declared(self._text(self._position(i)))

    def key(self, i: int) -> EpisodeKey:
        """The key of row ``i``, which stays valid whatever is written or evicted."""
        k = self._last[self._position(i)]
        return EpisodeKey(str(self._streams[self._spans["stream"][k]]), int(self._spans["episode"][k]))

    def find(self, key: EpisodeKey) -> int:
        """The row of an episode in this table.

        Raises:
            EpisodeNotFoundError: This snapshot does not show it.
        """
        stream = np.flatnonzero(self._streams == key.stream)
        if not self._is_ordered:
            return self._find_unordered(key)
        streams, episodes = self._spans["stream"][self._last], self._spans["episode"][self._last]
        if len(stream):
            low, high = np.searchsorted(streams, [stream[0], stream[0] + 1])
            i = low + int(np.searchsorted(episodes[low:high], key.episode))
            if i < high and episodes[i] == key.episode:
                return int(i)
        raise EpisodeNotFoundError(f"this snapshot has no episode {key.episode} of stream {key.stream!r}")

    def _find_unordered(self, key: EpisodeKey) -> int:
        is_found = self._last_span("episode") == key.episode
        for i in np.flatnonzero(is_found):
            if self.key(int(i)) == key:
                return int(i)
        raise EpisodeNotFoundError(f"this table has no episode {key.episode} of stream {key.stream!r}")

    def _position(self, i: int) -> int:
        if not -len(self) <= i < len(self):
            raise EpisodeNotFoundError(f"no episode {i}: this snapshot has {len(self)} episodes, counted from 0")
        return i % len(self)

    def spans(self, i: int) -> list[SpanExtent]:
        """The spans that hold the rows of episode ``i``, in order of time."""
        i = self._position(i)
        s = self._spans
        return [
            SpanExtent(int(s["source"][k]), int(s["t_start"][k]), int(s["row_start"][k]), int(s["row_stop"][k]))
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

    def row(self, i: int) -> EpisodeRow:
        """One episode as a dict, which notebooks show as a table."""
        i = self._position(i)
        k = self._last[i]
        declared = self._schema.episode if self._schema else {}
        text = self._text(i)
        values: dict[str, Any] = {
            "stream": str(self._streams[self._spans["stream"][k]]),
            "episode": int(self._spans["episode"][k]),
            "env": int(self._spans["env"][k]),
            "length": int(self._rows[i] + self._n_evicted[i] - self._spans["has_final"][k]),
            "end": End(int(self._spans["end"][k])).label,
            "return": float(self._spans["return"][k]),
            "has_final": bool(self._spans["has_final"][k]),
            "is_headless": bool(self._spans["t_start"][self._first[i]] > 0),
            "time": float(self._spans["time"][k]),
        }
        if self._is_history:
            values["is_evicted"] = bool(self._n_evicted[i] > 0 and self._rows[i] == 0)
            values["is_abandoned"] = bool(self._spans["stream"][k] >= self._n_streams)
        for bit, (name, kind) in enumerate(declared.items()):
            is_present = bool((self._spans["present"][k] >> bit) & 1)
            value = text.get(name) if kind == "str" else self._spans[name][k].item()
            values[name] = (bool(value) if kind == "bool" else value) if is_present else None
        values["metadata"] = self._without_declared(text)
        return EpisodeRow(values)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self.row(i) for i in range(len(self)))

    def to_pandas(self, *, derived: bool = False) -> pd.DataFrame:
        """The table as a pandas DataFrame, which pandas can write to any of its formats.

        ``time`` is a UTC datetime. Absent values of declared columns become ``<NA>``. Instead of ``metadata`` there
        is a column for each key of free metadata (``metadata.<key>`` if the name is taken): numbers, text and bools
        as such; lists, objects and values of several types as JSON text.

        Args:
            derived: Also read the derived columns, and add their `summaries`.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        names = [name for name in self.columns if name != "metadata"]
        columns = {name: self[name] for name in (*names, *(self.summaries if derived else ()))}
        return to_frame(columns, self._schema.episode if self._schema else {}, self["metadata"].tolist())

    def to_arrow(self, *, derived: bool = False) -> pa.Table:
        """The table as a `pyarrow.Table`, for Polars, DuckDB and others.

        ``stream`` and ``end`` are dictionaries of text, ``time`` is a UTC timestamp, declared columns are null
        where an episode has no value, and ``metadata`` is JSON text, null where there is none.

        Args:
            derived: Also read the derived columns, and add their `summaries`.

        Raises:
            MissingExtraError: pyarrow is not installed.
        """
        columns = {name: self[name] for name in (*self.columns, *(self.summaries if derived else ()))}
        labels = {name: self.codes(name) for name in ("stream", "end")}
        return to_arrow(columns, labels, self._schema.episode if self._schema else {})

    def to_parquet(self, path: str | os.PathLike[str], *, derived: bool = False) -> None:
        """Write the table to a Parquet file with the columns of `to_arrow`; an existing file is replaced.

        Args:
            path: The file.
            derived: Also read the derived columns, and add their `summaries`.

        Raises:
            MissingExtraError: pyarrow is not installed.
        """
        write_parquet(self.to_arrow(derived=derived), path)

    def __repr__(self) -> str:
        return f"<EpisodeTable {len(self)} episodes, {int(self._lengths().sum())} steps>"

    def _repr_html_(self) -> str:
        return table_html(self, list(self._schema.episode) if self._schema else [])


def _parse_text(data: bytes) -> dict[str, Any]:
    try:
        text = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptionError(f"episode text is not JSON: {error}") from error
    if not isinstance(text, dict):
        raise CorruptionError(f"episode text is a {type(text).__name__}, expected an object")
    return text
