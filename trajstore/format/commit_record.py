"""The commit record of a stream: the one object that says which rows exist."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from trajstore.errors import CorruptionError, FormatError, SchemaError
from trajstore.format.argument_checks import check_count, check_mark_advances, check_stream_ids
from trajstore.format.array_layout import ArrayLayout
from trajstore.format.codec import Codec
from trajstore.format.column_layouts import KnownRows, column_layouts
from trajstore.format.ids import is_column_name
from trajstore.format.json_values import parse_count, parse_id, parse_optional_count, parse_optional_text
from trajstore.format.spans import End, float_columns, int_columns
from trajstore.format.zarr_json import (
    FORMAT,
    GROUP,
    NO_CHECKSUM,
    check_checksum,
    parse_json,
    trajstore_attributes,
    with_checksum,
)
from trajstore.schema import Field, Schema

_SPAN_CHUNK_ROWS = 4096
_TEXT_CHUNK_BYTES = 64 << 10
_COLUMN_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class SessionView:
    """The decisions of a session about other streams.

    Attributes:
        first_rows: By stream, the first row that the session still wants.
        discarded: By stream, the episodes that are not shown.
        dead: Streams whose writers are declared dead.
    """

    first_rows: Mapping[str, int] = field(default_factory=dict)
    discarded: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    dead: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "first_rows": dict(self.first_rows),
            "discarded": {stream: list(episodes) for stream, episodes in self.discarded.items()},
            "dead": list(self.dead),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> SessionView:
        return SessionView(
            {parse_id(stream): parse_count(row) for stream, row in data["first_rows"].items()},
            {parse_id(stream): tuple(map(parse_count, episodes)) for stream, episodes in data["discarded"].items()},
            tuple(parse_id(stream) for stream in data["dead"]),
        )

    def advanced(
        self,
        first_rows: Mapping[str, int] | None = None,
        discarded: Mapping[str, Iterable[int]] | None = None,
        dead: Collection[str] | None = None,
    ) -> SessionView:
        """The view after further decisions; earlier decisions stay.

        Raises:
            DataError: A stream id or a count is malformed.
            ValueError: A mark would move back.
        """
        marks = {stream: check_count(row, f"first_rows[{stream!r}]") for stream, row in (first_rows or {}).items()}
        episodes = {
            stream: {check_count(episode, f"discarded[{stream!r}]") for episode in numbers}
            for stream, numbers in (discarded or {}).items()
        }
        check_stream_ids((*marks, *episodes), "view")
        check_stream_ids(dead or (), "dead")
        for stream, row in marks.items():
            check_mark_advances(stream, self.first_rows.get(stream, 0), row)
        return SessionView(
            {**self.first_rows, **marks},
            {**self.discarded, **{s: tuple(sorted({*self.discarded.get(s, ()), *e})) for s, e in episodes.items()}},
            tuple(dict.fromkeys((*self.dead, *(dead or ())))),
        )


@dataclass(frozen=True, slots=True)
class Replaces:
    """The rows of another stream that this stream holds in its place, under the same handles."""

    stream: str
    start: int
    stop: int

    def to_json(self) -> dict[str, Any]:
        return {"stream": self.stream, "start": self.start, "stop": self.stop}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Replaces:
        replaces = Replaces(parse_id(data["stream"]), parse_count(data["start"]), parse_count(data["stop"]))
        if replaces.start > replaces.stop:
            raise FormatError(f"replaces: expected start <= stop, got {replaces.start} and {replaces.stop}")
        return replaces


@dataclass(frozen=True, slots=True)
class DerivedColumnState:
    """The committed state of a derived column: values for rows ``[first, stop)`` of its target, then changes.

    Attributes:
        generation: Number of the values that were put whole; rises with every such put.
        dtype: Dtype of the values.
        shape: Shape of one value.
        first: First row of the target that has a value.
        stop: Row after the last value that was put whole.
        deltas: Number of changes of single rows, applied in order on top of the values.
    """

    generation: int
    dtype: str
    shape: tuple[int, ...]
    first: int
    stop: int
    deltas: int

    def to_json(self) -> dict[str, Any]:
        return {
            "generation": self.generation,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "first": self.first,
            "stop": self.stop,
            "deltas": self.deltas,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> DerivedColumnState:
        field_ = Field(str(data["dtype"]), tuple(parse_count(n) for n in data["shape"]))
        counts = {name: parse_count(data[name]) for name in ("generation", "first", "stop", "deltas")}
        if counts["first"] > counts["stop"]:
            raise FormatError(f"derived column: expected first <= stop, got {counts['first']} and {counts['stop']}")
        return DerivedColumnState(dtype=field_.dtype, shape=field_.shape, **counts)

    def paths(self, target: str, name: str, generation: int | None = None) -> tuple[str, str, str]:
        """Paths of its three arrays: values, rows of changes, values of changes.

        Generations alternate between two places.
        """
        place = (self.generation if generation is None else generation) % 2
        prefix = f"columns/{target}/{name}/{place}"
        return f"{prefix}/values", f"{prefix}/delta_rows", f"{prefix}/delta_values"

    def lengths(self, target: str, name: str) -> dict[str, int]:
        """Lengths of the arrays in both places, by path; those of the place that is not in use are empty."""
        used = dict(zip(self.paths(target, name), (self.stop - self.first, self.deltas, self.deltas), strict=True))
        return used | dict.fromkeys(self.paths(target, name, self.generation + 1), 0)

    def layouts(self, target: str, name: str) -> dict[str, ArrayLayout]:
        value = Field(self.dtype, self.shape)
        # Values are written whole and every object is synced, so large chunks; changes come a few at a time.
        n_rows = 1 << max(0, (_COLUMN_CHUNK_BYTES // value.row_bytes).bit_length() - 1)
        values, changes = (
            ArrayLayout.of(replace(value, chunk_rows=n)) for n in (n_rows, min(n_rows, _SPAN_CHUNK_ROWS))
        )
        rows = ArrayLayout(np.dtype("int64"), (), _SPAN_CHUNK_ROWS, Codec.parse("blosc-lz4:5"))
        values, changes = values.with_axes("row", "value"), changes.with_axes("change", "value")
        rows = rows.with_axes("change", "row")
        return dict(zip(self.lengths(target, name), (values, rows, changes) * 2, strict=True))


DerivedColumnStates = Mapping[str, Mapping[str, DerivedColumnState]]  # by target stream and name


@dataclass(frozen=True, slots=True, repr=False)
class CommitRecord:
    """A stream's ``zarr.json``. Replacing it is the commit: rows that no record names do not exist.

    docs/format.md, section 3, says what each attribute means.
    """

    id: str
    name: str
    schema: Schema
    layouts: Mapping[str, ArrayLayout]  # by array path within the stream
    rows: int = 0
    spans: int = 0
    text_bytes: int = 0
    commit: int = 0
    is_sealed: bool = False
    created_at: float = 0.0
    committed_at: float = 0.0
    rank: int | None = None
    world_size: int | None = None
    world: str | None = None
    checkpoint: str | None = None
    first_row: int = 0
    view: SessionView = field(default_factory=SessionView)
    replaces: Replaces | None = None
    columns: DerivedColumnStates = field(default_factory=dict)
    continues: Mapping[str, StreamExtent] | None = (
        None  # what its world shows of older streams; None: it resumed none
    )
    location: str | None = None  # the packed stream whose objects hold it; None: its own. Not stored: see `shown`

    def __repr__(self) -> str:
        state = "sealed" if self.is_sealed else "open"
        return f"<CommitRecord of {self.id}: {self.rows:,} rows, {self.spans:,} spans, {state}>"

    @property
    def shown_as(self) -> str:
        """The stream that handles of its episodes name: the replaced stream, if this one replaces another."""
        return self.replaces.stream if self.replaces else self.id

    @property
    def folder(self) -> str:
        """Key prefix of the objects that hold the stream."""
        return f"streams/{self.location or self.id}"

    @property
    def key(self) -> str:
        return f"{self.folder}/zarr.json"

    def shown(self) -> CommitRecord:
        """The record of a stream that replaces another as a whole, as the record of that other stream.

        It repeats everything that the other record says, so only the place of the objects differs.
        """
        if self.replaces is None:
            return self
        return replace(self, id=self.replaces.stream, replaces=None, location=self.id)

    def as_stored(self) -> CommitRecord:
        """The inverse of `shown`: the record of the stream whose objects hold this one."""
        if self.location is None:
            return self
        return replace(self, id=self.location, replaces=Replaces(self.id, 0, self.rows), location=None)

    def length(self, path: str) -> int:
        """Committed rows of one of the stream's arrays."""
        if path.startswith("steps/"):
            return self.rows
        if path.startswith("columns/"):
            _, target, name, _, _ = path.split("/")
            return self.columns[target][name].lengths(target, name)[path]
        return self.text_bytes if path == "spans/text" else self.spans

    def nodes(self) -> dict[str, dict[str, Any]]:
        """Metadata of every group and array below the stream's group, by path."""
        nodes: dict[str, dict[str, Any]] = {}
        for path in self.layouts:
            parts = path.split("/")[:-1]
            for depth in range(1, len(parts) + 1):
                nodes.setdefault("/".join(parts[:depth]), GROUP)
        nodes |= {path: layout.metadata(self.length(path)) for path, layout in self.layouts.items()}
        # Siblings must be adjacent: of siblings that are not, zarr-python (as of 3.1) forgets all but the last.
        return dict(sorted(nodes.items(), key=lambda node: node[0].rpartition("/")[0]))

    def to_bytes(self) -> bytes:
        if self.location is not None:
            return self.as_stored().to_bytes()
        own = {
            "format": FORMAT,
            "kind": "stream",
            "crc32c": NO_CHECKSUM,
            "id": self.id,
            "name": self.name,
            "schema": self.schema.to_json(),
            "rows": self.rows,
            "spans": self.spans,
            "text_bytes": self.text_bytes,
            "commit": self.commit,
            "sealed": self.is_sealed,
            "created_at": self.created_at,
            "committed_at": self.committed_at,
            "rank": self.rank,
            "world_size": self.world_size,
            "lineage": {"world": self.world, "checkpoint": self.checkpoint} | self._continued(),
            "first_row": self.first_row,
            "view": self.view.to_json(),
            "replaces": self.replaces.to_json() if self.replaces else None,
            "columns": {
                target: {name: state.to_json() for name, state in named.items()}
                for target, named in self.columns.items()
            },
        }
        consolidated = {"kind": "inline", "must_understand": False, "metadata": self.nodes()}
        return with_checksum(GROUP | {"attributes": {"trajstore": own}, "consolidated_metadata": consolidated})

    def _continued(self) -> dict[str, Any]:
        if self.continues is None:
            return {}
        return {"streams": {stream: extent.to_json() for stream, extent in self.continues.items()}}

    @staticmethod
    def from_bytes(data: bytes, stream_id: str, where: str) -> CommitRecord:
        """Parse a record, which may be damaged or hostile.

        Args:
            data: The bytes of the object.
            stream_id: Id of the stream, which the record must name.
            where: The store, for messages.

        Raises:
            FormatError: It is malformed, of another format, or its parts contradict each other.
        """
        what = f"{where}/streams/{stream_id}"
        parsed = parse_json(data, what)
        own = trajstore_attributes(parsed, "stream", what)
        check_checksum(data, what)
        try:
            record = _parse(own, parsed["consolidated_metadata"]["metadata"])
        except FormatError as error:
            raise FormatError(f"{what}: {error}") from error
        except (TypeError, LookupError, AttributeError, ValueError, OverflowError) as error:
            raise FormatError(f"{what}: record is malformed: {error!r}") from error
        if record.id != stream_id:
            raise FormatError(f"{what}: expected the record of '{stream_id}', got that of {record.id!r}")
        return record


