"""Appends rows to one array of a stream: encodes the chunks that change, and makes the objects that hold them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trajstore.format.array_layout import ArrayLayout
from trajstore.format.codec import CRC_BYTES, crc32c
from trajstore.format.step_bytes import GrownObjects
from trajstore.host_memory import HostMemory
from trajstore.schema import Array
from trajstore.storage import ANY, Put
from trajstore.writing.commit_batch import NewRows

_NO_BYTES = memoryview(b"")


@dataclass(frozen=True, slots=True)
class _LastObject:
    """The part-filled last object of an array, which the next commit writes again.

    Attributes:
        sizes: Encoded sizes of its complete chunks.
        encoded: These chunks, one after the other, so that they are not encoded again.
        tail: The rows of its part-filled last chunk, with zeros after them; None if all chunks are complete.
        n_bytes: Size of the object.
        version: Version that the storage gave it.
    """

    sizes: tuple[int, ...] = ()
    encoded: memoryview = _NO_BYTES
    tail: Array | None = None
    n_bytes: int = 0
    version: str = ANY


class ArrayAppender:
    """The growing end of one array: the number of committed rows and the part-filled last object.

    Args:
        key_prefix: Key of the array's group in the storage.
        layout: Chunking and codec of the array.
    """

    def __init__(self, key_prefix: str, layout: ArrayLayout) -> None:
        self.rows = 0
        self._prefix = key_prefix
        self._layout = layout
        self._last = _LastObject()
        self._made: dict[int, _LastObject] = {}  # what the last wave put, by object

    def puts(self, new: NewRows, expect: str) -> list[Put]:
        """The objects that change when ``new`` is appended. Calling it again gives the same bytes.

        Args:
            new: The rows to append.
            expect: What the storage may already hold where an object begins with new rows; see `Storage.put`.
        """
        size, stop = self._layout.object_rows, self.rows + len(new)
        self._made = {}
        return [self._put(number, new, expect) for number in range(self.rows // size, -(-stop // size))]

    def _put(self, number: int, new: NewRows, expect: str) -> Put:
        made = self._made

        def make() -> bytes | memoryview:
            data, made[number] = self._object(number, new)
            return data

        def make_pieces() -> Iterator[bytes | memoryview]:
            made[number] = _LastObject(n_bytes=self._full_raw_bytes)
            return self._pieces(number, new)

        is_grown = number * self._layout.object_rows < self.rows  # it is on disk already
        has_pieces = self._is_full_raw_shard(number, new)
        expected = self._last.version if is_grown else expect
        return Put(self._key(number), make, expected, make_pieces if has_pieces else None)

    def _key(self, number: int) -> str:
        return f"{self._prefix}/{self._layout.chunk_key(number * self._layout.chunks_per_shard)}"

    def _object(self, number: int, new: NewRows) -> tuple[bytes | memoryview, _LastObject]:
        """The bytes of an object after the commit, and what to keep of it if it is not full then."""
        layout = self._layout
        start = number * layout.object_rows
        stop = min(start + layout.object_rows, self.rows + len(new))
        old = self._last if start < self.rows else _LastObject()
        chunks = range(max(self.rows, start) // layout.chunk_rows, -(-stop // layout.chunk_rows))
        if layout.shard_rows is None:
            encoded, tail = self._encoded(chunks, old, new)
            return encoded[0], _LastObject(tail=tail, n_bytes=len(encoded[0]))
        if layout.codec.name == "none":
            return self._raw_shard(chunks, old, new)
        encoded, tail = self._encoded(chunks, old, new)
        sizes = (*old.sizes, *map(len, encoded))
        data = _joined([layout.encode_shard_index(sizes), old.encoded, *encoded])
        return data, self._kept(data, sizes, tail)

    def _kept(self, data: memoryview, sizes: tuple[int, ...], tail: Array | None) -> _LastObject:
        if tail is None and len(sizes) == self._layout.chunks_per_shard:
            return _LastObject(n_bytes=len(data))  # full: nothing is appended to it, so its memory is released
        complete, start = sizes if tail is None else sizes[:-1], self._layout.shard_index_bytes
        return _LastObject(complete, data[start : start + sum(complete)], tail, len(data))

    def _encoded(self, chunks: Sequence[int], old: _LastObject, new: NewRows) -> tuple[list[bytes], Array | None]:
        """Encode chunks; returns them, and the rows of the last one if it is not full."""
        encoded, tail = [], None
        for index in chunks:
            chunk, is_full = self._chunk(index, old, new)
            encoded.append(self._layout.encode(chunk))
            tail = None if is_full else chunk
        return encoded, tail

    def _chunk(self, index: int, old: _LastObject, new: NewRows) -> tuple[Array, bool]:
        """The rows of a chunk after the commit, with zeros after them, and whether the chunk is full."""
        low, high, stop = self._new_rows_of(index, new)
        start = index * self._layout.chunk_rows - self.rows  # rows of `new` are counted from the committed ones
        is_full = high == stop
        if low > start:
            assert old.tail is not None
            chunk = old.tail
        elif is_full and new.order is None:
            return np.ascontiguousarray(new.source[low:high]), True
        else:
            chunk = self._layout.empty_chunk() if is_full else self._new_tail()
        # Rows past the committed ones may be overwritten any number of times: a retry writes the same.
        new.copy_to(chunk[low - start : high - start], low, high)
        return chunk, is_full

    def _new_rows_of(self, index: int, new: NewRows) -> tuple[int, int, int]:
        """The rows ``[low, high)`` of ``new`` that go into a chunk, and the end of the chunk, counted like them."""
        start = index * self._layout.chunk_rows - self.rows
        stop = start + self._layout.chunk_rows
        return max(0, start), min(len(new), stop), stop

    def _new_tail(self) -> Array:
        layout = self._layout
        zeros = HostMemory(layout.chunk_bytes).array
        return zeros.view(layout.dtype).reshape(layout.chunk_rows, *layout.row_shape)

    def _raw_shard(self, chunks: Sequence[int], old: _LastObject, new: NewRows) -> tuple[memoryview, _LastObject]:
        """A shard of uncompressed chunks; new rows are copied once, to their place in it."""
        layout, source = self._layout, NewRows(_as_bytes(new.source), new.order)
        n_bytes = layout.chunk_bytes + CRC_BYTES
        sizes = (*old.sizes, *(n_bytes for _ in chunks))
        shard = HostMemory(layout.shard_index_bytes + len(sizes) * n_bytes).array
        data, at = memoryview(shard), layout.shard_index_bytes  # type: ignore[arg-type]
        shard[:at] = np.frombuffer(layout.encode_shard_index(sizes), np.uint8)
        shard[at : at + len(old.encoded)] = np.frombuffer(old.encoded, np.uint8)
        at += len(old.encoded)
        tail: Array | None = None
        for index in chunks:
            rows = shard[at : at + layout.chunk_bytes].reshape(layout.chunk_rows, layout.row_bytes)
            tail = rows if self._fill(rows, index, old, source) < layout.chunk_rows else None
            at += layout.chunk_bytes
            checksum = crc32c(data[at - layout.chunk_bytes : at])
            data[at : at + CRC_BYTES] = checksum.to_bytes(CRC_BYTES, "little")
            at += CRC_BYTES
        return data, self._kept(data, sizes, tail)

    def _is_full_raw_shard(self, number: int, new: NewRows) -> bool:
        """Whether an object is a shard of uncompressed chunks that is full after the commit, of rows in order."""
        layout = self._layout
        is_full = (number + 1) * layout.object_rows <= self.rows + len(new)
        return is_full and layout.shard_rows is not None and layout.codec.name == "none" and new.order is None

    @property
    def _full_raw_bytes(self) -> int:
        layout = self._layout
        return layout.shard_index_bytes + layout.chunks_per_shard * (layout.chunk_bytes + CRC_BYTES)

    def _pieces(self, number: int, new: NewRows) -> Iterator[bytes | memoryview]:
        """A full shard of uncompressed chunks; new rows that fill a whole chunk are not copied."""
        layout, source = self._layout, NewRows(_as_bytes(new.source))
        start = number * layout.object_rows
        old = self._last if start < self.rows else _LastObject()
        yield layout.encode_shard_index((layout.chunk_bytes + CRC_BYTES,) * layout.chunks_per_shard)
        yield old.encoded
        first = max(self.rows, start) // layout.chunk_rows
        for index in range(first, (start + layout.object_rows) // layout.chunk_rows):
            low, high, _ = self._new_rows_of(index, source)
            rows = source.source[low:high]
            if high - low < layout.chunk_rows:
                rows = np.empty((layout.chunk_rows, layout.row_bytes), np.uint8)
                self._fill(rows, index, old, source)
            chunk = memoryview(rows.reshape(-1))  # type: ignore[arg-type]
            yield chunk
            yield crc32c(chunk).to_bytes(CRC_BYTES, "little")

    def _fill(self, rows: Array, index: int, old: _LastObject, source: NewRows) -> int:
        """Write the rows of a chunk after the commit, as bytes, and zeros after them; returns their number."""
        low, high, _ = self._new_rows_of(index, source)
        start = index * self._layout.chunk_rows - self.rows
        if low > start:
            assert old.tail is not None
            rows[: low - start] = old.tail[: low - start]
        source.copy_to(rows[low - start : high - start], low, high)
        rows[high - start :] = 0
        return high - start

    def advance(self, n: int, versions: Mapping[str, str]) -> GrownObjects:
        """Count ``n`` appended rows as committed; return by how many bytes the array's objects grew.

        Args:
            n: Rows that became durable.
            versions: Versions of the objects that were put, by key.
        """
        sizes = {number: made.n_bytes for number, made in self._made.items()}
        grown = GrownObjects.whole(self._layout, sizes, self.rows, self.rows + n)
        if self.rows % self._layout.object_rows:
            # The previous last object was replaced.
            grown.n_bytes[0] -= self._last.n_bytes - self._layout.padding_bytes(self.rows)
        self.rows += n
        number, is_part_filled = divmod(self.rows, self._layout.object_rows)
        version = versions.get(self._key(number), self._last.version)
        self._last = replace(self._made[number], version=version) if is_part_filled else _LastObject()
        self._made = {}
        return grown


def _as_bytes(rows: Array) -> Array:
    """Rows as bytes, ``[n, bytes of a row]``; a view, if each row lies in one piece."""
    return np.ascontiguousarray(rows).reshape(len(rows), -1).view(np.uint8)


def _joined(parts: Sequence[bytes | memoryview]) -> memoryview:
    """All parts in one buffer; unlike ``bytes.join``, copies without the GIL."""
    joined = HostMemory(sum(map(len, parts))).array
    at = 0
    for part in parts:
        joined[at : at + len(part)] = np.frombuffer(part, np.uint8)
        at += len(part)
    return memoryview(joined)  # type: ignore[arg-type]
