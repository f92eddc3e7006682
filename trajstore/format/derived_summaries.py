"""Sums and means of derived columns over the steps of each episode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import numpy as np

from trajstore.schema import Array


class DerivedValues(Protocol):
    """The derived columns of a snapshot's streams."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns that have one number per step."""

    def numbers(self, name: str) -> Mapping[int, tuple[int, Array]]:
        """By position of the stream: the first row with a value, and the values from there on."""


class EpisodeRows(NamedTuple):
    """Which rows belong to which episode: span i has rows ``[start, stop)`` of the stream at ``source``."""

    source: Array
    start: Array
    stop: Array
    first: Array  # by episode: its first span
    last: Array  # and its last


SUMMARIES: dict[str, Callable[[Array, Array], Array]] = {
    "mean": lambda total, n: np.divide(total, n, out=np.full(len(n), np.nan), where=n > 0),
    "sum": lambda total, n: np.where(n > 0, total, np.nan),
}


def summarize(how: str, stored: Mapping[int, tuple[int, Array]], rows: EpisodeRows) -> Array:
    """The mean or sum of a column over the steps of each episode that have a value; NaN if none has one."""
    total, count = np.zeros(len(rows.start)), np.zeros(len(rows.start), np.int64)
    for source, (first, values) in stored.items():
        mine = np.flatnonzero(rows.source == source)
        is_set = ~np.isnan(values) if values.dtype.kind == "f" else np.ones(len(values), bool)
        sums = np.concatenate([[0.0], np.cumsum(np.where(is_set, values, 0), dtype=np.float64)])
        counts = np.concatenate([[0], np.cumsum(is_set)])
        low, high = (np.clip(edge[mine] - first, 0, len(values)) for edge in (rows.start, rows.stop))
        total[mine], count[mine] = sums[high] - sums[low], counts[high] - counts[low]
    by_episode = []
    for column in (total, count):
        running = np.concatenate([[0], np.cumsum(column)])
        by_episode.append(running[rows.last + 1] - running[rows.first])
    return SUMMARIES[how](*by_episode)
