"""What all compiled loops share. Importing this module imports numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np

F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    """Compile when first called; the machine code is kept on disk where a directory for it can be written."""
    njit: Any = numba.njit
    try:
        done: F = njit(cache=True, nogil=True)(function)
    except RuntimeError:  # no place for a cache
        done = njit(nogil=True)(function)
    return done


@compiled
def random_bits(seed: np.uint64, counter: np.uint64) -> np.uint64:
    """64 random bits, as `rng.Counter` gives them."""
    z = (counter + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + seed
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
