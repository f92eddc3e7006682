"""The episodes that can be sampled, as tensors: arithmetic from draws to rows, no I/O.

Episodes stand in order of arrival: those that ended are appended and never move, those still open follow as a
small tail that is written anew at every update. Rows are counted through, over all episodes in that order, so one
prefix sum answers how long an episode is and which span holds a row.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch

from trajstore.cache.growable_array import GrowableArray
from trajstore.errors import DataError, EpisodeNotFoundError
from trajstore.format.spans import End, EpisodeSpans, VisibleSpans, expand_counts, join_spans_by_episode, span_table
from trajstore.sampling.episode_numbers import EpisodeNumberMap
from trajstore.schema import Array
from trajstore.store.snapshot import Snapshot

_MIN_DEAD = 1 << 16  # evicted entries whose memory is not worth giving back
_MAX_HEADS = 1 << 14  # evictions after which what is derived from entries is made anew
GONE = 1 << 62  # the first step that is left of an episode that was evicted whole

HAS_FINAL = 1
TERMINATED = 2
TRUNCATED = 4
OPEN = 8
HEADLESS = 16
BEGINS = 32  # its first steps are gone, and the first that is left counts as its beginning
MARK = 128  # never set on an episode; free for telling it from 0
LIVE = 0  # the source of rows that are in no stream yet


@dataclass(frozen=True, slots=True)
class RowLocations:
    """Where steps lie: source (one more than the number of the stream that holds them) and row.

    ``source`` broadcasts against ``row``.
    """

    source: torch.Tensor
    row: torch.Tensor


@dataclass(frozen=True, slots=True)
class IndexEntries:
    """Episodes to be written into an index, and their spans, in the same order."""

    stream: Array
    episode: Array
    env: Array
    t_base: Array
    n_rows: Array
    flags: Array
    span_rows: Array  # rows of each span, none of them empty
    span_row: Array
    span_source: Array

    @property
    def n_spans(self) -> Array:
        """Spans of each episode."""
        ends = np.searchsorted(np.cumsum(self.span_rows), np.cumsum(self.n_rows), side="left") + 1
        counts: Array = np.diff(ends, prepend=0)
        return counts

    def take(self, chosen: Array) -> IndexEntries:
        """Some of them, in another order."""
        n = self.n_spans
        owner, number = expand_counts(n[chosen])
        spans = (np.cumsum(n) - n)[chosen][owner] + number
        facts = (a[chosen] for a in (self.stream, self.episode, self.env, self.t_base, self.n_rows, self.flags))
        return IndexEntries(*facts, *(a[spans] for a in (self.span_rows, self.span_row, self.span_source)))

    def above(self, t: Array) -> IndexEntries:
        """The same without steps below ``t``; all of them have some left."""
        lost = (t - self.t_base).clip(0)
        owner = np.repeat(np.arange(len(t)), self.n_spans)
        start = np.cumsum(self.span_rows) - self.span_rows - (np.cumsum(self.n_rows) - self.n_rows)[owner]
        gone = np.clip(lost[owner] - start, 0, self.span_rows)
        left = gone < self.span_rows
        spans = (self.span_rows - gone)[left], (self.span_row + gone)[left], self.span_source[left]
        facts = self.stream, self.episode, self.env, self.t_base + lost, self.n_rows - lost, self.flags
        return IndexEntries(*facts, *spans)

    @staticmethod
    def of(joined: EpisodeSpans, chosen: Array) -> IndexEntries:
        s, last = joined.columns, joined.last[chosen]
        spans = joined.span_numbers(chosen)
        rows = s["row_stop"][spans] - s["row_start"][spans]
        spans, rows = spans[rows > 0], rows[rows > 0]
        return IndexEntries(
            s["stream"][last],
            s["episode"][last],
            s["env"][last],
            joined.first_t[chosen],
            joined.n_rows[chosen],
            flags_of(s["end"][last], s["has_final"][last]),
            rows,
            s["row_start"][spans],
            s["source"][spans] + 1,
        )


def flags_of(end: Array, has_final: Array) -> Array:
    """What an index says of how episodes ended."""
    flags: Array = has_final * HAS_FINAL + (end == End.TERMINATED) * TERMINATED
    flags = flags + (end == End.TRUNCATED) * TRUNCATED + (end == End.OPEN) * OPEN
    return flags.astype(np.uint8)


class EpisodeIndex:
    """Joined, sampleable episodes of a snapshot; updated in place as the snapshot advances.

    Attributes:
        first: The first entry that is in use; those before were evicted.
        n: Where entries stop, the open episodes included.
        n_closed: Where the episodes stop that ended. Their entries change only when steps of theirs are evicted.
        version: Changes with every update.
        generation: Changes when entries moved, so that what was derived from them is void.
        heads: For each eviction, where the entries stop that it changed or moved; later ones stayed as they were.
    """

    def __init__(self, device: torch.device, kernels: ModuleType | None = None) -> None:
        self.device = device
        self.kernels = kernels
        self.first = self.n = self.n_closed = self.version = self.generation = 0
        self.step_base = 0  # what step_sums begins with: evictions take away from the front
        self.heads: list[int] = []
        self._n_closed_spans = self._first_span = 0
        self.logical = GrowableArray(
            np.int64, device
        )  # first row of each episode, counted through; one more at the end
        self.step_sums = GrowableArray(np.int64, device)  # steps up to and including each episode
        self.flags = GrowableArray(np.uint8, device)
        self.stream = GrowableArray(np.int32, device)
        self.episode = GrowableArray(np.int64, device)
        self.t_base = GrowableArray(np.int64, device)  # t of the first row that is still stored
        self.env = GrowableArray(np.int32, device)
        self.shown_env = GrowableArray(np.int32, device)  # the same, but for episodes that came from other ranks
        self.span_logical = GrowableArray(np.int64, device)
        self.span_row = GrowableArray(np.int64, device)
        self.span_source = GrowableArray(np.int32, device)
        self.logical.rewrite(0, np.zeros(1, np.int64))
        self._seen: dict[str, int] = {}  # spans taken, by stream
        self._carried: dict[str, Array] | None = None  # spans of the open episodes
        self._open: IndexEntries | None = None
        self._live: tuple[IndexEntries | None, IndexEntries | None] = (None, None)  # of the writer that is followed
        self.followed = ""  # id of its stream, whose episodes come by `set_live` and not with snapshots
        self._growing_spans = np.empty((0, 2), np.int64)  # of growing episodes: which one, and where in it
        self._signature: object = None
        self._first_rows: dict[str, int] = {}  # by stream: rows below were evicted when this was last updated
        self._entries: list[EpisodeNumberMap] = []  # by stream number: the entry of each episode, or -1
        self._floors: list[EpisodeNumberMap] = []  # by stream number: steps of an episode below were evicted here
        self._has_floors = False
        self._shown: list[
            tuple[EpisodeNumberMap, EpisodeNumberMap, EpisodeNumberMap]
        ] = []  # by stream number: env, flags, beginning
        self._has_shown = False
        self._own_marks: dict[str, int] = {}  # by stream: rows below are not wanted here, whatever records say
        self.n_evictions = 0  # changes whenever steps were taken away
        self.follows_evictions = False  # whether anybody asks for `take_evictions`
        self._evictions: list[Array] = []
        self.newest = np.empty(0, np.int64)  # by stream number: the largest number that an episode has had
        self.numbers: dict[str, int] = {}  # of streams, by id
        self.rank = 0  # of whoever shows this
        self._source_ranks = GrowableArray(np.int64, device)  # by stream number: who recorded it

    def update(self, snapshot: Snapshot) -> None:
        """Take in what a newer snapshot shows; costs what is new, what is open and what was evicted.

        Streams keep the number they got when they were first seen.
        """
        for name in snapshot.names:
            self.number_of(name)
        number = np.array([self.numbers[name] for name in snapshot.names], np.int64)
        self._learn_ranks(snapshot)
        parts = dict(zip((record.id for record in snapshot.streams), snapshot.parts(), strict=True))
        parts.pop(self.followed, None)
        self._settle(parts)
        self._evict(parts)
        for name, part in parts.items():  # also of episodes that were evicted before anybody looked
            new = part.spans.ints[self._seen.get(name, 0) :, 0]
            self.newest[number[part.stream]] = max(self.newest[number[part.stream]], new.max(initial=-1))
        fresh = [part.after(self._seen.get(name, 0)) for name, part in parts.items()]
        self._seen = {name: len(part.spans) for name, part in parts.items()}
        self._first_rows = {name: part.first_row for name, part in parts.items()}
        columns = span_table(fresh, None)
        columns |= {name: number[columns[name]] for name in ("stream", "source")}
        if self._carried is not None:
            finished = {self.numbers[name] for name, part in parts.items() if part.is_finished}
            columns = self._with_carried(columns, finished)
        self._take(join_spans_by_episode(self._above_floors(columns)))
        self.version += 1

    def _learn_ranks(self, snapshot: Snapshot) -> None:
        n = self._source_ranks.n
        if len(self.numbers) == n:
            return
        ranks = np.full(len(self.numbers), self.rank)
        for record in snapshot.streams:
            ranks[self.numbers[record.id]] = record.rank or 0
        self._source_ranks.rewrite(n, ranks[n:])

    def source_ranks(self) -> torch.Tensor:
        """By stream number: the rank that recorded it; a session without ranks is rank 0."""
        missing = len(self.numbers) - self._source_ranks.n
        if missing > 0:  # what is only followed yet is our own
            self._source_ranks.rewrite(self._source_ranks.n, np.full(missing, self.rank))
        return self._source_ranks.device

    def _settle(self, parts: Mapping[str, VisibleSpans]) -> None:
        """Begin anew where something other than new spans and evictions has changed."""
        signature = [(name, p.stream, p.hidden, p.discarded) for name, p in parts.items() if _is_special(p)]
        is_lost = any(self._is_shown(name) for name in self._seen.keys() - parts.keys())
        is_back = any(self._first_rows.get(name, 0) > part.first_row for name, part in parts.items())
        is_moved = bool(signature) and any(
            part.first_row != self._first_rows.get(name, 0) for name, part in parts.items()
        )
        if signature != self._signature or is_lost or is_back or is_moved:
            self._signature = signature
            own = self._closed_of(self.numbers.get(self.followed, -1))
            self._restart()
            self._append(own)
            self.n_evictions += 1  # perhaps

    def _is_shown(self, stream: str) -> bool:
        """Whether there are episodes of a stream here."""
        return bool((self.stream.host[self.first : self.n] == self.numbers[stream]).any())

    def _restart(self) -> None:
        self._seen, self._carried, self._first_rows = {}, None, {}
        self.first = self.n = self.n_closed = self._n_closed_spans = self._first_span = self.step_base = 0
        self.logical.rewrite(0, np.zeros(1, np.int64))
        for array in (self.step_sums, self.flags, *self._columns(), *self._span_columns()):
            array.rewrite(0, array.host[:0])
        for entries in self._entries:
            entries.clear()
        self.generation += 1
        self.heads = []

    def order(self) -> dict[str, Any]:
        """Which episodes there are, in order, and from which step on."""
        entry = slice(self.first, self.n)
        columns = {"stream": self.stream, "episode": self.episode, "t": self.t_base}
        found: dict[str, Any] = {"streams": list(self.numbers), "newest": self.newest.copy()}
        found |= {n: c.host[entry].astype(np.int64) for n, c in columns.items()}
        if self._has_shown:
            env, flags, begin = self._shown_of(found["stream"], found["episode"])
            found |= {"env": env, "flags": flags, "begin": begin}
        return found

    def arrange(self, order: Mapping[str, Any], *, growing: Collection[str] = ()) -> None:
        """Show just the episodes of another index, in its order and from its steps on; all here have ended.

        Of ``growing`` streams, episodes follow that are newer than all that it has seen there.

        Raises:
            EpisodeNotFoundError: One of them is not here.
        """
        number = np.array([self.numbers.get(name, -1) for name in order["streams"]], np.int64)
        stream, episode = number[np.asarray(order["stream"])], np.asarray(order["episode"])
        entry = self.find(stream, episode)
        if (entry < 0).any():
            lost = int(np.flatnonzero(entry < 0)[0])
            name = order["streams"][int(order["stream"][lost])]
            raise EpisodeNotFoundError(f"episode {episode[lost]} of stream '{name}' is not here any more")
        every = self._closed_of(None)
        newest = np.full(len(self.numbers), -1)
        known = number >= 0
        np.maximum.at(newest, number[known], np.asarray(order["newest"])[: len(number)][known])
        is_growing = np.array([name in growing for name in self.numbers], bool)
        newer = (every.episode > newest[every.stream]) & is_growing[every.stream]
        for n in np.unique(every.stream):
            mine = every.episode[(every.stream == n) & ~newer]
            self._floors[n].put(mine, np.full(len(mine), GONE))
            mine = stream == n
            self._floors[n].put(episode[mine], np.asarray(order["t"])[mine])
        self._has_floors = True
        if "env" in order:
            self._show(stream, episode, *(np.asarray(order[name]) for name in ("env", "flags", "begin")))
        kept = self._seen, self._carried, self._first_rows, self.first
        self._restart()
        self._seen, self._carried, self._first_rows, first = kept
        self._append(every.take(entry - first).above(np.asarray(order["t"])))
        if newer.any():
            self._append(every.take(np.flatnonzero(newer)))
        self.newest = np.maximum(self.newest, newest)
        self.version += 1

    def _show(self, stream: Array, episode: Array, *values: Array) -> None:
        """Episodes have another env here, further flags, and a step that counts as their first (`GONE`: none)."""
        self._has_shown = True
        for n in np.unique(stream):
            mine = stream == n
            for table, column in zip(self._shown[n], values, strict=True):
                table.put(episode[mine], column[mine])

    def _shown_of(self, stream: Array, episode: Array) -> tuple[Array, Array, Array]:
        found = tuple(np.empty(len(stream), np.int64) for _ in range(3))
        for n in np.unique(stream):
            mine = stream == n
            for table, column in zip(self._shown[n], found, strict=True):
                column[mine] = table.get(episode[mine])
        return found[0], found[1], found[2]

    def _closed_of(self, stream: int | None) -> IndexEntries:
        """The entries of a stream's episodes that ended, or of all of them, as they were written."""
        entry = np.arange(self.first, self.n_closed)
        entry = entry if stream is None else entry[self.stream.host[self.first : self.n_closed] == stream]
        spans = np.arange(self._first_span, self._n_closed_spans)
        ends = np.append(self.span_logical.host[spans[1:]], self.logical.host[self.n_closed])[: len(spans)]
        owner = np.searchsorted(self.logical.host, self.span_logical.host[spans], side="right") - 1
        mine = np.isin(owner, entry)
        spans, n_rows = spans[mine], (ends - self.span_logical.host[spans])[mine]
        number, episode, t_base, env = (column.host[entry].astype(np.int64) for column in self._columns()[:4])
        rows = self.logical.host[entry + 1] - self.logical.host[entry]
        flags = self.flags.host[entry] & ~np.uint8(HEADLESS | BEGINS)
        places = self.span_row.host[spans], self.span_source.host[spans]
        return IndexEntries(number, episode, env, t_base, rows, flags, n_rows, *places)

    @property
    def marks(self) -> Array:
        """By source: rows below were evicted."""
        marks = np.zeros(len(self.numbers) + 1, np.int64)
        for name, row in (*self._first_rows.items(), *self._own_marks.items()):
            source = self.numbers[name] + 1
            marks[source] = max(marks[source], row)
        return marks

    def _columns(self) -> tuple[GrowableArray, ...]:
        return self.stream, self.episode, self.t_base, self.env, self.shown_env

    def _span_columns(self) -> tuple[GrowableArray, ...]:
        return self.span_logical, self.span_row, self.span_source

    def _with_carried(self, columns: dict[str, Array], finished: set[int]) -> dict[str, Array]:
        """Add the spans of episodes that were open; those of streams that are finished now are cut."""
        carried = dict(self._carried or {})
        is_cut = np.isin(carried["source"], list(finished)) & (carried["end"] == End.OPEN)
        carried["end"] = np.where(is_cut, End.CUT, carried["end"])
        return {name: np.concatenate([carried[name], column]) for name, column in columns.items()}

    def _evict(self, parts: Mapping[str, VisibleSpans]) -> None:
        """Take away rows that were evicted since the last update."""
        marks = {
            name: part.first_row
            for name, part in parts.items()
            if name in self._seen and part.first_row > self._first_rows.get(name, 0)
        }
        if not marks:
            return
        self._trim_carried(marks)
        stop = 0
        for name, mark in marks.items():
            spans = parts[name].spans.ints
            low = _first_at(spans, self._first_rows.get(name, 0), column=4)
            hit = spans[low : _first_at(spans, mark, column=3), 0]
            entry = self.find(np.full(len(hit), self.numbers[name]), hit)
            entry = entry[entry < self.n_closed]
            stop = max(stop, int(entry.max()) + 1 if len(entry) else 0)
        if stop:
            self._trim_head(stop, self._lost_rows(stop, {self.numbers[n] + 1: mark for n, mark in marks.items()}))

    def _head_spans(self, stop: int) -> tuple[int, Array, Array]:
        """Spans of the entries before ``stop``: where they stop, and their entries (from `first` on) and rows."""
        span_stop = int(np.searchsorted(self.span_logical.host[: self._n_closed_spans], self.logical.host[stop]))
        logical = self.span_logical.host[self._first_span : span_stop]
        owner = np.searchsorted(self.logical.host[self.first : stop + 1], logical, side="right") - 1
        return span_stop, owner, np.diff(np.append(logical, self.logical.host[stop]))

    def _lost_rows(self, stop: int, marks: Mapping[int, int]) -> Array:
        """By entry from `first` on: how many of its rows lie below the marks of their sources."""
        span_stop, owner, n = self._head_spans(stop)
        row, source = (c.host[self._first_span : span_stop] for c in (self.span_row, self.span_source))
        mark = np.array([marks.get(s, 0) for s in range(int(source.max(initial=0)) + 1)], np.int64)[source]
        return np.bincount(owner, np.clip(mark - row, 0, n), stop - self.first).astype(np.int64)

    def evict(self, stream: Array, episode: Array, t: Array) -> tuple[Array, Array]:
        """Take away the steps of episodes below ``t`` (`GONE` for all); costs the entries up to the last of them.

        Returns episode and t of those that belong to the writer that is followed and are not placed for good yet:
        whoever tells of them has to leave these steps out.
        """
        for number in np.unique(stream[stream != self.numbers.get(self.followed, -1)]):
            mine = stream == number
            floors = self._floors[number]
            floors.put(episode[mine], np.maximum(floors.get(episode[mine]), t[mine]))
            self._has_floors = True
        entry = self.find(stream, episode)
        closed = (entry >= 0) & (entry < self.n_closed)
        open_ = entry >= self.n_closed
        is_live = open_ & (stream == self.numbers.get(self.followed, -1))
        if is_live.any():
            base = self.t_base.host[entry[is_live]]
            stops = np.minimum(t[is_live], base + self.lengths_of(entry[is_live]))
            self._note_evicted(stream[is_live], episode[is_live], base, stops)
        if closed.any():  # from here on entries may have moved
            stop = int(entry[closed].max()) + 1
            lost = np.zeros(stop - self.first, np.int64)
            lost[entry[closed] - self.first] = t[closed] - self.t_base.host[entry[closed]]
            self._trim_head(stop, lost.clip(0))
        if (open_ & ~is_live).any() and self._carried is not None:
            self._take(join_spans_by_episode(self._above_floors(self._carried)))
        self.version += 1
        return episode[is_live], t[is_live]

    def _note_evicted(self, stream: Array, episode: Array, start: Array, stop: Array) -> None:
        gone = stop > start
        if gone.any():
            self.n_evictions += 1
            if self.follows_evictions:
                rows = np.stack([np.asarray(a, np.int64) for a in (stream, episode, start, stop)], 1)
                self._evictions.append(rows[gone])

    def take_evictions(self) -> Array:
        """What was evicted since this was last asked: stream, episode, t from and to, one row each."""
        taken, self._evictions = self._evictions, []
        return np.concatenate([np.empty((0, 4), np.int64), *taken])

    def set_marks(self, marks: Mapping[str, int]) -> None:
        """Rows of streams below these are in no episode here any more, and never will be."""
        self._own_marks |= marks

    def first_live_rows(self) -> dict[str, int]:
        """By stream that holds rows: the first row that an episode here has; looks at all spans."""
        first = np.full(len(self.numbers) + 1, GONE)
        spans = slice(self._first_span, None)
        np.minimum.at(first, self.span_source.host[spans], self.span_row.host[spans])
        return {name: int(first[n + 1]) for name, n in self.numbers.items()}

    def _above_floors(self, columns: dict[str, Array]) -> dict[str, Array]:
        """Spans without what was evicted here, whatever their records say."""
        if not self._has_floors or not len(columns["episode"]):
            return columns
        floor = np.zeros(len(columns["episode"]), np.int64)
        for number in np.unique(columns["stream"]):
            mine = columns["stream"] == number
            floor[mine] = self._floors[number].get(columns["episode"][mine])
        gone = np.clip(floor - columns["t_start"], 0, columns["row_stop"] - columns["row_start"])
        return self._without(columns, gone)

    def _without(self, columns: dict[str, Array], gone: Array) -> dict[str, Array]:
        """Spans without so many of their first rows."""
        t = columns["t_start"]
        self._note_evicted(columns["stream"], columns["episode"], t, t + gone)
        return columns | {name: columns[name] + gone for name in ("row_start", "t_start", "n_evicted")}

    def _trim_carried(self, marks: Mapping[str, int]) -> None:
        carried = self._carried
        if carried is None:
            return
        for name, mark in marks.items():
            mine = carried["source"] == self.numbers[name]
            rows = carried["row_start"], carried["row_stop"]
            carried = self._without(carried, np.where(mine, np.clip(mark, *rows) - rows[0], 0))
        self._carried = carried

    def _trim_head(self, stop: int, lost: Array) -> None:
        """Take lost rows off the entries before ``stop``; what is left of them moves up to ``stop``."""
        first, entries = self.first, np.arange(self.first, stop)
        rows = np.diff(self.logical.host[first : stop + 1])
        steps = rows - (self.flags.host[first:stop] & HAS_FINAL)
        base = self.t_base.host[first:stop]
        lost = np.minimum(lost, rows)
        gone_t = base + np.minimum(lost, steps)
        self._note_evicted(self.stream.host[first:stop], self.episode.host[first:stop], base, gone_t)
        span_stop, owner, n = self._head_spans(stop)
        logical, row, source = (c.host[self._first_span : span_stop].copy() for c in self._span_columns())
        gone = np.clip((self.logical.host[first:stop] + lost)[owner] - logical, 0, n)
        rows, steps = rows - lost, steps - lost
        kept = steps > 0
        self._forget(entries[~kept])
        span_kept = kept[owner] & (n > gone)
        moved = [(row + gone)[span_kept], source[span_kept]]
        self._move_spans(span_stop, moved, (n - gone)[span_kept], int(self.logical.host[stop]))
        self._move_entries(stop, entries[kept], rows[kept], steps[kept], lost[kept])
        self.heads.append(stop)
        if (self.first > _MIN_DEAD and self.first > self.n // 2) or len(self.heads) > _MAX_HEADS:
            self._compact()

    def _move_spans(self, stop: int, columns: Sequence[Array], n: Array, end: int) -> None:
        start = stop - len(n)
        where = np.arange(start, stop)
        for column, values in zip((self.span_row, self.span_source), columns, strict=True):
            column.put(where, values)
        self.span_logical.put(np.arange(stop), np.append(np.full(start, -1), end - np.cumsum(n[::-1])[::-1]))
        self._first_span = start

    def _move_entries(self, stop: int, kept: Array, rows: Array, steps: Array, lost: Array) -> None:
        start = stop - len(kept)
        where = np.arange(start, stop)
        end, step_end = int(self.logical.host[stop]), int(self.step_sums.host[stop - 1])
        flags, values = self.flags.host[kept], [column.host[kept] for column in self._columns()]
        values[2] = values[2] + lost
        flags = flags | np.where(values[2] > 0, HEADLESS, 0).astype(np.uint8)
        flags = flags & ~np.where(lost > 0, BEGINS, 0).astype(np.uint8)
        self.flags.put(np.arange(stop), np.append(np.zeros(start, np.uint8), flags))
        for column, value in zip(self._columns(), values, strict=True):
            column.put(where, value)
        before = np.full(start, end - int(rows.sum()))
        self.logical.put(np.arange(stop), np.append(before, end - np.cumsum(rows[::-1])[::-1]))
        self.step_base = step_end - int(steps.sum())
        before = np.full(start, self.step_base)
        self.step_sums.put(np.arange(stop), np.append(before, step_end - (np.cumsum(steps[::-1])[::-1] - steps)))
        self.first = start
        self._note(start, stop)

    def _forget(self, entries: Array) -> None:
        stream, episode = self.stream.host[entries], self.episode.host[entries]
        for number in np.unique(stream):
            chosen = episode[stream == number]
            self._entries[number].put(chosen, np.full(len(chosen), -1))

    def _take(self, joined: EpisodeSpans) -> None:
        end = joined.columns["end"][joined.last]
        usable = (joined.n_rows - joined.columns["has_final"][joined.last] > 0) & (end != End.ABORTED)
        is_open = end == End.OPEN
        self._carried = joined.select(is_open)
        self._open = IndexEntries.of(joined, usable & is_open)
        self._append(IndexEntries.of(joined, usable & ~is_open))

    def _append(self, closed: IndexEntries) -> None:
        """Add episodes that ended, and write the tail anew behind them."""
        if self.n > self.n_closed:
            self._forget(np.arange(self.n_closed, self.n))
        self._write(self.n_closed, self._n_closed_spans, closed)
        self.n_closed, self._n_closed_spans = self.flags.n, self.span_row.n
        ended, growing = self._live
        for episodes in (ended, self._open, growing):
            if episodes is not None and len(episodes.episode):
                self._write(self.flags.n, self.span_row.n, episodes)
        self.n = self.flags.n

    def set_live(self, placed: IndexEntries, ended: IndexEntries, growing: IndexEntries) -> None:
        """Take in episodes of the writer that is followed: placed for good, ended, and growing ones."""
        self._live = ended, growing
        owner = np.repeat(np.arange(len(growing.n_rows)), growing.n_spans)
        offset = np.cumsum(growing.span_rows) - growing.span_rows
        offset = offset - (np.cumsum(growing.n_rows) - growing.n_rows)[owner]
        self._growing_spans = np.stack([owner, offset], 1)
        self._append(placed)
        self.version += 1

    def set_lengths(self, n_rows: Array) -> None:
        """The growing episodes of the writer that is followed are longer now, and nothing else has changed."""
        at, first_span = self.n - len(n_rows), self.span_row.n - len(self._growing_spans)
        starts = int(self.logical.host[at]) + np.cumsum(n_rows) - n_rows
        owner, offset = self._growing_spans.T
        self.logical.rewrite(at + 1, starts + n_rows)
        before = int(self.step_sums.host[at - 1]) if at else self.step_base
        self.step_sums.rewrite(at, before + np.cumsum(n_rows))
        self.span_logical.rewrite(first_span, starts[owner] + offset)
        self.version += 1

    def number_of(self, stream: str) -> int:
        """The number of a stream, which is given one if it has none."""
        if stream not in self.numbers:
            self.numbers[stream] = len(self.numbers)
            self._entries.append(EpisodeNumberMap())
            self._floors.append(EpisodeNumberMap(default=0))
            self._shown.append((EpisodeNumberMap(-1), EpisodeNumberMap(0), EpisodeNumberMap(GONE)))
            self.newest = np.append(self.newest, -1)
        return self.numbers[stream]

    def _note(self, start: int, stop: int | None = None) -> None:
        """Remember entries by stream and episode."""
        stream, episode = self.stream.host[start:stop], self.episode.host[start:stop]
        np.maximum.at(self.newest, stream, episode)
        for number in np.unique(stream):
            chosen = np.flatnonzero(stream == number)
            self._entries[number].put(episode[chosen], start + chosen)

    def _compact(self) -> None:
        """Give back the memory of entries that were evicted, once they are the larger part."""
        first, first_span = self.first, self._first_span
        for array in (self.logical, self.step_sums, self.flags, *self._columns()):
            array.rewrite(0, array.host[first:].copy())
        for array in self._span_columns():
            array.rewrite(0, array.host[first_span:].copy())
        for number, known in enumerate(self._entries):
            known.keep(self.episode.host[self.stream.host == number])
            known.map(-first)
        self.n, self.n_closed, self.first = self.n - first, self.n_closed - first, 0
        self._n_closed_spans, self._first_span = self._n_closed_spans - first_span, 0
        self.generation += 1
        self.heads = []

    def _write(self, at: int, at_span: int, new: IndexEntries) -> None:
        """Write episodes from entry ``at`` on, and their spans."""
        before = int(self.logical.host[at])
        self.logical.rewrite(at + 1, before + np.cumsum(new.n_rows))
        steps_before = int(self.step_sums.host[at - 1]) if at else self.step_base
        self.step_sums.rewrite(at, steps_before + np.cumsum(new.n_rows - (new.flags & HAS_FINAL)))
        flags, env = new.flags + ((new.t_base > 0) * HEADLESS).astype(np.uint8), new.env
        if self._has_shown:
            shown, more, begin = self._shown_of(new.stream, new.episode)
            flags = flags | (more + (begin == new.t_base) * BEGINS).astype(np.uint8)
            env = np.where(shown >= 0, shown, env)
        self.flags.rewrite(at, flags)
        self.shown_env.rewrite(at, env.astype(np.int32))
        self.stream.rewrite(at, new.stream.astype(np.int32))
        self.episode.rewrite(at, new.episode)
        self.t_base.rewrite(at, new.t_base)
        self.env.rewrite(at, new.env.astype(np.int32))
        self._note(at)
        self.span_logical.rewrite(at_span, before + np.cumsum(new.span_rows) - new.span_rows)
        self.span_row.rewrite(at_span, new.span_row)
        self.span_source.rewrite(at_span, new.span_source.astype(np.int32))

    @property
    def is_simple(self) -> bool:
        """Every episode is one span, so span i is episode i."""
        return self.span_row.n == self.n and self._first_span == self.first

    @property
    def n_rows(self) -> int:
        return int(self.logical.host[self.n])

    @property
    def n_episodes(self) -> int:
        return self.n - self.first

    @property
    def n_steps(self) -> int:
        """Steps of all episodes."""
        return int(self.step_sums.host[self.n - 1]) - self.step_base if self.n else 0

    @property
    def nbytes(self) -> int:
        arrays = (self.logical, self.step_sums, self.flags, *self._columns())
        tables = sum(table.nbytes for table in self._entries)
        return sum(a.nbytes for a in arrays) + tables + self.span_nbytes

    @property
    def span_nbytes(self) -> int:
        return sum(a.nbytes for a in (self.span_logical, self.span_row, self.span_source))

    def lengths(self, start: int = 0, stop: int | None = None) -> Array:
        """Steps of each episode of some entries, on the host; 0 where it was evicted."""
        stop = self.n if stop is None else stop
        rows = np.diff(self.logical.host[start : stop + 1])
        lengths: Array = rows - (self.flags.host[start:stop] & HAS_FINAL)
        return lengths

    def lengths_of(self, entry: Array) -> Array:
        """Steps of the episodes at these entries, on the host."""
        rows = self.logical.host[entry + 1] - self.logical.host[entry]
        lengths: Array = rows - (self.flags.host[entry] & HAS_FINAL)
        return lengths

    def find(self, stream: Array, episode: Array) -> Array:
        """Entries of episodes by stream number and episode; -1 for those that are not here."""
        found = np.full(len(stream), -1)
        for number in np.unique(stream):
            if 0 <= number < len(self._entries):
                chosen = np.flatnonzero(stream == number)
                found[chosen] = self._entries[number].get(episode[chosen])
        return found

    def has_steps_from(self, stream: Array, episode: Array, t: Array) -> Array:
        """Whether episodes are here with all of their steps from ``t`` on."""
        entry = self.find(stream, episode)
        found = entry >= 0
        found[found] = self.t_base.host[entry[found]] <= t[found]
        return found

    def entries_of(self, stream: int) -> EpisodeNumberMap:
        """The entry of each episode of a stream, or -1."""
        return self._entries[stream]

    def facts(self) -> tuple[Any, ...]:
        """What compiled loops need to know of episodes and spans, on the host."""
        episodes = self.logical.host, self.flags.host, self.t_base.host, self.stream.host, self.episode.host
        return *episodes, self.span_logical.host, self.span_row.host, self.span_source.host, self.is_simple

    def rows(self, entry: torch.Tensor, position: torch.Tensor) -> RowLocations:
        """Rows of steps: of episodes ``entry`` [B, ...], at ``position`` [B, ...] from their first stored row."""
        if self.kernels is not None and entry.dim() == 1:
            return self._compiled_rows(entry, position)
        lead = entry.shape + (1,) * (position.dim() - entry.dim())
        if self.is_simple:
            row = self.span_row.device[entry].view(lead) + position
            return RowLocations(self.span_source.device[entry].view(lead), row)
        logical = self.logical.device[entry].view(lead) + position
        span = torch.searchsorted(self.span_logical.device, logical, right=True).sub_(1)
        row = self.span_row.device[span] + (logical - self.span_logical.device[span])
        return RowLocations(self.span_source.device[span], row)

    def _compiled_rows(self, entry: torch.Tensor, position: torch.Tensor) -> RowLocations:
        assert self.kernels is not None
        lead = len(position), math.prod(position.shape[1:])  # not -1: there may be none
        flat = position.numpy().reshape(lead)
        row, source = torch.empty(position.shape, dtype=torch.int64), torch.empty(position.shape, dtype=torch.int32)
        spans = self.span_logical.host, self.span_row.host, self.span_source.host, self.is_simple
        outputs = row.numpy().reshape(lead), source.numpy().reshape(lead)
        self.kernels.rows(entry.numpy(), flat, self.logical.host, *spans, *outputs)
        return RowLocations(source, row)


def handles_of(index: Any) -> Array:
    """Handles of steps as arrays, from what a batch holds as ``index``.

    Raises:
        DataError: It is something else.
    """
    if not isinstance(index, (torch.Tensor, np.ndarray)):
        raise DataError(f"index: expected a batch's 'index', int64 of shape (batch, 3), got {type(index).__name__}")
    handles: Array = index.cpu().numpy() if isinstance(index, torch.Tensor) else index
    if handles.ndim != 2 or handles.shape[1] != 3 or handles.dtype != np.int64:
        raise DataError(f"index: expected int64 of shape (batch, 3), got {handles.dtype} of shape {handles.shape}")
    return handles


def _is_special(part: VisibleSpans) -> bool:
    return bool(part.hidden) or bool(part.discarded) or part.stream != part.source


def _first_at(spans: Array, row: int, column: int) -> int:
    """The first span whose value in a rising column is at least ``row``; looks at a few of them."""
    return bisect_left(range(len(spans)), row, key=lambda i: int(spans[i, column]))