@dataclass(frozen=True, slots=True)
class StreamExtent:
    """The part of one stream that a checkpoint or a lineage shows: rows ``[first, stop)`` of its first spans.

    Attributes:
        first: First row.
        stop: Row after the last one.
        spans: Number of spans, from the stream's first.
        text_bytes: Bytes of the stream's text.
        record: The stream's record, truncated to this extent; None if the stream may still grow, so that its own
            record must be read.
        discarded: Numbers of the episodes that are not shown.
    """

    first: int
    stop: int
    spans: int
    text_bytes: int
    record: CommitRecord | None = None
    discarded: tuple[int, ...] = ()

    def truncate(self, record: CommitRecord) -> CommitRecord:
        """The stream's record as if the stream ended with this extent.

        Arrays only grow, so their prefixes are what they were when the checkpoint was taken.

        Raises:
            CorruptionError: The stream has fewer rows, spans or text than this extent.
        """
        expected, got = (self.stop, self.spans, self.text_bytes), (record.rows, record.spans, record.text_bytes)
        if any(wanted > present for wanted, present in zip(expected, got, strict=True)):
            raise CorruptionError(
                f"stream '{record.id}': expected at least (rows, spans, text bytes) {expected}, got {got}"
            )
        discarded = {record.shown_as: self.discarded} if self.discarded else {}
        return replace(
            record,
            rows=self.stop,
            spans=self.spans,
            text_bytes=self.text_bytes,
            first_row=self.first,
            is_sealed=True,
            view=SessionView(discarded=discarded),
            continues=None,
            columns={},
            layouts={path: a for path, a in record.layouts.items() if not path.startswith("columns/")},
        )

    def to_json(self) -> dict[str, Any]:
        """All of it but the record."""
        return {
            "first": self.first,
            "stop": self.stop,
            "spans": self.spans,
            "text_bytes": self.text_bytes,
            "discarded": list(self.discarded),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any], stream: str) -> StreamExtent:
        first, stop, n_spans, text_bytes = (
            parse_count(data[name]) for name in ("first", "stop", "spans", "text_bytes")
        )
        discarded = tuple(parse_count(number) for number in data["discarded"])
        extent = StreamExtent(first, stop, n_spans, text_bytes, discarded=discarded)
        if extent.first > extent.stop:
            raise FormatError(
                f"stream '{stream}': expected first <= stop, got rows {extent.first} to {extent.stop}"
            )
        return extent


