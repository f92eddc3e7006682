"""One background thread that makes staged work durable, in order, and never loses an error."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Job = TypeVar("Job")


class Committer(Generic[Job]):
    """Runs jobs one after the other. A job that fails stays first in line until it succeeds.

    Args:
        run: Does one job; may be called again with the same job after it failed.
        tick: Called from the thread when it has been idle for ``tick_s``.
        tick_s: How long to idle between ticks, or None for no ticks.
    """

    def __init__(self, run: Callable[[Job], None], tick: Callable[[], None], tick_s: float | None) -> None:
        self._run = run
        self._tick = tick
        self._tick_s = tick_s
        self._condition = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._error: BaseException | None = None  # failed and not yet raised to anybody
        self._is_stalled = False  # the first job failed; it waits for somebody to ask for another try
        self._is_closing = False
        self._thread = threading.Thread(target=self._loop, name="trajstore-commit", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, job: Job) -> None:
        with self._condition:
            self._jobs.append(job)
            self._condition.notify_all()

    def raise_pending(self) -> None:
        """Raise a failure that nobody has seen yet; each is raised once."""
        if self._error is None:  # the common case, without taking the lock
            return
        with self._condition:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self, at_most: int = 0) -> None:
        """Wait until no more than ``at_most`` jobs are left, giving a failed one another try.

        Raises:
            BaseException: What the try ended with, if it failed again.
        """
        with self._condition:
            self._is_stalled = False
            self._condition.notify_all()
            self._condition.wait_for(lambda: len(self._jobs) <= at_most or self._is_stalled)
            if len(self._jobs) <= at_most:
                return
            error, self._error = self._error, None
        assert error is not None
        raise error

    def stop(self) -> None:
        """End the thread after the jobs that can be done; those that fail are given up."""
        with self._condition:
            self._is_closing = True
            self._condition.notify_all()
        self._thread.join()

    def _loop(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(self._has_news, timeout=self._tick_s)
                if self._is_closing and (self._is_stalled or not self._jobs):
                    return
                self._is_stalled = False  # woken by news, or by time: then a failed job gets another try
                job = self._jobs[0] if self._jobs else None
            if job is None:
                self._attempt(self._tick)
            else:
                self._attempt(lambda job=job: self._finish(job))  # type: ignore[misc]

    def _has_news(self) -> bool:
        return self._is_closing or (bool(self._jobs) and not self._is_stalled)

    def _finish(self, job: Job) -> None:
        self._run(job)
        with self._condition:
            self._jobs.popleft()
            self._condition.notify_all()

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except BaseException as error:
            with self._condition:
                self._error = error
                self._is_stalled = True
                self._condition.notify_all()
