"""Hindsight: every value of a relabelled batch against a plain reference, and how goals are distributed."""

from __future__ import annotations

import functools
import hashlib
import math
import uuid
from dataclasses import dataclass, replace
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import trajstore
from tests.sampling.test_priorities import Evicted
from tests.sampling.test_reader import ENDS, Episode, chi_square
from tests.store.test_device_sync import NoSync
from trajstore import DataError, Field, Schema, SnapshotExpiredError, Store
from trajstore.sampling.batches.batch_assembler import BatchAssembler
from trajstore.sampling.batches.batch_program import PER_WINDOW_KEYS
from trajstore.sampling.batches.outputs import flat_outputs
from trajstore.sampling.hindsight import GOAL_INDEX, Hindsight
from trajstore.sampling.reader import Reader
from trajstore.sampling.relabelling import Relabeller
from trajstore.sampling.rng import CounterRng
from trajstore.sampling.window_starts import DrawnWindows
from trajstore.sampling.windows import Windows
from trajstore.schema import nest

CPU = torch.device("cpu")
Flat = dict[str, torch.Tensor]
Key = tuple[str, int]  # id of the stream, number of the episode


def reward_of(achieved: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
    """Numbers that float32 holds exactly, also after being summed with powers of a half."""
    return 8.0 - (achieved - goal).abs().sum(-1)


def is_reached(achieved: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
    return (achieved == goal).all(-1)


def achieved_at(episode: Episode, t: int) -> list[float]:
    """Some steps achieve the same, also in other episodes."""
    return [episode.number % 3, t // 2]


def desired_at(episode: Episode, t: int) -> list[float]:
    return [-1 - episode.number, t]


@dataclass(frozen=True)
class Layout:
    """What a store is made of."""

    episodes: tuple[Episode, ...]
    chunk_rows: int
    n_commits: int
    seed: int
    alignment: str
    is_final: bool  # achieved goals have a value after the last step

    def schema(self) -> Schema:
        rows, with_observation = self.chunk_rows, self.alignment == "observation"
        return Schema(
            {
                "obs": Field("float32", (2,), final=True, chunk_rows=rows),
                "goal": {"desired": Field("float32", (2,), final=True, chunk_rows=rows)},
                "achieved": Field("float32", (2,), final=self.is_final, chunk_rows=rows + 1),
                "action": Field("int64", chunk_rows=rows),
                "reward": Field("float32", final=with_observation, chunk_rows=rows + 2),
            },
            reward_alignment=self.alignment,  # type: ignore[arg-type]
        )

    def step(self, episode: Episode, t: int) -> dict[str, Any]:
        return {
            "obs": np.array(episode.obs(t), np.float32),
            "goal": {"desired": np.array(desired_at(episode, t), np.float32)},
            "achieved": np.array(achieved_at(episode, t), np.float32),
            "action": t,
            "reward": np.float32(-100 - t),
        }

    def final(self, episode: Episode) -> dict[str, Any]:
        step = self.step(episode, episode.n)
        dropped = {"action"} | (set() if self.is_final else {"achieved"})
        dropped |= set() if self.alignment == "observation" else {"reward"}
        return {name: value for name, value in step.items() if name not in dropped}

    def write(self) -> tuple[Store, dict[Key, Episode]]:
        """Write the episodes step by step, interleaved over environments of two writers, with commits between."""
        rng = np.random.default_rng(self.seed)
        store = trajstore.create(f"memory://hindsight-{uuid.uuid4().hex}", self.schema())
        writers = [store.writer(f"w{i}", commit_seconds=None) for i in range(2)]
        known: dict[Key, Episode] = {}
        at = [0] * len(self.episodes)
        chance = self.n_commits / sum(e.n for e in self.episodes)
        while left := [i for i, e in enumerate(self.episodes) if at[i] < e.n]:
            i = int(rng.choice(left))
            episode, t, writer = self.episodes[i], at[i], writers[i % 2]
            ends: dict[str, Any] = {}
            if t == episode.n - 1 and episode.end != "open":
                ends = {episode.end: True, "final": self.final(episode) if episode.has_final else None}
            handle = writer.append(self.step(episode, t), env=i, **ends)
            known[handle.stream, handle.episode] = episode
            at[i] += 1
            if rng.random() < chance:
                writer.commit()
        for writer in writers:
            writer.commit()
            writer.release()  # as if it had died: what is open stays open
        store.refresh()
        return store, known


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    episodes = []
    for number in range(draw(st.integers(1, 5))):
        end = draw(st.sampled_from(ENDS))
        has_final = end != "open" and draw(st.sampled_from([True, True, False]))
        episodes.append(Episode(number, draw(st.integers(1, 10)), end, has_final))
    return Layout(
        tuple(episodes),
        draw(st.sampled_from([1, 2, 3, 8])),
        draw(st.integers(0, 4)),
        draw(st.integers(0, 1 << 16)),
        draw(st.sampled_from(["action", "observation"])),
        draw(st.sampled_from([True, True, False])),
    )


@st.composite
def windows(draw: st.DrawFn) -> Windows:
    boundary = draw(st.sampled_from(["strict", "pad_left", "pad_right", "pad_both", "short"]))
    offsets = draw(st.sampled_from([{}, {}, {"reward": (-1, 0, 2)}, {"goal": (-2, 0), "reward": (1,)}]))
    more: dict[str, Any] = {
        "boundary": boundary,
        "pad": draw(st.sampled_from(["repeat", "zero", -7.0])),
        "next_fields": draw(st.sampled_from([(), "final", ("goal", "reward")])),
        "n_step": draw(st.sampled_from([None, 1, 3, (1, 3)])),
        "gamma": 0.5,
        "offsets": offsets,
    }
    if draw(st.sampled_from([False, False, False, True])):
        return Windows(**more, squeeze=True)
    return Windows(
        **more,
        length=draw(st.integers(1, 4)),
        burn_in=draw(st.integers(0, 2)),
        bootstrap=draw(st.integers(0, 2)),
        stride=draw(st.integers(1, 3)),
        strict_context=boundary == "strict" and draw(st.booleans()),
    )


@st.composite
def options(draw: st.DrawFn) -> Hindsight:
    strategy = draw(st.sampled_from(["future", "final", "episode", "random"]))
    return Hindsight(
        strategy,
        fraction=draw(st.sampled_from([1.0, 1.0, 0.5, 0.0])),
        goal="goal/desired",
        achieved="achieved",
        reward=reward_of,
        terminated=draw(st.sampled_from([None, is_reached])),
        geometric=draw(st.sampled_from([None, 0.3])) if strategy == "future" else None,
    )


PLAIN = Hindsight(goal="goal/desired", achieved="achieved", reward=reward_of, fraction=1.0)


class Sampler:
    """Batches of a store with and without hindsight, as a reader makes them."""

    def __init__(self, snapshot: Any, *, cache_bytes: int = 1 << 20, compiled: bool = True, **more: Any) -> None:
        self.source = BatchAssembler(snapshot, more.get("device", CPU), cache_bytes, 0, compiled=compiled)

    def draw(self, n: int, spec: Windows, seed: int = 0) -> DrawnWindows:
        return self.source.kind(spec).starts.draw(n, CounterRng(seed))

    def plain(self, draw: DrawnWindows, spec: Windows) -> Flat:
        kind = self.source.kind(spec)
        return self.source.read_batch(kind, kind.plan(draw), {})

    def batch(
        self, draw: DrawnWindows, spec: Windows, options: Hindsight, seed: int = 1, outs: Flat | None = None
    ) -> Flat:
        kind = self.source.kind(spec)
        plan = Relabeller(self.source, options, CounterRng(seed)).plan(kind, draw)
        return self.source.read_batch(kind, plan, outs or {})


# ---- the reference ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """An episode as an index shows it: steps before ``base`` were evicted."""

    episode: Episode
    base: int
    layout: Layout

    @property
    def last(self) -> int:
        """The last t of which it is known what was achieved."""
        return self.episode.n - 1 + (self.episode.has_final and self.layout.is_final)

    def outcome(self, t: int) -> list[float] | None:
        """What the reward that stands at t is about; None where nothing is known."""
        if self.layout.alignment == "observation":
            return achieved_at(self.episode, t) if 0 < t <= self.last else None
        return achieved_at(self.episode, t + 1) if t < self.last and t < self.episode.n else None

    def is_lost(self, t: int) -> bool:
        """The reward that stands at t is about something that is not stored."""
        is_reward = t > 0 if self.layout.alignment == "observation" else t < self.episode.n
        return is_reward and self.outcome(t) is None


def reward_at(achieved: list[float], goal: list[float]) -> float:
    return 8.0 - sum(abs(a - g) for a, g in zip(achieved, goal, strict=True))


@dataclass(frozen=True)
class Step:
    """One step of a window, padding included."""

    seen: Seen
    t: int
    wished: int  # steps of its n-step return
    spec: Windows

    @property
    def exists(self) -> bool:
        return self.seen.base <= self.t < self.seen.episode.n

    @property
    def near(self) -> int:
        return min(max(self.t, self.seen.base), self.seen.episode.n - 1)

    @property
    def taken(self) -> int:
        """Steps to the next observation."""
        episode = self.seen.episode
        is_good = episode.has_final or (episode.end == "terminated" and self.seen.layout.alignment == "action")
        return min(self.wished, max(0, episode.n - 1 + is_good - self.near))

    @property
    def reached(self) -> int:
        return self.near + self.taken

    def last(self, has_final: bool) -> int:
        """The last row of a field."""
        return self.seen.episode.n - 1 + (has_final and self.seen.episode.has_final)

    @property
    def is_late(self) -> bool:
        return self.seen.layout.alignment == "observation"

    def place(self, has_final: bool) -> tuple[int, bool]:
        """The row of a field that stands here, and whether it exists: bootstrap steps reach the final row."""
        if not has_final or not self.spec.bootstrap:
            return self.near, self.exists
        at = min(max(self.t, self.seen.base), self.last(True))
        return at, self.exists or at == self.t == self.seen.episode.n

    def stacked(self) -> list[tuple[int, bool]]:
        """The t whose rewards stand here, and whether they exist."""
        at, exists = self.place(self.is_late)
        offsets = dict(self.spec.stacks).get("reward")
        if offsets is None:
            return [(at, exists)]
        moved = [at + offset for offset in offsets]
        inside = [min(max(t, self.seen.base), self.last(self.is_late)) for t in moved]
        return [(at, exists and at == t) for t, at in zip(moved, inside, strict=True)]

    def next_rewards(self) -> list[tuple[int, bool]]:
        """The t whose rewards stand here under ``next``, and whether they are values or padding."""
        last, offsets = self.last(self.is_late), dict(self.spec.stacks).get("reward", (0,))
        moved = [self.reached + offset for offset in offsets]
        inside = [min(max(t, self.seen.base), last) for t in moved]
        return [(at, self.seen.base <= t <= max(last, self.reached)) for t, at in zip(moved, inside, strict=True)]

    def is_lost(self, options: Hindsight, keys: set[str]) -> bool:
        """Something that follows from the goal is not known."""
        seen = self.seen
        lost = any(exists and seen.is_lost(at) for at, exists in self.stacked())
        if self.exists:
            lost |= "next/reward" in keys and any(e and seen.is_lost(at) for at, e in self.next_rewards())
            lost |= "n_step/return" in keys and self.taken > 0 and self.near + self.taken > seen.last
            lost |= options.terminated is not None and self.near + 1 > seen.last
        return lost


def check_goal(seen: Seen, goal: tuple[Seen, int], first: int, options: Hindsight) -> None:
    other, t = goal
    if options.strategy == "random":
        assert other.base <= t < other.episode.n
        return
    assert other == seen
    low, high = {
        "future": (first + 1, seen.last),
        "final": (seen.last, seen.last),
        "episode": (seen.base, seen.last),
    }[options.strategy]
    assert low <= t <= high


def check_step(step: Step, got: Flat, plain: Flat, goal: list[float], options: Hindsight) -> None:
    """One step of a relabelled window: everything that follows from the goal, at this place of the batch."""
    seen, spec = step.seen, step.spec
    goal_value = torch.tensor(goal, dtype=torch.float32)
    offsets, last = dict(spec.stacks).get("goal"), step.last(True)
    (at, is_here), stacked = step.place(True), step.stacked()
    here = [is_here and seen.base <= at + o <= last for o in offsets or (0,)]
    after = [seen.base <= step.reached + o <= max(last, step.reached) for o in offsets or (0,)]
    for key, exists in (("goal/desired", here), ("next/goal/desired", after)):
        if key in got:
            kept = (
                torch.tensor(exists).reshape(-1, 1) | (spec.pad == "repeat") | (key[0] == "n" and offsets is None)
            )
            found = torch.where(kept, goal_value, plain[key].reshape(-1, 2))
            assert torch.equal(got[key].reshape(-1, 2), found)
    rewards, before = got["reward"].reshape(-1).tolist(), plain["reward"].reshape(-1).tolist()
    for (at, is_real), reward, stored in zip(stacked, rewards, before, strict=True):
        found = seen.outcome(at) if is_real or spec.pad == "repeat" else None
        assert reward == (stored if found is None else reward_at(found, goal))
    if "next/reward" in got:
        rewards, before = got["next/reward"].reshape(-1).tolist(), plain["next/reward"].reshape(-1).tolist()
        for (at, is_real), reward, stored in zip(step.next_rewards(), rewards, before, strict=True):
            found = seen.outcome(at) if is_real or spec.pad == "repeat" else None
            assert reward == (stored if found is None else reward_at(found, goal))
    if step.exists:
        check_ends(step, got, plain, goal, options)
    else:
        assert not got["terminated"]


def check_ends(step: Step, got: Flat, plain: Flat, goal: list[float], options: Hindsight) -> None:
    seen = step.seen
    ends = [achieved_at(seen.episode, step.near + 1 + i) == goal for i in range(max(1, step.taken))]
    if options.terminated is None:
        assert bool(got["terminated"]) == bool(plain["terminated"])
    else:
        assert bool(got["terminated"]) == ends[0]
    if "n_step/return" not in got:
        return
    taken, is_terminal = step.taken, float(plain["n_step/discount"]) == 0.0
    if options.terminated is not None:
        is_terminal = any(ends[:taken])
        taken = ends.index(True) + 1 if is_terminal else taken
    rewards = [reward_at(achieved_at(seen.episode, step.near + 1 + i), goal) for i in range(taken)]
    assert int(got["n_step/n"]) == taken
    assert float(got["n_step/discount"]) == (0.0 if is_terminal else step.spec.gamma**taken)
    assert float(got["n_step/return"]) == sum(step.spec.gamma**i * r for i, r in enumerate(rewards))


CHANGED = {"goal/desired", "next/goal/desired", "reward", "next/reward", "terminated"}


def with_axis(flat: Flat, spec: Windows) -> Flat:
    return {k: v.unsqueeze(1) if spec.squeeze and k not in PER_WINDOW_KEYS else v for k, v in flat.items()}


class Reference:
    """Checks batches, window by window and step by step."""

    def __init__(self, sampler: Sampler, layout: Layout, known: dict[Key, Episode]) -> None:
        self._index, self._layout, self._known = sampler.source.index, layout, known
        self._streams = list(self._index.numbers)

    def seen(self, stream: int, episode: int) -> Seen:
        entry = int(self._index.find(np.array([stream]), np.array([episode]))[0])
        base = int(self._index.t_base.host[entry])
        return Seen(self._known[self._streams[stream], episode], base, self._layout)

    def check(self, got: Flat, plain: Flat, draw: DrawnWindows, spec: Windows, options: Hindsight) -> int:
        """Returns how many windows have another goal."""
        assert got.keys() == plain.keys() | {"hindsight/relabelled", GOAL_INDEX}
        for key in plain.keys() - CHANGED:
            if not key.startswith("n_step/"):
                assert torch.equal(got[key], plain[key]), key
        relabelled = got["hindsight/relabelled"].tolist()
        got, plain = with_axis(got, spec), with_axis(plain, spec)
        for b, is_new in enumerate(relabelled):
            n = spec.n_range[0] if draw.n is None else int(draw.n[b])
            seen = self.seen(*plain["index"][b, :2].tolist())
            start = int(draw.start[b]) + seen.base
            moved = [start + spec.stride * i for i in range(-spec.burn_in, spec.length + spec.bootstrap)]
            steps = [Step(seen, t, n, spec) for t in moved]
            first = next(t for t in moved[spec.burn_in :] if t >= seen.base)
            is_able = not any(step.is_lost(options, set(plain)) for step in steps)
            is_able &= options.strategy != "future" or first < seen.last
            assert not is_new or is_able
            if options.fraction == 1.0:
                assert is_new == is_able
            window, before = ({k: v[b] for k, v in flat.items()} for flat in (got, plain))
            self._check_window(window, before, steps, first, options)
        return sum(relabelled)

    def _check_window(self, got: Flat, plain: Flat, steps: list[Step], first: int, options: Hindsight) -> None:
        if not got["hindsight/relabelled"]:
            assert got[GOAL_INDEX].tolist() == [-1, -1, -1]
            assert all(torch.equal(got[key], value) for key, value in plain.items())
            return
        stream, episode, t = got[GOAL_INDEX].tolist()
        other = self.seen(stream, episode)
        check_goal(steps[0].seen, (other, t), first, options)
        goal = achieved_at(other.episode, t)
        for j, step in enumerate(steps):
            here, before = ({k: v[j] for k, v in flat.items() if k not in PER_WINDOW_KEYS} for flat in (got, plain))
            check_step(step, here, before, goal, options)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    layouts(),
    st.lists(st.tuples(windows(), options()), min_size=4, max_size=4),
    st.sampled_from([64, 400, 1 << 20]),
    st.booleans(),
    st.sampled_from([0, 0, 1, 4]),
)
def test_every_value_follows_from_the_goal_as_the_reference_says(
    layout: Layout, asked: list[tuple[Windows, Hindsight]], cache_bytes: int, compiled: bool, n_evicted: int
) -> None:
    store, known = layout.write()
    marks = {record.id: min(n_evicted, record.rows) for record in store.snapshot.streams}
    sampler = Sampler(store.snapshot, cache_bytes=cache_bytes, compiled=compiled)
    if n_evicted:
        sampler.source.follow(Evicted(store.snapshot, marks))
    for spec, options in asked:
        if sampler.source.kind(spec).starts.total:
            draw = sampler.draw(12, spec, layout.seed)
            plain, got = sampler.plain(draw, spec), sampler.batch(draw, spec, options)
            Reference(sampler, layout, known).check(got, plain, draw, spec, options)


def mixed_layout(alignment: str = "action") -> Layout:
    rng = np.random.default_rng(5)
    episodes = tuple(Episode(i, int(rng.integers(1, 12)), ENDS[i % 3], i % 3 < 2 and i % 4 > 0) for i in range(14))
    return Layout(episodes, 4, 3, 7, alignment, is_final=True)


@pytest.fixture(scope="module")
def mixed() -> tuple[Store, dict[Key, Episode]]:
    """A store for tests that only read."""
    return mixed_layout().write()


@pytest.fixture
def sampler(mixed: tuple[Store, dict[Key, Episode]]) -> Sampler:
    return Sampler(mixed[0].snapshot)


RICH = Windows(length=3, burn_in=1, boundary="pad_both", stride=2, next_fields="final", n_step=(1, 3), gamma=0.5)


def test_the_reference_sees_many_windows_with_other_goals(mixed: tuple[Store, dict[Key, Episode]]) -> None:
    sampler = Sampler(mixed[0].snapshot)
    draw = sampler.draw(400, RICH)
    options = replace(PLAIN, terminated=is_reached)
    plain, got = sampler.plain(draw, RICH), sampler.batch(draw, RICH, options)
    assert Reference(sampler, mixed_layout(), mixed[1]).check(got, plain, draw, RICH, options) > 100
    assert (got["terminated"] & ~plain["terminated"]).any()
    assert (plain["terminated"] & ~got["terminated"]).any()


@pytest.mark.parametrize("strategy", ["future", "final", "episode", "random"])
@pytest.mark.parametrize("alignment", ["action", "observation"])
def test_batches_depend_neither_on_the_cache_nor_on_compiled_loops(strategy: Any, alignment: str) -> None:
    store, _ = mixed_layout(alignment).write()
    options = replace(PLAIN, strategy=strategy, terminated=is_reached, fraction=0.7)
    expected: list[Flat] = []
    for cache_bytes, compiled in ((1 << 20, True), (1 << 20, False), (100, True), (100, False), (2000, True)):
        sampler = Sampler(store.snapshot, cache_bytes=cache_bytes, compiled=compiled)
        relabeller = Relabeller(sampler.source, options, CounterRng(9))
        kind = sampler.source.kind(RICH)
        draws = [sampler.draw(16, RICH, seed) for seed in range(3)]
        found = [sampler.source.read_batch(kind, relabeller.plan(kind, draw), {}) for draw in draws]
        expected = expected or found
        for one, other in zip(expected, found, strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[key], other[key]) for key in one)


def objects() -> dict[str, str]:
    """A hash of everything that lies in memory."""
    stored = fsspec.filesystem("memory").store
    return {path: hashlib.sha256(file.getvalue()).hexdigest() for path, file in stored.items()}


@pytest.mark.parametrize("cache_bytes", [100, 1 << 20])
@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_stored_and_cached_stays_as_it_is(
    mixed: tuple[Store, dict[Key, Episode]], cache_bytes: int, compiled: bool
) -> None:
    sampler = Sampler(mixed[0].snapshot, cache_bytes=cache_bytes, compiled=compiled)
    draw, before = sampler.draw(64, RICH), objects()
    plain = sampler.plain(draw, RICH)
    for seed in range(4):
        got = sampler.batch(draw, RICH, replace(PLAIN, terminated=is_reached), seed)
        assert not torch.equal(got["goal/desired"], plain["goal/desired"])
    again = sampler.plain(draw, RICH)
    assert all(torch.equal(plain[key], again[key]) for key in plain)
    assert objects() == before


def test_output_memory_is_written_again(sampler: Sampler) -> None:
    for spec in (RICH, Windows.transitions(n_step=2)):
        options = replace(PLAIN, terminated=is_reached)
        draw = sampler.draw(32, spec)
        expected, outs = sampler.batch(draw, spec, options, 5), sampler.batch(draw, spec, options, 6)
        places = {key: value.data_ptr() for key, value in outs.items()}
        got = sampler.batch(draw, spec, options, 5, outs)
        assert all(torch.equal(expected[key], value) for key, value in got.items())
        assert {key: value.data_ptr() for key, value in got.items()} == places


# ---- how goals are distributed -----------------------------------------------------------------------------


@functools.cache
def one_episode(n: int) -> Sampler:
    return Sampler(Layout((Episode(0, n, "truncated", True),), 8, 0, 0, "action", True).write()[0].snapshot)


def drawn(sampler: Sampler, options: Hindsight, start: int | None, n: int = 20_000) -> torch.Tensor:
    """The goals of many windows, that start at one step of the first episode or anywhere."""
    spec = Windows(boundary="pad_right")
    kind = sampler.source.kind(spec)
    draw = sampler.draw(n, spec)
    if start is not None:
        draw = DrawnWindows(torch.zeros(n, dtype=torch.int64), torch.full((n,), start))
    return Relabeller(sampler.source, options, CounterRng(3)).plan(kind, draw).known[GOAL_INDEX]


# With a fixed seed each of these is one number; for right draws it is near 1, and past 3 less than once in 10^3.
def counted(t: torch.Tensor, low: int, high: int, expected: Any) -> float:
    counts = np.bincount(t.numpy(), minlength=high + 1)
    assert counts.sum() == counts[low : high + 1].sum()
    return chi_square(counts[low : high + 1], np.asarray(expected) / np.sum(expected) * len(t))


@pytest.mark.parametrize("start", [0, 5, 17])
def test_future_goals_are_uniform_over_the_rows_after_the_start(start: int) -> None:
    goals = drawn(one_episode(20), PLAIN, start)
    assert counted(goals[:, 2], start + 1, 20, np.ones(20 - start)) < 3


@pytest.mark.parametrize("p", [0.05, 0.5, 0.99])
@pytest.mark.parametrize("start", [0, 17])
def test_geometric_distances_are_cut_at_the_end_of_the_episode(start: int, p: float) -> None:
    goals = drawn(one_episode(20), replace(PLAIN, geometric=p), start)
    expected = (1 - p) ** np.arange(20 - start)
    n_seen = int((expected / expected.sum() * len(goals) > 5).sum())  # rarer ones together
    t = goals[:, 2].clamp(max=start + n_seen)
    merged = np.append(expected[: n_seen - 1], expected[n_seen - 1 :].sum())
    assert counted(t, start + 1, start + n_seen, merged) < 3


def test_a_geometric_distance_of_parameter_1_is_1() -> None:
    assert set(drawn(one_episode(20), replace(PLAIN, geometric=1), 4)[:, 2].tolist()) == {5}


def test_long_episodes_reach_past_the_table_of_distances() -> None:
    goals = drawn(one_episode(300), replace(PLAIN, geometric=0.9), 0, 1000)
    assert int(goals[:, 2].min()) >= 1
    assert int(goals[:, 2].max()) < 20


def test_goals_of_the_episode_are_uniform_over_its_rows() -> None:
    goals = drawn(one_episode(20), replace(PLAIN, strategy="episode"), 5)
    assert counted(goals[:, 2], 0, 20, np.ones(21)) < 3


def test_final_goals_are_those_of_the_last_row() -> None:
    assert set(drawn(one_episode(20), replace(PLAIN, strategy="final"), 5)[:, 2].tolist()) == {20}


@pytest.mark.parametrize("n_evicted", [0, 9])
def test_random_goals_are_uniform_over_all_steps(mixed: tuple[Store, dict[Key, Episode]], n_evicted: int) -> None:
    store, known = mixed
    marks = {record.id: n_evicted for record in store.snapshot.streams}
    sampler = Sampler(store.snapshot)
    sampler.source.follow(Evicted(store.snapshot, marks))
    assert (sampler.source.index.step_base > 0) == (n_evicted > 0)
    goals = drawn(sampler, replace(PLAIN, strategy="random"), None)
    goals = goals[goals[:, 0] >= 0]
    index = sampler.source.index
    steps = [
        (int(index.stream.host[e]), int(index.episode.host[e]), t)
        for e in range(index.first, index.n)
        for t in range(int(index.t_base.host[e]), int(index.t_base.host[e] + index.lengths()[e]))
    ]
    n_all = sum(episode.n for episode in known.values())
    assert len(steps) == n_all if not n_evicted else len(steps) < n_all
    number = {step: i for i, step in enumerate(steps)}
    found = torch.tensor([number[tuple(goal)] for goal in goals.tolist()])
    assert counted(found, 0, len(steps) - 1, np.ones(len(steps))) < 1.7


@pytest.mark.parametrize("fraction", [0.0, 0.3, 1.0])
def test_the_asked_fraction_of_windows_gets_other_goals(fraction: float) -> None:
    goals = drawn(one_episode(20), replace(PLAIN, fraction=fraction), 0)
    deviation = math.sqrt(fraction * (1 - fraction) * len(goals))
    assert abs(int((goals[:, 0] >= 0).sum()) - fraction * len(goals)) <= 4 * deviation


def test_which_windows_get_other_goals_has_nothing_to_do_with_which() -> None:
    goals = drawn(one_episode(20), replace(PLAIN, fraction=0.5), 0)
    chosen = goals[:, 0] >= 0
    assert counted(goals[chosen, 2], 1, 20, np.ones(20)) < 3


# ---- batches that are planned ahead ------------------------------------------------------------------------


def live_reader(n_steps: int = 12) -> tuple[Layout, trajstore.Writer, Reader]:
    episode = Episode(0, n_steps, "open", False)
    layout = Layout((episode,), 4, 0, 0, "action", True)
    store = trajstore.create(f"memory://hindsight-{uuid.uuid4().hex}", layout.schema())
    writer = store.writer(commit_seconds=None, buffer_bytes="1MB")
    reader = Reader(store, writer=writer, cache_bytes="32MB")
    for t in range(n_steps):
        writer.append(layout.step(episode, t), env=0)
        writer.append(layout.step(Episode(1, n_steps, "open", False), t), env=1)
    reader.assembler.publish()
    return layout, writer, reader


@pytest.mark.parametrize("strategy", ["future", "final", "episode", "random"])
def test_goals_of_a_planned_batch_stay_when_rows_move_and_episodes_grow(strategy: Any) -> None:
    layout, writer, reader = live_reader()
    source, spec = reader.assembler, Windows.transitions(n_step=2, gamma=0.5)
    relabeller = Relabeller(source, replace(PLAIN, strategy=strategy, fraction=0.8), CounterRng(1))
    kind = source.kind(spec)
    draw = kind.starts.draw(64, CounterRng(0))
    plan = relabeller.plan(kind, draw)
    expected = source.read_batch(kind, plan, {})
    assert 0 < int(expected["hindsight/relabelled"].sum()) < 64
    windows = expected["index"].numpy()
    for t in range(12, 20):
        writer.append(layout.step(Episode(0, 20, "open", False), t), env=0)
    writer.commit()
    source.publish()
    kind = source.kind(spec)
    moved = source.draw_at(kind, windows, None, is_strict=False)
    got = source.read_batch(kind, relabeller.plan(kind, moved, plan.known[GOAL_INDEX]), {})
    kept = ~expected["is_last"] & (expected["n_step/n"] == 2)  # others see steps that are new
    assert kept.sum() > 32
    for key, value in expected.items():
        assert torch.equal(got[key][kept], value[kept]), key
    writer.close()


@pytest.mark.parametrize("fields", [None, ("obs", "goal")])
def test_no_goal_lies_past_the_newest_step_of_an_open_episode(fields: tuple[str, ...] | None) -> None:
    _, writer, reader = live_reader()
    source, spec = reader.assembler, Windows(boundary="pad_right", fields=fields)
    kind = source.kind(spec)
    draw = kind.starts.draw(400, CounterRng(0))
    known = Relabeller(source, PLAIN, CounterRng(1)).plan(kind, draw).known
    is_newest = known["index"][:, 2] == 11
    assert is_newest.any()
    assert torch.equal(known["hindsight/relabelled"], ~is_newest)  # nothing is known of what comes after it
    assert int(known[GOAL_INDEX][:, 2].max()) == 11
    writer.close()


def test_planned_goals_that_were_evicted_say_so() -> None:
    episodes = tuple(Episode(i, 9, "truncated", True) for i in range(4))
    store, _ = Layout(episodes, 4, 0, 0, "action", True).write()
    source, spec = Sampler(store.snapshot).source, Windows()
    kind, first = source.kind(spec), store.snapshot.streams[0].id
    kept = np.array([[1, 1, 8]] * 64)  # windows of the other stream, which stay
    relabeller = Relabeller(source, replace(PLAIN, strategy="random"), CounterRng(0))
    plan = relabeller.plan(kind, source.draw_at(kind, kept, None, is_strict=True))
    # First a part of an episode that goals were drawn from, then the whole of it.
    assert relabeller.has_goals(plan.known[GOAL_INDEX])
    for n_rows in (5, 10):
        source.follow(Evicted(store.snapshot, {first: n_rows}))
        with pytest.raises(SnapshotExpiredError, match="planned ahead were evicted before it was read"):
            source.check_plan(plan)
        kind = source.kind(spec)
        draw = source.draw_at(kind, kept, None, is_strict=True)
        assert not relabeller.has_goals(plan.known[GOAL_INDEX])
        with pytest.raises(SnapshotExpiredError, match="a goal of a batch that was drawn ahead has been evicted"):
            relabeller.plan(kind, draw, plan.known[GOAL_INDEX])
        assert len(relabeller.plan(kind, draw).known[GOAL_INDEX]) == 64


# ---- fields and functions ------------------------------------------------------------------------------------


def recorded(fields: dict[str, Any], data: dict[str, Any], **more: Any) -> Sampler:
    store = trajstore.create(f"memory://hindsight-{uuid.uuid4().hex}", Schema(fields, **more))
    with store.writer(commit_seconds=None) as writer:
        writer.append_episode(data, truncated=True)
    return Sampler(store.refresh())


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64", "int32", "bool", "float16", "bfloat16"])
def test_goals_of_all_dtypes_are_taken_bit_by_bit(dtype: str) -> None:
    fields = {"desired_goal": Field(dtype, (3,), final=True), "achieved_goal": Field(dtype, (3,), final=True)}
    bits = np.random.default_rng(0).integers(0, 2, (11, 3)) * (1 if dtype == "bool" else 60)
    achieved = torch.from_numpy(bits).to(getattr(torch, dtype))
    desired = torch.zeros(11, 3, dtype=torch.int64).to(getattr(torch, dtype))
    sampler = recorded(fields, {"desired_goal": desired, "achieved_goal": achieved})
    spec = Windows.transitions()
    got = sampler.batch(sampler.draw(32, spec), spec, Hindsight(fraction=1))
    assert got["desired_goal"].dtype == achieved.dtype
    for key in ("desired_goal", "next/desired_goal"):
        assert got[key].tolist() == achieved[got[GOAL_INDEX][:, 2]].tolist()


def test_goals_may_be_groups_of_fields() -> None:
    def group() -> dict[str, Any]:
        return {"at": Field("float32", (2,), final=True), "hand": {"open": Field("bool", final=True)}}

    def values(n: int, start: float) -> dict[str, Any]:
        at = (start + np.arange(2 * n)).reshape(n, 2).astype(np.float32)
        return {"at": at, "hand": {"open": np.arange(n) % 3 == 0}}

    def reward(achieved: Any, goal: Any) -> torch.Tensor:
        assert achieved["at"].shape == goal["at"].shape
        return (achieved["hand"]["open"] == goal["hand"]["open"]).float() + (achieved["at"] - goal["at"]).sum(-1)

    fields = {"want": group(), "have": group(), "reward": Field("float32", (1,))}
    achieved = values(11, 0)
    data = {"want": values(11, 100), "have": achieved, "reward": np.zeros((10, 1), np.float32)}
    sampler = recorded(fields, data)
    spec = Windows(length=2)
    got = sampler.batch(
        sampler.draw(32, spec), spec, Hindsight(goal="want", achieved="have", fraction=1, reward=reward)
    )
    t, goal = got["index"][:, 2], got[GOAL_INDEX][:, 2]
    for j in range(2):
        assert np.array_equal(got["want/at"][:, j], achieved["at"][goal])
        assert np.array_equal(got["want/hand/open"][:, j], achieved["hand"]["open"][goal])
        is_alike = (t + j + 1) % 3 == 0
        expected = (is_alike == (goal % 3 == 0)).float() + 4.0 * (t + j + 1 - goal)
        assert torch.equal(got["reward"][:, j, 0], expected)


def test_goals_without_rewards_need_no_function(sampler: Sampler) -> None:
    spec = Windows(fields=("obs", "goal"), length=2)
    got = sampler.batch(sampler.draw(8, spec), spec, replace(PLAIN, reward=None))
    assert got.keys() >= {"obs", "goal/desired"}


REFUSED = [
    ({"goal": "aim"}, {}, "hindsight: goal: no field 'aim'; there are obs, goal/desired"),
    ({"achieved": "aim"}, {}, "hindsight: achieved: no field 'aim'"),
    ({"achieved": "action"}, {}, r"'goal/desired' and 'action' to be alike, got float32 of shape \(2,\) and int64"),
    ({"goal": "goal"}, {}, "expected 'goal(/desired)?' and 'achieved(/desired)?' to be alike, got .*no such field"),
    ({"reward": None}, {}, "hindsight: 'reward' would be that of another goal; give reward=, or leave it out"),
    ({"reward": None}, {"fields": ("goal",), "n_step": 2}, "hindsight: 'n_step/return' would be"),
    ({"reward": None}, {"fields": ("goal",), "next_fields": ("reward",)}, "hindsight: 'next/reward' would be"),
    ({}, {"fields": ("obs",)}, "the batch does not hold the goal 'goal/desired'; add it to fields="),
    ({}, {"boundary": "cross"}, "expected windows inside one episode, got boundary='cross'"),
    ({"reward": lambda a, g: a}, {}, r"reward: expected .* of shape \(4,\), got torch.float32 of shape \(4, 2\)"),
    ({"reward": is_reached}, {}, r"torch.float32 of shape \(4,\), got torch.bool of shape \(4,\)"),
    ({"reward": lambda a, g: 1.0}, {}, "got float"),
    ({"terminated": reward_of}, {}, r"terminated: expected .* torch.bool of shape \(4,\), got torch.float32"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "windows", "message"), REFUSED)
def test_what_does_not_fit_is_refused(
    sampler: Sampler, changes: dict[str, Any], windows: dict[str, Any], message: str
) -> None:
    spec = Windows(**windows)
    with pytest.raises(ValueError, match=message):
        sampler.batch(sampler.draw(4, spec), spec, replace(PLAIN, **changes))


def test_rewards_of_several_numbers_are_refused() -> None:
    goal = Field("float32", final=True)
    fields = {"desired_goal": goal, "achieved_goal": goal, "reward": Field("float32", (2,))}
    data = {name: np.zeros(4, np.float32) for name in ("desired_goal", "achieved_goal")}
    sampler = recorded(fields, data | {"reward": np.zeros((3, 2), np.float32)})
    with pytest.raises(DataError, match=r"field 'reward' has shape \(2,\), expected one number per step"):
        sampler.batch(sampler.draw(4, Windows()), Windows(), Hindsight(reward=reward_of))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "past"}, "strategy: expected one of future, final, episode, random, got 'past'"),
        ({"fraction": 1.5}, "fraction: expected a number from 0 to 1, got 1.5"),
        ({"fraction": float("nan")}, "fraction: expected"),
        ({"fraction": True}, "fraction: expected"),
        ({"goal": 3}, "goal: expected the name of a field or group, got 3"),
        ({"achieved": None}, "achieved: expected"),
        ({"reward": 1.0}, "reward: expected a function, got 1.0"),
        ({"terminated": "reward"}, "terminated: expected a function"),
        ({"geometric": 0.0}, "geometric: expected a number from 0.0001 to 1, got 0.0"),
        ({"geometric": 2}, "geometric: expected"),
        ({"geometric": 0.5, "strategy": "final"}, "geometric goes with strategy='future', got 'final'"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        Hindsight(**options)


def test_functions_may_give_every_other_number_of_something(sampler: Sampler) -> None:
    def every_other(function: Any) -> Any:
        return lambda achieved, goal: function(achieved, goal).repeat_interleave(2)[::2]

    spec = Windows(length=2, n_step=2)
    draw, options = sampler.draw(16, spec), replace(PLAIN, terminated=is_reached)
    expected = sampler.batch(draw, spec, options)
    changed = replace(options, reward=every_other(reward_of), terminated=every_other(is_reached))
    got = sampler.batch(draw, spec, changed)
    assert all(torch.equal(expected[key], value) for key, value in got.items())


def test_functions_make_no_graph(sampler: Sampler) -> None:
    seen = []

    def reward(achieved: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
        seen.append(torch.is_grad_enabled())
        return reward_of(achieved, goal)

    sampler.batch(sampler.draw(4, Windows()), Windows(), replace(PLAIN, reward=reward))
    assert seen == [False]


# ---- no synchronisation ----------------------------------------------------------------------------------------

SPECS = [
    RICH,
    Windows.transitions(n_step=3),
    Windows(length=4, boundary="short"),
    Windows(length=2, offsets={"reward": (-1, 0), "goal": (0, 1)}),
]
CHOICES = [
    replace(PLAIN, terminated=is_reached),
    replace(PLAIN, geometric=0.1),
    replace(PLAIN, strategy="final"),
    replace(PLAIN, strategy="episode"),
    replace(PLAIN, strategy="random"),
]


@pytest.mark.parametrize("options", CHOICES)
@pytest.mark.parametrize("spec", SPECS)
def test_a_batch_from_a_resident_cache_waits_for_nothing(
    mixed: tuple[Store, dict[Key, Episode]], spec: Windows, options: Hindsight
) -> None:
    sampler = Sampler(mixed[0].snapshot, compiled=False)
    source, kind = sampler.source, sampler.source.kind(spec)
    relabeller, rng = Relabeller(source, options, CounterRng(1)), CounterRng(0)
    for _ in range(6):  # until everything is resident
        source.read_batch(kind, relabeller.plan(kind, kind.starts.draw(64, rng)), {})
    with NoSync() as mode:
        source.read_batch(kind, relabeller.plan(kind, kind.starts.draw(32, rng)), {})
    assert mode.n_operations > 40


@pytest.mark.parametrize("options", CHOICES)
@pytest.mark.parametrize("spec", SPECS)
def test_batches_can_be_made_on_a_device_that_has_no_values(
    mixed: tuple[Store, dict[Key, Episode]], spec: Windows, options: Hindsight
) -> None:
    store, _ = mixed
    sampler = Sampler(store.snapshot, device=torch.device("meta"), compiled=False)
    source = sampler.source
    for column in source.cache._columns.values():
        pages = column.table.missing(np.arange(column.table.n_pages))
        column.table.set_resident(pages, pages, 1)
    kind, relabeller, rng = source.kind(spec), Relabeller(source, options, CounterRng(1)), CounterRng(0)
    relabeller.plan(kind, kind.starts.draw(8, rng))  # tables are made when they are first asked for
    with NoSync("meta"):
        got = source.read_batch(kind, relabeller.plan(kind, kind.starts.draw(32, rng)), {})
    here = Sampler(store.snapshot)
    expected = here.batch(here.draw(32, spec), spec, options)
    assert {k: (v.shape, v.dtype) for k, v in got.items()} == {k: (v.shape, v.dtype) for k, v in expected.items()}


# ---- through a reader ------------------------------------------------------------------------------------------

SOME = replace(PLAIN, fraction=0.6, terminated=is_reached)


def alike(one: Any, other: Any) -> bool:
    first, second = flat_outputs(one), flat_outputs(other)
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def test_a_reader_gives_windows_other_goals(mixed: tuple[Store, dict[Key, Episode]]) -> None:
    reader, source = Reader(mixed[0], seed=4), Sampler(mixed[0].snapshot)
    for options in (PLAIN, SOME, SOME):
        state = reader.state_dict()
        batch = reader.sample(32, RICH, relabel=options)
        rng = CounterRng()
        rng.load_state_dict(state)
        kind = source.source.kind(RICH)
        draw = kind.starts.draw(32, rng)
        expected = source.source.read_batch(kind, Relabeller(source.source, options, rng).plan(kind, draw), {})
        assert alike(batch, nest(expected))
        assert reader.state_dict()["counter"] == rng.counter
    spec = Windows(length=2)
    index = reader.sample(32, spec)["index"]
    got = reader.at(index, spec, relabel=PLAIN)
    assert torch.equal(got["index"], index)
    assert got["hindsight"]["relabelled"].any()


def test_weights_of_priorities_stay(mixed: tuple[Store, dict[Key, Episode]]) -> None:
    spec, priorities = Windows.transitions(n_step=2), trajstore.Priorities()
    plain, new = (Reader(mixed[0], seed=4, priorities=priorities) for _ in range(2))
    before, got = plain.sample(32, spec), new.sample(32, spec, relabel=PLAIN)
    assert alike(before["priority"], got["priority"])
    assert torch.equal(before["index"], got["index"])
    assert got["hindsight"]["relabelled"].any()


def test_neither_prefetch_nor_rings_change_the_goals(mixed: tuple[Store, dict[Key, Episode]]) -> None:
    found = []
    for prefetch, ring in ((0, None), (3, None), (2, trajstore.Ring(12))):
        reader = Reader(mixed[0], seed=5, cache_bytes=4000)
        with reader.batches(8, RICH, prefetch=prefetch, relabel=SOME, out=ring) as batches:
            found.append([next(batches) for _ in range(6)])
    for other in found[1:]:
        assert all(alike(one, two) for one, two in zip(found[0], other, strict=True))


@pytest.mark.parametrize("depths", [(0, 0), (3, 0), (0, 2), (3, 2)])
def test_iterators_are_resumed_with_the_goals_that_were_drawn(
    mixed: tuple[Store, dict[Key, Episode]], depths: tuple[int, int]
) -> None:
    options = replace(SOME, strategy="random")
    with Reader(mixed[0], seed=5).batches(8, RICH, prefetch=depths[0], relabel=options) as batches:
        next(batches)
        state = batches.state_dict()
        expected = [next(batches) for _ in range(6)]
    with Reader(mixed[0], seed=99).batches(8, RICH, prefetch=depths[1], relabel=options) as again:
        next(again)
        again.load_state_dict(state)
        assert all(alike(one, next(again)) for one in expected)


def test_batches_that_wait_while_rows_move_keep_their_goals() -> None:
    layout, writer, reader = live_reader()
    episode, spec = Episode(0, 64, "open", False), Windows(fields=("obs", "goal"))
    with reader.batches(64, spec, prefetch=2, relabel=replace(PLAIN, strategy="episode")) as batches:
        next(batches)
        for t in range(12, 40):
            writer.append(layout.step(episode, t), env=0)
        writer.commit()
        for _ in range(5):
            got = next(batches)
            _, number, t = got["hindsight"]["goal_index"].unbind(1)
            expected = torch.stack([number % 3, t // 2], 1).float()
            assert torch.equal(got["goal"]["desired"][:, 0], expected)
    writer.close()


def test_tensordicts_hold_what_hindsight_says(mixed: tuple[Store, dict[Key, Episode]]) -> None:
    pytest.importorskip("tensordict")
    batch = Reader(mixed[0], as_tensordict=True).sample(8, Windows.transitions(), relabel=PLAIN)
    assert batch["hindsight", "relabelled"].shape == (8,)
    assert batch["hindsight", "goal_index"].shape == (8, 3)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_goals_that_were_evicted_before_their_turn_are_drawn_anew(prefetch: int) -> None:
    episodes = tuple(Episode(i, 9, "truncated", True) for i in range(4))
    store, _ = Layout(episodes, 4, 0, 0, "action", True).write()
    reader, first = Reader(store, seed=1), store.snapshot.streams[0].id

    def others(table: Any) -> Any:  # no window is evicted, only goals are
        return table["stream"] != first

    options = replace(PLAIN, strategy="random")
    with reader.batches(32, Windows(), prefetch=prefetch, where=others, relabel=options) as batches:
        next(batches)
        with reader.assembler.lock:
            reader.assembler.follow(Evicted(store.snapshot, {first: 15}))
        for _ in range(4):
            got = next(batches)
            stream, episode, t = got["hindsight"]["goal_index"].unbind(1)
            assert got["hindsight"]["relabelled"].all()
            assert ((stream == 1) | ((episode == 1) & (t >= 5))).all()
            assert torch.equal(got["goal"]["desired"][:, 0, 1], (t // 2).float())
