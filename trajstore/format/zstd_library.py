"""The C functions of zstd that compiled loops call, found in the extension module of numcodecs.

The public function of numcodecs makes a new context for every frame, which takes longer than decoding a few rows.
Where the functions are not found, chunks are decoded whole with the public one.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

_TEST = bytes(range(256)) * 16


class ZstdLibrary:
    """Functions of a shared library.

    Attributes:
        new: Makes a context.
        free: Frees one.
        decompress: Memory address of ``ZSTD_decompressDCtx``.
    """

    def __init__(self, path: str) -> None:
        library: Any = ctypes.CDLL(path)
        self.new, self.free = library.ZSTD_createDCtx, library.ZSTD_freeDCtx
        self.new.restype, self.new.argtypes = ctypes.c_void_p, []
        self.free.restype, self.free.argtypes = ctypes.c_size_t, [ctypes.c_void_p]
        self._decompress = library.ZSTD_decompressDCtx
        self._decompress.restype = ctypes.c_size_t
        sized = [ctypes.c_void_p, ctypes.c_size_t]
        self._decompress.argtypes = [ctypes.c_void_p, *sized, *sized]
        self.decompress = ctypes.cast(self._decompress, ctypes.c_void_p).value or 0

    def decodes(self) -> bool:
        """Whether a frame of numcodecs is decoded, and one that is cut off refused."""
        import numcodecs.zstd

        context, out = ZstdContext(self), ctypes.create_string_buffer(len(_TEST))
        frame = bytes(numcodecs.zstd.compress(_TEST, 1))
        found = [self._decompress(context.address, out, len(out), frame, n) for n in (len(frame) - 1, len(frame))]
        return found[0] > len(_TEST) and found[1] == len(_TEST) and out.raw == _TEST


class ZstdContext:
    """What one thread at a time needs to decode frames.

    Attributes:
        address: Its memory address; valid as long as this object exists.
    """

    def __init__(self, library: ZstdLibrary) -> None:
        self._free = library.free  # found here: modules may be gone when the interpreter ends
        self.address = int(library.new() or 0)
        if not self.address:
            raise MemoryError("no memory for a context of zstd")

    def __del__(self) -> None:
        if getattr(self, "address", None):
            self._free(self.address)


@functools.cache
def zstd_library() -> ZstdLibrary | None:
    """The functions, or None if they are not there or do not do what they should."""
    import numcodecs.zstd

    try:
        library = ZstdLibrary(numcodecs.zstd.__file__)
        return library if library.decodes() else None
    except (OSError, AttributeError, TypeError):  # not a shared library, or it does not show these functions
        return None
