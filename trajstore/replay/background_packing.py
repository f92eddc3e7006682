"""Packs finished streams of a buffer's store while the buffer is in use."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from trajstore.errors import ClosedError, ConflictError, CorruptionError
from trajstore.format.commit_record import CommitRecord
from trajstore.format.packed_streams import replaced_copies, unfinished_copies
from trajstore.schema import Schema
from trajstore.storage import Storage
from trajstore.store.packed_arrays import PackSettings
from trajstore.store.packing import NOT_CLOSED, PackedStream, Packing, StreamPlan
from trajstore.store.snapshot import Snapshot

SHARD_BYTES = 64 << 20  # twice this is held in memory while a stream is packed
_SHARE = 0.25  # of the time, at most, in which the thread reads, encodes and writes
_MAX_PAUSE_S = 30.0
_LOOK_S = 60.0  # how often finished streams are looked for
_RETRY_S = 10.0

_log = logging.getLogger(__name__)


def is_packed_by(record: CommitRecord, rank: int, size: int) -> bool:
    """Whether a rank packs this stream; of the ranks that show it, exactly one does."""
    return (record.rank or 0) % size == rank


class BackgroundPacking:
    """Packs finished streams in a thread, one after the other, and waits between every few chunks.

    A failure is logged, raised once by `raise_pending` or `close`, and tried again, unless a chunk is damaged: then
    its stream is left as it is. Thread-safe; to be used only in the process that made it.

    Args:
        storage: Storage of the store.
        schema: Returns the schema of the store; None if it has none yet.
        choose: Of a snapshot of the store, the ids of the streams that this session packs if they are finished.
        request_sweep: Begins to remove, after the grace time, what packed streams replace.
    """

    def __init__(
        self,
        storage: Storage,
        schema: Callable[[], Schema | None],
        choose: Callable[[Snapshot], Collection[str]],
        request_sweep: Callable[[], None],
    ) -> None:
        self._storage = storage
        self._schema = schema
        self._choose = choose
        self._request_sweep = request_sweep
        self._packing = Packing(storage, PackSettings(SHARD_BYTES), pause=self._pause)
        self._lock = threading.Lock()  # guards the counts and the failure
        self._counts = dict.fromkeys(("n_streams", "n_objects", "n_bytes", "n_packed_objects", "n_packed_bytes"), 0)
        self._failure: BaseException | None = None  # not raised yet
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._snapshot: Snapshot | None = None
        self._settled: set[str] = set()  # streams that are packed, or will never be
        self._worked_since = 0.0  # monotonic clock when the last pause ended

    def start(self) -> None:
        self._thread = threading.Thread(target=self._loop, name="trajstore-pack", daemon=True)
        self._thread.start()

    def raise_pending(self) -> None:
        """Raise the last failure, unless it was raised before."""
        if self._failure is None:  # the common case, without taking the lock
            return
        with self._lock:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Stop after the next few chunks; raises a failure not raised before. May be called again.

        The objects of a stream that is not completely packed are removed. If that fails, a later session that
        packs or sweeps removes them.
        """
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        self.raise_pending()

    def stats(self) -> dict[str, Any]:
        """Numbers of packed streams, of their objects and bytes before, and of those after."""
        with self._lock:
            return dict(self._counts)

    def _loop(self) -> None:
        while not self._closing.is_set():
            wait_s = _LOOK_S
            try:
                self._work()
            except ClosedError:
                return
            except BaseException as failure:  # keep any failure, to raise it to a caller
                self._fail(failure)
                wait_s = _RETRY_S
            self._closing.wait(wait_s)

    def _work(self) -> None:
        """Pack what is finished now."""
        self._worked_since = time.monotonic()
        if (schema := self._schema()) is None:
            return
        self._snapshot = snapshot = Snapshot.load(self._storage, schema, self._snapshot)
        if replaced_copies(snapshot.stored) or unfinished_copies(snapshot.stored):
            self._request_sweep()  # an earlier session may have ended before it removed them
        chosen = set(self._choose(snapshot)) - self._settled
        if not chosen:
            return
        plans, left = self._packing.plans(snapshot, chosen)
        self._settled.update(stream for stream, reason in left.items() if reason != NOT_CLOSED)
        for plan in plans:
            self._pack(plan)

    def _pack(self, plan: StreamPlan) -> None:
        stream = plan.record.id
        try:
            packed = self._packing.pack(plan)
        except ConflictError as conflict:  # it changed while it was read; the next look plans again
            _log.info("stream %s was not packed: %s", stream, conflict)
        except CorruptionError as failure:
            self._settled.add(stream)
            self._fail(failure)
        else:
            self._settled.add(stream)
            self._count(packed)
            self._request_sweep()

    def _count(self, packed: PackedStream) -> None:
        _log.info("packed stream %s: %d objects into %d", packed.stream, packed.n_objects, packed.n_packed_objects)
        with self._lock:
            self._counts["n_streams"] += 1
            for name in ("n_objects", "n_bytes", "n_packed_objects", "n_packed_bytes"):
                self._counts[name] += getattr(packed, name)

    def _fail(self, failure: BaseException) -> None:
        _log.warning("packing failed in the background: %s", failure)
        with self._lock:
            self._failure = failure

    def _pause(self) -> None:
        """Wait so that the thread works for a share of the time only."""
        worked_s = time.monotonic() - self._worked_since
        if self._closing.wait(min(worked_s * (1 / _SHARE - 1), _MAX_PAUSE_S)):
            raise ClosedError("the buffer is being closed")
        self._worked_since = time.monotonic()
