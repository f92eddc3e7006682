"""Numbers of arrays as JSON has them: lists of few digits, with null for what is not finite."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from trajstore.schema import Array

_DIGITS = 7  # enough for float32, and for any plot


def numbers(values: Array) -> list[float | int | None]:
    """A list of the numbers of a 1-D array, rounded to seven digits; NaN and infinities become None."""
    if values.dtype.kind in "biu":
        return values.astype(np.int64 if values.dtype != np.uint64 else np.uint64).tolist()  # type: ignore[no-any-return]
    return [number(value) for value in values.tolist()]


def number(value: float) -> float | None:
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None


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
