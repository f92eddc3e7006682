"""Numbers of arrays as JSON has them: lists of few digits, with null for what is not finite."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from trajstore.schema import Array

_DIGITS = 7  # enough for float32, and for any plot
_MAX_DIGITS = 16


def numbers(values: Array) -> list[float | int | None]:
    """A list of the numbers of a 1-D array; NaN and infinities become None.

    They are rounded to seven digits, or more if they differ less: times of one day differ in the last digits.
    """
    if values.dtype.kind in "biu":
        return values.astype(np.int64 if values.dtype != np.uint64 else np.uint64).tolist()  # type: ignore[no-any-return]
    digits = _digits(values)
    return [number(value, digits) for value in values.tolist()]


def number(value: float, digits: int = _DIGITS) -> float | None:
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def _digits(values: Array) -> int:
    finite = values[np.isfinite(values)].astype(np.float64)
    if not len(finite):
        return _DIGITS
    low, high = float(finite.min()), float(finite.max())
    greatest, span = max(abs(low), abs(high)), high / 2 - low / 2
    if not span:
        return _MAX_DIGITS
    return min(_MAX_DIGITS, _DIGITS + max(0, math.ceil(math.log10(greatest / 2 / span))))


def to_json(value: Any) -> bytes:
    """JSON of plain values; arrays as `numbers` has them.

    Text may hold lone surrogates, which are escaped.
    """
    return json.dumps(plain(value), allow_nan=False, separators=(",", ":")).encode()


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if isinstance(value, np.ndarray):
        return numbers(value)
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
