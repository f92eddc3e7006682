"""The disk cache: what it serves is what the store holds, whatever happens to its files."""

from __future__ import annotations

import contextlib
import errno
import inspect
import logging
import multiprocessing
import os
import resource
import shutil
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import trajstore
from trajstore import DiskCache, Field, Reader, Windows
from trajstore.errors import CorruptionError, StorageError
from trajstore.storage import (
    DiskCachedStorage,
    LocalStorage,
    Storage,
    StorageLayer,
    completer,
    disk_files,
    open_storage,
)
from trajstore.testing.conformance import StorageConformance

SCHEMA = {
    "obs": Field("float32", (64,), chunk_rows=64, shard_rows=512),
    "action": Field("int64", (), chunk_rows=256),
}
JOIN_S = 60


def cached(directory: Path, url: str, budget: int | str = "100MB") -> DiskCachedStorage:
    storage = open_storage(url, disk_cache=DiskCache(directory, budget))
    assert isinstance(storage, DiskCachedStorage)
    return storage


def in_directory(directory: Path, disk: Path, budget: int | str = "100MB") -> DiskCachedStorage:
    """In front of a directory that stands for a bucket: other processes see it, too."""
    return DiskCachedStorage(LocalStorage(directory, fsync=False), DiskCache(disk, budget))


class TestDiskCached(StorageConformance):
    is_per_process = True

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return cached(tmp_path / "disk", f"memory://{uuid.uuid4().hex}")


class TestDiskCachedDirectory(StorageConformance):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return in_directory(tmp_path / "bucket", tmp_path / "disk")


def test_a_layer_passes_every_call_on() -> None:
    public = {
        n
        for n, m in vars(Storage).items()
        if not n.startswith("_") and (inspect.isfunction(m) or isinstance(m, property))
    }
    assert public - vars(StorageLayer).keys() <= {"reset_locks"}


def test_an_object_behind_the_last_row_is_not_kept(tmp_path: Path) -> None:
    storage, key = cached(tmp_path, f"memory://{uuid.uuid4().hex}"), "streams/s/steps/x/c.2"
    storage.note_rows("streams/s", {"steps/x": (10, 20)}, is_final=True)
    for data in (b"old", b"new"):
        storage.put(key, data)
        assert storage.get(key) == data


def test_an_object_that_is_deleted_goes_from_the_disk(tmp_path: Path) -> None:
    storage, key = cached(tmp_path, f"memory://{uuid.uuid4().hex}"), "streams/s/steps/x/c.0"
    storage.note_rows("streams/s", {"steps/x": (1, 1000)}, is_final=False)
    for data in (b"old", b"new"):
        storage.put(key, data)
        assert storage.get(key) == data
        assert len(files_of(tmp_path)) == 1
        storage.delete([key])
        assert files_of(tmp_path) == []


def test_an_object_that_was_found_damaged_is_not_mapped_again(tmp_path: Path) -> None:
    storage, key = in_directory(tmp_path / "bucket", tmp_path / "disk"), "streams/s/steps/x/c.0"
    storage.note_rows("streams/s", {"steps/x": (1, 1000)}, is_final=False)
    storage.put(key, b"data")
    assert storage.drop_local(key)
    assert not storage.drop_local(key)
    for _ in range(3):
        assert storage.get(key) == b"data"  # which keeps it whole
        assert storage.map_if_local(key) is None


def test_a_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trajstore-1").mkdir(mode=0o700)
    cached(tmp_path, "memory://x")
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(tmp_path).st_uid + 1)
    with pytest.raises(StorageError, match="not a directory of this user"):
        cached(tmp_path, "memory://x")


def test_a_range_that_is_read_into_memory_is_counted_and_kept(tmp_path: Path) -> None:
    storage = cached(tmp_path, f"memory://{uuid.uuid4().hex}")
    storage.note_rows("streams/s", {"steps/x": (1, 1000)}, is_final=False)
    keys, room = ["zarr.json", "streams/s/steps/x/c.0"], memoryview(bytearray(4))
    for key in keys:
        storage.put(key, b"0123456789")
        for _ in range(2):
            assert bytes(storage.get_range_into(key, 2, 6, room)) == b"2345"
    found = storage.stats()
    assert found["requests"]["get"] == 3  # the object that never changes is asked for once
    assert found["bytes_read"] == 4 + 4 + 10
    assert found["disk_cache"]["hits"] == 1


