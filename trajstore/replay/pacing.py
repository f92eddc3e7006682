"""Pacing: collection and learning wait for each other, so that the ratio of samples to inserts is kept."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import Mapping
from fractions import Fraction
from numbers import Rational
from typing import Any

from trajstore.arguments import check_positive
from trajstore.errors import ClosedError, PacingError

_log = logging.getLogger(__name__)

_LOOK_S = 5.0  # seconds between checks whether a waiting call is in vain
_WARN_S = 30.0  # a call that has waited this long is logged, once for each object
_ALONE_S = 600.0  # a call waits this long for other threads if none of them has made a call yet
_MAX_CALLERS = 1024
_NO_CALLERS = ("trajstore-", "fsspecIO", "asyncio_", "tqdm_monitor")  # threads that never append or sample, by name

_Waiter = tuple[asyncio.AbstractEventLoop, "asyncio.Future[None]"]


class SamplesPerInsert:
    """Keeps ``inserted * ratio - sampled`` within bounds; safe to use from several threads and event loops.

    A thread that inserts too fast waits for samples, and a thread that samples too fast waits for inserts. No
    sample is allowed before ``min_steps`` are inserted. Until then inserts do not wait, and the bounds count from
    there: the difference stays within ``min_steps * ratio`` plus and minus ``slack``. Only the insert that reaches
    ``min_steps`` may exceed them.

    ``await_insert`` and ``await_sample`` wait until the bounds allow the call, and count it in the same step, so
    several threads can't exceed the bounds together. ``insert`` and ``sample`` count without waiting.

    Without a timeout, a call that would wait for ever raises `PacingError`, whose message says how many inserts or
    samples are missing: as soon as the process has no other thread that could make them, and after 600 seconds if
    it has, but none of them has inserted or sampled yet. A call that has waited for 30 seconds logs one warning.
    Coroutines are not checked: others of the same thread may make the missing calls.

    Args:
        ratio: Windows sampled for every step inserted. A decimal counts as it is written: 0.1 is 1/10.
        min_steps: Steps inserted before the first sample; at least 1.
        slack: How far either side may get ahead, in windows. It must be large enough for the largest insert and the
            largest sample, else both could wait for each other for ever: ``2 * slack >= ratio * n_inserted +
            n_sampled``. A call that breaks this rule is refused. By default a call may begin as soon as its side is
            not ahead.
        timeout_s: Seconds that a call waits by default; None: without a limit, as long as other threads take part.
    """

    def __init__(
        self, ratio: float, *, min_steps: int = 0, slack: float | None = None, timeout_s: float | None = None
    ) -> None:
        exact_ratio = _fraction("ratio", ratio)
        exact_slack = None if slack is None else _fraction("slack", slack)
        if not isinstance(min_steps, int) or isinstance(min_steps, bool) or min_steps < 0:
            raise ValueError(f"min_steps: expected an integer of at least 0, got {min_steps!r}")
        self.options = {"ratio": ratio, "min_steps": min_steps, "slack": slack, "timeout_s": timeout_s}
        self._min_steps = max(1, min_steps)
        # Everything is counted in whole fractions of a window, so nothing is ever rounded.
        self._window = math.lcm(exact_ratio.denominator, 1 if exact_slack is None else exact_slack.denominator)
        self._step = int(exact_ratio * self._window)
        self._slack = None if exact_slack is None else int(exact_slack * self._window)
        self._timeout_s = _seconds(timeout_s, math.inf)
        self._n_inserted = self._n_sampled = 0
        self._largest = {"insert": 0, "sample": 0}  # largest calls so far
        self._is_closed = self._has_warned = False
        self._callers: set[int] = set()  # threads that have inserted or sampled
        self._has_foreign_callers = False  # whether one of them was not made by Python, so that its end is not seen
        self._changed = threading.Condition()
        self._waiters: list[_Waiter] = []  # futures of event loops, woken together with the condition
        if self._slack is not None and 2 * self._slack < self._step + self._window:
            least = (self._step + self._window) / 2 / self._window
            raise ValueError(f"slack: expected at least {least:g} = (ratio + 1) / 2, got {slack!r}")

    @property
    def n_inserted(self) -> int:
        return self._n_inserted

    @property
    def n_sampled(self) -> int:
        return self._n_sampled

    @property
    def difference(self) -> float:
        """``inserted * ratio - sampled``, counted from ``min_steps``; above 0 if sampling is behind."""
        with self._changed:
            return self._difference() / self._window

    def insert(self, n: int = 1) -> None:
        """Count steps that were inserted without waiting."""
        check_positive("n", n)
        self._count(n, 0)

    def sample(self, n: int = 1) -> None:
        """Count windows that were sampled without waiting."""
        check_positive("n", n)
        self._count(0, n)

    def cancel_insert(self, n: int = 1) -> None:
        """Undo the count of an insert that was admitted and then failed."""
        check_positive("n", n)
        self._count(-n, 0)

    def cancel_sample(self, n: int = 1) -> None:
        """Undo the count of a sample that was admitted and then failed."""
        check_positive("n", n)
        self._count(0, -n)

    def can_insert(self, n: int = 1) -> bool:
        """Whether ``await_insert`` would return at once."""
        with self._changed:
            self._admit("insert", n)
            return self._may_insert(n)

    def can_sample(self, n: int = 1) -> bool:
        """Whether ``await_sample`` would return at once."""
        with self._changed:
            self._admit("sample", n)
            return self._may_sample(n)

    def await_insert(self, n: int = 1, timeout_s: float | None = None) -> None:
        """Wait until ``n`` steps may be inserted, and count them.

        Raises:
            TimeoutError: The bounds did not allow it within ``timeout_s`` seconds; nothing was counted.
            PacingError: No other thread can make the calls that this one waits for; nothing was counted.
            ClosedError: The object was closed.
            ValueError: With this ``slack``, this insert or the samples of other threads could wait for ever.
        """
        self._wait("insert", n, timeout_s)

    def await_sample(self, n: int = 1, timeout_s: float | None = None) -> None:
        """Wait until ``n`` windows may be sampled, and count them; raises as `await_insert` does."""
        self._wait("sample", n, timeout_s)

    async def await_insert_async(self, n: int = 1, timeout_s: float | None = None) -> None:
        """`await_insert` for coroutines: the event loop keeps running."""
        await self._wait_async("insert", n, timeout_s)

    async def await_sample_async(self, n: int = 1, timeout_s: float | None = None) -> None:
        """`await_sample` for coroutines: the event loop keeps running."""
        await self._wait_async("sample", n, timeout_s)

    def close(self) -> None:
        """Raise ClosedError in all waiting calls, and in later ones."""
        with self._changed:
            self._is_closed = True
            self._wake()

    def state_dict(self) -> dict[str, Any]:
        with self._changed:
            return {"n_inserted": self._n_inserted, "n_sampled": self._n_sampled}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        with self._changed:
            self._n_inserted, self._n_sampled = int(state["n_inserted"]), int(state["n_sampled"])
            self._wake()

    # The following methods are called with the condition held.

    def _difference(self) -> int:
        return (self._n_inserted - self._min_steps) * self._step - self._n_sampled * self._window

    def _may_insert(self, n: int) -> bool:
        if self._n_inserted < self._min_steps:
            return True
        return self._difference() <= (0 if self._slack is None else self._slack - n * self._step)

    def _may_sample(self, n: int) -> bool:
        if self._n_inserted < self._min_steps:
            return False
        return self._difference() >= (0 if self._slack is None else n * self._window - self._slack)

    def _admit(self, what: str, n: int) -> None:
        """Refuse a call that could wait for ever, given the largest calls so far."""
        check_positive("n", n)
        if self._is_closed:
            raise ClosedError(f"SamplesPerInsert is closed; {what} of {n} refused")
        if self._slack is None or (what == "insert" and self._n_inserted < self._min_steps):
            return
        largest = self._largest | {what: max(n, self._largest[what])}
        needed = largest["insert"] * self._step + largest["sample"] * self._window
        if needed > 2 * self._slack:
            raise ValueError(
                f"{what} of {n}: inserts of {largest['insert']} and samples of {largest['sample']} at ratio"
                f" {self._step / self._window:g} could wait for each other for ever; expected slack of at least"
                f" {needed / 2 / self._window:g}, it is {self._slack / self._window:g}"
            )
        self._largest = largest

    def _count_if_allowed(self, what: str, n: int) -> bool:
        """Count the call if the bounds allow it; returns whether they do."""
        if self._is_closed:
            raise ClosedError(f"SamplesPerInsert was closed while {what} of {n} waited")
        if not (self._may_insert(n) if what == "insert" else self._may_sample(n)):
            return False
        self._add(*((n, 0) if what == "insert" else (0, n)))
        return True

    def _add(self, n_inserted: int, n_sampled: int) -> None:
        self._note_caller()
        self._n_inserted += n_inserted
        self._n_sampled += n_sampled
        self._wake()

    def _wake(self) -> None:
        self._changed.notify_all()
        waiters, self._waiters = self._waiters, []
        for loop, future in waiters:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and its coroutines with it
                loop.call_soon_threadsafe(_resolve, future)

    def _note_caller(self) -> None:
        ident = threading.get_ident()
        if ident not in self._callers and len(self._callers) < _MAX_CALLERS:
            self._callers.add(ident)
            self._has_foreign_callers |= type(threading.current_thread()).__name__ == "_DummyThread"

    @property
    def _is_last_thread(self) -> bool:
        """Whether this process has no other thread that could insert or sample."""
        others = {t for t in threading.enumerate() if not t.name.startswith(_NO_CALLERS)}
        return not self._has_foreign_callers and others <= {threading.current_thread()}

    def _check_others(self, what: str, n: int, waited: float) -> None:
        """Refuse to wait for calls that no other thread will make."""
        if self._is_last_thread:
            why = "would wait for ever: no other thread could insert or sample"
        elif waited >= _ALONE_S and self._callers <= {threading.get_ident()}:
            why = f"waited {waited:.0f} s, and no other thread has inserted or sampled"
        else:
            return
        raise PacingError(f"{what} of {n} {why}; {self._missing(what, n)}")

    def _missing(self, what: str, n: int) -> str:
        """What has been counted, and how many calls of the other side would let this one pass."""
        slack = "none" if self._slack is None else f"{self._slack / self._window:g}"
        state = (
            f"{self._n_inserted} steps inserted, {self._n_sampled} windows sampled; ratio"
            f" {self._step / self._window:g}, min_steps {self._min_steps}, slack {slack};"
        )
        bound = 0 if self._slack is None else self._slack - n * (self._step if what == "insert" else self._window)
        if what == "insert":
            n_samples = -(-(self._difference() - bound) // self._window)
            return (
                f"{state} sample {n_samples} more windows first (can_insert({n}) says when), or set a larger slack"
            )
        n_steps = max(-(-(-bound - self._difference()) // self._step), self._min_steps - self._n_inserted)
        return f"{state} insert {n_steps} more steps first (can_sample({n}) says when), or set a larger slack"

    def _timed_out(self, what: str, n: int, seconds: float) -> TimeoutError:
        state = f"{self._n_inserted} steps inserted, {self._n_sampled} windows sampled"
        if self._n_inserted < self._min_steps:
            return TimeoutError(f"{what} of {n} waited {seconds:g} s: {state}; waits for {self._min_steps} steps")
        bound = self._slack or 0
        if self._slack is not None:
            bound -= n * (self._step if what == "insert" else self._window)
        limit = f"at most {bound / self._window:g}" if what == "insert" else f"at least {-bound / self._window:g}"
        return TimeoutError(
            f"{what} of {n} waited {seconds:g} s: {state}; (inserted - {self._min_steps}) *"
            f" {self._step / self._window:g} - sampled is {self._difference() / self._window:g}, has to be {limit}"
        )

    # The following methods are called without the condition.

    def _count(self, n_inserted: int, n_sampled: int) -> None:
        with self._changed:
            if self._n_inserted + n_inserted < 0 or self._n_sampled + n_sampled < 0:
                raise ValueError(
                    f"can't take back {-min(n_inserted, n_sampled)}: {self._n_inserted} steps inserted,"
                    f" {self._n_sampled} windows sampled"
                )
            self._add(n_inserted, n_sampled)

    def _wait(self, what: str, n: int, timeout_s: float | None) -> None:
        seconds = _seconds(timeout_s, self._timeout_s)
        began = time.monotonic()
        with self._changed:
            self._admit(what, n)
            while not self._count_if_allowed(what, n):
                self._changed.wait(self._checked_wait(what, n, began, seconds))

    def _checked_wait(self, what: str, n: int, began: float, seconds: float) -> float:
        """Seconds to wait until the next check; raises if a call should not wait longer."""
        waited = time.monotonic() - began
        if waited >= seconds:
            raise self._timed_out(what, n, seconds)
        if seconds == math.inf:
            self._check_others(what, n, waited)
        if waited >= _WARN_S and not self._has_warned:
            self._has_warned = True
            _log.warning("%s of %d has waited %.0f s: %s", what, n, waited, self._missing(what, n))
        return min(seconds - waited, _LOOK_S)

    async def _wait_async(self, what: str, n: int, timeout_s: float | None) -> None:
        seconds = _seconds(timeout_s, self._timeout_s)
        until = time.monotonic() + seconds
        with self._changed:
            self._admit(what, n)
        while (woken := self._try(what, n)) is not None:
            left = until - time.monotonic()
            try:
                await asyncio.wait_for(woken, None if left == math.inf else max(0.0, left))
            except TimeoutError:
                with self._changed:
                    raise self._timed_out(what, n, seconds) from None

    def _try(self, what: str, n: int) -> asyncio.Future[None] | None:
        """Count the call, or return a future that is resolved when it is worth trying again."""
        loop = asyncio.get_running_loop()
        with self._changed:
            if self._count_if_allowed(what, n):
                return None
            future: asyncio.Future[None] = loop.create_future()
            waiter = loop, future
            self._waiters.append(waiter)
        future.add_done_callback(lambda _: self._forget(waiter))
        return future

    def _forget(self, waiter: _Waiter) -> None:
        with self._changed:
            if waiter in self._waiters:
                self._waiters.remove(waiter)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _fraction(name: str, value: float) -> Fraction:
    """The number as it is written: 0.1 becomes 1/10, not the nearest binary fraction."""
    if isinstance(value, bool) or not isinstance(value, (int, float, Rational)) or not math.isfinite(value):
        raise ValueError(f"{name}: expected a finite number above 0, got {value!r}")
    number = Fraction(repr(float(value))) if isinstance(value, float) else Fraction(value)
    if number <= 0:
        raise ValueError(f"{name}: expected a finite number above 0, got {value!r}")
    return number


def _seconds(timeout_s: float | None, default: float) -> float:
    if timeout_s is None:
        return default
    if not timeout_s >= 0:
        raise ValueError(f"timeout_s: expected seconds of at least 0, got {timeout_s!r}")
    return float(timeout_s)
