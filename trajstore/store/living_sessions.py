"""Which sessions seem to write a store now."""

from __future__ import annotations

import time
from collections.abc import Iterable

from trajstore.errors import ConflictError
from trajstore.format.commit_record import CommitRecord
from trajstore.format.packed_streams import is_being_packed

IDLE_S = 3600.0  # a stream whose last commit is older is not being written, as far as can be told


def living_streams(records: Iterable[CommitRecord], idle_s: float) -> list[CommitRecord]:
    """Streams that are neither closed nor declared dead, and had a commit in the last ``idle_s`` seconds."""
    stored = list(records)
    dead = {stream for record in stored for stream in record.view.dead}
    latest = time.time() - idle_s
    return [
        record
        for record in stored
        if not (record.is_sealed or record.id in dead or is_being_packed(record)) and record.committed_at >= latest
    ]


def check_unwritten(where: str, records: Iterable[CommitRecord], idle_s: float) -> None:
    """Refuse a store that a session seems to write.

    Raises:
        ConflictError: One does; the message names its stream and says how long ago it has committed.
    """
    if found := living_streams(records, idle_s):
        raise ConflictError(f"{where}: {_described(found[0], len(found))}")


def _described(record: CommitRecord, n: int) -> str:
    age = max(0.0, time.time() - record.committed_at)
    others = f", and so are {n - 1} others" if n > 1 else ""
    return (
        f"stream '{record.id}' seems to be written{others}: it is not closed, and its last commit was {age:.0f} s"
        f" ago; close its session, or, if that has died, wait or pass a shorter idle_s than {age:.0f}"
    )
