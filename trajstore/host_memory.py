"""Memory whose unused parts can be given back to the system.

The system gives out memory as it is touched, so a large block costs little while few of its bytes are used. Memory
of numpy keeps what was touched once, and asks for huge pages, so that one byte makes 2 MB resident.
"""

from __future__ import annotations

import mmap
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

FEW_BYTES = 4 << 20  # what is filled from its start on should use huge pages only behind this many bytes
_PAGE_BYTES = mmap.PAGESIZE
_MIN_BYTES = 1 << 18  # smaller blocks come from numpy
_ROOM = 4  # a block can grow in place to this many times its first size


class HostMemory:
    """A block of zeros. It is freed when the last array that refers to it is.

    Attributes:
        array: The memory as bytes.
        room: Bytes that `array` can grow to where it lies; addresses without memory are reserved for them.
    """

    def __init__(self, n_bytes: int, *, grows: bool = False) -> None:
        self._map: Any = None
        self.room = n_bytes
        if sys.platform == "linux" and n_bytes >= _MIN_BYTES:
            self._map = _reserved(_ROOM * n_bytes) if grows else None
            if self._map is None:
                self._map = _reserved(n_bytes)
            if self._map is None:
                raise MemoryError(f"unable to allocate {n_bytes} bytes")
            self.room = len(self._map)
            self.array: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8, n_bytes)
        else:
            self.array = np.zeros(n_bytes, np.uint8)

    def resize(self, n_bytes: int) -> bool:
        """Change the size of `array` without moving or copying it; returns False if there is no room.

        Bytes that are cut off are given back to the system.
        """
        if self._map is None or n_bytes > self.room:
            return False
        self.discard(n_bytes, len(self.array))
        self.array = np.frombuffer(self._map, np.uint8, n_bytes)
        return True

    def use_huge_pages(self, start: int, stop: int) -> None:
        """Ask for huge pages for these bytes: access is faster, and the first byte makes 2 MB resident."""
        self._advise("MADV_HUGEPAGE", start, stop)

    def discard(self, start: int, stop: int) -> None:
        """Give the memory of these bytes back. They can be used again; their values are undefined."""
        self._advise("MADV_DONTNEED", start, stop)

    def _advise(self, advice: str, start: int, stop: int) -> None:
        """Advise the system about the whole pages between two bytes."""
        first = -(-start // _PAGE_BYTES) * _PAGE_BYTES
        n_bytes = stop // _PAGE_BYTES * _PAGE_BYTES - first
        if self._map is not None and n_bytes > 0 and hasattr(mmap, advice):
            try:
                self._map.madvise(getattr(mmap, advice), first, n_bytes)
            except OSError:  # a hint: the system may be built without it
                return


def _reserved(n_bytes: int) -> mmap.mmap | None:
    """Addresses that get memory when they are touched; None if the system does not give as many."""
    try:
        return mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError):
        return None
