"""ALF's replay buffer over trajstore: rows of environments, positions that never repeat, `get_batch` of ``[B, T]``."""

from trajstore.compat.alf.buffer import BatchInfo, ReplayBuffer, StepType

__all__ = ["BatchInfo", "ReplayBuffer", "StepType"]
