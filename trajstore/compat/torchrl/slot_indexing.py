"""Converts TorchRL's indices to slots, and the data written at them to rows."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from tensordict import is_tensor_collection

from trajstore.compat.torchrl.row_structure import TENSORDICT, Leaves, RowStructure, to_leaves, torch_dtype
from trajstore.errors import DataError
from trajstore.schema import Array


def is_single(index: Any) -> bool:
    """Return whether an index names a single slot, so that data for it has no dimension of rows."""
    return isinstance(index, (int, np.integer)) or getattr(index, "ndim", 1) == 0


def is_row_list(index: Any, n_rows: int) -> bool:
    """Return whether an index is a one-dimensional tensor of row numbers from 0 to ``n_rows`` - 1."""
    if not isinstance(index, torch.Tensor) or index.dtype != torch.int64 or index.dim() != 1 or not len(index):
        return False
    smallest, largest = index.aminmax()
    return bool(smallest >= 0) and bool(largest < n_rows)


def rows_of(data: Any, *, single: bool) -> Leaves:
    """Return data as rows ``[n, ...]`` by field; with ``single``, data is one row without that dimension."""
    if single and is_tensor_collection(data):
        return to_leaves(data.unsqueeze(0))
    leaves = to_leaves(data)
    return {path: leaf[None] for path, leaf in leaves.items()} if single else leaves


def slots_of(index: Any, n_slots: int, n_rows: int) -> Array:
    """Return the slots that an index names.

    Raises:
        DataError: The number of slots is not the number of rows.
        IndexError: A slot does not exist.
    """
    if isinstance(index, tuple) and len(index) != 1:
        raise DataError(f"index: expected one, as only whole rows are written, got {len(index)} indices")
    index = index[0] if isinstance(index, tuple) else index
    slots = np.arange(*index.indices(n_slots)) if isinstance(index, slice) else _slot_numbers(index)
    if len(slots) != n_rows:
        raise DataError(f"index: expected as many slots as rows, got {len(slots)} slots and {n_rows} rows")
    if len(slots) and not -n_slots <= slots.min() <= slots.max() < n_slots:
        raise IndexError(f"index: expected {-n_slots} to {n_slots - 1}, got {slots.min()} to {slots.max()}")
    return np.where(slots < 0, slots + n_slots, slots)


def _slot_numbers(index: Any) -> Array:
    array = np.asarray(index.cpu() if isinstance(index, torch.Tensor) else index).reshape(-1)
    return np.flatnonzero(array) if array.dtype == bool else array.astype(np.int64)


def warn_of_gap(slots: Array, n_filled: int) -> None:
    """Warn that rows do not count, because rows before them were refused."""
    warnings.warn(
        f"rows from slot {slots.min()} on do not count while slot {n_filled} is empty, because rows were refused;"
        " call storage.resume(buffer)",
        stacklevel=4,
    )


def check_size(n_rows: int, n_slots: int, size: int, n_lanes: int) -> None:
    """Check that rows of another storage can be loaded.

    Args:
        n_rows: Number of its slots up to the last one that holds a row.
        n_slots: Number of all its slots.
        size: Number of slots of the storage that loads them.
        n_lanes: Number of elements per slot.

    Raises:
        DataError: There are too many rows, or they fill a ring of another size.
    """
    if n_rows > size:
        raise DataError(
            f"max_size: expected at least the {n_rows * n_lanes} rows that are loaded, got {size * n_lanes}"
        )
    # TorchRL takes the rows of a ring with room to be in order of time; those of a full ring are not. And the
    # writer's cursor and the samplers' priorities, which are loaded next, go by slots.
    if n_slots != size and n_rows in (n_slots, size):
        raise DataError(
            f"max_size: expected {n_slots * n_lanes}, the size that the rows come from, because they fill a ring,"
            f" got {size * n_lanes}; to enlarge a storage, close it and open it with a larger max_size"
        )


def without_new_index(rows: Leaves, structure: RowStructure) -> Leaves:
    """Remove the key ``index`` if it is not a field; TorchRL adds it in some calls and not in others."""
    return {path: leaf for path, leaf in rows.items() if path in structure.fields or not _is_index(path)}


def with_index(rows: Leaves, slots: Array, structure: RowStructure) -> Leaves:
    """Add the key ``index``, which holds the slots, if it is a field and the rows lack it."""
    fields = structure.fields
    lacking = {path: fields[path] for path in fields if _is_index(path) and path not in rows}
    found = {
        path: torch.from_numpy(slots).to(torch_dtype(field)).reshape(-1, *[1] * len(field.shape))
        for path, field in lacking.items()
    }
    return rows | {path: leaf.expand(-1, *lacking[path].shape) for path, leaf in found.items()}


def _is_index(path: str) -> bool:
    root, _, key = path.partition("/")
    return key == "index" and root.startswith(TENSORDICT)
