"""Entries of the index for live episodes, made from the tables of episodes and of their spans."""

from __future__ import annotations

from types import ModuleType

import numpy as np

from trajstore.sampling.index.index_entries import IndexEntries, flags_of
from trajstore.sampling.live.integer_table import IntegerTable
from trajstore.schema import Array

_EMPTY = np.empty(0, np.int64)
_NO_ENTRIES = IndexEntries(_EMPTY, _EMPTY, _EMPTY, _EMPTY, _EMPTY, np.empty(0, np.uint8), _EMPTY, _EMPTY, _EMPTY)


def live_entries(
    table: IntegerTable, spans: IntegerTable, slots: Array, stream: int, kernels: ModuleType | None
) -> IndexEntries:
    """Entries of the episodes at positions ``slots`` of the table, in this order. All of them have steps.

    Args:
        table: Live episodes.
        spans: Their spans, in order of time within each episode but for those that a commit has just placed.
        slots: Which episodes.
        stream: Number of their stream.
        kernels: Compiled loops, for the CPU.
    """
    if not len(slots):
        return _NO_ENTRIES
    floor = table["floor"][slots]
    facts = np.full(len(slots), stream), table["episode"][slots], table["env"][slots], floor
    flags = flags_of(table["end"][slots], table["has_final"][slots])
    return IndexEntries(*facts, table["n_rows"][slots] - floor, flags, *_spans_of(table, spans, slots, kernels))


def _spans_of(
    table: IntegerTable, spans: IntegerTable, slots: Array, kernels: ModuleType | None
) -> tuple[Array, Array, Array]:
    """Number of rows, first row and source of the spans of episodes, as far as they are not evicted."""
    rank = np.full(table.n, -1)
    rank[slots] = np.arange(len(slots))
    if kernels is not None:
        outputs = np.empty((3, spans.n), np.int64)
        n = kernels.gather_spans(slots, rank, table.data, table.n, spans.data, spans.n, outputs)
        return outputs[0, :n], outputs[1, :n], outputs[2, :n]
    owner = rank[np.searchsorted(table["episode"], spans["episode"])]
    mine = np.flatnonzero(owner >= 0)
    mine = mine[np.lexsort((spans["t"][mine], owner[mine]))]
    t, stop = spans["t"][mine], table["n_rows"][slots][owner[mine]]
    is_followed = np.flatnonzero(owner[mine][1:] == owner[mine][:-1])
    stop[is_followed] = t[is_followed + 1]
    start = np.maximum(t, table["floor"][slots][owner[mine]])
    is_kept = stop > start
    mine, row = mine[is_kept], (spans["row"][mine] + start - t)[is_kept]
    return (stop - start)[is_kept], row, spans["source"][mine]
