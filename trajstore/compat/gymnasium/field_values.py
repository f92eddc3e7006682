"""Converts observations, actions, rewards and infos to values of their fields, and combines rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from trajstore.errors import DataError
from trajstore.schema import Array, Field, as_array

FieldValues: TypeAlias = dict[str, Array]  # by the path of the field
Info: TypeAlias = Mapping[str, Any]


def exact_values(path: str, field: Field, value: Any, lead: tuple[int, ...]) -> Array:
    """Return a copy in the dtype of the field if that changes no value; Python floats are rounded to it.

    Raises:
        DataError: The shape is not ``lead`` and that of the field, or a value would change.
    """
    if type(value) is np.ndarray and value.dtype == field.storage_dtype and value.shape == lead + field.shape:
        return value.copy()  # a fast path for the common case
    array, name = as_array(path, value)
    is_exact = name == field.dtype or _keeps(array, field.storage_dtype, is_python=not hasattr(value, "dtype"))
    if array.shape != lead + field.shape or not is_exact:
        expected = f"{field.dtype} of shape {lead + field.shape}"
        raise DataError(f"field '{path}': expected {expected}, got {name} of shape {array.shape}")
    return _cast(path, array, field.storage_dtype)


def _keeps(array: Array, dtype: np.dtype[Any], *, is_python: bool) -> bool:
    """Return whether a cast changes no value; Python numbers have no dtype, so their values decide."""
    given, wanted = array.dtype.kind, dtype.kind
    if not is_python or given == "b":
        return np.can_cast(array.dtype, dtype, "safe") and (wanted != "f" or given == "f")
    if given == "f":
        return wanted == "f"
    return wanted != "b" and np.array_equal(array.astype(dtype), array)


def real_numbers(path: str, field: Field, value: Any, lead: tuple[int, ...]) -> Array:
    """Return a copy of real numbers of any dtype in the dtype of the field.

    Raises:
        DataError: The shape is not ``lead``, or a number is out of range.
    """
    array, name = as_array(path, value)
    if array.shape != lead or name == "bfloat16":
        raise DataError(f"field '{path}': expected numbers of shape {lead}, got {name} of shape {array.shape}")
    return _cast(path, array, field.storage_dtype)


def _cast(path: str, array: Array, dtype: np.dtype[Any]) -> Array:
    if array.dtype == dtype:
        return array.copy()
    try:
        with np.errstate(over="raise"):
            return array.astype(dtype)
    except FloatingPointError as error:
        raise DataError(f"field '{path}': a value is out of range for {dtype}") from error


def bool_per_env(name: str, value: Any, n_envs: int) -> Array:
    """Return a copy of one bool per environment.

    Raises:
        DataError: The dtype or shape differs.
    """
    array = value if type(value) is np.ndarray else as_array(name, value)[0]
    if array.dtype != bool or array.shape != (n_envs,):
        raise DataError(f"{name}: expected bool of shape ({n_envs},), got {array.dtype} of shape {array.shape}")
    return array.copy()


def info_entry(info: Info, name: str) -> Any:
    """Return an entry of an info.

    Raises:
        DataError: The info has no such entry.
    """
    if name not in info:
        raise DataError(f"info field '{name}': expected a value at every step, got info with {', '.join(info)}")
    return info[name]


def info_rows(name: str, field: Field, infos: Info, mask: Array) -> Array:
    """Return an entry of vector infos as rows of all environments; rows outside ``mask`` are zero.

    Raises:
        DataError: An environment of the mask has no value.
    """
    n = int(mask.sum())
    if not n:
        return np.zeros((len(mask), *field.shape), field.storage_dtype)
    values, is_given = np.asarray(info_entry(infos, name)), infos.get(f"_{name}", mask)
    if values.shape[:1] != mask.shape or not np.all(is_given[mask]):
        raise DataError(f"info field '{name}': expected a value of every environment at every step, got {values}")
    rows = values[mask]
    return spread(exact_values(name, field, list(rows) if rows.dtype.kind == "O" else rows, (n,)), mask)


def spread(rows: Array, mask: Array) -> Array:
    """Return one row per element of ``mask``: the given rows, in order, where it is set, and zeros elsewhere."""
    everywhere = np.zeros((len(mask), *rows.shape[1:]), rows.dtype)
    everywhere[mask] = rows
    return everywhere


def replace_rows(values: FieldValues, others: FieldValues, mask: Array) -> FieldValues:
    """Return a copy with the rows of ``others`` where ``mask`` is set; fields that ``others`` lacks are kept."""
    changed = {path: values[path].copy() for path in others}
    for path, rows in changed.items():
        rows[mask] = others[path][mask]
    return values | changed
