"""Checkpoints on request: of a rank (also from a signal handler), of a clock, or of another process."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from trajstore.distributed.rank_group import RankGroup, rank_names
from trajstore.distributed.rank_notes import TorchNotes
from trajstore.distributed.request_notes import (
    CheckpointRequest,
    OutsideRequest,
    RequestedCheckpoint,
    parse_announcement,
    parse_request,
    put_outside_request,
    read_outside_request,
)
from trajstore.distributed.world_records import list_worlds, put_world, read_world
from trajstore.errors import DataError, RankError, RankTimeoutError, StorageError, TrajstoreError
from trajstore.format.ids import new_id
from trajstore.storage import Storage, open_storage
from trajstore.store import checkpoints
from trajstore.store.store import Url, check_root

_log = logging.getLogger(__name__)
_STOP_CHECK_S = 0.2  # the thread checks this often whether the program has ended
_LEFT_CHECK_S = 1.0  # a waiting caller checks this often whether other ranks have closed their buffers
_N_CONCLUDED = 4  # concluded checkpoints whose outcome is kept for callers of `wait`


class CheckpointRequests:
    """Checks for requests on a background thread. Rank 0 decides and announces; all ranks then take the checkpoint.

    Args:
        storage: Storage of the store.
        group: The ranks.
        begin_checkpoint: Given a name and an id, captures this rank's state and starts to save it. Returns a
            function that waits until the checkpoint is published.
        poll_s: Seconds between checks for requests.
        every_s: Rank 0 also takes a checkpoint this often, in seconds; None: never.
        checkpoint: Id of the checkpoint that the world started from.
    """

    def __init__(
        self,
        storage: Storage,
        group: RankGroup,
        begin_checkpoint: Callable[[str, str], Callable[[], None]],
        *,
        poll_s: float,
        every_s: float | None,
        checkpoint: str | None,
    ) -> None:
        self._storage = storage
        self._group = group
        self._begin_checkpoint = begin_checkpoint
        self._poll_s = poll_s
        self._every_s = every_s
        self._checkpoint = checkpoint
        self._due = time.monotonic() + every_s if every_s is not None else None
        self._condition = threading.Condition()
        self._n_asked = 0  # requests of this rank
        self._n_posted = 0  # of these, requests that the other ranks can see
        self._asked_name = ""  # of the last request of this rank
        self._concluded: list[tuple[RequestedCheckpoint, BaseException | None]] = []  # the last few, with failures
        self._answered = [0] * group.size  # on rank 0: by rank, the number of its last answered request
        self._last_outside: OutsideRequest | None = None  # on rank 0: answered, or made before this session
        self._last_number = 0  # of the last announcement that this rank has acted on
        self._failure: BaseException | None = None  # not raised to any caller yet
        self._has_ended = False  # the thread, by an error
        self._n_waiting = 0
        self._stopping = threading.Event()
        # Killing the thread inside torch's store aborts the process, so there the process waits until it has ended.
        self._thread = threading.Thread(
            target=self._run,
            name="trajstore-checkpoint-requests",
            daemon=not isinstance(group.notes, TorchNotes),
        )

    def start(self, *, is_back: bool) -> None:
        """Start to check for requests.

        Args:
            is_back: This session replaces one of the same rank that died; announcements and requests from before
                are not acted on again.
        """
        if self._group.is_leader:
            if read_world(self._storage, self._group.id) is None:
                put_world(self._storage, self._group.id, self._group.size, self._checkpoint)
            self._last_outside = read_outside_request(self._storage, self._group.id)
        if is_back:
            self._skip_earlier_requests()
        self._thread.start()

    def _skip_earlier_requests(self) -> None:
        announced, own_request = self._read_announced(), self._group.read("request", self._group.rank)
        if announced is not None:
            self._last_number, self._answered = announced.number, list(announced.answers)
        if own_request is not None:
            self._n_asked = self._n_posted = parse_request(own_request, self._group.rank).number

    # ---- callers

    def ask(self, name: str) -> int:
        """Ask all ranks for a checkpoint; returns the number of this request, for `wait`.

        Raises:
            SchemaError: The name is not allowed.
            RankError: A rank has closed its buffer.
        """
        checkpoints.new_checkpoint_id(name)  # raises if the name is not allowed
        self._check_none_left()
        with self._condition:
            self._n_asked += 1
            number, self._asked_name = self._n_asked, name
            self._condition.notify_all()
        return number

    def wait(self, number: int, timeout_s: float) -> str:
        """Wait until a request of this rank is answered; returns the id of the checkpoint.

        Raises:
            RankTimeoutError: It was not answered in time.
            RankError: A rank has closed its buffer.
            BaseException: The checkpoint failed with this error.
        """

        def answer() -> tuple[RequestedCheckpoint, BaseException | None] | None:
            return next((c for c in self._concluded if c[0].answers[self._group.rank] >= number), None)

        with self._condition:
            self._n_waiting += 1
            try:
                self._wait_until(lambda: bool(answer() or self._has_ended), timeout_s)
            finally:
                self._n_waiting -= 1
            found = answer()
        if found is None:
            self.raise_pending()
            raise RankTimeoutError(f"rank 0 did not take the requested checkpoint within {timeout_s:g} s")
        checkpoint, failure = found
        if failure is not None:
            raise failure
        return checkpoint.id

    def _wait_until(self, is_done: Callable[[], bool], timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        while not is_done() and time.monotonic() < until:
            self._condition.wait(min(_LEFT_CHECK_S, max(0.0, until - time.monotonic())))
            if not is_done():
                self._check_none_left()

    def _check_none_left(self) -> None:
        if left := self._group.ranks_that_left():
            raise RankError(f"{rank_names(left)} closed the buffer, so no checkpoint of all ranks can be taken")

    def raise_pending(self) -> None:
        """Raise, once, the error of a checkpoint that no caller waited for, or the error that ended the thread."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """End the thread after the checkpoint that it is taking."""
        with self._condition:
            self._stopping.set()
            self._condition.notify_all()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    # ---- the thread

    def _run(self) -> None:
        while self._should_continue():
            try:
                self._post_own_request()
                self._take_next()
            except (RankError, StorageError) as failure:  # may be temporary
                _log.warning("a check for checkpoint requests failed, and is repeated: %s", failure)
            except BaseException as failure:
                _log.warning("checkpoint requests are not answered from now on: %s", failure)
                with self._condition:
                    self._failure, self._has_ended = failure, True
                    self._condition.notify_all()
                return
            self._pause()

    def _should_continue(self) -> bool:
        return not self._stopping.is_set() and threading.main_thread().is_alive()

    def _pause(self) -> None:
        """Wait until the next check is due, this rank makes a request, or the thread shall stop."""
        with self._condition:
            until = time.monotonic() + self._poll_s
            while self._n_asked == self._n_posted and self._should_continue() and time.monotonic() < until:
                self._condition.wait(min(_STOP_CHECK_S, self._poll_s))

    def _post_own_request(self) -> None:
        with self._condition:
            number, name = self._n_asked, self._asked_name
        if number > self._n_posted:
            self._group.post("request", CheckpointRequest(number, name).to_note())
            self._n_posted = number

    def _take_next(self) -> None:
        """Take the checkpoint that is announced, if it is new."""
        announced = self._announce() if self._group.is_leader else self._read_announced()
        if announced is None or announced.number <= self._last_number:
            return
        self._last_number = announced.number
        failure: BaseException | None = None
        try:
            self._begin_checkpoint(announced.name, announced.id)()
        except TrajstoreError as error:
            failure = error
        with self._condition:
            self._concluded = [*self._concluded[1 - _N_CONCLUDED :], (announced, failure)]
            if failure is not None and not self._n_waiting:
                self._failure = failure
            self._condition.notify_all()

    def _read_announced(self) -> RequestedCheckpoint | None:
        note = self._group.read("announce")
        return None if note is None else parse_announcement(note, self._group.size)

    # ---- rank 0

    def _announce(self) -> RequestedCheckpoint | None:
        """Announce a checkpoint to all ranks if there is a new request or one is due."""
        notes = self._group.notes.read(range(self._group.size), "request")
        requests = {rank: parse_request(note, rank) for rank, note in notes.items()}
        answers = [requests[rank].number if rank in requests else 0 for rank in range(self._group.size)]
        outside = read_outside_request(self._storage, self._group.id)
        names = [requests[rank].name for rank, n in enumerate(answers) if n > self._answered[rank]]
        if outside is not None and outside != self._last_outside:
            names.append(outside.name)
        if self._due is not None and time.monotonic() >= self._due:
            names.append("periodic")
        if not names or self._group.ranks_that_left():  # a checkpoint needs all ranks
            return None
        if self._every_s is not None:
            self._due = time.monotonic() + self._every_s
        self._answered, self._last_outside = answers, outside
        checkpoint = RequestedCheckpoint(self._last_number + 1, new_id(names[0]), names[0], tuple(answers))
        self._group.notes.post_all({"announce": checkpoint.to_note(), "begun/asked": checkpoint.id})
        return checkpoint


def request_checkpoint(
    url: Url, name: str = "requested", *, storage_options: Mapping[str, Any] | None = None
) -> str:
    """Ask the running session of a store for a checkpoint, from any process.

    Puts a note into the store and does not wait for the checkpoint.

    Args:
        url: URL of the store.
        name: Name of the checkpoint.
        storage_options: Options for fsspec's filesystem (credentials, endpoints); never stored or shown.

    Returns:
        Id of the world that was asked: the newest one whose ranks have all joined.

    Raises:
        DataError: No session checks for requests. Sessions of several ranks do, and single ones with ``attend_s``.
    """
    storage = open_storage(url, storage_options)
    check_root(storage)
    checkpoints.new_checkpoint_id(name)  # raises if the name is not allowed
    newest = next((world for world in list_worlds(storage) if _is_joined(storage, world)), None)
    if newest is None:
        raise DataError(
            f"{storage.display}: no session checks for requests; start one with several ranks, or with attend_s"
        )
    put_outside_request(storage, newest, name)
    return newest


def _is_joined(storage: Storage, world: str) -> bool:
    record = read_world(storage, world)
    return record is not None and record.get("joined") is True
