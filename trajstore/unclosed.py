"""Closes what a program leaves open: when its object is dropped, and when the process ends normally.

This is the only place that does so. A buffer or writer that holds data registers here. The registration keeps alive
what it holds, so that the buffer itself can be garbage-collected. Garbage collection may run on any thread, also on
one that holds a lock or that a commit is waiting for. So a finalizer only marks: it puts the registration into a
queue, and a thread closes it.

When the main thread has ended, everything that is still open is closed, newest first, so that a buffer comes before
what it was made from. This takes at most `EXIT_S` seconds. What could not be stored is logged as an error.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread as pools
import contextlib
import logging
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

EXIT_S = 60.0  # the most seconds by which the end of the process is delayed

_log = logging.getLogger(__name__)


class Registration:
    """Something that is open, until `end` is called.

    Args:
        face: The object that the program holds. If it is garbage-collected, ``close`` is called in a thread.
        close: Stores everything and releases it; must not refer to ``face``, and must call `end` when it succeeds.
            May be called from several threads, and again after a failure.
        flush: Stores everything.
        name: What it is and where it stores, for messages: "ReplayBuffer at runs/7".
    """

    def __init__(self, face: Any, close: Callable[[], None], flush: Callable[[], None], name: str) -> None:
        self.name = name
        self.is_private = False
        self.is_dropped = False
        self._close = close
        self._flush = flush
        self._after: Callable[[], None] | None = None
        self._registry = _registries[-1]
        self._finalizer = weakref.finalize(face, self._mark_dropped)
        self._finalizer.atexit = False
        self._registry.add(self)

    def end(self) -> None:
        """Forget it, because it was closed or given up. Calling it twice is harmless."""
        self._finalizer.detach()
        self._registry.remove(self)

    def make_private(self, free: Callable[[], None]) -> None:
        """Declare that nothing of it outlives the process.

        Then it may be dropped without a warning, ``free`` is called after it was dropped and closed, and nothing is
        done at the end of the process.
        """
        self.is_private, self._after = True, free

    def _mark_dropped(self) -> None:
        # A finalizer: no I/O, no waiting, no locks. `SimpleQueue.put` is safe here, also if it interrupts itself.
        registry = self._registry
        if registry is not _registries[-1] or registry.is_over:
            return  # a forked child: the data is its parent's; or the process has ended, and the failure is logged
        self.is_dropped = True
        registry.dropped.put(self)
        if not self.is_private:
            warnings.warn(f"{self.name} was dropped unclosed; {_ADVICE}", ResourceWarning, stacklevel=2)

    def close(self, when: str) -> None:
        """Close it, and log a failure."""
        first = _failure_of(self._close)
        # The first call may raise a failure that happened in the background before, and store nothing.
        failure = None if first is None else _failure_of(self._close)
        if failure is None and self._after is not None:
            failure = _failure_of(self._after)
        if failure is not None:
            _log.error(
                "%s could not be closed %s, so its last steps are not stored: %s", self.name, when, _text(failure)
            )
        elif first is not None:
            _log.warning("%s was closed %s, after a failure: %s", self.name, when, _text(first))

    def flush(self) -> None:
        """Store everything; a failure is left to `close`."""
        if _failure_of(self._flush) is not None:  # it may have happened in the background before
            _failure_of(self._flush)


_ADVICE = "call close(), or use it in a with statement"


class _Registry:
    """Everything that this process has open. A forked child gets an empty one.

    Attributes:
        dropped: What was garbage-collected unclosed.
        is_over: Whether the process has ended as far as this module is concerned.
    """

    def __init__(self) -> None:
        self.dropped: SimpleQueue[Registration] = SimpleQueue()
        self.is_over = False
        self._lock = threading.Lock()
        self._open: dict[Registration, None] = {}  # in order of registration
        self._thread: threading.Thread | None = None

    def add(self, registration: Registration) -> None:
        with self._lock:
            self._open[registration] = None
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_close_dropped, args=(self.dropped,), name="trajstore-close", daemon=True
                )
                self._thread.start()

    def remove(self, registration: Registration) -> None:
        with self._lock:
            self._open.pop(registration, None)

    def newest_first(self) -> list[Registration]:
        with self._lock:
            return [registration for registration in reversed(self._open) if not registration.is_private]


def open_registrations() -> list[Registration]:
    """What would be closed if the process ended now, newest first."""
    return _registries[-1].newest_first()


def _close_dropped(dropped: SimpleQueue[Registration]) -> None:
    while True:
        registration = dropped.get()
        registration.close("after it was dropped")
        del registration  # it must not stay alive while this thread waits


# ---- the end of the process


def _at_main_end() -> None:
    """Called when the main thread has ended, while thread pools still accept work."""
    registry = _registries[-1]
    if _threads_at_work():  # the program goes on without its main thread; `_at_end` follows
        _in_time(registry.newest_first(), Registration.flush)
    else:
        _at_end()


def _at_end() -> None:
    """Called when the program has ended: close everything."""
    registry = _registries[-1]
    if registry.is_over:
        return
    opened = registry.newest_first()
    for registration in opened:
        if registration.is_dropped:
            continue  # there was a warning
        try:
            warnings.warn(f"{registration.name} was left open; {_ADVICE}", ResourceWarning, stacklevel=2)
        except ResourceWarning as warning:
            _log.warning("%s", warning)
    late = _in_time(opened, lambda registration: registration.close("when the process ended"))
    registry.is_over = True
    for registration in late:
        _log.error(
            "%s was not closed in time when the process ended (at most %g s), so its last steps may not be stored",
            registration.name,
            EXIT_S,
        )
    if opened:
        _keep_interrupt()


def _keep_interrupt() -> None:
    """Let a process that an interrupt ends still end with its status, as shells expect.

    Python notes the interrupt, but the note is lost when modules that are imported while closing run code from a
    string, as dataclasses do.
    """
    if getattr(sys, "last_type", None) is KeyboardInterrupt:
        with contextlib.suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")  # noqa: S102 - only code that is run from a string makes Python note it


def _in_time(opened: list[Registration], call: Callable[[Registration], None]) -> list[Registration]:
    """Call a function with each registration, in order; return those for which it did not return in time.

    Each gets half of the time that is left before the next one is begun beside it, so that one storage that does
    not answer does not keep the others from theirs.
    """
    until, calls = time.monotonic() + EXIT_S, []
    try:
        for registration in opened:
            thread = threading.Thread(target=call, args=(registration,), name="trajstore-close", daemon=True)
            calls.append((registration, thread))
            thread.start()
            thread.join(max(0.0, until - time.monotonic()) / 2)
        for _, thread in calls:
            thread.join(max(0.0, until - time.monotonic()))
    except (KeyboardInterrupt, RuntimeError):  # the user does not want to wait; or no more threads can be started
        pass
    returned = {registration for registration, thread in calls if thread.ident and not thread.is_alive()}
    return [registration for registration in opened if registration not in returned]


def _threads_at_work() -> list[threading.Thread]:
    """The program's threads that Python waits for before it ends, without idle threads of pools."""
    queues, frames = getattr(pools, "_threads_queues", {}), sys._current_frames()
    waits_for_task = getattr(getattr(pools, "_worker", None), "__code__", None)
    managers = getattr(sys.modules.get("concurrent.futures.process"), "_threads_wakeups", {})
    found = []
    for thread in threading.enumerate():
        if thread is threading.current_thread() or thread in managers or thread.name.startswith("trajstore-"):
            continue
        if thread in queues:
            frame = frames.get(thread.ident or 0)
            is_idle = queues[thread].empty() and (frame is None or frame.f_code is waits_for_task)
        else:
            is_idle = thread.daemon or thread is threading.main_thread()
        if not is_idle:
            found.append(thread)
    return found


def _failure_of(call: Callable[[], None]) -> BaseException | None:
    try:
        call()
    except BaseException as failure:  # the thread that calls has no caller that could handle it
        return failure
    return None


def _text(failure: BaseException) -> str:
    return f"{type(failure).__name__}: {failure}"


def _start_over() -> None:
    _registries[:] = [_Registry()]  # a forked child has nothing open, and locks may be held in the old registry


_registries = [_Registry()]
os.register_at_fork(after_in_child=_start_over)
# `atexit` alone would be too late: it runs after Python's thread pools have ended, which clients of object stores
# need, and children of multiprocessing end without it.
threading._register_atexit(_at_main_end)  # type: ignore[attr-defined]
atexit.register(_at_end)
