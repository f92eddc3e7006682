"""Keeps an episode index up to date with snapshots: new spans, evictions by their writers, evictions here."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from trajstore.errors import EpisodeNotFoundError
from trajstore.format.spans import End, EpisodeSpans, VisibleSpans, join_spans_by_episode, span_table
from trajstore.sampling.index.episode_index import EpisodeIndex
from trajstore.sampling.index.eviction_floors import EvictionFloors
from trajstore.sampling.index.index_entries import GONE, IndexEntries
from trajstore.schema import Array
from trajstore.store.snapshot import Snapshot

_ROW_START, _ROW_STOP = 3, 4  # columns of a stream's span table


class SnapshotFollower:
    """Shows the episodes of snapshots in an index, one snapshot after the other.

    It remembers how many spans of each stream it has read, the spans of episodes that are still open, and which
    rows were evicted: by the sessions that wrote them (as commit records say) or only here.
    """

    def __init__(self, index: EpisodeIndex) -> None:
        self._index = index
        self._floors = EvictionFloors()
        self._n_spans: dict[str, int] = {}  # spans read, by stream
        self._open_spans: dict[str, Array] | None = None  # span table of the open episodes
        self._first_rows: dict[str, int] = {}  # by stream: the first row of the last snapshot
        self._own_marks: dict[str, int] = {}  # by stream: rows below are not wanted here, whatever records say
        self._hidden: object = None  # what the last snapshot hid of streams that others continue
        self._limits: dict[str, int] = {}  # by stream: spans after this many were abandoned in the last snapshot

    # ---- snapshots

    def follow(self, snapshot: Snapshot) -> None:
        """Show a newer snapshot. Cost is proportional to new, open and evicted episodes.

        Streams keep the number that they got when they were first seen.
        """
        index = self._index
        for name in snapshot.names:
            index.number_of(name)
        number = np.array([index.numbers[name] for name in snapshot.names], np.int64)
        index.set_source_ranks({record.id: record.rank for record in snapshot.streams})
        parts = dict(zip((record.id for record in snapshot.streams), snapshot.parts(), strict=True))
        parts.pop(index.followed_stream, None)
        self._restart_if_rewritten(parts)
        self._evict_below_first_rows(parts)
        for name, part in parts.items():  # counts episodes that were evicted before this reader saw them as well
            new = part.spans.ints[self._n_spans.get(name, 0) :, 0]
            index.newest[number[part.stream]] = max(index.newest[number[part.stream]], new.max(initial=-1))
        unread = [part.after(self._n_spans.get(name, 0)) for name, part in parts.items()]
        self._n_spans = {name: len(part.spans) for name, part in parts.items()}
        self._first_rows = {name: part.first_row for name, part in parts.items()}
        columns = span_table(unread, None)
        columns |= {name: number[columns[name]] for name in ("stream", "source")}
        if self._open_spans is not None:
            finished = {index.numbers[name] for name, part in parts.items() if part.is_finished}
            columns = self._with_open_spans(columns, finished)
        self._add_episodes(join_spans_by_episode(self._above_floors(columns)))
        index.changes.episodes_added()

    def _restart_if_rewritten(self, parts: Mapping[str, VisibleSpans]) -> None:
        """Start over if something other than new spans and evictions has changed."""
        index = self._index
        hidden = [(name, p.stream, p.hidden, p.discarded) for name, p in parts.items() if _is_special(p)]
        is_lost = any(self._is_shown(name) for name in self._n_spans.keys() - parts.keys())
        is_back = any(self._first_rows.get(name, 0) > part.first_row for name, part in parts.items())
        is_moved = bool(hidden) and any(
            part.first_row != self._first_rows.get(name, 0) for name, part in parts.items()
        )
        limits = {name: part.limit for name, part in parts.items() if part.limit is not None}
        is_other_lineage = any(limits.get(n) != self._limits.get(n) for n in parts.keys() & self._n_spans.keys())
        self._limits = limits
        if hidden != self._hidden or is_lost or is_back or is_moved or is_other_lineage:
            self._hidden = hidden
            own = index.closed_entries(index.numbers.get(index.followed_stream, -1))
            index.restart()
            self._n_spans, self._open_spans, self._first_rows = {}, None, {}
            index.append(own)
            index.changes.steps_removed()  # some may be: those of streams that are no longer shown

    def _is_shown(self, stream: str) -> bool:
        """Whether the index holds episodes of a stream."""
        index = self._index
        return bool((index.stream.host[index.first : index.n] == index.numbers[stream]).any())

    def _with_open_spans(self, columns: dict[str, Array], finished: set[int]) -> dict[str, Array]:
        """Add the spans of episodes that were open; in streams that are finished now, these episodes were cut."""
        spans = dict(self._open_spans or {})
        is_cut = np.isin(spans["source"], list(finished)) & (spans["end"] == End.OPEN)
        spans["end"] = np.where(is_cut, End.CUT, spans["end"])
        return {name: np.concatenate([spans[name], column]) for name, column in columns.items()}

    def _add_episodes(self, joined: EpisodeSpans) -> None:
        end = joined.columns["end"][joined.last]
        usable = (joined.n_rows - joined.columns["has_final"][joined.last] > 0) & (end != End.ABORTED)
        is_open = end == End.OPEN
        self._open_spans = joined.select(is_open)
        self._index.append(
            IndexEntries.of(joined, usable & ~is_open), open_episodes=IndexEntries.of(joined, usable & is_open)
        )

    # ---- evictions

    @property
    def marks(self) -> Array:
        """By source: rows below were evicted, by their writer or here."""
        index = self._index
        marks = np.zeros(len(index.numbers) + 1, np.int64)
        for name, row in (*self._first_rows.items(), *self._own_marks.items()):
            source = index.numbers[name] + 1
            marks[source] = max(marks[source], row)
        return marks

    def set_marks(self, marks: Mapping[str, int]) -> None:
        """Note by stream that rows below belong to no episode of the index, now and later."""
        self._own_marks |= marks

    def _evict_below_first_rows(self, parts: Mapping[str, VisibleSpans]) -> None:
        """Remove rows that their writers evicted since the last snapshot."""
        index = self._index
        marks = {
            name: part.first_row
            for name, part in parts.items()
            if name in self._n_spans and part.first_row > self._first_rows.get(name, 0)
        }
        if not marks:
            return
        self._trim_open_spans(marks)
        stop = 0
        for name, mark in marks.items():
            spans = parts[name].spans.ints
            low = _first_at(spans, self._first_rows.get(name, 0), column=_ROW_STOP)
            episodes = spans[low : _first_at(spans, mark, column=_ROW_START), 0]
            entry = index.find(np.full(len(episodes), index.numbers[name]), episodes)
            entry = entry[entry < index.n_closed]
            stop = max(stop, int(entry.max()) + 1 if len(entry) else 0)
        if stop:
            by_source = {index.numbers[name] + 1: mark for name, mark in marks.items()}
            index.trim_front(stop, index.rows_below(by_source, stop))

    def _trim_open_spans(self, marks: Mapping[str, int]) -> None:
        spans = self._open_spans
        if spans is None:
            return
        for name, mark in marks.items():
            mine = spans["source"] == self._index.numbers[name]
            rows = spans["row_start"], spans["row_stop"]
            spans = self._without_first_rows(spans, np.where(mine, np.clip(mark, *rows) - rows[0], 0))
        self._open_spans = spans

    def _above_floors(self, columns: dict[str, Array]) -> dict[str, Array]:
        """Spans without the steps that were evicted here."""
        if not self._floors or not len(columns["episode"]):
            return columns
        floor = self._floors.of(columns["stream"], columns["episode"])
        n_lost = np.clip(floor - columns["t_start"], 0, columns["row_stop"] - columns["row_start"])
        return self._without_first_rows(columns, n_lost)

    def _without_first_rows(self, columns: dict[str, Array], n_lost: Array) -> dict[str, Array]:
        t = columns["t_start"]
        self._index.record_evicted(columns["stream"], columns["episode"], t, t + n_lost)
        return columns | {name: columns[name] + n_lost for name in ("row_start", "t_start", "n_evicted")}

    def evict(self, stream: Array, episode: Array, t: Array) -> tuple[Array, Array]:
        """Remove the steps of episodes before ``t`` (`GONE`: all steps).

        Cost is proportional to the number of entries up to the last of these episodes.

        Returns:
            Episode and t of those that the followed writer has not committed whole. The index still has their
            steps: the next `EpisodeIndex.set_live` must leave them out.
        """
        index = self._index
        own = index.numbers.get(index.followed_stream, -1)
        other = stream != own
        self._floors.raise_to(stream[other], episode[other], t[other])
        entry = index.find(stream, episode)
        is_closed = (entry >= 0) & (entry < index.n_closed)
        is_open = entry >= index.n_closed
        is_live = is_open & (stream == own)
        if is_live.any():
            base = index.t_base.host[entry[is_live]]
            stops = np.minimum(t[is_live], base + index.lengths_of(entry[is_live]))
            index.record_evicted(stream[is_live], episode[is_live], base, stops)
        if is_closed.any():  # entries may have other numbers afterwards
            stop = int(entry[is_closed].max()) + 1
            n_lost = np.zeros(stop - index.first, np.int64)
            n_lost[entry[is_closed] - index.first] = t[is_closed] - index.t_base.host[entry[is_closed]]
            index.trim_front(stop, n_lost.clip(0))
        if (is_open & ~is_live).any() and self._open_spans is not None:
            self._add_episodes(join_spans_by_episode(self._above_floors(self._open_spans)))
        index.changes.episodes_added()
        return episode[is_live], t[is_live]

    # ---- the order of a checkpoint

    def order(self) -> dict[str, Any]:
        """The episodes of the index, in order, and the first step of each; what `arrange` takes."""
        index = self._index
        entry = slice(index.first, index.n)
        columns = {"stream": index.stream, "episode": index.episode, "t": index.t_base}
        found: dict[str, Any] = {"streams": list(index.numbers), "newest": index.newest.copy()}
        found |= {n: c.host[entry].astype(np.int64) for n, c in columns.items()}
        if index.overrides:
            env, flags, begin = index.overrides.get(found["stream"], found["episode"])
            found |= {"env": env, "flags": flags, "begin": begin}
        return found

    def arrange(self, order: Mapping[str, Any], *, growing: Collection[str] = ()) -> None:
        """Show only the episodes of another index, in its order and from its first steps on.

        All episodes of this index must have ended. Episodes of ``growing`` streams that are newer than any that the
        other index had seen follow at the end.

        Raises:
            EpisodeNotFoundError: One of the episodes is not in this index.
        """
        index = self._index
        number = np.array([index.numbers.get(name, -1) for name in order["streams"]], np.int64)
        stream, episode, t = (
            number[np.asarray(order["stream"])],
            np.asarray(order["episode"]),
            np.asarray(order["t"]),
        )
        entry = index.find(stream, episode)
        if (entry < 0).any():
            lost = int(np.flatnonzero(entry < 0)[0])
            name = order["streams"][int(order["stream"][lost])]
            raise EpisodeNotFoundError(
                f"episode {episode[lost]} of stream '{name}' is not in this reader's snapshot"
            )
        every = index.closed_entries()
        newest = np.full(len(index.numbers), -1)
        known = number >= 0
        np.maximum.at(newest, number[known], np.asarray(order["newest"])[: len(number)][known])
        is_growing = np.array([name in growing for name in index.numbers], bool)
        is_newer = (every.episode > newest[every.stream]) & is_growing[every.stream]
        old = every.stream[~is_newer], every.episode[~is_newer]
        self._floors.set_to(*old, np.full(len(old[0]), GONE))
        self._floors.set_to(stream, episode, t)
        if "env" in order:
            index.overrides.put(stream, episode, *(np.asarray(order[name]) for name in ("env", "flags", "begin")))
        first = index.first
        index.restart()
        index.append(every.take(entry - first).from_step(t))
        if is_newer.any():
            index.append(every.take(np.flatnonzero(is_newer)))
        index.newest = np.maximum(index.newest, newest)
        index.changes.episodes_added()


def _is_special(part: VisibleSpans) -> bool:
    return bool(part.hidden) or bool(part.discarded) or part.stream != part.source


def _first_at(spans: Array, row: int, column: int) -> int:
    """The first span whose value in a rising column is at least ``row``, by bisection."""
    return bisect_left(range(len(spans)), row, key=lambda i: int(spans[i, column]))
