"""Threads in the background: calls for many items, in the order of the items."""

from __future__ import annotations

import threading

import pytest

from trajstore.background_pool import BackgroundPool

WAIT_S = 60


def test_results_and_errors_come_in_the_order_of_the_items() -> None:
    pool = BackgroundPool(3, "test")

    def call(i: int) -> int:
        if i % 4 == 1:
            raise KeyError(i)
        return 10 * i

    found = pool.map(call, range(9))
    assert [result for result in found if not isinstance(result, BaseException)] == [0, 20, 30, 40, 60, 70, 80]
    assert [result.args for result in found if isinstance(result, KeyError)] == [(1,), (5,)]
    assert pool.map(call, []) == []


def test_as_many_items_are_called_at_once_as_there_are_threads() -> None:
    pool = BackgroundPool(8, "test")
    at_once = threading.Barrier(8)
    for _ in range(2):  # new threads, and the same ones again
        assert sorted(pool.map(lambda _: at_once.wait(WAIT_S), range(8))) == list(range(8))  # type: ignore[type-var]


def test_several_threads_share_a_pool() -> None:
    pool = BackgroundPool(2, "test")
    found: dict[int, list[int | BaseException]] = {}

    def use(i: int) -> None:
        found[i] = pool.map(lambda j: i * j, range(50))

    users = [threading.Thread(target=use, args=(i,)) for i in range(4)]
    for user in users:
        user.start()
    for user in users:
        user.join(WAIT_S)
    assert found == {i: [i * j for j in range(50)] for i in range(4)}


def test_a_pool_that_was_shut_down_takes_no_items() -> None:
    pool = BackgroundPool(2, "test")
    pool.map(str, range(3))
    pool.shutdown()
    with pytest.raises(RuntimeError, match="test: no work is accepted after shutdown"):
        pool.map(str, range(3))
