"""Sharded streams that still grow: every commit replaces their last shard, and nothing takes that for damage."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trajstore
from tests.support.faulty import Call, FaultyStorage, Plan, real_storage, through
from tests.support.sharding import read_record
from trajstore import CorruptionError, Field, ReplayBuffer, Schema, Store, Writer
from trajstore.store.stream_reader import StreamReader
from trajstore.store.verify import verify

CODECS = ["none", "zstd:1", "blosc-lz4"]
OBSERVATION = 64
Array = np.ndarray[Any, np.dtype[Any]]


def schema_of(codec: str) -> Schema:
    return Schema({"x": Field("int32", (OBSERVATION,), chunk_rows=4, shard_rows=16, codec=codec)})


def rows(first: int, n: int) -> Array:
    """Rows that compress to different sizes, each of them different."""
    rng = np.random.default_rng(first)
    values = rng.integers(0, 1 << 30, (n, OBSERVATION), np.int32)
    values[:, : first % OBSERVATION] = 0
    return values


def opened(url: str, codec: str) -> tuple[Store, Writer]:
    store = trajstore.create(url, schema_of(codec), fsync=False)
    return store, store.writer(commit_seconds=None)


def commit(writer: Writer, first: int, n: int) -> None:
    writer.append_episode({"x": rows(first, n)}, terminated=True)
    writer.commit()


def reader_of(url: str, writer: Writer) -> StreamReader:
    return StreamReader(real_storage(url), read_record(Path(url), writer.stream))


@pytest.mark.parametrize("codec", CODECS)
def test_a_reader_that_is_advanced_reads_every_commit(url: str, codec: str) -> None:
    _, writer = opened(url, codec)
    expected = np.empty((0, OBSERVATION), np.int32)
    reader = None
    for n in range(1, 12):
        commit(writer, len(expected), n)
        expected = np.concatenate([expected, rows(len(expected), n)])
        record = read_record(Path(url), writer.stream)
        reader = reader_of(url, writer) if reader is None else reader.advanced(record)
        assert (reader.read_rows("steps/x", 0, len(expected)) == expected).all()
    writer.close()


@pytest.mark.parametrize("codec", CODECS)
def test_a_reader_with_an_older_record_reads_its_rows_from_the_replaced_shard(url: str, codec: str) -> None:
    _, writer = opened(url, codec)
    commit(writer, 0, 6)
    old = reader_of(url, writer)
    expected = old.read_rows("steps/x", 0, 6)  # the index of the shard is known from now on
    for n in range(1, 7):
        commit(writer, 6 + n, n)
        assert (old.read_rows("steps/x", 0, 6) == expected).all()
    writer.close()


@pytest.mark.parametrize("codec", CODECS)
def test_indexes_of_complete_chunks_are_read_once(url: str, codec: str) -> None:
    _, writer = opened(url, codec)
    commit(writer, 0, 16)
    storage = FaultyStorage(real_storage(url))
    reader = StreamReader(storage, read_record(Path(url), writer.stream))
    for i in range(12):
        reader.chunk("steps/x", i % 4, bytearray())
    assert storage.n_calls("get_range") == 1 + 3 * 4
    commit(writer, 16, 1)
    reader = reader.advanced(read_record(Path(url), writer.stream))
    for i in range(4):
        reader.chunk("steps/x", i, bytearray())
    assert storage.n_calls("get_range") == 1 + 4 * 4
    writer.close()


class CommitBetween(Plan):
    """After the first read of a shard's index, and before that of the chunk, the writer commits."""

    def __init__(self, commit: Callable[[], None]) -> None:
        self._commit: Callable[[], None] | None = commit

    def after(self, call: Call) -> None:
        if call.action == "get_range" and self._commit is not None:
            commit, self._commit = self._commit, None
            commit()


@pytest.mark.parametrize("codec", CODECS)
def test_a_commit_between_index_and_chunk_is_not_taken_for_damage(url: str, codec: str) -> None:
    _, writer = opened(url, codec)
    commit(writer, 0, 6)
    expected = rows(0, 6)
    storage = FaultyStorage(real_storage(url), CommitBetween(lambda: commit(writer, 40, 1)))
    reader = StreamReader(storage, read_record(Path(url), writer.stream))
    assert (reader.read_rows("steps/x", 0, 6) == expected).all()
    writer.close()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("where", ["index", "complete chunk", "part-filled chunk"])
