"""Checks of counts, marks and stream ids that callers pass in."""

from __future__ import annotations

import operator
from collections.abc import Collection

from trajstore.errors import DataError
from trajstore.format.ids import is_stream_id
from trajstore.format.json_values import MAX_ROWS


def check_count(value: object, name: str) -> int:
    """The argument ``name`` as a plain integer from 0 to `MAX_ROWS`.

    Raises:
        DataError: It is not such an integer.
    """
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if not 0 <= number <= MAX_ROWS:
        raise DataError(f"{name}: expected an integer of at least 0, got {value!r:.80}")
    return number


def check_mark_advances(stream: str, old: int, new: int) -> None:
    """Refuse to move the first wanted row of a stream back.

    Raises:
        ValueError: ``new`` is below ``old``.
    """
    if new < old:
        raise ValueError(f"stream '{stream}': its first row is {old} already and can't go back to {new}")


def check_stream_ids(streams: Collection[str], name: str) -> None:
    """Refuse an argument that is not a collection of stream ids.

    Raises:
        DataError: It is something else.
    """
    if isinstance(streams, str) or not isinstance(streams, Collection):
        raise DataError(f"{name}: expected a list of stream ids, got {streams!r:.80}")
    for stream in streams:
        if not isinstance(stream, str) or not is_stream_id(stream):
            raise DataError(f"{name}: expected stream ids, got {stream!r:.80}")
