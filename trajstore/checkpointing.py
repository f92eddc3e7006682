"""Checkpoints of a live buffer: the cut is taken at once, and written behind; by one rank, or by all of them."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from trajstore import checkpoints
from trajstore.checkpoints import Checkpoint, Cut
from trajstore.errors import CheckpointNotFoundError, ClosedError, RankError, StorageError
from trajstore.record import CommitRecord, derived_id
from trajstore.storage import Storage
from trajstore.world import World

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Taken:
    """What a checkpoint will hold, as it was in memory at the cut."""

    name: str
    streams: Mapping[str, Cut]  # all but the writer's own
    own_stream: str
    own_first: int  # the first row of the writer's own stream that is wanted
    state: Mapping[str, Any]
    record: Future[
        tuple[CommitRecord | None, Mapping[str, Any]]
    ]  # of the writer's own stream, and what goes with it
    ticket: int  # of the commit that the record is of
    keep_last: int | None

    @property
    def held(self) -> dict[str, int]:
        """By stream, the first row that must stay until this is pinned."""
        return {stream: cut.first for stream, cut in self.streams.items()} | {self.own_stream: self.own_first}


@dataclass(slots=True)
class Lineage:
    """The checkpoint that was saved last, or that the session started from; the next one's parent."""

    newest: str | None
    lock: threading.Lock = field(default_factory=threading.Lock)


def collective_id(world: str, name: str, n: int) -> str:
    """The id of a world's n-th checkpoint of a name: all ranks know it without asking each other."""
    digest = hashlib.blake2b(f"{world}/{name}/{n}".encode(), digest_size=10).digest()
    return derived_id(name, world, digest)


class Checkpointer:
    """Writes checkpoints in the background, one after the other; failures are raised by the next call.

    Args:
        storage: Of the store.
        world: The ranks that take part.
        lineage: Of the session.
        check: Given the first rows that a checkpoint wants, raises if an eviction has passed them.
        commit: Waits for the commit of a ticket, giving it another try if it failed.
    """

    def __init__(
        self,
        storage: Storage,
        world: World,
        lineage: Lineage,
        check: Callable[[Mapping[str, int]], None],
        commit: Callable[[int], None],
    ) -> None:
        self._storage = storage
        self._world = world
        self._lineage = lineage
        self._check = check
        self._commit = commit
        self._taken: Taken | None = None  # what is on its way
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._last: Future[None] | None = None
        self._old_notes: list[str] = []
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="trajstore-checkpoint")

    def submit(self, checkpoint_id: str, taken: Taken) -> Future[None]:
        """Begin to write a checkpoint. Nothing else is on its way: wait before, so that memory stays bounded."""
        self._taken = taken
        self._last = self._threads.submit(self._run, checkpoint_id, taken)
        return self._last

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is on its way."""
        return self._taken is not None

    @property
    def held(self) -> dict[str, int]:
        """By stream, the first row that a checkpoint on its way wants."""
        taken = self._taken
        return taken.held if taken is not None else {}

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
        if self._world.size > 1:
            _Together(self._storage, self._world, self._lineage, self._old_notes).save(
                checkpoint_id, taken, lambda: self._part(checkpoint_id, taken)
            )
            return
        streams, state = _content(taken)
        with self._lineage.lock:
            checkpoint = checkpoints.new_checkpoint(
                checkpoint_id, taken.name, parent=self._lineage.newest, world=self._world.id, streams=streams
            )
            checkpoints.save(self._storage, checkpoint, state, check=lambda: self._check(_firsts(streams)))
            self._lineage.newest = checkpoint_id
        if taken.keep_last is not None:
            prune(self._storage, checkpoint_id, taken.keep_last)

    def _part(self, checkpoint_id: str, taken: Taken) -> Mapping[str, Cut]:
        """Make this rank's part durable; what it wants of each stream."""
        streams, state = _content(taken)
        whole = checkpoints.new_checkpoint(
            checkpoint_id, taken.name, world=self._world.id, streams=streams, n_ranks=self._world.size
        )
        checkpoints.save_part(
            self._storage, whole, self._world.rank, state, check=lambda: self._check(_firsts(streams))
        )
        return streams

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
        failure = self.take_failure()
        if failure is not None:
            raise failure

    def take_failure(self) -> BaseException | None:
        """What a checkpoint failed with, once."""
        if self._failure is None:
            return None
        with self._lock:
            failure, self._failure = self._failure, None
        return failure

    def close(self) -> None:
        """End the thread, after what is on its way."""
        self._threads.shutdown(wait=True)
        self.raise_pending()


def _content(taken: Taken) -> tuple[dict[str, Cut], dict[str, Any]]:
    """What a checkpoint lists, and its state; waits until all of it is durable."""
    record, more = taken.record.result()
    streams = dict(taken.streams)
    if record is not None and taken.own_first < record.rows:
        streams[record.id] = Cut(taken.own_first, record.rows, record.spans, record.text_bytes)
    return streams, {**taken.state, **more}


