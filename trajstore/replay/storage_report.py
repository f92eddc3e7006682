"""What holds how many bytes of a store, and why: for a session that asks where its storage went."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trajstore.format.checkpoint_record import Checkpoint
from trajstore.format.commit_record import CommitRecord
from trajstore.format.marks import Marks
from trajstore.replay.limit_evictor import unshown_rows
from trajstore.sampling.batches.batch_assembler import BatchAssembler
from trajstore.storage import Storage
from trajstore.store import checkpoints
from trajstore.store.snapshot import Snapshot

_STEP_OBJECT = re.compile(r"streams/([^/]+)/(steps/.+)/c\.(0|[1-9][0-9]{0,17})(?:\.0)*\Z")


@dataclass(frozen=True, slots=True)
class StorageReport:
    """Bytes of all objects of a store, by the reason why they are kept. Each object counts once.

    Attributes:
        steps: Chunks with steps that the buffer can sample; also those that hold evicted steps beside them.
        evicted: Chunks whose steps are all evicted. They are deleted after the grace time, when no session of this
            world wants them.
        checkpoints: By checkpoint id: chunks that are kept only for checkpoints, which keep all rows of a stream
            from their first one on. Each counts for the newest checkpoint that keeps it, so pruning a checkpoint
            and all before it frees the sum up to there.
        abandoned: By stream id: chunks that only sessions outside this lineage have shown. They are kept until
            their stream is evicted as a whole.
        other_ranks: Chunks of streams that only other ranks show.
        uncommitted: Chunks past the last commit, of a commit that is under way or that a crash interrupted.
        episode_table: Spans and texts.
        columns: Derived columns, priorities among them.
        checkpoint_state: Records and states of checkpoints.
        metadata: Everything else.
    """

    steps: int = 0
    evicted: int = 0
    checkpoints: Mapping[str, int] = field(default_factory=dict)
    abandoned: Mapping[str, int] = field(default_factory=dict)
    other_ranks: int = 0
    uncommitted: int = 0
    episode_table: int = 0
    columns: int = 0
    checkpoint_state: int = 0
    metadata: int = 0

    @property
    def total(self) -> int:
        kept = sum(self.checkpoints.values()) + sum(self.abandoned.values())
        tables = self.episode_table + self.columns + self.checkpoint_state + self.metadata
        return self.steps + self.evicted + kept + self.other_ranks + self.uncommitted + tables

    def __str__(self) -> str:
        lines = [(self.steps, "steps that can be sampled"), (self.evicted, "evicted steps, to be deleted")]
        lines += [(n, f"steps kept only for checkpoint '{id_}'") for id_, n in self.checkpoints.items()]
        lines += [(n, f"abandoned steps of stream '{id_}'") for id_, n in self.abandoned.items()]
        lines += [(self.other_ranks, "steps of other ranks"), (self.uncommitted, "steps that are not committed")]
        lines += [(self.episode_table, "episode table"), (self.columns, "derived columns and priorities")]
        lines += [(self.checkpoint_state, "state of checkpoints"), (self.metadata, "metadata")]
        shown = [f"{n:>15,} bytes  {what}" for n, what in lines if n]
        return "\n".join([*shown, f"{self.total:>15,} bytes  in total"])


def make_report(storage: Storage, assembler: BatchAssembler, world: str) -> StorageReport:
    """List all objects of a store and say why each of them is kept. Called without the assembler's lock."""
    sizes = {key: n for part in storage.list_names("") for key, n in storage.tree_sizes(part).items()}
    sizes["zarr.json"] = storage.size("zarr.json")
    records = Snapshot.load(storage, None).streams
    with assembler.lock:
        assembler.publish()
        first, shown = unshown_rows(assembler), {record.id: record.rows for record in assembler.snapshot.streams}
    reasons = _Reasons(records, first, shown, checkpoints.list_checkpoints(storage), world)
    totals: Counter[str] = Counter()
    held: Counter[str] = Counter()
    abandoned: Counter[str] = Counter()
    for key, n in sizes.items():
        reason, name = reasons.of(key)
        counter = {"checkpoints": held, "abandoned": abandoned}.get(reason, totals)
        counter[name if name is not None else reason] += n
    ordered = {c.id: held[c.id] for c in reasons.checkpoints if held[c.id]}
    return StorageReport(checkpoints=ordered, abandoned=dict(abandoned), **totals)


class _Reasons:
    """Why an object is kept.

    Args:
        records: The newest record of every stream.
        first: By stream: the first row that the buffer shows.
        shown: By stream: number of its rows that belong to the buffer's view.
        existing: All checkpoints, parents before children.
        world: The world of the session.
    """

    def __init__(
        self,
        records: Sequence[CommitRecord],
        first: Mapping[str, int],
        shown: Mapping[str, int],
        existing: Sequence[Checkpoint],
        world: str,
    ) -> None:
        self.checkpoints = existing
        self._records = {record.as_stored().id: record for record in records}
        self._wanted = Marks.wanted(records)
        self._first = first
        self._shown = shown
        self._world = world

    def of(self, key: str) -> tuple[str, str | None]:
        """The reason, and the checkpoint or stream that it concerns."""
        if (match := _STEP_OBJECT.match(key)) and match[1] in self._records:
            record = self._records[match[1]]
            if (layout := record.layouts.get(match[2])) is not None:
                n = layout.shard_rows or layout.chunk_rows
                return self._of_rows(record, int(match[3]) * n, int(match[3]) * n + n)
        parts = key.split("/")
        if parts[0] == "streams" and len(parts) > 2 and parts[1] not in self._records:
            return "evicted", None  # of a stream that was packed, or of a copy that is being made
        if parts[0] == "checkpoints":
            return "checkpoint_state", None
        if parts[0] == "streams" and len(parts) > 3 and parts[-1] != "zarr.json":
            return {"spans": "episode_table", "columns": "columns"}.get(parts[2], "metadata"), None
        return "metadata", None

    def _of_rows(self, record: CommitRecord, start: int, stop: int) -> tuple[str, str | None]:
        is_in_view = start < self._shown.get(record.id, 0)
        if start >= record.rows:
            return "uncommitted", None
        if is_in_view and stop > self._first.get(record.id, 0):
            return "steps", None
        is_evicted = is_in_view or stop <= self._wanted[record.id]
        for checkpoint in reversed(self.checkpoints):
            extent = checkpoint.streams.get(record.id)
            # Chunks are deleted from the front, so an evicted chunk behind the first pinned one stays as well.
            if extent is not None and extent.first < stop and (is_evicted or start < extent.stop):
                return "checkpoints", checkpoint.id
        if is_evicted:
            return "evicted", None
        return ("other_ranks", None) if record.world == self._world else ("abandoned", record.id)