# ---- a store through the cache


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4().hex}"


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return tmp_path / "disk"


def fill(url: str, n_episodes: int = 20, length: int = 100, schema: dict[str, Field] = SCHEMA) -> None:
    rng = np.random.default_rng(7)
    with trajstore.create(url, schema).writer(commit_seconds=None) as writer:
        for _ in range(n_episodes):
            writer.append_episode(
                {
                    "obs": rng.normal(size=(length, 64)).astype(np.float32),
                    "action": rng.integers(0, 1 << 60, length),
                }
            )


def steps(store: trajstore.Store | trajstore.Snapshot) -> list[dict[str, Any]]:
    return [store.read_episode(i) for i in range(len(store.episodes))]


def assert_equal(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])


def counts(store: trajstore.Store) -> dict[str, Any]:
    found: dict[str, Any] = store.snapshot.storage.stats()["disk_cache"]
    return found


def files_of(disk: Path) -> list[Path]:
    return [path for path in (disk / "trajstore-1" / "objects").rglob("*") if path.is_file()]


def used(disk: Path) -> int:
    total = 0
    for path in files_of(disk):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_blocks * 512
    return total


def test_what_was_read_once_is_read_from_the_disk(url: str, disk: Path) -> None:
    fill(url)
    expected = steps(trajstore.open(url))
    first = trajstore.open(url, disk_cache=DiskCache(disk, "100MB"))
    assert_equal(steps(first), expected)
    assert counts(first)["misses"] > 0
    second = trajstore.open(url, disk_cache=DiskCache(disk, "100MB"))
    opened = second.snapshot.storage.stats()["bytes_read"]
    assert_equal(steps(second), expected)
    assert counts(second)["misses"] == 0
    assert counts(second)["bytes_hit"] > 0
    assert second.snapshot.storage.stats()["bytes_read"] == opened  # nothing was asked of the store


def test_batches_are_those_of_a_reader_without_it(url: str, disk: Path) -> None:
    fill(url)
    options = DiskCache(disk, "100MB")
    plain = Reader(trajstore.open(url), cache_bytes="64KiB", seed=3)
    for _ in range(2):
        reader = Reader(trajstore.open(url, disk_cache=options), cache_bytes="64KiB", host_cache_bytes=0, seed=3)
        plain.load_state_dict(reader.state_dict())
        for _ in range(5):
            expected, found = plain.sample(32, Windows(4)), reader.sample(32, Windows(4))
            for name in ("obs", "action"):
                np.testing.assert_array_equal(found[name].numpy(), expected[name].numpy())
    assert reader.stats()["storage"]["disk_cache"]["hits"] > 0


def test_a_buffer_reports_requests_and_the_disk(url: str, disk: Path) -> None:
    with trajstore.ReplayBuffer(url, schema=SCHEMA, disk_cache=DiskCache(disk, "1MB")) as buffer:
        buffer.append({"obs": np.zeros(64, np.float32), "action": 0}, terminated=True)
        buffer.flush()
        found = buffer.stats()["storage"]
    assert found["requests"]["put"] > 0
    assert found["bytes_written"] > 0
    assert found["disk_cache"]["hits"] == 0


def test_its_directories_and_files_are_for_this_user_alone(url: str, disk: Path) -> None:
    fill(url)
    old = os.umask(0)
    try:
        steps(trajstore.open(url, disk_cache=DiskCache(disk, "100MB")))
    finally:
        os.umask(old)
    for path in (disk / "trajstore-1").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path


def test_a_directory_that_others_may_write_to_is_closed_to_them(url: str, disk: Path) -> None:
    fill(url)
    (disk / "trajstore-1").mkdir(parents=True)
    (disk / "trajstore-1").chmod(0o777)
    trajstore.open(url, disk_cache=DiskCache(disk, "1MB"))
    assert (disk / "trajstore-1").stat().st_mode & 0o777 == 0o700


