"""Evicts the oldest steps of a store that nobody is writing, as a session with limits would."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trajstore.arguments import check_positive, parse_bytes
from trajstore.errors import DataError
from trajstore.format.commit_record import CommitRecord
from trajstore.format.ids import new_id
from trajstore.format.marks import Marks
from trajstore.format.spans import span_table
from trajstore.format.step_bytes import GrownObjects, StepBytes
from trajstore.schema import Array
from trajstore.storage import Storage
from trajstore.store.garbage_collection import GarbageCollector
from trajstore.store.living_sessions import IDLE_S, check_unwritten
from trajstore.store.snapshot import Snapshot
from trajstore.store.store import Store, Url
from trajstore.store.store import open as open_store

_OBJECT_NAME = re.compile(r"c\.(0|[1-9][0-9]{0,17})(\.0)*\Z")


@dataclass(frozen=True, slots=True)
class EvictReport:
    """What `evict` did, or would do.

    Attributes:
        url: The store, without credentials.
        n_steps: Steps that were evicted.
        n_episodes: Episodes that lost all their steps.
        n_headless: Episodes that lost their first steps only.
        n_bytes: About how many bytes of objects these steps take. What checkpoints list stays stored.
        marks: By stream id, the first row that is left.
        n_chunks_deleted: Objects that were deleted.
        n_streams_removed: Streams that were removed as a whole.
        is_dry_run: Whether nothing was changed.
    """

    url: str
    n_steps: int = 0
    n_episodes: int = 0
    n_headless: int = 0
    n_bytes: int = 0
    marks: Mapping[str, int] = field(default_factory=dict)
    n_chunks_deleted: int = 0
    n_streams_removed: int = 0
    is_dry_run: bool = False


def evict(
    url: Url,
    *,
    steps: int | None = None,
    episodes: int | None = None,
    bytes: int | str | None = None,  # noqa: A002 - the same name as in Retention
    age_s: float | None = None,
    dry_run: bool = False,
    idle_s: float = IDLE_S,
    grace_s: float = 10.0,
    storage_options: Mapping[str, Any] | None = None,
    fsync: bool = True,
) -> EvictReport:
    """Evict the oldest steps of a store until it keeps the given limits, as `Retention` has them.

    Works as a session does: it writes a stream of its own without steps, whose record says which rows are still
    wanted, waits until readers have finished with older snapshots, and deletes what no checkpoint needs. A row is
    older than those after it in its stream, and than those of other streams that were committed later. An episode
    may lose its first steps and keep the others.

    Args:
        url: URL of the store.
        steps: Keep at most this many steps.
        episodes: Keep at most this many episodes. Where several environments wrote a stream, others may lose their
            first steps.
        bytes: Keep at most this many bytes of step objects.
        age_s: Keep steps that were committed less than this many seconds ago.
        dry_run: Only say what would be evicted.
        idle_s: A stream that was not closed counts as being written if its last commit is younger.
        grace_s: Seconds between publishing what is wanted and deleting.
        storage_options: As in `open`.
        fsync: As in `open`.

    Raises:
        ConflictError: A session seems to write the store. Let it evict: ``ReplayBuffer(..., capacity=...)``.
        ValueError: No limit is given, or one is out of range.
    """
    limits = _Limits.checked(steps, episodes, bytes, age_s)
    store = open_store(url, storage_options=storage_options, fsync=fsync)
    check_unwritten(store.url, store.snapshot.stored, idle_s)
    plan = _Plan.of(store.snapshot, limits)
    marks = plan.marks()
    report = plan.report(store.url, marks, is_dry_run=dry_run)
    if dry_run or not marks:
        return report
    counts = publish_and_sweep(store, marks, grace_s)
    return EvictReport(
        report.url,
        report.n_steps,
        report.n_episodes,
        report.n_headless,
        report.n_bytes,
        marks,
        counts["n_chunks_deleted"],
        counts["n_streams_removed"],
    )


def publish_and_sweep(
    store: Store, marks: Mapping[str, int], grace_s: float, *, dead: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Raise marks as a session of its own, and delete what is below them; returns what was counted.

    Only the sessions of the newest world decide about older streams, so this one repeats what earlier ones decided.

    Args:
        store: The store.
        marks: By stream id, the first row that is still wanted; without any, nothing but a sweep is done.
        grace_s: Seconds between publishing marks and deleting.
        dead: Streams whose writers are declared dead.
    """
    storage, records = store.snapshot.storage, store.snapshot.streams
    wanted = Marks.wanted(records)
    decided = {r.id: wanted[r.id] for r in records if wanted[r.id] != r.first_row}
    writer = store.writer("evict", commit_seconds=None, world=new_id("evict"), dead=dead)
    collector = GarbageCollector.of_store(storage, writer, grace_s=grace_s)
    try:
        if marks:
            writer.set_view(first_rows={**decided, **marks})
            writer.wait(writer.publish_view())
        collector.flush()
        counts = collector.stats()
        collector.close()
        if marks:
            writer.close()
    finally:
        writer.release()
    return counts


