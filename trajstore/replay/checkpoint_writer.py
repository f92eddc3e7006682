"""Writes captured checkpoints in the background, of one session or, together with other ranks, of all of them."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Any

from trajstore.background_pool import BackgroundPool
from trajstore.distributed.rank_group import RankGroup
from trajstore.errors import ClosedError
from trajstore.format.commit_record import CommitRecord, StreamExtent
from trajstore.replay.checkpoint_lineage import CheckpointLineage, prune
from trajstore.replay.collective_checkpoint import CollectiveCheckpoint
from trajstore.storage import Storage
from trajstore.store import checkpoints

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CapturedState:
    """What a checkpoint will hold, as it was in memory when it was captured.

    Attributes:
        name: Name of the checkpoint.
        streams: What it shows of every stream but the session's own.
        own_stream: The session's own stream.
        own_first: The first row of that stream that it shows.
        state: State of the session.
        record: The record of the session's own stream, and further state, once the captured steps are durable.
        ticket: Ticket of the commit that makes them durable.
        keep_last: Afterwards keep only this many checkpoints of the lineage; None: all.
        lane: Checkpoints of one lane are taken one after the other: ``"called"`` or ``"asked"``.
    """

    name: str
    streams: Mapping[str, StreamExtent]
    own_stream: str
    own_first: int
    state: Mapping[str, Any]
    record: Future[tuple[CommitRecord | None, Mapping[str, Any]]]
    ticket: int
    keep_last: int | None
    lane: str = ""

    @property
    def held(self) -> dict[str, int]:
        """By stream: the first row that must stay until the checkpoint has pinned it."""
        return {stream: extent.first for stream, extent in self.streams.items()} | {self.own_stream: self.own_first}

    def content(self) -> tuple[dict[str, StreamExtent], dict[str, Any]]:
        """The extents and the state of the checkpoint; waits until the captured steps are durable."""
        record, more = self.record.result()
        streams = dict(self.streams)
        if record is not None and self.own_first < record.rows:
            streams[record.id] = StreamExtent(self.own_first, record.rows, record.spans, record.text_bytes)
        return streams, {**self.state, **more}


class CheckpointWriter:
    """Writes one checkpoint at a time, on a thread. The next call raises its failure.

    Args:
        storage: Storage of the store.
        group: The ranks that take part.
        lineage: Lineage of the session.
        check: Takes the first rows that a checkpoint wants; raises if an eviction has passed them.
        commit: Waits for the commit of a ticket; tries it again if it has failed.
        pruned: Called after checkpoints were removed.
    """

    def __init__(
        self,
        storage: Storage,
        group: RankGroup,
        lineage: CheckpointLineage,
        check: Callable[[Mapping[str, int]], None],
        commit: Callable[[int], None],
        pruned: Callable[[], None],
    ) -> None:
        self._storage = storage
        self._group = group
        self._lineage = lineage
        self._check = check
        self._commit = commit
        self._pruned = pruned
        self._current: CapturedState | None = None
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._last: Future[None] | None = None
        self._old_notes: list[str] = []
        self.published: str | None = None  # id of the last checkpoint that was published
        self._threads = BackgroundPool(1, "trajstore-checkpoint")

    def hold(self, captured: CapturedState | None) -> None:
        """Protect the rows of a captured checkpoint from eviction; None: it was given up."""
        self._current = captured

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._current is not None

    def submit(self, checkpoint_id: str, captured: CapturedState) -> None:
        """Begin to write a checkpoint. The caller has waited for the one before, so that memory stays bounded."""
        self.hold(captured)
        try:
            self._last = self._threads.submit(self._run, checkpoint_id, captured)
        except RuntimeError as error:  # the thread has ended
            raise ClosedError("the buffer was closed before its checkpoint was begun") from error

    @property
    def held(self) -> dict[str, int]:
        """By stream: the first row that the checkpoint being written wants."""
        captured = self._current
        return captured.held if captured is not None else {}

    def _run(self, checkpoint_id: str, captured: CapturedState) -> None:
        try:
            self._save(checkpoint_id, captured)
            self.published = checkpoint_id
        except BaseException as failure:
            _log.warning("checkpoint %s could not be saved: %s", checkpoint_id, failure)
            with self._lock:
                self._failure = failure
        finally:
            self._current = None

    def _save(self, checkpoint_id: str, captured: CapturedState) -> None:
        if self._group.size > 1:
            self._save_collectively(checkpoint_id, captured)
            return
        streams, state = captured.content()
        with self._lineage.lock:
            parent = self._lineage.next_parent(self._storage, checkpoint_id)
            checkpoint = checkpoints.new_checkpoint(
                checkpoint_id, captured.name, parent=parent, world=self._group.id, streams=streams
            )
            checkpoints.save(self._storage, checkpoint, state, check=lambda: self._check(_first_rows(streams)))
            self._lineage.add(checkpoint_id)
        self._prune(checkpoint_id, captured.keep_last)

    def _prune(self, checkpoint_id: str, keep_last: int | None) -> None:
        if keep_last is not None and prune(self._storage, checkpoint_id, keep_last):
            self._pruned()

    def _save_collectively(self, checkpoint_id: str, captured: CapturedState) -> None:
        collective = CollectiveCheckpoint(
            self._storage,
            self._group,
            self._lineage,
            self._old_notes,
            checkpoint_id=checkpoint_id,
            name=captured.name,
            lane=captured.lane,
        )
        collective.save(lambda: self._save_part(checkpoint_id, captured))
        if self._group.is_leader:
            self._prune(checkpoint_id, captured.keep_last)

    def _save_part(self, checkpoint_id: str, captured: CapturedState) -> Mapping[str, StreamExtent]:
        """Make this rank's part durable; returns what it shows of each stream."""
        streams, state = captured.content()
        whole = checkpoints.new_checkpoint(
            checkpoint_id, captured.name, world=self._group.id, streams=streams, n_ranks=self._group.size
        )
        checkpoints.save_part(
            self._storage, whole, self._group.rank, state, check=lambda: self._check(_first_rows(streams))
        )
        return streams

    def wait(self) -> None:
        """Wait until the checkpoint being written is durable.

        Raises:
            BaseException: The failure of the checkpoint.
        """
        captured, last = self._current, self._last
        if captured is not None:
            try:
                self._commit(captured.ticket)
            except BaseException as failure:  # the storage still fails
                if self._group.size == 1:
                    raise  # the checkpoint keeps waiting for its commit
                self._give_up(captured, failure)
                raise
        if last is not None:
            last.result()
        self.raise_pending()

    def _give_up(self, captured: CapturedState, failure: BaseException) -> None:
        """Let the other ranks know that this one has failed. The caller raises the failure, so drop it here."""
        with contextlib.suppress(InvalidStateError):
            captured.record.set_exception(failure)
        if self._last is not None:
            self._last.result()
        self._take_failure()

    def cancel(self) -> None:
        """Give up a checkpoint that waits for its commit."""
        captured = self._current
        if captured is not None and not captured.record.done():
            captured.record.set_exception(ClosedError("the buffer was closed before its checkpoint was complete"))

    def raise_pending(self) -> None:
        """Raise the failure of a checkpoint, once."""
        failure = self._take_failure()
        if failure is not None:
            raise failure

    def _take_failure(self) -> BaseException | None:
        if self._failure is None:
            return None
        with self._lock:
            failure, self._failure = self._failure, None
        return failure

    def close(self) -> None:
        """End the thread, after the checkpoint being written."""
        self._threads.shutdown()
        self.raise_pending()


def _first_rows(streams: Mapping[str, StreamExtent]) -> dict[str, int]:
    return {stream: extent.first for stream, extent in streams.items()}
