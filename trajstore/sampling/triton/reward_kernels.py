"""The kernel that sums rewards. Importing this module imports Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from trajstore.sampling.triton.batch_kernels import int64s, kernel, uint8s


@triton.jit
def _term(rewards, gamma, i, taken, mask, dtype: tl.constexpr):
    value = tl.load(rewards + i, mask=mask, other=0).to(dtype)
    return tl.where(i < taken, value * tl.load(gamma + i).to(dtype), 0.0)


@triton.jit
def _sum_few(first, gamma, taken, mask, dtype: tl.constexpr, n: tl.constexpr):
    total = _term(first, gamma, 0, taken, mask, dtype)
    for i in tl.static_range(1, n):
        total += _term(first, gamma, i, taken, mask, dtype)
    return total


@triton.jit
def _sum_many(first, gamma, taken, mask, n, dtype: tl.constexpr, n_left_over: tl.constexpr):
    sum_0 = _term(first, gamma, 0, taken, mask, dtype)
    sum_1 = _term(first, gamma, 1, taken, mask, dtype)
    sum_2 = _term(first, gamma, 2, taken, mask, dtype)
    sum_3 = _term(first, gamma, 3, taken, mask, dtype)
    for i in range(4, n - n_left_over, 4):
        sum_0 += _term(first, gamma, i, taken, mask, dtype)
        sum_1 += _term(first, gamma, i + 1, taken, mask, dtype)
        sum_2 += _term(first, gamma, i + 2, taken, mask, dtype)
        sum_3 += _term(first, gamma, i + 3, taken, mask, dtype)
    for i in tl.static_range(n_left_over):
        sum_0 += _term(first, gamma, n - n_left_over + i, taken, mask, dtype)
    return sum_0 + sum_1 + sum_2 + sum_3


@kernel
def sum_rewards(
    rewards: tl.int64, gamma: tl.int64, taken: tl.int64, is_terminal: tl.int64,
    returns: tl.int64, discounts: tl.int64, n_steps: tl.int64, n: tl.int64,
    stored: tl.constexpr, dtype: tl.constexpr, n_sums: tl.constexpr, n_left_over: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Sum the rewards of transitions, in the order of additions that `torch_executor.n_step_sums` fixes.

    Args:
        rewards: ``[n_steps, n]``.
        gamma: Powers of the discount factor, in float32.
        taken: Steps that each transition covers.
        is_terminal: Whether the episode terminated there.
        returns: Output, in ``dtype``.
        discounts: Output, in float32.
        n_steps: Steps of the batch.
        n: Largest number of steps that a transition covers.
        stored: The dtype of the rewards.
        dtype: The dtype that they are summed in.
        n_sums: The smaller of ``n`` and 4.
        n_left_over: Rewards that are left over behind the last whole four; 0 if there are fewer than four.
        block: Steps of one program of the grid.
    """
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    mask = at < n_steps
    ahead = tl.load(int64s(taken) + at, mask=mask, other=0)
    gamma = tl.cast(gamma, tl.pointer_type(tl.float32))
    first = tl.cast(rewards, tl.pointer_type(stored)) + at * n
    if n_sums < 4:
        total = _sum_few(first, gamma, ahead, mask, dtype, n_sums)
    else:
        total = _sum_many(first, gamma, ahead, mask, n, dtype, n_left_over)
    tl.store(tl.cast(returns, tl.pointer_type(dtype)) + at, total, mask=mask)
    ends = tl.load(uint8s(is_terminal) + at, mask=mask, other=0) != 0
    discount = tl.load(gamma + ahead, mask=mask, other=0.0)
    tl.store(tl.cast(discounts, tl.pointer_type(tl.float32)) + at, tl.where(ends, 0.0, discount), mask=mask)