def _firsts(streams: Mapping[str, Cut]) -> dict[str, int]:
    return {stream: cut.first for stream, cut in streams.items()}


class _Together:
    """One checkpoint that all ranks take: first every rank's part, then, if all are durable, the whole."""

    def __init__(self, storage: Storage, world: World, lineage: Lineage, old_notes: list[str]) -> None:
        self._storage = storage
        self._world = world
        self._lineage = lineage
        self._old_notes = old_notes  # of the checkpoint before: by now all have read them

    def save(self, checkpoint_id: str, taken: Taken, put_part: Callable[[], Mapping[str, Cut]]) -> None:
        own: Mapping[str, Cut] = {}
        try:
            own = put_part()
            note: dict[str, Any] = {"name": taken.name, "streams": {s: _cut_note(cut) for s, cut in own.items()}}
        except BaseException as failure:
            with contextlib.suppress(RankError, StorageError):
                self._say(checkpoint_id, {"failed": f"rank {self._world.rank}: {failure}"})
            raise
        self._say(checkpoint_id, note)
        outcome = self._outcome(checkpoint_id, taken, own)
        if "failed" in outcome:
            raise RankError(
                f"checkpoint '{checkpoint_id}' is not published, the one before stands: {outcome['failed']}"
            )
        self._lineage.newest = checkpoint_id

    def _say(self, checkpoint_id: str, note: Mapping[str, Any]) -> None:
        for key in self._old_notes:
            self._world.post(key, None)
        self._old_notes[:] = [f"part/{checkpoint_id}"]
        self._world.post(f"part/{checkpoint_id}", note)
        if self._world.is_leader and "failed" in note:
            self._conclude(checkpoint_id, dict(note))

    def _outcome(self, checkpoint_id: str, taken: Taken, own: Mapping[str, Cut]) -> dict[str, Any]:
        if not self._world.is_leader:
            return self._heard(checkpoint_id)
        try:
            notes = self._world.await_notes(f"part/{checkpoint_id}", range(self._world.size), "its part of it")
            failed = [note["failed"] for note in notes if "failed" in note]
            outcome = {"failed": "; ".join(failed)} if failed else self._published(checkpoint_id, taken, own, notes)
        except BaseException as failure:
            self._conclude(checkpoint_id, {"failed": str(failure)})
            raise
        self._conclude(checkpoint_id, outcome)
        return outcome

    def _published(
        self, checkpoint_id: str, taken: Taken, own: Mapping[str, Cut], notes: list[Mapping[str, Any]]
    ) -> dict[str, Any]:
        streams = dict(own)
        for note in notes:
            for stream, cut in note["streams"].items():
                streams[stream] = _joined(streams.get(stream), _cut_of(cut))
        with self._lineage.lock:
            parent = self._lineage.newest
            whole = checkpoints.new_checkpoint(
                checkpoint_id,
                taken.name,
                parent=parent,
                world=self._world.id,
                streams=streams,
                n_ranks=self._world.size,
            )
            checkpoints.publish(self._storage, whole)
            self._lineage.newest = checkpoint_id
        if taken.keep_last is not None:
            prune(self._storage, checkpoint_id, taken.keep_last)
        return {"published": checkpoint_id}

    def _conclude(self, checkpoint_id: str, outcome: dict[str, Any]) -> None:
        self._old_notes.append(f"outcome/{checkpoint_id}")
        with contextlib.suppress(RankError, StorageError):  # they look for themselves then
            self._world.post(f"outcome/{checkpoint_id}", outcome)
        if "failed" in outcome:
            with contextlib.suppress(StorageError):  # it is incomplete, so nobody sees what is left
                checkpoints.remove(self._storage, checkpoint_id)

    def _heard(self, checkpoint_id: str) -> dict[str, Any]:
        # The leader itself waits for others, and then has to publish: twice as long is never too short.
        patient = replace(self._world, timeout_s=2 * self._world.timeout_s)
        try:
            outcome: dict[str, Any] = patient.await_notes(f"outcome/{checkpoint_id}", [0], "its outcome")[0]
        except (RankError, StorageError):
            if not _is_there(self._storage, checkpoint_id):  # it may have died just after it published
                raise
            return {"published": checkpoint_id}
        return outcome


def _is_there(storage: Storage, checkpoint_id: str) -> bool:
    try:
        return checkpoints.find(storage, checkpoint_id).id == checkpoint_id
    except CheckpointNotFoundError:
        return False


def _cut_note(cut: Cut) -> list[Any]:
    return [cut.first, cut.stop, cut.spans, cut.text_bytes, list(cut.discarded)]


def _cut_of(note: list[Any]) -> Cut:
    first, stop, spans, text_bytes, discarded = note
    return Cut(first, stop, spans, text_bytes, None, tuple(discarded))


def _joined(one: Cut | None, other: Cut) -> Cut:
    """What two ranks want of a stream, together: of one that still grows, the one that writes it knows more."""
    if one is None:
        return other
    longer = one if one.stop >= other.stop else other
    return replace(longer, first=min(one.first, other.first), record=one.record if longer is one else None)


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
