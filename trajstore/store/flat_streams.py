"""Streams of a view as they are stored in another store: whole and sealed, with no session that decides about them.

The records of a store's sessions depend on each other: marks, lineages and columns of one say what is shown of the
others. A *flat* record says about its own stream what all of them said together, so streams of several stores, or
parts of one, can stand side by side. Ids, names and times stay, and with them the handles of all steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from trajstore.errors import CorruptionError, SnapshotExpiredError
from trajstore.format.commit_record import CommitRecord, DerivedColumnState, Replaces, SessionView
from trajstore.schema import Array
from trajstore.storage import Put, Storage
from trajstore.store.snapshot import Snapshot
from trajstore.store.stream_reader import MissingChunkError


@dataclass(frozen=True, slots=True)
class ColumnValues:
    """The values of a derived column for the rows of one stream from ``first`` on."""

    name: str
    state: DerivedColumnState
    values: Array


def flat_records(snapshot: Snapshot) -> dict[str, CommitRecord]:
    """The record of every stream of which a view shows rows, by id, as another store would hold it.

    Rows that are evicted or abandoned, and discarded episodes, stay hidden; derived columns are left out.
    """
    cuts = snapshot.cuts()
    return {r.id: _flat(cuts[r.id].truncate(r)) for r in snapshot.streams if r.id in cuts}


def _flat(record: CommitRecord) -> CommitRecord:
    return replace(record, location=None, rank=None, world_size=None, world=None, checkpoint=None)


def renamed(record: CommitRecord, names: Mapping[str, str]) -> CommitRecord:
    """A flat record with the ids that ``names`` has instead: its own, and that of a stream that it replaces."""
    discarded = {names.get(stream, stream): numbers for stream, numbers in record.view.discarded.items()}
    replaces = record.replaces
    if replaces is not None:
        replaces = Replaces(names.get(replaces.stream, replaces.stream), replaces.start, replaces.stop)
    id_ = names.get(record.id, record.id)
    return replace(record, id=id_, view=SessionView(discarded=discarded), replaces=replaces)


def column_values(snapshot: Snapshot, stream: str, rows: int) -> Iterator[ColumnValues]:
    """The derived columns of one stream, as far as a view shows its rows.

    Args:
        snapshot: The view.
        stream: Id of the stream.
        rows: Number of its rows that are shown.
    """
    for name in snapshot.columns.names:
        found = snapshot.column(name, {stream}).get(stream)
        if found is not None:
            first, values = found
            values = values[: max(0, rows - first)]
            shape = values.shape[1:]
            if len(values):
                state = DerivedColumnState(0, str(values.dtype), shape, first, first + len(values), 0)
                yield ColumnValues(name, state, values)


def put_columns(storage: Storage, record: CommitRecord, columns: Iterator[ColumnValues]) -> CommitRecord:
    """Store derived columns of a stream in the stream itself; returns the record that names them."""
    states: dict[str, DerivedColumnState] = {}
    layouts = dict(record.layouts)
    for column in columns:
        added = column.state.layouts(record.id, column.name)
        path = column.state.paths(record.id, column.name)[0]
        layout, values = added[path], column.values
        size = layout.chunk_rows

        def chunk(i: int, layout=layout, values=values, size=size) -> bytes:  # type: ignore[no-untyped-def]
            block = layout.empty_chunk()
            rows = values[i * size : (i + 1) * size]
            block[: len(rows)] = rows
            return bytes(layout.encode(block))

        storage.put_many(
            [
                Put(f"{record.folder}/{path}/{layout.chunk_key(i)}", lambda i=i, chunk=chunk: chunk(i))  # type: ignore[misc]
                for i in range(-(-len(values) // size))
            ]
        )
        states[column.name], layouts = column.state, layouts | added
    return replace(record, columns={record.id: states} if states else {}, layouts=layouts)


def missing_object(snapshot: Snapshot, stream: str, error: Exception) -> Exception:
    """The error for an object of a source that is gone: evicted or packed during the call, or lost."""
    first = dict(snapshot.cuts())[stream].first
    reason = snapshot.reason(MissingChunkError(str(error), stream, first, first), first)
    if isinstance(reason, SnapshotExpiredError):
        where = snapshot.storage.display
        return SnapshotExpiredError(f"{where} changes while it is read ({reason}); use a copy of it instead")
    return CorruptionError(f"{snapshot.storage.display}: an object is missing: {error}; see trajstore.repair")


def same_spans(mine: tuple[Array, Array], other: tuple[Array, Array]) -> bool:
    """Whether two span tables are equal, NaN included."""
    return all(np.array_equal(a.view(np.int64), b.view(np.int64)) for a, b in zip(mine, other, strict=True))
