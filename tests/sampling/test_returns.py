"""Returns to go and advantages: against plain loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trajstore import DataError
from trajstore.sampling.returns import advantages, returns_to_go
from trajstore.schema import Array

RATES = st.sampled_from([0.0, 0.5, 0.9, 0.99, 0.999, 1.0])


def summed(x: Array, link: Array) -> Array:
    """What follows, step by step from the end, in float64."""
    total, found = 0.0, np.zeros(len(x))
    for t in reversed(range(len(x))):
        total = float(x[t]) + (float(link[t]) * total if link[t] else 0.0)
        found[t] = total
    return found


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 300), st.integers(0, 1 << 20), RATES, st.sampled_from([0.02, 0.3, 1.0]))
def test_returns_are_those_of_a_loop(n: int, seed: int, gamma: float, often: float) -> None:
    rng = np.random.default_rng(seed)
    rewards, is_last = rng.normal(size=n), rng.random(n) < often
    got = returns_to_go(torch.from_numpy(rewards), torch.from_numpy(is_last), gamma=gamma)
    np.testing.assert_allclose(got.numpy(), summed(rewards, ~is_last * gamma), rtol=1e-12, atol=1e-12)


def test_sums_of_whole_numbers_are_exact() -> None:
    rng = np.random.default_rng(1)
    rewards, is_last = rng.integers(-1000, 1000, 100_000).astype(np.float64), rng.random(100_000) < 1e-4
    got = returns_to_go(torch.from_numpy(rewards), torch.from_numpy(is_last), gamma=1.0)
    assert np.array_equal(got.numpy(), summed(rewards, ~is_last * 1.0))


def test_long_episodes_lose_no_digits_and_nothing_overflows() -> None:
    n, gamma = 200_000, 0.9
    got = returns_to_go(torch.ones(n, dtype=torch.float64), torch.zeros(n, dtype=torch.bool), gamma=gamma)
    expected = (1 - gamma ** np.arange(n, 0, -1.0)) / (1 - gamma)
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-13)


def test_single_precision_is_that_of_the_result_alone() -> None:
    rng = np.random.default_rng(2)
    rewards, is_last = rng.normal(size=50_000).astype(np.float32), rng.random(50_000) < 1e-3
    got = returns_to_go(torch.from_numpy(rewards), torch.from_numpy(is_last), gamma=0.999)
    assert got.dtype == torch.float32
    expected = summed(rewards, ~is_last * 0.999)
    np.testing.assert_allclose(got.numpy(), expected, rtol=2e-7, atol=1e-9)


def test_what_is_not_finite_stays_in_its_episode() -> None:
    rewards = torch.tensor([1.0, 2.0, float("inf"), 3.0, float("nan"), 4.0])
    is_last = torch.tensor([False, True, False, True, True, True])
    assert returns_to_go(rewards, is_last, gamma=1.0)[[0, 1, 3, 5]].tolist() == [3.0, 2.0, 3.0, 4.0]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 200), st.integers(0, 1 << 20), RATES, RATES)
def test_advantages_are_those_of_a_loop(n: int, seed: int, gamma: float, lambda_: float) -> None:
    rng = np.random.default_rng(seed)
    rewards, values, next_values = rng.normal(size=(3, n))
    is_last = rng.random(n) < 0.1
    terminated = is_last & (rng.random(n) < 0.5)
    next_values[terminated] = np.nan
    error = rewards + np.where(terminated, 0.0, gamma * next_values) - values
    given_ = (torch.from_numpy(a) for a in (rewards, values, next_values, terminated, is_last))
    got = advantages(*given_, gamma=gamma, lambda_=lambda_)
    np.testing.assert_allclose(got.numpy(), summed(error, ~is_last * gamma * lambda_), rtol=1e-12, atol=1e-12)


def test_nothing_follows_a_step_that_terminated_though_the_window_goes_on() -> None:
    ones, never = torch.ones(3), torch.zeros(3, dtype=torch.bool)
    terminated = torch.tensor([False, True, False])
    got = advantages(ones, 0 * ones, 0 * ones, terminated, never, gamma=1.0, lambda_=1.0)
    assert got.tolist() == [2.0, 1.0, 1.0]


def test_rows_of_a_batch_are_summed_on_their_own() -> None:
    rng = np.random.default_rng(3)
    rewards, is_last = torch.from_numpy(rng.normal(size=(4, 3, 7))), torch.from_numpy(rng.random((4, 3, 7)) < 0.2)
    got = returns_to_go(rewards, is_last, gamma=0.9)
    for i in range(4):
        for j in range(3):
            expected = returns_to_go(rewards[i, j], is_last[i, j], gamma=0.9)
            torch.testing.assert_close(got[i, j], expected, rtol=1e-14, atol=1e-14)


def test_inputs_stay_as_they_are() -> None:
    rewards, values = torch.arange(5.0), torch.ones(5)
    is_last = torch.tensor([False, True, False, False, True])
    given_ = [rewards, values, values.clone(), is_last.clone(), is_last]
    before = [tensor.clone() for tensor in given_]
    advantages(*given_, gamma=0.9, lambda_=0.9)
    returns_to_go(rewards, is_last, gamma=0.9)
    assert all(torch.equal(a, b) for a, b in zip(given_, before, strict=True))


FLOATS, BOOLS = torch.zeros(3), torch.zeros(3, dtype=torch.bool)
GOOD: dict[str, Any] = {"rewards": FLOATS, "is_last": BOOLS, "gamma": 0.9}
MORE: dict[str, Any] = {"values": FLOATS, "next_values": FLOATS, "terminated": BOOLS, "lambda_": 0.9}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": torch.zeros(3, dtype=torch.int64)}, "rewards: expected floating-point .*got torch.int64"),
        ({"rewards": torch.zeros(())}, r"rewards: expected floating-point numbers of shape \(..., steps\), got"),
        ({"is_last": torch.zeros(4, dtype=torch.bool)}, r"is_last: expected torch.bool of shape \(3,\), .*\(4,\)"),
        ({"is_last": FLOATS}, "is_last: expected torch.bool .*got torch.float32"),
        ({"gamma": 1.1}, "gamma: expected a number from 0 to 1, got 1.1"),
        ({"gamma": float("nan")}, "gamma: expected"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    for function, arguments in ((returns_to_go, GOOD), (advantages, GOOD | MORE)):
        with pytest.raises(ValueError, match=message):
            function(**arguments | change)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": torch.zeros(4)}, r"values: expected floating-point numbers of shape \(3,\), got"),
        ({"next_values": torch.zeros(2)}, "next_values: expected"),
        ({"terminated": FLOATS}, "terminated: expected torch.bool"),
        ({"lambda_": -0.1}, "lambda_: expected a number from 0 to 1"),
    ],
)
def test_advantages_refuse_what_does_not_fit(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        advantages(**GOOD | MORE | change)
    assert issubclass(DataError, ValueError)
