"""A store as an xarray Dataset: lazy, in chunks of whole stored chunks, with coordinates that name each step."""

from __future__ import annotations

import pickle  # noqa: TID251 - dask sends arrays to its workers this way
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trajstore
from trajstore import Field, MissingExtraError, ReplayBuffer, Schema, SnapshotExpiredError, Store
from trajstore.store.stream_reader import StreamReader

HALF = torch.tensor(1.5, dtype=torch.bfloat16)
STATE = Field("float32", (3,), final=True, chunk_rows=8)
SCHEMA = Schema({
    "observation": {"state": STATE, "half": Field("bfloat16", final=True)},
    "t": Field("int64"),
    "reward": Field("float64", chunk_rows=16),
})  # fmt: skip


def data(i: int, n: int) -> dict[str, Any]:
    return {
        "observation": {
            "state": np.full((n + 1, 3), i, np.float32),
            "half": HALF.expand(n + 1),
        },
        "t": np.arange(n) + 100 * i,
        "reward": np.arange(n, dtype=np.float64),
    }


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Two streams; in the second, two episodes grow beside each other, and one is aborted."""
    store = trajstore.create(tmp_path / "s", SCHEMA)
    with store.writer("a") as writer:
        for i in range(5):
            writer.append_episode(data(i, 7 + i), terminated=True)
    with store.writer("b") as writer:
        for t in range(6):
            for env in (0, 1):
                step = {"observation": {"state": np.full(3, 10 + env, np.float32), "half": HALF},
                        "t": np.int64(t), "reward": np.float64(t)}  # fmt: skip
                writer.append(step, env=env, terminated=False)
            if t == 2:
                writer.commit()
        writer.abort_episode(env=1)
        writer.append_episode(data(9, 2), env=2, terminated=True)
    store.refresh()
    return store


def expected(store: Store, path: str) -> Any:
    """By key of the episode: the values of its steps."""
    found = {}
    for i in range(len(store)):
        value: Any = store.read_episode(i)
        for name in path.split("/"):
            value = value[name]
        found[store.episodes.key(i)] = value[: store.episodes["length"][i]]
    return found


@pytest.mark.parametrize("path", ["observation/state", "observation/half", "t", "reward"])
def test_every_step_is_there_once_under_its_name(store: Store, path: str) -> None:
    dataset = store.to_xarray()
    values = dataset["steps.t" if path == "t" else path.replace("/", ".")]
    assert values.dims[0] == "step"
    ids = dataset["stream"].attrs["ids"]
    place = [dataset[name].values for name in ("stream", "episode", "t")]
    found: dict[Any, list[Any]] = {}
    for stream, episode, t, value in zip(*place, values.values, strict=True):
        steps = found.setdefault((ids[stream], int(episode)), [])
        assert t == len(steps)
        steps.append(value)
    assert [(ids[s], e) for s, e in zip(place[0], place[1], strict=True)] == [
        store.episodes.key(row) for row in dataset["episode_row"].values.tolist()
    ]
    known = expected(store, path)
    assert found.keys() == known.keys()
    for key, steps in known.items():
        np.testing.assert_array_equal(np.array(found[key]), steps)


def test_final_rows_come_if_asked_for(store: Store) -> None:
    steps, rows = store.to_xarray(["reward"]), store.to_xarray(["observation/state"], final=True)
    assert rows.sizes["step"] == steps.sizes["step"] + int(store.episodes["has_final"].sum())
    assert int(rows["is_final"].sum()) == 6
    without = rows.isel(step=~rows["is_final"].values)
    assert (without["episode"].values == steps["episode"].values).all()
    assert set(rows.data_vars) == {"observation.state"}
    assert "is_final" not in steps.coords


def test_nothing_is_read_before_it_is_computed_and_each_chunk_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[tuple[str, str, int, int]] = []
    read = StreamReader.read_rows

    def counted(self: StreamReader, path: str, start: int, stop: int, *args: Any) -> Any:
        if path.startswith("steps/"):
            reads.append((self.record.id, path, start, stop))
        return read(self, path, start, stop, *args)

    monkeypatch.setattr(StreamReader, "read_rows", counted)
    dataset = store.to_xarray(["observation/state"], chunk_bytes=1)
    assert "observation.state" in repr(dataset)
    assert dataset["observation.state"].chunks is not None
    assert reads == []
    part = dataset["observation.state"].isel(step=slice(0, 3)).values
    assert part.shape == (3, 3)
    assert len(reads) == 1
    reads.clear()
    dataset["observation.state"].values  # noqa: B018
    chunks = [(stream, start // 8, (stop - 1) // 8) for stream, _, start, stop in reads]
    assert all(first == last for _, first, last in chunks)
    assert len(chunks) == len(set(chunks)) == 7 + 2  # of 50 and 12 rows


def test_chunks_grow_with_their_bytes(store: Store) -> None:
    assert len(store.to_xarray()["reward"].chunks[0]) == 2  # type: ignore[index] # one for each stream
    assert len(store.to_xarray(chunk_bytes=2 * 16 * 8)["reward"].chunks[0]) == 3  # type: ignore[index]
    with pytest.raises(ValueError, match="chunk_bytes"):
        store.to_xarray(chunk_bytes=0)
    with pytest.raises(KeyError, match="no field 'nothing'"):
        store.to_xarray(["nothing"])


def test_a_dataset_can_be_sent_to_another_process(store: Store) -> None:
    dataset = pickle.loads(pickle.dumps(store.to_xarray()))
    assert float(dataset["reward"].sum()) == float(sum(store.episodes["return"]))


def test_evicted_steps_are_not_shown_and_later_evictions_are_named(tmp_path: Path) -> None:
    schema = Schema({"x": Field("int64", chunk_rows=4)})
    with ReplayBuffer(tmp_path / "b", capacity=20, grace_s=0, schema=schema) as buffer:
        for i in range(4):
            buffer.add_episode({"x": np.full(10, i)}, terminated=True)
    dataset = trajstore.open(tmp_path / "b").to_xarray()
    assert dataset["x"].values.tolist() == [2] * 10 + [3] * 10
    assert dataset["episode"].values.tolist() == [2] * 10 + [3] * 10
    with ReplayBuffer(tmp_path / "b", exist="join", capacity=5) as joined:
        joined.add_episode({"x": np.full(10, 5)}, terminated=True)
    for chunk in (tmp_path / "b").glob(f"streams/{buffer.stream}/steps/x/c.*"):
        chunk.unlink()  # as if the grace time had passed
    with pytest.raises(SnapshotExpiredError, match="refresh the store"):
        dataset["x"].values  # noqa: B018


def test_a_store_without_steps_gives_an_empty_dataset(tmp_path: Path) -> None:
    assert dict(trajstore.create("memory://none").to_xarray().sizes) == {"step": 0}
    dataset = trajstore.create(tmp_path / "e", SCHEMA).to_xarray()
    assert dataset["observation.state"].values.shape == (0, 3)


def test_fields_that_a_stream_lacks_hold_their_fill(tmp_path: Path) -> None:
    store = trajstore.create(tmp_path / "s", {"x": Field("int64")})
    with store.writer() as writer:
        writer.append_episode({"x": np.arange(3)}, terminated=True)
    store = trajstore.create(tmp_path / "s", {"x": Field("int64"), "y": Field("float32", fill=7)}, exist_ok=True)
    with store.writer() as writer:
        writer.append_episode({"x": np.arange(2), "y": np.zeros(2, np.float32)}, terminated=True)
    store.refresh()
    assert store.to_xarray()["y"].values.tolist() == [7, 7, 7, 0, 0]


@pytest.mark.parametrize("module", ["xarray", "dask.array"])
def test_a_missing_library_is_named_with_its_extra(
    store: Store, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=r"pip install 'trajstore\[xarray\]'"):
        store.to_xarray()
