"""Nearly on-policy use: each step so many times, policy versions, removal."""

from __future__ import annotations

import uuid
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trajstore import DataError, Field, NotReadyError, Priorities, ReplayBuffer, Schema, Windows

SCHEMA = Schema({"obs": Field("float32", (2,), chunk_rows=8), "reward": Field("float32", chunk_rows=8)})


def new_buffer(**options: Any) -> ReplayBuffer:
    kwargs = {"schema": SCHEMA, "buffer_bytes": "64KB", "cache_bytes": "8MB", "commit_seconds": None} | options
    return ReplayBuffer(f"memory://onpolicy-{uuid.uuid4().hex}", **kwargs)


def fill(buffer: ReplayBuffer, n_steps: int, env: int = 0, ended: bool = True) -> None:
    for t in range(n_steps):
        buffer.append({"obs": np.array([env, t], np.float32), "reward": float(t)}, env=env)
    if ended:
        buffer.end_episode(env, terminated=True)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 3), st.integers(1, 12), st.booleans(), st.floats(0, 1))
def test_each_window_is_drawn_at_most_so_often(max_uses: int, size: int, compiled: bool, alpha: float) -> None:
    with new_buffer(priorities=Priorities(alpha=alpha, max_uses=max_uses), compiled=compiled) as buffer:
        fill(buffer, 10)
        n_left, counts = 10 * max_uses, np.zeros(10, int)
        while n_left >= size:
            index = buffer.sample(size)["index"]
            np.add.at(counts, index[:, 2].numpy(), 1)
            buffer.update_priorities(index, torch.rand(size) + 0.1)  # brings nothing back
            n_left -= size
        assert counts.max() <= max_uses
        before = counts.copy()
        with pytest.raises((NotReadyError, ValueError)):
            buffer.sample(n_left + 1)
        for _ in range(n_left):  # a batch that was refused has used nothing
            np.add.at(counts, buffer.sample(1)["index"][:, 2].numpy(), 1)
        assert (counts == max_uses).all()
        assert before.sum() + n_left == counts.sum()
        fill(buffer, 3, env=1)
        assert set(buffer.sample(3 * max_uses)["index"][:, 1].tolist()) == {1}


def test_used_up_steps_stay_so_after_resume_and_while_episodes_move() -> None:
    buffer = new_buffer(priorities=Priorities(alpha=0.0, max_uses=1))
    fill(buffer, 20, ended=False)
    seen = set(buffer.sample(12)["index"][:, 2].tolist())
    fill(buffer, 60, ended=False)  # the episode outgrows its place more than once
    buffer.flush()
    seen |= set(buffer.sample(30)["index"][:, 2].tolist())
    assert len(seen) == 42
    buffer.save_checkpoint("a", wait=True)
    buffer.close()
    with ReplayBuffer.resume(buffer.url) as again:
        rest = set(again.sample(38)["index"][:, 2].tolist())
        assert rest == set(range(80)) - seen


def test_a_buffer_whose_windows_are_all_used_up_says_what_to_do() -> None:
    with new_buffer(priorities=Priorities(alpha=0.0, max_uses=1)) as buffer:
        fill(buffer, 3)
        message = (
            r"max_uses=1: 4 windows requested, 3 draws are left; append more .*set_priorities\(max_uses=\.\.\.\)"
        )
        with pytest.raises(NotReadyError, match=message):
            buffer.sample(4)
        buffer.sample(3)
        message = r"max_uses=1: all 3 windows were drawn as often as allowed.*set_priorities\(max_uses=\.\.\.\)"
        with pytest.raises(NotReadyError, match=message):
            buffer.sample(1)
        buffer.set_priorities(max_uses=2)
        assert len(buffer.sample(3)["index"]) == 3


def test_windows_of_priority_0_are_named_as_the_reason() -> None:
    with new_buffer(priorities=Priorities()) as buffer:
        fill(buffer, 3)
        index = buffer.at(torch.tensor([[0, 0, t] for t in range(3)]))["index"]
        buffer.update_priorities(index, torch.zeros(3))
        with pytest.raises(DataError, match="all 3 windows that could be drawn have priority 0; set some above 0"):
            buffer.sample(1)


def test_max_uses_goes_with_plain_draws_only() -> None:
    for options in ({"uniform": 0.5}, {"stratified": True}, {"kind": "rank"}, {"over": "max"}):
        with pytest.raises(ValueError, match="max_uses goes with plain"):
            Priorities(max_uses=1, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_uses: expected a positive integer"):
        Priorities(max_uses=0)
    with new_buffer(priorities=Priorities(max_uses=1)) as buffer:
        fill(buffer, 5)
        with pytest.raises(ValueError, match="recent"):
            buffer.sample(2, recent_steps=3)


def test_batches_hold_the_version_of_the_policy_that_collected_each_step() -> None:
    with new_buffer(sample=Windows(length=2)) as buffer:
        fill(buffer, 4, ended=False)
        buffer.policy_version = 3
        fill(buffer, 4, ended=False)
        buffer.policy_version = 5
        fill(buffer, 4, env=1)
        block = next(buffer.read_all_in_order())
        versions = {
            (int(e), int(t)): int(v) for (_, e, t), v in zip(block["index"], block["policy_version"], strict=True)
        }
        assert versions == {(0, t): -1 if t < 4 else 3 for t in range(8)} | {(1, t): 5 for t in range(4)}
        assert buffer.sample(8)["policy_version"].shape == (8, 2)
        with pytest.raises(ValueError, match="expected at least 5, got 4"):
            buffer.policy_version = 4


def test_steps_of_older_policies_are_removed() -> None:
    with new_buffer(priorities=Priorities()) as buffer:
        buffer.policy_version = 1
        fill(buffer, 4, ended=False)
        fill(buffer, 3, env=1)
        buffer.policy_version = 2
        fill(buffer, 2, ended=False)
        buffer.flush()
        assert buffer.remove_below(2) == 7
        assert (buffer.n_steps, buffer.n_episodes) == (2, 1)
        batch = buffer.sample(20)
        assert set(batch["index"][:, 2].tolist()) == {4, 5}
        assert not batch["is_first"].any()
        assert buffer.stats()["evicted"]["removed"] == {"steps": 7, "episodes": 1}
        fill(buffer, 2)
        assert buffer.clear() == 4
        with pytest.raises(NotReadyError):
            buffer.sample(1)
        fill(buffer, 3, env=2)
        assert buffer.n_steps == 3


def test_versions_survive_a_resume() -> None:
    buffer = new_buffer()
    buffer.policy_version = 7
    fill(buffer, 3)
    buffer.save_checkpoint("a", wait=True)
    buffer.close()
    with ReplayBuffer.resume(buffer.url) as again:
        assert again.policy_version == 7
        assert (again.sample(5)["policy_version"] == 7).all()
        again.policy_version = 8
        fill(again, 2)
        assert again.remove_below(8) == 3
