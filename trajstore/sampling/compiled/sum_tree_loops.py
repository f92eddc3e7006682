"""Compiled loops of the sum tree. Importing this module imports numba.

All arrays are int64. ``sums`` has the layout of `sum_tree`. ``mins`` has the same layout without the leaves, and is
empty if the tree keeps no minima. ``offsets`` says where each level starts, leaves first.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trajstore.sampling.compiled.jit import compiled, random_bits
from trajstore.schema import Array

BITS = 4  # log2 of the fan-out, as in `sum_tree`; a constant here, so that loops over a row are unrolled

_FAN_OUT = 1 << BITS
_LINE = 8  # numbers in a cache line
_BLOCK = 256  # numbers searched together: the rows they need fit in the first-level cache
_CACHED = 1 << 12  # numbers at the top of the tree that stay in the cache without prefetching
_NO_POSITIVE_MASS = (1 << 63) - 1  # as in `sum_tree`
_LOW_31 = (1 << 31) - 1


@compiled
def _right_half(sums: Array, at: int, rest: int, half: int) -> tuple[int, int]:
    """Skip ``half`` nodes if ``rest`` lies behind them, without a branch, which the processor could not predict."""
    mass = 0
    for j in range(half):
        mass += sums[np.uint64(at + j)]  # unsigned, because numba tests signed indexes for being negative
    is_behind = rest >= mass
    return at + half * is_behind, rest - mass * is_behind


@compiled
def _fetch(sums: Array, first: int, node: Array) -> int:
    """Load the rows of all nodes into the cache. Here the loads do not wait for each other, as they would later.

    The result keeps the compiler from leaving out the loads; it has no other use.
    """
    touched = 0
    for i in range(len(node)):
        for j in range(0, _FAN_OUT, _LINE):
            touched ^= sums[np.uint64(first + (node[i] << BITS) + j)]
    return touched


@compiled
def _descend(sums: Array, offsets: Array, node: Array, rest: Array) -> int:
    """Search from the root to the leaves, level by level, for all numbers in ``rest``."""
    touched = 0
    for i in range(len(node)):
        node[i] = 0
    for level in range(len(offsets) - 2, -1, -1):
        first, stop = offsets[level], offsets[level - 1] if level else len(sums)
        for i in range(len(node)):
            # A node can be padding, which has no children, only if a number is not below the total.
            node[i] = min(node[i], (stop - first >> BITS) - 1)
        if first > _CACHED:
            touched ^= _fetch(sums, first, node)
        for i in range(len(node)):
            at, left = first + (node[i] << BITS), rest[i]
            half = _FAN_OUT >> 1
            while half:
                at, left = _right_half(sums, at, left, half)
                half >>= 1
            node[i], rest[i] = at - first, left
    return touched


@compiled
def find(sums: Array, offsets: Array, n_leaves: int, leaf: Array, rest: Array) -> int:
    """Find the leaves that hold the numbers in ``rest``, and replace the numbers by the leaves' masses."""
    touched = 0
    for start in range(0, len(leaf), _BLOCK):
        touched ^= _descend(sums, offsets, leaf[start : start + _BLOCK], rest[start : start + _BLOCK])
    for i in range(len(leaf)):
        leaf[i] = min(leaf[i], n_leaves - 1)
        rest[i] = sums[offsets[0] + leaf[i]]
    return touched


@compiled
def _scaled(bits: np.uint64, limit: Any) -> Any:
    """Return ``limit`` times the fraction that the upper 62 bits stand for, rounded down, as `sum_tree` does."""
    fraction = np.int64(bits >> np.uint64(2))
    high, low = fraction >> 31, fraction & _LOW_31
    limit_high, limit_low = limit >> 31, limit & _LOW_31
    middle = ((low * limit_low) >> 31) + high * limit_low + low * limit_high
    return high * limit_high + (middle >> 31)


