"""Stores the unsaved data of buffers that are still open when the process ends normally."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

_log = logging.getLogger(__name__)
_registered: weakref.WeakKeyDictionary[Any, tuple[int, Callable[[Any], None]]] = weakref.WeakKeyDictionary()


def finish_at_exit(owner: Any, finish: Callable[[Any], None]) -> None:
    """Call ``finish(owner)`` when the process ends.

    The call does not happen if ``owner`` was garbage-collected before, or if `cancel_finish_at_exit` was called.
    """
    _registered[owner] = os.getpid(), finish


def cancel_finish_at_exit(owner: Any) -> None:
    """Undo `finish_at_exit`, because ``owner`` was closed. Calling it twice is harmless."""
    _registered.pop(owner, None)


def _finish_all() -> None:
    for owner, (pid, finish) in list(_registered.items()):
        if pid != os.getpid():  # a forked child wrote nothing; the data is its parent's
            continue
        try:
            finish(owner)
        except Exception:
            _log.exception("the last writes of %s could not be stored when the process ended", type(owner).__name__)


# `atexit` would be too late: it runs after thread pools stop accepting work, and a commit needs a thread pool.
threading._register_atexit(_finish_all)  # type: ignore[attr-defined]
