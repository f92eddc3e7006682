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
    """

    def __init__(self, changes: ChangeLog) -> None:
        self.page_rows = _MAX_PAGE_ROWS
        self.n_free = 0
        self._changes = changes
        self._free = np.empty(0, np.int64)

    def set_rows(self, n: int) -> None:
        """Set the number of live rows. Called once, before any page is taken."""
        self.page_rows = 1 << (max(1, min(_MAX_PAGE_ROWS, n // _WANTED_PAGES)).bit_length() - 1)
        self._free = np.arange(n // self.page_rows)
        self.n_free = len(self._free)

    def take(self, n: int) -> Array:
        """Take ``n`` pages; the caller has checked that as many are free."""
        self.n_free -= n
        return self._free[self.n_free : self.n_free + n]

    def release(self, rows: Array) -> None:
        """Release the pages that hold these rows."""
        pages = np.unique(rows // self.page_rows)
        self._free[self.n_free : self.n_free + len(pages)] = pages
        self.n_free += len(pages)
        if len(pages):
            self._changes.rows_released()
