"""A buffer goes on as if nothing had happened when another process packs streams of its store."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trajstore
from trajstore import Priorities, ReplayBuffer, Retention, Windows
from trajstore.store.packing import pack, remove_replaced
from trajstore.store.verify import verify

WINDOWS = Windows(2)


def episode(i: int, n: int = 40) -> dict[str, Any]:
    return {"action": np.arange(n) + 1000 * i, "reward": np.full(n, float(i), np.float32)}


def fill(buffer: ReplayBuffer, *numbers: int) -> None:
    for i in numbers:
        buffer.add_episode(episode(i), terminated=True, metadata={"number": i})
        buffer.flush()


def new_buffer(url: str, **options: Any) -> ReplayBuffer:
    schema = {
        "action": trajstore.Field("int64", chunk_rows=8),
        "reward": trajstore.Field("float32", chunk_rows=16),
    }
    trajstore.create(url, schema, exist_ok=True, fsync=False)
    return ReplayBuffer(url, **{"sample": WINDOWS, "exist": "join", "seed": 5, "grace_s": 0.0} | options)


def batches(buffer: ReplayBuffer, n: int = 3) -> list[Any]:
    return [buffer.sample(16)["action"].tolist() for _ in range(n)]


def earlier_session(url: str, n_episodes: int = 5, **options: Any) -> str:
    """A session that has ended; returns its stream."""
    buffer = new_buffer(url, **options)
    fill(buffer, *range(n_episodes))
    buffer.close()
    return buffer.stream


def numbers(store: trajstore.Store) -> list[int]:
    return [row["metadata"]["number"] for row in store.episodes]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "store")


def pack_in_another_process(url: str, **options: Any) -> None:
    code = f"import trajstore; assert trajstore.pack({url!r}, **{options!r}).packed"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_live_buffer_draws_the_same_while_another_process_packs(url: str, compiled: bool) -> None:
    earlier_session(url)
    twin_url = f"{url}-twin"
    trajstore.copy(url, twin_url, fsync=False)
    buffer, twin = (new_buffer(place, compiled=compiled) for place in (url, twin_url))
    for one in (buffer, twin):
        fill(one, 10, 11)
    assert batches(buffer) == batches(twin)
    pack_in_another_process(url)
    assert batches(buffer) == batches(twin)
    buffer.refresh()
    assert batches(buffer) == batches(twin)
    fill(buffer, 12)
    fill(twin, 12)
    assert len(remove_replaced(buffer.store.snapshot.storage, 0)) == 1
    assert batches(buffer, 8) == batches(twin, 8)
    assert buffer.stats()["n_steps"] == twin.stats()["n_steps"] == 8 * 40
    buffer.close()
    twin.close()
    assert numbers(trajstore.open(url)) == [0, 1, 2, 3, 4, 10, 11, 12]
    assert verify(url).is_clean


def test_a_buffer_that_did_not_refresh_reads_on_after_the_originals_are_gone(url: str) -> None:
    earlier_session(url)
    twin_url = f"{url}-twin"
    trajstore.copy(url, twin_url, fsync=False)
    buffer, twin = (new_buffer(place, cache_bytes="2KiB") for place in (url, twin_url))
    for one in (buffer, twin):
        fill(one, 10)
    assert batches(buffer) == batches(twin)
    pack(url, fsync=False, wait=True, grace_s=0)
    assert batches(buffer, 20) == batches(twin, 20)
    assert buffer.stats()["n_steps"] == 6 * 40
    buffer.close()
    twin.close()


def test_prefetched_batches_survive_packing(url: str) -> None:
    earlier_session(url)
    buffer = new_buffer(url, cache_bytes="2KiB")
    fill(buffer, 10)
    with buffer.batches(8) as iterator:
        seen = [next(iterator)["action"].tolist() for _ in range(2)]
        pack(url, fsync=False, wait=True, grace_s=0)
        seen += [next(iterator)["action"].tolist() for _ in range(20)]
    assert all(np.diff(window).tolist() == [1] for batch in seen for window in batch)
    assert {window[0] // 1000 for batch in seen for window in batch} == {0, 1, 2, 3, 4, 10}
    buffer.close()


def test_a_checkpoint_of_before_is_resumed_with_the_same_draws(url: str) -> None:
    earlier_session(url)
    buffer = new_buffer(url)
    fill(buffer, 10, 11)
    batches(buffer)
    buffer.save_checkpoint("one", wait=True)
    expected = batches(buffer, 4)
    buffer.close()
    pack(url, fsync=False, wait=True, grace_s=0)
    assert all(record.location for record in trajstore.open(url).streams)
    again = ReplayBuffer.resume(url, "one")
    assert batches(again, 2) == expected[:2]
    again.save_checkpoint("two", wait=True)
    assert batches(again, 2) == expected[2:]
    again.close()
    pack(url, fsync=False, wait=True, grace_s=0, chunk_bytes=32)
    third = ReplayBuffer.resume(url, "two")
    assert batches(third, 2) == expected[2:]
    third.close()
    assert numbers(trajstore.open(url)) == [0, 1, 2, 3, 4, 10, 11]
    assert verify(url).is_clean


def test_a_resumed_buffer_moves_to_streams_that_are_packed_later(url: str) -> None:
    buffer = new_buffer(url)
    fill(buffer, 0, 1, 2, 3)
    buffer.save_checkpoint("one", wait=True)
    fill(buffer, 4)  # is abandoned
    expected = batches(buffer, 1)
    buffer.close()
    again = ReplayBuffer.resume(url, "one", grace_s=0.0)
    fill(again, 10)
    pack_in_another_process(url)
    again.save_checkpoint("two", wait=True)  # lists the original, which it still reads
    again.refresh()
    assert [record.location is not None for record in again.reader.assembler.snapshot.streams] == [True, False]
    assert len(remove_replaced(again.store.snapshot.storage, 0)) == 1
    again.refresh()
    batches(again, 8)
    again.save_checkpoint("three", wait=True)
    again.close()
    assert expected
    for name in ("one", "two", "three"):
        at = trajstore.open(url, at=name)
        assert numbers(at) == ([0, 1, 2, 3] if name == "one" else [0, 1, 2, 3, 10])
        assert [at.read_episode(i)["action"][0] // 1000 for i in range(len(at))] == numbers(at)
    assert numbers(trajstore.open(url)) == [0, 1, 2, 3, 10]  # what is abandoned stays abandoned
    assert [row["is_abandoned"] for row in trajstore.open(url).history(abandoned=True)] == [False] * 5 + [True]
    assert verify(url).is_clean


def test_the_garbage_collection_of_a_buffer_removes_originals(url: str) -> None:
    old = earlier_session(url)
    buffer = new_buffer(url, capacity=Retention(steps=200))
    fill(buffer, 10)
    report = pack(url, fsync=False)
    assert [one.stream for one in report.packed] == [old]
    fill(buffer, 11, 12, 13)
    assert buffer.stats()["n_steps"] <= 200  # evicts steps of the packed stream
    buffer._session.collector.flush()
    stored = [record.id for record in trajstore.open(url).snapshot.stored]
    assert sorted(stored) == sorted([str(report.packed[0].packed_in), buffer.stream])
    shown = trajstore.open(url)
    assert numbers(shown)[0] == 4 or shown.episodes["is_headless"].tolist()[0]
    assert verify(url).is_clean
    fill(buffer, *range(14, 24))
    assert buffer.stats()["n_steps"] <= 200  # evicts all of it
    buffer._session.collector.flush()
    assert [record.id for record in trajstore.open(url).snapshot.stored] == [buffer.stream]
    buffer.close()
    assert min(numbers(trajstore.open(url))) >= 18


def test_evicted_steps_stay_evicted_after_packing_twice(url: str) -> None:
    earlier_session(url)
    buffer = new_buffer(url, capacity=Retention(steps=120))
    fill(buffer, 10, 11)
    buffer.close()
    before = [tuple(trajstore.open(url).episodes.key(i)) for i in range(len(trajstore.open(url)))]
    lengths = trajstore.open(url).episodes["length"].tolist()
    for chunk_bytes in (32, 64):
        pack(url, fsync=False, wait=True, grace_s=0, chunk_bytes=chunk_bytes)
        store = trajstore.open(url)
        assert [tuple(store.episodes.key(i)) for i in range(len(store))] == before
        assert store.episodes["length"].tolist() == lengths
    again = new_buffer(url)
    assert again.stats()["n_steps"] == sum(lengths)
    again.close()


def test_priorities_and_columns_survive_packing(url: str) -> None:
    options: dict[str, Any] = {"priorities": Priorities(alpha=1.0)}
    buffer = new_buffer(url, **options)
    fill(buffer, 0, 1, 2)
    batch = buffer.sample(64)
    buffer.update_priorities(batch, np.arange(1, 65, dtype=np.float32))
    buffer.add_column("value", trajstore.Field("float32"))
    buffer.write_column("value", batch, np.arange(64, dtype=np.float32))
    buffer.close()
    twin_url = f"{url}-twin"
    trajstore.copy(url, twin_url, fsync=False)
    pack(url, fsync=False, wait=True, grace_s=0)
    before, after = trajstore.open(twin_url), trajstore.open(url)
    for name in ("priority", "value"):
        assert before.episodes[f"{name}.sum"].tolist() == after.episodes[f"{name}.sum"].tolist()
    for place in (twin_url, url):
        again = new_buffer(place, **options)
        fill(again, 7)
        batch = again.sample(32)
        again.update_priorities(batch, np.full(32, 9, np.float32))
        again.close()
    pack(url, fsync=False, wait=True, grace_s=0, chunk_bytes=64)
    before, after = trajstore.open(twin_url), trajstore.open(url)
    assert before.episodes["priority.sum"].tolist() == after.episodes["priority.sum"].tolist()
    readers = [trajstore.Reader(store, seed=3, priorities=options["priorities"]) for store in (before, after)]
    drawn = [reader.sample(64, WINDOWS)["action"].tolist() for reader in readers]
    assert drawn[0] == drawn[1]
    assert verify(url).is_clean


def test_a_limit_in_bytes_measures_the_packed_objects(url: str) -> None:
    earlier_session(url)
    buffer = new_buffer(url, capacity=Retention(bytes="1GiB"))
    fill(buffer, 10)
    pack(url, fsync=False)
    buffer.refresh()
    report = buffer.storage_report()
    assert report.steps > 0
    assert report.evicted > report.steps / 2  # the originals, which nothing needs
    remove_replaced(buffer.store.snapshot.storage, 0)
    with buffer._session.reader.assembler.lock:
        n_bytes = buffer._session.step_bytes()
    sizes = buffer.store.snapshot.storage.tree_sizes("streams")
    expected = sum(n for key, n in sizes.items() if "/steps/" in key and not key.endswith("zarr.json"))
    assert n_bytes == pytest.approx(expected, abs=2)
    assert buffer.storage_report().steps == expected
    buffer.close()
