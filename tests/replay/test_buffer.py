"""The live buffer: what it does, what it refuses, and how it fails."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import inspect
import os
import shutil
import signal
import subprocess
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trajstore
from tests.conftest import Place
from tests.support.faulty import BlockPuts, FailWhile, FaultyStorage, no_space, real_storage, through
from trajstore import (
    AmbiguousCheckpointError,
    CheckpointNotFoundError,
    ClosedError,
    DataError,
    EpisodeNotFoundError,
    Field,
    NotReadyError,
    Priorities,
    ReplayBuffer,
    Retention,
    SamplesPerInsert,
    Schema,
    SchemaError,
    StorageError,
    StoreNotFoundError,
    Windows,
)
from trajstore.replay.options import OptionChanges, RejoinChanges, ReplayOptions
from trajstore.sampling.priorities.priority_options import Linear

SCHEMA = Schema(
    {
        "obs": Field("float32", (3,), final=True, chunk_rows=16),
        "action": Field("int64", chunk_rows=64),
        "reward": Field("float32", chunk_rows=64),
    }
)
SMALL: dict[str, Any] = {"commit_seconds": None, "buffer_bytes": "64KB", "cache_bytes": "8MB", "grace_s": 0.0}


def new_buffer(url: str, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(url, fsync=False, **({"schema": SCHEMA} | SMALL | options))


def resumed(url: str, checkpoint: str = "latest", **options: Any) -> ReplayBuffer:
    return ReplayBuffer.resume(url, checkpoint, fsync=False, **options)


def step(env: int, t: int) -> dict[str, Any]:
    return {"obs": np.array([env, t, 0], np.float32), "action": t, "reward": float(t)}


def episode(env: int, n: int, n_final: int = 0) -> dict[str, Any]:
    """Steps 0 to n - 1 of an environment, and the observation after them."""
    t = np.arange(n + n_final)
    obs = np.stack([np.full(len(t), env), t, np.zeros(len(t))], 1).astype(np.float32)
    return {"obs": obs, "action": t[:n], "reward": t[:n].astype(np.float32)}


def crash(buffer: ReplayBuffer) -> None:
    """End the threads of a buffer; nothing that is staged is written, nobody seals the stream."""
    with contextlib.suppress(Exception):
        buffer.session.collector.close()
    buffer.session.writer.release()
    buffer.session.schedule.cancel()
    with contextlib.suppress(Exception):
        buffer.session.schedule.close()


def assert_same(a: Any, b: Any) -> None:
    """Two batches, all but the names of streams."""
    assert a.keys() == b.keys()
    for name in a:
        if isinstance(a[name], dict):
            assert_same(a[name], b[name])
        elif name != "index":
            assert torch.equal(a[name], b[name]), name


@pytest.fixture
def memory() -> str:
    return f"memory://replay-{uuid.uuid4().hex}"


# ---- the ordinary life ----------------------------------------------------------------------------------


def test_a_step_that_was_just_appended_can_be_given_a_priority_and_a_column(memory: str) -> None:
    with new_buffer(memory, priorities=Priorities()) as buffer:
        buffer.add_column("advantage", Field("float32"))
        for t in range(3):
            handle = buffer.append(step(0, t))
            index = torch.tensor([[0, handle.episode, handle.t]])
            assert buffer.update_priorities(index, torch.tensor([t + 1.0])) == 0
            handle = buffer.append(step(1, t), env=1)
            index = torch.tensor([[0, handle.episode, handle.t]])
            assert buffer.write_column("advantage", index, torch.tensor([t + 1.0])) == 0


def test_many_short_episodes_can_be_sampled_at_once_whether_there_was_room_for_them_or_not(memory: str) -> None:
    with ReplayBuffer(memory, commit_seconds=None, buffer_bytes="4MB", cache_bytes="64MB") as buffer:
        for number in range(40):
            handles = buffer.extend({"x": np.full((10, 40), number, np.float32)}, truncated=np.ones((10, 40), bool))
            if number % 7 == 0:
                last = torch.tensor([[0, int(handles.episode[-1, -1]), 0]])
                assert buffer.at(last, Windows())["x"].item() == number
        assert buffer.n_steps == 40 * 400
        seen = buffer.sample(4000)["x"].reshape(-1)
        assert set(seen.tolist()) == set(range(40))


def test_other_threads_sample_while_one_waits_for_a_commit_that_makes_room_for_many_short_episodes(
    memory: str,
) -> None:
    plan = BlockPuts()
    plan.gate.set()
    with through(FaultyStorage(real_storage(memory), plan)):
        buffer = ReplayBuffer(memory, commit_seconds=None, buffer_bytes="4MB", cache_bytes="64MB")
    ended = {"truncated": np.ones((10, 40), bool)}
    buffer.extend({"x": np.zeros((10, 40), np.float32)}, **ended)
    buffer.flush()
    plan.gate.clear()
    for _ in range(39):
        buffer.extend({"x": np.ones((10, 40), np.float32)}, **ended)
    waiting = threading.Thread(target=lambda: buffer.n_steps)
    waiting.start()
    assert plan.reached.wait(60)
    assert buffer.reader.assembler.lock.acquire(timeout=60)  # which a batch needs
    buffer.reader.assembler.lock.release()
    assert waiting.is_alive()
    plan.gate.set()
    waiting.join(60)
    assert buffer.n_steps == 40 * 400
    buffer.close()


@pytest.mark.parametrize("compiled", [True, False])
def test_no_steps_are_a_batch_of_none(memory: str, compiled: bool) -> None:
    with new_buffer(memory, compiled=compiled) as buffer:
        buffer.append(step(0, 0))
        none = torch.zeros(0, 3, dtype=torch.int64)
        shape = buffer.at(none, Windows(length=2, boundary="pad_right"))["obs"].shape
        assert shape[:2] == (0, 2)
        assert buffer.at(none, Windows(offsets={"obs": (-1, 0)}))["obs"].shape[:3] == (0, 1, 2)


def test_what_is_appended_can_be_sampled_at_once_and_is_stored_behind(memory: str) -> None:
    with new_buffer(memory) as buffer:
        handle = buffer.append(step(0, 0), env=0)
        assert (handle.stream, handle.episode, handle.t) == (buffer.stream, 0, 0)
        assert (buffer.n_steps, buffer.n_episodes, len(buffer)) == (1, 1, 1)
        assert buffer.sample(3)["index"].tolist() == [[0, 0, 0]] * 3
        assert trajstore.open(memory).snapshot.n_rows == 0
        buffer.flush()
        assert trajstore.open(memory).snapshot.n_rows == 1
    assert trajstore.open(memory).episodes["end"].tolist() == ["cut"]


def test_a_store_that_is_there_is_gone_on_with(memory: str) -> None:
    for session in range(3):
        with new_buffer(memory, schema=None if session else SCHEMA) as buffer:
            buffer.add_episode(episode(session, 10), terminated=True)
            assert buffer.n_steps == 10 * (session + 1)
            batch = buffer.sample(200)
            envs = batch["obs"][:, 0, 0].int().tolist()
            assert set(envs) == set(range(session + 1))
            names = [buffer.streams[stream] for stream in batch["index"][:, 0].tolist()]
            assert all((name == buffer.stream) == (env == session) for name, env in zip(names, envs, strict=True))
            assert buffer.abandoned == {}


def test_the_schema_is_read_off_the_first_data(memory: str) -> None:
    with new_buffer(memory, schema=None) as buffer:
        assert buffer.schema is None
        with pytest.raises(NotReadyError):
            buffer.sample(1)
        buffer.append(step(0, 0))
        assert buffer.schema is not None
        assert list(buffer.schema) == ["obs", "action", "reward"]
        assert buffer.sample(1)["obs"].shape == (1, 1, 3)


def test_every_way_to_append_and_to_end(memory: str) -> None:
    with new_buffer(memory) as buffer:
        buffer.append(step(0, 0), env=0, terminated=True, final={"obs": np.zeros(3, np.float32)})
        block = {name: np.stack([value] * 2) for name, value in episode(1, 4).items()}
        rows = {name: value.swapaxes(0, 1) for name, value in block.items()}
        handles = buffer.extend(rows, envs=[4, 5])
        assert handles.t.tolist() == [[0, 0], [1, 1], [2, 2], [3, 3]]
        buffer.amend({"reward": 7.0}, env=4, t=1)
        buffer.end_episode(4, truncated=True, metadata={"why": "time"})
        buffer.abort_episode(5)
        key = buffer.add_episode(episode(2, 3, n_final=1), terminated=True, metadata={"score": 3})
        assert (buffer.n_steps, buffer.n_episodes) == (1 + 4 + 3, 3)
        batch = buffer.at(torch.tensor([[0, int(handles.episode[1, 0]), 1], [0, key.episode, 2]]))
        assert batch["reward"][:, 0].tolist() == [7.0, 2.0]
        whole = buffer.sample_episodes(4)
        assert whole["obs"].shape[0] == 4
        assert sum(len(b["index"]) for b in buffer.epoch(3)) == 8
    assert sorted(trajstore.open(memory).episodes["end"].tolist()) == [
        "aborted",
        "terminated",
        "terminated",
        "truncated",
    ]


def test_windows_of_a_batch_are_those_asked_for(memory: str) -> None:
    with new_buffer(memory, sample=Windows(length=4)) as buffer:
        buffer.add_episode(episode(0, 10), terminated=True)
        assert buffer.n_windows() == 7
        assert buffer.n_windows(Windows(length=2)) == 9
        assert buffer.sample(5)["obs"].shape == (5, 4, 3)
        assert buffer.sample(5, Windows(length=2))["obs"].shape == (5, 2, 3)
        recent = buffer.sample(50, Windows(), recent_steps=2)["index"][:, 2]
        assert set(recent.tolist()) == {8, 9}
        with buffer.batches(5, Windows(length=2)) as batches:
            assert next(batches)["obs"].shape == (5, 2, 3)


def test_what_another_writer_commits_is_shown_after_a_refresh(memory: str) -> None:
    with new_buffer(memory) as buffer:
        buffer.add_episode(episode(0, 5), terminated=True)
        with trajstore.open(memory).writer("other") as other:
            other.append_episode(episode(1, 7), terminated=True)
        assert buffer.n_steps == 5
        buffer.refresh()
        assert buffer.n_steps == 12
        assert set(buffer.sample(200)["obs"][:, 0, 0].tolist()) == {0.0, 1.0}


def test_statistics_are_of_all_that_was_committed(memory: str) -> None:
    with new_buffer(memory, capacity=5, statistics=["reward"]) as buffer:
        for t in range(20):
            buffer.append(step(0, t))
        buffer.flush()
        assert list(buffer.statistics()) == ["reward"]
        assert buffer.statistics()["reward"]["count"] == 20
        assert buffer.statistics()["reward"]["mean"] == 9.5
        buffer.end_episode(terminated=True)
        buffer.save_checkpoint("a", wait=True)
    with resumed(memory) as again:
        assert again.statistics()["reward"]["count"] == 20
        again.save_checkpoint("b", wait=True)
    with resumed(memory) as last:
        last.append(step(0, 20))
        last.flush()
        assert last.statistics()["reward"]["count"] == 21
        assert last.statistics()["reward"]["mean"] == 10.0
    with (
        new_buffer(memory) as without,
        pytest.raises(ValueError, match="keeps no statistics; make it with statistics"),
    ):
        without.statistics()


def test_figures_for_loggers(memory: str) -> None:
    with new_buffer(memory, capacity=5, samples_per_insert=SamplesPerInsert(1.0, slack=100.0)) as buffer:
        for t in range(8):
            buffer.append(step(0, t))
        buffer.sample(3)
        buffer.flush()
        stats = buffer.stats()
        assert {"n_steps", "n_episodes", "n_sampled", "n_redrawn", "evicted", "abandoned_rows"} <= stats.keys()
        assert {"cache", "writer", "storage", "samples_per_insert"} <= stats.keys()
        assert (stats["n_steps"], stats["n_sampled"], stats["evicted"]["steps"]["steps"]) == (5, 3, 3)
        assert stats["writer"]["committed_rows"] == 8
        assert stats["samples_per_insert"] == {"n_inserted": 8, "n_sampled": 3}
        assert {"steps", "episodes", "bytes", "age"} <= stats["evicted"].keys()


@pytest.mark.s3
def test_a_run_on_s3_is_resumed(new_place: Callable[[str], Place]) -> None:
    place = new_place("s3")
    options = SMALL | {"schema": SCHEMA, "capacity": 60, "sample": Windows(length=2), "seed": 3, **place.kwargs}
    buffer = ReplayBuffer(place.url, priorities=Priorities(), **options)
    for number in range(8):
        buffer.add_episode(episode(number, 10), terminated=True)
        batch = buffer.sample(8)
        buffer.update_priorities(batch["index"], batch["reward"][:, 0] + 1)
    buffer.save_checkpoint("a", wait=True)
    expected = [buffer.sample(8) for _ in range(3)]
    crash(buffer)
    with ReplayBuffer.resume(place.url, "a", **place.kwargs) as again:
        for batch in expected:
            assert_same(again.sample(8), batch)
        again.add_episode(episode(99, 10), terminated=True)
        again.save_checkpoint("b", wait=True, keep_last=1)
        assert [c.name for c in again.checkpoints] == ["b"]
        assert again.n_steps == 60
        again.session.collector.flush()
        again.reader.assembler.cache.invalidate()
        assert len(again.sample(100)["index"]) == 100


# ---- options --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"capacity": 3, "sample": Windows(length=4)},
            "capacity: expected at least the 4 steps of a window, got 3",
        ),
        (
            {"capacity": 7, "sample": Windows(length=2, burn_in=3, bootstrap=3, strict_context=True)},
            "capacity: expected at least the 8 steps of a window, got 7",
        ),
        ({"capacity": 8, "sample": Windows(length=4, stride=3)}, "at least the 10 steps of a window, got 8"),
        ({"capacity": 256, "sample": Windows(length=256)}, "at least the 256 steps of a window, got 256"),
        (
            {"capacity": Retention(per_stream=Retention(steps=3)), "sample": Windows(length=4)},
            "at least the 4 steps",
        ),
        ({"capacity": 0}, "capacity: expected a positive integer, a Retention or None, got 0"),
        ({"capacity": "many"}, "capacity: expected a positive integer, a Retention or None, got 'many'"),
        ({"cache_bytes": "nonsense"}, "cache_bytes: expected bytes as an int or like '4GiB', got 'nonsense'"),
        ({"commit_seconds": 0}, "commit_seconds: expected a positive number or None, got 0"),
        ({"commit_steps": 0}, "commit_steps: expected an integer of at least 1 or None, got 0"),
        ({"grace_s": -1}, "grace_s: expected seconds, at least 0, got -1"),
        ({"name": "a b"}, "writer name 'a b': expected 1 to 64 of the characters"),
    ],
)
def test_options_that_make_no_sense_are_refused(memory: str, options: dict[str, Any], message: str) -> None:
    before = set(threading.enumerate())
    with pytest.raises(ValueError, match=message):
        new_buffer(memory, **options)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(
    "options",
    [{"sample": 5}, {"priorities": 0.6}, {"samples_per_insert": 4}, {"statistics": "reward"}, {"seed": "x"}],
    ids=lambda options: next(iter(options)),
)
def test_options_of_another_kind_are_refused(memory: str, options: dict[str, Any]) -> None:
    before = set(threading.enumerate())
    with pytest.raises(TypeError, match=f"{next(iter(options))}: expected .*, got "):
        new_buffer(memory, **options)
    assert set(threading.enumerate()) <= before


def test_an_unknown_option_is_refused_with_those_there_are(memory: str) -> None:
    with pytest.raises(TypeError, match="unknown options: 'capcity'"):
        new_buffer(memory, capcity=5)
    with pytest.raises(StoreNotFoundError):
        trajstore.open(memory)  # nothing was made
    new_buffer(memory).close()
    with pytest.raises(TypeError, match=r"unknown options: 'capcity' \(did you mean 'capacity'\?\); .*seed"):
        resumed(memory, capcity=5)


def test_the_constructor_and_the_changes_of_a_resume_have_the_options_that_checkpoints_keep() -> None:
    options = {f.name: f for f in dataclasses.fields(ReplayOptions)}
    unkept = ("url", "exist", "schema", "storage_options", "fsync", "disk_cache")
    parameters = inspect.signature(ReplayBuffer).parameters
    given = {name: p for name, p in parameters.items() if name not in unkept}
    assert given.keys() == options.keys() == OptionChanges.__annotations__.keys() | RejoinChanges.__annotations__
    defaults = ReplayOptions()
    assert {name: p.default for name, p in given.items()} == {name: getattr(defaults, name) for name in options}


def test_a_window_that_just_fits_the_capacity_can_be_drawn(memory: str) -> None:
    with new_buffer(memory, capacity=4, sample=Windows(length=4)) as buffer:
        for t in range(9):
            buffer.append(step(0, t))
            if t >= 3:
                assert buffer.sample(1)["action"].tolist() == [list(range(t - 3, t + 1))]
    with new_buffer(memory, capacity=2, sample=Windows(length=4, boundary="pad_right")) as buffer:
        assert buffer.sample(1)["valid"].sum() <= 2


def test_another_schema_is_refused_and_leaves_no_trace(memory: str) -> None:
    new_buffer(memory).close()
    with pytest.raises(SchemaError, match="has another schema"):
        new_buffer(memory, schema=Schema({"obs": Field("float64", (3,))}))
    with new_buffer(memory) as buffer:
        assert buffer.n_steps == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"obs": np.zeros(4, np.float32)},
            r"field 'obs': expected float32 of shape \(3\), got float32 of shape \(4\)",
        ),
        ({"obs": np.zeros(3, np.float64)}, r"field 'obs': expected float32 of shape \(3\), got float64"),
        ({"action": 1.5}, "field 'action': expected int64"),
        ({"more": 1}, "more"),
    ],
)
def test_data_that_does_not_fit_is_refused_mid_run_and_nothing_changes(
    memory: str, change: dict[str, Any], message: str
) -> None:
    with new_buffer(memory, seed=1) as buffer, new_buffer(memory + "-twin", seed=1) as twin:
        for t in range(5):
            buffer.append(step(0, t))
            twin.append(step(0, t))
            with pytest.raises(DataError, match=message):
                buffer.append(step(0, t) | change)
            assert_same(buffer.sample(4), twin.sample(4))
        assert buffer.n_steps == 5


@pytest.mark.parametrize("bad", [5, None, [], {"obs": 5}, {}, {"obs": {}}, "text"], ids=repr)
@pytest.mark.parametrize("call", ["add_episode", "extend", "append"])
def test_what_is_no_step_is_refused(memory: str, call: str, bad: Any) -> None:
    with new_buffer(memory) as buffer:
        with pytest.raises(DataError):
            getattr(buffer, call)(bad)
        assert buffer.n_steps == 0


def test_bad_calls_of_samples(memory: str) -> None:
    with new_buffer(memory) as buffer:
        with pytest.raises(NotReadyError):
            buffer.sample(4)
        buffer.append(step(0, 0))
        with pytest.raises(ValueError, match="batch_size: expected a positive integer, got 0"):
            buffer.sample(0)
        with pytest.raises(
            NotReadyError, match="no episode has 5 usable steps, so no such window exists; the longest"
        ):
            buffer.sample(4, Windows(length=5))
        with pytest.raises(TypeError, match="recentsteps"):
            buffer.sample(4, recentsteps=5)
        with pytest.raises(ValueError, match="no priorities; create it with priorities"):
            buffer.update_priorities(torch.tensor([[0, 0, 0]]), torch.ones(1))
        with pytest.raises(EpisodeNotFoundError, match="env 3 has no open episode"):
            buffer.end_episode(3, terminated=True)
        assert buffer.stats()["n_sampled"] == 0


def test_options_come_back_with_a_checkpoint(memory: str) -> None:
    options: dict[str, Any] = {
        "capacity": Retention(steps=50, episodes=20, age_s=1e6, per_stream=Retention(steps=40)),
        "sample": Windows(length=2, offsets={"obs": (-1, 0)}, n_step=(1, 3), pad="zero"),
        "priorities": Priorities(beta=Linear(0.4, 1.0, 7), over=0.3),
        "statistics": ("obs", "reward"),
        "commit_seconds": 3.5,
    }
    with new_buffer(memory, samples_per_insert=SamplesPerInsert(0.25, slack=9.5), **options) as buffer:
        buffer.add_episode(episode(0, 10), terminated=True)
        buffer.set_priorities(alpha=0.9)
        buffer.save_checkpoint("a", wait=True)
        made = buffer.options
    with resumed(memory, cache_bytes="16MB") as again:
        for name, value in options.items():
            expected = made.priorities if name == "priorities" else value
            assert getattr(again.options, name) == expected, name
        assert again.options.samples_per_insert is not None
        assert again.options.samples_per_insert.options == made.samples_per_insert.options  # type: ignore[union-attr]
        assert again.options.cache_bytes == "16MB"


def test_functions_have_to_be_given_again(memory: str) -> None:
    with new_buffer(memory, priorities=Priorities(beta=lambda n: 0.5)) as buffer:
        buffer.add_episode(episode(0, 10), terminated=True)
        buffer.save_checkpoint("a", wait=True)
        expected = buffer.sample(4)
    with pytest.raises(
        DataError,
        match=r"option 'priorities.beta' was the function '.*lambda>', which a checkpoint cannot hold; pass it",
    ):
        resumed(memory)
    with resumed(memory, priorities=Priorities(beta=0.5)) as again:
        assert_same(again.sample(4), expected)


# ---- closed, forked, ready ------------------------------------------------------------------------------


def calls_of(buffer: ReplayBuffer) -> dict[str, Callable[[], Any]]:
    index = torch.zeros((1, 3), dtype=torch.int64)
    return {
        "append": lambda: buffer.append(step(0, 0)),
        "add_episode": lambda: buffer.add_episode(episode(0, 2), env=5),
        "extend": lambda: buffer.extend({name: value[None] for name, value in episode(0, 2).items()}, envs=[6, 7]),
        "end_episode": lambda: buffer.end_episode(terminated=True),
        "abort_episode": buffer.abort_episode,
        "amend": lambda: buffer.amend({"reward": 1.0}),
        "sample": lambda: buffer.sample(1),
        "batches": lambda: buffer.batches(1),
        "epoch": lambda: buffer.epoch(1),
        "sample_episodes": lambda: buffer.sample_episodes(1),
        "at": lambda: buffer.at(index),
        "update_priorities": lambda: buffer.update_priorities(index, torch.ones(1)),
        "set_priorities": lambda: buffer.set_priorities(alpha=0.5),
        "is_ready": buffer.is_ready,
        "wait_ready": lambda: buffer.wait_ready(timeout_s=0),
        "n_steps": lambda: buffer.n_steps,
        "n_episodes": lambda: buffer.n_episodes,
        "stats": buffer.stats,
        "flush": buffer.flush,
        "refresh": buffer.refresh,
        "save_checkpoint": buffer.save_checkpoint,
        "prune_checkpoints": lambda: buffer.prune_checkpoints(1),
    }


def test_a_closed_buffer_says_so(memory: str) -> None:
    buffer = new_buffer(memory, capacity=3, priorities=Priorities())
    for t in range(9):
        buffer.append(step(0, t))
    assert buffer.n_steps == 3
    for t in range(9, 20):
        buffer.append(step(0, t))
    buffer.close()
    buffer.close()
    for name, call in calls_of(buffer).items():
        with pytest.raises(ClosedError, match=r"the buffer at memory://.* is closed"):
            call()
        assert name
    assert "closed" in repr(buffer)
    assert buffer.url == memory
    assert buffer.checkpoints == []


def test_a_forked_child_is_told_to_open_a_buffer_of_its_own(memory: str) -> None:
    buffer = new_buffer(memory, priorities=Priorities())
    buffer.append(step(0, 0))
    buffer.sample(1)
    locked, done = threading.Event(), threading.Event()

    def hold() -> None:
        with buffer.reader.assembler.lock:
            locked.set()
            done.wait(120)

    thread = threading.Thread(target=hold)
    thread.start()
    assert locked.wait(120)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(120)  # whatever hangs dies
        for name, call in {**calls_of(buffer), "close": buffer.close}.items():
            try:
                call()
            except ClosedError as error:
                told = "belongs to process" in str(error) and "open one in this process" in str(error)
                os.write(write, b"" if told else f"{name}: {error}\n".encode())
            except BaseException as error:
                os.write(write, f"{name}: {error!r}\n".encode())
            else:
                os.write(write, f"{name} works\n".encode())
        os._exit(0)
    os.close(write)
    done.set()
    thread.join()
    with os.fdopen(read) as pipe:
        assert pipe.read() == ""
    assert os.waitpid(child, 0)[1] == 0
    assert buffer.n_steps == 1
    buffer.close()


def test_waiting_until_there_is_enough(memory: str) -> None:
    with new_buffer(memory) as buffer:
        assert not buffer.is_ready()
        with pytest.raises(TimeoutError, match=r"waited 0.01 s for 5 steps in 2 episodes; there are 0 in 0"):
            buffer.wait_ready(min_steps=5, min_episodes=2, timeout_s=0.01)
        waiting = threading.Thread(target=buffer.wait_ready, kwargs={"min_steps": 5, "min_episodes": 2})
        waiting.start()
        for env in range(5):
            assert waiting.is_alive()
            buffer.append(step(env, 0), env=env)
        waiting.join(120)
        assert not waiting.is_alive()
        assert buffer.is_ready(min_steps=5, min_episodes=5)
        assert not buffer.is_ready(min_steps=6)


def test_a_buffer_is_ready_when_a_window_can_be_drawn(memory: str) -> None:
    with new_buffer(memory, sample=Windows(length=3)) as buffer:
        for env in range(4):
            buffer.append(step(env, 0), env=env)
        assert buffer.n_steps == 4
        assert not buffer.is_ready(min_steps=4)
        with pytest.raises(TimeoutError, match="there are 4 in 4, and no window of the buffer's kind can be drawn"):
            buffer.wait_ready(min_steps=4, timeout_s=0)
        for t in range(1, 3):
            buffer.append(step(0, t), env=0)
        assert buffer.is_ready(min_steps=4)
        assert len(buffer.sample(2)["index"]) == 2


def test_a_buffer_of_transitions_is_ready_once_a_next_observation_is_known(memory: str) -> None:
    with new_buffer(memory, schema=None, sample=Windows.transitions()) as buffer:
        assert not buffer.is_ready()
        buffer.append({"obs": np.zeros(2, np.float32), "action": 0})
        assert not buffer.is_ready()
        assert buffer.window_stats() == {"n_windows": 0, "n_left_out": 0, "n_open": 1}
        buffer.append({"obs": np.ones(2, np.float32), "action": 1})
        assert buffer.is_ready()
        assert buffer.sample(1)["next"]["obs"].tolist() == [[1.0, 1.0]]


def test_coroutines_wait_while_others_go_on(memory: str) -> None:
    buffer = new_buffer(memory)

    async def collect() -> None:
        for t in range(5):
            buffer.append(step(0, t))
            await asyncio.sleep(0.001)

    async def main() -> list[Any]:
        with pytest.raises(TimeoutError, match=r"waited 0.01 s for 1 steps"):
            await buffer.ready(timeout_s=0.01)
        with pytest.raises(TimeoutError):  # whoever gives up leaves nothing behind that waits
            await asyncio.wait_for(buffer.ready(min_steps=100), 0.05)
        return await asyncio.gather(buffer.ready(min_steps=5), collect())

    asyncio.run(main())
    assert buffer.n_steps == 5
    buffer.close()


def test_whoever_waits_for_a_buffer_that_is_closed_is_told(memory: str) -> None:
    buffer, told = new_buffer(memory), []

    def wait() -> None:
        try:
            buffer.wait_ready(min_steps=5)
        except ClosedError as error:
            told.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    buffer.close()
    thread.join(120)
    assert len(told) == 1


def test_samples_that_fail_do_not_count_for_the_ratio_to_inserts(memory: str) -> None:
    limiter = SamplesPerInsert(1.0, slack=50.0)
    with new_buffer(memory, samples_per_insert=limiter) as buffer:
        buffer.append(step(0, 0))
        with pytest.raises(NotReadyError):
            buffer.sample(4, Windows(length=9))
        with pytest.raises(DataError):
            buffer.append({"obs": 3})
        with pytest.raises(DataError):
            buffer.add_episode(episode(0, 7) | {"action": np.zeros(3)}, env=1)
        assert limiter.state_dict() == {"n_inserted": 1, "n_sampled": 0}
        buffer.sample(4)
        with buffer.batches(2) as batches:
            next(batches)
        assert limiter.state_dict() == {"n_inserted": 1, "n_sampled": 6}
        buffer.add_episode(episode(0, 7), env=1, terminated=True)
        assert limiter.n_inserted == 8


# ---- checkpoints ----------------------------------------------------------------------------------------


def test_a_missing_checkpoint_is_named_with_those_there_are(memory: str) -> None:
    with pytest.raises(StoreNotFoundError, match="there is no store here"):
        resumed(memory)
    buffer = new_buffer(memory)
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint 'latest'; the store has none"):
        resumed(memory)
    buffer.save_checkpoint("first", wait=True)
    message = r"no checkpoint 'second'; the store has 'first' of .*id first-"
    with pytest.raises(CheckpointNotFoundError, match=message):
        resumed(memory, "second")
    buffer.close()


def test_names_of_checkpoints(memory: str) -> None:
    with new_buffer(memory) as buffer:
        for name in ("latest", "a/b", "", "x" * 65, ".hidden"):
            with pytest.raises(SchemaError, match="checkpoint name"):
                buffer.save_checkpoint(name)
        for keep in (0, -1, 1.5):
            with pytest.raises(ValueError, match="keep_last: expected a positive number or None, got"):
                buffer.save_checkpoint("a", keep_last=keep)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="keep: expected a positive number, got"):
                buffer.prune_checkpoints(keep)  # type: ignore[arg-type]
        assert buffer.checkpoints == []
        ids = [buffer.save_checkpoint("same", wait=True) for _ in range(2)]
        assert len(set(ids)) == 2
        assert [c.id for c in buffer.checkpoints] == ids
    with resumed(memory, "same") as again:  # the newest of that name
        assert again.session.schedule.newest == ids[1]
    with resumed(memory, ids[0]) as again:
        assert again.session.schedule.newest == ids[0]


def test_two_sessions_that_go_on_from_one_checkpoint_make_the_latest_ambiguous(memory: str) -> None:
    with new_buffer(memory) as buffer:
        buffer.add_episode(episode(0, 5), terminated=True)
        buffer.save_checkpoint("root", wait=True)
    left, right = resumed(memory), resumed(memory)
    for number, branch in enumerate((left, right)):
        branch.add_episode(episode(10 + number, 5), terminated=True)
        branch.save_checkpoint(f"branch-{number}", wait=True)
    with pytest.raises(
        AmbiguousCheckpointError, match=r"'latest' could be any of 'branch-0' .*, 'branch-1' .*give the id"
    ):
        resumed(memory)
    for number, branch in enumerate((left, right)):
        branch.refresh()
        assert set(branch.sample(200)["obs"][:, 0, 0].tolist()) == {0.0, 10.0 + number}
        branch.close()
        with resumed(memory, f"branch-{number}") as again:
            assert set(again.sample(200)["obs"][:, 0, 0].tolist()) == {0.0, 10.0 + number}
            assert again.stats()["abandoned_rows"] == 5


def test_what_was_written_after_a_checkpoint_is_abandoned_and_never_seen(memory: str) -> None:
    buffer = new_buffer(memory)
    buffer.add_episode(episode(0, 5), terminated=True)
    buffer.append(step(1, 0), env=1)
    buffer.save_checkpoint("a", wait=True)
    buffer.append(step(1, 1), env=1)
    buffer.add_episode(episode(2, 5), terminated=True)
    buffer.flush()
    crash(buffer)
    with resumed(memory) as again:
        assert again.abandoned == {buffer.stream: 6}
        again.refresh()
        assert (again.n_steps, again.n_episodes) == (6, 2)
        batch = again.sample(300)
        assert set(batch["obs"][:, 0, 0].tolist()) == {0.0, 1.0}
        is_cut = batch["obs"][:, 0, 0] == 1
        assert batch["is_last"][is_cut].all()
        assert not (batch["terminated"] | batch["truncated"])[is_cut].any()
    assert len(trajstore.open(memory).episodes) == 2
    assert len(trajstore.open(memory).history(abandoned=True)) >= 3  # it stays readable


def test_only_the_last_checkpoints_of_a_lineage_are_kept(memory: str) -> None:
    with new_buffer(memory) as buffer:
        for number in range(5):
            buffer.append(step(0, number))
            buffer.save_checkpoint(f"c{number}", keep_last=3)
        buffer.flush()
        assert [c.name for c in buffer.checkpoints] == ["c2", "c3", "c4"]
        assert len(buffer.prune_checkpoints(2)) == 1
        assert buffer.prune_checkpoints(2) == []
    other = resumed(memory, "c3")
    other.save_checkpoint("other", wait=True, keep_last=1)
    assert [c.name for c in other.checkpoints] == ["c4", "other"]  # another lineage is left alone
    other.close()


def test_a_store_is_opened_as_it_was(memory: str) -> None:
    with new_buffer(memory) as buffer:
        for number in range(4):
            buffer.add_episode(episode(number, 5), terminated=True)
            buffer.append(step(9, number), env=9)
            buffer.save_checkpoint(f"c{number}", wait=True)
        for number in range(4):
            store = trajstore.open(memory, at=f"c{number}")
            assert sorted(store.episodes["length"].tolist()) == sorted([5] * (number + 1) + [number + 1])
            assert store.read_episode(0)["obs"][:, 1].tolist() == [0, 1, 2, 3, 4]
            store.refresh()
            assert len(store) == number + 2
            with pytest.raises(ClosedError, match=r"opened at checkpoint 'c.-.*' and is read-only"):
                store.writer()


def test_a_checkpoint_of_nothing(memory: str) -> None:
    for options in ({"schema": None}, {"capacity": 10, "priorities": Priorities()}):
        url = f"{memory}-{len(options)}"
        buffer = new_buffer(url, **options)
        buffer.save_checkpoint("empty", wait=True)
        buffer.add_episode(episode(7, 4), terminated=True)
        buffer.flush()
        crash(buffer)
        with resumed(url) as again:
            assert again.n_steps == 0
            again.add_episode(episode(8, 4), terminated=True)
            assert set(again.sample(20)["obs"][:, 0, 0].tolist()) == {8.0}


def test_iterators_go_on_in_their_order_however_often_a_run_is_resumed(memory: str) -> None:
    buffer = new_buffer(memory)
    buffer.add_episode(episode(0, 100), terminated=True)
    first, second = buffer.batches(4), buffer.batches(6, Windows(length=2), prefetch=2)
    for iterator in (first, second, second):
        next(iterator)
    buffer.save_checkpoint("a", wait=True)
    expected = [next(first), next(second), buffer.sample(3)]
    crash(buffer)
    again = resumed(memory)
    again.save_checkpoint("b", wait=True)  # before anybody asks for the iterators
    crash(again)
    with resumed(memory) as last:
        first, second = last.batches(4), last.batches(6, Windows(length=2), prefetch=2)
        time.sleep(0.05)
        for found, batch in zip((next(first), next(second), last.sample(3)), expected, strict=True):
            assert_same(found, batch)
        second.close()


def test_batches_prefetched_from_steps_that_were_evicted_are_the_same_after_a_resume(memory: str) -> None:
    runs = []
    for is_interrupted in (False, True):
        url = f"{memory}-{is_interrupted}"
        buffer = new_buffer(url, capacity=20, sample=Windows(length=3), buffer_bytes="1MB", cache_bytes="32MB")
        for number in range(3):
            buffer.add_episode(episode(number, 6), terminated=True)
        iterator = buffer.batches(8, prefetch=2)
        next(iterator)
        for number in range(3, 6):
            buffer.add_episode(episode(number, 6), terminated=True)
        assert buffer.n_steps == 20
        buffer.save_checkpoint("a", wait=True)
        if is_interrupted:
            crash(buffer)
            buffer = resumed(url)
            iterator = buffer.batches(8, prefetch=2)
        batches = [next(iterator) for _ in range(4)]
        for batch in batches:
            assert torch.equal(batch["obs"][..., 1], (batch["index"][:, 2:] + torch.arange(3)).float())
        runs.append(batches)
        iterator.close()
        buffer.close()
    for a, b in zip(*runs, strict=True):
        assert_same(a, b)


def test_batches_go_on_while_what_was_prefetched_is_evicted(memory: str) -> None:
    with new_buffer(memory, capacity=20, sample=Windows(length=3), buffer_bytes="16KB") as buffer:
        buffer.add_episode(episode(0, 7), terminated=True)
        iterator = buffer.batches(8, prefetch=2)
        for number in range(1, 100):
            buffer.add_episode(episode(number, 7), terminated=True)
            if number % 3 == 0:
                buffer.flush()
            batch = next(iterator)
            assert torch.equal(batch["obs"][..., 1], (batch["index"][:, 2:] + torch.arange(3)).float())
            assert torch.equal(batch["obs"][..., 0], batch["index"][:, 1:2].expand(8, 3).float())
        iterator.close()


def test_many_environments_with_wide_rows_can_be_sampled_at_once(memory: str) -> None:
    schema = Schema({"image": Field("uint8", (84, 84, 4))})
    with ReplayBuffer(
        memory, schema=schema, cache_bytes="256MB", buffer_bytes="16MB", commit_seconds=None
    ) as buffer:
        for t in range(2):
            buffer.append({"image": np.full((128, 84, 84, 4), t, np.uint8)}, envs=range(128))
            assert buffer.n_steps == 128 * (t + 1)
        batch = buffer.sample(64)
        assert torch.equal(batch["image"][:, 0, 0, 0, 0].long(), batch["index"][:, 2])


# ---- storage that fails ---------------------------------------------------------------------------------


@pytest.fixture
def failing(memory: str) -> tuple[FailWhile, Callable[..., ReplayBuffer]]:
    """A plan that fails puts while it is told to, and buffers on that storage."""
    plan = FailWhile()
    storage = FaultyStorage(real_storage(memory), plan)

    def make(**options: Any) -> ReplayBuffer:
        with through(storage):
            return new_buffer(memory, **options)

    return plan, make


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(12000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never came to that")


def test_training_goes_on_from_memory_while_the_disk_is_full(
    failing: tuple[FailWhile, Callable[..., ReplayBuffer]], memory: str
) -> None:
    plan, make = failing
    buffer = make(commit_steps=50, buffer_bytes="40KB")
    buffer.append(step(0, 0))
    buffer.flush()
    plan.error = no_space
    n, n_raised = 1, 0
    while n < 100_000:
        try:
            buffer.append(step(0, n))
            n += 1
        except StorageError:
            n_raised += 1
            if n_raised == 1:
                assert buffer.n_steps == n  # told once; what could not be stored is sampled from memory
                assert len(set(buffer.sample(500)["action"].flatten().tolist())) > 20
            elif n_raised == 4:
                break
        if n == 51:
            wait_for(lambda: plan.n_failed > 0)
    assert 100 < n < 2000  # both halves of the buffer are full: nothing more is taken
    assert buffer.n_steps == n
    with pytest.raises(StorageError, match="No space left"):
        buffer.flush()
    plan.error = None
    buffer.flush()
    buffer.append(step(0, n))
    buffer.close()
    store = trajstore.open(memory)
    assert store.read_episode(0)["action"].tolist() == list(range(n + 1))


def test_a_failure_in_the_background_is_raised_once_by_the_next_call(
    failing: tuple[FailWhile, Callable[..., ReplayBuffer]],
) -> None:
    plan, make = failing
    for name in ("sample", "n_steps", "is_ready", "stats", "append", "end_episode", "batches"):
        plan.error = None
        buffer = make(commit_steps=2)
        buffer.append(step(0, 0))
        buffer.flush()
        plan.error, plan.n_failed = no_space, 0
        buffer.append(step(0, 1))
        buffer.append(step(0, 2))
        wait_for(lambda buffer=buffer: buffer.session.writer._pipeline._commit_thread._unraised is not None)  # type: ignore[misc]
        call = calls_of(buffer)[name]
        with pytest.raises(StorageError, match="No space left"):
            call()
        call()
        plan.error = None
        buffer.close()


def test_a_checkpoint_waits_for_room_and_is_complete_then(
    failing: tuple[FailWhile, Callable[..., ReplayBuffer]], memory: str
) -> None:
    plan, make = failing
    buffer = make()
    buffer.append(step(0, 0))
    buffer.flush()
    plan.error = no_space
    buffer.append(step(0, 1), terminated=True)
    buffer.save_checkpoint("a")
    for call in (
        lambda: buffer.save_checkpoint("b"),
        buffer.flush,
        lambda: buffer.prune_checkpoints(1),
        buffer.close,
    ):
        with contextlib.suppress(StorageError):
            call()  # may raise what the call before has left
        with pytest.raises(StorageError, match="No space left"):
            call()
    plan.error = None
    with contextlib.suppress(StorageError):  # that nobody has seen yet
        buffer.flush()
    buffer.close()
    with resumed(memory) as again:
        assert again.n_steps == 2


def test_arguments_of_another_kind_are_refused_by_name(memory: str) -> None:
    with new_buffer(memory, priorities=Priorities()) as buffer:
        with pytest.raises(NotReadyError, match="no step was appended yet"):
            new_buffer(f"{memory}-other", schema=None).sample(4)
        fill(buffer, 0, 8)
        batch = buffer.sample(2)
        for index in (None, [[0, 0, 0]], batch["index"][:, :2]):
            with pytest.raises(DataError, match=r"index: expected .*int64 of shape \(batch, 3\)"):
                buffer.update_priorities(index, torch.ones(2))  # type: ignore[arg-type]
        with pytest.raises(DataError, match="priority: expected a tensor or an array, got object"):
            buffer.update_priorities(batch["index"], object())  # type: ignore[arg-type]
        assert buffer.update_priorities(batch["index"].numpy(), torch.ones(2)) == 0
        for size in ("4", 4.0, 0):
            with pytest.raises(ValueError, match="batch_size: expected a positive integer, got"):
                buffer.sample(size)  # type: ignore[arg-type]
        assert buffer.stats()["n_sampled"] == 2


def test_a_flush_that_nobody_waits_for_is_done_behind(memory: str) -> None:
    plan = BlockPuts()
    plan.gate.set()
    with through(FaultyStorage(real_storage(memory), plan)):
        buffer = new_buffer(memory)
    plan.gate.clear()
    for t in range(3):
        buffer.append(step(0, t))
        buffer.flush(wait=False)  # the second and third find the first on its way, and the other block in use
    assert trajstore.open(memory).streams == ()
    plan.gate.set()
    wait_for(lambda: len(trajstore.open(memory)) == 1)
    buffer.close()
    buffer.close()
    with pytest.raises(ClosedError):
        buffer.flush(wait=False)


def test_state_dict_lets_older_checkpoints_go(url: str) -> None:
    with new_buffer(url) as buffer:
        for t in range(4):
            buffer.append(step(0, t))
            state = buffer.state_dict(keep_last=2)
        assert [c.id for c in buffer.checkpoints][-1] == state["checkpoint"]
        assert len(buffer.checkpoints) == 2
    with ReplayBuffer.resume(url, state, fsync=False) as again:
        assert again.n_steps == 4


@pytest.mark.parametrize("is_released", [False, True], ids=["closed", "released"])
def test_a_closed_buffer_gives_its_memory_back_at_once(memory: str, is_released: bool) -> None:
    buffer = new_buffer(memory)
    fill(buffer, 0, 8)
    reader = buffer.reader
    buffer.sample(4)
    cache = weakref.ref(buffer.reader.assembler.cache)
    gc.disable()
    try:
        buffer._release() if is_released else buffer.close()
        assert cache() is None
    finally:
        gc.enable()
    assert buffer.session.writer._pipeline.staging is None
    for use in (reader.sample, lambda n, windows: next(reader.batches(n, windows))):
        with pytest.raises(ClosedError, match="closed"):
            use(2, Windows())


def test_a_close_that_failed_is_tried_again(
    failing: tuple[FailWhile, Callable[..., ReplayBuffer]], memory: str
) -> None:
    plan, make = failing
    buffer = make()
    buffer.append(step(0, 0))
    plan.error = no_space
    for _ in range(2):
        with pytest.raises(StorageError, match="No space left"):
            buffer.close()
    plan.error = None
    buffer.close()
    assert trajstore.open(memory).episodes["end"].tolist() == ["cut"]


def test_a_block_that_fails_keeps_its_own_exception(failing: tuple[FailWhile, Callable[..., ReplayBuffer]]) -> None:
    plan, make = failing
    before = set(threading.enumerate())

    def use() -> None:
        with make() as buffer:
            buffer.append(step(0, 0))
            plan.error = no_space
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        use()
    assert "No space left" in caught.value.__notes__[0]
    wait_for(lambda: set(threading.enumerate()) <= before)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mounted)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this process may not mount a file system")
    try:
        yield mounted
    finally:
        subprocess.run(["umount", "-l", str(mounted)], check=True)


def test_a_disk_that_really_is_full_loses_nothing(small_disk: Path) -> None:
    url, noise = str(small_disk / "run"), np.random.default_rng(0)
    schema = Schema({"image": Field("uint8", (1000,), chunk_rows=8)})
    options = {"schema": schema, "buffer_bytes": "2MB", "cache_bytes": "16MB"}
    buffer = new_buffer(url, **options)
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(700_000))
    data = noise.integers(0, 256, (600, 1000), dtype=np.uint8)
    for row in data:
        buffer.append({"image": row})
    with pytest.raises(StorageError, match="No space left"):
        buffer.flush()
    batch = buffer.sample(64)
    assert np.array_equal(batch["image"][:, 0].numpy(), data[batch["index"][:, 2].numpy()])
    with pytest.raises(StorageError, match="No space left"):
        buffer.save_checkpoint("a", wait=True)
    ballast.unlink()
    with contextlib.suppress(StorageError):  # that nobody has seen yet
        buffer.flush()
    buffer.save_checkpoint("b", wait=True)
    crash(buffer)
    assert np.array_equal(trajstore.open(url).read_episode(0)["image"], data)
    with resumed(url, "b") as again:
        assert again.n_steps == 600


def test_a_store_that_is_deleted_under_a_buffer_is_missed(url: str) -> None:
    buffer = new_buffer(url)
    buffer.append(step(0, 0))
    buffer.flush()
    shutil.rmtree(url)
    buffer.append(step(0, 1))
    for _ in range(2):
        with pytest.raises(StorageError):
            buffer.flush()
        with pytest.raises(StorageError):
            buffer.save_checkpoint("a", wait=True)
    with pytest.raises(StorageError):
        buffer.close()
    buffer._release()
    with pytest.raises(StoreNotFoundError):
        trajstore.open(url)


# ---- threads --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("lock_order")
@pytest.mark.slow
@pytest.mark.parametrize("priorities", [None, Priorities(normalize="buffer")], ids=["uniform", "prioritised"])
def test_threads_append_sample_iterate_and_checkpoint_without_torn_rows(url: str, priorities: Any) -> None:
    options = {"capacity": 3000, "sample": Windows(length=3), "priorities": priorities, "commit_seconds": 0.02}
    buffer = new_buffer(url, buffer_bytes="512KB", **options)
    buffer.add_episode(episode(0, 10), env=20, terminated=True)
    is_over, failures = threading.Event(), list[BaseException]()
    threads = [
        threading.Thread(target=guarded, args=(act, buffer, is_over, failures))
        for act in (collect, draw, iterate, save, look)
    ]
    for thread in threads:
        thread.start()
    time.sleep(3)
    for _ in range(1200):
        if failures or buffer.stats()["writer"]["steps"] > 4000:
            break
        time.sleep(0.1)
    is_over.set()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures
    buffer.flush()
    assert len(buffer.checkpoints) == 2
    stats = buffer.stats()
    assert stats["writer"]["steps"] == stats["n_steps"] + stats["evicted"]["steps"]["steps"]
    assert stats["evicted"]["steps"]["steps"] > 0
    crash(buffer)
    with resumed(url) as again:
        check(again.sample(500))


def guarded(act: Any, buffer: ReplayBuffer, is_over: threading.Event, failures: list[BaseException]) -> None:
    try:
        act(buffer, is_over)
    except BaseException as error:
        failures.append(error)
        is_over.set()


def check(batch: dict[str, Any]) -> None:
    """Values say which environment and step they are of; windows do not mix them."""
    assert torch.equal(batch["obs"][..., 1], (batch["index"][:, 2:] + torch.arange(3)).float())
    assert torch.equal(batch["action"].float(), batch["obs"][..., 1])
    assert (batch["obs"][..., 0] == batch["obs"][:, :1, 0]).all()


def collect(buffer: ReplayBuffer, is_over: threading.Event) -> None:
    rng, t = np.random.default_rng(0), np.zeros(8, np.int64)
    while not is_over.is_set():
        obs = np.stack([np.arange(8), t, np.zeros(8)], 1).astype(np.float32)
        ends = rng.random(8) < 0.02
        buffer.append({"obs": obs, "action": t, "reward": t.astype(np.float32)}, envs=range(8), terminated=ends)
        t = np.where(ends, 0, t + 1)


def draw(buffer: ReplayBuffer, is_over: threading.Event) -> None:
    while not is_over.is_set():
        batch = buffer.sample(64)
        check(batch)
        if "priority" in batch:
            buffer.update_priorities(batch["index"], torch.rand(64))


def iterate(buffer: ReplayBuffer, is_over: threading.Event) -> None:
    with buffer.batches(32, prefetch=2) as batches:
        while not is_over.is_set():
            check(next(batches))


def save(buffer: ReplayBuffer, is_over: threading.Event) -> None:
    n = 0
    while not is_over.is_set() or n < 3:
        buffer.save_checkpoint(f"c{n}", keep_last=2, wait=n % 2 == 0)
        n += 1
        time.sleep(0.02)


def look(buffer: ReplayBuffer, is_over: threading.Event) -> None:
    while not is_over.is_set():
        assert buffer.n_steps <= 3000
        buffer.stats()
        buffer.refresh()
        time.sleep(0.005)


def test_a_checkpoint_is_one_moment_while_others_append(url: str) -> None:
    """Rows of one call are in it or not, all of them."""
    buffer, is_over, failures = new_buffer(url, capacity=500), threading.Event(), list[BaseException]()
    thread = threading.Thread(target=guarded, args=(collect, buffer, is_over, failures))
    thread.start()
    try:
        buffer.wait_ready(min_steps=100)
        for number in range(5):
            buffer.save_checkpoint(f"c{number}", wait=True)
    finally:
        is_over.set()
        thread.join(60)
    assert not failures
    crash(buffer)
    for number in range(5):
        with resumed(url, f"c{number}", capacity=None) as again:
            lengths = again.reader.assembler.index.lengths(again.reader.assembler.index.first)
            bases = again.reader.assembler.index.t_base.host[
                again.reader.assembler.index.first : again.reader.assembler.index.n
            ]
            assert (lengths > 0).all()
            assert len(lengths) == len(bases)
            check(again.sample(64, Windows(length=3, boundary="strict")))


def test_a_look_at_the_store_that_others_overtook_takes_nothing_back(url: str, monkeypatch: Any) -> None:
    """Chunks that were committed since it began are not taken for ones that there is no need to read."""
    buffer = new_buffer(url)
    fill(buffer, 0, 8)
    check(buffer.sample(8, Windows(length=3)))
    refresh = buffer.session.store.refresh

    def overtaken() -> None:
        refresh()
        fill(buffer, 8, 200)
        check(buffer.sample(8, Windows(length=3)))

    monkeypatch.setattr(buffer.session.store, "refresh", overtaken)
    buffer.refresh()
    for n in (1, 200):
        check(buffer.sample(n, Windows(length=3)))
    assert buffer.reader.assembler.snapshot.n_rows == buffer.n_steps == 200


def fill(buffer: ReplayBuffer, first: int, stop: int) -> None:
    for t in range(first, stop):
        buffer.append(step(0, t))
    buffer.flush()


def test_rows_that_nobody_looked_at_before_they_were_stored_are_not_taken_for_live_ones(memory: str) -> None:
    plan = BlockPuts()
    plan.gate.set()
    with through(FaultyStorage(real_storage(memory), plan)):
        buffer = new_buffer(memory)
    for t in range(3):
        for env in (0, 1):
            buffer.append(step(env, t), env=env)
    assert buffer.n_steps == 6  # looked at
    for t in range(3, 6):
        buffer.append(step(0, t), env=0)
    buffer.session.writer.commit()
    for t in range(6, 9):
        buffer.append(step(0, t), env=0)
    plan.gate.clear()
    with buffer.session.writer._lock:
        buffer.session.writer._pipeline.hand_off()  # on their way, and stuck there
    batch = buffer.sample(400)
    assert torch.equal(batch["obs"][:, 0, :2], batch["index"][:, 1:].float())
    assert torch.equal(batch["action"][:, 0], batch["index"][:, 2])
    plan.gate.set()
    buffer.close()


class SlowPuts(BlockPuts):
    """Puts take a while."""

    def before(self, call: Any) -> None:
        if call.action == "put":
            time.sleep(0.002)


def test_a_slow_storage_does_not_change_the_batches(memory: str) -> None:
    runs = []
    for plan in (None, SlowPuts()):
        with through(FaultyStorage(real_storage(f"{memory}-{plan is None}"), plan)):
            buffer = new_buffer(memory, capacity=150, commit_steps=20, priorities=Priorities(), seed=4)
        drawn = []
        for number in range(30):
            buffer.add_episode(episode(number, 10), terminated=True)
            drawn.append(buffer.sample(8))
            buffer.update_priorities(drawn[-1]["index"], drawn[-1]["reward"][:, 0] + 0.5)
            if number % 10 == 9:
                buffer.save_checkpoint("a")
        runs.append(drawn)
        buffer.close()
    for a, b in zip(*runs, strict=True):
        assert_same(a, b)


def test_a_checkpoint_holds_also_what_there_was_no_room_to_show_before_it_was_committed(memory: str) -> None:
    # Many short episodes at once: each takes a page of live rows, of which there are not so many.
    ends = np.ones((10, 1000), bool)
    block = {"obs": np.zeros((10, 1000, 3), np.float32), "action": np.zeros((10, 1000), np.int64)}
    block["reward"] = np.ones((10, 1000), np.float32)
    with new_buffer(memory, buffer_bytes="4MiB", cache_bytes="32MiB", commit_seconds=None) as buffer:
        buffer.extend(block, terminated=ends)
        buffer.save_checkpoint("a", wait=True)
        assert buffer.n_steps == 10_000
    with resumed(memory) as again:
        assert again.n_steps == again.n_episodes == 10_000
