"""Merging: every episode that the sources show is in the new store, bit by bit, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trajstore
from tests.conftest import Place
from tests.store.test_checkpoints import SCHEMA, saved, shown, step, steps
from tests.support.faulty import DieAt, Died, FaultyStorage, real_storage
from tests.support.sharding import mark, read_record
from trajstore.errors import CorruptionError, SchemaError, StoreExistsError, StoreNotFoundError
from trajstore.store import merging
from trajstore.store.copying import copy
from trajstore.store.merging import MergeReport, merge
from trajstore.store.packing import pack
from trajstore.store.verify import verify

MakePlace = Callable[[str], Place]


def build(url: str, seed: int, *, at: str = "") -> trajstore.Store:
    """Two sealed streams, one with a column of the other, and one of a writer that died in an episode."""
    store = trajstore.create(url, SCHEMA, fsync=False)
    with store.writer(f"old{at}", commit_seconds=None) as old:
        old.append_episode(steps(9, seed, n_final=1), terminated=True, metadata={"task": "reach", "note": "\x1b["})
        old.append_episode(steps(4, seed + 1), truncated=True)
    with store.writer("mid", commit_seconds=None) as mid:
        mid.append_episode(steps(5, seed + 2), terminated=True)
        mid.commit()
        mid.put_column("advantage", old.stream, np.arange(14.0) + seed)
        mid.put_column("priority", mid.stream, np.ones(5, np.float32))
    writer = store.writer("dead", commit_seconds=None)
    for t in range(6):
        writer.append(step(t))
    writer.commit()
    writer.release()
    store.refresh()
    return store


def merged(target: str, *sources: str) -> MergeReport:
    return merge(target, sources, fsync=False)


def closed(view: dict[Any, Any]) -> dict[Any, Any]:
    """What a store shows, with open episodes as cut."""
    return {key: ("cut" if row[0] == "open" else row[0], *row[1:]) for key, row in view.items()}


@pytest.mark.parametrize(("from_", "to"), [("local", "local"), ("memory", "local"), ("local", "memory")])
def test_a_merged_store_has_the_episodes_of_all_sources_under_their_handles(
    new_place: MakePlace, from_: str, to: str
) -> None:
    a, b, target = new_place(from_).url, new_place(from_).url, new_place(to).url
    first, second = build(a, 1), build(b, 50)
    report = merged(target, a, b)
    assert verify(target).problems == []
    store = trajstore.open(target)
    assert shown(store) == closed(shown(first)) | closed(shown(second))
    assert [(s.n_streams, s.n_episodes, s.n_steps) for s in report.sources] == [(3, 4, 24)] * 2
    assert all(record.is_sealed and record.world is None for record in store.streams)
    times = {record.id: record.created_at for record in (*first.streams, *second.streams)}
    assert {record.id: record.created_at for record in store.streams} == times
    for source in (first, second):
        for name in ("advantage", "priority"):
            for stream, (start, values) in source.snapshot.column(name).items():
                there = store.snapshot.column(name)[stream]
                assert there[0] == start
                np.testing.assert_array_equal(there[1], values)


def test_a_merged_store_is_written_and_sampled(new_place: MakePlace) -> None:
    a, b, target = (new_place("memory").url for _ in range(3))
    build(a, 1), build(b, 2)
    merged(target, a, b)
    with trajstore.ReplayBuffer(target, exist="join") as buffer:
        n = buffer.n_steps
        buffer.add_episode(steps(5, 9), terminated=True)
        assert buffer.n_steps == n + 5 == 53
        assert len(buffer.sample(16)["reward"]) == 16


def test_what_a_source_does_not_show_stays_behind(new_place: MakePlace) -> None:
    a, b, target = new_place("local").url, new_place("local").url, new_place("local").url
    first, _ = build(a, 1), build(b, 2)
    old = first.streams[0].id
    saved(real_storage(a), "kept")
    mark(Path(a), read_record(Path(a), old), first_row=4)  # the first episode is headless
    with first.writer("later", commit_seconds=None) as later:
        later.append_episode(steps(3, 7), terminated=True)
        later.set_view(discarded={old: [1]})
    report = merged(target, a, b)
    assert verify(target).problems == []
    store = trajstore.open(target)
    assert shown(store) == closed(shown(trajstore.open(a))) | closed(shown(trajstore.open(b)))
    headless = [row for row in store.episodes if row["is_headless"]]
    assert [(row["stream"], row["episode"], row["length"]) for row in headless] == [(old, 0, 5)]
    assert [source.n_checkpoints for source in report.sources] == [1, 0]
    assert store.checkpoints == []


def test_packed_streams_are_merged_without_their_originals(new_place: MakePlace) -> None:
    a, target = new_place("local").url, new_place("local").url
    store = trajstore.create(a, SCHEMA, fsync=False)
    with store.writer("w", commit_seconds=None) as writer:
        for i in range(12):
            writer.append_episode(steps(16, i), terminated=True)
            writer.commit()
    assert pack(a, wait=True, grace_s=0).packed
    merged(target, a)
    assert verify(target).problems == []
    assert shown(trajstore.open(target)) == shown(trajstore.open(a))
    assert [record.id for record in trajstore.open(target).streams] == [writer.stream]


def test_a_stream_of_two_sources_is_taken_once_and_another_of_its_id_gets_a_new_one(new_place: MakePlace) -> None:
    a, b, c, target = (new_place("local").url for _ in range(4))
    store = trajstore.create(a, SCHEMA, fsync=False)
    with store.writer("one") as one:
        one.append_episode(steps(5, 1), terminated=True)
    with store.writer("two") as two:
        two.append_episode(steps(4, 2), terminated=True)
        two.put_column("advantage", two.stream, np.arange(4.0))
    copy(a, b, fsync=False)
    copy(a, c, fsync=False)
    spans = trajstore.open(c).snapshot.readers[1].read_spans()
    assert spans.ints[0, 0] == 0
    record = read_record(Path(c), two.stream)
    mark(Path(c), record, first_row=1)  # other rows than in the others
    report = merged(target, a, b, c)
    assert verify(target).problems == []
    assert [source.repeated for source in report.sources] == [(), (one.stream, two.stream), (one.stream,)]
    (new,) = report.sources[2].renamed.values()
    found = trajstore.open(target)
    assert sorted(found.episodes["length"].tolist()) == [3, 4, 5]
    assert {record.id for record in found.streams} == {one.stream, two.stream, new}
    np.testing.assert_array_equal(found.snapshot.column("advantage")[new][1], np.arange(4.0))


def test_different_schemas_are_refused_by_the_name_of_the_field(new_place: MakePlace) -> None:
    a, b, target = new_place("memory").url, new_place("memory").url, new_place("memory").url
    build(a, 1)
    trajstore.create(b, {"observation": trajstore.Field("float32", (3,))})
    with pytest.raises(SchemaError, match=r"different schemas: observation: float32.*2.*in memory.*action: "):
        merged(target, a, b)
    with pytest.raises(StoreNotFoundError):
        trajstore.open(target)


def test_fields_with_a_fill_may_be_missing_in_a_source(new_place: MakePlace) -> None:
    a, b, target = new_place("memory").url, new_place("memory").url, new_place("memory").url
    for url, more in ((a, {}), (b, {"speed": trajstore.Field("float32", fill=2.0)})):
        with trajstore.create(url, {"x": trajstore.Field("int64"), **more}).writer() as writer:
            data = {"x": np.arange(3)} | {name: np.zeros(3, np.float32) for name in more}
            writer.append_episode(data, truncated=True)
    merged(target, a, b)
    store = trajstore.open(target)
    assert [store.read_episode(i)["speed"].tolist() for i in range(2)] == [[2.0] * 3, [0.0] * 3]
    assert verify(target).problems == []


def test_stores_without_data_are_merged(new_place: MakePlace) -> None:
    a, b, target = (new_place("memory").url for _ in range(3))
    trajstore.create(a)
    trajstore.create(b, SCHEMA)
    merged(target, a, b)
    assert trajstore.open(target).schema == SCHEMA
    with pytest.raises(StoreExistsError, match="already a store"):
        merged(target, a)
    with pytest.raises(ValueError, match="at least one URL"):
        merge(target, a)  # type: ignore[arg-type]


def test_a_lost_object_is_damage_and_no_store_appears(new_place: MakePlace) -> None:
    a, target = new_place("local").url, new_place("local").url
    build(a, 1)
    next(Path(a).glob("streams/mid-*/steps/reward/c.0")).unlink()
    with pytest.raises(CorruptionError, match=r"an object is missing.*trajstore\.repair"):
        merged(target, a)
    with pytest.raises(StoreNotFoundError):
        trajstore.open(target)


def test_a_merge_that_dies_anywhere_leaves_no_store_and_can_be_given_again(
    new_place: MakePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = new_place("memory").url, new_place("memory").url
    expected = closed(shown(build(a, 1)))
    trajstore.create(b, SCHEMA)
    target = new_place("memory").url
    real = merging.open_storage
    counting = FaultyStorage(real(target))
    monkeypatch.setattr(merging, "open_storage", lambda *_, **__: counting)
    merged(target, a, b)
    n_calls = len(counting.calls)
    target = new_place("memory").url
    for at in range(1, n_calls + 1, 7):
        faulty = FaultyStorage(real(target), DieAt(at, is_after=at % 2 == 0))
        monkeypatch.setattr(merging, "open_storage", lambda *_, faulty=faulty, **__: faulty)
        with pytest.raises(Died):
            merged(target, a, b)
        with pytest.raises(StoreNotFoundError):
            trajstore.open(target)
    monkeypatch.setattr(merging, "open_storage", real)
    merged(target, a, b)
    assert shown(trajstore.open(target)) == expected
    assert verify(target).problems == []
