"""Sums over what follows in an episode, for all steps at once: returns to go, and advantages.

Steps lie on the last axis, episodes one after the other; ``is_last`` says where each stops.
"""

from __future__ import annotations

import torch

from trajstore.errors import DataError


def returns_to_go(rewards: torch.Tensor, is_last: torch.Tensor, *, gamma: float) -> torch.Tensor:
    """The discounted sum of each step's reward and all later ones of its episode.

    Computed in float64, in time proportional to the steps; the result has the dtype of the rewards. To bootstrap
    where an episode was truncated, add gamma times the value that follows to its last reward.

    Args:
        rewards: ``[..., steps]``, of a floating-point dtype.
        is_last: ``[..., steps]`` bools: the step is the last of its episode. The last of all need not say so.
        gamma: Discount, from 0 to 1.

    >>> returns_to_go(torch.ones(5), torch.tensor([False, True, False, False, True]), gamma=0.5)
    tensor([1.5000, 1.0000, 1.7500, 1.5000, 1.0000])
    """
    _check_numbers(rewards.shape, rewards=rewards)
    _check_masks(rewards.shape, is_last=is_last)
    _check_rate("gamma", gamma)
    total = _sum_ahead(rewards.to(torch.float64), (~is_last).to(torch.float64) * gamma)
    return total.to(rewards.dtype)


def advantages(
    rewards: torch.Tensor,
    values: torch.Tensor,
    next_values: torch.Tensor,
    terminated: torch.Tensor,
    is_last: torch.Tensor,
    *,
    gamma: float,
    lambda_: float,
) -> torch.Tensor:
    """Generalised advantage estimates; added to the values they are lambda-returns.

    Computed in float64, in time proportional to the steps; the result has the dtype of the rewards.

    Args:
        rewards: ``[..., steps]``, of a floating-point dtype; the other arguments have the same shape.
        values: Estimates of the observations that the steps began with.
        next_values: Estimates of the observations they led to, final ones included; where the step terminated they
            do not count, whatever they are.
        terminated: The step terminated the episode.
        is_last: The step is the last of its episode, however that ended; what follows belongs to another.
        gamma: Discount, from 0 to 1.
        lambda_: How far to look before trusting the values, from 0 (one step) to 1 (to the end).
    """
    _check_numbers(rewards.shape, rewards=rewards, values=values, next_values=next_values)
    _check_masks(rewards.shape, terminated=terminated, is_last=is_last)
    _check_rate("gamma", gamma)
    _check_rate("lambda_", lambda_)
    ahead = (gamma * next_values.to(torch.float64)).masked_fill(terminated, 0.0)
    error = rewards.to(torch.float64) + ahead - values.to(torch.float64)
    link = (~(is_last | terminated)).to(torch.float64) * (gamma * lambda_)
    return _sum_ahead(error, link).to(rewards.dtype)


def _sum_ahead(x: torch.Tensor, link: torch.Tensor) -> torch.Tensor:
    """The series with ``y[t] = x[t] + link[t] * y[t + 1]``, and nothing after the end.

    Neighbours are joined to a series of half the length, whose sums give those in between: about two operations a
    step in all, in some dozens of calls, and every factor is a product of links, so nothing overflows.
    """
    n = x.shape[-1]
    if n <= 1:
        return x
    even, odd = x[..., 0::2], x[..., 1::2]
    link_even, link_odd = link[..., 0::2], link[..., 1::2]
    if n % 2:
        odd, link_odd = (torch.nn.functional.pad(part, (0, 1)) for part in (odd, link_odd))
    found = _sum_ahead(_joined(even, link_even, odd), link_even * link_odd)
    following = torch.nn.functional.pad(found[..., 1:], (0, 1))
    between = _joined(odd, link_odd, following)
    return torch.stack([found, between], -1).flatten(-2)[..., :n]


def _joined(x: torch.Tensor, link: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    # What is not linked has no effect, also where it is not finite.
    return x + (link * following).masked_fill_(link == 0, 0.0)


def _check_numbers(shape: torch.Size, **given: torch.Tensor) -> None:
    for name, tensor in given.items():
        if not shape or tensor.shape != shape or not tensor.is_floating_point():
            raise DataError(f"{name}: expected floating-point numbers of shape {_text(shape)}, got {_of(tensor)}")


def _check_masks(shape: torch.Size, **given: torch.Tensor) -> None:
    for name, tensor in given.items():
        if tensor.shape != shape or tensor.dtype is not torch.bool:
            raise DataError(f"{name}: expected torch.bool of shape {_text(shape)}, got {_of(tensor)}")


def _text(shape: torch.Size) -> str:
    return str(tuple(shape)) if shape else "(..., steps)"


def _of(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"


def _check_rate(name: str, value: object) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0.0 <= value <= 1.0:
        raise ValueError(f"{name}: expected a number from 0 to 1, got {value!r}")
