"""Compiled loops that take up appended rows: into live rows of the cache, the index, and sums of window starts.

Each loop has a twin made of array operations that gives the same values. The loops keep the GIL, because they take
a few microseconds. Importing this module imports numba.
"""

from __future__ import annotations

import numpy as np

from trajstore.sampling.compiled.jit import compiled_with_gil
from trajstore.sampling.compiled.memory_access import copy_memory
from trajstore.schema import Array

HAS_FINAL = 1  # a flag of episodes, as in `index_entries`

# Rows of the table of live episodes, as in `live_episodes`.
_EPISODE, _ENV, _N_ROWS, _ENDED_AT, _LIVE, _NEXT, _ROOM, _FLOOR = 0, 1, 2, 5, 7, 8, 9, 10

# Rows of the table of spans.
_SPAN_EPISODE, _SPAN_T, _SPAN_SOURCE, _SPAN_ROW, _SPAN_STOP = range(5)
_LIVE_SOURCE, _NO_STOP = 0, 1 << 62


@compiled_with_gil
def _slot_of(episodes: Array, n: int, episode: int, before: int) -> int:
    """Return the position of an episode among ``n`` rising numbers, or that of the next larger one.

    ``before`` is where the row before this one was: environments that step together have neighbouring episodes.
    """
    if before + 1 < n and episodes[before + 1] == episode:
        return before + 1
    left, right = 0, n
    while left < right:
        middle = (left + right) >> 1
        if episodes[middle] < episode:
            left = middle + 1
        else:
            right = middle
    return left


@compiled_with_gil
def _find_slots(
    episode: Array, first: int, table: Array, n: int, page_rows: int, slots: Array, room: Array
) -> tuple[int, int]:
    """Find the place of each row's episode, and count live episodes and new pages; the first is -1 if it can't be.

    Nothing is changed, but for entries past the end of the table.
    """
    n_episodes, n_pages, slot = n, 0, -1
    for i in range(len(slots)):
        number = episode[first + i]
        slot = _slot_of(table[_EPISODE], n_episodes, number, slot)
        if slot == n_episodes:
            table[_EPISODE, slot] = number
            room[slot] = 0
            n_episodes += 1
        elif table[_EPISODE, slot] != number:
            return -1, 0
        if room[slot] == 0:
            n_pages += 1
            room[slot] = page_rows
        room[slot] -= 1
        slots[i] = slot
    return n_episodes, n_pages


@compiled_with_gil
def _begin_page(table: Array, slot: int, spans: Array, span: int, page: int, page_rows: int) -> None:
    """Let an episode continue in another page."""
    table[_NEXT, slot], table[_ROOM, slot] = page * page_rows, page_rows
    spans[_SPAN_EPISODE, span], spans[_SPAN_T, span] = table[_EPISODE, slot], table[_N_ROWS, slot]
    spans[_SPAN_SOURCE, span], spans[_SPAN_ROW, span] = _LIVE_SOURCE, table[_NEXT, slot]
    spans[_SPAN_STOP, span] = _NO_STOP


@compiled_with_gil
def _clear(table: Array, start: int, stop: int) -> None:
    """Set everything but the number of episodes to its first value. Slices would take seconds to compile."""
    for i in range(start, stop):
        for column in range(1, len(table)):
            table[column, i] = -1 if column == _ENDED_AT else 0


@compiled_with_gil
def add_rows(
    episode: Array,
    env: Array,
    first: int,
    stop: int,
    table: Array,
    n: int,
    spans: Array,
    n_spans: int,
    free: Array,
    n_free: int,
    page_rows: int,
    columns: Array,
    counts: Array,
) -> bool:
    """Take up the rows from ``first`` to ``stop`` of a staging, all or none, and copy them into live rows.

    Args:
        episode: By row: its episode.
        env: By row: its environment.
        first: The first row.
        stop: The end of the rows.
        table: Live episodes, with room for one more per row.
        n: Number of live episodes.
        spans: Their spans, with room for one more per row.
        n_spans: Number of spans.
        free: Free pages of live rows; the last is taken first.
        n_free: Number of free pages.
        page_rows: Rows of a page.
        columns: By field: address of the staged rows, address of the live rows, bytes of a row.
        counts: Output: new episodes, new pages, and episodes of which all earlier steps were evicted.

    Returns:
        False if nothing was taken: too few pages are free, or a row's episode is not live any longer.
    """
    slots = np.empty(stop - first, np.int64)
    room = np.empty(n + len(slots), np.int64)
    for i in range(n):
        room[i] = table[_ROOM, i]
    n_episodes, n_pages = _find_slots(episode, first, table, n, page_rows, slots, room)
    if n_episodes < 0 or n_pages > n_free:
        return False
    _clear(table, n, n_episodes)
    counts[0], counts[1], counts[2] = n_episodes - n, n_pages, 0
    for i in range(len(slots)):
        slot = slots[i]
        if table[_N_ROWS, slot] == 0:
            table[_ENV, slot] = env[first + i]
        if table[_ROOM, slot] == 0:
            n_free -= 1
            _begin_page(table, slot, spans, n_spans, free[n_free], page_rows)
            n_spans += 1
        counts[2] += table[_FLOOR, slot] >= table[_N_ROWS, slot]
        for c in range(len(columns)):
            n_bytes = columns[c, 2]
            target = columns[c, 1] + table[_NEXT, slot] * n_bytes
            copy_memory(target, columns[c, 0] + (first + i) * n_bytes, n_bytes)
        table[_N_ROWS, slot] += 1
        table[_LIVE, slot] = table[_N_ROWS, slot]
        table[_NEXT, slot] += 1
        table[_ROOM, slot] -= 1
    return True


