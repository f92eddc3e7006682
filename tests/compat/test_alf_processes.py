"""ALF's `allow_multiprocess`: experience from other processes."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import weakref
from collections.abc import Callable
from multiprocessing.connection import Client
from typing import Any

import pytest
import torch

from trajstore import DataError, StorageError
from trajstore.compat.alf import ReplayBuffer, StepType

FIRST, MID, LAST = StepType
N_STEPS = 30
WAIT_S = 120.0
OPTIONS: dict[str, Any] = {"cache_bytes": "16MiB", "buffer_bytes": "256KiB"}
METHODS = [method for method in ("fork", "spawn") if method in multiprocessing.get_all_start_methods()]


def step(env: int, t: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    kind = FIRST if t % 10 == 0 else LAST if t % 10 == 9 else MID
    return {
        "step_type": torch.tensor([kind], dtype=torch.int32),
        "reward": torch.tensor([float(t)]),
        "discount": torch.tensor([float(kind != LAST)]),
        "observation": {"x": torch.tensor([[env, t]], dtype=dtype)},
    }


def add_steps(buffer: Any, env: int) -> None:
    for t in range(N_STEPS):
        buffer.add_batch(step(env, t), torch.tensor([env]))


def report(call: Callable[..., None], buffer: Any, answers: Any) -> None:
    try:
        call(buffer)
    except Exception as error:
        answers.put((type(error).__name__, str(error)))
    else:
        answers.put(("none", ""))


def add_other_fields(buffer: Any) -> None:
    buffer.add_batch({**step(0, 0), "more": torch.zeros(1)}, torch.tensor([0]))


def draw(buffer: Any) -> None:
    buffer.get_batch(2, 1)


def look(buffer: Any) -> None:
    assert buffer.total_size >= 0


def run(method: str, target: Callable[..., None], *args: Any) -> None:
    process = multiprocessing.get_context(method).Process(target=target, args=args)
    process.start()
    process.join(WAIT_S)
    assert process.exitcode == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("method", METHODS)
def test_processes_add_to_the_buffer_while_the_trainer_draws(method: str) -> None:
    with ReplayBuffer(None, 3, 100, allow_multiprocess=True, **OPTIONS) as buffer:
        add_steps(buffer, 0)
        context = multiprocessing.get_context(method)
        processes = [context.Process(target=add_steps, args=(buffer, env)) for env in (1, 2)]
        for process in processes:
            process.start()
        while any(process.is_alive() for process in processes):
            batch, _ = buffer.get_batch(16, 2)
            assert (batch["observation"]["x"][:, 0, 0] == batch["observation"]["x"][:, 1, 0]).all()
        for process in processes:
            process.join(WAIT_S)
            assert process.exitcode == 0
        assert buffer.get_current_position().tolist() == [N_STEPS] * 3
        everything, info = buffer.gather_all()
        assert info.valid.all()
        expected = [[[env, t] for t in range(N_STEPS)] for env in range(3)]
        assert everything["observation"]["x"].tolist() == expected


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.skipif("fork" not in METHODS, reason="needs fork")
@pytest.mark.parametrize(
    ("call", "kind", "says"),
    [
        (add_other_fields, "DataError", "more"),
        (draw, "ClosedError", "with allow_multiprocess=True, other processes may call add_batch, and nothing else"),
        (look, "ClosedError", "this replay buffer belongs to process"),
    ],
)
def test_mistakes_in_another_process_are_raised_there(call: Any, kind: str, says: str) -> None:
    answers = multiprocessing.get_context("fork").SimpleQueue()
    with ReplayBuffer(None, 1, 100, allow_multiprocess=True, **OPTIONS) as buffer:
        buffer.add_batch(step(0, 0), [0])
        run("fork", report, call, buffer, answers)
        found = answers.get()
        assert found[0] == kind
        assert says in found[1]
        assert buffer.total_size == 1


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.skipif("fork" not in METHODS, reason="needs fork")
def test_a_forked_process_is_told_how_to_add_if_the_buffer_is_not_for_several() -> None:
    answers = multiprocessing.get_context("fork").SimpleQueue()
    with ReplayBuffer(None, 1, 100, **OPTIONS) as buffer:
        buffer.add_batch(step(0, 0), [0])
        run("fork", report, add_other_fields, buffer, answers)
        kind, says = answers.get()
        assert (kind, "allow_multiprocess=True" in says) == ("ClosedError", True)
        with pytest.raises(TypeError, match="create it with allow_multiprocess=True"):
            copy.copy(buffer)


def test_what_was_sent_is_what_is_stored_and_a_closed_buffer_says_so() -> None:
    buffer = ReplayBuffer(None, 1, 100, allow_multiprocess=True, **OPTIONS)
    remote = copy.copy(buffer)
    remote.add_batch(step(0, 0, torch.bfloat16), [0])
    again = copy.copy(remote)
    again.add_batch(step(0, 1, torch.bfloat16))
    found = buffer.get_field("observation.x", torch.tensor([0, 0]), torch.tensor([0, 1]))
    assert found.dtype is torch.bfloat16
    assert found.tolist() == [[0, 0], [0, 1]]
    with pytest.raises(DataError, match="expected each environment once"):
        remote.add_batch(step(0, 2, torch.bfloat16), [0, 0])
    with pytest.raises(ValueError, match="blocking: expected False"):
        remote.add_batch(step(0, 2, torch.bfloat16), [0], blocking=True)
    buffer.close()
    buffer.close()
    for sender in (remote, copy.copy(again)):
        with pytest.raises(StorageError, match=r"closed it or ended; .* (were not|may not have been) added"):
            sender.add_batch(step(0, 2, torch.bfloat16), [0])


def test_a_process_without_the_key_is_refused_and_others_still_add(caplog: pytest.LogCaptureFixture) -> None:
    with ReplayBuffer(None, 1, 100, allow_multiprocess=True, **OPTIONS) as buffer:
        remote = copy.copy(buffer)
        with pytest.raises((multiprocessing.AuthenticationError, OSError, EOFError)):
            Client(remote.address, authkey=b"another key").recv()
        remote.add_batch(step(0, 0), [0])
        assert buffer.total_size == 1
    assert "without the key" in caplog.text


def test_an_open_link_keeps_no_buffer_alive() -> None:
    buffer = ReplayBuffer(None, 1, 100, allow_multiprocess=True, **OPTIONS)
    remote = copy.copy(buffer)
    remote.add_batch(step(0, 0), [0])
    gone = weakref.ref(buffer)
    del buffer
    gc.collect()
    assert gone() is None
    with pytest.raises(StorageError, match="closed it or ended"):
        remote.add_batch(step(0, 1), [0])
