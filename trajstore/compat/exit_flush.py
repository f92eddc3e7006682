"""What nobody has closed when the process ends is made durable then, so that a normal end loses nothing."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

_log = logging.getLogger(__name__)
_open: weakref.WeakKeyDictionary[Any, tuple[int, Callable[[Any], None]]] = weakref.WeakKeyDictionary()


def end_with_process(owner: Any, end: Callable[[Any], None]) -> None:
    """When the process ends, call this with the owner, if somebody still has it and `has_ended` was not called."""
    _open[owner] = os.getpid(), end


def has_ended(owner: Any) -> None:
    """It was closed. May be called again."""
    _open.pop(owner, None)


def _end_all() -> None:
    for owner, (pid, end) in list(_open.items()):
        if pid != os.getpid():  # a child that was forked has nothing of its own to store
            continue
        try:
            end(owner)
        except Exception:
            _log.exception("what was written last could not be stored when the process ended")


# Thread pools take no more work by the time that atexit calls anybody, and a commit needs one.
threading._register_atexit(_end_all)  # type: ignore[attr-defined]
