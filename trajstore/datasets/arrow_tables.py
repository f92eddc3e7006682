"""Convert columns of Arrow tables to NumPy arrays."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from trajstore.datasets.optional_imports import import_optional
from trajstore.errors import DataError, FormatError, StoreNotFoundError
from trajstore.schema import Array


def import_pyarrow(module: str = "pyarrow") -> Any:
    """Import pyarrow, or one of its submodules."""
    return import_optional(module, "Parquet and Arrow files need pyarrow: pip install pyarrow")


def open_parquet(path: Path) -> Any:
    """Open a Parquet file; no row is read.

    Raises:
        StoreNotFoundError: The file does not exist.
        FormatError: It is not a complete Parquet file.
    """
    pq, pa = import_pyarrow("pyarrow.parquet"), import_pyarrow()
    if not path.is_file():
        raise StoreNotFoundError(f"{path} is missing")
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise FormatError(f"{path} can't be read as Parquet, or was not closed by its writer: {error}") from error


def innermost_type(column_type: Any) -> tuple[Any, int]:
    """Return the type of the items in nested lists, and the number of nested lists."""
    types, depth = import_pyarrow().types, 0
    column_type = getattr(column_type, "storage_type", column_type)  # of a registered extension type
    while types.is_list(column_type) or types.is_large_list(column_type) or types.is_fixed_size_list(column_type):
        column_type, depth = column_type.value_type, depth + 1
    return column_type, depth


def column_dtype(what: str, column_type: Any) -> np.dtype[Any]:
    """Return the dtype of the numbers in a column.

    Raises:
        DataError: The column holds neither numbers nor bools. ``what`` names it in the message.
    """
    kind, _ = innermost_type(column_type)
    types = import_pyarrow().types
    if not (types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind)):
        raise DataError(f"{what}: expected numbers or bools, got {column_type}")
    dtype: np.dtype[Any] = np.dtype(kind.to_pandas_dtype())
    return dtype


def column_rows(what: str, column: Any, shape: tuple[int, ...]) -> Array:
    """Convert a column of numbers, or of nested lists of numbers, to an array of shape ``[rows, *shape]``.

    Args:
        what: Names the column, for messages.
        column: An Arrow array, possibly chunked.
        shape: Shape of one row. Lists may be nested along its axes, or be flat.

    Raises:
        DataError: A row has another shape, or a value is missing.
    """
    dtype, (_, depth) = column_dtype(what, column.type), innermost_type(column.type)
    values, n = as_single_array(column), len(column)
    for size in _list_sizes(what, depth, shape):
        lengths = import_pyarrow("pyarrow.compute").list_value_length(values).unique().to_pylist()
        if lengths not in ([], [size]):
            raise DataError(f"{what}: expected lists of {size}, got lengths {lengths[:5]}")
        values = values.flatten()
    if values.null_count:
        raise DataError(f"{what}: expected a number in every row, got {values.null_count} nulls")
    return np.asarray(values.to_numpy(zero_copy_only=False), dtype).reshape(n, *shape)


def _list_sizes(what: str, depth: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the expected list length at each nesting level.

    There is one level per axis, or one level for all axes, or none if a row is a single number.
    """
    if depth == len(shape):
        return shape
    flat = (math.prod(shape),)
    if depth > 1 or (depth == 0 and flat != (1,)):
        raise DataError(f"{what}: expected rows of shape {shape}, got lists nested {depth} deep")
    return flat if depth else ()


def as_single_array(column: Any) -> Any:
    """Combine the chunks of a column, and return the storage array of an extension array."""
    array = column.combine_chunks() if isinstance(column, import_pyarrow().ChunkedArray) else column
    return getattr(array, "storage", array)