def test_a_link_to_elsewhere_is_refused(url: str, disk: Path, tmp_path: Path) -> None:
    fill(url)
    disk.mkdir()
    (disk / "trajstore-1").symlink_to(tmp_path)
    with pytest.raises(StorageError, match="not a directory of this user"):
        trajstore.open(url, disk_cache=DiskCache(disk, "1MB"))


def test_no_credential_is_written_to_the_disk(disk: Path, new_place: Callable[[str], Any]) -> None:
    url = f"memory://{uuid.uuid4().hex}"
    fill(url)
    options = {"password": "hunter2-secret"}
    store = trajstore.open(url, disk_cache=DiskCache(disk, "100MB"), storage_options=options)
    steps(store)
    for path in disk.rglob("*"):
        assert "hunter2" not in str(path)
        assert path.is_dir() or b"hunter2" not in path.read_bytes()
    assert "hunter2" not in repr(store.snapshot.storage)


def test_a_local_store_needs_no_cache(tmp_path: Path, disk: Path) -> None:
    fill(str(tmp_path / "store"))
    steps(trajstore.open(tmp_path / "store", disk_cache=DiskCache(disk, "1MB")))
    assert not disk.exists()


@pytest.mark.parametrize(
    ("directory", "budget"), [("s3://bucket/x", "1MB"), (7, "1MB"), ("cache", 0), ("cache", "much")]
)
def test_what_can_not_be_a_cache_is_refused(directory: Any, budget: Any) -> None:
    with pytest.raises(ValueError, match=r"disk_cache|budget_bytes"):
        DiskCache(directory, budget)


def test_a_bare_path_is_refused(url: str, disk: Path) -> None:
    with pytest.raises(TypeError, match="DiskCache"):
        trajstore.open(url, disk_cache=str(disk))  # type: ignore[arg-type]


def test_a_pickled_storage_uses_the_same_directory(url: str, disk: Path) -> None:
    fill(url)
    store = trajstore.open(url, disk_cache=DiskCache(disk, "100MB"))
    expected = steps(store)
    again = ForkingPickler.loads(bytes(ForkingPickler.dumps(store)))
    assert_equal(steps(again), expected)
    assert counts(again)["misses"] == 0


# ---- damage


def test_flipped_bits_are_found_and_read_again(url: str, disk: Path) -> None:
    fill(url)
    expected = steps(trajstore.open(url, disk_cache=DiskCache(disk, "100MB")))
    rng = np.random.default_rng(0)
    for path in files_of(disk):
        data = bytearray(path.read_bytes())
        begin = disk_files._DATA_AT
        for position in rng.integers(begin, len(data), 5).tolist():
            data[position] ^= 1 << int(rng.integers(8))
        path.write_bytes(data)
    store = trajstore.open(url, disk_cache=DiskCache(disk, "100MB"))
    assert_equal(steps(store), expected)
    assert counts(store)["damaged"] > 0
    healed = trajstore.open(url, disk_cache=DiskCache(disk, "100MB"))
    assert_equal(steps(healed), expected)  # also what was intact in the same files
    assert counts(healed)["damaged"] == 0


@pytest.mark.parametrize("keep", [0, 10, disk_files._MARKS_AT + 2, disk_files._DATA_AT, -1, -5000])
def test_files_that_were_cut_off_are_found_and_read_again(url: str, disk: Path, keep: int) -> None:
    fill(url)
    expected = steps(trajstore.open(url, disk_cache=DiskCache(disk, "100MB")))
    for path in files_of(disk):
        os.truncate(path, keep % path.stat().st_size)
    store = trajstore.open(url, disk_cache=DiskCache(disk, "100MB"))
    assert_equal(steps(store), expected)
    assert counts(store)["misses"] > 0


def test_files_of_noise_are_never_served(url: str, disk: Path) -> None:
    fill(url)
    expected = steps(trajstore.open(url, disk_cache=DiskCache(disk, "100MB")))
    for path in files_of(disk):
        path.write_bytes(os.urandom(path.stat().st_size))
    store = trajstore.open(url, disk_cache=DiskCache(disk, "100MB"))
    assert_equal(steps(store), expected)


