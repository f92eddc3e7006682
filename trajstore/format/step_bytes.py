"""How many bytes the step objects of one stream take, up to each of its rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trajstore.format.array_layout import ArrayLayout
from trajstore.schema import Array

_PARTS = 1 << 16  # a stream keeps about this many points of its curve at most


@dataclass(frozen=True, slots=True)
class GrownObjects:
    """By how many bytes objects of one array grew: ``n_bytes[i]`` for the rows ``[bounds[i], bounds[i + 1])``."""

    bounds: Array
    n_bytes: Array

    @staticmethod
    def whole(layout: ArrayLayout, sizes: Mapping[int, int], start: int, stop: int) -> GrownObjects:
        """Objects of an array that hold the rows from ``start`` to ``stop``, by their number and size.

        ``start`` is the first row of an object, or objects before it count as well. Missing ones were deleted.
        Zeros that fill up the last chunk do not count: a few rows of raw columns would weigh as much as many.
        """
        n = layout.shard_rows or layout.chunk_rows
        numbers = np.arange(start // n, -(-stop // n))
        bounds = np.clip(np.append(numbers, numbers[-1:] + 1) * n, start, stop)
        n_bytes = np.array([sizes.get(i, 0) for i in numbers.tolist()])
        n_bytes[-1:] = np.maximum(n_bytes[-1:] - layout.padding_bytes(stop), 0)
        return GrownObjects(bounds, n_bytes)


class StepBytes:
    """The bytes of a stream's step objects as a curve over its rows; the rows of one object count alike.

    The total is exact: the sizes of all objects that were added. One thread adds; any thread may read.
    """

    def __init__(self) -> None:
        self._wanted = 0  # rows below are not asked for again
        # Replaced in one assignment: the points, how many are in use, and the end of the curve.
        self._curve: tuple[Array, int, tuple[int, int]] = (np.zeros((2, 64)), 1, (0, 0))

    @property
    def rows(self) -> int:
        return self._curve[2][0]

    @property
    def total(self) -> int:
        """Bytes of all objects, as if none had been deleted since they were added."""
        return self._curve[2][1]

    def add(self, arrays: Sequence[GrownObjects]) -> None:
        """Add rows: for each array, by how many bytes which objects grew. All arrays cover the same rows."""
        points, n, (_, total) = self._curve
        rows = np.unique(np.concatenate([grown.bounds for grown in arrays]))
        n_bytes = total + sum(
            np.interp(rows, grown.bounds, np.append(0, np.cumsum(grown.n_bytes))) for grown in arrays
        )
        added = [(row, at) for row, at in zip(rows.tolist(), n_bytes.tolist(), strict=True)]
        end = int(rows[-1]), total + int(sum(grown.n_bytes.sum() for grown in arrays))
        chosen = list(self._spaced(added[1:], points[1, n - 1], self.at(np.array([self._wanted]))[0]))
        if n + len(chosen) > points.shape[1]:
            points, n = self._with_room(points[:, :n], len(chosen))
        points[:, n : n + len(chosen)] = np.array(chosen).reshape(-1, 2).T
        self._curve = points, n + len(chosen), end

    @staticmethod
    def _spaced(added: Iterable[tuple[int, float]], last: float, first: float) -> Iterable[tuple[int, float]]:
        """The points that are far enough from each other, so that their number stays bounded."""
        for row, n_bytes in added:
            if n_bytes - last >= (n_bytes - first) / _PARTS:
                last = n_bytes
                yield row, n_bytes

    def _with_room(self, points: Array, n: int) -> tuple[Array, int]:
        """The points that are still needed, in a new array with room for ``n`` more."""
        first = max(0, int(np.searchsorted(points[0], self._wanted, side="right")) - 1)
        kept = points[:, first:]
        grown = np.zeros((2, max(64, 2 * (kept.shape[1] + n))))
        grown[:, : kept.shape[1]] = kept
        return grown, kept.shape[1]

    def forget(self, row: int) -> None:
        """Note that rows below are not asked for again, so that the curve stays as short as what is kept."""
        self._wanted = row

    def points(self) -> tuple[Array, Array]:
        """Rows, rising, and the bytes of all objects up to each of them; linear in between."""
        points, n, (row, total) = self._curve
        used = points[:, :n]
        used = used[:, used[0] < row]
        return np.append(used[0], row), np.append(used[1], total)

    def at(self, rows: Array) -> Array:
        """Bytes of all objects up to each row."""
        found: Array = np.interp(rows, *self.points())
        return found
