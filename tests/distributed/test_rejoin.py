"""A rank that died alone comes back; and ranks on S3, which reach each other through the store."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

import trajstore
from tests.conftest import Place
from tests.replay.test_buffer import crash
from trajstore import Field, Priorities, RankError, ReplayBuffer, Schema, Windows
from trajstore.store import checkpoints
from trajstore.store.verify import verify

T = TypeVar("T")
SCHEMA = Schema({"obs": Field("float32", (2,)), "reward": Field("float32")})
OPTIONS: dict[str, Any] = {
    "sample": Windows(length=2, provenance=True),
    "priorities": Priorities(),
    "commit_seconds": None,
    "cache_bytes": "32MiB",
    "buffer_bytes": "1MiB",
    "rank_timeout_s": 20.0,
    "grace_s": 0.0,
    "attend_s": 0.05,
}


def on_all(n: int, action: Callable[[int], T]) -> list[T]:
    with ThreadPoolExecutor(n) as threads:
        return list(threads.map(action, range(n)))


def fill(buffer: ReplayBuffer, first: int, n: int = 5, length: int = 8) -> None:
    """Episodes whose observations say which they are: 1000 times the rank, and a number."""
    for number in range(first, first + n):
        obs = np.full((length, 2), 1000 * buffer.rank + number, np.float32)
        buffer.add_episode({"obs": obs, "reward": np.arange(length, dtype=np.float32)}, terminated=True)


def shown(buffer: ReplayBuffer) -> dict[int, int]:
    """By number of an episode, its steps."""
    found: dict[int, int] = {}
    for block in buffer.read_all_in_order():
        for number in block["obs"][:, 0].int().tolist():
            found[number] = found.get(number, 0) + 1
    return found


@pytest.fixture
def ranks(url: str) -> Iterator[list[ReplayBuffer]]:
    """Two ranks with five episodes each, all committed."""
    buffers = on_all(2, lambda r: ReplayBuffer(url, schema=SCHEMA, rank=r, world_size=2, fsync=False, **OPTIONS))
    for buffer in buffers:
        fill(buffer, 0)
        buffer.flush()
    yield buffers
    for buffer in buffers:
        with contextlib.suppress(Exception):
            buffer.close()


def rejoin(url: str, rank: int, **options: Any) -> ReplayBuffer:
    return ReplayBuffer.rejoin(url, rank=rank, world_size=2, fsync=False, **options)


@pytest.mark.parametrize("rank", [0, 1])
def test_all_that_was_committed_is_back_and_what_was_open_is_cut(
    url: str, ranks: list[ReplayBuffer], rank: int
) -> None:
    lost = ranks[rank]
    lost.append({"obs": np.full(2, 77, np.float32), "reward": np.float32(0)}, env=3)
    lost.flush()
    expected = shown(lost)
    lost.append({"obs": np.full(2, 88, np.float32), "reward": np.float32(0)}, env=3)  # not durable
    crash(lost)
    ranks[rank] = back = rejoin(url, rank, **OPTIONS)
    assert shown(back) == expected
    assert back.world == ranks[1 - rank].world
    store = trajstore.open(url)
    ends = dict(zip(store.episodes["length"].tolist(), store.episodes["end"].tolist(), strict=True))
    assert ends[1] == "cut"
    assert shown(ranks[1 - rank]) == {1000 * (1 - rank) + number: 8 for number in range(5)}


@pytest.mark.parametrize("rank", [0, 1])
def test_checkpoints_of_all_ranks_go_on_after_one_came_back(url: str, ranks: list[ReplayBuffer], rank: int) -> None:
    first = on_all(2, lambda r: ranks[r].save_checkpoint("a", wait=True))
    asked = ranks[1 - rank].request_checkpoint("asked", wait=True, timeout_s=60)
    crash(ranks[rank])
    ranks[rank] = rejoin(url, rank)
    for buffer in ranks:
        fill(buffer, 100)
    again = on_all(2, lambda r: ranks[r].save_checkpoint("a", wait=True))
    assert len(set(again)) == 1
    assert again[0] != first[0]
    late = ranks[rank].request_checkpoint("asked", wait=True, timeout_s=60)
    assert [c.id for c in ranks[0].checkpoints] == [first[0], asked, again[0], late]
    assert [c.parent for c in ranks[0].checkpoints] == [None, first[0], asked, again[0]]
    for buffer in ranks:
        buffer.close()
    with ReplayBuffer.resume(url, late) as one:
        assert len(shown(one)) == 20


def test_priorities_are_those_of_the_last_checkpoint_and_later_steps_are_new(
    url: str, ranks: list[ReplayBuffer]
) -> None:
    batch = ranks[1].sample(64)
    ranks[1].update_priorities(batch["index"], torch.full((64,), 0.25))
    on_all(2, lambda r: ranks[r].save_checkpoint("a", wait=True))
    fill(ranks[1], 50, n=2)
    ranks[1].flush()
    ranks[1].sample(4)
    table = ranks[1].reader.priority_sampler
    assert table is not None
    expected = table.priority_column.of_steps().sort().values
    crash(ranks[1])
    ranks[1] = rejoin(url, 1)
    ranks[1].sample(4)
    found = ranks[1].reader.priority_sampler
    assert found is not None
    assert torch.equal(found.priority_column.of_steps().sort().values, expected)
    assert len(shown(ranks[1])) == 7


def test_storage_is_freed_behind_a_rank_that_came_back(url: str, ranks: list[ReplayBuffer]) -> None:
    old = ranks[1].stream
    crash(ranks[1])
    ranks[1] = rejoin(url, 1, **OPTIONS)
    ranks[1].clear()
    ranks[1].session.collector.flush()
    ranks[1].session.collector.flush()
    store = trajstore.open(url)
    assert old not in {record.id for record in store.streams} or not store.snapshot.storage.list_names(
        f"streams/{old}/steps/obs/c.0.0"
    )
    assert shown(ranks[0]) == dict.fromkeys(range(5), 8)
    rows = [episode["length"] for episode in store.episodes if episode["stream"] == old]
    assert rows == []


@pytest.mark.parametrize("share", ["partition", "whole"])
def test_evicted_rows_stay_evicted_when_both_ranks_come_back_one_after_the_other(url: str, share: str) -> None:
    """The rank that came back first has named the other's stream, and never hears of later evictions there."""
    fields = {name: replace(field, chunk_rows=8) for name, field in SCHEMA.fields.items()}
    options = OPTIONS | {"schema": Schema(fields), "share": share, "world_size": 2, "fsync": False}
    ranks = on_all(2, lambda r: ReplayBuffer(url, rank=r, **options))
    for buffer in ranks:
        fill(buffer, 0)
    on_all(2, lambda r: ranks[r].save_checkpoint("a", wait=True))
    crash(ranks[0])
    ranks[0] = rejoin(url, 0)
    fill(ranks[1], 100)
    ranks[1].flush()
    ranks[1].clear()
    fill(ranks[1], 200, n=1)
    ranks[1].flush()
    checkpoints.remove(trajstore.open(url).snapshot.storage, ranks[0].checkpoints[0].id)
    ranks[1].session.collector.flush()
    crash(ranks[1])
    ranks[1] = rejoin(url, 1, **OPTIONS, share=share)
    fill(ranks[1], 300, n=1)
    ranks[1].flush()
    assert verify(url).problems == []
    store = trajstore.open(url)
    numbers = {int(store.read_episode(i)["obs"][0, 0]) for i in range(len(store))}
    assert numbers >= {1200, 1300}
    assert not numbers & {*range(1000, 1005), *range(1100, 1105)}
    for buffer in ranks:
        buffer.close()


