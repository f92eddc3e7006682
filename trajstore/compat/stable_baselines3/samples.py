"""Converts batches to the form that Stable-Baselines3's algorithms take; that package itself is not needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from trajstore.errors import DataError

_NEEDED = ("next", "terminated")  # in every batch of transitions


class ReplaySamples(NamedTuple):
    """Has the fields of Stable-Baselines3's ``ReplayBufferSamples``, in the same order."""

    observations: Any
    actions: torch.Tensor
    next_observations: Any
    dones: torch.Tensor
    rewards: torch.Tensor
    discounts: torch.Tensor | None = None


def replay_samples(
    batch: Mapping[str, Any], *, observation: str = "observation", action: str = "action", reward: str = "reward"
) -> ReplaySamples:
    """Convert a batch of ``Windows.transitions()`` to Stable-Baselines3's form; tensors are shared, not copied.

    ``dones`` is set where an episode terminated. It is not set where an episode was truncated, so that algorithms
    bootstrap from the next observation there, as with ``handle_timeout_termination`` of their buffers. With
    ``n_step``, ``rewards`` are the n-step returns, and ``discounts`` is the factor of the next observation's value,
    which is 0 at termination.

    Args:
        batch: A batch that `sample` returned.
        observation: The field of the observation, or a group of fields.
        action: The field of the action.
        reward: The field of the reward.

    Raises:
        DataError: The batch does not hold single transitions, or lacks one of the fields.
    """
    for name in (*_NEEDED, observation, action):
        if name not in batch:
            raise DataError(f"batch: expected transitions (Windows.transitions) with '{name}', got {sorted(batch)}")
    terminated = batch["terminated"]
    if terminated.dim() != 1:
        raise DataError(f"batch: expected single transitions, got windows of shape {tuple(terminated.shape)}")
    actions = batch[action]
    returns = batch.get("n_step")
    rewards = batch[reward] if returns is None else returns["return"]
    discounts = None if returns is None else returns["discount"].reshape(-1, 1)
    return ReplaySamples(
        batch[observation],
        actions.reshape(len(actions), -1),
        batch["next"][observation],
        terminated.to(rewards.dtype).reshape(-1, 1),
        rewards.reshape(-1, 1),
        discounts,
    )
