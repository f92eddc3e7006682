"""Short calls stay in the thread of the caller, long ones are shared out."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from trajstore.background_pool import BackgroundPool
from trajstore.storage import shared_work
from trajstore.storage.shared_work import map_in_threads


class Clock:
    """A clock that goes on with each call that is made."""

    def __init__(self, patch: pytest.MonkeyPatch, seconds: float) -> None:
        self.now, self.callers = 0.0, list[int]()
        self._seconds = seconds
        patch.setattr(shared_work, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def double(self, number: int) -> int:
        self.now += self._seconds
        self.callers.append(threading.get_ident())
        return 2 * number


def no_threads() -> Any:
    raise AssertionError("no thread is needed")


def pool() -> BackgroundPool:
    return BackgroundPool(3, "test")


def test_short_calls_are_made_by_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, 0.0001)
    assert map_in_threads(clock.double, range(100), no_threads, 3) == list(range(0, 200, 2))
    assert {*clock.callers} == {threading.get_ident()}


def test_long_calls_are_shared_out_after_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, threads = Clock(monkeypatch, 0.01), pool()
    assert map_in_threads(clock.double, range(100), lambda: threads, 3) == list(range(0, 200, 2))
    assert clock.callers.count(threading.get_ident()) == 1
    assert len(clock.callers) == 100
    threads.shutdown()


def test_calls_that_wait_for_each_other_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, threads, barrier = Clock(monkeypatch, 0.01), pool(), threading.Barrier(3, timeout=30)

    def meet(number: int) -> int:
        if number:
            barrier.wait()
        return clock.double(number)

    assert map_in_threads(meet, range(4), lambda: threads, 3) == [0, 2, 4, 6]
    threads.shutdown()


@pytest.mark.parametrize("seconds", [0.0, 0.01])
def test_all_calls_are_made_before_the_first_error_is_raised(
    monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    clock, threads = Clock(monkeypatch, seconds), pool()

    def fail_early(number: int) -> int:
        clock.double(number)
        if number < 2:
            raise ValueError(f"number {number}")
        return number

    with pytest.raises(ValueError, match="number 0"):
        map_in_threads(fail_early, range(20), lambda: threads, 3)
    assert len(clock.callers) == 20
    threads.shutdown()


def test_nothing_to_do_needs_no_threads() -> None:
    assert map_in_threads(lambda number: number, [], no_threads, 3) == []
