"""Finds the records of stored streams, and the packed copies of streams whose objects may be gone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from trajstore.format.commit_record import CommitRecord
from trajstore.format.ids import is_stream_id
from trajstore.format.packed_streams import counts_over, shown_records
from trajstore.storage import Storage
from trajstore.store.column_reader import read_records


def load_records(
    storage: Storage, known: Mapping[str, CommitRecord], listed: Sequence[str] | None = None
) -> dict[str, CommitRecord]:
    """The newest record of every stored stream, where ``known`` may be out of date.

    ``listed`` are the names below ``streams``, if they were listed already.
    """
    found = storage.list_names("streams") if listed is None else listed
    names = [name for name in found if is_stream_id(name)]
    dead = {stream for record in known.values() for stream in record.view.dead}
    may_have_changed = [n for n in names if n not in known or not (known[n].is_sealed or n in dead)]
    fresh = read_records(storage, may_have_changed)
    stored: dict[str, CommitRecord] = {name: known[name] for name in names if name not in may_have_changed}
    for name, record in fresh.items():  # a backend may return an older record; a snapshot never goes back in time
        is_older = name in known and record.commit < known[name].commit
        stored[name] = known[name] if is_older else record
    return stored


def with_packed_copies(
    storage: Storage, wanted: Collection[str], records: Mapping[str, CommitRecord]
) -> dict[str, CommitRecord]:
    """The records of streams; those that were packed since name the packed objects: the others may be gone.

    Lists the streams, and reads the records of those that are not among ``records``.

    Args:
        storage: Storage of the store.
        wanted: The streams.
        records: Their records, as far as they are known. A record may be cut to an extent, and stays so.
    """
    known = {record.as_stored().id for record in records.values()}
    names = [name for name in storage.list_names("streams") if is_stream_id(name) and name not in known]
    stored = read_records(storage, names).values()
    copies = {copy.id: copy for copy in shown_records(stored) if copy.location is not None and copy.id in wanted}
    found = {
        name: at_place_of(copy, records[name])
        for name, copy in copies.items()
        if name in records and counts_over(copy, records[name])
    }
    return {**copies, **records, **found}


def at_place_of(copy: CommitRecord, record: CommitRecord) -> CommitRecord:
    """A record whose arrays are those of another copy of the stream."""
    layouts = {path: layout for path, layout in copy.layouts.items() if path in record.layouts}
    return replace(record, location=copy.location, layouts=layouts)


def is_moved(old: CommitRecord, new: CommitRecord, stored: Iterable[CommitRecord], *, is_pinned: bool) -> bool:
    """Whether other objects hold a stream now, and the old ones are gone or, unless they are pinned, may be."""
    is_gone = old.as_stored().id not in (record.id for record in stored)
    return old.folder != new.folder and (is_gone or not is_pinned)
