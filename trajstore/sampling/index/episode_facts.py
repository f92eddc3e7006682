"""Everything that a plan asks about an episode, in one row of a table, which tensor operations read at once.

Only executors without compiled loops use these tables. They are made when they are first asked for, and follow the
index afterwards at a cost proportional to new, open and evicted episodes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from trajstore.cache.growable_array import GrowableArray
from trajstore.sampling.index.change_log import ChangeLog
from trajstore.sampling.index.episode_tensors import EpisodeTensors
from trajstore.sampling.index.index_entries import BEGINS, HAS_FINAL, OPEN, TERMINATED, TRUNCATED
from trajstore.schema import Array

NOWHERE = -(1 << 62)  # a position that no step has

# Columns of the table of episodes. These three, in this order, are the handle of the first step.
STREAM, EPISODE, T_BASE = range(3)
# The position at which each mask of a batch is True, `NOWHERE` if it is not True in this episode.
IS_FIRST, IS_LAST, IS_TERMINATED, IS_TRUNCATED, IS_FINAL = range(3, 8)
# Positions of the last step, of the last row, which may be the final one, and of the last row or the state that
# terminated the episode.
LAST_STEP, LAST_ROW, LAST_STATE = range(8, 11)
TERMINAL = 11  # the position after the step that terminated the episode, or `NOWHERE`
LOGICAL, ROW, SOURCE = range(12, 15)  # of the first row
N_FACTS = 15

SHIFT, SPAN_SOURCE = range(2)  # columns of the table of spans: row minus logical row, and source
N_SPAN_FACTS = 2


class EpisodeFacts:
    """The tables of an index: one row of int64 for each entry, and one for each span."""

    def __init__(self, device: torch.device) -> None:
        self._entries = _FollowingTable(N_FACTS, device)
        self._spans = _FollowingTable(N_SPAN_FACTS, device)

    @property
    def nbytes(self) -> int:
        return self._entries.nbytes + self._spans.nbytes

    def of_entries(self, index: EpisodeTensors, changes: ChangeLog, n_closed: int) -> torch.Tensor:
        """The table of episodes, up to date with the index; ``n_closed`` entries change only by evictions."""
        self._entries.follow(changes, index.n, n_closed, lambda n: n, lambda *part: _entry_facts(index, *part))
        return self._entries.rows

    def of_spans(self, index: EpisodeTensors, changes: ChangeLog, n_closed: int) -> torch.Tensor:
        """The table of spans, up to date with the index; ``n_closed`` spans change only by evictions."""

        def first_span(entry: int) -> int:
            return int(np.searchsorted(index.span_logical.host, index.logical.host[entry]))

        self._spans.follow(changes, index.span_row.n, n_closed, first_span, lambda *part: _span_facts(index, *part))
        return self._spans.rows


class _FollowingTable:
    """A table on the device whose rows are computed from an index, each as seldom as possible."""

    def __init__(self, n_columns: int, device: torch.device) -> None:
        self._values = GrowableArray(np.int64, device)
        self._n_columns = n_columns
        self._n_closed = 0  # rows that change only by evictions
        self._version = -1  # of the index, at the last update

    @property
    def rows(self) -> torch.Tensor:
        return self._values.device.view(-1, self._n_columns)

    @property
    def nbytes(self) -> int:
        return self._values.nbytes

    def follow(
        self,
        changes: ChangeLog,
        n: int,
        n_closed: int,
        first_row: Callable[[int], int],
        compute: Callable[[int, int], Array],
    ) -> None:
        """Compute the rows that changed since the last call.

        Args:
            changes: The changes of the index.
            n: Number of rows.
            n_closed: Number of rows, from the first on, that change only by evictions.
            first_row: Returns the first row of an entry.
            compute: Returns the rows from a first to a last number.
        """
        if self._version == changes.version:
            return
        removals = changes.removals_since(self._version)
        is_same = removals is not None and not any(removal.is_renumbered for removal in removals)
        start, width = self._n_closed if is_same else 0, self._n_columns
        n_rewritten = max((removal.n_rewritten for removal in removals or ()), default=0)
        if start and n_rewritten:
            stop = min(start, first_row(n_rewritten))
            self._values.put(np.arange(stop * width), compute(0, stop).ravel())
        self._values.rewrite(start * width, compute(start, n).ravel())
        self._n_closed, self._version = n_closed, changes.version


def _entry_facts(index: EpisodeTensors, start: int, stop: int) -> Array:
    flags, last = index.flags.host[start:stop], index.lengths(start, stop) - 1
    t_base, logical = index.t_base.host[start:stop], index.logical.host[start:stop]
    span = np.searchsorted(index.span_logical.host, logical, side="right") - 1
    facts = np.empty((stop - start, N_FACTS), np.int64)
    facts[:, STREAM], facts[:, EPISODE] = index.stream.host[start:stop], index.episode.host[start:stop]
    facts[:, T_BASE] = t_base
    facts[:, IS_FIRST] = np.where((t_base == 0) | (flags & BEGINS != 0), 0, NOWHERE)
    facts[:, IS_LAST] = np.where(flags & OPEN == 0, last, NOWHERE)
    facts[:, IS_TERMINATED] = np.where(flags & TERMINATED != 0, last, NOWHERE)
    facts[:, IS_TRUNCATED] = np.where(flags & TRUNCATED != 0, last, NOWHERE)
    facts[:, IS_FINAL] = np.where(flags & HAS_FINAL != 0, last + 1, NOWHERE)
    facts[:, LAST_STEP], facts[:, LAST_ROW] = last, last + (flags & HAS_FINAL)
    facts[:, LAST_STATE] = last + (flags & (HAS_FINAL | TERMINATED) != 0)
    facts[:, TERMINAL] = np.where(flags & TERMINATED != 0, last + 1, NOWHERE)
    facts[:, LOGICAL] = logical
    facts[:, ROW:] = 0
    if index.span_row.n:
        facts[:, ROW], facts[:, SOURCE] = index.span_row.host[span], index.span_source.host[span]
    return facts


def _span_facts(index: EpisodeTensors, start: int, stop: int) -> Array:
    row, logical = index.span_row.host[start:stop], index.span_logical.host[start:stop]
    return np.stack([row - logical, index.span_source.host[start:stop]], 1)
