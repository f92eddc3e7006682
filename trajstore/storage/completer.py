"""Completes the files of objects that are read often, so that they can be mapped."""

from __future__ import annotations

import logging
import os
import threading
import time

from trajstore.background_pool import BackgroundPool
from trajstore.errors import StorageError
from trajstore.storage.disk_files import DiskFiles
from trajstore.storage.interface import Data, Storage

MAX_BYTES = 64 << 20  # larger objects stay as they are: reading all of one costs too much
_PIECE_BYTES = 1 << 20
_TOUCHES = 2  # an object that was asked for so often is completed
_MAX_COUNTED = 1 << 17
_MAX_WAITING = 4096
_NO_ROOM_S = 10.0  # without completing anything, after the budget was found to be used up
_log = logging.getLogger(__name__)


class Completer:
    """Reads what is absent of objects in the background, one after the other. Thread-safe.

    Nothing is removed from the disk for it: within a budget that is used up, objects stay as they are.

    Args:
        inner: Has the objects.
        files: Where they are kept.

    Attributes:
        n_completed: Objects that this process completed.
    """

    def __init__(self, inner: Storage, files: DiskFiles) -> None:
        self.n_completed = 0
        self._rest_until = 0.0
        self._inner = inner
        self._files = files
        self._start_anew()

    def _start_anew(self) -> None:
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._pool: BackgroundPool | None = None
        self._touches: dict[str, int] = {}  # by file: how often it was asked for, as far as that matters
        self._n_waiting = 0

    def reset_locks(self) -> None:
        """Make new locks, in a process that was forked, which has none of the threads."""
        self._start_anew()

    def note(self, key: str, name: str) -> None:
        """Note that an object was asked for that could not be mapped. The second time it is completed.

        Args:
            key: The object, all bytes of which never change.
            name: The file that it is kept in.
        """
        if self._files.is_paused or time.monotonic() < self._rest_until:
            return
        with self._lock:
            if len(self._touches) >= _MAX_COUNTED:
                self._touches.clear()
            n = self._touches[name] = self._touches.get(name, 0) + 1
            if n != _TOUCHES or self._n_waiting >= _MAX_WAITING:
                return
            self._n_waiting += 1
            self._pool = self._pool or BackgroundPool(1, "trajstore-disk-cache")
            self._pool.submit(self._complete, key, name)

    def _complete(self, key: str, name: str) -> None:
        try:
            is_done = self._keep_all(key, name)
        except (OSError, StorageError) as error:  # whoever needs the object meets the error, too
            _log.info("%s: can't complete %s in the disk cache: %s", self._inner.display, key, error)
            is_done = False
        with self._lock:
            self._n_waiting -= 1
            self.n_completed += is_done
            if is_done or self._rest_until:
                self._touches.pop(name, None)  # later it may be absent again, or there may be room

    def _keep_all(self, key: str, name: str) -> bool:
        if self._files.is_whole(name):  # another process was faster
            return False
        known = self._files.read(name, 0, None)
        size = self._inner.size(key) if known is None else len(known)
        if size > MAX_BYTES:
            return False
        if not self._files.has_room(size):
            self._rest_until = time.monotonic() + _NO_ROOM_S
            return False
        if known is not None:
            return self._files.write(name, [(0, known)], size, whole=True, may_evict=False)
        spans = [(start, min(start + _PIECE_BYTES, size)) for start in range(0, size, _PIECE_BYTES)]
        found: dict[tuple[int, int], Data | None] = {span: self._files.read(name, *span) for span in spans}
        absent = [span for span, data in found.items() if data is None]
        found.update(zip(absent, self._inner.get_ranges([(key, *span) for span in absent]), strict=True))
        pieces = [(start, data) for (start, _), data in found.items() if data is not None]
        if sum(len(data) for _, data in pieces) != size:
            return False
        return self._files.write(name, pieces, size, whole=True, may_evict=False)
