"""Compiled loops of prioritised sampling: draws with probabilities and weights, updates, and new starts.

``sums``, ``mins`` and ``offsets`` are a sum tree, as in `sum_tree_loops`. Its leaves are addresses of a step table,
whose ranges are ``range_start``, ``range_entry`` and ``range_origin``, as in `AddressRanges`. Importing this module
imports numba.
"""

from __future__ import annotations

import numpy as np

from trajstore.sampling.compiled.jit import compiled
from trajstore.sampling.compiled.searching import last_at
from trajstore.sampling.compiled.step_table_loops import all_last_at
from trajstore.sampling.compiled.sum_tree_loops import draw, put
from trajstore.schema import Array

EVICTED = -1  # in place of the address of a step that was evicted, as in `step_handles`


@compiled
def draw_windows(
    sums: Array,
    mins: Array,
    offsets: Array,
    n_leaves: int,
    seed: np.uint64,
    counter: np.uint64,
    stratified: bool,
    beta: float,
    range_start: Array,
    range_entry: Array,
    range_origin: Array,
    entry: Array,
    start: Array,
    probability: Array,
    weight: Array,
) -> int:
    """Draw windows by mass: their index entries, starts, probabilities (float64) and weights (float32).

    Weights are divided by the largest weight of all leaves if the tree keeps minima, else by that of the draw. The
    result has no meaning.
    """
    touched = draw(sums, offsets, n_leaves, seed, counter, stratified, entry, start)
    total, least = np.float64(sums[0]), np.inf
    for i in range(len(entry)):
        probability[i] = np.float64(start[i]) / total
        least = min(least, probability[i])
    if len(mins):
        least = np.float64(mins[0]) / total
    for i in range(len(entry)):
        weight[i] = np.float32(min((least / probability[i]) ** beta, 1.0))
    all_last_at(range_start, entry, start)
    for i in range(len(entry)):
        owner = start[i]
        start[i] = entry[i] - range_origin[owner]
        entry[i] = range_entry[owner]
    return touched


@compiled
def checked_values(
    address: Array, value: Array, lowest: int, priority: Array, eps: float, kept: Array, raised: Array, found: Array
) -> int:
    """Check an update of priorities, and move the addresses of steps that exist to the front of ``address``.

    Args:
        address: Addresses of steps; -1 if a step was evicted.
        value: Their new priorities, float32.
        lowest: The lowest number in ``address`` that is not an error.
        priority: The present priorities by address.
        eps: Added to the new priorities.
        kept: Receives the new priorities of steps that exist.
        raised: Receives the same plus ``eps``, as float64.
        found: Receives the largest present and the largest new priority of these steps, and the number of evicted
            steps.

    Returns:
        How many steps exist, or -1 if a priority or an address is wrong; then nothing has changed.
    """
    for i in range(len(address)):
        if not 0.0 <= value[i] < np.inf or address[i] < lowest:
            return -1
    n = 0
    found[0], found[1], found[2] = 0.0, 0.0, 0.0
    for i in range(len(address)):
        if address[i] >= 0:
            address[n], kept[n] = address[i], value[i]
            raised[n] = np.float64(value[i]) + eps
            found[0] = max(found[0], np.float64(priority[address[n]]))
            found[1] = max(found[1], np.float64(value[i]))
            n += 1
        elif address[i] == EVICTED:
            found[2] += 1.0
    return n


@compiled
def set_values(address: Array, value: Array, values: Array, dirty: Array) -> None:
    """Set values by address, in order, and note that they were set."""
    for i in range(len(address)):
        values[address[i]] = value[i]
        dirty[address[i]] = True


@compiled
def put_masses(
    sums: Array,
    mins: Array,
    offsets: Array,
    n_leaves: int,
    address: Array,
    value: Array,
    raw: Array,
    scale: float,
    are_starts: bool,
    range_start: Array,
    range_entry: Array,
    range_origin: Array,
    start_sums: Array,
    start_base: int,
    lead: int,
    mass: Array,
) -> int:
    """Compute the masses of steps from raw masses, and put them into the tree where a window can start.

    A positive old mass proves that one can; where it is 0, the position is looked up, unless ``are_starts``.
    ``start_sums`` are running sums of the windows of index entries that begin with ``start_base``, and ``lead`` is
    the first position at which a window can start. ``mass`` receives the masses.

    Returns -1, or the position of an address that does not exist.
    """
    for i in range(len(address)):
        mass[i] = 0
        if value[i] > 0:
            mass[i] = max(np.int64(np.rint(raw[i] * scale)), 1)
            if not are_starts and 0 <= address[i] < n_leaves and sums[offsets[0] + address[i]] == 0:
                owner = last_at(range_start, address[i])
                e, position = range_entry[owner], address[i] - range_origin[owner]
                count = 0
                if e >= 0:
                    count = start_sums[e] - (start_sums[e - 1] if e > 0 else start_base)
                if position < lead or position >= lead + count:
                    mass[i] = 0
    return put(sums, mins, offsets, n_leaves, address, mass)


@compiled
def new_starts(
    first: int,
    tail: Array,
    stream: Array,
    episode: Array,
    t_base: Array,
    start_sums: Array,
    start_base: int,
    ranges: Array,
    homes: Array,
    new: Array,
) -> int:
    """Find the new starts of windows in the index entries from ``first`` on, if these episodes only got longer.

    Args:
        first: The first entry.
        tail: By entry, as the tree knows them: stream, episode, first t, and the t where starts stop, which is
            updated.
        stream: By entry of the index, like the next two: the stream number.
        episode: The episode.
        t_base: The t of its first step.
        start_sums: Running sums of windows by entry.
        start_base: The number that they begin with.
        ranges: The range of addresses of each entry from ``first`` on.
        homes: By range: the address of t = 0.
        new: Receives the addresses of new starts.

    Returns:
        How many starts are new, or -1 if something else has happened or ``new`` is too short; then nothing has
        changed.
    """
    n = 0
    for k in range(tail.shape[1]):
        e = first + k
        if tail[0, k] != stream[e] or tail[1, k] != episode[e] or tail[2, k] != t_base[e]:
            return -1
        stop = t_base[e] + start_sums[e] - (start_sums[e - 1] if e > 0 else start_base)
        if stop < tail[3, k]:
            return -1
        n += stop - tail[3, k]
    if n > len(new):
        return -1
    n = 0
    for k in range(tail.shape[1]):
        e = first + k
        stop = t_base[e] + start_sums[e] - (start_sums[e - 1] if e > 0 else start_base)
        for t in range(tail[3, k], stop):
            new[n] = homes[ranges[k]] + t
            n += 1
        tail[3, k] = stop
    return n
