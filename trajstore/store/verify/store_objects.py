"""Checks the objects above the streams: root, groups, schema and commit records."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from trajstore.errors import FormatError, StoreNotFoundError
from trajstore.format.commit_record import CommitRecord
from trajstore.format.ids import is_stream_id
from trajstore.format.packed_streams import is_being_packed, shown_records
from trajstore.format.zarr_json import FORMAT, parse_json, trajstore_attributes
from trajstore.schema import Schema
from trajstore.store.schema_objects import parse_schema, schema_key
from trajstore.store.verify.inspection import NO_RECORD, Inspection, by_creation
from trajstore.store.verify.nodes import group_fault, scratch_fault
from trajstore.store.verify.report import without_subject

_TOP_NAMES = frozenset({"zarr.json", "schema", "streams", "checkpoints", "scratch", "worlds"})


def check_root(inspection: Inspection) -> None:
    """Check the store's root group.

    Raises:
        StoreNotFoundError: The location has neither a root nor streams.
        FormatError: The root is damaged and no streams exist, or it has another format.
    """
    storage = inspection.storage
    display, names = storage.display, storage.list_names("")
    try:
        own = trajstore_attributes(parse_json(storage.get("zarr.json"), display), "store", display)
    except FileNotFoundError:
        if not _has_streams(inspection):
            raise StoreNotFoundError(f"{display}: there is no store here") from None
        inspection.problem("zarr.json", "missing, so the store can't be opened")
    except FormatError as error:
        if not _has_streams(inspection) or _is_of_another_format(error):
            raise
        inspection.problem("zarr.json", without_subject(error, display))
    else:
        if not isinstance(own.get("id"), str) or not _is_time(own.get("created_at")):
            inspection.problem("zarr.json", "has no id, or no time of creation")
    for name in sorted(set(names) - _TOP_NAMES):
        inspection.note(name, "not part of a store; readers ignore it")


def _has_streams(inspection: Inspection) -> bool:
    return any(is_stream_id(name) for name in inspection.storage.list_names("streams"))


def _is_of_another_format(error: FormatError) -> bool:
    return f"this trajstore reads format {FORMAT}" in str(error)


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def check_groups(inspection: Inspection) -> None:
    """Check the groups that every store has, and the scratch directory."""
    storage = inspection.storage
    for name in ("streams", "checkpoints"):
        _check_node(inspection, f"{name}/zarr.json", group_fault)
    scratch = storage.list_names("scratch")
    if "scratch" in storage.list_names("") and not storage.is_remote:
        _check_node(inspection, "scratch/zarr.json", scratch_fault)
    if n := len(set(scratch) - {"zarr.json"}):
        inspection.note("scratch", f"{n} temporary files, of running writers or of writers that died")


def _check_node(inspection: Inspection, key: str, fault: Callable[[dict[str, Any]], str | None]) -> None:
    """Check one ``zarr.json``; ``fault`` describes what is wrong with its content, or returns None."""
    try:
        what = fault(parse_json(inspection.storage.get(key), key))
    except FileNotFoundError:
        what = "missing"
    except FormatError as error:
        what = without_subject(error, key)
    if what:
        inspection.problem(key, what)


def read_records(inspection: Inspection) -> dict[str, CommitRecord]:
    """Read the commit records of all streams, oldest first, and report those that are damaged or missing.

    Streams that packed ones replace, and packed ones that are not complete, are noted and left out.
    """
    storage = inspection.storage
    names = storage.list_names("streams")
    streams = [name for name in names if is_stream_id(name)]
    for name in sorted(set(names) - {"zarr.json", *streams}):
        inspection.note(f"streams/{name}", "not a stream; readers ignore it")
    found = dict(zip(streams, storage.map(inspection.record_or_fault, streams), strict=True))
    records = {name: record for name, record in found.items() if isinstance(record, CommitRecord)}
    marks = {stream: row for r in records.values() for stream, row in r.view.first_rows.items()}
    packed = {r.replaces.stream for r in records.values() if r.replaces is not None}
    for name, fault in found.items():
        where = f"stream '{name}', commit record"
        if fault == NO_RECORD and name in marks:
            inspection.note(where, f"missing; its rows below {marks[name]} are evicted, so it was being removed")
        elif fault == NO_RECORD and name in packed:
            inspection.note(where, "missing; the stream was packed, so the original was being removed")
        elif isinstance(fault, str):
            inspection.problem(where, fault)
    shown = _without_other_copies(inspection, records)
    inspection.report.counts["streams"] = len(streams) - len(records) + len(shown)
    return by_creation(shown)


def _without_other_copies(inspection: Inspection, records: dict[str, CommitRecord]) -> dict[str, CommitRecord]:
    """The streams that readers use; of a stream that was packed, only the copy that counts."""
    used = {record.as_stored().id for record in shown_records(records.values())}
    for id_ in records.keys() - used:
        is_unfinished = is_being_packed(records[id_])
        what = "a packed copy that is not complete" if is_unfinished else "replaced by a packed copy"
        inspection.note(f"stream '{id_}'", f"{what}; readers ignore it, and it will be removed")
    return {id_: records[id_] for id_ in records if id_ in used}


def check_schemas(inspection: Inspection) -> None:
    """Compare the schema of every commit record with the store's, and check the record's own values."""
    schema = _read_schema(inspection)
    for record in inspection.records.values():
        schema = schema or record.schema
        if differences := schema.differences(record.schema, "the store", "the stream", filled=True):
            inspection.problem(f"stream '{record.id}'", f"has another schema: {'; '.join(differences)}")
        for what in _record_faults(record):
            inspection.problem(f"stream '{record.id}', commit record", what)


def _read_schema(inspection: Inspection) -> Schema | None:
    """The newest schema, after a report of those that are damaged or missing."""
    names = set(inspection.storage.list_names("schema")) - {"zarr.json"}
    numbers = sorted(int(name) for name in names if name.isascii() and name.isdecimal() and name[0] != "0")
    for name in sorted(names - set(map(str, numbers))):
        inspection.note(f"schema/{name}", "not a schema; readers ignore it")
    schema: Schema | None = None
    for number, stored in enumerate((0, *numbers)):
        where = schema_key(number)
        if stored != number:
            inspection.problem(where, "missing, although later ones are stored")
            break
        try:
            schema = parse_schema(inspection.storage.get(where), where, schema)
        except FileNotFoundError:
            if inspection.records:
                inspection.problem(where, "missing, although the store has streams")
        except FormatError as error:
            inspection.problem(where, without_subject(error, where))
    return schema


def _record_faults(record: CommitRecord) -> Iterator[str]:
    if not record.id.startswith(f"{record.name}-"):
        yield f"its name is {record.name!r}, but the stream's id does not begin with it"
    if record.first_row > record.rows:
        yield f"its first row is {record.first_row}, but it has {record.rows} rows"
    if record.rank is not None and record.world_size is not None and record.rank >= record.world_size:
        yield f"its rank is {record.rank}, of {record.world_size}"
    if record.replaces and record.replaces.stop - record.replaces.start != record.rows:
        yield f"replaces rows {record.replaces.start} to {record.replaces.stop}, but has {record.rows} rows"
    if not (_is_time(record.created_at) and _is_time(record.committed_at)):
        yield "its times are not finite"
