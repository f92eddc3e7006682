"""Priorities and derived columns can be read by a person: by step, by episode, and without trajstore."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

import trajstore
from trajstore import DataError, Field, Priorities, ReplayBuffer, Windows

WINDOWS = Windows(1)


def episode(i: int, n: int = 5) -> dict[str, Any]:
    return {"action": np.arange(n) + 100 * i, "reward": np.ones(n)}


def filled(url: str) -> ReplayBuffer:
    """Two episodes; the priority of a step is its action plus one, and its column ``value`` is ten times that."""
    buffer = ReplayBuffer(url, priorities=Priorities(), sample=WINDOWS)
    for i in range(2):
        buffer.add_episode(episode(i), terminated=True)
    buffer.add_column("value", Field("float32"))
    for batch in buffer.epoch(4):
        priority = batch["action"].flatten().float() + 1
        buffer.update_priorities(batch["index"], priority)
        buffer.write_column("value", batch["index"], 10 * priority)
    return buffer


EXPECTED = [1.0, 2.0, 3.0, 4.0, 5.0, 101.0, 102.0, 103.0, 104.0, 105.0]


def how_values_are_stored(buffer: ReplayBuffer, how: str) -> None:
    if how == "flush":
        buffer.flush()
    elif how == "checkpoint":
        buffer.save_checkpoint("one", wait=True)
    else:
        buffer.close()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "store")


def test_a_buffer_tells_the_priority_of_each_step(url: str) -> None:
    with filled(url) as buffer:
        assert buffer.priorities().tolist() == EXPECTED
        assert buffer.column("value").tolist() == [10 * value for value in EXPECTED]
        batch = buffer.sample(32)
        priority = buffer.priorities(batch["index"])
        assert priority.tolist() == (batch["action"].flatten() + 1).tolist()
        assert priority.dtype == np.float32


def test_the_priority_of_an_evicted_step_is_nan(url: str) -> None:
    with filled(url) as buffer:
        index = next(iter(buffer.epoch(10, shuffle=False)))["index"]
        buffer.evict(n_episodes=1)
        assert np.isnan(buffer.priorities(index)[:5]).all()
        assert buffer.priorities(index)[5:].tolist() == EXPECTED[5:]


def test_a_reader_without_priorities_says_so_and_unknown_steps_are_refused(url: str) -> None:
    with filled(url) as buffer:
        with pytest.raises(DataError, match="no such step"):
            buffer.priorities(torch.tensor([[0, 99, 0]]))
        buffer.flush()
        with pytest.raises(ValueError, match="this reader has no priorities; create it with"):
            trajstore.Reader(trajstore.open(url)).priorities()


@pytest.mark.parametrize("how", ["flush", "checkpoint", "close"])
def test_stored_values_are_read_with_an_episode(url: str, how: str) -> None:
    buffer = filled(url)
    how_values_are_stored(buffer, how)
    store = trajstore.open(url)
    data = store.read_episode(1, columns=["priority", "value"])
    assert data["priority"].tolist() == EXPECTED[5:]
    assert data["value"].tolist() == [10 * value for value in EXPECTED[5:]]
    part = store.read_episode(1, fields=["action"], columns=True, start=1, stop=3)
    assert {name: len(values) for name, values in part.items()} == {"action": 2, "priority": 2, "value": 2}
    assert "priority" not in store.read_episode(1)
    with pytest.raises(DataError, match=r"no derived column 'priorities'.*it has priority, value"):
        store.read_episode(1, columns=["priorities"])
    buffer.close()


def test_the_episode_table_has_means_and_sums(url: str) -> None:
    with filled(url) as buffer:
        buffer.flush()
        table = trajstore.open(url).episodes
        assert table["priority.mean"].tolist() == [3.0, 103.0]
        assert table["value.sum"].tolist() == [150.0, 5150.0]
        assert table.summaries == ("priority.mean", "priority.sum", "value.mean", "value.sum")
        assert table.to_pandas(derived=True)["priority.sum"].tolist() == [15.0, 515.0]
        assert "priority.sum" not in table.to_pandas()
        with pytest.raises(KeyError, match=r"no episode column 'priority'; the table has .*priority\.mean"):
            table["priority"]


def test_steps_without_a_stored_value_have_nan(url: str) -> None:
    with filled(url) as buffer:
        buffer.flush()
        with trajstore.open(url).writer("other") as writer:
            writer.append_episode(episode(7), terminated=True)
        store = trajstore.open(url)
        assert np.isnan(store.read_episode(2, columns=["priority"])["priority"]).all()
        assert np.isnan(store.episodes["priority.mean"]).tolist() == [False, False, True]


def test_final_rows_are_not_steps(url: str) -> None:
    with ReplayBuffer(url, priorities=Priorities(initial=2.0), sample=WINDOWS) as buffer:
        buffer.add_episode({"observation": np.zeros((6, 2)), "reward": np.ones(5)}, terminated=True)
        buffer.flush()
        store = trajstore.open(url)
        assert store.episodes["priority.sum"].tolist() == [10.0]
        assert store.read_episode(0, columns=True)["priority"].tolist() == [2.0] * 5


def test_plain_zarr_reads_priorities_by_row(url: str) -> None:
    with filled(url) as buffer:
        buffer.flush()
        stream = zarr.open_group(url, mode="r")["streams"][buffer.stream]
        column = stream.attrs["trajstore"]["columns"][buffer.stream]["priority"]
        arrays = stream[f"columns/{buffer.stream}/priority/{column['generation'] % 2}"]
        priority = arrays["values"][:]
        priority[arrays["delta_rows"][:] - column["first"]] = arrays["delta_values"][:]
        assert priority.tolist() == EXPECTED


def test_a_session_that_joins_finds_the_priorities(url: str) -> None:
    filled(url).close()
    with ReplayBuffer(url, priorities=Priorities(), sample=WINDOWS) as again:
        assert again.priorities().tolist() == EXPECTED


def test_values_of_steps_that_are_all_evicted_can_be_flushed(url: str) -> None:
    with filled(url) as buffer:
        buffer.clear()
        buffer.flush()
