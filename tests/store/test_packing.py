"""A packed store shows the same steps under the same handles, whatever happens while it is packed."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import trajstore
from tests.conftest import Place
from tests.support.faulty import Call, DieAt, Died, FailOnce, FaultyStorage, Plan, broken, real_storage
from tests.support.sharding import mark, read_record, stream_arrays, write_record
from tests.support.sharding import pack as pack_part
from trajstore import DataError, Field, Schema, SchemaError, SnapshotExpiredError, StorageError, Store, Windows
from trajstore.cli.app import app
from trajstore.format.array_layout import ArrayLayout
from trajstore.format.codec import Codec
from trajstore.format.commit_record import Replaces, SessionView
from trajstore.format.ids import new_id
from trajstore.format.lineage import Lineage
from trajstore.format.marks import newest_world
from trajstore.format.packed_streams import shown_records
from trajstore.format.shard import assemble_shard
from trajstore.store import checkpoints, packing
from trajstore.store.checkpoints import Checkpoint
from trajstore.store.packed_arrays import PackSettings
from trajstore.store.packing import Packing, pack, remove_replaced
from trajstore.store.snapshot import Snapshot
from trajstore.store.verify import verify

MakePlace = Callable[[str], Place]

SCHEMA = Schema(
    {
        "observation": Field("float32", (3,), chunk_rows=4, final=True),
        "action": Field("int64", chunk_rows=8),
        "reward": Field("float32", chunk_rows=2),
    },
    episode={"task": "str", "success": "bool"},
)


def steps(n: int, first: int) -> dict[str, Any]:
    at = np.arange(first, first + n)
    return {
        "observation": np.repeat(np.arange(first, first + n + 1)[:, None], 3, 1).astype(np.float32),
        "action": at,
        "reward": at.astype(np.float32),
    }


def write(store: Store, name: str = "a", n_episodes: int = 6, n: int = 7, **options: Any) -> str:
    """A sealed stream of several commits; its last episode is cut. Returns its id."""
    with store.writer(name, commit_seconds=None, **options) as writer:
        for i in range(n_episodes):
            metadata = {"task": f"task {i}", "success": i % 2 == 0, "note": "ü" * i}
            writer.append_episode(steps(n, 100 * i), terminated=True, metadata=metadata)
            writer.commit()
        for t in range(3):
            writer.append({"observation": np.full(3, t, np.float32), "action": t, "reward": 1.0}, env=1)
    return writer.stream


def made(place: Place) -> Store:
    return trajstore.create(place.url, SCHEMA, fsync=False, **place.kwargs)


def opened(place: Place, **options: Any) -> Store:
    return trajstore.open(place.url, fsync=False, **place.kwargs, **options)


def packed(place: Place, **options: Any) -> packing.PackReport:
    return pack(place.url, fsync=False, **place.kwargs, **options)


def swept(place: Place, **options: Any) -> packing.PackReport:
    """Pack and remove the originals."""
    return packed(place, wait=True, grace_s=0, **options)


def contents(store: Store) -> list[Any]:
    """Everything that a reader finds, and its names."""
    table, found = store.episodes, []
    for i, row in enumerate(table):
        arrays = store.read_episode(i, columns=True)
        found.append((tuple(table.key(i)), row, {name: values.tolist() for name, values in arrays.items()}))
    return found


def data_objects(place: Place) -> list[str]:
    keys = real_storage(place.url, place.options).list_tree("streams")
    return [key for key in keys if not key.endswith("zarr.json")]


@pytest.fixture
def local(tmp_path: Path) -> Place:
    return Place(str(tmp_path / "store"), {})


# ---- what a packed store shows ------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["local", "memory", pytest.param("s3", marks=pytest.mark.s3)])
def test_a_packed_store_shows_the_same_in_few_objects(new_place: MakePlace, backend: str) -> None:
    place = new_place(backend)
    store = made(place)
    streams = [write(store, "a"), write(store, "b", 3)]
    store.refresh()
    before, n_objects = contents(store), len(data_objects(place))
    report = packed(place)
    assert [one.stream for one in report.packed] == streams
    assert contents(opened(place)) == before
    assert contents(store) == before  # a reader that is open reads on
    assert verify(opened(place)).is_clean
    assert swept(place).removed == tuple(streams)
    assert contents(opened(place)) == before
    assert n_objects > 60
    assert len(data_objects(place)) == 2 * 6  # one of each array
    assert verify(opened(place)).notes == []
    assert [record.id for record in opened(place).streams] == streams
    assert [one.n_packed_objects for one in report.packed] == [
        len(real_storage(place.url, place.options).list_tree(f"streams/{one.packed_in}")) for one in report.packed
    ]
    sizes = [real_storage(place.url, place.options).tree_sizes(f"streams/{one.packed_in}") for one in report.packed]
    assert [one.n_packed_bytes for one in report.packed] == [sum(found.values()) for found in sizes]


def test_plain_zarr_walks_and_reads_a_packed_store(local: Place) -> None:
    stream = write(made(local))
    root = Path(local.url)
    before = stream_arrays(root, stream)
    (one,) = swept(local).packed
    assert one.packed_in is not None
    after = stream_arrays(root, one.packed_in)
    assert before.keys() == after.keys()
    for path, values in before.items():
        np.testing.assert_array_equal(after[path], values)
        alone = zarr.open_array(root / "streams" / one.packed_in / path, mode="r")
        np.testing.assert_array_equal(alone[...], values)
        assert alone.shards == (-(-len(values) // alone.chunks[0]) * alone.chunks[0], *values.shape[1:])


def test_keys_and_handles_of_before_stay_valid(local: Place) -> None:
    store = made(local)
    write(store)
    store.refresh()
    keys = [store.episodes.key(i) for i in range(len(store))]
    reader = trajstore.Reader(store, seed=1)
    batch = reader.sample(16, Windows(3))
    index, values = batch["index"].clone(), batch["observation"].clone()
    swept(local)
    fresh = opened(local)
    assert [fresh.episodes.key(i) for i in range(len(fresh))] == keys
    assert all(fresh.read_episode(key) for key in keys)
    again = trajstore.Reader(fresh, seed=2)
    assert (again.at(index, Windows(3))["observation"] == values).all()


def drawn(place: Place, **options: Any) -> list[Any]:
    reader = trajstore.Reader(opened(place), seed=7, **options)
    batches = [reader.sample(32, Windows(3)) for _ in range(3)]
    return [{name: value.tolist() for name, value in batch.items()} for batch in batches]


@pytest.mark.parametrize("compiled", [True, False])
def test_the_same_seed_draws_the_same_batches(local: Place, compiled: bool) -> None:
    store = made(local)
    write(store, "a")
    write(store, "b")
    write(store, "c", 2)
    before = drawn(local, compiled=compiled)
    packed(local, streams=[store.refresh().streams[1].id])
    assert drawn(local, compiled=compiled) == before
    swept(local)
    assert drawn(local, compiled=compiled) == before


def test_a_reader_follows_a_packed_stream_at_its_refresh(local: Place) -> None:
    store = made(local)
    write(store, "a")
    write(store, "b")
    reader, twin = (trajstore.Reader(opened(local), seed=3, cache_bytes="64KiB") for _ in range(2))
    expected = [twin.sample(16, Windows(2))["action"].tolist() for _ in range(4)]
    found = [reader.sample(16, Windows(2))["action"].tolist()]
    swept(local, chunk_bytes=64)
    reader.refresh()
    found += [reader.sample(16, Windows(2))["action"].tolist() for _ in range(3)]
    assert found == expected


def test_a_reader_of_removed_originals_is_told_to_refresh(local: Place) -> None:
    write(made(local))
    store, table = opened(local), opened(local)
    reader = trajstore.Reader(store, seed=3)
    assert len(store)
    swept(local)
    with pytest.raises(SnapshotExpiredError, match="was packed; refresh"):
        store.read_episode(0)
    assert len(reader.sample(4, Windows(2))["action"]) == 4  # a reader of batches finds the packed ones itself
    with pytest.raises(SnapshotExpiredError, match="was packed; refresh"):
        len(table)
    reader.refresh()
    table.refresh()
    assert len(table) == 7
    assert contents(table) == contents(opened(local))
    assert len(reader.sample(4, Windows(2))["action"]) == 4


def test_a_pickled_snapshot_of_a_packed_stream_reads_the_same(local: Place) -> None:
    write(made(local))
    swept(local)
    snapshot = opened(local).snapshot
    copy = ForkingPickler.loads(ForkingPickler.dumps(snapshot))
    assert copy.streams == snapshot.streams
    assert copy.read_episode(2)["action"].tolist() == snapshot.read_episode(2)["action"].tolist()


def test_evicted_episodes_stay_in_the_history(local: Place) -> None:
    store = made(local)
    stream = write(store)
    mark(Path(local.url), read_record(Path(local.url), stream), first_row=17, is_sealed=True)
    store.refresh()
    before, history = contents(store), list(store.history())
    report = swept(local)
    assert report.packed[0].stream == stream
    fresh = opened(local)
    assert contents(fresh) == before
    assert list(fresh.history()) == history
    assert [row["is_evicted"] for row in history].count(True) == 2
    assert verify(fresh).is_clean


@pytest.mark.parametrize("options", [{"shard_bytes": 64, "chunk_bytes": 16}, {}])
def test_rows_that_are_gone_are_not_copied(local: Place, options: dict[str, Any]) -> None:
    store = made(local)
    stream, root = write(store), Path(local.url)
    mark(root, read_record(root, stream), first_row=26)
    folder = root / "streams" / stream / "steps"
    for path, n in (("observation", 4), ("action", 8), ("reward", 2)):
        for i in range(26 // n):
            (folder / path / f"c.{i}{'.0' if path == 'observation' else ''}").unlink()
    before = contents(opened(local))
    assert len(before) == 4
    (one,) = swept(local, **options).packed
    assert contents(opened(local)) == before
    assert verify(opened(local)).is_clean
    names = [key.rsplit("/", 2)[1:] for key in data_objects(local) if "/steps/reward/" in key]
    assert (min(int(name.split(".")[1]) for _, name in names) > 0) == bool(options)
    assert one.n_packed_objects == len(list((root / "streams" / str(one.packed_in)).rglob("c.*"))) + 9


# ---- which streams are packed -------------------------------------------------------------------


def test_open_streams_and_streams_of_few_objects_are_left_alone(local: Place) -> None:
    store = made(local)
    stream = write(store)
    small = write(store, "small", 0)
    writer = store.writer("open", commit_seconds=None)
    for i in range(4):
        writer.append_episode(steps(9, i), terminated=True)
        writer.commit()
    report = packed(local)
    assert [one.stream for one in report.packed] == [stream]
    assert report.left == {
        small: "it has few objects already",
        writer.stream: "its writer has not closed it",
    }
    again = packed(local)
    assert again.packed == ()
    assert again.left[stream] == "it has few objects already"
    writer.close()
    assert [one.stream for one in packed(local).packed] == [writer.stream]


def test_a_dry_run_says_what_would_be_packed_and_changes_nothing(local: Place) -> None:
    stream = write(made(local))
    before = real_storage(local.url).tree_sizes("")
    report = packed(local, dry_run=True, wait=True)
    assert report.is_dry_run
    assert real_storage(local.url).tree_sizes("") == before
    done = packed(local)
    assert [one.stream for one in report.packed] == [stream]
    assert [one.n_packed_objects for one in report.packed] == [one.n_packed_objects for one in done.packed]
    assert [(one.n_objects, one.n_bytes) for one in report.packed] == [
        (one.n_objects, one.n_bytes) for one in done.packed
    ]


@pytest.mark.parametrize("grace_s", [-1.0, float("inf"), float("nan")])
def test_a_grace_time_that_is_none_is_refused_before_anything_is_packed(local: Place, grace_s: float) -> None:
    write(made(local))
    with pytest.raises(ValueError, match="grace_s: expected seconds, at least 0"):
        packed(local, wait=True, grace_s=grace_s)
    assert len(opened(local).snapshot.stored) == 1


def test_chosen_streams_are_packed_and_unknown_names_are_refused(local: Place) -> None:
    store = made(local)
    chosen, _ = write(store, "a"), write(store, "b")
    assert [one.stream for one in packed(local, streams=[chosen]).packed] == [chosen]
    with pytest.raises(DataError, match="has no stream 'x'"):
        packed(local, streams=["x"])
    with pytest.raises(DataError, match="no field 'nothing'"):
        packed(local, codecs={"nothing": "none"})
    with pytest.raises(SchemaError, match="codec 'gzip'"):
        packed(local, codecs={"reward": "gzip"})


def test_a_packed_stream_is_packed_again_with_other_chunks_and_codecs(local: Place) -> None:
    store = made(local)
    stream = write(store)
    before = contents(opened(local))
    first = swept(local).packed[0]
    assert swept(local).packed == ()
    second = swept(local, chunk_bytes=24, codecs={"reward": "none"})
    assert second.removed == (first.packed_in,)
    assert contents(opened(local)) == before
    record = opened(local).streams[0]
    assert record.id == stream
    assert record.layouts["steps/reward"].codec == Codec("none")
    assert record.layouts["steps/reward"].chunk_rows == 4
    assert record.layouts["steps/observation"].chunk_rows == 2
    assert swept(local, chunk_bytes=24, codecs={"reward": "none"}).packed == ()
    third = swept(local, shard_bytes=100)
    assert len(third.packed) == 1
    assert third.packed[0].n_packed_objects > second.packed[0].n_packed_objects
    assert contents(opened(local)) == before
    assert verify(opened(local)).is_clean


def test_a_dead_stream_is_packed_and_reads_as_cut(local: Place) -> None:
    store = made(local)
    zombie = store.writer("zombie", commit_seconds=None)
    for i in range(4):
        zombie.append_episode(steps(9, i), terminated=True)
        zombie.commit()
    write(store, "next", dead=[zombie.stream])
    before = contents(opened(local))
    report = packed(local, streams=[zombie.stream])
    assert len(report.packed) == 1
    assert contents(opened(local)) == before
    # The writer was not dead after all: what it commits now is shown, and the copy no longer counts.
    zombie.append_episode(steps(5, 77), terminated=True)
    zombie.commit()
    after = opened(local)
    assert len(after) == len(before) + 1
    assert [r["action"].tolist() for r in (after.read_episode((zombie.stream, 4)),)] == [list(range(77, 82))]
    assert verify(after).is_clean
    assert remove_replaced(real_storage(local.url), 0) == [report.packed[0].packed_in]
    zombie.close()
    shown = contents(opened(local))
    assert swept(local, streams=[zombie.stream]).removed == (zombie.stream,)
    assert contents(opened(local)) == shown


# ---- other sessions' decisions ------------------------------------------------------------------


def test_marks_of_a_packed_stream_are_those_of_the_original(local: Place) -> None:
    store, root = made(local), Path(local.url)
    stream = write(store)
    other = write(store, "b", 2)
    swept(local, streams=[stream])
    mark(root, read_record(root, other), view=SessionView({stream: 20}))
    assert opened(local).snapshot.parts()[0].first_row == 20
    table = opened(local).episodes
    assert table.find(trajstore.EpisodeKey(stream, 2)) == 0
    assert table["is_headless"].tolist()[0]
    assert verify(opened(local)).is_clean


def test_marks_of_the_original_apply_to_a_stream_that_replaces_a_part(local: Place) -> None:
    store, root = made(local), Path(local.url)
    stream = write(store)  # episodes of eight rows
    other = write(store, "b", 1)
    pack_part(root, stream, 8, 24)
    before = contents(opened(local))
    mark(root, read_record(root, other), view=SessionView({stream: 17}))
    after = contents(opened(local))
    assert [key for key, _, _ in after] == [key for key, _, _ in before if key not in {(stream, 0), (stream, 1)}]
    assert [row["is_headless"] for _, row, _ in after].count(True) == 1


def test_a_packed_stream_is_the_newest_of_nothing(local: Place) -> None:
    store = made(local)
    old = write(store, "old", world="w1")
    new = write(store, "new", world="w2")
    before = [(r.id, r.created_at, r.world) for r in opened(local).streams]
    swept(local, streams=[old])
    records = opened(local).streams
    assert [(r.id, r.created_at, r.world) for r in records] == before
    assert newest_world(records) == "w2"
    swept(local, streams=[new])
    assert newest_world(opened(local).streams) == "w2"
    assert Lineage.newest(opened(local).streams).limits == {}


def test_discarded_episodes_stay_hidden(local: Place) -> None:
    store, root = made(local), Path(local.url)
    stream = write(store)
    other = write(store, "b", 1)
    mark(root, read_record(root, other), view=SessionView(discarded={stream: (1, 3)}))
    before = contents(opened(local))
    swept(local)
    assert contents(opened(local)) == before
    assert {key[1] for key, _, _ in before if key[0] == stream} == {0, 2, 4, 5, 6}


def test_derived_columns_of_and_in_packed_streams_are_read(local: Place) -> None:
    store = made(local)
    stream = write(store)
    n = store.refresh().streams[0].rows
    with store.writer("b", commit_seconds=None) as writer:
        writer.append_episode(steps(3, 0), terminated=True)
        writer.commit()
        writer.put_column("priority", stream, np.arange(n, dtype=np.float32))
        writer.commit()
        writer.put_column("priority", stream, np.array([50, 60], np.float32), rows=np.array([2, 5]))
        writer.put_column("priority", writer.stream, np.ones(4, np.float32))
        writer.commit()
    before = contents(opened(local))
    column = {
        name: (first, values.tolist())
        for name, (first, values) in opened(local).snapshot.column("priority").items()
    }
    assert column[stream][1][:6] == [0, 1, 50, 3, 4, 60]
    held = opened(local)
    swept(local, streams=[stream])
    assert contents(opened(local)) == before
    swept(local, chunk_bytes=8)
    fresh = opened(local)
    assert [record.location is not None for record in fresh.streams] == [True, True]
    assert contents(fresh) == before
    found = {name: (first, values.tolist()) for name, (first, values) in fresh.snapshot.column("priority").items()}
    assert found == column
    assert fresh.episodes["priority.mean"].tolist() == held.refresh().episodes["priority.mean"].tolist()
    assert verify(fresh).is_clean


def test_columns_of_a_removed_original_ask_for_a_refresh(local: Place) -> None:
    store = made(local)
    with store.writer("b", commit_seconds=None) as writer:
        for i in range(6):
            writer.append_episode(steps(7, i), terminated=True)
            writer.commit()
        writer.put_column("value", writer.stream, np.arange(48, dtype=np.float32))
        writer.commit()
    held = opened(local)
    assert len(held)
    swept(local)
    with pytest.raises(SnapshotExpiredError, match="refresh the store"):
        held.snapshot.column("value")
    held.refresh()
    assert held.snapshot.column("value")[writer.stream][1].tolist() == list(range(48))


# ---- checkpoints --------------------------------------------------------------------------------


def checkpointed(place: Place, name: str) -> Checkpoint:
    storage = real_storage(place.url, place.options)
    cuts = opened(place).snapshot.cuts()
    new = Checkpoint(checkpoints.new_checkpoint_id(name), name, time.time(), streams=cuts)
    return checkpoints.save(storage, new, {"x": 1})


def test_a_checkpoint_of_before_shows_the_same_after_packing(local: Place) -> None:
    store = made(local)
    write(store, "a")
    checkpointed(local, "one")
    write(store, "b")
    before = contents(opened(local, at="one"))
    held = opened(local, at="one")
    packed(local)
    assert contents(opened(local, at="one")) == before
    swept(local)
    assert contents(opened(local, at="one")) == before
    with pytest.raises(SnapshotExpiredError, match="was packed; refresh"):
        held.read_episode(0)
    held.refresh()
    assert contents(held) == before
    assert verify(local.url).is_clean
    assert verify(local.url, at="one").is_clean


def test_a_checkpoint_of_a_packed_stream_outlives_packing_again(local: Place) -> None:
    store = made(local)
    stream = write(store, "a")
    first = swept(local).packed[0]
    saved = checkpointed(local, "one")
    raw = json.loads((Path(local.url) / "checkpoints" / saved.id / "zarr.json").read_text())
    listed = raw["attributes"]["trajstore"]["streams"]
    assert list(listed) == [first.packed_in]
    assert listed[first.packed_in]["record"]["replaces"]["stream"] == stream
    assert list(checkpoints.find(real_storage(local.url), "one").streams) == [stream]
    before = contents(opened(local, at="one"))
    assert swept(local, chunk_bytes=8).removed == (first.packed_in,)
    assert contents(opened(local, at="one")) == before
    assert verify(local.url, at="one").is_clean
    assert verify(local.url).is_clean


def test_rows_that_only_a_checkpoint_needs_are_copied(local: Place) -> None:
    store, root = made(local), Path(local.url)
    stream = write(store, "a")
    checkpointed(local, "one")
    before = contents(opened(local, at="one"))
    mark(root, read_record(root, stream), first_row=30)
    shown = contents(opened(local))
    assert len(shown) < len(before)
    swept(local)
    assert contents(opened(local)) == shown
    assert contents(opened(local, at="one")) == before


# ---- copies, verification, the command line -----------------------------------------------------


def test_a_packed_store_is_copied(new_place: MakePlace) -> None:
    place = new_place("local")
    store = made(place)
    write(store, "a")
    checkpointed(place, "one")
    write(store, "b")
    before, at = contents(opened(place)), contents(opened(place, at="one"))
    packed(place)
    for i in range(2):
        whole, part = new_place("memory"), new_place("local")
        trajstore.copy(place.url, whole.url)
        trajstore.copy(place.url, part.url, at="one")
        assert contents(opened(whole)) == before
        assert contents(opened(whole, at="one")) == contents(opened(part, at="one")) == contents(opened(part)) == at
        for copy in (whole, part):
            assert verify(copy.url).is_clean
        if not i:
            assert len(remove_replaced(real_storage(place.url), 0)) == 2
            shapes = [len(key.split("/")) for key in data_objects(whole)]
            assert len(shapes) == 12  # originals that were replaced are not copied


@pytest.mark.parametrize("at", [None, "one"])
def test_a_stream_that_is_packed_and_removed_during_a_copy_is_copied(
    local: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str | None
) -> None:
    store = made(local)
    write(store, "a")
    write(store, "b")
    checkpointed(local, "one")
    before = contents(opened(local))
    real = trajstore.storage.LocalStorage.copy_many
    calls: list[int] = []

    def copy_many(self: Any, keys: Any, other: Any, **options: Any) -> None:
        calls.append(len(keys))
        if len(calls) == 2:
            swept(local)
        real(self, keys, other, **options)

    monkeypatch.setattr(trajstore.storage.LocalStorage, "copy_many", copy_many)
    target = Place(str(tmp_path / "copy"), {})
    trajstore.copy(local.url, target.url, at=at, fsync=False)
    assert contents(opened(target)) == before
    assert contents(opened(target, at="one")) == before
    assert verify(target.url).is_clean
    assert len(data_objects(target)) == 12


def test_verification_finds_damage_in_packed_streams(local: Place) -> None:
    write(made(local))
    (one,) = swept(local).packed
    path = Path(local.url) / "streams" / str(one.packed_in) / "steps" / "action" / "c.0"
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)
    report = verify(local.url)
    assert any("chunk" in problem.where and "checksum" in problem.what for problem in report.problems)
    with pytest.raises(trajstore.CorruptionError, match="chunk"):
        opened(local).read_episode(6)
    data[3] ^= 1
    path.write_bytes(data)
    assert not verify(local.url).is_clean


def test_damage_in_the_original_is_named_and_stops_packing(local: Place) -> None:
    stream = write(made(local))
    path = Path(local.url) / "streams" / stream / "steps" / "action" / "c.1"
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)
    for options in ({}, {"chunk_bytes": 16}):
        with pytest.raises(trajstore.CorruptionError, match=f"stream '{stream}', array 'steps/action', chunk 1"):
            packed(local, **options)
        assert [record.id for record in opened(local).snapshot.stored] == [stream]


def test_the_command_packs_and_says_so(local: Place) -> None:
    stream = write(made(local))
    run = CliRunner().invoke
    dry = run(app(), ["pack", local.url, "--dry-run"])
    assert dry.exit_code == 0
    assert stream in dry.output
    assert "would be packed" in dry.output
    assert len(opened(local).snapshot.stored) == 1
    done = run(
        app(),
        ["pack", local.url, "--json", "--codec", "reward=none", "--chunk-bytes", "64", "--shard-bytes", "1MiB"],
    )
    assert done.exit_code == 0, done.output
    assert [one["stream"] for one in json.loads(done.output)["packed"]] == [stream]
    assert opened(local).streams[0].layouts["steps/reward"].codec == Codec("none")
    assert "1 original of packed streams not removed yet" in run(app(), ["info", local.url]).output
    swept_ = run(app(), ["pack", local.url, "--wait", "--grace-s", "0", "--stream", stream])
    assert swept_.exit_code == 0, swept_.output
    assert "removed" in swept_.output.lower()
    assert len(opened(local).snapshot.stored) == 1
    facts = json.loads(run(app(), ["info", local.url, "--json", "--sizes"]).output)
    assert [s["state"] for s in facts["streams"]] == ["packed"]
    assert all(field["stored_bytes"] > 0 for field in facts["schema"]["fields"])
    for wrong in (["--codec", "reward"], ["--codec", "reward=gzip"], ["--stream", "x"], ["--shard-bytes", "many"]):
        assert run(app(), ["pack", local.url, *wrong]).exit_code == 2


def test_progress_ends_at_the_total(local: Place) -> None:
    write(made(local))
    seen: list[tuple[int, int]] = []
    packed(local, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] > 0
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


# ---- several processes, kills and faults --------------------------------------------------------


def test_two_processes_may_pack_the_same_stream(local: Place) -> None:
    write(made(local))
    before = contents(opened(local))
    failures: list[BaseException] = []

    def run() -> None:
        try:
            packed(local)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert contents(opened(local)) == before
    remove_replaced(real_storage(local.url), 0)
    assert contents(opened(local)) == before
    assert len(opened(local).snapshot.stored) == 1
    assert verify(local.url).notes == []


class Then(Plan):
    """Does something once, before the first call on a key that contains a text."""

    def __init__(self, action: str, part: str, do: Callable[[], Any]) -> None:
        self._action, self._part, self._do = action, part, do

    def before(self, call: Call) -> None:
        if call.action == self._action and self._part in call.key and self._do is not None:
            do, self._do = self._do, None  # type: ignore[assignment]
            do()


def test_a_stream_that_another_process_packed_and_removed_is_left_alone(local: Place) -> None:
    stream = write(made(local))
    before = contents(opened(local))
    for action, part in (("get", "steps/reward"), ("put", "spans/text/c.")):
        other = Then(action, part, lambda: swept(local, chunk_bytes=8 if opened(local).streams[0].location else 4))
        storage = FaultyStorage(real_storage(local.url), other)
        report = Packing(storage, PackSettings(chunk_bytes=16)).run()
        assert report.packed == ()
        assert "packed by another process" in report.left[stream]
        assert contents(opened(local)) == before
        assert len(opened(local).snapshot.stored) == 1
        assert verify(local.url).notes == []
        swept(local, chunk_bytes=32)


def test_a_copy_that_seemed_abandoned_and_was_removed_is_not_published(
    local: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = write(made(local))
    storage = real_storage(local.url)

    def remove() -> None:
        (copy,) = (r for r in Snapshot.load(storage, None).stored if r.id != stream)
        storage.remove_tree(copy.folder)

    faulty = FaultyStorage(storage, Then("put", "spans/text/c.", remove))
    report = Packing(faulty, PackSettings()).run()
    assert "was removed while it was being written" in report.left[stream]
    assert [r.id for r in Snapshot.load(storage, None).stored] == [stream]


def test_an_unfinished_copy_is_removed_after_an_hour_unless_it_is_renewed(
    local: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = write(made(local))
    before = contents(opened(local))
    faulty = FaultyStorage(real_storage(local.url), DieAt(40, is_after=True))
    with pytest.raises(Died):
        Packing(faulty, PackSettings()).run()
    stored = opened(local).snapshot.stored
    (copy,) = (r for r in stored if r.id != stream)
    assert contents(opened(local)) == before
    assert [note.what for note in verify(local.url).notes if copy.id in note.where] == [
        "a packed copy that is not complete; readers ignore it, and it will be removed"
    ]
    assert remove_replaced(real_storage(local.url), 0) == []  # its process may be alive
    write_record(Path(local.url), replace(copy, committed_at=copy.committed_at - 3601))
    assert len(packed(local).packed) == 1
    assert copy.id not in [r.id for r in opened(local).snapshot.stored]
    # While it is written, its record is put again.
    monkeypatch.setattr(packing, "_RENEW_S", -1.0)
    faulty = FaultyStorage(real_storage(local.url))
    Packing(faulty, PackSettings(chunk_bytes=8)).run()
    puts = [call.key for call in faulty.calls if call.action == "put"]
    (record,) = (key for key in set(puts) if key.count("/") == 2)
    assert puts.count(record) > 3
    assert contents(opened(local)) == before


def forget(place: Place) -> None:
    """Remove everything: a listing in memory looks at all that is there."""
    storage = real_storage(place.url, place.options)
    storage.delete(storage.list_tree(""))


class LoseLastAnswer(Plan):
    """The second put of a copy's record, which makes it count, has its effect but raises an error."""

    def __init__(self) -> None:
        self._n_puts = 0

    def after(self, call: Call) -> None:
        self._n_puts += call.action == "put" and call.key.count("/") == 2
        if self._n_puts == 2:
            self._n_puts += 1
            raise broken()


