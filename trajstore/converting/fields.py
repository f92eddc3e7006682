"""What all formats ask of the arrays of an episode."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from trajstore.errors import DataError, SchemaError
from trajstore.schema import Array, Field, Schema, as_array, flatten, nest, widen_bfloat16


def is_skipped(path: str, skip: Collection[str]) -> bool:
    """Whether a field, or a group that it is in, is named."""
    return any(path == name or path.startswith(f"{name}/") for name in skip)


def field_of(path: str, dtype: Any, shape: tuple[int, ...], *, final: bool = False) -> Field:
    """A field as a dataset declares it.

    Raises:
        SchemaError: It can't be stored; the message names it and the way to leave it out.
    """
    try:
        return Field(dtype, shape, final=final)
    except SchemaError as error:
        raise SchemaError(f"field '{path}': {error}; leave it out with skip=['{path}']") from error


def schema_of(steps: Mapping[str, Any], *, reward: str | None = "reward") -> Schema:
    """The schema that an episode shows; fields with a row more than others have a final value."""
    flat = flatten(steps)
    n_steps = length_of(flat)
    arrays = {path: as_array(path, value) for path, value in flat.items()}
    fields = {
        path: field_of(path, name, array.shape[1:], final=len(array) > n_steps)
        for path, (array, name) in arrays.items()
    }
    return Schema(nest(fields), reward=reward if reward in fields else None)


def length_of(flat: Mapping[str, Any]) -> int:
    """Steps of an episode: the rows of its arrays, but for one more that final values take.

    Raises:
        DataError: The arrays differ by more than that.
    """
    n_rows = {path: len(value) for path, value in flat.items()}
    if not n_rows:
        raise DataError("expected fields, got none")
    n_steps = min(n_rows.values())
    for path, n in n_rows.items():
        if n > n_steps + 1:
            raise DataError(f"field '{path}': expected {n_steps} or {n_steps + 1} rows, got {n}")
    return n_steps


def readable_arrays(steps: Mapping[str, Any]) -> dict[str, Array]:
    """Arrays by path, as a store gives them back: bfloat16 as float32."""
    arrays = {path: as_array(path, value) for path, value in flatten(steps).items()}
    return {path: widen_bfloat16(a) if name == "bfloat16" else a for path, (a, name) in arrays.items()}


def are_same(mine: Array, theirs: Array) -> Array:
    """By row, whether two arrays of one dtype and shape are equal bit by bit."""
    kind = f"u{mine.dtype.itemsize}"  # of whole numbers, NaN is equal to itself and 0.0 not to -0.0
    is_same = np.ascontiguousarray(mine).view(kind) == np.ascontiguousarray(theirs).view(kind)
    same: Array = is_same.all(axis=tuple(range(1, is_same.ndim)))
    return same


def followed(path: str, values: Array, next_path: str, next_values: Array) -> Array:
    """Observations and the one after the last, if each is what the step before says that came.

    Raises:
        DataError: One is not; the message names the step.
    """
    is_next = are_same(next_values[:-1], values[1:])
    if not is_next.all():
        raise DataError(
            f"'{next_path}' of step {int(is_next.argmin())} is not '{path}' of the step after it: steps are missing"
            " between them, or each is made of several; keep both as fields with keep_next=True"
        )
    return np.concatenate([values, next_values[-1:]])
