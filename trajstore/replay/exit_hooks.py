"""Calls a function before a signal or an uncaught exception ends the process."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import Any

_log = logging.getLogger(__name__)
_GRACE_S = 5.0  # for `save` to end by its own limit, which says more than ours


class ExitHooks:
    """Calls ``save`` before a signal or an uncaught exception ends the process, which then ends as it would have.

    A signal is handled on a separate thread, because the main thread may be in the middle of a change, or wait for
    a dead peer. Must be created in the main thread. An exception that ``save`` raises is logged, and the process
    ends.

    Args:
        save: Called with the reason, as text.
        signals: The signals to handle.
        exceptions: Whether to handle uncaught exceptions.
        timeout_s: Seconds that ``save`` may take; then the process ends without it.
    """

    def __init__(
        self, save: Callable[[str], None], signals: Iterable[int], exceptions: bool, timeout_s: float
    ) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("checkpoint_on_exit: signal handlers can be set in the main thread only")
        self._save = save
        self.signals = frozenset(signals)
        self.handles_exceptions = exceptions
        self.timeout_s = timeout_s
        _process.add(self)

    def save(self, why: str) -> None:
        """Call the function; log its failure."""
        try:
            self._save(why)
        except BaseException as failure:
            _log.error("no checkpoint before the process ended (%s): %s", why, failure)

    def remove(self) -> None:
        """Restore the earlier handlers, unless other hooks still need ours."""
        _process.drop(self)


class _Process:
    """The signal handlers and the exception hook of this process, shared by all `ExitHooks`."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._hooks: list[ExitHooks] = []
        self._before: dict[int, Any] = {}  # the handlers that ours replaced
        self._excepthook: Any = None
        self._pipe: tuple[int, int] | None = None
        self._owns_wakeup = False
        self._saved: set[int] = set()

    def add(self, hook: ExitHooks) -> None:
        with self._lock:
            self._hooks.append(hook)
            if hook.signals and self._pipe is None:
                self._listen()
            for number in hook.signals - self._before.keys():
                self._before[number] = signal.signal(number, self._handle)
            if hook.handles_exceptions and self._excepthook is None:
                self._excepthook, sys.excepthook = sys.excepthook, self._raised

    def drop(self, hook: ExitHooks) -> None:
        with self._lock:
            self._hooks = [other for other in self._hooks if other is not hook]
            if self._excepthook is not None and not any(other.handles_exceptions for other in self._hooks):
                if sys.excepthook == self._raised:
                    sys.excepthook = self._excepthook
                self._excepthook = None
            # Only the main thread can restore handlers; until it does, ours pass signals on.
            if threading.current_thread() is threading.main_thread():
                self._restore()

    def _restore(self) -> None:
        wanted = {number for hook in self._hooks for number in hook.signals}
        for number in list(self._before.keys() - wanted):
            if signal.getsignal(number) == self._handle:
                signal.signal(number, self._before[number])
            del self._before[number]
        if not self._before and self._pipe is not None:
            if self._owns_wakeup:
                signal.set_wakeup_fd(-1)
            os.write(self._pipe[1], b"\0")
            self._pipe, self._owns_wakeup = None, False

    def _listen(self) -> None:
        """Receive signals while the main thread runs no Python, unless other code has set a wakeup descriptor."""
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        threading.Thread(target=self._loop, args=self._pipe, name="trajstore-exit", daemon=True).start()
        other = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        self._owns_wakeup = other == -1
        if not self._owns_wakeup:
            signal.set_wakeup_fd(other)

    def _wanting(self, number: int) -> list[ExitHooks]:
        return [hook for hook in self._hooks if number in hook.signals]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Called in the main thread."""
        if number in self._saved or not self._wanting(number):
            self._pass_on(number, frame)
        elif not self._owns_wakeup and self._pipe is not None:
            os.write(self._pipe[1], bytes([number]))

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(number, signal.SIG_DFL)
        if callable(before):
            before(number, frame)
        elif before == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _loop(self, read: int, write: int) -> None:
        while data := os.read(read, 1):
            number = data[0]
            if not number:
                break
            with self._lock:
                hooks = self._wanting(number) if number not in self._saved else []
            if hooks:
                self._save_all(hooks, f"signal {signal.Signals(number).name}")
                self._saved.add(number)
                self._end_by(number)
        os.close(read)
        os.close(write)

    def _save_all(self, hooks: Iterable[ExitHooks], why: str) -> None:
        threads = [(hook, threading.Thread(target=hook.save, args=(why,), daemon=True)) for hook in hooks]
        begun_at = time.monotonic()
        for _, thread in threads:
            thread.start()
        for hook, thread in threads:
            thread.join(max(0.0, begun_at + hook.timeout_s + _GRACE_S - time.monotonic()))
            if thread.is_alive():
                _log.error("no checkpoint before the process ended (%s): not done in %g s", why, hook.timeout_s)

    def _end_by(self, number: int) -> None:
        """Let the signal have its original effect."""
        before = self._before.get(number, signal.SIG_DFL)
        if before == signal.SIG_DFL:
            # Python lets only the main thread change this, and the main thread may be blocked.
            ctypes.CDLL(None).signal(number, None)
        if before != signal.SIG_IGN:
            os.kill(os.getpid(), number)

    def _raised(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before = self._excepthook or sys.__excepthook__
        if issubclass(kind, Exception):
            self._save_all([hook for hook in self._hooks if hook.handles_exceptions], kind.__name__)
        before(kind, error, trace)


_process = _Process()
