"""Checkpoints of a live buffer: the cut is taken at once, and written behind."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from trajstore import checkpoints
from trajstore.checkpoints import Checkpoint, Cut
from trajstore.errors import ClosedError
from trajstore.record import CommitRecord
from trajstore.storage import Storage

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Taken:
    """What a checkpoint will hold, as it was in memory at the cut."""

    name: str
    streams: Mapping[str, Cut]  # all but the writer's own
    own_first: int  # the first row of the writer's own stream that is wanted
    state: Mapping[str, Any]
    record: Future[
        tuple[CommitRecord | None, Mapping[str, Any]]
    ]  # of the writer's own stream, and what goes with it
    ticket: int  # of the commit that the record is of
    keep_last: int | None


class Checkpointer:
    """Writes checkpoints in the background, one after the other; failures are raised by the next call.

    Args:
        storage: Of the store.
        world: Of the session.
        parent: Id of the checkpoint that the session started from.
        check: Given the first rows that a checkpoint wants, raises if an eviction has passed them.
        commit: Waits for the commit of a ticket, giving it another try if it failed.
    """

    def __init__(
        self,
        storage: Storage,
        world: str,
        parent: str | None,
        check: Callable[[Mapping[str, int]], None],
        commit: Callable[[int], None],
    ) -> None:
        self._storage = storage
        self._world = world
        self._parent = parent
        self._check = check
        self._commit = commit
        self._taken: Taken | None = None  # what is on its way
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._last: Future[None] | None = None
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="trajstore-checkpoint")

    @property
    def newest(self) -> str | None:
        """The checkpoint that was saved last, or that the session started from."""
        return self._parent

    def submit(self, taken: Taken) -> str:
        """Begin to write a checkpoint; returns its id. Waits for the one before, so that memory stays bounded."""
        self.wait()
        checkpoint_id = checkpoints.new_checkpoint_id(taken.name)
        self._taken = taken
        self._last = self._threads.submit(self._run, checkpoint_id, taken)
        return checkpoint_id

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is on its way."""
        return self._taken is not None

    def _run(self, checkpoint_id: str, taken: Taken) -> None:
        try:
            self._save(checkpoint_id, taken)
        except BaseException as failure:
            _log.warning("checkpoint %s could not be saved: %s", checkpoint_id, failure)
            with self._lock:
                self._failure = failure
        finally:
            self._taken = None

    def _save(self, checkpoint_id: str, taken: Taken) -> None:
        record, more = taken.record.result()
        streams = dict(taken.streams)
        if record is not None and taken.own_first < record.rows:
            streams[record.id] = Cut(taken.own_first, record.rows, record.spans, record.text_bytes)
        checkpoint = checkpoints.new_checkpoint(
            checkpoint_id, taken.name, parent=self._parent, world=self._world, streams=streams
        )
        wanted = {stream: cut.first for stream, cut in streams.items()}
        checkpoints.save(self._storage, checkpoint, {**taken.state, **more}, check=lambda: self._check(wanted))
        self._parent = checkpoint_id
        if taken.keep_last is not None:
            prune(self._storage, checkpoint_id, taken.keep_last)

    def wait(self) -> None:
        """Wait until what was begun is durable.

        Raises:
            BaseException: What it failed with.
        """
        taken, last = self._taken, self._last
        if taken is not None:
            self._commit(taken.ticket)  # raises if the storage fails still: then the checkpoint goes on waiting
        if last is not None:
            last.result()
        self.raise_pending()

    def cancel(self) -> None:
        """Give up a checkpoint that waits for its commit."""
        taken = self._taken
        if taken is not None and not taken.record.done():
            taken.record.set_exception(ClosedError("the buffer was closed before its checkpoint was complete"))

    def raise_pending(self) -> None:
        """Raise what a checkpoint failed with, once."""
        if self._failure is None:
            return
        with self._lock:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """End the thread, after what is on its way."""
        self._threads.shutdown(wait=True)
        self.raise_pending()


def prune(storage: Storage, newest: str, keep: int) -> list[str]:
    """Remove all ancestors of a checkpoint but the last ones, so that ``keep`` are left with it; returns which."""
    known: dict[str, Checkpoint] = {c.id: c for c in checkpoints.list_checkpoints(storage)}
    chain: list[str] = []
    at: str | None = newest
    while at is not None and at in known:
        chain.append(at)
        at = known[at].parent
    for old in chain[keep:]:
        checkpoints.remove(storage, old)
    return chain[keep:]
