"""Raw columns that do not fit in the cache are read from mapped files: same batches, checked once, never stale."""

from __future__ import annotations

import os
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import trajstore
from tests.cache.test_cache import check, chunk_file, everything, evict, flip
from tests.sampling.test_batch_iterator import FIELDS, numbered, open_store, write
from tests.support.sharding import pack, rewrite
from trajstore import CorruptionError, Field, Reader, ReplayBuffer, Retention, Schema, SnapshotExpiredError, Windows
from trajstore.storage.file_maps import FileMap, _file_system, can_map_files

RAW = {path: replace(field, codec="none") for path, field in FIELDS.items()}


def sealed(root: Path, lengths: list[int], fields: Any = None) -> tuple[trajstore.Store, str]:
    store, writer = open_store(lengths, root, fields or RAW)
    writer.close()
    store.refresh()
    return store, writer.stream


def mapped_pages(reader: Reader) -> int:
    return sum(column.table.n_mapped for column in reader.assembler.cache._columns.values())


def n_maps(reader: Any) -> int:
    return int(reader.assembler.cache._maps.n)


def deleted_files_in_memory(name: str = "c.") -> int:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(f"/{name}" in line and line.endswith("(deleted)") for line in lines)


@pytest.fixture(autouse=True)
def local(tmp_path: Path) -> None:
    if not can_map_files(tmp_path):
        pytest.skip("files are not mapped on this file system")


# ---- what is read


@pytest.mark.parametrize(
    ("chunks_per_shard", "index_at_start"), [(None, True), (2, True), (2, False), (8, True), (8, False)]
)
def test_batches_are_those_of_a_large_cache(
    tmp_path: Path, chunks_per_shard: int | None, index_at_start: bool
) -> None:
    store, stream = sealed(tmp_path, [6, 1, 30, 9] * 5)
    rewrite(tmp_path, stream, chunks_per_shard=chunks_per_shard, index_at_start=index_at_start)
    store = trajstore.open(tmp_path, fsync=False)
    windows = Windows(length=3, boundary="pad_right")
    small, large, plain = (
        Reader(store, cache_bytes=n, seed=5, compiled=c) for n, c in ((1, 1), (1 << 20, 1), (1, 0))
    )
    for _ in range(20):
        batches = [reader.sample(32, windows) for reader in (small, large, plain)]
        for batch in batches[1:]:
            assert all(torch.equal(batch[key], value) for key, value in batches[0].items())
    everything(small)
    assert mapped_pages(small) > 0
    assert not mapped_pages(large)
    assert not mapped_pages(plain)


def test_every_chunk_is_checked_once_and_then_a_batch_is_one_compiled_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = sealed(tmp_path, [6] * 50)
    reader = Reader(store, cache_bytes=1)
    everything(reader)
    read = reader.stats()["bytes_read"]
    monkeypatch.setattr(type(reader.assembler.cache), "gather", lambda *_: pytest.fail("a page is missing"))
    for _ in range(30):
        check(reader.sample(32, Windows()))
    assert reader.stats()["bytes_read"] == read


def test_a_batch_that_misses_pages_draws_the_same_windows(tmp_path: Path) -> None:
    store, _ = sealed(tmp_path, [6] * 50)
    cold, warm = Reader(store, cache_bytes=1, seed=3), Reader(store, cache_bytes=1, seed=3)
    everything(warm)
    windows = Windows(length=2)
    warm.load_state_dict(cold.state_dict())
    for _ in range(40):
        assert torch.equal(cold.sample(4, windows)["index"], warm.sample(4, windows)["index"])


def test_raw_and_compressed_streams_and_missing_fields_are_read_together(tmp_path: Path) -> None:
    store, writer = open_store([6] * 20, tmp_path, RAW)
    writer.close()
    packed = {path: replace(field, codec="zstd:1") for path, field in FIELDS.items()}
    with ReplayBuffer(tmp_path, schema=Schema(packed), fsync=False, exist="join") as buffer:
        for k in range(20):
            buffer.add_episode(numbered(k, 6), terminated=True)
    store.refresh()
    reader = Reader(store, cache_bytes=400)
    everything(reader)
    for _ in range(20):
        check(reader.sample(32, Windows()))
    assert 0 < mapped_pages(reader) < 100


def test_a_packed_stream_is_read_in_place_of_its_original(tmp_path: Path) -> None:
    store, stream = sealed(tmp_path, [6] * 20)
    reader = Reader(store, cache_bytes=1)
    everything(reader)
    pack(tmp_path, stream, 0, 60, chunks_per_shard=4)
    reader.refresh()
    everything(reader)


