"""Sizes of cache and buffer are settled together: combinations work, or the first append says what would."""

from __future__ import annotations

import re
import uuid
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trajstore import DataError, Field, Priorities, ReplayBuffer, Windows

FRAMES = (84, 84)


def new_buffer(cache_bytes: int | str, buffer_bytes: int | str, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(
        f"memory://{uuid.uuid4().hex}",
        **{"cache_bytes": cache_bytes, "buffer_bytes": buffer_bytes, "commit_seconds": None, "seed": 3} | options,
    )


def run(buffer: ReplayBuffer, shape: tuple[int, ...], n: int = 48) -> list[dict[str, torch.Tensor]]:
    """Append steps of four environments, and sample now and then; returns the batches."""
    batches = []
    for t in range(n):
        frames = np.full((4, *shape), t, np.uint8)
        buffer.append(
            {"observation": frames, "reward": np.full(4, float(t))}, envs=4, truncated=np.full(4, t % 9 == 8)
        )
        if t % 12 == 11:
            batch = buffer.sample(16)
            observation = batch["observation"].reshape(16, -1)[:, 0]
            assert torch.equal(observation, batch["reward"].reshape(16, -1)[:, 0].to(torch.uint8))
            batches.append(batch)
    return batches


@pytest.mark.parametrize("shape", [(4,), FRAMES])
@pytest.mark.parametrize("buffer_bytes", ["128KB", "1MB", "64MiB"])
@pytest.mark.parametrize("cache_bytes", ["10KB", "1MB", "64MB"])
def test_every_combination_gives_the_same_batches(
    cache_bytes: str, buffer_bytes: str, shape: tuple[int, ...]
) -> None:
    options = {"sample": Windows(length=3), "capacity": 120}
    with new_buffer("1GiB", "64MiB", **options) as large, new_buffer(cache_bytes, buffer_bytes, **options) as small:
        for expected, found in zip(run(large, shape), run(small, shape), strict=True):
            assert torch.equal(found["index"], expected["index"])
            assert torch.equal(found["observation"], expected["observation"])
        assert small.n_steps == large.n_steps


def test_a_small_cache_with_the_default_buffer_can_be_sampled() -> None:
    buffer = ReplayBuffer(f"memory://{uuid.uuid4().hex}", cache_bytes="64MB")
    run(buffer, (*FRAMES, 4), n=24)
    assert buffer.stats()["cache"]["cache_bytes"] <= 64_000_000
    buffer.close()


def test_a_small_cache_keeps_priorities_and_checkpoints() -> None:
    with new_buffer("100KB", "8MB", priorities=Priorities(alpha=1.0), sample=Windows()) as buffer:
        run(buffer, FRAMES, n=36)
        index = buffer.sample(16)["index"]
        buffer.update_priorities(index, torch.full((16,), 1e6))
        buffer.save_checkpoint("a", wait=True)
        expected = buffer.sample(32)["index"]
        url = buffer.url
    with ReplayBuffer.resume(url, "a") as again:
        assert torch.equal(again.sample(32)["index"], expected)


def test_long_runs_between_samples_do_not_overflow_a_small_cache() -> None:
    with new_buffer("50KB", "8MB", schema={"x": Field("float32", (64,))}) as buffer:
        for t in range(3000):
            buffer.append({"x": np.full((4, 64), t, np.float32)}, envs=4, truncated=np.full(4, t % 100 == 99))
        assert buffer.n_steps == 12_000
        assert buffer.sample(8)["x"].shape == (8, 1, 64)


def test_a_buffer_that_is_too_small_is_refused_with_the_first_step_and_the_size_that_works() -> None:
    fields = {"observation": Field("uint8", FRAMES, final=True)}
    for envs in (None, 4):
        lead = () if envs is None else (envs,)
        frames = {"observation": np.zeros((*lead, *FRAMES), np.uint8)}
        flags = True if envs is None else np.ones(envs, bool)
        with new_buffer("1MB", 1000, schema=fields) as buffer:
            with pytest.raises(DataError, match="raise buffer_bytes to at least") as caught:
                buffer.append(frames, envs=envs)
            found = re.search(r"at least (\d+)", str(caught.value))
        assert found is not None
        with new_buffer("1MB", int(found[1]), schema=fields) as buffer:
            buffer.append(frames, envs=envs)
            buffer.append(frames, envs=envs, truncated=flags, final=frames)  # the most rows that a call may need
            assert buffer.n_steps == 2 * (envs or 1)
        with (
            new_buffer("1MB", int(found[1]) - 1, schema=fields) as buffer,
            pytest.raises(DataError, match="at least"),
        ):
            buffer.append(frames, envs=envs)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    cache_bytes=st.integers(1, 1 << 20) | st.integers(1, 4000),
    buffer_bytes=st.integers(1, 1 << 20) | st.integers(1, 20_000),
    shape=st.sampled_from([(), (3,), (64,), (40, 40)]),
    n_fields=st.sampled_from([1, 2, 12]),
    n_envs=st.sampled_from([None, 1, 5]),
    has_final=st.booleans(),
)
def test_sizes_work_or_are_refused_with_the_first_step(
    cache_bytes: int,
    buffer_bytes: int,
    shape: tuple[int, ...],
    n_fields: int,
    n_envs: int | None,
    has_final: bool,
) -> None:
    names = [f"field{i}" for i in range(n_fields)]
    schema = {name: Field("float32", shape, final=has_final) for name in names}
    lead = () if n_envs is None else (n_envs,)

    def append(buffer: ReplayBuffer, t: int) -> None:
        values = {name: np.full((*lead, *shape), t, np.float32) for name in names}
        ends = np.full(lead, t % 7 == 6)
        final = values if has_final and t % 7 == 6 else None
        buffer.append(values, envs=n_envs, truncated=ends if lead else bool(ends), final=final)

    with new_buffer(cache_bytes, buffer_bytes, schema=schema) as buffer:
        try:
            append(buffer, 0)
        except DataError as error:
            assert "raise buffer_bytes to at least" in str(error)  # noqa: PT017
            return
        for t in range(1, 60):
            append(buffer, t)
            if t % 20 == 10:
                sampled(buffer, names)
        buffer.flush()
        sampled(buffer, names)
        append(buffer, 60)
        sampled(buffer, names)
        assert buffer.n_steps == 61 * (n_envs or 1)


def sampled(buffer: ReplayBuffer, names: list[str]) -> None:
    """Draw windows of two steps, and check that each field holds the time of its step."""
    batch = buffer.sample(16, Windows(length=2))
    first = batch[names[0]].reshape(16, 2, -1)[..., 0]
    assert torch.equal(first[:, 0] + 1, first[:, 1])
    for name in names:
        values = batch[name].reshape(16, 2, -1)
        assert torch.equal(values, first[..., None].expand_as(values))
