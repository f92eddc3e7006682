"""Waiting until a buffer holds enough steps."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable

_POLL_S = 0.05  # a refresh may also add steps, and does not notify


class Readiness:
    """Waits for steps and episodes that other threads append.

    Args:
        count: Returns the number of steps and of episodes that are present now.
        has_window: Returns whether a window can be drawn from them.
    """

    def __init__(self, count: Callable[[], tuple[int, int]], has_window: Callable[[], bool]) -> None:
        self._count = count
        self._has_window = has_window
        self._appended = threading.Condition()
        self._n_waiting = 0

    def notify_appended(self) -> None:
        """Wake waiting threads; costs nothing while no thread waits."""
        if self._n_waiting:
            with self._appended:
                self._appended.notify_all()

    def is_ready(self, min_steps: int, min_episodes: int) -> bool:
        n_steps, n_episodes = self._count()
        is_enough = n_steps >= min_steps and n_episodes >= min_episodes
        return is_enough and (min_steps <= 0 or self._has_window())

    def wait(self, min_steps: int, min_episodes: int, timeout_s: float | None) -> None:
        """Block this thread until the buffer is ready.

        Raises:
            TimeoutError: It was not ready in time.
        """
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        with self._appended:
            self._n_waiting += 1
            try:
                while not self.is_ready(min_steps, min_episodes):
                    self._appended.wait(self._pause(deadline, min_steps, min_episodes, timeout_s))
            finally:
                self._n_waiting -= 1

    async def wait_async(self, min_steps: int, min_episodes: int, timeout_s: float | None) -> None:
        """Suspend this coroutine until the buffer is ready; the event loop keeps running.

        Raises:
            TimeoutError: It was not ready in time.
        """
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self.is_ready(min_steps, min_episodes):
            await asyncio.sleep(self._pause(deadline, min_steps, min_episodes, timeout_s))

    def _pause(self, deadline: float, min_steps: int, min_episodes: int, timeout_s: float | None) -> float:
        left = deadline - time.monotonic()
        if left > 0:
            return min(left, _POLL_S)
        n_steps, n_episodes = self._count()
        why = "" if self._has_window() else ", and no window of the buffer's kind can be drawn from them"
        raise TimeoutError(
            f"waited {timeout_s} s for {min_steps} steps in {min_episodes} episodes; there are {n_steps} in"
            f" {n_episodes}{why}"
        )
