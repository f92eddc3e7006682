"""What all formats ask of the arrays of an episode."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np

from trajstore.errors import DataError, SchemaError
from trajstore.schema import Array, Field, Schema, as_array, flatten, nest, widen_bfloat16

_MAX_LISTED = 40  # names in a message


def is_skipped(path: str, skip: Collection[str]) -> bool:
    """Whether a field, or a group that it is in, is named."""
    return any(path == name or path.startswith(f"{name}/") for name in skip)


def check_skip(
    display: str, skip: Collection[str], there: Iterable[str], named: Callable[[str], str] = str
) -> None:
    """Refuse names that nothing has: what they were meant for would be in the store for good.

    Args:
        display: Where the dataset is.
        skip: Fields or groups to leave out.
        there: What can be left out; of groups that are named, what is in them may be missing. Looked at only until
            all names are found.
        named: What a name stands for, where there are several ways to write it.

    Raises:
        DataError: A name is not there; the message lists those that are.
    """
    groups = [f"{named(name)}/" for name in skip]
    left = [name for name in skip if not named(name).startswith(tuple(groups))]
    seen: dict[str, None] = {}
    for path in there if left else ():
        seen[path] = None
        left = [name for name in left if not is_skipped(named(path), [named(name)])]
        if not left:
            return
    if left:
        names = ", ".join([*list(seen)[:_MAX_LISTED], *(["..."] if len(seen) > _MAX_LISTED else [])])
        raise DataError(
            f"{display}: skip '{left[0]}': there is nothing of that name to leave out; there are {names}"
        )


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
