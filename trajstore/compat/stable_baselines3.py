"""Batches in the form that Stable-Baselines3's algorithms take; that package itself is not needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from trajstore.errors import DataError

# Neither observations nor actions: what a batch of transitions holds beside them.
_NEEDED = ("next", "terminated")


class ReplaySamples(NamedTuple):
    """The fields of ``ReplayBufferSamples``, by name and in their order."""

    observations: Any
    actions: torch.Tensor
    next_observations: Any
    dones: torch.Tensor
    rewards: torch.Tensor
    discounts: torch.Tensor | None = None


def replay_samples(
    batch: Mapping[str, Any], *, observation: str = "observation", action: str = "action", reward: str = "reward"
) -> ReplaySamples:
    """A batch of ``Windows.transitions()`` as Stable-Baselines3 has it; tensors are shared, not copied.

    ``dones`` is set where an episode terminated, never where it was truncated: there the next observation is
    bootstrapped from, as their buffers have it with ``handle_timeout_termination``. With ``n_step``, ``rewards``
    are the n-step returns and ``discounts`` what the next observation's value is multiplied with, 0 at
    termination.

    Args:
        batch: As `sample` gave it.
        observation: The field of the observation, or a group of fields.
        action: The field of the action.
        reward: The field of the reward.

    Raises:
        DataError: The batch is not one of transitions, or has no such field.
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
