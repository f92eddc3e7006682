"""The ratio of samples to inserts: bounds that hold under threads, waits that end, deadlocks that are refused."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trajstore import ClosedError, PacingError
from trajstore.replay.pacing import SamplesPerInsert

SOON_S = 120.0  # far longer than anything here takes; reached only by what hangs


@contextmanager
def running(*functions: Callable[[], object]) -> Iterator[list[BaseException]]:
    """Run functions in threads, joined at the end; gives what they raised."""
    raised: list[BaseException] = []

    def caught(function: Callable[[], object]) -> None:
        try:
            function()
        except Exception as error:
            raised.append(error)

    threads = [threading.Thread(target=caught, args=(function,), daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    yield raised
    for thread in threads:
        thread.join(SOON_S)
    assert not any(thread.is_alive() for thread in threads)


def wait_until(condition: Callable[[], bool]) -> None:
    """Until another thread has come so far."""
    for _ in range(int(SOON_S * 1000)):
        if condition():
            return
        threading.Event().wait(0.001)
    raise AssertionError("it never came so far")


def n_waiting(limiter: SamplesPerInsert) -> int:
    with limiter._changed:
        return len(limiter._changed._waiters) + len(limiter._waiters)  # type: ignore[attr-defined]


# ---- what is allowed ----------------------------------------------------------------------------------------


def test_nothing_is_sampled_before_min_steps_and_until_then_inserts_are_free() -> None:
    limiter = SamplesPerInsert(1.0, min_steps=100, slack=5)
    for _ in range(100):
        assert not limiter.can_sample()
        limiter.await_insert(timeout_s=0)
    assert limiter.can_sample()


def test_an_empty_buffer_is_never_sampled() -> None:
    limiter = SamplesPerInsert(1.0, slack=100)
    assert not limiter.can_sample()
    limiter.insert()
    assert limiter.can_sample()


def test_either_side_gets_ahead_by_the_slack_counted_from_min_steps() -> None:
    limiter = SamplesPerInsert(2.0, min_steps=10, slack=6)
    limiter.insert(10)
    assert limiter.difference == 0
    n = 0
    while limiter.can_sample():
        limiter.sample()
        n += 1
    assert n == 6
    n = 0
    while limiter.can_insert():
        limiter.insert()
        n += 1
    assert n == 6  # from -6 to +6, two at a time
    assert limiter.difference == 6
    assert (limiter.n_inserted, limiter.n_sampled) == (16, 6)


def test_without_slack_a_call_begins_as_soon_as_its_side_is_not_ahead() -> None:
    limiter = SamplesPerInsert(1.0, min_steps=1)
    limiter.insert()
    assert limiter.can_sample(256)
    limiter.sample(256)
    assert not limiter.can_sample(256)
    for _ in range(256):
        limiter.await_insert(timeout_s=0)
    assert limiter.can_sample(256)
    assert limiter.can_insert(1000)


@pytest.mark.parametrize("ratio", [0.29, 0.1, 1 / 3, Fraction(1, 3), 7, 256.0])
def test_the_ratio_is_kept_exactly_over_many_inserts(ratio: float) -> None:
    limiter = SamplesPerInsert(ratio, min_steps=1)
    limiter.insert()
    for _ in range(3000):
        limiter.await_insert(timeout_s=0) if limiter.can_insert() else limiter.await_sample(timeout_s=0)
    assert abs((limiter.n_inserted - 1) * ratio - limiter.n_sampled) <= max(1.0, ratio)


def test_decimals_are_what_they_are_written_as() -> None:
    limiter = SamplesPerInsert(0.29, min_steps=1, slack=29)
    limiter.insert(101)
    limiter.sample(29)  # 100 * 0.29 is 28.999999999999996 in binary
    assert limiter.difference == 0
    assert limiter.can_sample(29)


@given(
    st.floats(0.01, 300),
    st.integers(0, 20),
    st.integers(1, 40),
    st.integers(1, 400),
    st.floats(0, 50),
    st.lists(st.booleans(), max_size=60),
)
def test_one_side_can_always_go_on_and_the_bounds_hold(
    ratio: float, min_steps: int, n_insert: int, n_sample: int, more: float, choices: list[bool]
) -> None:
    slack = (ratio * n_insert + n_sample) / 2 + more + 1e-6
    limiter = SamplesPerInsert(ratio, min_steps=min_steps, slack=slack)
    overshoot = ratio * (n_insert + 1)
    for insert_first in choices:
        can_insert, can_sample = limiter.can_insert(n_insert), limiter.can_sample(n_sample)
        assert can_insert or can_sample
        if can_insert and (insert_first or not can_sample):
            limiter.await_insert(n_insert, timeout_s=0)
        else:
            limiter.await_sample(n_sample, timeout_s=0)
        if limiter.n_sampled:
            assert -slack - 1e-6 <= limiter.difference <= max(slack, overshoot) + 1e-6


def test_a_count_can_be_taken_back() -> None:
    limiter = SamplesPerInsert(1.0, slack=2)
    limiter.await_insert()
    limiter.await_sample(2)
    assert not limiter.can_sample()
    limiter.cancel_sample(2)
    assert limiter.can_sample(2)
    limiter.cancel_insert()
    assert not limiter.can_sample()
    with pytest.raises(ValueError, match="can't take back 1: 0 steps inserted"):
        limiter.cancel_insert()


def test_a_state_goes_on_where_it_was_taken() -> None:
    first, second = SamplesPerInsert(3.0, slack=20), SamplesPerInsert(3.0, slack=20)
    first.insert(7)
    first.sample(11)
    second.load_state_dict(first.state_dict())
    assert second.difference == first.difference == 7.0
    assert (second.n_inserted, second.n_sampled) == (7, 11)


# ---- what could never happen --------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0, -1.0, float("nan"), float("inf"), "2", True])
def test_a_ratio_is_a_finite_number_above_0(ratio: float) -> None:
    with pytest.raises(ValueError, match="ratio: expected a finite number above 0"):
        SamplesPerInsert(ratio)


def test_bounds_too_narrow_for_one_insert_and_one_sample_are_refused() -> None:
    with pytest.raises(ValueError, match=r"slack: expected at least 4\.5"):
        SamplesPerInsert(8.0, slack=4)
    SamplesPerInsert(8.0, slack=4.5)
    for bad in ({"min_steps": -1}, {"min_steps": 1.5}, {"timeout_s": -1.0}, {"slack": 0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            SamplesPerInsert(1.0, **bad)  # type: ignore[arg-type]


def test_a_batch_that_could_never_be_sampled_is_refused_at_once() -> None:
    limiter = SamplesPerInsert(1.0, slack=100)
    for call in (limiter.await_sample, limiter.can_sample):
        with pytest.raises(ValueError, match=r"sample of 256: .* expected slack of at least 128, it is 100"):
            call(256)
    assert not limiter.can_sample(100)  # the refused size does not count against others


def test_sizes_that_could_wait_for_each_other_are_refused_at_the_second_call() -> None:
    limiter = SamplesPerInsert(2.0, slack=100)
    limiter.insert()
    limiter.await_sample(100)
    with pytest.raises(ValueError, match=r"insert of 64: inserts of 64 and samples of 100 .* at least 114"):
        limiter.await_insert(64)
    limiter.await_insert(50)


def test_inserts_before_min_steps_may_be_of_any_size() -> None:
    limiter = SamplesPerInsert(1.0, min_steps=1000, slack=10)
    limiter.await_insert(5000)
    assert limiter.can_sample(10)
    assert not limiter.can_insert()


def test_counts_are_positive() -> None:
    limiter = SamplesPerInsert(1.0)
    for call in (limiter.insert, limiter.sample, limiter.await_insert, limiter.can_sample, limiter.cancel_insert):
        with pytest.raises(ValueError, match="n: expected a positive integer"):
            call(0)


# ---- waiting ------------------------------------------------------------------------------------------------


def test_a_timeout_says_what_is_waited_for() -> None:
    limiter = SamplesPerInsert(2.0, min_steps=5, slack=8, timeout_s=0.01)
    with pytest.raises(TimeoutError, match=r"sample of 4 waited 0.01 s: 0 steps inserted.*waits for 5 steps"):
        limiter.await_sample(4)
    limiter.insert(5)
    limiter.await_sample(8)
    with pytest.raises(TimeoutError, match=r"\(inserted - 5\) \* 2 - sampled is -8, has to be at least -7"):
        limiter.await_sample(1)
    limiter.insert(8)
    with pytest.raises(TimeoutError, match=r"insert of 1 waited 0.02 s: 13 steps .* is 8, has to be at most 6"):
        limiter.await_insert(1, timeout_s=0.02)
    assert (limiter.n_inserted, limiter.n_sampled) == (13, 8)


def test_a_timeout_without_slack_says_what_is_waited_for() -> None:
    limiter = SamplesPerInsert(1.0, timeout_s=0.0)
    limiter.insert(4)
    with pytest.raises(TimeoutError, match="is 3, has to be at most 0"):
        limiter.await_insert()


def test_an_insert_wakes_a_sampler_and_a_sample_wakes_an_inserter() -> None:
    limiter = SamplesPerInsert(1.0, min_steps=3)
    with running(lambda: limiter.await_sample(3)) as raised:
        wait_until(lambda: n_waiting(limiter) == 1)
        limiter.insert(3)
    limiter.insert(4)
    with running(limiter.await_insert) as more:
        wait_until(lambda: n_waiting(limiter) == 1)
        limiter.sample()
    assert raised == more == []
    assert (limiter.n_inserted, limiter.n_sampled) == (8, 4)


def test_a_loaded_state_wakes_those_who_wait() -> None:
    limiter = SamplesPerInsert(1.0, min_steps=3)
    with running(limiter.await_sample) as raised:
        wait_until(lambda: n_waiting(limiter) == 1)
        limiter.load_state_dict({"n_inserted": 3, "n_sampled": 0})
    assert raised == []


def test_closing_wakes_everybody_with_an_error() -> None:
    limiter = SamplesPerInsert(1.0, min_steps=3)
    calls = [lambda: limiter.await_sample(2), lambda: asyncio.run(limiter.await_sample_async())]
    with running(*calls) as raised:
        wait_until(lambda: n_waiting(limiter) == 2)
        limiter.close()
    assert [type(error) for error in raised] == [ClosedError] * 2
    for call in (limiter.await_insert, limiter.can_insert, limiter.can_sample):
        with pytest.raises(ClosedError, match="SamplesPerInsert is closed"):
            call()
    limiter.insert()  # what happened is still counted
    assert limiter.n_inserted == 1


def test_bounds_hold_while_many_threads_insert_and_sample() -> None:
    ratio, slack, n = 4.0, 40.0, 300
    limiter = SamplesPerInsert(ratio, min_steps=20, slack=slack)
    after_inserts: list[float] = []
    after_samples: list[float] = []

    def actor() -> None:
        for _ in range(n):
            limiter.await_insert(timeout_s=SOON_S)
            after_inserts.append(limiter.difference)

    def learner() -> None:
        for _ in range((3 * n - 20) * 4 // 2 // 16):
            limiter.await_sample(16, timeout_s=SOON_S)
            after_samples.append(limiter.difference)

    with running(actor, actor, actor, learner, learner) as raised:
        pass
    assert raised == []
    assert limiter.n_inserted == 3 * n
    assert limiter.difference == 0
    assert max(after_inserts) <= slack
    assert min(after_samples) >= -slack


def test_threads_that_come_together_do_not_overstep_together() -> None:
    limiter = SamplesPerInsert(1.0, min_steps=1, slack=4)
    limiter.insert()
    barrier = threading.Barrier(8)

    def insert() -> None:
        barrier.wait(SOON_S)
        limiter.await_insert(timeout_s=0.05)

    with running(*[insert] * 8) as raised:
        pass
    assert [type(error) for error in raised] == [TimeoutError] * 4
    assert limiter.difference == 4


# ---- event loops --------------------------------------------------------------------------------------------


def test_coroutines_of_one_loop_wake_each_other() -> None:
    limiter = SamplesPerInsert(2.0, min_steps=2)

    async def act() -> None:
        for _ in range(50):
            await limiter.await_insert_async(timeout_s=SOON_S)

    async def learn() -> None:
        for _ in range(24):
            await limiter.await_sample_async(4, timeout_s=SOON_S)

    async def both() -> None:
        await asyncio.gather(act(), learn())

    asyncio.run(both())
    assert (limiter.n_inserted, limiter.n_sampled) == (50, 96)
    assert not limiter._waiters


def test_a_thread_wakes_a_coroutine_whose_loop_goes_on_meanwhile() -> None:
    limiter = SamplesPerInsert(1.0, min_steps=1)
    ticks = 0

    async def main() -> None:
        nonlocal ticks
        waiting = asyncio.ensure_future(limiter.await_sample_async(timeout_s=SOON_S))
        while not n_waiting(limiter):
            await asyncio.sleep(0)
        ticks += 1
        thread = threading.Thread(target=limiter.insert)
        thread.start()
        await waiting
        thread.join(SOON_S)

    asyncio.run(main())
    assert ticks == 1
    assert limiter.n_sampled == 1


def test_a_coroutine_times_out_and_leaves_nothing_behind() -> None:
    limiter = SamplesPerInsert(1.0, min_steps=1)

    async def main() -> None:
        with pytest.raises(TimeoutError, match=r"sample of 1 waited 0.01 s: 0 steps inserted"):
            await limiter.await_sample_async(timeout_s=0.01)
        await asyncio.sleep(0)

    asyncio.run(main())
    assert not limiter._waiters
    assert limiter.n_sampled == 0


def test_a_coroutine_that_is_cancelled_counts_nothing_and_leaves_nothing_behind() -> None:
    limiter = SamplesPerInsert(1.0, min_steps=1)

    async def main() -> None:
        waiting = asyncio.ensure_future(limiter.await_sample_async())
        await asyncio.sleep(0.001)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.sleep(0)
        limiter.insert()

    asyncio.run(main())
    assert not limiter._waiters
    assert limiter.n_sampled == 0


def test_a_loop_that_was_closed_disturbs_nobody() -> None:
    limiter = SamplesPerInsert(1.0, min_steps=2)
    loop = asyncio.new_event_loop()

    async def wait() -> None:
        limiter._try("sample", 1)

    loop.run_until_complete(wait())
    loop.close()
    limiter.insert(2)
    assert limiter.can_sample()


# ---- waits that would never end ---------------------------------------------------------------------------


@pytest.fixture
def only_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process whose other threads are those of trajstore."""
    ours = threading.Thread(name="trajstore-commit")
    monkeypatch.setattr("trajstore.replay.pacing.threading.enumerate", lambda: [threading.current_thread(), ours])


