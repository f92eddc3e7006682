"""Use counts against a plain dict, and staleness."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trajstore import DataError
from trajstore.sampling.usage import UseCounts, fresh_mask, staleness_weights


def addresses(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


class Model:
    """The same, one address at a time."""

    def __init__(self, max_uses: int | None) -> None:
        self.max_uses, self.counts, self.first = max_uses, dict[int, int](), 0

    def is_used_up(self, address: int) -> bool:
        enough = self.max_uses is not None and self.counts.get(address, 0) >= self.max_uses
        return address < self.first or enough

    def take(self, given: list[int]) -> list[bool]:
        for address in given:
            if address >= self.first:
                self.counts[address] = self.counts.get(address, 0) + 1
        return [self.is_used_up(address) for address in given]

    def forget(self, start: int, stop: int) -> None:
        if start <= self.first:
            self.first = max(self.first, stop)
        self.counts = {a: n for a, n in self.counts.items() if not start <= a < stop and a >= self.first}


some = st.integers(0, 5000)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.lists(some, max_size=20)),
        st.tuples(st.just("forget"), st.tuples(some, some)),
        st.tuples(st.just("forget"), st.tuples(st.just(0), some)),
        st.tuples(st.just("reload"), st.none()),
    ),
    max_size=15,
)


@given(actions, st.sampled_from([None, 1, 2]))
def test_counts_agree_with_a_plain_dict(steps: list[tuple[str, object]], max_uses: int | None) -> None:
    counts, model = UseCounts(max_uses), Model(max_uses)
    seen = {0}
    for what, value in steps:
        if what == "take":
            assert isinstance(value, list)
            assert counts.take(addresses(*value)).tolist() == model.take(value)
            seen |= set(value)
        elif what == "forget":
            start, stop = sorted(value)  # type: ignore[call-overload]
            counts.forget(start, stop)
            model.forget(start, stop)
            seen |= {start, stop}
        else:
            state = counts.state_dict()
            counts = UseCounts(max_uses)
            counts.load_state_dict(state)
        known = sorted(seen)
        assert counts.uses(addresses(*known)).tolist() == [model.counts.get(a, 0) for a in known]
        assert counts.is_used_up(addresses(*known)).tolist() == [model.is_used_up(a) for a in known]
        expected = [a for a in known if max_uses and model.counts.get(a, 0) >= max_uses and 10 <= a < 4000]
        assert counts.used_up(10, 4000).tolist() == expected


def test_a_step_named_twice_is_used_twice() -> None:
    counts = UseCounts(max_uses=2)
    assert counts.take(addresses(3, 3, 4)).tolist() == [True, True, False]


def test_answers_have_the_shape_of_the_addresses() -> None:
    counts = UseCounts(max_uses=1)
    given_ = torch.arange(12).reshape(3, 4)
    assert counts.take(given_).shape == (3, 4)
    assert counts.uses(given_).eq(1).all()
    assert counts.take(addresses()).shape == (0,)


def test_memory_is_that_of_what_is_not_forgotten() -> None:
    counts = UseCounts(max_uses=3)
    for start in range(0, 1_000_000, 500):
        counts.take(torch.arange(start, start + 500))
        counts.forget(0, max(0, start - 5000))
    assert counts.nbytes < 4 * 5500 * 3
    assert counts.uses(torch.arange(994_500, 1_000_000)).eq(1).all()
    counts.forget(0, 1_000_000)
    assert counts.nbytes == UseCounts().nbytes


def test_a_far_prefix_may_be_forgotten_before_anything_is_used() -> None:
    counts = UseCounts(max_uses=1)
    counts.forget(0, 10**12)
    assert counts.take(addresses(5, 10**12 + 3)).tolist() == [True, True]
    assert counts.uses(addresses(5, 10**12, 10**12 + 3)).tolist() == [0, 0, 1]
    assert counts.nbytes < 1 << 16


def test_a_loaded_state_shares_no_memory() -> None:
    counts = UseCounts()
    counts.take(torch.arange(2000))
    state = counts.state_dict()
    other = UseCounts()
    other.load_state_dict(state)
    other.take(addresses(7))
    counts.take(addresses(8))
    assert state["counts"][:10].tolist() == [1] * 10
    assert counts.uses(addresses(7)).item() == 1


def test_bad_arguments_are_refused() -> None:
    counts = UseCounts()
    with pytest.raises(DataError, match=r"expected int64, got torch\.int32"):
        counts.take(torch.arange(3, dtype=torch.int32))
    with pytest.raises(DataError, match="at least 0, got -1"):
        counts.take(addresses(2, -1))
    with pytest.raises(ValueError, match="start <= stop, got 5 and 4"):
        counts.forget(5, 4)
    with pytest.raises(ValueError, match="max_uses"):
        UseCounts(0)


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
def test_fresh_is_what_lies_at_most_so_many_versions_back(versions: list[int], current: int, most: int) -> None:
    mask = fresh_mask(torch.from_numpy(np.array(versions, np.int64)), current, most)
    assert mask.tolist() == [current - version <= most for version in versions]


def test_staleness_is_not_negative() -> None:
    with pytest.raises(ValueError, match="max_staleness"):
        fresh_mask(torch.tensor([1]), 1, -1)