@dataclass(frozen=True, slots=True)
class _Limits:
    steps: int | None
    episodes: int | None
    bytes: int | None
    age_s: float | None

    @staticmethod
    def checked(steps: int | None, episodes: int | None, n_bytes: int | str | None, age_s: float | None) -> _Limits:
        for name, limit in (("steps", steps), ("episodes", episodes)):
            if limit is not None:
                check_positive(name, limit)
        if age_s is not None and not 0 < age_s < math.inf:
            raise ValueError(f"age_s: expected a positive number of seconds, got {age_s!r}")
        size = None if n_bytes is None else parse_bytes(n_bytes, "bytes")
        if all(limit is None for limit in (steps, episodes, size, age_s)):
            raise ValueError("expected a limit: steps, episodes, bytes or age_s")
        return _Limits(steps, episodes, size, age_s)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The spans that a store shows, oldest first, and how many of their rows are evicted.

    Attributes:
        streams: Ids of streams by position.
        columns: Spans by column, sorted; `n_steps` and `n_bytes` are what they hold.
        n_gone: By span, the rows that are evicted.
    """

    streams: list[str]
    columns: Mapping[str, Array]
    n_gone: Array

    @staticmethod
    def of(snapshot: Snapshot, limits: _Limits) -> _Plan:
        for record in snapshot.streams:
            if record.replaces is not None:
                raise DataError(f"stream '{record.id}' holds a part of another one; only a session can evict it")
        columns = _sorted_spans(snapshot)
        return _Plan(snapshot.names, columns, _evicted_rows(columns, limits))

    def marks(self) -> dict[str, int]:
        """By stream id, the first row that is left, of streams that lose rows."""
        c, found = self.columns, {}
        gone = self.n_gone > 0
        for source in np.unique(c["source"][gone]):
            mine = gone & (c["source"] == source)
            found[self.streams[source]] = int((c["row_start"] + self.n_gone)[mine].max())
        return found

    def report(self, url: str, marks: Mapping[str, int], *, is_dry_run: bool) -> EvictReport:
        c, n_gone = self.columns, self.n_gone
        n_rows = c["row_stop"] - c["row_start"]
        share = np.divide(n_gone, n_rows, out=np.zeros(len(n_rows)), where=n_rows > 0)
        _, episode = np.unique(np.stack([c["stream"], c["episode"]]), axis=1, return_inverse=True)
        lost, had = np.bincount(episode.ravel(), n_gone), np.bincount(episode.ravel(), n_rows)
        return EvictReport(
            url,
            int(np.minimum(n_gone, c["n_steps"]).sum()),
            int(((lost == had) & (had > 0)).sum()),
            int(((lost > 0) & (lost < had)).sum()),
            int((share * c["n_bytes"]).sum()),
            marks,
            is_dry_run=is_dry_run,
        )


def _sorted_spans(snapshot: Snapshot) -> dict[str, Array]:
    """The shown spans with rows, oldest first; those of one stream in order of their rows."""
    columns = span_table(snapshot.parts(), snapshot.schema)
    kept = np.flatnonzero(columns["row_stop"] > columns["row_start"])
    columns = {name: column[kept] for name, column in columns.items()}
    columns["n_steps"] = columns["row_stop"] - columns["row_start"] - columns["has_final"]
    columns["n_bytes"] = np.zeros(len(kept))
    times = columns["time"].copy()
    for i, record in enumerate(snapshot.streams):
        mine = np.flatnonzero(columns["source"] == i)
        mine = mine[np.argsort(columns["row_start"][mine], kind="stable")]
        times[mine] = np.maximum.accumulate(times[mine])  # a clock that was set back must not change the order
        if len(mine):
            curve = _bytes_of(snapshot.storage, record)
            columns["n_bytes"][mine] = curve.at(columns["row_stop"][mine]) - curve.at(columns["row_start"][mine])
    order = np.lexsort((columns["row_start"], columns["source"], times))
    return {name: column[order] for name, column in (columns | {"time": times}).items()}


def _bytes_of(storage: Storage, record: CommitRecord) -> StepBytes:
    """The bytes of a stream's step objects as a curve over its rows."""
    sizes = storage.tree_sizes(f"{record.folder}/steps")
    curve, grown = StepBytes(), []
    for path, layout in record.layouts.items():
        if path.startswith("steps/"):
            prefix = f"{record.folder}/{path}/"
            names = {key.removeprefix(prefix): n for key, n in sizes.items() if key.startswith(prefix)}
            numbers = {int(m[1]): n for name, n in names.items() if (m := _OBJECT_NAME.match(name))}
            grown.append(GrownObjects.whole(layout, numbers, 0, record.rows))
    curve.add(grown)
    return curve