def test_a_flipped_bit_in_a_growing_shard_is_damage_and_named(url: str, codec: str, where: str) -> None:
    _, writer = opened(url, codec)
    commit(writer, 0, 6)
    (file,) = Path(url, "streams", writer.stream, "steps/x").glob("c.*")
    data = bytearray(file.read_bytes())
    data[{"index": 3, "complete chunk": 16 * 4 + 4 + 20, "part-filled chunk": len(data) - 9}[where]] ^= 4
    file.write_bytes(data)
    with pytest.raises(CorruptionError, match=r"array 'steps/x', chunk \d \(rows"):
        reader_of(url, writer).read_rows("steps/x", 0, 6)
    problems = [str(problem) for problem in verify(url).problems]
    assert problems
    assert all("array 'steps/x'" in problem for problem in problems)
    writer.release()


@pytest.mark.parametrize("codec", CODECS)
def test_a_chunk_that_the_index_of_its_shard_lacks_is_damage_not_fill(url: str, codec: str) -> None:
    _, writer = opened(url, codec)
    commit(writer, 0, 6)
    (file,) = Path(url, "streams", writer.stream, "steps/x").glob("c.*")
    older = file.read_bytes()
    commit(writer, 6, 6)
    file.write_bytes(older)
    with pytest.raises(CorruptionError, match="impossible"):
        reader_of(url, writer).read_rows("steps/x", 0, 12)
    assert not verify(url).is_clean
    assert verify(url, fast=True).is_clean is (codec != "none")  # sizes tell it where they are known
    writer.release()


@pytest.mark.parametrize("codec", CODECS)
def test_snapshots_read_on_while_a_writer_commits(url: str, codec: str) -> None:
    store, writer = opened(url, codec)
    commit(writer, 0, 1)
    is_over, failures = threading.Event(), []

    def read() -> None:
        own = trajstore.open(url)
        try:
            while not is_over.is_set():
                own.refresh()
                for i in range(max(0, len(own) - 3), len(own)):
                    values = own.read_episode(i)["x"]
                    assert (values == rows(i, len(values))).all(), i
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for n in range(1, 120):
        commit(writer, n, n % 5 + 1)
    is_over.set()
    for thread in threads:
        thread.join()
    writer.close()
    assert failures == []
    assert verify(url).is_clean
    store.refresh()
    assert len(store) == 120


@pytest.mark.parametrize("codec", CODECS)
def test_copies_and_checkpoints_hold_the_rows_of_growing_shards(url: str, codec: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"commit_seconds": None, "fsync": False}
    buffer = ReplayBuffer(url, schema=schema_of(codec), **options)
    for i in range(4):
        buffer.add_episode({"x": rows(i, 5)}, terminated=True)
        buffer.flush()
    buffer.save_checkpoint("four", wait=True)
    for i in range(4, 9):
        buffer.add_episode({"x": rows(i, 5)}, terminated=True)
        buffer.flush()
    whole = trajstore.copy(url, tmp_path / "whole", fsync=False)
    part = trajstore.copy(url, tmp_path / "part", at="four", fsync=False)
    for store, n in ((whole, 9), (part, 4), (trajstore.open(url, at="four"), 4)):
        assert [(store.read_episode(i)["x"] == rows(i, 5)).all() for i in range(len(store))] == [True] * n
    buffer.close()
    assert all(verify(place).is_clean for place in (url, tmp_path / "whole", tmp_path / "part"))
    with ReplayBuffer.resume(url, "four", fsync=False) as resumed:
        assert resumed.n_steps == 20


def test_a_failed_commit_is_repaired_by_the_next_one(url: str) -> None:
    class FailAtRecords(Plan):
        is_failing = False

        def before(self, call: Call) -> None:
            if self.is_failing and call.action == "put" and call.key.endswith("/zarr.json"):
                raise OSError("no")

    plan = FailAtRecords()
    with through(FaultyStorage(real_storage(url), plan)):
        store, writer = opened(url, "zstd:1")
        for n in range(12):
            writer.append_episode({"x": rows(n, n % 7 + 1)}, terminated=True)
            plan.is_failing = n > 0
            if plan.is_failing:
                with pytest.raises(OSError, match="no"):
                    writer.commit()
            plan.is_failing = False
            writer.commit()
        writer.close()
        store.refresh()
    assert [(store.read_episode(n)["x"] == rows(n, n % 7 + 1)).all() for n in range(12)] == [True] * 12
    assert verify(url).is_clean
