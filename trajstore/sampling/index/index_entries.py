"""Facts that an episode index holds about an episode: flags, row locations, and entries to write into the index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trajstore.errors import DataError
from trajstore.format.handles import Handle, Handles
from trajstore.format.spans import End, EpisodeSpans, expand_counts
from trajstore.schema import Array

HAS_FINAL = 1
TERMINATED = 2
TRUNCATED = 4
OPEN = 8
HEADLESS = 16  # its first steps were evicted
BEGINS = 32  # its first steps were evicted, and the first remaining step counts as its beginning
_FLAGS_OF_END = np.zeros(len(End), np.uint8)
_FLAGS_OF_END[[End.TERMINATED, End.TRUNCATED, End.OPEN]] = TERMINATED, TRUNCATED, OPEN
MARK = 128  # never set on an episode, so that arithmetic can use it to tell a flag byte from 0

StepIndex = torch.Tensor | Array | Mapping[str, Any] | Handle | Handles | Sequence[Handle]
"""How a caller names steps; see `handles_of`."""

LIVE = 0  # the source of rows that are not committed yet
GONE = 1 << 62  # the first remaining step of an episode that was evicted whole


@dataclass(frozen=True, slots=True)
class RowLocations:
    """The source and row of each step.

    The source is `LIVE`, or one more than the number of the stream that holds the row. ``source`` broadcasts
    against ``row``.
    """

    source: torch.Tensor
    row: torch.Tensor


@dataclass(frozen=True, slots=True)
class IndexEntries:
    """Episodes to write into an index, and their spans in the same order."""

    stream: Array
    episode: Array
    env: Array
    t_base: Array
    n_rows: Array
    flags: Array
    span_rows: Array  # number of rows of each span; no span is empty
    span_row: Array
    span_source: Array

    @property
    def columns(self) -> tuple[Array, ...]:
        """All arrays, in the order in which they are declared."""
        facts = self.stream, self.episode, self.env, self.t_base, self.n_rows, self.flags
        return *facts, self.span_rows, self.span_row, self.span_source

    @property
    def n_spans(self) -> Array:
        """Number of spans of each episode."""
        ends = np.searchsorted(np.cumsum(self.span_rows), np.cumsum(self.n_rows), side="left") + 1
        counts: Array = np.diff(ends, prepend=0)
        return counts

    def take(self, chosen: Array) -> IndexEntries:
        """The entries at these positions, in this order."""
        n = self.n_spans
        owner, number = expand_counts(n[chosen])
        spans = (np.cumsum(n) - n)[chosen][owner] + number
        facts = (a[chosen] for a in (self.stream, self.episode, self.env, self.t_base, self.n_rows, self.flags))
        return IndexEntries(*facts, *(a[spans] for a in (self.span_rows, self.span_row, self.span_source)))

    def split(self, *positions: int) -> tuple[IndexEntries, ...]:
        """The entries before, between and after these positions, as views."""
        n = len(self.episode)
        rows = np.cumsum(self.n_rows)
        before = [int(rows[at - 1]) if at else 0 for at in positions]
        spans = np.searchsorted(np.cumsum(self.span_rows), before, side="right").tolist()
        parts = zip((0, *positions), (*positions, n), (0, *spans), (*spans, len(self.span_rows)), strict=True)
        facts, of_spans = self.columns[:6], self.columns[6:]
        return tuple(
            IndexEntries(*(a[start:stop] for a in facts), *(a[first:last] for a in of_spans))
            for start, stop, first, last in parts
        )

    def from_step(self, t: Array) -> IndexEntries:
        """The same entries without their steps before ``t``; each entry must keep at least one step."""
        lost = (t - self.t_base).clip(0)
        owner = np.repeat(np.arange(len(t)), self.n_spans)
        start = np.cumsum(self.span_rows) - self.span_rows - (np.cumsum(self.n_rows) - self.n_rows)[owner]
        n_cut = np.clip(lost[owner] - start, 0, self.span_rows)
        is_kept = n_cut < self.span_rows
        spans = (self.span_rows - n_cut)[is_kept], (self.span_row + n_cut)[is_kept], self.span_source[is_kept]
        facts = self.stream, self.episode, self.env, self.t_base + lost, self.n_rows - lost, self.flags
        return IndexEntries(*facts, *spans)

    @staticmethod
    def of(joined: EpisodeSpans, chosen: Array) -> IndexEntries:
        """Entries of the chosen episodes of a joined span table."""
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


def joined_entries(parts: Sequence[IndexEntries]) -> IndexEntries:
    """The entries of all parts, one after the other."""
    filled = [part for part in parts if len(part.episode)]
    if len(filled) < 2:
        return filled[0] if filled else parts[0]
    columns = zip(*(part.columns for part in filled), strict=True)
    return IndexEntries(*(np.concatenate(arrays) for arrays in columns))


def flags_of(end: Array, has_final: Array) -> Array:
    """The flag byte of episodes, from how they ended."""
    flags: Array = _FLAGS_OF_END[end] | (has_final * HAS_FINAL).astype(np.uint8)
    return flags


def handles_of(index: Any, numbers: Mapping[str, int]) -> Array:
    """Steps that a caller names, as a host array ``[batch, 3]``: stream number, episode and t of each.

    Args:
        index: A batch, its ``index``, or what `append` returned: a `Handle`, `Handles`, or a list of `Handle`.
        numbers: The number of each stream, by id.

    Raises:
        DataError: ``index`` has another type, dtype or shape, or names an unknown stream.
    """
    if isinstance(index, Handle | Handles):
        return _from_handles([index], numbers)
    if isinstance(index, list | tuple) and index and all(isinstance(each, Handle | Handles) for each in index):
        return _from_handles(index, numbers)
    if isinstance(index, Mapping) and "index" in index:
        index = index["index"]
    if not isinstance(index, (torch.Tensor, np.ndarray)):
        raise DataError(
            "index: expected a batch, its 'index' (int64 of shape (batch, 3)), or handles that append returned; got"
            f" {type(index).__name__}"
        )
    handles: Array = index.cpu().numpy() if isinstance(index, torch.Tensor) else index
    if handles.ndim != 2 or handles.shape[1] != 3 or handles.dtype != np.int64:
        raise DataError(f"index: expected int64 of shape (batch, 3), got {handles.dtype} of shape {handles.shape}")
    return handles


def _from_handles(handles: Sequence[Handle | Handles], numbers: Mapping[str, int]) -> Array:
    parts = []
    for each in handles:
        if each.stream not in numbers:
            raise DataError(
                f"index: this reader has no stream {each.stream!r}; it has {', '.join(numbers) or 'none'}"
            )
        episode, t = np.atleast_1d(each.episode).ravel(), np.atleast_1d(each.t).ravel()
        parts.append(np.stack([np.full(len(t), numbers[each.stream]), episode, t], 1))
    return np.concatenate(parts).astype(np.int64)
