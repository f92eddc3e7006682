"""A small table of integers that grows at the end."""

from __future__ import annotations

import numpy as np

from trajstore.schema import Array


class IntegerTable:
    """Named int64 columns, stored as the rows of one array so that a record is one column slice of `data`."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.n = 0
        self.data = np.empty((len(names), 0), np.int64)

    def __getitem__(self, name: str) -> Array:
        """A view of a column; valid until the table grows."""
        column: Array = self.data[self.names.index(name), : self.n]
        return column

    def append(self, *columns: Array | int) -> None:
        """Add records, given one array or number for each column; numbers are repeated."""
        n = max(len(c) if isinstance(c, np.ndarray) else 1 for c in columns)
        self.reserve(n)
        for i, column in enumerate(columns):
            self.data[i, self.n : self.n + n] = column
        self.n += n

    def reserve(self, n: int) -> Array:
        """Make room for ``n`` more records behind the last; returns `data`."""
        if self.n + n > self.data.shape[1]:
            grown = np.empty((len(self.names), max(64, 2 * (self.n + n))), np.int64)
            grown[:, : self.n] = self.data[:, : self.n]
            self.data = grown
        return self.data

    def keep(self, chosen: Array) -> None:
        """Keep the chosen records, given as positions or as a mask."""
        kept = self.data[:, : self.n][:, chosen]
        self.data[:, : kept.shape[1]] = kept
        self.n = kept.shape[1]
