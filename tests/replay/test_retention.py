"""What goes when a limit is reached: which steps, in which order, what is counted, and what storage gets back."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections import deque
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import trajstore
from tests.replay.test_buffer import crash, episode, new_buffer, resumed, step
from tests.support.faulty import BlockPuts, Call, FaultyStorage, real_storage, through
from tests.support.files import bytes_of
from trajstore import EpisodeKey, Field, Priorities, ReplayBuffer, Retention, Schema, SnapshotExpiredError, Windows

SINGLE = Windows()


def fresh() -> str:
    return f"memory://retention-{uuid.uuid4().hex}"


def fill(buffer: ReplayBuffer, n: int, env: int = 0, first: int = 0) -> None:
    """Append single steps; their t stands in the observation."""
    for t in range(first, first + n):
        buffer.append(step(env, t), env=env)


def here(buffer: ReplayBuffer) -> list[tuple[int, int, int]]:
    """Every step that can be sampled: stream number, episode, t."""
    steps: list[tuple[int, int, int]] = []
    if buffer.n_steps:
        for batch in buffer.epoch(64, SINGLE, shuffle=False):
            steps += [tuple(handle) for handle in batch["index"].tolist()]
            assert torch.equal(batch["obs"][:, 0, 1], batch["index"][:, 2].float())
    return steps


# ---- options --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps: expected a positive integer, got 0"),
        ({"steps": 1.5}, "steps: expected a positive integer, got 1.5"),
        ({"steps": True}, "steps: expected a positive integer, got True"),
        ({"episodes": -1}, "episodes: expected a positive integer, got -1"),
        ({"bytes": "many"}, "bytes: expected bytes as an int or like '4GiB', got 'many'"),
        ({"age_s": 0}, "age_s: expected a positive number of seconds, got 0"),
        ({"age_s": float("nan")}, "age_s: expected a positive number of seconds, got nan"),
        ({"per_stream": Retention(episodes=3)}, r"per_stream: expected Retention\(steps=...\), got Retention"),
    ],
)
def test_limits_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Retention(**options)


# ---- steps ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [1, 2, 7, 100, 255, 256, 600])
def test_the_newest_steps_stay_and_no_more_than_the_capacity(capacity: int) -> None:
    with new_buffer(fresh(), capacity=capacity) as buffer:
        for t in range(2 * capacity + 5):
            buffer.append(step(0, t))
            n = buffer.n_steps
            assert n <= capacity
            if t + 1 >= capacity:
                assert n >= capacity - capacity // 256
        ts = [t for *_, t in here(buffer)]
        assert ts == list(range(t + 1 - n, t + 1))


def test_a_capacity_is_kept_also_while_nobody_samples() -> None:
    with new_buffer(fresh(), capacity=1000, buffer_bytes="1MB", cache_bytes="64MB") as buffer:
        for first in range(0, 40_000, 500):
            buffer.add_episode(episode(0, 500), terminated=True)
            assert first < 20_000 or buffer.reader.assembler.index.n_steps < 20_000
        assert buffer.n_steps <= 1000


def test_steps_of_one_page_go_environment_by_environment_and_pages_in_order() -> None:
    capacity, n_envs = 640, 5  # pages of 10 rows: two steps of each environment
    with new_buffer(fresh(), capacity=capacity) as buffer:
        for t in range(capacity // n_envs):
            rows = np.stack([np.arange(n_envs), np.full(n_envs, t), np.zeros(n_envs)], 1).astype(np.float32)
            values = {"obs": rows, "action": np.zeros(n_envs, np.int64), "reward": np.zeros(n_envs, np.float32)}
            buffer.append(values, envs=range(n_envs))
        assert buffer.n_steps == capacity
        buffer.append(step(9, 0), env=9)  # one too many: that one and two more go
        gone = {(e, t) for e in range(n_envs) for t in range(128)} - {(e, t) for _, e, t in here(buffer)}
        assert gone == {(0, 0), (0, 1), (1, 0)}


def test_an_episode_longer_than_the_capacity_keeps_its_end() -> None:
    with new_buffer(fresh(), capacity=50, sample=Windows(length=4)) as buffer:
        buffer.add_episode(episode(3, 500), terminated=True)
        assert buffer.n_steps == 50
        batch = buffer.sample(300)
        assert int(batch["index"][:, 2].min()) == 450
        assert not batch["is_first"].any()
        assert batch["terminated"].any()
        fill(buffer, 700)
        assert here(buffer) == [(0, 1, t) for t in range(650, 700)]


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(
    "spec",
    [
        Windows(length=2, burn_in=3),
        Windows(length=4, boundary="pad_both"),
        Windows(length=4, boundary="pad_left", stride=2),
        Windows(length=2, burn_in=2, bootstrap=2, boundary="short"),
        Windows(length=3, boundary="cross", burn_in=2),
    ],
    ids=lambda spec: spec.boundary,
)
def test_no_step_of_a_headless_episode_is_ever_called_its_first(spec: Windows, compiled: bool) -> None:
    with new_buffer(fresh(), capacity=20, sample=spec, compiled=compiled) as buffer:
        for is_flushed in (False, True):
            fill(buffer, 30)
            for last in (False, True):
                batch = buffer.sample(400)
                assert buffer.n_steps == 20
                assert not batch["is_first"].any(), (is_flushed, last)
                buffer.flush()
            buffer.end_episode(truncated=True)


def test_only_the_first_step_of_an_episode_is_called_so_once_others_are_headless() -> None:
    with new_buffer(fresh(), capacity=20) as buffer:
        buffer.add_episode(episode(0, 15), terminated=True)
        buffer.add_episode(episode(1, 15), terminated=True)
        batch = buffer.sample(500)
        expected = (batch["index"][:, 1] == 1) & (batch["index"][:, 2] == 0)
        assert torch.equal(batch["is_first"][:, 0], expected)


def test_what_is_left_of_an_arrival_does_not_depend_on_its_final_row() -> None:
    url = fresh()
    with new_buffer(url) as buffer:
        buffer.add_episode(episode(0, 12, n_final=1), terminated=True)
    for capacity in (11, 5, 1):
        with new_buffer(url, capacity=capacity) as buffer:
            assert buffer.n_steps == capacity


def test_an_open_episode_that_was_evicted_whole_goes_on() -> None:
    with new_buffer(fresh(), capacity=3) as buffer:
        for env in range(3):
            buffer.append(step(env, 0), env=env)
        fill(buffer, 3, env=5)
        assert {e for _, e, _ in here(buffer)} == {3}
        for env in range(3):
            buffer.append(step(env, 1), env=env)
            assert (0, env, 1) in here(buffer)
        assert here(buffer) == [(0, 0, 1), (0, 1, 1), (0, 2, 1)]


# ---- episodes, age, bytes, streams ----------------------------------------------------------------------


def test_a_limit_on_episodes_takes_whole_ones_in_order_of_their_ends() -> None:
    with new_buffer(fresh(), capacity=Retention(episodes=3)) as buffer:
        fill(buffer, 5, env=0)
        fill(buffer, 5, env=1)
        buffer.end_episode(1, terminated=True)
        buffer.end_episode(0, terminated=True)
        for number in range(2, 6):
            buffer.add_episode(episode(0, number), terminated=True, env=7)
            assert buffer.n_episodes <= 3
            left = sorted({e for _, e, _ in here(buffer)})
            assert left == {2: [0, 1, 2], 3: [0, 2, 3], 4: [2, 3, 4], 5: [3, 4, 5]}[number]
        assert buffer.stats()["evicted"]["episodes"] == {"steps": 5 + 5 + 2, "episodes": 3}


def test_open_episodes_are_not_taken_whole() -> None:
    with new_buffer(fresh(), capacity=Retention(episodes=1)) as buffer:
        for env in range(3):
            fill(buffer, 2, env=env)
        assert buffer.n_episodes == 3
        buffer.end_episode(1, terminated=True)
        assert {e for _, e, _ in here(buffer)} == {0, 2}


def test_the_oldest_episodes_can_be_evicted_on_demand() -> None:
    with new_buffer(fresh()) as buffer:
        for number in range(5):
            buffer.add_episode(episode(0, number + 1), terminated=True, env=7)
        fill(buffer, 2, env=0)
        n_steps = buffer.n_steps
        lengths = [sum(e == number for _, e, _ in here(buffer)) for number in range(6)]
        assert buffer.evict(2) == sum(lengths[:2])
        assert {e for _, e, _ in here(buffer)} == {2, 3, 4, 5}
        assert buffer.evict(100) == sum(lengths[2:5])
        assert {e for _, e, _ in here(buffer)} == {5}, "an open episode went"
        assert buffer.n_steps == n_steps - sum(lengths[:5])
        with pytest.raises(ValueError, match="n_episodes: expected a positive integer, got 0"):
            buffer.evict(0)
        with pytest.raises(ValueError, match="evict: give exactly one of n_episodes, where and keys"):
            buffer.evict()


def test_episodes_can_be_evicted_by_their_keys_before_they_are_committed() -> None:
    with new_buffer(fresh()) as buffer:
        keys = [buffer.add_episode(episode(0, 2), terminated=True, env=number) for number in range(4)]
        fill(buffer, 3, env=9)
        other = EpisodeKey("another", 0)
        assert buffer.evict(keys=[keys[3], keys[1], other, EpisodeKey(buffer.stream, 77)]) == 4
        assert {e for _, e, _ in here(buffer)} == {0, 2, 4}
        assert buffer.evict(keys=[keys[1], EpisodeKey(buffer.stream, 4)]) == 3
        buffer.append(step(9, 3), env=9)
        assert here(buffer)[-1][1:] == (4, 3)
        assert buffer.evict(keys=[]) == 0


def test_episodes_of_a_choice_can_be_evicted() -> None:
    with new_buffer(fresh()) as buffer:
        for number in range(5):
            buffer.add_episode(episode(0, number + 1), terminated=True, env=7)
        buffer.flush()
        assert buffer.evict(where=lambda table: table["length"] % 2 == 0) == 2 + 4
        assert {e for _, e, _ in here(buffer)} == {0, 2, 4}
        assert buffer.evict(where=lambda table: table["length"] % 2 == 0) == 0
        assert buffer.evict(1) == 1
        assert {e for _, e, _ in here(buffer)} == {2, 4}


@pytest.mark.parametrize("how", ["evict", "where", "clear"])
def test_what_was_evicted_before_its_commit_is_not_shown_once_that_is_durable(how: str, url: str) -> None:
    buffer = new_buffer(url)
    for number in range(5):
        buffer.add_episode(episode(0, 3), terminated=True, env=number)
    if how == "evict":
        buffer.evict(3)
    elif how == "clear":
        buffer.clear()
        for number in range(2):
            buffer.add_episode(episode(0, 3), terminated=True, env=number)
    elif how == "where":
        buffer.flush()
        buffer.evict(where=lambda table: table["episode"] < 3)
    buffer.flush()
    shown = trajstore.open(url).episodes["episode"].tolist()
    assert shown == ([5, 6] if how == "clear" else [3, 4])
    buffer.flush()
    crash(buffer)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time that the buffer goes by."""
    fake = SimpleNamespace(now=1000.0, time=lambda: fake.now, monotonic=time.monotonic)
    monkeypatch.setattr("trajstore.replay.eviction.time", fake)
    return fake


