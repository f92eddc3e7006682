"""Frames in blocks: several threads and readers at once, and columns that others wrote or that are older."""

from __future__ import annotations

import itertools
import shutil
import threading
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import torch

import trajstore
from tests.cache.test_blocked_pages import FIELDS, _column, flattened, frames, stored
from tests.cache.test_mapped_pages import mapped_pages
from tests.format.test_kept_stores import LENGTHS, STORES, episode
from tests.support.sharding import read_record, stream_arrays, write_arrays, write_record
from trajstore import Field, Reader, ReplayBuffer, Schema, Windows
from trajstore.format.array_layout import ArrayLayout
from trajstore.format.codec import Codec
from trajstore.format.zstd_library import zstd_library
from trajstore.storage.file_maps import can_map_files

Array = np.ndarray[Any, np.dtype[Any]]


@pytest.fixture(autouse=True)
def local(tmp_path: Path) -> None:
    if not can_map_files(tmp_path) or zstd_library() is None:
        pytest.skip("blocks are not mapped here")


# ---- several at once


def value_of(step: Array) -> Array:
    """The frames of steps with these numbers."""
    rows = np.zeros((*step.shape, 64, 64), np.uint8)
    rows[..., 0, :] = (step % 251)[..., None]
    rows[..., 1, :] = (step // 251)[..., None]
    return rows


def check_frames(batch: Any) -> None:
    """Every frame is the one of the step that its window says."""
    step = 100 * batch["index"][:, 1].numpy()[:, None] + batch["index"][:, 2].numpy()[:, None] + np.arange(3)
    assert (batch["x"].numpy() == value_of(step)).all()


@pytest.mark.parametrize("cache_bytes", ["100KiB", "3MiB"])  # nothing, and most of the rows as they become more
def test_threads_draw_from_one_buffer_that_grows(tmp_path: Path, cache_bytes: str) -> None:
    schema = Schema({"x": Field("uint8", (64, 64), chunk_rows=32)})
    options: dict[str, Any] = {"cache_bytes": cache_bytes, "commit_seconds": None, "fsync": False}
    with ReplayBuffer(tmp_path / "store", schema=schema, **options) as buffer:
        is_over = threading.Event()

        def draw() -> int:
            n = 0
            while not is_over.is_set() or n < 20:
                check_frames(buffer.sample(32, Windows(3)))
                n += 1
            return n

        def iterate() -> int:
            with buffer.batches(32, Windows(3), prefetch=2) as batches:
                for batch in itertools.islice(batches, 40):
                    check_frames(batch)
            return 40

        def add(k: int) -> None:
            buffer.add_episode({"x": value_of(100 * k + np.arange(100))}, terminated=True)
            buffer.flush()

        add(0)
        with ThreadPoolExecutor(4) as threads:
            try:
                work = [threads.submit(act) for act in (draw, draw, iterate, iterate)]
                for k in range(1, 11):
                    add(k)
            finally:
                is_over.set()
            assert all(each.result() >= 20 for each in work)
        assert mapped_pages(buffer.reader) > 0


def test_readers_in_threads_draw_what_each_draws_alone(tmp_path: Path) -> None:
    store, _ = stored(tmp_path)

    def run(seed: int) -> list[dict[str, torch.Tensor]]:
        reader = Reader(store, cache_bytes=1, seed=seed)
        return [flattened(reader.sample(32, Windows.transitions())) for _ in range(15)]

    alone = [run(seed) for seed in range(2)]
    with ThreadPoolExecutor(2) as threads:
        together = list(threads.map(run, range(2)))
    for ours, theirs in zip(together, alone, strict=True):
        assert all(torch.equal(o[key], t[key]) for o, t in zip(ours, theirs, strict=True) for key in t)


# ---- columns that others wrote


def write_with_tensorstore(root: Path, stream: str, layouts: dict[str, ArrayLayout], arrays: Any) -> None:
    for path, layout in layouts.items():
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": f"{root}/streams/{stream}/{path}/"},
            "metadata": {
                k: v for k, v in layout.metadata(len(arrays[path])).items() if k != "storage_transformers"
            },
        }
        array = tensorstore.open(spec, create=True, delete_existing=True).result()
        array.write(arrays[path]).result()


