"""A buffer with a field that older sessions of its store did not have."""

from __future__ import annotations

from typing import Any

import numpy as np

import trajstore
from trajstore import Field, ReplayBuffer, Windows

OLD = {"obs": Field("float32", (2,), final=True, chunk_rows=8), "reward": Field("float32")}
NEW = {**OLD, "depth": Field("float32", (3,), fill=-1)}
PAIRS = Windows(2)


def steps(n: int, start: int = 0, **more: Any) -> dict[str, Any]:
    t = np.arange(start, start + n, dtype=np.float32)
    return {"obs": np.stack([t, t], axis=1), "reward": t, **more}


def new_steps() -> dict[str, Any]:
    return steps(8, 100, depth=np.arange(24, dtype=np.float32).reshape(8, 3))


def check_batch(batch: Any) -> None:
    """Every step of an old episode has the fill, every other one its own values."""
    t, depth = batch["reward"], batch["depth"]
    is_new = t >= 100
    assert is_new.any()
    assert not is_new.all()
    assert (depth[~is_new] == -1).all()
    assert (depth[is_new][:, 0] == 3 * (t[is_new] - 100)).all()


def start_old(place: Any) -> None:
    with ReplayBuffer(place.url, schema=OLD, seed=1, statistics=True, **place.kwargs) as buffer:
        buffer.add_episode(steps(8), terminated=True)
        buffer.save_checkpoint("before", wait=True)


def test_a_session_adds_a_field_and_samples_old_and_new_episodes(place: Any) -> None:
    start_old(place)
    with ReplayBuffer(place.url, schema=NEW, seed=1, exist="join", **place.kwargs) as buffer:
        buffer.add_episode(new_steps(), terminated=True)
        check_batch(buffer.sample(64, windows=PAIRS))  # from live rows
        buffer.flush()
        check_batch(buffer.sample(64, windows=PAIRS))
    with ReplayBuffer(place.url, seed=1, exist="join", **place.kwargs) as buffer:
        check_batch(buffer.sample(64, windows=PAIRS))


def test_a_checkpoint_of_before_is_resumed_with_an_added_field(place: Any) -> None:
    start_old(place)
    options: Any = {"schema": NEW, "seed": 1, "statistics": True, "exist": "resume", **place.kwargs}
    with ReplayBuffer(place.url, **options) as buffer:
        assert (buffer.sample(8, windows=PAIRS)["depth"] == -1).all()
        buffer.add_episode(new_steps(), terminated=True)
        buffer.flush()
        check_batch(buffer.sample(64, windows=PAIRS))
        counts = {path: int(np.max(of["count"])) for path, of in buffer.statistics().items()}
        assert counts["depth"] == 8
        assert counts["reward"] == 16
        buffer.save_checkpoint("after", wait=True)
    with ReplayBuffer.resume(place.url, "after", **place.kwargs) as buffer:
        check_batch(buffer.sample(64, windows=PAIRS))
    shown = trajstore.open(place.url, at="before", **place.kwargs)
    assert (shown.read_episode(0)["depth"] == -1).all()


def test_a_session_that_still_has_the_old_schema_runs_beside_one_with_the_new(place: Any) -> None:
    options: Any = {"seed": 1, "exist": "join", **place.kwargs}
    with ReplayBuffer(place.url, schema=OLD, **options) as old:
        old.add_episode(steps(8), terminated=True)
        old.flush()
        with ReplayBuffer(place.url, schema=NEW, **options) as new:
            new.add_episode(new_steps(), terminated=True)
            new.flush()
            old.add_episode(steps(8), terminated=True)
            old.flush()
            assert set(old.sample(16, windows=PAIRS)) & {"obs", "depth"} == {"obs"}
            check_batch(new.sample(64, windows=PAIRS))
    with ReplayBuffer(place.url, schema=OLD, **options) as again:
        batch = again.sample(64, windows=PAIRS)
        assert "depth" not in batch
        assert (batch["reward"] >= 100).any()
        again.add_episode(steps(3), terminated=True)
