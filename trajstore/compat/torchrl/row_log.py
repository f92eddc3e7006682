"""The durable side of a storage: an append-only log of rows, in which the newest row of a slot counts."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from trajstore.compat.torchrl.earlier_sessions import EarlierSessions
from trajstore.compat.torchrl.options import WriterOptionsDict
from trajstore.compat.torchrl.row_structure import HEADER, Leaves, RowStructure, torch_dtype
from trajstore.compat.torchrl.slot_map import GROUP_ROWS, SlotMap
from trajstore.errors import DataError
from trajstore.format.marks import Marks
from trajstore.sampling.reader import Reader
from trajstore.sampling.windows import Windows
from trajstore.schema import Array, flatten, nest
from trajstore.store.garbage_collection import GarbageCollector
from trajstore.store.store import Store

_BLOCK_ROWS = 8192


class _DiscardWriter(Exception):  # noqa: N818 - not an error
    """Raised in the ``with`` block of a writer so that the writer releases everything without a commit."""


class RowLog:
    """Rows by slot in a store: row i of a session is step i % 1024 of episode i // 1024 of its stream.

    A row never changes; writing a slot again appends another row. A new session reads the headers to find the
    newest row of every slot. Rows at the front that no slot holds are evicted. When no slot holds more than half of
    the remaining rows, live rows at the front are appended again. A row is evicted only after its successor is
    durable, so after a crash at any instruction every slot is as some commit left it. Only one process at a time
    may use a log.

    Args:
        store: The store, with the schema of ``structure``.
        structure: The fields of a row.
        n_slots: Number of slots.
        paged: Fields that `read` can read.
        cache_bytes: Bound of the memory for decoded chunks of these fields.
        device: Device of the decoded chunks.
        grace_s: Seconds that evicted rows stay on storage.
        options: Options of the writer.

    Attributes:
        slot_map: Which row each slot holds.
        epoch: How often the storage was emptied.
        cursor: The slot that a writer wrote last in its turn; -1: none.
        oldest: The slot of the oldest row if the ring was full and is larger now; otherwise 0.
        block_rows: Rows that are appended or copied together, at most.

    Raises:
        DataError: The store holds rows for more slots.
    """

    def __init__(
        self,
        store: Store,
        structure: RowStructure,
        n_slots: int,
        *,
        paged: Sequence[str],
        cache_bytes: int,
        device: torch.device,
        grace_s: float,
        options: WriterOptionsDict,
    ) -> None:
        snapshot = store.refresh()
        earlier = EarlierSessions(snapshot)
        if len(earlier.place) > n_slots:
            raise DataError(
                f"max_size: expected at least the {len(earlier.place)} slots that {store.url} holds, got {n_slots}"
            )
        # TorchRL takes the rows of a ring that is not full to be in order of time, which a grown ring breaks.
        has_grown = earlier.is_full and earlier.n_slots < n_slots
        self.oldest = (earlier.cursor + 1) % earlier.n_slots if has_grown else 0
        self.epoch, self.cursor = earlier.epoch, earlier.cursor
        self._earlier, self._earlier_streams, self._n_earlier = earlier, earlier.streams, earlier.n_places
        self.slot_map = SlotMap(n_slots)
        self.slot_map.restore(earlier.place, earlier.n_places)
        self._structure, self._storage = structure, snapshot.storage
        self._freed_front = 0  # the front that the garbage collector knows
        # The next front for the garbage collector, and the own rows that must be durable before. Rows that earlier
        # sessions dropped and did not delete are freed with the first commit.
        self._pending_front: tuple[int, int] | None = (self.slot_map.front, 1) if self.slot_map.front else None
        self._grace_s = grace_s
        dead = [record.id for record in snapshot.streams if not record.is_sealed]
        self._writer = store.writer(f"session-{earlier.next_session}", world=uuid.uuid4().hex, dead=dead, **options)
        self._writer.leave_to_owner()
        # Only the records of the newest session count, so it must repeat which rows are evicted.
        marks = Marks.wanted(snapshot.streams)
        self._writer.set_view(first_rows={stream: row for stream, row in marks.items() if row})
        self._streams = [*earlier.streams, self._writer.stream]
        self._starts = np.cumsum([0, *earlier.streams.values()])
        self._collector = GarbageCollector.of_store(self._storage, self._writer, grace_s=grace_s)
        # Created before the first append, so that it shows rows that are not committed yet.
        self._reader = (
            Reader(snapshot, device=device, cache_bytes=cache_bytes, writer=self._writer, streams=self._streams)
            if paged
            else None
        )
        with self._writer.locked_staging(blocking=True) as staging:
            assert staging is not None  # the store has a schema
            self.block_rows = max(1, min(_BLOCK_ROWS, staging.capacity // 4))

    # ---- rows

    def restored_rows(self, fields: Sequence[str]) -> Iterator[tuple[Array, Leaves]]:
        """Yield slots and some fields of the rows of earlier sessions, block by block. Can be called once."""
        earlier = self._earlier
        del self._earlier  # frees the headers of all rows
        yield from earlier.rows(fields)

    def append(self, slots: Array, rows: Leaves) -> None:
        """Append rows ``[n, ...]`` for slots, each at most once; call `compact` after it."""
        self._collector.raise_pending()
        for start in range(0, len(slots), self.block_rows):
            part = slice(start, start + self.block_rows)
            self._append(slots[part], {path: leaf[part] for path, leaf in rows.items()})

    def compact(self, read: Callable[[Array], Leaves]) -> None:
        """Free rows that no slot holds; ``read`` returns the rows of slots, some of which are appended again."""
        while self.slot_map.is_sparse:
            # Only a part of the log at a time: moving the newest rows is not worth it.
            oldest = self.slot_map.oldest(max(GROUP_ROWS, len(self.slot_map.place) // 16))
            self.append(oldest, read(oldest))
        self._free_front()

    def _append(self, slots: Array, rows: Leaves) -> None:
        header = np.empty((len(slots), 4), np.int64)
        header[:, 0], header[:, 1:] = slots, (self.cursor, self.epoch, len(self.slot_map.place))
        self._write(header, rows)
        self.slot_map.append(slots)

    def _write(self, header: Array, rows: Leaves) -> None:
        first = self.slot_map.n_places - self._n_earlier
        is_last = (first + 1 + np.arange(len(header))) % GROUP_ROWS == 0
        if len(header) == 1:  # a shorter path for the most common case
            step = {path: leaf[0].cpu() for path, leaf in rows.items()} | {HEADER: header[0]}
            self._writer.append(nest(step), env=0, truncated=bool(is_last[0]))
        else:
            data = {path: leaf[:, None].cpu() for path, leaf in rows.items()} | {HEADER: header[:, None]}
            self._writer.append_rollout(nest(data), envs=[0], truncated=is_last[:, None])

    def read(self, field: str, slots: Array) -> torch.Tensor:
        """Return the values of a paged field.

        Raises:
            IndexError: A slot holds no row.
        """
        assert self._reader is not None  # there are paged fields
        with self._reader.assembler.lock:  # no row may be given up between looking it up and reading it
            place = self.slot_map.place[slots]
            if place.min() < 0:
                raise IndexError(f"slot {int(slots[place.argmin()])} holds no row")
            # A stream without rows starts where the next one does; side="right" finds the one with the row.
            stream = np.searchsorted(self._starts, place, side="right") - 1
            row = place - self._starts[stream]
            handles = torch.from_numpy(np.stack([stream, row // GROUP_ROWS, row % GROUP_ROWS], 1))
            found: torch.Tensor = flatten(self._reader.at(handles, Windows(fields=(field,), squeeze=True)))[field]
            return found

    def clear(self) -> None:
        """Drop all rows, with the next commit."""
        if not self.slot_map.n_live:
            return
        # A row without a slot marks the new epoch, so it becomes durable together with the rows around it.
        zeros = {
            path: torch.zeros((1, *f.shape), dtype=torch_dtype(f)) for path, f in self._structure.fields.items()
        }
        self._write(np.array([[-1, -1, self.epoch + 1, len(self.slot_map.place)]]), zeros)
        self.epoch, self.cursor = self.epoch + 1, -1
        self.slot_map.append_without_slot()
        self.slot_map.clear()
        self._free_front()

    # ---- eviction

    def _free_front(self) -> None:
        """Let the garbage collector delete unused rows at the front once their successors are durable."""
        if self._pending_front is not None and self._writer.committed_rows >= self._pending_front[1]:
            front, n_durable = self._pending_front
            if self._reader is None or self._mark_reader(self._reader, front, n_durable):
                self._freed_front, self._pending_front = front, None
                self._collector.want(self._marks(front))
        front = self.slot_map.front
        n_needed = max(GROUP_ROWS - 1, (self.slot_map.n_places - self._freed_front) // 64)
        if self._pending_front is None and front - self._freed_front > n_needed:
            self._pending_front = front, self.slot_map.n_places - self._n_earlier

    def _mark_reader(self, reader: Reader, front: int, n_durable: int) -> bool:
        """Set the reader's marks before rows are deleted: its cache also loads pages that no batch asked for.

        Returns False if the reader does not know all durable rows of this session yet, because the cache must not
        receive rows below a mark later. The next call tries again.
        """
        with reader.assembler.lock:
            reader.assembler.publish(may_commit=False)
            if reader.assembler.n_placed < n_durable:
                return False
            reader.assembler.set_marks(self._marks(front))
            return True

    def _marks(self, front: int) -> dict[str, int]:
        """Return the first row of each stream that is still wanted, if places below ``front`` are not."""
        own = max(0, front - self._n_earlier)
        streams = zip(self._earlier_streams.items(), self._starts.tolist(), strict=False)
        marks = {stream: min(max(0, front - start), rows) for (stream, rows), start in streams}
        return {stream: row for stream, row in {**marks, self._writer.stream: own}.items() if row}

    # ---- durability

    def flush(self) -> None:
        """Make all rows durable."""
        self._collector.raise_pending()
        self._writer.commit()
        self._free_front()

    def close(self) -> None:
        """Make all rows durable and release everything. A second call does nothing."""
        if self._writer.is_closed:
            return
        self._writer.commit()
        has_rows = self.slot_map.n_places > self._n_earlier  # without own rows, no commit record holds the marks
        if has_rows and not self._grace_s:  # otherwise a later session deletes the rows
            self._collector.want(self._marks(self.slot_map.front))
            self._collector.flush()
        self._collector.close()
        if has_rows:
            marks = self._marks(self.slot_map.front)
            own = marks.pop(self._writer.stream, None)
            published = self._writer.first_rows
            marks = {stream: max(row, published.get(stream, 0)) for stream, row in marks.items()}
            self._writer.set_view(first_row=own, first_rows=marks)
        self._writer.close()

    def discard(self) -> None:
        """Drop rows that are not durable and release everything, even if the storage fails."""
        with contextlib.suppress(Exception):
            self._collector.close()
        with contextlib.suppress(_DiscardWriter), self._writer:
            raise _DiscardWriter

    def stats(self) -> dict[str, Any]:
        """Return the number of rows in the log and of slots with a row, and figures of commits and deletions."""
        rows = {"n_rows": self.slot_map.n_places - self.slot_map.front, "n_live": self.slot_map.n_live}
        return {**rows, "writer": self._writer.stats(), "storage": self._collector.stats()}