def test_removing_everything_while_sampling_disturbs_nobody(url: str, disk: Path) -> None:
    fill(url)
    reader = Reader(
        trajstore.open(url, disk_cache=DiskCache(disk, "100MB")), cache_bytes="64KiB", host_cache_bytes=0, seed=3
    )
    plain = Reader(trajstore.open(url), seed=3)
    is_over = threading.Event()

    def remove() -> None:
        while not is_over.is_set():
            shutil.rmtree(disk, ignore_errors=True)

    thread = threading.Thread(target=remove)
    thread.start()
    try:
        for _ in range(40):
            found, expected = reader.sample(32, Windows(4)), plain.sample(32, Windows(4))
            np.testing.assert_array_equal(found["obs"].numpy(), expected["obs"].numpy())
    finally:
        is_over.set()
        thread.join()


# ---- the budget


def test_the_least_recently_used_make_room(url: str, disk: Path) -> None:
    fill(url, 60)
    budget = 400_000
    store = trajstore.open(url, disk_cache=DiskCache(disk, budget))
    assert_equal(steps(store), steps(trajstore.open(url)))
    assert counts(store)["evictions"] > 0
    assert used(disk) <= budget


def test_what_is_used_stays(disk: Path) -> None:
    files = disk_files.DiskFiles(disk, 10 * 40_000)
    data = os.urandom(32 << 10)
    for i in range(30):
        files.write(f"s/{i}", [(0, data)], len(data), whole=False)
        if i:  # the first one is used all the time
            os.utime(disk / "objects" / "s" / "0", ns=(time.time_ns(),) * 2)
        time.sleep(0.002)
    assert files.read("s/0", 0, None) == data
    assert files.read("s/1", 0, None) is None
    assert files.evictions > 0


def test_reading_counts_as_use(disk: Path) -> None:
    files = disk_files.DiskFiles(disk, 100_000)
    files.write("s/0", [(0, b"data")], 4, whole=False)
    os.utime(disk / "objects" / "s" / "0", ns=(0, 0))
    assert files.read("s/0", 0, None) == b"data"
    assert (disk / "objects" / "s" / "0").stat().st_mtime_ns > 0


def test_an_object_above_the_budget_is_read_and_not_kept(url: str, disk: Path) -> None:
    fill(url)
    store = trajstore.open(url, disk_cache=DiskCache(disk, 5000))
    assert_equal(steps(store), steps(trajstore.open(url)))
    assert files_of(disk) == []


def read_everything(bucket: Path, disk: Path, budget: int, n: int, queue: Any) -> None:
    storage = in_directory(bucket, disk, budget)
    keys = [key for key in storage.tree_sizes("streams") if "/c." in key]
    storage.note_rows("streams/s", {"steps/x": (1, 1000)}, is_final=False)
    rng, most, is_right = np.random.default_rng(n), 0, True
    for _ in range(60):
        key = keys[int(rng.integers(len(keys)))]
        is_right &= storage.get(key) == bytes([int(key.rpartition(".")[2])]) * 100_000
        most = max(most, used(disk))
    queue.put((is_right, most))


def test_two_processes_share_one_tiny_budget(tmp_path: Path, disk: Path) -> None:
    bucket = tmp_path / "bucket"
    plain = LocalStorage(bucket, fsync=False)
    for i in range(40):
        plain.put(f"streams/s/steps/x/c.{i}", bytes([i]) * 100_000)
    budget = 1_000_000
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=read_everything, args=(bucket, disk, budget, n, queue)) for n in range(3)]
    for process in processes:
        process.start()
    found = [queue.get(timeout=JOIN_S) for _ in processes]
    for process in processes:
        process.join(JOIN_S)
    assert all(is_right for is_right, _ in found)
    assert max(most for _, most in found) <= budget + 2 * 120_000  # what others were writing when it was counted
    assert used(disk) <= budget


