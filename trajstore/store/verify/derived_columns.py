"""Checks derived columns: their arrays, the rows they name, and the values of priorities."""

from __future__ import annotations

from typing import Any

import numpy as np

from trajstore.format.commit_record import DerivedColumnState
from trajstore.schema import Array
from trajstore.store.verify.chunks import ChunkSums, check_array
from trajstore.store.verify.inspection import CheckedStream, Inspection


def check_derived_columns(inspection: Inspection, stream: CheckedStream) -> None:
    """Check every derived column that is stored in a stream."""
    for target, named in stream.record.columns.items():
        for name, state in named.items():
            _check_column(inspection, stream, target, name, state)


def _check_column(
    inspection: Inspection, stream: CheckedStream, target: str, name: str, state: DerivedColumnState
) -> None:
    where = f"{stream.name}, column '{name}' of stream '{target}'"
    values, delta_rows, delta_values = state.paths(target, name)
    rows, priorities = _RowRange(), _PriorityCheck()
    sums: dict[str, ChunkSums[Any]] = {delta_rows: rows}
    if name == "priority" and state.dtype == "float32":
        sums |= dict.fromkeys((values, delta_values), priorities)
    are_sound = [check_array(inspection, stream, path, sums.get(path)) for path in state.lengths(target, name)]
    if target not in inspection.records:
        inspection.note(where, "the stream that it belongs to does not exist")
    elif all(are_sound):
        low, high = min(rows.low, state.first), max(rows.high, state.stop)
        _check_rows(inspection, where, target, low, high, state)
    if priorities.n_bad:
        inspection.problem(where, f"{priorities.n_bad} priorities are negative or not finite")


def _check_rows(
    inspection: Inspection, where: str, target: str, low: int, high: int, state: DerivedColumnState
) -> None:
    if low < state.first:
        inspection.problem(where, f"has changes from row {low} on, but its first row is {state.first}")
    if high > inspection.records[target].rows and high > inspection.newest_record(target).rows:
        inspection.problem(where, f"has rows up to {high}, its stream has {inspection.records[target].rows}")


class _RowRange:
    """The smallest row number, and one more than the largest."""

    def __init__(self) -> None:
        self.low, self.high = 1 << 63, 0

    def of_chunk(self, start: int, stop: int, block: Array | None) -> tuple[int, int] | None:
        return (int(block.min()), int(block.max()) + 1) if block is not None and len(block) else None

    def add(self, found: tuple[int, int] | None) -> None:
        if found is not None:
            self.low, self.high = min(self.low, found[0]), max(self.high, found[1])


class _PriorityCheck:
    """Counts priorities that are negative or not finite."""

    def __init__(self) -> None:
        self.n_bad = 0

    def of_chunk(self, start: int, stop: int, block: Array | None) -> int:
        return 0 if block is None else int((~(np.isfinite(block) & (block >= 0))).sum())

    def add(self, found: int) -> None:
        self.n_bad += found
