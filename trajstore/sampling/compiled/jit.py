"""The decorator of compiled loops, and their random numbers. Importing this module imports numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np

F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    """Compile a function at its first call. The machine code is cached on disk if a directory can be written."""
    njit: Any = numba.njit
    try:
        done: F = njit(cache=True, nogil=True)(function)
    except RuntimeError:  # numba found no directory that it can write
        done = njit(nogil=True)(function)
    return done


@compiled
def random_bits(seed: np.uint64, counter: np.uint64) -> np.uint64:
    """Return number ``counter`` of 64 random bits, as `CounterRng.bits` does; ``seed`` is its mixed seed."""
    z = (counter + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + seed
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
