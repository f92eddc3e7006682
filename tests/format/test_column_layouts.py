"""The layouts that a stream chooses for its columns, and what it chooses them by."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trajstore
from tests.support.faulty import Call, FaultyStorage, Plan, no_space, real_storage, through
from tests.support.sharding import read_record
from trajstore import Field, Schema, StorageError
from trajstore.format.array_layout import ArrayLayout
from trajstore.format.codec import Codec
from trajstore.format.column_layouts import KnownRows, column_layouts
from trajstore.store.verify import verify
from trajstore.writing.commit_batch import NewRows
from trajstore.writing.row_samples import sample_rows

Array = np.ndarray[Any, np.dtype[Any]]
MIB = 1 << 20
MANY = KnownRows(1 << 20)


def layout_of(spec: Field, known: KnownRows) -> ArrayLayout:
    return column_layouts(Schema({"x": spec}), known)["x"]


# ---- codecs ------------------------------------------------------------------------------------------------


def test_a_field_that_compresses_to_less_than_six_tenths_is_compressed() -> None:
    for share, name in ((0.05, "blosc"), (0.6, "blosc"), (0.61, "none"), (1.0, "none")):
        assert layout_of(Field("float32", (64,)), KnownRows(1000, None, {"x": share})).codec.name == name
        assert layout_of(Field("uint8", (84, 84, 4)), KnownRows(1000, None, {"x": share})).codec.name == name


def test_a_declared_codec_stays_whatever_the_rows_are() -> None:
    for codec in ("none", "zstd:3", "blosc-lz4:9"):
        for share in (0.01, 1.0):
            layout = layout_of(Field("float32", (64,), codec=codec), KnownRows(1000, None, {"x": share}))
            assert layout.codec == Codec.parse(codec)


RNG = np.random.default_rng(0)
COLUMNS = {
    "noise": (RNG.standard_normal((5000, 64)).astype(np.float32), "none"),
    "walk": (np.cumsum(RNG.standard_normal((5000, 64)), 0).astype(np.float32), "none"),
    "swing": (np.sin(np.linspace(0, 99, 5000)[:, None] * np.arange(1, 28)), "none"),
    "sparse": ((RNG.random(5000) < 0.02).astype(np.float32), "blosc"),
    "action": (RNG.integers(0, 6, 5000), "blosc"),
    "sprites": (np.kron(RNG.integers(0, 4, (200, 21, 21)), np.ones((1, 4, 4), int)).astype(np.uint8), "blosc"),
    "static": (RNG.integers(0, 256, (200, 84, 84)).astype(np.uint8), "none"),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_a_stream_chooses_by_its_first_rows(tmp_path: Path, name: str) -> None:
    values, codec = COLUMNS[name]
    store = trajstore.create(tmp_path / "store", fsync=False)
    with store.writer(commit_seconds=None) as writer:
        writer.append_episode({"x": values}, terminated=True)
        writer.commit()
        writer.append_episode({"x": np.zeros_like(values)}, terminated=True)
    layout = read_record(tmp_path / "store", writer.stream).layouts["steps/x"]
    assert layout.codec.name == codec
    assert (store.refresh().read_episode(0)["x"] == values).all()


def test_few_rows_are_not_taken_for_a_sample() -> None:
    schema = Schema({"wide": Field("float32", (64,)), "narrow": Field("uint8")})
    for n, measured in ((63, set()), (64, {"wide"}), (1023, {"wide"}), (1024, {"wide", "narrow"})):
        rows = {"wide": NewRows(np.zeros((n, 64), np.float32)), "narrow": NewRows(np.zeros(n, np.uint8))}
        assert set(sample_rows(schema, rows, KnownRows()).shares) == measured


def test_a_sample_is_bounded_and_spread_over_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    n_bytes, encode, here = [], ArrayLayout.encode, threading.get_ident()

    def counted(layout: ArrayLayout, rows: Any) -> bytes:
        if threading.get_ident() == here:  # not what writers of other tests still commit
            n_bytes.append(rows.nbytes)
        return encode(layout, rows)

    monkeypatch.setattr(ArrayLayout, "encode", counted)
    values = RNG.integers(0, 256, (1 << 22, 4)).astype(np.uint8)
    values[: 1 << 21] = 0  # half of the rows are zeros: a sample of the first ones would say so of all
    known = sample_rows(Schema({"x": Field("uint8", (4,))}), {"x": NewRows(values)}, KnownRows())
    assert sum(n_bytes) == MIB
    assert 0.45 < known.shares["x"] < 0.55


def test_rows_are_sampled_in_the_order_in_which_they_are_stored() -> None:
    schema = Schema({"x": Field("uint8", (84, 84))})
    frames = RNG.integers(0, 256, (2, 84, 84)).astype(np.uint8)
    rows = np.tile(frames, (128, 1, 1))  # every second row is the same frame
    mixed = sample_rows(schema, {"x": NewRows(rows[RNG.permutation(256)])}, KnownRows()).shares["x"]
    sorted_ = sample_rows(schema, {"x": NewRows(rows, np.argsort(np.arange(256) % 2))}, KnownRows()).shares["x"]
    assert sorted_ < mixed


# ---- objects -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "known", "chunk_rows", "object_rows"),
    [
        (Field("float32", (64,)), MANY, 512, 32768),  # 128 KiB in 8 MiB
        (Field("float32", (64,)), KnownRows(10_000), 512, 32768),
        (Field("float32", (64,)), KnownRows(1000), 512, 4096),  # about five commits
        (Field("float32", (64,)), KnownRows(1, 1000), 512, 4096),
        (Field("float32", (64,)), KnownRows(1), 256, 1024),  # not less than 256 KiB, in four chunks
        (Field("float32"), MANY, 16384, 1 << 21),
        (Field("float32"), KnownRows(1), 16384, 65536),
        (Field("uint8", (84, 84)), KnownRows(1 << 20, None, {"x": 0.01}), 64, 8192),  # 64 MiB decoded
        (Field("uint8", (84, 84)), KnownRows(1 << 20, None, {"x": 0.5}), 64, 2048),  # 8 MiB encoded
        (Field("uint8", (84, 84)), KnownRows(1 << 20, None, {"x": 1.0}), 32, 1024),
        (Field("uint8", (84, 84)), KnownRows(100, None, {"x": 1.0}), 32, 512),
        (Field("uint8", (84, 84)), KnownRows(1), 64, 128),  # not less than 1 MiB decoded
        (Field("uint8", (1 << 21,)), KnownRows(1 << 20, None, {"x": 1.0}), 1, 4),
        (Field("uint8", (1 << 24,)), KnownRows(1 << 20, None, {"x": 1.0}), 1, 1),
    ],
)
def test_chunks_are_small_and_objects_large(
    spec: Field, known: KnownRows, chunk_rows: int, object_rows: int
) -> None:
    layout = layout_of(spec, known)
    assert (layout.chunk_rows, layout.object_rows) == (chunk_rows, object_rows)
    assert (layout.shard_rows is None) is (chunk_rows == object_rows)


def test_a_field_with_chunks_of_its_own_is_laid_out_as_it_says() -> None:
    flat = layout_of(Field("float32", (64,), chunk_rows=1000), MANY)
    assert (flat.chunk_rows, flat.shard_rows, flat.codec) == (1000, None, Codec.parse("blosc-lz4"))
    packed = layout_of(Field("float32", (64,), chunk_rows=10, shard_rows=30), MANY)
    assert (packed.chunk_rows, packed.shard_rows) == (10, 30)


sizes = st.lists(
    st.tuples(st.sampled_from(("uint8", "float32", "int64")), st.integers(1, 40_000)), min_size=1, max_size=40
)


@given(sizes, st.integers(0, 1 << 22), st.none() | st.integers(1, 1000), st.floats(0.001, 1))
@settings(deadline=None)
def test_the_last_objects_of_all_columns_are_bounded(
    fields: list[Any], n_rows: int, commit_steps: int | None, share: float
) -> None:
    schema = Schema({f"f{i}": Field(dtype, (n,)) for i, (dtype, n) in enumerate(fields)})
    layouts = column_layouts(schema, KnownRows(n_rows, commit_steps, dict.fromkeys(schema, share)))
    stored = 0.0
    for path, layout in layouts.items():
        size, row_bytes = layout.object_rows, schema[path].row_bytes
        stored += size * row_bytes * (1 if layout.codec.name == "none" else share)
        assert layout.chunk_rows & (layout.chunk_rows - 1) == size & (size - 1) == 0
        assert layout.chunk_bytes <= 512 << 10 or layout.chunk_rows == 1
        assert layout.chunks_per_shard <= 1024
    # Sizes are rounded to powers of two, and an object of wide rows may have up to 1 MiB in any case.
    assert stored <= 1.5 * 32 * MIB + len(schema) * MIB


@pytest.mark.parametrize("n_rows", [1000, 1600, 5000, 16_000])
def test_a_commit_writes_about_four_times_what_it_appends(n_rows: int) -> None:
    """Counted by the layouts, over the many commits that fill some objects of each column."""
    shapes: list[tuple[int, ...]] = [(64,), (8,), (), (), (), (2,)]
    schema = Schema({f"f{i}": Field("float32", shape) for i, shape in enumerate(shapes)})
    n_commits, written = 200, 0
    for layout in column_layouts(schema, KnownRows(n_rows)).values():
        stops = n_rows * np.arange(1, n_commits + 1)
        starts = (stops - n_rows) // layout.object_rows * layout.object_rows  # of the object that is written again
        written += int((-(-(stops - starts) // layout.chunk_rows)).sum()) * layout.chunk_bytes
    assert written <= 5 * n_commits * n_rows * schema.row_bytes


def test_few_rows_of_many_columns_take_little_room() -> None:
    """Raw chunks are stored whole; short sessions and small commits have small ones."""
    schema = Schema({f"f{i}": Field("float32", (1 + i % 3,)) for i in range(100)})
    layouts = column_layouts(schema, KnownRows(10)).values()
    assert all(layout.is_raw and layout.chunk_bytes <= 16 << 10 for layout in layouts)


def test_ten_gigabytes_of_state_are_at_most_two_thousand_objects() -> None:
    """Sixteen environments that make 1,000 steps a second each, and a commit every five seconds: six fields."""
    shapes: list[tuple[int, ...]] = [(64,), (8,), (), (), (), (2,)]
    schema = Schema({f"f{i}": Field("float32", shape) for i, shape in enumerate(shapes)})
    n_rows = 10**10 // schema.row_bytes
    layouts = column_layouts(schema, KnownRows(80_000)).values()
    assert sum(-(-n_rows // layout.object_rows) for layout in layouts) <= 2000


# ---- streams without rows ----------------------------------------------------------------------------------


def test_a_stream_that_was_published_without_rows_chooses_when_they_come(tmp_path: Path) -> None:
    root = tmp_path / "store"
    store = trajstore.create(root, {"x": Field("float32", (64,)), "y": Field("int64")}, fsync=False)
    writer = store.writer(commit_seconds=None)
    writer.wait(writer.publish_view())
    empty = read_record(root, writer.stream)
    assert empty.rows == 0
    store.refresh()
    values = {"x": np.ones((4096, 64), np.float32), "y": RNG.integers(0, 1 << 62, 4096)}
    writer.append_episode(values, terminated=True)
    writer.commit()
    record = read_record(root, writer.stream)
    assert [record.layouts[f"steps/{n}"].codec.name for n in "xy"] == ["blosc", "none"]
    assert [empty.layouts[f"steps/{n}"].codec.name for n in "xy"] == ["none", "blosc"]
    assert verify(root).is_clean
    writer.close()
    assert verify(root).is_clean
    for reader in (store.refresh(), trajstore.open(root)):
        assert all((reader.read_episode(0)[name] == values[name]).all() for name in values)


class NoChunks(Plan):
    """Chunks of steps can't be put."""

    def before(self, call: Call) -> None:
        if call.action == "put" and "/steps/x/c." in call.key:
            raise no_space()


