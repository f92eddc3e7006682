"""Rows by slot: in memory as far as they fit, and in the log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from trajstore.compat.torchrl.layout import Layout, Leaves, torch_dtype
from trajstore.compat.torchrl.log import Log
from trajstore.compat.torchrl.paged import PagedTensor
from trajstore.schema import Array, Field
from trajstore.store.store import Store

_BUFFER_BYTES = 64 << 20
_RESIDENT_PART = 2  # of the budget, where not everything fits: narrow fields get half
_PAGED_ROWS = 342  # that a cache must have room for, those included that are not committed yet


class Table:
    """A tensor ``[n_slots, ...]`` for every field, each resident or read by pages, backed by a log.

    It begins with what is in the log.

    Args:
        store: Of the log.
        layout: What a row holds.
        n_slots: How many there may be.
        cache_bytes: Bound of the memory for rows.
        device: Where that is.
        grace_s: See `Log`.
        options: Of the log's writer.
    """

    def __init__(
        self,
        store: Store,
        layout: Layout,
        n_slots: int,
        cache_bytes: int,
        device: torch.device,
        *,
        grace_s: float,
        options: Mapping[str, Any],
    ) -> None:
        self.layout, self.n_slots, self._device = layout, n_slots, device
        resident = _resident(layout, n_slots, cache_bytes)
        paged = [path for path in layout.fields if path not in resident]
        rest = max(cache_bytes - sum(layout.fields[path].row_bytes * n_slots for path in resident), 1)
        if paged and rest < _PAGED_ROWS * layout.schema.row_bytes:
            enough = _RESIDENT_PART * _PAGED_ROWS * layout.schema.row_bytes
            raise ValueError(
                f"cache_bytes: {cache_bytes} bytes are too few to read rows of {layout.row_bytes} bytes by pages;"
                f" {enough} are enough"
            )
        # Rows that are not committed yet stand in the cache too, in at most half of it.
        buffer_bytes = min(_BUFFER_BYTES, rest // 8) if paged else _BUFFER_BYTES
        self.log = Log(
            store,
            layout,
            n_slots,
            paged=paged,
            cache_bytes=rest,
            device=device,
            grace_s=grace_s,
            options={"buffer_bytes": max(1, buffer_bytes), **options},
        )
        self.leaves: Leaves = {
            path: self._memory(field) if path in resident else self._pages(path, field)
            for path, field in layout.fields.items()
        }
        self._resident = {path: self.leaves[path] for path in resident}
        self._versions = self._seen()
        for slots, rows in self.log.restored(list(resident)):
            self._keep(torch.from_numpy(slots), rows)

    def _memory(self, field: Field) -> torch.Tensor:
        with torch.inference_mode(False):  # else changes in place could not be noticed
            return torch.empty((self.n_slots, *field.shape), dtype=torch_dtype(field), device=self._device)

    def _pages(self, path: str, field: Field) -> torch.Tensor:
        log = self.log
        return PagedTensor(
            lambda slots: log.read(path, slots.numpy()),
            range(self.n_slots),
            field.shape,
            torch_dtype(field),
            self._device,
        )

    @property
    def held(self) -> Array:
        """The slots that hold a row."""
        return np.flatnonzero(self.log.slots.place >= 0)

    def rows(self, slots: Array) -> Leaves:
        """Rows of some slots, by field."""
        return self.select(torch.from_numpy(slots))

    def select(self, index: torch.Tensor, fields: Iterable[str] | None = None) -> Leaves:
        """The same, of some fields."""
        index = index.to(self._device)
        chosen = self.leaves if fields is None else fields
        return {path: self.leaves[path].index_select(0, index) for path in chosen}

    def blocks(self) -> Iterator[tuple[Array, Leaves]]:
        """All rows, in order of their slots, some at a time."""
        held, n = self.held, self.log.block_rows
        for start in range(0, len(held), n):
            slots = held[start : start + n]
            yield slots, self.rows(slots)

    def write(self, slots: Array, rows: Leaves, *, in_turn: bool = False) -> None:
        """Write rows ``[n, ...]``; where a slot comes twice, the last one counts.

        Args:
            slots: Where they go.
            rows: By field.
            in_turn: The next ones in turn will follow these.

        Raises:
            DataError: They do not fit the layout; nothing was written.
        """
        self.layout.check(rows)
        if in_turn and len(slots):
            self.log.cursor = int(slots[-1])
        last = _last_of_each(slots)
        if len(last) < len(slots):
            slots, rows = slots[last], {path: leaf[torch.from_numpy(last)] for path, leaf in rows.items()}
        self.log.append(slots, rows)
        self._keep(torch.from_numpy(slots), rows)
        self.log.compact(self.rows)

    def _keep(self, slots: torch.Tensor, rows: Leaves) -> None:
        index = slots.to(self._device)
        with torch.no_grad():
            for path, leaf in self._resident.items():
                self._put(path, index, rows[path].to(self._device, leaf.dtype))

    def _put(self, path: str, index: Any, values: torch.Tensor) -> None:
        """Change what is in memory, and count that as one's own change: others may make some at the same time."""
        self.leaves[path][index] = values
        self._versions[path] += 1

    def patch(self, index: tuple[torch.Tensor, ...], values: Mapping[str, torch.Tensor]) -> None:
        """Change elements of some fields in memory, the slots being the first of their index, and in the log."""
        for path, value in values.items():
            self._put(path, index, value)
        self._log_again(np.unique(index[0].cpu().numpy()))

    def _seen(self) -> dict[str, int]:
        return {path: leaf._version for path, leaf in self._resident.items()}

    def log_changes(self) -> None:
        """Append what is in memory, if somebody has changed it there, past `write`."""
        seen = self._seen()  # before the rows are read: what is changed meanwhile is due once more
        if seen != self._versions:
            self._log_again(self.held)  # which rows were changed nobody says
            self._versions = seen

    def _log_again(self, slots: Array) -> None:
        n = self.log.block_rows
        for start in range(0, len(slots), n):
            part = slots[start : start + n]
            self.log.append(part, self.rows(part))
        self.log.compact(self.rows)

    def copy_to(self, other: Table) -> None:
        """Write all rows to a table with the same fields and perhaps more, which are zero then.

        The oldest row of a full ring that has become larger comes to the first slot.
        """
        oldest, n = self.log.oldest, self.log.slots.n_live
        other.log.cursor = n - 1 if oldest else self.log.cursor
        more = {path: field for path, field in other.layout.fields.items() if path not in self.leaves}
        for slots, rows in self.blocks():
            zeros = {p: torch.zeros((len(slots), *f.shape), dtype=torch_dtype(f)) for p, f in more.items()}
            other.write((slots - oldest) % n if oldest else slots, rows | zeros)


def _resident(layout: Layout, n_slots: int, cache_bytes: int) -> set[str]:
    """The fields to keep in memory whole: all if they fit, else the narrowest that fit a part of the budget."""
    if layout.row_bytes * n_slots <= cache_bytes:
        return set(layout.fields)
    left, chosen = cache_bytes // _RESIDENT_PART, set()
    for path, field in sorted(layout.fields.items(), key=lambda item: item[1].row_bytes):
        left -= field.row_bytes * n_slots
        if left >= 0:
            chosen.add(path)
    return chosen


def _last_of_each(slots: Array) -> Array:
    """Positions of the last appearance of every slot, in order."""
    if (slots[1:] > slots[:-1]).all():  # as most are written
        return np.arange(len(slots))
    _, first = np.unique(slots[::-1], return_index=True)
    last: Array = np.sort(len(slots) - 1 - first)
    return last
