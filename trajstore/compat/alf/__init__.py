"""ALF's replay buffer over trajstore: one ring of steps per environment, with positions that never repeat.

buffer                  the `ReplayBuffer` that ALF's algorithms call
batch_info              what `get_batch` returns beside the batch
step_queries            its methods that find steps
process_link            adds experience from other processes
process_messages        the bytes that those processes send
episodic_returns        the return of each step, once it is known
default_device          torch's default device, which ALF sets
options                 the keyword options of `ReplayBuffer.resume`
step_reader             reads windows and fields of steps, and gives them the nesting of the experience
window_draws            chooses which windows come next
prioritised_windows     chooses windows in proportion to priorities
ring_recovery           rebuilds the rings from the steps of a store
environment_rings       which step of the store is at which position of which environment
ring_windows            window starts, and windows divided at episode ends
stored_steps            the steps of a store as arrays
replay_internals        operations on `trajstore.ReplayBuffer` that it has no public method for
step_schema             the schema of ALF's steps, and checks of batches
nested_tensors          ALF's nests as leaves by path, and back
ring_table              a growing table of integers
"""

from trajstore.compat.alf.batch_info import BatchInfo
from trajstore.compat.alf.buffer import ReplayBuffer
from trajstore.compat.alf.step_schema import StepType

__all__ = ["BatchInfo", "ReplayBuffer", "StepType"]


def __dir__() -> list[str]:
    return sorted(__all__)
