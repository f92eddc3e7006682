"""Divides the cache's byte budget among columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

from trajstore.cache.column_pages import ColumnPages


def share_budget(columns: Iterable[ColumnPages], budget: int) -> None:
    """Set the number of slots of every column.

    Small columns come first and get a slot for every page. The larger ones share the remaining bytes in proportion
    to the sizes of those pages that can't be mapped from files. What is left goes to columns whose blocks can be
    decoded from mapped files, if it holds at least half of their pages. Every column gets the slots without which
    it could not be read, even if the budget is exceeded.
    """
    by_size = sorted(columns, key=attrgetter("nbytes_of_all_pages"))
    needs_none = [c.can_map_all and not c.may_need_slots for c in by_size]
    least = [c.table.n_live_pages if no else c.min_slots for c, no in zip(by_size, needs_none, strict=True)]
    slots = _plan(by_size, budget, [column.n_slot_pages for column in by_size], least)
    left = budget - sum(n * column.page_bytes for n, column in zip(slots, by_size, strict=True))
    chosen = [i for i, c in enumerate(by_size) if slots[i] < c.table.n_pages and c.can_keep_decoded]
    n_bytes = sum(by_size[i].nbytes_of_all_pages for i in chosen)
    for i in chosen:
        column = by_size[i]
        share = max(0, left) * column.nbytes_of_all_pages // n_bytes
        n = min(column.table.n_pages, slots[i] + share // column.page_bytes)
        if 2 * n >= column.table.n_pages:
            slots[i] = n
    for n, column in zip(slots, by_size, strict=True):
        column.set_slots(n)


def slots_without_maps(columns: Iterable[ColumnPages], budget: int) -> dict[str, int]:
    """Return the slots that columns would have if no page could be mapped, by path.

    They are the same wherever a store lies, and on every device.
    """
    by_size = sorted(columns, key=attrgetter("nbytes_of_all_pages"))
    pages = [column.table.n_pages for column in by_size]
    slots = _plan(by_size, budget, pages, [column.min_slots for column in by_size])
    return {column.path: n for n, column in zip(slots, by_size, strict=True)}


def _plan(
    by_size: Sequence[ColumnPages], budget: int, n_slot_pages: Sequence[int], least: Sequence[int]
) -> list[int]:
    """The slots of columns of which so many pages need one, and that have to have so many at least."""
    left, slots = budget, []
    for i, column in enumerate(by_size):
        needed = [n * c.page_bytes for n, c in zip(n_slot_pages[i:], by_size[i:], strict=True)]
        spare = left - sum(n * c.page_bytes for n, c in zip(least[i + 1 :], by_size[i + 1 :], strict=True))
        n = column.table.n_pages
        if column.nbytes_of_all_pages > spare:
            share = left * needed[0] // max(1, sum(needed))
            n = min(n, max(least[i], min(share, spare, needed[0]) // column.page_bytes))
        slots.append(n)
        left -= n * column.page_bytes
    return slots