def test_memory_and_descriptors_do_not_grow_with_the_number_of_files(tmp_path: Path) -> None:
    store, _ = sealed(tmp_path, [6] * 200)
    before = len(os.listdir("/proc/self/fd"))
    reader = Reader(store, cache_bytes=1)
    everything(reader)
    assert n_maps(reader) > 200
    assert len(os.listdir("/proc/self/fd")) <= before + 20  # those of threads
    assert reader.stats()["cache_bytes"] < 1000


def test_when_too_many_files_are_mapped_all_are_mapped_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trajstore.cache.object_maps._MAX_MAPS", 10)
    store, _ = sealed(tmp_path, [6] * 50)
    reader = Reader(store, cache_bytes=1)
    for _ in range(5):
        everything(reader, Windows(length=2))
        check(reader.sample(4, Windows()))
        assert n_maps(reader) <= 10 + 200  # what one batch maps at most


# ---- streams that change


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(turns=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), min_size=1, max_size=25))
def test_streams_that_grow_in_turn_are_read_right(
    turns: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("turns")
    store = trajstore.create(root / uuid.uuid4().hex, Schema(RAW), fsync=False)
    writers = [store.writer(f"w{i}", commit_seconds=None) for i in range(3)]
    counts = [0, 0, 0]
    reader = Reader(store, cache_bytes=1)
    for i, n in turns:
        write(writers[i], [n], first=counts[i])
        counts[i] += 1
        reader.refresh()
        check(reader.sample(8, Windows()))
    everything(reader)
    everything(reader)
    assert deleted_files_in_memory() == 0  # files that were replaced are let go


def test_files_of_evicted_rows_are_let_go(tmp_path: Path) -> None:
    store, stream = sealed(tmp_path, [8] * 10)
    reader = Reader(store, cache_bytes=1)
    everything(reader)
    before = n_maps(reader)
    evict(tmp_path, stream, 40)
    for path, rows in (("obs", 4), ("action", 8)):
        for chunk in range(40 // rows):
            chunk_file(tmp_path, stream, path, chunk).unlink()
    check(reader.sample(64, Windows()))  # mapped files can still be read
    reader.refresh()
    everything(reader)
    assert n_maps(reader) == before // 2
    assert deleted_files_in_memory() == 0


def test_a_chunk_that_was_evicted_before_it_was_mapped_says_that_the_snapshot_expired(tmp_path: Path) -> None:
    store, stream = sealed(tmp_path, [8] * 10)
    reader = Reader(store, cache_bytes=1)
    evict(tmp_path, stream, 40)
    for chunk in range(10):
        chunk_file(tmp_path, stream, "obs", chunk).unlink()
    with pytest.raises(SnapshotExpiredError, match=f"stream '{stream}' were evicted; refresh"):
        reader.sample(200, Windows())
    reader.refresh()
    everything(reader)


@pytest.mark.parametrize("cache_bytes", ["1KiB", "16MiB"])
def test_a_live_buffer_reads_back_what_it_committed(tmp_path: Path, cache_bytes: str) -> None:
    fields = {"obs": Field("int64", (2,), chunk_rows=16, codec="none"), "action": Field("int64", codec="none")}
    options: dict[str, Any] = {"cache_bytes": cache_bytes, "buffer_bytes": "64KiB", "commit_seconds": None}
    with ReplayBuffer(
        tmp_path / "store", schema=Schema(fields), capacity=Retention(steps=3000), fsync=False, **options
    ) as buffer:
        for k in range(400):
            for t in range(20):
                buffer.append({"obs": np.array([k, t]), "action": t}, terminated=t == 19)
            if k % 7 == 0:
                buffer.flush()
            check(buffer.sample(32, Windows(length=2)))
    assert deleted_files_in_memory() == 0


# ---- damage


@pytest.mark.parametrize("chunks_per_shard", [None, 4])
def test_a_flipped_bit_is_found_and_named_and_the_rest_stays_readable(
    tmp_path: Path, chunks_per_shard: int | None
) -> None:
    store, stream = sealed(tmp_path, [6] * 10)
    rewrite(tmp_path, stream, chunks_per_shard=chunks_per_shard)
    store = trajstore.open(tmp_path, fsync=False)
    reader = Reader(store, cache_bytes=1)
    file = chunk_file(tmp_path, stream, "obs", 4 // (chunks_per_shard or 1))
    whole = file.read_bytes()
    damaged = bytearray(whole)
    damaged[68 + 12 if chunks_per_shard else 12] ^= 1  # behind the shard's index: in its first chunk
    file.write_bytes(damaged)
    for _ in range(3):
        with pytest.raises(CorruptionError, match=r"steps/obs.*chunk 4 \(rows 16 to 20\).*episodes \[2, 3\]"):
            reader.sample(200, Windows())
    check(reader.at(torch.tensor([[0, k, t] for k in (0, 1, 4, 5, 9) for t in range(6)]), Windows()))
    file.write_bytes(whole)
    everything(reader)


def test_a_damaged_shard_index_is_found_and_named(tmp_path: Path) -> None:
    store, stream = sealed(tmp_path, [6] * 10)
    rewrite(tmp_path, stream, chunks_per_shard=4)
    store = trajstore.open(tmp_path, fsync=False)
    file = chunk_file(tmp_path, stream, "obs", 1)
    damaged = bytearray(file.read_bytes())
    damaged[3] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(CorruptionError, match=r"steps/obs.*chunk 4 \(rows 16 to 20\)"):
        Reader(store, cache_bytes=1).sample(200, Windows())


@pytest.mark.parametrize("n_bytes", [0, 10])
@pytest.mark.parametrize("chunks_per_shard", [None, 4])
def test_a_file_that_is_too_short_is_an_error_and_not_the_end_of_the_process(
    tmp_path: Path, n_bytes: int, chunks_per_shard: int | None
) -> None:
    store, stream = sealed(tmp_path, [6] * 10)
    rewrite(tmp_path, stream, chunks_per_shard=chunks_per_shard)
    store = trajstore.open(tmp_path, fsync=False)
    reader = Reader(store, cache_bytes=1)
    file = chunk_file(tmp_path, stream, "obs", 0)
    whole = file.read_bytes()
    file.write_bytes(whole[:n_bytes])
    with pytest.raises(CorruptionError, match=r"steps/obs.*chunk 0 \(rows 0 to 4\)"):
        reader.sample(200, Windows())
    file.unlink()
    with pytest.raises(CorruptionError, match=r"chunk 0 \(rows 0 to 4\) is missing"):
        reader.sample(200, Windows())
    file.write_bytes(whole)
    everything(reader)


def test_a_flip_after_the_check_is_found_by_the_next_reader(tmp_path: Path) -> None:
    store, stream = sealed(tmp_path, [6] * 10)
    everything(Reader(store, cache_bytes=1))
    flip(chunk_file(tmp_path, stream, "obs", 4))
    with pytest.raises(CorruptionError, match="chunk 4"):
        everything(Reader(store, cache_bytes=1))


# ---- files in memory


def test_a_mapped_file_stays_as_it_was_when_its_name_goes(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"before" * 1000)
    mapped = FileMap(file)
    other = tmp_path / "other"
    other.write_bytes(b"after!" * 1000)
    other.replace(file)
    mapped.prefetch(5000, 6000)
    view = mapped.view(0, 6000)
    with pytest.raises(TypeError, match="read-only"):
        view[0] = 1
    del mapped  # the view keeps the file
    assert bytes(view) == b"before" * 1000
    assert deleted_files_in_memory("file") == 1
    del view
    assert deleted_files_in_memory("file") == 0


MOUNTS = [
    "21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw",
    "22 21 0:5 / /data rw - nfs4 server:/x rw",
    "23 22 0:6 / /data/my\\040disk rw shared:3 - xfs /dev/sdb rw",
    "24 21 0:7 / /mnt rw - ext4 /dev/sdc rw",
    "25 24 0:8 / /mnt rw - fuse.sshfs host: rw",
]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/home/me", "ext4"),
        ("/data", "nfs4"),
        ("/data/run", "nfs4"),
        ("/database", "ext4"),
        ("/data/my disk/run", "xfs"),
        ("/mnt/run", "fuse.sshfs"),
    ],
)
def test_the_file_system_of_a_path_is_that_of_the_nearest_mount(path: str, expected: str) -> None:
    assert _file_system(path, MOUNTS) == expected


def test_files_of_network_file_systems_are_not_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trajstore.storage.local.can_map_files", lambda _: False)
    store, _ = sealed(tmp_path, [6] * 20)
    reader = Reader(store, cache_bytes=1)
    everything(reader)
    assert mapped_pages(reader) == 0
