"""Checkpoints that somebody asks for: another rank, a signal, a clock, or a note in the store."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trajstore.distributed.rank_group import RankGroup, list_worlds, put_world, rank_names, read_world
from trajstore.distributed.rank_notes import read_group
from trajstore.errors import (
    DataError,
    FormatError,
    RankError,
    RankTimeoutError,
    SchemaError,
    StorageError,
    TrajstoreError,
)
from trajstore.format.ids import is_stream_id, new_id
from trajstore.format.zarr_json import FORMAT, group_bytes
from trajstore.storage import Storage, open_storage
from trajstore.store import checkpoints
from trajstore.store.store import Url, check_root

_log = logging.getLogger(__name__)
_SLICE_S = 0.2  # the thread looks so often whether the program is over
_LOOK_S = 1.0  # so often somebody who waits looks whether others are there still


@dataclass(frozen=True, slots=True)
class RequestedCheckpoint:
    """A checkpoint that all ranks are to take: its number, id and name, and the requests that it answers."""

    n: int
    id: str
    name: str
    answers: tuple[int, ...]  # by rank: its requests up to this one


class CheckpointRequests:
    """Looks for requests every so often, on a thread of its own; rank 0 decides, all ranks follow.

    Args:
        storage: Of the store.
        world: The ranks.
        take: Takes the cut of this rank and begins to save it; returns a function that waits until it is published.
        poll_s: How often to look.
        every_s: Rank 0 asks by itself so often; None: never.
        checkpoint: That the world started from.
    """

    def __init__(
        self,
        storage: Storage,
        world: RankGroup,
        take: Callable[[str, str], Callable[[], None]],
        *,
        poll_s: float,
        every_s: float | None,
        checkpoint: str | None,
    ) -> None:
        self._storage = storage
        self._world = world
        self._take = take
        self._poll_s = poll_s
        self._every_s = every_s
        self._checkpoint = checkpoint
        self._due = time.monotonic() + every_s if every_s is not None else None
        self._condition = threading.Condition()
        self._n_asked = 0  # requests of this rank
        self._n_posted = 0
        self._name = ""
        self._done: list[tuple[RequestedCheckpoint, BaseException | None]] = []  # the last ones that came to an end
        self._answered = [0] * world.size  # by rank; of rank 0 only
        self._outside: str | None = None  # the request in the store that was answered last
        self._n = 0
        self._failure: BaseException | None = None  # not yet raised to anybody
        self._is_over = False  # the thread has ended by an error
        self._n_waiting = 0
        self._stopping = threading.Event()
        # No daemon: it ends when the main thread has. One that is killed inside torch's store aborts the process.
        self._thread = threading.Thread(target=self._loop, name="trajstore-attend", daemon=False)

    def start(self, *, is_back: bool) -> None:
        """Begin to look; ``is_back``: a rank that died and came back leaves alone what was decided before."""
        if self._world.is_leader:
            if read_world(self._storage, self._world.id) is None:
                put_world(self._storage, self._world.id, self._world.size, self._checkpoint)
            self._outside = self._request_outside()[0]  # what was asked of nobody
        if is_back:
            self._take_up()
        self._thread.start()

    def _take_up(self) -> None:
        before, own = self._announced(), self._world.read("request", self._world.rank)
        if before is not None:
            self._n, self._answered = before.n, list(before.answers)
        if own is not None:
            self._n_asked = self._n_posted = _checked_request(own, self._world.rank)[0]

    def ask(self, name: str) -> int:
        """Ask all ranks for a checkpoint; returns the number of this request, for `wait`."""
        checkpoints.new_checkpoint_id(name)  # refuses what is no name
        self._check_left()
        with self._condition:
            self._n_asked += 1
            n, self._name = self._n_asked, name
            self._condition.notify_all()
        return n

    def wait(self, n: int, timeout_s: float) -> str:
        """Wait until a request of this rank is answered; returns the id of the checkpoint.

        Raises:
            RankTimeoutError: It was not, in time.
            BaseException: What the checkpoint failed with.
        """

        def answer() -> tuple[RequestedCheckpoint, BaseException | None] | None:
            return next((d for d in self._done if d[0].answers[self._world.rank] >= n), None)

        with self._condition:
            self._n_waiting += 1
            try:
                self._await(lambda: bool(answer() or self._is_over), timeout_s)
            finally:
                self._n_waiting -= 1
            found = answer()
        if found is None:
            self.raise_pending()
            raise RankTimeoutError(f"no checkpoint within {timeout_s:g} s of asking for one; rank 0 decides")
        asked, failure = found
        if failure is not None:
            raise failure
        return asked.id

    def _await(self, is_done: Callable[[], bool], timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        while not is_done() and time.monotonic() < until:
            self._condition.wait(min(_LOOK_S, max(0.0, until - time.monotonic())))
            if not is_done():
                self._check_left()

    def _check_left(self) -> None:
        if left := self._world.left():
            raise RankError(f"{rank_names(left)} closed the buffer, so no checkpoint of all ranks can be taken")

    def raise_pending(self) -> None:
        """Raise what a checkpoint failed with that nobody waited for, or what ended the thread; once."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """End the thread, after what it is about."""
        with self._condition:
            self._stopping.set()
            self._condition.notify_all()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _loop(self) -> None:
        while self._is_wanted():
            try:
                with self._condition:
                    asked, name = self._n_asked, self._name
                if asked > self._n_posted:
                    self._world.post("request", {"n": asked, "name": name})
                    self._n_posted = asked
                self._look()
            except (RankError, StorageError) as failure:  # perhaps the next look succeeds
                _log.warning("a look for requested checkpoints failed: %s", failure)
            except BaseException as failure:
                _log.warning("no requested checkpoints from now on: %s", failure)
                with self._condition:
                    self._failure, self._is_over = failure, True
                    self._condition.notify_all()
                return
            with self._condition:
                until = time.monotonic() + self._poll_s
                while self._n_asked == self._n_posted and self._is_wanted() and time.monotonic() < until:
                    self._condition.wait(min(_SLICE_S, self._poll_s))

    def _is_wanted(self) -> bool:
        return not self._stopping.is_set() and threading.main_thread().is_alive()

    def _look(self) -> None:
        asked = self._decided() if self._world.is_leader else self._announced()
        if asked is None or asked.n <= self._n:
            return
        self._n = asked.n
        failure: BaseException | None = None
        try:
            self._take(asked.name, asked.id)()
        except TrajstoreError as error:
            failure = error
        with self._condition:
            self._done = [*self._done[-3:], (asked, failure)]
            if failure is not None and not self._n_waiting:
                self._failure = failure
            self._condition.notify_all()

    def _announced(self) -> RequestedCheckpoint | None:
        note = self._world.read("announce")
        return None if note is None else _checked_announcement(note, self._world.size)

    def _decided(self) -> RequestedCheckpoint | None:
        """What is asked for now, announced to all."""
        notes = self._world.board.read(range(self._world.size), "request")
        asked = {rank: _checked_request(note, rank) for rank, note in notes.items()}
        answers = [asked[rank][0] if rank in asked else 0 for rank in range(self._world.size)]
        fresh = [rank for rank, n in enumerate(answers) if n > self._answered[rank]]
        outside, outside_name = self._request_outside()
        names = [asked[rank][1] for rank in fresh]
        if outside != self._outside:
            names.append(outside_name)
        if self._due is not None and time.monotonic() >= self._due:
            names.append("periodic")
        if not names or self._world.left():  # those who are left alone have nobody to take one with
            return None
        if self._every_s is not None:
            self._due = time.monotonic() + self._every_s
        self._answered, self._outside = answers, outside
        found = RequestedCheckpoint(self._n + 1, new_id(names[0]), names[0], tuple(answers))
        note = {"n": found.n, "id": found.id, "name": found.name, "answers": answers}
        self._world.board.post_all({"announce": note, "begun/asked": found.id})
        return found

    def _request_outside(self) -> tuple[str | None, str]:
        own, what = read_group(self._storage, _request_key(self._world.id), "request")
        if own is None:
            return None, ""
        name, nonce = own.get("name"), own.get("nonce")
        if not isinstance(nonce, str) or not _is_name(name):
            raise FormatError(f"{what}: expected a name and a nonce")
        return nonce, str(name)


def _is_name(name: object) -> bool:
    try:
        return isinstance(name, str) and checkpoints.new_checkpoint_id(name) is not None
    except SchemaError:
        return False


def _is_count(n: object) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 62


def _checked_request(note: Any, rank: int) -> tuple[int, str]:
    if not isinstance(note, dict) or not _is_count(note.get("n")) or not _is_name(note.get("name")):
        raise FormatError(f"rank {rank} asks for a checkpoint with {note!r:.80}, expected a number and a name")
    return note["n"], note["name"]


def _checked_announcement(note: Any, size: int) -> RequestedCheckpoint:
    """What rank 0 has decided, trusting nothing in it."""
    given = note if isinstance(note, dict) else {}
    values: list[Any] = [given.get(key) for key in ("n", "id", "name", "answers")]
    n, id_, name, answers = values
    is_good = _is_count(n) and _is_name(name) and isinstance(id_, str) and is_stream_id(id_)
    is_good = is_good and id_.rpartition("-")[0] == name and isinstance(answers, list) and len(answers) == size
    if not is_good or not all(map(_is_count, answers)):
        raise FormatError(f"rank 0 announces a checkpoint with {note!r:.80}, expected n, id, name and answers")
    return RequestedCheckpoint(n, id_, name, tuple(answers))


def _request_key(world: str) -> str:
    return f"worlds/{world}/request/zarr.json"


def request_checkpoint(
    url: Url, name: str = "requested", *, storage_options: Mapping[str, Any] | None = None
) -> str:
    """Ask whoever writes a store for a checkpoint, from outside: leaves a note in it, and does not wait.

    Args:
        url: Of the store.
        name: What to call the checkpoint.
        storage_options: Options for fsspec's filesystem (credentials, endpoints); never stored or shown.

    Returns:
        Id of the world that was asked: the newest that looks for such notes.

    Raises:
        DataError: None ever did: a session does with several ranks, or where it has ``attend_s``.
    """
    storage = open_storage(url, storage_options)
    check_root(storage)
    checkpoints.new_checkpoint_id(name)  # refuses what is no name
    worlds = (world for world in list_worlds(storage) if _is_joined(storage, world))
    newest = next(worlds, None)
    if newest is None:
        raise DataError(
            f"{storage.display}: no session here looks for requests; it needs several ranks, or attend_s"
        )
    own: dict[str, Any] = {"format": FORMAT, "kind": "request", "nonce": os.urandom(16).hex(), "name": name}
    storage.put(_request_key(newest), group_bytes(own))
    return newest


def _is_joined(storage: Storage, world: str) -> bool:
    known = read_world(storage, world)
    return known is not None and known.get("joined") is True
