"""Reads and decodes the chunks of one array in threads, neighbouring chunks together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trajstore.errors import CorruptionError, StorageError
from trajstore.format.array_layout import ArrayLayout
from trajstore.format.codec import is_intact
from trajstore.schema import Array
from trajstore.storage import Storage
from trajstore.store.shard_pieces import ShardPiece, pieces
from trajstore.store.stream_reader import ChunkError, MissingChunkError

_PIECE_BYTES = 4 << 20  # decoded; of chunks that are objects of their own
_AHEAD_BYTES = 64 << 20  # decoded, of all pieces that are under way

Room = Callable[[int], memoryview]  # gives memory of a size
ChunkReader = Callable[[int, bytearray], memoryview]  # reads one chunk, still encoded, perhaps into the buffer
PieceReader = Callable[[ShardPiece, Room], Iterator[memoryview]]  # reads neighbouring ones of a shard
Visit = Callable[[int, Array | None], Any]  # what a chunk holds; called with None if it is damaged


@dataclass(frozen=True, slots=True)
class ChunkSource:
    """Where the chunks of one array are read.

    Attributes:
        chunks: Indexes of the chunks that must exist.
        read: Reads one chunk, still encoded.
        read_piece: Reads neighbouring chunks of one shard; None: each chunk is an object of its own.
    """

    layout: ArrayLayout
    chunks: range
    read: ChunkReader
    read_piece: PieceReader | None = None

    def pieces(self) -> list[ShardPiece]:
        """The chunks, divided: one thread reads and checks a piece."""
        start, stop = self.chunks.start, self.chunks.stop
        if self.read_piece is not None:
            return list(pieces(self.layout, start, stop))
        n = max(1, _PIECE_BYTES // max(1, self.layout.chunk_bytes))
        return [ShardPiece(first, min(first + n, stop)) for first in range(start, stop, n)]


@dataclass(slots=True)
class DecodedPiece:
    """What was found in neighbouring chunks.

    Attributes:
        chunks: Their indexes.
        n_bytes: Their stored size.
        faults: By chunk, what is wrong with it.
        results: What was returned for each chunk.
    """

    chunks: range
    n_bytes: int = 0
    faults: dict[int, str] = field(default_factory=dict)
    results: list[Any] = field(default_factory=list)


class _Memory:
    """Memory that one piece after the other uses: new memory takes as long as reading and checking.

    Attributes:
        block: One decoded chunk.
        buffer: Grows to the largest chunk that was read alone.
    """

    def __init__(self, layout: ArrayLayout) -> None:
        self.block = np.empty((layout.chunk_rows, *layout.row_shape), layout.dtype)
        self.buffer = bytearray()
        self._room = memoryview(b"")

    def room(self, n: int) -> memoryview:
        if n > len(self._room):
            self._room = memoryview(bytearray(n))
        return self._room


def decoded_pieces(storage: Storage, source: ChunkSource, visit: Visit | None) -> Iterator[DecodedPiece]:
    """Check every chunk; the results are in order.

    Memory is bounded by a few pieces, or by one chunk if that is larger.

    Args:
        storage: Reads the chunks, in threads.
        source: The chunks.
        visit: Called with each chunk, in these threads; its results are in `DecodedPiece.results`.
    """
    n_ahead = max(1, _AHEAD_BYTES // max(_PIECE_BYTES, source.layout.chunk_bytes))
    decode = _PieceDecoder(storage, source, visit).decode
    return storage.map_ahead(decode, source.pieces(), n_ahead)


class _PieceDecoder:
    """Decodes pieces of one array. Thread-safe."""

    def __init__(self, storage: Storage, source: ChunkSource, visit: Visit | None) -> None:
        self._storage = storage
        self._source = source
        self._visit = visit
        self._free: list[_Memory] = []

    def decode(self, piece: ShardPiece) -> DecodedPiece:
        try:
            memory = self._free.pop()
        except IndexError:
            memory = _Memory(self._source.layout)
        decoded = DecodedPiece(range(piece.start, piece.stop))
        encoded = self._read(piece, memory)
        for index in decoded.chunks:
            n_bytes, fault = self._decode_chunk(index, next(encoded, None), memory)
            decoded.n_bytes += n_bytes
            if fault is not None:
                decoded.faults[index] = fault
            if self._visit is not None:
                decoded.results.append(self._visit(index, memory.block if fault is None else None))
        self._free.append(memory)
        return decoded

    def _read(self, piece: ShardPiece, memory: _Memory) -> Iterator[memoryview]:
        """The chunks of a piece of a shard, up to the first that can't be read with its neighbours."""
        if self._source.read_piece is None:
            return
        try:
            yield from self._source.read_piece(piece, memory.room)
        except (FileNotFoundError, CorruptionError):
            return
        except StorageError:
            self._storage.list_names("")  # raises if the whole storage fails, not only this object

    def _decode_chunk(self, index: int, data: memoryview | None, memory: _Memory) -> tuple[int, str | None]:
        """The stored size of a chunk, and what is wrong with it."""
        if data is not None and self._is_sound(data, memory.block):
            return len(data), None
        return self._decode_alone(index, memory)  # whatever is wrong with the piece: it names the chunk's own fault

    def _decode_alone(self, index: int, memory: _Memory) -> tuple[int, str | None]:
        data = memoryview(b"")
        try:
            data = self._source.read(index, memory.buffer)
            self._source.layout.decode(data, memory.block)
        except (MissingChunkError, FileNotFoundError):
            return 0, "missing"
        except ChunkError as error:
            return 0, str(error.__cause__)
        except CorruptionError as error:
            return len(data), str(error)
        except StorageError as error:
            self._storage.list_names("")  # raises if the whole storage fails, not only this object
            return 0, f"can't be read: {error}"
        return len(data), None

    def _is_sound(self, data: memoryview, block: Array) -> bool:
        layout = self._source.layout
        try:
            if layout.is_raw and self._visit is None:
                return len(data) == layout.max_encoded_bytes and is_intact(data)
            layout.decode(data, block)
        except CorruptionError:
            return False
        return True
