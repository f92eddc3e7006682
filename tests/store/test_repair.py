"""Repair: what is intact is kept bit by bit, what is lost is said, nothing is made up, and the result is clean."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import trajstore
from tests.conftest import Place
from tests.store.test_verify import SCHEMA, Made, build, chunks, flip, nodes, objects, steps
from tests.support.faulty import DieAt, Died, FaultyStorage, real_storage
from tests.support.sharding import mark, read_record, rewrite
from trajstore.errors import FormatError, StorageError, StoreExistsError, StoreNotFoundError, TrajstoreError
from trajstore.schema import flatten
from trajstore.store.packing import pack
from trajstore.store.repair import RepairReport, repair, repairing
from trajstore.store.verify import verify

MakePlace = Callable[[str], Place]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return build(tmp_path_factory.mktemp("repairing") / "store")


@pytest.fixture
def made(template: Made, tmp_path: Path) -> Made:
    root = tmp_path / "store"
    shutil.copytree(template.root, root)
    return replace(template, root=root)


def fixed(root: Path, name: str = "new") -> tuple[Path, RepairReport]:
    target = root.parent / name
    shutil.rmtree(target, ignore_errors=True)
    report = repair(root, target, fsync=False)
    assert verify(target).problems == [], report
    return target, report


def episodes(root: Path | str, at: str | None = None) -> dict[Any, tuple[dict[str, Any], dict[str, Any]]]:
    """Every episode of everything that is stored: its row, and its arrays by field."""
    store = trajstore.open(root, at=at)
    view = store.snapshot if at else store.snapshot.with_abandoned()
    return {view.episodes.key(i): (row, arrays(view, i)) for i, row in enumerate(view.episodes)}


def arrays(view: trajstore.Snapshot, i: int) -> dict[str, Any]:
    return dict(flatten(view.read_episode(i)))


def assert_nothing_made_up(found: Any, original: Any) -> None:
    """Every episode is one of the original, or the beginning of one."""
    for key, (row, values) in found.items():
        row_before, before = original[key]
        for name, rows in values.items():
            np.testing.assert_array_equal(rows, before[name][: len(rows)], strict=False)
        if row["length"] == row_before["length"] and row["end"] == row_before["end"]:
            assert row["return"] == row_before["return"]
        else:
            assert row["end"] == "cut", key
            assert row["length"] <= row_before["length"]
        assert row["time"] <= row_before["time"]
        for name in ("env", "seed", "score"):
            assert row.get(name) == row_before.get(name)
        assert row["metadata"] in (row_before["metadata"], {})
        assert row.get("task") in (row_before.get("task"), None)


def assert_kept(found: Any, before: Any) -> None:
    """Every episode that could be read is there, bit by bit."""
    for key, (row, values) in before.items():
        assert found[key][0] == row
        for name, rows in values.items():
            assert found[key][1][name].tobytes() == rows.tobytes()


def test_a_whole_store_stays_what_it_is(made: Made) -> None:
    target, report = fixed(made.root)
    assert (report.damages, report.mended, report.has_losses) == ([], [], False)
    assert (report.n_streams, report.n_episodes, report.n_steps) == (2, 4, 22)
    assert_kept(episodes(target), episodes(made.root))
    assert_kept(episodes(target, at="c"), episodes(made.root, at="c"))
    for name in ("priority", "advantage"):
        before, now = (trajstore.open(root).snapshot.column(name) for root in (made.root, target))
        assert before.keys() == now.keys()
        assert all(before[k][1].tobytes() == now[k][1].tobytes() for k in before)
    data = [path.relative_to(made.root) for path in chunks(made.root)]
    assert all((target / path).read_bytes() == (made.root / path).read_bytes() for path in data)


def damaged_in_turn(
    made: Made, paths: list[Path], damage: Callable[[Path], None]
) -> Iterator[tuple[Path, Path, RepairReport]]:
    original = episodes(made.root)
    for path in paths:
        before = path.read_bytes()
        damage(path)
        target, report = fixed(made.root)
        assert_nothing_made_up(episodes(target), original)
        yield path, target, report
        path.write_bytes(before)


@pytest.mark.parametrize(
    "damage", [flip, lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:5])]
)
def test_one_damaged_chunk_costs_the_episodes_in_it_and_no_others(
    made: Made, damage: Callable[[Path], None]
) -> None:
    whole = episodes(made.root)
    record = read_record(made.root, made.first)
    paths = [path for path in chunks(made.root) if "steps" in path.parts]
    for path, target, report in damaged_in_turn(made, paths if damage is flip else paths[::4], damage):
        stream, name = path.relative_to(made.root).parts[1], "/".join(path.relative_to(made.root).parts[3:-1])
        size = read_record(made.root, stream).layouts[f"steps/{name}"].chunk_rows
        number = int(path.name.split(".")[1])
        hit = set(range(number * size, (number + 1) * size))
        found, view = episodes(target), trajstore.open(made.root).snapshot
        changed = {e.episode for e in (*report.lost_episodes, *report.shortened)}
        for i in range(len(view.episodes)):
            key, spans = view.episodes.key(i), view.episodes.spans(i)
            if key.stream != stream:
                assert_kept(found, {key: whole[key]})
                continue
            rows = [row for s in spans for row in range(s.row_start, s.row_stop)]
            if view.episodes.has_final(i) and not record.schema[name].final:
                rows = rows[:-1]
            bad = [t for t, row in enumerate(rows) if row in hit]
            if not bad:
                assert_kept(found, {key: whole[key]})
            else:
                assert key.episode in changed
                assert (key in found) == (bad[0] > 0)
                if bad[0]:
                    assert found[key][0]["length"] == min(bad[0], whole[key][0]["length"])
        assert len(report.damages) == 1
        assert made.checkpoint in report.lost_checkpoints


def test_damage_of_text_costs_the_text_alone(made: Made) -> None:
    flip(made.chunk("spans/text"))
    target, report = fixed(made.root)
    found, whole = episodes(target), episodes_without_text(made)
    assert report.lost_metadata == [(made.first, 0)]  # the only one with text
    assert [report.lost_episodes, report.shortened, report.lost_checkpoints] == [[], [], {}]
    assert {key: values for key, (_, values) in found.items()}.keys() == whole.keys()
    assert [row["metadata"] for row, _ in found.values()] == [{}] * 4
    assert [row["task"] for row, _ in found.values()] == [None] * 4
    assert [row["seed"] for row, _ in found.values()] == [3, None, None, None]
    for key, values in whole.items():
        assert all(found[key][1][name].tobytes() == values[name].tobytes() for name in values)


def episodes_without_text(made: Made) -> dict[Any, dict[str, Any]]:
    view = trajstore.open(made.root).snapshot
    return {view.episodes.key(i): arrays(view, i) for i in range(len(view.episodes))}


@pytest.mark.parametrize("name", ["ints", "floats"])
def test_a_stream_without_its_span_table_is_lost_and_said_to_be(made: Made, name: str) -> None:
    whole = episodes(made.root)
    flip(made.chunk(f"spans/{name}"))
    target, report = fixed(made.root)
    assert list(report.lost_streams) == [made.first]
    assert "span table is lost" in report.lost_streams[made.first]
    assert list(report.lost_checkpoints) == [made.checkpoint]
    assert_kept(episodes(target), {key: value for key, value in whole.items() if key.stream == made.second})


def test_a_lost_part_of_a_long_span_table_costs_its_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trajstore.format.commit_record._SPAN_CHUNK_ROWS", 8)
    root = tmp_path / "store"
    schema = trajstore.Schema({"x": trajstore.Field("int64"), "reward": trajstore.Field("float32")})
    store = trajstore.create(root, schema, fsync=False)
    with store.writer("w", commit_seconds=None) as writer:
        for i in range(20):
            data = {"x": np.arange(2) + i, "reward": np.ones(2, np.float32)}
            writer.append_episode(data, terminated=True, metadata={"n": i})
            if i in (4, 12):  # one episode that goes on behind the damage, and one that begins there
                writer.append({"x": -i, "reward": 1.0}, env=i)
                writer.commit()
            if i == 17:
                for env in (4, 12):
                    writer.append({"x": -i, "reward": 1.0}, env=env, truncated=True)
                writer.commit()
    whole = episodes(root)
    assert len(whole) == 22
    shape = read_record(root, writer.stream).spans
    assert 17 <= shape <= 24
    flip(root / "streams" / writer.stream / "spans/ints/c.1.0")
    target, report = fixed(root)
    found = episodes(target)
    assert_nothing_made_up(found, whole)
    table = spans_of(root, writer.stream)
    kept = [row for i, row in enumerate(table) if not 8 <= i < 16]
    complete = {key for key in whole if sum(r[0] == key[1] for r in table) == sum(r[0] == key[1] for r in kept)}
    assert_kept({k: strip(v) for k, v in found.items()}, {k: strip(whole[k]) for k in complete})
    assert {key for key in found if key not in complete} == {(e.stream, e.episode) for e in report.shortened}
    flip(root / "streams" / writer.stream / "spans/floats/c.2.0")
    target, _ = fixed(root)
    assert_nothing_made_up(episodes(target), whole)
    assert len(episodes(target)) >= 7


def spans_of(root: Path, stream: str) -> list[Any]:
    import zarr

    flip(root / "streams" / stream / "spans/ints/c.1.0")  # back
    found = np.asarray(zarr.open_group(root / "streams" / stream, mode="r")["spans/ints"][...])
    flip(root / "streams" / stream / "spans/ints/c.1.0")
    return found.tolist()  # type: ignore[no-any-return]


def strip(found: Any) -> Any:
    """An episode without metadata: that of the first span behind the damage can't be found."""
    return {name: value for name, value in found[0].items() if name != "metadata"}, found[1]


