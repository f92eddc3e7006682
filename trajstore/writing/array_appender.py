"""Appends rows to one array of a stream: encodes the chunk objects that change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from trajstore.format.array_layout import ArrayLayout
from trajstore.format.step_bytes import GrownObjects
from trajstore.host_memory import HostMemory
from trajstore.schema import Array
from trajstore.storage import ANY, Put
from trajstore.writing.commit_batch import NewRows


class ArrayAppender:
    """The growing end of one array: the number of committed rows and the part-filled last chunk.

    Args:
        key_prefix: Key of the array's group in the storage.
        layout: Chunking and codec of the array.
    """

    def __init__(self, key_prefix: str, layout: ArrayLayout) -> None:
        self.rows = 0
        self._prefix = key_prefix
        self._layout = layout
        self._tail: Array | None = None  # the part-filled last chunk, with zeros after its rows
        self._next_tail: Array | None = None
        self._tail_version = ANY
        self._tail_bytes = 0
        self._put_bytes: dict[int, int] = {}  # size of each object of the last wave, by chunk

    def puts(self, new: NewRows, expect: str) -> list[Put]:
        """The chunk objects that change when ``new`` is appended. Calling it again gives the same bytes.

        Args:
            new: The rows to append.
            expect: What the storage may already hold where a chunk begins with new rows; see `Storage.put`.
        """
        size, stop = self._layout.chunk_rows, self.rows + len(new)
        self._next_tail, self._put_bytes = self._tail, {}
        chunks = range(self.rows // size, -(-stop // size))
        return [self._measured(index, self._put(index, new, stop, expect)) for index in chunks]

    def _measured(self, index: int, put: Put) -> Put:
        sizes = self._put_bytes

        def make() -> bytes:
            data = put.make()
            sizes[index] = len(data)
            return data

        return replace(put, make=make)

    def _put(self, index: int, new: NewRows, stop: int, expect: str) -> Put:
        size = self._layout.chunk_rows
        low, high = max(self.rows, index * size), min(stop, (index + 1) * size)
        new_range = (low - self.rows, high - self.rows)
        key = f"{self._prefix}/{self._layout.chunk_key(index)}"
        is_full = high == (index + 1) * size
        if low > index * size:  # extends the part-filled chunk, which is on disk already
            assert self._tail is not None
            self._next_tail = None if is_full else self._tail
            return Put(key, self._encoder(self._tail, low - index * size, new, new_range), self._tail_version)
        if is_full and new.order is None:
            block = new.source[slice(*new_range)]
            return Put(key, lambda: self._layout.encode(np.ascontiguousarray(block)), expect)
        if is_full:
            return Put(key, lambda: self._encoder(self._layout.empty_chunk(), 0, new, new_range)(), expect)
        self._next_tail = self._new_tail()
        return Put(key, self._encoder(self._next_tail, 0, new, new_range), expect)

    def _new_tail(self) -> Array:
        layout = self._layout
        zeros = HostMemory(layout.chunk_bytes).array
        return zeros.view(layout.dtype).reshape(layout.chunk_rows, *layout.row_shape)

    def _encoder(self, chunk: Array, at: int, new: NewRows, new_range: tuple[int, int]) -> Callable[[], bytes]:
        """A function that copies new rows into ``chunk`` from row ``at`` on and encodes the chunk."""

        def make() -> bytes:
            # Rows past the committed ones may be overwritten any number of times: a retry writes the same.
            new.copy_to(chunk[at : at + new_range[1] - new_range[0]], *new_range)
            return self._layout.encode(chunk)

        return make

    def advance(self, n: int, versions: Mapping[str, str]) -> GrownObjects:
        """Count ``n`` appended rows as committed; return by how many bytes the array's objects grew.

        Args:
            n: Rows that became durable.
            versions: Versions of the objects that were put, by key.
        """
        grown = self._grown(self.rows + n)
        self.rows += n
        last, n_tail = divmod(self.rows, self._layout.chunk_rows)
        if not n_tail:
            self._tail, self._tail_version, self._tail_bytes = None, ANY, 0
            return grown
        self._tail, self._tail_bytes = self._next_tail, self._put_bytes[last]
        key = f"{self._prefix}/{self._layout.chunk_key(last)}"
        self._tail_version = versions.get(key, self._tail_version)
        return grown

    def _grown(self, stop: int) -> GrownObjects:
        grown = GrownObjects.whole(self._layout, self._put_bytes, self.rows, stop)
        if self.rows % self._layout.chunk_rows:
            grown.n_bytes[0] -= self._tail_bytes  # the previous tail was replaced
        return grown
