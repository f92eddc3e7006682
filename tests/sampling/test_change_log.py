"""The account of what changed in an index: plans and tables that follow it, and what they do where it forgot."""

from __future__ import annotations

import uuid
from typing import Any

import numpy as np
import pytest
import torch

from trajstore import Field, Priorities, ReplayBuffer, Schema, Windows
from trajstore.sampling.batches.batch_assembler import BatchAssembler
from trajstore.sampling.batches.outputs import flat_outputs
from trajstore.sampling.index.change_log import BoundedLog, ChangeLog
from trajstore.sampling.step_columns.step_table import StepTable
from trajstore.schema import Array

SCHEMA = Schema({"obs": Field("float32", (2,), chunk_rows=16)})
KINDS = (
    Windows(),
    Windows(length=3, boundary="pad_right"),
    Windows(length=2, burn_in=1),
    Windows(length=4, boundary="short"),
)
PRIORITIES = {"uniform": None, "start": Priorities(), "window": Priorities(over=0.9)}


def new_log(max_changes: int, max_rows: int, rows: list[int]) -> BoundedLog[int]:
    """A log with a change at every second version, of so many rows each."""
    log: BoundedLog[int] = BoundedLog(max_changes, max_rows)
    for i, n in enumerate(rows):
        log.add(2 * (i + 1), i, n)
    return log


def test_a_log_gives_the_changes_after_a_version() -> None:
    log = new_log(10, 100, [1, 1, 1])
    assert [log.since(version) for version in range(8)] == [
        *([0, 1, 2], [0, 1, 2], [1, 2], [1, 2], [2], [2], [], []),
    ]
    assert log.since(-1) is None  # nothing was seen yet, not even what was there at first


@pytest.mark.parametrize(("max_changes", "max_rows"), [(2, 100), (10, 10)])
def test_a_log_forgets_its_oldest_changes_and_says_so(max_changes: int, max_rows: int) -> None:
    log = new_log(max_changes, max_rows, [5, 5, 5, 5])
    assert len(log) == 2
    assert [log.since(version) for version in (0, 3, 4, 6, 8)] == [None, None, [2, 3], [3], []]
    log.forget(9)
    assert [log.since(version) for version in (8, 9)] == [None, []]


def test_a_log_keeps_its_newest_change_however_large() -> None:
    assert new_log(10, 10, [1, 1000]).since(2) == [1]


def test_additions_and_moves_of_rows_touch_no_plan() -> None:
    log = ChangeLog()
    log.episodes_added()
    log.rows_moved(np.arange(3), np.arange(3))
    log.entries_renumbered()
    assert (log.version, log.touched_at) == (3, 0)
    log.rows_released()
    assert (log.released_at, log.touched_at, log.removed_at) == (4, 4, 0)
    log.steps_removed()
    assert (log.released_at, log.touched_at, log.removed_at) == (4, 5, 5)
    moves, removals = log.moves_since(1), log.removals_since(1)
    assert moves is not None
    assert removals is not None
    assert ([len(m.live) for m in moves], [r.is_renumbered for r in removals]) == ([3], [True, False])


def new_buffer(**options: Any) -> ReplayBuffer:
    small = {"commit_seconds": None, "buffer_bytes": "64KB", "cache_bytes": "8MB", "grace_s": 0.0, "seed": 5}
    return ReplayBuffer(f"memory://log-{uuid.uuid4().hex}", schema=SCHEMA, **small, **options)


def append(buffer: ReplayBuffer, rng: np.random.Generator, n: int) -> None:
    for _ in range(n):
        env, end = int(rng.integers(3)), rng.random()
        buffer.append({"obs": rng.random(2).astype(np.float32)}, env=env, truncated=end < 0.15)


def test_a_plan_that_nothing_has_touched_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a plan was checked that nothing has touched")

    monkeypatch.setattr(BatchAssembler, "check_plan", refuse)
    monkeypatch.setattr(BatchAssembler, "with_moved_rows", refuse)
    rng = np.random.default_rng(0)
    with new_buffer() as buffer:
        append(buffer, rng, 100)
        with buffer.batches(8, Windows(), prefetch=2) as batches:
            for _ in range(20):
                append(buffer, rng, 3)
                assert len(next(batches)["index"]) == 8


def play(priorities: Priorities | None, n_rounds: int = 60) -> list[dict[str, Array]]:
    """Batches of a buffer whose limits evict all the time; some kinds and the column are used rarely."""
    rng, seen = np.random.default_rng(1), []
    with new_buffer(capacity=150, priorities=priorities) as buffer:
        buffer.add_column("value", Field("float32"), fill=-1)
        for k in range(n_rounds):
            change(buffer, rng, k)
            for i, kind in enumerate(KINDS):
                if k % (3 * i + 1) == 0:
                    seen.append(learn(buffer, rng, kind, writes=k % 4 == 0))
        seen.append({"column": buffer.reader.column("value")})
    return seen


def change(buffer: ReplayBuffer, rng: np.random.Generator, k: int) -> None:
    """Append steps; now and then commit, abort an episode that was seen, or evict episodes."""
    append(buffer, rng, int(rng.integers(1, 60)))
    if k % 7 == 3:
        buffer.flush()
    if k % 11 == 5:
        buffer.append({"obs": np.zeros(2, np.float32)}, env=9)
        assert buffer.n_steps > 0
        buffer.abort_episode(9)
    if k % 13 == 9:
        buffer.evict(2)


def learn(buffer: ReplayBuffer, rng: np.random.Generator, kind: Windows, writes: bool) -> dict[str, Array]:
    """A batch; the column and the priorities of its steps are set afterwards."""
    batch = buffer.sample(8, kind)
    values = torch.from_numpy(rng.random(8).astype(np.float32))
    if writes:
        buffer.write_column("value", batch["index"], values)
    if buffer.options.priorities is not None:
        buffer.update_priorities(batch["index"], values)
    return {key: value.numpy().copy() for key, value in flat_outputs(batch).items()}


@pytest.mark.parametrize("name", PRIORITIES)
def test_batches_are_the_same_where_the_log_forgets_nearly_all(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    expected = play(PRIORITIES[name])
    forgotten: list[int] = []
    clear = StepTable._clear_unused

    def count(self: StepTable) -> None:
        forgotten.append(self.size)
        clear(self)

    monkeypatch.setattr(StepTable, "_clear_unused", count)
    monkeypatch.setattr("trajstore.sampling.index.change_log._MAX_REMOVALS", 1)
    monkeypatch.setattr("trajstore.sampling.step_columns.step_table._MAX_CHANGES", 1)
    got = play(PRIORITIES[name])
    assert forgotten
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert a.keys() == b.keys()
        assert all(np.array_equal(a[key], b[key]) for key in a)
