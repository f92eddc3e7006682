"""Compiled loops that decode single blocks of compressed chunks, and copy rows out of them. Imports numba.

A chunk is a container of blosc: a header of 16 bytes, the start of each block, and the blocks, which are ordinary
frames of zstd behind their sizes. Its checksum was checked when it was mapped. The loops check every number in it
all the same before they use it, because nothing that lies in a file may make them read or write elsewhere.
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
_FLAGS, _TYPESIZE, _DECODED, _BLOCK, _ENCODED = 2, 3, 4, 8, 12  # positions in the header
_SHUFFLED, _STORED, _UNSPLIT = 1, 2, 16  # flags; stored: not compressed
_LINE, _AHEAD_BYTES = 64, 768  # bytes of a cache line, and of a block that are asked for before its turn
_MAX_SPLITS, _MIN_SPLIT_BYTES = (
    16,
    128,
)  # blosc splits blocks of elements that are at most, or have at least, so large


def _as_number(bits: int) -> Any:
    """A function that reads a number of so many bits, which need not be aligned."""
    target = ir.IntType(bits).as_pointer()

    @intrinsic
    def number(context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            value = builder.load(builder.inttoptr(arguments[0], target), align=1)
            return builder.zext(value, ir.IntType(64))

        return types.int64(types.int64), generate

    return number


_byte_at, _number_at = _as_number(8), _as_number(32)


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
    part = n // n_parts
    if part * n_parts != n:
        return False
    for _ in range(n_parts):
        if at + 4 > stop:
            return False
        size = _number_at(at)
        at += 4
        if size > stop - at:
            return False
        if size == part:
            copy_memory(to, at, part)
        elif _decompress(decoder[DECOMPRESS], decoder[CONTEXT], to, part, at, size) != part:
            return False
        to += part
        at += size
    return True


@compiled
def _block(decoder: Array, chunk: Any, number: Any, n: Any, block_bytes: Any) -> Any:
    """Return the memory address of a decoded block of ``n`` bytes, as it was compressed; 0 if it is damaged."""
    for i in range(2):
        if decoder[HELD + i] == chunk + number:
            decoder[LATEST] = i
            return decoder[MEMORY] + i * decoder[CAPACITY]
    flags, typesize = _byte_at(chunk + _FLAGS), _byte_at(chunk + _TYPESIZE)
    stop = chunk + _number_at(chunk + _ENCODED)
    first = chunk + _HEADER_BYTES + 4 * -(-_number_at(chunk + _DECODED) // block_bytes)
    if first > stop:
        return 0
    at = chunk + _number_at(chunk + _HEADER_BYTES + 4 * number)
    if at < first or at > stop:
        return 0
    is_split = not flags & _UNSPLIT and n == block_bytes and 1 < typesize <= _MAX_SPLITS
    n_parts = typesize if is_split and block_bytes // typesize >= _MIN_SPLIT_BYTES else 1
    i = 1 - decoder[LATEST]
    to = decoder[MEMORY] + i * decoder[CAPACITY]
    decoder[HELD + i] = 0
    if not _decode_parts(decoder, to, n, at, stop, n_parts):
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
def _copy_from_chunk(decoder: Array, chunk: Any, n_chunk: Any, first: Any, n: Any, out: Any) -> bool:
    """Copy ``n`` decoded bytes from position ``first`` of a chunk on; returns False if the chunk is damaged."""
    block_bytes, flags = _number_at(chunk + _BLOCK), _byte_at(chunk + _FLAGS)
    if _number_at(chunk + _DECODED) != n_chunk or not 0 < block_bytes <= decoder[CAPACITY]:
        return False
    if flags & _STORED:
        if _HEADER_BYTES + n_chunk > _number_at(chunk + _ENCODED):
            return False
        copy_memory(out, chunk + _HEADER_BYTES + first, n)
        return True
    typesize = _byte_at(chunk + _TYPESIZE)
    while n > 0:
        number = first // block_bytes
        low = number * block_bytes
        n_block = min(block_bytes, n_chunk - low)
        block = _block(decoder, chunk, number, n_block, block_bytes)
        if block == 0:
            return False
        k = min(n, low + n_block - first)
        if flags & _SHUFFLED and typesize > 1:
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
def prefetch_block(table: Any, page_rows: Any, row_bytes: Any, virtual: Any) -> None:
    """Ask for the beginning of the block that holds a virtual row; its chunk's header should be there already."""
    page = virtual // page_rows
    slot = array_at(pointer(table), (MANY,), np.int64)[page]
    if slot <= -BLOCKED:
        chunk = -slot - BLOCKED
        number = (virtual - page * page_rows) * row_bytes // max(1, _number_at(chunk + _BLOCK))
        at = chunk + _number_at(chunk + _HEADER_BYTES + 4 * number)
        for line in range(0, _AHEAD_BYTES, _LINE):
            prefetch(at + line)


@compiled
def copy_run(
    decoder: Array, arena: Any, row_bytes: Any, table: Any, page_rows: Any, virtual: Any, n: Any, out: Any
) -> int:
    """Copy neighbouring rows from pages of all kinds; returns `COPIED`, `ABSENT` or `DAMAGED`.

    Args:
        decoder: Numbers of a decoder.
        arena: Memory address of the slots.
        row_bytes: Bytes of a row.
        table: Memory address of `PageTable.slot_of_page`.
        page_rows: Rows of a page.
        virtual: The first virtual row.
        n: Number of rows.
        out: Memory address that they go to.
    """
    slots = array_at(pointer(table), (MANY,), np.int64)
    while n > 0:
        page = virtual // page_rows
        slot, at = slots[page], virtual - page * page_rows
        k = min(n, page_rows - at)
        if slot == -1:
            return ABSENT
        if slot > -BLOCKED:
            copy_memory(out, page_address(arena, slot, page_rows * row_bytes) + at * row_bytes, k * row_bytes)
        else:
            chunk = -slot - BLOCKED
            if not _copy_from_chunk(decoder, chunk, page_rows * row_bytes, at * row_bytes, k * row_bytes, out):
                return DAMAGED
        virtual, n, out = virtual + k, n - k, out + k * row_bytes
    return COPIED


@compiled
def copy_blocked_rows(decoder: int, column: Array, virtual: Array, out: Array) -> int:
    """Copy rows of a column to memory addresses; rows of a block that follow each other cost decoding it once.

    Args:
        decoder: Memory address of a decoder.
        column: What `copy_columns` takes of a column.
        virtual: The virtual rows.
        out: Where each goes.

    Returns:
        What `copy_run` returns.
    """
    state = decoder_at(decoder)
    forget_blocks(state)
    arena, row_bytes, table, page_rows = column[0], column[1], column[2], column[3]
    i, n = 0, len(virtual)
    while i < n:
        prefetch_header(table, page_rows, virtual[min(i + 2 * AHEAD, n - 1)])
        prefetch_block(table, page_rows, row_bytes, virtual[min(i + AHEAD, n - 1)])
        k = i + 1
        while k < n and virtual[k] - virtual[i] == k - i and out[k] - out[i] == (k - i) * row_bytes:
            k += 1
        found = copy_run(state, arena, row_bytes, table, page_rows, virtual[i], k - i, out[i])
        if found != COPIED:
            return found
        i = k
    return COPIED
