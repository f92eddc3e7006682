"""What rows need of a `trajstore.ReplayBuffer` that it has no method for."""

from __future__ import annotations

import numpy as np
import torch

from trajstore.priority_table import PriorityTable
from trajstore.replay import ReplayBuffer
from trajstore.rng import Counter
from trajstore.schema import Array


def random_numbers(buffer: ReplayBuffer) -> Counter:
    """The numbers that the buffer draws by; checkpoints keep how far they were used."""
    return buffer.reader._rng


def priority_table(buffer: ReplayBuffer) -> PriorityTable:
    """The priorities of all steps, which checkpoints keep and redistribution takes along."""
    return buffer.reader._sampler.table


def priorities_of(buffer: ReplayBuffer, handles: Array) -> torch.Tensor:
    """Priorities of steps that are in the buffer, float64 on its device."""
    reader = buffer.reader
    with reader._source.lock:
        reader._source.publish()
        reader.follow_priorities()
        table = reader._sampler.table
        values = table.get(table.steps.addresses_of(handles))
    return torch.from_numpy(values.astype(np.float64)).to(reader._source.device)


def evict(buffer: ReplayBuffer, stream: Array, episode: Array, floor: Array) -> None:
    """Take away the steps of episodes below some t (`GONE`: all), as the buffer's own limits do."""
    if not len(stream):
        return
    with buffer._source.lock:
        buffer._source.publish()
        buffer._retainer._evict("steps", stream, episode, floor)
        buffer._reader.follow_priorities()
        buffer._reader.follow_columns()
        buffer._tell_marks()
