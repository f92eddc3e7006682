"""Dumps in the layouts of TorchRL's checkpointers, which also call the hooks that a user registered."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torchrl.data import LazyTensorStorage, TensorStorage
from torchrl.data.replay_buffers.checkpointers import StorageCheckpointerBase

from trajstore.compat.torchrl.non_tensor import restore
from trajstore.compat.torchrl.row_structure import Leaves, RowStructure, from_leaves, to_leaves, torch_dtype
from trajstore.compat.torchrl.slot_table import SlotTable
from trajstore.errors import DataError

if TYPE_CHECKING:
    from trajstore.compat.torchrl.storage import TrajStorage


def dump_with(checkpointer: StorageCheckpointerBase, storage: TrajStorage, path: str | os.PathLike[str]) -> None:
    """Let a checkpointer of TorchRL dump the rows of a storage, which are all copied to memory for this.

    Raises:
        DataError: The storage has no rows.
    """
    if storage.table is None:
        raise DataError("dumps: expected rows, because hooks and TorchRL's checkpointers need them, found none")
    stand_in = TensorStorage(_all_slots(storage.table), device=storage.device, ndim=storage.ndim)
    stand_in._len, stand_in._last_cursor = len(storage), (storage.next_slot - 1) % storage.table.n_slots
    checkpointer.dumps(stand_in, Path(path))


def _all_slots(table: SlotTable) -> Any:
    """Return copies of the rows of all slots; those without a row are zero."""
    held = torch.from_numpy(table.held_slots)
    leaves: Leaves = {}
    for path, field in table.structure.fields.items():
        leaves[path] = torch.zeros((table.n_slots, *field.shape), dtype=torch_dtype(field))
        leaves[path][held] = table.select(held, [path])[path].cpu()
    data = from_leaves(leaves)
    return restore(data, table.structure.marked) if table.structure.marked else data


def load_with(checkpointer: StorageCheckpointerBase, storage: TrajStorage, path: str | os.PathLike[str]) -> None:
    """Replace the rows of a storage by those that a checkpointer of TorchRL reads.

    Raises:
        DataError: The dump contains pickled objects, which could execute code, or does not fit the storage.
    """
    if odd := next(Path(path).rglob("*.pickle"), None):
        raise DataError(f"{odd}: expected a dump without pickled objects, which could execute code")
    stand_in = LazyTensorStorage(storage.max_size, device="cpu", ndim=storage.ndim)
    checkpointer.loads(stand_in, Path(path))
    leaves = to_leaves(stand_in[:])
    structure = RowStructure.of(leaves)
    n_rows = len(next(iter(leaves.values())))
    n_slots = -(-storage.max_size // structure.lanes(storage.ndim).numel())
    cursor = n_rows - 1 if n_rows < n_slots else None  # such dumps do not say where a full ring begins
    storage.load_rows(structure, [(np.arange(n_rows), leaves)], n_rows, cursor, n_slots)
