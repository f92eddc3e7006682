"""Checks values that callers put into derived columns."""

from __future__ import annotations

import numpy as np

from trajstore.errors import DataError
from trajstore.format.ids import is_column_name, is_stream_id
from trajstore.format.json_values import MAX_ROWS
from trajstore.schema import Array, Field
from trajstore.writing.commit_batch import DerivedColumnChange


def check_column_values(name: str, target: str, values: Array, first: int) -> Field:
    """Check what can be checked without knowing earlier puts; return dtype and shape of one value.

    Raises:
        DataError: An argument is malformed.
        SchemaError: The values have a dtype or shape that can't be stored.
    """
    if not is_column_name(name) or not isinstance(target, str) or not is_stream_id(target):
        raise DataError(f"column {name!r} of stream {target!r}: expected a plain name and a stream id")
    if not isinstance(values, np.ndarray) or values.ndim == 0:
        raise DataError(f"column '{name}': expected an array with one value per row, got {values!r:.60}")
    if not isinstance(first, int) or isinstance(first, bool) or not 0 <= first <= MAX_ROWS - len(values):
        raise DataError(f"column '{name}': expected the number of the first row, got first={first!r}")
    return Field(str(values.dtype), values.shape[1:])


class DerivedColumns:
    """The derived columns that one writer has put, by target stream and name."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], tuple[int, Field]] = {}  # first row, and dtype and shape of a value

    def change(
        self, name: str, target: str, value_field: Field, values: Array, first: int, rows: Array | None
    ) -> DerivedColumnChange:
        """A new generation of a column, or a change of single rows of one that was put whole before.

        Raises:
            DataError: The rows or values of the change do not fit the column.
        """
        if rows is None:
            self._known[target, name] = first, value_field
        else:
            self._check_rows(name, target, value_field, rows, values)
        return DerivedColumnChange(target, name, values, first, rows)

    def _check_rows(self, name: str, target: str, value_field: Field, rows: Array, values: Array) -> None:
        if (target, name) not in self._known:
            raise DataError(
                f"column '{name}' of stream '{target}': expected a put of the whole column before a change of rows"
            )
        first, known = self._known[target, name]
        if not isinstance(rows, np.ndarray) or rows.dtype != np.int64 or rows.shape != values.shape[:1]:
            raise DataError(f"column '{name}': expected int64 rows of shape {values.shape[:1]}, got {rows!r:.60}")
        if (value_field.dtype, value_field.shape) != (known.dtype, known.shape):
            expected, got = (f"{f.dtype} of shape {f.shape}" for f in (known, value_field))
            raise DataError(f"column '{name}': expected values like the whole column, {expected}, got {got}")
        if len(rows) and not first <= rows.min() <= rows.max() < MAX_ROWS:
            raise DataError(f"column '{name}': expected rows from {first} on, got {rows.min()} to {rows.max()}")
