"""Compiled loops that sum the rewards of n-step transitions. Importing this module imports numba."""

from __future__ import annotations

import numpy as np

from trajstore.sampling.compiled.jit import compiled
from trajstore.sampling.compiled.memory_access import array_at, pointer
from trajstore.sampling.compiled.program_layout import (
    DISCOUNTS,
    GAMMA,
    IS_TERMINAL,
    MOST_STEPS,
    N_WINDOWS,
    RETURNS,
    REWARD_BYTES,
    REWARDS,
    SIZE,
    TAKEN,
)
from trajstore.schema import Array


@compiled
def _sum_rewards(rewards: Array, gamma: Array, taken: Array, returns: Array, most: int) -> None:
    """Sum discounted rewards; the order of the additions is that of `torch_executor.n_step_sums`."""
    n_whole = most - most % 4
    zero = rewards.dtype.type(0)
    for i in range(len(taken)):
        lane_0 = lane_1 = lane_2 = lane_3 = zero
        at, n = i * most, taken[i]
        for k in range(0, n_whole, 4):
            part_0 = rewards[at + k] * gamma[k] if k < n else zero
            part_1 = rewards[at + k + 1] * gamma[k + 1] if k + 1 < n else zero
            part_2 = rewards[at + k + 2] * gamma[k + 2] if k + 2 < n else zero
            part_3 = rewards[at + k + 3] * gamma[k + 3] if k + 3 < n else zero
            if k == 0:
                lane_0, lane_1, lane_2, lane_3 = part_0, part_1, part_2, part_3
            else:
                lane_0, lane_1, lane_2, lane_3 = (
                    lane_0 + part_0,
                    lane_1 + part_1,
                    lane_2 + part_2,
                    lane_3 + part_3,
                )
        for k in range(n_whole, most):
            part = rewards[at + k] * gamma[k] if k < n else zero
            lane_0 = part if k == 0 else lane_0 + part
        if n_whole:
            lane_0 = lane_0 + lane_1 + lane_2 + lane_3
        returns[i] = lane_0


@compiled
def sum_returns(program: Array, call: Array) -> None:
    """Sum the rewards of transitions, and find their discounts."""
    most, n_steps = program[MOST_STEPS], call[N_WINDOWS] * program[SIZE]
    if not most:
        return
    gamma = array_at(pointer(call[GAMMA]), (most + 1,), np.float32)
    taken = array_at(pointer(call[TAKEN]), (n_steps,), np.int64)
    is_terminal = array_at(pointer(call[IS_TERMINAL]), (n_steps,), np.uint8)
    discounts = array_at(pointer(call[DISCOUNTS]), (n_steps,), np.float32)
    for i in range(n_steps):
        discounts[i] = np.float32(0) if is_terminal[i] else gamma[taken[i]]
    if program[REWARD_BYTES] == 4:
        rewards_4 = array_at(pointer(call[REWARDS]), (n_steps * most,), np.float32)
        returns_4 = array_at(pointer(call[RETURNS]), (n_steps,), np.float32)
        _sum_rewards(rewards_4, gamma, taken, returns_4, most)
    elif program[REWARD_BYTES] == 8:
        rewards_8 = array_at(pointer(call[REWARDS]), (n_steps * most,), np.float64)
        returns_8 = array_at(pointer(call[RETURNS]), (n_steps,), np.float64)
        _sum_rewards(rewards_8, gamma, taken, returns_8, most)
