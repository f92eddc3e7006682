"""Derived columns and priorities over random sequences of appends, evictions, checkpoints, resumes and flushes."""

from __future__ import annotations

import random
import uuid
from typing import Any

import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

import trajstore
from trajstore import EpisodeKey, Field, NotReadyError, Priorities, Reader, ReplayBuffer, Retention, Schema, Windows

SCHEMA = Schema({"number": Field("int64", (), chunk_rows=8)})
ADVANTAGE = Field("float32", ())
BY_STEP = Windows(squeeze=True)


@pytest.fixture
def memory() -> str:
    return f"memory://columns-{uuid.uuid4().hex}"


class Run:
    """A buffer whose steps are numbered, and the value of each step that it should have."""

    def __init__(self, url: str, seed: int) -> None:
        self.url, self.random = url, random.Random(seed)
        self.n_steps = self.n_checkpoints = 0
        self.values: dict[int, float] = {}  # by step number; steps that were never written are not in it
        self.saved: dict[str, dict[int, float]] = {}
        capacity = self.random.choice([None, 30, Retention(episodes=3)])
        self.buffer = ReplayBuffer(
            url,
            schema=SCHEMA,
            capacity=capacity,
            priorities=Priorities() if self.random.random() < 0.5 else None,
            commit_seconds=None,
            commit_steps=self.random.choice([None, 7]),
            buffer_bytes="64KB",
            cache_bytes="8MB",
            grace_s=0.0,
            seed=seed,
        )
        self.buffer.add_column("advantage", ADVANTAGE)

    def append(self) -> None:
        env, n = self.random.randrange(3), self.random.choice([1, 5, 20])
        for k in range(n):
            ends = k == n - 1 and self.random.random() < 0.5
            self.buffer.append({"number": np.int64(self.n_steps)}, env=env, truncated=ends)
            self.n_steps += 1

    def abort(self) -> None:
        for env in self.buffer.session.writer._open_episodes.open_envs()[:1]:
            self.buffer.abort_episode(env)

    def evict(self) -> None:
        self.buffer.evict(self.random.randint(1, 3))

    def clear(self) -> None:
        self.buffer.clear()

    def write(self) -> None:
        try:
            batch = self.buffer.sample(8, BY_STEP)
        except NotReadyError:
            return
        numbers = batch["number"].tolist()
        given = {number: self.random.random() for number in numbers}
        values = torch.tensor([given[number] for number in numbers])
        assert self.buffer.write_column("advantage", batch["index"], values) == 0
        self.values |= dict(zip(numbers, values.tolist(), strict=True))
        if self.buffer.session.options.priorities is not None:
            self.buffer.update_priorities(batch["index"], values + 0.1)

    def checkpoint(self) -> None:
        name = f"c{self.n_checkpoints}"
        self.n_checkpoints += 1
        self.buffer.save_checkpoint(name, wait=True)
        self.saved[name] = dict(self.values)

    def resume(self) -> None:
        if self.saved:
            name = self.random.choice(list(self.saved)[-3:])
            self.buffer.close()
            self.buffer = ReplayBuffer.resume(self.url, name)
            self.values = dict(self.saved[name])

    def flush(self) -> None:
        self.buffer.flush()
        self.buffer.n_windows()  # shows what the flush committed
        stored = self._columns(Reader(self.buffer.reader.snapshot))
        for number, value in self._columns(self.buffer.reader).items():
            assert stored[number] == value

    def check(self) -> None:
        """The values of all steps are those that were written last."""
        for number, value in self._columns(self.buffer.reader).items():
            assert value == self.values.get(number, 0.0)

    def _columns(self, reader: Reader) -> dict[int, float]:
        if "advantage" not in reader.column_names:
            reader.add_column("advantage", ADVANTAGE)
        try:
            blocks = list(reader.read_all_in_order())
        except NotReadyError:
            return {}
        numbers = torch.cat([block["number"] for block in blocks]).tolist()
        values = torch.cat([block["advantage"] for block in blocks])
        assert np.array_equal(reader.column("advantage"), values.numpy())
        return dict(zip(numbers, values.tolist(), strict=True))


@pytest.mark.parametrize("seed", [*range(10), 18, 23])
def test_every_step_keeps_its_value_whatever_happens_to_the_others(memory: str, seed: int) -> None:
    run = Run(memory, seed)
    acts: list[Any] = [run.append] * 4 + [run.write] * 3 + [run.flush] * 2 + [run.checkpoint, run.resume, run.evict]
    acts += [run.abort, run.clear]
    try:
        for _ in range(40):
            run.random.choice(acts)()
            run.check()
    finally:
        run.buffer._release()


