"""When a writer may be used: its lock, the process that owns it, and whether it is closed."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from trajstore.errors import ClosedError

_BRIEF_S = 0.1


class WriterLifecycle:
    """The lock of a writer and the states it goes through: open, ending, closed.

    Args:
        stream: Id of the writer's stream, for messages.

    Attributes:
        lock: Held while anything is appended or handed off.
        is_ending: `close` or `discard` was called, or an interrupt tore a change: no call may append any more.
        is_closed: Everything is released.
    """

    def __init__(self, stream: str) -> None:
        self.lock = threading.RLock()
        self.is_ending = False
        self.is_closed = False
        self._stream = stream
        self._pid = os.getpid()
        self._brief_threads: set[int] = set()

    def check_process(self) -> None:
        """Raise in a forked child. Call it before taking the lock, which may never be released there."""
        if self._pid != os.getpid():
            raise ClosedError(
                f"writer of stream '{self._stream}' belongs to process {self._pid}; open one in this process"
            )

    def own_lock(self) -> threading.RLock:
        """The lock, to be taken with ``with``; raises in a forked child."""
        if self._pid != os.getpid():
            self.check_process()
        return self.lock

    def check_open(self) -> None:
        """Raise if the writer is closed or being closed. The caller holds the lock."""
        if self.is_closed:
            raise ClosedError(f"writer of stream '{self._stream}' is closed; open another with store.writer()")
        if self.is_ending:
            raise ClosedError(f"writer of stream '{self._stream}' is being closed; call close() again")

    @contextlib.contextmanager
    def briefly(self) -> Iterator[None]:
        """Announce that this thread takes the lock only for a moment and appends nothing."""
        self._brief_threads.add(threading.get_ident())
        try:
            yield
        finally:
            self._brief_threads.discard(threading.get_ident())

    def try_lock(self, blocking: bool, is_ticking: bool) -> bool:
        """Take the lock; return whether that succeeded.

        Args:
            blocking: Whether to wait for any thread that holds the lock.
            is_ticking: Whether the commit thread may hold the lock at this moment.
        """
        if self.lock.acquire(blocking=blocking):
            return True
        # Threads that hold the lock only briefly are waited for: else a reader would miss appended steps.
        return bool(is_ticking or self._brief_threads) and self.lock.acquire(timeout=_BRIEF_S)
