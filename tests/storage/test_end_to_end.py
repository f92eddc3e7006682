"""The life of a store on each kind of cloud: written, sampled, resumed, shared, killed, evicted, copied, packed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

import trajstore
from tests.conftest import Place
from tests.support import numbered
from tests.support.numbered import LENGTH, SCHEMA, Target, assert_episodes, assert_windows, episode, wait_until
from tests.support.proxy import RESET, Hold, Proxy
from tests.support.servers.process import Server
from trajstore import Batch, ReplayBuffer, Windows
from trajstore.store.verify import verify

pytestmark = pytest.mark.parametrize("kind", ["s3", "gcs", "azure"])

SMALL = {"cache_bytes": "1MiB", "buffer_bytes": "1MiB", "commit_seconds": None, "sample": Windows(length=LENGTH)}


@pytest.fixture
def place(kind: str, new_place: Callable[[str], Place]) -> Place:
    return new_place(kind)


@pytest.fixture
def target(place: Place) -> Target:
    trajstore.create(place.url, SCHEMA, **place.kwargs)
    return Target(place.url, place.options)


@pytest.fixture
def proxy(kind: str, server: Callable[[str], Server]) -> Iterator[Proxy]:
    proxy = Proxy(server(kind).endpoint)
    yield proxy
    proxy.close()


def fill(buffer: ReplayBuffer, *numbers: int) -> None:
    for number in numbers:
        buffer.add_episode(episode(0, number), terminated=True)
    buffer.flush()


def assert_same(batch: Batch, other: Batch) -> None:
    assert batch.keys() == other.keys()
    for name in ("observation", "pixels", "action", "index"):
        np.testing.assert_array_equal(batch[name], other[name])


def assert_clean(target: Target) -> None:
    assert verify(target.url, storage_options=target.options).problems == []


def test_a_run_is_sampled_saved_evicted_and_resumed(target: Target) -> None:
    options = SMALL | {"schema": SCHEMA, "storage_options": target.options}
    with ReplayBuffer(target.url, capacity=60, seed=3, grace_s=0, **options) as buffer:
        fill(buffer, *range(4))
        assert_windows(buffer.sample(32))
        buffer.save_checkpoint("early", wait=True)
        expected = [buffer.sample(16) for _ in range(2)]
        fill(buffer, *range(4, 16))
        assert buffer.evict(1) > 0
        assert buffer.n_steps < 60
        batch = buffer.sample(32)
        assert_windows(batch)
        assert batch["observation"][..., 1].min() > 0
    with ReplayBuffer.resume(target.url, "early", storage_options=target.options) as again:
        for batch in expected:
            assert_same(again.sample(16), batch)
        fill(again, *range(4, 6))
        assert_windows(again.sample(64))
    assert_clean(target)


def test_a_reader_sees_each_commit_at_its_refresh(target: Target) -> None:
    store = target.open()
    with target.open().writer(commit_seconds=None) as writer:
        for n in range(1, 4):
            numbered.append(writer, n - 1, 0)
            assert len(store) == n - 1
            writer.commit()
            store.refresh()
            assert assert_episodes(store) == {0: n}


def test_a_store_is_copied_and_packed(target: Target, place: Place) -> None:
    for name in range(2):
        with target.open().writer(f"writer{name}", commit_seconds=None) as writer:
            for number in range(6):
                numbered.append(writer, number, name)
                writer.commit()
    url = f"{place.url}-copy"
    copied = trajstore.copy(place.url, url, storage_options=place.options, target_options=place.options)
    assert assert_episodes(copied) == {0: 6, 1: 6}
    copy = Target(url, place.options)
    report = trajstore.pack(url, codecs={"pixels": "zstd:5"}, storage_options=place.options, wait=True, grace_s=0)
    assert report.removed
    for each in (target, copy):
        assert assert_episodes(each.open()) == {0: 6, 1: 6}
        assert_clean(each)


def test_writers_and_readers_in_processes_share_a_store(target: Target) -> None:
    calls = [(numbered.write_for, target, name, 1.0) for name in range(2)]
    counts = numbered.call_all(*calls, (numbered.read_for, target, 7, 1.5), (numbered.read_for, target, 8, 1.5))
    assert assert_episodes(target.open()) == dict(enumerate(counts[:2]))
    assert min(counts) > 0
    assert_clean(target)


@pytest.mark.parametrize("n_puts", [0, 2])
def test_a_writer_killed_in_a_wave_of_puts_leaves_what_it_committed(
    target: Target, proxy: Proxy, kind: str, server: Callable[[str], Server], n_puts: int
) -> None:
    """So many puts of a wave reach the server, the others do not, and the writer is killed with SIGKILL."""
    behind = Target(target.url, server(kind).options_at(proxy.endpoint))
    committed, held = numbered.shared_count(), Hold(n_puts, "PUT")
    writer = numbered.start(numbered.write_forever, behind, 0, committed)
    try:
        wait_until(lambda: committed.value >= 2)
        proxy.plan = held
        held.wait()
        writer.kill()
        writer.join()
    finally:
        writer.kill()
        held.release(RESET)
    store = target.open()
    assert assert_episodes(store) == {0: committed.value}
    with store.writer("writer0", commit_seconds=None) as second:
        numbered.append(second, 0, 1)
    store.refresh()
    assert assert_episodes(store) == {0: committed.value, 1: 1}
    assert_clean(target)