def stream_layouts(schema: Schema, known: KnownRows | None = None) -> dict[str, ArrayLayout]:
    """The arrays of a new stream, by path: one per field, and three for the spans.

    Args:
        schema: The fields.
        known: What is known of the rows, for the choice of layouts; None: nothing.
    """
    has_step = any("step" in path.split("/") for path in schema.fields)
    rows = "step:row" if has_step else "step"
    layouts = {
        f"steps/{path}": layout.with_axes(rows, path.replace("/", "."))
        for path, layout in column_layouts(schema, known or KnownRows()).items()
    }
    numbers = Codec.parse("blosc-lz4:5")
    for name, dtype, columns in (
        ("ints", "int64", int_columns(schema)),
        ("floats", "float64", float_columns(schema)),
    ):
        layouts[f"spans/{name}"] = ArrayLayout(
            np.dtype(dtype), (len(columns),), _SPAN_CHUNK_ROWS, numbers, _span_attributes(name, columns)
        ).with_axes("span", name)
    text = ArrayLayout(np.dtype("uint8"), (), _TEXT_CHUNK_BYTES, Codec.parse("zstd:1"))
    layouts["spans/text"] = text.with_axes("byte", "text")
    return layouts


def _span_attributes(name: str, columns: tuple[str, ...]) -> tuple[tuple[str, Any], ...]:
    attributes: tuple[tuple[str, Any], ...] = (("columns", list(columns)),)
    if name == "ints":
        attributes += (("end", {end.label: int(end) for end in End}),)
    return attributes


