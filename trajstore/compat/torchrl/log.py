"""The durable side of a storage: rows in an append-only log, the newest of a slot counts."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from trajstore.compat.torchrl.layout import HEADER, Layout, Leaves, torch_dtype
from trajstore.compat.torchrl.past import Past
from trajstore.compat.torchrl.slots import SET, Slots
from trajstore.errors import DataError
from trajstore.format.commit_record import CommitRecord
from trajstore.format.first_live_rows import first_live_rows
from trajstore.sampling.reader import Reader
from trajstore.sampling.windows import Windows
from trajstore.schema import Array, flatten, nest
from trajstore.store import checkpoints
from trajstore.store.garbage_collection import GarbageCollector
from trajstore.store.snapshot import Snapshot
from trajstore.store.store import Store

_BLOCK_ROWS = 8192


class _Discarded(Exception):  # noqa: N818 - no error
    """Nothing is wrong: what a log holds is not wanted any more."""


class Log:
    """Rows by slot in a store: row i of a session is step i % 1024 of episode i // 1024 of its stream.

    A row is never changed; writing a slot again appends another. A session that begins finds the newest row of
    every slot by reading the headers. What no slot holds any more is evicted from the front; when more than half of
    what is left is of no use, rows at the front are appended again. Nothing is evicted before whatever took its
    place is durable, so a crash at any instruction finds every slot as some commit left it. One process at a time.

    Args:
        store: Where the rows go; has the schema of the layout.
        layout: What a row holds.
        n_slots: How many slots there are.
        paged: Fields that `read` is asked for.
        cache_bytes: Bound of the memory for decoded chunks of these.
        device: Where they are decoded to.
        grace_s: How long evicted rows stay on storage.
        options: Of the writer; ``buffer_bytes`` among them.
    """

    def __init__(
        self,
        store: Store,
        layout: Layout,
        n_slots: int,
        *,
        paged: Sequence[str],
        cache_bytes: int,
        device: torch.device,
        grace_s: float,
        options: Mapping[str, Any],
    ) -> None:
        snapshot = store.refresh()
        past = Past(snapshot)
        if len(past.place) > n_slots:
            raise DataError(
                f"max_size: expected at least the {len(past.place)} slots that {store.url} holds, got {n_slots}"
            )
        # Where the oldest row of a ring is that has become larger: there, rows are taken to be in order of time.
        self.oldest = (past.cursor + 1) % past.n_slots if past.is_full and past.n_slots < n_slots else 0
        self.epoch, self.cursor = past.epoch, past.cursor
        self._past, self._before, self._n_before = past, past.streams, past.n_places
        self.slots = Slots(n_slots)
        self.slots.recall(past.place, past.n_places)
        self._layout, self._storage = layout, snapshot.storage
        self._told = 0  # the front that the sweeper knows
        # A front, and the rows that must be durable before it is told. What earlier sessions gave up and did not
        # free is told with the first commit.
        self._due: tuple[int, int] | None = (self.slots.front, 1) if self.slots.front else None
        self._grace_s = grace_s
        dead = [record.id for record in snapshot.streams if not record.is_sealed]
        self._writer = store.writer(f"session-{past.session}", world=uuid.uuid4().hex, dead=dead, **options)
        # Of all records only those of the newest session count, so it says again what is gone.
        marks = first_live_rows(snapshot.streams)
        self._writer.set_view(first_rows={stream: row for stream, row in marks.items() if row})
        self._streams = [*past.streams, self._writer.stream]
        self._starts = np.cumsum([0, *past.streams.values()])
        self._sweeper = GarbageCollector(
            self._storage, self._writer, grace_s=grace_s, pins=self._pins, records=self._records
        )
        # Made before anything is appended, so that it shows what is not committed yet.
        self._reader = (
            Reader(snapshot, device=device, cache_bytes=cache_bytes, writer=self._writer, streams=self._streams)
            if paged
            else None
        )
        with self._writer.locked_staging(blocking=True) as staging:
            assert staging is not None  # the store has a schema
            self.block_rows = max(1, min(_BLOCK_ROWS, staging.capacity // 4))

    # ---- rows

    def restored(self, fields: Sequence[str]) -> Iterator[tuple[Array, Leaves]]:
        """What earlier sessions left: slots and values of some fields, a part at a time; can be asked once."""
        past = self._past
        del self._past  # the headers of all rows
        yield from past.rows(fields)

    def append(self, slots: Array, rows: Leaves) -> None:
        """Append rows ``[n, ...]`` for slots, each at most once; then `compact`."""
        self._sweeper.raise_pending()
        for start in range(0, len(slots), self.block_rows):
            part = slice(start, start + self.block_rows)
            self._append(slots[part], {path: leaf[part] for path, leaf in rows.items()})

    def compact(self, read: Callable[[Array], Leaves]) -> None:
        """Let go what no slot holds any more; ``read`` gives rows of slots, to be appended again if need be."""
        while self.slots.is_sparse:
            # A part of the log at a time: the newest rows are not worth moving.
            oldest = self.slots.oldest(max(SET, len(self.slots.place) // 16))
            self.append(oldest, read(oldest))
        self._tell_front()

    def _append(self, slots: Array, rows: Leaves) -> None:
        header = np.empty((len(slots), 4), np.int64)
        header[:, 0], header[:, 1:] = slots, (self.cursor, self.epoch, len(self.slots.place))
        self._put(header, rows)
        self.slots.append(slots)

    def _put(self, header: Array, rows: Leaves) -> None:
        first = self.slots.n_places - self._n_before
        is_last = (first + 1 + np.arange(len(header))) % SET == 0
        if len(header) == 1:  # the usual way to add is worth a shorter path
            step = {path: leaf[0].cpu() for path, leaf in rows.items()} | {HEADER: header[0]}
            self._writer.append(nest(step), env=0, truncated=bool(is_last[0]))
        else:
            data = {path: leaf[:, None].cpu() for path, leaf in rows.items()} | {HEADER: header[:, None]}
            self._writer.append_rollout(nest(data), envs=[0], truncated=is_last[:, None])

    def read(self, field: str, slots: Array) -> torch.Tensor:
        """Values of a paged field."""
        assert self._reader is not None  # there are paged fields
        place = self.slots.place[slots]
        if place.min() < 0:
            raise IndexError(f"slot {int(slots[place.argmin()])} holds no row")
        stream = np.searchsorted(self._starts, place, side="right") - 1
        # Of streams without rows, which start where the next one does, the last is meant: that is what right gives.
        row = place - self._starts[stream]
        handles = torch.from_numpy(np.stack([stream, row // SET, row % SET], 1))
        found: torch.Tensor = flatten(self._reader.at(handles, Windows(fields=(field,), squeeze=True)))[field]
        return found

    def clear(self) -> None:
        """Forget all rows, with the next commit."""
        if not self.slots.n_live:
            return
        # A row of no slot says so: it is durable when what comes after it is, and not before what came before.
        nothing = {
            path: torch.zeros((1, *f.shape), dtype=torch_dtype(f)) for path, f in self._layout.fields.items()
        }
        self._put(np.array([[-1, -1, self.epoch + 1, len(self.slots.place)]]), nothing)
        self.epoch, self.cursor = self.epoch + 1, -1
        self.slots.skip()
        self.slots.clear()
        self._tell_front()

    # ---- eviction

    def _tell_front(self) -> None:
        """Let storage go that no slot needs, once what took its place is durable."""
        if self._due is not None and self._writer.committed_rows >= self._due[1]:
            self._told, self._due = self._due[0], None
            self._sweeper.want(self._marks(self._told))
        front = self.slots.front
        if self._due is None and front - self._told > max(SET - 1, (self.slots.n_places - self._told) // 64):
            self._due = front, self.slots.n_places - self._n_before

    def _marks(self, front: int) -> dict[str, int]:
        """By stream, the first row that is wanted, if those before this place are not."""
        own = max(0, front - self._n_before)
        ends = zip(self._before.items(), self._starts.tolist(), strict=False)
        marks = {stream: min(max(0, front - start), rows) for (stream, rows), start in ends}
        return {stream: row for stream, row in {**marks, self._writer.stream: own}.items() if row}

    def _pins(self) -> dict[str, int]:
        return checkpoints.pins(self._storage)

    def _records(self) -> tuple[CommitRecord, ...]:
        return Snapshot.load(self._storage, self._layout.schema).streams

    # ---- durability

    def flush(self) -> None:
        """Make all rows durable."""
        self._sweeper.raise_pending()
        self._writer.commit()
        self._tell_front()

    def close(self) -> None:
        """Make all rows durable and release everything; may be called again."""
        if self._writer.is_closed:
            return
        self._writer.commit()
        has_rows = self.slots.n_places > self._n_before  # else there is no record that could say anything
        if has_rows and not self._grace_s:  # otherwise freeing it is left to a session that lasts longer
            self._sweeper.want(self._marks(self.slots.front))
            self._sweeper.flush()
        self._sweeper.close()
        if has_rows:
            marks = self._marks(self.slots.front)
            own = marks.pop(self._writer.stream, None)
            said = self._writer.first_rows
            marks = {stream: max(row, said.get(stream, 0)) for stream, row in marks.items()}
            self._writer.set_view(first_row=own, first_rows=marks)
        self._writer.close()

    def discard(self) -> None:
        """Give up what is not durable, and release everything, also if the storage fails."""
        with contextlib.suppress(Exception):
            self._sweeper.close()
        with contextlib.suppress(_Discarded), self._writer:
            raise _Discarded  # leaving its block so, the writer releases everything whatever happens

    def stats(self) -> dict[str, Any]:
        """Rows in the log and rows that slots hold; what was deleted."""
        rows = {"n_rows": self.slots.n_places - self.slots.front, "n_live": self.slots.n_live}
        return {**rows, "writer": self._writer.stats(), "storage": self._sweeper.stats()}
