"""What is kept for every step in memory, at addresses that do not depend on where the steps are stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from trajstore.cache.growable_array import GrowableArray
from trajstore.format.spans import expand_counts, expand_ranges
from trajstore.sampling.episode_index import LIVE, OPEN, EpisodeIndex
from trajstore.sampling.episode_numbers import EpisodeNumberMap
from trajstore.schema import Array

EVICTED, PAST_END, UNKNOWN = -1, -2, -3  # what stands for the address of a step that is not here; as in kernels
_HOMELESS = -(1 << 62)
_MIN_ROOM = 16  # steps that an open episode gets room for at least
_SLACK = 1 << 16  # addresses in no use that are not worth giving back
_MAX_LOG = 1024
_CPU = torch.device("cpu")


class AddressChange(NamedTuple):
    """Steps that have another address now, or none any more."""

    old: Array
    new: Array | None


class _Places(NamedTuple):
    """Of episodes: the address that step 0 has or would have, and the t up to which there is room and a value."""

    home: Array
    limit: Array
    known: Array


@dataclass(slots=True)
class StepColumn:
    """Values by address, of steps that have one; others have zeros."""

    values: torch.Tensor
    initial: Callable[[], Any]  # of new steps
    dirty: Array  # by address: set since it was last saved

    def grow(self, n: int) -> None:
        grown = self.values.new_zeros((n, *self.values.shape[1:]))
        grown[: len(self.values)] = self.values
        dirty = np.zeros(n, bool)
        dirty[: len(self.dirty)] = self.dirty
        self.values, self.dirty = grown, dirty


class StepTable:
    """Columns with a value for every step in the index, at an address: the home of its episode plus t.

    Episodes get a range of addresses when they are first seen, one after the other. An open one gets room to grow
    and moves to a larger range when it has outgrown it. Draws go by address, so the ranges decide what is drawn.
    They depend on the order in which steps were seen and on nothing else, above all not on when these reach the
    disk.

    Attributes:
        size: Addresses in use, room included.
        layout: Changes when all ranges were laid anew.
        columns: By name.
    """

    def __init__(self, index: EpisodeIndex) -> None:
        self._index = index
        self._device = index.device
        self.size = self.layout = self._room = 0
        self.columns: dict[str, StepColumn] = {}
        self._typical = 0.0  # length of episodes that ended lately
        self._places: list[
            tuple[EpisodeNumberMap, EpisodeNumberMap, EpisodeNumberMap]
        ] = []  # by stream number: home, limit, known
        self._starts = GrowableArray(
            np.int64, _CPU
        )  # of ranges, rising, and whose they are; moved ones are left behind
        self._range_stream = GrowableArray(np.int64, _CPU)
        self._range_episode = GrowableArray(np.int64, _CPU)
        self._seen = (-1, 0)  # generation of the index, and where episodes stopped that had ended
        self._log: list[AddressChange] = []
        self._n_forgotten = 0  # changes that the log does not hold any more

    # ---- following the index

    def follow(self) -> None:
        """Give addresses to steps that are new, and take those of evicted ones away; costs what is new and open."""
        index = self._index
        self._places += [
            (EpisodeNumberMap(_HOMELESS), EpisodeNumberMap(), EpisodeNumberMap())
            for _ in range(len(index.numbers) - len(self._places))
        ]
        self._clear_evicted(index.take_evictions())
        start = max(self._seen[1], index.first) if self._seen[0] == index.generation else index.first
        entry = np.arange(start, index.n)
        stream, episode = index.stream.host[entry].astype(np.int64), index.episode.host[entry]
        base = index.t_base.host[entry]
        stop = base + index.lengths_of(entry)
        is_open = (index.flags.host[entry] & OPEN) != 0
        before = self._get(stream, episode).limit
        places = self._settle(stream, episode, base, stop, is_open)
        self._initialise(places.home, np.maximum(places.known, base), stop)
        self._put(stream, episode, _Places(places.home, np.where(is_open, places.limit, stop), stop))
        self._learn_length((stop - base)[~is_open & (before != stop)])  # each once, when it has ended
        self._seen = index.generation, index.n_closed
        if self.size > 3 * index.n_steps + _SLACK:
            self._compact()

    def _settle(self, stream: Array, episode: Array, base: Array, stop: Array, is_open: Array) -> _Places:
        """Where episodes lie, after those without room for their steps got some."""
        places = self._get(stream, episode)
        outgrown = stop > np.where(places.home == _HOMELESS, -1, places.limit)
        last = np.flatnonzero(outgrown & (places.home + places.limit == self.size))
        room = np.where(is_open, np.maximum(2 * (stop - base), self._first_room), stop - base)
        if len(last):  # it goes on where the addresses end, so it need not move
            places.limit[last] = (base + room)[last]
            self._extend(int((places.home + places.limit)[last[0]]))
            outgrown[last] = False
        if outgrown.any():
            where = np.flatnonzero(outgrown)
            new_home = self._allot(stream[where], episode[where], room[where]) - base[where]
            moved = where[places.home[where] != _HOMELESS]
            homes = places.home.copy()
            homes[where] = new_home
            self._move(places.home[moved], homes[moved], base[moved], places.known[moved])
            places.home[where], places.limit[where] = new_home, (base + room)[where]
        return places

    @property
    def _first_room(self) -> int:
        return max(_MIN_ROOM, int(1.25 * self._typical))

    def _learn_length(self, lengths: Array) -> None:
        if len(lengths):
            self._typical += (float(lengths.mean()) - self._typical) * min(1.0, len(lengths) / 16)

    def _get(self, stream: Array, episode: Array) -> _Places:
        found = _Places(*(np.empty(len(stream), np.int64) for _ in range(3)))
        for number in _distinct(stream):
            mine = stream == number
            for values, table in zip(found, self._places[number], strict=True):
                values[mine] = table.get(episode[mine])
        return found

    def _put(self, stream: Array, episode: Array, places: _Places) -> None:
        for number in _distinct(stream):
            mine = stream == number
            for values, table in zip(places, self._places[number], strict=True):
                table.put(episode[mine], values[mine])

    def _homes(self, stream: Array, episode: Array) -> Array:
        home = np.empty(len(stream), np.int64)
        for number in _distinct(stream):
            mine = stream == number
            home[mine] = self._places[number][0].get(episode[mine])
        return home

    def _allot(self, stream: Array, episode: Array, room: Array) -> Array:
        """New ranges at the end; returns where they start."""
        start: Array = self.size + np.cumsum(room) - room
        n = self._starts.n
        self._starts.rewrite(n, start)
        self._range_stream.rewrite(n, stream)
        self._range_episode.rewrite(n, episode)
        self._extend(self.size + int(room.sum()))
        return start

    def _extend(self, size: int) -> None:
        if size > self._room:
            self._room = size + size // 8
            for column in self.columns.values():
                column.grow(self._room)
        self.size = size

    def attach(
        self,
        name: str,
        dtype: torch.dtype,
        shape: tuple[int, ...] = (),
        initial: Callable[[], Any] = lambda: 0,
        fill: Any = None,
    ) -> StepColumn:
        """Keep one more value for every step; those that are there get ``fill``, or the initial one."""
        empty = torch.zeros((self._room, *shape), dtype=dtype, device=self._device)
        column = self.columns[name] = StepColumn(empty, initial, np.zeros(self._room, bool))
        index = self._index
        index.follows_evictions = True
        if self._seen[0] >= 0:
            owner, position = expand_counts(index.lengths(index.first, index.n))
            address = self.addresses(index.first + owner, position)
            value = initial() if fill is None else fill
            column.values[self._on_device(address)] = torch.as_tensor(value, dtype=dtype, device=self._device)
            column.dirty[address] = True
        return column

    def _move(self, old: Array, new: Array, start: Array, stop: Array) -> None:
        """Take what is kept of steps from one home to another."""
        owner, t = expand_ranges(start, stop)
        if len(t):
            source, target = old[owner] + t, new[owner] + t
            from_, to = self._on_device(source), self._on_device(target)
            for column in self.columns.values():
                column.values[to] = column.values[from_]
                column.values[from_] = 0
                column.dirty[target], column.dirty[source] = column.dirty[source], False
            self._note(AddressChange(source, target))

    def _initialise(self, home: Array, start: Array, stop: Array) -> None:
        owner, t = expand_ranges(start, stop)
        address = home[owner] + t
        if not len(address):
            return
        is_one = len(address) == address[-1] - address[0] + 1 and bool((np.diff(address) == 1).all())
        where = slice(int(address[0]), int(address[-1]) + 1) if is_one else self._on_device(address)
        for column in self.columns.values():
            column.values[where] = column.initial()
            column.dirty[address] = True

    def _clear_evicted(self, evicted: Array) -> None:
        if not len(evicted):
            return
        home, _, known = self._get(evicted[:, 0], evicted[:, 1])
        stop = np.where(home == _HOMELESS, 0, np.minimum(evicted[:, 3], known))
        owner, t = expand_ranges(evicted[:, 2], stop)
        self._clear(home[owner] + t)

    def _clear(self, address: Array) -> None:
        if len(address):
            self._blank(address)
            self._note(AddressChange(address, None))

    def _blank(self, address: Array) -> None:
        where = self._on_device(address)
        for column in self.columns.values():
            column.values[where] = 0
            column.dirty[address] = False

    def _note(self, change: AddressChange) -> None:
        self._log.append(change)
        if len(self._log) > _MAX_LOG:
            self._n_forgotten += len(self._log) // 2
            self._log = self._log[len(self._log) // 2 :]

    def changes_since(self, n: int) -> list[AddressChange] | None:
        """What has moved or gone after the first ``n`` changes; None if that is not known any more."""
        return self._log[n - self._n_forgotten :] if n >= self._n_forgotten else None

    @property
    def n_changes(self) -> int:
        return self._n_forgotten + len(self._log)

    def forget_episode(self, stream: int, episode: int, start: int, stop: int) -> Array:
        """Take away what is kept of some steps of an episode that is not in the index any more.

        It may have lost its first steps and moved since these were noted: only what lies in its own range is its.
        """
        home, limit, _ = (int(value[0]) for value in self._get(np.array([stream]), np.array([episode])))
        if home == _HOMELESS:
            return np.empty(0, np.int64)
        first = self._starts.host[np.searchsorted(self._starts.host, home + limit - 1, side="right") - 1]
        address = np.arange(max(home + start, int(first)), home + min(stop, limit))
        self._blank(address)
        return address

    def _compact(self) -> None:
        """Lay all ranges anew, in the same order and without what lies unused between them."""
        index = self._index
        entry = np.arange(index.first, index.n)
        stream, episode = index.stream.host[entry].astype(np.int64), index.episode.host[entry]
        base, n = index.t_base.host[entry], index.lengths_of(entry)
        places = self._get(stream, episode)
        order = np.argsort(places.home + base, kind="stable")
        entry, stream, episode, base, n = (a[order] for a in (entry, stream, episode, base, n))
        places = _Places(*(a[order] for a in places))
        is_open = (index.flags.host[entry] & OPEN) != 0
        room = np.where(is_open, np.maximum(places.limit - base, n), n)
        owner, k = expand_counts(n)
        old = (places.home + base)[owner] + k
        kept = [(c.values[self._on_device(old)], c.dirty[old]) for c in self.columns.values()]
        self._starts.rewrite(0, self._starts.host[:0])
        self._range_stream.rewrite(0, self._range_stream.host[:0])
        self._range_episode.rewrite(0, self._range_episode.host[:0])
        self._empty()
        start = self._allot(stream, episode, room)
        new = start[owner] + k
        for column, (values, dirty) in zip(self.columns.values(), kept, strict=True):
            column.values[self._on_device(new)] = values
            column.dirty[new] = dirty
        for number, tables in enumerate(self._places):
            for table in tables:
                table.keep(episode[stream == number])
        self._put(stream, episode, _Places(start - base, base + room, base + n))
        self.layout += 1

    def _empty(self) -> None:
        self.size = self._room = 0
        for column in self.columns.values():
            column.values, column.dirty = column.values[:0], column.dirty[:0]

    # ---- addresses

    def addresses(self, entry: Array, position: Array) -> Array:
        """Addresses of steps at positions of index entries, elementwise."""
        index = self._index
        home = self._homes(index.stream.host[entry], index.episode.host[entry])
        found: Array = home + index.t_base.host[entry] + position
        return found

    def addresses_of(self, handles: Array) -> Array:
        """Addresses of steps by handle; `EVICTED`, `PAST_END` or `UNKNOWN` for those that are not here."""
        index = self._index
        known = (handles[:, 0] >= 0) & (handles[:, 0] < len(self._places))
        address = np.full(len(handles), UNKNOWN)
        for stream in _distinct(handles[:, 0]):
            if not 0 <= stream < len(self._places):
                continue
            entries, home = index.entries_of(stream), self._places[stream][0]
            table, homes = entries.table, home.table
            if table is not None and homes is not None and index.kernels is not None:
                facts = index.logical.host, index.flags.host, index.t_base.host
                known_to = entries.base, int(index.newest[stream])
                index.kernels.addresses_of(handles, stream, table, *known_to, *facts, homes, home.base, address)
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
        """Index entries and positions of the steps at addresses; entry -1 where the step is not here any more."""
        at = np.searchsorted(self._starts.host, address, side="right") - 1
        stream, episode = self._range_stream.host[at], self._range_episode.host[at]
        entry = self._index.find(stream, episode)
        position: Array = address - self._homes(stream, episode) - self._index.t_base.host[entry]
        return entry, position

    # ---- values

    def _on_device(self, address: Array) -> torch.Tensor:
        return torch.from_numpy(address).to(self._device)

    def set(self, name: str, address: Array, values: Array) -> None:
        """Overwrite values; of several at one address the last counts. The caller has checked them."""
        column = self.columns[name]
        if self._device.type == "cpu":
            column.values.numpy()[address] = values
        else:  # where an index comes twice, a device may take either
            address, last = np.unique(address[::-1], return_index=True)
            values = values[::-1][last]
            column.values[self._on_device(address)] = torch.from_numpy(values).to(self._device)
        column.dirty[address] = True

    def get(self, name: str, address: Array) -> Array:
        """Values at addresses, on the host."""
        values = self.columns[name].values
        if self._device.type == "cpu":
            found: Array = values.numpy()[address]
            return found
        return values[self._on_device(address)].cpu().numpy()

    def all_steps(self) -> Array:
        """Addresses of all steps in the index, in its order."""
        index = self._index
        owner, position = expand_counts(index.lengths(index.first, index.n))
        return self.addresses(index.first + owner, position)

    @property
    def nbytes(self) -> int:
        tables = sum(table.nbytes for places in self._places for table in places)
        arrays = self._starts, self._range_stream, self._range_episode
        columns = sum(column.values.nbytes + column.dirty.nbytes for column in self.columns.values())
        return columns + tables + sum(array.nbytes for array in arrays)

    # ---- as they are stored: by row of a stream

    def rows_of(self, source: int) -> tuple[Array, Array]:
        """Rows of a source that hold steps of the index, and the addresses of these; looks at all spans."""
        index = self._index
        logical = index.span_logical.host
        spans = np.flatnonzero((index.span_source.host == source) & (logical >= index.logical.host[index.first]))
        n = np.diff(np.append(logical, index.n_rows))[spans]
        owner = np.searchsorted(index.logical.host[: index.n + 1], logical[spans], side="right") - 1
        first = logical[spans] - index.logical.host[owner]
        of_span, k = expand_counts(n)
        entry, position = owner[of_span], first[of_span] + k
        is_step = position < index.lengths_of(entry)
        rows = (index.span_row.host[spans][of_span] + k)[is_step]
        return rows, self.addresses(entry[is_step], position[is_step])

    def load(self, name: str, stored: Mapping[int, tuple[int, Array]]) -> None:
        """Take over stored values: by source, the first row and the values from there on."""
        for source, (first, values) in stored.items():
            rows, address = self.rows_of(source)
            here = (rows >= first) & (rows < first + len(values))
            found = torch.from_numpy(values[rows[here] - first]).to(self._device)
            self.columns[name].values[self._on_device(address[here])] = found

    def take_changes(self, name: str) -> dict[int, tuple[Array, Array]]:
        """Rows whose value was set since this was last asked, by source and in order, and their addresses.

        Steps that are in no stream yet are told of when they are.
        """
        dirty = self.columns[name].dirty
        address = np.flatnonzero(dirty[: self.size])
        entry, position = self.steps(address)
        here = entry >= 0
        address, entry, position = address[here], entry[here], position[here]
        if not len(entry):
            return {}
        at = self._index.rows(*(torch.from_numpy(a).to(self._device) for a in (entry, position[:, None])))
        source, row = (a.expand(len(entry), 1)[:, 0].cpu().numpy() for a in (at.source, at.row))
        dirty[address[source != LIVE]] = False
        changed = {}
        for number in np.unique(source[source != LIVE]):
            mine = np.flatnonzero(source == number)
            mine = mine[np.argsort(row[mine], kind="stable")]
            changed[int(number)] = row[mine], address[mine]
        return changed

    def restore_changes(self, name: str, changes: Mapping[int, tuple[Array, Array]]) -> None:
        """Take back what `take_changes` gave: it could not be saved."""
        for _, address in changes.values():
            self.columns[name].dirty[address] = True

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """All values, and where episodes lie: draws go by address."""
        index = self._index
        entry = np.arange(index.first, index.n)
        stream, episode = index.stream.host[entry].astype(np.int64), index.episode.host[entry].copy()
        return {
            "streams": list(index.numbers),
            "stream": stream,
            "episode": episode,
            **self._get(stream, episode)._asdict(),
            "size": self.size,
            "columns": {n: c.values[: self.size].cpu().numpy().copy() for n, c in self.columns.items()},
            "typical": self._typical,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what another table had; the index shows the same episodes, and perhaps more."""
        self.follow()
        numbers = np.array([self._index.numbers.get(name, -1) for name in state["streams"]], np.int64)
        stream, episode = numbers[np.asarray(state["stream"])], np.asarray(state["episode"])
        places = _Places(*(np.asarray(state[name]).copy() for name in _Places._fields))
        entry = self._index.find(stream, episode)
        here = entry >= 0
        start = (places.home + np.where(here, self._index.t_base.host[entry], 0))[here]
        order = np.argsort(start, kind="stable")
        for array, values in (
            (self._starts, start[order]),
            (self._range_stream, stream[here][order]),
            (self._range_episode, episode[here][order]),
        ):
            array.rewrite(0, values)
        for tables in self._places:
            for table in tables:
                table.clear()
        self._put(stream[here], episode[here], _Places(*(a[here] for a in places)))
        self._empty()
        self._extend(int(state["size"]))
        for name, column in self.columns.items():
            if name in state["columns"]:
                values = torch.from_numpy(np.asarray(state["columns"][name]))
                column.values[: self.size] = values.to(self._device)
                column.dirty[: self.size] = True
        self._typical = float(state["typical"])
        self._seen = (-1, 0)
        self.layout += 1
        self.follow()  # what the state does not know follows


def _distinct(values: Array) -> list[int]:
    """Each value once; mostly there is but one."""
    if not len(values):
        return []
    first = values[0]
    return [int(first)] if (values == first).all() else [int(v) for v in np.unique(values)]
