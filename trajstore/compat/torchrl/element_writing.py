"""Writes at an index of several dimensions: elements of rows, as whole rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import is_tensor_collection

from trajstore.compat.torchrl.non_tensor import JSON, widen
from trajstore.compat.torchrl.row_structure import Leaves, describe_field, to_leaves
from trajstore.compat.torchrl.slot_table import SlotTable
from trajstore.errors import DataError
from trajstore.schema import Array


def rows_with_elements(table: SlotTable, index: tuple[Any, ...], data: Any, ndim: int) -> tuple[Leaves, Array]:
    """Return the whole rows that result from writing data at an index of several dimensions, and their slots.

    Args:
        table: The table that holds the rows.
        index: The first part chooses slots that hold rows, the others elements of these rows.
        data: Values of some or all fields; fields that the table lacks are zero in all other elements.
        ndim: Number of dimensions that an index may have.

    Raises:
        DataError: The index has too many parts or is of a kind that is not supported, or data does not fit.
        IndexError: A row or an element does not exist.
    """
    if len(index) > ndim:
        raise DataError(f"index: expected at most {ndim} parts, as the storage has ndim={ndim}, got {len(index)}")
    slots, first = _first_part(index[0], table.log.slot_map.n_filled)
    within = (first, *index[1:])
    values = _with_root_of(table, to_leaves(data))
    rows = table.rows(slots)
    lanes = torch.empty((len(slots), *table.structure.lanes(ndim)), device="meta")
    n_batch = data.batch_dims if is_tensor_collection(data) else lanes[within].dim()
    _, values = table.structure.fitted(values)
    for path, value in values.items():
        row = rows.get(path)
        if row is None or row.shape[lanes.dim() :] != value.shape[n_batch:]:
            row = _enlarged(path, row, value, lanes.shape, n_batch)
        rows[path] = _put(path, row, within, value)
    return rows, slots


def _first_part(part: Any, n_rows: int) -> tuple[Array, Any]:
    """Return the slots that the first part of an index chooses, and that part as an index of these slots' rows."""
    if isinstance(part, slice):
        return np.arange(*part.indices(n_rows)), slice(None)
    numbers = np.asarray(part.cpu() if isinstance(part, torch.Tensor) else part)
    if numbers.dtype == bool and numbers.ndim == 1:
        numbers = np.flatnonzero(numbers)
    if numbers.dtype.kind not in "iu":
        raise DataError(f"index: expected integers, slices or a mask of one dimension, got {part!r:.80}")
    if numbers.size and not -n_rows <= numbers.min() <= numbers.max() < n_rows:
        raise IndexError(f"index: expected {-n_rows} to {n_rows - 1}, got {numbers.min()} to {numbers.max()}")
    slots, where = np.unique(np.where(numbers < 0, numbers + n_rows, numbers), return_inverse=True)
    return slots, torch.from_numpy(where.reshape(numbers.shape)) if numbers.ndim else 0


def _with_root_of(table: SlotTable, values: Leaves) -> Leaves:
    """Return values under the names of the table's fields, which say how many dimensions whole rows have."""
    root = next(iter(table.structure.fields)).split("/")[0]
    return {"/".join([root, *path.split("/")[1:]]): value for path, value in values.items()}


def _enlarged(
    path: str, row: torch.Tensor | None, value: torch.Tensor, lanes: torch.Size, n_batch: int
) -> torch.Tensor:
    """Return zeros for a new field, or an existing field with room for longer text.

    Raises:
        DataError: The field exists and has another shape.
    """
    shape = (*lanes, *value.shape[n_batch:])
    if row is None:
        return value.new_zeros(shape)
    if not path.endswith(f"/{JSON}") or row.shape[-1] > value.shape[-1]:
        raise DataError(
            f"{describe_field(path)}: expected shape {tuple(row.shape[len(lanes) :])} as before, got"
            f" {tuple(value.shape[n_batch:])}"
        )
    return widen(row, value.shape[-1])


def _put(path: str, row: torch.Tensor, index: tuple[Any, ...], value: torch.Tensor) -> torch.Tensor:
    if row.dtype != value.dtype:
        raise DataError(f"{describe_field(path)}: expected {row.dtype} as before, got {value.dtype}")
    try:
        row[index] = value.to(row.device)
    except RuntimeError as error:  # shapes that do not broadcast
        raise DataError(
            f"{describe_field(path)}: expected values for shape {tuple(row[index].shape)}, got {tuple(value.shape)}"
        ) from error
    return row
