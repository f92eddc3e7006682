"""ALF's replay buffer over trajstore: a row for every environment, positions that never repeat."""

from trajstore.compat.alf.buffer import BatchInfo, ReplayBuffer, StepType

__all__ = ["BatchInfo", "ReplayBuffer", "StepType"]
