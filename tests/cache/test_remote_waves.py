"""Chunks over a network: a batch takes one wave of requests, and one more for indexes of shards that are new."""

from __future__ import annotations

import mmap
import threading
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import trajstore
from tests.cache.test_cache import check, everything
from tests.sampling.test_batch_iterator import FIELDS, write
from tests.support.faulty import through
from trajstore import CorruptionError, Field, Reader, Schema, Windows
from trajstore.cache.arena import Arena
from trajstore.cache.cache_version import CacheVersion
from trajstore.host_memory import HostMemory
from trajstore.sampling.compiled import batch_loops
from trajstore.storage import Data, FsspecStorage, Place

SHARDED = {path: replace(field, shard_rows=4 * field.chunk_rows) for path, field in FIELDS.items()}  # type: ignore[operator]


class FarStorage(FsspecStorage):
    """An object store in memory that counts waves, and requests outside of them."""

    def __init__(self) -> None:
        super().__init__(f"memory://far-{uuid.uuid4().hex}", {})
        self.is_remote = True
        self.waves: list[int] = []
        self.n_single = 0
        self._in_wave = False

    def get_ranges(self, places: Sequence[Place]) -> Sequence[Data]:
        self.waves += [len(places)] * bool(places)
        self._in_wave = True
        try:
            return super().get_ranges(places)
        finally:
            self._in_wave = False

    def get(self, key: str) -> bytes:
        self.n_single += not self._in_wave
        return super().get(key)

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        self.n_single += not self._in_wave
        return super().get_range(key, start, stop)


def far_store(fields: Any, lengths: list[int]) -> tuple[FarStorage, trajstore.Store, trajstore.Writer]:
    storage = FarStorage()
    with through(storage):
        store = trajstore.create("memory://far", Schema(fields))
    writer = store.writer(commit_seconds=None)
    write(writer, lengths)
    store.refresh()
    return storage, store, writer


@pytest.mark.parametrize("codec", ["none", "zstd:1"])
def test_a_cold_batch_takes_a_wave_of_indexes_and_a_wave_of_chunks(codec: str) -> None:
    fields = {path: replace(field, codec=codec) for path, field in SHARDED.items()}
    storage, store, _ = far_store(fields, [6] * 20)
    reader = Reader(store)
    storage.waves.clear()
    storage.n_single = 0
    check(reader.sample(200, Windows()))
    assert storage.waves == [8 + 4, 30 + 15]
    check(reader.sample(200, Windows()))
    assert (len(storage.waves), storage.n_single) == (2, 0)


def test_a_cache_that_is_too_small_for_a_batch_asks_for_nothing_alone() -> None:
    storage, store, _ = far_store(SHARDED, [6] * 20)
    reader = Reader(store, cache_bytes=1)
    storage.n_single = 0
    for _ in range(3):
        check(reader.sample(200, Windows()))
    assert storage.n_single == 0


def test_flat_columns_take_one_wave() -> None:
    storage, store, _ = far_store(FIELDS, [6] * 20)
    reader = Reader(store)
    storage.waves.clear()
    storage.n_single = 0
    check(reader.sample(200, Windows()))
    assert len(storage.waves) == 1
    assert storage.n_single == 0


