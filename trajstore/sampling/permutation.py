"""A shuffle that needs no memory: a keyed bijection of the numbers below n."""

from __future__ import annotations

import numpy as np
import torch

from trajstore.sampling.compiled.selection import compiled_loops
from trajstore.schema import Array

_ROUNDS = 6


class Permutation:
    """The numbers ``[0, n)`` in an order that depends only on the seed. Any part of it can be computed alone.

    The order is that of a Feistel network over the smallest even number of bits that can hold all numbers. Results
    of ``n`` or more go through the network again, until they are below ``n``. A compiled loop gives the
    same order as array operations, much faster.
    """

    def __init__(self, n: int, seed: int, *, compiled: bool = True) -> None:
        self._n = np.uint64(n)
        self._half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))  # bits in each half of a number
        self._mask = np.uint64((1 << int(self._half)) - 1)
        self._keys = _mix(np.array([(seed + i) % 2**64 for i in range(1, _ROUNDS + 1)], np.uint64))
        self._loops = compiled_loops(torch.device("cpu"), compiled, "permutation_loops")

    def __call__(self, start: int, stop: int) -> Array:
        """Return elements ``start`` to ``stop`` of the order, as int64."""
        numbers = np.arange(start, stop, dtype=np.uint64)
        if self._loops is not None:
            self._loops.permute(numbers, self._n, self._half, self._mask, self._keys)
            return numbers.view(np.int64)
        numbers = self._encrypt(numbers)
        outside = np.flatnonzero(numbers >= self._n)
        while len(outside):  # fewer than three more passes on average, over ever fewer numbers
            numbers[outside] = self._encrypt(numbers[outside])
            outside = outside[numbers[outside] >= self._n]
        return numbers.astype(np.int64)

    def _encrypt(self, x: Array) -> Array:
        """Apply the Feistel network once."""
        left, right = x >> self._half, x & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right + key) & self._mask)
        joined: Array = (left << self._half) | right
        return joined


def _mix(z: Array) -> Array:
    """Apply the finaliser of splitmix64; uint64 arithmetic wraps around."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Array = z ^ (z >> np.uint64(31))
    return mixed