def write_for_ever(disk: Path, started: Any) -> None:
    files = disk_files.DiskFiles(disk, 100 << 20)
    started.set()
    for i in range(10**6):
        number = i % 50
        files.write(f"s/{number}", [(0, bytes([number]) * 200_000)], 200_000, whole=bool(i % 2))
        files.remove(f"s/{(number + 25) % 50}")


def test_a_process_killed_while_it_writes_leaves_nothing_wrong(disk: Path) -> None:
    context = multiprocessing.get_context("fork")
    n_found = 0
    for wait in (0.01, 0.05, 0.1):
        started = context.Event()
        process = context.Process(target=write_for_ever, args=(disk, started))
        process.start()
        assert started.wait(JOIN_S)
        time.sleep(wait)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(JOIN_S)
        files = disk_files.DiskFiles(disk, 100 << 20)
        for number in range(50):
            data = files.read(f"s/{number}", 0, None)
            assert data in (None, bytes([number]) * 200_000)
            n_found += data is not None
        assert files.write("s/after", [(0, b"x")], 1, whole=False)  # no lock is left behind
        assert files.damaged == 0
    assert n_found


# ---- a disk that refuses


def test_a_full_disk_stops_caching_and_nothing_else(
    url: str, disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fill(url)
    real = os.pwrite

    def full(descriptor: int, data: Any, offset: int) -> int:
        if len(data) > 8:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data, offset)

    store = trajstore.open(url, disk_cache=DiskCache(disk, "100MB"))
    monkeypatch.setattr(os, "pwrite", full)
    with caplog.at_level(logging.WARNING):
        assert_equal(steps(store), steps(trajstore.open(url)))
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "No space left" in caplog.text
    assert counts(store)["is_full"]
    monkeypatch.undo()
    monkeypatch.setattr(disk_files, "_PAUSE_S", 0.0)
    monkeypatch.setattr(store.snapshot.storage._files, "_paused_until", 0.0)  # type: ignore[attr-defined]
    steps(trajstore.open(url, disk_cache=DiskCache(disk, "100MB")))
    assert files_of(disk)  # and it begins again


def read_with_a_limit(bucket: Path, disk: Path, queue: Any) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (disk_files._DATA_AT + 20_000, resource.RLIM_INFINITY))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    storage = in_directory(bucket, disk)
    storage.note_rows("streams/s", {"steps/x": (1, 10)}, is_final=False)
    right = [storage.get(f"streams/s/steps/x/c.{i}") == bytes([i]) * 100_000 for i in (0, 1, 0, 1)]
    queue.put((all(right), storage.stats()["disk_cache"]["is_full"]))


def test_a_file_that_can_not_grow_is_never_served(tmp_path: Path, disk: Path) -> None:
    bucket = tmp_path / "bucket"
    plain = LocalStorage(bucket, fsync=False)
    for i in range(2):
        plain.put(f"streams/s/steps/x/c.{i}", bytes([i]) * 100_000)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=read_with_a_limit, args=(bucket, disk, queue))
    process.start()
    assert queue.get(timeout=JOIN_S) == (True, True)
    process.join(JOIN_S)


def test_a_directory_that_can_not_be_made_stops_nothing(url: str, tmp_path: Path) -> None:
    fill(url)
    (tmp_path / "file").write_text("")
    store = trajstore.open(url)
    with pytest.raises(StorageError, match="can't use"):
        trajstore.open(url, disk_cache=DiskCache(tmp_path / "file" / "x", "1MB"))
    assert len(store) == 20


# ---- what may change is never served stale


def test_streams_that_are_gone_from_the_store_go_from_the_disk(url: str, disk: Path) -> None:
    fill(url)
    store = trajstore.open(url, disk_cache=DiskCache(disk, "100MB"))
    steps(store)
    assert files_of(disk)
    open_storage(url).remove_tree(f"streams/{store.streams[0].id}")
    store.refresh()
    assert files_of(disk) == []


def test_records_and_part_filled_objects_of_a_live_stream_are_not_kept(url: str, disk: Path) -> None:
    writer = trajstore.create(url, SCHEMA).writer(commit_seconds=None)
    writer.append_episode({"obs": np.zeros((10, 64), np.float32), "action": np.zeros(10, np.int64)})
    writer.commit()
    store = trajstore.open(url, disk_cache=DiskCache(disk, "100MB"))
    steps(store)
    assert files_of(disk) == []
    writer.close()


