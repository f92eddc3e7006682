"""Eviction and pruning of stores that nobody writes: by marks and sweeps, and only of what nobody needs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trajstore
from tests.conftest import Place
from tests.store.test_checkpoints import SCHEMA, saved, shown, steps
from tests.support.faulty import real_storage
from tests.support.sharding import mark, read_record
from trajstore.errors import CheckpointNotFoundError, ConflictError
from trajstore.store.evicting import evict
from trajstore.store.packing import pack
from trajstore.store.pruning import prune
from trajstore.store.verify import verify

MakePlace = Callable[[str], Place]


@pytest.fixture
def root(new_place: MakePlace) -> str:
    return new_place("local").url


def fill(url: str, n_streams: int = 2, n_episodes: int = 10, length: int = 8) -> trajstore.Store:
    """Streams of some episodes each, one after the other."""
    store = trajstore.create(url, SCHEMA, fsync=False)
    for s in range(n_streams):
        with store.writer(f"w{s}", commit_seconds=None) as writer:
            for i in range(n_episodes):
                writer.append_episode(steps(length, 100 * s + i, n_final=1), terminated=True)
                writer.commit()
    store.refresh()
    return store


def lengths(url: str) -> list[int]:
    return list(trajstore.open(url).episodes["length"].tolist())


def test_the_oldest_steps_are_evicted_and_their_objects_deleted(root: str) -> None:
    store = fill(root)
    whole = shown(store)
    n_objects = len(real_storage(root).list_tree("streams"))
    report = evict(root, steps=100, grace_s=0)
    assert (report.n_steps, report.n_episodes, report.n_headless) == (60, 7, 1)
    assert lengths(root) == [4, 8, 8, *[8] * 10]
    assert report.n_chunks_deleted > 10
    assert len(real_storage(root).list_tree("streams")) < n_objects + 20
    assert verify(root).problems == []
    found = shown(trajstore.open(root))
    assert all(whole[key] == found[key] for key in list(found)[1:])
    again = evict(root, steps=100, grace_s=0)
    assert (again.n_steps, again.marks) == (0, {})
    evict(root, steps=60, grace_s=0)
    assert sum(lengths(root)) == 60
    assert verify(root).problems == []


@pytest.mark.parametrize(
    ("limit", "left"),
    [
        ({"episodes": 7}, 7),
        ({"episodes": 12}, 12),
        ({"bytes": "2KiB"}, None),
        ({"age_s": 1e6}, 20),
        ({"steps": 1}, 1),
    ],
)
def test_each_limit_is_kept(root: str, limit: dict[str, Any], left: int | None) -> None:
    fill(root)
    before = real_storage(root).tree_sizes("")
    expected = evict(root, **limit, dry_run=True)
    assert real_storage(root).tree_sizes("") == before
    report = evict(root, **limit, grace_s=0)
    assert (report.n_steps, report.n_episodes, report.marks) == (
        expected.n_steps,
        expected.n_episodes,
        expected.marks,
    )
    n = lengths(root)
    assert len(n) == (left if left is not None else len(n))
    assert 160 - sum(n) == report.n_steps
    if left is None:
        assert 0 < len(n) < 20
    assert verify(root).problems == []


def test_steps_older_than_an_age_are_evicted(root: str) -> None:
    fill(root, n_streams=1, n_episodes=3)
    time.sleep(0.3)
    with trajstore.open(root, fsync=False).writer("later") as writer:
        writer.append_episode(steps(5, 1), terminated=True)
    evict(root, age_s=0.25, grace_s=0)
    assert lengths(root) == [5]


def test_rows_of_checkpoints_stay_stored_and_earlier_marks_stay(root: str) -> None:
    store = fill(root)
    saved(real_storage(root), "kept")
    evict(root, episodes=12, grace_s=0)
    evict(root, episodes=8, grace_s=0)
    assert lengths(root) == [8] * 8
    assert shown(trajstore.open(root, at="kept")) == shown(store)
    assert verify(root).problems == []
    prune(root, names=["kept"], grace_s=0)
    assert verify(root).problems == []
    assert len(trajstore.open(root).streams) < 4
    assert lengths(root) == [8] * 8


def test_a_store_of_several_ranks_is_evicted_and_continued(root: str) -> None:
    with trajstore.ReplayBuffer(root, commit_seconds=None, checkpoint_seconds=None) as buffer:
        for i in range(10):
            buffer.add_episode(steps(8, i), terminated=True)
        buffer.save_checkpoint("c", wait=True)
    evict(root, episodes=4, grace_s=0)
    with trajstore.ReplayBuffer(root, exist="join", commit_seconds=None) as buffer:
        assert buffer.n_episodes == 4
        buffer.add_episode(steps(8, 1), terminated=True)
    assert len(lengths(root)) == 5
    with trajstore.ReplayBuffer.resume(root, "c", commit_seconds=None) as buffer:
        assert buffer.n_episodes == 10
    assert verify(root).problems == []


def test_a_store_that_is_written_is_refused_with_the_reason(root: str) -> None:
    store = fill(root)
    writer = store.writer("live", commit_seconds=None)
    writer.append_episode(steps(5, 1), terminated=True)
    writer.commit()
    with pytest.raises(ConflictError, match=r"stream 'live-.*seems to be written.*its last commit was \d+ s ago"):
        evict(root, steps=10, grace_s=0)
    report = prune(root, grace_s=0)
    assert "seems to be written now" in report.kept[0]
    writer.release()
    time.sleep(0.05)
    assert evict(root, steps=10, grace_s=0, idle_s=0.01).n_steps == 155
    assert sum(lengths(root)) == 10


@pytest.mark.parametrize("limits", [{}, {"steps": 0}, {"age_s": -1.0}, {"bytes": "many"}])
def test_impossible_limits_are_refused(root: str, limits: dict[str, Any]) -> None:
    fill(root, 1, 1)
    with pytest.raises(ValueError, match=r"expected|steps|bytes"):
        evict(root, **limits)


# ---- prune -----------------------------------------------------------------------------------------------


def kinds(report: Any) -> list[str]:
    return sorted({one.kind for one in report.removed})


def test_a_store_with_nothing_to_prune_stays_as_it_is(root: str) -> None:
    fill(root)
    saved(real_storage(root), "c")
    before = real_storage(root).tree_sizes("")
    report = prune(root, grace_s=0)
    assert (report.removed, report.kept) == ((), ())
    assert real_storage(root).tree_sizes("") == before


def test_old_checkpoints_go_by_number_and_name(root: str) -> None:
    fill(root)
    for name in ("a", "b", "c", "d"):
        saved(real_storage(root), name)
    plan = prune(root, keep_last=2, names=["c"], dry_run=True)
    assert kinds(plan) == ["checkpoint"]
    assert [one.name.split("-")[0] for one in plan.removed] == ["a", "b", "c"]
    assert plan.n_bytes > 100
    assert len(trajstore.open(root).checkpoints) == 4
    prune(root, keep_last=2, names=["c"], grace_s=0)
    assert [c.name for c in trajstore.open(root).checkpoints] == ["d"]
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint 'never'; the store has d"):
        prune(root, names=["never"])
    with pytest.raises(ValueError, match="keep_last"):
        prune(root, keep_last=0)


def test_leftovers_replaced_originals_and_evicted_rows_go(root: str) -> None:
    store = fill(root)
    whole = shown(store)
    assert pack(root).packed
    folder = Path(root)
    (folder / "scratch" / "tmp123").write_bytes(b"x" * 77)
    first = store.streams[0].id
    packed = next(r for r in trajstore.open(root).snapshot.stored if r.replaces and r.replaces.stream == first)
    past = folder / packed.folder / "steps/reward/c.99"
    past.write_bytes(b"y" * 5)
    plan = prune(root, dry_run=True)
    assert kinds(plan) == ["replaced stream", "temporary files", "unfinished commit"]
    assert sum(one.n_bytes for one in plan.removed if one.kind == "temporary files") == 77
    prune(root, grace_s=0)
    assert verify(root).problems == []
    assert verify(root).notes == []
    assert shown(trajstore.open(root)) == whole
    assert len(trajstore.open(root).snapshot.stored) == 2


def test_evicted_rows_that_a_session_did_not_delete_go(root: str) -> None:
    store = fill(root, n_streams=1)
    id_ = store.streams[0].id
    mark(Path(root), read_record(Path(root), id_), first_row=30)
    plan = prune(root, dry_run=True)
    assert kinds(plan) == ["evicted rows"]
    prune(root, grace_s=0)
    assert prune(root, dry_run=True).removed == ()
    assert verify(root).problems == []
    assert verify(root).notes == []


def test_abandoned_streams_go_only_on_request(root: str) -> None:
    episode = {"x": np.arange(20), "reward": np.ones(20)}
    with trajstore.ReplayBuffer(root, commit_seconds=None, checkpoint_seconds=None) as buffer:
        buffer.add_episode(episode, terminated=True)
        buffer.save_checkpoint("c", wait=True)
    with trajstore.ReplayBuffer.resume(root, "c", commit_seconds=None) as buffer:
        buffer.add_episode(episode, terminated=True)
        lost = buffer.stats() and buffer.n_steps
    with trajstore.ReplayBuffer.resume(root, "c", commit_seconds=None) as buffer:
        buffer.add_episode(episode, terminated=True)
    assert lost == 40
    assert len(trajstore.open(root).history(abandoned=True)) == 3
    assert "abandoned stream" not in kinds(prune(root, grace_s=0))
    assert len(trajstore.open(root).history(abandoned=True)) == 3
    plan = prune(root, abandoned=True, dry_run=True)
    assert kinds(plan) == ["abandoned stream"]
    prune(root, abandoned=True, grace_s=0)
    assert len(trajstore.open(root).history(abandoned=True)) == 2
    assert len(trajstore.open(root)) == 2
    assert verify(root).problems == []
    with trajstore.ReplayBuffer.resume(root, "c", commit_seconds=None) as buffer:
        assert buffer.n_steps == 20


def test_streams_without_steps_that_say_nothing_about_others_go(root: str) -> None:
    store = fill(root)
    for limit in (18, 16, 14):
        evict(root, episodes=limit, grace_s=0)
    assert len(trajstore.open(root).streams) == 5
    plan = prune(root, dry_run=True)
    assert [one.kind for one in plan.removed] == ["empty stream"] * 2
    prune(root, grace_s=0)
    assert len(trajstore.open(root).streams) == 3
    assert lengths(root) == [8] * 14
    assert verify(root).problems == []
    assert len(store) == 20
