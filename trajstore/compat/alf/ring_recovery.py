"""Rebuilds the rings of environments from the steps that a buffer holds."""

from __future__ import annotations

import numpy as np
import torch

from trajstore.compat.alf.environment_rings import EnvironmentRings
from trajstore.compat.alf.replay_internals import random_numbers, unused_position, write_integer_column
from trajstore.compat.alf.step_schema import MOVED_POSITION, POSITION, StepType
from trajstore.compat.alf.stored_steps import StoredSteps
from trajstore.errors import DataError
from trajstore.replay.buffer import ReplayBuffer
from trajstore.sampling.windows import Windows
from trajstore.schema import flatten

_BATCH_STEPS = 8192  # read together


def recover_rings(
    buffer: ReplayBuffer, step_type: str, n_envs: int, length: int, *, redistributed: bool
) -> EnvironmentRings:
    """Return rings with all steps of a buffer.

    Steps keep their positions. Redistributed steps, and those of environments with gaps, get positions that no step
    had before; the buffer stores these in a column.

    Args:
        buffer: The buffer.
        step_type: Path of the field ``step_type``.
        n_envs: Number of rings.
        length: Steps that each ring keeps; more if one received more steps in a redistribution.
        redistributed: The episodes were assigned to new environments.

    Raises:
        DataError: The buffer holds steps of more environments.
    """
    unused = unused_position(buffer)
    if not len(buffer):
        return EnvironmentRings(n_envs, length, unused)
    steps = _read_steps(buffer, step_type)
    if steps.env.max() >= n_envs:
        raise DataError(
            f"num_environments: expected at least {steps.env.max() + 1}, as in the store, got {n_envs}; give a"
            " policy to redistribute the episodes"
        )
    unused = max(unused, int(steps.position.max()) + 1)
    placed = steps.with_contiguous_positions(unused, redistributed)
    moved = placed.take(placed.position != steps.position)
    if len(moved.env):
        handles = np.stack([moved.stream, moved.episode, moved.t], 1)
        write_integer_column(buffer, MOVED_POSITION, handles, moved.position)
        length = max(length, int(np.bincount(moved.env).max()))  # a ring keeps all steps that it received
    return EnvironmentRings.from_steps(n_envs, length, placed, unused)


def _read_steps(buffer: ReplayBuffer, step_type: str) -> StoredSteps:
    """Read all steps of a buffer, in order."""
    windows = Windows(squeeze=True, fields=(step_type, POSITION), provenance=True)
    batches, numbers = [], random_numbers(buffer)
    counter = numbers.counter
    for batch in buffer.epoch(_BATCH_STEPS, windows, shuffle=False):
        types, recorded = flatten(batch)[step_type], batch[POSITION]
        moved = batch[MOVED_POSITION if MOVED_POSITION in batch else POSITION]
        position = torch.where(moved < 0, recorded, moved)
        is_end = types == StepType.FIRST, types == StepType.LAST
        env, handles = batch["provenance"]["env"], batch["index"].unbind(1)
        batches.append((env, *handles, recorded, position, *is_end))
    numbers.counter = counter  # the iterator used random numbers although nothing was drawn
    return StoredSteps(*(torch.cat(column).cpu().numpy() for column in zip(*batches, strict=True)))
