"""Decoded chunks on the device, paged like virtual memory.

Every column has an arena of slots on the device and a page table that says which slot holds which page. Hit test,
choice of victims and gather work on whole batches. A column that fits its share of the budget has a slot for every
page; once all of it is resident, a gather needs nothing from the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import torch

from trajstore.cache.growable_array import GrowableArray
from trajstore.schema import Array, Field

MIN_SLOTS = 2
_ABSENT = -1
PINNED = np.iinfo(np.int64).max  # the tick of a slot that is not given away


@dataclass(slots=True)
class CacheStats:
    """What the cache has done so far; counts are of pages, times in seconds."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    bytes_read: int = 0
    bytes_decoded: int = 0
    host_hits: int = 0
    n_parts: int = (
        0  # gathers that had to be assembled in parts, because a batch needed more pages than there are slots
    )
    n_syncs: int = 0  # gathers for which the host had to look at the addresses
    seconds: dict[str, float] = field(default_factory=lambda: {"plan": 0.0, "load": 0.0, "gather": 0.0})


# torch has few operations on these, so arenas hold their bits as signed numbers.
UNSIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def torch_dtypes(spec: Field) -> tuple[torch.dtype, torch.dtype]:
    """The dtype that an arena has, and the one its values are seen as."""
    seen: torch.dtype = getattr(torch, spec.dtype)
    return UNSIGNED.get(seen, seen), seen


def flat_rows(source: torch.Tensor, row: torch.Tensor) -> tuple[Array, Array]:
    """Source and row as numpy arrays of two axes; that of source may be one long."""
    n, sources = len(row), source.numpy()
    if source.shape != row.shape and source.shape != (n, 1):
        sources = np.ascontiguousarray(source.expand(row.shape).numpy())
    return sources.reshape(n, math.prod(sources.shape[1:])), row.numpy().reshape(n, math.prod(row.shape[1:]))