def test_a_batch_of_many_chunks_is_one_wave_unless_they_take_too_much_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chunk_bytes, n_chunks = 16, 300
    storage, store, _ = far_store({"obs": Field("int64", chunk_rows=2)}, [])
    with store.writer() as writer:
        writer.append_episode({"obs": np.arange(2 * n_chunks)}, terminated=True)
    store.refresh()
    for wave_bytes, n_waves in ((None, 1), (n_chunks * chunk_bytes // 4, 4), (1, n_chunks)):
        if wave_bytes is not None:
            monkeypatch.setattr("trajstore.cache.chunk_fetcher._WAVE_BYTES", wave_bytes)
        reader = Reader(store, host_cache_bytes=0)
        storage.waves.clear()
        reader.sample(10 * n_chunks, Windows(1))
        assert len(storage.waves) == n_waves


@pytest.mark.parametrize("codec", ["none", "zstd:1", "blosc-lz4"])
def test_a_shard_that_grows_between_refreshes_is_read_right(codec: str) -> None:
    fields = {path: replace(field, codec=codec) for path, field in SHARDED.items()}
    _, store, writer = far_store(fields, [3])
    reader, stale = Reader(store, cache_bytes=1), Reader(store, cache_bytes=1)
    for k in range(1, 25):
        write(writer, [1 + k % 5], first=k)
        check(stale.sample(8, Windows()))  # shows the first commit only; its shard was replaced
        reader.refresh()
        everything(reader)


def test_a_damaged_index_is_named() -> None:
    storage, store, _ = far_store(SHARDED, [6] * 20)
    key = next(key for key in storage.list_tree("streams") if "/steps/obs/c.1." in key)
    data = bytearray(storage.get(key))
    data[3] ^= 1
    storage.delete([key])
    storage.put(key, bytes(data))
    with pytest.raises(CorruptionError, match=r"steps/obs.*chunk 4 \(rows 16 to 20\)"):
        Reader(store).sample(200, Windows())


def test_a_column_of_a_far_store_uses_huge_pages_once_it_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr("trajstore.cache.arena._HUGE_BYTES", 1)
    monkeypatch.setattr(HostMemory, "use_huge_pages", lambda self, *place: asked.append(place))
    _, store, _ = far_store({"obs": Field("float32", (512,), chunk_rows=16)}, [])
    with store.writer(commit_seconds=None) as writer:
        writer.append_episode({"obs": np.ones((500, 512), np.float32)})
    store.refresh()
    reader = Reader(store)
    asked.clear()
    reader.sample(2, Windows())
    assert not any(start < stop for start, stop in asked)
    for _ in reader.epoch(50, Windows()):
        pass
    assert any(start < stop for start, stop in asked)


def test_chunks_that_are_kept_in_ram_keep_no_larger_answer() -> None:
    """Neighbouring chunks come in one answer; each of them can be dropped alone."""
    _, store, _ = far_store(SHARDED, [6] * 20)
    reader = Reader(store)
    reader.sample(200, Windows())
    tier = reader.assembler.cache.tier
    kept = [data for i in range(30) for r in store.streams if (data := tier.get((r.folder, "obs", i))) is not None]
    assert len(kept) == 30
    assert all(memoryview(memoryview(data).obj).nbytes == len(data) for data in kept)


def test_memory_is_touched_while_chunks_are_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    storage, store, _ = far_store({"obs": Field("float32", (20_000,), chunk_rows=4)}, [])
    with store.writer(commit_seconds=None) as writer:
        writer.append_episode({"obs": np.ones((50, 20_000), np.float32)}, terminated=True)
    store.refresh()
    touched, real = threading.Event(), Arena.touch

    def touch(arena: Arena, slots: Any) -> None:
        real(arena, slots)
        touched.set()

    def get_ranges(places: Sequence[Place]) -> Sequence[Data]:
        assert touched.wait(60)
        return FarStorage.get_ranges(storage, places)

    reader = Reader(store)
    monkeypatch.setattr(Arena, "touch", touch)
    monkeypatch.setattr(storage, "get_ranges", get_ranges)
    assert (reader.sample(20, Windows())["obs"] == 1).all()


@pytest.mark.parametrize("n_bytes", [1, 100, 4096, 5000, 70_000])
def test_touching_slots_leaves_the_others_as_they_are(n_bytes: int) -> None:
    n_slots = 300_000 // n_bytes + 3  # in memory of the system, not of numpy
    arena = Arena(Field("uint8", (n_bytes,)), 1, torch.device("cpu"), CacheVersion(), batch_loops)
    arena.resize(n_slots, [], 0, n_slots)
    rows = np.arange(n_slots)
    arena.write(rows, np.full((n_slots, n_bytes), 7, np.uint8))
    arena.touch(rows[1::2])
    values = arena.read(torch.from_numpy(rows), arena.empty(rows.shape)).numpy()
    assert (values[::2] == 7).all()
    assert (values[1::2, :: mmap.PAGESIZE] == 0).all()
