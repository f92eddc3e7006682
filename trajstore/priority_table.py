"""Raw priorities, one a row of every stream, and where each row belongs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from trajstore.errors import CorruptionError
from trajstore.growing import Growing
from trajstore.index import EpisodeIndex
from trajstore.schema import Array
from trajstore.snapshot import Snapshot
from trajstore.spans import ranges

EVICTED, PAST_END, UNKNOWN = -1, -2, -3  # what stands for the address of a step that is not here; as in kernels
_MIN_ROOM = 1024
_MAX_CHANGED = 1 << 20


class PriorityTable:
    """A float32 for every row, at an address: rows of all sources, counted through.

    Every source has a range with room to grow; one that outgrows it moves to the end. Values are raw priorities as
    they were given; rows that got none have the initial one.

    Attributes:
        values: By address.
        size: Addresses in use, unused room included.
        largest: The largest priority so far.
        layout: Changes when ranges moved.
    """

    def __init__(self, index: EpisodeIndex, initial: float | None) -> None:
        self._index = index
        self.initial = initial  # of new rows; None: the largest so far
        self._device = index.device
        self.values = torch.zeros(0, dtype=torch.float32, device=self._device)
        self.size = self.layout = 0
        self.largest = 1.0 if initial is None else initial
        self._base = np.empty(0, np.int64)  # by source
        self._room = np.empty(0, np.int64)
        self.n_rows = np.empty(0, np.int64)
        self._span_rows: dict[int, Growing] = {}  # by source: first rows of its spans, which rise
        self._parts: Sequence[Array] = ()  # by source: its spans
        self._streams = np.empty(0, np.int64)  # by source: the number of the stream that handles name
        self._changed: list[Array] = []  # addresses whose value was set
        self._n_changed = 0
        self._dirty: list[tuple[int, Array]] = []  # sources and rows whose value was set

    def follow(self, snapshot: Snapshot) -> None:
        """Make room for the rows of a newer snapshot; new ones get the initial priority."""
        number = self._index.numbers
        names = [record.id for record in snapshot.streams]
        rows = np.zeros(len(number) + 1, np.int64)
        rows[[number[name] + 1 for name in names]] = [record.rows for record in snapshot.streams]
        self._grow(rows)
        parts: list[Array] = [np.empty((0, 9), np.int64)] * len(rows)
        streams = np.full(len(rows), -1)
        logical = snapshot.names
        for name, part in zip(names, snapshot.parts(), strict=True):
            source = number[name] + 1
            parts[source], streams[source] = part.spans.ints, number[logical[part.stream]]
            known = self._span_rows.setdefault(source, Growing(np.int64, torch.device("cpu")))
            known.rewrite(known.n, part.spans.ints[known.n :, 3])
        self._parts, self._streams = parts, streams

    def _grow(self, rows: Array) -> None:
        more = len(rows) - len(self._base)
        if more:
            self._base = np.append(self._base, np.full(more, self.size))
            self._room, self.n_rows = (
                np.append(self._room, np.zeros(more, int)),
                np.append(self.n_rows, np.zeros(more, int)),
            )
        for source in np.flatnonzero(rows > self._room):
            self._make_room(int(source), int(rows[source]))
        for source in np.flatnonzero(rows > self.n_rows):
            start, stop = self._base[source] + self.n_rows[source], self._base[source] + rows[source]
            self.values[start:stop] = self.largest if self.initial is None else self.initial
            self._dirty.append((int(source), np.arange(self.n_rows[source], rows[source])))
            self.n_rows[source] = rows[source]

    def _make_room(self, source: int, n: int) -> None:
        room, base, old = max(n + n // 4, _MIN_ROOM), int(self._base[source]), int(self._room[source])
        if base + old == self.size:
            self._extend(base + room)
        else:
            start = self.size
            self._extend(start + room)
            n_old = int(self.n_rows[source])
            self.values[start : start + n_old] = self.values[base : base + n_old]
            self._settle_changes()
            self._base[source] = start
            self.layout += 1
        self._room[source] = room

    def _extend(self, size: int) -> None:
        if size > len(self.values):
            grown = torch.zeros(size + size // 8, dtype=torch.float32, device=self._device)
            grown[: self.size] = self.values[: self.size]
            self.values = grown
        self.size = size

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + sum(known.nbytes for known in self._span_rows.values())

    def addresses(self, entry: Array, position: Array) -> Array:
        """Addresses of steps at positions of index entries, elementwise."""
        index = self._index
        logical = index.logical.host[entry] + position
        span = entry if index.is_simple else np.searchsorted(index.span_logical.host, logical, side="right") - 1
        row = index.span_row.host[span] + (logical - index.span_logical.host[span])
        found: Array = self._base[index.span_source.host[span]] + row
        return found

    def range_of(self, source: int, start: int, stop: int) -> tuple[int, int]:
        """Addresses of a source's rows."""
        base = int(self._base[source])
        return base + start, base + stop

    def addresses_of(self, handles: Array) -> Array:
        """Addresses of steps by handle; `EVICTED`, `PAST_END` or `UNKNOWN` for those that are not here."""
        index = self._index
        known = (handles[:, 0] >= 0) & (handles[:, 0] < len(index.numbers))
        address = np.full(len(handles), UNKNOWN)
        for stream in _distinct(handles[:, 0]):
            table = index.table_of(stream) if 0 <= stream < len(index.numbers) else None
            if table is not None and index.kernels is not None:
                facts = index.logical.host, index.flags.host, index.t_base.host
                spans = index.span_logical.host, index.span_row.host, index.span_source.host, index.is_simple
                newest = int(index.newest[stream])
                index.kernels.addresses_of(handles, stream, table, newest, *facts, *spans, self._base, address)
                known &= handles[:, 0] != stream
        if known.any():
            address[known] = self._look_up(handles[known])
        return address

    def _look_up(self, handles: Array) -> Array:
        index = self._index
        stream, episode, t = handles.T
        entry = index.find(stream, episode)
        here = entry >= 0
        address = np.where((episode < 0) | (episode > index.newest[stream]) | (t < 0), UNKNOWN, EVICTED)
        if here.any():
            e, position = entry[here], t[here] - index.t_base.host[entry[here]]
            n = index.lengths_of(e)
            found = self.addresses(e, position.clip(0, n - 1))
            found = np.where(position < 0, EVICTED, np.where(position >= n, PAST_END, found))
            address[here] = np.where(t[here] < 0, UNKNOWN, found)
        return address

    def steps(self, address: Array) -> tuple[Array, Array]:
        """Index entries and positions of the steps at addresses; these must be of steps in the index."""
        entry, position = np.full(len(address), -1), np.empty(len(address), np.int64)
        for source in np.flatnonzero(self.n_rows).tolist():
            stream = int(self._streams[source])
            low = int(self._base[source])
            span_rows, spans = self._span_rows[source].host, self._parts[source]
            table = self._index.table_of(stream)
            if self._index.kernels is not None and table is not None:
                bounds = low, low + int(self.n_rows[source])
                facts = span_rows, spans, table, self._index.t_base.host
                self._index.kernels.steps_at(address, *bounds, *facts, entry, position)
                continue
            chosen = (address >= low) & (address < low + self.n_rows[source])
            row = address[chosen] - low
            span = np.searchsorted(span_rows, row, side="right") - 1
            found = self._index.find(np.full(len(row), stream), spans[span, 0])
            entry[chosen] = found
            position[chosen] = spans[span, 2] + row - spans[span, 3] - self._index.t_base.host[found]
        return entry, position

    def set(self, address: Array, values: Array) -> None:
        """Overwrite priorities; of several at one address the last counts. The caller has checked them."""
        if self._device.type == "cpu":
            self.values.numpy()[address] = values
        else:  # where an index comes twice, a device may take either
            address, last = np.unique(address[::-1], return_index=True)
            values = values[::-1][last]
            self.values[torch.from_numpy(address).to(self._device)] = torch.from_numpy(values).to(self._device)
        self._changed.append(address)
        self._n_changed += len(address)
        if self._n_changed > _MAX_CHANGED:  # nobody saves them, or seldom: each row counts once
            self._dirty = list(self.take_changes().items())
        if len(values):
            self.largest = max(self.largest, float(values.max()))

    def _settle_changes(self) -> None:
        """Turn changed addresses into rows, before ranges move or when asked for."""
        address = np.unique(np.concatenate(self._changed)) if self._changed else np.empty(0, np.int64)
        self._changed, self._n_changed = [], 0
        for source in np.flatnonzero(self.n_rows) if len(address) else ():
            low = int(self._base[source])
            chosen = address[np.searchsorted(address, low) : np.searchsorted(address, low + self.n_rows[source])]
            if len(chosen):
                self._dirty.append((int(source), chosen - low))

    def get(self, address: Array) -> Array:
        """Priorities at addresses, on the host."""
        if self._device.type == "cpu":
            found: Array = self.values.numpy()[address]
            return found
        return self.values[torch.from_numpy(address).to(self._device)].cpu().numpy()

    def maximum(self) -> float:
        """The largest priority there is; looks at all of them."""
        return float(self.values[: self.size].max()) if self.size else self.largest

    def of_steps(self) -> torch.Tensor:
        """Priorities of all steps in the index."""
        index = self._index
        owner, position = ranges(index.lengths(index.first, index.n))
        address = self.addresses(index.first + owner, position)
        return self.values[torch.from_numpy(address).to(self._device)]

    def ranges_of(self, stream: int, episode: int) -> list[tuple[int, int]]:
        """Addresses of an episode's rows, whether it is in the index or not; looks at all spans of its stream."""
        found = []
        for source in np.flatnonzero(self._streams == stream).tolist():
            spans = self._parts[source]
            mine = spans[spans[:, 0] == episode]
            found += [self.range_of(source, start, stop) for start, stop in mine[:, 3:5].tolist()]
        return found

    def check(self, stored: Mapping[str, Array]) -> None:
        """Refuse stored values that are no priorities, and know the largest.

        Raises:
            CorruptionError: Something else stands there.
        """
        for stream, values in stored.items():
            is_good = values.dtype == np.float32 and values.ndim == 1
            if not is_good or not (np.isfinite(values) & (values >= 0)).all():
                raise CorruptionError(
                    f"priorities of stream '{stream}': expected finite float32 of at least 0 a row"
                )
            self.largest = max(self.largest, float(values.max(initial=0.0)))

    def layout_state(self) -> dict[str, tuple[int, int]]:
        """Where the range of each stream begins, and its room: draws go by address."""
        return {name: (int(self._base[n + 1]), int(self._room[n + 1])) for name, n in self._index.numbers.items()}

    def set_layout(self, state: Mapping[str, tuple[int, int]]) -> None:
        """Lay the ranges as another table had them; streams that it did not know follow."""
        self._settle_changes()
        old, base = self.values, self._base.copy()
        known = {
            self._index.numbers[name] + 1: place for name, place in state.items() if name in self._index.numbers
        }
        size = max((start + room for start, room in known.values()), default=0)
        self._room[:] = [known.get(source, (0, int(room)))[1] for source, room in enumerate(self._room)]
        for source in range(len(base)):
            self._base[source] = known[source][0] if source in known else size
            self._room[source] = max(self._room[source], 0 if source in known else self.n_rows[source])
            size += 0 if source in known else int(self._room[source])
        self.values = torch.zeros(size + size // 8, dtype=torch.float32, device=self._device)
        self.size = size
        for source in np.flatnonzero(self.n_rows).tolist():
            n, to, at = int(self.n_rows[source]), int(self._base[source]), int(base[source])
            if n > self._room[source]:
                self._make_room(source, n)
                to = int(self._base[source])
            self.values[to : to + n] = old[at : at + n]
        self.layout += 1

    def restore_changes(self, changes: Mapping[int, Array]) -> None:
        """Take back what `take_changes` gave: it could not be saved."""
        self._dirty += list(changes.items())

    def load(self, rows: Mapping[int, tuple[int, Array]]) -> None:
        """Take over stored values: by source, the first row and the values from there on."""
        for source, (first, values) in rows.items():
            start = int(self._base[source]) + first
            self.values[start : start + len(values)] = torch.from_numpy(values).to(self._device)

    def take_changes(self) -> dict[int, Array]:
        """Rows whose value was set since this was last asked, by source, each once and in order."""
        self._settle_changes()
        changed: dict[int, list[Array]] = {}
        for source, rows in self._dirty:
            changed.setdefault(source, []).append(rows)
        self._dirty = []
        return {source: _once(rows, int(self.n_rows[source])) for source, rows in changed.items()}


def _once(parts: list[Array], n_rows: int) -> Array:
    """Each row once and in order; marks are far faster than sorting where much has changed."""
    rows = np.concatenate(parts)
    if len(rows) < n_rows // 8:
        return np.unique(rows)
    is_changed = np.zeros(n_rows, bool)
    is_changed[rows] = True
    return np.flatnonzero(is_changed)


def _distinct(values: Array) -> list[int]:
    """Each value once; mostly there is but one."""
    if not len(values):
        return []
    first = values[0]
    return [int(first)] if (values == first).all() else [int(v) for v in np.unique(values)]
