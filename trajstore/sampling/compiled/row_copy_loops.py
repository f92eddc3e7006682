"""Compiled loops that copy the rows of a batch. Importing this module imports numba."""

from __future__ import annotations

from typing import Any

import numpy as np

from trajstore.cache.block_decoders import BLOCKED
from trajstore.sampling.compiled.block_loops import (
    AHEAD,
    COPIED,
    copy_run,
    decoder_at,
    forget_blocks,
    prefetch_block,
    prefetch_header,
)
from trajstore.sampling.compiled.jit import compiled
from trajstore.sampling.compiled.memory_access import (
    MANY,
    array_at,
    copy_memory,
    move_1,
    move_4,
    move_8,
    move_16,
    page_address,
    pointer,
    prefetch,
)
from trajstore.sampling.compiled.program_layout import (
    DECODERS,
    EXISTS,
    GROUP_SIZE,
    GROUPS,
    N_GROUPS,
    N_WINDOWS,
    ROWS,
    SEGMENTS,
    SIZE,
    SOURCES,
)
from trajstore.schema import Array

_LINE = 64  # bytes of a cache line
_AHEAD, _MAX_AHEAD = 12, 1024  # segments that are prefetched before their turn, and bytes of each at most


@compiled
def _copy(to: Any, at: Any, n: Any) -> None:
    """Copy ``n`` bytes between memory addresses."""
    if n == 4:
        move_4(to, at)
    elif n == 8:
        move_8(to, at)
    elif n == 1:
        move_1(to, at)
    elif n == 16:
        move_16(to, at)
    else:
        copy_memory(to, at, n)


@compiled
def _find_segments(call: Array, first: int, n_rows: int, segments: Array) -> int:
    """Write the runs of neighbouring rows of a group: first row, source, where it goes, and how many rows."""
    rows = array_at(pointer(call[ROWS] + 8 * first), (n_rows,), np.int64)
    sources = array_at(pointer(call[SOURCES] + 4 * first), (n_rows,), np.int32)
    n = i = 0
    while i < n_rows:
        k = i + 1
        while k < n_rows and rows[k] - rows[i] == k - i and sources[k] == sources[i]:
            k += 1
        segments[n, 0], segments[n, 1], segments[n, 2], segments[n, 3] = rows[i], sources[i], i, k - i
        n += 1
        i = k
    return n


@compiled
def _copy_direct(column: Array, segments: Array, n_segments: int, out: Any) -> None:
    """Copy segments of a column whose pages lie in the slots of their own numbers."""
    arena, row_bytes = column[0], column[1]
    first_rows = array_at(pointer(column[4]), (MANY,), np.int64)
    for i in range(n_segments):
        for ahead in range(0 if i == 0 else i + _AHEAD, min(i + _AHEAD + 1, n_segments)):
            at = arena + (segments[ahead, 0] + first_rows[segments[ahead, 1]]) * row_bytes
            for line in range(0, min(segments[ahead, 3] * row_bytes, _MAX_AHEAD), _LINE):
                prefetch(at + line)
        row, source, place, count = segments[i, 0], segments[i, 1], segments[i, 2], segments[i, 3]
        _copy(out + place * row_bytes, arena + (row + first_rows[source]) * row_bytes, count * row_bytes)


@compiled
def _copy_paged(column: Array, segments: Array, n_segments: int, out: Any) -> bool:
    """Copy segments of a column page by page; returns False if a page is not resident."""
    arena, row_bytes, page_rows = column[0], column[1], column[3]
    slots = array_at(pointer(column[2]), (MANY,), np.int64)
    first_rows = array_at(pointer(column[4]), (MANY,), np.int64)
    for i in range(n_segments):
        for ahead in range(0 if i == 0 else i + _AHEAD, min(i + _AHEAD + 1, n_segments)):
            virtual = segments[ahead, 0] + first_rows[segments[ahead, 1]]
            page = virtual // page_rows
            at = page_address(arena, slots[page], page_rows * row_bytes) + (virtual - page * page_rows) * row_bytes
            for line in range(0, min(segments[ahead, 3] * row_bytes, _MAX_AHEAD), _LINE):
                prefetch(at + line)
        virtual, place, count = segments[i, 0] + first_rows[segments[i, 1]], segments[i, 2], segments[i, 3]
        while count:
            page = virtual // page_rows
            slot = slots[page]
            if slot == -1 or slot <= -BLOCKED:
                return False
            n = min(count, (page + 1) * page_rows - virtual)
            at = page_address(arena, slot, page_rows * row_bytes) + (virtual - page * page_rows) * row_bytes
            _copy(out + place * row_bytes, at, n * row_bytes)
            virtual, place, count = virtual + n, place + n, count - n
    return True


@compiled
def _pad(exists: Array, row: Any, row_bytes: Any, out: Any) -> None:
    """Overwrite rows that do not exist by the bytes at address ``row``."""
    for i in range(len(exists)):
        if not exists[i]:
            _copy(out + i * row_bytes, row, row_bytes)


