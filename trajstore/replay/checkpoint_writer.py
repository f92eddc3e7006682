"""Checkpoints of a live buffer: the cut is taken at once, and written behind; by one rank, or by all of them."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from trajstore.distributed.rank_group import RankGroup
from trajstore.errors import (
    CheckpointNotFoundError,
    ClosedError,
    FormatError,
    RankError,
    RankTimeoutError,
    StorageError,
)
from trajstore.format.checkpoint_record import StreamExtent
from trajstore.format.commit_record import CommitRecord
from trajstore.format.ids import derived_id
from trajstore.storage import Storage
from trajstore.store import checkpoints

_log = logging.getLogger(__name__)
_TRIES, _TRY_S = 3, 0.2


@dataclass(frozen=True, slots=True)
class CapturedState:
    """What a checkpoint will hold, as it was in memory at the cut."""

    name: str
    streams: Mapping[str, StreamExtent]  # all but the writer's own
    own_stream: str
    own_first: int  # the first row of the writer's own stream that is wanted
    state: Mapping[str, Any]
    record: Future[
        tuple[CommitRecord | None, Mapping[str, Any]]
    ]  # of the writer's own stream, and what goes with it
    ticket: int  # of the commit that the record is of
    keep_last: int | None
    lane: str = ""  # checkpoints of one lane are taken one after the other

    @property
    def held(self) -> dict[str, int]:
        """By stream, the first row that must stay until this is pinned."""
        return {stream: cut.first for stream, cut in self.streams.items()} | {self.own_stream: self.own_first}


@dataclass(slots=True)
class CheckpointLineage:
    """The checkpoint that was saved last, or that the session started from; the next one's parent."""

    newest: str | None
    lock: threading.Lock = field(default_factory=threading.Lock)
    doubtful: str | None = None  # one whose saving failed: it may have been published all the same

    def next_parent(self, storage: Storage, checkpoint_id: str) -> str | None:
        """The parent of the next one, which is doubtful from now on; called with the lock held."""
        if self.doubtful is not None and self.doubtful != checkpoint_id and is_published(storage, self.doubtful):
            self.newest = self.doubtful
        self.doubtful = checkpoint_id
        return self.newest

    def add(self, checkpoint_id: str) -> None:
        self.newest, self.doubtful = checkpoint_id, None


def collective_id(world: str, name: str, after: str) -> str:
    """The id of a world's checkpoint of a name after another one: all ranks know it without asking each other."""
    digest = hashlib.blake2b(f"{world}/{name}/{after}".encode(), digest_size=10).digest()
    return derived_id(name, world, digest)


class CheckpointWriter:
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
        world: RankGroup,
        lineage: CheckpointLineage,
        check: Callable[[Mapping[str, int]], None],
        commit: Callable[[int], None],
    ) -> None:
        self._storage = storage
        self._world = world
        self._lineage = lineage
        self._check = check
        self._commit = commit
        self._taken: CapturedState | None = None  # what is on its way
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._last: Future[None] | None = None
        self._old_notes: list[str] = []
        self.published: str | None = None  # the last one that was
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="trajstore-checkpoint")

    def hold(self, taken: CapturedState | None) -> None:
        """Keep what a checkpoint wants, from its cut on; None: it does not come about."""
        self._taken = taken

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is on its way."""
        return self._taken is not None

    def submit(self, checkpoint_id: str, taken: CapturedState) -> None:
        """Begin to write a checkpoint. Nothing else is on its way: wait before, so that memory stays bounded."""
        self.hold(taken)
        try:
            self._last = self._threads.submit(self._run, checkpoint_id, taken)
        except RuntimeError as error:  # the thread was ended meanwhile
            raise ClosedError("the buffer was closed before its checkpoint was begun") from error

    @property
    def held(self) -> dict[str, int]:
        """By stream, the first row that a checkpoint on its way wants."""
        taken = self._taken
        return taken.held if taken is not None else {}

    def _run(self, checkpoint_id: str, taken: CapturedState) -> None:
        try:
            self._save(checkpoint_id, taken)
            self.published = checkpoint_id
        except BaseException as failure:
            _log.warning("checkpoint %s could not be saved: %s", checkpoint_id, failure)
            with self._lock:
                self._failure = failure
        finally:
            self._taken = None

    def _save(self, checkpoint_id: str, taken: CapturedState) -> None:
        if self._world.size > 1:
            _Together(self._storage, self._world, self._lineage, self._old_notes).save(
                checkpoint_id, taken, lambda: self._part(checkpoint_id, taken)
            )
            return
        streams, state = _content(taken)
        with self._lineage.lock:
            parent = self._lineage.next_parent(self._storage, checkpoint_id)
            checkpoint = checkpoints.new_checkpoint(
                checkpoint_id, taken.name, parent=parent, world=self._world.id, streams=streams
            )
            checkpoints.save(self._storage, checkpoint, state, check=lambda: self._check(_firsts(streams)))
            self._lineage.add(checkpoint_id)
        if taken.keep_last is not None:
            prune(self._storage, checkpoint_id, taken.keep_last)

    def _part(self, checkpoint_id: str, taken: CapturedState) -> Mapping[str, StreamExtent]:
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
            try:
                self._commit(taken.ticket)
            except BaseException as failure:  # the storage fails still
                if self._world.size == 1:
                    raise  # the checkpoint goes on waiting
                self._give_up(taken, failure)
                raise
        if last is not None:
            last.result()
        self.raise_pending()

    def _give_up(self, taken: CapturedState, failure: BaseException) -> None:
        """Let the other ranks know that this one can't; whoever is told of it here need not be told again."""
        with contextlib.suppress(InvalidStateError):
            taken.record.set_exception(failure)
        if self._last is not None:
            self._last.result()
        self.take_failure()

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


