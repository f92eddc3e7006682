"""Batches that are made in one compiled call, by one thread or by several."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from trajstore import Priorities, ReplayBuffer, Ring, Windows
from trajstore.sampling.batches.batch_assembler import BatchAssembler
from trajstore.sampling.batches.compiled_executor import CompiledExecutor
from trajstore.sampling.batches.outputs import flat_outputs
from trajstore.sampling.compiled.torch_threads import TorchThreads

pytest.importorskip("numba")

KINDS = {
    "windows": (Windows(8), 600),
    "transitions": (Windows.transitions(), 2000),
    "n-step": (Windows.transitions(n_step=5), 2000),
    "a drawn n": (Windows.transitions(n_step=(1, 4)), 2000),
    "padding": (Windows(8, burn_in=3, bootstrap=2, boundary="pad_both", pad="zero"), 600),
    "stacks": (Windows(4, offsets={"observation": (-2, 0, 1)}, next_fields=["observation"]), 300),
}


def episode(n: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "observation": rng.random((n + 1, 64)).astype(np.float32),
        "action": rng.integers(0, 9, (n, 3)).astype(np.int16),
        "reward": rng.random(n).astype(np.float32),
    }


@pytest.fixture
def buffer() -> Iterator[ReplayBuffer]:
    """A buffer whose steps are all resident."""
    with ReplayBuffer(f"memory://{uuid.uuid4().hex}", priorities=Priorities(), commit_seconds=None) as made:
        for i in range(20):
            made.add_episode(episode(3 + 7 * i, i), terminated=i % 2 == 0)
        made.flush()
        for _ in range(5):
            made.sample(100, Windows(2, boundary="pad_both"), prioritised=False)
        yield made


@pytest.fixture
def n_threads() -> Iterator[None]:
    """Restores the number of torch's threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    one, other = flat_outputs(a), flat_outputs(b)
    assert list(one) == list(other)
    for key, value in one.items():
        assert value.dtype == other[key].dtype
        assert value.numpy().tobytes() == other[key].numpy().tobytes(), key


@pytest.mark.parametrize("kind", KINDS)
def test_several_threads_copy_the_same_batch(buffer: ReplayBuffer, n_threads: None, kind: str) -> None:
    windows, n = KINDS[kind]
    rng = buffer.reader.rng
    torch.set_num_threads(4)
    executor = buffer.reader.assembler.kind(windows).executor
    assert isinstance(executor, CompiledExecutor)
    for _ in range(10):  # threads that shared memory by mistake would not do so each time
        counter = rng.counter
        torch.set_num_threads(1)
        expected = buffer.sample(n, windows, prioritised=False)
        rng.counter = counter
        torch.set_num_threads(4)
        assert_same(buffer.sample(n, windows, prioritised=False), expected)
    if TorchThreads().n > 1:  # torch was built with GNU OpenMP
        assert executor._n_threads(n) > 1


@pytest.mark.parametrize("prioritised", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resident_batch_is_made_without_a_plan(
    buffer: ReplayBuffer, monkeypatch: pytest.MonkeyPatch, kind: str, prioritised: bool
) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("a batch was planned")

    monkeypatch.setattr(BatchAssembler, "read_batch", fail)
    monkeypatch.setattr(CompiledExecutor, "plan", fail)
    windows, n = KINDS[kind]
    if prioritised and windows.boundary == "pad_both":
        pytest.skip("a window that starts before its episode has no step whose priority it could have")
    batch = buffer.sample(n, windows, prioritised=prioritised)
    buffer.sample(n, windows, prioritised=prioritised, out=batch)
    buffer.at(batch, windows) if windows.boundary == "strict" else None
    next(buffer.batches(n, windows, prioritised=prioritised))
    next(buffer.epoch(n, windows))


def test_outputs_are_written_in_place_and_checked(buffer: ReplayBuffer) -> None:
    windows = Windows.transitions(n_step=2)
    batch = buffer.sample(50, windows, prioritised=False)
    addresses = {key: value.data_ptr() for key, value in flat_outputs(batch).items()}
    again = buffer.sample(50, windows, prioritised=False, out=batch)
    assert {key: value.data_ptr() for key, value in flat_outputs(again).items()} == addresses
    with pytest.raises(ValueError, match=r"out 'observation': expected torch.float32 of shape \(49, 64\), got"):
        buffer.sample(49, windows, prioritised=False, out=batch)
    ring = Ring(2)
    first, second, third = (buffer.sample(50, windows, prioritised=False, out=ring) for _ in range(3))
    assert first["observation"].data_ptr() == third["observation"].data_ptr() != second["observation"].data_ptr()


def test_an_output_of_another_size_leaves_the_draws_as_they_are(buffer: ReplayBuffer) -> None:
    windows, counter = Windows(2), buffer.reader.rng.counter
    wrong = {"observation": torch.zeros(3)}
    with pytest.raises(ValueError, match="out 'observation'"):
        buffer.sample(8, windows, prioritised=False, out=wrong)
    assert buffer.reader.rng.counter == counter


def test_a_forked_process_copies_with_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = TorchThreads()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert threads.n == 1


def test_batches_follow_rows_that_are_appended_between_them(buffer: ReplayBuffer) -> None:
    windows = Windows.transitions()
    seen = set()
    for i in range(200):
        buffer.append({name: value[0] for name, value in episode(1, i).items()})
        batch = buffer.sample(64, windows, prioritised=False, recent_steps=3)
        seen |= {tuple(handle) for handle in batch["index"].tolist()}
    assert len(seen) > 150
