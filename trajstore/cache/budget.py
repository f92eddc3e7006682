"""Divides the cache's byte budget among columns."""

from __future__ import annotations

from collections.abc import Iterable

from trajstore.cache.column_pages import ColumnPages


def share_budget(columns: Iterable[ColumnPages], budget: int) -> None:
    """Set the number of slots of every column.

    Small columns come first and get a slot for every page. The larger ones share the remaining bytes in proportion
    to the sizes of those pages that can't be mapped from files. Every column gets the slots without which it could
    not be read, even if the budget is exceeded.
    """
    left = budget
    by_size = sorted(columns, key=lambda column: column.nbytes_of_all_pages)
    for i, column in enumerate(by_size):
        rest = by_size[i:]
        spare = left - sum(c.table.min_slots * c.page_bytes for c in rest[1:])
        slots = column.table.n_pages
        if column.nbytes_of_all_pages > spare:
            n_bytes = column.n_slot_pages * column.page_bytes
            share = left * n_bytes // max(1, sum(c.n_slot_pages * c.page_bytes for c in rest))
            slots = min(slots, max(column.table.min_slots, min(share, spare, n_bytes) // column.page_bytes))
        column.set_slots(slots)
        left -= slots * column.page_bytes
