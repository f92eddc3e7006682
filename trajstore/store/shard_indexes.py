"""The indexes of a stream's shards: where each chunk lies, as far as it was read."""

from __future__ import annotations

from trajstore.format.array_layout import ArrayLayout
from trajstore.schema import Array
from trajstore.storage import Data, Storage


class ShardIndexes:
    """Reads indexes of shards and keeps them, together with the rows that the array had when each was read.

    Complete chunks never move in their shard, so their entries are valid for good; that of a part-filled chunk is
    valid until the next commit.

    Args:
        storage: Reads objects.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._known: dict[tuple[str, int], tuple[Array, int]] = {}  # by array and shard

    def known(self, path: str, layout: ArrayLayout, index: int, length: int) -> tuple[Array, int] | None:
        """The index of the shard that holds a chunk, and the rows it was read for; None if it has to be read.

        Args:
            path: The array.
            layout: Its layout.
            index: Number of the chunk.
            length: Rows of the array that its reader shows.
        """
        known = self._known.get((path, index // layout.chunks_per_shard))
        n_rows = min((index + 1) * layout.chunk_rows, length)
        return known if known is not None and known[1] >= n_rows else None

    def learn(self, path: str, layout: ArrayLayout, index: int, length: int, data: Data) -> tuple[Array, int]:
        """Keep the index of the shard that holds a chunk.

        Raises:
            CorruptionError: It is damaged.
        """
        known = layout.decode_shard_index(data), length
        self._known[path, index // layout.chunks_per_shard] = known
        return known

    def read(self, path: str, layout: ArrayLayout, index: int, length: int, key: str) -> tuple[Array, int]:
        """Read the index of a shard from its object, and keep it."""
        start = 0 if layout.index_at_start else max(0, self._storage.size(key) - layout.shard_index_bytes)
        data = self._storage.get_range(key, start, start + layout.shard_index_bytes)
        return self.learn(path, layout, index, length, data)
