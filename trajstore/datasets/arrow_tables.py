"""Columns of Arrow tables as arrays."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from trajstore.datasets.libraries import needed
from trajstore.errors import DataError, FormatError, StoreNotFoundError
from trajstore.schema import Array


def library(part: str = "pyarrow") -> Any:
    """pyarrow, or a module of it."""
    return needed(
        part, "Parquet and Arrow files need pyarrow: pip install 'trajstore[lerobot]' or 'trajstore[minari]'"
    )


def open_parquet(path: Path) -> Any:
    """A file, of which no row is read yet."""
    pq, pa = library("pyarrow.parquet"), library()
    if not path.is_file():
        raise StoreNotFoundError(f"{path} is missing")
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise FormatError(f"{path} can't be read as Parquet, or was not closed by its writer: {error}") from error


def item_type(column_type: Any) -> tuple[Any, int]:
    """The type of the numbers in nested lists, and how deep they are nested."""
    types, depth = library().types, 0
    column_type = getattr(column_type, "storage_type", column_type)  # of an extension that somebody has registered
    while types.is_list(column_type) or types.is_large_list(column_type) or types.is_fixed_size_list(column_type):
        column_type, depth = column_type.value_type, depth + 1
    return column_type, depth


def dtype_of(what: str, column_type: Any) -> np.dtype[Any]:
    """The dtype of the numbers in a column.

    Raises:
        DataError: It holds something else.
    """
    kind, _ = item_type(column_type)
    types = library().types
    if not (types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind)):
        raise DataError(f"{what}: expected numbers or bools, got {column_type}")
    dtype: np.dtype[Any] = np.dtype(kind.to_pandas_dtype())
    return dtype


def rows_of(what: str, column: Any, shape: tuple[int, ...]) -> Array:
    """The rows of a column of numbers, or of nested lists of them.

    Args:
        what: Names the column, for messages.
        column: An Arrow array, or one in chunks.
        shape: Of one row; every list must have as many numbers.
    """
    dtype, (_, depth) = dtype_of(what, column.type), item_type(column.type)
    values, n = whole(column), len(column)
    for size in _sizes(what, depth, shape):
        lengths = library("pyarrow.compute").list_value_length(values).unique().to_pylist()
        if lengths not in ([], [size]):
            raise DataError(f"{what}: expected lists of {size}, got lengths {lengths[:5]}")
        values = values.flatten()
    if values.null_count:
        raise DataError(f"{what}: expected a number in every row, got {values.null_count} nulls")
    return np.asarray(values.to_numpy(zero_copy_only=False), dtype).reshape(n, *shape)


def _sizes(what: str, depth: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of the lists at each level: one an axis, or all axes in one list, or none around a single number."""
    if depth == len(shape):
        return shape
    flat = (math.prod(shape),)
    if depth > 1 or (depth == 0 and flat != (1,)):
        raise DataError(f"{what}: expected rows of shape {shape}, got lists nested {depth} deep")
    return flat if depth else ()


def whole(column: Any) -> Any:
    """One plain array of a column that may be in chunks, or of an extension."""
    array = column.combine_chunks() if isinstance(column, library().ChunkedArray) else column
    return getattr(array, "storage", array)
