"""Checks of single values read from the JSON of a store, which may be damaged or hostile.

Every function returns the value with its type, or raises FormatError.
"""

from __future__ import annotations

import math

from trajstore.errors import FormatError
from trajstore.format.ids import is_stream_id

MAX_ROWS = 1 << 62


def parse_bounded_integer(value: object, low: int, high: int) -> int:
    """An integer from ``low`` to ``high``, both included."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise FormatError(f"expected an integer from {low} to {high}, got {value!r:.80}")
    return value


def parse_count(value: object) -> int:
    """A number of rows, spans, bytes or the like: an integer from 0 to `MAX_ROWS`."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_ROWS:
        raise FormatError(f"expected a count, got {value!r:.80}")
    return value


def parse_optional_count(value: object) -> int | None:
    return None if value is None else parse_count(value)


def parse_id(value: object) -> str:
    """An id; those of streams and of checkpoints have the same form."""
    if not isinstance(value, str) or not is_stream_id(value):
        raise FormatError(f"expected an id of a stream or checkpoint, got {value!r:.80}")
    return value


def parse_text(value: object) -> str:
    if not isinstance(value, str):
        raise FormatError(f"expected text, got {value!r:.80}")
    return value


def parse_optional_text(value: object) -> str | None:
    return None if value is None else parse_text(value)


def parse_seconds(value: object) -> float:
    """A finite number of UNIX seconds."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise FormatError(f"expected seconds, got {value!r:.80}")
    return float(value)
