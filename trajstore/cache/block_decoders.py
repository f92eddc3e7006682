"""Memory with which compiled loops decode blocks of compressed chunks, for each thread that does."""

from __future__ import annotations

import numpy as np

from trajstore.format.zstd_library import ZstdContext, zstd_library

# A page of which single blocks are decoded has this number added to its memory address in the page table.
BLOCKED = 1 << 62

# Positions in the numbers of a decoder: addresses of a context of zstd, of its function, and of memory for two
# blocks of CAPACITY bytes and for a copy of an encoded one; the blocks that lie there (chunk address plus number of
# the block); and which was used last.
CONTEXT, DECOMPRESS, MEMORY, CAPACITY, HELD, LATEST = 0, 1, 2, 3, 4, 6
DECODER_SIZE = 8

_N_BLOCKS = 3  # that the memory of a decoder has room for
_LEAST_BYTES = 64  # room for blocks if none is mapped yet: loops need decoders for columns that may have some


class BlockDecoders:
    """Contexts and memory for blocks, by thread. Not thread-safe: its owner calls it with a lock held."""

    def __init__(self) -> None:
        self._contexts: list[ZstdContext] = []
        self._capacity = _LEAST_BYTES
        self._memory = np.empty(0, np.uint8)
        self._numbers = np.zeros((0, DECODER_SIZE), np.int64)

    @property
    def stride(self) -> int:
        """Bytes from one decoder to the next."""
        return 8 * DECODER_SIZE

    def reserve(self, block_bytes: int) -> None:
        """Make room for blocks of this size."""
        self._capacity = max(self._capacity, -(-block_bytes // 64) * 64)

    def address(self, n_threads: int) -> int:
        """Memory address of decoders for so many threads, valid until the next call."""
        n = max(n_threads, len(self._contexts))
        if len(self._memory) < _N_BLOCKS * n * self._capacity or n > len(self._contexts):
            self._make(n)
        return int(self._numbers.ctypes.data)

    def _make(self, n: int) -> None:
        library = zstd_library()
        assert library is not None  # else no blocks are mapped
        while len(self._contexts) < n:
            self._contexts.append(ZstdContext(library))
        self._memory = np.empty(_N_BLOCKS * n * self._capacity, np.uint8)
        self._numbers = np.zeros((n, DECODER_SIZE), np.int64)
        self._numbers[:, CONTEXT] = [context.address for context in self._contexts]
        self._numbers[:, DECOMPRESS] = library.decompress
        self._numbers[:, MEMORY] = self._memory.ctypes.data + _N_BLOCKS * self._capacity * np.arange(n)
        self._numbers[:, CAPACITY] = self._capacity
