"""Compares the returns in a span table with the sums of the stored rewards."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from trajstore.schema import Array
from trajstore.store.verify.inspection import CheckedStream
from trajstore.store.verify.spans import span_name

_SUM_TOLERANCE = 1e-9  # of the sum of magnitudes: other writers may add in another order


@dataclass(frozen=True, slots=True)
class _SpanSums:
    """What one chunk adds to spans ``[low, high)``; None if it is damaged."""

    low: int
    high: int
    total: Array | None = None
    magnitude: Array | None = None


class ReturnCheck:
    """Sums rewards by span, chunk after chunk, and compares them with the recorded returns."""

    def __init__(self, stream: CheckedStream) -> None:
        assert stream.spans is not None
        self._stream = stream
        self._ints, self._floats = stream.spans
        self._start, self._stop = self._ints[:, 3], self._ints[:, 4]
        self._sum = np.zeros(len(self._ints))
        self._magnitude = np.zeros(len(self._ints))
        self._is_known = self._start >= stream.first_row
        schema = stream.record.schema
        spec = schema.fields.get(schema.reward) if schema.reward else None
        self._is_summed = spec is not None and math.prod(spec.shape) == 1 and spec.dtype not in ("bool", "bfloat16")
        self._skips_first = schema.reward_alignment == "observation"

    def of_chunk(self, start: int, stop: int, block: Array | None) -> _SpanSums:
        """The sums of the rewards in rows ``[start, stop)``; None if their chunk is damaged."""
        low = int(np.searchsorted(self._stop, start, "right"))
        high = int(np.searchsorted(self._start, stop, "left"))
        if not self._is_summed or low >= high:
            return _SpanSums(low, low)
        return _SpanSums(low, high) if block is None else self._sums(low, high, start, block)

    def _sums(self, low: int, high: int, start: int, block: Array) -> _SpanSums:
        stop = start + len(block)
        values = np.append(block.reshape(-1).astype(np.float64), 0.0)
        if self._skips_first:
            first = self._start[low:high][(self._ints[low:high, 2] == 0) & (self._stop > self._start)[low:high]]
            values[first[first >= start] - start] = 0.0
        bounds = np.stack([self._start[low:high], self._stop[low:high]], 1).clip(start, stop) - start
        with np.errstate(all="ignore"):
            sums = [np.add.reduceat(terms, bounds.reshape(-1))[::2] for terms in (values, np.abs(values))]
        has_rows = bounds[:, 0] < bounds[:, 1]
        return _SpanSums(low, high, *(np.where(has_rows, found, 0.0) for found in sums))

    def add(self, found: _SpanSums) -> None:
        spans = slice(found.low, found.high)
        if found.total is None or found.magnitude is None:
            self._is_known[spans] = False
            return
        with np.errstate(all="ignore"):
            self._sum[spans] += found.total
            self._magnitude[spans] += found.magnitude

    def faults(self) -> Iterator[tuple[str, str]]:
        """Names of the spans whose recorded return is wrong, and what is wrong with it."""
        recorded = self._floats[:, 0]
        before, is_known = self._returns_before()
        with np.errstate(all="ignore"):
            expected = before + self._sum
            tolerance = _SUM_TOLERANCE * (self._magnitude + np.abs(before)) + np.finfo(np.float64).tiny
            is_close = np.abs(recorded - expected) <= tolerance
        if not self._is_summed:
            expected, is_close, is_known = recorded, np.isnan(recorded), np.ones(len(recorded), bool)
        # Infinite rewards may add up to any value that is not finite, depending on the order.
        is_good = is_close | ~is_known | (~np.isfinite(self._magnitude + before) & ~np.isfinite(recorded))
        for i in np.flatnonzero(~is_good):
            sums = f"the rewards sum to {expected[i]:g}" if self._is_summed else "there is no reward to sum"
            where = f"{self._stream.name}, {span_name(self._ints, i)}"
            yield where, f"records a return of {recorded[i]:g}, {sums}"

    def _returns_before(self) -> tuple[Array, Array]:
        """The return before each span, and a mask of the spans for which it and the rewards are known."""
        episode, is_start = self._ints[:, 0], self._ints[:, 2] == 0
        order = np.argsort(episode, kind="stable")
        before, has_before = np.zeros(len(order)), np.zeros(len(order), bool)
        follows = np.flatnonzero(np.diff(episode[order]) == 0) + 1
        before[order[follows]] = self._floats[order[follows - 1], 0]
        has_before[order[follows]] = True
        return before, self._is_known & (has_before | is_start)
