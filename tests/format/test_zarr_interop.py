"""What trajstore writes, zarr-python and tensorstore read; what zarr-python writes in our layout, we read."""

from __future__ import annotations

import json
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore
import torch
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zarr.core.buffer import default_buffer_prototype
from zarr.core.metadata.v3 import ArrayV3Metadata

import trajstore
from tests.conftest import Place
from tests.support.sharding import mark, pack, read_record, rewrite, sharded, stream_arrays
from trajstore import CorruptionError, Field, Schema, SnapshotExpiredError, Store, Writer
from trajstore.format.commit_record import SessionView, stream_layouts
from trajstore.schema import as_array, flatten
from trajstore.testing import strategies as ours
from trajstore.testing.model import assert_same_bits, stored_as

Array = np.ndarray[Any, np.dtype[Any]]
quick = settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow])

PLAIN = Schema(
    {
        "observation": Field("float32", (3,), final=True, chunk_rows=4),
        "action": Field("uint8", (2, 2), chunk_rows=2, codec="none"),
        "reward": Field("float64", chunk_rows=4, codec="zstd"),
    },
    episode={"seed": int, "task": str},
)
ROWS = 6  # rows of an episode of PLAIN: five steps and the final one


def episode(seed: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {
        "observation": rng.random((ROWS, 3), np.float32),
        "action": rng.integers(0, 256, (ROWS - 1, 2, 2), np.uint8),
        "reward": rng.random(ROWS - 1),
    }


def fill(writer: Writer, n: int) -> list[dict[str, Array]]:
    written = [episode(seed) for seed in range(n)]
    for seed, data in enumerate(written):
        writer.append_episode(data, terminated=True, metadata={"seed": seed, "task": f"t{seed}", "note": [seed]})
    return written


def plain_store(root: Path, n: int = 3) -> tuple[Store, str, list[dict[str, Array]]]:
    """A store with one sealed stream of ``n`` episodes."""
    store = trajstore.create(root, PLAIN, fsync=False)
    with store.writer() as writer:
        written = fill(writer, n)
    store.refresh()
    return store, writer.stream, written


def assert_shows(store: Store, stream: str, expected: dict[int, dict[str, Array]]) -> None:
    """The store shows exactly these episodes of the stream, bit by bit, with their metadata."""
    assert [store.episodes.key(i) for i in range(len(store))] == [(stream, n) for n in expected]
    for i, (n, data) in enumerate(expected.items()):
        row = store.episodes.row(i)
        assert (row["seed"], row["task"], row["metadata"]) == (n, f"t{n}", {"note": [n]})
        for path, values in store.read_episode(i).items():
            assert_same_bits(values, data[path], f"episode {n}, {path}")


def columns_of(schema: Schema, episodes: Sequence[dict[str, Any]]) -> dict[str, Array]:
    """What the arrays of a stream hold after these episodes: rows in order, zeros where there is no final value."""
    flat = [{path: as_array(path, value)[0] for path, value in flatten(data).items()} for data in episodes]
    columns = {}
    for path, spec in schema.fields.items():
        parts = [np.empty((0, *spec.shape), spec.storage_dtype)]
        for data in flat:
            filler = max(map(len, data.values())) - len(data[path])
            parts += [data[path], np.zeros((filler, *spec.shape), spec.storage_dtype)]
        columns[f"steps/{path}"] = np.concatenate(parts)
    return columns


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def chunk_files(root: Path, stream: str, path: str) -> dict[int, Path]:
    found = (root / "streams" / stream / path).glob("c.*")
    return {int(file.name.split(".")[1]): file for file in found}


# ---- ours, read by others ------------------------------------------------------------------------------


@st.composite
def recordings(draw: st.DrawFn) -> tuple[Schema, list[dict[str, Any]]]:
    schema = draw(ours.schemas())
    return schema, draw(st.lists(ours.episodes(schema, max_steps=12), min_size=1, max_size=3))


def record_in(root: Path, schema: Schema, episodes: Sequence[dict[str, Any]]) -> Writer:
    """Write the episodes to a new store, one commit each; the writer is still open."""
    writer = trajstore.create(root, schema, fsync=False).writer(commit_seconds=None)
    for data in episodes:
        writer.append_episode(data, terminated=True)
        writer.commit()
    return writer


@pytest.fixture
def fresh_root(tmp_path: Path) -> Callable[[], Path]:
    """Makes a new place for each example of a property test."""
    return lambda: Path(tempfile.mkdtemp(dir=tmp_path)) / "store"


shared_fixture = settings(quick, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@given(recordings())
@shared_fixture
def test_zarr_reads_bit_identical_what_is_committed(
    fresh_root: Callable[[], Path], recording: tuple[Schema, list[dict[str, Any]]]
) -> None:
    root = fresh_root()
    writer = record_in(root, *recording)
    group = zarr.open_group(root, mode="r")["streams"][writer.stream]
    for path, expected in columns_of(*recording).items():
        assert_same_bits(np.asarray(group[path][...]), expected, path)
    writer.close()


@given(recordings())
@shared_fixture
def test_tensorstore_reads_bit_identical_what_is_sealed(
    fresh_root: Callable[[], Path], recording: tuple[Schema, list[dict[str, Any]]]
) -> None:
    root = fresh_root()
    writer = record_in(root, *recording)
    writer.close()
    for path, expected in columns_of(*recording).items():
        kvstore = {"driver": "file", "path": f"{root}/streams/{writer.stream}/{path}"}
        array = tensorstore.open({"driver": "zarr3", "kvstore": kvstore}).result()
        assert_same_bits(array.read().result(), expected, path)


@given(recordings())
@shared_fixture
def test_episodes_read_bit_identical_to_what_zarr_reads(
    fresh_root: Callable[[], Path], recording: tuple[Schema, list[dict[str, Any]]]
) -> None:
    root, (schema, episodes) = fresh_root(), recording
    record_in(root, schema, episodes).close()
    store = trajstore.open(root)
    for i, data in enumerate(episodes):
        read = flatten(store.read_episode(i))
        for path, value in flatten(data).items():
            assert_same_bits(read[path], stored_as(as_array(path, value)[0], schema[path].dtype), path)


def walk(place: Place) -> dict[str, Any]:
    """Every node below the root, as zarr-python finds it; a warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        group = zarr.open_group(place.url, mode="r", storage_options=place.options or None)
        return dict(group.members(max_depth=None))


def expected_nodes(stream: str) -> set[str]:
    arrays = [f"streams/{stream}/steps/{path}" for path in PLAIN]
    arrays += [f"streams/{stream}/spans/{name}" for name in ("ints", "floats", "text")]
    return {*arrays, *(f"streams/{stream}{part}" for part in ("", "/steps", "/spans"))}


@pytest.fixture
def live(place: Place) -> Iterator[tuple[Place, Store, Writer]]:
    """A store with an open writer that nothing has been appended to."""
    store = trajstore.create(place.url, PLAIN, fsync=False, **place.kwargs)
    writer = store.writer(commit_seconds=None)
    yield place, store, writer
    writer.discard()


def test_zarr_walks_an_empty_store(live: tuple[Place, Store, Writer]) -> None:
    assert {"schema", "streams", "checkpoints"} <= set(walk(live[0])) <= {
        "schema", "streams", "checkpoints", "scratch"
    }  # fmt: skip


def test_zarr_walks_a_store_between_commits(live: tuple[Place, Store, Writer]) -> None:
    place, _, writer = live
    fill(writer, 2)
    writer.commit()
    fill(writer, 2)
    nodes = walk(place)
    assert expected_nodes(writer.stream) <= set(nodes)
    assert nodes[f"streams/{writer.stream}/steps/reward"].shape == (2 * ROWS,)


def test_zarr_walks_groups_that_have_both_groups_and_arrays(place: Place) -> None:
    one = Field("float32")
    schema = Schema({"a": {"b": {"c": one}, "d": one}, "e": {"f": {"g": one}, "h": one}, "reward": one})
    store = trajstore.create(place.url, schema, fsync=False, **place.kwargs)
    with store.writer() as writer:
        writer.append({"a": {"b": {"c": 1.0}, "d": 1.0}, "e": {"f": {"g": 1.0}, "h": 1.0}, "reward": 1.0})
    assert {f"streams/{writer.stream}/steps/{path}" for path in schema} <= set(walk(place))


def test_zarr_walks_a_store_after_a_crash(live: tuple[Place, Store, Writer]) -> None:
    place, store, writer = live
    fill(writer, 2)
    writer.commit()
    fill(writer, 1)
    writer.release()  # what a crash leaves: staged rows gone, stream not sealed
    with store.writer() as after:
        fill(after, 1)
    assert expected_nodes(writer.stream) | expected_nodes(after.stream) <= set(walk(place))


def test_zarr_walks_a_store_with_an_aborted_episode(live: tuple[Place, Store, Writer]) -> None:
    place, _, writer = live
    writer.append({path: values[0] for path, values in episode(0).items()})
    writer.commit()
    writer.abort_episode()
    writer.close()
    nodes = walk(place)
    assert nodes[f"streams/{writer.stream}/steps/reward"].shape == (1,)
    assert nodes[f"streams/{writer.stream}/spans/ints"].shape[0] == 2


def test_a_streams_group_shows_exactly_the_committed_shapes(live: tuple[Place, Store, Writer]) -> None:
    place, store, writer = live
    for n in (1, 2, 3):
        fill(writer, 1)
        writer.commit()
        fill(writer, 1)
        group = zarr.open_group(
            f"{place.url}/streams/{writer.stream}", mode="r", storage_options=place.options or None
        )
        assert {p: group[f"steps/{p}"].shape[0] for p in PLAIN} == dict.fromkeys(PLAIN, (2 * n - 1) * ROWS)
        assert group["spans/ints"].shape[0] == 2 * n - 1
        writer.commit()
    assert store.refresh().n_rows == 6 * ROWS


def test_an_array_opened_by_its_own_path_shows_a_prefix_and_after_sealing_all(root: Path) -> None:
    writer = record_in(root, PLAIN, [episode(0), episode(1)])
    path = root / "streams" / writer.stream / "steps/observation"
    expected = columns_of(PLAIN, [episode(0), episode(1)])["steps/observation"]
    before = np.asarray(zarr.open_array(path, mode="r")[...])
    assert_same_bits(before, expected[: len(before)], "before sealing")
    writer.close()
    assert_same_bits(np.asarray(zarr.open_array(path, mode="r")[...]), expected, "after sealing")


def test_store_zarr_group_is_the_same_hierarchy(live: tuple[Place, Store, Writer]) -> None:
    place, store, writer = live
    fill(writer, 1)
    writer.commit()
    assert set(dict(store.zarr_group().members(max_depth=None))) == set(walk(place))


@given(ours.schemas(), st.integers(0, 1 << 40), st.sampled_from((None, 1, 5)), st.booleans())
@quick
def test_our_metadata_is_what_zarr_would_write(
    schema: Schema, rows: int, chunks_per_shard: int | None, index_at_start: bool
) -> None:
    for layout in sharded(stream_layouts(schema), chunks_per_shard, index_at_start).values():
        ours_json = layout.metadata(rows)
        parsed = ArrayV3Metadata.from_dict(json.loads(json.dumps(ours_json)))
        theirs = json.loads(parsed.to_buffer_dict(default_buffer_prototype())["zarr.json"].to_bytes())
        assert theirs == ours_json


# ---- theirs, read by us --------------------------------------------------------------------------------

LAYOUTS = [
    pytest.param((None, True), id="flat"),
    pytest.param((1, True), id="one-chunk-shards"),
    pytest.param((3, True), id="index-at-start"),
    pytest.param((3, False), id="index-at-end"),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@given(recording=recordings())
@settings(shared_fixture, max_examples=8)
def test_arrays_written_by_zarr_in_our_layout_are_read_bit_identical(
    fresh_root: Callable[[], Path],
    layout: tuple[int | None, bool],
    recording: tuple[Schema, list[dict[str, Any]]],
) -> None:
    root, (schema, episodes) = fresh_root(), recording
    writer = record_in(root, schema, episodes)
    writer.close()
    rewrite(root, writer.stream, chunks_per_shard=layout[0], index_at_start=layout[1])
    store = trajstore.open(root)
    for i, data in enumerate(episodes):
        read = flatten(store.read_episode(i))
        for path, value in flatten(data).items():
            assert_same_bits(read[path], stored_as(as_array(path, value)[0], schema[path].dtype), path)


@pytest.mark.parametrize("index_at_start", [True, False])
def test_sharded_arrays_are_read_by_steps(root: Path, index_at_start: bool) -> None:
    _, stream, written = plain_store(root)
    rewrite(root, stream, chunks_per_shard=2, index_at_start=index_at_start)
    read = trajstore.open(root).read_episode(1, fields=["observation"], start=2, stop=4)
    assert_same_bits(read["observation"], written[1]["observation"][2:4], "steps 2 to 4")


@pytest.mark.parametrize("index_at_start", [True, False])
def test_a_damaged_shard_index_is_corruption(root: Path, index_at_start: bool) -> None:
    _, stream, _ = plain_store(root)
    rewrite(root, stream, chunks_per_shard=2, index_at_start=index_at_start)
    file = chunk_files(root, stream, "steps/observation")[0]
    data = bytearray(file.read_bytes())
    data[2 if index_at_start else -6] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptionError, match="observation"):
        trajstore.open(root).read_episode(0)


def test_a_truncated_shard_is_corruption(root: Path) -> None:
    _, stream, _ = plain_store(root)
    rewrite(root, stream, chunks_per_shard=2)
    file = chunk_files(root, stream, "steps/observation")[0]
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CorruptionError, match="chunk 1"):
        trajstore.open(root).read_episode(1)


# ---- bfloat16 ------------------------------------------------------------------------------------------

ALL_BFLOAT16 = np.arange(1 << 16, dtype=np.uint16)


@pytest.mark.parametrize(
    "values",
    [
        pytest.param(torch.from_numpy(ALL_BFLOAT16.view(np.int16)).view(torch.bfloat16), id="torch"),
        pytest.param(ALL_BFLOAT16.view(ml_dtypes.bfloat16), id="ml_dtypes"),
    ],
)
def test_every_bfloat16_is_read_back_exactly(root: Path, values: Any) -> None:
    store = trajstore.create(root, Schema({"x": Field("bfloat16")}), fsync=False)
    with store.writer() as writer:
        writer.append_episode({"x": values})
    store.refresh()
    expected = (ALL_BFLOAT16.astype(np.uint32) << 16).view(np.float32)
    assert_same_bits(store.read_episode(0)["x"], expected, "as float32")
    array = store.zarr_group()[f"streams/{writer.stream}/steps/x"]
    assert_same_bits(np.asarray(array[...]), ALL_BFLOAT16, "on disk")
    assert array.attrs["trajstore_dtype"] == "bfloat16"


# ---- packed copies -------------------------------------------------------------------------------------


def test_a_packed_copy_shows_each_episode_once_under_its_original_key(root: Path) -> None:
    _, stream, written = plain_store(root)
    pack(root, stream, 0, 3 * ROWS)
    assert_shows(trajstore.open(root), stream, dict(enumerate(written)))


def test_packed_rows_are_read_after_the_original_chunks_are_deleted(root: Path) -> None:
    _, stream, written = plain_store(root)
    pack(root, stream, 0, 3 * ROWS)
    for path in PLAIN:
        for file in chunk_files(root, stream, f"steps/{path}").values():
            file.unlink()
    assert_shows(trajstore.open(root), stream, dict(enumerate(written)))


def test_packed_episodes_keep_their_keys_when_the_original_stream_is_gone(root: Path) -> None:
    _, stream, written = plain_store(root)
    pack(root, stream, 0, 3 * ROWS)
    shutil.rmtree(root / "streams" / stream)
    assert_shows(trajstore.open(root), stream, dict(enumerate(written)))


@pytest.mark.parametrize(("start", "stop"), [(0, 2), (1, 3), (1, 2)])
def test_a_packed_part_and_the_rest_of_its_original_make_the_whole(root: Path, start: int, stop: int) -> None:
    _, stream, written = plain_store(root)
    pack(root, stream, start * ROWS, stop * ROWS)
    assert_shows(trajstore.open(root), stream, dict(enumerate(written)))


def test_two_packed_parts_of_one_stream_show_each_episode_once(root: Path) -> None:
    _, stream, written = plain_store(root, 4)
    pack(root, stream, 0, 2 * ROWS)
    pack(root, stream, 2 * ROWS, 4 * ROWS)
    assert_shows(trajstore.open(root), stream, dict(enumerate(written)))


def test_a_packed_episode_that_ended_after_its_last_row_is_shown_once(root: Path) -> None:
    store = trajstore.create(root, PLAIN, fsync=False)
    with store.writer() as writer:
        rows = {path: values[0] for path, values in episode(0).items()}
        writer.append(rows)
        writer.commit()
        writer.end_episode(truncated=True, metadata={"seed": 7})
    pack(root, writer.stream, 0, 1)
    row = next(iter(trajstore.open(root).episodes))
    assert (row["length"], row["end"], row["seed"]) == (1, "truncated", 7)
    assert len(trajstore.open(root)) == 1


def test_zarr_walks_a_store_with_a_packed_copy(root: Path) -> None:
    _, stream, _ = plain_store(root)
    packed = pack(root, stream, 0, 3 * ROWS)
    assert expected_nodes(stream) | expected_nodes(packed) <= set(walk(Place(str(root), {})))
    for path, values in stream_arrays(root, packed).items():
        if path.startswith("steps/"):
            assert_same_bits(values, stream_arrays(root, stream)[path], path)


# ---- marks that a later session sets on older streams --------------------------------------------------


@pytest.fixture
def marked(root: Path) -> Callable[..., tuple[Store, str, list[dict[str, Array]]]]:
    """A stream of three episodes, and a later empty session whose record holds the given view."""

    def make(view: Callable[[str], SessionView], **changes: Any) -> tuple[Store, str, list[dict[str, Array]]]:
        store, stream, written = plain_store(root)
        add_session(root, view(stream), **changes)
        store.refresh()
        return store, stream, written

    return make


def add_session(root: Path, view: SessionView, **changes: Any) -> str:
    """A session that has committed one empty, aborted and discarded episode, and holds this view."""
    writer = trajstore.open(root, fsync=False).writer("session")
    writer.append({path: values[0] for path, values in episode(0).items()})
    writer.abort_episode()
    writer.close()
    own = {writer.stream: (0,)}
    mark(
        root,
        read_record(root, writer.stream),
        view=replace(view, discarded={**view.discarded, **own}),
        **changes,
    )
    return writer.stream


def test_rows_below_the_first_row_mark_do_not_exist(marked: Callable[..., Any]) -> None:
    store, stream, written = marked(lambda s: SessionView(first_rows={s: 8}))
    assert [store.episodes.key(i) for i in range(len(store))] == [(stream, 1), (stream, 2)]
    headless = {path: values[2:] for path, values in written[1].items()}
    assert_shows(store, stream, {1: headless, 2: written[2]})


def test_an_episode_without_its_first_steps_is_flagged(marked: Callable[..., Any]) -> None:
    store, _, _ = marked(lambda s: SessionView(first_rows={s: 8}))
    assert store.episodes["is_headless"].tolist() == [True, False]
    assert store.episodes["length"].tolist() == [3, 5]
    assert [store.episodes.spans(i)[0].t_start for i in range(2)] == [2, 0]


def test_a_mark_on_an_episodes_bound_evicts_it_and_spares_the_next(marked: Callable[..., Any]) -> None:
    store, stream, written = marked(lambda s: SessionView(first_rows={s: ROWS}))
    assert_shows(store, stream, {1: written[1], 2: written[2]})
    assert store.episodes["is_headless"].tolist() == [False, False]


def test_a_mark_past_the_last_row_leaves_nothing(marked: Callable[..., Any]) -> None:
    store, _, _ = marked(lambda s: SessionView(first_rows={s: 3 * ROWS}))
    assert len(store) == 0


def test_a_streams_own_first_row_evicts_too(root: Path) -> None:
    _, stream, written = plain_store(root)
    mark(root, read_record(root, stream), first_row=ROWS)
    assert_shows(trajstore.open(root), stream, {1: written[1], 2: written[2]})


def test_the_lowest_mark_of_a_world_counts(marked: Callable[..., Any], root: Path) -> None:
    store, stream, written = marked(lambda s: SessionView(first_rows={s: 2 * ROWS}), world="w")
    add_session(root, SessionView(first_rows={stream: ROWS}), world="w")
    store.refresh()
    assert_shows(store, stream, {1: written[1], 2: written[2]})


def test_marks_of_an_older_world_do_not_count(marked: Callable[..., Any], root: Path) -> None:
    store, stream, written = marked(lambda s: SessionView(first_rows={s: 2 * ROWS}), world="old")
    add_session(root, SessionView(), world="new")
    store.refresh()
    assert_shows(store, stream, dict(enumerate(written)))


def test_discarded_episodes_are_hidden(marked: Callable[..., Any]) -> None:
    store, stream, written = marked(lambda s: SessionView(discarded={s: (1,)}))
    assert_shows(store, stream, {0: written[0], 2: written[2]})


def test_discarded_episodes_stay_hidden_in_a_packed_copy(marked: Callable[..., Any], root: Path) -> None:
    store, stream, written = marked(lambda s: SessionView(discarded={s: (1,)}))
    pack(root, stream, 0, 3 * ROWS)
    store.refresh()
    assert_shows(store, stream, {0: written[0], 2: written[2]})


def test_open_episodes_of_a_writer_declared_dead_are_cut(root: Path) -> None:
    store = trajstore.create(root, PLAIN, fsync=False)
    writer = store.writer(commit_seconds=None)
    writer.append({path: values[0] for path, values in episode(0).items()})
    writer.commit()
    assert store.refresh().episodes["end"].tolist() == ["open"]
    add_session(root, SessionView(dead=(writer.stream,)))
    assert store.refresh().episodes["end"].tolist() == ["cut"]
    writer.discard()


# ---- chunks that are not there -------------------------------------------------------------------------


def test_a_snapshot_older_than_an_eviction_says_that_it_expired(root: Path) -> None:
    store, stream, _ = plain_store(root)
    old = store.snapshot
    add_session(root, SessionView(first_rows={stream: 8}))
    files = chunk_files(root, stream, "steps/observation")
    for index in (0, 1):
        files[index].unlink()
    with pytest.raises(SnapshotExpiredError, match=stream):
        old.read_episode(0)
    with pytest.raises(SnapshotExpiredError, match="refresh"):
        old.read_episode(1)


def test_a_snapshot_taken_after_an_eviction_reads_what_is_left(root: Path) -> None:
    store, stream, written = plain_store(root)
    add_session(root, SessionView(first_rows={stream: 8}))
    for path in PLAIN:
        n = PLAIN[path].chunk_rows or 1
        for index, file in chunk_files(root, stream, f"steps/{path}").items():
            if (index + 1) * n <= 8:
                file.unlink()
    store.refresh()
    assert_shows(store, stream, {1: {p: v[2:] for p, v in written[1].items()}, 2: written[2]})


@pytest.mark.parametrize("has_read_spans", [True, False])
def test_a_snapshot_of_a_removed_stream_says_that_it_expired(root: Path, has_read_spans: bool) -> None:
    store, stream, _ = plain_store(root)
    assert not has_read_spans or len(store) == 3
    shutil.rmtree(root / "streams" / stream)
    with pytest.raises(SnapshotExpiredError, match=stream):
        store.snapshot.read_episode(0)


def test_a_lost_chunk_is_corruption_that_names_store_stream_array_and_chunk(root: Path) -> None:
    store, stream, _ = plain_store(root)
    chunk_files(root, stream, "steps/observation")[2].unlink()
    with pytest.raises(CorruptionError) as caught:
        store.read_episode(1)
    for part in (str(root), stream, "steps/observation", "chunk 2 (rows 8 to 12)"):
        assert part in str(caught.value)
    assert not isinstance(caught.value, SnapshotExpiredError)


def test_a_lost_chunk_of_spans_is_corruption(root: Path) -> None:
    _, stream, _ = plain_store(root)
    chunk_files(root, stream, "spans/ints")[0].unlink()
    with pytest.raises(CorruptionError, match="spans/ints"):
        len(trajstore.open(root))


def test_a_chunk_lost_above_the_mark_is_corruption(root: Path) -> None:
    store, stream, _ = plain_store(root)
    add_session(root, SessionView(first_rows={stream: 8}))
    chunk_files(root, stream, "steps/observation")[4].unlink()
    with pytest.raises(CorruptionError, match="chunk 4"):
        store.snapshot.read_episode(2)
