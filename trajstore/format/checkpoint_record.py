"""The record of a checkpoint: one object that says which rows of which streams the checkpoint shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from trajstore.errors import DataError, FormatError
from trajstore.format.array_layout import ArrayLayout
from trajstore.format.commit_record import CommitRecord, Replaces, StreamExtent, stream_layouts
from trajstore.format.json_values import (
    parse_count,
    parse_id,
    parse_optional_count,
    parse_optional_text,
    parse_seconds,
    parse_text,
)
from trajstore.format.zarr_json import (
    FORMAT,
    GROUP,
    MAX_RECORD_BYTES,
    NO_CHECKSUM,
    check_checksum,
    parse_json,
    to_json_bytes,
    trajstore_attributes,
    with_checksum,
)
from trajstore.html_blocks import MAX_ROWS, Section, count, facts, moment, representation, table
from trajstore.schema import Schema


@dataclass(frozen=True, slots=True, repr=False)
class Checkpoint:
    """A named state of several streams, as far as its record tells.

    Attributes:
        id: ``<name>-<unique part>``.
        name: The name it was given; several checkpoints may have the same.
        created_at: UNIX seconds.
        parent: Id of the checkpoint that the session continued; None for a first one.
        world: Id of the set of sessions that took it.
        streams: The extent that it shows of each stream, by the id that handles name.
        is_complete: Whether all of it is written.
        ancestors: Ids of the checkpoints that the parent descends from, oldest first; removed ones may be missing.
        pinned_at: UNIX seconds when writing it began; None once it is complete.
        n_ranks: Number of ranks that took it, each with its own part below it; None if a single session took it.
    """

    id: str
    name: str
    created_at: float
    parent: str | None = None
    world: str | None = None
    streams: Mapping[str, StreamExtent] = field(default_factory=dict)
    is_complete: bool = False
    ancestors: tuple[str, ...] = ()
    pinned_at: float | None = None
    n_ranks: int | None = None

    @property
    def n_rows(self) -> int:
        """Number of rows that it shows, final rows included."""
        return sum(extent.stop - extent.first for extent in self.streams.values())

    def __repr__(self) -> str:
        state = "" if self.is_complete else ", incomplete"
        streams, rows = count(len(self.streams), "stream"), count(self.n_rows, "row")
        return f"<Checkpoint {self.id}: {streams}, {rows}, {moment(self.created_at)}{state}>"

    def _repr_html_(self) -> str:
        return representation(
            "Checkpoint", self.id, lambda: f"{repr(self).partition(': ')[2].removesuffix('>')}", [
                lambda: Section("Facts", self.name, facts(self._facts()), is_open=True),
                lambda: Section("Streams", count(len(self.streams), "stream"), self._streams_html()),
            ],
        )  # fmt: skip

    def _facts(self) -> list[tuple[str, object]]:
        return [
            ("name", self.name),
            ("created", moment(self.created_at)),
            ("complete", "yes" if self.is_complete else "no: it is being written, or its session died"),
            ("parent", self.parent),
            ("ancestors", len(self.ancestors) or None),
            ("world", self.world),
            ("ranks", self.n_ranks),
        ]

    def _streams_html(self) -> str:
        rows = [
            [stream, f"{extent.first:,}", f"{extent.stop:,}", f"{extent.spans:,}", f"{len(extent.discarded):,}"]
            for stream, extent in islice(self.streams.items(), MAX_ROWS)
        ]
        headings = ["stream", ">first row", ">stop", ">spans", ">episodes not shown"]
        return table(headings, rows, len(self.streams))


class CheckpointList(list[Checkpoint]):
    """Checkpoints, parents before children; notebooks show them as a table."""

    def _repr_html_(self) -> str:
        return representation(
            "Checkpoints", "", lambda: count(len(self), "checkpoint"), [
                lambda: Section("Newest", "the last ones of the list", self._table(), is_open=True),
            ],
        )  # fmt: skip

    def _table(self) -> str:
        rows = [
            [c.name, c.id, moment(c.created_at), c.parent or "", f"{len(c.streams):,}", f"{c.n_rows:,}"]
            for c in self[-MAX_ROWS:]
        ]
        return table(["name", "id", "created", "parent", ">streams", ">rows"], rows, len(self))


def checkpoint_to_bytes(checkpoint: Checkpoint, state: Mapping[str, Any], nodes: Mapping[str, Any] | None) -> bytes:
    """The bytes of a checkpoint's record.

    Args:
        checkpoint: The checkpoint.
        state: The description of its state.
        nodes: Metadata of the groups and arrays below its group, by path; None if they are not all known, so that
            Zarr readers must list them.

    Raises:
        DataError: The record is larger than `MAX_RECORD_BYTES`.
    """
    kinds = _StreamKinds()
    own = {
        "format": FORMAT,
        "kind": "checkpoint",
        "crc32c": NO_CHECKSUM,
        "complete": checkpoint.is_complete,
        "id": checkpoint.id,
        "name": checkpoint.name,
        "created_at": checkpoint.created_at,
        "pinned_at": checkpoint.pinned_at,
        "parent": checkpoint.parent,
        "ancestors": list(checkpoint.ancestors),
        "world": checkpoint.world,
        "ranks": checkpoint.n_ranks,
        "streams": {
            _stored_in(stream, extent): _extent_to_json(extent, kinds)
            for stream, extent in checkpoint.streams.items()
        },
        "kinds": kinds.known,
        "state": state,
    }
    group = GROUP | {"attributes": {"trajstore": own}}
    if nodes is not None:
        group["consolidated_metadata"] = {"kind": "inline", "must_understand": False, "metadata": nodes}
    data = with_checksum(group)
    if len(data) > MAX_RECORD_BYTES:
        raise DataError(f"the checkpoint's record takes {len(data)} bytes; at most {MAX_RECORD_BYTES}")
    return data


class _StreamKinds:
    """Schemas and array layouts that several streams share; the record holds each of them once."""

    def __init__(self) -> None:
        self.known: list[dict[str, Any]] = []
        self._numbers: dict[bytes, int] = {}

    def number(self, record: CommitRecord) -> int:
        """The position of a stream's schema and layouts in ``known``, added if new."""
        arrays = {path: layout.metadata(0) for path, layout in record.layouts.items()}
        kind = {"schema": record.schema.to_json(), "arrays": arrays}
        number = self._numbers.setdefault(to_json_bytes(kind), len(self.known))
        if number == len(self.known):
            self.known.append(kind)
        return number


