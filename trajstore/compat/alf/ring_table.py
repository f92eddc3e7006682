"""A growing table of integers."""

from __future__ import annotations

import numpy as np

from trajstore.schema import Array


class RingTable:
    """Rows of int64 columns; a row's id is its index, until `keep` renumbers the rows."""

    def __init__(self, n_columns: int) -> None:
        self._data = np.empty((64, n_columns), np.int64)
        self.n = 0

    @property
    def data(self) -> Array:
        """The rows, as a view."""
        return self._data[: self.n]

    def add(self, *columns: Array) -> Array:
        """Append rows, given column by column; returns their ids."""
        new = np.stack(np.broadcast_arrays(*columns), 1)
        stop = self.n + len(new)
        if stop > len(self._data):
            grown = np.empty((2 * stop, new.shape[1]), np.int64)
            grown[: self.n] = self.data
            self._data = grown
        self._data[self.n : stop] = new
        ids = np.arange(self.n, stop)
        self.n = stop
        return ids

    def keep(self, chosen: Array) -> Array:
        """Remove the rows where ``chosen`` is False.

        Returns:
            The new id for each old id, and -1 for removed rows. A last element of -1 maps the old id -1 to itself.
        """
        new_id = np.append(np.where(chosen, np.cumsum(chosen) - 1, -1), -1)
        kept = self.data[chosen]
        self._data[: len(kept)] = kept
        self.n = len(kept)
        return new_id
