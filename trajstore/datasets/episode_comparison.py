"""Compare two episodes bit by bit, and describe their first difference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trajstore.datasets.episode_arrays import readable_arrays, rows_equal
from trajstore.datasets.interfaces import Episode
from trajstore.format.spans import check_metadata
from trajstore.schema import Array, Schema


def find_step_difference(expected: Mapping[str, Any], got: Mapping[str, Any]) -> str | None:
    """Describe the first difference in the fields of ``expected``; None if there is none.

    Further fields of ``got`` are ignored.
    """
    expected_arrays, got_arrays = readable_arrays(expected), readable_arrays(got)
    for path, values in expected_arrays.items():
        if path not in got_arrays:
            return f"field '{path}' is missing"
        if difference := _find_array_difference(values, got_arrays[path]):
            return f"field '{path}': {difference}"
    return None


def end_name(episode: Episode) -> str:
    return "terminated" if episode.terminated else "truncated" if episode.truncated else "cut"


def find_end_difference(expected: Episode, got: Episode) -> str | None:
    if end_name(expected) == end_name(got):
        return None
    return f"expected the episode to end {end_name(expected)}, got {end_name(got)}"


def find_metadata_difference(schema: Schema, expected: Mapping[str, Any], got: Mapping[str, Any]) -> str | None:
    """Describe the difference between metadata as a store keeps them; None if there is none.

    A tuple equals the list it is stored as, and NaN equals NaN.
    """
    if repr(check_metadata(schema, expected)) == repr(check_metadata(schema, got)):
        return None
    names = [n for n in {**expected, **got} if repr(expected.get(n)) != repr(got.get(n))]
    return f"metadata {', '.join(map(repr, names))}: expected {expected!r:.200}, got {got!r:.200}"


def _find_array_difference(expected: Array, got: Array) -> str | None:
    if (expected.dtype, expected.shape) != (got.dtype, got.shape):
        return f"expected {expected.dtype} of shape {expected.shape}, got {got.dtype} of shape {got.shape}"
    same = rows_equal(expected, got)
    if same.all():
        return None
    t = int(same.argmin())
    return f"step {t} differs: expected {expected[t]!r:.100}, got {got[t]!r:.100}"