def _content(taken: CapturedState) -> tuple[dict[str, StreamExtent], dict[str, Any]]:
    """What a checkpoint lists, and its state; waits until all of it is durable."""
    record, more = taken.record.result()
    streams = dict(taken.streams)
    if record is not None and taken.own_first < record.rows:
        streams[record.id] = StreamExtent(taken.own_first, record.rows, record.spans, record.text_bytes)
    return streams, {**taken.state, **more}


def _firsts(streams: Mapping[str, StreamExtent]) -> dict[str, int]:
    return {stream: cut.first for stream, cut in streams.items()}


class _Together:
    """One checkpoint that all ranks take: first every rank's part, then, if all are durable, the whole.

    Rank 0 decides. It tells first that it has begun, then looks at what the others say; another rank that gives up
    takes back what it said first, then looks whether rank 0 has begun. So no part is changed that may be published.
    """

    def __init__(
        self, storage: Storage, world: RankGroup, lineage: CheckpointLineage, old_notes: list[str]
    ) -> None:
        self._storage = storage
        self._world = world
        self._lineage = lineage
        self._old_notes = old_notes  # of checkpoints before, which nobody needs any more when this one is taken

    def save(
        self, checkpoint_id: str, taken: CapturedState, put_part: Callable[[], Mapping[str, StreamExtent]]
    ) -> None:
        own = self._put(checkpoint_id, taken, put_part)
        try:
            outcome = self._outcome_of(checkpoint_id, taken, own)
        except BaseException:
            if self._world.is_leader:
                self._withdraw(checkpoint_id)
            raise
        if "failed" in outcome:
            self._withdraw(checkpoint_id)  # it will never be published, so nobody needs what is left
            raise RankError(
                f"checkpoint '{checkpoint_id}' is not published, the one before stands: {outcome['failed']}"
            )
        if not self._world.is_leader:  # that one knew when it published
            self._lineage.newest = checkpoint_id
        elif taken.keep_last is not None:
            prune(self._storage, checkpoint_id, taken.keep_last)

    def _outcome_of(
        self, checkpoint_id: str, taken: CapturedState, own: Mapping[str, StreamExtent]
    ) -> dict[str, Any]:
        if self._world.is_leader:
            return self._decided(checkpoint_id, taken, own)
        return self._heard(checkpoint_id, taken)

    def _withdraw(self, checkpoint_id: str) -> None:
        with contextlib.suppress(StorageError):  # it is incomplete, so nobody sees what is left
            checkpoints.withdraw(self._storage, checkpoint_id)

    def _put(
        self, checkpoint_id: str, taken: CapturedState, put_part: Callable[[], Mapping[str, StreamExtent]]
    ) -> Mapping[str, StreamExtent]:
        """Make this rank's part durable and say so, or say why not."""
        key = f"part/{checkpoint_id}"
        try:
            if self._world.is_leader:  # which need not tell itself of its part
                self._world.post(f"begun/{taken.lane}", checkpoint_id)
                return put_part()
            own = put_part()
            note = {"name": taken.name, "streams": {stream: _cut_note(cut) for stream, cut in own.items()}}
            self._world.board.post_all({**dict.fromkeys(self._old_notes), key: note})
        except BaseException as failure:
            why = {"failed": f"rank {self._world.rank}: {failure}"}
            if self._world.is_leader:
                self._conclude(checkpoint_id, taken, why)
                self._withdraw(checkpoint_id)
            else:
                with contextlib.suppress(RankError, StorageError):
                    self._world.post(key, why)
                self._old_notes.append(key)
            raise
        self._old_notes[:] = [key]
        return own

    def _decided(self, checkpoint_id: str, taken: CapturedState, own: Mapping[str, StreamExtent]) -> dict[str, Any]:
        try:
            others = range(1, self._world.size)
            notes = self._world.await_notes(f"part/{checkpoint_id}", others, "its part of it")
            failed = [str(note["failed"]) for note in notes if "failed" in note]
            if not failed:
                self._publish_surely(checkpoint_id, taken, own, notes)
        except BaseException as failure:
            self._conclude(checkpoint_id, taken, {"failed": str(failure)})
            raise
        outcome: dict[str, Any] = {"failed": "; ".join(failed)} if failed else {"published": checkpoint_id}
        # Whoever has sent its part of this one has read of all before: their notes can go.
        self._conclude(checkpoint_id, taken, outcome, list(self._old_notes))
        return outcome

    def _publish_surely(
        self,
        checkpoint_id: str,
        taken: CapturedState,
        own: Mapping[str, StreamExtent],
        notes: list[Mapping[str, Any]],
    ) -> None:
        with self._lineage.lock:
            try:
                self._publish(checkpoint_id, taken, own, notes)
            except StorageError:
                if not is_published(self._storage, checkpoint_id):  # only the answer was lost
                    raise
            self._lineage.add(checkpoint_id)

    def _publish(
        self,
        checkpoint_id: str,
        taken: CapturedState,
        own: Mapping[str, StreamExtent],
        notes: list[Mapping[str, Any]],
    ) -> None:
        streams = dict(own)
        for note in notes:
            for stream, cut in note["streams"].items():
                streams[stream] = _joined(streams.get(stream), _cut_of(cut))
        whole = checkpoints.new_checkpoint(
            checkpoint_id,
            taken.name,
            parent=self._lineage.next_parent(self._storage, checkpoint_id),
            world=self._world.id,
            streams=streams,
            n_ranks=self._world.size,
        )
        checkpoints.publish(self._storage, whole)

    def _conclude(
        self, checkpoint_id: str, taken: CapturedState, outcome: dict[str, Any], dropped: Sequence[str] = ()
    ) -> None:
        key = f"outcome/{checkpoint_id}"
        news = {key: outcome, f"concluded/{taken.lane}": checkpoint_id}
        for _ in range(_TRIES):
            with contextlib.suppress(RankError, StorageError):  # the others look for themselves then
                self._world.board.post_all({**dict.fromkeys(dropped), **news})
                break
            if self._world.is_closing.wait(_TRY_S):
                break
        self._old_notes[:] = [key for key in self._old_notes if key not in dropped] + [key]

    def _heard(self, checkpoint_id: str, taken: CapturedState) -> dict[str, Any]:
        """What rank 0 has decided."""
        try:
            return self._outcome(checkpoint_id)
        except (RankError, StorageError) as failure:
            with contextlib.suppress(RankError, StorageError):
                note = {"failed": f"rank {self._world.rank} gave up waiting"}
                self._world.post(f"part/{checkpoint_id}", note)
                if self._world.read(f"begun/{taken.lane}") != checkpoint_id:
                    self._world.post(f"part/{checkpoint_id}", None)  # it may begin later, and others with it
                elif not _has_left(failure):
                    return self._outcome(checkpoint_id)  # it waits for others as long
            if is_published(self._storage, checkpoint_id):  # it may have died just after that
                return {"published": checkpoint_id}
            raise

    def _outcome(self, checkpoint_id: str) -> dict[str, Any]:
        outcome = self._world.await_notes(f"outcome/{checkpoint_id}", [0], "its outcome")[0]
        if not isinstance(outcome, dict):
            raise FormatError(f"rank 0 says of checkpoint '{checkpoint_id}': {outcome!r:.80}")
        return outcome


