"""Weights and masks by the age of the policy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trajstore.sampling.staleness import fresh_mask, staleness_weights


def test_weights_halve_with_every_half_life() -> None:
    weights = staleness_weights(torch.tensor([10, 8, 6, 0]), 10, 2)
    assert weights.tolist() == [1.0, 0.5, 0.25, 2.0**-5]
    assert weights.dtype == torch.float32
    assert staleness_weights(torch.tensor([12]), 10, 2).tolist() == [1.0]
    assert staleness_weights(torch.tensor([0, 10]), 10, math.inf).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("half_life", [0, -1.0, math.nan])
def test_a_half_life_is_above_0(half_life: float) -> None:
    with pytest.raises(ValueError, match="half_life: expected"):
        staleness_weights(torch.tensor([1]), 1, half_life)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1), st.integers(0, 2**40), st.integers(0, 2**40))
def test_steps_are_fresh_up_to_the_maximum_staleness(versions: list[int], current: int, most: int) -> None:
    mask = fresh_mask(torch.from_numpy(np.array(versions, np.int64)), current, most)
    assert mask.tolist() == [current - version <= most for version in versions]


def test_staleness_is_not_negative() -> None:
    with pytest.raises(ValueError, match="max_staleness"):
        fresh_mask(torch.tensor([1]), 1, -1)
