"""Frees storage behind the rows that are still wanted, in the background."""

from __future__ import annotations

import logging
import operator
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from trajstore.errors import ClosedError, SnapshotExpiredError
from trajstore.format.argument_checks import check_stream_ids
from trajstore.format.array_layout import ArrayLayout
from trajstore.format.commit_record import CommitRecord
from trajstore.format.first_live_rows import first_live_rows, newest_world
from trajstore.storage import Storage
from trajstore.writing.stream_appender import remove_stream
from trajstore.writing.writer import Writer

_log = logging.getLogger(__name__)


_WAVE_KEYS = 512  # objects deleted at a time


_RETRY_S = 1.0  # at least so long after a failure


_CHUNK_NAME = re.compile(r"c\.(0|[1-9][0-9]{0,17})(\.0)*\Z")


class GarbageCollector:
    """Deletes chunks that no session of the newest world and no checkpoint wants any more.

    Marks are published first, in the writer's record. After a grace time, in which readers may finish what they
    began with an older snapshot, the records are read again, then the checkpoints; what lies wholly below both
    is deleted. So whoever puts a checkpoint and then finds by `check_pins` that no mark has passed it keeps its
    rows. A crash at any point leaves chunks that nobody is shown, which the next session's sweeper deletes.

    Everything but `want` may wait for the storage. Failures in the background are logged, raised once by
    `raise_pending` or `close`, and made good by the next sweep, which follows by itself. Thread-safe; belongs to
    the process of its writer.

    Args:
        storage: Where the store is.
        writer: The session's writer, through which marks are published; close it after the sweeper.
        grace_s: How long a mark is published before anything below it is deleted.
        pins: By stream, the smallest row that any checkpoint wants; every stream that one lists is named.
        records: The newest commit record of every stream, read from the storage when called.
    """

    def __init__(
        self,
        storage: Storage,
        writer: Writer,
        *,
        grace_s: float = 10.0,
        pins: Callable[[], Mapping[str, int]],
        records: Callable[[], Sequence[CommitRecord]],
    ) -> None:
        self._storage = storage
        self._writer = writer
        self._grace_s = grace_s
        self._pins = pins
        self._records = records
        self._condition = threading.Condition()
        self._wanted: dict[str, int] = {}  # guarded by the condition
        self._published: dict[str, int] = {}  # the same
        self._is_due = False  # the same
        self._failure: BaseException | None = None  # not yet raised to anybody
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._publishing = threading.Lock()
        self._sweeping = threading.Lock()  # one sweep at a time; guards what follows
        self._freed: dict[tuple[str, str], int] = {}  # by stream and array: objects that are deleted, from 0 on
        self._removing: set[str] = set()  # streams whose record may be gone and whose chunks are there still
        self._counts = dict.fromkeys(("n_chunks_deleted", "n_streams_removed", "n_sweeps"), 0)

    def want(self, marks: Mapping[str, int]) -> None:
        """This session no longer wants rows below these, by stream; what was given up stays so.

        Cheap: what follows from it happens in the background.
        """
        with self._condition:
            if self._closing.is_set():
                raise ClosedError("the sweeper is closed")
            for stream, row in marks.items():
                if stream not in self._wanted:
                    check_stream_ids((stream,), "marks")
                self._wanted[stream] = max(operator.index(row), self._wanted.get(stream, 0))
                self._is_due = self._is_due or self._wanted[stream] > self._published.get(stream, 0)
            if self._is_due:
                self._start()
                self._condition.notify_all()

    def publish(self) -> None:
        """Publish the marks; returns when no reader is shown what is below. Deleting it comes later."""
        with self._publishing:
            self._publish()

    def flush(self) -> None:
        """Publish the marks and delete what nobody wants now; returns when it is gone, after the grace time."""
        with self._sweeping:
            self._sweep()

    def check_pins(self, wanted: Mapping[str, int]) -> None:
        """See `check_pins`, by the records as they are now."""
        check_pins(wanted, self._records())

    def raise_pending(self) -> None:
        """Raise a failure of the background that nobody has seen yet; each is raised once."""
        with self._condition:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """End the background thread, in the middle of the grace time if need be; raises what is left to raise.

        What is not deleted yet is left to a later session. May be called again.
        """
        with self._condition:
            self._closing.set()
            self._condition.notify_all()
        if self._thread is not None:
            self._thread.join()
        self.raise_pending()

    def stats(self) -> dict[str, Any]:
        """Counters of what was deleted (by others as well, perhaps), and the marks by stream."""
        with self._condition:
            return {**self._counts, "marks": dict(self._wanted)}

    def __repr__(self) -> str:
        return f"<Sweeper of {self._storage.display} for stream {self._writer.stream}>"

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="trajstore-sweep", daemon=True)
            self._thread.start()

    def _loop(self) -> None:
        while self._next_is_due():
            try:
                with self._sweeping:
                    self._sweep()
            except ClosedError as failure:  # of this, or of the writer: no other try would help
                if not self._closing.is_set():
                    self._fail(failure)
                return
            except BaseException as failure:  # whatever it is, somebody must hear of it
                self._fail(failure)
                self._closing.wait(max(self._grace_s, _RETRY_S))

    def _next_is_due(self) -> bool:
        with self._condition:
            self._condition.wait_for(lambda: self._is_due or self._closing.is_set())
            return not self._closing.is_set()

    def _fail(self, failure: BaseException) -> None:
        _log.warning("a sweep failed in the background and will be tried again: %s", failure)
        with self._condition:
            self._failure, self._is_due = failure, True

    def _sweep(self) -> None:
        with self._condition:
            self._is_due = False
        self.publish()
        # Marks that others have published since have not had their grace time, so they wait for another sweep.
        aged = first_live_rows(self._records()) if self._grace_s > 0 else None
        if self._closing.wait(self._grace_s) if self._grace_s > 0 else self._closing.is_set():
            raise ClosedError("the sweeper was closed before it could delete anything")
        records = sorted(self._records(), key=lambda record: (record.created_at, record.id))
        marks = first_live_rows(records)
        if aged is not None:
            marks = {stream: min(row, aged.get(stream, 0)) for stream, row in marks.items()}
        # Checkpoints last: one that is put after this reads the marks again, and finds those that count here.
        self._delete(records, marks, self._pins())
        with self._condition:
            self._counts["n_sweeps"] += 1
            self._failure = None  # overcome before anybody asked; the log has it

    def _publish(self) -> None:
        own = self._writer.stream
        with self._condition:
            wanted = dict(self._wanted)
        if not wanted:
            return
        wanted[own] = min(wanted.get(own, 0), self._writer.committed_rows)
        said = self._writer.first_rows
        news = {stream: row for stream, row in wanted.items() if row > said.get(stream, 0)}
        self._writer.set_view(first_row=news.pop(own, None), first_rows=news)
        self._writer.wait(self._writer.publish_view())
        with self._condition:
            self._published = wanted

    def _delete(self, records: Sequence[CommitRecord], marks: Mapping[str, int], pins: Mapping[str, int]) -> None:
        """Delete what lies below the marks and below the pins."""
        for stream in sorted(self._removing):
            self._remove(stream)
        dead = {stream for record in records for stream in record.view.dead}
        left = list(records)
        for record in records:
            is_finished = record.is_sealed or record.id in dead
            is_gone = 0 < record.rows <= marks[record.id] and record.id not in pins
            if is_finished and is_gone and record.id != self._writer.stream and not _is_needed(record, left):
                self._remove(record.id)
                left.remove(record)
            else:
                limit = min(marks[record.id], record.rows)
                self._free(record, min(limit, pins.get(record.id, limit)))

    def _remove(self, stream: str) -> None:
        self._removing.add(stream)
        remove_stream(self._storage, stream)
        self._removing.remove(stream)
        self._freed = {place: n for place, n in self._freed.items() if place[0] != stream}
        self._count("n_streams_removed", 1)

    def _free(self, record: CommitRecord, limit: int) -> None:
        """Delete the step objects of a stream of which every row is below ``limit``."""
        for path, layout in record.layouts.items():
            if path.startswith("steps/"):
                self._free_column(record.id, path, layout, limit // (layout.shard_rows or layout.chunk_rows))

    def _free_column(self, stream: str, path: str, layout: ArrayLayout, stop: int) -> None:
        start = self._freed.get((stream, path), 0 if stream == self._writer.stream else None)
        if stop <= (start or 0):
            return
        folder = f"streams/{stream}/{path}"
        if start is None:  # what earlier sessions have left there, of perhaps millions that they have deleted
            names: Iterable[str] = _chunk_names(self._storage.list_names(folder), stop)
        else:
            names = (layout.chunk_key(i * layout.chunks_per_shard) for i in range(start, stop))
        keys = [f"{folder}/{name}" for name in names]
        for wave in range(0, len(keys), _WAVE_KEYS):
            self._storage.delete(keys[wave : wave + _WAVE_KEYS])
            self._count("n_chunks_deleted", len(keys[wave : wave + _WAVE_KEYS]))
        self._freed[stream, path] = stop

    def _count(self, name: str, n: int) -> None:
        with self._condition:
            self._counts[name] += n


def check_pins(wanted: Mapping[str, int], records: Sequence[CommitRecord]) -> None:
    """See that nothing a checkpoint wants is given up: called when it is put, with records read after.

    Args:
        wanted: By stream, the first row that the checkpoint wants; no streams of which it wants none.
        records: The newest commit record of every stream.

    Raises:
        SnapshotExpiredError: A mark has passed one of these rows, or the stream is gone. What is below the mark may
            be deleted at any time, so the checkpoint must be withdrawn.
    """
    marks = first_live_rows(records)
    for stream, row in wanted.items():
        if stream not in marks:
            raise SnapshotExpiredError(f"stream '{stream}' was removed; take the checkpoint again")
        if marks[stream] > row:
            raise SnapshotExpiredError(
                f"stream '{stream}': the checkpoint wants rows from {row} on, those below {marks[stream]} are"
                " evicted; take it again"
            )


def _is_needed(record: CommitRecord, records: Sequence[CommitRecord]) -> bool:
    """Whether readers of other streams go by what this record says."""
    world = newest_world(records)
    named = {*record.columns, *record.view.discarded, *record.view.dead}
    if record.replaces is not None:
        named.add(record.replaces.stream)
    if world is None or record.world == world:
        named.update(record.view.first_rows)
    others = [other for other in records if other.id != record.id]
    return bool(named.intersection(other.id for other in others)) or newest_world(others) != world


def _chunk_names(names: Iterable[str], stop: int) -> list[str]:
    """The names that are those of chunk objects before object ``stop``."""
    found = ((name, _CHUNK_NAME.match(name)) for name in names)
    return [name for name, match in found if match is not None and int(match[1]) < stop]
