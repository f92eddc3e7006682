"""Files in the address space of the process, read without system calls or copies.

Python's own ``mmap`` keeps a file descriptor for every file; a store may have more objects than a process may have
descriptors, so the system is called directly.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

_PROT_READ, _MAP_SHARED = 1, 1
_RANDOM, _WILL_NEED = 1, 3  # advice, the same on Linux and macOS
_FAILED = ctypes.c_void_p(-1).value
_PAGE_BYTES = os.sysconf("SC_PAGESIZE") if hasattr(os, "sysconf") else 4096
# On others, another machine may take a mapped file away, and the next access to it would end the process.
_LOCAL_SYSTEMS = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "jfs", "tmpfs", "ramfs", "overlay"}
)


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


class FileMap:
    """A file, mapped for reading. It stays as it was when it was mapped, even if its name is deleted or replaced.

    Args:
        path: The file.
        offset: Bytes at its beginning that are left out.
        descriptor: Reads it, if it is open already; it is left open.

    Attributes:
        address: Memory address of the first byte; valid as long as this object exists.
        size: Number of bytes.
    """

    def __init__(self, path: str | os.PathLike[str], offset: int = 0, descriptor: int | None = None) -> None:
        self.address = self._start = 0
        self._path = path
        used = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)) if descriptor is None else descriptor
        try:
            status = os.fstat(used)
            self._identity = status.st_dev, status.st_ino
            self._n_mapped = status.st_size
            self.size = max(0, status.st_size - offset)
            if self.size:
                self._map(used, offset)
        finally:
            if descriptor is None:
                os.close(used)

    def _map(self, descriptor: int, offset: int) -> None:
        libc = _libc()
        address = libc.mmap(None, self._n_mapped, _PROT_READ, _MAP_SHARED, descriptor, 0)
        if address in (None, _FAILED):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        self._start = int(address)
        self.address = self._start + offset
        self._unmap = libc.munmap  # found here: modules may be gone when the interpreter ends
        # Rows are read in random order: the system need not read ahead.
        libc.madvise(self._start, self._n_mapped, _RANDOM)

    def touch(self, seconds: float) -> bool:
        """Note by its time of change that the file is used, also in the next ``seconds``.

        Returns:
            Whether the file still has its name. Without it, its space is not free before it is unmapped.
        """
        try:
            status = os.stat(self._path)
            if (status.st_dev, status.st_ino) != self._identity:
                return False
            until = time.time() + seconds
            os.utime(self._path, (until, until))
        except FileNotFoundError:
            return False
        except OSError:
            pass  # it is used all the same, but others can't see it
        return True

    def view(self, start: int, stop: int) -> memoryview:
        """The bytes from ``start`` to ``stop``, read-only. The file stays mapped as long as the view exists."""
        if not self.size:
            return memoryview(b"")
        whole: Any = np.asarray(_MappedBytes(self))
        return memoryview(whole)[start:stop]

    def prefetch(self, start: int, stop: int) -> None:
        """Let the system read bytes from the disk, without waiting for it."""
        first = (self.address + start) // _PAGE_BYTES * _PAGE_BYTES
        _libc().madvise(first, self.address + stop - first, _WILL_NEED)

    def __del__(self) -> None:
        if self._start:
            self._unmap(self._start, self._n_mapped)


class _MappedBytes:
    """What numpy makes an array of; the array keeps this, and this the mapped file."""

    def __init__(self, file: FileMap) -> None:
        self._file = file
        data = file.address, True  # read-only
        self.__array_interface__ = {"version": 3, "shape": (file.size,), "typestr": "|u1", "data": data}


def can_map_files(directory: Path) -> bool:
    """Whether files below a directory can be mapped: it is on a local file system that is known to be safe.

    If a mapped file of a network file system vanishes, the next access ends the process.
    """
    if sys.platform != "linux":
        return False
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    return _file_system(os.path.realpath(directory), mounts) in _LOCAL_SYSTEMS


def _file_system(path: str, mounts: list[str]) -> str:
    """The type of the file system that a path lies on, by the lines of ``/proc/self/mountinfo``."""
    found, longest = "", -1
    for line in mounts:
        before, _, after = line.partition(" - ")
        point = before.split(" ")[4].encode().decode("unicode_escape")  # a space in a name is \040
        is_above = path == point or path.startswith(point.rstrip("/") + "/")
        if is_above and len(point) >= longest:  # of two mounts at one place, the later one counts
            found, longest = after.split(" ")[0], len(point)
    return found
