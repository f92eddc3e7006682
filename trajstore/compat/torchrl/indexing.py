"""Which slots an index of TorchRL names, and the rows that come with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import is_tensor_collection

from trajstore.compat.torchrl.layout import TENSORDICT, Layout, Leaves, to_leaves, torch_dtype
from trajstore.errors import DataError
from trajstore.schema import Array


def is_one(cursor: Any) -> bool:
    """Whether an index names one slot, so that what is written there has no dimension for it."""
    return isinstance(cursor, (int, np.integer)) or getattr(cursor, "ndim", 1) == 0


def is_plain(index: Any, n_rows: int) -> bool:
    """Whether it is a list of rows, counted from the first."""
    if not isinstance(index, torch.Tensor) or index.dtype != torch.int64 or index.dim() != 1 or not len(index):
        return False
    least, most = index.aminmax()
    return bool(least >= 0) and bool(most < n_rows)


def rows_of(data: Any, *, is_one: bool) -> Leaves:
    if is_one and is_tensor_collection(data):
        return to_leaves(data.unsqueeze(0))
    leaves = to_leaves(data)
    return {path: leaf[None] for path, leaf in leaves.items()} if is_one else leaves


def slots_of(cursor: Any, n_slots: int, n_rows: int) -> Array:
    """The slots that an index names.

    Raises:
        DataError: They are not as many as there are rows.
        IndexError: There is no such slot.
    """
    if isinstance(cursor, tuple) and len(cursor) != 1:
        raise DataError(f"index: rows are written whole, by their first dimension; got {len(cursor)} indexes")
    index = cursor[0] if isinstance(cursor, tuple) else cursor
    slots = np.arange(*index.indices(n_slots)) if isinstance(index, slice) else _listed(index)
    if len(slots) != n_rows:
        raise DataError(f"index: expected as many slots as rows, got {len(slots)} slots and {n_rows} rows")
    if len(slots) and not -n_slots <= slots.min() <= slots.max() < n_slots:
        raise IndexError(f"index: expected {-n_slots} to {n_slots - 1}, got {slots.min()} to {slots.max()}")
    return np.where(slots < 0, slots + n_slots, slots)


def _listed(index: Any) -> Array:
    array = np.asarray(index.cpu() if isinstance(index, torch.Tensor) else index).reshape(-1)
    return np.flatnonzero(array) if array.dtype == bool else array.astype(np.int64)


def without_new_index(rows: Leaves, layout: Layout) -> Leaves:
    """Rows without the key ``index``, which TorchRL adds in some calls and not in others, where it is no field."""
    return {path: leaf for path, leaf in rows.items() if path in layout.fields or not _is_index(path)}


def with_index(rows: Leaves, slots: Array, layout: Layout) -> Leaves:
    """Rows with that key, which holds the slots, where it is a field and they lack it."""
    lacking = {path: layout.fields[path] for path in layout.fields if _is_index(path) and path not in rows}
    found = {
        path: torch.from_numpy(slots).to(torch_dtype(field)).reshape(-1, *[1] * len(field.shape))
        for path, field in lacking.items()
    }
    return rows | {path: leaf.expand(-1, *lacking[path].shape) for path, leaf in found.items()}


def _is_index(path: str) -> bool:
    root, _, key = path.partition("/")
    return key == "index" and root.startswith(TENSORDICT)
