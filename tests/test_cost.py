"""The cost of a store is arithmetic that a user can check by hand."""

from __future__ import annotations

import doctest
from typing import Any

import pytest

import trajstore
import trajstore.cost
from trajstore import Prices, estimate_cost

ROUND = Prices("round", gb_month=1.0, put_1000=2.0, get_1000=3.0, gb_out=4.0)
DAYS = 30.44


def test_each_part_is_count_times_price() -> None:
    cost = estimate_cost(
        5e9,
        commits_per_day=100,
        puts_per_commit=8,
        reads_per_day=1000,
        bytes_per_read=1e6,
        refreshes_per_day=200,
        disk_cache_hits=0.75,
        prices=ROUND,
    )
    assert cost.storage == 5.0
    assert cost.writes == pytest.approx((100 * 8 + 200) * DAYS / 1000 * 2)
    assert cost.reads == pytest.approx(250 * DAYS / 1000 * 3)
    assert cost.transfer == pytest.approx(250 * DAYS * 1e6 / 1e9 * 4)
    assert cost.total == pytest.approx(cost.storage + cost.writes + cost.reads + cost.transfer)


def test_the_prices_say_where_and_when_they_are_from() -> None:
    for name in ("s3", "gcs", "azure"):
        cost = estimate_cost(1e9, prices=name)
        assert cost.prices.is_example
        for told in ("example: ", "list prices as of January 2025", "not checked", "pass them as Prices"):
            assert told in str(cost)


def test_own_prices_are_shown_by_their_name_alone() -> None:
    assert str(estimate_cost(2e9, prices=ROUND)) == (
        "2.00 a month (2.00 storage, 0.00 writes, 0.00 reads, 0.00 transfer), by these prices: round"
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"commits_per_day": -1},
        {"reads_per_day": float("nan")},
        {"disk_cache_hits": 1.5},
        {"prices": "nowhere"},
        {"puts_per_commit": "ten"},
        {"refreshes_per_day": True},
    ],
)
def test_impossible_numbers_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        estimate_cost(1, **wrong)


def test_negative_prices_are_refused() -> None:
    with pytest.raises(ValueError, match="gb_month"):
        Prices("x", -1, 0, 0)


def test_the_example_is_right() -> None:
    assert doctest.testmod(trajstore.cost).failed == 0
