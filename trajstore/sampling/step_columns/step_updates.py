"""Steps named by an update: handles of the learning steps of windows, and their addresses."""

from __future__ import annotations

import numpy as np

from trajstore.errors import DataError
from trajstore.sampling.step_columns.step_handles import EVICTED, PAST_END
from trajstore.sampling.step_columns.step_table import StepTable
from trajstore.schema import Array


def learning_steps(handles: Array, length: int, stride: int) -> Array:
    """Handles ``[batch * length, 3]`` of the learning steps of windows, from handles of their first ones."""
    steps = np.repeat(handles, length, axis=0)
    steps[:, 2] += np.tile(np.arange(length) * stride, len(handles))
    return steps


def addresses_to_update(table: StepTable, handles: Array, *, may_pass_end: bool) -> Array:
    """Addresses of steps; negative for evicted steps and for steps past the end of their episode.

    Raises:
        DataError: A step does not exist, or lies past the end of its episode and ``may_pass_end`` is False.
    """
    address = table.addresses_of(handles)
    bad = address < (PAST_END if may_pass_end else EVICTED)
    if bad.any():
        raise DataError(f"index {handles[np.flatnonzero(bad)[0]].tolist()}: this reader has no such step")
    return address
