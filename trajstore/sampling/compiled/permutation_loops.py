"""The compiled loop that shuffles the numbers of an epoch. Importing this module imports numba."""

from __future__ import annotations

import numpy as np

from trajstore.sampling.compiled.jit import compiled_with_gil
from trajstore.schema import Array


@compiled_with_gil
def permute(numbers: Array, n: np.uint64, half: np.uint64, mask: np.uint64, keys: Array) -> None:
    """Replace numbers below ``n`` by those that a keyed bijection gives, as `Permutation` does; all are uint64.

    Args:
        numbers: In place.
        n: End of the numbers.
        half: Bits in each half of a number.
        mask: The bits of a half.
        keys: A key for each round of the Feistel network.
    """
    for i in range(len(numbers)):
        x = numbers[i]
        while True:
            left, right = x >> half, x & mask
            for k in range(len(keys)):
                z = right + keys[k]
                z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
                z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
                left, right = right, left ^ ((z ^ (z >> np.uint64(31))) & mask)
            x = (left << half) | right
            if x < n:
                break
        numbers[i] = x
