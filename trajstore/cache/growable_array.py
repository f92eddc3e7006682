"""An array that grows at the end, kept on the host and on a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from trajstore.schema import Array

_MIN_CAPACITY = 64
_MAX_IDLE = 1 << 16  # unused elements that are kept even if the array has become almost empty


class GrowableArray:
    """A one-dimensional array with amortised appends and a copy on a device.

    The host copy and the device copy always hold the same values. On the CPU both are the same memory.
    Not thread-safe.
    """

    def __init__(self, dtype: Any, device: torch.device) -> None:
        self._host = np.empty(_MIN_CAPACITY, dtype)
        self._device = device
        self._is_shared = device.type == "cpu"
        self._mirror = self._copy_to_device()
        self.n = 0

    def _copy_to_device(self) -> torch.Tensor:
        tensor = torch.from_numpy(self._host)
        return tensor if self._is_shared else tensor.to(self._device)

    @property
    def host(self) -> Array:
        """A view of the values on the host, valid until the next change."""
        return self._host[: self.n]

    @property
    def device(self) -> torch.Tensor:
        """A view of the values on the device, valid until the next change."""
        return self._mirror[: self.n]

    @property
    def data_ptr(self) -> int:
        """The memory address of the first value on the device, valid until the next change."""
        return self._mirror.data_ptr()

    @property
    def nbytes(self) -> int:
        """Bytes of memory on the device, including room to grow."""
        return int(self._host.nbytes)

    def resize(self, n: int) -> Array:
        """Make the array ``n`` elements long, and return them for changes in place: for arrays on the CPU only.

        Elements that are added are undefined.
        """
        assert self._is_shared
        if n > len(self._host):
            self.rewrite(self.n, np.empty(n - self.n, self._host.dtype))
        self.n = n
        return self._host[:n]

    def put(self, where: Array, values: Array) -> None:
        """Change the values at some positions."""
        self._host[where] = values
        if not self._is_shared:
            index = torch.from_numpy(np.ascontiguousarray(where)).to(self._device)
            self._mirror[index] = torch.from_numpy(self._host[where]).to(self._device)

    def rewrite(self, start: int, values: Array) -> None:
        """Replace everything from position ``start`` on; the array ends with the last of ``values``."""
        stop = start + len(values)
        if not start and len(self._host) > 4 * stop + _MAX_IDLE:  # no old value is kept, so free the memory
            self._host = np.empty(stop + _MIN_CAPACITY, self._host.dtype)
            self._mirror = self._copy_to_device()
        if stop > len(self._host):
            # An eighth of room to grow: each element is copied eight times on average, and little memory is unused.
            grown = np.empty(max(stop + _MIN_CAPACITY, stop + stop // 8), self._host.dtype)
            grown[:start] = self._host[:start]
            self._host = grown
            self._host[start:stop] = values
            self._mirror = self._copy_to_device()
        else:
            self._host[start:stop] = values
            if not self._is_shared:
                self._mirror[start:stop] = torch.from_numpy(self._host[start:stop])
        self.n = stop
