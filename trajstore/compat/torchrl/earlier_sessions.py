"""Finds the newest row of every slot among the rows that earlier sessions stored."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from trajstore.compat.torchrl.row_structure import HEADER, Leaves, torch_dtype
from trajstore.format.marks import Marks
from trajstore.schema import Array, Field
from trajstore.store.snapshot import Snapshot
from trajstore.store.stream_reader import StreamReader

_SESSION = re.compile(r"session-(\d+)\Z")
_BLOCK_BYTES = 64 << 20
_BLOCK_ROWS = 1024, 1 << 16  # minimum and maximum, so that chunks of narrow fields are not read many times


class EarlierSessions:
    """The newest row of every slot, over all earlier sessions; the constructor reads the headers of all rows.

    A row's place is its number when the rows of all sessions are counted in order.

    Attributes:
        streams: Number of rows of each session's stream, by stream id, in order of the sessions.
        n_places: Number of all rows, evicted ones included.
        next_session: Number of the next session.
        epoch: How often the storage was emptied; rows of earlier epochs do not count.
        cursor: The slot that a writer wrote last in its turn; -1: none.
        n_slots: Number of slots when the last row was written.
        place: For each slot the place of its newest row; -1: the slot holds no row.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._schema = snapshot.schema
        readers = sorted(snapshot.readers, key=lambda reader: _session_number(reader.record.name))
        self.streams = {reader.record.id: reader.record.rows for reader in readers}
        self.next_session = 1 + max((_session_number(reader.record.name) for reader in readers), default=-1)
        starts = np.cumsum([0, *self.streams.values()]).tolist()
        self.n_places = starts.pop()
        firsts = Marks.wanted(snapshot.streams)
        self._sessions = [
            _SessionRows(r, firsts[r.record.id], start) for r, start in zip(readers, starts, strict=True)
        ]
        headers = [session.header for session in self._sessions if len(session.header)]
        self.epoch = max((int(header[:, 2].max()) for header in headers), default=0)
        self.cursor, self.n_slots = -1, 0
        self.place = np.full(max((int(header[:, 0].max()) + 1 for header in headers), default=0), -1, np.int64)
        for session in self._sessions:
            self._apply(session)
        held = np.flatnonzero(self.place >= 0)
        self.place = self.place[: held[-1] + 1 if len(held) else 0]

    def _apply(self, session: _SessionRows) -> None:
        current = np.flatnonzero(session.header[:, 2] == self.epoch)
        if not len(current):
            return
        self.cursor, self.n_slots = (int(n) for n in session.header[current[-1], [1, 3]])
        current = current[session.header[current, 0] >= 0]  # a row without a slot says that all were emptied
        self.place[session.header[current, 0]] = session.first_place + current  # the last row of a slot counts

    @property
    def is_full(self) -> bool:
        """Whether every slot of a ring held a row, so that the oldest row follows the cursor."""
        return 0 < self.n_slots == len(self.place) and bool((self.place >= 0).all())

    def rows(self, fields: Sequence[str]) -> Iterator[tuple[Array, Leaves]]:
        """Yield slots and some fields of the newest rows, block by block, in order of places."""
        if self._schema is None or not fields:
            return
        specs = {path: self._schema[path] for path in fields}
        n_fit = _BLOCK_BYTES // sum(field.row_bytes for field in specs.values())
        n = min(max(n_fit, _BLOCK_ROWS[0]), _BLOCK_ROWS[1])
        for session in self._sessions:
            for start in range(0, len(session.header), n):
                slots = session.header[start : start + n, 0]
                newest = self._newest(slots, session.first_place + start)
                if len(newest):
                    yield (
                        slots[newest],
                        {p: session.read(p, field, start, len(slots))[newest] for p, field in specs.items()},
                    )

    def _newest(self, slots: Array, first_place: int) -> Array:
        """Return which of consecutive rows are the newest of their slots."""
        known = np.flatnonzero((slots >= 0) & (slots < len(self.place)))
        newest: Array = known[self.place[slots[known]] == first_place + known]
        return newest


class _SessionRows:
    """The remaining rows of one session.

    Attributes:
        first_place: Place of the first remaining row.
        header: Headers of all remaining rows.
    """

    def __init__(self, reader: StreamReader, first: int, start: int) -> None:
        self._reader, self._first = reader, min(first, reader.record.rows)
        self.first_place = start + self._first
        n_rows = reader.record.rows
        self.header = (
            reader.read_rows(f"steps/{HEADER}", self._first, n_rows) if n_rows else np.empty((0, 4), np.int64)
        )

    def read(self, path: str, field: Field, start: int, n: int) -> torch.Tensor:
        values = self._reader.read_rows(f"steps/{path}", self._first + start, self._first + start + n)
        if field.dtype == "bfloat16":  # stored as bits
            return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(values).to(torch_dtype(field))


def _session_number(stream_name: str) -> int:
    found = _SESSION.match(stream_name)
    return int(found[1]) if found is not None else -1