@pytest.mark.parametrize("prioritised", [False, True])
@pytest.mark.parametrize("how", ["clear", "abort"])
def test_values_of_steps_that_are_all_gone_are_not_saved(memory: str, how: str, prioritised: bool) -> None:
    """A flush used to raise IndexError: the steps were gone, but their values were still to be saved."""
    options: Any = {"commit_seconds": None, "priorities": Priorities() if prioritised else None}
    with ReplayBuffer(memory, schema=SCHEMA, **options) as buffer:
        buffer.add_column("advantage", ADVANTAGE)
        for number in range(5):
            buffer.append({"number": np.int64(number)})
        assert buffer.n_steps == 5
        buffer.write_all("advantage", torch.ones(5))
        buffer.clear() if how == "clear" else buffer.abort_episode()
        buffer.flush()
        buffer.save_checkpoint("gone", wait=True)
    with ReplayBuffer.resume(memory, "gone") as buffer:
        buffer.flush()
        assert buffer.n_steps == 0
        buffer.append({"number": np.int64(9)})
        assert buffer.n_steps == 1
        assert buffer.reader.column("advantage").tolist() == [0.0]
        buffer.flush()


def test_a_resumed_session_saves_only_values_of_its_steps(memory: str) -> None:
    """Addresses between episodes that were given to evicted ones belong to no step."""
    with ReplayBuffer(memory, schema=SCHEMA, commit_seconds=None) as buffer:
        buffer.add_column("advantage", ADVANTAGE)
        for number in range(12):
            buffer.append({"number": np.int64(number)}, truncated=number % 3 == 2)
        assert buffer.n_steps == 12
        buffer.write_all("advantage", torch.arange(1.0, 13.0))
        buffer.evict(keys=[EpisodeKey(buffer.stream, 0), EpisodeKey(buffer.stream, 2)])
        buffer.save_checkpoint("gaps", wait=True)
    with ReplayBuffer.resume(memory, "gaps") as buffer:
        changes = buffer.reader._steps.take_changes("advantage")
        assert [rows.tolist() for rows, _ in changes.values()] == [[3, 4, 5, 9, 10, 11]]
        assert buffer.reader.column("advantage").tolist() == [4.0, 5.0, 6.0, 10.0, 11.0, 12.0]


def test_steps_that_were_evicted_before_priorities_were_stored_do_not_get_the_priority_0(memory: str) -> None:
    """Others still show them, because the open episode is stored before them; a reader can draw them."""
    options: Any = {"commit_seconds": None, "priorities": Priorities(), "capacity": Retention(episodes=2)}
    with ReplayBuffer(memory, schema=SCHEMA, **options) as buffer:
        for number in range(40):
            buffer.append({"number": np.int64(number)})
        buffer.flush()
        for number in (100, 200, 300, 400):
            buffer.add_episode({"number": np.arange(3) + number}, env=1, truncated=True)
            assert buffer.n_episodes <= 3
        buffer.flush()
        stored = trajstore.open(memory).snapshot
        assert len(stored.episodes) == 5
        for i in range(5):
            assert (stored.read_episode(i, columns=["priority"])["priority"] == 1.0).all()


def test_a_session_that_joins_keeps_stored_priorities_of_steps_that_only_it_evicts(memory: str) -> None:
    options: Any = {"commit_seconds": None, "priorities": Priorities()}
    writer = ReplayBuffer(memory, schema=SCHEMA, **options)
    for number in range(4):
        writer.append({"number": np.int64(number)})
    for number in (100, 200, 300):
        writer.add_episode({"number": np.arange(3) + number}, env=1, truncated=True)
    batch = writer.sample(256, BY_STEP)
    writer.update_priorities(batch["index"], batch["number"] + 1.0)
    assert sorted(writer.priorities()) == [1, 2, 3, 4, 101, 102, 103, 201, 202, 203, 301, 302, 303]
    writer.flush()
    with ReplayBuffer(memory, exist="join", capacity=Retention(episodes=2), **options) as joined:
        assert joined.n_episodes == 2
        joined.flush()
        stored = trajstore.open(memory).snapshot
        for i in range(len(stored.episodes)):
            steps = stored.read_episode(i, columns=["priority"])
            assert steps["priority"].tolist() == (steps["number"] + 1).tolist()
        assert len(stored.episodes) == 4
    writer._release()


def test_stored_priorities_of_a_stream_without_steps_may_be_deleted_at_any_moment(memory: str) -> None:
    """A sample used to raise MissingChunkError, if the collector was faster."""
    options: Any = {"commit_seconds": None, "priorities": Priorities(), "capacity": 7, "grace_s": 3600.0}
    with ReplayBuffer(memory, schema=SCHEMA, **options) as first:
        first.add_episode({"number": np.arange(4)}, truncated=True)
    with ReplayBuffer(memory, exist="join", **options) as second:
        second.add_episode({"number": np.arange(100)}, truncated=True)
        assert second.n_steps == 7
    with ReplayBuffer(memory, exist="join", **options) as third:
        objects = MemoryFileSystem.store
        columns = [key for key in objects if f"/streams/{first.stream}/columns/" in key and key.endswith("/c.0")]
        assert columns
        for key in columns:
            del objects[key]
        assert third.sample(4, BY_STEP)["number"].min() >= 93
