"""Whether two episodes are the same, bit by bit, and where they first are not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trajstore.datasets.fields import are_same, readable_arrays
from trajstore.datasets.ports import Episode
from trajstore.format.spans import check_metadata
from trajstore.schema import Array, Schema


def steps_differ(expected: Mapping[str, Any], got: Mapping[str, Any]) -> str | None:
    """What differs in the fields of ``expected``; there may be more in ``got``."""
    mine, theirs = readable_arrays(expected), readable_arrays(got)
    for path, values in mine.items():
        if path not in theirs:
            return f"field '{path}' is missing"
        if found := _arrays_differ(values, theirs[path]):
            return f"field '{path}': {found}"
    return None


def end_of(episode: Episode) -> str:
    return "terminated" if episode.terminated else "truncated" if episode.truncated else "cut"


def ends_differ(expected: Episode, got: Episode) -> str | None:
    mine, theirs = end_of(expected), end_of(got)
    return None if mine == theirs else f"expected an end that is {mine}, got {theirs}"


def metadata_differs(schema: Schema, expected: Mapping[str, Any], got: Mapping[str, Any]) -> str | None:
    """What differs, as it would be stored: a tuple is a list, and NaN is itself."""
    if repr(check_metadata(schema, expected)) == repr(check_metadata(schema, got)):
        return None
    names = [n for n in {**expected, **got} if repr(expected.get(n)) != repr(got.get(n))]
    return f"metadata {', '.join(map(repr, names))}: expected {expected!r:.200}, got {got!r:.200}"


def _arrays_differ(expected: Array, got: Array) -> str | None:
    if (expected.dtype, expected.shape) != (got.dtype, got.shape):
        return f"expected {expected.dtype} of shape {expected.shape}, got {got.dtype} of shape {got.shape}"
    same = are_same(expected, got)
    if same.all():
        return None
    t = int(same.argmin())
    return f"step {t} differs: expected {expected[t]!r:.100}, got {got[t]!r:.100}"
