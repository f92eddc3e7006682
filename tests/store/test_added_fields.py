"""Fields that are added to a store: older streams read as their fill value."""

from __future__ import annotations

import math
import pickle  # noqa: TID251 - a snapshot may be sent to another process
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import trajstore
from trajstore import Field, ReplayBuffer, Schema, SchemaError
from trajstore.store.schema_objects import read_schemas
from trajstore.store.verify import verify

OLD = {"obs": Field("float32", (2,), final=True, chunk_rows=8), "reward": Field("float32")}
DEPTH = Field("float32", (3,), fill=-1, chunk_rows=4)
NEW = {**OLD, "depth": DEPTH}
RED = {**OLD, "red": Field("uint8", fill=7)}


def steps(n: int, *, start: int = 0, **more: Any) -> dict[str, Any]:
    t = np.arange(start, start + n, dtype=np.float32)
    obs = np.stack([t, t], axis=1)
    return {"obs": obs, "reward": t, **more}


def depths(n: int) -> Any:
    return np.arange(3 * n, dtype=np.float32).reshape(n, 3)


def add_episode(store: trajstore.Store, n: int, **more: Any) -> None:
    with store.writer() as writer:
        writer.append_episode(steps(n, **more), terminated=True)


def extended(place: Any) -> trajstore.Store:
    """A store with an episode of 5 steps without ``depth``, then one of 6 with it."""
    add_episode(trajstore.create(place.url, OLD, **place.kwargs), 5)
    store = trajstore.create(place.url, NEW, exist_ok=True, **place.kwargs)
    add_episode(store, 6, depth=depths(6))
    return trajstore.open(place.url, **place.kwargs)


def test_older_episodes_read_as_the_fill_of_an_added_field(place: Any) -> None:
    store = extended(place)
    assert store.schema == Schema(NEW)
    old, new = store.read_episode(0), store.read_episode(1)
    np.testing.assert_array_equal(old["depth"], np.full((5, 3), -1, np.float32))
    np.testing.assert_array_equal(old["obs"][:, 0], np.arange(5))
    np.testing.assert_array_equal(new["depth"], depths(6))
    assert old["depth"].dtype == new["depth"].dtype
    assert store.read_episode(0, start=2, stop=2)["depth"].shape == (0, 3)
    assert [("depth" in record.schema.fields) for record in store.streams] == [False, True]
    again = pickle.loads(pickle.dumps(store.snapshot))
    np.testing.assert_array_equal(again.read_episode(0)["depth"], old["depth"])


def test_nothing_is_wrong_with_a_store_that_got_a_field(place: Any) -> None:
    extended(place)
    report = verify(place.url, **place.kwargs)
    assert not report.problems
    assert not report.notes


def test_a_copy_keeps_added_fields(place: Any, tmp_path: Path) -> None:
    extended(place)
    copy = trajstore.copy(place.url, tmp_path / "copy", storage_options=place.kwargs.get("storage_options"))
    assert copy.schema == Schema(NEW)
    np.testing.assert_array_equal(copy.read_episode(0)["depth"], np.full((5, 3), -1, np.float32))
    assert not verify(tmp_path / "copy").problems


def test_the_first_schema_object_does_not_change_and_a_stream_without_the_field_has_no_array(
    tmp_path: Path,
) -> None:
    trajstore.create(tmp_path / "s", OLD)
    before = (tmp_path / "s/schema/zarr.json").read_bytes()
    assert b"fill" not in before
    store = trajstore.create(tmp_path / "s", NEW, exist_ok=True)
    assert (tmp_path / "s/schema/zarr.json").read_bytes() == before
    trajstore.create(tmp_path / "s", NEW, exist_ok=True)
    assert sorted(p.name for p in (tmp_path / "s/schema").iterdir()) == ["1", "zarr.json"]
    add_episode(trajstore.create(tmp_path / "s", OLD, exist_ok=True), 2)
    add_episode(store, 3, depth=depths(3))
    group = zarr.open_group(tmp_path / "s", mode="r")
    has = [("depth" in group[f"streams/{record.id}/steps"]) for record in trajstore.open(tmp_path / "s").streams]
    assert has == [False, True]


