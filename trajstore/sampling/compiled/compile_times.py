"""Says that loops are being compiled, if that takes long. Imports numba."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from numba.core import event

_SHOWN_S = 1.0  # seconds of compiling after which a message says so

_log = logging.getLogger(__name__)


class CompileTimes(event.Listener):
    """Measures how long numba compiles, and logs once a process that this takes time and where the code is kept.

    The message is a warning, because it explains a delay that the program could avoid.

    Attributes:
        seconds: Seconds of compiling in this process.
        n_loops: Loops that were compiled, each with one signature.
        kept_in: Where the newest code was kept; None if it could not be, or if nothing was compiled.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.n_loops = 0
        self.kept_in: Path | None = None
        self._starts: list[float] = []  # of functions that are being compiled, each inside the one before
        self._was_shown = False
        self._collects = False  # whether garbage was collected before

    def on_start(self, event: Any) -> None:
        """Numba starts to compile a function. It holds a lock until `on_end`.

        Until then nothing collects garbage: numba makes a million objects that live on, and looking for garbage
        among them and all of torch's took a tenth of the time.
        """
        if not self._starts:
            self._collects = gc.isenabled()
            gc.disable()
        self._starts.append(time.perf_counter())

    def on_end(self, event: Any) -> None:
        """Numba has compiled a function, or failed to."""
        start = self._starts.pop()
        if not self._starts:
            self.seconds += time.perf_counter() - start
            if self._collects:
                gc.enable()

    def loop_compiled(self, kept_in: Path | None, tried: Sequence[Path]) -> None:
        """A loop was compiled, and its code kept in a directory, or nowhere although directories were tried."""
        self.n_loops += 1
        self.kept_in = kept_in
        if self.seconds <= _SHOWN_S or self._was_shown:
            return
        self._was_shown = True
        if kept_in is not None:
            _log.warning(
                "compiling loops for this processor, kept in %s; this happens once, and"
                " 'python -m trajstore warm-up' does it ahead",
                kept_in,
            )
        else:
            _log.warning(
                "compiling loops for this processor in every process, because the code can't be kept: no directory"
                " can be written (tried %s); set NUMBA_CACHE_DIR to one that can",
                ", ".join(str(path.parent) for path in tried) or "none",
            )


COMPILE_TIMES = CompileTimes()
event.register("numba:compile", COMPILE_TIMES)
