"""Checks of how data are stored: streams, commits, spans, chunks, checkpoints."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from trajstore.format.array_layout import ArrayLayout
from trajstore.format.checkpoint_record import Checkpoint
from trajstore.format.commit_record import CommitRecord
from trajstore.format.marks import Marks
from trajstore.format.packed_streams import replaced_copies
from trajstore.inspection.doctor.finding import Finding, Severity, share
from trajstore.schema import Schema
from trajstore.store.snapshot import Snapshot

_IDLE_S = 600.0  # after which an open stream may be one of a dead writer
_IDLE_COMMITS = 20  # or this many usual times between two commits, if that is longer
_MANY_STREAMS = 200
_FEW_ROWS = 1000  # of a stream
_MANY_COMMITS = 50
_TINY_COMMIT_BYTES = 16 << 10
_MANY_SPANS = 4  # an episode
_SHORT_SPAN = 32  # rows
_UNBALANCED = 3.0  # times the rows of another rank
_LARGE_CHUNK_BYTES = 8 << 20
_SMALL_CHUNK_BYTES = 4 << 10
_MANY_OBJECTS = 10_000


@dataclass(frozen=True, slots=True)
class Stored:
    """What the checks look at.

    Attributes:
        snapshot: The store.
        checkpoints: Its checkpoints.
        now: UNIX seconds.
    """

    snapshot: Snapshot
    checkpoints: Sequence[Checkpoint]
    now: float

    @property
    def records(self) -> tuple[CommitRecord, ...]:
        return self.snapshot.streams


def check_storage(stored: Stored) -> Iterator[Finding]:
    """Run all checks of streams."""
    for check in _CHECKS:
        yield from check(stored)


def _dead_writers(stored: Stored) -> Iterator[Finding]:
    dead = {stream for record in stored.records for stream in record.view.dead}
    for record in stored.records:
        if record.is_sealed or record.id in dead or stored.snapshot.lineage.is_abandoned(record.id):
            continue
        usual = (record.committed_at - record.created_at) / max(1, record.commit)
        idle = stored.now - record.committed_at
        if idle > max(_IDLE_S, _IDLE_COMMITS * usual):
            yield Finding(
                "open-stream", Severity.WARNING, f"stream '{record.id}'",
                f"is open, but had no commit for {_duration(idle)}",
                "if its writer is dead, its open episodes are shown as open for ever, and pack leaves it alone",
                "open a writer with dead=[id], or resume the run, which declares its predecessors dead",
            )  # fmt: skip


def _unbalanced(stored: Stored) -> Iterator[Finding]:
    worlds: dict[str | None, list[CommitRecord]] = defaultdict(list)
    for record in stored.records:
        if record.rank is not None and (record.world_size or 0) > 1:
            worlds[record.world].append(record)
    for world, records in worlds.items():
        by_rank: dict[int, int] = defaultdict(int)
        for record in records:
            by_rank[record.rank or 0] += record.rows
        fewest, most = min(by_rank.values()), max(by_rank.values())
        if len(by_rank) > 1 and most >= _FEW_ROWS and most > _UNBALANCED * fewest:
            rank = min(by_rank, key=lambda r: by_rank[r])
            yield Finding(
                "unbalanced-ranks", Severity.WARNING, f"world '{world}'",
                f"rank {rank} wrote {fewest:,} rows, another rank {most:,}",
                "ranks that sample their own steps see few of them often",
                "check whether that rank is slow or had died; redistribute shows a fairer division",
            )  # fmt: skip


def _many_streams(stored: Stored) -> Iterator[Finding]:
    small = [record for record in stored.records if record.rows < _FEW_ROWS]
    if len(small) > _MANY_STREAMS:
        yield Finding(
            "many-streams", Severity.WARNING, "streams",
            f"{share(len(small), len(stored.records))} streams have less than {_FEW_ROWS:,} rows",
            "every reader opens the record of each stream, and small streams make small objects",
            "write with one writer for longer; merge the episodes into a new store by one writer",
        )  # fmt: skip


def _tiny_commits(stored: Stored) -> Iterator[Finding]:
    row_bytes = _row_bytes(stored.snapshot.schema)
    for record in stored.records:
        if record.commit < _MANY_COMMITS or record.location:
            continue
        rows = record.rows / record.commit
        if rows * row_bytes < _TINY_COMMIT_BYTES:
            yield Finding(
                "tiny-commits", Severity.WARNING, f"stream '{record.id}'",
                f"{record.commit:,} commits of {rows:.0f} rows, {rows * row_bytes / 1024:.1f} KiB each",
                "a commit writes about ten objects, whatever it holds, and splits episodes into spans",
                "commit less often: commit_seconds or commit_steps, and no flush() after every step",
            )  # fmt: skip


def _many_spans(stored: Stored) -> Iterator[Finding]:
    table = stored.snapshot.episodes
    if not len(table):
        return
    rows = int((table.row_ranges.stop - table.row_ranges.start).sum())
    spans, length = table.n_spans / len(table), rows / max(1, table.n_spans)
    if spans > _MANY_SPANS and length < _SHORT_SPAN:
        yield Finding(
            "many-spans", Severity.WARNING, "episodes",
            f"an episode lies in {spans:.1f} spans of {length:.0f} rows, on average",
            "a window touches many places, so more chunks are read for it",
            "commit less often, or only when episodes end",
        )  # fmt: skip


def _chunks(stored: Stored) -> Iterator[Finding]:
    for path, layouts in _layouts(stored).items():
        largest = max(layouts, key=lambda item: item[0].chunk_bytes)[0]
        if largest.chunk_bytes > _LARGE_CHUNK_BYTES and largest.chunk_rows > 1:
            yield Finding(
                "large-chunks", Severity.WARNING, f"field '{path}'",
                f"a chunk has {largest.chunk_rows:,} rows, {largest.chunk_bytes / 2**20:.0f} MiB decoded",
                "a random row that is not in the cache costs a whole chunk",
                "smaller chunk_rows in the schema, or trajstore pack --chunk-bytes 256KiB",
            )  # fmt: skip
        small = [(layout, n) for layout, n in layouts if layout.chunk_bytes < _SMALL_CHUNK_BYTES]
        n_chunks = sum(n // layout.chunk_rows for layout, n in small)
        if n_chunks > _MANY_OBJECTS / 10:
            layout = small[0][0]
            yield Finding(
                "small-chunks", Severity.WARNING, f"field '{path}'",
                f"{n_chunks:,} chunks of {layout.chunk_rows:,} rows, {layout.chunk_bytes:,} bytes decoded",
                "each is read and checked on its own", "larger chunk_rows, or trajstore pack --chunk-bytes 128KiB",
            )  # fmt: skip


def _many_objects(stored: Stored) -> Iterator[Finding]:
    n = sum(n_rows // layout.object_rows for layouts in _layouts(stored).values() for layout, n_rows in layouts)
    if n > _MANY_OBJECTS:
        yield Finding(
            "many-objects", Severity.WARNING, "streams", f"steps lie in about {n:,} objects",
            "listings, copies and garbage collection take long, and an object store charges for each",
            "trajstore pack --wait rewrites finished streams as few large objects",
        )  # fmt: skip


def _unremoved(stored: Stored) -> Iterator[Finding]:
    if n := len(replaced_copies(stored.snapshot.stored)):
        yield Finding(
            "packed-originals", Severity.NOTE, "streams", f"{n:,} originals of packed streams are not removed yet",
            "they take their space twice", "trajstore pack --wait removes them; a running buffer does so too",
        )  # fmt: skip
    snapshot = stored.snapshot
    abandoned = sum(r.rows - snapshot.lineage.n_rows(r) for r in stored.records)
    if abandoned:
        yield Finding(
            "abandoned-rows", Severity.NOTE, "streams",
            f"{share(abandoned, snapshot.n_rows)} rows are abandoned: written after a checkpoint that was resumed",
            "they take space, but are not sampled", "ls --evicted lists them; they go with their stream's eviction",
        )  # fmt: skip


def _pinned(stored: Stored) -> Iterator[Finding]:
    wanted = Marks.wanted(stored.records)
    rows = {record.id: record.rows for record in stored.records}
    first = {
        stream: min(c.streams[stream].first for c in stored.checkpoints if stream in c.streams) for stream in rows
        if any(stream in c.streams for c in stored.checkpoints)
    }  # fmt: skip
    n = sum(max(0, min(wanted[stream], rows[stream]) - row) for stream, row in first.items() if stream in wanted)
    total = sum(rows.values())
    if n > total / 4 and n > _FEW_ROWS:
        yield Finding(
            "pinned-rows", Severity.NOTE, "checkpoints",
            f"checkpoints keep {share(n, total)} rows that are evicted",
            "they take space until the checkpoints are removed",
            "keep fewer checkpoints (keep_checkpoints), or prune",
        )  # fmt: skip


def _layouts(stored: Stored) -> dict[str, list[tuple[ArrayLayout, int]]]:
    """By field: the layout of its column in each stream, and the stream's rows."""
    found: dict[str, list[tuple[ArrayLayout, int]]] = defaultdict(list)
    for record in stored.records:
        for path in record.schema.fields:
            found[path].append((record.layouts[f"steps/{path}"], record.rows))
    return found


def _row_bytes(schema: Schema | None) -> int:
    return sum(spec.row_bytes for spec in schema.fields.values()) if schema is not None else 0


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 60:.0f} minutes"


_CHECKS: tuple[Callable[[Stored], Iterator[Finding]], ...] = (
    _dead_writers, _unbalanced, _many_streams, _tiny_commits, _many_spans, _chunks, _many_objects, _unremoved,
    _pinned,
)  # fmt: skip
