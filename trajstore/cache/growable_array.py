"""Arrays that grow at the end, on the host and on a device at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from trajstore.schema import Array

_FIRST = 64
_MANY = 1 << 16


class GrowableArray:
    """A one-dimensional array with amortised appends; the host copy and the device copy are always alike.

    On the CPU both are the same memory.
    """

    def __init__(self, dtype: Any, device: torch.device) -> None:
        self._host = np.empty(_FIRST, dtype)
        self._device = device
        self._is_shared = device.type == "cpu"
        self._mirror = self._mirrored()
        self.n = 0

    def _mirrored(self) -> torch.Tensor:
        tensor = torch.from_numpy(self._host)
        return tensor if self._is_shared else tensor.to(self._device)

    @property
    def host(self) -> Array:
        """A view of the values; valid until the next change."""
        return self._host[: self.n]

    @property
    def device(self) -> torch.Tensor:
        """A view of the values on the device; valid until the next change."""
        return self._mirror[: self.n]

    @property
    def address(self) -> int:
        """Where the values on the device begin; valid until the next change."""
        return self._mirror.data_ptr()

    @property
    def nbytes(self) -> int:
        """Memory on the device, slack included."""
        return int(self._host.nbytes)

    def put(self, where: Array, values: Array) -> None:
        """Change values in place."""
        self._host[where] = values
        if not self._is_shared:
            index = torch.from_numpy(np.ascontiguousarray(where)).to(self._device)
            self._mirror[index] = torch.from_numpy(self._host[where]).to(self._device)

    def rewrite(self, start: int, values: Array) -> None:
        """Replace everything from ``start`` on."""
        stop = start + len(values)
        if not start and len(self._host) > 4 * stop + _MANY:  # nothing is kept: nor need the memory be
            self._host = np.empty(stop + _FIRST, self._host.dtype)
            self._mirror = self._mirrored()
        if stop > len(self._host):
            # An eighth of slack: a copy for every element on average eight times, memory close to what is needed.
            grown = np.empty(max(stop + _FIRST, stop + stop // 8), self._host.dtype)
            grown[:start] = self._host[:start]
            self._host = grown
            self._host[start:stop] = values
            self._mirror = self._mirrored()
        else:
            self._host[start:stop] = values
            if not self._is_shared:
                self._mirror[start:stop] = torch.from_numpy(self._host[start:stop])
        self.n = stop