def _stored_in(stream: str, extent: StreamExtent) -> str:
    """Id of the stream whose objects hold a stream: a packed one, or the stream itself."""
    return stream if extent.record is None else extent.record.location or stream


def _extent_to_json(extent: StreamExtent, kinds: _StreamKinds) -> dict[str, Any]:
    record = None if extent.record is None else extent.truncate(extent.record).as_stored()
    return extent.to_json() | {"record": None if record is None else _record_to_json(record, kinds)}


def _record_to_json(record: CommitRecord, kinds: _StreamKinds) -> dict[str, Any]:
    return {
        "kind": kinds.number(record),
        "name": record.name,
        "commit": record.commit,
        "created_at": record.created_at,
        "committed_at": record.committed_at,
        "rank": record.rank,
        "world_size": record.world_size,
        "lineage": {"world": record.world, "checkpoint": record.checkpoint},
        "replaces": record.replaces.to_json() if record.replaces else None,
    }


def parse_checkpoint(
    data: bytes, checkpoint_id: str, where: str
) -> tuple[Checkpoint, dict[str, Any], dict[str, Any]]:
    """Parse a record, which may be damaged or hostile.

    Args:
        data: The bytes of the object.
        checkpoint_id: Id of the checkpoint, which the record must name.
        where: The store, for messages.

    Returns:
        The checkpoint, the description of its state, and metadata of the nodes below it, by path.

    Raises:
        FormatError: It is malformed, of another format, or its checksum does not match.
    """
    what = f"{where}/checkpoints/{checkpoint_id}"
    parsed = parse_json(data, what)
    own = trajstore_attributes(parsed, "checkpoint", what)
    check_checksum(data, what)
    try:
        checkpoint = _parse_checkpoint(own)
        state = dict(own["state"])
        nodes = dict(parsed["consolidated_metadata"]["metadata"]) if checkpoint.n_ranks is None else {}
    except FormatError as error:
        raise FormatError(f"{what}: {error}") from error
    except (TypeError, LookupError, AttributeError, ValueError, OverflowError) as error:
        raise FormatError(f"{what}: checkpoint is malformed: {error!r:.300}") from error
    if checkpoint.id != checkpoint_id:
        raise FormatError(f"{what}: expected the record of '{checkpoint_id}', got that of {checkpoint.id!r:.80}")
    return checkpoint, state, nodes


