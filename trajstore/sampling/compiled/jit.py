"""The decorator of compiled loops, and their random numbers. Importing this module imports numba."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from numba.core.ccallback import CFunc
from numba.core.sigutils import normalize_signature

from trajstore.sampling.compiled.code_cache import CodeCache

F = TypeVar("F", bound=Callable[..., object])

LOOPS: list[Any] = []  # the compiled loops of all modules that are imported
C_FUNCTIONS: list[CFunction] = []  # and their C functions


def compiled(function: F) -> F:
    """Compile a function at its first call. The machine code is kept on disk if a directory can be written."""
    return _compiled(function, nogil=True)


def compiled_with_gil(function: F) -> F:
    """Like `compiled`, for a function that takes a few microseconds: it keeps the GIL.

    A thread that waits for the GIL would take it at each such call, and the caller would wait much longer to get it
    back than the call takes.
    """
    return _compiled(function, nogil=False)


def inlined(function: F) -> F:
    """Make a function part of the loop that calls it, so that no code is compiled for it alone.

    For a function that only calls loops: numba inlines large ones slowly.
    """
    return _compiled(function, nogil=True, inline="always")


def _compiled(function: F, *, nogil: bool, inline: str = "never") -> F:
    njit: Any = numba.njit
    loop = njit(nogil=nogil, no_cfunc_wrapper=True, inline=inline)(function)
    loop._cache = CodeCache(function)
    LOOPS.append(loop)
    done: F = loop
    return done


class CFunction:
    """A function of one memory address as a C function, which threads without Python can call.

    It is compiled when its address is first asked for, and kept on disk as other loops are.
    """

    def __init__(self, function: Any) -> None:
        self.py_func = function
        C_FUNCTIONS.append(self)

    @property
    def is_compiled(self) -> bool:
        return "address" in self.__dict__

    @functools.cached_property
    def address(self) -> int:
        """The memory address of the C function."""
        make: Any = CFunc
        self._compiled = make(self.py_func, normalize_signature("void(int64)"), {}, {"nopython": True})
        self._compiled._cache = CodeCache(self.py_func)
        self._compiled.compile()
        address: int = self._compiled.address
        return address


@compiled
def random_bits(seed: np.uint64, counter: np.uint64) -> np.uint64:
    """Return number ``counter`` of 64 random bits, as `CounterRng.bits` does; ``seed`` is its mixed seed."""
    z = (counter + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + seed
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
