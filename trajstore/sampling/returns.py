"""Returns to go and advantages, for all steps of many episodes at once.

Steps lie along the last axis, one episode after another; ``is_last`` marks the last step of each episode. In blocks
of `Reader.read_episodes_in_order` that is ``segment_end``, which open episodes have as well.
"""

from __future__ import annotations

import torch

from trajstore.errors import DataError


def returns_to_go(rewards: torch.Tensor, is_last: torch.Tensor, *, gamma: float) -> torch.Tensor:
    """Return, for each step, the discounted sum of its reward and all later rewards of its episode.

    Sums are computed in float64, in time proportional to the number of steps; the result has the dtype of the
    rewards. To bootstrap a truncated episode, add gamma times the value of its final observation to its last
    reward.

    Args:
        rewards: ``[..., steps]``, of a floating-point dtype.
        is_last: ``[..., steps]`` bools: whether the step is the last of its episode. It may be False for the very
            last step.
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
    has_next: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return generalised advantage estimates (GAE). Add the values to get lambda-returns.

    Sums are computed in float64, in time proportional to the number of steps; the result has the dtype of the
    rewards.

    Args:
        rewards: ``[..., steps]``, of a floating-point dtype; the other arguments have the same shape.
        values: Value estimates of the observations before the steps.
        next_values: Value estimates of the observations after the steps, final observations included. They are
            ignored where the step terminated its episode.
        terminated: Whether the step terminated its episode.
        is_last: Whether the step is the last of its episode, however the episode ended.
        gamma: Discount, from 0 to 1.
        lambda_: How far to look ahead before trusting the values, from 0 (one step) to 1 (to the end).
        has_next: Whether the observation after the step is known; None if all are. Where it is False, nothing is
            known of what the step led to: its advantage is 0, and earlier steps bootstrap from its value.
    """
    _check_numbers(rewards.shape, rewards=rewards, values=values, next_values=next_values)
    _check_masks(rewards.shape, terminated=terminated, is_last=is_last)
    _check_rate("gamma", gamma)
    _check_rate("lambda_", lambda_)
    ahead = (gamma * next_values.to(torch.float64)).masked_fill(terminated, 0.0)
    error = rewards.to(torch.float64) + ahead - values.to(torch.float64)
    if has_next is not None:
        _check_masks(rewards.shape, has_next=has_next)
        error = error.masked_fill(~has_next, 0.0)
    link = (~(is_last | terminated)).to(torch.float64) * (gamma * lambda_)
    return _sum_ahead(error, link).to(rewards.dtype)


def _sum_ahead(x: torch.Tensor, link: torch.Tensor) -> torch.Tensor:
    """Return the series ``y[t] = x[t] + link[t] * y[t + 1]``, with 0 after the end.

    Pairs of neighbours are combined to a series of half the length, whose sums give the even elements; the odd ones
    follow from them. That takes about two operations a step and a few dozen calls in all. Every factor is a product
    of links, so nothing overflows.
    """
    n = x.shape[-1]
    if n <= 1:
        return x
    even, odd = x[..., 0::2], x[..., 1::2]
    link_even, link_odd = link[..., 0::2], link[..., 1::2]
    if n % 2:
        odd, link_odd = (torch.nn.functional.pad(part, (0, 1)) for part in (odd, link_odd))
    found = _sum_ahead(_linked_sum(even, link_even, odd), link_even * link_odd)
    following = torch.nn.functional.pad(found[..., 1:], (0, 1))
    between = _linked_sum(odd, link_odd, following)
    return torch.stack([found, between], -1).flatten(-2)[..., :n]


def _linked_sum(x: torch.Tensor, link: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    # A value without a link has no effect, even if it is not finite.
    return x + (link * following).masked_fill_(link == 0, 0.0)


def _check_numbers(shape: torch.Size, **tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if not shape or tensor.shape != shape or not tensor.is_floating_point():
            expected = f"floating-point numbers of shape {_shape_text(shape)}"
            raise DataError(f"{name}: expected {expected}, got {_describe(tensor)}")


def _check_masks(shape: torch.Size, **tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.shape != shape or tensor.dtype is not torch.bool:
            raise DataError(f"{name}: expected torch.bool of shape {_shape_text(shape)}, got {_describe(tensor)}")


def _shape_text(shape: torch.Size) -> str:
    return str(tuple(shape)) if shape else "(..., steps)"


def _describe(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"


def _check_rate(name: str, value: object) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0.0 <= value <= 1.0:
        raise ValueError(f"{name}: expected a number from 0 to 1, got {value!r}")
