"""Kernels of a batch: draw and frame windows, copy rows, sum rewards. Importing this module imports Triton.

They give bit by bit what `torch_executor` gives. Addresses and sizes are int64 arguments and are never specialised,
so that neither a growing buffer nor another batch size compiles a kernel again in the middle of a run.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from trajstore.sampling.triton import table_layout as layout

HAS_FINAL, TERMINATED, TRUNCATED, OPEN = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4), tl.constexpr(8)
HEADLESS, BEGINS = tl.constexpr(16), tl.constexpr(32)  # flags of episodes, as in `index_entries`

_SIZE, _BURN_IN, _STRIDE, _LENGTH, _LEAD, _REACH, _START_RULE, _IS_BY_WINDOW = (tl.constexpr(i) for i in range(8))
_COUNT_RULE, _CONTEXT, _NEEDS_NEXT, _LEADS_ON, _N_LOW, _N_CHOICES, _N_LANES = (
    tl.constexpr(i) for i in range(8, len(layout.PROGRAM))
)
_LANE_SIZE = tl.constexpr(len(layout.LANE))
_COLUMN_SIZE = tl.constexpr(len(layout.COLUMN))
_PAD_LEFT, _PAD_BOTH = tl.constexpr(layout.PAD_LEFT_START), tl.constexpr(layout.PAD_BOTH_START)
_STRICT, _SHORT = tl.constexpr(layout.STRICT_COUNT), tl.constexpr(layout.SHORT_COUNT)
_PAD_BOTH_COUNT = tl.constexpr(layout.PAD_BOTH_COUNT)
_OBSERVED, _REACHED = tl.constexpr(1), tl.constexpr(2)

# splitmix64, as in `rng`
_GOLDEN, _MIX_1 = tl.constexpr(0x9E3779B97F4A7C15), tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)


def kernel(function: Any) -> Any:
    """Compile a kernel whose arguments are never specialised, except constants."""
    numbers = [name for name, kind in function.__annotations__.items() if "constexpr" not in kind]
    return triton.jit(function, do_not_specialize=numbers)


@triton.jit
def int64s(address):
    return tl.cast(address.to(tl.int64), tl.pointer_type(tl.int64))


@triton.jit
def _int32s(address):
    return tl.cast(address.to(tl.int64), tl.pointer_type(tl.int32))


@triton.jit
def uint8s(address):
    return tl.cast(address.to(tl.int64), tl.pointer_type(tl.uint8))


@triton.jit
def _only_if(mask, flag):
    """A mask of lanes, or nothing if one flag is False. The interpreter makes integers of ``mask & flag``."""
    return (mask & flag) != 0


@triton.jit
def random_bits(seed, counter):
    """64 random bits, as `CounterRng.bits` returns them."""
    z = (counter + 1).to(tl.uint64) * _GOLDEN + seed.to(tl.uint64)
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    return z ^ (z >> 31)


@triton.jit
def _below(seed, counter, limit):
    """A number uniform in [0, limit), as `CounterRng.below` returns it."""
    uniform = (random_bits(seed, counter) >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2**-53
    return tl.minimum(tl.floor(uniform * limit.to(tl.float64)).to(tl.int64), limit - 1)


@triton.jit
def _count_at_most(rising, n, wanted, mask):
    """How many of ``n`` rising numbers are at most ``wanted``."""
    step = tl.cast(1, tl.int64)
    while step * 2 <= n:
        step *= 2
    found = tl.zeros_like(wanted)
    while step > 0:
        next_found = found + step
        is_inside = mask & (next_found <= n)
        value = tl.load(rising + next_found - 1, mask=is_inside, other=0)
        found = tl.where(is_inside & (value <= wanted), next_found, found)
        step //= 2
    return found


@triton.jit
def _length_and_flags(logical, flags, entry, mask):
    flag = tl.load(flags + entry, mask=mask, other=0).to(tl.int64)
    first = tl.load(logical + entry, mask=mask, other=0)
    return tl.load(logical + entry + 1, mask=mask, other=1) - first - (flag & HAS_FINAL), flag, first


@triton.jit
def _usable(program, n, flag):
    """How many steps of an episode a window may learn from, as `usable_steps` says."""
    needs_next, leads_on = tl.load(program + _NEEDS_NEXT), tl.load(program + _LEADS_ON)
    return tl.where(needs_next != 0, n - 1 + ((flag & leads_on) != 0).to(tl.int64), n)


@triton.jit
def _n_starts(program, n):
    """How many windows start in an episode of ``n`` usable steps, as `Windows.n_starts` says."""
    rule, reach, stride = tl.load(program + _COUNT_RULE), tl.load(program + _REACH), tl.load(program + _STRIDE)
    found = n
    if rule == _STRICT:
        found = tl.maximum(n - (reach + tl.load(program + _CONTEXT)), 0)
    elif rule == _SHORT:
        found = tl.maximum(n - reach, 1) * (n > 0).to(tl.int64)
    elif rule == _PAD_BOTH_COUNT:
        found = n + (tl.load(program + _LENGTH) - 1) * tl.minimum(n, stride)
    return found


@triton.jit
def _start(program, offset, n):
    """Where window number ``offset`` of an episode of ``n`` usable steps starts, as `Windows.start` says."""
    rule, reach, stride = tl.load(program + _START_RULE), tl.load(program + _REACH), tl.load(program + _STRIDE)
    found = offset + tl.load(program + _LEAD)
    if rule == _PAD_LEFT:
        found = offset - reach
    elif rule == _PAD_BOTH:
        group = tl.maximum(tl.minimum(n, stride), 1)  # at least 1, because lanes outside the batch divide too
        n_before = (tl.load(program + _LENGTH) - 1) * group
        before = offset // group * stride + offset % group - reach
        found = tl.where(offset < n_before, before, offset - n_before)
    return found


@triton.jit
def _draw(program, logical, flags, sums, n_entries, base, low, limit, seed, counter, n_windows, window, mask):
    """Draw windows: entry, start, and number of steps of the n-step return."""
    number = _below(seed, counter + window, limit) + low + base
    entry = _count_at_most(sums, n_entries, number, mask)
    offset = number - tl.load(sums + entry - 1, mask=mask & (entry > 0), other=base)
    n, flag, _ = _length_and_flags(logical, flags, entry, mask)
    usable = _usable(program, n, flag)
    used = n_windows
    if tl.load(program + _IS_BY_WINDOW) == 0:
        offset = _below(seed, counter + used + window, _n_starts(program, usable))
        used += n_windows
    n_choices = tl.load(program + _N_CHOICES)
    n_ahead = tl.zeros_like(entry) + tl.load(program + _N_LOW)
    if n_choices > 1:
        n_ahead += _below(seed, counter + used + window, n_choices)
    return entry, _start(program, offset, usable), n_ahead


@triton.jit
def _store_rows(
    lane, at, mask, first, entry, nearest, observed, reached, exists, is_final, n, has_final,
    span_logical, span_row, span_source, n_spans, n_steps, rows, sources, is_real, positions,
):  # fmt: skip
    """Find the rows of one lane, and store them."""
    origin, reaches_final = tl.load(lane), tl.load(lane + 2)
    n_places = tl.load(lane + 5)
    goal = tl.where(origin == _OBSERVED, observed, tl.where(origin == _REACHED, reached, nearest))
    is_origin = exists | _only_if(is_final, origin == _OBSERVED)
    origin_position = goal
    goal += tl.load(lane + 1)
    near = tl.minimum(tl.maximum(goal, 0), n - 1 + has_final * reaches_final)
    repeats = (goal > near) & (goal <= origin_position)
    is_there = tl.where(origin == _REACHED, (near == goal) | repeats, (near == goal) & is_origin)
    logical = first + near
    span, before = tl.zeros_like(near) + entry, tl.zeros_like(near) + first
    if n_spans > 0:
        span = _count_at_most(span_logical, n_spans, logical, mask) - 1
        before = tl.load(span_logical + span, mask=mask, other=0)
    row = tl.load(span_row + span, mask=mask, other=0) + (logical - before)
    source = tl.load(span_source + span, mask=mask, other=0)
    to = tl.load(lane + 3) * n_steps + at * n_places + tl.load(lane + 4)
    tl.store(rows + to, row, mask=mask)
    tl.store(sources + to, source, mask=mask)
    tl.store(is_real + to, is_there.to(tl.uint8), mask=mask)
    tl.store(int64s(positions) + to, near, mask=_only_if(mask, positions != 0))


@kernel
def frame(
    program: tl.int64, lanes: tl.int64,
    logical: tl.int64, flags: tl.int64, t_base: tl.int64, stream: tl.int64, episode: tl.int64,
    span_logical: tl.int64, span_row: tl.int64, span_source: tl.int64, n_spans: tl.int64,
    sums: tl.int64, n_entries: tl.int64, base: tl.int64, low: tl.int64, limit: tl.int64,
    seed: tl.int64, counter: tl.int64, counter_at: tl.int64, n_windows: tl.int64,
    entries: tl.int64, starts: tl.int64, n_of_window: tl.int64,
    handles: tl.int64, masks: tl.int64, final_mask: tl.int64, taken: tl.int64, is_terminal: tl.int64,
    rows: tl.int64, sources: tl.int64, is_real: tl.int64, positions: tl.int64, mask_stride: tl.int64,
    is_drawn: tl.constexpr, block_windows: tl.constexpr, block_steps: tl.constexpr,
):  # fmt: skip
    """Draw windows, or take given ones, and find out everything about their steps except the values of rows.

    A program of the grid has some windows and some of their steps. All arguments but the last three are numbers or
    addresses; 0 stands for an array that does not exist.

    Args:
        program: Numbers in the order of `table_layout.PROGRAM`.
        lanes: Numbers in the order of `table_layout.LANE` for each lane.
        logical: Arrays of the episode index, like the next seven.
        flags: See there.
        t_base: See there.
        stream: See there.
        episode: See there.
        span_logical: See there.
        span_row: See there.
        span_source: See there.
        n_spans: Number of spans; 0 if span i belongs to entry i.
        sums: Running sums of what draws are uniform over.
        n_entries: Their number.
        base: The value that they start from.
        low: First number that may be drawn.
        limit: How many numbers may be drawn.
        seed: Mixed seed of the random numbers.
        counter: Counter of the first of them.
        counter_at: A counter in device memory that replaces ``counter``.
        n_windows: Windows of the batch.
        entries: Index entry of each window; written if windows are drawn.
        starts: Start of each window; the same.
        n_of_window: Steps of each n-step return; the same. May be 0.
        handles: Output ``[n_windows, 3]``.
        masks: Output: one array of all steps for each mask.
        final_mask: Output: whether the step is the final row; may be 0.
        taken: Output: steps that each transition covers; 0 if there are no transitions.
        is_terminal: Output: whether the episode terminated there.
        rows: Output: rows of all groups, one group after the other, ``[n_windows, size, n_places]`` each.
        sources: Output: their sources.
        is_real: Output: whether they exist.
        positions: Output: their positions; may be 0.
        mask_stride: Bytes from one mask to the next.
        is_drawn: Whether windows are drawn.
        block_windows: Windows of one program of the grid.
        block_steps: Steps of each of them.
    """
    program, lanes = int64s(program), int64s(lanes)
    logical, flags, t_base = int64s(logical), uint8s(flags), int64s(t_base)
    n_windows, seed = n_windows.to(tl.int64), seed.to(tl.int64)
    n_entries, n_spans = n_entries.to(tl.int64), n_spans.to(tl.int64)
    window = tl.program_id(0).to(tl.int64) * block_windows + tl.arange(0, block_windows)
    step = tl.program_id(1).to(tl.int64) * block_steps + tl.arange(0, block_steps)
    in_batch = window < n_windows
    is_first_block = _only_if(in_batch, tl.program_id(1) == 0)
    if is_drawn:
        counter = counter.to(tl.int64)
        if counter_at != 0:
            counter = tl.load(int64s(counter_at))
        base, low, limit = base.to(tl.int64), low.to(tl.int64), limit.to(tl.int64)
        entry, start, n_ahead = _draw(
            program, logical, flags, int64s(sums), n_entries, base, low, limit, seed, counter, n_windows, window,
            in_batch,
        )  # fmt: skip
        tl.store(int64s(entries) + window, entry, mask=is_first_block)
        tl.store(int64s(starts) + window, start, mask=is_first_block)
        tl.store(int64s(n_of_window) + window, n_ahead, mask=_only_if(is_first_block, n_of_window != 0))
    else:
        entry = tl.load(int64s(entries) + window, mask=in_batch, other=0)
        start = tl.load(int64s(starts) + window, mask=in_batch, other=0)
        n_ahead = tl.zeros_like(entry) + tl.load(program + _N_LOW)
        if n_of_window != 0:
            n_ahead = tl.load(int64s(n_of_window) + window, mask=in_batch, other=0)

    n, flag, first = _length_and_flags(logical, flags, entry, in_batch)
    begin = tl.load(t_base + entry, mask=in_batch, other=0)
    handle = int64s(handles) + window * 3
    number = tl.load(_int32s(stream) + entry, mask=in_batch, other=0).to(tl.int64)
    tl.store(handle, number, mask=is_first_block)
    tl.store(handle + 1, tl.load(int64s(episode) + entry, mask=in_batch, other=0), mask=is_first_block)
    tl.store(handle + 2, begin + tl.maximum(start, 0), mask=is_first_block)

    # From here on everything is [windows, steps].
    size = tl.load(program + _SIZE)
    n_steps = n_windows * size
    mask = in_batch[:, None] & (step < size)[None, :]
    at = window[:, None] * size + step[None, :]
    relative = (step - tl.load(program + _BURN_IN)) * tl.load(program + _STRIDE)
    wanted = start[:, None] + relative[None, :]
    n, flag, has_final = n[:, None], flag[:, None], (flag & HAS_FINAL)[:, None]
    nearest = tl.minimum(tl.maximum(wanted, 0), n - 1)
    observed = tl.minimum(tl.maximum(wanted, 0), n - 1 + has_final)
    exists = nearest == wanted
    is_final = (wanted == n) & (has_final != 0)
    is_learning = (relative >= 0) & (relative <= tl.load(program + _REACH))
    learns = exists & is_learning[None, :]
    reached = nearest
    if tl.load(program + _NEEDS_NEXT) != 0:
        stop = n - 1 + ((flag & tl.load(program + _LEADS_ON)) != 0).to(tl.int64)
        ahead = tl.minimum(tl.maximum(stop - nearest, 0), n_ahead[:, None])
        reached = nearest + ahead
        ends = (reached == n) & ((flag & TERMINATED) != 0)
        learns = learns & (ahead > 0)
        tl.store(int64s(taken) + at, ahead, mask=mask)
        tl.store(uint8s(is_terminal) + at, ends.to(tl.uint8), mask=mask)

    begins_at = tl.where((flag & BEGINS) != 0, 0, -begin[:, None])
    is_end = wanted == n - 1
    to = uint8s(masks) + at
    tl.store(to, exists.to(tl.uint8), mask=mask)
    tl.store(to + mask_stride, learns.to(tl.uint8), mask=mask)
    tl.store(to + 2 * mask_stride, (exists & (wanted == begins_at)).to(tl.uint8), mask=mask)
    tl.store(to + 3 * mask_stride, (is_end & ((flag & OPEN) == 0)).to(tl.uint8), mask=mask)
    tl.store(to + 4 * mask_stride, (is_end & ((flag & TERMINATED) != 0)).to(tl.uint8), mask=mask)
    tl.store(to + 5 * mask_stride, (is_end & ((flag & TRUNCATED) != 0)).to(tl.uint8), mask=mask)
    tl.store(uint8s(final_mask) + at, is_final.to(tl.uint8), mask=_only_if(mask, final_mask != 0))

    for i in range(tl.load(program + _N_LANES)):
        _store_rows(
            lanes + i * _LANE_SIZE, at, mask, first[:, None], entry[:, None], nearest, observed, reached, exists,
            is_final, n, has_final, int64s(span_logical), int64s(span_row), _int32s(span_source), n_spans, n_steps,
            int64s(rows), _int32s(sources), uint8s(is_real), positions,
        )  # fmt: skip


@triton.jit
def _copy_16(origin, to, mask, is_real, pattern):
    """Copy 16 bytes a lane. Both addresses are multiples of 16."""
    half = tl.arange(0, 2)[None, :]
    here = tl.multiple_of(int64s(origin), 16)
    there = tl.multiple_of(int64s(to), 16)
    value = tl.load(here[:, None] + half, mask=mask[:, None])
    tl.store(there[:, None] + half, tl.where(is_real[:, None], value, pattern), mask=mask[:, None])


@triton.jit
def _copy_4(origin, to, mask, is_real, pattern):
    value = tl.load(_int32s(origin), mask=mask)
    tl.store(_int32s(to), tl.where(is_real, value, pattern.to(tl.int32)), mask=mask)


@triton.jit
def _copy_1(origin, to, mask, is_real, pattern):
    value = tl.load(uint8s(origin), mask=mask)
    tl.store(uint8s(to), tl.where(is_real, value, pattern.to(tl.uint8)), mask=mask)


@kernel
def gather(
    columns: tl.int64, tiles: tl.int64, n_columns: tl.int64, n_steps: tl.int64,
    rows: tl.int64, sources: tl.int64, is_real: tl.int64, out: tl.int64, scratch: tl.int64,
    counter_at: tl.int64, n_used: tl.int64, block: tl.constexpr,
):  # fmt: skip
    """Copy the rows of all columns of a batch, and pad rows that do not exist.

    A program of the grid copies one tile: ``block`` pieces of 16, 4 or 1 bytes of one column.

    Args:
        columns: Numbers in the order of `table_layout.COLUMN` for each column; all their pages must be resident.
        tiles: The first tile of each column.
        n_columns: Number of columns.
        n_steps: Steps of the batch.
        rows: What `frame` wrote, like the next two.
        sources: See there.
        is_real: See there.
        out: Address of the outputs.
        scratch: Address of the scratch memory.
        counter_at: A counter in device memory that `frame` has used; it is advanced. May be 0.
        n_used: How many random numbers `frame` has used.
        block: Pieces of a tile.
    """
    tile = tl.program_id(0).to(tl.int64)
    if (tile == 0) & (counter_at != 0):
        tl.store(int64s(counter_at), tl.load(int64s(counter_at)) + n_used)
    number = _count_at_most(int64s(tiles), n_columns.to(tl.int64), tile, tile >= 0) - 1
    column = int64s(columns) + number * _COLUMN_SIZE
    arena, row_bytes = tl.load(column), tl.load(column + 1)
    slots, page_rows = tl.load(column + 2), tl.load(column + 3)
    first_rows, n_places, width = int64s(tl.load(column + 4)), tl.load(column + 6), tl.load(column + 11)
    first = tl.load(column + 5) * n_steps
    to = tl.where(tl.load(column + 7) != 0, scratch, out) + tl.load(column + 8)
    # Where the tile begins is computed once, in 64 bits. Lanes divide in 32 bits, which is several times faster.
    n_pieces = row_bytes // width
    begin = (tile - tl.load(int64s(tiles) + number)) * block
    begin_row = begin // n_pieces
    piece = (begin - begin_row * n_pieces).to(tl.int32) + tl.arange(0, block)
    row_in_tile = piece // n_pieces.to(tl.int32)
    piece = (piece - row_in_tile * n_pieces.to(tl.int32)).to(tl.int64)
    place = begin_row + row_in_tile
    mask = place < n_steps * n_places
    row = tl.load(int64s(rows) + first + place, mask=mask, other=0)
    source = tl.load(_int32s(sources) + first + place, mask=mask, other=0)
    needs_padding = _only_if(mask, tl.load(column + 9) != 0)
    real = tl.load(uint8s(is_real) + first + place, mask=needs_padding, other=1) != 0
    at = row + tl.load(first_rows + source, mask=mask, other=0)
    if slots != 0:
        page = at // page_rows
        at += (tl.load(int64s(slots) + page, mask=mask, other=0) - page) * page_rows
    origin = arena + at * row_bytes + piece * width
    to += place * row_bytes + piece * width
    pattern = tl.load(column + 10) >> (piece * width % 8 * 8)
    if width == 16:
        _copy_16(origin, to, mask, real, tl.load(column + 10))
    elif width == 4:
        _copy_4(origin, to, mask, real, pattern)
    else:
        _copy_1(origin, to, mask, real, pattern)


@kernel
def provenance(
    flags: tl.int64, stream: tl.int64, env: tl.int64, shown_env: tl.int64, source_ranks: tl.int64,
    entries: tl.int64, rank: tl.int64, n_windows: tl.int64, out: tl.int64, stride: tl.int64, is_headless: tl.int64,
    block: tl.constexpr,
):  # fmt: skip
    """Find out where windows come from.

    Args:
        flags: Arrays of the episode index, like the next four.
        stream: See there.
        env: See there.
        shown_env: See there.
        source_ranks: See there.
        entries: Index entry of each window.
        rank: Rank of this session.
        n_windows: Windows of the batch.
        out: Output: rank, env, source_rank, source_env, end.
        stride: Numbers from one of them to the next.
        is_headless: Output.
        block: Windows of one program of the grid.
    """
    window = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    mask = window < n_windows
    entry = tl.load(int64s(entries) + window, mask=mask, other=0)
    flag = tl.load(uint8s(flags) + entry, mask=mask, other=0).to(tl.int64)
    number = tl.load(_int32s(stream) + entry, mask=mask, other=0).to(tl.int64)
    end = tl.where((flag & TERMINATED) != 0, 1, tl.where((flag & TRUNCATED) != 0, 2, 3))
    to = int64s(out) + window
    shown = tl.load(_int32s(shown_env) + entry, mask=mask, other=0).to(tl.int64)
    recorded = tl.load(_int32s(env) + entry, mask=mask, other=0).to(tl.int64)
    tl.store(to, tl.zeros_like(entry) + rank, mask=mask)
    tl.store(to + stride, shown, mask=mask)
    tl.store(to + 2 * stride, tl.load(int64s(source_ranks) + number, mask=mask, other=0), mask=mask)
    tl.store(to + 3 * stride, recorded, mask=mask)
    tl.store(to + 4 * stride, tl.where((flag & OPEN) != 0, 0, end).to(tl.int64), mask=mask)
    tl.store(uint8s(is_headless) + window, ((flag & (HEADLESS | BEGINS)) == HEADLESS).to(tl.uint8), mask=mask)
