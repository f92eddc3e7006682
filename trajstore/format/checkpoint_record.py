"""The record of a checkpoint: one object, that says which rows of which streams it shows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trajstore.errors import CorruptionError, DataError, FormatError
from trajstore.format.array_layout import ArrayLayout
from trajstore.format.commit_record import CommitRecord, Replaces, SessionView, check_count, stream_layouts
from trajstore.format.ids import is_stream_id
from trajstore.format.zarr_json import (
    FORMAT,
    GROUP,
    MAX_RECORD_BYTES,
    check_checksum,
    parse_json,
    to_json_bytes,
    trajstore_attributes,
    with_checksum,
)
from trajstore.schema import Schema


@dataclass(frozen=True, slots=True)
class StreamExtent:
    """What a view shows of one stream: rows ``[first, stop)``, of its first ``spans`` spans.

    Attributes:
        first: First row.
        stop: Row after the last.
        spans: How many of the stream's spans.
        text_bytes: How much of their text.
        record: The stream's record, cut to this; None where the stream goes on and its own is to be read.
        discarded: Episodes that are not shown, by number.
    """

    first: int
    stop: int
    spans: int
    text_bytes: int
    record: CommitRecord | None = None
    discarded: tuple[int, ...] = ()

    def truncate(self, record: CommitRecord) -> CommitRecord:
        """The record of a stream that ends here: its arrays only grow, so a prefix of them is what they were.

        Raises:
            CorruptionError: The stream has less than this.
        """
        mine, its = (self.stop, self.spans, self.text_bytes), (record.rows, record.spans, record.text_bytes)
        if any(n > there for n, there in zip(mine, its, strict=True)):
            raise CorruptionError(f"stream '{record.id}' has (rows, spans, text) {its}, {mine} are wanted")
        discarded = {record.shown_as: self.discarded} if self.discarded else {}
        return replace(
            record,
            rows=self.stop,
            spans=self.spans,
            text_bytes=self.text_bytes,
            first_row=self.first,
            is_sealed=True,
            view=SessionView(discarded=discarded),
            columns={},
            layouts={path: a for path, a in record.layouts.items() if not path.startswith("columns/")},
        )


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A named cut across streams.

    Attributes:
        id: ``<name>-<unique id>``.
        name: What it was called; several may have the same.
        created_at: UNIX seconds.
        parent: Id of the checkpoint that the session continued; None for a first one.
        world: The set of sessions that took it.
        streams: What it shows of each stream, by id.
        is_complete: Whether all of it is there.
        ancestors: Ids of those that the parent descends from, oldest first, as far as there were any left.
        pinned_at: UNIX seconds when it was begun; None once it is complete.
        n_ranks: How many ranks took it, each with a part of its own below it; None where a single session did.
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


def checkpoint_to_bytes(checkpoint: Checkpoint, state: Mapping[str, Any], nodes: Mapping[str, Any] | None) -> bytes:
    """The record of a checkpoint, with what is said of its state, and the nodes below its group.

    ``nodes`` is None where they are not known all at once: walkers list them then.

    Raises:
        DataError: It is absurdly long.
    """
    kinds = _Kinds()
    own = {
        "format": FORMAT,
        "kind": "checkpoint",
        "crc32c": "00000000",
        "complete": checkpoint.is_complete,
        "id": checkpoint.id,
        "name": checkpoint.name,
        "created_at": checkpoint.created_at,
        "pinned_at": checkpoint.pinned_at,
        "parent": checkpoint.parent,
        "ancestors": list(checkpoint.ancestors),
        "world": checkpoint.world,
        "ranks": checkpoint.n_ranks,
        "streams": {stream: _cut_json(cut, kinds) for stream, cut in checkpoint.streams.items()},
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


class _Kinds:
    """What streams have in common, said once: a schema and the layout of the arrays that follow from it."""

    def __init__(self) -> None:
        self.known: list[dict[str, Any]] = []
        self._numbers: dict[bytes, int] = {}

    def number(self, record: CommitRecord) -> int:
        arrays = {path: layout.metadata(0) for path, layout in record.layouts.items()}
        kind = {"schema": record.schema.to_json(), "arrays": arrays}
        number = self._numbers.setdefault(to_json_bytes(kind), len(self.known))
        if number == len(self.known):
            self.known.append(kind)
        return number


def _cut_json(cut: StreamExtent, kinds: _Kinds) -> dict[str, Any]:
    return {
        "first": cut.first,
        "stop": cut.stop,
        "spans": cut.spans,
        "text_bytes": cut.text_bytes,
        "discarded": list(cut.discarded),
        "record": None if cut.record is None else _record_json(cut.truncate(cut.record), kinds),
    }


def _record_json(record: CommitRecord, kinds: _Kinds) -> dict[str, Any]:
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
    """Read a record, trusting nothing in it: the checkpoint, what is said of its state, and the nodes below it.

    Raises:
        FormatError: It is malformed, of another format, or not what was written.
    """
    what = f"{where}/checkpoints/{checkpoint_id}"
    parsed = parse_json(data, what)
    own = trajstore_attributes(parsed, "checkpoint", what)
    check_checksum(data, what)
    try:
        checkpoint = _checkpoint(own)
        about = dict(own["state"])
        nodes = dict(parsed["consolidated_metadata"]["metadata"]) if checkpoint.n_ranks is None else {}
    except FormatError as error:
        raise FormatError(f"{what}: {error}") from error
    except (TypeError, LookupError, AttributeError, ValueError, OverflowError) as error:
        raise FormatError(f"{what}: checkpoint is malformed: {error!r:.300}") from error
    if checkpoint.id != checkpoint_id:
        raise FormatError(f"{what}: checkpoint names itself {checkpoint.id!r:.80}")
    return checkpoint, about, nodes


def _checkpoint(own: Mapping[str, Any]) -> Checkpoint:
    kinds = [_kind(data) for data in own["kinds"]]
    checkpoint = Checkpoint(
        id=_id(own["id"]),
        name=_text(own["name"]),
        created_at=_seconds(own["created_at"]),
        parent=None if own["parent"] is None else _id(own["parent"]),
        world=None if own["world"] is None else _text(own["world"]),
        streams={_id(stream): _cut(stream, data, kinds) for stream, data in own["streams"].items()},
        is_complete=own["complete"] is True,
        ancestors=tuple(_id(id_) for id_ in own["ancestors"]),
        pinned_at=None if own["pinned_at"] is None else _seconds(own["pinned_at"]),
        n_ranks=None if own.get("ranks") is None else check_count(own["ranks"], "ranks"),
    )
    if checkpoint.id.rpartition("-")[0] != checkpoint.name:
        raise FormatError(f"it has the name {checkpoint.name!r:.80}")
    return checkpoint


def _kind(data: Mapping[str, Any]) -> CommitRecord:
    """A record of a stream of this kind, without rows."""
    schema = Schema.from_json(data["schema"])
    layouts = {path: ArrayLayout.from_metadata(data["arrays"][path], path)[0] for path in stream_layouts(schema)}
    for path, expected in stream_layouts(schema).items():
        if (layouts[path].dtype, layouts[path].row_shape) != (expected.dtype, expected.row_shape):
            raise FormatError(f"array '{path}' is not what the schema says")
    return CommitRecord("", "", schema, layouts)


def _cut(stream: str, data: Mapping[str, Any], kinds: Sequence[CommitRecord]) -> StreamExtent:
    counts = {name: check_count(data[name], name) for name in ("first", "stop", "spans", "text_bytes")}
    discarded = tuple(check_count(number, "discarded") for number in data["discarded"])
    cut = StreamExtent(counts["first"], counts["stop"], counts["spans"], counts["text_bytes"], discarded=discarded)
    if cut.first > cut.stop:
        raise FormatError(f"stream '{stream}': rows {cut.first} to {cut.stop}")
    if data["record"] is None:
        return cut
    return replace(cut, record=cut.truncate(_record(stream, cut, data["record"], kinds)))


def _record(stream: str, cut: StreamExtent, data: Mapping[str, Any], kinds: Sequence[CommitRecord]) -> CommitRecord:
    lineage = data["lineage"]
    return replace(
        kinds[check_count(data["kind"], "kind")],
        id=stream,
        name=_text(data["name"]),
        rows=cut.stop,
        spans=cut.spans,
        text_bytes=cut.text_bytes,
        commit=check_count(data["commit"], "commit"),
        created_at=_seconds(data["created_at"]),
        committed_at=_seconds(data["committed_at"]),
        rank=None if data["rank"] is None else check_count(data["rank"], "rank"),
        world_size=None if data["world_size"] is None else check_count(data["world_size"], "world_size"),
        world=None if lineage["world"] is None else _text(lineage["world"]),
        checkpoint=None if lineage["checkpoint"] is None else _text(lineage["checkpoint"]),
        replaces=None if data["replaces"] is None else Replaces.from_json(data["replaces"]),
    )


def _id(value: object) -> str:
    if not isinstance(value, str) or not is_stream_id(value):
        raise FormatError(f"{value!r:.80} is not an id")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise FormatError(f"expected text, got {value!r:.80}")
    return value


def _seconds(value: object) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise FormatError(f"expected seconds, got {value!r:.80}")
    return float(value)