def test_a_writer_with_the_old_schema_continues_beside_one_with_the_new(place: Any) -> None:
    first = trajstore.create(place.url, OLD, **place.kwargs)
    with first.writer() as older:
        older.append_episode(steps(2), terminated=True)
        older.commit()
        second = trajstore.create(place.url, NEW, exist_ok=True, **place.kwargs)
        with second.writer() as newer:
            newer.append_episode(steps(3, depth=depths(3)), terminated=True)
        older.append_episode(steps(4), terminated=True)
    first.refresh()
    assert first.schema == Schema(OLD)
    assert set(first.read_episode(2)) == {"obs", "reward"}
    with trajstore.create(place.url, OLD, exist_ok=True, **place.kwargs).writer() as restarted:
        restarted.append_episode(steps(5), terminated=True)
    store = trajstore.open(place.url, **place.kwargs)
    read = [store.read_episode(i)["depth"] for i in range(len(store))]
    assert [len(depth) for depth in read] == [2, 4, 3, 5]
    assert [bool((depth == -1).all()) for depth in read] == [True, True, False, True]


def test_several_additions_are_all_kept(place: Any) -> None:
    extended(place)
    add_episode(trajstore.create(place.url, RED, exist_ok=True, **place.kwargs), 2, red=np.full(2, 3, np.uint8))
    store = trajstore.open(place.url, **place.kwargs)
    assert set(store.schema or ()) == {*NEW, *RED}
    assert len(read_schemas(store.snapshot.storage)) == 3
    assert [int(store.read_episode(i)["red"][0]) for i in range(3)] == [7, 7, 3]
    assert [float(store.read_episode(i)["depth"][0, 0]) for i in range(3)] == [-1, 0, -1]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({**OLD, "reward": Field("float64")}, r"reward: float32 \(\) in the store, float64 \(\)"),
        ({"obs": OLD["obs"]}, r"reward: float32 \(\) in the store, absent in the given schema"),
        ({**OLD, "y": Field("int64")}, r"y: absent in the store, int64 \(\).*Field\(\.\.\., fill=0\)"),
        ({**NEW, "depth": Field("float32", (3,), fill=2)}, r"with fill -1.0 in the store, .* with fill 2.0"),
    ],
    ids=["dtype", "removed", "without a fill", "another fill"],
)  # fmt: skip
def test_other_changes_are_refused_and_change_nothing(place: Any, changed: Any, says: str) -> None:
    extended(place)
    with pytest.raises(SchemaError, match=f"has another schema: .*{says}"):
        trajstore.create(place.url, changed, exist_ok=True, **place.kwargs)
    with pytest.raises(SchemaError, match="has another schema"):
        ReplayBuffer(place.url, schema=changed, **place.kwargs)
    assert trajstore.open(place.url, **place.kwargs).schema == Schema(NEW)


def test_a_field_that_is_not_in_the_store_is_refused_with_the_way_to_add_it(place: Any) -> None:
    add_episode(trajstore.create(place.url, OLD, **place.kwargs), 2)
    store = trajstore.open(place.url, **place.kwargs)
    with store.writer() as writer, pytest.raises(trajstore.DataError, match=r"unexpected 'depth'.*Field\(.*fill="):
        writer.append_episode(steps(3, depth=depths(3)), terminated=True)


