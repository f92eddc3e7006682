"""Columns that are written back: values by step, in batches, in the store and in checkpoints."""

from __future__ import annotations

import uuid
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import trajstore
from trajstore import DataError, Field, Priorities, ReplayBuffer, Schema, Windows

SCHEMA = Schema({"obs": Field("float32", (2,), final=True, chunk_rows=8), "reward": Field("float32", chunk_rows=8)})


def new_buffer(**options: Any) -> ReplayBuffer:
    kwargs = {"schema": SCHEMA, "buffer_bytes": "64KB", "cache_bytes": "8MB", "commit_seconds": None} | options
    return ReplayBuffer(f"memory://derived-{uuid.uuid4().hex}", **kwargs)


def fill(buffer: ReplayBuffer, n_steps: int, env: int = 0, ended: bool = True) -> None:
    for t in range(n_steps):
        buffer.append({"obs": np.array([env, t], np.float32), "reward": float(t)}, env=env)
    if ended:
        buffer.end_episode(env, terminated=True)


def expected(index: torch.Tensor) -> torch.Tensor:
    """What these tests write for a step."""
    return (100 * index[:, 1] + index[:, 2]).float()


def write(buffer: ReplayBuffer) -> None:
    for block in buffer.read_all_in_order(block_steps=7):
        buffer.write_column("advantage", block["index"], expected(block["index"]))


def check(buffer: ReplayBuffer, n: int = 64) -> None:
    batch = buffer.sample(n, Windows(length=3, boundary="pad_right"))
    index, valid = batch["index"], batch["valid"]
    wanted = expected(index)[:, None] + torch.arange(3)
    assert torch.equal(batch["advantage"][valid], wanted[valid])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 30), st.booleans(), st.booleans()), min_size=1, max_size=8
    ),
    st.booleans(),
)
def test_written_values_come_with_their_steps_wherever_these_are(script: list[Any], prioritised: bool) -> None:
    with new_buffer(priorities=Priorities() if prioritised else None) as buffer:
        buffer.append({"obs": np.zeros(2, np.float32), "reward": 0.0}, env=9)
        buffer.add_column("advantage", Field("float32"), fill=-1.0)
        for env, n, ended, committed in script:
            fill(buffer, n, env, ended)
            if committed:
                buffer.flush()
            write(buffer)
            check(buffer)


def test_new_steps_have_the_fill_value_until_they_are_written() -> None:
    with new_buffer() as buffer:
        fill(buffer, 5)
        buffer.add_column("advantage", Field("float32"), fill=-1.0)
        assert (buffer.sample(20)["advantage"] == -1).all()
        write(buffer)
        fill(buffer, 5, env=1)
        batch = buffer.sample(200)
        new = batch["index"][:, 1] == 1
        assert (batch["advantage"][new] == -1).all()
        assert torch.equal(batch["advantage"][~new, 0], expected(batch["index"][~new]))


def test_all_steps_are_read_and_written_in_one_order() -> None:
    with new_buffer() as buffer:
        fill(buffer, 5)
        fill(buffer, 4, env=1, ended=False)
        buffer.add_column("latent", Field("float32", (3,)))
        blocks = list(buffer.read_all_in_order(block_steps=4))
        assert [len(block["index"]) for block in blocks] == [4, 4, 1]
        values = torch.cat([expected(block["index"]) for block in blocks])[:, None].expand(-1, 3).contiguous()
        buffer.write_all("latent", values)
        again = torch.cat([block["latent"] for block in buffer.read_all_in_order()])
        assert torch.equal(again, values)
        buffer.write_all("latent", iter(values.split(4)))
        with pytest.raises(DataError, match="expected the values of 9 steps, got 8"):
            buffer.write_all("latent", values[:8])
        with pytest.raises(DataError, match="expected the values of 9 steps, got more"):
            buffer.write_all("latent", torch.zeros(10, 3))


def test_values_follow_evictions() -> None:
    with new_buffer(capacity=20) as buffer:
        fill(buffer, 15)
        buffer.add_column("advantage", Field("float32"))
        for env in range(1, 8):
            fill(buffer, 11, env)
            write(buffer)
            check(buffer)
        assert buffer.n_steps == 20
        late = torch.tensor([[buffer.streams.index(buffer.stream), 0, 3]])
        assert buffer.write_column("advantage", late, torch.zeros(1)) == 1


