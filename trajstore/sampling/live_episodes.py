"""Steps that a writer has appended and not committed yet, where they can be sampled from.

They lie in the live rows of the cache, a page of consecutive rows for each environment at a time, until they are
committed; then they are found in the stream like any others.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from trajstore.format.spans import End, expand_counts
from trajstore.sampling.episode_index import LIVE, IndexEntries, flags_of
from trajstore.schema import Array
from trajstore.writing.staging import Staging

_MAX_PAGE_ROWS = 64
_PAGES = 2048  # that there should be, so that many environments have one each
_COLUMNS = (
    *("episode", "env", "n_rows", "end", "has_final", "ended_at", "committed", "live", "next", "room"),
    "floor",  # steps below were evicted
)
_N_ROWS, _LIVE, _NEXT, _ROOM, _FLOOR = map(_COLUMNS.index, ("n_rows", "live", "next", "room", "floor"))


@dataclass(slots=True)
class AppendedRows:
    """Rows on their way into the cache: values by field, and the live rows they go to."""

    values: Mapping[str, Array]
    rows: Array


@dataclass(slots=True)
class PlacedRows:
    """Live rows that are rows of the stream now, of those that a commit placed in [start, stop)."""

    live: Array
    rows: Array
    start: int
    stop: int


IndexChange = AppendedRows | PlacedRows


@dataclass(slots=True)
class _Block:
    """Rows of a staging that went to disk before they were looked at; values are dropped once they are durable."""

    episode: Array
    env: Array
    ends: Array
    values: dict[str, Array] | None


@dataclass(slots=True)
class _Table:
    """Columns of numbers, one row each; grows at the end."""

    names: tuple[str, ...]
    n: int = 0
    data: Array = field(default_factory=lambda: np.empty((0, 0), np.int64))

    def __post_init__(self) -> None:
        self.data = np.empty((len(self.names), 0), np.int64)

    def __getitem__(self, name: str) -> Array:
        column: Array = self.data[self.names.index(name), : self.n]
        return column

    def append(self, *columns: Array | int) -> None:
        n = max(len(c) if isinstance(c, np.ndarray) else 1 for c in columns)
        if self.n + n > self.data.shape[1]:
            grown = np.empty((len(self.names), max(64, 2 * (self.n + n))), np.int64)
            grown[:, : self.n] = self.data[:, : self.n]
            self.data = grown
        for i, column in enumerate(columns):
            self.data[i, self.n : self.n + n] = column
        self.n += n

    def keep(self, chosen: Array) -> None:
        kept = self.data[:, : self.n][:, chosen]
        self.data[:, : kept.shape[1]] = kept
        self.n = kept.shape[1]


class LiveEpisodes:
    """Follows a writer: which of its episodes are not yet placed for good, and where their rows lie now.

    `handed_off`, `committed` and `amended` are called by the writer's threads; everything else with the lock of the
    cache held.

    Args:
        stream: Number of the writer's stream in the index.

    Attributes:
        epoch: Changes when live rows were given back, so that what was planned with them is void.
    """

    def __init__(self, stream: int) -> None:
        self.epoch = 0
        self._stream = stream
        self._lock = threading.Lock()
        self._blocks: deque[_Block] = deque()  # not looked at yet
        self._in_flight: deque[_Block] = deque()  # on their way to disk
        self._commits: deque[Array] = deque()
        self._amended: list[tuple[int, int, dict[str, Array]]] = []
        self._n_taken = self._n_ends = 0  # rows and ends of the staging being filled that were looked at
        self._page_rows = _MAX_PAGE_ROWS
        self._free = np.empty(0, np.int64)  # pages
        self._n_free = 0
        # Of episodes, in order of number. Rows from "committed" to "live" lie in live rows; an episode goes on at
        # the live row "next", where there is "room" for so many.
        self._episodes = _Table(_COLUMNS)
        # Of an episode, in order of time. What is live may stop before the next begins: rows that went to disk
        # before anybody looked are in no live row.
        self._spans = _Table(("episode", "t", "source", "row", "stop"))
        self._n_ended = 0
        self._is_dropped = False
        self._n_stuck = -1  # free pages when there were too few
        self._is_changed = True
        self._is_longer = False  # some episode, and nothing else has changed
        self._growing = np.empty(0, np.int64)  # where the growing episodes stand that were told of last
        self.n_aborted = 0  # changes whenever episodes were given up
        self.keeps_arrivals = False
        self._arrivals: list[Array] = []  # episodes of the rows that came since, in that order
        self._aborted: list[Array] = []  # episodes that were given up since

    # ---- called by the writer

    def handed_off(self, staging: Staging) -> None:
        """Keep what was not looked at yet: the staging is used again once it is durable."""
        with self._lock:
            block = self._block(staging, copy=True)
            self._blocks.append(block)
            self._in_flight.append(block)
            self._n_taken = self._n_ends = 0

    def committed(self, spans: Array) -> None:
        """Rows are durable, and can be read from the stream."""
        with self._lock:
            self._commits.append(spans[:, :7].copy())
            self._in_flight.popleft().values = None

    def amended(self, episode: int, t: int, values: Mapping[str, Array]) -> None:
        """A step that was appended before has other values now."""
        with self._lock:
            self._amended.append((episode, t, {path: np.array(value) for path, value in values.items()}))

    def dropped(self) -> None:
        """What is staged is gone; only what was handed off becomes durable, and nothing comes after."""
        with self._lock:
            self._is_dropped = True

    def _block(self, staging: Staging, copy: bool) -> _Block:
        new = slice(self._n_taken, staging.n)
        kept = np.flatnonzero(~staging.dropped[new]) + self._n_taken if staging.any_dropped else new
        values = {path: column[kept] for path, column in staging.columns.items()}
        if copy and isinstance(kept, slice):
            values = {path: column.copy() for path, column in values.items()}
        episode, env = staging.episode[kept].copy(), staging.env[kept].copy()
        ends = staging.ends(self._n_ends) if staging.n_ends > self._n_ends else _NO_ENDS
        return _Block(episode, env, ends, values)

    # ---- called by the reader

    def set_rows(self, n: int) -> None:
        """Say once how many live rows there are."""
        self._page_rows = 1 << (max(1, min(_MAX_PAGE_ROWS, n // _PAGES)).bit_length() - 1)
        self._free = np.arange(n // self._page_rows)
        self._n_free = len(self._free)

    def take(self, staging: Staging | None) -> list[IndexChange]:
        """Look at everything appended since; returns what has to be copied, in that order.

        ``staging`` is the one being filled, if the writer's lock could be had: nothing is appended meanwhile.
        """
        with self._lock:
            blocks = [(block, block.values) for block in self._blocks]
            commits, self._commits = self._commits, deque()
            amended, self._amended = self._amended, []
        taken: list[IndexChange] = []
        n_done = sum(1 for block, values in blocks if self._enter(block, values, taken))
        taken = [change for change in taken if change is not _FULL]
        # Before rows move into the stream; what comes from the staging after is amended already.
        taken += [found for change in amended if (found := self._amend(*change)) is not None]
        taken += [self._place(spans) for spans in commits if len(spans)]
        with self._lock:
            for _ in range(n_done):
                self._blocks.popleft()
            if staging is not None and n_done == len(blocks):
                self._take_staging(staging, taken)
            if self._is_dropped and not self._in_flight:
                self._cut_back()
        return [change for change in taken if change is not _FULL]

    @property
    def is_full(self) -> bool:
        """Whether there were too few live rows when something was to be taken up, and there are no more since."""
        return self._n_stuck == self._n_free

    def is_behind(self, staging: Staging | None) -> bool:
        """Whether something appended was not looked at, because there is no live row for it until a commit."""
        with self._lock:
            n, n_ends = (staging.n, staging.n_ends) if staging is not None else (self._n_taken, self._n_ends)
            return bool(self._blocks) or n > self._n_taken or n_ends > self._n_ends

    def _take_staging(self, staging: Staging, taken: list[IndexChange]) -> None:
        if staging.n == self._n_taken and staging.n_ends == self._n_ends:
            return
        if self.is_full:
            return  # there was no room, and there is no more since
        if staging.n_ends == self._n_ends and not staging.any_dropped:
            enter = self._enter_one if staging.n == self._n_taken + 1 else self._enter_each
            if enter(staging, taken):
                self._n_taken = staging.n
                return
        block = self._block(staging, copy=False)
        if self._enter(block, block.values, taken):
            self._n_taken, self._n_ends = staging.n, self._n_ends + len(block.ends)

    def _cut_back(self) -> None:
        """Forget what never became durable."""
        self._is_dropped = False
        table = self._episodes
        lost = table["committed"] < table["n_rows"]
        self._trim(np.zeros(table.n, np.int64))
        live = self._spans["source"] == LIVE
        self._release(self._spans["row"][live])
        self._spans.keep(~live)
        table["n_rows"][lost], table["has_final"][lost] = table["committed"][lost], 0
        open_ = table["end"] == End.OPEN
        table["end"][lost | open_] = End.CUT
        table["ended_at"][open_] = self._n_ended + np.arange(int(open_.sum()))
        self._n_ended += int(open_.sum())
        self._is_changed = True

    def _enter_one(self, staging: Staging, taken: list[IndexChange]) -> bool:
        """Take up a single row of an episode that goes on in its page: the common case, and far cheaper."""
        table, row = self._episodes, self._n_taken
        slot = int(np.searchsorted(table["episode"], staging.episode[row]))
        if slot == table.n or table["episode"][slot] != staging.episode[row]:
            return False
        values = table.data[:, slot]
        if not values[_ROOM]:
            return False
        live = slice(row, row + 1)
        rows = {path: column[live] for path, column in staging.columns.items()}
        taken.append(AppendedRows(rows, values[_NEXT : _NEXT + 1].copy()))
        if self.keeps_arrivals:
            self._arrivals.append(staging.episode[live].copy())
        self._is_changed = self._is_changed or bool(values[_FLOOR] >= values[_N_ROWS])  # it is shown again
        values[[_N_ROWS, _LIVE, _NEXT]] += 1
        values[_ROOM] -= 1
        self._is_longer = True
        return True

    def _enter_each(self, staging: Staging, taken: list[IndexChange]) -> bool:
        """Take up a row of each of several episodes that go on in their pages: one step of many environments."""
        table, rows = self._episodes, slice(self._n_taken, staging.n)
        episode = staging.episode[rows]
        if len(episode) > table.n:
            return False
        slot = np.searchsorted(table["episode"], episode)
        if slot.max() == table.n or (table["episode"][slot] != episode).any():
            return False
        values = table.data[:, slot]
        if not values[_ROOM].all() or len(np.unique(slot)) < len(slot):
            return False
        taken.append(
            AppendedRows({path: column[rows] for path, column in staging.columns.items()}, values[_NEXT].copy())
        )
        if self.keeps_arrivals:
            self._arrivals.append(episode.copy())
        self._is_changed = self._is_changed or bool((values[_FLOOR] >= values[_N_ROWS]).any())
        values[[_N_ROWS, _LIVE, _NEXT]] += 1
        values[_ROOM] -= 1
        table.data[:, slot] = values
        self._is_longer = True
        return True

    def _enter(self, block: _Block, values: dict[str, Array] | None, taken: list[IndexChange]) -> bool:
        """Take up the rows of a block; False if there are too few live rows for them, and nothing is done."""
        if taken and taken[-1] is _FULL:
            return False
        order = np.argsort(block.episode, kind="stable")
        ids, first, count = np.unique(block.episode[order], return_index=True, return_counts=True)
        fresh = ids > (self._episodes["episode"][-1] if self._episodes.n else -1)
        at = np.searchsorted(self._episodes["episode"], ids) if self._episodes.n else np.zeros(len(ids), np.int64)
        room = np.zeros(len(ids), np.int64)
        room[~fresh] = self._episodes["room"][at[~fresh]]
        n_pages = -(-np.maximum(count - room, 0) // self._page_rows)
        if values is not None and int(n_pages.sum()) > self._n_free:
            taken.append(_FULL)
            self._n_stuck = self._n_free
            return False
        env = block.env[order[first]]
        n = int(fresh.sum())
        self._episodes.append(ids[fresh], env[fresh], 0, int(End.OPEN), 0, -1, 0, 0, 0, 0, 0) if n else None
        slot = np.searchsorted(self._episodes["episode"], ids)
        if values is not None and len(order):
            rows = self._allot(ids, slot, count, n_pages)
            taken.append(AppendedRows({path: column[order] for path, column in values.items()}, rows))
            self._episodes["live"][slot] = self._episodes["n_rows"][slot] + count
        elif len(order):
            self._episodes["room"][slot] = 0  # these rows are in the stream; what follows begins another page
            self._stop_live(ids, self._episodes["n_rows"][slot])
        is_back = (self._episodes["floor"][slot] >= self._episodes["n_rows"][slot]).any()  # evicted whole before
        self._episodes["n_rows"][slot] += count
        if self.keeps_arrivals:
            self._arrivals.append(block.episode)
        self._end(block.ends)
        if values is None or n or is_back or n_pages.any() or len(block.ends):
            self._is_changed = True
        else:
            self._is_longer = True
        return True

    def _stop_live(self, ids: Array, t: Array) -> None:
        """What is live of these episodes stops at ``t``."""
        spans = self._spans
        mine = np.flatnonzero(
            (spans["source"] == LIVE) & (spans["stop"] == _NO_STOP) & np.isin(spans["episode"], ids)
        )
        spans["stop"][mine] = t[np.searchsorted(ids, spans["episode"][mine])]

    def _allot(self, ids: Array, slot: Array, count: Array, n_pages: Array) -> Array:
        """Live rows for so many more rows of episodes: what is left of their pages, then new ones."""
        table = self._episodes
        n = int(n_pages.sum())
        self._n_free -= n
        pages = self._free[self._n_free : self._n_free + n]
        room, following = table["room"][slot], table["next"][slot]
        owner, i = expand_counts(count)
        beyond = i - room[owner]
        first_page = np.cumsum(n_pages) - n_pages
        page = (
            pages[np.minimum(first_page[owner] + np.maximum(beyond, 0) // self._page_rows, max(n - 1, 0))]
            if n
            else 0
        )
        rows = np.where(beyond < 0, following[owner] + i, page * self._page_rows + beyond % self._page_rows)
        page_owner, k = expand_counts(n_pages)
        t = (table["n_rows"][slot] + room)[page_owner] + k * self._page_rows
        self._spans.append(ids[page_owner], t, LIVE, pages * self._page_rows, _NO_STOP) if n else None
        last = np.cumsum(count) - 1
        table["next"][slot] = rows[last] + 1
        table["room"][slot] = np.where(n_pages > 0, room + n_pages * self._page_rows - count, room - count)
        found: Array = rows
        return found

    def _end(self, ends: Array) -> None:
        if not len(ends):
            return
        slot, known = self._slots(ends[:, 1])
        ends = ends[known]
        self._episodes["end"][slot], self._episodes["has_final"][slot] = ends[:, 3], ends[:, 4]
        self._episodes["ended_at"][slot] = self._n_ended + np.arange(len(slot))
        self._n_ended += len(slot)
        if (ends[:, 3] == End.ABORTED).any():
            self.n_aborted += 1
            if self.keeps_arrivals:
                self._aborted.append(ends[ends[:, 3] == End.ABORTED, 1])
            self._drop(self._episodes["end"] == End.ABORTED)

    def _slots(self, episode: Array) -> tuple[Array, Array]:
        """Where episodes stand that are known here, and which of those asked for they are."""
        slot = np.searchsorted(self._episodes["episode"], episode)
        known = slot < self._episodes.n
        known[known] = self._episodes["episode"][slot[known]] == episode[known]
        return slot[known], known

    def _drop(self, gone: Array) -> None:
        """Forget episodes; their live rows are free."""
        ids = self._episodes["episode"][gone]
        spans = np.isin(self._spans["episode"], ids)
        self._release(self._spans["row"][spans & (self._spans["source"] == LIVE)])
        self._spans.keep(~spans)
        self._episodes.keep(~gone)

    def _release(self, rows: Array) -> None:
        pages = np.unique(rows // self._page_rows)
        self._free[self._n_free : self._n_free + len(pages)] = pages
        self._n_free += len(pages)
        self.epoch += bool(len(pages))

    def _place(self, spans: Array) -> PlacedRows:
        """Rows of these spans are in the stream: they need no live rows any more."""
        start, stop = int(spans[0, 3]), int(spans[-1, 4])
        spans = spans[spans[:, 4] > spans[:, 3]]
        slot, known = self._slots(spans[:, 0])
        spans, table = spans[known], self._episodes
        table["committed"][slot] = spans[:, 2] + spans[:, 4] - spans[:, 3]
        shift = np.zeros(table.n, np.int64)
        shift[slot] = spans[:, 3] - spans[:, 2]  # from t to row
        live, rows = self._trim(shift)
        self._spans.append(spans[:, 0], spans[:, 2], self._stream + 1, spans[:, 3], _NO_STOP) if len(
            spans
        ) else None
        self._is_changed = True
        return PlacedRows(live, rows, start, stop)

    def _trim(self, shift: Array) -> tuple[Array, Array]:
        """Take committed rows off the live spans; returns these live rows, and the rows they are now."""
        spans, table = self._spans, self._episodes
        live = np.flatnonzero(spans["source"] == LIVE)
        live = live[np.lexsort((spans["t"][live], spans["episode"][live]))]
        episode, t = spans["episode"][live], spans["t"][live]
        slot = np.searchsorted(table["episode"], episode)
        stop = table["live"][slot]
        same = np.flatnonzero(episode[1:] == episode[:-1])
        stop[same] = np.minimum(stop[same], t[same + 1])
        stop = np.minimum(stop, spans["stop"][live])
        committed = table["committed"][slot]
        gone = stop <= committed
        cut = np.clip(committed - t, 0, stop - t)
        row = spans["row"][live]
        owner, i = expand_counts(cut)
        moved = row[owner] + i, (t + shift[slot])[owner] + i
        spans["t"][live], spans["row"][live] = t + cut, row + cut
        is_last = np.ones(len(live), bool)
        is_last[same] = False
        table["room"][slot[gone & is_last]] = 0  # its page is given back: it goes on in another
        self._release(row[gone])
        keep = np.ones(spans.n, bool)
        keep[live[gone]] = False
        spans.keep(keep)
        return moved

    def _amend(self, episode: int, t: int, values: dict[str, Array]) -> AppendedRows | None:
        spans, table = self._spans, self._episodes
        slot = int(np.searchsorted(table["episode"], episode))
        if slot == table.n or table["episode"][slot] != episode or t >= table["live"][slot]:
            return None
        mine = np.flatnonzero((spans["episode"] == episode) & (spans["source"] == LIVE) & (spans["t"] <= t))
        if not len(mine):
            return None
        span = mine[np.argmax(spans["t"][mine])]
        if t >= spans["stop"][span]:
            return None
        row = spans["row"][span] + t - spans["t"][span]
        return AppendedRows({path: np.asarray(value)[None] for path, value in values.items()}, np.array([row]))

    def take_arrivals(self) -> Array:
        """Episodes of the rows that were taken up since this was last asked, in order of arrival."""
        taken, self._arrivals = np.concatenate([_EMPTY, *self._arrivals]), []
        aborted, self._aborted = self._aborted, []
        # Some of their rows may have been dropped before anybody saw them, if they were not on their way to disk.
        return taken[~np.isin(taken, np.concatenate(aborted))] if aborted else taken

    @property
    def unplaced(self) -> Array:
        """Episodes that are open, or not placed for good yet."""
        return self._episodes["episode"]

    def trim(self, episode: Array, t: Array) -> None:
        """Steps of these episodes below ``t`` were evicted."""
        slot, known = self._slots(episode)
        floor = self._episodes["floor"]
        floor[slot] = np.maximum(floor[slot], np.minimum(t[known], self._episodes["n_rows"][slot]))
        self._is_changed = True

    def retell(self) -> None:
        """Tell everything again when asked next: the index has been written from what was told before."""
        self._is_changed = True

    def lengths(self) -> Array | None:
        """Rows of the growing episodes that were told of last; None unless that is all that has changed."""
        if self._is_changed or not self._is_longer:
            return None
        self._is_longer = False
        n_rows: Array = (self._episodes["n_rows"] - self._episodes["floor"])[self._growing]
        return n_rows

    def episodes(self) -> tuple[IndexEntries, IndexEntries, IndexEntries] | None:
        """Episodes that are placed for good now, that ended, and that grow; None if nothing has changed."""
        if not self._is_changed:
            return None
        self._is_changed = self._is_longer = False
        table = self._episodes
        ended = np.flatnonzero(table["end"] != End.OPEN)
        ended = ended[np.argsort(table["ended_at"][ended], kind="stable")]
        is_placed = table["committed"][ended] == table["n_rows"][ended]
        # In order of their ends, whatever became durable first: the order must not depend on the disk.
        n_placed = len(ended) if is_placed.all() else int(np.argmin(is_placed))
        growing = np.flatnonzero(table["end"] == End.OPEN)
        blocks = tuple(self._described(slots) for slots in (ended[:n_placed], ended[n_placed:], growing))
        gone = np.zeros(table.n, bool)
        gone[ended[:n_placed]] = True
        if n_placed:
            self._drop(gone)
        growing = np.flatnonzero(table["end"] == End.OPEN)
        self._growing = growing[(table["n_rows"] - table["floor"])[growing] > 0]
        return blocks[0], blocks[1], blocks[2]

    def _described(self, slots: Array) -> IndexEntries:
        if not len(slots):
            return _NONE
        table, spans = self._episodes, self._spans
        slots = slots[(table["n_rows"] - table["has_final"] - table["floor"])[slots] > 0]
        rank = np.full(table.n, -1)
        rank[slots] = np.arange(len(slots))
        owner = rank[np.searchsorted(table["episode"], spans["episode"])]
        mine = np.flatnonzero(owner >= 0)
        mine = mine[np.lexsort((spans["t"][mine], owner[mine]))]
        t, stop = spans["t"][mine], table["n_rows"][slots][owner[mine]]
        same = np.flatnonzero(owner[mine][1:] == owner[mine][:-1])
        stop[same] = t[same + 1]
        flags, floor = flags_of(table["end"][slots], table["has_final"][slots]), table["floor"][slots]
        stream, n_rows = np.full(len(slots), self._stream), table["n_rows"][slots] - floor
        start = np.maximum(t, floor[owner[mine]])
        left = stop > start
        mine, row = mine[left], (spans["row"][mine] + start - t)[left]
        facts = stream, table["episode"][slots], table["env"][slots], floor, n_rows
        return IndexEntries(*facts, flags, (stop - start)[left], row, spans["source"][mine])


_NO_STOP = 1 << 62  # it goes on
_EMPTY = np.empty(0, np.int64)
_NO_ENDS = np.empty((0, 5), np.int64)
_NONE = IndexEntries(_EMPTY, _EMPTY, _EMPTY, _EMPTY, _EMPTY, np.empty(0, np.uint8), _EMPTY, _EMPTY, _EMPTY)
_FULL = AppendedRows({}, np.empty(0, np.int64))  # stands where live rows ran out
