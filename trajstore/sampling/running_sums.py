"""Running sums over the entries of an index, from a base that need not be 0."""

from __future__ import annotations

import numpy as np
import torch

from trajstore.cache.growable_array import GrowableArray
from trajstore.schema import Array


class RunningSums:
    """Sums of int64 up to and including each entry, on the host and on a device, and the value before the first.

    The base lies in memory right before the first sum, so that one lookup finds the sum before any entry.
    """

    def __init__(self, device: torch.device) -> None:
        self._values = GrowableArray(np.int64, device)
        self._values.rewrite(0, np.zeros(1, np.int64))
        self._base = 0  # also the first of the values

    @property
    def n(self) -> int:
        return self._values.n - 1

    @property
    def base(self) -> int:
        """The value that the sums start from."""
        return self._base

    @base.setter
    def base(self, value: int) -> None:
        if value != self._base:
            self._base = value
            self._values.put(np.zeros(1, np.int64), np.array([value]))

    @property
    def host(self) -> Array:
        """The sums on the host, valid until the next change."""
        return self._values.host[1:]

    @property
    def device(self) -> torch.Tensor:
        """The sums on the device, valid until the next change."""
        return self._values.device[1:]

    @property
    def before(self) -> torch.Tensor:
        """On the device, by entry: the sum up to the entry before it, or the base. Valid until the next change."""
        return self._values.device[:-1]

    @property
    def data_ptr(self) -> int:
        """The memory address of the first sum on the device, valid until the next change."""
        return self._values.data_ptr + 8

    @property
    def nbytes(self) -> int:
        """Bytes of memory on the device, including room to grow."""
        return self._values.nbytes

    def put(self, where: Array, values: Array) -> None:
        """Change the sums of some entries."""
        self._values.put(where + 1, values)

    def rewrite(self, start: int, values: Array) -> None:
        """Replace the sums from entry ``start`` on; the last of ``values`` belongs to the last entry."""
        self._values.rewrite(start + 1, values)

    def resize(self, n: int) -> Array:
        """Make room for the sums of ``n`` entries, and return them for changes in place, on the CPU only."""
        return self._values.resize(n + 1)[1:]