@pytest.mark.parametrize("looks", [[], [30.0], [1.0, 59.0]])
def test_nothing_outlives_a_limit_on_its_age(clock: SimpleNamespace, looks: list[float]) -> None:
    with new_buffer(fresh(), capacity=Retention(age_s=60.0)) as buffer:
        fill(buffer, 10)
        assert buffer.n_steps == 10
        for after in looks:
            clock.now = 1000.0 + after
            assert buffer.n_steps == 10
        clock.now = 1000.0 + 60.0 * (1 + 1 / 64) + 0.1
        assert buffer.n_steps == 0
        assert buffer.stats()["evicted"]["age"] == {"steps": 10, "episodes": 1}


def test_of_steps_that_come_now_and_then_the_old_ones_go(clock: SimpleNamespace) -> None:
    with new_buffer(fresh(), capacity=Retention(age_s=60.0)) as buffer:
        for t in range(200):
            clock.now = 1000.0 + t
            buffer.append(step(0, t))
            assert min(60, t + 1) <= buffer.n_steps <= 63


def test_ages_count_from_the_arrival_also_after_a_resume(clock: SimpleNamespace) -> None:
    url = fresh()
    buffer = new_buffer(url, capacity=Retention(age_s=60.0))
    buffer.add_episode(episode(0, 10), terminated=True)
    assert buffer.n_steps == 10
    clock.now += 40
    buffer.save_checkpoint("a", wait=True)
    crash(buffer)
    with resumed(url) as buffer:
        assert buffer.n_steps == 10
        clock.now += 22
        assert buffer.n_steps == 0


