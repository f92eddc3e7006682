"""The memory that holds the resident pages of one column."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch

from trajstore.cache.cache_version import CacheVersion
from trajstore.cache.tensor_dtypes import arena_dtypes
from trajstore.host_memory import FEW_BYTES, HostMemory
from trajstore.schema import Array, Field

_SYSTEM_PAGE_BYTES = mmap.PAGESIZE
_ONE_BYTE = np.zeros(1, np.uint8)
_HUGE_BYTES = 32 << 20  # bytes of stored pages from which on they lie in huge pages of the system


class Arena:
    """Slots of one page each, in one block of memory on the device.

    The rows of all slots are numbered consecutively: *arena row* ``r`` is row ``r % page_rows`` of slot
    ``r // page_rows``.

    Attributes:
        row_shape: Shape of one row.
        row_bytes: Bytes of one row.
        dtype: The dtype that batches show the column in.
        data_ptr: Memory address of the first slot; only kept where compiled loops are used.
    """

    def __init__(
        self,
        spec: Field,
        page_rows: int,
        device: torch.device,
        version: CacheVersion,
        kernels: ModuleType | None = None,
    ) -> None:
        self.row_shape = spec.shape
        self.row_bytes = spec.row_bytes
        self._page_rows = page_rows
        self._dtype, self.dtype = arena_dtypes(spec)
        self._storage_dtype = spec.storage_dtype
        self._device = device
        self._version = version
        self._kernels = kernels
        self._host: HostMemory | None = None
        self._set_memory(torch.empty((0, page_rows, *spec.shape), dtype=self._dtype, device=device))

    def _set_memory(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._version.advance()
        self.data_ptr = 0
        if self._kernels is not None:
            self._bytes = memory.reshape(-1).view(torch.uint8).numpy()
            self.data_ptr = memory.data_ptr()

    @property
    def address(self) -> int:
        """Memory address of the first slot, on every device; valid until `resize`."""
        return self._memory.data_ptr()

    def resize(self, n_slots: int, used: Iterable[range], n_live: int, n_stored: int) -> None:
        """Change the number of slots; the contents of used slots that exist before and after are kept.

        Only these are touched, so the others take no memory on the CPU.

        Args:
            n_slots: The number of slots.
            used: Ranges of slots that hold something.
            n_live: Slots at the start that are for live rows.
            n_stored: Slots behind them that are going to be used soon.
        """
        if self._host is not None and self._host.resize(n_slots * self._page_rows * self.row_bytes):
            self._set_memory(self._host_slots(n_slots, n_live, n_stored))
            return
        memory = self._allocate(n_slots, n_live, n_stored)
        for slots in used:
            kept = slice(slots.start, min(slots.stop, n_slots, len(self._memory)))
            memory[kept] = self._memory[kept]
        self._set_memory(memory)

    def discard(self, n_rows: int) -> None:
        """Give the memory of the first arena rows back to the system; their contents are undefined."""
        if self._host is not None:
            self._host.discard(0, n_rows * self.row_bytes)

    def _allocate(self, n_slots: int, n_live: int, n_stored: int) -> torch.Tensor:
        shape = (n_slots, self._page_rows, *self.row_shape)
        if self._device.type != "cpu" or not n_slots:
            return torch.empty(shape, dtype=self._dtype, device=self._device)
        self._host = HostMemory(n_slots * self._page_rows * self.row_bytes, grows=True)
        return self._host_slots(n_slots, n_live, n_stored)

    def _host_slots(self, n_slots: int, n_live: int, n_stored: int) -> torch.Tensor:
        """The memory of the CPU as slots."""
        assert self._host is not None
        page_bytes = self._page_rows * self.row_bytes
        # Random reads of a large arena are a fifth faster with huge pages. In one that holds little they would make
        # much memory resident that is not used.
        self._host.use_huge_pages(FEW_BYTES, min(n_live, n_slots) * page_bytes)
        self.use_huge_pages(n_live, n_stored, n_slots)
        shape = (n_slots, self._page_rows, *self.row_shape)
        return torch.from_numpy(self._host.array).view(self._dtype).view(shape)

    def use_huge_pages(self, n_live: int, n_stored: int, n_slots: int | None = None) -> None:
        """Let the slots behind those of live rows lie in huge pages of the system, if enough will be used."""
        page_bytes = self._page_rows * self.row_bytes
        if self._host is not None and n_stored * page_bytes >= _HUGE_BYTES:
            stop = len(self._memory) if n_slots is None else n_slots
            self._host.use_huge_pages(n_live * page_bytes, stop * page_bytes)

    # ---- filling slots

    def touch(self, slots: Array) -> None:
        """Make memory of the system resident for slots that are filled next. Their contents become undefined."""
        if self._kernels is None or self._host is None or not len(slots):
            return
        slot_bytes = self._page_rows * self.row_bytes
        positions = (slots[:, None] * slot_bytes + np.arange(0, slot_bytes, _SYSTEM_PAGE_BYTES)).reshape(-1)
        self._kernels.scatter_rows(_ONE_BYTE, 1, np.zeros_like(positions), positions, self._bytes)

    def slot_views(self, slots: Array) -> list[Array] | None:
        """Return writable numpy views of slots; None if the arena is not in host memory."""
        if self._device.type != "cpu":
            return None
        host = self._as_numpy(self._memory)
        return [host[slot] for slot in slots]

    def new_upload(self, n_pages: int) -> tuple[torch.Tensor, list[Array]]:
        """Return host memory for pages (page-locked for CUDA) and numpy views of them, to fill before `upload`."""
        is_locked = self._device.type == "cuda"
        shape = (n_pages, self._page_rows, *self.row_shape)
        pages = torch.empty(shape, dtype=self._dtype, pin_memory=is_locked)
        return pages, list(self._as_numpy(pages))

    def upload(self, slots: Array, pages: torch.Tensor) -> None:
        """Copy pages from host memory into slots."""
        index = torch.from_numpy(slots).to(self._device, non_blocking=True)
        self._memory.index_copy_(0, index, pages.to(self._device, non_blocking=True))

    def _as_numpy(self, pages: torch.Tensor) -> Array:
        bits = pages.view(torch.int16) if self._dtype is torch.bfloat16 else pages
        return bits.numpy().view(self._storage_dtype)

    def new_host_pages(self, n_pages: int) -> Array:
        """Return uninitialised host memory for pages, in the dtype that is stored."""
        return np.empty((n_pages, self._page_rows, *self.row_shape), self._storage_dtype)

    def write(self, rows: Array, values: Array) -> None:
        """Overwrite arena rows with values in the dtype that is stored."""
        if self._device.type == "cpu":
            self._as_numpy(self._memory).reshape(-1, *self.row_shape)[rows] = values
            return
        bits = np.ascontiguousarray(values)
        new = torch.from_numpy(bits.view(np.int16) if self._dtype is torch.bfloat16 else bits).view(self._dtype)
        index = torch.from_numpy(rows).to(self._device)
        self._memory.view(-1, *self.row_shape).index_copy_(0, index, new.to(self._device))

    def copy_within(self, to_rows: Array, from_rows: Array) -> None:
        """Copy arena rows to other arena rows, none of which are copied themselves."""
        if self._kernels is not None:
            self.scatter(from_rows, to_rows, self._bytes)
            return
        if self._device.type == "cpu":
            flat: Any = self._as_numpy(self._memory).reshape(-1, *self.row_shape)
            flat[to_rows] = flat[from_rows]
            return
        target, origin = (torch.from_numpy(a).to(self._device) for a in (to_rows, from_rows))
        memory = self._memory.view(-1, *self.row_shape)
        memory.index_copy_(0, target, memory.index_select(0, origin))

    def copy_first_rows(self, other: Arena, n_rows: int) -> None:
        """Copy the first arena rows of an arena whose pages may have another size."""
        flat, before = (arena._memory.view(-1, *self.row_shape) for arena in (self, other))
        flat[:n_rows] = before[:n_rows]

    # ---- reading rows

    def empty(self, shape: Sequence[int]) -> torch.Tensor:
        """Return uninitialised memory on the device for rows: ``[*shape, *row_shape]``."""
        return torch.empty((*shape, *self.row_shape), dtype=self.dtype, device=self._device)

    def read(self, rows: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Copy arena rows to ``out``, whose axes before the row's shape hold as many elements as ``rows``."""
        flat = self._memory.view(-1, *self.row_shape)
        torch.index_select(flat, 0, rows, out=out.view(self._dtype).view(-1, *self.row_shape))
        return out

    def scatter(self, rows: Array, positions: Array, out: Array, pages: Array | None = None) -> None:
        """Copy arena rows to positions of ``out`` (flat bytes), with a compiled loop.

        If host memory for ``pages`` is given, the rows are rows of those pages instead.
        """
        assert self._kernels is not None
        origin = self._bytes if pages is None else pages.reshape(-1).view(np.uint8)
        self._kernels.scatter_rows(origin, self.row_bytes, rows, positions, out)
