"""The value that steps of streams without a field read as: checked against the dtype, and as JSON."""

from __future__ import annotations

import math

import numpy as np

from trajstore.errors import SchemaError

Fill = bool | int | float

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}  # as in Zarr's metadata


def check_fill(fill: object, dtype: str) -> Fill:
    """The fill value as the Python number that fits a dtype.

    Raises:
        SchemaError: It is not a number, or the dtype can't hold it.
    """
    value = fill.item() if isinstance(fill, np.generic) else fill
    if isinstance(value, (bool, int, float)) and _holds(dtype, value):
        return float(value) if "float" in dtype else value
    expected = "True or False" if dtype == "bool" else "one number that the dtype can hold"
    raise SchemaError(f"fill {fill!r:.80}: expected {expected}, for {dtype}")


def _holds(dtype: str, value: Fill) -> bool:
    """Whether a dtype holds a number: an int exactly, a float rounded."""
    if dtype == "bool" or isinstance(value, bool):
        return dtype == "bool" and isinstance(value, bool)
    if "float" not in dtype:
        limits = np.iinfo(dtype)
        return isinstance(value, int) and limits.min <= value <= limits.max
    if isinstance(value, float):
        return not math.isfinite(value) or abs(value) <= _largest(dtype)
    return abs(value) <= _largest(dtype) and _is_exact(value, dtype)


def _largest(dtype: str) -> float:
    return 3.3895313892515355e38 if dtype == "bfloat16" else float(np.finfo(dtype).max)


def _is_exact(value: int, dtype: str) -> bool:
    """Whether a float dtype holds an int exactly."""
    n_bits = {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53}[dtype]
    return value == 0 or (value // (value & -value)).bit_length() <= n_bits


def fill_to_json(fill: Fill) -> Fill | str:
    """The fill value as JSON: a number, a bool, or the text that Zarr uses for a float that is not finite."""
    if isinstance(fill, float) and not math.isfinite(fill):
        return next(text for text, value in _NOT_FINITE.items() if str(value) == str(fill))
    return fill


def fill_from_json(data: object) -> object:
    """Parse what `fill_to_json` made; `check_fill` refuses what is not a fill value."""
    return _NOT_FINITE.get(data, data) if isinstance(data, str) else data
