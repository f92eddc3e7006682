"""A whole batch in one compiled call: draw, frame, find rows, copy them, and sum rewards.

The loops work on memory addresses that `compiled_executor` puts into a few arrays of integers, so a call costs the
same however many columns a batch has; `program_layout` describes the arrays. They give bit by bit what
`torch_executor` gives. A large batch is made in parts, by one or more threads. Importing this module imports numba.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trajstore.sampling.compiled.jit import CFunction, compiled, inlined, random_bits
from trajstore.sampling.compiled.memory_access import MANY, array_at, pointer, take_number
from trajstore.sampling.compiled.program_layout import (
    BEGINS,
    BOUNDARY,
    BURN_IN,
    CALL_SIZE,
    COLUMN_SIZE,
    COPIES,
    COUNTER,
    ENTRY,
    EPISODE,
    EPISODE_ROW,
    EXISTS,
    FACTS,
    FIRST,
    FIRST_INSIDE,
    FLAG,
    FLAGS,
    GROUP_SIZE,
    GROUPS,
    HANDLES,
    HAS_FINAL,
    HAS_FINAL_MASK,
    INDEX_SIZE,
    IS_DRAWN,
    IS_SIMPLE,
    IS_TERMINAL,
    JOB_CALL,
    JOB_COLUMNS,
    JOB_FAILED,
    JOB_INDEX,
    JOB_N_COLUMNS,
    JOB_NEXT_PART,
    JOB_NEXT_THREAD,
    JOB_OFFSETS,
    JOB_OUTPUTS,
    JOB_PART,
    JOB_PROGRAM,
    JOB_SHIFTS,
    JOB_SIZE,
    LEAD,
    LEADS_ON,
    LENGTH,
    LIMIT,
    LOGICAL,
    LOW,
    MASKS,
    N_COUNTER,
    N_DRAWN,
    N_FACTS,
    N_GROUPS,
    N_IN_EPISODE,
    N_OF_WINDOW,
    N_SPANS,
    N_STEPS,
    N_SUMS,
    N_WINDOWS,
    NEEDS_NEXT,
    OBSERVED,
    OPEN,
    PAD_LEFT,
    PART_NUMBERS,
    PLAIN,
    POSITIONS,
    REACH,
    REACHED,
    ROWS,
    ROWS_OF_STARTS,
    SEED,
    SIZE,
    SOURCES,
    SPAN_LOGICAL,
    SPAN_ROW,
    SPAN_SOURCE,
    SPANS,
    START,
    STOP_INSIDE,
    STREAM,
    STRIDE,
    SUMS,
    SUMS_BASE,
    T_BASE,
    TAKEN,
    TERMINATED,
    TRUNCATED,
)
from trajstore.sampling.compiled.return_loops import sum_returns
from trajstore.sampling.compiled.row_copy_loops import copy
from trajstore.sampling.compiled.searching import last_at
from trajstore.schema import Array

_BLOCK = 32  # searches that take turns
_END = 1 << 62


@compiled
def _search(rising: Array, wanted: Array, found: Array) -> None:
    """Find, for each wanted number, the position of the last of rising numbers that is at most it, or -1.

    Searches of a block take turns, so that the processor waits for the memory of all of them at once.
    """
    for start in range(0, len(wanted), _BLOCK):
        stop, n = min(start + _BLOCK, len(wanted)), np.int64(len(rising))
        for i in range(start, stop):
            found[i] = 0
        while n > 1:
            half = n >> 1
            for i in range(start, stop):
                at = found[i]
                found[i] = at + half if rising[at + half - 1] <= wanted[i] else at
            n -= half
        for i in range(start, stop):
            if n < 1 or rising[found[i]] > wanted[i]:
                found[i] -= 1


@compiled
def _below(seed: Any, counter: Any, limit: Any) -> Any:
    """Return random number ``counter``, uniform in [0, limit)."""
    z = random_bits(np.uint64(seed), np.uint64(counter))
    number = np.int64(np.float64(z >> np.uint64(11)) * 2.0**-53 * np.float64(limit))
    return min(number, limit - 1)


@compiled
def _draw(program: Array, index: Array, call: Array) -> None:
    """Draw windows: their entries, starts and, if it is drawn, the number of steps of their n-step returns."""
    n = call[N_WINDOWS]
    entry = array_at(pointer(call[ENTRY]), (n,), np.int64)
    start = array_at(pointer(call[START]), (n,), np.int64)
    sums = array_at(pointer(index[SUMS]), (index[N_SUMS],), np.int64)
    for b in range(n):
        start[b] = _below(call[SEED], call[COUNTER] + b, call[LIMIT]) + call[LOW]
    _search(sums, start, entry)
    for b in range(n):
        start[b] += program[LEAD] - (sums[entry[b]] if entry[b] >= 0 else index[SUMS_BASE])
        entry[b] += 1
    if program[BOUNDARY] != PLAIN:
        _place(program, index, entry, start)
    if program[N_DRAWN]:
        n_of_window = array_at(pointer(call[N_OF_WINDOW]), (n,), np.int64)
        for b in range(n):
            n_of_window[b] = _below(call[SEED], call[N_COUNTER] + b, program[N_DRAWN]) + program[N_STEPS]


@compiled
def _place(program: Array, index: Array, entry: Array, start: Array) -> None:
    """Turn the numbers of windows in their episodes into starts, where windows begin before their episodes."""
    logical = array_at(pointer(index[LOGICAL]), (MANY,), np.int64)
    flags = array_at(pointer(index[FLAGS]), (MANY,), np.uint8)
    stride, reach = program[STRIDE], program[REACH]
    for b in range(len(entry)):
        if program[BOUNDARY] == PAD_LEFT:
            start[b] -= reach
            continue
        e, number = entry[b], start[b]
        usable = logical[e + 1] - logical[e] - (flags[e] & HAS_FINAL)
        if program[NEEDS_NEXT]:
            usable += -1 + (1 if flags[e] & program[LEADS_ON] else 0)
        group = min(usable, stride)
        n_before = (program[LENGTH] - 1) * group
        start[b] = number - n_before
        if number < n_before:
            start[b] = number // group * stride + number % group - reach


@compiled
def _fill(values: Array, start: int, stop: int, value: Any) -> None:
    for i in range(start, stop):
        values[i] = value


@compiled
def _set_range(address: Any, size: int, start: int, stop: int) -> None:
    """Set bytes from ``start`` to ``stop`` to 1, and the others of ``size`` bytes to 0."""
    values = array_at(pointer(address), (size,), np.uint8)
    _fill(values, 0, start, 0)
    _fill(values, start, stop, 1)
    _fill(values, stop, size, 0)


@compiled
def _set_at(address: Any, i: int, value: bool) -> None:
    """Set byte ``i``; a negative ``i`` means none."""
    if i >= 0:
        array_at(pointer(address), (i + 1,), np.uint8)[i] = value


@compiled
def _step_at(position: Any, first: Any, stride: int, size: int) -> Any:
    """Return the step of a window, which begins at ``first``, that lies at a position; -1 if none does."""
    distance = position - first
    if distance < 0 or distance % stride or distance // stride >= size:
        return -1
    return distance // stride


@compiled
def _frame(program: Array, index: Array, call: Array) -> None:
    """Find the episodes of drawn windows: handles, and facts that the other loops need."""
    n_windows, size, stride = call[N_WINDOWS], program[SIZE], program[STRIDE]
    entry = array_at(pointer(call[ENTRY]), (n_windows,), np.int64)
    starts = array_at(pointer(call[START]), (n_windows,), np.int64)
    logical = array_at(pointer(index[LOGICAL]), (MANY,), np.int64)
    flags = array_at(pointer(index[FLAGS]), (MANY,), np.uint8)
    t_base = array_at(pointer(index[T_BASE]), (MANY,), np.int64)
    stream = array_at(pointer(index[STREAM]), (MANY,), np.int32)
    episode = array_at(pointer(index[EPISODE]), (MANY,), np.int64)
    handles = array_at(pointer(call[HANDLES]), (n_windows, 3), np.int64)
    facts = array_at(pointer(call[FACTS]), (n_windows, N_FACTS), np.int64)
    for b in range(n_windows):
        e = entry[b]
        flag = np.int64(flags[e])
        n = logical[e + 1] - logical[e] - (flag & HAS_FINAL)
        if t_base[e] == 0:
            flag |= BEGINS
        handles[b, 0], handles[b, 1], handles[b, 2] = stream[e], episode[e], t_base[e] + max(starts[b], 0)
        first = starts[b] - program[BURN_IN] * stride
        low = 0 if first >= 0 else min(size, (stride - 1 - first) // stride)
        high = size if first + (size - 1) * stride < n else max(low, (n - first + stride - 1) // stride)
        facts[b, EPISODE_ROW], facts[b, N_IN_EPISODE], facts[b, FLAG] = logical[e], n, flag
        facts[b, FIRST], facts[b, FIRST_INSIDE], facts[b, STOP_INSIDE] = first, low, high
    if not index[IS_SIMPLE]:
        rows = array_at(pointer(call[ROWS_OF_STARTS]), (n_windows,), np.int64)
        for b in range(n_windows):
            rows[b] = facts[b, EPISODE_ROW] + min(max(starts[b], 0), facts[b, N_IN_EPISODE] - 1)
        spans = array_at(pointer(call[SPANS]), (n_windows,), np.int64)
        _search(array_at(pointer(index[SPAN_LOGICAL]), (index[N_SPANS],), np.int64), rows, spans)


@compiled
def _mark(program: Array, call: Array) -> None:
    """Write the masks of all steps."""
    size, stride, n_steps = program[SIZE], program[STRIDE], call[N_WINDOWS] * program[SIZE]
    facts = array_at(pointer(call[FACTS]), (call[N_WINDOWS], N_FACTS), np.int64)
    is_same = program[LENGTH] == size  # every step that exists is learned from
    for m in range(6 + program[HAS_FINAL_MASK]):
        mask = array_at(pointer(call[MASKS + m]), (n_steps,), np.uint8)
        _fill(mask, 0, n_steps, 1 if m == 0 or (m == 1 and is_same) else 0)
    for b in range(call[N_WINDOWS]):
        n, flag, first = facts[b, N_IN_EPISODE], facts[b, FLAG], facts[b, FIRST]
        if not is_same or facts[b, FIRST_INSIDE] > 0 or facts[b, STOP_INSIDE] < size:
            _mark_inside(program, call, b, facts[b, FIRST_INSIDE], facts[b, STOP_INSIDE])
        if first <= 0 and flag & BEGINS:
            _set_at(call[MASKS + 2] + b * size, _step_at(np.int64(0), first, stride, size), True)
        if first + (size - 1) * stride >= n - 1:
            j = _step_at(n - 1, first, stride, size)
            _set_at(call[MASKS + 3] + b * size, j, flag & OPEN == 0)
            _set_at(call[MASKS + 4] + b * size, j, flag & TERMINATED != 0)
            _set_at(call[MASKS + 5] + b * size, j, flag & TRUNCATED != 0)
            if program[HAS_FINAL_MASK]:
                _set_at(call[MASKS + 6] + b * size, _step_at(n, first, stride, size), flag & HAS_FINAL != 0)


@compiled
def _mark_inside(program: Array, call: Array, b: int, low: Any, high: Any) -> None:
    """Mark the steps of a window that exist, and those among them that are learned from."""
    size, burn_in = program[SIZE], program[BURN_IN]
    _set_range(call[MASKS] + b * size, size, low, high)
    learn_low = min(max(low, burn_in), size)
    learn_high = max(learn_low, min(high, burn_in + program[LENGTH]))
    _set_range(call[MASKS + 1] + b * size, size, learn_low, learn_high)


@compiled
def _find_targets(program: Array, call: Array) -> None:
    """Find where the transition of each step leads; a step without a successor is not learned from."""
    n_windows, size, stride = call[N_WINDOWS], program[SIZE], program[STRIDE]
    facts = array_at(pointer(call[FACTS]), (n_windows, N_FACTS), np.int64)
    taken = array_at(pointer(call[TAKEN]), (n_windows, size), np.int64)
    is_terminal = array_at(pointer(call[IS_TERMINAL]), (n_windows, size), np.uint8)
    learn = array_at(pointer(call[MASKS + 1]), (n_windows, size), np.uint8)
    n_of_window = array_at(pointer(call[N_OF_WINDOW]), (n_windows,), np.int64)
    for b in range(n_windows):
        n, flag, first = facts[b, N_IN_EPISODE], facts[b, FLAG], facts[b, FIRST]
        stop = n - 1 + (1 if flag & program[LEADS_ON] else 0)
        most = n_of_window[b] if program[N_DRAWN] else program[N_STEPS]
        for j in range(size):
            inside = min(max(first + j * stride, 0), n - 1)
            ahead = min(max(stop - inside, 0), most)
            taken[b, j] = ahead
            is_terminal[b, j] = (inside + ahead == n) & (flag & TERMINATED != 0)
            learn[b, j] = (learn[b, j] != 0) & (ahead > 0)


@compiled
def _find_positions(
    program: Array, call: Array, group: Array, fact: Array, b: int, offsets: Array, near: Array, exists: Array
) -> None:
    """Find the positions of the rows of one window, and which of them exist."""
    _, n, flag, first, low, high = fact
    size, stride = program[SIZE], program[STRIDE]
    origin, reaches_final, is_padded, n_offsets, first_offset, _ = group
    taken = array_at(pointer(call[TAKEN]), (call[N_WINDOWS], size), np.int64)
    has_final = flag & HAS_FINAL
    last = n - 1 + (has_final if reaches_final else 0)
    for j in range(size):
        position = first + j * stride
        inside = min(max(position, 0), n - 1 + (has_final if origin == OBSERVED else 0))
        is_origin = (low <= j < high) | ((origin == OBSERVED) & (position == n) & (has_final != 0))
        if origin == REACHED:
            inside += taken[b, j]
        for k in range(n_offsets):
            goal, i = inside + offsets[first_offset + k], j * n_offsets + k
            near[i] = min(max(goal, 0), last)
            if is_padded and origin == REACHED:
                exists[i] = (near[i] == goal) | ((goal > near[i]) & (goal <= inside))
            elif is_padded:
                exists[i] = (near[i] == goal) & is_origin


@compiled
def _locate(index: Array, row: Any, span: Any, near: Array, rows: Array, sources: Array) -> None:
    """Find the rows and sources of positions of an episode that begins at a logical row. May be in place.

    ``span`` is the span to try first.
    """
    n_spans = index[N_SPANS]
    span_logical = array_at(pointer(index[SPAN_LOGICAL]), (n_spans,), np.int64)
    span_row = array_at(pointer(index[SPAN_ROW]), (n_spans,), np.int64)
    span_source = array_at(pointer(index[SPAN_SOURCE]), (n_spans,), np.int32)
    low = span_logical[span]
    high = span_logical[span + 1] if span + 1 < n_spans else np.int64(_END)
    shift, source = span_row[span] - low, span_source[span]
    for i in range(len(near)):
        wanted = row + near[i]
        if wanted < low or wanted >= high:
            span = last_at(span_logical, wanted)
            low = span_logical[span]
            high = span_logical[span + 1] if span + 1 < n_spans else np.int64(_END)
            shift, source = span_row[span] - low, span_source[span]
        rows[i], sources[i] = wanted + shift, source


@compiled
def _find_plain_positions(program: Array, call: Array, group: Array, near: Array, exists: Array) -> None:
    """Find the positions of the rows of a group that is not stacked, for windows that need no padding."""
    size, stride = program[SIZE], program[STRIDE]
    facts = array_at(pointer(call[FACTS]), (call[N_WINDOWS], N_FACTS), np.int64)
    taken = array_at(pointer(call[TAKEN]), (call[N_WINDOWS], size), np.int64)
    is_reached = group[0] == REACHED
    if group[2]:
        for b in range(len(exists)):
            _fill(exists[b], 0, size, 1)
    for b in range(call[N_WINDOWS]):
        first, last = facts[b, FIRST], facts[b, N_IN_EPISODE] - 1
        if group[1]:
            last += facts[b, FLAG] & HAS_FINAL
        for j in range(size):
            position = first + j * stride
            near[b, j] = min(position + taken[b, j], last) if is_reached else position


@compiled
def _find_rows(program: Array, offsets: Array, index: Array, call: Array, g: int) -> None:
    """Find the rows of one group."""
    n_windows, size = call[N_WINDOWS], program[SIZE]
    group = program[GROUPS + g * GROUP_SIZE : GROUPS + (g + 1) * GROUP_SIZE]
    n, first_row = size * group[3], group[5] * size * n_windows
    facts = array_at(pointer(call[FACTS]), (n_windows, N_FACTS), np.int64)
    rows = array_at(pointer(call[ROWS] + 8 * first_row), (n_windows, n), np.int64)
    sources = array_at(pointer(call[SOURCES] + 4 * first_row), (n_windows, n), np.int32)
    exists = array_at(pointer(call[EXISTS] + first_row), (n_windows, n), np.uint8)
    near = rows
    if call[POSITIONS]:
        near = array_at(pointer(call[POSITIONS] + 8 * first_row), (n_windows, n), np.int64)
    spans = array_at(pointer(call[SPANS]), (n_windows,), np.int64)
    is_plain = group[3] == 1 and offsets[group[4]] == 0
    if is_plain:
        _find_plain_positions(program, call, group, near, exists)
    for b in range(n_windows):
        if not is_plain or facts[b, FIRST_INSIDE] > 0 or facts[b, STOP_INSIDE] < size:
            _find_positions(program, call, group, facts[b], b, offsets, near[b], exists[b])
    if index[IS_SIMPLE]:
        _shift_rows(index, call, near, rows, sources)
    else:
        for b in range(n_windows):
            _locate(index, facts[b, EPISODE_ROW], spans[b], near[b], rows[b], sources[b])


@compiled
def _shift_rows(index: Array, call: Array, near: Array, rows: Array, sources: Array) -> None:
    """Find the rows and sources of positions in episodes that have one span each. May be in place."""
    n_windows, n = rows.shape
    entry = array_at(pointer(call[ENTRY]), (n_windows,), np.int64)
    span_row = array_at(pointer(index[SPAN_ROW]), (MANY,), np.int64)
    span_source = array_at(pointer(index[SPAN_SOURCE]), (MANY,), np.int32)
    for b in range(n_windows):
        shift, source = span_row[entry[b]], span_source[entry[b]]
        for i in range(n):
            rows[b, i] = near[b, i] + shift
            sources[b, i] = source


@inlined
def _make(program: Array, offsets: Array, index: Array, columns: Array, outputs: Array, call: Array) -> int:
    """Make a batch: draw its windows, unless they are given, frame them, copy all rows and sum rewards.

    With ``call[COPIES]`` 0, nothing is copied or summed. Returns what `copy` returns.
    """
    if call[IS_DRAWN]:
        _draw(program, index, call)
    _frame(program, index, call)
    _mark(program, call)
    if program[NEEDS_NEXT]:
        _find_targets(program, call)
    for g in range(program[N_GROUPS]):
        _find_rows(program, offsets, index, call, g)
    if not call[COPIES]:
        return -1
    failed = copy(program, call, columns, outputs)
    if failed < 0:
        sum_returns(program, call)
    return failed


@compiled
def _shift(numbers: Array, shifts: Array, n_windows: Any, n_threads: Any, shifted: Array) -> None:
    """Write the numbers of a part of a batch, before which there are so many windows and threads."""
    for i in range(len(numbers)):
        shifted[i] = numbers[i] + shifts[i, 0] * n_windows + shifts[i, 1] * n_threads


def _run_parts(address: Any) -> None:
    """Make one part of a batch after the other, until all parts are taken; other threads do the same."""
    job = array_at(pointer(address), (JOB_SIZE,), np.int64)
    n_columns, part = job[JOB_N_COLUMNS], job[JOB_PART]
    program = array_at(pointer(job[JOB_PROGRAM]), (MANY,), np.int64)
    offsets = array_at(pointer(job[JOB_OFFSETS]), (MANY,), np.int64)
    index = array_at(pointer(job[JOB_INDEX]), (INDEX_SIZE,), np.int64)
    columns = array_at(pointer(job[JOB_COLUMNS]), (n_columns, COLUMN_SIZE), np.int64)
    outputs = array_at(pointer(job[JOB_OUTPUTS]), (n_columns,), np.int64)
    call = array_at(pointer(job[JOB_CALL]), (CALL_SIZE,), np.int64)
    shifts = array_at(pointer(job[JOB_SHIFTS]), (CALL_SIZE + n_columns, 2), np.int64)
    thread = take_number(address + 8 * JOB_NEXT_THREAD)
    start = part * take_number(address + 8 * JOB_NEXT_PART)
    own = call[PART_NUMBERS] + thread * shifts[PART_NUMBERS, 1]
    part_call = array_at(pointer(own), (CALL_SIZE,), np.int64)
    part_outputs = array_at(pointer(own + 8 * CALL_SIZE), (n_columns,), np.int64)
    while start < call[N_WINDOWS]:
        _shift(call, shifts[:CALL_SIZE], start, thread, part_call)
        _shift(outputs, shifts[CALL_SIZE:], start, thread, part_outputs)
        part_call[N_WINDOWS] = min(part, call[N_WINDOWS] - start)
        failed = _make(program, offsets, index, columns, part_outputs, part_call)
        if failed >= 0:
            job[JOB_FAILED] = failed
        start = part * take_number(address + 8 * JOB_NEXT_PART)


run_parts = CFunction(_run_parts)  # several threads may call it for one batch