CODECS = {
    "blocks of rows": Codec("blosc", 3, "zstd", "noshuffle", 16 << 10),
    "blocks that are no rows": Codec("blosc", 5, "zstd", "noshuffle", 5000),
    "shuffled, split": Codec("blosc", 1, "zstd", "shuffle", 32 << 10, 4),
    "at the level of our own": Codec("blosc", 1, "zstd", "noshuffle", 16 << 10),
    "not compressed": Codec("blosc", 0, "zstd", "noshuffle", 16 << 10),
}


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
@pytest.mark.parametrize("write", [write_arrays, write_with_tensorstore], ids=["zarr-python", "tensorstore"])
@pytest.mark.parametrize("chunks_per_shard", [None, 2], ids=["flat", "sharded"])
def test_columns_that_others_wrote_in_blocks_are_mapped(
    tmp_path: Path, codec: Codec, write: Callable[..., None], chunks_per_shard: int | None
) -> None:
    _, stream = stored(tmp_path)
    record, arrays = read_record(tmp_path, stream), stream_arrays(tmp_path, stream)
    frame = replace(
        record.layouts["steps/frame"],
        codec=codec,
        shard_rows=chunks_per_shard and 32 * chunks_per_shard,
        index_at_start=True,
    )
    shutil.rmtree(tmp_path / "streams" / stream / "steps/frame")
    write(tmp_path, stream, {"steps/frame": frame}, arrays)
    write_record(tmp_path, replace(record, layouts={**record.layouts, "steps/frame": frame}))

    store = trajstore.open(tmp_path)
    expected = torch.from_numpy(np.concatenate([_column(k, n, "frame") for k, n in enumerate((30, 1, 50, 20))]))
    first = np.cumsum([0, 31, 2, 51])
    for cache_bytes, is_mapped in ((1, True), (1 << 30, False)):
        reader = Reader(store, cache_bytes=cache_bytes, seed=3)
        for _ in range(4):
            batch = reader.sample(32, Windows(fields=("frame",)))
            rows = first[batch["index"][:, 1]] + batch["index"][:, 2].numpy()
            assert torch.equal(batch["frame"][:, 0], expected[rows])
        assert (reader.assembler.cache._columns["frame"].table.n_mapped > 0) == is_mapped


# ---- older columns


def test_plain_zstd_is_sampled_as_before(tmp_path: Path) -> None:
    """Chunks without blocks, which older versions wrote: the same batches, from slots."""
    runs = []
    for codec in (None, "zstd:1"):
        fields = {"frame": replace(FIELDS["frame"], codec=codec)}
        store = trajstore.create(tmp_path / str(codec)[:4], Schema(fields), fsync=False)
        with store.writer() as writer:
            for k in range(4):
                writer.append_episode({"frame": frames(31, (64, 64), k)}, terminated=True)
        store.refresh()
        reader = Reader(store, cache_bytes=1, seed=5)
        runs.append([flattened(reader.sample(32, Windows.transitions())) for _ in range(5)])
        runs[-1] = [{k: v for k, v in batch.items() if k != "index"} for batch in runs[-1]]
        assert (mapped_pages(reader) > 0) == (codec is None)
    assert all(torch.equal(a[key], b[key]) for a, b in zip(*runs, strict=True) for key in a)


@pytest.mark.parametrize("cache_bytes", [1, 1 << 30])
def test_a_store_of_format_1_is_sampled_as_before(tmp_path: Path, cache_bytes: int) -> None:
    with zipfile.ZipFile(STORES / "format-1.zip") as archive:
        archive.extractall(tmp_path)
    store = trajstore.open(tmp_path / "store")
    expected = [episode(k, n, k < 2)["observation"]["frame"] for k, n in enumerate(LENGTHS)]
    reader = Reader(store, cache_bytes=cache_bytes, seed=2)
    keys = {store.episodes.key(k): k for k in range(len(store))}
    for _ in range(5):
        batch = reader.sample(32, Windows(2))
        for (stream, number, t), frame in zip(
            batch["index"].tolist(), batch["observation"]["frame"].numpy(), strict=True
        ):
            assert (frame == expected[keys[reader.streams[stream], number]][t : t + 2]).all()