def _parse_columns(data: Mapping[str, Any]) -> dict[str, dict[str, DerivedColumnState]]:
    for named in data.values():
        for name in named:
            if not is_column_name(name):
                raise FormatError(f"{name!r:.80} is not the name of a column")
    return {
        parse_id(target): {name: DerivedColumnState.from_json(state) for name, state in named.items()}
        for target, named in data.items()
    }


def _parse_continued(data: Mapping[str, Any] | None) -> dict[str, StreamExtent] | None:
    if data is None:
        return None
    return {parse_id(stream): StreamExtent.from_json(extent, stream) for stream, extent in data.items()}


def _parse(own: dict[str, Any], metadata: dict[str, Any]) -> CommitRecord:
    try:
        schema = Schema.from_json(own["schema"])
    except SchemaError as error:
        raise FormatError(str(error)) from error
    columns = _parse_columns(own["columns"])
    expected = stream_layouts(schema)
    for target, named in columns.items():
        for name, state in named.items():
            expected |= state.layouts(target, name)
    arrays = {path: ArrayLayout.from_metadata(metadata[path], path) for path in expected}
    for path, (layout, _) in arrays.items():
        if (layout.dtype, layout.row_shape) != (expected[path].dtype, expected[path].row_shape):
            raise FormatError(f"array '{path}' has {layout.dtype} {layout.row_shape}, not what the schema says")
    record = CommitRecord(
        id=parse_id(own["id"]),
        name=str(own["name"]),
        schema=schema,
        layouts={path: layout for path, (layout, _) in arrays.items()},
        rows=parse_count(own["rows"]),
        spans=parse_count(own["spans"]),
        text_bytes=parse_count(own["text_bytes"]),
        commit=parse_count(own["commit"]),
        is_sealed=own["sealed"] is True,
        created_at=float(own["created_at"]),
        committed_at=float(own["committed_at"]),
        rank=parse_optional_count(own["rank"]),
        world_size=parse_optional_count(own["world_size"]),
        world=parse_optional_text(own["lineage"]["world"]),
        checkpoint=parse_optional_text(own["lineage"]["checkpoint"]),
        first_row=parse_count(own["first_row"]),
        view=SessionView.from_json(own["view"]),
        replaces=Replaces.from_json(own["replaces"]) if own["replaces"] is not None else None,
        columns=columns,
        continues=_parse_continued(own["lineage"].get("streams")),
    )
    for path, (_, rows) in arrays.items():
        if rows != record.length(path):
            raise FormatError(f"array '{path}' has {rows} rows, the record says {record.length(path)}")
    return record
