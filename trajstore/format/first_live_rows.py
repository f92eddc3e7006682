"""Which rows of each stream are still live, according to the records of all sessions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trajstore.format.commit_record import CommitRecord


def newest_world(records: Iterable[CommitRecord]) -> str | None:
    """The world of the record created last among those that have one."""
    newest = max((r for r in records if r.world is not None), key=lambda r: r.created_at, default=None)
    return None if newest is None else newest.world


def first_live_rows(records: Sequence[CommitRecord]) -> dict[str, int]:
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