IMAGES = Schema({"image": Field("uint8", (64, 64), chunk_rows=8)})


def images(n: int, rng: Any = None) -> dict[str, Any]:
    """Half noise, half nothing: they take half of their size on storage."""
    image = np.zeros((n, 64, 64), np.uint8)
    image[:, :32] = (rng or np.random.default_rng(0)).integers(0, 256, (n, 32, 64))
    return {"image": image}


def tree_bytes(url: str) -> int:
    return bytes_of(Path(url).rglob("c.*"))


def test_a_limit_on_bytes_is_one_of_what_lies_on_storage(url: str) -> None:
    options = {"schema": IMAGES, "buffer_bytes": "1MB", "cache_bytes": "16MB"}
    with new_buffer(url, capacity=Retention(bytes="400KB"), **options) as buffer:
        for _ in range(30):
            buffer.add_episode(images(20), terminated=True)
            buffer.flush()
            n = buffer.n_steps
        assert 150 <= n <= 200  # 2 KiB each, and a little
        assert buffer.stats()["evicted"]["bytes"]["steps"] == 600 - n
        buffer.session.collector.flush()
        assert tree_bytes(url) <= 450_000
        buffer.save_checkpoint("a", wait=True)
    with resumed(url) as buffer:
        assert buffer.n_steps == n
    with new_buffer(url, capacity=Retention(bytes="400KB"), **options) as buffer:
        assert buffer.n_steps >= n - 8