def test_flushed_values_are_found_by_whoever_opens_the_store() -> None:
    buffer = new_buffer()
    fill(buffer, 12)
    buffer.add_column("advantage", Field("float32"), fill=-1.0)
    write(buffer)
    buffer.flush()
    fill(buffer, 3, env=1)
    buffer.close()
    (first, values) = trajstore.open(buffer.url).snapshot.column("advantage")[buffer.stream]
    assert (first, values.tolist()) == (0, [*map(float, range(12)), -1.0, -1.0, -1.0])
    with ReplayBuffer(buffer.url, buffer_bytes="64KB", cache_bytes="8MB") as again:
        again.add_column("advantage", Field("float32"), fill=-1.0)
        batch = again.sample(100)
        known = batch["index"][:, 1] == 0
        assert torch.equal(batch["advantage"][known, 0], batch["index"][known, 2].float())
        assert (batch["advantage"][~known] == -1).all()


@pytest.mark.parametrize("priorities", [None, Priorities()])
def test_checkpoints_hold_the_columns(priorities: Priorities | None) -> None:
    buffer = new_buffer(priorities=priorities, seed=5)
    fill(buffer, 12)
    buffer.add_column("advantage", Field("float32"), fill=-1.0)
    write(buffer)
    buffer.save_checkpoint("a", wait=True)
    wanted = [buffer.sample(16) for _ in range(3)]
    buffer.write_column("advantage", wanted[0]["index"], torch.zeros(16))
    buffer.close()
    with ReplayBuffer.resume(buffer.url) as again:
        for batch in wanted:
            assert torch.equal(again.sample(16)["advantage"], batch["advantage"])
        fill(again, 3, env=1)
        write(again)
        check(again)


def test_prefetched_batches_hold_the_columns() -> None:
    with new_buffer() as buffer:
        fill(buffer, 12)
        buffer.add_column("advantage", Field("float32"))
        write(buffer)
        with buffer.batches(16, Windows(length=2), prefetch=2) as batches:
            for batch, _ in zip(batches, range(5), strict=False):
                assert torch.equal(batch["advantage"], expected(batch["index"])[:, None] + torch.arange(2))


def test_bad_input_changes_nothing() -> None:
    with new_buffer() as buffer:
        fill(buffer, 5)
        for name in ("obs", "index", "next", "no/name", ""):
            with pytest.raises(DataError, match="expected a plain name"):
                buffer.add_column(name, Field("float32"))
        buffer.add_column("advantage", Field("float32"), fill=1.0)
        with pytest.raises(DataError, match=r"column 'advantage' exists with float32 .* fill 1.0; got .* fill 0"):
            buffer.add_column("advantage", Field("float32"))
        index = buffer.sample(4)["index"]
        with pytest.raises(DataError, match=r"expected float32 of shape \(4,\) or \(4, 'length'\), got float64"):
            buffer.write_column("advantage", index, torch.zeros(4, dtype=torch.float64))
        with pytest.raises(DataError, match="expected int64 of shape"):
            buffer.write_column("advantage", index[:, :2], torch.zeros(4))
        with pytest.raises(DataError, match="no column 'nope'; existing columns: advantage"):
            buffer.write_column("nope", index, torch.zeros(4))
        index[1, 1] = 77
        with pytest.raises(DataError, match="this reader has no such step"):
            buffer.write_column("advantage", index, torch.zeros(4))
        assert (buffer.sample(16)["advantage"] == 1).all()


def test_windows_may_be_written_whole() -> None:
    with new_buffer() as buffer:
        fill(buffer, 9)
        buffer.add_column("advantage", Field("float32"))
        spec = Windows(length=3, boundary="pad_right")
        index = torch.tensor([[buffer.streams.index(buffer.stream), 0, t] for t in (0, 3, 8)])
        buffer.write_column("advantage", index, torch.tensor([[0.0, 1, 2], [3, 4, 5], [8, 99, 99]]))
        block = next(buffer.read_all_in_order())
        assert block["advantage"].tolist() == [0, 1, 2, 3, 4, 5, 0, 0, 8]
        assert buffer.at(index[:1], spec)["advantage"].tolist() == [[0, 1, 2]]