class ColumnPages:
    """The pages of one column: an arena on the device, and which page lies in which slot.

    Pages of all sources are numbered through; one that outgrows its range moves to a new one at the end. The first
    source, if it has rows, is live: written by `write_live`, always resident.
    """

    def __init__(
        self,
        path: str,
        spec: Field,
        page_rows: int,
        device: torch.device,
        live_rows: int = 0,
        kernels: ModuleType | None = None,
    ) -> None:
        self.path = path
        self.page_rows = page_rows
        self.row_shape = spec.shape
        self.page_bytes = page_rows * spec.row_bytes
        self._dtype, self.dtype = torch_dtypes(spec)
        self._storage_dtype = spec.storage_dtype
        self._device = device
        self._kernels = kernels
        self._row_bytes = spec.row_bytes
        self.n_live_pages = -(-live_rows // page_rows)
        self._seen = np.zeros(0, np.int64)  # by page: the last tick at which it was asked for
        self._set_arena(torch.empty((0, page_rows, *spec.shape), dtype=self._dtype, device=device))
        self._table = GrowableArray(np.int64, device)  # page -> slot, or -1
        self._row_base = GrowableArray(np.int64, device)  # by source: rows before its first page
        self._capacity: list[int] = []  # by source: pages in its range
        self._n_rows: list[int] = []  # by source: rows known
        self._slot_page = np.empty(0, np.int64)
        self._slot_tick = np.empty(0, np.int64)
        self._n_used = 0  # pages that hold rows
        self._first_used: list[int] = []  # by source: pages before were evicted
        self.n_resident = 0
        self.n_pinned = 0
        self._is_direct = True  # page i lies in slot i

    def _set_arena(self, arena: torch.Tensor) -> None:
        self._arena = arena
        if self._kernels is not None:
            self._bytes = arena.reshape(-1).view(torch.uint8).numpy()
            self._address = arena.data_ptr()

    @property
    def n_pages(self) -> int:
        return self._table.n

    @property
    def n_slots(self) -> int:
        return len(self._slot_page)

    @property
    def n_free(self) -> int:
        """Slots that a batch may use."""
        return self.n_slots - self.n_pinned

    @property
    def is_complete(self) -> bool:
        """Everything is resident."""
        return self.n_resident == self._n_used

    def set_rows(self, n_rows: Sequence[int], marks: Sequence[int] = (), written: int = -1) -> None:
        """Take note of how many rows each source has; part-filled pages that grew are forgotten.

        Not those of the source that is written here: `move_live` brings what they lack.
        """
        for source, n in enumerate(n_rows):
            pages = -(-n // self.page_rows)
            if source == len(self._capacity):
                self._add_source(pages)
            elif pages > self._capacity[source]:
                self._extend(source, pages)
            before = self._n_rows[source]
            if n < before:  # the stream is gone, or was replaced by another
                first = self._first_page(source)
                self.forget(np.arange(first, first + self._capacity[source]))
            if before % self.page_rows and n > before and source != written:
                self.forget(np.array([self._first_page(source) + before // self.page_rows]))
            self._n_rows[source] = n
        self._first_used = [
            -(-n // self.page_rows) if mark >= n else mark // self.page_rows  # of all rows gone no page is left
            for n, mark in zip(n_rows, [*marks, *[0] * (len(n_rows) - len(marks))], strict=False)
        ]
        for source, mark in enumerate(self._first_used):  # what was evicted is never asked for again
            first = self._first_page(source)
            self.forget(np.arange(first, first + min(mark, self._capacity[source])))
        counts = zip(self._n_rows, self._first_used, strict=True)
        self._n_used = sum(max(0, -(-n // self.page_rows) - mark) for n, mark in counts)

    @property
    def fits(self) -> bool:
        """There is a slot for every page."""
        return self.n_slots >= self.n_pages

    @property
    def least_slots(self) -> int:
        """Slots without which nothing can be read."""
        return min(self.n_pages, self.n_live_pages + MIN_SLOTS)

    def some_absent(self, n: int) -> Array:
        """Some pages that hold rows and are not resident."""
        found: list[Array] = []
        for source, (rows, mark) in enumerate(zip(self._n_rows, self._first_used, strict=True)):
            first = self._first_page(source)
            found.append(self.missing(np.arange(first + mark, first + max(mark, -(-rows // self.page_rows))))[:n])
        return np.concatenate(found)[:n]

    def _first_page(self, source: int) -> int:
        return int(self._row_base.host[source]) // self.page_rows

    def _add_source(self, pages: int) -> None:
        self._row_base.rewrite(len(self._capacity), np.array([self.n_pages * self.page_rows]))
        self._capacity.append(pages)
        self._n_rows.append(0)
        self._table.rewrite(self.n_pages, np.full(pages, _ABSENT))

    def _extend(self, source: int, pages: int) -> None:
        """Give a source room for more pages: in place if it is the last, else by moving it to the end."""
        first, old = self._first_page(source), self._capacity[source]
        room = max(pages, 2 * old)
        if first + old == self.n_pages:
            self._table.rewrite(self.n_pages, np.full(room - old, _ABSENT))
        else:
            slots = self._table.host[first : first + old].copy()
            moved = np.append(slots, np.full(room - old, _ABSENT))
            resident = np.flatnonzero(slots >= 0)
            self._slot_page[slots[resident]] = self.n_pages + resident
            self._is_direct = False
            bases = self._row_base.host.copy()
            bases[source] = self.n_pages * self.page_rows
            self._row_base.rewrite(0, bases)
            table = np.append(self._table.host, moved)
            table[first : first + old] = _ABSENT
            self._table.rewrite(0, table)
        self._capacity[source] = room

    def set_slots(self, n: int) -> None:
        """Give the arena ``n`` slots; keeps what it holds where it can."""
        self._is_direct = self._is_direct and n >= self.n_pages
        if n == self.n_slots:
            return
        kept = min(n, self.n_slots)
        arena = self._new_arena(n)
        arena[:kept] = self._arena[:kept]
        self.forget(self._slot_page[kept:][self._slot_page[kept:] >= 0])
        self._set_arena(arena)
        self._slot_page = np.append(self._slot_page[:kept], np.full(n - kept, _ABSENT))
        self._slot_tick = np.append(self._slot_tick[:kept], np.zeros(n - kept, np.int64))
        live = np.arange(self.n_live_pages)
        self.settle(self.missing(live), self.missing(live), PINNED)
        self.n_pinned = int((self._slot_tick == PINNED).sum())

    def _new_arena(self, n: int) -> torch.Tensor:
        shape = (n, self.page_rows, *self.row_shape)
        if self._device.type != "cpu" or not n:
            return torch.empty(shape, dtype=self._dtype, device=self._device)
        # numpy asks for huge pages, torch does not: random reads of a large arena are a fifth faster with them.
        return torch.from_numpy(np.empty(n * self.page_bytes, np.uint8)).view(self._dtype).view(shape)

    def forget(self, pages: Array) -> None:
        """Make pages absent; their slots are free."""
        slots = self._table.host[pages]
        resident = slots >= 0
        self._slot_page[slots[resident]] = _ABSENT
        self._slot_tick[slots[resident]] = 0
        self._mark(pages[resident], np.full(int(resident.sum()), _ABSENT))
        self.n_resident -= int(resident.sum())

    def _mark(self, pages: Array, slots: Array) -> None:
        self._table.put(pages, slots)

    def missing(self, pages: Array) -> Array:
        return pages[self._table.host[pages] < 0]

    def touch(self, pages: Array, tick: int) -> None:
        slots = self._table.host[pages]
        slots = slots[slots >= 0]
        self._slot_tick[slots] = np.maximum(self._slot_tick[slots], tick)

    def pin(self, pages: Array) -> None:
        """Keep resident pages until `unpin`."""
        self._slot_tick[self._table.host[pages]] = PINNED
        self.n_pinned = int((self._slot_tick == PINNED).sum())

    def n_pinned_of(self, pages: Array) -> int:
        """How many of these pages are pinned."""
        slots = self._table.host[pages]
        return int((self._slot_tick[slots[slots >= 0]] == PINNED).sum())

    def unpin(self, tick: int) -> None:
        """Let go of all pinned pages but the live ones."""
        pinned = self._slot_tick == PINNED
        self._slot_tick[pinned & (self._slot_page >= self.n_live_pages)] = tick
        self.n_pinned = int((self._slot_tick == PINNED).sum())

    def distinct_pages(self, source: torch.Tensor, row: torch.Tensor, tick: int) -> Array:
        """The pages of rows, each once. On a GPU this is where the host waits for the device."""
        if self._kernels is None:
            pages: Array = np.unique(self.addresses(source, row).cpu().numpy() // self.page_rows)
            return pages
        if len(self._seen) < self.n_pages:
            self._seen = np.zeros(self.n_pages + self.n_pages // 8, np.int64)
        sources, rows = flat_rows(source, row)
        found = np.empty(min(rows.size, self.n_pages), np.int64)
        n = self._kernels.distinct_pages(
            sources, rows, self._row_base.host, self.page_rows, self._seen, tick, found
        )
        return found[:n]

    def claim(self, pages: Array) -> tuple[Array, int]:
        """Slots for absent pages, free ones first, then those used longest ago; and how many were taken away."""
        if self._is_direct:
            return pages, 0
        order = np.argpartition(self._slot_tick, len(pages) - 1)[: len(pages)]
        victims = self._slot_page[order]
        victims = victims[victims >= 0]
        self.forget(victims)
        return order, len(victims)

    def settle(self, pages: Array, slots: Array, tick: int) -> None:
        """Pages are in their slots now."""
        self._slot_page[slots] = pages
        self._slot_tick[slots] = tick
        self._mark(pages, slots)
        self.n_resident += len(pages)

    def host_slots(self, slots: Array) -> list[Array] | None:
        """Writable numpy views of slots, where the arena is host memory."""
        if self._device.type != "cpu":
            return None
        host = self._as_numpy(self._arena)
        return [host[slot] for slot in slots]

    def stage(self, n: int) -> tuple[torch.Tensor, list[Array]]:
        """A host block of ``n`` pages (pinned for CUDA) and numpy views of them, to be filled and uploaded."""
        pin = self._device.type == "cuda"
        block = torch.empty((n, self.page_rows, *self.row_shape), dtype=self._dtype, pin_memory=pin)
        return block, list(self._as_numpy(block))

    def _as_numpy(self, block: torch.Tensor) -> Array:
        bits = block.view(torch.int16) if self._dtype is torch.bfloat16 else block
        return bits.numpy().view(self._storage_dtype)

    def upload(self, slots: Array, block: torch.Tensor) -> None:
        index = torch.from_numpy(slots).to(self._device, non_blocking=True)
        self._arena.index_copy_(0, index, block.to(self._device, non_blocking=True))

    def locate(self, pages: Array) -> tuple[Array, Array]:
        """For each page, its source and its number within the source."""
        bases = self._row_base.host // self.page_rows
        order = np.argsort(bases, kind="stable")
        order = order[np.array(self._capacity)[order] > 0]  # one without pages has the base of another
        source = order[np.searchsorted(bases[order], pages, side="right") - 1]
        return source, pages - bases[source]

    def addresses(self, source: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        """Rows counted through over all sources."""
        return row + self._row_base.device[source]

    def empty(self, shape: Sequence[int]) -> torch.Tensor:
        """Memory for so many rows."""
        return torch.empty((*shape, *self.row_shape), dtype=self.dtype, device=self._device)

    def gather(self, source: torch.Tensor, row: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Values of rows of resident pages, as ``[*row.shape, *row_shape]``."""
        address = self.addresses(source, row).reshape(-1)
        if not self._is_direct:
            page = address.div(self.page_rows, rounding_mode="floor")
            address = self._table.device[page] * self.page_rows + (address - page * self.page_rows)
        arena = self._arena.view(-1, *self.row_shape)
        torch.index_select(arena, 0, address, out=out.view(self._dtype).view(-1, *self.row_shape))
        return out

    def layout(self, out: torch.Tensor) -> tuple[int, ...]:
        """What a compiled loop has to know to copy rows to a tensor."""
        table, bases = self._table.address, self._row_base.address
        return self._address, self._row_bytes, table, self.page_rows, bases, out.data_ptr()

    @property
    def n_empty(self) -> int:
        """Slots that hold nothing."""
        return self.n_slots - self.n_resident

    def slots(self, pages: Array) -> Array:
        """By page: the slot that holds it, or -1."""
        slots: Array = self._table.host[pages]
        return slots

    def block(self, n_pages: int) -> Array:
        """Host memory for some pages."""
        return np.empty((n_pages, self.page_rows, *self.row_shape), self._storage_dtype)

    def scatter(self, rows: Array, position: Array, out: Array, data: Array | None = None) -> None:
        """Copy rows of the arena, or of a block of pages, to positions of flat bytes."""
        assert self._kernels is not None
        origin = self._bytes if data is None else data.reshape(-1).view(np.uint8)
        self._kernels.scatter_rows(origin, self._row_bytes, rows, position, out)

    def copy_live(self, old: ColumnPages, n_rows: int) -> None:
        """Take over the live rows of a column that had pages of another size."""
        flat, before = (column._arena.view(-1, *self.row_shape) for column in (self, old))
        flat[:n_rows] = before[:n_rows]

    def move_live(self, source: int, live: Array, rows: Array, start: int, stop: int) -> None:
        """Copy live rows to where they are in a source now, of which the rows [start, stop) are new.

        Pages that are resident and get all their new rows stay so; new pages that get all of theirs come to be, as
        far as there are slots.
        """
        first, last = start // self.page_rows, -(-stop // self.page_rows)
        pages = self._first_page(source) + np.arange(first, last)
        covered = np.ones((last - first) * self.page_rows, bool)
        covered[start - first * self.page_rows : stop - first * self.page_rows] = False
        covered[rows - first * self.page_rows] = True
        is_whole = covered.reshape(-1, self.page_rows).all(1)
        is_here = self._table.host[pages] >= 0
        self.forget(pages[is_here & ~is_whole])
        is_new = np.arange(first, last) * self.page_rows >= start
        fresh = pages[is_whole & ~is_here & is_new][: max(0, self.n_empty)]
        if len(fresh):
            slots, _ = self.claim(fresh)
            self.settle(fresh, slots, 1)
        slot = self._table.host[self._first_page(source) + rows // self.page_rows]
        chosen = slot >= 0
        self._copy_rows(slot[chosen] * self.page_rows + rows[chosen] % self.page_rows, live[chosen])

    def _copy_rows(self, to: Array, at: Array) -> None:
        if self._device.type == "cpu":
            flat: Any = self._as_numpy(self._arena).reshape(-1, *self.row_shape)
            flat[to] = flat[at]
            return
        target, origin = (torch.from_numpy(a).to(self._device) for a in (to, at))
        arena = self._arena.view(-1, *self.row_shape)
        arena.index_copy_(0, target, arena.index_select(0, origin))

    def write_live(self, rows: Array, values: Array) -> None:
        """Overwrite live rows, with values as they are stored."""
        if self._device.type == "cpu":
            self._as_numpy(self._arena).reshape(-1, *self.row_shape)[rows] = values
            return
        bits = np.ascontiguousarray(values)
        block = torch.from_numpy(bits.view(np.int16) if self._dtype is torch.bfloat16 else bits).view(self._dtype)
        index = torch.from_numpy(rows).to(self._device)
        self._arena.view(-1, *self.row_shape).index_copy_(0, index, block.to(self._device))

    @property
    def nbytes(self) -> int:
        return self.n_slots * self.page_bytes
