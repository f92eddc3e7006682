"""The decoded chunks that reads of a snapshot ended in, for the next read in order."""

from __future__ import annotations

from trajstore.schema import Array
from trajstore.store.read_ahead import ChunkKey, ReadAhead

MAX_BYTES = 16 << 20


class RecentChunks:
    """Keeps chunks of which a read has used a part: an episode that follows another one begins in the same chunk.

    Belongs to one snapshot: a chunk that still grows holds all rows that the snapshot shows. Thread-safe without a
    lock, so it may be forked: if two threads change it at the same time, a chunk may be forgotten.

    Attributes:
        ahead: Encoded chunks that were fetched for the next reads, if any are.
    """

    def __init__(self, ahead: ReadAhead | None = None) -> None:
        self.ahead = ahead
        self._chunks: dict[ChunkKey, Array] = {}
        self._n_bytes = 0

    def get(self, key: ChunkKey) -> Array | None:
        return self._chunks.get(key)

    def take_encoded(self, key: ChunkKey) -> memoryview | None:
        """A chunk that was fetched ahead, still encoded; None if it was not."""
        if self.ahead is None or key not in self.ahead:
            return None
        return self.ahead.take(key)

    def put(self, key: ChunkKey, chunk: Array) -> None:
        """Keep a chunk, unless it is large. If there are too many, those that were put first are forgotten."""
        if chunk.nbytes > MAX_BYTES // 8:
            return
        self._chunks[key] = chunk
        self._n_bytes += chunk.nbytes
        if self._n_bytes > MAX_BYTES:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        kept: list[tuple[ChunkKey, Array]] = []
        n_bytes = 0
        for key, chunk in reversed(list(self._chunks.items())):
            if n_bytes + chunk.nbytes > MAX_BYTES // 2:
                break
            n_bytes += chunk.nbytes
            kept.append((key, chunk))
        self._chunks, self._n_bytes = dict(reversed(kept)), n_bytes
