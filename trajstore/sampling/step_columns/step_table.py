"""Values that are kept in memory for every step, at addresses that do not depend on where steps are stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from trajstore.format.spans import expand_counts, expand_ranges
from trajstore.sampling.compiled.selection import compiled_loops
from trajstore.sampling.index.change_log import BoundedLog, Removal
from trajstore.sampling.index.episode_index import EpisodeIndex
from trajstore.sampling.index.index_entries import LIVE, OPEN
from trajstore.sampling.step_columns.address_ranges import HOMELESS, AddressRanges, Places
from trajstore.sampling.step_columns.step_handles import StepHandles
from trajstore.schema import Array

_MIN_ROOM = 16  # least room of an open episode, in steps
_MAX_NEW = 1 << 12  # new steps of open episodes that a compiled loop takes up
_SLACK = 1 << 16  # unused addresses that are not worth compacting
_MAX_CHANGES = 1024  # of addresses, remembered for priority trees
_MAX_CHANGED = 1 << 20  # addresses in these changes


class AddressChange(NamedTuple):
    """Steps that got another address; None as the new one if they were removed."""

    old: Array
    new: Array | None


@dataclass(slots=True)
class StepColumn:
    """Values by address; addresses without a step hold zeros."""

    values: torch.Tensor
    initial: Callable[[], Any]  # gives the value of new steps
    dirty: Array  # by address: whether the value was set since it was last saved

    def grow(self, n: int) -> None:
        grown = self.values.new_zeros((n, *self.values.shape[1:]))
        grown[: len(self.values)] = self.values
        dirty = np.zeros(n, bool)
        dirty[: len(self.dirty)] = self.dirty
        self.values, self.dirty = grown, dirty


class StepTable:
    """Columns with a value for every step of the index, at an address: the home of its episode plus t.

    Episodes get ranges of addresses one after the other, when they are first seen. An open episode gets room to
    grow, and moves to a larger range when it has outgrown its own. Prioritised draws go by address, so ranges
    decide which steps are drawn. They depend on the order in which steps were seen and on nothing else, above all
    not on when steps reach the disk.

    Methods are called with the assembler's lock held.

    Attributes:
        version: Number of changes of addresses so far.
        columns: Columns by name.
        ranges: The addresses of episodes.
        tail: By index entry from `n_closed` on: the number of its range.
    """

    def __init__(self, index: EpisodeIndex) -> None:
        self._index = index
        self._device = index.device
        self.ranges = AddressRanges(index.device)
        self._kernels = compiled_loops(index.device, index.kernels is not None, "step_table_loops")
        self._handles = StepHandles(index, self.ranges, self._kernels)
        self._capacity = 0  # addresses that columns have memory for
        self.version = 0
        self.columns: dict[str, StepColumn] = {}
        self._typical_length = 0.0  # of episodes that ended lately
        self._index_version = -1  # that this table is up to date with
        self._n_closed = 0  # closed entries of the index whose steps have addresses
        self.tail = np.empty(0, np.int64)
        self._new = np.empty(_MAX_NEW, np.int64)
        self._changes: BoundedLog[AddressChange] = BoundedLog(_MAX_CHANGES, _MAX_CHANGED)

    @property
    def n_closed(self) -> int:
        """Number of entries of the index that came before its open episodes when it was last followed."""
        return self._n_closed

    @property
    def size(self) -> int:
        """Number of addresses, room of open episodes included."""
        return self.ranges.size

    # ---- following the index

    def follow(self) -> None:
        """Give addresses to new steps and clear those of evicted ones. Cost grows with new and open steps."""
        if self._index_version == self._index.version:
            return
        removals = self._index.changes.removals_since(self._index_version)
        if removals or removals is None or not self._follow_growth():
            self._follow_all(removals)

    def _follow_growth(self) -> bool:
        """Follow an index whose open episodes got longer, in a compiled loop; returns False if more has changed."""
        index, ranges, tail = self._index, self.ranges, self.tail
        is_same = index.n_closed == self._n_closed and index.n == self._n_closed + len(tail)
        if self._kernels is None or not is_same or len(index.numbers) != ranges.n_streams:
            return False
        entries = index.logical, index.flags, index.stream, index.episode, index.t_base
        places = ranges.stream, ranges.episode, ranges.home, ranges.limit, ranges.known, ranges.entry, ranges.origin
        arrays = [array.host for array in (*entries, *places)]
        n_new = self._kernels.grow(self._n_closed, tail, *arrays, self._new)
        if n_new < 0:
            return False
        if n_new:
            address = self._new[:n_new]
            for column in self.columns.values():
                column.values.numpy()[address] = column.initial()
                column.dirty[address] = True
        self._index_version = index.version
        return True

    def _follow_all(self, removals: Sequence[Removal] | None) -> None:
        index = self._index
        self.ranges.set_streams(len(index.numbers))
        self._clear_evicted(removals or ())
        is_same = removals is not None and not any(removal.is_renumbered for removal in removals)
        entry = np.arange(max(self._n_closed, index.first) if is_same else index.first, index.n)
        stream, episode = index.stream.host[entry].astype(np.int64), index.episode.host[entry]
        base = index.t_base.host[entry]
        stop = base + index.lengths_of(entry)
        is_open = (index.flags.host[entry] & OPEN) != 0
        limit_before = self.ranges.get(stream, episode).limit
        places = self._make_room(stream, episode, base, stop, is_open)
        self._set_initial(places.home, np.maximum(places.known, base), stop)
        number = self.ranges.find(stream, episode)
        self.ranges.set_extents(number, np.where(is_open, places.limit, stop), stop)
        self._learn_length((stop - base)[~is_open & (limit_before != stop)])  # each episode once, when it ended
        if removals is None and self._index_version >= 0:
            self._clear_unused()
        self._follow_entries(entry, removals if is_same else None)
        self._index_version, self._n_closed = index.version, index.n_closed
        if self.size > 3 * index.n_steps + _SLACK:
            self._compact()

    def _follow_entries(self, entry: Array, removals: Sequence[Removal] | None) -> None:
        """Note which range belongs to which index entry.

        Args:
            entry: The entries whose steps may be new; all entries if ``removals`` is None.
            removals: What was removed from the index.
        """
        if removals is None:
            self.ranges.forget_entries()
        else:
            self.ranges.forget_entries(self.tail)  # some episodes may have been aborted
            for removal in removals:
                self.ranges.forget_entries(self.ranges.find(removal.ranges[:, 0], removal.ranges[:, 1]))
            n_rewritten = max((removal.n_rewritten for removal in removals), default=0)
            front = np.arange(self._index.first, min(n_rewritten, self._index.n - len(entry)))
            entry = np.concatenate([front, entry])
        self._set_entries(entry)

    def _set_entries(self, entry: Array) -> None:
        """Set the entries of ranges; the last of them are those of open episodes."""
        index = self._index
        number = self.ranges.find(index.stream.host[entry], index.episode.host[entry])
        self.ranges.set_entries(number, entry, index.t_base.host[entry])
        self.tail = number[len(number) - (index.n - index.n_closed) :]

    def _make_room(self, stream: Array, episode: Array, base: Array, stop: Array, is_open: Array) -> Places:
        """Places of episodes, after those that lack room for their steps got a larger range."""
        places = self.ranges.get(stream, episode)
        outgrown = stop > np.where(places.home == HOMELESS, -1, places.limit)
        last = np.flatnonzero(outgrown & (places.home + places.limit == self.size))
        room = np.where(is_open, np.maximum(2 * (stop - base), self._first_room), stop - base)
        if len(last):  # its range ends where the addresses end, so it grows in place
            places.limit[last] = (base + room)[last]
            self.ranges.size = int((places.home + places.limit)[last[0]])
            self._grow_columns()
            outgrown[last] = False
        if outgrown.any():
            where = np.flatnonzero(outgrown)
            new_home = self.ranges.add(stream[where], episode[where], base[where], room[where])
            self._grow_columns()
            moved = where[places.home[where] != HOMELESS]
            homes = places.home.copy()
            homes[where] = new_home
            self._move(places.home[moved], homes[moved], base[moved], places.known[moved])
            places.home[where], places.limit[where] = new_home, (base + room)[where]
        return places

    @property
    def _first_room(self) -> int:
        return max(_MIN_ROOM, int(1.25 * self._typical_length))

    def _learn_length(self, lengths: Array) -> None:
        if len(lengths):
            self._typical_length += (float(lengths.mean()) - self._typical_length) * min(1.0, len(lengths) / 16)

    def _grow_columns(self) -> None:
        if self.size > self._capacity:
            self._capacity = self.size + self.size // 8
            for column in self.columns.values():
                column.grow(self._capacity)

    def attach(
        self,
        name: str,
        dtype: torch.dtype,
        shape: tuple[int, ...] = (),
        initial: Callable[[], Any] = lambda: 0,
        fill: Any = None,
    ) -> StepColumn:
        """Add a column.

        Args:
            name: Name of the column.
            dtype: Dtype of its values.
            shape: Shape of the value of one step.
            initial: Gives the value of new steps.
            fill: Value of the steps that exist already; None for what ``initial`` gives.
        """
        empty = torch.zeros((self._capacity, *shape), dtype=dtype, device=self._device)
        column = self.columns[name] = StepColumn(empty, initial, np.zeros(self._capacity, bool))
        if self._index_version >= 0:
            address = self.all_steps()
            value = initial() if fill is None else fill
            column.values[self._on_device(address)] = torch.as_tensor(value, dtype=dtype, device=self._device)
            column.dirty[address] = True
        return column

    def _move(self, old: Array, new: Array, start: Array, stop: Array) -> None:
        """Move the values of steps from ``start`` to ``stop`` of episodes from old homes to new ones."""
        owner, t = expand_ranges(start, stop)
        if len(t):
            source, target = old[owner] + t, new[owner] + t
            from_, to = self._on_device(source), self._on_device(target)
            for column in self.columns.values():
                column.values[to] = column.values[from_]
                column.values[from_] = 0
                column.dirty[target], column.dirty[source] = column.dirty[source], False
            self._record(AddressChange(source, target))

    def _set_initial(self, home: Array, start: Array, stop: Array) -> None:
        owner, t = expand_ranges(start, stop)
        address = home[owner] + t
        if not len(address):
            return
        is_one = len(address) == address[-1] - address[0] + 1 and bool((np.diff(address) == 1).all())
        where = slice(int(address[0]), int(address[-1]) + 1) if is_one else self._on_device(address)
        for column in self.columns.values():
            column.values[where] = column.initial()
            column.dirty[address] = True

    def _clear_evicted(self, removals: Sequence[Removal]) -> None:
        evicted = np.concatenate([np.empty((0, 4), np.int64), *(removal.ranges for removal in removals)])
        if not len(evicted):
            return
        home, _, known = self.ranges.get(evicted[:, 0], evicted[:, 1])
        stop = np.where(home == HOMELESS, 0, np.minimum(evicted[:, 3], known))
        owner, t = expand_ranges(evicted[:, 2], stop)
        address = home[owner] + t
        if len(address):
            self._set_zero(address)
            self._record(AddressChange(address, None))

    def _set_zero(self, address: Array) -> None:
        where = self._on_device(address)
        for column in self.columns.values():
            column.values[where] = 0
            column.dirty[address] = False

    def _clear_unused(self) -> None:
        """Clear all addresses without a step, where the index has forgotten which steps were evicted."""
        is_unused = np.ones(self.size, bool)
        is_unused[self.all_steps()] = False
        self._set_zero(np.flatnonzero(is_unused))
        self._record_new_layout()

    def _record(self, change: AddressChange) -> None:
        self.version += 1
        self._changes.add(self.version, change, len(change.old))

    def _record_new_layout(self) -> None:
        """Let everything that is derived from addresses start over."""
        self.version += 1
        self._changes.forget(self.version)

    def changes_since(self, version: int) -> list[AddressChange] | None:
        """The changes of addresses after a version; None if some are forgotten or all addresses changed."""
        return self._changes.since(version)

    def forget_episode(self, stream: int, episode: int, start: int, stop: int) -> Array:
        """Clear the steps from ``start`` to ``stop`` of an episode that is no longer in the index.

        Returns:
            Their addresses. The episode may have lost its first steps and moved since ``start`` and ``stop`` were
            noted, so only addresses of its present range count.
        """
        home, limit, _ = (int(value[0]) for value in self.ranges.get(np.array([stream]), np.array([episode])))
        if home == HOMELESS:
            return np.empty(0, np.int64)
        first = self.ranges.start_of(home + limit - 1)
        address = np.arange(max(home + start, first), home + min(stop, limit))
        self._set_zero(address)
        return address

    def _compact(self) -> None:
        """Lay out all ranges again, in the same order and without unused addresses between them."""
        index = self._index
        entry = np.arange(index.first, index.n)
        stream, episode = index.stream.host[entry].astype(np.int64), index.episode.host[entry]
        base, n = index.t_base.host[entry], index.lengths_of(entry)
        places = self.ranges.get(stream, episode)
        order = np.argsort(places.home + base, kind="stable")
        entry, stream, episode, base, n = (a[order] for a in (entry, stream, episode, base, n))
        places = Places(*(a[order] for a in places))
        is_open = (index.flags.host[entry] & OPEN) != 0
        room = np.where(is_open, np.maximum(places.limit - base, n), n)
        owner, k = expand_counts(n)
        old = (places.home + base)[owner] + k
        kept = [(c.values[self._on_device(old)], c.dirty[old]) for c in self.columns.values()]
        self.ranges.restart(stream, episode)
        self._empty_columns()
        home = self.ranges.add(stream, episode, base, room)
        self._grow_columns()
        new = (home + base)[owner] + k
        for column, (values, dirty) in zip(self.columns.values(), kept, strict=True):
            column.values[self._on_device(new)] = values
            column.dirty[new] = dirty
        self.ranges.set_extents(np.arange(len(n)), base + room, base + n)
        self._set_entries(np.arange(index.first, index.n))
        self._record_new_layout()

    def _empty_columns(self) -> None:
        self._capacity = 0
        for column in self.columns.values():
            column.values, column.dirty = column.values[:0], column.dirty[:0]

    # ---- addresses

    def addresses(self, entry: Array, position: Array) -> Array:
        """Addresses of the steps at positions of index entries, elementwise."""
        return self._handles.addresses(entry, position)

    def addresses_of(self, handles: Array) -> Array:
        """Addresses of steps by handle; `EVICTED`, `PAST_END` or `UNKNOWN` for steps that are not in the index."""
        return self._handles.addresses_of(handles)

    def steps(self, address: Array) -> tuple[Array, Array]:
        """Index entries and positions of the steps at addresses; entry -1 for steps that were removed."""
        return self.ranges.steps(address)

    def all_steps(self) -> Array:
        """Addresses of all steps of the index, in its order."""
        index = self._index
        owner, position = expand_counts(index.lengths(index.first, index.n))
        return self.addresses(index.first + owner, position)

    # ---- values

    def _on_device(self, address: Array) -> torch.Tensor:
        return torch.from_numpy(address).to(self._device)

    def set(self, name: str, address: Array, values: Array) -> None:
        """Overwrite values, which the caller has checked; of several at one address the last counts."""
        column = self.columns[name]
        if self._device.type == "cpu":
            column.values.numpy()[address] = values
        else:  # a device may take either of two values at one address
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

    @property
    def nbytes(self) -> int:
        columns = sum(column.values.nbytes + column.dirty.nbytes for column in self.columns.values())
        return columns + self.ranges.nbytes

    # ---- values by row of a stream, as they are stored

    def rows_of(self, source: int) -> tuple[Array, Array]:
        """Rows of a source that hold steps of the index, and the addresses of these steps. Reads all spans."""
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
        """Set stored values: by source, the first row and the values of the rows from there on."""
        for source, (first, values) in stored.items():
            rows, address = self.rows_of(source)
            is_stored = (rows >= first) & (rows < first + len(values))
            found = torch.from_numpy(values[rows[is_stored] - first]).to(self._device)
            self.columns[name].values[self._on_device(address[is_stored])] = found

    def take_changes(self, name: str) -> dict[int, tuple[Array, Array]]:
        """Rows whose value was set since the last call, by source and in order, and their addresses.

        Steps that are not committed yet are returned by a later call.
        """
        dirty = self.columns[name].dirty
        address = np.flatnonzero(dirty[: self.size])
        entry, position = self.steps(address)
        is_found = entry >= 0
        address, entry, position = address[is_found], entry[is_found], position[is_found]
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
        """Undo a `take_changes` whose values could not be saved."""
        for _, address in changes.values():
            self.columns[name].dirty[address] = True

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """All values and all places: draws go by address, so a resumed session needs the same ones."""
        index = self._index
        entry = np.arange(index.first, index.n)
        stream, episode = index.stream.host[entry].astype(np.int64), index.episode.host[entry].copy()
        return {
            "streams": list(index.numbers),
            "stream": stream,
            "episode": episode,
            **self.ranges.get(stream, episode)._asdict(),
            "size": self.size,
            "columns": {n: c.values[: self.size].cpu().numpy().copy() for n, c in self.columns.items()},
            "typical": self._typical_length,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace everything by the state of another table; the index shows its episodes, and may show more."""
        self.follow()
        numbers = np.array([self._index.numbers.get(name, -1) for name in state["streams"]], np.int64)
        stream, episode = numbers[np.asarray(state["stream"])], np.asarray(state["episode"])
        places = Places(*(np.asarray(state[name]).copy() for name in Places._fields))
        entry = self._index.find(stream, episode)
        is_found = entry >= 0
        stream, episode, entry, shown = (*(a[is_found] for a in (stream, episode, entry)), places.take(is_found))
        base = self._index.t_base.host[entry]
        self.ranges.load(stream, episode, shown.home + base, shown, int(state["size"]))
        self._empty_columns()
        self._grow_columns()
        owner, t = expand_ranges(base, np.minimum(shown.known, base + self._index.lengths_of(entry)))
        # Other addresses belong to no step: they were given to episodes that are gone, or are room to grow.
        address = shown.home[owner] + t
        where = self._on_device(address)
        for name, column in self.columns.items():
            if name in state["columns"]:
                values = torch.from_numpy(np.asarray(state["columns"][name])[address])
                column.values[where] = values.to(self._device)
                column.dirty[address] = True
        self._typical_length = float(state["typical"])
        self._n_closed, self.tail = 0, np.empty(0, np.int64)
        self._record_new_layout()
        self._follow_all(())  # gives addresses to episodes that the state does not have
