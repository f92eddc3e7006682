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

from trajstore.sampling.compiled.jit import compiled, random_bits
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


@intrinsic
def _number_at(context: Any, address: Any, i: Any) -> Any:
    """Return element ``i`` of the int64 array at a memory address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, i = arguments
        return builder.load(builder.gep(builder.inttoptr(address, _NUMBERS), [i]))

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _copy_memory(context: Any, to: Any, at: Any, n: Any) -> Any:
    """Copy ``n`` bytes from memory address ``at`` to ``to``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to, at, n = arguments
        cgutils.raw_memcpy(builder, builder.inttoptr(to, _BYTES), builder.inttoptr(at, _BYTES), n, 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def _prefetch(context: Any, address: Any) -> Any:
    """Ask the processor to fetch the cache line of a memory address; any number is allowed."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), (_BYTES, number, number, number))
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", (_BYTES,), kind)
        builder.call(prefetch, [builder.inttoptr(arguments[0], _BYTES), number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@compiled
def _last_at(rising: Array, wanted: Any) -> int:
    """Return the position of the last of rising numbers that is at most ``wanted``, or -1."""
    left, right = 0, len(rising)
    while left < right:
        middle = (left + right) >> 1
        if rising[middle] <= wanted:
            left = middle + 1
        else:
            right = middle
    return left - 1


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
        left = _last_at(sums, number) + 1
        entry[i] = left
        offset[i] = number - (sums[left - 1] if left > 0 else base)


@compiled
def window_steps(
    entry: Array,
    start: Array,
    steps: Array,
    is_learning: Array,
    logical: Array,
    flags: Array,
    t_base: Array,
    stream: Array,
    episode: Array,
    span_logical: Array,
    span_row: Array,
    span_source: Array,
    is_simple: bool,
    masks: Array,
    inside: Array,
    handles: Array,
    row: Array,
    source: Array,
) -> None:
    """Find the steps of windows: positions, masks, handles, rows and sources.

    ``inside`` receives the position of each step, or of the nearest step that exists. ``masks`` receives the six
    masks in the order of ``batch_plan.MASKS``. ``is_simple`` says that every episode has exactly one span.
    """
    n_spans = len(span_logical)
    for b in range(len(entry)):
        e = entry[b]
        flag = flags[e]
        base = logical[e]
        last = logical[e + 1] - base - (flag & HAS_FINAL) - 1
        first = -t_base[e]
        begin = np.int64(0) if flag & BEGINS != 0 else first
        is_ended, is_terminated = flag & OPEN == 0, flag & TERMINATED != 0
        is_truncated = flag & TRUNCATED != 0
        handles[b, 0] = stream[e]
        handles[b, 1] = episode[e]
        handles[b, 2] = max(start[b], 0) - first
        low, high, shift, origin = np.int64(0), np.int64(-1), np.int64(0), span_source[0]
        if is_simple:
            low, high, shift, origin = base, base + last + 1, span_row[e] - base, span_source[e]
        for j in range(len(steps)):
            position = start[b] + steps[j]
            near = min(max(position, 0), last)
            is_last = position == last
            inside[b, j] = near
            masks[0, b, j] = near == position
            masks[1, b, j] = (near == position) & is_learning[j]
            masks[2, b, j] = (near == position) & (position == begin)
            masks[3, b, j] = is_last & is_ended
            masks[4, b, j] = is_last & is_terminated
            masks[5, b, j] = is_last & is_truncated
            wanted = base + near
            if wanted < low or wanted >= high:
                span = _last_at(span_logical, wanted)
                low, high = span_logical[span], np.int64(1) << 62
                if span + 1 < n_spans:
                    high = span_logical[span + 1]
                shift, origin = span_row[span] - low, span_source[span]
            row[b, j] = wanted + shift
            source[b, j] = origin


@compiled
def transition_targets(
    entry: Array,
    inside: Array,
    n_step: Array,
    good: int,
    logical: Array,
    flags: Array,
    taken: Array,
    position: Array,
    is_terminal: Array,
) -> None:
    """Find where each step's transition leads, at most ``n_step`` steps ahead.

    ``taken`` receives the number of steps, ``position`` the position reached, or that of the last row if the
    episode has no such row, and ``is_terminal`` whether the episode terminated there. The last step of an episode
    has a transition only if the episode has one of the flags ``good``.
    """
    for b in range(len(entry)):
        e = entry[b]
        flag = flags[e]
        has_final = flag & HAS_FINAL
        n = logical[e + 1] - logical[e] - has_final
        stop = n - 1 + (1 if flag & good != 0 else 0)
        for j in range(inside.shape[1]):
            ahead = min(max(stop - inside[b, j], 0), n_step[b])
            reached = inside[b, j] + ahead
            taken[b, j] = ahead
            position[b, j] = min(reached, n - 1 + has_final)
            is_terminal[b, j] = (reached == n) & (flag & TERMINATED != 0)


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
        span = entry[b] if is_simple else _last_at(span_logical, base + position[b, 0])
        low, high = span_logical[span], np.int64(1) << 62
        if span + 1 < n_spans:
            high = span_logical[span + 1]
        for j in range(position.shape[1]):
            wanted = base + position[b, j]
            if wanted < low or wanted >= high:
                span = _last_at(span_logical, wanted)
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
def copy_columns(columns: Array, source: Array, row: Array) -> int:
    """Copy the same rows of several columns; neighbouring rows are copied together.

    Each line of ``columns`` holds the memory address of the arena, the bytes of a row, the memory address of the
    page table (slot by page), the rows of a page, the memory address of the sources' first virtual rows, and the
    memory address that the rows go to.

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
                at = arena + (_number_at(table, page) * page_rows + address - page * page_rows) * row_bytes
                for line in range(0, n_ahead, _LINE):
                    _prefetch(at + line)
            j = 0
            while j < n:
                origin = np.int64(source[b, min(j, last_source)])
                first = row[b, j]
                address = first + _number_at(row_base, origin)
                page = address // page_rows
                slot = _number_at(table, page)
                if slot < 0:
                    return c
                stop = min(n, j + (page + 1) * page_rows - address)
                k = j + 1
                while k < stop and row[b, k] - first == k - j and source[b, min(k, last_source)] == origin:
                    k += 1
                at = arena + (slot * page_rows + address - page * page_rows) * row_bytes
                _copy_memory(out + (b * n + j) * row_bytes, at, (k - j) * row_bytes)
                j = k
    return -1


@compiled
def addresses_of(
    handles: Array,
    stream: int,
    entries: Array,
    first_entry: int,
    newest: int,
    logical: Array,
    flags: Array,
    t_base: Array,
    homes: Array,
    first_home: int,
    address: Array,
) -> None:
    """Find the step-table addresses of handles of one stream; handles of other streams are left as they are.

    An address is -1 if the step was evicted, -2 if it lies past the end of its episode, and -3 if the stream has no
    such episode. ``entries`` starts with episode ``first_entry``, ``homes`` with episode ``first_home``. Every
    episode that has an entry has a home.
    """
    for i in range(len(handles)):
        if handles[i, 0] != stream:
            continue
        episode, t = handles[i, 1], handles[i, 2]
        if episode < 0 or episode > newest or t < 0:
            address[i] = -3
            continue
        at = episode - first_entry
        e = entries[at] if 0 <= at < len(entries) else np.int64(-1)
        if e < 0 or t < t_base[e]:
            address[i] = -1
        elif t - t_base[e] >= logical[e + 1] - logical[e] - (flags[e] & HAS_FINAL):
            address[i] = -2
        else:
            address[i] = homes[episode - first_home] + t


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
