"""Rows of plans that were made before the index changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from trajstore.cache.row_request import RowRequest
from trajstore.errors import SnapshotExpiredError
from trajstore.sampling.batches.batch_plan import BatchPlan
from trajstore.sampling.index.change_log import MovedRows
from trajstore.sampling.index.index_entries import LIVE, RowLocations
from trajstore.schema import Array


def check_not_evicted(plan: BatchPlan, marks: Array) -> None:
    """Check that all rows of a plan lie at or above the mark of their source.

    Raises:
        SnapshotExpiredError: Some rows were evicted.
    """
    on_device: torch.Tensor | None = None
    for rows in {id(w.row): w for w in plan.wanted.values()}.values():
        if on_device is None:
            on_device = torch.from_numpy(marks).to(rows.row.device)
        if bool((rows.row < on_device[rows.source.to(torch.int64)]).any()):
            raise SnapshotExpiredError("steps of a batch that was planned ahead were evicted before it was read")


def with_moved_rows(plan: BatchPlan, moves: Sequence[MovedRows], source: int) -> BatchPlan:
    """The plan with live rows replaced by the rows of ``source`` that they became.

    Args:
        plan: Refers to live rows as they were before the moves.
        moves: The moves since, oldest first.
        source: The followed writer's stream.
    """
    moved: dict[int, RowLocations] = {}  # several outputs share one tensor of rows
    for wanted in plan.wanted.values():
        if id(wanted.row) not in moved:
            moved[id(wanted.row)] = _moved_rows(wanted, moves, source)
    found = {key: (w, moved[id(w.row)]) for key, w in plan.wanted.items()}
    return replace(
        plan, wanted={key: RowRequest(w.path, rows.source, rows.row) for key, (w, rows) in found.items()}
    )


def _moved_rows(wanted: RowRequest, moves: Sequence[MovedRows], own: int) -> RowLocations:
    source, row = wanted.source.expand(wanted.row.shape).clone(), wanted.row.clone()
    for move in moves:
        if not len(move.live):
            continue
        order = np.argsort(move.live)
        old, new = (torch.from_numpy(a[order]).to(row.device) for a in (move.live, move.rows))
        at = torch.searchsorted(old, row).clamp(max=len(old) - 1)
        is_moved = (source == LIVE) & (old[at] == row)
        row = torch.where(is_moved, new[at], row)
        source = torch.where(is_moved, own, source)
    return RowLocations(source, row)
