"""The episodes that can be sampled, as tensors: arithmetic from draws to rows, no I/O.

Episodes stand in order of arrival: those that ended are appended and never move, those still open follow as a
small tail that is written anew at every update. Rows are counted through, over all episodes in that order, so one
prefix sum answers how long an episode is and which span holds a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch

from trajstore.growing import Growing
from trajstore.schema import Array
from trajstore.snapshot import Snapshot
from trajstore.spans import End, JoinedSpans, StreamSpans, join, span_table

_CPU = torch.device("cpu")
_DENSE, _MIN_DENSE = 4, 1 << 16

HAS_FINAL = 1
TERMINATED = 2
TRUNCATED = 4
OPEN = 8
HEADLESS = 16
MARK = 128  # never set on an episode; free for telling it from 0


LIVE = 0  # the source of rows that are in no stream yet


@dataclass(frozen=True, slots=True)
class Rows:
    """Where steps lie: source (one more than the number of the stream that holds them) and row.

    ``source`` broadcasts against ``row``.
    """

    source: torch.Tensor
    row: torch.Tensor


class EpisodeIndex:
    """Joined, sampleable episodes of a snapshot; updated in place as the snapshot advances.

    Attributes:
        n: Episodes, the open ones included.
        n_closed: Episodes that ended; their entries never change.
        version: Changes with every update.
        generation: Changes when entries moved or vanished, so that what was derived from them is void.
    """

    def __init__(self, device: torch.device, kernels: ModuleType | None = None) -> None:
        self.device = device
        self._kernels = kernels
        self.n = self.n_closed = self.version = self.generation = 0
        self._n_closed_spans = 0
        self.logical = Growing(np.int64, device)  # first row of each episode, counted through; one more at the end
        self.step_sums = Growing(np.int64, device)  # steps up to and including each episode
        self.flags = Growing(np.uint8, device)
        self.stream = Growing(np.int32, device)
        self.episode = Growing(np.int64, device)
        self.t_base = Growing(np.int64, device)  # t of the first row that is still stored
        self.env = Growing(np.int32, device)
        self.span_logical = Growing(np.int64, device)
        self.span_row = Growing(np.int64, device)
        self.span_source = Growing(np.int32, device)
        self.logical.rewrite(0, np.zeros(1, np.int64))
        self._seen: dict[str, int] = {}  # spans taken, by stream
        self._carried: dict[str, Array] | None = None  # spans of the open episodes
        self._signature: object = None
        self._entries: list[Growing] = []  # by stream number: the entry of each episode, or -1
        self._far: dict[tuple[int, int], int] = {}  # the same for episodes of outlandish numbers
        self.numbers: dict[str, int] = {}  # of streams, by id

    def update(self, snapshot: Snapshot) -> None:
        """Take in what a newer snapshot shows; costs what is new and what is open.

        Streams keep the number they got when they were first seen.
        """
        for name in snapshot.names:
            if name not in self.numbers:
                self.numbers[name] = len(self.numbers)
                self._entries.append(Growing(np.int64, _CPU))
        number = np.array([self.numbers[name] for name in snapshot.names], np.int64)
        parts = snapshot.parts()
        signature = [(p.source, p.stream, p.first_row, p.hidden, p.discarded) for p in parts if _is_special(p)]
        if signature != self._signature:
            self._restart(signature)
        ids = [record.id for record in snapshot.streams]
        fresh = [part.after(self._seen.get(name, 0)) for name, part in zip(ids, parts, strict=True)]
        self._seen = {name: len(part.spans) for name, part in zip(ids, parts, strict=True)}
        columns = span_table(fresh, None)
        columns |= {name: number[columns[name]] for name in ("stream", "source")}
        if self._carried is not None:
            columns = self._with_carried(columns, {int(number[p.source]) for p in parts if p.is_finished})
        self._take(join(columns))
        self.version += 1

    def _with_carried(self, columns: dict[str, Array], finished: set[int]) -> dict[str, Array]:
        """Add the spans of episodes that were open; those of streams that are finished now are cut."""
        carried = dict(self._carried or {})
        is_cut = np.isin(carried["source"], list(finished)) & (carried["end"] == End.OPEN)
        carried["end"] = np.where(is_cut, End.CUT, carried["end"])
        return {name: np.concatenate([carried[name], column]) for name, column in columns.items()}

    def _restart(self, signature: object) -> None:
        self._signature = signature
        self._seen, self._carried = {}, None
        self.n = self.n_closed = self._n_closed_spans = 0
        self._far = {}
        for entries in self._entries:
            entries.rewrite(0, np.empty(0, np.int64))
        self.generation += 1

    def _take(self, joined: JoinedSpans) -> None:
        end = joined.columns["end"][joined.last]
        usable = (joined.n_rows - joined.columns["has_final"][joined.last] > 0) & (end != End.ABORTED)
        is_open = end == End.OPEN
        self._write(self.n_closed, self._n_closed_spans, joined, usable & ~is_open)
        self.n_closed, self._n_closed_spans = self.flags.n, self.span_row.n
        self._write(self.n_closed, self._n_closed_spans, joined, usable & is_open)
        self.n = self.flags.n
        self._carried = joined.select(is_open)

    def _note(self, at: int) -> None:
        """Remember the entries from ``at`` on by stream and episode."""
        stream, episode = self.stream.host[at:], self.episode.host[at:]
        # Writers number episodes without large gaps; a table of any other numbers would take any memory.
        far = episode >= _DENSE * (at + len(episode)) + _MIN_DENSE
        for i in np.flatnonzero(far):
            self._far[int(stream[i]), int(episode[i])] = at + int(i)
        for number in np.unique(stream[~far]):
            chosen = np.flatnonzero((stream == number) & ~far)
            known, high = self._entries[number], int(episode[chosen].max()) + 1
            if high > known.n:
                known.rewrite(known.n, np.full(high - known.n, -1))
            known.put(episode[chosen], at + chosen)

    def _write(self, at: int, at_span: int, joined: JoinedSpans, chosen: Array) -> None:
        """Write the chosen episodes from entry ``at`` on, and their spans."""
        s, first, last = joined.columns, joined.first[chosen], joined.last[chosen]
        n_rows = joined.n_rows[chosen]
        before = int(self.logical.host[at])
        self.logical.rewrite(at + 1, before + np.cumsum(n_rows))
        steps_before = int(self.step_sums.host[at - 1]) if at else 0
        self.step_sums.rewrite(at, steps_before + np.cumsum(n_rows - s["has_final"][last]))
        end = s["end"][last]
        flags = s["has_final"][last] * HAS_FINAL + (end == End.TERMINATED) * TERMINATED
        flags = flags + (end == End.TRUNCATED) * TRUNCATED + (end == End.OPEN) * OPEN
        t_base = s["t_start"][first]
        self.flags.rewrite(at, (flags + (t_base > 0) * HEADLESS).astype(np.uint8))
        self.stream.rewrite(at, s["stream"][last].astype(np.int32))
        self.episode.rewrite(at, s["episode"][last])
        self.t_base.rewrite(at, t_base)
        self.env.rewrite(at, s["env"][last].astype(np.int32))
        self._note(at)
        spans = joined.span_numbers(chosen)
        rows = s["row_stop"][spans] - s["row_start"][spans]
        spans, rows = spans[rows > 0], rows[rows > 0]
        self.span_logical.rewrite(at_span, before + np.cumsum(rows) - rows)
        self.span_row.rewrite(at_span, s["row_start"][spans])
        self.span_source.rewrite(at_span, (s["source"][spans] + 1).astype(np.int32))

    @property
    def is_simple(self) -> bool:
        """Every episode is one span, so span i is episode i."""
        return self.span_row.n == self.n

    @property
    def n_rows(self) -> int:
        return int(self.logical.host[self.n])

    @property
    def nbytes(self) -> int:
        arrays = (self.logical, self.step_sums, self.flags, self.stream, self.episode, self.t_base, self.env)
        return sum(a.nbytes for a in (*arrays, *self._entries)) + self.span_nbytes

    @property
    def span_nbytes(self) -> int:
        return sum(a.nbytes for a in (self.span_logical, self.span_row, self.span_source))

    def lengths(self, start: int = 0) -> Array:
        """Steps of each episode from entry ``start`` on, on the host."""
        rows = np.diff(self.logical.host[start : self.n + 1])
        lengths: Array = rows - (self.flags.host[start : self.n] & HAS_FINAL)
        return lengths

    def find(self, stream: Array, episode: Array) -> Array:
        """Entries of episodes by stream number and episode; -1 for those that are not here."""
        found = np.full(len(stream), -1)
        for number in np.unique(stream):
            if 0 <= number < len(self._entries):
                known, chosen = self._entries[number].host, np.flatnonzero(stream == number)
                chosen = chosen[(episode[chosen] >= 0) & (episode[chosen] < len(known))]
                found[chosen] = known[episode[chosen]]
        if self._far:
            for i in np.flatnonzero(found < 0):
                found[i] = self._far.get((int(stream[i]), int(episode[i])), -1)
        return found

    def rows(self, entry: torch.Tensor, position: torch.Tensor) -> Rows:
        """Rows of steps: of episodes ``entry`` [B, ...], at ``position`` [B, ...] from their first stored row."""
        if self._kernels is not None and entry.dim() == 1:
            return self._compiled_rows(entry, position)
        lead = entry.shape + (1,) * (position.dim() - entry.dim())
        if self.is_simple:
            row = self.span_row.device[entry].view(lead) + position
            return Rows(self.span_source.device[entry].view(lead), row)
        logical = self.logical.device[entry].view(lead) + position
        span = torch.searchsorted(self.span_logical.device, logical, right=True).sub_(1)
        row = self.span_row.device[span] + (logical - self.span_logical.device[span])
        return Rows(self.span_source.device[span], row)

    def _compiled_rows(self, entry: torch.Tensor, position: torch.Tensor) -> Rows:
        assert self._kernels is not None
        n, flat = len(position), position.numpy().reshape(len(position), -1)
        row, source = torch.empty(position.shape, dtype=torch.int64), torch.empty(position.shape, dtype=torch.int32)
        spans = self.span_logical.host, self.span_row.host, self.span_source.host, self.is_simple
        outputs = row.numpy().reshape(n, -1), source.numpy().reshape(n, -1)
        self._kernels.rows(entry.numpy(), flat, self.logical.host, *spans, *outputs)
        return Rows(source, row)


def _is_special(part: StreamSpans) -> bool:
    return part.first_row > 0 or bool(part.hidden) or bool(part.discarded) or part.stream != part.source
