"""The life of a store on each kind of cloud: written, sampled, resumed, shared, killed, evicted, copied, packed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import trajstore
from tests.conftest import Place
from tests.support import numbered
from tests.support.numbered import LENGTH, SCHEMA, Target, assert_episodes, assert_windows, episode, wait_until
from tests.support.proxy import RESET, Hold, Proxy
from tests.support.servers.process import Server
from trajstore import Batch, ReplayBuffer, Windows
from trajstore.credentials import secrets_of
from trajstore.storage import open_storage
from trajstore.store.verify import verify

# By hand also on another server of S3, and on GCS by the other transport.
IS_LONG = bool(os.environ.get("TRAJSTORE_ALL_SERVER_TESTS"))
KINDS = ["s3", "gcs", "azure", *(["seaweedfs", "gcs by obstore"] if IS_LONG else [])]
pytestmark = pytest.mark.parametrize("kind", KINDS)

SMALL = {"cache_bytes": "1MiB", "buffer_bytes": "1MiB", "commit_seconds": None, "sample": Windows(length=LENGTH)}


@pytest.fixture
def service(kind: str, server: Callable[[str], Server]) -> Server:
    return server(kind.partition(" ")[0])


def options_at(kind: str, service: Server, endpoint: str) -> dict[str, Any]:
    return {**service.options_at(endpoint), **({"transport": "obstore"} if kind.endswith("by obstore") else {})}


@pytest.fixture
def place(kind: str, service: Server) -> Place:
    return Place(service.new_url(), options_at(kind, service, service.endpoint))


@pytest.fixture
def target(place: Place) -> Target:
    trajstore.create(place.url, SCHEMA, **place.kwargs)
    return Target(place.url, place.options)


@pytest.fixture
def proxy(service: Server) -> Iterator[Proxy]:
    proxy = Proxy(service.endpoint)
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
    assert_no_secrets(target)


def assert_no_secrets(target: Target) -> None:
    """No object holds anything that was given as a credential."""
    storage = open_storage(target.url, target.options)
    keys = storage.list_tree("")
    secrets = [secret.encode() for secret in secrets_of("", target.options)]
    assert secrets or target.url.startswith("gs")
    assert len(keys) > 20
    for data in storage.get_many(keys):
        assert not any(secret in data for secret in secrets)


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
    target: Target, proxy: Proxy, kind: str, service: Server, n_puts: int
) -> None:
    """So many puts of a wave reach the server, the others do not, and the writer is killed with SIGKILL."""
    behind = Target(target.url, options_at(kind, service, proxy.endpoint))
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
