"""Checks the objects of one array and puts those that are intact into another store, each read once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from trajstore.errors import CorruptionError, StorageError
from trajstore.format.array_layout import ArrayLayout
from trajstore.format.shard import assemble_shard
from trajstore.schema import Array
from trajstore.storage import UNSEEN, Storage

_WAVE_OBJECTS = 16
_WAVE_BYTES = 64 << 20
_ABSENT = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class StoredArray:
    """One array to check: rows ``[first, n_rows)`` of it must be stored below ``prefix``."""

    prefix: str
    layout: ArrayLayout
    n_rows: int
    first: int = 0

    @property
    def numbers(self) -> range:
        """Numbers of the objects that must exist."""
        size = self.layout.object_rows
        return range(self.first // size, -(-self.n_rows // size)) if self.first < self.n_rows else range(0)

    def key(self, number: int) -> str:
        return f"{self.prefix}/{self.layout.chunk_key(number * self.layout.chunks_per_shard)}"

    def chunks(self, number: int) -> range:
        """The chunks of an object that must be there."""
        per, size = self.layout.chunks_per_shard, self.layout.chunk_rows
        start, stop = number * per, (number + 1) * per
        return range(max(start, self.first // size), min(stop, -(-self.n_rows // size)))


@dataclass(slots=True)
class ArrayDamage:
    """What is wrong with an array: by chunk, and as ranges of rows."""

    array: StoredArray
    by_chunk: dict[int, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.by_chunk)

    def ranges(self) -> list[tuple[int, int, str]]:
        """Ranges of damaged rows with the fault of their first chunk; neighbouring chunks are one range."""
        size = self.array.layout.chunk_rows
        found: list[tuple[int, int, str]] = []
        for index, what in sorted(self.by_chunk.items()):
            start, stop = index * size, min(self.array.n_rows, (index + 1) * size)
            if found and found[-1][1] == start and found[-1][2] == what:
                start = found.pop()[0]
            found.append((start, stop, what))
        return found


def salvage(
    source: Storage,
    array: StoredArray,
    target: Storage,
    target_prefix: str,
    *,
    values: Array | None = None,
    report: Callable[[int], None] = lambda n_bytes: None,
) -> ArrayDamage:
    """Copy an array; returns what is damaged. An intact object is copied as it is, a damaged chunk becomes zeros.

    Args:
        source: Where the array is stored.
        array: The array.
        target: Where to put it.
        target_prefix: Key prefix of its objects there.
        values: If given, gets the rows: those of the array from row 0 on; damaged ones are left as they are.
        report: Called with the bytes of every wave of objects.

    Raises:
        StorageError: The storage fails, and not only for one object.
    """
    damage = ArrayDamage(array)

    def one(number: int) -> tuple[dict[int, str], int]:
        checked = _CheckedObject(source, array, number, values)
        data = checked.data
        if data is None or checked.faults:
            target.put(f"{target_prefix}/{array.key(number).rpartition('/')[2]}", checked.rebuilt(), UNSEEN)
        else:
            target.put(f"{target_prefix}/{array.key(number).rpartition('/')[2]}", data, UNSEEN)
        return checked.faults, len(data or b"")

    for wave in _waves(array):
        results = target.map(one, wave)
        for faults, _ in results:
            damage.by_chunk |= faults
        report(sum(n for _, n in results))
    return damage


def _waves(array: StoredArray) -> Iterator[Sequence[int]]:
    size = array.layout.object_rows * array.layout.row_bytes
    n = max(1, min(_WAVE_OBJECTS, _WAVE_BYTES // max(1, size)))
    return (array.numbers[i : i + n] for i in range(0, len(array.numbers), n))


class _CheckedObject:
    """One object of an array, and what is wrong with its chunks.

    Attributes:
        data: Its bytes; None if it can't be read.
        faults: By chunk: what is wrong with it.
    """

    def __init__(self, source: Storage, array: StoredArray, number: int, values: Array | None) -> None:
        self._array, self._number, self._values = array, number, values
        self.faults: dict[int, str] = {}
        self._intact: dict[int, bytes | memoryview] = {}
        self.data = self._read(source)
        if self.data is not None:
            self._check(self.data)

    def _read(self, source: Storage) -> bytes | None:
        try:
            return source.get(self._array.key(self._number))
        except FileNotFoundError:
            what = "missing"
        except StorageError as error:
            source.list_names("")  # raises if the whole storage fails, not only this object
            what = f"can't be read: {error}"
        self.faults = dict.fromkeys(self._array.chunks(self._number), what)
        return None

    def _check(self, data: bytes) -> None:
        layout, chunks = self._array.layout, self._array.chunks(self._number)
        view = memoryview(data)
        if layout.shard_rows is None:
            places = {index: (0, len(data)) for index in chunks}
        else:
            try:
                places = self._places(data)
            except CorruptionError as error:
                self.faults = dict.fromkeys(chunks, f"the index of its shard is damaged: {error}")
                return
        for index in chunks:
            try:
                offset, size = places[index]
                if offset == _ABSENT:
                    raise CorruptionError("missing in its shard")
                if layout.shard_rows is not None:
                    layout.check_place(offset, size, len(data))
                encoded = view[offset : offset + size]
                self._keep(index, layout.decode_new(encoded))
            except CorruptionError as error:
                self.faults[index] = str(error)
            else:
                self._intact[index] = encoded

    def _places(self, data: bytes) -> dict[int, tuple[int, int]]:
        layout = self._array.layout
        n = layout.shard_index_bytes
        index = layout.decode_shard_index(data[:n] if layout.index_at_start else data[-n:])
        first = self._number * layout.chunks_per_shard
        return {i: tuple(map(int, index[i - first])) for i in self._array.chunks(self._number)}  # type: ignore[misc]

    def _keep(self, index: int, block: Array) -> None:
        if self._values is not None:
            start = index * self._array.layout.chunk_rows
            rows = self._values[start : start + len(block)]
            rows[...] = block[: len(rows)]

    def rebuilt(self) -> bytes:
        """The object with zeros in the place of damaged chunks."""
        layout, chunks = self._array.layout, self._array.chunks(self._number)
        zeros = layout.encode(np.zeros((layout.chunk_rows, *layout.row_shape), layout.dtype))
        if layout.shard_rows is None:
            return zeros
        n_absent = chunks.start - self._number * layout.chunks_per_shard
        present = [bytes(self._intact[i]) if i in self._intact else zeros for i in chunks]
        return assemble_shard(layout, [*[None] * n_absent, *present])
