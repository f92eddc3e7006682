"""Compressed chunks in RAM, behind the decoded ones on the device."""

from __future__ import annotations

import threading
from collections import OrderedDict


class CompressedTier:
    """Compressed chunks in RAM, least recently used first out, within a byte budget; thread-safe."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.nbytes = 0
        self._lock = threading.Lock()
        self._chunks: OrderedDict[tuple[str, str, int], bytes] = OrderedDict()

    def get(self, key: tuple[str, str, int]) -> bytes | None:
        with self._lock:
            data = self._chunks.get(key)
            if data is not None:
                self._chunks.move_to_end(key)
            return data

    def __contains__(self, key: tuple[str, str, int]) -> bool:
        return key in self._chunks

    def put(self, key: tuple[str, str, int], data: memoryview) -> None:
        """Keep a copy."""
        if len(data) > self.budget:
            return
        with self._lock:
            self.nbytes += len(data) - len(self._chunks.pop(key, b""))
            self._chunks[key] = bytes(data)
            self._shrink()

    def drop(self, key: tuple[str, str, int]) -> None:
        with self._lock:
            self.nbytes -= len(self._chunks.pop(key, b""))

    def clear(self) -> None:
        with self._lock:
            self._chunks.clear()
            self.nbytes = 0

    def resize(self, budget: int) -> None:
        with self._lock:
            self.budget = budget
            self._shrink()

    def _shrink(self) -> None:
        while self.nbytes > self.budget:
            self.nbytes -= len(self._chunks.popitem(last=False)[1])
