"""The compiled loop that divides episodes among ranks. Importing this module imports numba."""

from __future__ import annotations

import numpy as np

from trajstore.sampling.compiled.jit import compiled
from trajstore.schema import Array


@compiled
def least_loaded(lengths: Array, n: int) -> Array:
    """Assign each length in turn to the one of ``n`` places with the smallest load so far; the first of equals."""
    load = np.zeros(n, np.int64)
    place = np.empty(len(lengths), np.int64)
    for i in range(len(lengths)):
        least = 0
        for k in range(1, n):
            if load[k] < load[least]:
                least = k
        load[least] += lengths[i]
        place[i] = least
    return place
