"""Rows by slot: in memory as far as they fit, and in the log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from trajstore.compat.torchrl.options import WriterOptionsDict
from trajstore.compat.torchrl.paged_tensor import PagedTensor
from trajstore.compat.torchrl.row_log import RowLog
from trajstore.compat.torchrl.row_structure import Leaves, RowStructure, torch_dtype
from trajstore.schema import Array, Field
from trajstore.store.store import Store

_BUFFER_BYTES = 64 << 20
_RESIDENT_PART = 2  # if not all fields fit, resident fields get half of the budget
_PAGED_ROWS = 342  # rows, uncommitted ones included, that the cache of paged fields must have room for


class SlotTable:
    """A tensor ``[n_slots, ...]`` for every field, backed by a log; it begins with the rows in the log.

    A field is either resident, which means whole in memory, or paged, which means read from the log when needed.

    Args:
        store: The store of the log.
        structure: The fields of a row.
        n_slots: Number of slots.
        cache_bytes: Bound of the memory for rows.
        device: Device of that memory.
        grace_s: See `RowLog`.
        options: Options of the log's writer.

    Attributes:
        structure: The fields of a row.
        n_slots: Number of slots.
        log: The log.
        leaves: The tensor of each field.

    Raises:
        ValueError: ``cache_bytes`` is too small for paged fields.
    """

    def __init__(
        self,
        store: Store,
        structure: RowStructure,
        n_slots: int,
        cache_bytes: int,
        device: torch.device,
        *,
        grace_s: float,
        options: WriterOptionsDict,
    ) -> None:
        self.structure, self.n_slots, self._device = structure, n_slots, device
        resident = _resident_fields(structure, n_slots, cache_bytes)
        paged = [path for path in structure.fields if path not in resident]
        rest = max(cache_bytes - sum(structure.fields[path].row_bytes * n_slots for path in resident), 1)
        if paged and rest < _PAGED_ROWS * structure.schema.row_bytes:
            enough = _RESIDENT_PART * _PAGED_ROWS * structure.schema.row_bytes
            raise ValueError(
                f"cache_bytes: expected at least {enough}, as rows of {structure.row_bytes} bytes do not all fit in"
                f" memory, got {cache_bytes}"
            )
        # Rows that are not committed yet are in the cache too, and may use at most half of it.
        buffer_bytes = min(_BUFFER_BYTES, rest // 8) if paged else _BUFFER_BYTES
        self.log = RowLog(
            store,
            structure,
            n_slots,
            paged=paged,
            cache_bytes=rest,
            device=device,
            grace_s=grace_s,
            options={"buffer_bytes": max(1, buffer_bytes), **options},
        )
        self.leaves: Leaves = {
            path: self._resident_tensor(field) if path in resident else self._paged_tensor(path, field)
            for path, field in structure.fields.items()
        }
        self._resident = {path: self.leaves[path] for path in resident}
        self._own_memory = {leaf.untyped_storage().data_ptr() for leaf in self._resident.values()}
        self._known_versions = self._versions()
        for slots, rows in self.log.restored_rows(list(resident)):
            self._set_resident(torch.from_numpy(slots), rows)

    def _resident_tensor(self, field: Field) -> torch.Tensor:
        with torch.inference_mode(False):  # inference tensors do not count their changes in place
            return torch.empty((self.n_slots, *field.shape), dtype=torch_dtype(field), device=self._device)

    def _paged_tensor(self, path: str, field: Field) -> torch.Tensor:
        log = self.log
        return PagedTensor(
            lambda slots: log.read(path, slots.numpy()),
            range(self.n_slots),
            field.shape,
            torch_dtype(field),
            self._device,
        )

    @property
    def held_slots(self) -> Array:
        """The slots that hold a row."""
        return np.flatnonzero(self.log.slot_map.place >= 0)

    def rows(self, slots: Array) -> Leaves:
        """Return copies of the rows of some slots, by field."""
        return self.select(torch.from_numpy(slots))

    def select(self, index: torch.Tensor, fields: Iterable[str] | None = None) -> Leaves:
        """Return copies of the rows at an index, by default all fields."""
        index = index.to(self._device)
        chosen = self.leaves if fields is None else fields
        return {path: self.leaves[path].index_select(0, index) for path in chosen}

    def blocks(self) -> Iterator[tuple[Array, Leaves]]:
        """Yield slots and rows of the whole table, block by block, in order of the slots."""
        held, n = self.held_slots, self.log.block_rows
        for start in range(0, len(held), n):
            slots = held[start : start + n]
            yield slots, self.rows(slots)

    def write(self, slots: Array, rows: Leaves, *, in_turn: bool = False) -> None:
        """Write rows ``[n, ...]`` to slots; if a slot is named twice, its last row counts.

        Args:
            slots: The slots.
            rows: The rows, by field.
            in_turn: A writer of TorchRL wrote these slots in its turn, so the log's cursor moves to the last one.

        Raises:
            DataError: The rows do not match the structure; nothing was written.
        """
        self.structure.check(rows)
        rows = self._without_views(rows)
        if in_turn and len(slots):
            self.log.cursor = int(slots[-1])
        last = _last_of_each(slots)
        if len(last) < len(slots):
            slots, rows = slots[last], {path: leaf[torch.from_numpy(last)] for path, leaf in rows.items()}
        self.log.append(slots, rows)
        self._set_resident(torch.from_numpy(slots), rows)
        self.log.compact(self.rows)

    def _without_views(self, rows: Leaves) -> Leaves:
        """Return rows that share no memory with the table's, which torch cannot copy to themselves."""
        views = [
            path
            for path, leaf in rows.items()
            if not isinstance(leaf, PagedTensor) and leaf.untyped_storage().data_ptr() in self._own_memory
        ]
        return rows | {path: rows[path].clone() for path in views} if views else rows

    def _set_resident(self, slots: torch.Tensor, rows: Leaves) -> None:
        index = slots.to(self._device)
        with torch.no_grad():
            for path, leaf in self._resident.items():
                self._put(path, index, rows[path].to(self._device, leaf.dtype))

    def _put(self, path: str, index: Any, values: torch.Tensor) -> None:
        """Change a tensor in memory and count the change as known; other threads may change it at the same time."""
        self.leaves[path][index] = values
        self._known_versions[path] += 1

    def patch(self, index: tuple[torch.Tensor, ...], values: Mapping[str, torch.Tensor]) -> None:
        """Change elements of some fields in memory and in the log; the first tensor of the index names slots."""
        for path, value in values.items():
            self._put(path, index, value)
        self._append_again(np.unique(index[0].cpu().numpy()))

    def _versions(self) -> dict[str, int]:
        return {path: leaf._version for path, leaf in self._resident.items()}

    def log_changes(self) -> None:
        """Append all rows again if other code changed tensors in memory without `write`."""
        versions = self._versions()  # before the rows are read, so that later changes are logged by the next call
        if versions != self._known_versions:
            self._append_again(self.held_slots)  # torch does not say which rows changed
            self._known_versions = versions

    def _append_again(self, slots: Array) -> None:
        n = self.log.block_rows
        for start in range(0, len(slots), n):
            part = slots[start : start + n]
            self.log.append(part, self.rows(part))
        self.log.compact(self.rows)

    def copy_to(self, other: SlotTable) -> None:
        """Write all rows to a table with the same fields; fields that only ``other`` has become zero.

        If a full ring has become larger, its oldest row goes to the first slot.
        """
        oldest, n = self.log.oldest, self.log.slot_map.n_live
        other.log.cursor = n - 1 if oldest else self.log.cursor
        new = {path: field for path, field in other.structure.fields.items() if path not in self.leaves}
        for slots, rows in self.blocks():
            zeros = {p: torch.zeros((len(slots), *f.shape), dtype=torch_dtype(f)) for p, f in new.items()}
            _, wide = other.structure.fitted(rows | zeros)
            other.write((slots - oldest) % n if oldest else slots, wide)


def _resident_fields(structure: RowStructure, n_slots: int, cache_bytes: int) -> set[str]:
    """Return the fields to keep in memory: all if they fit, otherwise the narrowest that fit part of the budget."""
    if structure.row_bytes * n_slots <= cache_bytes:
        return set(structure.fields)
    left, chosen = cache_bytes // _RESIDENT_PART, set()
    for path, field in sorted(structure.fields.items(), key=lambda item: item[1].row_bytes):
        left -= field.row_bytes * n_slots
        if left >= 0:
            chosen.add(path)
    return chosen


def _last_of_each(slots: Array) -> Array:
    """Return the index of the last occurrence of every slot, in order."""
    if (slots[1:] > slots[:-1]).all():  # the common case
        return np.arange(len(slots))
    _, first = np.unique(slots[::-1], return_index=True)
    last: Array = np.sort(len(slots) - 1 - first)
    return last