def _evicted_rows(c: Mapping[str, Array], limits: _Limits) -> Array:
    """By span, how many of its first rows are evicted so that all limits hold."""
    n_rows = c["row_stop"] - c["row_start"]
    gone = np.zeros(len(n_rows), np.int64)
    if limits.steps is not None:
        gone = np.maximum(gone, _oldest(c["n_steps"], c["n_steps"].sum() - limits.steps, c))
    if limits.bytes is not None:
        gone = np.maximum(gone, _oldest(c["n_bytes"], c["n_bytes"].sum() - limits.bytes, c))
    if limits.age_s is not None:
        gone = np.maximum(gone, np.where(c["time"] < time.time() - limits.age_s, n_rows, 0))
    if limits.episodes is not None:
        gone = np.maximum(gone, _oldest_episodes(c, limits.episodes))
    return gone


def _oldest(amount: Array, need: float, c: Mapping[str, Array]) -> Array:
    """Rows of the oldest spans that together have at least ``need`` of an amount."""
    n_rows, n_steps = c["row_stop"] - c["row_start"], c["n_steps"]
    if need <= 0:
        return np.zeros(len(n_rows), np.int64)
    before = np.cumsum(amount) - amount
    part = np.divide(need - before, amount, out=np.ones(len(amount)), where=amount > 0)
    part = np.where(before < need, np.clip(part, 0, 1), 0)
    rows = np.ceil(np.round(part * n_steps, 6)).astype(np.int64)
    found: Array = np.where((part > 0) & (rows >= n_steps), n_rows, rows)  # a final row goes with the last step
    return found


def _oldest_episodes(c: Mapping[str, Array], limit: int) -> Array:
    """Rows of all spans up to the last one of the oldest episodes above a limit."""
    n_rows = c["row_stop"] - c["row_start"]
    _, episode = np.unique(np.stack([c["stream"], c["episode"]]), axis=1, return_inverse=True)
    last = np.zeros(int(episode.max(initial=-1)) + 1, np.int64)
    np.maximum.at(last, episode.ravel(), np.arange(len(n_rows)))
    n_above = len(last) - limit
    if n_above <= 0:
        return np.zeros(len(n_rows), np.int64)
    stop = np.sort(last)[n_above - 1]
    found: Array = np.where(np.arange(len(n_rows)) <= stop, n_rows, 0)
    return found
