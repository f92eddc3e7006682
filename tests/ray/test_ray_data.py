"""Stores as datasets of Ray Data, and datasets as stores."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
import ray
import ray.data

import trajstore
from tests.support import ray_cluster
from trajstore import DataError, Field, Schema
from trajstore.ray.data import EpisodeSink, EpisodeSource, read_episodes, write_episodes
from trajstore.schema import flatten

# Ray Data sets options of its own that it has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`use_\\w+` is deprecated:DeprecationWarning")

SCHEMA = Schema(
    {
        "observation": {"pixels": Field("uint8", (4, 4), final=True), "half": Field("bfloat16", (2,), final=True)},
        "action": Field("int64"),
        "reward": Field("float32"),
    },
    episode={"success": bool, "task": str},
)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with ray_cluster.started():
        ray.data.DataContext.get_current().enable_progress_bars = False
        yield


def episode(k: int, n: int) -> dict[str, Any]:
    rng = np.random.default_rng(k)
    half = torch.from_numpy(rng.integers(-8, 8, (n + 1, 2)).astype(np.float32))
    return {
        "observation": {"pixels": rng.integers(0, 255, (n + 1, 4, 4), np.uint8), "half": half.to(torch.bfloat16)},
        "action": np.full(n, k),
        "reward": np.arange(n, dtype=np.float32),
    }


def written(url: str, n: int = 20) -> trajstore.Store:
    """Episodes of 1 to n steps, ended in turn in every way that an episode can end by itself."""
    store = trajstore.create(url, SCHEMA, fsync=False)
    with store.writer() as writer:
        for k in range(n):
            metadata = {"success": k % 2 == 0, "task": f"task {k}", "seed": k} if k % 3 else None
            given = episode(k, k + 1)
            writer.append_episode(given, terminated=k % 3 == 0, truncated=k % 3 == 1, env=k, metadata=metadata)
    store.refresh()
    return store


def assert_same(came: trajstore.Store, wanted: trajstore.Store) -> None:
    """The same episodes, in whatever order."""
    order = [
        np.argsort([store.read_episode(i)["action"][0] for i in range(len(store))]) for store in (came, wanted)
    ]
    assert len(order[0]) == len(order[1])
    for i, j in zip(*order, strict=True):
        one, other = came.episodes.row(int(i)), wanted.episodes.row(int(j))
        for name in ("env", "length", "end", "return", "has_final", "success", "task", "metadata"):
            assert one[name] == other[name], name
        flat = flatten(came.read_episode(int(i)))
        for path, values in flatten(wanted.read_episode(int(j))).items():
            assert np.array_equal(flat[path], values), path


# ---- reading


def test_a_row_is_an_episode(url: str) -> None:
    store = written(url)
    rows = sorted(read_episodes(url, blocks=4).take_all(), key=lambda row: row["episode"])
    assert len(rows) == 20
    for k, row in enumerate(rows):
        assert (row["stream"], row["episode"], row["env"]) == (store.streams[0].id, k, k)
        assert (row["length"], row["end"]) == (k + 1, ("terminated", "truncated", "cut")[k % 3])
        assert (row["success"], row["task"]) == ((k % 2 == 0, f"task {k}") if k % 3 else (None, None))
        assert np.array_equal(row["observation/pixels"], episode(k, k + 1)["observation"]["pixels"])
        assert row["observation/half"].shape == (k + 2, 2)
        assert row["reward"].dtype == np.float32
        assert row["reward"].tolist() == list(range(k + 1))


def test_only_what_is_asked_for_is_read(url: str) -> None:
    written(url)
    dataset = read_episodes(url, fields=["reward"], where=lambda table: table["end"] == "cut", blocks=3)
    rows = dataset.take_all()
    assert {row["end"] for row in rows} == {"cut"}
    assert len(rows) == 6
    assert "action" not in rows[0]
    with pytest.raises(KeyError, match="no field 'rewards'"):
        read_episodes(url, fields=["rewards"])


def test_tasks_read_runs_of_episodes_of_about_the_same_size_in_small_blocks(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = written(url)
    source = EpisodeSource(store.snapshot)
    tasks = source.get_read_tasks(3)
    counts = [task.metadata.num_rows for task in tasks]
    assert (len(counts), sum(counts)) == (3, 20)
    assert counts[0] > counts[1] > counts[2]  # later episodes are longer
    assert source.estimate_inmemory_data_size() == sum(task.metadata.size_bytes for task in tasks)
    monkeypatch.setattr("trajstore.ray.episode_source._BLOCK_BYTES", 1)
    assert [block.num_rows for block in tasks[2]()] == [1] * counts[2]  # one after the other, as they are read


def test_a_dataset_is_what_was_committed_when_it_was_made(url: str) -> None:
    store = written(url, 6)
    before = read_episodes(url)
    with store.writer() as writer:
        writer.append_episode(episode(99, 5), terminated=True)
    assert before.count() == 6
    assert len(before.take_all()) == 6
    assert read_episodes(url).count() == 7


def test_a_store_without_episodes_is_an_empty_dataset(url: str) -> None:
    trajstore.create(url, SCHEMA)
    assert read_episodes(url).take_all() == []


# ---- writing


def test_what_is_read_is_written_again_bit_by_bit(url: str) -> None:
    store = written(url)
    copied = write_episodes(read_episodes(url, blocks=4), f"{url}-copy", SCHEMA, fsync=False)
    assert_same(copied, store)
    assert 1 < len(copied.streams) <= 4  # every task has its own
    assert all(record.is_sealed for record in copied.streams)
    trajstore.open(f"{url}-copy").episodes.to_pandas()


def test_rows_of_anybody_become_episodes(url: str) -> None:
    def make(row: dict[str, Any]) -> dict[str, Any]:
        n = int(row["id"]) + 1
        return {"obs": np.full((n, 2), n, np.float32), "reward": np.ones(n, np.float32), "end": "terminated"}

    store = write_episodes(ray.data.range(8, override_num_blocks=2).map(make), url, fsync=False)
    assert sorted(store.episodes["length"]) == list(range(1, 9))
    assert set(store.episodes["end"]) == {"terminated"}
    assert set(store.schema or ()) == {"obs", "reward"}


def test_an_end_that_is_none_is_refused(url: str) -> None:
    sink = EpisodeSink(url, fsync=False)
    sink.on_write_start()
    rows = [{"obs": np.zeros((2, 3), np.float32), "end": "open"}]
    with pytest.raises(DataError, match="end: expected one of terminated, truncated, cut, got 'open'"):
        sink.write([to_block(rows)], None)


def to_block(rows: list[dict[str, Any]]) -> Any:
    return next(
        iter(ray.data.from_items(rows, override_num_blocks=1).iter_batches(batch_size=None, batch_format="pyarrow"))
    )


def test_a_task_that_fails_leaves_nothing_and_a_second_try_is_whole(url: str, tmp_path: Path) -> None:
    flag = tmp_path / "failed"

    def fail_once(row: dict[str, Any]) -> dict[str, Any]:
        if row["episode"] == 19 and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)  # in the middle of the task that reads, maps and writes
        return row

    store = written(url)
    copied = write_episodes(read_episodes(url, blocks=2).map(fail_once), f"{url}-copy", SCHEMA, fsync=False)
    assert flag.exists()
    assert_same(copied, store)


def test_a_job_that_fails_takes_back_what_its_tasks_wrote(url: str) -> None:
    def fail(row: dict[str, Any]) -> dict[str, Any]:
        if row["episode"] == 19:
            raise ValueError("not this one")
        return row

    written(url)
    before = write_episodes(read_episodes(url).limit(3), f"{url}-copy", SCHEMA, fsync=False)
    with pytest.raises(Exception, match="not this one"):
        write_episodes(read_episodes(url, blocks=5).map(fail), f"{url}-copy", SCHEMA, fsync=False, concurrency=1)
    after = trajstore.open(f"{url}-copy")
    assert len(after) == len(before) == 3
    assert len(after.streams) > len(before.streams)  # they had committed


def test_an_attempt_whose_answer_was_lost_is_shown_once(url: str) -> None:
    sink = EpisodeSink(url, fsync=False)
    sink.on_write_start()
    rows = [{"obs": np.full((k + 1, 3), k, np.float32), "end": "cut"} for k in range(4)]
    first, second = (sink.write([to_block(rows)], None) for _ in range(2))
    assert len(trajstore.open(url)) == 8
    sink.on_write_complete([second])
    store = trajstore.open(url)
    assert set(store.episodes["stream"]) == {second.stream} != {first.stream}
    assert store.episodes["length"].tolist() == [1, 2, 3, 4]


def test_one_task_commits_once_however_much_it_has(url: str) -> None:
    sink = EpisodeSink(url, fsync=False)
    sink.on_write_start()
    rows = [{"obs": np.zeros((256, 64, 64), np.uint8), "end": "cut"} for _ in range(16)]
    sink.write([to_block(rows[:8]), to_block(rows[8:])], None)
    store = trajstore.open(url)
    assert len(store) == 16
    assert store.streams[0].commit <= 2  # the one, and the seal
