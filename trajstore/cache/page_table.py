"""The page table of one column: where each page lies, and which slot is reused next.

A page lies in a slot of the arena, or in a file that is mapped into memory, or nowhere.

The pages of all sources of a column are numbered consecutively. A row has the same place in that numbering, its
*virtual row*: page number times rows per page, plus the position within the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import numpy as np
import torch

from trajstore.cache.cache_version import CacheVersion
from trajstore.cache.growable_array import GrowableArray
from trajstore.cache.row_request import as_matrices
from trajstore.schema import Array

MIN_STORED_SLOTS = 2  # slots that a column has beside those of live rows, however small the budget is
PINNED = np.iinfo(np.int64).max  # the tick of a pinned slot: later than every use, so it is never reused
_ABSENT = -1


class PageTable:
    """Maps the pages of one column to slots, and slots to pages.

    Every source has a range of page numbers with room to grow. A source that outgrows its range gets a larger one
    at the end. The pages of source 0, which holds the live rows, always lie in the slots of the same numbers and
    are pinned.

    Uses are ordered by *ticks*, numbers that rise from batch to batch. The slots with the smallest ticks are reused
    first.

    Args:
        page_rows: Rows of a page.
        device: Where a copy of the table is kept, for gathers with tensor operations.
        version: Advances when the table's memory moves or `is_complete` changes.
        n_live_pages: Pages of live rows.
        kernels: Compiled loops, for the CPU.

    Attributes:
        n_resident: Pages that lie in a slot.
        n_mapped: Pages that lie in a mapped file.
        n_pinned: Slots that are not reused, those of live pages included.
        is_direct: Page ``i`` lies in slot ``i`` or nowhere, so virtual rows are arena rows.
        slot_of_page: By page: its slot; -1 if the page lies nowhere; below that, the negative of the memory address
            of a page in a mapped file, or of a chunk plus `block_decoders.BLOCKED` if it has to be decoded.
        bytes_of_page: By page: if it is a chunk that has to be decoded, its size as it was when it was checked,
            without its checksum; otherwise undefined.
        first_virtual_row: By source: the virtual row of its row 0.
        can_map: By source: whether its pages can be mapped.
        layout_version: Rises when `first_virtual_row` changes.
    """

    def __init__(
        self,
        page_rows: int,
        device: torch.device,
        version: CacheVersion,
        n_live_pages: int = 0,
        kernels: ModuleType | None = None,
    ) -> None:
        self.page_rows = page_rows
        self.n_live_pages = n_live_pages
        self.n_resident = 0
        self.n_mapped = 0
        self.n_pinned = 0
        self.is_direct = True
        self.slot_of_page = GrowableArray(np.int64, device)
        self.bytes_of_page = GrowableArray(np.int64, torch.device("cpu"))
        self.first_virtual_row = GrowableArray(np.int64, device)
        self._version = version
        self._was_complete = True  # when the version was advanced last
        self.layout_version = 0
        self._kernels = kernels
        self._last_tick = np.zeros(0, np.int64)  # by page: the tick at which `distinct_pages` last found it
        self._capacity: list[int] = []  # by source: pages in its range
        self.can_map = np.zeros(0, bool)
        self._n_rows: list[int] = []  # by source: rows known
        self._first_used: list[int] = []  # by source: the first page that was not evicted
        self._n_used = 0  # pages that hold rows that can be asked for
        self._slot_page = np.empty(0, np.int64)  # by slot: its page, or -1
        self._slot_tick = np.empty(0, np.int64)  # by slot: its last use, 0 if it is empty, or PINNED

    @property
    def n_pages(self) -> int:
        return self.slot_of_page.n

    @property
    def n_slots(self) -> int:
        return len(self._slot_page)

    @property
    def n_empty(self) -> int:
        """Slots that hold no page."""
        return self.n_slots - self.n_resident

    @property
    def n_used(self) -> int:
        """Stored pages that hold rows that can be asked for."""
        return self._n_used - self.n_live_pages

    @property
    def stored_slots(self) -> range:
        """The slots from the first behind the live pages to the last that holds a page."""
        filled = np.flatnonzero(self._slot_page[self.n_live_pages :] >= 0)
        return range(self.n_live_pages, self.n_live_pages + (int(filled[-1]) + 1 if len(filled) else 0))

    @property
    def is_complete(self) -> bool:
        """Whether every page that holds rows is resident."""
        return self.n_resident + self.n_mapped == self._n_used

    @property
    def has_slot_for_every_page(self) -> bool:
        return self.n_slots >= self.n_pages

    @property
    def maps_pages(self) -> bool:
        """Whether pages that can be mapped are mapped: not all pages have a slot."""
        return bool(self.can_map.any()) and not self.has_slot_for_every_page

    @property
    def n_slot_pages(self) -> int:
        """Pages that need a slot: they can't be mapped."""
        return sum(n for n, can_map in zip(self._capacity, self.can_map.tolist(), strict=True) if not can_map)

    # ---- sources and their rows

    def set_rows(
        self,
        n_rows: Sequence[int],
        marks: Sequence[int] = (),
        written: int = -1,
        can_map: Sequence[bool] = (),
    ) -> None:
        """Set how many rows each source has, and forget the pages that are out of date.

        Args:
            n_rows: By source: how many rows it has now.
            marks: By source: the first row that was not evicted; 0 for sources without an entry.
            written: The source whose new rows come from live rows. Its partly filled last page stays resident:
                `ColumnPages.move_live_rows` adds the rows that it lacks.
            can_map: By source: whether its pages can be mapped; False for sources without an entry.
        """
        self.can_map = np.array([*can_map, *[False] * (len(n_rows) - len(can_map))], bool)
        for source, n in enumerate(n_rows):
            self._make_room(source, self._count_pages(n))
            self._forget_changed(source, n, is_written=source == written)
            self._n_rows[source] = n
        marks = [*marks, *[0] * (len(n_rows) - len(marks))]
        self._first_used = [
            # If all rows were evicted, the partly filled last page is unused as well.
            self._count_pages(n) if mark >= n else mark // self.page_rows
            for n, mark in zip(n_rows, marks, strict=False)
        ]
        for source, n_evicted in enumerate(self._first_used):  # evicted rows are never asked for again
            first = self.first_page(source)
            self.forget(np.arange(first, first + min(n_evicted, self._capacity[source])))
        counts = zip(self._n_rows, self._first_used, strict=True)
        self._n_used = sum(max(0, self._count_pages(n) - n_evicted) for n, n_evicted in counts)
        self._note_completeness()

    def _note_completeness(self) -> None:
        if self.is_complete != self._was_complete:
            self._was_complete = self.is_complete
            self._version.advance()

    def _count_pages(self, n_rows: int) -> int:
        return -(-n_rows // self.page_rows)

    def _forget_changed(self, source: int, n: int, is_written: bool) -> None:
        """Forget the pages of a source that were read when it had another number of rows."""
        before = self._n_rows[source]
        if n < before:  # the stream is gone, or another one took its place
            first = self.first_page(source)
            self.forget(np.arange(first, first + self._capacity[source]))
        if before % self.page_rows and n > before and not is_written:
            self.forget(np.array([self.first_page(source) + before // self.page_rows]))

    def first_page(self, source: int) -> int:
        """Return the number of the page that holds row 0 of a source."""
        return int(self.first_virtual_row.host[source]) // self.page_rows

    def _make_room(self, source: int, n_pages: int) -> None:
        if source == len(self._capacity):
            self._add_source(n_pages)
        elif n_pages > self._capacity[source]:
            self._enlarge(source, n_pages)

    def _add_source(self, n_pages: int) -> None:
        self.layout_version += 1
        self.first_virtual_row.rewrite(len(self._capacity), np.array([self.n_pages * self.page_rows]))
        self._version.advance()
        self._capacity.append(n_pages)
        self._n_rows.append(0)
        self.bytes_of_page.rewrite(self.n_pages, np.zeros(n_pages, np.int64))
        self.slot_of_page.rewrite(self.n_pages, np.full(n_pages, _ABSENT))

    def _enlarge(self, source: int, n_pages: int) -> None:
        """Give a source room for more pages: in place if its range is the last, else in a new range at the end."""
        self._version.advance()
        first, old = self.first_page(source), self._capacity[source]
        room = max(n_pages, 2 * old)
        if first + old == self.n_pages:
            self.bytes_of_page.rewrite(self.n_pages, np.zeros(room - old, np.int64))
            self.slot_of_page.rewrite(self.n_pages, np.full(room - old, _ABSENT))
        else:
            self._move_to_end(source, first, old, room)
        self._capacity[source] = room

    def _move_to_end(self, source: int, first: int, old: int, room: int) -> None:
        slots = self.slot_of_page.host[first : first + old].copy()
        moved = np.append(slots, np.full(room - old, _ABSENT))
        resident = np.flatnonzero(slots >= 0)
        self._slot_page[slots[resident]] = self.n_pages + resident
        self.is_direct = False
        starts = self.first_virtual_row.host.copy()
        starts[source] = self.n_pages * self.page_rows
        self.layout_version += 1
        self.first_virtual_row.rewrite(0, starts)
        sizes = np.append(self.bytes_of_page.host[first : first + old], np.zeros(room - old, np.int64))
        self.bytes_of_page.rewrite(self.n_pages, sizes)
        table = np.append(self.slot_of_page.host, moved)
        table[first : first + old] = _ABSENT
        self.slot_of_page.rewrite(0, table)

    # ---- slots

    def set_slots(self, n: int) -> None:
        """Change the number of slots; pages in slots that no longer exist are forgotten."""
        kept = min(n, self.n_slots)
        self.forget(self._slot_page[kept:][self._slot_page[kept:] >= 0])
        self._slot_page = np.append(self._slot_page[:kept], np.full(n - kept, _ABSENT))
        self._slot_tick = np.append(self._slot_tick[:kept], np.zeros(n - kept, np.int64))
        absent = self.missing(np.arange(self.n_live_pages))
        self.set_resident(absent, absent, PINNED)
        self.n_pinned = int((self._slot_tick == PINNED).sum())

    def claim(self, pages: Array) -> tuple[Array, int]:
        """Choose slots for absent pages: empty ones first, then those used longest ago.

        Pages that lie in the chosen slots are forgotten.

        Returns:
            The slots, and the number of pages that were forgotten.
        """
        if self.is_direct:
            return pages, 0
        slots = np.argpartition(self._slot_tick, len(pages) - 1)[: len(pages)]
        victims = self._slot_page[slots]
        victims = victims[victims >= 0]
        self.forget(victims)
        return slots, len(victims)

    def set_resident(self, pages: Array, slots: Array, tick: int) -> None:
        """Record that pages lie in these slots now and were last used at ``tick``."""
        self._slot_page[slots] = pages
        self._slot_tick[slots] = tick
        self.slot_of_page.put(pages, slots)
        self.n_resident += len(pages)
        self._note_completeness()

    def set_mapped(self, pages: Array, addresses: Array, n_bytes: Array) -> None:
        """Record that absent pages lie in mapped files, at these memory addresses; see `bytes_of_page`."""
        self.bytes_of_page.put(pages, n_bytes)
        self.slot_of_page.put(pages, -addresses)
        self.n_mapped += len(pages)
        self._note_completeness()

    def forget(self, pages: Array) -> None:
        """Make pages absent and their slots empty."""
        slots = self.slot_of_page.host[pages]
        resident, present = slots >= 0, slots != _ABSENT
        self._slot_page[slots[resident]] = _ABSENT
        self._slot_tick[slots[resident]] = 0
        self.slot_of_page.put(pages[present], np.full(int(present.sum()), _ABSENT))
        self.n_resident -= int(resident.sum())
        self.n_mapped -= int(present.sum()) - int(resident.sum())
        self._note_completeness()

    def forget_mapped(self, pages: Array) -> None:
        """Make those of the pages absent that lie in mapped files."""
        self.forget(pages[self.slot_of_page.host[pages] < _ABSENT])

    def touch(self, pages: Array, tick: int) -> None:
        """Record that those pages which are resident are used at ``tick``."""
        slots = self.slot_of_page.host[pages]
        slots = slots[slots >= 0]
        self._slot_tick[slots] = np.maximum(self._slot_tick[slots], tick)

    def pin(self, pages: Array) -> None:
        """Keep resident pages until `unpin`."""
        self._slot_tick[self.slot_of_page.host[pages]] = PINNED
        self.n_pinned = int((self._slot_tick == PINNED).sum())

    def unpin(self, tick: int) -> None:
        """Release all pinned pages except those of live rows, as if they were last used at ``tick``."""
        pinned = self._slot_tick == PINNED
        self._slot_tick[pinned & (self._slot_page >= self.n_live_pages)] = tick
        self.n_pinned = int((self._slot_tick == PINNED).sum())

    def count_pinned(self, pages: Array) -> int:
        """Count how many of these pages are pinned."""
        slots = self.slot_of_page.host[pages]
        return int((self._slot_tick[slots[slots >= 0]] == PINNED).sum())

    # ---- looking up

    def slots(self, pages: Array) -> Array:
        """Return the slot of each page; a negative number if it does not lie in a slot."""
        slots: Array = self.slot_of_page.host[pages]
        return slots

    def missing(self, pages: Array) -> Array:
        """Return those of the pages that lie nowhere."""
        found: Array = pages[self.are_absent(pages)]
        return found

    def are_absent(self, pages: Array) -> Array:
        """Return which of the pages lie nowhere, as a mask."""
        absent: Array = self.slot_of_page.host[pages] == _ABSENT
        return absent

    def mappable(self, pages: Array) -> Array:
        """Return which of the pages can be mapped, as a mask."""
        source, _ = self.locate(pages)
        can_map: Array = self.can_map[source]
        return can_map

    def absent_pages(self, n_most: int) -> Array:
        """Return at most ``n_most`` pages that hold rows and are not resident."""
        found: list[Array] = []
        for source, (n_rows, n_evicted) in enumerate(zip(self._n_rows, self._first_used, strict=True)):
            first = self.first_page(source)
            used = np.arange(first + n_evicted, first + max(n_evicted, self._count_pages(n_rows)))
            found.append(self.missing(used)[:n_most])
        return np.concatenate(found)[:n_most]

    def locate(self, pages: Array) -> tuple[Array, Array]:
        """Return the source of each page, and its number within the source."""
        starts = self.first_virtual_row.host // self.page_rows
        order = np.argsort(starts, kind="stable")
        order = order[np.array(self._capacity)[order] > 0]  # a source without pages has the start of another one
        source = order[np.searchsorted(starts[order], pages, side="right") - 1]
        return source, pages - starts[source]

    def virtual_rows(self, source: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        """Return the virtual rows of rows of sources, on the device."""
        return row + self.first_virtual_row.device[source]

    def arena_rows(self, virtual: torch.Tensor) -> torch.Tensor:
        """Return the arena rows of virtual rows in resident pages, on the device."""
        if self.is_direct:
            return virtual
        page = virtual.div(self.page_rows, rounding_mode="floor")
        return torch.add(virtual, self.slot_of_page.device[page] - page, alpha=self.page_rows)

    def distinct_pages(self, source: torch.Tensor, row: torch.Tensor, tick: int) -> Array:
        """Return the pages of rows, each once. On a GPU the host waits for the device here.

        The compiled loop leaves out pages that an earlier call with the same tick returned.
        """
        if self._kernels is None:
            pages: Array = np.unique(self.virtual_rows(source, row).cpu().numpy() // self.page_rows)
            return pages
        if len(self._last_tick) < self.n_pages:
            self._last_tick = np.zeros(self.n_pages + self.n_pages // 8, np.int64)
        sources, rows = as_matrices(source, row)
        found = np.empty(min(rows.size, self.n_pages), np.int64)
        n = self._kernels.distinct_pages(
            sources, rows, self.first_virtual_row.host, self.page_rows, self._last_tick, tick, found
        )
        return found[:n]
