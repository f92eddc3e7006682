"""Derived columns: values put after collection, for rows of any stream, and read again."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import trajstore
from tests.conftest import Place
from tests.sampling.test_reader import schema
from tests.support.faulty import FailOnce, FaultyStorage, Plan, broken, real_storage, through
from trajstore import ClosedError, DataError, SchemaError, SnapshotExpiredError, StorageError, Store
from trajstore.schema import Array

ROWS = 30
_numbers = itertools.count()


@pytest.fixture(autouse=True)
def empty_memory() -> Iterator[None]:
    """Listing a place in memory looks at all that is there, so tests leave nothing behind."""
    yield
    fsspec.filesystem("memory").store.clear()


def steps(n: int) -> dict[str, Array]:
    return {"obs": np.zeros((n, 2), np.float32), "action": np.arange(n), "reward": np.zeros(n, np.float32)}


def new_store(url: str | None = None, **kwargs: Any) -> tuple[Store, str]:
    """A store with one sealed stream, and its id."""
    store = trajstore.create(url or f"memory://columns-{next(_numbers)}", schema((4, 4, 4)), fsync=False, **kwargs)
    with store.writer("target", commit_seconds=None) as writer:
        writer.append_episode(steps(ROWS), terminated=True)
    store.refresh()
    return store, writer.stream


def column(store: Store, name: str = "c") -> dict[str, tuple[int, Array]]:
    return trajstore.open(store.url, fsync=False).snapshot.columns.read(name)


def assert_column(store: Store, target: str, first: int, values: Array, name: str = "c") -> None:
    found_first, found = column(store, name)[target]
    assert (found_first, found.dtype, found.shape) == (first, values.dtype, values.shape)
    assert found.tobytes() == values.tobytes()


# ---- values ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (3,), (2, 2)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int64", "int8", "uint8", "bool"])
def test_values_come_back_as_they_were_put(dtype: str, shape: tuple[int, ...]) -> None:
    store, target = new_store()
    rng = np.random.default_rng(0)
    values = rng.integers(0, 100, (ROWS, *shape)).astype(dtype)
    changed = rng.integers(0, 100, (4, *shape)).astype(dtype)
    with store.writer(commit_seconds=None) as writer:
        writer.put_column("c", target, values.copy())
        writer.commit()
        assert_column(store, target, 0, values)
        rows = np.array([3, 29, 0, 7])
        writer.put_column("c", target, changed.copy(), rows=rows)
        writer.commit()
        values[rows] = changed
        assert_column(store, target, 0, values)
    assert_column(store, target, 0, values)


def test_bits_of_floats_are_kept() -> None:
    store, target = new_store()
    odd = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1e-45, 3e38], np.float32)
    with store.writer(commit_seconds=None) as writer:
        writer.put_column("c", target, odd)
        writer.put_column("c", target, odd[::-1].copy(), rows=np.arange(7, 14))
    assert_column(store, target, 0, np.concatenate([odd, odd[::-1]]))


def test_a_column_is_seen_once_it_is_committed() -> None:
    store, target = new_store()
    writer = store.writer(commit_seconds=None)
    writer.put_column("c", target, np.ones(3, np.float32))
    assert column(store) == {}
    writer.commit()
    assert column(store).keys() == {target}
    assert column(store, "other") == {}
    writer.close()


def test_a_commit_takes_steps_and_columns_together() -> None:
    store, target = new_store()
    writer = store.writer(commit_seconds=None)
    writer.append_episode(steps(5), terminated=True)
    writer.put_column("c", target, np.ones(3, np.float32))
    writer.commit()
    record = next(r for r in store.refresh().streams if r.id == writer.stream)
    assert (record.commit, record.rows) == (1, 5)
    assert record.columns[target]["c"].stop == 3
    writer.close()


def test_a_writer_may_have_columns_of_its_own_stream() -> None:
    store, _ = new_store()
    with store.writer(commit_seconds=None) as writer:
        writer.append_episode(steps(5), terminated=True)
        writer.commit()
        writer.put_column("c", writer.stream, np.arange(5.0))
    assert_column(store, writer.stream, 0, np.arange(5.0))


def test_several_columns_of_several_streams() -> None:
    store, target = new_store()
    with store.writer("second", commit_seconds=None) as writer:
        writer.append_episode(steps(8), terminated=True)
        for name, n in (("a", 3), ("b", 4)):
            writer.put_column(name, target, np.full(n, n))
            writer.put_column(name, writer.stream, np.full(n + 1, n))
    assert_column(store, target, 0, np.full(3, 3), "a")
    assert_column(store, writer.stream, 0, np.full(5, 4), "b")
    assert column(store, "a").keys() == column(store, "b").keys() == {target, writer.stream}


def test_values_may_begin_later_and_changes_go_past_their_end() -> None:
    store, target = new_store()
    with store.writer(commit_seconds=None) as writer:
        writer.put_column("c", target, np.arange(5.0), first=10)
        writer.put_column("c", target, np.array([7.0, 8.0]), rows=np.array([17, 11]))
    assert_column(store, target, 10, np.array([0, 8.0, 2, 3, 4, 0, 0, 7]))  # rows never set are 0


def test_an_empty_generation_can_be_changed() -> None:
    store, target = new_store()
    with store.writer(commit_seconds=None) as writer:
        writer.put_column("c", target, np.empty(0, np.float32), first=4)
        writer.commit()
        assert_column(store, target, 4, np.empty(0, np.float32))
        writer.put_column("c", target, np.ones(1, np.float32), rows=np.array([6]))
    assert_column(store, target, 4, np.array([0, 0, 1], np.float32))


def test_of_several_changes_to_a_row_the_last_counts() -> None:
    store, target = new_store()
    with store.writer(commit_seconds=None) as writer:
        writer.put_column("c", target, np.zeros(5, np.int64))
        writer.put_column("c", target, np.arange(1, 7), rows=np.array([2, 1, 2, 2, 1, 4]))
        writer.put_column("c", target, np.array([9]), rows=np.array([4]))
    assert_column(store, target, 0, np.array([0, 5, 4, 0, 9]))


def test_another_generation_may_have_another_type() -> None:
    store, target = new_store()
    with store.writer(commit_seconds=None) as writer:
        writer.put_column("c", target, np.zeros(5, np.float32))
        writer.put_column("c", target, np.ones((4, 2), np.int64), first=1)
        writer.commit()
        assert_column(store, target, 1, np.ones((4, 2), np.int64))


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 12), st.booleans()), min_size=1, max_size=12), st.integers(0)
)
def test_any_sequence_of_changes_comes_back(changes: list[tuple[bool, int, bool]], seed: int) -> None:
    store, target = new_store()
    rng, writer = np.random.default_rng(seed), store.writer(commit_seconds=None)
    first, expected = 0, np.empty(0, np.float32)
    for i, (is_whole, n, is_committed) in enumerate(changes):
        values = rng.random(n, np.float32)
        if is_whole or not i:
            first = int(rng.integers(0, min(ROWS - 1, ROWS - n) + 1))
            expected = values.copy()
            writer.put_column("c", target, values, first=first)
        else:
            rows = rng.integers(first, ROWS, n)
            grown = np.zeros(max(len(expected), int(rows.max(initial=first)) + 1 - first if n else 0), np.float32)
            grown[: len(expected)] = expected
            for row, value in zip(rows, values, strict=True):
                grown[row - first] = value
            expected = grown
            writer.put_column("c", target, values, rows=rows)
        if is_committed:
            writer.commit()
            assert_column(store, target, first, expected)
    writer.close()
    assert_column(store, target, first, expected)


def test_columns_longer_than_a_chunk_come_back(place: Place) -> None:
    store = trajstore.create(place.url, schema((1024,) * 3), **place.kwargs)
    n = 40_000
    with store.writer("target", commit_seconds=None) as writer:
        writer.append_episode(steps(n), terminated=True)
    rng, target = np.random.default_rng(1), writer.stream
    expected = rng.random(n, np.float32)
    with store.writer(commit_seconds=None) as other:
        other.put_column("c", target, expected.copy())
        for _ in range(4):
            rows, values = rng.integers(0, n, 5000), rng.random(5000, np.float32)
            other.put_column("c", target, values, rows=rows)
            for row, value in zip(rows, values, strict=True):
                expected[row] = value
            other.commit()
    first, found = trajstore.open(place.url, **place.kwargs).snapshot.column("c")[target]
    assert first == 0
    assert found.tobytes() == expected.tobytes()


# ---- several writers ------------------------------------------------------------------------------------


def test_the_column_of_the_newest_writer_counts() -> None:
    store, target = new_store()
    old, new = store.writer("old", commit_seconds=None), store.writer("new", commit_seconds=None)
    old.put_column("c", target, np.full(5, 1.0))
    old.commit()
    assert_column(store, target, 0, np.full(5, 1.0))
    new.put_column("c", target, np.full(3, 2.0), first=1)
    new.commit()
    old.put_column("c", target, np.full(6, 3.0))  # later, but of the older stream
    old.put_column("d", target, np.full(6, 4.0))
    old.commit()
    assert_column(store, target, 1, np.full(3, 2.0))
    assert_column(store, target, 0, np.full(6, 4.0), "d")
    for writer in (old, new):
        writer.close()


def test_columns_of_streams_that_are_not_here_are_left_out() -> None:
    store, _ = new_store()
    with store.writer(commit_seconds=None) as writer:
        writer.put_column("c", trajstore.format.ids.new_id("gone"), np.ones(3))
    assert column(store) == {}


# ---- snapshots, generations, plain zarr -----------------------------------------------------------------


def test_a_snapshot_shows_the_column_as_it_was_or_says_that_it_is_gone() -> None:
    store, target = new_store()
    writer = store.writer(commit_seconds=None)
    writer.put_column("c", target, np.zeros(5))
    writer.commit()
    before = trajstore.open(store.url).snapshot
    writer.put_column("c", target, np.ones(2), rows=np.array([1, 2]))
    writer.commit()
    between = trajstore.open(store.url).snapshot
    assert before.column("c")[target][1].tolist() == [0, 0, 0, 0, 0]
    for i in range(4):
        writer.put_column("c", target, np.full(5, 2.0 + i))
        writer.commit()
        for snapshot, expected in ((before, [0, 0, 0, 0, 0]), (between, [0, 1, 1, 0, 0])):
            with contextlib.suppress(SnapshotExpiredError):
                assert snapshot.column("c")[target][1].tolist() == expected
    with pytest.raises(SnapshotExpiredError):
        between.column("c")
    writer.close()


def files_of(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def test_generations_take_two_places_in_turn(tmp_path: Path) -> None:
    store, target = new_store(str(tmp_path / "s"))
    writer = store.writer(commit_seconds=None)
    for i in range(6):
        writer.put_column("c", target, np.full(40_000 if i == 0 else 5, float(i)))
        writer.commit()
        writer.put_column("c", target, np.full(2, 9.0), rows=np.array([1, 2]))
        writer.commit()
    folder = tmp_path / "s" / "streams" / writer.stream / "columns" / target / "c"
    assert {name.split("/")[0] for name in files_of(folder)} == {"0", "1", "zarr.json"}
    writer.close()


@pytest.mark.parametrize("n_generations", [1, 2, 4])
@pytest.mark.parametrize("is_closed", [True, False])
def test_plain_zarr_walks_the_columns(tmp_path: Path, n_generations: int, is_closed: bool) -> None:
    store, target = new_store(str(tmp_path / "s"))
    writer = store.writer(commit_seconds=None)
    for i in range(n_generations):
        writer.put_column("c", target, np.full(5, float(i)))
        writer.put_column("c", target, np.full(2, 9.0), rows=np.array([1, 2]))
        writer.commit()
    writer.close() if is_closed else writer.release()
    root = zarr.open_group(tmp_path / "s", mode="r")
    nodes = dict(root.members(max_depth=None))  # a warning is an error here
    record = next(r for r in trajstore.open(tmp_path / "s").streams if r.id == writer.stream)
    prefix = f"streams/{writer.stream}/columns/{target}/c/{record.columns[target]['c'].generation % 2}"
    arrays = {name: nodes[f"{prefix}/{name}"][...] for name in ("values", "delta_rows", "delta_values")}  # type: ignore[index, union-attr]
    assert arrays["values"].tolist() == [n_generations - 1] * 5  # type: ignore[union-attr]
    assert arrays["delta_rows"].tolist() == [1, 2]  # type: ignore[union-attr]
    assert arrays["delta_values"].tolist() == [9.0, 9.0]  # type: ignore[union-attr]


# ---- failures -------------------------------------------------------------------------------------------


def life(url: str, plan: Plan, n_tries: int) -> tuple[FaultyStorage, str, str]:
    """Steps and columns in the same commits, each tried so many times; every third brings a new generation."""
    storage = FaultyStorage(real_storage(url), plan)
    with through(storage):
        store = trajstore.open(url, fsync=False)
    target = store.streams[0].id
    writer = store.writer("life", commit_seconds=None)
    for i in range(7):
        writer.append_episode(steps(3), terminated=True)
        if i % 3 == 0:
            writer.put_column("c", target, np.arange(20.0) + i)
        else:
            writer.put_column("c", target, np.array([100.0 + i, 200.0 + i]), rows=np.array([i, i + 5]))
        for left in reversed(range(n_tries)):
            try:
                writer.commit()
                break
            except StorageError:
                assert left
    writer.release()
    return storage, target, writer.stream


def outcome(url: str, target: str, stream: str) -> tuple[list[float], int, list[int]]:
    store = trajstore.open(url, fsync=False)
    record = next(r for r in store.streams if r.id == stream)
    lengths = [
        int(n) for n, s in zip(store.episodes["length"], store.episodes["stream"], strict=True) if s == stream
    ]
    return store.snapshot.column("c")[target][1].tolist(), record.rows, lengths


@pytest.mark.parametrize("is_after", [False, True], ids=["error", "lost_answer"])
def test_a_commit_tried_again_writes_the_same(is_after: bool) -> None:
    store, _ = new_store()
    storage, target, stream = life(store.url, Plan(), 1)
    expected = outcome(store.url, target, stream)
    assert expected[1:] == (21, [3] * 7)
    first = next(call.number for call in storage.calls if call.action == "put")
    for at in range(first + is_after, len(storage.calls) + 1, 3):
        store, _ = new_store()
        storage, target, stream = life(store.url, FailOnce(at, is_after, broken), 2)
        assert outcome(store.url, target, stream) == expected, storage.calls[at - 1]


def test_values_that_were_not_committed_do_not_come_with_a_block_that_failed() -> None:
    store, target = new_store()

    def fail() -> None:
        with store.writer(commit_seconds=None) as writer:
            writer.put_column("c", target, np.ones(3))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert column(store) == {}


# ---- bad arguments --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "a/b", "..", ".x", "-x", "x" * 65, "a b", "é", "a\n", "zarr.json", 3, None])
def test_bad_names_are_refused(name: Any) -> None:
    store, target = new_store()
    with store.writer(commit_seconds=None) as writer:
        with pytest.raises(DataError, match="expected a plain name and a stream id"):
            writer.put_column(name, target, np.ones(3))
        writer.commit()
    assert all(not record.columns for record in store.refresh().streams)


@pytest.mark.parametrize("target", ["", "x", "../x", "a/b-01k7hged77h636piqfm143vidh", 3, None])
def test_bad_targets_are_refused(target: Any) -> None:
    store, _ = new_store()
    with store.writer(commit_seconds=None) as writer, pytest.raises(DataError, match="a stream id"):
        writer.put_column("c", target, np.ones(3))


@pytest.mark.parametrize(
    ("kwargs", "error"),
    [
        ({"values": np.array(["a", "b"])}, SchemaError),
        ({"values": np.array([object()])}, SchemaError),
        ({"values": np.array([1j])}, SchemaError),
        ({"values": np.array([1, 2], ">f4")}, SchemaError),
        ({"values": np.array("2020-01-01", "datetime64[s]")[None]}, SchemaError),
        ({"values": np.float32(1.0)}, DataError),
        ({"values": np.array(1.0)}, DataError),
        ({"values": [1.0, 2.0]}, DataError),
        ({"values": np.ones((3, 0))}, SchemaError),
        ({"values": np.ones(3), "first": -1}, DataError),
        ({"values": np.ones(3), "first": 1 << 63}, DataError),
        ({"values": np.ones(3), "first": 1.5}, DataError),
        ({"values": np.ones(3), "first": True}, DataError),
    ],
    ids=lambda value: re.sub(r" at 0x[0-9a-f]+", "", str(value)),
)
def test_bad_values_are_refused_and_the_store_stays_as_it_was(kwargs: Any, error: type[Exception]) -> None:
    store, target = new_store()
    with store.writer(commit_seconds=None) as writer:
        with pytest.raises(error):
            writer.put_column("c", target, **kwargs)
        writer.put_column("d", target, np.ones(2))
    assert column(store) == {}
    assert_column(store, target, 0, np.ones(2), "d")


@pytest.mark.parametrize(
    ("rows", "values"),
    [
        (np.array([1, 2]), np.ones(3, np.float32)),
        (np.array([[1], [2]]), np.ones(2, np.float32)),
        (np.array([1, 2], np.int32), np.ones(2, np.float32)),
        (np.array([1.0, 2.0]), np.ones(2, np.float32)),
        ([1, 2], np.ones(2, np.float32)),
        (np.array([-1]), np.ones(1, np.float32)),
        (np.array([4]), np.ones(1, np.float32)),
        (np.array([1 << 62]), np.ones(1, np.float32)),
        (np.array([6]), np.ones(1, np.float64)),
        (np.array([6]), np.ones(1, np.int64)),
        (np.array([6]), np.ones((1, 2), np.float32)),
    ],
    ids=lambda value: re.sub(r" at 0x[0-9a-f]+", "", str(value)),
)
def test_bad_changes_are_refused_and_the_column_stays_as_it_was(rows: Any, values: Array) -> None:
    store, target = new_store()
    with store.writer(commit_seconds=None) as writer:
        writer.put_column("c", target, np.arange(6, dtype=np.float32), first=5)
        with pytest.raises(DataError, match="column 'c'"):
            writer.put_column("c", target, values, rows=rows)
        writer.put_column("c", target, np.ones(1, np.float32), rows=np.array([5]))
    assert_column(store, target, 5, np.array([1, 1, 2, 3, 4, 5], np.float32))


def test_rows_can_be_changed_only_where_the_writer_has_put_the_column() -> None:
    store, target = new_store()
    with store.writer(commit_seconds=None) as writer:
        writer.put_column("c", target, np.ones(3))
    with store.writer(commit_seconds=None) as writer:
        with pytest.raises(DataError, match="expected a put of the whole column before a change of rows"):
            writer.put_column("c", target, np.ones(1), rows=np.array([1]))
        writer.put_column("d", target, np.ones(3))
        with pytest.raises(DataError, match="expected a put of the whole column before a change of rows"):
            writer.put_column("c", target, np.ones(1), rows=np.array([1]))


def test_a_closed_writer_takes_no_columns() -> None:
    store, target = new_store()
    writer = store.writer(commit_seconds=None)
    writer.close()
    with pytest.raises(ClosedError):
        writer.put_column("c", target, np.ones(3))


def test_a_column_that_does_not_exist_is_refused_with_the_names_of_those_that_do(url: str) -> None:
    store = trajstore.create(url)
    with store.writer() as writer:
        writer.append_episode({"x": np.arange(3)})
        writer.commit()
        writer.put_column("value", writer.stream, np.ones(3, np.float32))
    with pytest.raises(trajstore.DataError, match=r"no derived column 'nope' in .*; it has value"):
        store.refresh().column("nope")