def test_streams_have_limits_of_their_own() -> None:
    url = fresh()
    for number in range(3):
        with new_buffer(url, name=f"w{number}") as buffer:
            buffer.add_episode(episode(number, 40), terminated=True)
    with new_buffer(url, capacity=Retention(per_stream=Retention(steps=30))) as buffer:
        fill(buffer, 50)
        steps = here(buffer)
        counts = {stream: [t for s, _, t in steps if s == stream] for stream in range(4)}
        own = buffer.streams.index(buffer.stream)
        assert counts.pop(own) == list(range(20, 50))
        assert list(counts.values()) == [list(range(10, 40))] * 3


def test_a_limit_for_each_stream_is_never_passed() -> None:
    limits = Retention(per_stream=Retention(steps=300))
    with new_buffer(fresh(), capacity=limits, buffer_bytes="1MB", cache_bytes="32MB") as buffer:
        assert max(buffer.n_steps for t in range(900) if buffer.append(step(t % 3, t // 3), env=t % 3)) == 300


def test_all_limits_hold_at_once() -> None:
    limits = Retention(steps=100, episodes=6, per_stream=Retention(steps=60))
    url = fresh()
    with new_buffer(url, name="old") as buffer:
        for number in range(8):
            buffer.add_episode(episode(number, 12), terminated=True)
    rng = np.random.default_rng(0)
    with new_buffer(url, capacity=limits) as buffer:
        for number in range(40):
            buffer.add_episode(episode(number, int(rng.integers(1, 30))), terminated=True)
            steps = here(buffer)
            assert len(steps) <= 100
            assert buffer.n_episodes <= 6
            assert max(sum(s == stream for s, *_ in steps) for stream in (0, 1)) <= 60


@pytest.mark.parametrize("before", [None, 80])
def test_a_limit_that_is_lowered_when_resuming_evicts(before: int | None) -> None:
    url = fresh()
    with new_buffer(url, capacity=before) as buffer:
        for number in range(10):
            buffer.add_episode(episode(number, 10), terminated=True)
        buffer.save_checkpoint("a", wait=True)
    with resumed(url, capacity=25) as buffer:
        assert buffer.n_steps == 25
        assert here(buffer)[-10:] == [(0, 9, t) for t in range(10)]
        assert buffer.options.capacity == 25
    with resumed(url, capacity=Retention(episodes=2)) as buffer:
        assert (buffer.n_episodes, buffer.n_steps) == (2, 20)
    with resumed(url, capacity=None) as buffer:
        assert buffer.n_steps == (before or 100)


# ---- what is counted ------------------------------------------------------------------------------------

calls = st.lists(
    st.one_of(
        st.tuples(st.just("one"), st.integers(0, 3), st.booleans()),
        st.tuples(st.just("burst"), st.integers(0, 3), st.integers(1, 60)),
        st.tuples(st.just("episode"), st.integers(1, 40), st.booleans()),
        st.tuples(st.just("abort"), st.integers(0, 3), st.just(0)),
        st.tuples(st.sampled_from(["flush", "look"]), st.just(0), st.just(0)),
    ),
    max_size=40,
)
limits = st.sampled_from([5, 30, 200, Retention(episodes=2), Retention(steps=50, episodes=4), None])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(calls, limits)
def test_every_appended_step_is_here_evicted_or_dropped(script: list[tuple[str, int, Any]], capacity: Any) -> None:
    with new_buffer(fresh(), capacity=capacity) as buffer:
        t, n_aborted, n_gone = dict.fromkeys(range(4), 0), 0, 0
        for action, env, more in script:
            if action in ("one", "burst"):
                fill(buffer, 1 if action == "one" else more, env, t[env])
                t[env] += 1 if action == "one" else more
                if action == "one" and more:
                    buffer.end_episode(env, terminated=True)
                    t[env] = 0
            elif action == "episode":
                buffer.add_episode(episode(9, env, n_final=int(more)), env=9, truncated=True)
            elif action == "abort" and t[env]:
                before = buffer.n_steps
                buffer.abort_episode(env)
                n_aborted, n_gone = n_aborted + t[env], n_gone + before - buffer.n_steps
                t[env] = 0
            elif action == "flush":
                buffer.flush()
            elif action == "look":
                assert buffer.n_steps == buffer.reader.assembler.index.n_steps
        stats = buffer.stats()
        evicted = sum(counts["steps"] for counts in stats["evicted"].values())
        assert stats["writer"]["steps"] == stats["n_steps"] + evicted + n_gone
        assert n_gone <= n_aborted
        assert stats["writer"]["dropped_steps"] <= n_aborted


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 1 << 30), st.sampled_from([130, 300, 512]))
def test_what_goes_does_not_depend_on_when_steps_are_committed(seed: int, capacity: int) -> None:
    def play(with_commits: bool) -> list[torch.Tensor]:
        rng, drawn = np.random.default_rng(seed), []
        with new_buffer(fresh(), capacity=capacity, buffer_bytes="1MB", seed=1) as buffer:
            t = [0] * 4
            for _ in range(800):
                env, chance = int(rng.integers(4)), rng.random()
                buffer.append(step(env, t[env]), env=env)
                t[env] += 1
                if chance < 0.05 and with_commits:
                    buffer.flush()
                if chance < 0.03:
                    buffer.abort_episode(env) if chance < 0.01 else buffer.end_episode(env, terminated=True)
                    t[env] = 0
                if chance > 0.97:
                    drawn.append(buffer.sample(8)["index"])
        return drawn

    with_commits, without = play(True), play(False)
    assert all(torch.equal(a, b) for a, b in zip(with_commits, without, strict=True))


# ---- storage --------------------------------------------------------------------------------------------


def chunks(url: str, stream: str) -> int:
    return len(list(Path(url, "streams", stream, "steps").rglob("c.*")))


def test_storage_gets_back_what_nobody_wants(url: str) -> None:
    with new_buffer(url, capacity=100) as buffer:
        for number in range(100):
            buffer.add_episode(episode(number, 20), terminated=True)
            buffer.flush()
            assert buffer.n_steps <= 100
        buffer.session.collector.flush()
        assert chunks(url, buffer.stream) <= 3 * (100 // 16 + 4)
        assert buffer.stats()["storage"]["n_chunks_deleted"] > 100
        assert sorted(t for *_, t in here(buffer))[-5:] == [19] * 5


def test_a_checkpoint_keeps_what_it_needs_until_it_is_removed(url: str) -> None:
    buffer = new_buffer(url, capacity=60)
    for number in range(5):
        buffer.add_episode(episode(number, 20), terminated=True)
        buffer.flush()
    assert buffer.n_steps == 60
    buffer.save_checkpoint("kept", wait=True)
    kept, old = here(buffer), buffer.stream
    for number in range(5, 20):
        buffer.add_episode(episode(number, 20), terminated=True)
        buffer.flush()
        assert buffer.n_steps == 60
    buffer.session.collector.flush()
    crash(buffer)
    chunk = Path(url, "streams", old, "steps", "obs", "c.3.0")  # rows 48 to 63
    assert chunk.exists()
    assert read_all(url, at="kept") == 60
    with resumed(url, "kept", grace_s=0.0) as buffer:
        assert here(buffer) == kept
        buffer.add_episode(episode(99, 60), terminated=True)
        assert here(buffer) == [(1, 0, t) for t in range(60)]
        buffer.session.collector.flush()
        assert chunk.exists()
        buffer.save_checkpoint("next", wait=True, keep_last=1)
        buffer.add_episode(episode(100, 20), terminated=True)
        assert buffer.n_steps == 60
        buffer.session.collector.flush()
        assert not chunk.exists()
        buffer.reader.assembler.cache.invalidate()
        assert len(here(buffer)) == 60
    with resumed(url, "next") as buffer:
        assert here(buffer) == [(1, 0, t) for t in range(60)]


def test_streams_of_which_nothing_is_left_are_removed(url: str) -> None:
    for number in range(4):
        with new_buffer(url, capacity=40, name=f"w{number}") as buffer:
            for e in range(5):
                buffer.add_episode(episode(e, 20), terminated=True)
                buffer.flush()
            assert buffer.n_steps == 40
            buffer.session.collector.flush()
            assert len(here(buffer)) == 40
    left = [name for name in os.listdir(Path(url, "streams")) if name != "zarr.json"]
    assert [name.split("-")[0] for name in left] == ["w3"]
    assert sum(trajstore.open(url).episodes["length"]) >= 40


def read_all(url: str, at: str | None = None) -> int:
    """Read every episode that a store shows; says how many steps these have.

    Without any time of grace, what a reader has just looked up may go: then it looks again, as it is told to.
    """
    for _ in range(10):
        store = trajstore.open(url, at=at)
        with contextlib.suppress(SnapshotExpiredError):
            return sum(len(store.read_episode(i)["action"]) for i in range(len(store)))
    raise AssertionError("expired each time")


def test_a_store_stays_readable_however_many_sessions_evict(url: str) -> None:
    for session, capacity in enumerate((None, 100, None, 30, 200)):
        buffer = new_buffer(url, capacity=capacity)
        for number in range(6):
            buffer.add_episode(episode(number, 20), terminated=True)
            buffer.flush()
            assert read_all(url) >= buffer.n_steps - 20 * (capacity is None)
            assert len(here(buffer)) == buffer.n_steps
        buffer.session.collector.flush()
        read_all(url)
        buffer.close() if session % 2 else crash(buffer)
        read_all(url)


def test_a_store_stays_readable_after_a_resume(url: str) -> None:
    buffer = new_buffer(url, capacity=50)
    for number in range(15):
        buffer.add_episode(episode(number, 20), terminated=True)
        buffer.flush()
        assert len(here(buffer)) == min(50, 20 * (number + 1))
        if number == 4:
            buffer.save_checkpoint("a", wait=True)
    buffer.session.collector.flush()
    buffer.close()
    assert read_all(url) >= 50
    for capacity in (50, 200):
        with resumed(url, "a", capacity=capacity, grace_s=0.0) as again:
            for number in range(4):
                again.add_episode(episode(number, 20), terminated=True)
                again.flush()
                assert len(here(again)) == again.n_steps
                again.session.collector.flush()
                assert read_all(url) >= 50
        assert read_all(url) >= 50
        assert read_all(url, at="a") >= 50


def test_a_commit_that_comes_while_steps_are_taken_up_does_not_give_up_live_steps() -> None:
    buffer = new_buffer(fresh(), capacity=4, buffer_bytes="1MB", cache_bytes="32MB")
    commit_late(buffer)
    buffer.append(step(0, 44))
    assert buffer.n_steps == 4
    buffer.session.collector.flush()
    assert buffer.session.writer.first_rows[buffer.stream] <= 41
    for _ in range(2):
        buffer.reader.assembler.cache.invalidate()
        assert here(buffer) == [(0, 0, t) for t in range(41, 45)]
    buffer.close()


def test_a_commit_that_comes_while_a_checkpoint_is_taken_does_not_cut_live_steps_off() -> None:
    url = fresh()
    buffer = new_buffer(url, capacity=4, buffer_bytes="1MB", cache_bytes="32MB")
    commit_late(buffer)
    buffer.save_checkpoint("a", wait=True)
    crash(buffer)
    with resumed(url) as buffer:
        assert here(buffer) == [(0, 0, t) for t in range(40, 44)]


def commit_late(buffer: ReplayBuffer) -> None:
    """44 steps of which four are left and live, which a commit places right after they were looked at next."""
    fill(buffer, 40)
    buffer.flush()
    assert buffer.n_steps == 4
    fill(buffer, 4, first=40)
    assert buffer.n_steps == 4
    live: Any = buffer.reader.assembler.live.episodes
    take = live.take

    def late(staging: Any) -> Any:
        found = take(staging)
        live.take = take
        buffer.session.writer.commit()
        return found

    live.take = late


class BlockCheckpoints(BlockPuts):
    """Puts of checkpoints wait while the gate is clear."""

    def before(self, call: Call) -> None:
        if "checkpoints/" in call.key:
            super().before(call)


def test_a_checkpoint_that_is_being_written_is_not_overtaken_by_evictions(url: str) -> None:
    plan = BlockCheckpoints()
    plan.gate.set()
    with through(FaultyStorage(real_storage(url), plan)):
        buffer = new_buffer(url, capacity=40)
    for number in range(4):
        buffer.add_episode(episode(number, 20), terminated=True)
        buffer.flush()
    kept = here(buffer)
    plan.gate.clear()
    buffer.save_checkpoint("a")
    assert plan.reached.wait(120)
    for number in range(4, 12):
        buffer.add_episode(episode(number, 20), terminated=True)
        buffer.session.writer.commit()
        assert buffer.n_steps == 40
    plan.gate.set()
    buffer.flush()
    buffer.add_episode(episode(20, 20), terminated=True)
    assert buffer.n_steps == 40
    buffer.session.collector.flush()
    crash(buffer)
    with resumed(url, "a") as again:
        assert here(again) == kept


def test_a_resumed_session_can_save_although_the_one_before_had_given_up_its_rows(url: str) -> None:
    buffer = new_buffer(url, capacity=40)
    for number in range(4):
        buffer.add_episode(episode(number, 20), terminated=True)
    kept = here(buffer)
    buffer.save_checkpoint("a", wait=True)
    for number in range(4, 8):
        buffer.add_episode(episode(number, 20), terminated=True)
        buffer.flush()
        assert buffer.n_steps == 40
    buffer.session.collector.flush()
    crash(buffer)
    again = resumed(url, "a", grace_s=0.0)
    again.save_checkpoint("b", wait=True, keep_last=1)  # nothing was appended yet, and the old pins are gone
    again.session.collector.flush()
    again.reader.assembler.cache.invalidate() if again.n_steps else None
    assert here(again) == kept
    crash(again)
    with resumed(url, "b") as last:
        assert here(last) == kept


def test_a_session_without_rows_does_not_confuse_the_next(url: str) -> None:
    with new_buffer(url) as buffer:
        buffer.add_episode(episode(0, 20), terminated=True)
    with new_buffer(url, capacity=8) as buffer:
        assert buffer.n_steps == 8
        buffer.session.collector.flush()
    assert [record.rows for record in trajstore.open(url).streams] == [20, 0]
    with new_buffer(url) as buffer:
        for number in range(6):
            buffer.add_episode(episode(number, 20), terminated=True)
            buffer.flush()
            assert buffer.n_steps == 8 + 20 * (number + 1)
            buffer.reader.assembler.cache.invalidate()
            assert len(here(buffer)) == buffer.n_steps


@pytest.mark.parametrize("n", [1, 4, 15, 16, 17, 40])
def test_a_predecessor_that_was_evicted_whole_is_not_asked_for(url: str, n: int) -> None:
    with new_buffer(url) as buffer:
        buffer.add_episode(episode(0, n), terminated=True)
        buffer.save_checkpoint("a", wait=True)
    with resumed(url, capacity=8, grace_s=0.0) as buffer:
        for number in range(1, 4):
            buffer.add_episode(episode(number, 30), terminated=True)
            buffer.flush()
            assert buffer.n_steps == 8
            buffer.save_checkpoint("b", wait=True, keep_last=1)
            buffer.session.collector.flush()
            buffer.reader.assembler.cache.invalidate()
            assert here(buffer) == [(1, number - 1, t) for t in range(22, 30)]
        buffer.refresh()
        assert len(here(buffer)) == 8
    assert [record.id for record in trajstore.open(url).streams] == [buffer.stream]


# ---- memory ---------------------------------------------------------------------------------------------

CAPACITY = 2_000


def held_bytes(thing: Any, seen: set[int]) -> int:
    """Bytes of all arrays, tensors and containers that can be reached from a thing, each once."""
    if id(thing) in seen or isinstance(thing, (type, ModuleType, FunctionType)):
        return 0
    seen.add(id(thing))
    if isinstance(thing, np.ndarray):
        return int(thing.nbytes) if thing.base is None else held_bytes(thing.base, seen)
    if isinstance(thing, torch.Tensor):
        storage = thing.untyped_storage()
        return 0 if storage.data_ptr() in seen else (seen.add(storage.data_ptr()) or 0) + storage.nbytes()
    if isinstance(thing, (list, tuple, set, frozenset, deque)):
        return 8 * len(thing) + sum(held_bytes(item, seen) for item in thing)
    if isinstance(thing, dict):
        return 16 * len(thing) + sum(held_bytes(item, seen) for pair in thing.items() for item in pair)
    names = [
        *getattr(thing, "__dict__", ()),
        *(n for kind in type(thing).__mro__ for n in getattr(kind, "__slots__", ())),
    ]
    return sum(held_bytes(getattr(thing, name, None), seen) for name in names) if is_ours(thing) else 0


def is_ours(thing: Any) -> bool:
    return type(thing).__module__.startswith("trajstore")


def sizes(buffer: ReplayBuffer) -> dict[str, int]:
    """Bytes of everything that grows with what a buffer holds."""
    source, sampler = buffer.reader.assembler, buffer.reader.priority_sampler
    parts = {
        "index": source.index,
        "live": source.live,
        "retention": buffer.session.evictor,
        "priorities": sampler,
    }
    parts |= {"windows": source._kinds, "cache": source.cache, "sweeper": buffer.session.collector}
    others = {
        id(thing)
        for thing in (
            buffer,
            buffer.reader,
            source,
            buffer.session.writer,
            buffer.session.storage,
            buffer.session.store,
        )
    }
    alone = others | {id(part) for part in parts.values()} | {id(source.snapshot)}
    return {name: held_bytes(part, alone - {id(part)}) for name, part in parts.items()}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def soak(buffer: ReplayBuffer, n_blocks: int, ends: float, samples: bool) -> None:
    """Append blocks of 50 steps of 8 environments, with episodes that end so often."""
    rng = np.random.default_rng(0)
    for number in range(n_blocks):
        rows = {"obs": np.full((50, 8, 3), number, np.float32), "reward": np.zeros((50, 8), np.float32)}
        buffer.extend(rows, terminated=rng.random((50, 8)) < ends)
        if samples and number % 4 == 0:
            batch = buffer.sample(16)
            buffer.update_priorities(batch["index"], torch.rand(16))


@pytest.mark.slow
@pytest.mark.parametrize("samples", [True, False], ids=["sampled", "never sampled"])
@pytest.mark.parametrize("ends", [0.9, 0.001], ids=["short episodes", "long episodes"])
def test_what_a_buffer_holds_in_memory_is_bounded_by_its_capacity(url: str, ends: float, samples: bool) -> None:
    """200,000 steps, in about as many episodes or in few, pass through a buffer for 2,000.

    Index entries that are not in use are given back once there are 2**16 of them; with what is derived from them
    they take up to 250 bytes each. The rest is bounded by a kilobyte a step.
    """
    schema = Schema({"obs": Field("float32", (3,), chunk_rows=1024), "reward": Field("float32", chunk_rows=1024)})
    options = {"schema": schema, "buffer_bytes": "1MB", "cache_bytes": "16MB", "priorities": Priorities()}
    buffer = new_buffer(url, capacity=CAPACITY, **options)
    early: dict[str, int] = {}
    for _ in range(5):  # memory is given back now and then, so it goes up and down
        soak(buffer, 80, ends, samples)
        buffer.flush()
        early = {name: max(n, early.get(name, 0)) for name, n in sizes(buffer).items()}
    rss = resident_bytes()
    soak(buffer, 350, ends, samples)
    buffer.flush()
    assert buffer.n_steps <= CAPACITY
    late = sizes(buffer)
    assert late.pop("cache") < 20_000_000
    assert {name: n for name, n in late.items() if n > 250 * (1 << 16) + 1000 * CAPACITY} == {}
    assert {name: (early[name], n) for name, n in late.items() if n > 1.4 * early[name] + 3_000_000} == {}
    assert len(buffer.reader.assembler.index.changes) < 10_000
    assert resident_bytes() < rss + (48 << 20)
    buffer.close()
