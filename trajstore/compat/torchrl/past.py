"""What earlier sessions left in the store of a log."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from trajstore.compat.torchrl.layout import HEADER, Leaves, torch_dtype
from trajstore.format.marks import Marks
from trajstore.schema import Array, Field
from trajstore.store.snapshot import Snapshot
from trajstore.store.stream_reader import StreamReader

_SESSION = re.compile(r"session-(\d+)\Z")
_BLOCK_BYTES = 64 << 20
_BLOCK_ROWS = 1024, 1 << 16  # at least and at the most, so that chunks of narrow fields are not read many times


class Past:
    """The newest row of every slot, of all sessions; reads the headers.

    Rows of all sessions are counted through, in order: that is a row's place.

    Attributes:
        streams: Ids and numbers of rows of the sessions' streams, in order.
        n_places: Rows, those that are evicted included.
        session: Number of the session that comes next.
        epoch: How often the storage was emptied; rows from before do not count.
        cursor: The slot that was written last in turn; -1: none.
        n_slots: How many slots there were when the last row was written.
        place: By slot, the place of its newest row; -1: none.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._schema = snapshot.schema
        readers = sorted(snapshot.readers, key=lambda reader: _session(reader.record.name))
        self.streams = {reader.record.id: reader.record.rows for reader in readers}
        self.session = 1 + max((_session(reader.record.name) for reader in readers), default=-1)
        starts = np.cumsum([0, *self.streams.values()]).tolist()
        self.n_places = starts.pop()
        firsts = Marks.live(snapshot.streams)
        self._parts = [_Part(r, firsts[r.record.id], start) for r, start in zip(readers, starts, strict=True)]
        headers = [part.header for part in self._parts if len(part.header)]
        self.epoch = max((int(header[:, 2].max()) for header in headers), default=0)
        self.cursor, self.n_slots = -1, 0
        self.place = np.full(max((int(header[:, 0].max()) + 1 for header in headers), default=0), -1, np.int64)
        for part in self._parts:
            self._recall(part)
        held = np.flatnonzero(self.place >= 0)
        self.place = self.place[: held[-1] + 1 if len(held) else 0]

    def _recall(self, part: _Part) -> None:
        counts = np.flatnonzero(part.header[:, 2] == self.epoch)
        if not len(counts):
            return
        self.cursor, self.n_slots = (int(n) for n in part.header[counts[-1], [1, 3]])
        counts = counts[part.header[counts, 0] >= 0]  # a row of no slot says that all were emptied
        self.place[part.header[counts, 0]] = part.place + counts  # where a slot comes twice, the last one counts

    @property
    def is_full(self) -> bool:
        """Whether every slot of a ring held a row, so that the oldest one is behind the cursor."""
        return 0 < self.n_slots == len(self.place) and bool((self.place >= 0).all())

    def rows(self, fields: Sequence[str]) -> Iterator[tuple[Array, Leaves]]:
        """Slots and values of some fields, a part at a time, in order of places."""
        if self._schema is None or not fields:
            return
        kinds = {path: self._schema[path] for path in fields}
        n_fit = _BLOCK_BYTES // sum(field.row_bytes for field in kinds.values())
        n = min(max(n_fit, _BLOCK_ROWS[0]), _BLOCK_ROWS[1])
        for part in self._parts:
            for start in range(0, len(part.header), n):
                slots = part.header[start : start + n, 0]
                held = self._held(slots, part.place + start)
                if len(held):
                    yield (
                        slots[held],
                        {p: part.read(p, field, start, len(slots))[held] for p, field in kinds.items()},
                    )

    def _held(self, slots: Array, place: int) -> Array:
        """Which of the rows from a place on are the newest of their slots."""
        known = np.flatnonzero((slots >= 0) & (slots < len(self.place)))
        held: Array = known[self.place[slots[known]] == place + known]
        return held


class _Part:
    """The rows of one session that are left.

    Attributes:
        place: Of the first.
        header: Of all of them.
    """

    def __init__(self, reader: StreamReader, first: int, start: int) -> None:
        self._reader, self._first = reader, min(first, reader.record.rows)
        self.place = start + self._first
        n_rows = reader.record.rows
        self.header = (
            reader.read_rows(f"steps/{HEADER}", self._first, n_rows) if n_rows else np.empty((0, 4), np.int64)
        )

    def read(self, path: str, field: Field, start: int, n: int) -> torch.Tensor:
        values = self._reader.read_rows(f"steps/{path}", self._first + start, self._first + start + n)
        if field.dtype == "bfloat16":  # stored as bits
            return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(values).to(torch_dtype(field))


def _session(name: str) -> int:
    found = _SESSION.match(name)
    return int(found[1]) if found is not None else -1