def _parse_checkpoint(own: Mapping[str, Any]) -> Checkpoint:
    kinds = [_parse_kind(data) for data in own["kinds"]]
    checkpoint = Checkpoint(
        id=parse_id(own["id"]),
        name=parse_text(own["name"]),
        created_at=parse_seconds(own["created_at"]),
        parent=None if own["parent"] is None else parse_id(own["parent"]),
        world=parse_optional_text(own["world"]),
        streams=_parse_streams(own["streams"], kinds),
        is_complete=own["complete"] is True,
        ancestors=tuple(parse_id(id_) for id_ in own["ancestors"]),
        pinned_at=None if own["pinned_at"] is None else parse_seconds(own["pinned_at"]),
        n_ranks=parse_optional_count(own.get("ranks")),
    )
    if checkpoint.id.rpartition("-")[0] != checkpoint.name:
        raise FormatError(f"expected the name that the id begins with, got {checkpoint.name!r:.80}")
    return checkpoint


def _parse_streams(data: Mapping[str, Any], kinds: Sequence[CommitRecord]) -> dict[str, StreamExtent]:
    """The extents by the id that handles name: a packed stream stands for the one that it replaces as a whole."""
    extents = {parse_id(stream): _parse_extent(stream, extent, kinds) for stream, extent in data.items()}
    streams: dict[str, StreamExtent] = {}
    for stored, extent in extents.items():
        replaces = extent.record.replaces if extent.record is not None else None
        if extent.record is None or replaces is None or replaces.start or replaces.stream in extents:
            streams[stored] = extent
        else:
            streams[replaces.stream] = replace(extent, record=extent.record.shown())
    return streams


def _parse_kind(data: Mapping[str, Any]) -> CommitRecord:
    """A record with this schema and these layouts, without rows."""
    schema = Schema.from_json(data["schema"])
    layouts = {path: ArrayLayout.from_metadata(data["arrays"][path], path)[0] for path in stream_layouts(schema)}
    for path, expected in stream_layouts(schema).items():
        if (layouts[path].dtype, layouts[path].row_shape) != (expected.dtype, expected.row_shape):
            raise FormatError(f"array '{path}' is not what the schema says")
    return CommitRecord("", "", schema, layouts)


def _parse_extent(stream: str, data: Mapping[str, Any], kinds: Sequence[CommitRecord]) -> StreamExtent:
    extent = StreamExtent.from_json(data, stream)
    if data["record"] is None:
        return extent
    return replace(extent, record=extent.truncate(_parse_record(stream, extent, data["record"], kinds)))


def _parse_record(
    stream: str, extent: StreamExtent, data: Mapping[str, Any], kinds: Sequence[CommitRecord]
) -> CommitRecord:
    lineage = data["lineage"]
    return replace(
        kinds[parse_count(data["kind"])],
        id=stream,
        name=parse_text(data["name"]),
        rows=extent.stop,
        spans=extent.spans,
        text_bytes=extent.text_bytes,
        commit=parse_count(data["commit"]),
        created_at=parse_seconds(data["created_at"]),
        committed_at=parse_seconds(data["committed_at"]),
        rank=parse_optional_count(data["rank"]),
        world_size=parse_optional_count(data["world_size"]),
        world=parse_optional_text(lineage["world"]),
        checkpoint=parse_optional_text(lineage["checkpoint"]),
        replaces=None if data["replaces"] is None else Replaces.from_json(data["replaces"]),
    )
