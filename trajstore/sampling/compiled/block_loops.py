"""Compiled loops that decode single blocks of compressed chunks, and copy rows out of them. Imports numba.

A chunk is a container of blosc: a header of 16 bytes, the start of each block, and the blocks, which are ordinary
frames of zstd behind their sizes. Its checksum was checked when it was mapped, but another program may have written
to the file since then. Nothing in a file may make the loops read or write elsewhere: the size of a chunk comes from
the page table and not from the chunk, every number is read once, then checked and used, and zstd gets a copy of its
frame.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from trajstore.cache.block_decoders import (
    BLOCKED,
    CAPACITY,
    CONTEXT,
    DECODER_SIZE,
    DECOMPRESS,
    HELD,
    LATEST,
    MEMORY,
)
from trajstore.sampling.compiled.jit import compiled
from trajstore.sampling.compiled.memory_access import (
    MANY,
    array_at,
    copy_memory,
    page_address,
    pointer,
    prefetch,
)
from trajstore.schema import Array

COPIED, ABSENT, DAMAGED = range(3)
AHEAD = 4  # rows, or windows, that are prefetched before their turn

_HEADER_BYTES = 16
_FLAGS, _TYPESIZE, _DECODED, _BLOCK = 2, 3, 4, 8  # positions in the header
_SHUFFLED, _STORED, _UNSPLIT = 1, 2, 16  # flags; stored: not compressed
_LINE, _AHEAD_BYTES = 64, 768  # bytes of a cache line, and of a block that are asked for before its turn
_MAX_SPLITS, _MIN_SPLIT_BYTES = (
    16,
    128,
)  # blosc splits blocks of elements that are at most, or have at least, so large


def _as_byte(context: Any, address: Any) -> Any:
    target = ir.IntType(8).as_pointer()

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        # Atomic, so that a compiler may not read it again after it was checked.
        value = builder.load_atomic(builder.inttoptr(arguments[0], target), "monotonic", 1)
        return builder.zext(value, ir.IntType(64))

    return types.int64(types.int64), generate


_byte_at: Any = intrinsic(_as_byte)


@compiled
def _number_at(address: Any) -> Any:
    """The number of 32 bits at an address, which need not be aligned."""
    low = _byte_at(address) | _byte_at(address + 1) << 8
    return low | _byte_at(address + 2) << 16 | _byte_at(address + 3) << 24


def _as_decompress(context: Any, function: Any, state: Any, to: Any, n: Any, at: Any, size: Any) -> Any:
    """Call ``ZSTD_decompressDCtx`` by its memory address, which is not part of the code that is kept on disk."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = ir.IntType(64)  # addresses and sizes alike
        kind = ir.FunctionType(number, [number] * 5).as_pointer()
        return builder.call(builder.inttoptr(arguments[0], kind), arguments[1:])

    return types.int64(*[types.int64] * 6), generate


_decompress: Any = intrinsic(_as_decompress)


@compiled
def _decode_parts(decoder: Array, to: Any, n: Any, at: Any, stop: Any, n_parts: Any) -> bool:
    """Decode the parts of a block to ``to``, which lie before ``stop``; returns False if they are damaged."""
    part, copy = n // n_parts, decoder[MEMORY] + 2 * decoder[CAPACITY]
    if part * n_parts != n:
        return False
    for _ in range(n_parts):
        if at + 4 > stop:
            return False
        size = _number_at(at)
        at += 4
        if size > stop - at or size > part:  # blosc never writes parts that are larger than their content
            return False
        if size == part:
            copy_memory(to, at, part)
        else:
            copy_memory(copy, at, size)
            if _decompress(decoder[DECOMPRESS], decoder[CONTEXT], to, part, copy, size) != part:
                return False
        to += part
        at += size
    return True


@compiled
def _block(
    decoder: Array, chunk: Any, size: Any, number: Any, n: Any, first: Any, block_bytes: Any, n_parts: Any
) -> Any:
    """Return the memory address of a decoded block of ``n`` bytes, as it was compressed; 0 if it is damaged.

    ``first`` is where the first block begins in the chunk, at the earliest.
    """
    for i in range(2):
        if decoder[HELD + i] == chunk + number:
            decoder[LATEST] = i
            return decoder[MEMORY] + i * decoder[CAPACITY]
    start = _number_at(chunk + _HEADER_BYTES + 4 * number)
    if start < first or start > size:
        return 0
    i = 1 - decoder[LATEST]
    to = decoder[MEMORY] + i * decoder[CAPACITY]
    decoder[HELD + i] = 0
    if not _decode_parts(decoder, to, n, chunk + start, chunk + size, n_parts if n == block_bytes else 1):
        return 0
    decoder[HELD + i] = chunk + number
    decoder[LATEST] = i
    return to


