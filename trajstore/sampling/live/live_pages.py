"""Allocation of the cache's live rows, a page of consecutive rows at a time."""

from __future__ import annotations

import numpy as np

from trajstore.sampling.index.change_log import ChangeLog
from trajstore.schema import Array

_MAX_PAGE_ROWS = 64
_WANTED_PAGES = 2048  # so that many environments can each have a page


class LivePages:
    """A stack of free pages.

    Args:
        changes: Records when pages are released.

    Attributes:
        page_rows: Rows of a page, a power of two.
        n_free: Number of free pages.
        free: The free pages, up to `n_free`; the last is taken first.
        n_used_rows: Rows from this one on were not taken since the number was last set to 0.
    """

    def __init__(self, changes: ChangeLog) -> None:
        self.page_rows = _MAX_PAGE_ROWS
        self.n_free = 0
        self.n_used_rows = 0
        self._changes = changes
        self.free = np.empty(0, np.int64)

    def set_rows(self, n: int) -> None:
        """Set the number of live rows. Called once, before any page is taken."""
        self.page_rows = 1 << (max(1, min(_MAX_PAGE_ROWS, n // _WANTED_PAGES)).bit_length() - 1)
        self.free = np.arange(n // self.page_rows)[::-1].copy()  # low numbers are taken first
        self.n_free = len(self.free)

    @property
    def is_unused(self) -> bool:
        """Whether all pages are free although some were taken."""
        return self.n_used_rows > 0 and self.n_free == len(self.free)

    @property
    def is_half_taken(self) -> bool:
        """Whether at least half of the pages are taken."""
        return 2 * self.n_free <= len(self.free)

    def take(self, n: int) -> Array:
        """Take ``n`` pages; the caller has checked that as many are free."""
        self.n_free -= n
        pages: Array = self.free[self.n_free : self.n_free + n][::-1]
        if n:
            self.n_used_rows = max(self.n_used_rows, (int(pages.max()) + 1) * self.page_rows)
        return pages

    def release(self, rows: Array) -> None:
        """Release the pages that hold these rows."""
        pages = np.unique(rows // self.page_rows)
        self.free[self.n_free : self.n_free + len(pages)] = pages
        self.n_free += len(pages)
        if len(pages):
            self._changes.rows_released()
