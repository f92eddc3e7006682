"""The binary search of compiled loops. Importing this module imports numba."""

from __future__ import annotations

from typing import Any

import numpy as np

from trajstore.sampling.compiled.jit import compiled
from trajstore.schema import Array


@compiled
def last_at(rising: Array, wanted: Any) -> Any:
    """Return the position of the last of rising numbers that is at most ``wanted``, or -1."""
    first, n = np.int64(0), np.int64(len(rising))
    while n > 1:  # without branches that the processor would have to guess
        half = n >> 1
        first += half if rising[first + half - 1] <= wanted else 0
        n -= half
    return first if n == 1 and rising[first] <= wanted else first - 1
