"""Compiled loops of the step table: from handles to addresses, and taking up the new steps of open episodes.

All arrays are int64 except the flags of episodes (uint8) and their stream numbers (int32). Importing this module
imports numba.
"""

from __future__ import annotations

import numpy as np

from trajstore.sampling.compiled.jit import compiled
from trajstore.schema import Array

HAS_FINAL, OPEN = 1, 8  # flags of episodes, as in `index_entries`


@compiled
def all_last_at(rising: Array, wanted: Array, found: Array) -> None:
    """Find the position of the last of rising numbers that is at most each wanted one, and 0 if none is.

    All numbers take a step of the search before any takes the next, so that loads do not wait for each other. That
    is several times faster than one search after the other.
    """
    for i in range(len(found)):
        found[i] = 0
    n_left = len(rising)
    while n_left > 1:
        half = n_left >> 1
        for i in range(len(wanted)):
            at = found[i] + half
            found[i] = at if rising[np.uint64(at)] <= wanted[i] else found[i]
        n_left -= half


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
    ranges: Array,
    first_range: int,
    homes: Array,
    address: Array,
) -> int:
    """Find the addresses of handles of one stream; handles of other streams are left as they are.

    An address is -1 if the step was evicted, -2 if it lies past the end of its episode, and -3 if the stream has no
    such episode. ``entries`` starts with episode ``first_entry``, ``ranges`` with episode ``first_range``. Every
    episode that has an entry has a range, whose home is in ``homes``.

    Returns the number of handles of other streams.
    """
    n_others = 0
    for i in range(len(handles)):
        if handles[i, 0] != stream:
            n_others += 1
            continue
        episode, t = handles[i, 1], handles[i, 2]
        if episode < 0 or episode > newest or t < 0:
            address[i] = -3
            continue
        at = episode - first_entry
        e = entries[at] if 0 <= at < len(entries) else -1
        if e < 0 or t < t_base[e]:
            address[i] = -1
        elif t - t_base[e] >= logical[e + 1] - logical[e] - (flags[e] & HAS_FINAL):
            address[i] = -2
        else:
            address[i] = homes[ranges[episode - first_range]] + t
    return n_others


@compiled
def grow(
    first: int,
    tail: Array,
    logical: Array,
    flags: Array,
    stream: Array,
    episode: Array,
    t_base: Array,
    range_stream: Array,
    range_episode: Array,
    home: Array,
    limit: Array,
    known: Array,
    range_entry: Array,
    origin: Array,
    new: Array,
) -> int:
    """Take up the new steps of the index entries from ``first`` on, whose ranges are ``tail``.

    Writes the addresses of new steps to ``new``, and how far values are known to ``known``.

    Returns the number of new steps, or -1 if anything else happened: an entry belongs to another episode, an
    episode ended, lost steps or needs a larger range, or ``new`` is too short. Then nothing has changed.
    """
    n_new = 0
    for k in range(len(tail)):
        e, r = first + k, tail[k]
        if range_stream[r] != stream[e] or range_episode[r] != episode[e] or range_entry[r] != e:
            return -1
        stop = t_base[e] + logical[e + 1] - logical[e] - (flags[e] & HAS_FINAL)
        if origin[r] != home[r] + t_base[e] or stop < known[r]:
            return -1
        if stop > limit[r] or (flags[e] & OPEN == 0 and (stop != limit[r] or stop != known[r])):
            return -1
        n_new += stop - max(known[r], t_base[e])
    if n_new > len(new):
        return -1
    n_new = 0
    for k in range(len(tail)):
        e, r = first + k, tail[k]
        stop = t_base[e] + logical[e + 1] - logical[e] - (flags[e] & HAS_FINAL)
        for t in range(max(known[r], t_base[e]), stop):
            new[n_new] = home[r] + t
            n_new += 1
        known[r] = stop
    return n_new
