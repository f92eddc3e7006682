"""The arrays of one episode: fields, schema, number of steps, comparison row by row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from trajstore.errors import DataError, SchemaError
from trajstore.schema import Array, Field, Schema, as_array, flatten, nest, widen_bfloat16


def make_field(path: str, dtype: Any, shape: tuple[int, ...], *, final: bool = False) -> Field:
    """Create the field for an array that a dataset declares.

    Raises:
        SchemaError: A store cannot hold it. The message names the array and the ``skip`` that leaves it out.
    """
    try:
        return Field(dtype, shape, final=final)
    except SchemaError as error:
        raise SchemaError(f"field '{path}': {error}; leave it out with skip=['{path}']") from error


def infer_schema(steps: Mapping[str, Any], *, reward: str | None = "reward") -> Schema:
    """Return the schema of an episode's arrays. A field with one row more than the steps has a final value."""
    flat = flatten(steps)
    n_steps = count_steps(flat)
    arrays = {path: as_array(path, value) for path, value in flat.items()}
    fields = {
        path: make_field(path, name, array.shape[1:], final=len(array) > n_steps)
        for path, (array, name) in arrays.items()
    }
    return Schema(nest(fields), reward=reward if reward in fields else None)


def count_steps(flat: Mapping[str, Any]) -> int:
    """Return the number of steps of an episode: the rows of its shortest array.

    Arrays with a final value have one row more.

    Raises:
        DataError: There are no arrays, or one has at least two rows more than another.
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
    """Return arrays by path, in the dtypes in which a store returns them: bfloat16 becomes float32."""
    arrays = {path: as_array(path, value) for path, value in flatten(steps).items()}
    return {path: widen_bfloat16(a) if name == "bfloat16" else a for path, (a, name) in arrays.items()}


def rows_equal(left: Array, right: Array) -> Array:
    """Return, for each row, whether two arrays of the same dtype and shape have the same bits."""
    # As integers, NaN equals itself and 0.0 differs from -0.0.
    integers = f"u{left.dtype.itemsize}"
    is_same = np.ascontiguousarray(left).view(integers) == np.ascontiguousarray(right).view(integers)
    same: Array = is_same.all(axis=tuple(range(1, is_same.ndim)))
    return same


def append_final(path: str, values: Array, next_path: str, next_values: Array) -> Array:
    """Return the observations followed by the last next observation.

    Args:
        path: Name of the observations, for messages.
        values: One observation per step.
        next_path: Name of the next observations, for messages.
        next_values: One next observation per step, of the same dtype and shape.

    Raises:
        DataError: The next observation of a step is not the observation of the following step. The message names
            the step.
    """
    is_next = rows_equal(next_values[:-1], values[1:])
    if not is_next.all():
        raise DataError(
            f"'{next_path}' of step {int(is_next.argmin())} differs from '{path}' of the following step: steps are"
            " missing, or one step stands for several; keep both as fields with keep_next=True"
        )
    return np.concatenate([values, next_values[-1:]])
