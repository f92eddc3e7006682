"""Calls of a function that may be short or long: only long ones are worth a thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from trajstore.background_pool import BackgroundPool

T = TypeVar("T")
# Handing a call of some microseconds to a thread takes several times as long as the call.
_SHORT_S, _SHORT_CALL_S = 0.002, 0.0005


def map_in_threads(
    function: Callable[[Any], T], items: Sequence[Any], threads: Callable[[], BackgroundPool], n_threads: int
) -> list[T]:
    """Call a function with each item; the results are in order.

    The calling thread begins. Once the calls prove to be long, threads share the rest. If calls fail, the first
    error is raised after all calls have ended.

    Args:
        function: What to call.
        items: What to call it with.
        threads: Returns the threads, if they are needed.
        n_threads: The most threads to use.
    """
    results: list[Any] = [None] * len(items)
    errors: list[Exception] = []
    left = deque(range(len(items)))

    def work(until: Callable[[], bool]) -> None:
        while left and not until():
            try:
                number = left.popleft()
            except IndexError:  # another thread took the last one
                return
            try:
                results[number] = function(items[number])
            except Exception as error:
                errors.append(error)

    start = time.perf_counter()

    def are_long() -> bool:
        return time.perf_counter() - start > max(_SHORT_S, _SHORT_CALL_S * (len(items) - len(left)))

    work(are_long)
    for future in [threads().submit(work, lambda: False) for _ in range(min(n_threads, len(left)))]:
        future.result()
    if errors:
        raise errors[0]
    return results