def test_damaged_columns_are_lost_alone(made: Made) -> None:
    whole = episodes(made.root)
    folder = made.root / "streams" / made.second / "columns" / made.first / "priority"
    flip(next(folder.rglob("delta_values/c.0")))
    target, report = fixed(made.root)
    assert report.lost_columns == [(made.first, "priority")]
    assert [report.lost_checkpoints, report.lost_episodes] == [{}, []]
    assert_kept(episodes(target), whole)
    assert trajstore.open(target).snapshot.columns.names == ("advantage",)


def test_damage_of_a_checkpoint_costs_that_checkpoint(made: Made) -> None:
    whole = episodes(made.root)
    below = made.root / "checkpoints" / made.checkpoint
    for path in (below / "zarr.json", next(below.rglob("c.0"))):
        before = path.read_bytes()
        flip(path, len(before) // 2)
        target, report = fixed(made.root)
        assert list(report.lost_checkpoints) == [made.checkpoint]
        assert_kept(episodes(target), whole)
        assert trajstore.open(target).checkpoints == []
        path.write_bytes(before)


def test_metadata_that_others_repeat_is_made_again(made: Made) -> None:
    whole = episodes(made.root)
    records = {made.root / "streams" / s / "zarr.json" for s in (made.first, made.second)}
    others = [p for p in nodes(made.root) if p not in records and p.parent.name != made.checkpoint]
    root_node, schema_node = made.root / "zarr.json", made.root / "schema" / "zarr.json"
    for damaged in ([root_node], [schema_node], others[::2]):
        kept = {path: path.read_bytes() for path in damaged}
        for path in damaged:
            path.write_bytes(b"{")
        target, report = fixed(made.root)
        assert not report.has_losses, damaged
        assert_kept(episodes(target), whole)
        assert len(trajstore.open(target).checkpoints) == 1
        for path, data in kept.items():
            path.write_bytes(data)
    for path in others:
        path.unlink()
    target, report = fixed(made.root)
    assert not report.has_losses
    assert_kept(episodes(target), whole)
    assert trajstore.open(target).schema == SCHEMA


def test_a_lost_commit_record_of_a_sealed_stream_is_made_again(made: Made) -> None:
    whole = episodes(made.root)
    for stream, lost in ((made.first, []), (made.second, [(made.first, "advantage"), (made.first, "priority")])):
        path = made.root / "streams" / stream / "zarr.json"
        before = path.read_bytes()
        for damaged in (
            b"",
            before[:-1],
            before.replace(b'"rows":', b'"rows": ', 1),
            before.replace(b'"format":1', b'"format":3'),
        ):
            path.write_bytes(damaged)
            target, report = fixed(made.root)
            assert_kept(episodes(target), whole)
            assert [report.lost_streams, report.lost_episodes, report.shortened] == [{}, [], []]
            assert sorted(report.lost_columns) == lost
            assert any("was made again" in text for text in report.mended)
        path.write_bytes(before)


def test_a_lost_record_of_an_open_stream_is_made_again_as_far_as_a_checkpoint_lists_it(tmp_path: Path) -> None:
    from tests.store.test_checkpoints import saved

    root = tmp_path / "store"
    store = trajstore.create(root, SCHEMA, fsync=False)
    writer = store.writer("w", commit_seconds=None)
    keys = [writer.append_episode(steps(6, i), terminated=True) for i in range(2)]
    writer.commit()
    saved(real_storage(str(root)), "c")
    writer.append_episode(steps(6, 2), terminated=True)
    writer.commit()
    writer.release()
    whole = episodes(root)
    (root / "streams" / writer.stream / "zarr.json").unlink()
    target, report = fixed(root)
    assert_kept(episodes(target), {key: whole[key] for key in keys})
    assert len(trajstore.open(target)) == 2
    shutil.rmtree(root / "checkpoints")
    target, report = fixed(root)
    assert "no other object says which of its rows exist" in report.lost_streams[writer.stream]
    assert len(trajstore.open(target)) == 0


def test_packed_streams_are_repaired_under_their_handles(tmp_path: Path) -> None:
    from tests.store.test_checkpoints import saved

    root = tmp_path / "store"
    store = trajstore.create(root, SCHEMA, fsync=False)
    with store.writer("w", commit_seconds=None) as writer:
        for i in range(12):
            writer.append_episode(steps(16, i), terminated=True, metadata={"task": f"t{i}"})
            writer.commit()
    saved(real_storage(str(root)), "before")
    assert pack(root, wait=True, grace_s=0).packed
    saved(real_storage(str(root)), "after")
    whole = episodes(root)
    target, report = fixed(root)
    assert_kept(episodes(target), whole)
    assert not report.lost_checkpoints
    for name in ("before", "after"):
        assert len(episodes(target, at=name)) == 12
    shard = max((p for p in chunks(root) if p.parts[-2] == "f"), key=lambda p: p.stat().st_size)
    flip(shard, -2)
    target, report = fixed(root)
    assert len(report.lost_episodes) + len(report.shortened) == 1
    assert len(report.damages) == 1
    found = episodes(target)
    assert_nothing_made_up(found, whole)
    assert len(found) >= 11
    flip(shard, 3)  # now the index: no chunk of the shard can be found
    _, report = fixed(root)
    assert "the index of its shard is damaged" in report.damages[0].what
    assert len(report.lost_episodes) == 12


@pytest.mark.parametrize("index_at_start", [False, True])
def test_a_shard_keeps_its_intact_chunks(made: Made, index_at_start: bool) -> None:
    whole = episodes(made.root)
    shutil.rmtree(made.root / "checkpoints" / made.checkpoint)
    rewrite(made.root, made.first, chunks_per_shard=4, index_at_start=index_at_start)
    path = made.root / "streams" / made.first / "steps/f/c.0.0"
    flip(path, -30 if index_at_start else 40)
    target, report = fixed(made.root)
    assert len(report.damages) == 1
    assert_nothing_made_up(episodes(target), whole)
    assert len(report.lost_episodes) + len(report.shortened) in (1, 2)
    path.write_bytes(path.read_bytes()[:20])
    assert_nothing_made_up(episodes(fixed(made.root)[0]), whole)


def test_evicted_rows_are_not_missed_and_headless_episodes_keep_their_t(made: Made) -> None:
    shutil.rmtree(made.root / "checkpoints" / made.checkpoint)
    record = mark(made.root, read_record(made.root, made.first), first_row=4)
    (made.root / record.folder / "steps/f/c.0.0").unlink()
    whole = episodes(made.root)
    target, report = fixed(made.root)
    assert not report.damages
    assert_kept(episodes(target), whole)
    flip(made.chunk("steps/f", 3))
    target, report = fixed(made.root)
    found = episodes(target)
    assert found[trajstore.EpisodeKey(made.first, 0)][0]["is_headless"]
    assert [(e.episode, e.n_steps) for e in report.shortened] == [(1, 5)]
    assert_nothing_made_up(found, whole)


def test_what_abandoned_sessions_wrote_is_repaired_too_and_stays_abandoned(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with trajstore.ReplayBuffer(str(root), commit_seconds=None, checkpoint_seconds=None) as buffer:
        buffer.add_episode({"x": np.arange(20), "reward": np.ones(20)}, terminated=True)
        buffer.save_checkpoint("c", wait=True)
        buffer.add_episode({"x": np.arange(5), "reward": np.ones(5)}, terminated=True)
    with trajstore.ReplayBuffer.resume(str(root), "c", commit_seconds=None) as buffer:
        buffer.add_episode({"x": np.arange(7), "reward": np.ones(7)}, terminated=True)
    target, _ = fixed(root)
    for view in ("episodes", "history"):
        before, now = (trajstore.open(r) for r in (root, target))
        assert len(now) == len(before) == 2
        assert len(now.history(abandoned=True)) == len(before.history(abandoned=True)) == 3, view
    with trajstore.ReplayBuffer.resume(str(target), "c", commit_seconds=None) as buffer:
        assert buffer.n_steps == 20


def test_a_store_of_a_newer_format_or_none_at_all_is_refused(made: Made, tmp_path: Path) -> None:
    with pytest.raises(StoreNotFoundError):
        repair(tmp_path / "nothing", tmp_path / "new")
    with pytest.raises(StoreExistsError, match="already a store"):
        repair(made.root, made.root)
    path = made.root / "zarr.json"
    path.write_bytes(path.read_bytes().replace(b'"format":1', b'"format":2'))
    with pytest.raises(FormatError, match="reads format 1"):
        repair(made.root, tmp_path / "new")
    assert not (tmp_path / "new" / "zarr.json").exists()


def test_an_object_that_can_not_be_read_is_lost_and_a_storage_that_fails_is_not_damage(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = real_storage(str(made.root))
    original, fails = real.get, [True]

    def get(key: str) -> bytes:
        if fails[0] and key.endswith("steps/f/c.2.0") and made.first in key:
            raise StorageError("can't read: Input/output error")
        return original(key)

    monkeypatch.setattr(real, "get", get)
    monkeypatch.setattr(repairing, "open_storage", lambda url, *_, **__: real if url == "s" else real_storage(url))
    target = str(made.root.parent / "new")
    report = repair("s", target)
    assert [d.what for d in report.damages] == ["can't be read: can't read: Input/output error"]
    assert verify(target).is_clean

    def no_names(prefix: str) -> list[str]:
        raise StorageError("the storage does not answer")

    monkeypatch.setattr(real, "list_names", no_names)
    with pytest.raises(StorageError, match="does not answer"):
        repair("s", str(made.root.parent / "newer"))


def test_a_repair_that_dies_anywhere_leaves_no_store_and_can_be_given_again(
    made: Made, new_place: MakePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(made.chunk("steps/f", 2))
    before = {path: path.read_bytes() for path in objects(made.root)}
    real = repairing.open_storage
    target = new_place("memory").url

    def through(plan: Any, url: str) -> FaultyStorage:
        faulty = FaultyStorage(real(url), plan)
        monkeypatch.setattr(repairing, "open_storage", lambda u, *a, **k: faulty if u == url else real(u, *a, **k))
        return faulty

    counting = through(None, new_place("memory").url)
    repair(made.root, counting.display)
    for at in range(1, len(counting.calls) - 3, 9):
        through(DieAt(at, is_after=at % 2 == 0), target)
        with pytest.raises(Died):
            repair(made.root, target)
        with pytest.raises(StoreNotFoundError):
            trajstore.open(target)
    monkeypatch.setattr(repairing, "open_storage", real)
    repair(made.root, target)
    assert verify(target).problems == []
    assert {path: path.read_bytes() for path in objects(made.root)} == before


@pytest.mark.parametrize("kind", ["memory", pytest.param("s3", marks=pytest.mark.s3)])
def test_stores_in_memory_and_on_object_stores_are_repaired(new_place: MakePlace, kind: str) -> None:
    source, target = new_place(kind), new_place(kind)
    store = trajstore.create(source.url, SCHEMA, **source.kwargs)
    with store.writer("w") as writer:
        keys = [writer.append_episode(steps(6, i), terminated=True) for i in range(4)]
    storage = real_storage(source.url, source.options)
    storage.delete([f"streams/{writer.stream}/steps/f/c.3.0", "zarr.json", "schema/zarr.json"])
    options = {"storage_options": source.options or None, "target_options": target.options or None}
    report = repair(source.url, target.url, **options)
    assert [e.episode for e in report.lost_episodes] == [2]  # rows 12 to 16
    assert not report.shortened
    found = trajstore.open(target.url, **target.kwargs)
    assert [found.episodes.key(i) for i in range(len(found))][:2] == keys[:2]
    assert verify(found).problems == []


# ---- any damage ------------------------------------------------------------------------------------------


DAMAGES = st.lists(
    st.tuples(st.integers(0, 10_000), st.sampled_from(["flip", "cut", "remove", "zeros"]), st.integers(0, 10_000)),
    min_size=1,
    max_size=4,
)


def hurt(path: Path, how: str, at: int) -> None:
    if not path.exists():
        return
    data = bytearray(path.read_bytes())
    if how == "remove":
        path.unlink()
    elif how == "cut":
        path.write_bytes(data[: at % (len(data) + 1)])
    elif how == "zeros":
        start = at % (len(data) + 1)
        path.write_bytes(data[:start] + bytes(min(16, len(data) - start)) + data[start + 16 :])
    elif data:
        flip(path, at % len(data), at % 8)


def readable(root: Path) -> dict[Any, Any]:
    """The episodes that can be read of a damaged store."""
    found = {}
    try:
        view = trajstore.open(root).snapshot.with_abandoned()
        rows = list(view.episodes)
    except TrajstoreError:
        return {}
    for i, row in enumerate(rows):
        try:
            found[view.episodes.key(i)] = row, arrays(view, i)
        except TrajstoreError:
            continue
    return found


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damages=DAMAGES)
def test_whatever_is_damaged_what_could_be_read_is_kept_and_nothing_is_made_up(
    template: Made, tmp_path_factory: pytest.TempPathFactory, damages: list[tuple[int, str, int]]
) -> None:
    root = tmp_path_factory.mktemp("any") / "store"
    shutil.copytree(template.root, root)
    whole = episodes(root)
    paths = objects(root)
    for which, how, at in damages:
        hurt(paths[which % len(paths)], how, at)
    before = readable(root)
    target, report = fixed(root)
    found = episodes(target)
    assert_kept(found, before)
    assert_nothing_made_up(found, whole)
    lost = {(e.stream, e.episode) for e in report.lost_episodes} | {(s, 0) for s in report.lost_streams}
    missing = whole.keys() - found.keys()
    assert {key for key in missing if key.stream not in report.lost_streams} <= lost
    shutil.rmtree(root.parent)
