"""Makes the span table of a damaged stream name only rows that are intact.

Rows keep their numbers, so marks, lineages, derived columns and handles stay valid. An episode ends before its
first damaged row, as `cut`; its later spans stay in the table without rows. Spans that can't be read any more are
left out, and an episode that began in one of them is lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from trajstore.format.commit_record import CommitRecord
from trajstore.format.spans import End
from trajstore.schema import Array, Schema

EPISODE, ENV, T_START, ROW_START, ROW_STOP, END, HAS_FINAL, PRESENT, TEXT_STOP = range(9)
_RETURN = 0
_EMPTY = b"{}"  # the shortest text: an object without values

Rewards = Callable[[int, int], Array]  # the rewards of rows [start, stop), which are intact


@dataclass(frozen=True, slots=True)
class DamagedRows:
    """Ranges of damaged rows of a stream.

    Attributes:
        every: Ranges of fields that a final row has.
        others: Ranges of fields whose values in final rows are filler.
    """

    every: Sequence[tuple[int, int]] = ()
    others: Sequence[tuple[int, int]] = ()

    def first_in(self, start: int, stop: int, final: int | None) -> int | None:
        """The first damaged row among ``[start, stop)``; ``final`` is the final row, if it is one of them."""
        found = [_first(self.every, start, stop), _first(self.others, start, stop if final is None else final)]
        return min((row for row in found if row is not None), default=None)

    def hits(self, start: int, stop: int) -> bool:
        """Whether a row among ``[start, stop)`` is damaged."""
        return self.first_in(start, stop, None) is not None

    def overlaps(self, start: Array, stop: Array) -> Array:
        """Which of many ranges of rows have a damaged one."""
        found = np.zeros(len(start), bool)
        for low, high in (*self.every, *self.others):
            found |= (start < high) & (stop > low)
        return found


def _first(ranges: Sequence[tuple[int, int]], start: int, stop: int) -> int | None:
    hits = (max(low, start) for low, high in ranges if low < stop and high > start and start < stop)
    return min(hits, default=None)


@dataclass(slots=True)
class SpanTable:
    """The span table of a stream as it was read.

    Attributes:
        ints: All rows; of unreadable ones, zeros.
        floats: The same.
        is_known: Which rows were read.
        text: The stream's text, zeros where it was not read.
        lost_text: Ranges of bytes of the text that were not read.
    """

    ints: Array
    floats: Array
    is_known: Array
    text: Array
    lost_text: Sequence[tuple[int, int]] = ()


@dataclass(slots=True)
class SalvagedSpans:
    """A span table that names only intact rows.

    Attributes:
        ints, floats, text: The table.
        kept: Positions in the old table of the first rows of the new one.
        is_changed: Whether anything differs from what was read.
        lost: By episode: the number of its steps. None of them is shown any more.
        shortened: By episode: the steps that it has now, and those that it lost.
        lost_metadata: Episodes whose text was lost.
        hidden: Episodes without rows that readers must not show.
        first_lost_span: The first span that could not be read; None if all could.
    """

    ints: Array
    floats: Array
    text: Array
    kept: Array
    is_changed: bool = False
    lost: dict[int, int] = field(default_factory=dict)
    shortened: dict[int, tuple[int, int]] = field(default_factory=dict)
    lost_metadata: list[int] = field(default_factory=list)
    hidden: list[int] = field(default_factory=list)
    first_lost_span: int | None = None

    def spans_before(self, n: int) -> int:
        """How many spans of the new table were among the first ``n`` of the old one."""
        return int(np.searchsorted(self.kept, n))

    def text_before(self, n: int) -> int:
        """Bytes of the text of the new table's first ``n`` spans."""
        return int(self.ints[n - 1, TEXT_STOP]) if n else 0


def salvage_spans(
    table: SpanTable, record: CommitRecord, damaged: DamagedRows, first: int, stored: int, rewards: Rewards | None
) -> SalvagedSpans:
    """Shorten episodes with damaged rows, and leave out what can't be read.

    Args:
        table: What was read of the span table.
        record: The stream's record.
        damaged: The damaged rows.
        first: First row that readers show; rows below are evicted, and their damage does no harm.
        stored: First row that is still stored, for a checkpoint; not above ``first``.
        rewards: Reads rewards; None if returns are not sums of rewards.
    """
    return _Salvage(table, record, damaged, first, stored, rewards).run()


