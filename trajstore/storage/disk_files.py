"""Files of a disk cache: pieces of objects, each with a checksum, within a byte budget that all processes share.

A file holds one object that never changes, as far as it was read. Its header has one number for each block: 0 as
long as the block is absent, then a checksum of its bytes. A block whose bytes do not match, because they were cut
off or changed, is as good as absent, so nothing has to be synced.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import struct
import threading
import time
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np

from trajstore.storage.file_maps import FileMap

BLOCK_BYTES = 16 << 10
MAX_OBJECT_BYTES = 1 << 30  # what lies behind in an object is not kept
_MARKS_AT = 4096
_DATA_AT = _MARKS_AT + 4 * (MAX_OBJECT_BYTES // BLOCK_BYTES)
_SIZE = struct.Struct("<4sIQ")  # "TJC1", checksum of the size, size
_MAGIC = b"TJC1"
_WHOLE = b"TJCW"  # the same of a file that got its name after all of its blocks were written
_OVERHEAD_BYTES = 3 * 4096  # of one file: header, marks, directory
_EVICT_TO = 0.9  # share of the budget that eviction leaves, so that it is rare
_LOCK_S = 1.0
_PAUSE_S = 60.0  # without new files, after the disk refused one
_TOUCH_NS = 1_000_000_000
_RECOUNT_S = 10.0  # between scans that only count
USED_S = 60.0  # a file that was mapped counts as used for so long
_log = logging.getLogger(__name__)


class DiskFiles:
    """Pieces of objects in files below a directory. Thread-safe; processes may share the directory.

    Any of its files may be removed at any time. A disk that refuses files stops it from keeping more for a minute.

    Args:
        directory: Made on first use, readable only for this user.
        budget: The most bytes of all files.

    Attributes:
        evictions: Files that this process removed to make room.
        damaged: Files whose bytes did not match their checksums; they were removed.
    """

    def __init__(self, directory: Path, budget: int) -> None:
        self.evictions = 0
        self.damaged = 0
        self.bytes_written = 0
        self._directory = directory
        self._objects = directory / "objects"
        self._budget = budget
        self._paused_until = 0.0
        self._has_warned = False
        self._recount_at = 0.0
        self._counting = threading.Lock()

    @property
    def is_paused(self) -> bool:
        """Whether no files are written, because the disk has refused one."""
        return time.monotonic() < self._paused_until

    def reset_locks(self) -> None:
        """Make new locks, in a process that was forked."""
        self._counting = threading.Lock()

    # ---- reading

    def read(self, name: str, start: int, stop: int | None) -> bytes | None:
        """Bytes ``[start, stop)`` of an object, or all of them; None if some of them are absent."""
        path = self._objects / name
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            size = _read_size(descriptor)
            if size is not None:
                stop = size if stop is None else min(stop, size)
            if stop is None or stop > MAX_OBJECT_BYTES:
                return None
            data = b"" if start >= stop else self._read_blocks(descriptor, path, start, stop, size)
            if data is not None:
                _touch(descriptor)
        except OSError:  # a disk that fails is as good as one that has nothing
            return None
        finally:
            os.close(descriptor)
        return data

    def is_whole(self, name: str) -> bool:
        """Whether a file has all of its object, so that it can be mapped."""
        try:
            descriptor = os.open(self._objects / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            return os.pread(descriptor, len(_WHOLE), 0) == _WHOLE
        except OSError:
            return False
        finally:
            os.close(descriptor)

    def map(self, name: str) -> FileMap | None:
        """An object in the address space of the process, unchecked; None if some of it is absent.

        It stays there when its file is removed. No file with a whole object is ever written to or cut off.
        """
        path = self._objects / name
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if os.pread(descriptor, len(_WHOLE), 0) != _WHOLE:
                    return None
                size, file = _read_size(descriptor), FileMap(path, _DATA_AT, descriptor)
            finally:
                os.close(descriptor)
        except OSError:
            return None
        if file.size != size:
            self._drop_damaged(path)
            return None
        file.touch(USED_S)
        return file

    def _read_blocks(self, descriptor: int, path: Path, start: int, stop: int, size: int | None) -> bytes | None:
        first, last = start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)
        known = os.pread(descriptor, 4 * (last - first), _MARKS_AT + 4 * first)
        marks = np.frombuffer(known if len(known) == 4 * (last - first) else b"\0\0\0\0", np.uint32)
        if not marks.all():
            return None
        low, high = first * BLOCK_BYTES, last * BLOCK_BYTES if size is None else min(last * BLOCK_BYTES, size)
        data = os.pread(descriptor, high - low, _DATA_AT + low)
        if len(data) < high - low or not np.array_equal(_marks(data), marks):
            self._drop_damaged(path)
            return None
        return data[start - low : stop - low]

    def drop_damaged(self, name: str) -> None:
        """Remove a file whose bytes turned out to be wrong, and count it."""
        self._drop_damaged(self._objects / name)

    def _drop_damaged(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            os.unlink(path)
        with self._counting:
            self.damaged += 1
        _log.info("%s: cached bytes were damaged and are read again", path)

    # ---- writing

    def write(
        self,
        name: str,
        pieces: Collection[tuple[int, bytes | memoryview]],
        size: int | None,
        *,
        whole: bool,
        may_evict: bool = True,
    ) -> bool:
        """Keep pieces of an object; returns whether they were kept.

        Args:
            name: Path of the file.
            pieces: Where each piece begins, at a block, and its bytes: whole blocks, except at the object's end.
            size: Size of the object, if it is known.
            whole: The pieces are all of the object. The file appears at once with all of them, so that it can be
                mapped, or because its object may be replaced by one with other bytes.
            may_evict: Whether other files are removed to make room for it.
        """
        pieces = [(start, data) for start, data in pieces if start + len(data) <= MAX_OBJECT_BYTES]
        n_bytes = sum(-(-len(data) // 4096) * 4096 for _, data in pieces) + _OVERHEAD_BYTES
        if not pieces or self.is_paused:
            return False
        try:
            if not self._reserve(n_bytes, may_evict=may_evict):
                return False
            self._write_file(self._objects / name, pieces, size, whole=whole)
        except FileNotFoundError:  # somebody empties the cache
            return False
        except OSError as error:
            self._pause(error)
            return False
        with self._counting:
            self.bytes_written += sum(len(data) for _, data in pieces)
        return True

    def _write_file(
        self, path: Path, pieces: Collection[tuple[int, bytes | memoryview]], size: int | None, *, whole: bool
    ) -> None:
        target = path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}") if whole else path
        try:
            descriptor = self._open(target)
            try:
                if whole and size and hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(descriptor, _DATA_AT, size)  # a mapped page must have its place on the disk
                for start, data in pieces:
                    _write_at(descriptor, data, _DATA_AT + start)
                    # After the data: a process that is killed in between leaves the block absent.
                    _write_at(descriptor, _marks(data).tobytes(), _MARKS_AT + 4 * (start // BLOCK_BYTES))
                if size is not None:
                    number = size.to_bytes(8, "little")
                    magic = _WHOLE if whole else _MAGIC
                    _write_at(descriptor, _SIZE.pack(magic, _crc32c(number), size), 0)
            finally:
                os.close(descriptor)
            if whole:
                self._replace(target, path)
        except BaseException:
            if whole:
                with contextlib.suppress(OSError):
                    os.unlink(target)
            raise

    def _replace(self, target: Path, path: Path) -> None:
        try:
            n_freed = os.stat(path).st_blocks * 512
        except FileNotFoundError:
            n_freed = 0
        os.replace(target, path)
        with self._locked() as counter:
            if n_freed and counter is not None and len(known := os.pread(counter, 8, 0)) == 8:
                os.pwrite(counter, max(0, int.from_bytes(known, "little") - n_freed).to_bytes(8, "little"), 0)

    def _open(self, path: Path) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        for _ in range(3):
            try:
                return os.open(path, flags, 0o600)
            except FileNotFoundError:  # it is the first of its stream, or somebody empties the cache
                self._make(path.parent)
        return os.open(path, flags, 0o600)

    def _make(self, directory: Path) -> None:
        missing = [d for d in (directory, *directory.parents) if not d.exists()]
        for parent in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(parent, 0o700)

    def _pause(self, error: OSError) -> None:
        self._paused_until = time.monotonic() + _PAUSE_S
        with self._counting:
            is_first, self._has_warned = not self._has_warned, True
        if is_first:
            _log.warning(
                "%s: the disk cache keeps nothing more for now (%s); reading goes on from the object store",
                self._directory,
                os.strerror(error.errno) if error.errno else error,
            )

    # ---- the budget

    def _reserve(self, n_bytes: int, *, may_evict: bool = True) -> bool:
        """Count bytes that are about to be written; makes room for them if necessary and allowed.

        Returns:
            False if there is no room, or another process holds the lock for long.
        """
        if n_bytes > self._budget:
            return False
        with self._locked() as counter:
            if counter is None:
                return False
            known = os.pread(counter, 8, 0)
            used = int.from_bytes(known, "little") if len(known) == 8 else self._evict(self._budget)
            if used + n_bytes > self._budget:
                if not may_evict:
                    return False
                used = self._evict(min(self._budget - n_bytes, int(self._budget * _EVICT_TO)))
            has_room = used + n_bytes <= self._budget
            os.pwrite(counter, (used + n_bytes * has_room).to_bytes(8, "little"), 0)
            return has_room

    def has_room(self, n_bytes: int) -> bool:
        """Whether so many bytes fit in the budget without removing anything."""
        try:
            with self._locked() as counter:
                if counter is None:
                    return False
                known = os.pread(counter, 8, 0)
                used = int.from_bytes(known, "little") if len(known) == 8 else self._budget
                if used + n_bytes + _OVERHEAD_BYTES > self._budget and time.monotonic() >= self._recount_at:
                    used = self._evict(self._budget)  # files that were removed are still counted
                    os.pwrite(counter, used.to_bytes(8, "little"), 0)
                    self._recount_at = time.monotonic() + _RECOUNT_S
                return used + n_bytes + _OVERHEAD_BYTES <= self._budget
        except OSError as error:
            self._pause(error)
            return False

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int | None]:
        """Hold the lock of all processes; gives the open file of the bytes in use, or None if it took too long."""
        path = self._directory / "bytes"
        deadline = time.monotonic() + _LOCK_S
        descriptor = self._open(path)
        try:
            while not _try_lock(descriptor, path):
                if time.monotonic() > deadline:
                    yield None
                    return
                if not _is_at(descriptor, path):  # the cache was emptied
                    os.close(descriptor)
                    descriptor = self._open(path)
                else:
                    time.sleep(0.002)
            yield descriptor
        finally:
            os.close(descriptor)

    def _evict(self, limit: int) -> int:
        """Remove the files that were used least recently until the others have at most ``limit`` bytes.

        Returns:
            The bytes of the files that stay.
        """
        found = sorted(_files_below(self._objects))
        total = sum(n_bytes for _, n_bytes, _ in found)
        for _, n_bytes, path in found:
            if total <= limit:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            total -= n_bytes
            with self._counting:
                self.evictions += 1
            with contextlib.suppress(OSError):  # not empty
                os.rmdir(os.path.dirname(path))
        return total

    # ---- removal

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with all its files, if it exists."""
        path = self._objects / name
        with contextlib.suppress(OSError):
            os.unlink(path)
        shutil.rmtree(path, ignore_errors=True)

    def names(self, folder: str) -> list[str]:
        """Names directly in a folder."""
        try:
            return os.listdir(self._objects / folder)
        except OSError:
            return []