@compiled
def _copy_group(call: Array, columns: Array, outputs: Array, g: int, first: int, n_rows: int) -> int:
    """Copy the rows of a group, which begin at ``first``; returns as `copy` does."""
    segments = array_at(pointer(call[SEGMENTS]), (n_rows, 4), np.int64)
    exists = array_at(pointer(call[EXISTS] + first), (n_rows,), np.uint8)
    n_segments = -1
    for c in range(len(outputs)):
        if columns[c, 6] != g or columns[c, 5]:
            continue
        if n_segments < 0:
            n_segments = _find_segments(call, first, n_rows, segments)
        out = outputs[c]
        if columns[c, 2] == 0:
            _copy_direct(columns[c], segments, n_segments, out)
        elif not _copy_paged(columns[c], segments, n_segments, out):
            return c
        if columns[c, 7]:
            _pad(exists, columns[c, 7], columns[c, 1], out)
    return -1


@compiled
def _ask_ahead(program: Array, call: Array, column: Array, b: int) -> None:
    """Prefetch what the first rows of later windows need of a column that is stored in blocks."""
    group = GROUPS + column[6] * GROUP_SIZE
    n, n_windows = program[group + 3] * program[SIZE], call[N_WINDOWS]
    n_rows, before = n * n_windows, program[group + 5] * program[SIZE] * n_windows
    rows = array_at(pointer(call[ROWS] + 8 * before), (n_rows,), np.int64)
    sources = array_at(pointer(call[SOURCES] + 4 * before), (n_rows,), np.int32)
    first_rows = array_at(pointer(column[4]), (MANY,), np.int64)
    near, far = min(b + AHEAD, n_windows - 1) * n, min(b + 2 * AHEAD, n_windows - 1) * n
    prefetch_header(column[2], column[3], rows[far] + first_rows[sources[far]])
    prefetch_block(column[2], column[5], column[3], column[1], rows[near] + first_rows[sources[near]])


@compiled
def _copy_window(program: Array, call: Array, column: Array, decoder: Array, b: int, out: Any) -> int:
    """Copy the rows of one window of one output of such a column; returns as `copy_run` does."""
    group = GROUPS + column[6] * GROUP_SIZE
    n = program[group + 3] * program[SIZE]
    first = program[group + 5] * program[SIZE] * call[N_WINDOWS] + b * n
    rows = array_at(pointer(call[ROWS] + 8 * first), (n,), np.int64)
    sources = array_at(pointer(call[SOURCES] + 4 * first), (n,), np.int32)
    first_rows = array_at(pointer(column[4]), (MANY,), np.int64)
    i = 0
    while i < n:
        k = i + 1
        while k < n and rows[k] - rows[i] == k - i and sources[k] == sources[i]:
            k += 1
        virtual, to = rows[i] + first_rows[sources[i]], out + (b * n + i) * column[1]
        found = copy_run(decoder, column[0], column[1], column[2], column[5], column[3], virtual, k - i, to)
        if found != COPIED:
            return found
        i = k
    return COPIED


@compiled
def _pad_blocked(program: Array, call: Array, column: Array, out: Any) -> None:
    """Overwrite the rows that do not exist, as `_copy_group` does."""
    group = GROUPS + column[6] * GROUP_SIZE
    n_steps = program[SIZE] * call[N_WINDOWS]
    exists = array_at(
        pointer(call[EXISTS] + program[group + 5] * n_steps), (program[group + 3] * n_steps,), np.uint8
    )
    _pad(exists, column[7], column[1], out)


@compiled
def _copy_blocked(program: Array, call: Array, columns: Array, outputs: Array, first: int) -> int:
    """Copy the rows of all outputs of a column that is stored in blocks; returns as `copy` does.

    All outputs get the rows of one window before the next one, because these mostly lie in the same block.
    """
    decoder = decoder_at(call[DECODERS])
    forget_blocks(decoder)
    for b in range(call[N_WINDOWS]):
        _ask_ahead(program, call, columns[first], b)
        for c in range(first, len(outputs)):
            is_same = columns[c, 2] == columns[first, 2]
            if is_same and _copy_window(program, call, columns[c], decoder, b, outputs[c]) != COPIED:
                return c
    for c in range(first, len(outputs)):
        if columns[c, 2] == columns[first, 2] and columns[c, 7]:
            _pad_blocked(program, call, columns[c], outputs[c])
    return -1


@compiled
def _is_first(columns: Array, c: int) -> bool:
    """Whether no output before this one is of the same column."""
    n_before = 0
    for before in range(c):
        n_before += columns[before, 2] == columns[c, 2]
    return n_before == 0


@compiled
def copy(program: Array, call: Array, columns: Array, outputs: Array) -> int:
    """Copy the rows of all windows to the outputs, and pad rows that do not exist.

    Returns -1, or the number of the first column with a page that is not resident, or can't be decoded; copying
    stops there.
    """
    n_steps = call[N_WINDOWS] * program[SIZE]
    for c in range(len(outputs)):
        if columns[c, 5] and _is_first(columns, c):
            failed = _copy_blocked(program, call, columns, outputs, c)
            if failed >= 0:
                return failed
    for g in range(program[N_GROUPS]):
        n_offsets, n_before = program[GROUPS + g * GROUP_SIZE + 3], program[GROUPS + g * GROUP_SIZE + 5]
        failed = _copy_group(call, columns, outputs, g, n_before * n_steps, n_offsets * n_steps)
        if failed >= 0:
            return failed
    return -1
