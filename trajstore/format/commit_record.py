"""The commit record of a stream: the one object that says what exists."""

from __future__ import annotations

import json
import operator
import os
import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from trajstore.errors import DataError, FormatError, SchemaError
from trajstore.format.array_layout import MAX_ROWS, ArrayLayout, Codec, crc32c
from trajstore.format.spans import End, float_columns, int_columns
from trajstore.schema import Field, Schema

FORMAT = 1
GROUP: dict[str, Any] = {"zarr_format": 3, "node_type": "group", "attributes": {}}
MAX_RECORD_BYTES = 64 << 20
_SPAN_CHUNK_ROWS = 4096
_TEXT_CHUNK_BYTES = 64 << 10
_COLUMN_CHUNK_BYTES = 1 << 20
_STREAM_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,63}-[0-9a-v]{26}\Z")
_COLUMN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,63}\Z")
_BASE32 = "0123456789abcdefghijklmnopqrstuv"


def new_id(name: str, after: str | None = None) -> str:
    """``<name>-<unique id>``; ids of one name sort by the time they were made, in any case after a given one."""
    earliest = 0 if after is None else (int(after.rpartition("-")[2], 32) >> 80) + 1
    number = (max(time.time_ns() // 1_000_000, earliest) << 80) | int.from_bytes(os.urandom(10), "big")
    return name + "-" + "".join(_BASE32[number >> shift & 31] for shift in range(125, -1, -5))


def derived_id(name: str, of: str, digest: bytes) -> str:
    """``<name>-<unique id>`` from the time of another id and ten bytes: the same wherever it is made."""
    time_part = int(of.rpartition("-")[2], 32) >> 80
    number = (time_part << 80) | int.from_bytes(digest, "big")
    return name + "-" + "".join(_BASE32[number >> shift & 31] for shift in range(125, -1, -5))


def is_stream_id(name: str) -> bool:
    return _STREAM_ID.match(name) is not None


def dump_json(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def group_bytes(own: Mapping[str, Any]) -> bytes:
    """The ``zarr.json`` of a group that has nothing but these attributes of ours."""
    return dump_json(GROUP | {"attributes": {"trajstore": own}})


def load_json(data: bytes, what: str) -> dict[str, Any]:
    """Parse a ``zarr.json``.

    Raises:
        FormatError: It is not a JSON object, or absurdly large.
    """
    if len(data) > MAX_RECORD_BYTES:
        raise FormatError(f"{what}: {len(data)} bytes of metadata; at most {MAX_RECORD_BYTES}")
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{what}: not readable as JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise FormatError(f"{what}: expected a JSON object, got {type(parsed).__name__}")
    return parsed


_CHECKSUM = re.compile(rb'"crc32c": ?"([0-9a-f]{8})"')
_NO_CHECKSUM = "00000000"


def with_checksum(data: Mapping[str, Any]) -> bytes:
    """A ``zarr.json`` whose first ``"crc32c"`` is the checksum of its own text with zeros in that place."""
    text = dump_json(data)
    found = _CHECKSUM.search(text)
    assert found is not None
    return text[: found.start(1)] + f"{crc32c(text):08x}".encode() + text[found.end(1) :]


def check_checksum(text: bytes, what: str) -> None:
    """Refuse a ``zarr.json`` that is not as it was written.

    Raises:
        FormatError: It has no checksum, or another one than it should.
    """
    found = _CHECKSUM.search(text)
    if found is None:
        raise FormatError(f"{what} has no checksum")
    blank = text[: found.start(1)] + _NO_CHECKSUM.encode() + text[found.end(1) :]
    if found.group(1) != f"{crc32c(blank):08x}".encode():
        raise FormatError(f"{what} is damaged: its checksum does not match")


def own_attributes(data: Mapping[str, Any], kind: str, what: str) -> dict[str, Any]:
    """The ``trajstore`` attributes of a group, of the expected kind and a format this version reads."""
    attributes = data.get("attributes")
    own = attributes.get("trajstore") if isinstance(attributes, dict) else None
    if not isinstance(own, dict) or data.get("node_type") != "group":
        raise FormatError(f"{what} is not part of a trajstore store")
    if own.get("format") != FORMAT:
        raise FormatError(
            f"{what} has format {own.get('format')!r}, this trajstore reads format {FORMAT}; upgrade trajstore"
        )
    if own.get("kind") != kind:
        raise FormatError(f"{what}: expected a {kind}, got {own.get('kind')!r}")
    return own


@dataclass(frozen=True, slots=True)
class View:
    """What a session decided about streams older than its own."""

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
    def from_json(data: Mapping[str, Any]) -> View:
        return View(
            {_id(stream): _count(row) for stream, row in data["first_rows"].items()},
            {_id(stream): tuple(map(_count, episodes)) for stream, episodes in data["discarded"].items()},
            tuple(_id(stream) for stream in data["dead"]),
        )

    def advanced(
        self,
        first_rows: Mapping[str, int] | None = None,
        discarded: Mapping[str, Iterable[int]] | None = None,
        dead: Collection[str] | None = None,
    ) -> View:
        """The view after more was decided; what was decided before stays.

        Raises:
            DataError: Something is neither a stream id nor a count.
            ValueError: A mark would go back.
        """
        marks = {stream: check_count(row, f"first_rows[{stream!r}]") for stream, row in (first_rows or {}).items()}
        episodes = {
            stream: {check_count(episode, f"discarded[{stream!r}]") for episode in numbers}
            for stream, numbers in (discarded or {}).items()
        }
        check_stream_ids((*marks, *episodes), "view")
        check_stream_ids(dead or (), "dead")
        for stream, row in marks.items():
            check_mark(stream, self.first_rows.get(stream, 0), row)
        return View(
            {**self.first_rows, **marks},
            {**self.discarded, **{s: tuple(sorted({*self.discarded.get(s, ()), *e})) for s, e in episodes.items()}},
            tuple(dict.fromkeys((*self.dead, *(dead or ())))),
        )


def check_stream_ids(streams: Collection[str], what: str) -> None:
    if isinstance(streams, str) or not isinstance(streams, Collection):
        raise DataError(f"{what}: expected a list of stream ids, got {streams!r:.80}")
    for stream in streams:
        if not isinstance(stream, str) or not is_stream_id(stream):
            raise DataError(f"{what}: expected stream ids, got {stream!r:.80}")


def check_count(value: object, what: str) -> int:
    """A count that a caller gave, as a plain integer."""
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if not 0 <= number <= MAX_ROWS:
        raise DataError(f"{what}: expected an integer of at least 0, got {value!r:.80}")
    return number


def check_mark(stream: str, old: int, new: int) -> None:
    if new < old:
        raise ValueError(f"stream '{stream}': its first row is {old} already and can't go back to {new}")


@dataclass(frozen=True, slots=True)
class Replaces:
    """The rows of another stream that this one holds in its place, under the same handles."""

    stream: str
    start: int
    stop: int

    def to_json(self) -> dict[str, Any]:
        return {"stream": self.stream, "start": self.start, "stop": self.stop}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Replaces:
        replaces = Replaces(_id(data["stream"]), _count(data["start"]), _count(data["stop"]))
        if replaces.start > replaces.stop:
            raise FormatError(f"replaces rows {replaces.start} to {replaces.stop}")
        return replaces


@dataclass(frozen=True, slots=True)
class ColumnState:
    """How far a derived column of some target stream has come: values for rows [first, stop), then changes."""

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
    def from_json(data: Mapping[str, Any]) -> ColumnState:
        field_ = Field(str(data["dtype"]), tuple(_count(n) for n in data["shape"]))
        counts = {name: _count(data[name]) for name in ("generation", "first", "stop", "deltas")}
        if counts["first"] > counts["stop"]:
            raise FormatError(f"a column holds rows {counts['first']} to {counts['stop']}")
        return ColumnState(dtype=field_.dtype, shape=field_.shape, **counts)

    def paths(self, target: str, name: str, generation: int | None = None) -> tuple[str, str, str]:
        """Its three arrays: values, and rows and values of changes. Generations take turns in two places."""
        place = (self.generation if generation is None else generation) % 2
        prefix = f"columns/{target}/{name}/{place}"
        return f"{prefix}/values", f"{prefix}/delta_rows", f"{prefix}/delta_values"

    def lengths(self, target: str, name: str) -> dict[str, int]:
        """The arrays in both places, by path, and how long they are; the one not in use is empty."""
        used = dict(zip(self.paths(target, name), (self.stop - self.first, self.deltas, self.deltas), strict=True))
        return used | dict.fromkeys(self.paths(target, name, self.generation + 1), 0)

    def layouts(self, target: str, name: str) -> dict[str, ArrayLayout]:
        kind = Field(self.dtype, self.shape)
        # Values are written whole, and every object is synced; changes come a few at a time.
        n_rows = 1 << max(0, (_COLUMN_CHUNK_BYTES // kind.row_bytes).bit_length() - 1)
        values, changes = (
            ArrayLayout.of(replace(kind, chunk_rows=n)) for n in (n_rows, min(n_rows, _SPAN_CHUNK_ROWS))
        )
        rows = ArrayLayout(np.dtype("int64"), (), _SPAN_CHUNK_ROWS, Codec.parse("blosc-lz4:5"))
        return dict(zip(self.lengths(target, name), (values, rows, changes) * 2, strict=True))


Columns = Mapping[str, Mapping[str, ColumnState]]  # by target stream and name


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """A stream's ``zarr.json``. Publishing a new one is the commit; nothing else makes rows exist."""

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
    view: View = field(default_factory=View)
    replaces: Replaces | None = None
    columns: Columns = field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"streams/{self.id}/zarr.json"

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
        # Siblings stand together: of those that do not, zarr-python (as of 3.1) forgets all but the last.
        return dict(sorted(nodes.items(), key=lambda node: node[0].rpartition("/")[0]))

    def to_bytes(self) -> bytes:
        own = {
            "format": FORMAT,
            "kind": "stream",
            "crc32c": _NO_CHECKSUM,
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
            "lineage": {"world": self.world, "checkpoint": self.checkpoint},
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

    @staticmethod
    def from_bytes(data: bytes, stream_id: str, where: str) -> CommitRecord:
        """Read a record, trusting nothing in it.

        Raises:
            FormatError: It is malformed, of another format, or its parts contradict each other.
        """
        what = f"{where}/streams/{stream_id}"
        parsed = load_json(data, what)
        own = own_attributes(parsed, "stream", what)
        check_checksum(data, what)
        try:
            record = _parse(own, parsed["consolidated_metadata"]["metadata"])
        except FormatError as error:
            raise FormatError(f"{what}: {error}") from error
        except (TypeError, LookupError, AttributeError, ValueError, OverflowError) as error:
            raise FormatError(f"{what}: record is malformed: {error!r}") from error
        if record.id != stream_id:
            raise FormatError(f"{what}: record names itself {record.id!r}")
        return record


def newest_world(records: Iterable[CommitRecord]) -> str | None:
    """The world of the record created last among those that have one."""
    newest = max((r for r in records if r.world is not None), key=lambda r: r.created_at, default=None)
    return None if newest is None else newest.world


def first_rows(records: Sequence[CommitRecord]) -> dict[str, int]:
    """The first live row of each stream: its own mark, or what every session of the newest world has passed.

    A session that goes on from a checkpoint may want rows that the one before had given up since: of streams of
    older worlds, what the newest world says counts alone. Of its own streams, whoever writes one decides.
    """
    world = newest_world(records)
    # A rank that came back speaks for its stream from before as well, which it has declared dead.
    dead = {stream for r in records if world is not None and r.world == world for stream in r.view.dead}
    marks: dict[str, int] = {}
    for record in records:
        if (world is not None and record.world != world) or record.id in dead:
            continue
        for stream, row in record.view.first_rows.items():
            marks[stream] = min(row, marks.get(stream, row))
    if world is None:
        return {r.id: max(r.first_row, marks.get(r.id, 0)) for r in records}
    is_own = {r.id: r.world == world and r.id not in dead for r in records}
    return {r.id: r.first_row if is_own[r.id] else marks.get(r.id, r.first_row) for r in records}


def layouts_of(schema: Schema, commit_steps: int | None = None) -> dict[str, ArrayLayout]:
    """The arrays of a stream, by path: one a field, and three for the spans."""
    layouts = {f"steps/{path}": ArrayLayout.of(spec, commit_steps) for path, spec in schema.fields.items()}
    numbers = Codec.parse("blosc-lz4:5")
    for name, dtype, columns in (
        ("ints", "int64", int_columns(schema)),
        ("floats", "float64", float_columns(schema)),
    ):
        layouts[f"spans/{name}"] = ArrayLayout(
            np.dtype(dtype), (len(columns),), _SPAN_CHUNK_ROWS, numbers, _span_attributes(name, columns)
        )
    layouts["spans/text"] = ArrayLayout(np.dtype("uint8"), (), _TEXT_CHUNK_BYTES, Codec.parse("zstd:1"))
    return layouts


def _span_attributes(name: str, columns: tuple[str, ...]) -> tuple[tuple[str, Any], ...]:
    attributes: tuple[tuple[str, Any], ...] = (("columns", list(columns)),)
    if name == "ints":
        attributes += (("end", {end.label: int(end) for end in End}),)
    return attributes


def _id(value: object) -> str:
    if not isinstance(value, str) or not is_stream_id(value):
        raise FormatError(f"{value!r:.80} is not a stream id")
    return value


def _columns(data: Mapping[str, Any]) -> dict[str, dict[str, ColumnState]]:
    for named in data.values():
        for name in named:
            if not is_column_name(name):
                raise FormatError(f"{name!r:.80} is not the name of a column")
    return {
        _id(target): {name: ColumnState.from_json(state) for name, state in named.items()}
        for target, named in data.items()
    }


def is_column_name(name: object) -> bool:
    return isinstance(name, str) and _COLUMN_NAME.match(name) is not None and name != "zarr.json"


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_ROWS:
        raise FormatError(f"expected a count, got {value!r:.80}")
    return value


def _optional_count(value: object) -> int | None:
    return None if value is None else _count(value)


def _optional_text(value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise FormatError(f"expected text or null, got {value!r:.80}")
    return value


def _parse(own: dict[str, Any], metadata: dict[str, Any]) -> CommitRecord:
    try:
        schema = Schema.from_json(own["schema"])
    except SchemaError as error:
        raise FormatError(str(error)) from error
    columns = _columns(own["columns"])
    expected = layouts_of(schema)
    for target, named in columns.items():
        for name, state in named.items():
            expected |= state.layouts(target, name)
    arrays = {path: ArrayLayout.from_metadata(metadata[path], path) for path in expected}
    for path, (layout, _) in arrays.items():
        if (layout.dtype, layout.row_shape) != (expected[path].dtype, expected[path].row_shape):
            raise FormatError(f"array '{path}' has {layout.dtype} {layout.row_shape}, not what the schema says")
    record = CommitRecord(
        id=_id(own["id"]),
        name=str(own["name"]),
        schema=schema,
        layouts={path: layout for path, (layout, _) in arrays.items()},
        rows=_count(own["rows"]),
        spans=_count(own["spans"]),
        text_bytes=_count(own["text_bytes"]),
        commit=_count(own["commit"]),
        is_sealed=own["sealed"] is True,
        created_at=float(own["created_at"]),
        committed_at=float(own["committed_at"]),
        rank=_optional_count(own["rank"]),
        world_size=_optional_count(own["world_size"]),
        world=_optional_text(own["lineage"]["world"]),
        checkpoint=_optional_text(own["lineage"]["checkpoint"]),
        first_row=_count(own["first_row"]),
        view=View.from_json(own["view"]),
        replaces=Replaces.from_json(own["replaces"]) if own["replaces"] is not None else None,
        columns=columns,
    )
    for path, (_, rows) in arrays.items():
        if rows != record.length(path):
            raise FormatError(f"array '{path}' has {rows} rows, the record says {record.length(path)}")
    return record
