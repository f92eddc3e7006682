"""One checkpoint that all ranks take: first every rank's part, then, if all are durable, the whole."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trajstore.distributed.rank_group import RankGroup
from trajstore.errors import ConflictError, FormatError, RankError, RankTimeoutError, StorageError
from trajstore.format.commit_record import StreamExtent
from trajstore.format.ids import derived_id
from trajstore.replay.checkpoint_lineage import CheckpointLineage, is_published
from trajstore.storage import Storage
from trajstore.store import checkpoints

_TRIES, _TRY_S = 3, 0.2

PutPart = Callable[[], Mapping[str, StreamExtent]]


def collective_id(world: str, name: str, after: str) -> str:
    """The id of a world's checkpoint after another one; all ranks compute it without asking each other."""
    digest = hashlib.blake2b(f"{world}/{name}/{after}".encode(), digest_size=10).digest()
    return derived_id(name, world, digest)


def has_failed_alone(group: RankGroup, checkpoint_id: str) -> bool:
    """Whether rank 0 has given a checkpoint up because its own part failed, without waiting for other ranks."""
    outcome = group.read(f"outcome/{checkpoint_id}")
    return isinstance(outcome, dict) and outcome.get("alone") is True


class CollectiveCheckpoint:
    """One rank's share in one collective checkpoint.

    Rank 0 decides. It posts first that it has begun, then reads the notes of the others. A rank that gives up
    removes its note first, then reads whether rank 0 has begun. So no part changes that may be published.

    Args:
        storage: Storage of the store.
        group: The ranks.
        lineage: Lineage of this rank's session.
        old_notes: Keys of this rank's notes on earlier checkpoints; they are removed when no rank needs them.
        checkpoint_id: The same on all ranks.
        name: Name of the checkpoint.
        lane: Checkpoints of one lane are taken one after the other.
    """

    def __init__(
        self,
        storage: Storage,
        group: RankGroup,
        lineage: CheckpointLineage,
        old_notes: list[str],
        *,
        checkpoint_id: str,
        name: str,
        lane: str,
    ) -> None:
        self._storage = storage
        self._group = group
        self._lineage = lineage
        self._old_notes = old_notes
        self._id = checkpoint_id
        self._name = name
        self._lane = lane

    def save(self, put_part: PutPart) -> None:
        """Make this rank's part durable with ``put_part``, then wait for the outcome.

        Raises:
            RankError: The checkpoint was not published; the one before stays valid.
        """
        own = self._put(put_part)
        try:
            outcome = self._decide(own) if self._group.is_leader else self._await_decision()
        except BaseException:
            if self._group.is_leader:
                self._withdraw()
            raise
        if "failed" in outcome:
            self._withdraw()  # it will never be published, so what is left of it is not needed
            raise self._not_published(outcome["failed"])
        if not self._group.is_leader:  # the leader's lineage knows it since it was published
            self._lineage.newest = self._id

    def _withdraw(self) -> None:
        with contextlib.suppress(StorageError):  # an incomplete checkpoint is invisible to readers
            checkpoints.withdraw(self._storage, self._id)

    def _put(self, put_part: PutPart) -> Mapping[str, StreamExtent]:
        """Make this rank's part durable and post a note of it, or post why that failed."""
        key = f"part/{self._id}"
        try:
            if self._group.is_leader:  # it needs no note of its own part
                self._group.post(f"begun/{self._lane}", self._id)
                return put_part()
            own = put_part()
            note = {"name": self._name, "streams": {stream: _to_note(extent) for stream, extent in own.items()}}
            self._group.notes.post_all({**dict.fromkeys(self._old_notes), key: note})
        except (ConflictError, StorageError) as failure:
            self._post_failure(key, f"rank {self._group.rank}: {failure}")
            raise self._reason_of_removal() or failure from failure
        except BaseException as failure:
            self._post_failure(key, f"rank {self._group.rank}: {failure}")
            raise
        self._old_notes[:] = [key]
        return own

    def _reason_of_removal(self) -> RankError | None:
        """The failure of another rank, if that is why this part was removed while it was being saved."""
        with contextlib.suppress(RankError, StorageError):
            outcome = None if self._group.is_leader else self._group.read(f"outcome/{self._id}")
            if isinstance(outcome, dict) and "failed" in outcome:
                return self._not_published(outcome["failed"])
        return None

    def _not_published(self, reason: str) -> RankError:
        return RankError(f"checkpoint '{self._id}' is not published, the one before stays valid: {reason}")

    def _post_failure(self, key: str, reason: str) -> None:
        if self._group.is_leader:
            self._conclude({"failed": reason, "alone": True})
            self._withdraw()
        else:
            with contextlib.suppress(RankError, StorageError):
                self._group.post(key, {"failed": reason})
            self._old_notes.append(key)

    # ---- rank 0

    def _decide(self, own: Mapping[str, StreamExtent]) -> dict[str, Any]:
        try:
            others = range(1, self._group.size)
            notes = self._group.await_notes(f"part/{self._id}", others, "its part of it")
            failed = [str(note["failed"]) for note in notes if "failed" in note]
            if not failed:
                self._publish_surely(own, notes)
        except BaseException as failure:
            self._conclude({"failed": str(failure)})
            raise
        outcome: dict[str, Any] = {"failed": "; ".join(failed)} if failed else {"published": self._id}
        # A rank that has sent its part of this checkpoint has read all earlier outcomes: those notes can go.
        self._conclude(outcome, list(self._old_notes))
        return outcome

    def _publish_surely(self, own: Mapping[str, StreamExtent], notes: Sequence[Mapping[str, Any]]) -> None:
        with self._lineage.lock:
            try:
                self._publish(own, notes)
            except StorageError:
                if not is_published(self._storage, self._id):  # else only the answer was lost
                    raise
            self._lineage.add(self._id)

    def _publish(self, own: Mapping[str, StreamExtent], notes: Sequence[Mapping[str, Any]]) -> None:
        streams = dict(own)
        for note in notes:
            for stream, values in note["streams"].items():
                streams[stream] = _union(streams.get(stream), _from_note(values))
        whole = checkpoints.new_checkpoint(
            self._id,
            self._name,
            parent=self._lineage.next_parent(self._storage, self._id),
            world=self._group.id,
            streams=streams,
            n_ranks=self._group.size,
        )
        checkpoints.publish(self._storage, whole)

    def _conclude(self, outcome: dict[str, Any], dropped: Sequence[str] = ()) -> None:
        """Post the outcome, and remove old notes."""
        key = f"outcome/{self._id}"
        notes = {key: outcome, f"concluded/{self._lane}": self._id}
        for _ in range(_TRIES):
            with contextlib.suppress(RankError, StorageError):  # then the other ranks look for the checkpoint
                self._group.notes.post_all({**dict.fromkeys(dropped), **notes})
                break
            if self._group.is_closing.wait(_TRY_S):
                break
        self._old_notes[:] = [key for key in self._old_notes if key not in dropped] + [key]

    # ---- other ranks

    def _await_decision(self) -> dict[str, Any]:
        """What rank 0 has decided; if it does not answer, what the store shows."""
        try:
            return self._outcome()
        except (RankError, StorageError) as failure:
            with contextlib.suppress(RankError, StorageError):
                note = {"failed": f"rank {self._group.rank} gave up waiting"}
                self._group.post(f"part/{self._id}", note)
                if self._group.read(f"begun/{self._lane}") != self._id:
                    self._group.post(f"part/{self._id}", None)  # rank 0 may begin later, with all ranks
                elif not _has_left(failure):
                    return self._outcome()  # rank 0 waits for the others as long as this rank has waited
            if is_published(self._storage, self._id):  # rank 0 may have died right after that
                return {"published": self._id}
            raise

    def _outcome(self) -> dict[str, Any]:
        outcome = self._group.await_notes(f"outcome/{self._id}", [0], "its outcome")[0]
        if not isinstance(outcome, dict):
            raise FormatError(f"checkpoint '{self._id}': expected an outcome from rank 0, got {outcome!r:.80}")
        return outcome


def _has_left(failure: Exception) -> bool:
    return isinstance(failure, RankError) and not isinstance(failure, RankTimeoutError)


def _to_note(extent: StreamExtent) -> list[Any]:
    return [extent.first, extent.stop, extent.spans, extent.text_bytes, list(extent.discarded)]


def _from_note(values: Sequence[Any]) -> StreamExtent:
    first, stop, spans, text_bytes, discarded = values
    return StreamExtent(first, stop, spans, text_bytes, None, tuple(discarded))


def _union(one: StreamExtent | None, other: StreamExtent) -> StreamExtent:
    """What two ranks want of a stream, together. Of a stream that grows, its writer has captured the most."""
    if one is None:
        return other
    longer = one if one.stop >= other.stop else other
    return replace(longer, first=min(one.first, other.first), record=one.record if longer is one else None)
