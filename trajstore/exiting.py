"""A last checkpoint before a process ends: by a signal, or by an exception that nobody catches."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import Any

_log = logging.getLogger(__name__)


class ExitHooks:
    """Calls ``save`` before the process ends by a signal or an uncaught exception; then it ends as it would have.

    A signal is handled on a thread: the main one may be in the middle of a change, or wait for a dead peer. Made
    in the main thread. What ``save`` raises is logged: the process ends all the same.

    Args:
        save: Given why.
        signals: Which signals.
        exceptions: Whether uncaught exceptions count.
    """

    def __init__(self, save: Callable[[str], None], signals: Iterable[int], exceptions: bool) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("checkpoint_on_exit: signal handlers can be set in the main thread only")
        self._save = save
        self._before: dict[int, Any] = {}
        self._hook: Any = None
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._owns_wakeup = self._is_saved = False
        self.handles_exceptions = exceptions
        for number in signals:
            self._before[number] = signal.signal(number, self._handle)
        if self._before:
            threading.Thread(target=self._loop, name="trajstore-exit", daemon=True).start()
            self._wake_by_signal()
        if exceptions:
            self._hook, sys.excepthook = sys.excepthook, self._raised

    def _wake_by_signal(self) -> None:
        """Hear of signals even while the main thread is in a call that runs no Python, if nobody else does so."""
        other = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._owns_wakeup = other == -1
        if not self._owns_wakeup:
            signal.set_wakeup_fd(other)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_saved and callable(self._before.get(number)):
            self._before[number](number, frame)
        elif not self._owns_wakeup:
            os.write(self._write, bytes([number]))

    def _loop(self) -> None:
        while data := os.read(self._read, 1):
            number = data[0]
            if not number:
                return
            if number in self._before and not self._is_saved:
                self.save(f"signal {signal.Signals(number).name}")
                self._is_saved = True
                self._end_by(number)

    def _end_by(self, number: int) -> None:
        """Let the signal do what it would have done."""
        if self._before[number] == signal.SIG_DFL:
            # Python lets only the main thread change this, and that one may be stuck.
            ctypes.CDLL(None).signal(number, None)
        if self._before[number] != signal.SIG_IGN:
            os.kill(os.getpid(), number)

    def _raised(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, Exception):
            self.save(f"{kind.__name__}")
        if self._hook is not None:
            self._hook(kind, error, trace)

    def save(self, why: str) -> None:
        """Try; what goes wrong is logged."""
        try:
            self._save(why)
        except BaseException as failure:
            _log.error("no checkpoint before the end (%s): %s", why, failure)

    def remove(self) -> None:
        """Set everything back as it was."""
        if self._hook is not None and sys.excepthook == self._raised:
            sys.excepthook = self._hook
        if threading.current_thread() is threading.main_thread():
            for number, before in self._before.items():
                if signal.getsignal(number) == self._handle:
                    signal.signal(number, before)
            if self._owns_wakeup:
                signal.set_wakeup_fd(-1)
        self._before = {}
        os.write(self._write, b"\0")