def test_a_copy_is_kept_if_only_the_answer_of_its_last_put_was_lost(local: Place) -> None:
    stream = write(made(local))
    before = contents(opened(local))
    faulty = FaultyStorage(real_storage(local.url), LoseLastAnswer())
    with pytest.raises(StorageError):
        Packing(faulty, PackSettings(chunk_bytes=8)).run()
    (record,) = opened(local).streams
    assert record.id == stream
    assert record.layouts["steps/action"].chunk_rows == 1
    assert contents(opened(local)) == before


def n_calls_of(make: Callable[[], Place]) -> int:
    place = make()
    faulty = FaultyStorage(real_storage(place.url, place.options))
    Packing(faulty, PackSettings()).run()
    remove_replaced(faulty, 0)
    Packing(faulty, PackSettings(chunk_bytes=16)).run()
    remove_replaced(faulty, 0)
    return len(faulty.calls)


@pytest.mark.parametrize("backend", ["local", "memory"])
@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("kind", ["dies", "fails"])
def test_a_kill_or_a_failure_at_any_storage_call_changes_nothing_that_readers_see(
    new_place: MakePlace, backend: str, is_after: bool, kind: str
) -> None:
    """Pack, remove, pack again, remove: at every call in turn the process dies, or the call fails."""
    source = new_place("local")
    store = made(source)
    write(store, "a", 3, 3)
    with store.writer("b", commit_seconds=None) as writer:
        writer.append_episode(steps(3, 0), terminated=True)
        writer.put_column("value", store.refresh().streams[0].id, np.arange(15))
    checkpointed(source, "one")
    before, at = contents(opened(source)), contents(opened(source, at="one"))

    def copied() -> Place:
        place = new_place(backend)
        trajstore.copy(source.url, place.url, target_options=place.options, fsync=False)
        return place

    n_calls = n_calls_of(copied)
    assert n_calls > 100
    # To die after a call is to die before the next one, so every second call of both is every call. Calls of odd
    # numbers fail before they do anything, those of even numbers when all is done.
    first = 2 if kind == "fails" and is_after else 1
    for number in range(first, n_calls + 1, 5 if backend == "local" else 2):
        place = copied()
        plan = DieAt(number, is_after) if kind == "dies" else FailOnce(number, is_after, broken)
        faulty = FaultyStorage(real_storage(place.url, place.options), plan)
        try:
            Packing(faulty, PackSettings()).run()
            remove_replaced(faulty, 0)
            Packing(faulty, PackSettings(chunk_bytes=16)).run()
            remove_replaced(faulty, 0)
        except (Died, StorageError):
            pass
        assert contents(opened(place)) == before, faulty.calls[number - 1]
        assert contents(opened(place, at="one")) == at, faulty.calls[number - 1]
        report = verify(opened(place), fast=True)
        assert report.is_clean, (faulty.calls[number - 1], report.problems)
        swept(place, chunk_bytes=8)
        assert contents(opened(place)) == before
        forget(place)


