"""Keeps compressed chunks in RAM, so that a chunk dropped from the device need not be read from storage again."""

from __future__ import annotations

import threading
from collections import OrderedDict

ChunkKey = tuple[str, str, int]  # stream id, path of the field, chunk number


class CompressedTier:
    """A least-recently-used cache of compressed chunks within a byte budget. Thread-safe."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.nbytes = 0
        self._lock = threading.Lock()
        self._chunks: OrderedDict[ChunkKey, bytes | memoryview] = OrderedDict()  # used longest ago first

    def get(self, key: ChunkKey) -> bytes | memoryview | None:
        """Return a chunk and count that as a use; None if it is not here."""
        with self._lock:
            data = self._chunks.get(key)
            if data is not None:
                self._chunks.move_to_end(key)
            return data

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._chunks

    def put(self, key: ChunkKey, data: memoryview, *, is_shared: bool = True) -> None:
        """Keep a chunk, unless it is larger than the whole budget.

        Args:
            key: Which chunk.
            data: Its bytes.
            is_shared: Whether the memory holds something else, too, or will be used again; then it is copied.
        """
        if len(data) > self.budget:
            return
        kept = bytes(data) if is_shared else data
        with self._lock:
            self.nbytes += len(data) - len(self._chunks.pop(key, b""))
            self._chunks[key] = kept
            self._shrink()

    def drop(self, key: ChunkKey) -> None:
        with self._lock:
            self.nbytes -= len(self._chunks.pop(key, b""))

    def clear(self) -> None:
        with self._lock:
            self._chunks.clear()
            self.nbytes = 0

    def resize(self, budget: int) -> None:
        """Change the budget; chunks that no longer fit are dropped."""
        with self._lock:
            self.budget = budget
            self._shrink()

    def _shrink(self) -> None:
        while self.nbytes > self.budget:
            self.nbytes -= len(self._chunks.popitem(last=False)[1])
