"""Deletes evicted chunks and streams from the storage, in the background."""

from __future__ import annotations

import logging
import operator
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from trajstore.errors import ClosedError, SnapshotExpiredError
from trajstore.format.argument_checks import check_stream_ids
from trajstore.format.array_layout import ArrayLayout
from trajstore.format.commit_record import CommitRecord
from trajstore.format.lineage import Lineage
from trajstore.format.marks import Marks, newest_world
from trajstore.format.packed_streams import (
    PENDING_S,
    replaced_copies,
    shown_records,
    unfinished,
    unfinished_copies,
)
from trajstore.storage import Storage
from trajstore.store import checkpoints
from trajstore.store.snapshot import Snapshot
from trajstore.writing.stream_appender import remove_stream
from trajstore.writing.writer import Writer

_log = logging.getLogger(__name__)

_WAVE_KEYS = 512  # objects deleted at a time
_RETRY_S = 1.0  # shortest wait after a failed sweep
_CHUNK_NAME = re.compile(r"c\.(0|[1-9][0-9]{0,17})(\.0)*\Z")


class GarbageCollector:
    """Deletes chunks that neither a session of the newest world nor a checkpoint needs.

    A *sweep* first publishes the session's marks in the writer's record. After a grace time, in which readers may
    finish with an older snapshot, it reads the records again, then the checkpoints, and deletes the chunks whose
    rows all lie below the wanted rows and below the pinned rows. So a checkpoint that is put, and for which
    `check_pins` then finds that no mark has passed it, keeps its rows. A crash at any point leaves chunks that
    readers ignore; the garbage collector of a later session deletes them. Streams that packed ones have replaced
    for the grace time are removed as well: the packed ones have all rows that any session or checkpoint needs.

    All methods but `want` may wait for the storage. A failure in the background is logged, raised once by
    `raise_pending` or `close`, and repaired by the next sweep, which follows without being requested. Thread-safe;
    to be used only in the process of its writer.

    Args:
        storage: Storage of the store.
        writer: The session's writer, which publishes the marks. Close it after the garbage collector.
        grace_s: Seconds between publishing a mark and deleting the chunks below it.
        pins: Returns, by stream id, the smallest row that any checkpoint needs, for every stream that one lists.
        records: Returns the newest commit record of every stored stream, read from the storage at each call.
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
        self._wanted = Marks()  # to be published; guarded by the condition, as the next three are
        self._published = Marks()
        self._is_due = False
        self._failure: BaseException | None = None  # not raised yet
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._publishing = threading.Lock()
        self._sweeping = threading.Lock()  # one sweep at a time; guards the next two
        self._freed: dict[tuple[str, str], int] = {}  # by stream and array: number of leading objects deleted
        self._removing: set[str] = set()  # streams whose record may be deleted and whose chunks are not
        self._counts = dict.fromkeys(("n_chunks_deleted", "n_streams_removed", "n_sweeps"), 0)

    @classmethod
    def of_store(cls, storage: Storage, writer: Writer, *, grace_s: float) -> GarbageCollector:
        """A garbage collector that reads the checkpoints and records of the writer's store."""
        return cls(
            storage,
            writer,
            grace_s=grace_s,
            pins=lambda: checkpoints.pins(storage),
            records=lambda: Snapshot.load(storage, writer.schema).stored,
        )

    def want(self, marks: Mapping[str, int]) -> None:
        """Raise the session's marks: by stream id, the first row that it still wants. Marks never go back.

        Returns at once; marks are published and chunks deleted in the background.
        """
        with self._condition:
            if self._closing.is_set():
                raise ClosedError("the garbage collector is closed")
            check_stream_ids([stream for stream in marks if stream not in self._wanted], "marks")
            self._wanted = self._wanted.raised({s: max(0, operator.index(row)) for s, row in marks.items()})
            if any(self._wanted[stream] > self._published.get(stream, 0) for stream in marks):
                self._is_due = True
            if self._is_due:
                self._start()
                self._condition.notify_all()

    def request_sweep(self) -> None:
        """Begin a sweep in the background, as after a checkpoint was removed; returns at once."""
        with self._condition:
            if not self._closing.is_set():
                self._is_due = True
                self._start()
                self._condition.notify_all()

    def publish(self) -> None:
        """Publish the marks. When this returns, new snapshots hide the rows below; they are deleted later."""
        with self._publishing:
            self._publish()

    def flush(self) -> None:
        """Run one sweep now: publish the marks, wait for the grace time, and delete unneeded chunks."""
        with self._sweeping:
            self._sweep()

    def check_pins(self, wanted: Mapping[str, int]) -> None:
        """Check a checkpoint against the newest records; see the function `check_pins`."""
        check_pins(wanted, self._records())

    def raise_pending(self) -> None:
        """Raise the last failure of the background thread, unless it was raised before."""
        if self._failure is None:  # the common case, without taking the lock
            return
        with self._condition:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Stop the background thread, without waiting for the grace time; raises a failure not raised before.

        Chunks that are not deleted yet are left to a later session. May be called again.
        """
        with self._condition:
            self._closing.set()
            self._condition.notify_all()
        if self._thread is not None:
            self._thread.join()
        self.raise_pending()

    def stats(self) -> dict[str, Any]:
        """Numbers of deleted chunks and streams (some may have been deleted by others), and the marks by stream."""
        with self._condition:
            return {**self._counts, "marks": dict(self._wanted)}

    def __repr__(self) -> str:
        return f"<GarbageCollector of {self._storage.display} for stream {self._writer.stream}>"

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="trajstore-sweep", daemon=True)
            self._thread.start()

    def _loop(self) -> None:
        while self._next_is_due():
            try:
                with self._sweeping:
                    self._sweep()
            except ClosedError as failure:  # this or the writer is closed: another attempt would not help
                if not self._closing.is_set():
                    self._fail(failure)
                return
            except BaseException as failure:  # keep any failure, to raise it to a caller
                self._fail(failure)
                self._closing.wait(max(self._grace_s, _RETRY_S))

    def _next_is_due(self) -> bool:
        with self._condition:
            self._condition.wait_for(lambda: self._is_due or self._closing.is_set())
            return not self._closing.is_set()

    def _fail(self, failure: BaseException) -> None:
        _log.warning("garbage collection failed in the background and will be tried again: %s", failure)
        with self._condition:
            self._failure, self._is_due = failure, True

    def _sweep(self) -> None:
        with self._condition:
            self._is_due = False
        self.publish()
        # Marks and packed streams that others publish from here on get their grace time before a later sweep.
        aged = self._stored() if self._grace_s > 0 else None
        if self._closing.wait(self._grace_s) if self._grace_s > 0 else self._closing.is_set():
            raise ClosedError("the garbage collector was closed before it could delete anything")
        stored = self._stored()
        records = sorted(shown_records(stored), key=lambda record: (record.created_at, record.id))
        marks, replaced = Marks.wanted(records), replaced_copies(stored)
        if aged is not None:
            wanted = Marks.wanted(shown_records(aged))
            marks = marks.lowered({stream: wanted.get(stream, 0) for stream in marks})
            replaced &= replaced_copies(aged)
        # Read checkpoints last: one that is put later reads the marks again, and finds the marks used here.
        pins = self._pins()
        unused = replaced | unfinished_copies(stored)
        for record in stored:
            if record.id in unused and record.id != self._writer.stream:
                remove_copy(self._storage, record)
                self._count("n_streams_removed", 1)
        self._delete(records, marks, pins)
        with self._condition:
            self._counts["n_sweeps"] += 1
            self._failure = None  # repaired before it was raised; the log has it

    def _stored(self) -> list[CommitRecord]:
        return [record.as_stored() for record in self._records()]

    def _publish(self) -> None:
        own = self._writer.stream
        with self._condition:
            wanted = self._wanted
        if not wanted:
            return
        wanted = wanted.raised({own: 0}).lowered({own: self._writer.committed_rows})
        published = self._writer.first_rows
        raised = {stream: row for stream, row in wanted.items() if row > published.get(stream, 0)}
        self._writer.set_view(first_row=raised.pop(own, None), first_rows=raised)
        self._writer.wait(self._writer.publish_view())
        with self._condition:
            self._published = wanted

    def _delete(self, records: Sequence[CommitRecord], marks: Mapping[str, int], pins: Mapping[str, int]) -> None:
        """Delete the chunks whose rows all lie below the marks and below the pins."""
        for stream in sorted(self._removing):
            self._remove(stream)
        dead = {stream for record in records for stream in record.view.dead}
        kept = list(records)
        for record in records:
            is_finished = record.is_sealed or record.id in dead
            is_evicted = 0 < record.rows <= marks[record.id] and record.id not in pins
            if is_finished and is_evicted and record.id != self._writer.stream and not is_needed(record, kept):
                self._remove(record.as_stored().id)
                kept.remove(record)
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
        """Delete the step objects of a stream whose rows all lie below ``limit``."""
        for path, layout in record.layouts.items():
            if path.startswith("steps/"):
                stop = limit // (layout.shard_rows or layout.chunk_rows)
                self._free_column(record.as_stored().id, path, layout, stop)

    def _free_column(self, stream: str, path: str, layout: ArrayLayout, stop: int) -> None:
        start = self._freed.get((stream, path), 0 if stream == self._writer.stream else None)
        if stop <= (start or 0):
            return
        folder = f"streams/{stream}/{path}"
        if start is None:  # earlier sessions may have deleted millions of chunks: list the remaining ones
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


def remove_copy(storage: Storage, record: CommitRecord) -> None:
    """Remove a stored stream that readers do not use, because a packed one replaces it or it is not complete.

    The record of a packed stream is first replaced by that of an unfinished one: if the removal is interrupted,
    the next one finds it.
    """
    if record.replaces is not None:
        storage.put(record.key, unfinished(record, time.time() - 2 * PENDING_S).to_bytes())
        storage.delete([key for key in storage.list_tree(record.folder) if key != record.key])
    remove_stream(storage, record.id)


def check_pins(wanted: Mapping[str, int], records: Sequence[CommitRecord]) -> None:
    """Check that no mark has passed the rows of a checkpoint.

    Call it after the incomplete checkpoint was put, with records that were read after that.

    Args:
        wanted: By stream id, the first row that the checkpoint needs; without streams of which it needs no rows.
        records: The newest commit record of every stream.

    Raises:
        SnapshotExpiredError: A mark has passed one of these rows, or a stream was removed. Rows below a mark may be
            deleted at any time, so the checkpoint must be withdrawn.
    """
    live = Marks.wanted(shown_records(records))
    for stream, row in wanted.items():
        if stream not in live:
            raise SnapshotExpiredError(f"stream '{stream}' was removed; take the checkpoint again")
        if live[stream] > row:
            raise SnapshotExpiredError(
                f"stream '{stream}': the checkpoint needs rows from {row} on, but rows below {live[stream]} are"
                " evicted; take the checkpoint again"
            )


def is_needed(record: CommitRecord, records: Sequence[CommitRecord]) -> bool:
    """Whether this record says something that readers of the other streams need."""
    world = newest_world(records)
    named = {*record.columns, *record.view.discarded, *record.view.dead}
    if record.replaces is not None:
        named.add(record.replaces.stream)
    if world is None or record.world == world:
        named.update(record.view.first_rows)
    others = [other for other in records if other.id != record.id]
    if named.intersection(other.id for other in others) or newest_world(others) != world:
        return True
    limits = dict(Lineage.newest(records).limits)
    limits.pop(record.id, None)
    return Lineage.newest(others).limits != limits  # without this record, readers would show what is abandoned


def _chunk_names(names: Iterable[str], stop: int) -> list[str]:
    """Names of chunk objects whose number is below ``stop``."""
    found = ((name, _CHUNK_NAME.match(name)) for name in names)
    return [name for name, match in found if match is not None and int(match[1]) < stop]