def _marks(data: bytes | memoryview) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """For each block of data, its checksum, or 1 if that is 0."""
    view = memoryview(data)
    sums = [_crc32c(view[i : i + BLOCK_BYTES]) or 1 for i in range(0, len(view), BLOCK_BYTES)]
    return np.array(sums, np.uint32)


def _crc32c(data: bytes | memoryview) -> int:
    import crc32c  # here, because most programs have no disk cache

    checksum: int = crc32c.crc32c(data)
    return checksum


def _read_size(descriptor: int) -> int | None:
    head = os.pread(descriptor, _SIZE.size, 0)
    if len(head) < _SIZE.size:
        return None
    magic, checksum, size = _SIZE.unpack(head)
    is_known = magic in (_MAGIC, _WHOLE) and checksum == _crc32c(size.to_bytes(8, "little"))
    return int(size) if is_known else None


def _write_at(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        n = os.pwrite(descriptor, view, offset)
        if not n:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        view, offset = view[n:], offset + n


def _touch(descriptor: int) -> None:
    """Note that a file was used: by its time of change, exact to about a second."""
    if time.time_ns() - os.fstat(descriptor).st_mtime_ns > _TOUCH_NS:
        with contextlib.suppress(OSError):
            os.utime(descriptor)


def _try_lock(descriptor: int, path: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return _is_at(descriptor, path)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file still has its name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _files_below(directory: Path) -> Iterator[tuple[int, int, str]]:
    """Time of last use, bytes on the disk and path of every file."""
    for folder, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(folder, name)
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(path, follow_symlinks=False)
                yield status.st_mtime_ns, status.st_blocks * 512, path
