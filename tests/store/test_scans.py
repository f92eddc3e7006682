"""Reads in order: how many requests they take."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trajstore
from tests.support.sharding import read_record, rewrite
from trajstore import Field, Schema
from trajstore.errors import CorruptionError
from trajstore.format.array_layout import ArrayLayout
from trajstore.format.codec import Codec
from trajstore.sampling.reader import Reader
from trajstore.sampling.windows import Windows
from trajstore.storage import LocalStorage
from trajstore.store import recent_chunks, shard_pieces
from trajstore.store.recent_chunks import RecentChunks
from trajstore.store.stream_reader import StreamReader

N_STEPS, N_EPISODES, CHUNK_ROWS = 30, 8, 4
SCHEMA = Schema(
    {
        "observation": Field("float32", (3,), chunk_rows=CHUNK_ROWS),
        "reward": Field("float32", chunk_rows=2 * CHUNK_ROWS),
    }
)


@pytest.fixture(autouse=True)
def unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are mapped are read without requests; these tests count them."""
    monkeypatch.setattr("trajstore.storage.local.can_map_files", lambda _: False)


class Requests:
    """Counts what is read, by key and kind of request."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        for kind in ("get", "get_into", "get_range", "size"):
            patch.setattr(LocalStorage, kind, self._counted(kind, getattr(LocalStorage, kind)))

    def _counted(self, kind: str, real: Any) -> Any:
        def call(storage: LocalStorage, key: str, *args: Any) -> Any:
            if "/c." in key:
                self.counts[key, kind] += 1
            return real(storage, key, *args)

        return call

    def by_key(self, path: str) -> dict[str, int]:
        found: Counter[str] = Counter()
        for (key, _), n in self.counts.items():
            if f"/{path}/" in key:
                found[key] += n
        return dict(found)


def observations(n: int) -> Any:
    return np.arange(3 * n, dtype=np.float32).reshape(n, 3)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    values = observations(N_STEPS * N_EPISODES)
    with trajstore.create(tmp_path / "store", SCHEMA, fsync=False).writer() as writer:
        for i in range(N_EPISODES):
            rows = values[i * N_STEPS : (i + 1) * N_STEPS]
            writer.append_episode({"observation": rows, "reward": rows[:, 0]}, terminated=True)
    return tmp_path / "store"


def stream_of(root: Path) -> str:
    return next(path.name for path in (root / "streams").iterdir() if path.is_dir())


def reader_of(root: Path) -> StreamReader:
    return StreamReader(LocalStorage(root, fsync=False), read_record(root, stream_of(root)))


SHARDED = [pytest.param((n, first), id=f"{n}-{first}") for n in (3, 16) for first in (True, False)]


@pytest.mark.parametrize("layout", SHARDED)
def test_rows_of_whole_shards_take_one_request_a_shard(
    root: Path, monkeypatch: pytest.MonkeyPatch, layout: tuple[int, bool]
) -> None:
    rewrite(root, stream_of(root), chunks_per_shard=layout[0], index_at_start=layout[1])
    requests = Requests(monkeypatch)
    n = N_STEPS * N_EPISODES
    found = reader_of(root).read_rows("steps/observation", 0, n)
    assert np.array_equal(found, observations(n))
    n_shards = -(-n // (CHUNK_ROWS * layout[0]))
    assert len(requests.by_key("observation")) == n_shards
    assert set(requests.by_key("observation").values()) == {1}


@pytest.mark.parametrize("layout", SHARDED)
def test_rows_of_sharded_arrays_are_the_same_wherever_they_begin_and_end(
    root: Path, layout: tuple[int, bool]
) -> None:
    rewrite(root, stream_of(root), chunks_per_shard=layout[0], index_at_start=layout[1])
    reader, n = reader_of(root), N_STEPS * N_EPISODES
    for start in range(0, n, 7):
        for stop in (start, start + 1, start + 5, start + 33, n):
            found = reader.read_rows("steps/observation", start, min(stop, n))
            assert np.array_equal(found, observations(n)[start : min(stop, n)])


def test_some_chunks_of_a_shard_take_one_range_and_its_index(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rewrite(root, stream_of(root), chunks_per_shard=16)
    requests, reader = Requests(monkeypatch), reader_of(root)
    found = reader.read_rows("steps/observation", 5, 5 + 5 * CHUNK_ROWS)
    assert np.array_equal(found, observations(100)[5 : 5 + 5 * CHUNK_ROWS])
    assert sum(requests.counts.values()) == 2
    reader.read_rows("steps/observation", 5, 5 + 5 * CHUNK_ROWS)
    assert sum(requests.counts.values()) == 3  # the index is known


def test_chunks_that_lie_far_apart_in_a_shard_are_read_apart(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rewrite(root, stream_of(root), chunks_per_shard=16)
    monkeypatch.setattr(shard_pieces, "_MAX_GAP_BYTES", -1)
    requests = Requests(monkeypatch)
    found = reader_of(root).read_rows("steps/observation", 0, 5 * CHUNK_ROWS)
    assert np.array_equal(found, observations(5 * CHUNK_ROWS))
    assert sum(requests.counts.values()) == 6


def test_large_shards_are_read_in_pieces(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rewrite(root, stream_of(root), chunks_per_shard=60)
    monkeypatch.setattr(shard_pieces, "_MAX_PIECE_BYTES", 10 * CHUNK_ROWS * 12)
    requests, n = Requests(monkeypatch), N_STEPS * N_EPISODES
    assert np.array_equal(reader_of(root).read_rows("steps/observation", 0, n), observations(n))
    assert {kind: count for (_, kind), count in requests.counts.items()} == {"get_range": 1 + 6}


def test_an_impossible_place_in_a_shard_index_names_its_chunk(root: Path) -> None:
    rewrite(root, stream_of(root), chunks_per_shard=3)
    reader = reader_of(root)
    index = np.array([[100, 8], [100, 1 << 60], [100, 8]], np.uint64)
    layout = reader.record.layouts["steps/observation"]
    (file,) = (path for path in (root / "streams").rglob("c.1.0") if path.parent.name == "observation")
    data = file.read_bytes()
    file.write_bytes(Codec("none").encode(index) + data[layout.shard_index_bytes :])
    with pytest.raises(CorruptionError, match=r"chunk 4 .*which is impossible"):
        reader.read_rows("steps/observation", 0, N_STEPS)


def test_episodes_read_in_order_read_each_object_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests, store, values = Requests(monkeypatch), trajstore.open(root), observations(N_STEPS * N_EPISODES)
    for i in range(N_EPISODES):
        found = store.read_episode(i)
        assert np.array_equal(found["observation"], values[i * N_STEPS : (i + 1) * N_STEPS])
        assert np.array_equal(found["reward"], values[i * N_STEPS : (i + 1) * N_STEPS, 0])
    for path in SCHEMA.fields:
        assert set(requests.by_key(path).values()) == {1}


def test_episodes_read_in_order_decode_each_chunk_of_a_shard_once(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewrite(root, stream_of(root), chunks_per_shard=60)
    decoded: Counter[bytes] = Counter()
    real = ArrayLayout.decode_new

    def decode_new(layout: ArrayLayout, data: Any) -> Any:
        decoded[bytes(data)] += layout.chunk_rows == CHUNK_ROWS
        return real(layout, data)

    monkeypatch.setattr(ArrayLayout, "decode_new", decode_new)
    store, values = trajstore.open(root), observations(N_STEPS * N_EPISODES)
    for first in range(0, len(values), 3):  # pieces of episodes, some of them inside a chunk
        i, t = divmod(first, N_STEPS)
        found = store.read_episode(i, fields=["observation"], start=t, stop=min(t + 3, N_STEPS))
        assert np.array_equal(found["observation"], values[first : first + 3])
    assert max(decoded.values()) == 1


def test_a_chunk_that_still_grows_is_read_again(tmp_path: Path) -> None:
    store = trajstore.create(tmp_path / "store", SCHEMA, fsync=False)
    with store.writer() as writer:
        for i in range(3 * CHUNK_ROWS):
            rows = observations(i + 1)[-1:]
            writer.append_episode({"observation": rows, "reward": rows[:, 0]}, terminated=True)
            writer.commit()
            store.refresh()
            assert np.array_equal(store.read_episode(i)["observation"], rows)
            assert np.array_equal(store.read_episode(max(0, i - 1))["reward"], observations(max(1, i))[-1:, 0])


def test_chunks_that_are_kept_for_the_next_episode_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_chunks, "MAX_BYTES", 1000)
    recent, chunk = RecentChunks(), np.zeros(100, np.uint8)
    for i in range(100):
        recent.put(("stream", "steps/x", i), chunk)
        kept = [n for n in range(100) if recent.get(("stream", "steps/x", n)) is not None]
        assert kept[-4:] == [*range(max(0, i - 3), i + 1)][-4:]
        assert len(kept) <= 10
    recent.put(("stream", "steps/y", 0), np.zeros(126, np.uint8))
    assert recent.get(("stream", "steps/y", 0)) is None


def test_a_scan_through_the_cache_reads_each_object_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = Requests(monkeypatch)
    reader = Reader(trajstore.open(root), cache_bytes=4096)
    steps = [block["observation"] for block in reader.read_all_in_order(block_steps=7)]
    assert np.array_equal(np.concatenate([block.numpy() for block in steps]), observations(N_STEPS * N_EPISODES))
    for path in SCHEMA.fields:
        assert set(requests.by_key(path).values()) == {1}


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_epoch_in_order_reads_each_object_once(
    root: Path, monkeypatch: pytest.MonkeyPatch, prefetch: int
) -> None:
    requests = Requests(monkeypatch)
    reader = Reader(trajstore.open(root), cache_bytes=4096)
    n = sum(len(b["index"]) for b in reader.epoch(3, Windows(4), shuffle=False, prefetch=prefetch))
    assert n == N_EPISODES * (N_STEPS - 3)
    for path in SCHEMA.fields:
        assert set(requests.by_key(path).values()) == {1}
