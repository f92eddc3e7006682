"""Scans fetch chunks in the background before they read them."""

from __future__ import annotations

import gc
import os
import pickle  # noqa: TID251 (what users do with snapshots)
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trajstore
from tests.support.sharding import rewrite
from trajstore import Field, Schema
from trajstore.errors import CorruptionError, StorageError
from trajstore.sampling.reader import Reader
from trajstore.sampling.windows import Windows
from trajstore.storage import LocalStorage
from trajstore.store.read_ahead import ReadAhead
from trajstore.store.shard_pieces import ShardPiece
from trajstore.store.stream_reader import StreamReader

N_STEPS, N_EPISODES, CHUNK_ROWS = 30, 20, 4
N_ROWS = N_STEPS * N_EPISODES
SCHEMA = Schema(
    {
        "observation": Field("float32", (3,), chunk_rows=CHUNK_ROWS),
        "reward": Field("float32", chunk_rows=2 * CHUNK_ROWS),
    }
)
OBSERVATIONS = np.arange(3 * N_ROWS, dtype=np.float32).reshape(N_ROWS, 3)
WAIT_S = 60.0
ONE, TWO = ("stream", "steps/x", 1), ("stream", "steps/x", 2)

Scan = Callable[[trajstore.Store], Iterator[Any]]