@contextlib.contextmanager
def growing(url: str) -> Iterator[Callable[[int], None]]:
    """Appends rows that tell their own number, and commits them."""
    n = 0
    with trajstore.create(url, SCHEMA).writer(commit_seconds=None) as writer:

        def grow(length: int) -> None:
            nonlocal n
            rows = np.arange(n, n + length)
            writer.append_episode({"obs": np.repeat(rows[:, None], 64, 1).astype(np.float32), "action": rows})
            writer.commit()
            n += length

        yield grow


def assert_numbered(store: trajstore.Store | trajstore.Snapshot, n_rows: int) -> None:
    found = steps(store)
    rows = np.concatenate([one["action"] for one in found]) if found else np.zeros(0, np.int64)
    np.testing.assert_array_equal(rows, np.arange(n_rows))
    for one in found:
        np.testing.assert_array_equal(one["obs"][:, 5], one["action"].astype(np.float32))


ACTIONS = st.one_of(
    st.tuples(st.just("grow"), st.integers(1, 700)),
    st.tuples(st.just("read"), st.integers(0, 2)),
    st.tuples(st.just("refresh"), st.integers(0, 2)),
    st.tuples(st.just("end"), st.integers(0, 2)),
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=st.lists(ACTIONS, min_size=3, max_size=14), budget=st.sampled_from([300_000, 100 << 20]))
def test_readers_of_a_growing_stream_see_exactly_their_rows(
    tmp_path: Path, actions: list[tuple[str, int]], budget: int
) -> None:
    """Also readers that take the stream for finished, as a checkpoint or a resumed session does."""
    url, options = f"memory://{uuid.uuid4().hex}", DiskCache(tmp_path / uuid.uuid4().hex, budget)
    with growing(url) as grow:
        grow(1)
        n_rows = 1
        stores = [trajstore.open(url, disk_cache=options) for _ in range(3)]
        shown, ended = [1, 1, 1], list[tuple[trajstore.Snapshot, int]]()
        for action, number in actions:
            if action == "grow":
                grow(number)
                n_rows += number
                continue
            store = stores[number]
            if action == "refresh":
                store.refresh()
                shown[number] = n_rows
            elif action == "end":
                ended.append((store.snapshot.ended([record.id for record in store.streams]), shown[number]))
            assert_numbered(store, shown[number])
            for snapshot, rows in ended:
                assert_numbered(snapshot, rows)
    for store in stores:
        store.refresh()
        assert_numbered(store, n_rows)


# ---- whole objects are mapped


def fill_raw(url: str, n_episodes: int = 20) -> None:
    """Observations that can be mapped."""
    fill(
        url,
        n_episodes,
        schema=SCHEMA | {"obs": Field("float32", (64,), chunk_rows=64, shard_rows=512, codec="none")},
    )


def mapped_reader(url: str, disk: Path, budget: int | str = "100MB") -> Reader:
    """A reader with a cache of a few pages, whose columns are mapped as far as possible."""
    store = trajstore.open(url, disk_cache=DiskCache(disk, budget))
    return Reader(store, cache_bytes="64KiB", host_cache_bytes=1, seed=3)


def disk_counts(reader: Reader) -> dict[str, Any]:
    found: dict[str, Any] = reader.stats()["storage"]["disk_cache"]
    return found


def sample_until(reader: Reader, is_done: Callable[[dict[str, Any]], bool]) -> None:
    """Draw batches until the counts are so; objects are completed in the background."""
    deadline = time.monotonic() + JOIN_S
    while not is_done(disk_counts(reader)):
        assert time.monotonic() < deadline, disk_counts(reader)
        reader.sample(32, Windows(4, fields=("obs",)))
        time.sleep(0.002)