@compiled
def _unshuffle(block: Any, n_block: Any, typesize: Any, first: Any, n: Any, out: Any) -> None:
    """Copy ``n`` bytes from position ``first`` of a block on, which has the bytes of its elements apart."""
    n_elements = n_block // typesize
    data = array_at(pointer(block), (MANY,), np.uint8)
    if typesize == 4 and first % 4 == 0 and n % 4 == 0 and n_block % 4 == 0 and out % 4 == 0:
        words = array_at(pointer(out), (MANY,), np.uint32)
        of_byte = n_elements + 0
        start = first // 4
        for e in range(n // 4):
            at = np.uint64(start + e)
            low = np.uint32(data[at]) | np.uint32(data[at + np.uint64(of_byte)]) << np.uint32(8)
            high = np.uint32(data[at + np.uint64(2 * of_byte)]) | np.uint32(
                data[at + np.uint64(3 * of_byte)]
            ) << np.uint32(8)
            words[np.uint64(e)] = low | high << np.uint32(16)
        return
    values = array_at(pointer(out), (MANY,), np.uint8)
    n_whole = n_elements * typesize  # bytes behind the last whole element are not shuffled
    for i in range(n):
        at = first + i
        element = at // typesize
        values[i] = data[(at - element * typesize) * n_elements + element] if at < n_whole else data[at]


@compiled
def _count_parts(flags: Any, typesize: Any, block_bytes: Any) -> Any:
    """How many parts a whole block has; the last block of a chunk, if it is shorter, has one."""
    is_split = not flags & _UNSPLIT and 1 < typesize <= _MAX_SPLITS
    return typesize if is_split and block_bytes // typesize >= _MIN_SPLIT_BYTES else 1


@compiled
def _copy_stored(chunk: Any, size: Any, n_chunk: Any, first: Any, n: Any, out: Any) -> bool:
    """The same as `_copy_from_chunk` for a chunk that is not compressed."""
    if _HEADER_BYTES + n_chunk > size:
        return False
    copy_memory(out, chunk + _HEADER_BYTES + first, n)
    return True


@compiled
def _copy_from_chunk(decoder: Array, chunk: Any, size: Any, n_chunk: Any, first: Any, n: Any, out: Any) -> bool:
    """Copy ``n`` decoded bytes from position ``first`` of a chunk on; returns False if the chunk is damaged.

    ``size`` and ``n_chunk`` are its bytes, encoded and decoded.
    """
    if size < _HEADER_BYTES or _number_at(chunk + _DECODED) != n_chunk:
        return False
    flags, typesize, block_bytes = _byte_at(chunk + _FLAGS), _byte_at(chunk + _TYPESIZE), _number_at(chunk + _BLOCK)
    if flags & _STORED:
        return _copy_stored(chunk, size, n_chunk, first, n, out)
    n_starts = -(-n_chunk // max(1, block_bytes))
    if not 0 < block_bytes <= decoder[CAPACITY] or _HEADER_BYTES + 4 * n_starts > size:
        return False
    is_shuffled = flags & _SHUFFLED and typesize > 1
    n_parts, first_block = _count_parts(flags, typesize, block_bytes), _HEADER_BYTES + 4 * n_starts
    while n > 0:
        number = first // block_bytes
        low = number * block_bytes
        n_block = min(block_bytes, n_chunk - low)
        block = _block(decoder, chunk, size, number, n_block, first_block, block_bytes, n_parts)
        if block == 0:
            return False
        k = min(n, low + n_block - first)
        if is_shuffled:
            _unshuffle(block, n_block, typesize, first - low, k, out)
        else:
            copy_memory(out, block + first - low, k)
        first, n, out = first + k, n - k, out + k
    return True


@compiled
def forget_blocks(decoder: Array) -> None:
    """Forget which blocks are decoded: files may have been unmapped since, and others mapped in their place."""
    decoder[HELD] = decoder[HELD + 1] = 0


@compiled
def decoder_at(address: Any) -> Any:
    return array_at(pointer(address), (DECODER_SIZE,), np.int64)


@compiled
def prefetch_header(table: Any, page_rows: Any, virtual: Any) -> None:
    """Ask for the header of the chunk that holds a virtual row, if that has to be decoded."""
    slot = array_at(pointer(table), (MANY,), np.int64)[virtual // page_rows]
    if slot <= -BLOCKED:
        prefetch(-slot - BLOCKED)
        prefetch(-slot - BLOCKED + _LINE)


@compiled
def prefetch_block(table: Any, sizes: Any, page_rows: Any, row_bytes: Any, virtual: Any) -> None:
    """Ask for the beginning of the block that holds a virtual row; its chunk's header should be there already."""
    page = virtual // page_rows
    slot = array_at(pointer(table), (MANY,), np.int64)[page]
    if slot <= -BLOCKED:
        chunk, size = -slot - BLOCKED, array_at(pointer(sizes), (MANY,), np.int64)[page]
        if size < _HEADER_BYTES:
            return
        number = (virtual - page * page_rows) * row_bytes // max(1, _number_at(chunk + _BLOCK))
        place = _HEADER_BYTES + 4 * number
        if place + 4 <= size:
            at = chunk + _number_at(chunk + place)
            for line in range(0, _AHEAD_BYTES, _LINE):
                prefetch(at + line)


@compiled
def copy_run(
    decoder: Array,
    arena: Any,
    row_bytes: Any,
    table: Any,
    sizes: Any,
    page_rows: Any,
    virtual: Any,
    n: Any,
    out: Any,
) -> int:
    """Copy neighbouring rows from pages of all kinds; returns `COPIED`, `ABSENT` or `DAMAGED`.

    Args:
        decoder: Numbers of a decoder.
        arena: Memory address of the slots.
        row_bytes: Bytes of a row.
        table: Memory address of `PageTable.slot_of_page`.
        sizes: Memory address of `PageTable.bytes_of_page`.
        page_rows: Rows of a page.
        virtual: The first virtual row.
        n: Number of rows.
        out: Memory address that they go to.
    """
    slots = array_at(pointer(table), (MANY,), np.int64)
    n_bytes = array_at(pointer(sizes), (MANY,), np.int64)
    while n > 0:
        page = virtual // page_rows
        slot, at = slots[page], virtual - page * page_rows
        k = min(n, page_rows - at)
        if slot == -1:
            return ABSENT
        if slot > -BLOCKED:
            copy_memory(out, page_address(arena, slot, page_rows * row_bytes) + at * row_bytes, k * row_bytes)
        else:
            chunk, n_chunk = -slot - BLOCKED, page_rows * row_bytes
            if not _copy_from_chunk(decoder, chunk, n_bytes[page], n_chunk, at * row_bytes, k * row_bytes, out):
                return DAMAGED
        virtual, n, out = virtual + k, n - k, out + k * row_bytes
    return COPIED


@compiled
def copy_blocked_rows(decoder: int, column: Array, virtual: Array, out: Array) -> int:
    """Copy rows of a column to memory addresses; rows of a block that follow each other cost decoding it once.

    Args:
        decoder: Memory address of a decoder.
        column: What `ColumnPages.addresses` returns.
        virtual: The virtual rows.
        out: Where each goes.

    Returns:
        What `copy_run` returns.
    """
    state = decoder_at(decoder)
    forget_blocks(state)
    arena, row_bytes, table, page_rows, sizes = column[0], column[1], column[2], column[3], column[5]
    i, n = 0, len(virtual)
    while i < n:
        prefetch_header(table, page_rows, virtual[min(i + 2 * AHEAD, n - 1)])
        prefetch_block(table, sizes, page_rows, row_bytes, virtual[min(i + AHEAD, n - 1)])
        k = i + 1
        while k < n and virtual[k] - virtual[i] == k - i and out[k] - out[i] == (k - i) * row_bytes:
            k += 1
        found = copy_run(state, arena, row_bytes, table, sizes, page_rows, virtual[i], k - i, out[i])
        if found != COPIED:
            return found
        i = k
    return COPIED
