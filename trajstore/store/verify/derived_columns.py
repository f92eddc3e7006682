"""Checks derived columns: their arrays, the rows they name, and the values of priorities."""

from __future__ import annotations

import numpy as np

from trajstore.format.commit_record import DerivedColumnState
from trajstore.schema import Array
from trajstore.store.verify.chunks import check_array
from trajstore.store.verify.inspection import CheckedStream, Inspection, RowConsumer


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
    consumers: dict[str, RowConsumer] = {delta_rows: rows.add}
    if name == "priority" and state.dtype == "float32":
        consumers |= dict.fromkeys((values, delta_values), priorities.add)
    are_sound = [check_array(inspection, stream, path, consumers.get(path)) for path in state.lengths(target, name)]
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

    def add(self, start: int, stop: int, block: Array | None) -> None:
        if block is not None and len(block):
            self.low, self.high = min(self.low, int(block.min())), max(self.high, int(block.max()) + 1)


class _PriorityCheck:
    """Counts priorities that are negative or not finite."""

    def __init__(self) -> None:
        self.n_bad = 0

    def add(self, start: int, stop: int, block: Array | None) -> None:
        if block is not None:
            self.n_bad += int((~(np.isfinite(block) & (block >= 0))).sum())
