"""Checks at run time that threads take the locks of the library in one order."""

from __future__ import annotations

import linecache
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

# Outermost first. A thread that holds a lock may wait only for locks of later groups.
LOCK_ORDER = (
    ("Session._ending", "CheckpointSchedule._lock", "Mixture._lock", "Readiness._appended"),
    ("BatchIterator._turn",),
    ("StoredBytes._measuring",),
    ("BatchAssembler.lock",),
    ("GarbageCollector._sweeping",),
    ("GarbageCollector._publishing",),
    ("WriterLifecycle.lock",),
    (
        *("WriterInbox.lock", "CommitThread._condition", "SamplesPerInsert._changed", "RunningStatistics._lock"),
        *("GarbageCollector._condition", "CompressedTier._lock", "CheckpointWriter._lock"),
        *("CheckpointRequests._condition", "StoreNotes._lock", "ChunkFetcher._counting", "Drawing._counting"),
        "ReadAhead._lock",
    ),
    ("Storage._lock", "FsspecConnection._lock"),
    ("BackgroundPool._lock", "WrittenFiles._lock", "_Registry._lock"),
    ("_Count._lock",),
)
_LEVELS = {name: level for level, names in enumerate(LOCK_ORDER) for name in names}
_COMMIT_THREAD = "trajstore-commit"


class LockOrder:
    """A record of how threads took traced locks.

    Attributes:
        nested: Names of a lock that a thread held and of one that it waited for.
        held_in_wait: Names of a lock that a thread held while it waited for a condition, and of the condition.
        by_commit_thread: Names of locks that the background thread of a writer waited for.
    """

    def __init__(self) -> None:
        self.nested: set[tuple[str, str]] = set()
        self.held_in_wait: set[tuple[str, str]] = set()
        self.by_commit_thread: set[str] = set()
        self._threads = threading.local()

    @property
    def held(self) -> list[TracedLock]:
        """The locks that this thread holds, once for each time it took them."""
        if not hasattr(self._threads, "held"):
            self._threads.held = []
        found: list[TracedLock] = self._threads.held
        return found

    def before_wait(self, lock: TracedLock) -> None:
        """Record that this thread may have to wait for a lock; not for one that it holds."""
        if lock not in self.held:
            self.nested |= {(other.name, lock.name) for other in self.held}
            if threading.current_thread().name == _COMMIT_THREAD:
                self.by_commit_thread.add(lock.name)

    def check(self) -> None:
        """Fail unless all locks were taken in the order above."""
        seen = {name for pair in self.nested for name in pair}
        assert seen <= _LEVELS.keys(), f"give {sorted(seen - _LEVELS.keys())} a place in LOCK_ORDER"
        inverted = sorted(pair for pair in self.nested if _LEVELS[pair[0]] >= _LEVELS[pair[1]])
        assert not inverted, f"held and then waited for, against LOCK_ORDER: {inverted}"
        awaited = {held for held, condition in self.held_in_wait if condition == "CommitThread._condition"}
        stuck = sorted(awaited & self.by_commit_thread)
        assert not stuck, f"held by a thread that waits for a commit, and wanted by the one that commits: {stuck}"


class TracedLock:
    """A lock that reports to a `LockOrder` which threads take it; also the lock of a condition."""

    def __init__(self, lock: Any, name: str, order: LockOrder) -> None:
        self._lock, self.name, self._order = lock, name, order

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if blocking and timeout < 0:  # a thread that gives up cannot be part of a deadlock
            self._order.before_wait(self)
        is_taken = bool(self._lock.acquire(blocking, timeout))
        if is_taken:
            self._order.held.append(self)
        return is_taken

    def release(self) -> None:
        self._lock.release()
        self._order.held.remove(self)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    # Methods that a condition calls on its lock.

    def _is_owned(self) -> bool:
        return self in self._order.held

    def _release_save(self) -> Any:
        held = self._order.held
        n = held.count(self)
        held[:] = [lock for lock in held if lock is not self]
        self._order.held_in_wait |= {(lock.name, self.name) for lock in held}
        return self._lock._release_save(), n

    def _acquire_restore(self, state: Any) -> None:
        self._lock._acquire_restore(state[0])
        self._order.held.extend([self] * state[1])


class _TracedThreading:
    """The module `threading`, with traced locks."""

    def __init__(self, order: LockOrder) -> None:
        self._order = order

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)

    def Lock(self) -> TracedLock:
        return TracedLock(threading.Lock(), _name_of(sys._getframe(1)), self._order)

    def RLock(self) -> TracedLock:
        return TracedLock(threading.RLock(), _name_of(sys._getframe(1)), self._order)

    def Condition(self) -> threading.Condition:
        return threading.Condition(TracedLock(threading.RLock(), _name_of(sys._getframe(1)), self._order))  # type: ignore[arg-type]


def _name_of(frame: Any) -> str:
    """The class and attribute that a lock is made for, by the line that makes it."""
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    attribute = re.search(r"self\.(\w+)[^=]*=", line)
    assert attribute is not None, f"a lock that is no attribute: {line}"
    return f"{frame.f_code.co_qualname.split('.')[0]}.{attribute[1]}"


@contextmanager
def traced_locks() -> Iterator[LockOrder]:
    """Trace the locks of everything that the library makes in this block; check their order at its end."""
    order, patch = LockOrder(), pytest.MonkeyPatch()
    for name, module in list(sys.modules.items()):
        if name.startswith("trajstore.") and getattr(module, "threading", None) is threading:
            patch.setattr(module, "threading", _TracedThreading(order))
    try:
        yield order
    finally:
        patch.undo()
    order.check()