def test_two_processes_that_add_different_fields_at_once_add_both(place: Any) -> None:
    add_episode(trajstore.create(place.url, OLD, **place.kwargs), 2)
    barrier, failures = threading.Barrier(6), []

    def add(i: int) -> None:
        barrier.wait()
        try:
            schema = {**OLD, f"f{i % 3}": Field("int8", fill=i % 3)}
            add_episode(
                trajstore.create(place.url, schema, exist_ok=True, **place.kwargs),
                2,
                **{f"f{i % 3}": np.full(2, 50, np.int8)},
            )
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=add, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    store = trajstore.open(place.url, **place.kwargs)
    assert set(store.schema or ()) == {*OLD, "f0", "f1", "f2"}
    for i in range(3):
        values = sorted(int(store.read_episode(e)[f"f{i}"][0]) for e in range(len(store)))
        assert values == sorted([i] * 5 + [50] * 2)
    assert not verify(place.url, **place.kwargs).problems


def test_of_two_additions_that_contradict_each_other_one_wins(place: Any) -> None:
    add_episode(trajstore.create(place.url, OLD, **place.kwargs), 2)
    barrier, outcomes = threading.Barrier(2), []

    def add(dtype: str) -> None:
        barrier.wait()
        try:
            trajstore.create(place.url, {**OLD, "y": Field(dtype, fill=1)}, exist_ok=True, **place.kwargs)
            outcomes.append(dtype)
        except SchemaError:
            outcomes.append("refused")

    threads = [threading.Thread(target=add, args=(dtype,)) for dtype in ("int8", "int16")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count("refused") == 1
    schema = trajstore.open(place.url, **place.kwargs).schema
    assert schema is not None
    assert schema["y"].dtype in outcomes


def test_a_fill_that_is_not_finite_is_kept(tmp_path: Path) -> None:
    add_episode(trajstore.create(tmp_path / "s", OLD), 2)
    fills = {"a": math.nan, "b": math.inf, "c": -math.inf}
    more = {name: Field("bfloat16" if name == "b" else "float16", fill=fill) for name, fill in fills.items()}
    for _ in range(2):
        trajstore.create(tmp_path / "s", {**OLD, **more}, exist_ok=True)
    read = trajstore.open(tmp_path / "s").read_episode(0)
    assert {name: str(float(read[name][1])) for name in fills} == {n: str(f) for n, f in fills.items()}


@pytest.mark.parametrize(
    ("dtype", "fill"),
    [("int8", 200), ("uint8", -1), ("int64", 0.5), ("bool", 1), ("float32", True), ("float16", 1e6),
     ("float32", "0"), ("float32", (1 << 24) + 1), ("bfloat16", 257), ("float64", 10**400),
     ("float32", np.zeros(2))],
)  # fmt: skip
def test_a_fill_that_the_dtype_cannot_hold_is_refused(dtype: str, fill: Any) -> None:
    with pytest.raises(SchemaError, match=r"fill .*: expected .*, for " + dtype):
        Field(dtype, fill=fill)


def test_a_schema_object_that_contradicts_the_one_before_is_refused_and_reported(tmp_path: Path) -> None:
    trajstore.create(tmp_path / "s", NEW)
    trajstore.create(tmp_path / "other", OLD)
    (tmp_path / "s/schema/1").mkdir()
    (tmp_path / "s/schema/1/zarr.json").write_bytes((tmp_path / "other/schema/zarr.json").read_bytes())
    with pytest.raises(
        trajstore.FormatError, match="schema/1: the schema contradicts an earlier one: it lacks 'depth'"
    ):
        trajstore.open(tmp_path / "s")
    (problem,) = verify(tmp_path / "s").problems
    assert "it lacks 'depth'" in str(problem)
    (tmp_path / "s/schema/1").rename(tmp_path / "s/schema/2")
    (problem,) = verify(tmp_path / "s").problems
    assert "schema/1/zarr.json" in str(problem)
    assert "missing" in str(problem)


def test_an_added_field_must_not_have_a_name_that_batches_use(place: Any) -> None:
    trajstore.create(place.url, OLD, **place.kwargs)
    with pytest.raises(SchemaError, match="index"):
        trajstore.create(place.url, {**OLD, "index": Field("int64", fill=0)}, exist_ok=True, **place.kwargs)
    assert trajstore.open(place.url, **place.kwargs).schema == Schema(OLD)
