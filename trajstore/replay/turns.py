"""How threads that append, threads that sample and checkpoints take turns."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

_YIELD_S = 0.05  # the longest time that an append waits for a batch


class TurnTaking:
    """Keeps appending and sampling threads from starving each other. It protects no data: locks do that."""

    def __init__(self) -> None:
        self._no_batch = threading.Event()  # set while no thread assembles a batch
        self._no_batch.set()
        self._may_append = threading.Event()  # cleared while a checkpoint waits for a commit to free room
        self._may_append.set()
        self._last_sampler = 0  # the thread that sampled last

    def begin_batch(self) -> None:
        self._no_batch.clear()
        self._last_sampler = threading.get_ident()

    def end_batch(self) -> None:
        self._no_batch.set()

    def before_append(self) -> None:
        """Wait while a checkpoint needs room, and give way once to a thread that assembles a batch."""
        if not self._may_append.is_set():
            self._may_append.wait()
        if not self._no_batch.is_set():
            # Two threads that run Python all the time would otherwise each wait for the other.
            self._no_batch.wait(_YIELD_S)

    def after_append(self) -> None:
        if self._last_sampler not in (0, threading.get_ident()):
            time.sleep(0)  # releases the interpreter's lock, which a sampling thread may be waiting for

    @contextlib.contextmanager
    def no_appends(self) -> Iterator[None]:
        """Hold back appends until the block ends."""
        self._may_append.clear()
        try:
            yield
        finally:
            self._may_append.set()
