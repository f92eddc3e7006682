"""The version of the cache: facts that were read from it hold until the version rises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sampling.test_batch_iterator import open_store
from trajstore import Reader, ReplayBuffer, Windows
from trajstore.cache.chunk_cache import ChunkCache


def cache_of(buffer: Any) -> ChunkCache:
    """The cache of a reader or a buffer."""
    reader: Reader = buffer if isinstance(buffer, Reader) else buffer._session.reader
    return reader.assembler.cache


def facts(cache: ChunkCache) -> dict[str, Any]:
    """What users of the cache may keep while the version stays the same."""
    return {
        path: (
            id(column),
            column.arena.data_ptr,
            column.table.slot_of_page.data_ptr,
            column.table.first_virtual_row.data_ptr,
            column.table.is_complete,
            column.table.is_direct,
        )
        for path, column in cache._columns.items()
    }


STEP = {"obs": np.zeros(16, np.float32), "action": np.int64(1)}


def act(buffer: ReplayBuffer, action: str, cache_bytes: int) -> None:
    if action in ("append", "evict"):
        for t in range(40):
            buffer.append(STEP, terminated=t == 39)
    if action == "evict":
        buffer.evict(1)
    elif action == "sample":
        buffer.sample(8, Windows(3))
    elif action == "flush":
        buffer.flush()
    elif action == "resize":
        buffer._session.reader.resize(cache_bytes=cache_bytes)


@settings(max_examples=15, deadline=None)
@given(
    actions=st.lists(st.sampled_from(["append", "sample", "flush", "resize", "evict"]), min_size=5, max_size=25),
    cache_bytes=st.sampled_from([4_000, 60_000, 1 << 26]),
)
def test_facts_hold_while_the_version_stays_the_same(
    tmp_path_factory: pytest.TempPathFactory, actions: list[str], cache_bytes: int
) -> None:
    root, known = tmp_path_factory.mktemp("run"), dict[int, Any]()
    with ReplayBuffer(root, capacity=500, cache_bytes=cache_bytes, buffer_bytes=20_000) as buffer:
        act(buffer, "append", 0)
        act(buffer, "sample", 0)
        for i, action in enumerate(actions):
            act(buffer, action, cache_bytes // (1 + i % 3))
            cache = cache_of(buffer)
            assert known.setdefault(cache.version, facts(cache)) == facts(cache)


@pytest.mark.parametrize("cache_bytes", [1 << 20, 400])
def test_drawing_batches_does_not_change_the_version(cache_bytes: int) -> None:
    store, _ = open_store([4] * 200)
    reader = Reader(store, cache_bytes=cache_bytes)
    for _ in range(200):
        reader.sample(32, Windows(2))
    version, misses = cache_of(reader).version, reader.stats()["misses"]
    for _ in range(5):
        reader.sample(32, Windows(2))
    assert cache_of(reader).version == version
    assert (reader.stats()["misses"] > misses) == (cache_bytes == 400)


def test_appending_does_not_change_the_version(tmp_path: Path) -> None:
    with ReplayBuffer(tmp_path, commit_seconds=None) as buffer:
        step = {"obs": np.zeros(2, np.float32)}
        versions = set()
        for _ in range(50):
            buffer.append(step)
            buffer.sample(4, Windows(1))
            versions.add(cache_of(buffer).version)
        assert len(versions) == 1
