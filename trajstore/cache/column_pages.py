"""The cached pages of one column: a page table, and the arena that the pages lie in."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import torch

from trajstore.cache.arena import Arena
from trajstore.cache.cache_version import CacheVersion
from trajstore.cache.page_table import MIN_STORED_SLOTS, PageTable
from trajstore.schema import Array, Field


class ColumnPages:
    """Pages of one column, and the slots that hold some or all of them.

    Source 0 holds the live rows: live row ``i`` is always arena row ``i``.

    Args:
        path: Path of the field.
        spec: Its dtype and shape.
        page_rows: Rows of a page.
        device: Where the arena is.
        version: Advances when memory moves or the column becomes complete or incomplete.
        live_rows: Number of live rows.
        kernels: Compiled loops, for the CPU.

    Attributes:
        n_live_used: Live rows from this one on hold nothing.
        may_need_slots: Whether pages that can be mapped may need slots at times.
        is_far: Whether pages come over a network, a batch at a time.
    """

    def __init__(
        self,
        path: str,
        spec: Field,
        page_rows: int,
        device: torch.device,
        version: CacheVersion,
        live_rows: int = 0,
        kernels: ModuleType | None = None,
    ) -> None:
        self.path = path
        self.n_live_used = live_rows
        self.may_need_slots = self.is_far = False
        self._can_decode_blocks = False
        self._version = version
        self.page_rows = page_rows
        self.page_bytes = page_rows * spec.row_bytes
        self.table = PageTable(page_rows, device, version, -(-live_rows // page_rows), kernels)
        self.arena = Arena(spec, page_rows, device, version, kernels)

    @property
    def is_mapped(self) -> bool:
        """Whether every stored page can be mapped from a file, so that pages may be absent."""
        return self.table.maps_pages and self.can_map_all

    @property
    def can_map_all(self) -> bool:
        """Whether every stored page can be mapped, if `may_need_slots` not at all times."""
        return bool(self.table.can_map.any()) and self.table.n_slot_pages == self.table.n_live_pages

    @property
    def can_keep_decoded(self) -> bool:
        """Whether every stored page can be decoded in blocks at all times, but is copied faster from a slot."""
        return self._can_decode_blocks and self.can_map_all and not self.may_need_slots

    @property
    def fills_slots(self) -> bool:
        """Whether pages that can be mapped are decoded into empty slots as long as there are any; see `budget`."""
        return self.can_keep_decoded and self.table.n_slots > self.min_slots

    @property
    def min_slots(self) -> int:
        """Slots that the column needs to be read at all, if no page can be mapped."""
        return min(self.table.n_pages, self.table.n_live_pages + MIN_STORED_SLOTS)

    @property
    def n_unpinned(self) -> int:
        """Slots that a batch may use."""
        return self.table.n_slots - self.table.n_pinned

    @property
    def n_slot_pages(self) -> int:
        """Pages that need a slot, or may need one at times."""
        return self.table.n_pages if self.may_need_slots else self.table.n_slot_pages

    @property
    def has_blocks(self) -> bool:
        """Whether pages may be mapped chunks of which single blocks are decoded."""
        return self._can_decode_blocks and not self.table.is_direct

    def note_blocks(self, can_decode_blocks: bool) -> None:
        """Note whether chunks of some sources can be decoded in blocks, before such a page is mapped."""
        if can_decode_blocks != self._can_decode_blocks:
            self._can_decode_blocks = can_decode_blocks
            self._version.advance()

    @property
    def nbytes(self) -> int:
        """Bytes of the arena."""
        return self.table.n_slots * self.page_bytes

    @property
    def nbytes_of_all_pages(self) -> int:
        """Bytes that the arena would need to hold every page."""
        return self.table.n_pages * self.page_bytes

    def set_slots(self, n: int) -> None:
        """Change the number of slots; pages stay resident where their slot still exists."""
        # First, so that after a failed allocation no page is mapped to a slot that does not exist.
        self.table.is_direct = self.table.is_direct and n >= self.table.n_pages
        if n != self.table.n_slots:
            live_slots = range(-(-self.n_live_used // self.page_rows))
            used = (live_slots, self.table.stored_slots)
            n_stored = 0 if self._waits_for_huge_pages else self.table.n_used
            self.arena.resize(n, used, self.table.n_live_pages, n_stored)
            self.table.set_slots(n)

    @property
    def _waits_for_huge_pages(self) -> bool:
        # Of a store far away, pages come a batch at a time and in any order: in huge pages of the system, every
        # chunk of 128 KiB would cost 2 MB of cleared memory.
        return self.is_far and self.table.is_direct and not self.table.is_complete

    def note_loaded(self) -> None:
        """Use huge pages, if the last page has been loaded and the column waited for it."""
        if self.is_far and self.table.is_direct and self.table.is_complete:
            self.arena.use_huge_pages(self.table.n_live_pages, self.table.n_used)

    def gather(self, source: torch.Tensor, row: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Copy rows of resident pages to ``out``, ``[*row.shape, *row_shape]``, with tensor operations."""
        virtual = self.table.virtual_rows(source, row)
        return self.arena.read(self.table.arena_rows(virtual).reshape(-1), out)

    def copy_arguments(self, out: torch.Tensor) -> tuple[int, ...]:
        """Return the column's line of the ``columns`` argument of the compiled loop ``copy_columns``."""
        arena, table = self.arena, self.table
        slots, first_rows = table.slot_of_page.data_ptr, table.first_virtual_row.data_ptr
        return arena.data_ptr, arena.row_bytes, slots, self.page_rows, first_rows, out.data_ptr()

    def addresses(self) -> tuple[int, ...]:
        """Return the first six numbers of the column for `program_loops`.

        The third is 0 if it needs no table, the last if no page has to be decoded.

        If pages are mapped, those that no batch has asked for yet are absent.
        """
        arena, table = self.arena, self.table
        slots = 0 if table.is_direct else table.slot_of_page.data_ptr
        first_rows = table.first_virtual_row.data_ptr
        sizes = table.bytes_of_page.data_ptr if self.has_blocks else 0
        return arena.data_ptr, arena.row_bytes, slots, self.page_rows, first_rows, sizes

    def forget_mapped(self, source: int, start: int, stop: int) -> None:
        """Make the mapped pages of a source absent that hold rows from ``start`` to ``stop``."""
        if self.table.n_mapped:
            first = self.table.first_page(source)
            pages = np.arange(first + start // self.page_rows, first - (-stop // self.page_rows))
            self.table.forget_mapped(pages)

    # ---- live rows

    def adopt_live_rows(self, old: ColumnPages, n_rows: int) -> None:
        """Copy the live rows of a column that had pages of another size."""
        self.arena.copy_first_rows(old.arena, n_rows)

    def move_live_rows(self, source: int, live: Array, rows: Array, start: int, stop: int) -> None:
        """Copy live rows, which are committed now, to the pages of the source that they belong to.

        A resident page that receives all its new rows stays resident; one that does not is forgotten. A new page
        that receives all its rows becomes resident if a slot is empty.

        Args:
            source: The source whose rows ``[start, stop)`` are new.
            live: Live rows.
            rows: The row of the source that each of them became.
            start: First new row of the source.
            stop: End of its new rows.
        """
        table = self.table
        first, last = start // self.page_rows, -(-stop // self.page_rows)
        pages = table.first_page(source) + np.arange(first, last)
        covered = np.ones((last - first) * self.page_rows, bool)
        covered[start - first * self.page_rows : stop - first * self.page_rows] = False
        covered[rows - first * self.page_rows] = True
        is_whole = covered.reshape(-1, self.page_rows).all(1)
        is_resident = table.slots(pages) >= 0
        table.forget(pages[is_resident & ~is_whole])
        is_new = np.arange(first, last) * self.page_rows >= start
        added = pages[is_whole & ~is_resident & is_new][: max(0, table.n_empty)]
        if len(added):
            slots, _ = table.claim(added)
            table.set_resident(added, slots, 1)
        slot = table.slots(table.first_page(source) + rows // self.page_rows)
        chosen = slot >= 0
        self.arena.copy_within(slot[chosen] * self.page_rows + rows[chosen] % self.page_rows, live[chosen])
