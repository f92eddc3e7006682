"""Packed streams: which of several stored copies of a stream readers show.

A packed stream holds all rows of another stream in other objects, and its record repeats everything that the other
record says. So a reader shows it as that other stream, under its id, and nothing but the place of the objects
differs. docs/format.md, section 6, has the rules.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

from trajstore.format.commit_record import CommitRecord, Replaces, SessionView

PENDING_S = 3600.0  # a copy whose record was not put for so long is no longer being written


def shown_records(records: Iterable[CommitRecord]) -> list[CommitRecord]:
    """The record of each stream as readers show it: that of the copy that counts, with the id that handles name.

    Streams that are being packed, and copies that do not count, are left out.
    """
    counting = _counting_copies(records)
    return [record if record.id == stream else record.shown() for stream, record in counting.items()]


def replaced_copies(records: Iterable[CommitRecord]) -> set[str]:
    """Ids of the complete stored streams of which readers use nothing, because another copy counts."""
    stored = list(records)
    counting = {record.id for record in _counting_copies(stored).values()}
    return {record.id for record in stored if not is_being_packed(record)} - counting


def unfinished_copies(records: Iterable[CommitRecord]) -> set[str]:
    """Ids of copies that were never completed, and that no process can still be writing."""
    latest = time.time() - PENDING_S
    return {record.id for record in records if is_being_packed(record) and record.committed_at < latest}


def unfinished(packed: CommitRecord, put_at: float) -> CommitRecord:
    """The record of a packed stream while it is being written or removed: without rows; readers ignore it.

    Args:
        packed: The record of the whole.
        put_at: UNIX seconds when this record is put.
    """
    assert packed.replaces is not None
    columns = {
        target: {name: replace(state, first=0, stop=0, deltas=0) for name, state in named.items()}
        for target, named in packed.columns.items()
    }
    return replace(
        packed,
        rows=0,
        spans=0,
        text_bytes=0,
        commit=0,
        is_sealed=False,
        committed_at=put_at,
        first_row=0,
        view=SessionView(),
        replaces=Replaces(packed.replaces.stream, 0, 0),
        columns=columns,
        continues=None,
    )


def is_being_packed(record: CommitRecord) -> bool:
    """Whether a stream is a copy that is not complete; readers ignore it."""
    return record.replaces is not None and not record.is_sealed


def stream_of(record: CommitRecord, stored: Mapping[str, CommitRecord]) -> str:
    """The stream that a stored stream is a copy of: another one that it replaces as a whole, or itself."""
    if record.replaces is None or _is_part(record, stored.get(record.replaces.stream)):
        return record.id
    return record.replaces.stream


def counts_over(copy: CommitRecord, other: CommitRecord) -> bool:
    """Whether readers prefer one copy of a stream to another; both as they are shown."""
    return _rank(copy.as_stored()) > _rank(other.as_stored())


def _is_part(packed: CommitRecord, original: CommitRecord | None) -> bool:
    """Whether a stream replaces only some rows of another, which then shows the others itself."""
    replaces = packed.replaces
    if replaces is None or replaces.start or replaces.stop != packed.rows:
        return replaces is not None
    is_current = original is not None and packed.commit >= original.commit
    return is_current and original is not None and packed.rows < original.rows


def _counting_copies(records: Iterable[CommitRecord]) -> dict[str, CommitRecord]:
    """By stream, the stored stream that counts: that of the newest commit, and of these the newest packed one."""
    stored = {record.id: record for record in records}
    counting: dict[str, CommitRecord] = {}
    for record in stored.values():
        if not is_being_packed(record):
            stream = stream_of(record, stored)
            counting[stream] = max(record, counting.get(stream, record), key=_rank)
    return counting


def _rank(record: CommitRecord) -> tuple[int, bool, str]:
    return record.commit, record.replaces is not None, record.id.rpartition("-")[2]
