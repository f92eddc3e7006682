"""The index of sampleable episodes: how entries are added, rewritten and taken off the front.

Episodes that ended are appended and keep their entries. Open episodes follow them as a short tail that is rewritten
at every update. Evictions take steps off the front.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType

import numpy as np
import torch

from trajstore.sampling.index.change_log import ChangeLog
from trajstore.sampling.index.episode_facts import LOGICAL, ROW, SHIFT, SOURCE, SPAN_SOURCE, EpisodeFacts
from trajstore.sampling.index.episode_numbers import EpisodeNumberMap
from trajstore.sampling.index.episode_overrides import EpisodeOverrides
from trajstore.sampling.index.episode_tensors import EpisodeTensors
from trajstore.sampling.index.index_entries import (
    BEGINS,
    HAS_FINAL,
    HEADLESS,
    IndexEntries,
    RowLocations,
    joined_entries,
)
from trajstore.schema import Array

_MIN_DEAD = 1 << 16  # fewer evicted entries than this are not worth compacting


class EpisodeIndex(EpisodeTensors):
    """Sampleable episodes, updated in place. `SnapshotFollower` and `BatchAssembler` write it; others read.

    Attributes:
        n_closed: Number of entries of episodes that ended, unused ones included. These entries change only when
            their steps are evicted.
        followed_stream: Id of the stream whose episodes come by `set_live` and not with snapshots; "" for none.
        overrides: Facts that a redistribution gave to episodes.
        changes: The log of all changes, in order.
    """

    def __init__(
        self, device: torch.device, kernels: ModuleType | None = None, growth_kernels: ModuleType | None = None
    ) -> None:
        super().__init__(device, kernels, growth_kernels)
        self.n_closed = 0
        self.changes = ChangeLog()
        self.followed_stream = ""
        self.overrides = EpisodeOverrides()
        self._n_closed_spans = 0
        self._facts = EpisodeFacts(device)
        self._open: IndexEntries | None = None  # open episodes of snapshots
        self._live: tuple[IndexEntries | None, IndexEntries | None] = (None, None)  # of the followed writer
        self._growing_spans = np.empty((2, 0), np.int64)  # of growing episodes: which one, and where in it

    @property
    def version(self) -> int:
        """Number of changes so far."""
        return self.changes.version

    @property
    def nbytes(self) -> int:
        """Memory on the device, and that of the entry tables on the host."""
        return super().nbytes + self._facts.nbytes

    # ---- rows

    def facts(self) -> torch.Tensor:
        """The table of facts of all entries, on the device; its columns are those of `episode_facts`."""
        return self._facts.of_entries(self, self.changes, self.n_closed)

    def rows(self, entry: torch.Tensor, position: torch.Tensor) -> RowLocations:
        """Locations of the steps at ``position`` [B, ...] of entries [B, ...].

        A position counts from the first stored row of the episode.
        """
        if self.kernels is not None and entry.dim() == 1:
            return self._compiled_rows(entry, position)
        facts = self.facts()[entry]
        return self.rows_of(facts.view(*entry.shape, *(1,) * (position.dim() - entry.dim()), -1), position)

    def rows_of(self, facts: torch.Tensor, position: torch.Tensor) -> RowLocations:
        """Locations of steps, from the facts of their episodes, whose axes before the last broadcast."""
        if self.is_simple:
            return RowLocations(self._as_source(facts[..., SOURCE]), facts[..., ROW] + position)
        logical = facts[..., LOGICAL] + position
        # The number of a row's span is the number of other spans than the first that begin at or before the row.
        span = torch.searchsorted(self.span_logical.device[1:], logical, right=True)
        found = self._facts.of_spans(self, self.changes, self._n_closed_spans)[span]
        return RowLocations(self._as_source(found[..., SPAN_SOURCE]), logical + found[..., SHIFT])

    def _as_source(self, source: torch.Tensor) -> torch.Tensor:
        """Sources as they are passed on: compiled loops are compiled for contiguous int32."""
        return source if self.kernels is None else source.to(torch.int32).contiguous()

    def _compiled_rows(self, entry: torch.Tensor, position: torch.Tensor) -> RowLocations:
        assert self.kernels is not None
        lead = len(position), math.prod(position.shape[1:])  # not -1, which an empty array does not allow
        flat = position.numpy().reshape(lead)
        row, source = torch.empty(position.shape, dtype=torch.int64), torch.empty(position.shape, dtype=torch.int32)
        spans = self.span_logical.host, self.span_row.host, self.span_source.host, self.is_simple
        outputs = row.numpy().reshape(lead), source.numpy().reshape(lead)
        self.kernels.rows(entry.numpy(), flat, self.logical.host, *spans, *outputs)
        return RowLocations(source, row)

    # ---- streams

    def number_of(self, stream: str) -> int:
        """The number of a stream; a stream that is new to the index gets the next free one."""
        if stream not in self.numbers:
            self.numbers[stream] = len(self.numbers)
            self._entries.append(EpisodeNumberMap())
            self.overrides.add_stream()
            self.newest = np.append(self.newest, -1)
        return self.numbers[stream]

    def set_source_ranks(self, ranks: Mapping[str, int | None]) -> None:
        """Note the rank that recorded each stream, for streams whose rank is not known yet."""
        n = self._source_ranks.n
        if len(self.numbers) == n:
            return
        by_number = np.full(len(self.numbers), self.rank)
        for stream, rank in ranks.items():
            by_number[self.numbers[stream]] = rank or 0
        self._source_ranks.rewrite(n, by_number[n:])

    # ---- adding entries

    def restart(self) -> None:
        """Remove all entries; streams keep their numbers."""
        self.first = self.n = self.n_closed = self._n_closed_spans = self._first_span = self.step_base = 0
        self.logical.rewrite(0, np.zeros(1, np.int64))
        for array in (self.step_sums, self.flags, *self._columns(), *self._span_columns()):
            array.rewrite(0, array.host[:0])
        for entries in self._entries:
            entries.clear()
        self.changes.entries_renumbered()

    def append(self, closed: IndexEntries, open_episodes: IndexEntries | None = None) -> None:
        """Add episodes that ended and rewrite the tail behind them.

        Args:
            closed: Entries of episodes that ended.
            open_episodes: Entries that replace the open episodes of snapshots in the tail; None keeps them.
        """
        if open_episodes is not None:
            self._open = open_episodes
        if self.n > self.n_closed:
            self._unregister(np.arange(self.n_closed, self.n))
        ended, growing = self._live
        tail = [episodes for episodes in (ended, self._open, growing) if episodes is not None]
        self._write(self.n_closed, self._n_closed_spans, joined_entries([closed, *tail]))
        self.n_closed += len(closed.episode)
        self._n_closed_spans += len(closed.span_rows)
        self.n = self.flags.n

    def set_live(self, placed: IndexEntries, ended: IndexEntries, growing: IndexEntries) -> None:
        """Update the episodes of the followed writer.

        Args:
            placed: Episodes that ended and are committed whole; they are appended for good.
            ended: Episodes that ended and have live rows; they replace those of the call before.
            growing: Open episodes; they replace those of the call before.
        """
        self._live = ended, growing
        owner = np.repeat(np.arange(len(growing.n_rows)), growing.n_spans)
        offset = np.cumsum(growing.span_rows) - growing.span_rows
        offset = offset - (np.cumsum(growing.n_rows) - growing.n_rows)[owner]
        self._growing_spans = np.stack([owner, offset])
        self.append(placed)
        self.changes.episodes_added()

    def set_lengths(self, n_rows: Array) -> None:
        """Set the number of rows of the growing episodes of the last `set_live`; nothing else changes."""
        owner, offset = self._growing_spans
        at, first_span = self.n - len(n_rows), self.span_row.n - len(owner)
        before = int(self.step_sums.host[at - 1]) if at else self.step_base
        if self.growth_kernels is not None:
            outputs = self.logical.host, self.step_sums.host, self.span_logical.host
            self.growth_kernels.set_lengths(n_rows, owner, offset, before, *outputs)
        else:
            starts = int(self.logical.host[at]) + np.cumsum(n_rows) - n_rows
            self.logical.rewrite(at + 1, starts + n_rows)
            self.step_sums.rewrite(at, before + np.cumsum(n_rows))
            self.span_logical.rewrite(first_span, starts[owner] + offset)
        self.changes.episodes_added()

    def _write(self, at: int, at_span: int, new: IndexEntries) -> None:
        """Write episodes from entry ``at`` on, and their spans from ``at_span`` on."""
        before = int(self.logical.host[at])
        self.logical.rewrite(at + 1, before + np.cumsum(new.n_rows))
        steps_before = int(self.step_sums.host[at - 1]) if at else self.step_base
        self.step_sums.rewrite(at, steps_before + np.cumsum(new.n_rows - (new.flags & HAS_FINAL)))
        flags, env = new.flags + ((new.t_base > 0) * HEADLESS).astype(np.uint8), new.env
        if self.overrides:
            other_env, more_flags, begin = self.overrides.get(new.stream, new.episode)
            flags = flags | (more_flags + (begin == new.t_base) * BEGINS).astype(np.uint8)
            env = np.where(other_env >= 0, other_env, env)
        self.flags.rewrite(at, flags)
        self.shown_env.rewrite(at, env.astype(np.int32))
        self.stream.rewrite(at, new.stream.astype(np.int32))
        self.episode.rewrite(at, new.episode)
        self.t_base.rewrite(at, new.t_base)
        self.env.rewrite(at, new.env.astype(np.int32))
        self._register(at)
        self.span_logical.rewrite(at_span, before + np.cumsum(new.span_rows) - new.span_rows)
        self.span_row.rewrite(at_span, new.span_row)
        self.span_source.rewrite(at_span, new.span_source.astype(np.int32))

    def _register(self, start: int, stop: int | None = None) -> None:
        """Make entries findable by stream and episode."""
        stream, episode = self.stream.host[start:stop], self.episode.host[start:stop]
        for number, chosen in _by_stream(stream):
            self.newest[number] = max(self.newest[number], episode[chosen].max())
            self._entries[number].put(episode[chosen], start + chosen)

    def _unregister(self, entries: Array) -> None:
        stream, episode = self.stream.host[entries], self.episode.host[entries]
        for number, chosen in _by_stream(stream):
            self._entries[number].put(episode[chosen], np.full(len(chosen), -1))

    def closed_entries(self, stream: int | None = None) -> IndexEntries:
        """The entries of episodes that ended, of one stream or of all, as they were written."""
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

    # ---- removing steps

    def record_evicted(
        self, stream: Array, episode: Array, start: Array, stop: Array, *, n_rewritten: int = 0
    ) -> None:
        """Record that the steps from ``start`` to ``stop`` of episodes are removed; see `Removal`.

        Empty ranges do not count.
        """
        chosen = np.flatnonzero(stop > start)
        if len(chosen) or n_rewritten:
            columns = (stream, episode, start, stop)
            ranges = np.stack([np.asarray(a[chosen], np.int64) for a in columns], 1)
            self.changes.steps_removed(ranges, n_rewritten=n_rewritten)

    def rows_below(self, marks: Mapping[int, int], stop: int) -> Array:
        """For each entry from `first` to ``stop``: how many of its rows lie below the mark of their source."""
        span_stop, owner, n = self._spans_before(stop)
        row, source = (c.host[self._first_span : span_stop] for c in (self.span_row, self.span_source))
        mark = np.array([marks.get(s, 0) for s in range(int(source.max(initial=0)) + 1)], np.int64)[source]
        return np.bincount(owner, np.clip(mark - row, 0, n), stop - self.first).astype(np.int64)

    def _spans_before(self, stop: int) -> tuple[int, Array, Array]:
        """Spans of the entries from `first` to ``stop``: where they stop, and for each its entry and its rows.

        The entry is counted from `first`.
        """
        span_stop = int(np.searchsorted(self.span_logical.host[: self._n_closed_spans], self.logical.host[stop]))
        logical = self.span_logical.host[self._first_span : span_stop]
        owner = np.searchsorted(self.logical.host[self.first : stop + 1], logical, side="right") - 1
        return span_stop, owner, np.diff(np.append(logical, self.logical.host[stop]))

    def trim_front(self, stop: int, n_lost: Array) -> None:
        """Remove the first ``n_lost`` rows of each entry from `first` to ``stop``.

        The remaining entries move up to ``stop``, so that entries from there on stay as they are. An entry without
        steps is removed.
        """
        first, entries = self.first, np.arange(self.first, stop)
        rows = np.diff(self.logical.host[first : stop + 1])
        steps = rows - (self.flags.host[first:stop] & HAS_FINAL)
        base = self.t_base.host[first:stop]
        n_lost = np.minimum(n_lost, rows)
        stop_t = base + np.minimum(n_lost, steps)
        episodes = self.stream.host[first:stop], self.episode.host[first:stop]
        self.record_evicted(*episodes, base, stop_t, n_rewritten=stop)
        span_stop, owner, n = self._spans_before(stop)
        logical, row, source = (c.host[self._first_span : span_stop].copy() for c in self._span_columns())
        n_cut = np.clip((self.logical.host[first:stop] + n_lost)[owner] - logical, 0, n)
        rows, steps = rows - n_lost, steps - n_lost
        kept = steps > 0
        self._unregister(entries[~kept])
        span_kept = kept[owner] & (n > n_cut)
        moved = [(row + n_cut)[span_kept], source[span_kept]]
        self._move_spans(span_stop, moved, (n - n_cut)[span_kept], int(self.logical.host[stop]))
        self._move_entries(stop, entries[kept], rows[kept], steps[kept], n_lost[kept])
        if self.first > _MIN_DEAD and self.first > self.n // 2:
            self._compact()

    def _move_spans(self, stop: int, columns: Sequence[Array], n: Array, end: int) -> None:
        """Write the remaining spans of the front so that they end at span ``stop`` and logical row ``end``."""
        start = stop - len(n)
        where = np.arange(start, stop)
        for column, values in zip((self.span_row, self.span_source), columns, strict=True):
            column.put(where, values)
        self.span_logical.put(np.arange(stop), np.append(np.full(start, -1), end - np.cumsum(n[::-1])[::-1]))
        self._first_span = start

    def _move_entries(self, stop: int, kept: Array, rows: Array, steps: Array, n_lost: Array) -> None:
        """Write the remaining entries of the front so that they end at entry ``stop``."""
        start = stop - len(kept)
        where = np.arange(start, stop)
        end, step_end = int(self.logical.host[stop]), int(self.step_sums.host[stop - 1])
        flags, values = self.flags.host[kept], [column.host[kept] for column in self._columns()]
        values[2] = values[2] + n_lost
        flags = flags | np.where(values[2] > 0, HEADLESS, 0).astype(np.uint8)
        flags = flags & ~np.where(n_lost > 0, BEGINS, 0).astype(np.uint8)
        self.flags.put(np.arange(stop), np.append(np.zeros(start, np.uint8), flags))
        for column, value in zip(self._columns(), values, strict=True):
            column.put(where, value)
        before = np.full(start, end - int(rows.sum()))
        self.logical.put(np.arange(stop), np.append(before, end - np.cumsum(rows[::-1])[::-1]))
        self.step_base = step_end - int(steps.sum())
        before = np.full(start, self.step_base)
        self.step_sums.put(np.arange(stop), np.append(before, step_end - (np.cumsum(steps[::-1])[::-1] - steps)))
        self.first = start
        self._register(start, stop)

    def _compact(self) -> None:
        """Free the memory of evicted entries; all others get lower numbers."""
        first, first_span = self.first, self._first_span
        for array in (self.logical, self.step_sums, self.flags, *self._columns()):
            array.rewrite(0, array.host[first:].copy())
        for array in self._span_columns():
            array.rewrite(0, array.host[first_span:].copy())
        for number, entries in enumerate(self._entries):
            entries.keep(self.episode.host[self.stream.host == number])
            entries.add_to_all(-first)
        self.n, self.n_closed, self.first = self.n - first, self.n_closed - first, 0
        self._n_closed_spans, self._first_span = self._n_closed_spans - first_span, 0
        self.changes.entries_renumbered()


def _by_stream(stream: Array) -> Iterator[tuple[int, Array]]:
    """Each stream number that occurs, and where; fast in the common case that all are equal."""
    if len(stream) and (stream == stream[0]).all():
        yield int(stream[0]), np.arange(len(stream))
        return
    for number in np.unique(stream):
        yield int(number), np.flatnonzero(stream == number)
