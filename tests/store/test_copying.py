"""Copies of stores: whole or not there, of live stores and of checkpoints, between all kinds of places."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import trajstore
from tests.conftest import Place
from tests.store.test_checkpoints import SCHEMA, saved, shown, small_state, step, steps
from tests.support.faulty import DieAt, Died, FailOnce, FaultyStorage, Plan, broken, real_storage
from tests.support.sharding import mark, pack, read_record, rewrite
from trajstore.errors import (
    CheckpointNotFoundError,
    CorruptionError,
    SnapshotExpiredError,
    StorageError,
    StoreExistsError,
    StoreNotFoundError,
)
from trajstore.format.commit_record import SessionView
from trajstore.format.ids import new_id
from trajstore.storage import LocalStorage, Storage, open_storage
from trajstore.store.checkpoints import list_checkpoints, read_state, remove
from trajstore.store.copying import copy, copy_objects

MakePlace = Callable[[str], Place]
KINDS = [
    ("local", "local"),
    ("local", "memory"),
    ("memory", "local"),
    pytest.param("s3", "s3", marks=pytest.mark.s3),
    pytest.param("s3", "local", marks=pytest.mark.s3),
    pytest.param("local", "s3", marks=pytest.mark.s3),
]


def build(place: Place) -> Storage:
    """A sealed stream, a checkpoint, and a stream that went on after it and goes on."""
    store = trajstore.create(place.url, SCHEMA, fsync=False, **place.kwargs)
    storage = real_storage(place.url, place.options)
    with store.writer("old", commit_seconds=None) as writer:
        writer.append_episode(steps(9, 1, n_final=1), terminated=True, metadata={"task": "reach"})
        writer.commit()
        writer.put_column("advantage", writer.stream, np.arange(10.0))
    writer = store.writer("new", commit_seconds=None)
    for t in range(6):
        writer.append(step(t))
    writer.commit()
    saved(storage, "then", small_state())
    for t in range(6, 11):
        writer.append(step(t))
    writer.commit()
    writer.release()
    with store.writer("third", commit_seconds=None) as third:
        third.append_episode(steps(5, 4), truncated=True)
    return storage


def copied(source: Place, target: Place, **kwargs: Any) -> trajstore.Store:
    return copy(
        source.url,
        target.url,
        storage_options=source.options or None,
        target_options=target.options or None,
        fsync=False,
        **kwargs,
    )


def opened(place: Place, **kwargs: Any) -> trajstore.Store:
    return trajstore.open(place.url, fsync=False, **place.kwargs, **kwargs)


def walk(place: Place) -> set[str]:
    """Paths of all nodes; a warning is an error here."""
    root = zarr.open_group(place.url, mode="r", storage_options=place.options or None)
    return {path for path, _ in root.members(max_depth=None)} - {"scratch"}


# ---- whole stores ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("from_", "to"), KINDS)
def test_a_copy_is_the_same_store_at_another_place(new_place: MakePlace, from_: str, to: str) -> None:
    source, target = new_place(from_), new_place(to)
    storage = build(source)
    store = copied(source, target)
    assert shown(store) == shown(opened(source))
    assert store.streams == opened(source).streams
    assert store.schema == SCHEMA
    assert walk(target) == walk(source)
    (checkpoint,) = store.checkpoints
    assert checkpoint == list_checkpoints(storage)[0]
    there = real_storage(target.url, target.options)
    assert repr(read_state(there, checkpoint)) == repr(read_state(storage, checkpoint))
    assert shown(opened(target, at="then")) == shown(opened(source, at="then"))
    old = store.streams[0].id
    np.testing.assert_array_equal(store.snapshot.column("advantage")[old][1], np.arange(10.0))
    assert there.list_names("") == sorted({"checkpoints", "schema", "streams", "zarr.json"} | scratch(target))


def scratch(place: Place) -> set[str]:
    return {"scratch"} if "://" not in place.url else set()


def test_a_copy_lives_without_the_original_and_is_written_to(new_place: MakePlace) -> None:
    source, target = new_place("local"), new_place("local")
    storage = build(source)
    expected = shown(opened(source))
    store = copied(source, target)
    for part in ("streams", "checkpoints"):
        storage.remove_tree(part)
    with store.writer("more") as writer:
        key = writer.append_episode(steps(5, 8), terminated=True)
    found = shown(opened(target))
    assert len(found.pop(key)) == 4
    assert found == expected


def test_an_empty_store_and_one_without_a_schema_are_copied(new_place: MakePlace) -> None:
    for schema in (None, SCHEMA):
        source, target = new_place("memory"), new_place("memory")
        trajstore.create(source.url, schema)
        assert copied(source, target).schema == schema
        assert walk(target) == walk(source)
        copied(source, new_place("local")).writer().close()


def test_only_the_full_chunks_of_finished_streams_are_hard_links(new_place: MakePlace) -> None:
    source, target = new_place("local"), new_place("local")
    build(source)
    old, new, third = (record.id for record in copied(source, target).streams)
    links = {
        str(path.relative_to(target.url))
        for path in Path(target.url).rglob("*")
        if path.is_file() and path.stat().st_nlink > 1
    }
    for path in links:
        assert os.path.samefile(Path(source.url) / path, Path(target.url) / path)
    in_streams = {path for path in links if path.startswith("streams")}
    assert {path.partition("/")[2].partition("/")[0] for path in in_streams} == {old, third}
    assert f"streams/{old}/steps/observation/c.1.0" in links
    assert f"streams/{old}/steps/observation/c.2.0" not in links
    assert any("state/0/c.0" in path for path in links)
    assert not any(path.endswith("zarr.json") for path in links)
    assert new not in str(links)


def test_where_links_can_not_be_made_objects_are_copied(
    new_place: MakePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = new_place("local"), new_place("local")
    build(source)
    real = os.link

    def link(src: Any, dst: Any, **kwargs: Any) -> None:
        if str(src).startswith(source.url):
            raise OSError(18, "Invalid cross-device link")
        real(src, dst, **kwargs)

    monkeypatch.setattr(os, "link", link)
    assert shown(copied(source, target)) == shown(opened(source))
    assert not any(path.stat().st_nlink > 1 for path in Path(target.url).rglob("*") if path.is_file())
    assert os.listdir(Path(target.url) / "scratch") == ["zarr.json"]


@pytest.mark.s3
def test_within_one_service_no_chunk_passes_through_this_machine(
    new_place: MakePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = new_place("s3"), new_place("s3")
    build(source)
    got: list[str] = []
    real = type(real_storage(source.url, source.options).source).get

    def get(self: Any, key: str) -> bytes:
        got.append(key)
        return real(self, key)

    monkeypatch.setattr("trajstore.storage.ServiceStorage.get", get)
    store = copied(source, target)
    assert got
    assert not [key for key in got if not key.endswith("zarr.json")]
    monkeypatch.undo()
    assert shown(store) == shown(opened(source))


def test_sharded_and_packed_streams_are_copied(new_place: MakePlace) -> None:
    source, target = new_place("local"), new_place("memory")
    root = Path(source.url)
    store = trajstore.create(root, SCHEMA, fsync=False)
    with store.writer("a") as writer:
        for i in range(4):
            writer.append_episode(steps(8, i), terminated=True)
    with store.writer("b") as other:
        other.append_episode(steps(30, 9), terminated=True)
    pack(root, writer.stream, 0, 16)
    rewrite(root, other.stream, chunks_per_shard=2)
    assert shown(copied(source, target)) == shown(opened(source))


def evict(root: Path, stream: str, first: int) -> None:
    """Give up rows below ``first`` and delete the objects that hold no others."""
    record = read_record(root, stream)
    mark(root, record, first_row=first)
    delete_below(root, stream, first)


def delete_below(root: Path, stream: str, first: int) -> None:
    for path, layout in read_record(root, stream).layouts.items():
        if path.startswith("steps/"):
            for i in range(first // layout.chunk_rows):
                (root / "streams" / stream / path / layout.chunk_key(i)).unlink(missing_ok=True)


def test_evicted_rows_are_not_missed_and_pinned_ones_are_copied(new_place: MakePlace) -> None:
    source = new_place("local")
    root = Path(source.url)
    store = trajstore.create(root, SCHEMA, fsync=False)
    with store.writer("a") as writer:
        for i in range(6):
            writer.append_episode(steps(10, i), terminated=True)
    evict(root, writer.stream, 20)
    saved(open_storage(root), "pinned")
    mark(root, read_record(root, writer.stream), first_row=40)  # rows from 20 on stay, for the checkpoint
    target = new_place("memory")
    assert shown(copied(source, target)) == shown(opened(source))
    assert len(shown(opened(target, at="pinned"))) == 4
    assert shown(opened(target, at="pinned")) == shown(opened(source, at="pinned"))


def test_progress_is_told_from_nothing_to_all(new_place: MakePlace) -> None:
    for at in (None, "then"):
        source, target = new_place("local"), new_place("memory")
        storage = build(source)
        told: list[tuple[int, int]] = []
        copied(source, target, at=at, progress=lambda n, total: told.append((n, total)))  # noqa: B023
        there = real_storage(target.url).tree_sizes("")
        assert {total for _, total in told} == {sum(n for key, n in there.items() if not key.endswith("zarr.json")
                                                   or "/state/" in key)}  # fmt: skip
        assert [n for n, _ in told] == sorted(n for n, _ in told)
        assert (told[0][0], told[-1][0]) == (0, told[-1][1])
        assert len(told) > 4
        assert storage.list_names("streams")


def test_a_progress_that_raises_stops_the_copy(new_place: MakePlace) -> None:
    source, target = new_place("local"), new_place("local")
    build(source)

    def stop(n: int, total: int) -> None:
        if n:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copied(source, target, progress=stop)
    with pytest.raises(StoreNotFoundError):
        opened(target)
    assert shown(copied(source, target)) == shown(opened(source))


# ---- checkpoints -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("from_", "to"), KINDS)
def test_the_copy_of_a_checkpoint_holds_what_it_shows_and_nothing_else(
    new_place: MakePlace, from_: str, to: str
) -> None:
    source, target = new_place(from_), new_place(to)
    storage = build(source)
    saved(storage, "other")
    store = copied(source, target, at="then")
    then = opened(source, at="then")
    assert shown(store) == shown(then) == shown(opened(target, at="latest"))
    assert [record.rows for record in store.streams] == [10, 6]
    assert all(record.is_sealed for record in store.streams)
    assert [c.name for c in store.checkpoints] == ["then"]
    new = store.streams[1].id
    there = real_storage(target.url, target.options)
    assert f"streams/{new}/steps/reward/c.1" in there.list_tree(f"streams/{new}")
    assert f"streams/{new}/steps/reward/c.2" not in there.list_tree(f"streams/{new}")
    assert not [key for key in there.list_tree("streams") if "/columns/" in key]
    walk(target)


def test_the_copy_of_a_checkpoint_leaves_out_chunks_below_its_first_row(new_place: MakePlace) -> None:
    source, target = new_place("local"), new_place("local")
    root = Path(source.url)
    with trajstore.create(root, SCHEMA, fsync=False).writer("a") as writer:
        for i in range(4):
            writer.append_episode(steps(8, i), terminated=True)
    mark(root, read_record(root, writer.stream), first_row=16)
    saved(open_storage(root), "late")
    store = copied(source, target, at="late")
    assert shown(store) == shown(opened(source))
    names = {path.name for path in (Path(target.url) / "streams" / writer.stream / "steps/reward").iterdir()}
    assert names == {"zarr.json", *(f"c.{i}" for i in range(4, 8))}


def test_no_such_checkpoint_is_said_before_anything_is_put(new_place: MakePlace) -> None:
    source, target = new_place("local"), new_place("local")
    build(source)
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint 'never'"):
        copied(source, target, at="never")
    assert not Path(target.url).exists()


class Before(Plan):
    """Does something once, before the first call on a key that contains ``part``."""

    def __init__(self, part: str, function: Callable[[], object], action: str = "get") -> None:
        self._part, self._function, self._action = part, function, action
        self.n_calls = 0

    def before(self, call: Any) -> None:
        if self._part in call.key and call.action == self._action:
            self.n_calls += 1
            if self.n_calls == 1:
                self._function()


def test_a_checkpoint_that_is_removed_while_it_is_copied_is_said(new_place: MakePlace) -> None:
    for part, action in (("steps/reward", "get"), ("state/0/c.0", "get")):
        source, target = new_place("local"), new_place("local")
        storage = build(source)
        checkpoint = list_checkpoints(storage)[0]

        def away(storage: Storage = storage, checkpoint: Any = checkpoint) -> None:
            remove(storage, checkpoint.id)
            storage.remove_tree(f"streams/{next(iter(checkpoint.streams))}")

        faulty = FaultyStorage(storage, Before(part, away, action))
        with pytest.raises(CheckpointNotFoundError, match="was removed while it was copied"):
            copy_objects(faulty, real_storage(target.url), at="then")
        with pytest.raises(StoreNotFoundError):
            opened(target)


# ---- where to --------------------------------------------------------------------------------------------


def test_a_copy_goes_nowhere_where_something_is(place: Place, new_place: MakePlace) -> None:
    source = new_place("memory")
    build(source)
    trajstore.create(place.url, fsync=False, **place.kwargs)
    before = real_storage(place.url, place.options).list_tree("")
    with pytest.raises(StoreExistsError, match="is already a store"):
        copied(source, place)
    with pytest.raises(StoreExistsError, match="is already a store"):
        copied(place, place)
    assert real_storage(place.url, place.options).list_tree("") == before


@pytest.mark.parametrize(
    "key", ["thesis.tex", "streams/precious", "checkpoints/mine/x", "schema/x", f"other/a-{'0' * 26}/x"]
)
def test_a_copy_does_not_touch_what_is_not_of_an_interrupted_copy(new_place: MakePlace, key: str) -> None:
    source, target = new_place("memory"), new_place("local")
    build(source)
    storage = real_storage(target.url)
    left = f"streams/{new_id('w')}/x"
    storage.put(left, b"left")
    storage.put(key, b"precious")
    with pytest.raises(StoreExistsError, match="is not empty"):
        copied(source, target)
    assert storage.get(key) == b"precious"
    assert storage.get(left) == b"left"


def test_what_is_no_store_is_not_copied(new_place: MakePlace) -> None:
    with pytest.raises(StoreNotFoundError):
        copied(new_place("local"), new_place("local"))


# ---- interrupted -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [None, "then"])
@pytest.mark.parametrize(
    ("kind", "stride"), [("local", 7), ("memory", 3), pytest.param("s3", 70, marks=pytest.mark.s3)]
)
def test_a_copy_that_died_at_any_call_is_no_store_and_may_be_made_again(
    new_place: MakePlace, kind: str, stride: int, at: str | None
) -> None:
    source = new_place("memory")
    other = new_place("memory")
    build(source)
    with trajstore.create(other.url, SCHEMA).writer("other") as writer:
        writer.append_episode(steps(3), terminated=True)
    counting = FaultyStorage(real_storage(new_place(kind).url, new_place(kind).options))
    copy_objects(real_storage(source.url), counting, at=at)
    expected = shown(opened(source, at=at))
    for number in range(1, len(counting.calls) + 1, stride):
        target = new_place(kind)
        real = real_storage(target.url, target.options)
        with pytest.raises(Died):
            copy_objects(real_storage(source.url), FaultyStorage(real, DieAt(number, False)), at=at)
        with pytest.raises(StoreNotFoundError):
            opened(target)
        if number % 2:  # also by a copy of another store, which shows nothing of this one
            assert len(copied(other, target)) == 1
        else:
            assert shown(copied(source, target, at=at)) == expected
        walk(target)


def test_a_failing_storage_is_said_and_the_copy_may_be_made_again(new_place: MakePlace) -> None:
    source = new_place("memory")
    build(source)
    reading = FaultyStorage(real_storage(source.url))
    copy_objects(reading, real_storage(new_place("memory").url))
    for number in range(1, len(reading.calls) + 1, 5):
        target = new_place("memory")
        faulty = FaultyStorage(real_storage(source.url), FailOnce(number, False, broken))
        with pytest.raises(StorageError):
            copy_objects(faulty, real_storage(target.url))
        with pytest.raises(StoreNotFoundError):
            opened(target)
    assert shown(copied(source, target)) == shown(opened(source))


def test_two_copies_to_one_place_are_one_store_or_an_error(new_place: MakePlace) -> None:
    source, target = new_place("memory"), new_place("memory")
    build(source)
    real = real_storage(target.url)
    first = FaultyStorage(real, Before("zarr.json", lambda: copied(source, target), "put"))
    with pytest.raises(StoreExistsError, match="another process has created a store there"):
        copy_objects(real_storage(source.url), first)
    assert shown(opened(target)) == shown(opened(source))


# ---- live and damaged stores -----------------------------------------------------------------------------


def test_a_lost_chunk_is_said_and_makes_no_store(new_place: MakePlace) -> None:
    for at in (None, "then"):
        source, target = new_place("local"), new_place("local")
        storage = build(source)
        old = opened(source).streams[0].id
        storage.delete([f"streams/{old}/steps/action/c.0"])
        with pytest.raises(CorruptionError, match=r"an object is missing.*steps/action/c\.0"):
            copied(source, target, at=at)
        with pytest.raises(StoreNotFoundError):
            opened(target)


def test_a_record_that_claims_absurdly_many_rows_ends_the_copy_at_once(new_place: MakePlace) -> None:
    source, target = new_place("local"), new_place("local")
    build(source)
    root = Path(source.url)
    record = read_record(root, opened(source).streams[0].id)
    mark(root, record, rows=1 << 61)
    with pytest.raises(CorruptionError, match="an object is missing"):
        copied(source, target, progress=lambda *_: None)


def test_a_lost_chunk_of_a_checkpoint_is_said(new_place: MakePlace) -> None:
    source, target = new_place("memory"), new_place("memory")
    storage = build(source)
    (checkpoint,) = list_checkpoints(storage)
    chunk = f"checkpoints/{checkpoint.id}/state/0/c.0"
    faulty = FaultyStorage(storage, Before(chunk, lambda: storage.delete([chunk])))
    with pytest.raises(CorruptionError, match=rf"checkpoint '{checkpoint.id}': an object is missing"):
        copy_objects(faulty, real_storage(target.url))


def test_a_copy_of_a_store_that_is_written_to_shows_whole_commits(new_place: MakePlace) -> None:
    source = new_place("local")
    store = trajstore.create(source.url, SCHEMA, fsync=False)
    is_over, has_begun = threading.Event(), threading.Event()

    def write() -> None:
        with store.writer("w", commit_seconds=None) as writer:
            for i in itertools.takewhile(lambda _: not is_over.is_set(), range(10_000)):
                writer.append_episode(steps(7, i % 50, n_final=1), terminated=True)
                writer.commit()
                has_begun.set()

    with ThreadPoolExecutor(1) as threads:
        written = threads.submit(write)
        try:
            assert has_begun.wait(60)
            copies = [copied(source, new_place("local")) for _ in range(3)]
        finally:
            is_over.set()
        written.result()
    for made in copies:
        assert len(made) == made.streams[0].rows // 8
        for i in range(len(made)):
            expected = steps(7, i % 50, n_final=1)
            read = made.read_episode(i)
            assert all(np.array_equal(read[name], values) for name, values in expected.items())


def test_rows_committed_while_a_copy_is_made_are_not_in_it_in_part(new_place: MakePlace) -> None:
    source, target = new_place("memory"), new_place("memory")
    store = trajstore.create(source.url, SCHEMA)
    writer = store.writer("w", commit_seconds=None)
    for t in range(6):
        writer.append(step(t))
    writer.commit()
    before = shown(opened(source))

    def more() -> None:
        for t in range(6, 30):
            writer.append(step(t))
        writer.commit()

    faulty = FaultyStorage(real_storage(source.url), Before("steps/reward", more))
    copy_objects(faulty, real_storage(target.url))
    writer.close()
    assert shown(opened(target)) == before
    assert opened(target).streams[0].rows == 6


def test_a_column_that_is_written_anew_while_it_is_copied_is_copied_again(new_place: MakePlace) -> None:
    source, target = new_place("memory"), new_place("memory")
    store = trajstore.create(source.url, SCHEMA)
    writer = store.writer("w", commit_seconds=None)
    writer.append_episode(steps(10), terminated=True)
    writer.commit()

    def put(value: float, n_rows: int = 10) -> None:
        writer.put_column("priority", writer.stream, np.full(n_rows, value, np.float32))
        writer.commit()

    def anew() -> None:
        writer.append_episode(steps(10), terminated=True)
        writer.commit()
        for value in (2.0, 3.0):  # the second goes where the first was
            put(value, 20)

    put(1.0)
    plan = Before("/values/c.0", anew)
    copy_objects(FaultyStorage(real_storage(source.url), plan), real_storage(target.url))
    writer.close()
    assert plan.n_calls == 2
    ((first, values),) = opened(target).snapshot.column("priority").values()
    assert (first, values.tolist()) == (0, [3.0] * 20)
    assert opened(target).streams[0].rows == 20


def test_a_column_never_names_rows_that_were_not_copied(new_place: MakePlace) -> None:
    source, target = new_place("memory"), new_place("memory")
    store = trajstore.create(source.url, SCHEMA)
    first = store.writer("a", commit_seconds=None)
    second = store.writer("b", commit_seconds=None)
    for writer in (first, second):
        writer.append_episode(steps(10), terminated=True)
        writer.commit()

    def more() -> None:
        first.append_episode(steps(10), terminated=True)
        first.commit()
        second.put_column("advantage", first.stream, np.arange(20.0))
        second.commit()

    # After the record of the first stream is read, and before that of the second is.
    plan = Before(f"streams/{second.stream}/zarr.json", more)
    copy_objects(FaultyStorage(real_storage(source.url), plan), real_storage(target.url))
    for writer in (first, second):
        writer.close()
    found = opened(target).snapshot.column("advantage")
    assert found[first.stream][1].tolist() == list(range(20))


def test_rows_evicted_while_a_copy_is_made_are_left_out(new_place: MakePlace) -> None:
    source, target = new_place("local"), new_place("local")
    root = Path(source.url)
    store = trajstore.create(root, SCHEMA, fsync=False)
    streams = []
    for name in ("a", "b"):
        with store.writer(name) as writer:
            for i in range(6):
                writer.append_episode(steps(8, i), terminated=True)
        streams.append(writer.stream)

    def give_up() -> None:
        evict(root, streams[0], 16)
        record = read_record(root, streams[1])
        mark(root, replace(record, rows=record.rows), view=SessionView())
        open_storage(root).remove_tree(f"streams/{streams[1]}")

    plan = Before(f"{streams[1]}/steps/reward", give_up)
    copy_objects(FaultyStorage(open_storage(root), plan), real_storage(target.url))
    assert shown(opened(target)) == shown(opened(source))
    assert {record.id for record in opened(target).streams} == {streams[0]}
    assert len(opened(target)) == 4
    walk(target)


def test_a_store_that_changes_faster_than_it_is_copied_is_said(new_place: MakePlace) -> None:
    source, target = new_place("memory"), new_place("memory")
    store = trajstore.create(source.url, SCHEMA)
    writer = store.writer("w", commit_seconds=None)
    writer.append_episode(steps(10), terminated=True)
    writer.commit()

    class Always(Plan):
        def before(self, call: Any) -> None:
            if "/values/c.0" in call.key:
                writer.put_column("priority", writer.stream, np.ones(10, np.float32))
                writer.commit()

    writer.put_column("priority", writer.stream, np.ones(10, np.float32))
    writer.commit()
    with pytest.raises(SnapshotExpiredError, match="copy a checkpoint of it, with at="):
        copy_objects(FaultyStorage(real_storage(source.url), Always()), real_storage(target.url))
    writer.close()


# ---- what storages do for it -----------------------------------------------------------------------------


def test_a_linked_copy_shares_its_bytes_and_a_plain_one_does_not(tmp_path: Path) -> None:
    source, target = (LocalStorage(tmp_path / name, fsync=True) for name in "ab")
    source.put("x", b"data")
    source.copy("x", target, "p/linked", may_link=True)
    source.copy("x", target, "p/plain")
    assert os.path.samefile(tmp_path / "a/x", tmp_path / "b/p/linked")
    assert not os.path.samefile(tmp_path / "a/x", tmp_path / "b/p/plain")
    source.copy("x", target, "p/linked", may_link=True)
    assert os.listdir(tmp_path / "b/scratch") == ["zarr.json"]


def test_a_local_tree_is_gone_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(tmp_path, fsync=True)
    for i in range(3):
        storage.put(f"p/a/{i}/zarr.json", b"x")

    def die(path: Any) -> None:
        assert not (tmp_path / "p/a").exists()
        assert Path(path).parent == tmp_path / "scratch"
        raise Died

    monkeypatch.setattr("shutil.rmtree", die)
    with pytest.raises(Died):
        storage.remove_tree("p/a")
    assert storage.list_tree("p") == []


def test_elsewhere_the_record_of_a_tree_goes_first(new_place: MakePlace) -> None:
    real = real_storage(new_place("memory").url)
    for key in ("p/a", "p/zarr.json", "p/b/c"):
        real.put(key, b"x")
    faulty = FaultyStorage(real)
    faulty.remove_tree("p")
    assert [call.key for call in faulty.calls if call.action == "delete"] == ["p/zarr.json", "p/a", "p/b/c"]
