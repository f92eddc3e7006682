"""Files that are written first and synced later, so that the disk works on many of them at a time."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType

MAX_OPEN = 64  # files of one wave that stay open, beside one in each thread
_START_WRITE_BACK = 2  # SYNC_FILE_RANGE_WRITE
_BATCH_BYTES, _BATCH_PIECES = 1 << 20, 512


class WrittenFiles:
    """The files of one wave of puts, from the write to the sync. Thread-safe.

    A file is handed to the disk as soon as it is written, and stays open until it is synced: when `MAX_OPEN` later
    ones are written, or at the end. By then most of it is on disk, and the file system has recorded the metadata of
    all of them together. A sync right after each write would wait for the disk once for each file.

    As a context manager, it closes what is open and, after an error, removes temporary files.

    Args:
        fsync: Whether files are synced at all.
    """

    def __init__(self, *, fsync: bool) -> None:
        self._fsync = fsync
        self._lock = threading.Lock()
        self._open: deque[tuple[str, int]] = deque()  # key and descriptor, oldest first
        self._temporaries: list[str] = []
        self._is_over = False  # an interrupted wave may end before its last thread has written

    def __enter__(self) -> WrittenFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._is_over = True
        for _, descriptor in self.take():
            os.close(descriptor)
        if error is not None:
            for path in self._temporaries:
                _remove(path)

    def write(
        self, key: str, path: str, pieces: Iterable[bytes | memoryview], flags: int
    ) -> tuple[str, int] | None:
        """Write a file; return the key and descriptor of an older file that must be synced and closed now, if any.

        Args:
            key: The object that the file will be.
            path: The file.
            pieces: All of its bytes, in order.
            flags: ``O_EXCL`` for a temporary file, which is removed if the wave fails, or ``O_TRUNC``.
        """
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | flags, 0o666)
        try:
            write_pieces(descriptor, pieces)
        except BaseException:
            os.close(descriptor)
            if flags & os.O_EXCL:
                _remove(path)
            raise
        if self._fsync:
            start_write_back(descriptor)
        return self._keep(key, descriptor, path if flags & os.O_EXCL else None)

    def _keep(self, key: str, descriptor: int, temporary: str | None) -> tuple[str, int] | None:
        with self._lock:
            if temporary is not None and not self._is_over:
                self._temporaries.append(temporary)
            if self._fsync and not self._is_over:
                self._open.append((key, descriptor))
                return self._open.popleft() if len(self._open) > MAX_OPEN else None
        os.close(descriptor)
        if temporary is not None and self._is_over:
            _remove(temporary)
        return None

    def take(self) -> list[tuple[str, int]]:
        """Keys and descriptors of all files that are not synced yet; the caller syncs and closes them."""
        with self._lock:
            taken, self._open = list(self._open), deque()
        return taken


def write_pieces(descriptor: int, pieces: Iterable[bytes | memoryview]) -> None:
    """Write pieces to an open file, one after the other, several with one call."""
    batch: list[memoryview] = []
    n_bytes = 0
    for piece in pieces:
        batch.append(memoryview(piece))
        n_bytes += len(piece)
        # What was just made is still in the cache of the processor, and systems take only so many pieces at a time.
        if n_bytes >= _BATCH_BYTES or len(batch) == _BATCH_PIECES:
            _write_batch(descriptor, batch)
            batch, n_bytes = [], 0
    _write_batch(descriptor, batch)


def _write_batch(descriptor: int, batch: list[memoryview]) -> None:
    if len(batch) > 1 and hasattr(os, "writev"):
        batch = _after(batch, os.writev(descriptor, batch))
    for view in batch:  # all of it, or what the call left
        while view:
            view = view[os.write(descriptor, view) :]


def _after(batch: list[memoryview], n_bytes: int) -> list[memoryview]:
    """What is left of some pieces after their first bytes."""
    for i, view in enumerate(batch):
        if n_bytes < len(view):
            return [view[n_bytes:], *batch[i + 1 :]]
        n_bytes -= len(view)
    return []


def sync_and_close(descriptor: int) -> None:
    """Wait until an open file is on disk, and close it."""
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def start_write_back(descriptor: int) -> None:
    """Have the system begin to write an open file to the disk, where it can, without waiting; promises nothing."""
    if _sync_file_range is not None:
        _sync_file_range(descriptor, 0, 0, _START_WRITE_BACK)


def _find_sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """The function of the C library; None on systems other than Linux."""
    try:
        function = ctypes.CDLL(None).sync_file_range
    except (AttributeError, OSError, TypeError):
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    call: Callable[[int, int, int, int], int] = function
    return call


_sync_file_range = _find_sync_file_range()


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
