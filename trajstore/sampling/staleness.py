"""Weights and masks by the age of the policy that took a step, for learning close to on-policy."""

from __future__ import annotations

import math

import torch


def staleness_weights(version: torch.Tensor, current: int, half_life: float) -> torch.Tensor:
    """Return a float32 weight for each step that halves with every ``half_life`` policy versions of age.

    Steps of the current policy version, or of a later one, have weight 1.

    Args:
        version: The policy version that took each step.
        current: The policy version now.
        half_life: In policy versions. Infinity gives all steps weight 1.
    """
    if math.isnan(half_life) or half_life <= 0:
        raise ValueError(f"half_life: expected a number above 0, got {half_life!r}")
    age = (current - version).clamp(min=0).to(torch.float32)
    return torch.exp2(age / -half_life)


def fresh_mask(version: torch.Tensor, current: int, max_staleness: int) -> torch.Tensor:
    """Return which steps were taken by a policy at most ``max_staleness`` versions old."""
    if max_staleness < 0:
        raise ValueError(f"max_staleness: expected at least 0, got {max_staleness!r}")
    return version >= current - max_staleness
