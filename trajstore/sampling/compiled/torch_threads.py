"""Runs a compiled loop on the threads that torch itself uses, so that no other pool competes with them.

torch on Linux computes with the threads of GNU OpenMP, whose library comes with it. Its entry point takes a
function and calls it once in every thread. Where the library is not found, loops run in one thread.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_int64)
_FUNCTION_WITH_GIL = ctypes.PYFUNCTYPE(None, ctypes.c_int64)


def _find_parallel() -> Any:
    """Return the function that calls another one in several threads of torch; None if there is no such function."""
    if "OpenMP" not in torch.__config__.parallel_info():
        return None
    for path in sorted(Path(torch.__file__).parent.joinpath("lib").glob("libgomp*.so*")):
        try:
            parallel = ctypes.CDLL(str(path), os.RTLD_NOLOAD | os.RTLD_LOCAL).GOMP_parallel
        except (OSError, AttributeError):  # torch does not use this one
            continue
        parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        parallel.restype = None
        return parallel
    return None


def with_gil(function: int) -> Callable[[int], None]:
    """Return the C function at an address as one that is called with an address, and keeps the GIL.

    For calls of a few microseconds: a thread that waits for the GIL would take it at each call, and the caller
    would wait much longer to get it back than the call takes.
    """
    return _FUNCTION_WITH_GIL(function)


class TorchThreads:
    """Calls compiled functions in the threads of torch."""

    def __init__(self) -> None:
        self._parallel = _find_parallel()
        self._pid = os.getpid()

    @property
    def n(self) -> int:
        """How many threads a call uses: as many as torch does, and one in a forked process.

        GNU OpenMP does not survive a fork.
        """
        return torch.get_num_threads() if self._parallel is not None and self._pid == os.getpid() else 1

    def call(self, function: int, argument: int, n: int) -> None:
        """Call the C function at an address in ``n`` threads, each with the same address as its argument.

        The GIL is released. One thread is the calling one.
        """
        if n == 1:
            _FUNCTION(function)(argument)
        else:
            self._parallel(function, argument, n, 0)
