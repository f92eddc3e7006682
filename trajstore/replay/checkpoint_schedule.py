"""When a buffer's checkpoints are taken: by its own call, all ranks at theirs; or asked for by anybody."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from trajstore.distributed.checkpoint_requests import CheckpointRequests
from trajstore.distributed.rank_group import RankGroup
from trajstore.replay.checkpoint_writer import (
    CapturedState,
    CheckpointLineage,
    CheckpointWriter,
    collective_id,
    is_published,
)
from trajstore.storage import Storage
from trajstore.store import checkpoints

_POLL_S = 1.0
_ASKED_S = 600.0
_CALLED, _ASKED = "called", "asked"


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """How checkpoints come about that nobody here calls for.

    Args:
        attend_s: Look so often whether anybody asks for one; None: never by a single session.
        every_s: Take one so often.
        keep_last: Of those that were asked for, keep so many.
    """

    attend_s: float | None
    every_s: float | None
    keep_last: int | None


class CheckpointSchedule:
    """Takes cuts and has them saved, those that were called for and those that were asked for side by side.

    Args:
        storage: Of the store.
        world: The ranks that take part.
        parent: Id of the checkpoint that the session started from.
        check: Given the first rows that a checkpoint wants, raises if an eviction has passed them.
        commit: Waits for the commit of a ticket, giving it another try if it failed.
        take: Takes the cut of this moment: given its name, how many to keep, and who is told of it at once.
        options: See there.
    """

    def __init__(
        self,
        storage: Storage,
        world: RankGroup,
        parent: str | None,
        check: Callable[[Mapping[str, int]], None],
        commit: Callable[[int], None],
        take: Callable[[str, int | None, Callable[[CapturedState], None]], CapturedState],
        options: CheckpointOptions,
    ) -> None:
        self._storage = storage
        self._world = world
        self._take = take
        self._options = options
        self._lineage = CheckpointLineage(parent)
        self._called, self._asked = (
            CheckpointWriter(storage, world, self._lineage, check, commit) for _ in range(2)
        )
        self._lock = threading.Lock()  # one cut at a time
        self._last_id: str | None = None  # of this rank's last one, and what that followed from
        self._after: object = None
        self._attendant: CheckpointRequests | None = None
        if world.size > 1 or options.attend_s is not None or options.every_s is not None:
            self._attendant = CheckpointRequests(
                storage,
                world,
                self._take_asked,
                poll_s=options.attend_s or _POLL_S,
                every_s=options.every_s,
                checkpoint=parent,
            )

    def start(self, *, is_back: bool = False) -> None:
        """Look for requests from now on; ``is_back``: after a session of the same rank that died."""
        if self._attendant is not None:
            self._attendant.start(is_back=is_back)

    @property
    def newest(self) -> str | None:
        """The checkpoint that was saved last, or that the session started from."""
        return self._lineage.newest

    @property
    def held(self) -> dict[str, int]:
        """By stream, the first row that a checkpoint on its way wants."""
        held = self._called.held
        for stream, row in self._asked.held.items():
            held[stream] = min(row, held.get(stream, row))
        return held

    def save(self, name: str, *, wait: bool, keep_last: int | None) -> str:
        """Take this rank's cut now; all ranks call this with the same name."""
        checkpoints.new_checkpoint_id(name)  # refuses names before anything is begun
        id_ = before = None
        while id_ is None:  # another thread may be faster after the wait
            before = self._before() or before
            id_ = self._begin(name, keep_last)
        if before is not None:
            before.add_note(f"trajstore: that was an earlier checkpoint; '{id_}' is on its way")
            raise before
        if wait:
            self._called.wait()
        return id_

    def _begin(self, name: str, keep_last: int | None) -> str | None:
        """Take the cut and have it saved; None if another one is on its way."""
        with self._lock:
            if self._called.is_busy:
                return None
            id_ = checkpoints.new_checkpoint_id(name) if self._world.size == 1 else self._next_id(name)
            self._submit(self._called, id_, name, keep_last, _CALLED)
            return id_

    def _submit(
        self, checkpointer: CheckpointWriter, id_: str, name: str, keep_last: int | None, lane: str
    ) -> None:
        try:
            checkpointer.submit(id_, replace(self._take(name, keep_last, checkpointer.hold), lane=lane))
        except BaseException:
            checkpointer.hold(None)
            raise

    def _before(self) -> BaseException | None:
        """Wait for the checkpoint before; what it failed with must not keep this rank from the next one."""
        try:
            self._called.wait()
        except BaseException as failure:
            if self._world.size == 1 or not isinstance(failure, Exception):
                raise
            return failure
        return None

    def _next_id(self, name: str) -> str:
        """The id that all ranks give to the next checkpoint: it follows from the one that rank 0 concluded last."""
        last = self._world.read(f"concluded/{_CALLED}")
        # Rank 0 may not have been able to tell: then what is there decides.
        if last == self._after and self._last_id is not None and self._is_published(self._last_id):
            last = self._last_id
        self._after, self._last_id = last, collective_id(self._world.id, name, str(last))
        return self._last_id

    def _is_published(self, id_: str) -> bool:
        return self._called.published == id_ or is_published(self._storage, id_)

    def ask(self, name: str, *, wait: bool, timeout_s: float | None) -> str | None:
        """Ask all ranks for a checkpoint, wherever they are; each takes its cut when it hears of it."""
        if self._attendant is None:
            return self.save(name, wait=wait, keep_last=self._options.keep_last)
        n = self._attendant.ask(name)
        return self._attendant.wait(n, timeout_s or _ASKED_S) if wait else None

    def _take_asked(self, name: str, id_: str) -> Callable[[], None]:
        with self._lock:
            self._submit(self._asked, id_, name, self._options.keep_last, _ASKED)
        return self._asked.wait

    def wait(self) -> None:
        """Wait until what was begun is durable."""
        self._called.wait()

    def raise_pending(self) -> None:
        self._called.raise_pending()
        if self._attendant is not None:
            self._attendant.raise_pending()

    def cancel(self) -> None:
        """Give up what waits for its commit, or for other ranks."""
        self._world.is_closing.set()
        for checkpointer in (self._called, self._asked):
            checkpointer.cancel()

    def close(self) -> None:
        """End all threads, after what is on its way; raises the first of what is left to raise."""
        attended = [] if self._attendant is None else [self._attendant.close, self._attendant.raise_pending]
        failures: list[BaseException] = []
        for end in (self._called.close, *attended, self._asked.close):
            try:
                end()
            except BaseException as failure:
                failures.append(failure)
        if failures:
            raise failures[0]
