"""A field of an episode over time, shortened for a plot: least and greatest value of each bucket of steps."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from trajstore.schema import Array
from trajstore.viewer.json_numbers import number, numbers

MAX_POINTS = 2000  # buckets
MAX_LINES = 12  # components that are drawn as lines; more are a map of colours
_MAP_ROWS = 128
_MAP_POINTS = 400
_BLOCK_BYTES = 8 << 20  # decoded at a time
MAX_READ_BYTES = 256 << 20  # decoded for one answer

Read = Callable[[int, int], Array]  # rows [start, stop) of the episode


@dataclass(frozen=True, slots=True)
class Buckets:
    """Neighbouring steps that share a point of the plot.

    Attributes:
        start: The first step.
        stop: The step after the last.
        width: Steps in a bucket; the last one may have fewer.
        n_read: Steps that are read of each bucket, from its first on.
    """

    start: int
    stop: int
    width: int
    n_read: int

    @staticmethod
    def of(start: int, stop: int, n_points: int, row_bytes: int) -> Buckets:
        """At most ``n_points`` buckets, of which at most `MAX_READ_BYTES` are read."""
        width = max(1, math.ceil((stop - start) / max(1, n_points)))
        n = math.ceil((stop - start) / width)
        return Buckets(start, stop, width, max(1, min(width, MAX_READ_BYTES // max(1, n * row_bytes))))

    def __len__(self) -> int:
        return math.ceil((self.stop - self.start) / self.width)

    @property
    def is_sampled(self) -> bool:
        return self.n_read < self.width

    def blocks(self, row_bytes: int) -> Iterator[tuple[int, int]]:
        """Ranges of buckets to read at a time."""
        n = 1 if self.is_sampled else max(1, _BLOCK_BYTES // (row_bytes * self.width))
        for first in range(0, len(self), n):
            yield first, min(first + n, len(self))

    def rows(self, first: int, last: int) -> tuple[int, int]:
        """The steps to read for buckets ``[first, last)``."""
        start = self.start + first * self.width
        if self.is_sampled:
            return start, min(start + self.n_read, self.stop)
        return start, min(self.start + last * self.width, self.stop)


def shortened(
    read: Read, start: int, stop: int, shape: tuple[int, ...], itemsize: int, points: int
) -> dict[str, Any]:
    """A field of steps ``[start, stop)`` as lines, or as a map of colours if it has many components.

    Args:
        read: Reads rows.
        start: First step.
        stop: Step after the last.
        shape: Shape of one step.
        itemsize: Bytes of one component.
        points: Points to show at most.
    """
    n_components = math.prod(shape)
    is_map = n_components > MAX_LINES
    n_points = max(1, min(points, _MAP_POINTS if is_map else MAX_POINTS))
    buckets = Buckets.of(start, stop, n_points, n_components * itemsize)
    reduced = _reduced(read, buckets, n_components, n_components * itemsize)
    answer: dict[str, Any] = {
        "start": start,
        "stop": stop,
        "width": buckets.width,
        "is_sampled": buckets.is_sampled,
        "n_not_finite": reduced.n_not_finite,
        "n_components": n_components,
    }
    return answer | (_as_map(reduced) if is_map else _as_lines(reduced, shape, buckets.width))


@dataclass(slots=True)
class _Reduced:
    """Least, greatest and mean value of each bucket: ``[buckets, components]``; NaN where nothing is finite."""

    low: Array
    high: Array
    mean: Array
    n_not_finite: int = 0


def _reduced(read: Read, buckets: Buckets, n_components: int, row_bytes: int) -> _Reduced:
    low, high, mean = (np.full((len(buckets), n_components), np.nan) for _ in range(3))
    reduced = _Reduced(low, high, mean)
    for first, last in buckets.blocks(row_bytes):
        begin, end = buckets.rows(first, last)
        rows = read(begin, end)
        values = rows.reshape(len(rows), n_components).astype(np.float64)
        is_finite = np.isfinite(values)
        reduced.n_not_finite += int(values.size - is_finite.sum())
        starts = np.arange(0, len(values), buckets.width)
        n = np.add.reduceat(is_finite.astype(np.int64), starts, axis=0)
        with np.errstate(invalid="ignore", divide="ignore"):
            mean[first:last] = np.add.reduceat(np.where(is_finite, values, 0), starts, axis=0) / n
        low[first:last] = np.minimum.reduceat(np.where(is_finite, values, np.inf), starts, axis=0)
        high[first:last] = np.maximum.reduceat(np.where(is_finite, values, -np.inf), starts, axis=0)
    low[~np.isfinite(mean)] = high[~np.isfinite(mean)] = np.nan
    return reduced


def _as_lines(reduced: _Reduced, shape: tuple[int, ...], width: int) -> dict[str, Any]:
    names = ["" if not shape else ", ".join(map(str, index)) for index in np.ndindex(shape)]
    lines = []
    for i, name in enumerate(names):
        line: dict[str, Any] = {"name": name, "low": numbers(reduced.low[:, i])}
        lines.append(line | ({"high": numbers(reduced.high[:, i])} if width > 1 else {}))
    return {"kind": "lines", "lines": lines}


def _as_map(reduced: _Reduced) -> dict[str, Any]:
    """Means as bytes from the least (1) to the greatest (255); 0 where nothing is finite. Components are rows."""
    means = reduced.mean.T
    if (n_together := math.ceil(len(means) / _MAP_ROWS)) > 1:
        starts = np.arange(0, len(means), n_together)
        with np.errstate(invalid="ignore"):
            means = np.add.reduceat(means, starts, axis=0) / np.diff([*starts, len(means)])[:, None]
    is_known = np.isfinite(means)
    low, high = (float(means[is_known].min()), float(means[is_known].max())) if is_known.any() else (0.0, 0.0)
    scaled = np.zeros(means.shape, np.uint8)
    scaled[is_known] = 1 + 254 * (means[is_known] - low) / (high - low) if high > low else 128
    return {
        "kind": "map",
        "rows": len(means),
        "columns": means.shape[1],
        "together": n_together,
        "low": number(low),
        "high": number(high),
        "values": base64.b64encode(scaled.tobytes()).decode(),
    }
