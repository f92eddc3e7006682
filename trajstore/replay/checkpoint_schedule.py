"""When a buffer's checkpoints are taken: by a call on all ranks, on request of any one of them, or by the clock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trajstore.distributed.checkpoint_requests import CheckpointRequests
from trajstore.distributed.rank_group import RankGroup
from trajstore.replay.checkpoint_lineage import CheckpointLineage, is_published
from trajstore.replay.checkpoint_writer import CapturedState, CheckpointWriter
from trajstore.replay.collective_checkpoint import collective_id, has_failed_alone
from trajstore.storage import Storage
from trajstore.store import checkpoints

_POLL_S = 1.0
_REQUEST_TIMEOUT_S = 600.0
_CALLED, _ASKED = "called", "asked"


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """When checkpoints are taken without a call to `save`.

    Args:
        attend_s: Seconds between checks for requests; None: a single session does not check.
        every_s: Take a checkpoint this often; None: never.
        keep_last: Number of requested and timed checkpoints to keep; None: all.
    """

    attend_s: float | None
    every_s: float | None
    keep_last: int | None


class CheckpointSchedule:
    """Captures checkpoints and has them written; called and requested ones run side by side.

    Args:
        storage: Storage of the store.
        group: The ranks that take part.
        parent: Id of the checkpoint that the session continued.
        check: Takes the first rows that a checkpoint wants; raises if an eviction has passed them.
        commit: Waits for the commit of a ticket; tries it again if it has failed.
        pruned: Called after checkpoints were removed.
        capture: Captures this moment, given a name, how many checkpoints to keep, and what gets the result first.
        options: When checkpoints are taken without a call.
    """

    def __init__(
        self,
        storage: Storage,
        group: RankGroup,
        parent: str | None,
        check: Callable[[Mapping[str, int]], None],
        commit: Callable[[int], None],
        pruned: Callable[[], None],
        capture: Callable[[str, int | None, Callable[[CapturedState], None]], CapturedState],
        options: CheckpointOptions,
    ) -> None:
        self._storage = storage
        self._group = group
        self._capture = capture
        self._options = options
        self._lineage = CheckpointLineage(parent)
        self._called, self._asked = (
            CheckpointWriter(storage, group, self._lineage, check, commit, pruned) for _ in range(2)
        )
        self._lock = threading.Lock()  # one capture at a time
        self._last_id: str | None = None  # of this rank's last called checkpoint, and what it followed
        self._after: object = None
        self._requests: CheckpointRequests | None = None
        if group.size > 1 or options.attend_s is not None or options.every_s is not None:
            self._requests = CheckpointRequests(
                storage,
                group,
                self._save_requested,
                poll_s=options.attend_s or _POLL_S,
                every_s=options.every_s,
                checkpoint=parent,
            )

    def start(self, *, is_back: bool = False) -> None:
        """Begin to check for requests; ``is_back``: this session replaces one of the same rank that died."""
        if is_back:
            self._last_id = self._concluded()
        if self._requests is not None:
            self._requests.start(is_back=is_back)

    @property
    def newest(self) -> str | None:
        """Id of the checkpoint that was saved last, or that the session continued."""
        return self._lineage.newest

    @property
    def held(self) -> dict[str, int]:
        """By stream: the first row that checkpoints being written want."""
        held = self._called.held
        for stream, row in self._asked.held.items():
            held[stream] = min(row, held.get(stream, row))
        return held

    def save(self, name: str, *, wait: bool, keep_last: int | None) -> str:
        """Capture this rank's state now; all ranks call this with the same name."""
        checkpoints.new_checkpoint_id(name)  # refuses a bad name before anything begins
        id_ = earlier = None
        while id_ is None:  # another thread may be faster after the wait
            earlier = self._failure_of_previous() or earlier
            id_ = self._begin(name, keep_last)
        if earlier is not None:
            earlier.add_note(f"trajstore: that was an earlier checkpoint; '{id_}' is being written")
            raise earlier
        if wait:
            self._called.wait()
        return id_

    def _begin(self, name: str, keep_last: int | None) -> str | None:
        """Capture the state and have it written; None if another checkpoint is being written."""
        with self._lock:
            if self._called.is_busy:
                return None
            id_ = checkpoints.new_checkpoint_id(name) if self._group.size == 1 else self._next_id(name)
            self._submit(self._called, id_, name, keep_last, _CALLED)
            return id_

    def _submit(self, writer: CheckpointWriter, id_: str, name: str, keep_last: int | None, lane: str) -> None:
        try:
            writer.submit(id_, replace(self._capture(name, keep_last, writer.hold), lane=lane))
        except BaseException:
            writer.hold(None)
            raise

    def _failure_of_previous(self) -> BaseException | None:
        """Wait for the checkpoint before. With several ranks its failure must not keep this rank from the next."""
        try:
            self._called.wait()
        except BaseException as failure:
            if self._group.size == 1 or not isinstance(failure, Exception):
                raise
            return failure
        return None

    def _next_id(self, name: str) -> str:
        """The id that all ranks give to the next checkpoint: it follows from the one that rank 0 concluded last."""
        last = self._concluded()
        if last not in (self._after, self._last_id):  # rank 0 has concluded one without this rank
            missed = collective_id(self._group.id, name, str(self._last_id))
            if has_failed_alone(self._group, missed):  # that is the one which this call is for
                last = self._last_id
        # Rank 0 may not have been able to post its conclusion: then the store decides.
        if last == self._after and self._last_id is not None and self._is_published(self._last_id):
            last = self._last_id
        self._after, self._last_id = last, collective_id(self._group.id, name, str(last))
        return self._last_id

    def _concluded(self) -> Any:
        return self._group.read(f"concluded/{_CALLED}")

    def _is_published(self, id_: str) -> bool:
        return self._called.published == id_ or is_published(self._storage, id_)

    def ask(self, name: str, *, wait: bool, timeout_s: float | None) -> str | None:
        """Ask all ranks for a checkpoint; each captures its state when it sees the request."""
        if self._requests is None:
            return self.save(name, wait=wait, keep_last=self._options.keep_last)
        n = self._requests.ask(name)
        return self._requests.wait(n, timeout_s or _REQUEST_TIMEOUT_S) if wait else None

    def _save_requested(self, name: str, id_: str) -> Callable[[], None]:
        with self._lock:
            self._submit(self._asked, id_, name, self._options.keep_last, _ASKED)
        return self._asked.wait

    def wait(self) -> None:
        """Wait until the called checkpoint being written is durable."""
        self._called.wait()

    def raise_pending(self) -> None:
        """Raise the failure of a checkpoint, once."""
        self._called.raise_pending()
        if self._requests is not None:
            self._requests.raise_pending()

    def cancel(self) -> None:
        """Give up checkpoints that wait for their commit, or for other ranks."""
        self._group.is_closing.set()
        for writer in (self._called, self._asked):
            writer.cancel()

    def close(self) -> None:
        """End all threads, after the checkpoints being written; raises the first failure that is left."""
        requests = [] if self._requests is None else [self._requests.close, self._requests.raise_pending]
        failures: list[BaseException] = []
        for end in (self._called.close, *requests, self._asked.close):
            try:
                end()
            except BaseException as failure:
                failures.append(failure)
        if failures:
            raise failures[0]
