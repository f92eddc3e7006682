"""Where windows may start in the rings, and windows divided at episode ends."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trajstore.format.spans import expand_ranges
from trajstore.schema import Array


@dataclass(frozen=True, slots=True)
class WindowStarts:
    """Numbered window starts: ranges of positions, one per stretch of a ring.

    Attributes:
        env: The environment of each range.
        first: The first start of each range.
        sums: The running sum of the sizes of the ranges.
    """

    env: Array
    first: Array
    sums: Array

    @property
    def total(self) -> int:
        return int(self.sums[-1]) if len(self.sums) else 0

    def at(self, number: Array) -> tuple[Array, Array]:
        """Return environment and position of the starts with these numbers, which are in [0, total)."""
        at = np.searchsorted(self.sums, number, side="right")
        before = np.append(0, self.sums)[at]
        return self.env[at], self.first[at] + number - before


NO_STARTS = WindowStarts(*np.zeros((3, 0), np.int64))


@dataclass(frozen=True, slots=True)
class WindowParts:
    """Windows divided where episodes end; every array is ``[n]``, and the first part of each window comes first.

    A part holds the steps ``start`` to ``stop`` of its window. They are consecutive in one ring, from ``position``.
    """

    window: Array
    start: Array
    stop: Array
    env: Array
    position: Array

    def joints(self, n_windows: int, length: int) -> tuple[Array, Array]:
        """Return where to copy the steps of later parts so that ``n_windows`` windows become whole.

        Returns:
            Targets and origins, as indices into the flattened array ``[parts, length]``.
        """
        owner, step = expand_ranges(self.start[n_windows:], self.stop[n_windows:])
        origin = (n_windows + owner) * length + step - self.start[n_windows:][owner]
        return self.window[n_windows:][owner] * length + step, origin