@pytest.mark.usefixtures("only_thread")
def test_a_sample_that_only_its_own_thread_could_allow_is_refused_with_the_numbers() -> None:
    limiter = SamplesPerInsert(4.0, min_steps=10)
    with pytest.raises(
        PacingError, match=r"sample of 8 would wait for ever: .*; 0 steps inserted, .* insert 10 more"
    ):
        limiter.await_sample(8)
    limiter.await_insert(12)
    limiter.await_sample(256)
    with pytest.raises(PacingError, match="sample of 256 would wait for ever: no other thread") as raised:
        limiter.await_sample(256)
    assert str(raised.value).endswith(
        "12 steps inserted, 256 windows sampled; ratio 4, min_steps 10, slack none; insert 62 more steps first"
        " (can_sample(256) says when), or set a larger slack"
    )
    limiter.await_insert(61)
    with pytest.raises(PacingError, match="insert 1 more steps first"):
        limiter.await_sample(256)
    limiter.insert(1)
    limiter.await_sample(256)


@pytest.mark.usefixtures("only_thread")
def test_an_insert_that_only_its_own_thread_could_allow_is_refused_with_the_numbers() -> None:
    limiter = SamplesPerInsert(2.0, slack=10)
    for _ in range(6):
        limiter.await_insert(1)
    with pytest.raises(PacingError, match=r"insert of 1 .* sample 2 more windows first") as raised:
        limiter.await_insert(1)
    assert isinstance(raised.value, RuntimeError)
    assert limiter.n_inserted == 6
    limiter.await_sample(2)
    limiter.await_insert(1)


