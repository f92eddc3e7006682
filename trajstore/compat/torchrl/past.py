"""What earlier sessions left in the store of a log."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from trajstore.compat.torchrl.layout import HEADER, Leaves, torch_dtype
from trajstore.schema import Array, flatten
from trajstore.snapshot import Snapshot

_SESSION = re.compile(r"session-(\d+)\Z")


class Past:
    """The newest row of every slot, of all sessions; reads the headers.

    Rows of all sessions are counted through, in order: that is a row's place.

    Attributes:
        streams: Ids and numbers of rows of the sessions' streams, in order.
        n_places: Rows, those that are evicted included.
        epoch: How often the storage was emptied; rows from before do not count.
        cursor: The slot that was written last in turn; -1: none.
        place: By slot, the place of its newest row; -1: none.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        records = sorted(snapshot.streams, key=lambda record: _session(record.name))
        self.streams = {record.id: record.rows for record in records}
        self.n_places = sum(self.streams.values())
        self.session = 1 + max((_session(record.name) for record in records), default=-1)
        self._parts = [(place, i, self._read(i, [HEADER])[HEADER]) for place, i in self._episodes()]
        self.epoch = max((int(header[:, 2].max()) for _, _, header in self._parts), default=0)
        self.cursor = -1
        self.place = np.full(max((int(h[:, 0].max()) + 1 for _, _, h in self._parts), default=0), -1, np.int64)
        for place, _, header in self._parts:
            counts = np.flatnonzero(header[:, 2] == self.epoch)
            self.place[header[counts, 0]] = place + counts  # where a slot comes twice, the last one counts
            self.cursor = int(header[counts[-1], 1]) if len(counts) else self.cursor
        held = np.flatnonzero(self.place >= 0)
        self.place = self.place[: held[-1] + 1 if len(held) else 0]

    def rows(self, fields: Sequence[str]) -> Iterator[tuple[Array, Leaves]]:
        """Slots and values of some fields, a part at a time, in order of places."""
        schema = self._snapshot.schema
        for place, i, header in self._parts if fields else ():
            slots = header[:, 0]
            in_reach = np.flatnonzero(slots < len(self.place))
            held = in_reach[self.place[slots[in_reach]] == place + in_reach]
            if len(held) and schema is not None:
                values = self._read(i, fields)
                yield (
                    slots[held],
                    {p: torch.from_numpy(values[p][held]).to(torch_dtype(schema[p])) for p in fields},
                )

    def _read(self, episode: int, fields: Sequence[str]) -> dict[str, Array]:
        return flatten(self._snapshot.read_episode(episode, fields=fields))

    def _episodes(self) -> list[tuple[int, int]]:
        """The place of the first row that is left of each episode, and its position in the episode table."""
        table = self._snapshot.episodes
        start = dict(zip(self.streams, np.cumsum([0, *self.streams.values()]).tolist(), strict=False))
        streams = table["stream"]
        left = [i for i in range(len(table)) if table.n_rows(i)]
        return sorted((start[streams[i]] + table.spans(i)[0].row_start, i) for i in left)


def _session(name: str) -> int:
    found = _SESSION.match(name)
    return int(found[1]) if found is not None else -1
