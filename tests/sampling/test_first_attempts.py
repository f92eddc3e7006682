"""What a user types first when sampling works, or is refused at once with the way out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trajstore
from trajstore import Field, Mixture, Priorities, Reader, ReplayBuffer, Windows

Table = Any


def add_episodes(writer: Any, n: int, length: int = 6, **metadata: Any) -> None:
    for episode in range(n):
        for t in range(length):
            step = {"observation": np.float32([episode, t]), "reward": np.float32(episode)}
            writer.append(step, env=0)
        writer.end_episode(terminated=True, metadata={"number": episode, **metadata})


@pytest.fixture
def store(tmp_path: Path) -> trajstore.Store:
    store = trajstore.create(tmp_path / "store")
    with store.writer() as writer:
        add_episodes(writer, 4)
    store.refresh()
    return store


@pytest.fixture
def buffer(tmp_path: Path) -> Iterator[ReplayBuffer]:
    with ReplayBuffer(tmp_path / "buffer", commit_seconds=None, priorities=Priorities()) as buffer:
        yield buffer


# ---- a reader beside a writer -------------------------------------------------------------------


def test_a_reader_of_a_store_starts_at_the_newest_commit(tmp_path: Path) -> None:
    store = trajstore.create(tmp_path / "store")
    with store.writer() as writer:
        add_episodes(writer, 2)
        writer.commit()
        assert len(Reader(store).sample(8, Windows(3))["index"]) == 8


def test_a_reader_of_a_snapshot_keeps_that_snapshot(tmp_path: Path) -> None:
    store = trajstore.create(tmp_path / "store")
    with store.writer() as writer:
        add_episodes(writer, 2)
        writer.commit()
        snapshot = store.refresh()
        add_episodes(writer, 2)
        writer.commit()
    assert Reader(snapshot).n_windows(Windows(6)) == 2
    assert Reader(store).n_windows(Windows(6)) == 4


# ---- where --------------------------------------------------------------------------------------


def test_where_sees_episodes_before_they_are_committed(buffer: ReplayBuffer) -> None:
    add_episodes(buffer, 5)
    wanted = {2, 4}
    batch = buffer.sample(64, Windows(2), where=lambda episodes: np.isin(episodes["return"], [12.0, 24.0]))
    assert set(batch["index"][:, 1].tolist()) == wanted


def by_number(table: Table) -> np.ndarray:
    numbers = [metadata.get("number", -1) for metadata in table["metadata"]]
    return np.isin(numbers, [1, 3])


def open_ones(table: Table) -> np.ndarray:
    return table["end"] == "open"  # type: ignore[no-any-return]


@pytest.mark.parametrize("flush_after", [(), (2,), (0, 1, 2, 3, 4), (4,)])
def test_where_gives_the_same_episodes_whenever_commits_happen(
    tmp_path: Path, flush_after: tuple[int, ...]
) -> None:
    with ReplayBuffer(tmp_path / "buffer", commit_seconds=None) as buffer:
        for episode in range(5):
            for t in range(6):
                buffer.append({"x": np.float32(episode), "reward": np.float32(1)})
                if t == 3 and episode in flush_after:
                    buffer.flush()
            buffer.end_episode(terminated=True, metadata={"number": episode, "name": "ö" * episode})
            if episode in flush_after:
                buffer.flush()
        for _ in range(3):
            buffer.append({"x": np.float32(9), "reward": np.float32(1)})
        for where, expected in ((by_number, {1, 3}), (open_ones, {5}), (lambda t: t["length"] == 6, set(range(5)))):
            assert set(buffer.sample(64, Windows(1), where=where)["index"][:, 1].tolist()) == expected
        assert buffer.n_windows(Windows(1), where=open_ones) == 3
        assert buffer.n_windows(Windows(1), where=lambda t: t["return"] == 3.0) == 3


def test_where_follows_episodes_that_end_and_are_evicted(tmp_path: Path) -> None:
    def long_ones(table: Table) -> np.ndarray:
        return table["return"] >= 2.0  # type: ignore[no-any-return]

    with ReplayBuffer(tmp_path / "buffer", commit_seconds=None, capacity=trajstore.Retention(episodes=3)) as buffer:
        for episode in range(8):
            buffer.append({"reward": np.float32(episode)}, terminated=True)
            if episode >= 2:
                found = set(buffer.sample(64, Windows(1), where=long_ones)["index"][:, 1].tolist())
                assert found == set(range(max(2, episode - 2), episode + 1))


@pytest.mark.parametrize("where", ["length > 3", [True] * 4, np.ones(4, bool)])
def test_a_where_that_is_no_function_is_refused(store: trajstore.Store, where: Any) -> None:
    reader = Reader(store)
    for call in (
        lambda: reader.sample(2, Windows(2), where=where),
        lambda: reader.n_windows(Windows(2), where=where),
    ):
        with pytest.raises(TypeError, match=r"where: expected a function of the episode table .* lambda episodes"):
            call()


def test_windows_that_are_a_number_are_refused_with_the_way_out(store: trajstore.Store) -> None:
    with pytest.raises(TypeError, match=r"windows: expected Windows, such as Windows\(32\) .* got int"):
        Reader(store).sample(2, 3)  # type: ignore[arg-type]


# ---- naming steps -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "convert", [np.asarray, lambda p: p.numpy().astype(np.float64), lambda p: p.tolist(), lambda p: p]
)
def test_priorities_may_be_arrays(buffer: ReplayBuffer, convert: Callable[[torch.Tensor], Any]) -> None:
    add_episodes(buffer, 1)
    batch = buffer.sample(4, Windows(1))
    buffer.update_priorities(batch["index"].numpy(), convert(torch.full((4,), 3.0)))
    again = buffer.at(batch["index"], Windows(1))
    assert buffer.session.reader.priority_stats(Windows(1))["max"] == 3.0
    assert torch.equal(again["index"], batch["index"])


def test_a_batch_names_its_own_steps(buffer: ReplayBuffer) -> None:
    add_episodes(buffer, 2)
    buffer.add_column("advantage")
    batch = buffer.sample(4, Windows(2))
    assert buffer.update_priorities(batch, torch.ones(4)) == 0
    assert buffer.write_column("advantage", batch, torch.full((4, 2), 5.0)) == 0
    again = buffer.at(batch, Windows(2))
    assert torch.equal(again["observation"], batch["observation"])
    assert (again["advantage"] == 5).all()


def test_handles_that_append_returned_name_steps(buffer: ReplayBuffer) -> None:
    steps = [{"observation": np.float32([0, t]), "reward": np.float32(t)} for t in range(5)]
    handles = [buffer.append(step) for step in steps]
    assert buffer.at(handles[3], Windows(1))["reward"].ravel().tolist() == [3.0]
    assert buffer.at(handles[1:4], Windows(1))["reward"].ravel().tolist() == [1.0, 2.0, 3.0]
    buffer.update_priorities(handles[2], [7.0])
    buffer.update_priorities(handles[:2], np.array([0.5, 0.25]))
    assert buffer.session.reader.priority_stats(Windows(1))["max"] == 7.0
    many = buffer.append({k: np.stack([v, v]) for k, v in steps[0].items()}, envs=[1, 2])
    assert buffer.at(many, Windows(1))["observation"].shape == (2, 1, 2)


def test_handles_of_another_store_are_refused(buffer: ReplayBuffer, store: trajstore.Store) -> None:
    handle = buffer.append({"observation": np.float32([0, 0]), "reward": np.float32(0)})
    with pytest.raises(trajstore.DataError, match=r"index: this reader has no stream 'buffer-.*; it has writer-"):
        Reader(store).at(handle, Windows(1))


@pytest.mark.parametrize("index", [None, 3, [1, 2], {"observation": 1}])
def test_other_things_do_not_name_steps(buffer: ReplayBuffer, index: Any) -> None:
    add_episodes(buffer, 1)
    with pytest.raises(trajstore.DataError, match=r"index: expected a batch, its 'index' .*, or handles"):
        buffer.at(index, Windows(1))


# ---- columns ------------------------------------------------------------------------------------


def test_a_column_may_be_added_again_with_the_same_field(buffer: ReplayBuffer) -> None:
    add_episodes(buffer, 1)
    buffer.add_column("advantage", "float32", fill=float("nan"))
    batch = buffer.sample(2, Windows(1))
    buffer.write_column("advantage", batch, torch.ones(2))
    buffer.add_column("advantage", Field("float32"), fill=float("nan"))
    assert (buffer.at(batch, Windows(1))["advantage"] == 1).all()
    with pytest.raises(trajstore.DataError, match=r"column 'advantage' exists with float32 .* got float64"):
        buffer.add_column("advantage", "float64", fill=float("nan"))
    with pytest.raises(trajstore.DataError, match=r"column 'advantage' exists .* fill nan; got .* fill 0"):
        buffer.add_column("advantage")


def test_an_unknown_column_of_a_snapshot_is_refused_by_name(tmp_path: Path) -> None:
    with ReplayBuffer(tmp_path / "buffer") as buffer:
        add_episodes(buffer, 1)
        buffer.add_column("advantage")
        buffer.flush()
        snapshot = trajstore.open(tmp_path / "buffer").snapshot
    assert snapshot.columns.names == ("advantage",)
    with pytest.raises(trajstore.DataError, match=r"no derived column 'nope' in .*; it has advantage"):
        snapshot.column("nope")
    with pytest.raises(trajstore.DataError, match=r"no derived column 'reward' .* it is a field: read it"):
        snapshot.column("reward")


def test_values_of_all_steps_can_be_set_right_after_appends(buffer: ReplayBuffer) -> None:
    buffer.add_column("advantage")
    add_episodes(buffer, 2)
    buffer.write_all("advantage", np.arange(12, dtype=np.float32))
    assert buffer.session.reader.column("advantage").tolist() == list(range(12))


# ---- mixtures -----------------------------------------------------------------------------------


def test_a_mixture_says_what_its_sources_must_be(store: trajstore.Store) -> None:
    with pytest.raises(TypeError, match=r"source 'a': expected a reader .* got a store; .*Reader\(store\)"):
        Mixture({"a": store})
    with pytest.raises(TypeError, match="source 'a': expected a reader or a buffer, got int"):
        Mixture({"a": 3})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="sources: expected a dict of readers or buffers by name, got list"):
        Mixture([Reader(store)])  # type: ignore[arg-type]


def test_a_mixture_of_readers_asks_for_windows(store: trajstore.Store) -> None:
    with pytest.raises(TypeError, match="windows: source 'a' has no default, as readers; pass windows="):
        Mixture({"a": Reader(store)}).sample(4)


def test_a_mixture_converts_dtypes_when_asked(store: trajstore.Store, tmp_path: Path) -> None:
    other = trajstore.create(tmp_path / "float64")
    with other.writer() as writer:
        for t in range(5):
            writer.append({"observation": np.float64([9, t]), "reward": np.float64(t)}, terminated=t == 4)
    sources = {"a": Reader(store), "b": Reader(other)}
    with pytest.raises(trajstore.SchemaError, match=r"'a' and 'b': observation: float32.*cast= to convert dtypes"):
        Mixture(sources)
    mixture = Mixture(sources, cast={"observation": "float32", "reward": "float32"})
    batch = mixture.sample(8, Windows(2))
    assert batch["observation"].dtype == batch["reward"].dtype == torch.float32
    assert (batch["observation"][batch["source"] == 1, :, 0] == 9).all()
    with pytest.raises(trajstore.SchemaError, match="cast: no source has 'nope'"):
        Mixture(sources, cast={"observation": "float32", "reward": "float32", "nope": "int8"})


def test_a_mixture_of_uniform_and_prioritised_sources_says_how(store: trajstore.Store) -> None:
    mixture = Mixture({"a": Reader(store), "b": Reader(store, priorities=Priorities())})
    with pytest.raises(trajstore.DataError, match=r"'a' lacks 'priority/weight'.*prioritised=False"):
        mixture.sample(4, Windows(2))
    assert len(mixture.sample(4, Windows(2), prioritised=False)["index"]) == 4


# ---- places -------------------------------------------------------------------------------------


def test_a_writer_of_a_read_only_directory_is_refused_at_once(
    store: trajstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)  # root may write anywhere
    with pytest.raises(trajstore.StorageError, match="is read-only for this process"):
        store.writer()
    assert len(Reader(store).sample(2, Windows(1))["index"]) == 2


@pytest.mark.parametrize("make", [Reader, lambda url: trajstore.BatchDataset(url, 4, Windows())])
def test_a_url_in_the_place_of_a_store_is_refused(make: Callable[[Any], object]) -> None:
    with pytest.raises(TypeError, match=r"got 'runs/walker'; open a URL with trajstore.open\(url\)"):
        make("runs/walker")


def test_a_single_handle_takes_a_single_priority(buffer: ReplayBuffer) -> None:
    handle = buffer.append({"observation": np.zeros(2, np.float32), "reward": np.float32(0)})
    buffer.update_priorities(handle, 5.0)
    assert buffer.priorities().tolist() == [5.0]


def test_a_column_of_another_dtype_says_how(buffer: ReplayBuffer) -> None:
    add_episodes(buffer, 1)
    buffer.add_column("advantage")
    index = buffer.sample(2, Windows())["index"]
    with pytest.raises(trajstore.DataError, match=r"or add the column with Field\('float64', ...\)"):
        buffer.write_column("advantage", index, np.zeros(2))


def test_a_column_that_a_later_field_is_named_like_is_refused_by_a_reader(tmp_path: Path) -> None:
    store = trajstore.create(tmp_path / "store")
    reader = Reader(store)
    reader.add_column("reward")
    with store.writer() as writer:
        add_episodes(writer, 1)
    reader.refresh()
    with pytest.raises(trajstore.DataError, match=r"column 'reward': .*; a field has this name"):
        reader.sample(2, Windows())