@given(
    ratio=st.sampled_from([0.1, 0.5, 1, 3, 7.5]),
    min_steps=st.integers(0, 20),
    slack=st.sampled_from([None, 200.0]),
    calls=st.lists(st.tuples(st.booleans(), st.integers(1, 12)), max_size=40),
)
def test_the_missing_number_is_the_smallest_that_helps(
    ratio: float, min_steps: int, slack: float | None, calls: list[tuple[bool, int]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trajstore.replay.pacing.threading.enumerate", lambda: [threading.current_thread()])
        limiter = SamplesPerInsert(ratio, min_steps=min_steps, slack=slack)
        for is_insert, n in calls:
            wait, other, can = (
                (limiter.await_insert, limiter.sample, limiter.can_insert)
                if is_insert
                else (limiter.await_sample, limiter.insert, limiter.can_sample)
            )
            try:
                wait(n)
            except PacingError as error:
                found = re.search(r"(insert|sample) (\d+) more", str(error))
                assert found is not None
                missing = int(found[2])
                if missing > 1:
                    other(missing - 1)
                    assert not can(n)
                other(1)
                assert can(n)


def test_a_thread_that_may_still_begin_is_waited_for() -> None:
    limiter = SamplesPerInsert(1.0, min_steps=5)
    limiter.await_insert(4)  # by the thread that samples
    begin = threading.Event()

    def insert() -> None:
        begin.wait(SOON_S)
        limiter.await_insert(1)

    with running(insert) as raised:
        threading.Timer(0.05, begin.set).start()
        limiter.await_sample(1)
    assert not raised


def test_a_wait_ends_when_the_last_other_thread_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trajstore.replay.pacing._LOOK_S", 0.01)
    limiter, alive = SamplesPerInsert(1.0, min_steps=5), threading.Event()
    mine = threading.current_thread()

    def insert() -> None:
        limiter.await_insert(1)
        alive.wait(SOON_S)

    thread = threading.Thread(target=insert, daemon=True)
    monkeypatch.setattr(
        "trajstore.replay.pacing.threading.enumerate", lambda: [mine, *([thread] if thread.is_alive() else [])]
    )
    thread.start()
    threading.Timer(0.1, alive.set).start()
    with pytest.raises(PacingError, match="no other thread could insert or sample; 1 steps inserted"):
        limiter.await_sample(1)


def test_a_thread_that_never_takes_part_is_waited_for_only_a_stated_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, seconds in (("_LOOK_S", 0.01), ("_WARN_S", 0.02), ("_ALONE_S", 0.2)):
        monkeypatch.setattr(f"trajstore.replay.pacing.{name}", seconds)
    limiter, end = SamplesPerInsert(1.0), threading.Event()
    with running(lambda: end.wait(SOON_S)):
        limiter.await_insert(1)
        limiter.await_sample(1)
        with pytest.raises(PacingError, match=r"sample of 3 waited \d+ s, and no other thread has inserted or"):
            limiter.await_sample(3)
        end.set()
    assert [r.levelname for r in caplog.records if r.name == "trajstore.replay.pacing"] == ["WARNING"]
    assert "sample of 3 has waited" in caplog.text
    assert "insert 1 more steps first" in caplog.text


LOOP = """
import numpy as np, trajstore
pace = trajstore.SamplesPerInsert(4.0, min_steps=10)
buffer = trajstore.ReplayBuffer("memory://loop", samples_per_insert=pace, buffer_bytes="1MB", commit_seconds=0.01)
try:
    for t in range(100):
        buffer.append({"observation": np.zeros(4, np.float32), "reward": 0.0})
        if t > 50:
            buffer.sample(32)
except trajstore.PacingError as error:
    print(error)
buffer.close()
"""


def test_a_loop_in_one_thread_that_samples_too_much_raises_instead_of_hanging() -> None:
    done = subprocess.run([sys.executable, "-c", LOOP], capture_output=True, text=True, timeout=300, check=True)
    assert re.search(r"insert of 1 would wait for ever.* sample \d+ more windows first", done.stdout)