def test_who_never_was_there_can_not_come_back(url: str, ranks: list[ReplayBuffer]) -> None:
    with pytest.raises(RankError, match="no world of 3 ranks that rank 2 has joined through the store"):
        ReplayBuffer.rejoin(url, rank=2, world_size=3)
    with pytest.raises(RankError, match="no world 'world-none'"):
        ReplayBuffer.rejoin(url, rank=1, world_size=2, world="world-none")
    with pytest.raises(ValueError, match="rank: expected less than the world_size 2, got 2"):
        ReplayBuffer.rejoin(url, rank=2, world_size=2)


@pytest.mark.s3
def test_ranks_on_s3_save_together_and_another_number_of_them_continues(new_place: Callable[[str], Place]) -> None:
    place = new_place("s3")
    options = {**OPTIONS, **place.kwargs}
    buffers = on_all(2, lambda r: ReplayBuffer(place.url, schema=SCHEMA, rank=r, world_size=2, **options))
    for buffer in buffers:
        fill(buffer, 0)
    ids = on_all(2, lambda r: buffers[r].save_checkpoint("a", wait=True))
    asked = buffers[1].request_checkpoint("asked", wait=True, timeout_s=60)
    assert asked != ids[0] == ids[1]
    for buffer in buffers:
        buffer.close()
    plan = trajstore.redistribute(place.url, world_size=3, **place.kwargs)
    resumed = on_all(3, lambda r: ReplayBuffer.resume(place.url, rank=r, world_size=3, **place.kwargs))
    found = [shown(buffer) for buffer in resumed]
    assert [sum(each.values()) for each in found] == [counts["steps"] for counts in plan.report.ranks]
    assert sorted(number for each in found for number in each) == sorted([*range(5), *range(1000, 1005)])
    for buffer in resumed:
        buffer.close()
