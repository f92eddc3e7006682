"""Reads schema and commit records of a damaged store, and makes lost records again where others know them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from trajstore.errors import FormatError, SchemaError, StorageError, UnknownFormatError
from trajstore.format.array_layout import ArrayLayout
from trajstore.format.checkpoint_record import Checkpoint
from trajstore.format.commit_record import CommitRecord, stream_layouts
from trajstore.format.ids import is_stream_id
from trajstore.format.zarr_json import check_checksum, parse_json
from trajstore.schema import Schema
from trajstore.storage import Storage
from trajstore.store.repair.report import Damage, RepairReport
from trajstore.store.schema_objects import parse_schema, schema_key, union_of_schemas

_LOST = "its commit record is {}, and no other object says which of its rows exist"


def read_records(storage: Storage, report: RepairReport) -> tuple[dict[str, CommitRecord], dict[str, str]]:
    """The intact commit records of all stored streams, and by id what is wrong with the others.

    Raises:
        UnknownFormatError: A stream needs a newer trajstore.
    """
    names = [name for name in storage.list_names("streams") if is_stream_id(name)]
    found = dict(zip(names, storage.map(lambda name: _record_or_fault(storage, name), names), strict=True))
    faults = {name: record for name, record in found.items() if isinstance(record, str)}
    for name, fault in faults.items():
        report.damages.append(Damage(f"stream '{name}', commit record", fault))
    return {name: record for name, record in found.items() if isinstance(record, CommitRecord)}, faults


def _record_or_fault(storage: Storage, name: str) -> CommitRecord | str:
    try:
        data = storage.get(f"streams/{name}/zarr.json")
        return CommitRecord.from_bytes(data, name, "")
    except FileNotFoundError:
        return "missing"
    except UnknownFormatError:
        if _is_undamaged(data):
            raise
        return "damaged: its checksum does not match"
    except FormatError as error:
        return f"damaged: {str(error).removeprefix(f'/streams/{name}').lstrip(': ')}"
    except StorageError as error:
        storage.list_names("")  # raises if the whole storage fails, not only this object
        return f"unreadable: {error}"


def _is_undamaged(data: bytes) -> bool:
    try:
        check_checksum(data, "")
    except FormatError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class KnownSchema:
    """The schema of a damaged store.

    Attributes:
        schema: The newest one that is known; None if the store has none.
        objects: Its intact objects, to be copied as they are; empty if one of them is damaged.
    """

    schema: Schema | None
    objects: Sequence[bytes] = ()


def read_known_schema(storage: Storage, records: Mapping[str, CommitRecord], report: RepairReport) -> KnownSchema:
    """The schema, from its objects and from the commit records, which repeat it."""
    names = set(storage.list_names("schema")) - {"zarr.json"}
    n_later = max((int(n) for n in names if n.isascii() and n.isdecimal() and n[0] != "0"), default=0)
    objects: list[bytes] = []
    newest: Schema | None = None
    for number in range(n_later + 1):
        found = _schema_or_fault(storage, number, newest)
        if isinstance(found, str):
            if n_later or records:
                report.damages.append(Damage(schema_key(number), found))
        else:
            newest, data = found
            objects.append(data)
    if len(objects) == n_later + 1:
        return KnownSchema(newest, objects)
    of_streams = union_of_schemas(storage.display, records.values())
    if newest is None:
        newest = of_streams
    elif of_streams is not None:
        newest = newest.merged(of_streams)
    if newest is not None:
        report.mended.append("the schema was made again, from what is left of it and from the commit records")
    return KnownSchema(newest)


def _schema_or_fault(storage: Storage, number: int, before: Schema | None) -> tuple[Schema, bytes] | str:
    data = b""
    try:
        data = storage.get(schema_key(number))
        return parse_schema(data, schema_key(number), before), data
    except FileNotFoundError:
        return "missing"
    except FormatError as error:
        if isinstance(error, UnknownFormatError) and _is_undamaged(data):
            raise
        return str(error)


def without_foreign_schemas(records: Mapping[str, CommitRecord], report: RepairReport) -> dict[str, CommitRecord]:
    """The records of streams that agree with each other; others are reported as lost."""
    kept: dict[str, CommitRecord] = {}
    for name, record in sorted(records.items(), key=lambda item: (item[1].created_at, item[0])):
        try:
            union_of_schemas("the store", [*kept.values(), record])
        except SchemaError as error:
            report.lost_streams[name] = str(error)
        else:
            kept[name] = record
    return {name: record for name, record in records.items() if name in kept}


class RecordRebuilding:
    """Makes commit records that were lost again.

    What is known of a stream without its record: the metadata of its arrays, which has their lengths if the stream
    was sealed, and checkpoints that list it. What only the record had is lost: derived columns, marks, decisions
    about other streams, rank and lineage.
    """

    def __init__(self, storage: Storage, schema: Schema | None, checkpoints: Iterable[Checkpoint]) -> None:
        self._storage, self._schema = storage, schema
        self._checkpoints = list(checkpoints)

    def rebuilt(self, name: str) -> CommitRecord | None:
        """A record of the rows that are known to be committed; None if none is."""
        found = [
            record for record in (self._from_arrays(name), *self._from_checkpoints(name)) if record is not None
        ]
        best = max(found, key=lambda record: record.rows, default=None)
        if best is None or not best.rows:
            return None
        return replace(best, first_row=self._first_stored(best))

    def _from_arrays(self, name: str) -> CommitRecord | None:
        """The record of a sealed stream, from the metadata of its arrays."""
        schema = self._schema_of(name)
        if schema is None:
            return None
        layouts, lengths = {}, {}
        for path in stream_layouts(schema):
            try:
                node = parse_json(self._storage.get(f"streams/{name}/{path}/zarr.json"), path)
                layouts[path], lengths[path] = ArrayLayout.from_metadata(node, path)
            except (FileNotFoundError, FormatError):
                return None
        rows = {n for path, n in lengths.items() if path.startswith("steps/")}
        if len(rows) != 1 or lengths["spans/ints"] != lengths["spans/floats"]:
            return None
        created_at = (int(name.rpartition("-")[2], 32) >> 80) / 1000
        return CommitRecord(
            name,
            name.rpartition("-")[0],
            schema,
            layouts,
            rows=rows.pop(),
            spans=lengths["spans/ints"],
            text_bytes=lengths["spans/text"],
            commit=1,
            is_sealed=True,
            created_at=created_at,
            committed_at=created_at,
        )

    def _schema_of(self, name: str) -> Schema | None:
        """The store's schema without the fields that the stream has no array for."""
        if self._schema is None:
            return None
        nodes = set(self._storage.list_tree(f"streams/{name}/steps"))
        prefix = f"streams/{name}/steps"
        present = [
            path
            for path, spec in self._schema.fields.items()
            if spec.fill is None or f"{prefix}/{path}/zarr.json" in nodes
        ]
        return self._schema.only(present)

    def _from_checkpoints(self, name: str) -> Iterable[CommitRecord | None]:
        """Records of the rows that checkpoints list."""
        for checkpoint in self._checkpoints:
            for stream, extent in checkpoint.streams.items():
                if extent.record is not None and extent.record.as_stored().id == name:
                    yield extent.record.as_stored()
                elif extent.record is None and stream == name:
                    base = self._from_nodes(name)
                    yield base and replace(base, rows=extent.stop, spans=extent.spans, text_bytes=extent.text_bytes)

    def _from_nodes(self, name: str) -> CommitRecord | None:
        """The record of a stream that was not sealed, with no rows."""
        schema = self._schema_of(name)
        if schema is None:
            return None
        layouts = {}
        for path in stream_layouts(schema):
            try:
                node = parse_json(self._storage.get(f"streams/{name}/{path}/zarr.json"), path)
                layouts[path] = ArrayLayout.from_metadata(node, path)[0]
            except (FileNotFoundError, FormatError):
                return None
        created_at = (int(name.rpartition("-")[2], 32) >> 80) / 1000
        return CommitRecord(
            name,
            name.rpartition("-")[0],
            schema,
            layouts,
            commit=1,
            is_sealed=True,
            created_at=created_at,
            committed_at=created_at,
        )

    def _first_stored(self, record: CommitRecord) -> int:
        """The first row of which all objects exist: those before it were evicted, or there is no telling."""
        first = 0
        for path, layout in record.layouts.items():
            if path.startswith("steps/"):
                stored = self._storage.list_names(f"{record.folder}/{path}")
                numbers = [
                    int(n.split(".")[1]) for n in stored if n.startswith("c.") and n.split(".")[1].isdecimal()
                ]
                first = max(first, min(numbers, default=0) * layout.object_rows)
        return min(first, record.rows)


def lost_record(fault: str) -> str:
    """Why a stream is lost whose record could not be made again."""
    return _LOST.format(fault.partition(":")[0])
