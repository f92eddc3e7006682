"""Lineages: what a session that resumed a checkpoint, and those that came after it, hold of each stream."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from trajstore.format.checkpoint_record import Checkpoint
from trajstore.format.commit_record import CommitRecord, StreamExtent


@dataclass(frozen=True, slots=True)
class Lineage:
    """The part of a store that belongs to one line of sessions.

    A session that resumes a checkpoint continues the extents that the checkpoint lists. Whatever other sessions
    wrote after that checkpoint is abandoned.

    Attributes:
        limits: By stream id: the extent that belongs to the lineage, or None if nothing of the stream does. A
            stream that is not named belongs to it as a whole.
    """

    limits: Mapping[str, StreamExtent | None] = field(default_factory=dict)

    @staticmethod
    def newest(records: Sequence[CommitRecord]) -> Lineage:
        """The lineage of the newest session: docs/format.md, section 6, defines it.

        The session that resumed a checkpoint last decides about the streams that are older than its own. Streams
        of its world, and streams that were created later, belong to the lineage as a whole. If no session ever
        resumed a checkpoint, everything does.
        """
        base = max((r for r in records if r.continues is not None), key=_age, default=None)
        if base is None or base.continues is None:
            return Lineage()
        limits = {
            record.id: base.continues.get(record.id)
            for record in records
            if record.world != base.world and _age(record) < _age(base)
        }
        for record in records:  # what was packed belongs where the original does
            if record.replaces is not None and limits.get(record.replaces.stream, record) is None:
                limits[record.id] = None
        return Lineage(limits)

    def is_abandoned(self, stream: str) -> bool:
        """Whether nothing of a stream belongs to the lineage."""
        return self.limits.get(stream, stream) is None

    def n_spans(self, record: CommitRecord) -> int:
        """The number of a stream's spans that belong to the lineage, counted from its first span."""
        if record.id not in self.limits:
            return record.spans
        limit = self.limits[record.id]
        return 0 if limit is None else min(limit.spans, record.spans)

    def n_rows(self, record: CommitRecord) -> int:
        """The number of a stream's rows that belong to the lineage, evicted ones included."""
        if record.id not in self.limits:
            return record.rows
        limit = self.limits[record.id]
        return 0 if limit is None else min(limit.stop, record.rows)


def continued_extents(checkpoint: Checkpoint, records: Sequence[CommitRecord]) -> dict[str, StreamExtent]:
    """What a session that resumes a checkpoint continues of each stream; for its record.

    A checkpoint does not list streams that were evicted as a whole. They are added here with no rows left, so that
    their episodes count as evicted and not as abandoned.
    """
    extents = {stream: replace(extent, record=None) for stream, extent in checkpoint.streams.items()}
    before = Lineage.newest([record for record in records if record.created_at <= checkpoint.created_at])
    for record in records:
        was_complete = record.rows and record.committed_at <= checkpoint.created_at
        if was_complete and record.id not in extents and not before.is_abandoned(record.id):
            stop, n_spans = before.n_rows(record), before.n_spans(record)
            extents[record.id] = StreamExtent(stop, stop, n_spans, record.text_bytes)
    return extents


def discarded_episodes(records: Iterable[CommitRecord], lineage: Lineage) -> dict[str, set[int]]:
    """By stream id, the episodes that any session has discarded."""
    discarded: dict[str, set[int]] = {}
    for record in records:
        for target, episodes in record.view.discarded.items():
            discarded.setdefault(target, set()).update(episodes)
        if (limit := lineage.limits.get(record.id)) is not None and limit.discarded:
            discarded.setdefault(record.shown_as, set()).update(limit.discarded)
    return discarded


def _age(record: CommitRecord) -> tuple[float, str]:
    return record.created_at, record.id
