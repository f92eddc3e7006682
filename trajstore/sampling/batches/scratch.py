"""Memory for the intermediate results of batches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class Scratch:
    """Memory that one batch after the other uses; guarded by the assembler's lock.

    Attributes:
        generation: Rises when the memory moves; addresses of earlier generations are not valid any longer.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._memory = np.empty(0, np.uint8)
        self._address = 0

    def addresses(self, sizes: Sequence[int]) -> list[int]:
        """Return the addresses of parts of these sizes in bytes; their contents are arbitrary."""
        total = sum(sizes) + 64 * len(sizes)
        if total > len(self._memory):
            self._memory = np.empty(total + total // 4, np.uint8)
            self._address = int(self._memory.ctypes.data)
            self.generation += 1
        found, at = [], self._address
        for size in sizes:
            found.append(at)
            at += -(-size // 64) * 64
        return found
