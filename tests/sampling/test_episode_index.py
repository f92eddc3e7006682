"""The episode index: followed step by step it shows what one made at once shows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import trajstore
from tests.sampling.test_reader import schema
from trajstore.format.spans import VisibleSpans
from trajstore.sampling.index.episode_index import EpisodeIndex
from trajstore.sampling.index.snapshot_follower import SnapshotFollower
from trajstore.sampling.rng import CounterRng
from trajstore.sampling.window_starts import WindowStarts
from trajstore.sampling.windows import Windows
from trajstore.store.snapshot import Snapshot

CPU = torch.device("cpu")
SPECS = (
    Windows(length=3),
    Windows(length=4, boundary="pad_both", stride=2),
    Windows(length=2, boundary="pad_right", n_step=2),
    Windows(length=5, boundary="short"),
    Windows(length=3, boundary="cross"),
    Windows(length=2, weight="episode"),
)


class Evicted:
    """A snapshot of which rows below some marks were evicted."""

    def __init__(self, snapshot: Snapshot, marks: dict[str, int]) -> None:
        self._snapshot = snapshot
        self._marks = marks
        self.names, self.streams = snapshot.names, snapshot.streams

    def parts(self) -> list[VisibleSpans]:
        ids = [record.id for record in self.streams]
        return [
            replace(part, first_row=min(self._marks.get(name, 0), len_rows(part)))
            for name, part in zip(ids, self._snapshot.parts(), strict=True)
        ]


def len_rows(part: VisibleSpans) -> int:
    return int(part.spans.ints[-1, 4]) if len(part.spans) else 0


def contents(index: EpisodeIndex) -> dict[tuple[int, int], tuple[Any, ...]]:
    """Everything that an index says of its episodes, by stream and episode."""
    found = {}
    for entry in range(index.first, index.n):
        key = int(index.stream.host[entry]), int(index.episode.host[entry])
        n_rows = int(index.logical.host[entry + 1] - index.logical.host[entry])
        rows = index.rows(torch.tensor([entry]), torch.arange(n_rows)[None])
        places = torch.stack([rows.source.expand(rows.row.shape), rows.row]).tolist()
        facts = int(index.flags.host[entry]), int(index.t_base.host[entry]), int(index.env.host[entry])
        found[key] = (*facts, places)
        assert int(index.find(np.array([key[0]]), np.array([key[1]]))[0]) == entry
    return found


def drawable(starts: WindowStarts, index: EpisodeIndex) -> set[tuple[int, int, int]]:
    """Every window that can be drawn, by handle."""
    starts.update()
    draw = starts.locate(torch.arange(starts.total), CounterRng(0))
    stream, episode = index.stream.device[draw.entry], index.episode.device[draw.entry]
    t = index.t_base.device[draw.entry] + draw.start
    if starts.windows.weight != "window":
        t = torch.zeros_like(t)  # which start is drawn depends on the order of arrival
    return set(zip(stream.tolist(), episode.tolist(), t.tolist(), strict=True))


def write_some(writer: trajstore.Writer, rng: np.random.Generator, n: int) -> None:
    for _ in range(n):
        env = int(rng.integers(3))
        step = {"obs": np.zeros(2, np.float32), "action": 0, "reward": 0.0}
        end = rng.choice(["", "", "", "terminated", "truncated"])
        has_final = bool(end) and bool(rng.integers(2))
        final = {"obs": np.zeros(2, np.float32)} if has_final else None
        writer.append(step, env=env, final=final, **({end: True} if end else {}))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(0, 1 << 30), st.lists(st.tuples(st.integers(0, 12), st.booleans(), st.integers(0, 3)), max_size=8)
)
def test_an_index_that_follows_evictions_equals_one_made_at_once(
    seed: int, rounds: list[tuple[int, bool, int]]
) -> None:
    rng = np.random.default_rng(seed)
    store = trajstore.create(f"memory://index-{np.random.default_rng().integers(1 << 60)}", schema((4, 4, 4)))
    writers = [store.writer(f"w{i}", commit_seconds=None) for i in range(2)]
    index = EpisodeIndex(CPU)
    follower = SnapshotFollower(index)
    starts = {spec: WindowStarts(index, spec, False) for spec in SPECS}
    marks: dict[str, int] = {}
    for n, both, evict in rounds:
        for writer in writers[: 1 + both]:
            write_some(writer, rng, n)
            writer.commit()
        snapshot = store.refresh()
        for record in snapshot.streams:
            marks[record.id] = min(record.rows, marks.get(record.id, 0) + int(rng.integers(0, 4 * evict + 1)))
        seen: Any = Evicted(snapshot, marks)
        follower.follow(seen)
        fresh = EpisodeIndex(CPU)
        SnapshotFollower(fresh).follow(seen)
        assert contents(index) == contents(fresh)
        for spec, followed in starts.items():
            anew = WindowStarts(fresh, spec, False)
            assert drawable(followed, index) == drawable(anew, fresh)
            if spec.weight == "window":
                assert followed.total == anew.total
    for writer in writers:
        writer.release()


def test_evicted_entries_are_compacted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trajstore.sampling.index.episode_index._MIN_DEAD", 4)
    store = trajstore.create("memory://index-compacts", schema((4, 4, 4)))
    writer = store.writer(commit_seconds=None)
    index = EpisodeIndex(CPU)
    follower = SnapshotFollower(index)
    spec = Windows(length=2)
    starts = WindowStarts(index, spec, False)
    data = {"obs": np.zeros((3, 2), np.float32), "action": np.arange(3), "reward": np.zeros(3, np.float32)}
    n_compactions = version = 0
    for i in range(60):
        writer.append_episode(data, terminated=True)
        writer.commit()
        snapshot = store.refresh()
        seen: Any = Evicted(snapshot, {snapshot.streams[0].id: max(0, 3 * i - 10)})
        follower.follow(seen)
        removals = index.changes.removals_since(version)
        assert removals is not None
        n_compactions, version = n_compactions + sum(r.is_renumbered for r in removals), index.version
        assert len(contents(index)) == min(i + 1, 5)
        assert index.n <= 16
        assert len(drawable(starts, index)) == starts.total
    assert n_compactions > 3
    writer.close()


def test_an_eviction_touches_only_the_front(monkeypatch: pytest.MonkeyPatch) -> None:
    store = trajstore.create("memory://index-front", schema((4, 4, 4)))
    data = {"obs": np.zeros((3, 2), np.float32), "action": np.arange(3), "reward": np.zeros(3, np.float32)}
    with store.writer(commit_seconds=None) as writer:
        for _ in range(100):
            writer.append_episode(data, terminated=True)
    snapshot = store.refresh()
    index = EpisodeIndex(CPU)
    follower = SnapshotFollower(index)
    follower.follow(snapshot)
    starts = WindowStarts(index, Windows(length=2), False)
    starts.update()
    seen: Any = Evicted(snapshot, {snapshot.streams[0].id: 8})
    version = index.version
    follower.follow(seen)
    removals = index.changes.removals_since(version)
    assert removals is not None
    assert [(r.n_rewritten, r.is_renumbered) for r in removals] == [(3, False)]
    assert [r.ranges.tolist() for r in removals] == [[[0, 0, 0, 3], [0, 1, 0, 3], [0, 2, 0, 2]]]
    assert index.first == 2
    summed: list[tuple[int, int]] = []
    real = WindowStarts._units
    monkeypatch.setattr(WindowStarts, "_units", lambda self, a, b: (summed.append((a, b)), real(self, a, b))[1])
    starts.update()
    assert summed == [(0, 3), (100, 100)]


def test_episodes_of_outlandish_numbers_take_no_memory_for_the_gaps() -> None:
    index = EpisodeIndex(CPU)
    index.number_of("s")
    index.stream.rewrite(0, np.zeros(3, np.int32))
    index.episode.rewrite(0, np.array([5, 1 << 60, 7]))
    index.n = 3
    index._register(0)
    assert index.find(np.zeros(4, np.int64), np.array([7, 1 << 60, 5, 6])).tolist() == [2, 1, 0, -1]
    assert index.nbytes < 10_000
