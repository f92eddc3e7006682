"""Compiled loops that draw, plan and copy batches on the CPU, each in one pass over the data.

Each loop has a twin made of tensor operations that gives the same values and is used on other devices. All loops
release the GIL, and none starts threads. Importing this module imports numba.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from trajstore.cache.block_decoders import BLOCKED
from trajstore.sampling.compiled import block_loops  # noqa: F401 - a part of what a cache calls
from trajstore.sampling.compiled.jit import compiled, random_bits
from trajstore.sampling.compiled.memory_access import MANY, array_at, copy_memory, page_address, pointer, prefetch
from trajstore.sampling.compiled.searching import last_at
from trajstore.schema import Array

HAS_FINAL, TERMINATED, TRUNCATED, OPEN, BEGINS = 1, 2, 4, 8, 32  # flags of episodes, as in `episode_index`

_LINE = 64  # bytes of a cache line
_AHEAD, _MAX_AHEAD = 4, 1024  # windows that are prefetched before their turn, and bytes of each at most
_BYTES, _NUMBERS = (ir.IntType(bits).as_pointer() for bits in (8, 64))


@intrinsic
def _copy_bytes(context: Any, out: Any, to: Any, data: Any, at: Any, n: Any) -> Any:
    """Copy ``n`` bytes from ``data[at:]`` to ``out[to:]`` with memcpy; a compiled loop takes twice as long."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        out, to, data, at, n = arguments
        target = context.make_array(signature.args[0])(context, builder, out)
        origin = context.make_array(signature.args[2])(context, builder, data)
        cgutils.raw_memcpy(builder, builder.gep(target.data, [to]), builder.gep(origin.data, [at]), n, 1)
        return context.get_dummy_value()

    return types.void(out, types.int64, data, types.int64, types.int64), generate


@compiled
def draw(
    seed: np.uint64, counter: np.uint64, base: int, low: int, limit: int, sums: Array, entry: Array, offset: Array
) -> None:
    """Draw numbers uniform in [low, low + limit), and find each in running sums: its entry, and its offset there.

    The sum before the first entry is ``base``.
    """
    for i in range(len(entry)):
        z = random_bits(seed, counter + np.uint64(i))
        number = np.int64(np.float64(z >> np.uint64(11)) * 2.0**-53 * np.float64(limit))
        number = min(number, limit - 1) + low
        left = last_at(sums, number) + 1
        entry[i] = left
        offset[i] = number - (sums[left - 1] if left > 0 else base)


@compiled
def rows(
    entry: Array,
    position: Array,
    logical: Array,
    span_logical: Array,
    span_row: Array,
    span_source: Array,
    is_simple: bool,
    row: Array,
    source: Array,
) -> None:
    """Find the row and source of positions in episodes. Neighbours mostly share a span, so it is tried first."""
    n_spans = len(span_logical)
    for b in range(len(entry)):
        base = logical[entry[b]]
        span = entry[b] if is_simple else last_at(span_logical, base + position[b, 0])
        low, high = span_logical[span], np.int64(1) << 62
        if span + 1 < n_spans:
            high = span_logical[span + 1]
        for j in range(position.shape[1]):
            wanted = base + position[b, j]
            if wanted < low or wanted >= high:
                span = last_at(span_logical, wanted)
                low, high = span_logical[span], np.int64(1) << 62
                if span + 1 < n_spans:
                    high = span_logical[span + 1]
            row[b, j] = span_row[span] + (wanted - low)
            source[b, j] = span_source[span]


@compiled
def distinct_pages(
    source: Array, row: Array, row_base: Array, page_rows: int, seen: Array, tick: int, found: Array
) -> int:
    """Write the distinct pages of rows to ``found``, in order of appearance, and return how many there are.

    ``row_base`` holds, by source, the virtual row of its row 0. ``seen`` holds, by page, the last tick at which the
    page was found; pages with the current tick are left out.
    """
    n = 0
    last_source = source.shape[1] - 1
    for b in range(row.shape[0]):
        low, high = np.int64(0), np.int64(0)  # virtual rows of the page found last
        for j in range(row.shape[1]):
            address = row[b, j] + row_base[source[b, min(j, last_source)]]
            if address < low or address >= high:
                page = address // page_rows
                low = page * page_rows
                high = low + page_rows
                if seen[page] != tick:
                    seen[page] = tick
                    found[n] = page
                    n += 1
    return n


@compiled
def _number_at(address: Any, i: Any) -> Any:
    """Return element ``i`` of the int64 array at a memory address."""
    return array_at(pointer(address), (MANY,), np.int64)[i]


@compiled
def copy_columns(columns: Array, source: Array, row: Array) -> int:
    """Copy the same rows of several columns; neighbouring rows are copied together.

    Each line of ``columns`` holds the memory address of the arena, the bytes of a row, the memory address of the
    page table (`PageTable.slot_of_page`), the rows of a page, the memory address of the sources' first virtual
    rows, and the memory address that the rows go to.

    Returns -1, or the number of the first column with a page that is not resident; copying stops there.
    """
    n_windows, n = row.shape
    last_source = source.shape[1] - 1
    for c in range(len(columns)):
        arena, row_bytes, table, page_rows, row_base, out = columns[c]
        n_ahead = min(n * row_bytes, _MAX_AHEAD)
        for b in range(n_windows if n else 0):
            # Rows of different windows lie far apart, so they are prefetched some windows ahead.
            for w in range(0 if b == 0 else b + _AHEAD, min(b + _AHEAD + 1, n_windows)):
                address = row[w, 0] + _number_at(row_base, np.int64(source[w, 0]))
                page = address // page_rows
                at = page_address(arena, _number_at(table, page), page_rows * row_bytes)
                at += (address - page * page_rows) * row_bytes
                for line in range(0, n_ahead, _LINE):
                    prefetch(at + line)
            j = 0
            while j < n:
                origin = np.int64(source[b, min(j, last_source)])
                first = row[b, j]
                address = first + _number_at(row_base, origin)
                page = address // page_rows
                slot = _number_at(table, page)
                if slot == -1 or slot <= -BLOCKED:
                    return c
                stop = min(n, j + (page + 1) * page_rows - address)
                k = j + 1
                while k < stop and row[b, k] - first == k - j and source[b, min(k, last_source)] == origin:
                    k += 1
                at = page_address(arena, slot, page_rows * row_bytes) + (address - page * page_rows) * row_bytes
                copy_memory(out + (b * n + j) * row_bytes, at, (k - j) * row_bytes)
                j = k
    return -1


@compiled
def scatter_rows(data: Array, row_bytes: int, row: Array, position: Array, out: Array) -> None:
    """Copy rows of ``data`` to row positions of ``out``, both flat bytes; neighbouring rows are copied together."""
    n = len(row)
    i = 0
    while i < n:
        k = i + 1
        while k < n and row[k] - row[i] == k - i and position[k] - position[i] == k - i:
            k += 1
        _copy_bytes(out, position[i] * row_bytes, data, row[i] * row_bytes, (k - i) * row_bytes)
        i = k