class _Salvage:
    def __init__(
        self,
        table: SpanTable,
        record: CommitRecord,
        damaged: DamagedRows,
        first: int,
        stored: int,
        rewards: Rewards | None,
    ) -> None:
        self._record, self._damaged, self._first, self._stored = record, damaged, first, stored
        self._rewards = rewards
        self._table = table
        kept = np.flatnonzero(table.is_known)
        self._out = SalvagedSpans(table.ints[kept].copy(), table.floats[kept].copy(), table.text, kept)
        self._is_gapless = len(kept) == len(table.ints)
        if not self._is_gapless:
            self._out.first_lost_span = int(np.flatnonzero(~table.is_known)[0])

    def run(self) -> SalvagedSpans:
        out = self._out
        self._text_start = self._text_starts()
        self._mend_texts()
        for spans in self._touched_episodes():
            self._mend_episode(spans)
        if not self._is_gapless:
            self._compact_text()
        self._reach_last_row()
        out.is_changed = out.is_changed or not self._is_gapless
        out.lost_metadata = [number for number in out.lost_metadata if number not in out.lost]
        return out

    # ---- episodes

    def _touched_episodes(self) -> list[Array]:
        """The spans of every episode that has a damaged row or lacks a span, as positions in the new table."""
        ints = self._out.ints
        chosen = np.ones(len(ints), bool)
        if self._is_gapless:
            suspect = ints[self._damaged.overlaps(ints[:, ROW_START], ints[:, ROW_STOP]), EPISODE]
            chosen = np.isin(ints[:, EPISODE], suspect)
        order = np.flatnonzero(chosen)
        order = order[np.argsort(ints[order, EPISODE], kind="stable")]
        bounds = np.flatnonzero(np.diff(ints[order, EPISODE])) + 1
        episodes = np.split(order, bounds) if len(order) else []
        return [spans for spans in episodes if self._is_touched(spans)]

    def _is_touched(self, spans: Array) -> bool:
        if not self._is_gapless and not self._is_complete(spans):
            return True
        return any(self._first_bad(spans, i) is not None for i in spans)

    def _is_complete(self, spans: Array) -> bool:
        """Whether no span of an episode is missing, as far as can be told."""
        ints = self._out.ints[spans]
        n_rows = ints[:, ROW_STOP] - ints[:, ROW_START]
        expected = np.cumsum(n_rows) - n_rows
        is_last_known = ints[-1, END] != End.OPEN or self._out.kept[spans[-1]] > self._last_lost()
        return bool((ints[:, T_START] == expected).all()) and bool(is_last_known)

    def _last_lost(self) -> int:
        return int(np.flatnonzero(~self._table.is_known)[-1])

    def _first_bad(self, spans: Array, i: int) -> int | None:
        """The first damaged row of a span that readers show."""
        ints = self._out.ints
        start, stop = max(int(ints[i, ROW_START]), self._first), int(ints[i, ROW_STOP])
        is_final = ints[i, HAS_FINAL] == 1
        return self._damaged.first_in(start, stop, stop - 1 if is_final else None) if start < stop else None

    def _mend_episode(self, spans: Array) -> None:
        """End an episode before its first damaged or missing row."""
        out, ints, floats = self._out, self._out.ints, self._out.floats
        before = ints[spans].copy()
        had_final = int(before[:, HAS_FINAL].sum())
        is_whole, t, sum_ = True, 0, 0.0
        for i in spans.tolist():
            start, stop = int(ints[i, ROW_START]), int(ints[i, ROW_STOP])
            is_whole = is_whole and int(ints[i, T_START]) == t
            bad = self._first_bad(spans, i) if is_whole else start
            if is_whole and bad is None:
                t, sum_ = t + stop - start, float(floats[i, _RETURN])
            else:
                cut = start if bad is None else bad
                sum_ = self._return_up_to(sum_, start, cut, t, float(floats[i, _RETURN])) if is_whole else sum_
                is_whole = False
                ints[i, ROW_STOP], ints[i, T_START] = cut, t
                floats[i, _RETURN] = sum_ if self._rewards is not None else math.nan
                t += cut - start
            ints[i, HAS_FINAL] = 0
            ints[i, END] = End.OPEN
        ints[spans[-1], END] = End.CUT
        out.is_changed = True
        self._note(spans, before, had_final)

    def _return_up_to(self, before: float, start: int, cut: int, t: int, whole: float) -> float:
        """The return of an episode up to row ``cut`` of a span that begins at ``start`` with step ``t``."""
        if self._rewards is None or start < self._stored:  # the rewards of evicted rows are gone
            return before if cut == start else math.nan
        skipped = self._record.schema.reward_alignment == "observation" and t == 0
        values = self._rewards(start + skipped, max(cut, start + skipped)).astype(np.float64)
        with np.errstate(all="ignore"):
            return before + float(values.sum())

    def _note(self, spans: Array, before: Array, had_final: int) -> None:
        """Note how much of an episode is shown now, and how much was before."""
        ints, number = self._out.ints[spans], int(before[0, EPISODE])
        shown = int((ints[:, ROW_STOP] - np.clip(self._first, ints[:, ROW_START], ints[:, ROW_STOP])).sum())
        had = int((before[:, ROW_STOP] - np.clip(self._first, before[:, ROW_START], before[:, ROW_STOP])).sum())
        n_evicted = int((np.clip(self._first, ints[:, ROW_START], ints[:, ROW_STOP]) - ints[:, ROW_START]).sum())
        if shown:
            # Losing the end of an episode that was still open, or is not known, loses no step of it.
            if shown < had or before[-1, END] == End.OPEN:
                self._out.shortened[number] = shown, max(0, had - had_final - shown)
        else:
            self._out.lost[number] = had - had_final
            if not n_evicted:
                self._out.hidden.append(number)

    def _reach_last_row(self) -> None:
        """Let the last span end at the stream's last row, as every reader checks, without giving it more rows."""
        out, rows = self._out, self._record.rows
        if not len(out.ints) or out.ints[-1, ROW_STOP] == rows:
            return
        out.is_changed = True
        if out.ints[-1, ROW_START] == out.ints[-1, ROW_STOP]:
            out.ints[-1, ROW_START] = out.ints[-1, ROW_STOP] = rows
            return
        # What is known at the end of an episode stands in its last span: here in one without rows.
        last, added = out.ints[-1], out.ints[-1].copy()
        added[[ROW_START, ROW_STOP]] = rows
        added[T_START] = last[T_START] + last[ROW_STOP] - last[ROW_START]
        text_start = out.ints[-2, TEXT_STOP] if len(out.ints) > 1 else 0
        last[[END, PRESENT, TEXT_STOP]] = End.OPEN, 0, text_start
        out.ints = np.concatenate([out.ints, added[None]])
        out.floats = np.concatenate([out.floats, out.floats[-1:]])

    # ---- text

    def _text_starts(self) -> Array:
        """Where the text of each kept span begins; where that can't be known, where it ends."""
        stops = self._table.ints[:, TEXT_STOP]
        starts = np.concatenate([[0], stops[:-1]])[: len(stops)]
        follows_known = np.concatenate([[True], self._table.is_known[:-1]])[: len(stops)]
        starts = np.where(follows_known, starts, stops)
        found: Array = starts[self._out.kept]
        return found

    def _mend_texts(self) -> None:
        """Replace texts that were not read by empty ones of the same length."""
        out, lost_text = self._out, self._table.lost_text
        stops = out.ints[:, TEXT_STOP]
        lost = [
            i for i in range(len(stops)) if _first(lost_text, int(self._text_start[i]), int(stops[i])) is not None
        ]
        follows_gap = [] if self._is_gapless else np.flatnonzero(self._after_gap()).tolist()
        if lost:
            out.text = out.text.copy()
        for i in lost:
            start, stop = int(self._text_start[i]), int(stops[i])
            out.text[start:stop] = np.frombuffer(_EMPTY.ljust(stop - start)[: stop - start], np.uint8)
        for i in (*lost, *follows_gap):
            out.ints[i, PRESENT] &= ~_text_bits(self._record.schema)
            if out.ints[i, END] != End.OPEN:  # metadata stands in the last span of an episode
                out.lost_metadata.append(int(out.ints[i, EPISODE]))
            out.is_changed = True

    def _after_gap(self) -> Array:
        """Which kept spans follow one that was not read, and may have a text whose beginning is not known."""
        kept = self._out.kept
        found: Array = (kept > 0) & ~self._table.is_known[kept - 1]
        return found

    def _compact_text(self) -> None:
        """Put the texts of the kept spans one after the other."""
        out = self._out
        parts = [
            out.text[start:stop]
            for start, stop in zip(self._text_start.tolist(), out.ints[:, TEXT_STOP].tolist(), strict=True)
        ]
        out.text = np.concatenate([np.empty(0, np.uint8), *parts])
        out.ints[:, TEXT_STOP] = np.cumsum([len(part) for part in parts])


def _text_bits(schema: Schema) -> int:
    """The bits of `present` that stand for values in the text."""
    return sum(1 << bit for bit, kind in enumerate(schema.episode.values()) if kind == "str")
