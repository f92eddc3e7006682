"""Random numbers as tensors are those of the definition, in Python's integers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trajstore.sampling.rng import CounterRng

CPU = torch.device("cpu")
MASK = (1 << 64) - 1
seeds, counters = st.integers(0, MASK), st.integers(0, 1 << 62)
limits = (
    st.integers(1, 1 << 20)
    | st.integers(1, (1 << 63) - 1)
    | st.sampled_from([1 << 53, (1 << 53) - 1, (1 << 53) + 1])
)


def splitmix(rng: CounterRng, i: int) -> int:
    z = (rng.mixed_seed + (i + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def below(bits: int, limit: int) -> int:
    return min(int((bits >> 11) * 2.0**-53 * float(limit)), limit - 1)


@given(seeds, counters, st.lists(st.tuples(st.integers(1, 5), limits), min_size=1, max_size=4))
def test_numbers_are_those_of_the_definition(seed: int, counter: int, calls: list[tuple[int, int]]) -> None:
    rng = CounterRng(seed, counter)
    for n, limit in calls:
        expected = [splitmix(rng, rng.counter + i) for i in range(3 * n)]
        assert [bits & MASK for bits in rng.bits(n, CPU).tolist()] == expected[:n]
        assert rng.uniform(n, CPU).tolist() == [(bits >> 11) * 2.0**-53 for bits in expected[n : 2 * n]]
        assert rng.below(n, limit, CPU).tolist() == [below(bits, limit) for bits in expected[2 * n :]]


@given(seeds, counters, st.integers(1, 5), st.lists(st.integers(1, 1 << 53), min_size=1, max_size=3))
def test_several_limits_are_drawn_as_by_several_calls(seed: int, counter: int, n: int, limits: list[int]) -> None:
    at_once, in_turn = CounterRng(seed, counter), CounterRng(seed, counter)
    for found, limit in zip(at_once.below_each(n, limits, CPU), limits, strict=True):
        assert torch.equal(found, in_turn.below(n, limit, CPU))
    assert at_once.counter == in_turn.counter


@given(seeds, st.lists(st.integers(1, 1 << 53), min_size=1, max_size=5))
def test_each_number_may_have_its_own_limit(seed: int, limits: list[int]) -> None:
    rng = CounterRng(seed)
    bits = [splitmix(rng, i) for i in range(len(limits))]
    found = rng.below(len(limits), torch.tensor(limits), CPU)
    assert found.tolist() == [below(each, limit) for each, limit in zip(bits, limits, strict=True)]


@pytest.mark.parametrize("exponent", range(54))
def test_the_largest_number_is_below_the_limit(exponent: int) -> None:
    """So the rounded product needs no correction for limits of at most 2**53."""
    for limit in {max(1, (1 << exponent) + d) for d in (-1, 0, 1)}:
        if limit <= 1 << 53:
            assert int(((1 << 53) - 1) * 2.0**-53 * limit) < limit