def n_objects(url: str) -> int:
    """Objects of observations that are complete, and so may be completed on the disk."""
    [stream] = trajstore.open(url).streams
    return -(-stream.rows // 512)


@pytest.fixture
def warm(url: str, disk: Path) -> str:
    """A store, all of whose observations are on the disk as whole objects."""
    fill_raw(url)
    sample_until(mapped_reader(url, disk), lambda counts: counts["mapped"] == n_objects(url))
    return url


def assert_same_batches(reader: Reader, url: str, n: int = 10) -> None:
    plain = Reader(trajstore.open(url), seed=0)
    plain.load_state_dict(reader.state_dict())
    for _ in range(n):
        found, expected = reader.sample(32, Windows(4)), plain.sample(32, Windows(4))
        for name in ("obs", "action"):
            np.testing.assert_array_equal(found[name].numpy(), expected[name].numpy())


def test_objects_that_are_asked_for_again_are_completed_and_mapped(warm: str, disk: Path) -> None:
    reader = mapped_reader(warm, disk)
    reader.sample(32, Windows(4, fields=("obs",)))
    opened = disk_counts(reader)
    assert opened["mapped"] > 0
    for _ in range(20):
        reader.sample(32, Windows(4, fields=("obs",)))
    found = disk_counts(reader)
    assert found["mapped"] == n_objects(warm)
    assert found["hits"] == opened["hits"]  # nothing was read with a call
    assert found["misses"] == 0
    assert_same_batches(reader, warm)


def test_batches_are_the_same_while_objects_are_completed(url: str, disk: Path) -> None:
    fill_raw(url)
    reader = mapped_reader(url, disk)
    assert_same_batches(reader, url, 40)
    assert disk_counts(reader)["completed"] > 0


def test_large_objects_are_not_completed(url: str, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completer, "MAX_BYTES", 1000)
    fill_raw(url)
    reader = mapped_reader(url, disk)
    assert_same_batches(reader, url, 20)
    assert disk_counts(reader)["completed"] == 0


def test_nothing_is_removed_to_complete_an_object(url: str, disk: Path) -> None:
    fill_raw(url, 60)
    budget = 700_000
    reader = mapped_reader(url, disk, budget)
    sample_until(reader, lambda counts: counts["completed"] > 0)
    assert_same_batches(reader, url, 30)
    assert disk_counts(reader)["mapped"] < n_objects(url)
    assert used(disk) <= budget


def test_removing_everything_while_files_are_mapped_disturbs_nobody(
    warm: str, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trajstore.cache.chunk_cache.TOUCH_S", 0.0)
    reader = mapped_reader(warm, disk)
    is_over = threading.Event()

    def remove() -> None:
        while not is_over.is_set():
            shutil.rmtree(disk, ignore_errors=True)
            time.sleep(0.01)

    thread = threading.Thread(target=remove)
    reader.sample(256, Windows(4))
    assert disk_counts(reader)["mapped"] > 0
    thread.start()
    try:
        assert_same_batches(reader, warm, 60)
    finally:
        is_over.set()
        thread.join()


def test_what_another_process_evicts_is_unmapped_and_comes_back(
    warm: str, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its space would not be free as long as it is mapped."""
    monkeypatch.setattr("trajstore.cache.chunk_cache.TOUCH_S", 0.0)
    reader = mapped_reader(warm, disk)
    sample_until(reader, lambda counts: counts["mapped"] == n_objects(warm))
    other = disk_files.DiskFiles(disk / "trajstore-1", 100_000)
    assert other.write("s/x", [(0, bytes(50_000))], 50_000, whole=False)
    assert other.evictions > 0
    assert used(disk) <= 100_000
    assert [line for line in maps_of(disk) if "(deleted)" in line]
    assert_same_batches(reader, warm)
    assert not [line for line in maps_of(disk) if "(deleted)" in line]
    sample_until(reader, lambda counts: counts["completed"] > 0)
    assert_same_batches(reader, warm)


def maps_of(disk: Path) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(disk) in line]


def test_mapped_files_count_as_used(warm: str, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = mapped_reader(warm, disk)
    sample_until(reader, lambda counts: counts["mapped"] == n_objects(warm))
    paths = {line.split(maxsplit=5)[5] for line in maps_of(disk)}
    assert len(paths) == n_objects(warm)
    for path in paths:
        os.utime(path, (0, 0))
    reader.sample(32, Windows(4))
    assert max(os.stat(path).st_mtime for path in paths) == 0  # not with every batch
    monkeypatch.setattr(reader.assembler._rows.cache, "_tend_at", 0.0)
    reader.sample(32, Windows(4))
    assert min(os.stat(path).st_mtime for path in paths) > time.time()


@pytest.mark.parametrize("damage", ["chunk", "index", "cut off", "header"])
def test_a_file_that_was_damaged_before_it_is_mapped_is_read_again(warm: str, disk: Path, damage: str) -> None:
    for path in files_of(disk):
        data = bytearray(path.read_bytes())
        if data[:4] != b"TJCW":
            continue
        begin = disk_files._DATA_AT
        if damage == "chunk":
            data[(begin + len(data)) // 2 :: 5000] = bytes(len(data[(begin + len(data)) // 2 :: 5000]))
            data[-20_000] ^= 1
        elif damage == "index":
            data[begin + 2] ^= 1
            data[-6] ^= 1
        elif damage == "header":
            data[6] ^= 1
        path.write_bytes(data[: len(data) * 2 // 3] if damage == "cut off" else data)
    reader = mapped_reader(warm, disk)
    assert_same_batches(reader, warm, 20)
    assert disk_counts(reader)["damaged"] > 0
    assert disk_counts(reader)["bytes_missed"] > 0
    steps(trajstore.open(warm, disk_cache=DiskCache(disk, "100MB")))
    assert_same_batches(mapped_reader(warm, disk), warm)  # and healed


def test_a_damaged_object_of_the_store_itself_is_an_error(warm: str, disk: Path) -> None:
    storage = open_storage(warm)
    key = next(key for key in storage.tree_sizes("streams") if "/obs/" in key and "/c." in key)
    data = bytearray(storage.get(key))
    data[len(data) // 2] ^= 1
    storage.put(key, bytes(data))
    shutil.rmtree(disk)
    reader = mapped_reader(warm, disk)
    with pytest.raises(CorruptionError, match="obs"):
        sample_until(reader, lambda counts: False)


def sample_then_tell(url: str, disk: Path, budget: int, queue: Any) -> None:
    reader = mapped_reader(url, disk, budget)
    assert_same_batches(reader, url, 20)
    queue.put(disk_counts(reader)["mapped"])


def test_a_forked_process_maps_and_completes_for_itself(url: str, disk: Path) -> None:
    fill_raw(url)
    reader = mapped_reader(url, disk)
    sample_until(reader, lambda counts: counts["completed"] > 0)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=sample_then_tell, args=(url, disk, 100 << 20, queue))
    process.start()
    assert queue.get(timeout=JOIN_S) > 0
    process.join(JOIN_S)


def test_frames_are_decoded_where_the_disk_has_them(url: str, disk: Path) -> None:
    rng, spec = np.random.default_rng(0), Field("uint8", (84, 84))
    with trajstore.create(url, {"frame": spec}).writer(commit_seconds=None) as writer:
        for _ in range(8):
            base = rng.integers(0, 255, (84, 84), np.uint8)
            writer.append_episode({"frame": np.stack([np.roll(base, i, 0) // 64 for i in range(100)])})
    store = trajstore.open(url, disk_cache=DiskCache(disk, "100MB"))
    reader = Reader(store, cache_bytes="1MiB", host_cache_bytes=1, seed=1)
    plain = Reader(trajstore.open(url), seed=1)
    deadline = time.monotonic() + JOIN_S
    while not disk_counts(reader)["mapped"]:
        assert time.monotonic() < deadline
        found, expected = reader.sample(16, Windows(2)), plain.sample(16, Windows(2))
        np.testing.assert_array_equal(found["frame"].numpy(), expected["frame"].numpy())
    before = reader.stats()["bytes_decoded"]
    for _ in range(20):
        found, expected = reader.sample(16, Windows(2)), plain.sample(16, Windows(2))
        np.testing.assert_array_equal(found["frame"].numpy(), expected["frame"].numpy())
    assert reader.stats()["bytes_decoded"] - before < 20 << 20