@compiled_with_gil
def _order_spans(
    rank: Array, n_owners: int, table: Array, n: int, spans: Array, n_spans: int
) -> tuple[Array, Array]:
    """Return the spans of each episode in order of time, and where those of each episode begin."""
    owner, begin, slot = np.empty(n_spans, np.int64), np.zeros(n_owners + 1, np.int64), -1
    for i in range(n_spans):
        slot = _slot_of(table[_EPISODE], n, spans[_SPAN_EPISODE, i], slot)
        owner[i] = rank[slot] if slot < n else -1
        if owner[i] >= 0:
            begin[owner[i] + 1] += 1
    for i in range(n_owners):
        begin[i + 1] += begin[i]
    order, end = np.empty(begin[n_owners], np.int64), begin.copy()
    for i in range(n_spans):
        if owner[i] >= 0:
            j = end[owner[i]]
            end[owner[i]] += 1
            while j > begin[owner[i]] and spans[_SPAN_T, order[j - 1]] > spans[_SPAN_T, i]:
                order[j] = order[j - 1]
                j -= 1
            order[j] = i
    return order, begin


@compiled_with_gil
def gather_spans(
    slots: Array, rank: Array, table: Array, n: int, spans: Array, n_spans: int, outputs: Array
) -> int:
    """Write number of rows, first row and source of the spans of episodes that are not evicted; return how many.

    Args:
        slots: Positions of the episodes in the table.
        rank: By position in the table: which of the episodes it is, or -1.
        table: Live episodes.
        n: Number of live episodes.
        spans: Their spans.
        n_spans: Number of spans.
        outputs: Three rows, for as many values as there are spans.
    """
    order, begin = _order_spans(rank, len(slots), table, n, spans, n_spans)
    n_written = 0
    for i in range(len(slots)):
        for j in range(begin[i], begin[i + 1]):
            span = order[j]
            stop = spans[_SPAN_T, order[j + 1]] if j + 1 < begin[i + 1] else table[_N_ROWS, slots[i]]
            start = max(spans[_SPAN_T, span], table[_FLOOR, slots[i]])
            if stop > start:
                outputs[0, n_written] = stop - start
                outputs[1, n_written] = spans[_SPAN_ROW, span] + start - spans[_SPAN_T, span]
                outputs[2, n_written] = spans[_SPAN_SOURCE, span]
                n_written += 1
    return n_written


@compiled_with_gil
def set_lengths(
    n_rows: Array, owner: Array, offset: Array, before: int, logical: Array, step_sums: Array, span_logical: Array
) -> None:
    """Set the rows of growing episodes, which are the last entries of an index, and where their spans begin.

    Args:
        n_rows: By episode: its rows.
        owner: By span: its episode among the growing ones.
        offset: By span: its first row within the episode.
        before: Steps before the first of the episodes, as `step_sums` counts them.
        logical: The index's, in place.
        step_sums: The same.
        span_logical: The same.
    """
    at, first_span = len(step_sums) - len(n_rows), len(span_logical) - len(owner)
    for i in range(len(n_rows)):
        logical[at + i + 1] = logical[at + i] + n_rows[i]
        before += n_rows[i]
        step_sums[at + i] = before
    for i in range(len(owner)):
        span_logical[first_span + i] = logical[at + owner[i]] + offset[i]


@compiled_with_gil
def sum_starts(
    logical: Array,
    flags: Array,
    start: int,
    before: int,
    needs_next: bool,
    leads_on: int,
    shape: int,
    reach: int,
    stride: int,
    sums: Array,
) -> None:
    """Write running sums of the windows that start in each episode from entry ``start`` on, as `Windows.n_starts`.

    Args:
        logical: The index's first logical rows.
        flags: The index's flags.
        start: The first entry.
        before: The sum before it.
        needs_next: Whether a step is used only if its successor is known.
        leads_on: Flags of episodes whose last step counts all the same.
        shape: 0: windows lie inside the episode; 1: a shorter episode has one; 2: they may begin before it.
        reach: Steps of a window beyond its first; for shape 2 in multiples of the stride.
        stride: Only counts for shape 2.
        sums: Output, up to the last entry.
    """
    for entry in range(start, len(sums)):
        flag = np.int64(flags[entry])
        n = logical[entry + 1] - logical[entry] - (flag & HAS_FINAL)
        if needs_next and flag & leads_on == 0:
            n -= 1
        n = max(n, 0)
        if shape == 0:
            n = max(n - reach, 0)
        elif shape == 1:
            n = max(n - reach, 1) if n > 0 else 0
        else:
            n += reach * min(n, stride)
        before += n
        sums[entry] = before
