"""Storage is freed when checkpoints are pruned, and a report says what holds how many bytes, and why."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.replay.test_buffer import crash
from tests.support.files import bytes_of
from trajstore import CheckpointNotFoundError, Field, ReplayBuffer, Schema

SOON_S = 120.0
SCHEMA = Schema({"x": Field("uint8", (1000,), chunk_rows=4)})
OPTIONS: dict[str, Any] = {
    "schema": SCHEMA,
    "buffer_bytes": "1MB",
    "cache_bytes": "16MB",
    "commit_seconds": None,
    "fsync": False,
    "grace_s": 0.0,
}


def noise(n: int) -> dict[str, Any]:
    return {"x": np.random.default_rng(n).integers(0, 256, (n, 1000), np.uint8)}


def step_bytes(url: str) -> int:
    return bytes_of(Path(url, "streams").rglob("steps/x/c.*"))


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def fill(buffer: ReplayBuffer, n_episodes: int, n: int = 20) -> None:
    for _ in range(n_episodes):
        buffer.add_episode(noise(n), terminated=True)
    buffer.flush()


@pytest.fixture
def pinned(url: str) -> Any:
    """A buffer whose first 100 steps are evicted, and kept by two checkpoints."""
    with ReplayBuffer(url, capacity=60, **OPTIONS) as buffer:
        fill(buffer, 2)
        buffer.save_checkpoint("old", wait=True)
        fill(buffer, 4)
        buffer.save_checkpoint("new", wait=True)
        fill(buffer, 4)
        assert buffer.n_steps <= 60
        buffer.session.collector.flush()
        yield buffer


def test_pruning_frees_the_rows_of_a_checkpoint_without_a_later_eviction(url: str, pinned: ReplayBuffer) -> None:
    before = step_bytes(url)
    assert before > 190_000
    assert len(pinned.prune_checkpoints(1)) == 1
    wait_until(lambda: step_bytes(url) < before - 50_000)


def test_a_checkpoint_that_replaces_older_ones_frees_their_rows(url: str, pinned: ReplayBuffer) -> None:
    assert step_bytes(url) > 190_000
    pinned.save_checkpoint("newest", wait=True, keep_last=1)
    wait_until(lambda: step_bytes(url) < 70_000)


def test_a_session_that_joined_is_refused_with_the_reason_or_prunes_all(url: str, caplog: Any) -> None:
    with ReplayBuffer(url, **OPTIONS) as buffer:
        assert buffer.prune_checkpoints(1) == []  # the store has none
        fill(buffer, 1)
        ids = [buffer.save_checkpoint(name, wait=True) for name in ("a", "b", "c")]
    with ReplayBuffer(url, **OPTIONS) as joined:
        with pytest.raises(
            CheckpointNotFoundError, match=f"none of the 3 checkpoints .*{ids[-1]}.*all_sessions=True"
        ):
            joined.prune_checkpoints(1)
        own = joined.save_checkpoint("own", wait=True)
        assert joined.prune_checkpoints(1) == []
        assert "of the 4 checkpoints" in caplog.text
        assert joined.prune_checkpoints(2, all_sessions=True) == ids[:2]
        assert [c.id for c in joined.checkpoints] == [ids[2], own]


def test_a_report_counts_every_byte_once_and_names_the_checkpoint_that_holds_it(
    url: str, pinned: ReplayBuffer
) -> None:
    report = pinned.storage_report()
    assert report.total == sum(file.stat().st_size for file in Path(url).rglob("*") if file.is_file())
    old, new = (c.id for c in pinned.checkpoints)
    assert list(report.checkpoints) == [old, new]
    kept = report.steps + sum(report.checkpoints.values()) + report.evicted
    assert kept == step_bytes(url)
    assert 55_000 < report.steps < 68_000
    assert report.steps == pytest.approx(pinned.stats()["storage"]["step_bytes"], abs=5_000)
    assert report.evicted < 5_000
    assert f"bytes  steps kept only for checkpoint '{old}'" in str(report)
    pinned.prune_checkpoints(1)
    freed = report.checkpoints[old]
    wait_until(lambda: step_bytes(url) <= kept - freed)
    assert pinned.storage_report().checkpoints == {new: report.checkpoints[new]}


def test_evicted_steps_count_as_such_until_they_are_deleted(url: str) -> None:
    with ReplayBuffer(url, **OPTIONS | {"grace_s": 3600.0}) as buffer:
        fill(buffer, 5)
        assert buffer.storage_report().evicted == 0
        buffer.evict(n_episodes=3)
        report = buffer.storage_report()
        assert (report.steps, report.evicted) == pytest.approx((40_000, 60_000), abs=1_000)


def test_rows_of_a_dead_lineage_count_as_abandoned(url: str) -> None:
    buffer = ReplayBuffer(url, **OPTIONS)
    fill(buffer, 1)
    buffer.save_checkpoint("a", wait=True)
    fill(buffer, 2)
    crash(buffer)
    with ReplayBuffer.resume(url, "a", fsync=False) as resumed:
        fill(resumed, 1)
        report = resumed.storage_report()
        assert report.abandoned == {buffer.stream: pytest.approx(40_000, abs=1_000)}
        assert report.steps == pytest.approx(40_000, abs=1_000)
    with ReplayBuffer(url, **OPTIONS) as joined:
        assert joined.storage_report().abandoned == {}
        assert joined.stats()["storage"]["step_bytes"] is None


def test_what_a_session_had_no_time_to_delete_is_freed_by_the_next_one(url: str) -> None:
    with ReplayBuffer(url, capacity=60, **OPTIONS | {"grace_s": 3600.0}) as buffer:
        fill(buffer, 2)
        buffer.save_checkpoint("old", wait=True)
        fill(buffer, 8)
        newest = buffer.save_checkpoint("new", wait=True, keep_last=1)
    assert step_bytes(url) > 190_000
    with ReplayBuffer.resume(url, newest, fsync=False, grace_s=0.0):
        wait_until(lambda: step_bytes(url) < 70_000)
