"""Rows of episodes of an index, and where they are stored."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trajstore.format.spans import expand_counts
from trajstore.sampling.index.episode_tensors import EpisodeTensors
from trajstore.sampling.index.index_entries import LIVE
from trajstore.schema import Array


@dataclass(frozen=True, slots=True)
class EntryRows:
    """Rows of episodes: index entries, and positions from ``start`` to ``stop``, which may lie outside of them."""

    entry: Array
    start: Array
    stop: Array

    @classmethod
    def none(cls) -> EntryRows:
        return cls(*(np.empty(0, np.int64) for _ in range(3)))

    def take(self, chosen: Array) -> EntryRows:
        """The rows of some of the entries."""
        return EntryRows(self.entry[chosen], self.start[chosen], self.stop[chosen])

    def stored(self, index: EpisodeTensors) -> Array:
        """``[n, 3]``: source, first row and row after the last, in order; without rows that are not committed."""
        begin, end = index.logical.host[self.entry], index.logical.host[self.entry + 1]
        low, high = (np.clip(begin + at, begin, end) for at in (self.start, self.stop))
        low, high = low[high > low], high[high > low]
        spans = index.span_logical.host
        first, last = (np.searchsorted(spans, at, side="right") - 1 for at in (low, high - 1))
        owner, number = expand_counts(last - first + 1)
        span = first[owner] + number
        ends = np.where(span + 1 < len(spans), spans[np.minimum(span + 1, len(spans) - 1)], index.n_rows)
        start, stop = np.maximum(low[owner], spans[span]), np.minimum(high[owner], ends)
        shift, source = index.span_row.host[span] - spans[span], index.span_source.host[span]
        ranges = np.stack([source, start + shift, stop + shift], 1).astype(np.int64)
        stored: Array = ranges[source != LIVE]
        return stored