class Requests:
    """Counts reads of chunks by key and range, and chunks that are fetched ahead; fetching ahead may fail."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.counts: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self.n_ahead = 0
        self.is_broken = False
        for kind in ("get", "get_into", "get_range"):
            patch.setattr(LocalStorage, kind, self._counted(getattr(LocalStorage, kind)))
        patch.setattr(StreamReader, "read_chunks", self._noted(StreamReader.read_chunks))

    def _counted(self, real: Any) -> Any:
        def call(storage: LocalStorage, key: str, *args: Any) -> Any:
            if "/steps/" in key and "/c." in key:
                self.counts[key, tuple(a for a in args if isinstance(a, int))] += 1
            return real(storage, key, *args)

        return call

    def _noted(self, real: Any) -> Any:
        def read_chunks(reader: StreamReader, path: str, piece: ShardPiece) -> Any:
            self.n_ahead += piece.stop - piece.start
            if self.is_broken:
                raise StorageError("it is a test")
            return real(reader, path, piece)

        return read_chunks


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Requests:
    """A local directory that is taken for an object store."""
    monkeypatch.setattr("trajstore.storage.local.can_map_files", lambda _: False)
    monkeypatch.setattr(LocalStorage, "is_remote", True)
    return Requests(monkeypatch)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with trajstore.create(tmp_path / "store", SCHEMA, fsync=False).writer() as writer:
        for i in range(N_EPISODES):
            rows = OBSERVATIONS[i * N_STEPS : (i + 1) * N_STEPS]
            writer.append_episode({"observation": rows, "reward": rows[:, 0]}, terminated=True)
    return tmp_path / "store"


def reader_of(store: trajstore.Store) -> Reader:
    return Reader(store, cache_bytes=4096, host_cache_bytes=0)


def episodes(store: trajstore.Store) -> Iterator[Any]:
    for i in range(len(store.episodes)):
        yield store.read_episode(i)


def epoch(store: trajstore.Store) -> Iterator[Any]:
    return reader_of(store).epoch(16, Windows(4), shuffle=False)


def prefetched_epoch(store: trajstore.Store) -> Iterator[Any]:
    return reader_of(store).epoch(16, Windows(4), shuffle=False, prefetch=2)


def blocks(store: trajstore.Store) -> Iterator[Any]:
    return reader_of(store).read_all_in_order(block_steps=20)


def episode_blocks(store: trajstore.Store) -> Iterator[Any]:
    return reader_of(store).read_episodes_in_order(block_steps=60)


def dataset(store: trajstore.Store) -> Iterator[Any]:
    options = {"epoch": True, "shuffle": False, "cache_bytes": 4096}
    return iter(trajstore.BatchDataset(store, 16, Windows(4), **options))


SCANS = [episodes, epoch, prefetched_epoch, blocks, episode_blocks, dataset]
each_scan = pytest.mark.parametrize("scan", SCANS, ids=lambda scan: scan.__name__)


def observations(batches: Iterator[Any]) -> list[Any]:
    return [np.asarray(batch["observation"]).copy() for batch in batches]


def assert_same(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


def threads_ahead() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("trajstore-ahead")]


def wait_for_threads() -> None:
    deadline = time.monotonic() + WAIT_S
    while threads_ahead() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not threads_ahead()


@each_scan
def test_a_scan_reads_each_chunk_once_and_nearly_all_in_the_background(
    root: Path, requests: Requests, scan: Scan, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = observations(scan(trajstore.open(root)))
    assert max(requests.counts.values()) == 1
    n_chunks = -(-N_ROWS // CHUNK_ROWS) + -(-N_ROWS // (2 * CHUNK_ROWS))
    assert sum(requests.counts.values()) == n_chunks
    assert 0.8 * n_chunks < requests.n_ahead <= n_chunks
    monkeypatch.setattr(LocalStorage, "is_remote", False)
    assert_same(found, observations(scan(trajstore.open(root))))


@each_scan
def test_shards_take_no_more_requests_than_without_reading_ahead(
    root: Path, requests: Requests, scan: Scan, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewrite(root, next(iter(trajstore.open(root).streams)).id, chunks_per_shard=16)
    found = observations(scan(trajstore.open(root)))
    assert requests.n_ahead
    ranges = Counter(key for key, place in requests.counts.elements() if place[:1] != (0,))  # without the indexes
    requests.counts.clear()
    monkeypatch.setattr(ReadAhead, "request", lambda *_: None)
    assert_same(found, observations(scan(trajstore.open(root))))
    before = Counter(key for key, place in requests.counts.elements() if place[:1] != (0,))
    assert ranges.total() <= before.total() + len(SCHEMA.fields)  # the shard in which reading ahead begins


@each_scan
def test_a_failure_in_the_background_is_tried_again_when_the_chunk_is_needed(
    root: Path, requests: Requests, scan: Scan
) -> None:
    expected = observations(scan(trajstore.open(root)))
    requests.is_broken = True
    assert_same(observations(scan(trajstore.open(root))), expected)
    assert requests.n_ahead


@each_scan
def test_an_error_is_raised_by_the_call_that_needs_the_chunk(root: Path, requests: Requests, scan: Scan) -> None:
    good = observations(scan(trajstore.open(root)))
    stream = trajstore.open(root).streams[0].id
    (file,) = (root / f"streams/{stream}/steps/observation").glob(f"c.{N_ROWS // CHUNK_ROWS // 2}.*")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    batches, found = scan(trajstore.open(root)), []
    with pytest.raises(CorruptionError, match="observation"):
        found += [np.asarray(batch["observation"]).copy() for batch in batches]
    assert_same(found, good[: len(found)])


def test_the_error_comes_after_all_good_batches(root: Path, requests: Requests) -> None:
    stream = trajstore.open(root).streams[0].id
    (file,) = (root / f"streams/{stream}/steps/observation").glob("c.100.*")  # rows from 400 on
    file.unlink()
    batches = blocks(trajstore.open(root))
    for _ in range(400 // 20):
        next(batches)
    with pytest.raises(CorruptionError, match=r"chunk 100 .*missing"):
        next(batches)


@each_scan
def test_streams_may_be_packed_while_they_are_fetched_ahead(root: Path, requests: Requests, scan: Scan) -> None:
    expected = observations(scan(trajstore.open(root)))
    store = trajstore.open(root)
    batches = scan(store)
    found = [np.asarray(next(batches)["observation"]).copy() for _ in range(2)]
    trajstore.pack(root, grace_s=0, wait=True, fsync=False)
    try:
        found += observations(batches)
    except trajstore.SnapshotExpiredError:  # of `read_episode`, as without reading ahead
        assert scan is episodes
        return
    assert_same(found, expected)


def test_what_is_fetched_ahead_is_bounded(root: Path, requests: Requests) -> None:
    batches = blocks(trajstore.open(root))
    next(batches)
    wait_for_threads()
    n_bytes = 12 * CHUNK_ROWS * sum("/observation/" in key for key, _ in requests.counts)
    assert 0 < n_bytes < 2 * 4096
    assert len(requests.counts) < N_ROWS // CHUNK_ROWS / 2


@each_scan
def test_an_abandoned_scan_leaves_no_thread(root: Path, requests: Requests, scan: Scan) -> None:
    batches = scan(trajstore.open(root))
    for _ in range(3):
        next(batches)
    del batches
    gc.collect()
    wait_for_threads()


def test_episodes_read_at_random_are_not_followed_by_others(root: Path, requests: Requests) -> None:
    store = trajstore.open(root)
    for i in (3, 9, 2, 15, 0):
        store.read_episode(i)
    assert not requests.n_ahead
    for start in range(0, N_STEPS, 10):  # parts of one episode in order
        store.read_episode(5, start=start, stop=start + 10)
    assert requests.n_ahead


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # forking beside threads
def test_a_forked_child_and_a_pickled_snapshot_go_on_reading(root: Path, requests: Requests) -> None:
    store, rows = trajstore.open(root), OBSERVATIONS.reshape(N_EPISODES, N_STEPS, 3)
    snapshot = store.snapshot
    for i in range(3):
        snapshot.read_episode(i)
    twin = pickle.loads(pickle.dumps(snapshot))
    pid = os.fork()
    if not pid:
        same = all(np.array_equal(snapshot.read_episode(i)["observation"], rows[i]) for i in range(3, N_EPISODES))
        os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    for shown in (snapshot, twin):
        assert all(np.array_equal(shown.read_episode(i)["observation"], rows[i]) for i in range(3, N_EPISODES))


def test_a_shuffled_epoch_and_a_local_store_fetch_nothing_ahead(
    root: Path, requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in reader_of(trajstore.open(root)).epoch(16, Windows(4)):
        pass
    monkeypatch.setattr(LocalStorage, "is_remote", False)
    for scan in SCANS:
        observations(scan(trajstore.open(root)))
    assert not requests.n_ahead


def test_an_epoch_that_continues_from_a_state_gives_the_same_batches(root: Path, requests: Requests) -> None:
    expected = observations(epoch(trajstore.open(root)))
    first: Any = epoch(trajstore.open(root))
    for _ in range(7):
        next(first)
    other: Any = epoch(trajstore.open(root))
    for _ in range(20):
        next(other)
    other.load_state_dict(first.state_dict())
    assert_same(observations(other), expected[7:])


def test_parts_of_an_epoch_fetch_only_their_batches(root: Path, requests: Requests) -> None:
    loader = torch.utils.data.DataLoader(
        trajstore.BatchDataset(trajstore.open(root), 60, Windows(1), epoch=True, shuffle=False, cache_bytes=4096),
        batch_size=None,
    )
    assert_same(observations(iter(loader)), [OBSERVATIONS[i : i + 60, None] for i in range(0, N_ROWS, 60)])


# ---- ReadAhead alone


def reading(*values: bytes) -> Callable[[], list[memoryview]]:
    return lambda: [memoryview(value) for value in values]


def test_a_chunk_is_handed_out_once() -> None:
    ahead = ReadAhead(100)
    assert ahead.room == 100
    ahead.request([ONE, TWO], 80, 0, reading(b"one", b"two"))
    assert ahead.room == 0
    assert ONE in ahead
    assert ahead.take(ONE) == b"one"
    assert ONE not in ahead
    assert ahead.take(ONE) is None
    assert ahead.room == 0  # the other chunk was read with it
    assert ahead.take(TWO) == b"two"
    assert ahead.room == 100


def test_chunks_of_parts_that_are_over_are_dropped() -> None:
    ahead = ReadAhead(100)
    ahead.request([ONE], 80, 1, reading(b"one"))
    ahead.request([TWO], 80, 1, reading(b"two"))
    assert ahead.keep(TWO, 5)
    ahead.forget_before(4)
    assert ONE not in ahead
    assert TWO in ahead
    assert ahead.keep(ONE, 5)  # it was requested before, so it is not requested again
    ahead.close()
    assert TWO not in ahead
    assert not ahead.keep(ONE, 5)


def test_requests_that_have_not_begun_are_left_out_when_a_scan_is_abandoned() -> None:
    began, goes_on, n_read = threading.Event(), threading.Event(), Counter[str]()

    def wait() -> list[memoryview]:
        began.set()
        goes_on.wait(WAIT_S)
        return [memoryview(b"")]

    def count() -> list[memoryview]:
        n_read["late"] += 1
        return [memoryview(b"")]

    ahead = ReadAhead(100)
    for i in range(16):
        ahead.request([("stream", "steps/x", i)], 1, 0, wait)
    ahead.request([("stream", "steps/x", 99)], 1, 0, count)
    assert began.wait(WAIT_S)
    del ahead
    gc.collect()
    goes_on.set()
    wait_for_threads()
    assert not n_read