def test_a_writer_that_dies_between_new_layouts_and_their_record_leaves_a_sound_store(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with through(FaultyStorage(real_storage(str(root)), NoChunks())):
        store = trajstore.create(root, {"x": Field("float32", (64,))})
        writer = store.writer(commit_seconds=None)
        writer.wait(writer.publish_view())
        writer.append_episode({"x": np.zeros((4096, 64), np.float32)}, terminated=True)
        with pytest.raises(StorageError):
            writer.commit()
        writer.release()
    node = json.loads((root / "streams" / writer.stream / "steps/x/zarr.json").read_bytes())
    assert node["codecs"] != read_record(root, writer.stream).nodes()["steps/x"]["codecs"]
    assert verify(root).is_clean
    assert len(trajstore.open(root)) == 0


@pytest.mark.parametrize("mib", [1, 8, 64, 1024])
def test_objects_in_memory_are_bounded_by_the_buffer(mib: int) -> None:
    """Small buffers get small objects, down to the least size; large ones not more than 8 MiB."""
    fields = {f"field_{i}": Field("float32", (64,)) for i in range(6)}
    known = KnownRows(1 << 20, buffer_bytes=mib << 20)
    sizes = [layout.object_rows * layout.row_bytes for layout in column_layouts(Schema(fields), known).values()]
    assert all(size <= min(8 << 20, (mib << 20) // 8) * 1.5 for size in sizes)
    assert sum(sizes) <= min(32 << 20, (mib << 20) // 2) * 1.5
