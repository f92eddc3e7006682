"""One background thread that commits jobs in order, retries failed ones and reports every failure."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from trajstore.errors import ClosedError

Job = TypeVar("Job")
_log = logging.getLogger(__name__)


class CommitThread(Generic[Job]):
    """Runs jobs one after the other. A job that fails stays first in the queue until it succeeds.

    A failure is logged at once and raised to the next caller of `raise_pending` or `wait`, unless a retry has
    succeeded before that.

    Args:
        run: Does one job. The thread may call it again with the same job after a failure.
        tick: The thread calls it after each ``tick_s`` seconds without a job.
        tick_s: Seconds between ticks; None: no ticks.
    """

    def __init__(self, run: Callable[[Job], None], tick: Callable[[], None], tick_s: float | None) -> None:
        self._run = run
        self._tick = tick
        self._tick_s = None if tick_s is None else min(tick_s, threading.TIMEOUT_MAX)
        self._condition = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._n_submitted = 0
        self._n_done = 0
        self._failure: BaseException | None = None  # why the first job waits for a retry
        self._unraised: BaseException | None = None  # a failure that no call has raised yet
        self._last: BaseException | None = None  # the newest failure
        self._is_closing = False
        self._thread = threading.Thread(target=self._loop, name="trajstore-commit", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, job: Job) -> None:
        with self._condition:
            self._jobs.append(job)
            self._n_submitted += 1
            self._condition.notify_all()

    @property
    def n_submitted(self) -> int:
        """Jobs submitted so far: the ticket of the newest one."""
        return self._n_submitted

    def raise_pending(self) -> None:
        """Raise a failure that no call has raised yet; each failure is raised once."""
        if self._unraised is None:  # the common case, without taking the lock
            return
        with self._condition:
            failure, self._unraised = self._unraised, None
        if failure is not None:
            raise failure

    def wait(self, ticket: int) -> None:
        """Wait until ``ticket`` jobs are done. A job that failed before is retried first.

        Raises:
            BaseException: The retry failed again; this is its error.
        """
        with self._condition:
            self._failure = None
            self._condition.notify_all()
            self._condition.wait_for(
                lambda: self._n_done >= ticket or self._failure is not None or not self._thread.is_alive()
            )
            if self._n_done >= ticket:
                return
            failure, self._unraised = self._failure or self._last, None
        raise failure or ClosedError("the writer was closed before this was committed")

    def stop(self) -> None:
        """Finish the queued jobs and end the thread; jobs from the first failure on are given up."""
        with self._condition:
            self._is_closing = True
            self._condition.notify_all()
        self._thread.join()
        with self._condition:
            self._condition.notify_all()

    def _loop(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(self._has_work, timeout=self._tick_s)
                if self._is_closing and (self._failure is not None or not self._jobs):
                    return
                self._failure = None  # there is work, or a tick is due; a tick retries a failed job
                job = self._jobs[0] if self._jobs else None
            try:
                if job is None:
                    self._tick()
                else:
                    self._run(job)
            except BaseException as failure:  # every failure must reach a caller
                self._fail(failure)
            else:
                self._succeed(job)

    def _has_work(self) -> bool:
        return self._is_closing or (bool(self._jobs) and self._failure is None)

    def _succeed(self, job: Job | None) -> None:
        if job is not None:
            with self._condition:
                self._jobs.popleft()
                self._n_done += 1
                self._unraised = None  # a retry succeeded before any call raised the failure; the log has it
                self._condition.notify_all()

    def _fail(self, failure: BaseException) -> None:
        _log.warning("a background commit failed and will be retried: %s", failure)
        with self._condition:
            self._failure = self._unraised = self._last = failure
            self._condition.notify_all()