# ---- the rules and the objects ------------------------------------------------------------------


def test_of_several_copies_the_newest_one_of_the_newest_commit_counts(local: Place) -> None:
    stream = write(made(local))
    original = read_record(Path(local.url), stream)
    copies = [
        replace(original, id=new_id("a"), commit=commit, replaces=Replaces(stream, 0, original.rows))
        for commit in (original.commit, original.commit, original.commit - 1)
    ]
    copies.sort(key=lambda record: (record.commit, record.id))
    (shown,) = shown_records([original, *copies])
    assert (shown.id, shown.location) == (stream, copies[-1].id)
    (shown,) = shown_records(copies)
    assert shown.location == copies[-1].id
    (shown,) = shown_records([original, copies[0]])
    assert shown is original  # it was continued since


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    n_rows=st.integers(1, 40),
    chunk_rows=st.integers(1, 8),
    n_chunks=st.integers(1, 6),
    first=st.integers(0, 39),
    codec=st.sampled_from(["none", "zstd:1", "blosc-lz4"]),
    at_start=st.booleans(),
)
def test_zarr_reads_assembled_shards(
    tmp_path: Path, n_rows: int, chunk_rows: int, n_chunks: int, first: int, codec: str, at_start: bool
) -> None:
    layout = ArrayLayout(
        np.dtype("int32"),
        (2,),
        chunk_rows,
        Codec.parse(codec),
        shard_rows=chunk_rows * n_chunks,
        index_at_start=at_start,
    )
    values = np.arange(2 * n_rows, dtype=np.int32).reshape(n_rows, 2) + 1
    root = tmp_path / new_id("array")
    root.mkdir()
    (root / "zarr.json").write_text(json.dumps(layout.metadata(n_rows)))
    absent = min(first, n_rows) // chunk_rows
    chunks: list[bytes | None] = []
    for i in range(-(-n_rows // chunk_rows)):
        block = layout.empty_chunk()
        rows = values[i * chunk_rows : (i + 1) * chunk_rows]
        block[: len(rows)] = rows
        chunks.append(layout.encode(block) if i >= absent else None)
    for shard in range(0, len(chunks), n_chunks):
        data = assemble_shard(layout, chunks[shard : shard + n_chunks])
        (root / layout.chunk_key(shard)).write_bytes(data)
    expected = values.copy()
    expected[: absent * chunk_rows] = 0
    np.testing.assert_array_equal(zarr.open_array(root, mode="r")[...], expected)