def _has_left(failure: Exception) -> bool:
    return isinstance(failure, RankError) and not isinstance(failure, RankTimeoutError)


def is_published(storage: Storage, checkpoint_id: str) -> bool:
    """Whether a checkpoint is there, whole."""
    try:
        return checkpoints.find(storage, checkpoint_id).id == checkpoint_id
    except CheckpointNotFoundError:
        return False


def _cut_note(cut: StreamExtent) -> list[Any]:
    return [cut.first, cut.stop, cut.spans, cut.text_bytes, list(cut.discarded)]


def _cut_of(note: list[Any]) -> StreamExtent:
    first, stop, spans, text_bytes, discarded = note
    return StreamExtent(first, stop, spans, text_bytes, None, tuple(discarded))


def _joined(one: StreamExtent | None, other: StreamExtent) -> StreamExtent:
    """What two ranks want of a stream, together: of one that still grows, the one that writes it knows more."""
    if one is None:
        return other
    longer = one if one.stop >= other.stop else other
    return replace(longer, first=min(one.first, other.first), record=one.record if longer is one else None)


def prune(storage: Storage, newest: str, keep: int) -> list[str]:
    """Remove all ancestors of a checkpoint but the last ones, so that ``keep`` are left with it; returns which."""
    chain = [checkpoint.id for checkpoint in checkpoints.lineage(storage, newest)]
    gone = chain[: max(0, len(chain) - keep)]
    for old in gone:  # oldest first: whoever dies meanwhile leaves a chain without gaps
        checkpoints.remove(storage, old)
    return gone
