"""What rows need of a `trajstore.ReplayBuffer` that it has no method for."""

from __future__ import annotations

import numpy as np
import torch

from trajstore.compat.alf.rows import Rows
from trajstore.replay.buffer import ReplayBuffer
from trajstore.sampling.priority_column import PriorityColumn
from trajstore.sampling.rng import CounterRng
from trajstore.schema import Array, Field


def random_numbers(buffer: ReplayBuffer) -> CounterRng:
    """The numbers that the buffer draws by; checkpoints keep how far they were used."""
    return buffer.reader.rng


def priority_table(buffer: ReplayBuffer) -> PriorityColumn:
    """The priorities of all steps, which checkpoints keep and redistribution takes along."""
    return buffer.reader._sampler.table


def priorities_of(buffer: ReplayBuffer, handles: Array) -> torch.Tensor:
    """Priorities of steps that are in the buffer, float64 on its device."""
    reader = buffer.reader
    with reader.assembler.lock:
        reader.assembler.publish(waits=True)
        reader.follow_priorities()
        table = reader._sampler.table
        values = table.get(table.steps.addresses_of(handles))
    return torch.from_numpy(values.astype(np.float64)).to(reader.assembler.device)


def begin_priorities(buffer: ReplayBuffer, initial: float) -> None:
    """Give steps that priority, as long as there is no larger one; not where a checkpoint knows of others.

    Called before anything is asked of the buffer: the steps that are there get their priorities then.
    """
    state = buffer.session.start.state
    if state is None or "priorities" not in state["reader"]:
        priority_table(buffer).largest = initial


def unused_position(buffer: ReplayBuffer) -> int:
    """A position above all that sessions before this one gave to any row; 0 where there were none."""
    start = buffer.session.start
    if start.checkpoint is None and all(record.world == buffer.world for record in start.store.snapshot.streams):
        return 0
    # Ids hold the time in milliseconds, and no row takes 2**20 steps in one of them.
    return int(buffer.world.rpartition("-")[2], 32) >> 80 << 20


def keep_column(buffer: ReplayBuffer, name: str, handles: Array, values: Array) -> None:
    """Keep an integer with each of some steps, also in checkpoints; -1 with others."""
    if name not in buffer.reader._derived.state_dict():
        buffer.add_column(name, Field("int64"), fill=-1)
    buffer.write_column(name, torch.from_numpy(handles), torch.from_numpy(values))


def sweep(buffer: ReplayBuffer, rows: Rows) -> None:
    """Take away the steps that rows have given up, as the buffer's own limits do."""
    assembler = buffer.reader.assembler
    with assembler.lock:
        assembler.publish(waits=True)  # may fail, as storage does: before rows forget what is to go
        stream, episode, floor = rows.forget()
        if len(stream):
            buffer.session.eviction.evict_below(stream, episode, floor)