@compiled
def draw(
    sums: Array,
    offsets: Array,
    n_leaves: int,
    seed: np.uint64,
    counter: np.uint64,
    stratified: bool,
    leaf: Array,
    mass: Array,
) -> int:
    """Draw leaves with the random numbers from ``counter`` on, and write them and their masses to the outputs."""
    n, low, width = len(leaf), 0, sums[0]
    share, spare = sums[0] // max(n, 1), sums[0] % max(n, 1)
    for i in range(n):
        if stratified:
            low = share * i + spare * i // n
            width = share * (i + 1) + spare * (i + 1) // n - low
        mass[i] = low + _scaled(random_bits(seed, counter + np.uint64(i)), width)
    return find(sums, offsets, n_leaves, leaf, mass)


@compiled
def _least(row: Array, first: int) -> Any:
    """Return the smallest positive number of the row that starts at ``first``."""
    least = np.uint64(_NO_POSITIVE_MASS) - np.uint64(1)
    for j in range(_FAN_OUT):
        # One less, as an unsigned number: 0 becomes the largest, and no branch is needed.
        mass = np.uint64(row[np.uint64(first + j)]) - np.uint64(1)
        least = mass if mass < least else least
    return np.int64(least) + 1


@compiled
def _update_minima(sums: Array, mins: Array, offsets: Array, n_leaves: int, leaf: Array) -> None:
    """Compute the minima above leaves again, level by level, up to a level where none has changed."""
    for level in range(1, len(offsets)):
        below, at = offsets[level - 1], offsets[level]
        row, bits, has_changed = sums if level == 1 else mins, BITS * level, False
        n_nodes = (n_leaves - 1 >> bits) + 1
        is_whole = n_nodes < len(leaf)  # few nodes: each of them once
        for i in range(n_nodes if is_whole else len(leaf)):
            node = i if is_whole else leaf[i] >> bits
            least = _least(row, below + (node << BITS))
            has_changed |= mins[np.uint64(at + node)] != least
            mins[np.uint64(at + node)] = least
        if not has_changed:
            return


@compiled
def put(sums: Array, mins: Array, offsets: Array, n_leaves: int, index: Array, mass: Array) -> int:
    """Set masses one after the other. Returns -1, or the first invalid position; then nothing has changed."""
    for i in range(len(index)):
        if not 0 <= index[i] < n_leaves or mass[i] < 0:
            return i
    for i in range(len(index)):
        node = index[i]
        old = sums[offsets[0] + node]
        sums[1] += np.int64(mass[i] > 0) - np.int64(old > 0)
        for level in range(len(offsets)):
            sums[np.uint64(offsets[level] + node)] += mass[i] - old
            node >>= BITS
    if len(mins):
        _update_minima(sums, mins, offsets, n_leaves, index)
    return -1


@compiled
def put_range(sums: Array, mins: Array, offsets: Array, start: int, mass: Array) -> int:
    """Set the masses from ``start`` on. Returns -1, or the first invalid position; then nothing has changed."""
    for i in range(len(mass)):
        if mass[i] < 0:
            return i
    for i in range(len(mass)):
        at = offsets[0] + start + i
        sums[1] += np.int64(mass[i] > 0) - np.int64(sums[at] > 0)
        sums[at] = mass[i]
    sum_up(sums, mins, offsets, start, start + len(mass))
    return -1


@compiled
def sum_up(sums: Array, mins: Array, offsets: Array, start: int, stop: int) -> None:
    """Recompute all nodes above the leaves ``[start, stop)``."""
    for level in range(1, len(offsets)):
        start, stop = start >> BITS, ((stop - 1) >> BITS) + 1
        for node in range(start, stop):
            first = offsets[level - 1] + (node << BITS)
            mass = 0
            for j in range(_FAN_OUT):
                mass += sums[np.uint64(first + j)]
            sums[offsets[level] + node] = mass
            if len(mins):
                mins[offsets[level] + node] = _least(sums if level == 1 else mins, first)
