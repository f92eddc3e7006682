"""Operations on the parts of a `trajstore.ReplayBuffer` that its own methods do not offer.

ALF's rings draw their own windows and evict their own steps. So they need the buffer's random numbers, its
priorities by step, and eviction of chosen steps, together with what checkpoints save of these.
"""

from __future__ import annotations

import numpy as np
import torch

from trajstore.compat.alf.environment_rings import EnvironmentRings
from trajstore.replay.buffer import ReplayBuffer
from trajstore.sampling.priorities.priority_column import PriorityColumn
from trajstore.sampling.rng import CounterRng
from trajstore.schema import Array, Field


def random_numbers(buffer: ReplayBuffer) -> CounterRng:
    """Return the generator that the buffer draws with; checkpoints save its state."""
    return buffer.reader.rng


def priority_column(buffer: ReplayBuffer) -> PriorityColumn:
    """Return the priorities of all steps; checkpoints save them, redistributions move them with their steps."""
    sampler = buffer.reader.priority_sampler
    assert sampler is not None  # the buffer was made with priorities
    return sampler.priority_column


def priorities_of(buffer: ReplayBuffer, handles: Array) -> torch.Tensor:
    """Return the priorities of held steps, as float64 on the buffer's device."""
    reader = buffer.reader
    with reader.assembler.lock:
        reader.assembler.publish(waits=True)
        reader.follow_priorities()
        column = priority_column(buffer)
        values = column.get(column.steps.addresses_of(handles))
    return torch.from_numpy(values.astype(np.float64)).to(reader.assembler.device)


def set_initial_priority(buffer: ReplayBuffer, initial: float) -> None:
    """Give new steps this priority until a larger one is set; does nothing if a checkpoint restored priorities.

    Call it before any other use of the buffer: existing steps get their priorities at the first use.
    """
    state = buffer.session.start.state
    if state is None or "priorities" not in state["reader"]:
        priority_column(buffer).largest = initial


def unused_position(buffer: ReplayBuffer) -> int:
    """Return a position above all positions of earlier sessions; 0 if there were none."""
    start = buffer.session.start
    if start.checkpoint is None and all(record.world == buffer.world for record in start.store.snapshot.streams):
        return 0
    # The id of a world contains its creation time in milliseconds. No environment takes 2**20 steps in one of them.
    return int(buffer.world.rpartition("-")[2], 32) >> 80 << 20


def write_integer_column(buffer: ReplayBuffer, name: str, handles: Array, values: Array) -> None:
    """Write an integer for each of some steps to a derived column, which checkpoints save; other steps have -1."""
    if name not in buffer.reader.column_names:
        buffer.add_column(name, Field("int64"), fill=-1)
    buffer.write_column(name, torch.from_numpy(handles), torch.from_numpy(values))


def evict_dropped_steps(buffer: ReplayBuffer, rings: EnvironmentRings) -> None:
    """Evict the steps that the rings dropped, in the way that the buffer applies its own limits."""
    assembler = buffer.reader.assembler
    with assembler.lock:
        assembler.publish(waits=True)  # first, because storage may fail here: the rings then forget nothing
        stream, episode, first_t = rings.take_dropped()
        if len(stream):
            buffer.session.eviction.evict_below(stream, episode, first_t)
