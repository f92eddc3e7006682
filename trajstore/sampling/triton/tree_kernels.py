"""Kernels of the sum tree. Importing this module imports Triton.

``sums`` has the layout of `sum_tree`. ``levels`` holds the offset and the length of each level, leaves first. All
arguments are int64 and never specialised, so a tree that grows uses the same compiled kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from trajstore.sampling.triton.batch_kernels import int64s, kernel, random_bits

_BITS, _FAN_OUT = tl.constexpr(4), tl.constexpr(16)  # as in `sum_tree`
_LOW_31 = tl.constexpr((1 << 31) - 1)


@triton.jit
def _scaled(bits, limit):
    """``limit`` times the fraction that the upper 62 bits stand for, rounded down, as in `sum_tree`."""
    fraction = (bits >> 2).to(tl.int64)
    high, low = fraction >> 31, fraction & _LOW_31
    limit_high, limit_low = limit >> 31, limit & _LOW_31
    middle = ((low * limit_low) >> 31) + high * limit_low + low * limit_high
    return high * limit_high + (middle >> 31)


@triton.jit
def _descend(sums, levels, n_levels, rest, mask):
    """Search from the root to the leaves; the last child that starts at or before a number holds it."""
    node = tl.zeros_like(rest)
    child = tl.arange(0, _FAN_OUT)[None, :]
    for i in range(n_levels - 1):
        level = levels + (n_levels - 2 - i) * 2
        node = tl.minimum(node, (tl.load(level + 1) >> _BITS) - 1)
        mass = tl.load(sums + tl.load(level) + (node * _FAN_OUT)[:, None] + child, mask=mask[:, None], other=0)
        starts = tl.cumsum(mass, 1) - mass
        is_before = starts <= rest[:, None]
        node = node * _FAN_OUT + tl.sum(is_before.to(tl.int64), 1) - 1
        rest -= tl.max(tl.where(is_before, starts, 0), 1)
    return node


@kernel
def find(
    sums: tl.int64, levels: tl.int64, n_levels: tl.int64, n_leaves: tl.int64, numbers: tl.int64, n: tl.int64,
    leaves: tl.int64, block: tl.constexpr,
):  # fmt: skip
    """Find the leaf that holds each of ``n`` numbers."""
    i = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    mask = i < n
    number = tl.maximum(tl.load(int64s(numbers) + i, mask=mask, other=0), 0)
    leaf = _descend(int64s(sums), int64s(levels), n_levels, number, mask)
    tl.store(int64s(leaves) + i, tl.minimum(leaf, n_leaves - 1), mask=mask)


@kernel
def draw(
    sums: tl.int64, levels: tl.int64, n_levels: tl.int64, n_leaves: tl.int64,
    seed: tl.int64, counter: tl.int64, n: tl.int64, is_stratified: tl.int64,
    leaves: tl.int64, masses: tl.int64, block: tl.constexpr,
):  # fmt: skip
    """Draw ``n`` leaves with the random numbers from ``counter`` on, and write them and their masses."""
    i = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    mask = i < n
    sums, levels, n = int64s(sums), int64s(levels), n.to(tl.int64)
    total = tl.load(sums)
    low = tl.zeros_like(i)
    width = low + total
    if is_stratified != 0:
        share, spare = total // n, total % n
        low = share * i + spare * i // n
        width = share * (i + 1) + spare * (i + 1) // n - low
    number = low + _scaled(random_bits(seed.to(tl.int64), counter.to(tl.int64) + i), width)
    leaf = tl.minimum(_descend(sums, levels, n_levels, number, mask), n_leaves - 1)
    tl.store(int64s(leaves) + i, leaf, mask=mask)
    tl.store(int64s(masses) + i, tl.load(sums + tl.load(levels) + leaf, mask=mask, other=0), mask=mask)


@kernel
def put(
    sums: tl.int64, levels: tl.int64, n_levels: tl.int64, indexes: tl.int64, masses: tl.int64, n: tl.int64,
    block: tl.constexpr,
):  # fmt: skip
    """Set the masses of ``n`` leaves; if one occurs more than once, its last mass counts.

    Every lane compares its leaf with all later ones. The lane that is the last of its leaf is the only one that
    touches that leaf, and adds the difference to all nodes above. Sums of integers do not depend on their order.
    """
    i = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    mask = i < n
    sums, levels, indexes, n = int64s(sums), int64s(levels), int64s(indexes), n.to(tl.int64)
    leaf = tl.load(indexes + i, mask=mask, other=-1)
    n_later = tl.zeros_like(i)
    for start in range(tl.program_id(0) * block, n, block):
        k = start + tl.arange(0, block)
        other = tl.load(indexes + k, mask=k < n, other=-2)
        is_same = (other[None, :] == leaf[:, None]) & (k[None, :] > i[:, None])
        n_later += tl.sum(is_same.to(tl.int64), 1)
    is_last = mask & (n_later == 0)
    at = tl.load(levels) + leaf
    old = tl.load(sums + at, mask=is_last, other=0)
    mass = tl.load(int64s(masses) + i, mask=is_last, other=0)
    node = leaf
    for level in range(n_levels - 1):
        tl.atomic_add(sums + tl.load(levels + level * 2) + node, mass - old, mask=is_last)
        node = node >> _BITS
    # The root and the number of positive leaves change once for all lanes.
    tl.atomic_add(sums, tl.sum(mass - old, 0))
    tl.atomic_add(sums + 1, tl.sum((mass > 0).to(tl.int64) - (old > 0).to(tl.int64), 0))
