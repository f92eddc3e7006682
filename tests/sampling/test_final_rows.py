"""The row after the last step, against a plain reference: next values of stacks, steps ahead, bootstrap steps."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import trajstore
from trajstore import Field, Hindsight, Reader, ReplayBuffer, Schema, Store, Windows

SLOW = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
FRAMES = (-3, -2, -1, 0)
SCHEMA = Schema(
    {
        "observation": Field("int64", final=True, chunk_rows=4),
        "action": Field("int64", chunk_rows=3),
        "reward": Field("float64", chunk_rows=8),
    }
)


@dataclass(frozen=True)
class Episode:
    """Row t of episode number ``number`` holds ``100 * number + t``; the final row follows the last step."""

    number: int
    n: int
    end: str  # terminated, truncated or cut
    has_final: bool

    @property
    def last_row(self) -> int:
        return self.n - 1 + self.has_final

    def code(self, t: int) -> int:
        return 100 * self.number + t


@st.composite
def episodes(draw: st.DrawFn) -> list[Episode]:
    found = []
    for number in range(1, draw(st.integers(1, 5)) + 1):
        end = draw(st.sampled_from(["terminated", "truncated", "cut"]))
        found.append(Episode(number, draw(st.integers(1, 7)), end, draw(st.booleans())))
    return found


def record(episodes: Sequence[Episode], *, commits: bool = True) -> Store:
    """The episodes in one stream, each in up to two spans."""
    store = trajstore.create(f"memory://finals-{uuid.uuid4().hex}", SCHEMA)
    with store.writer(commit_seconds=None) as writer:
        for episode in episodes:
            append(writer, episode, commits)
    store.refresh()
    return store


def append(writer: Any, episode: Episode, commits: bool = False) -> None:
    for t in range(episode.n):
        code = episode.code(t)
        writer.append({"observation": code, "action": code, "reward": float(t + 1)})
        if commits and t == episode.number % 3:
            writer.commit()
    final = {"final": {"observation": episode.code(episode.n)}} if episode.has_final else {}
    flag = {} if episode.end == "cut" else {episode.end: True}
    writer.end_episode(**flag, **final)


offset_lists = st.lists(st.integers(-3, 3), min_size=1, max_size=4)


@st.composite
def kinds(draw: st.DrawFn) -> Windows:
    boundary = draw(st.sampled_from(["strict", "pad_right", "short"]))
    offsets = {
        name: tuple(draw(offset_lists)) for name in ("observation", "action") if draw(st.booleans())
    }  # neither, one or both
    return Windows(
        length=draw(st.integers(1, 4)),
        burn_in=draw(st.integers(0, 2)),
        bootstrap=draw(st.integers(0, 3)),
        stride=draw(st.integers(1, 2)),
        boundary=boundary,
        pad=draw(st.sampled_from(["repeat", "zero", -7])),
        offsets=offsets,
        next_fields=draw(st.sampled_from([(), ("observation",), ("observation", "action"), "final"])),
        n_step=draw(st.sampled_from([None, 1, 3])),
        gamma=0.5,
    )


class Reference:
    """One window, step by step, as the documentation says."""

    def __init__(self, episode: Episode, spec: Windows, start: int) -> None:
        self.episode, self.spec = episode, spec
        steps = range(-spec.burn_in, spec.length + spec.bootstrap)
        self.positions = [start + spec.stride * k for k in steps]
        self.pad = {"repeat": None, "zero": 0}.get(spec.pad, spec.pad) if isinstance(spec.pad, str) else spec.pad

    def expected(self) -> dict[str, Any]:
        found: dict[str, Any] = {"valid": [self._exists(p) for p in self.positions]}
        if self.spec.bootstrap:
            found["is_final"] = [self._is_final(p) for p in self.positions]
        for name in ("observation", "action"):
            found[name] = [self._value(name, p) for p in self.positions]
            if self.spec.next_fields and (name == "observation" or "action" in self.spec.next_fields):
                found[f"next/{name}"] = [self._next(name, p) for p in self.positions]
        return found

    def _exists(self, p: int) -> bool:
        return 0 <= p < self.episode.n

    def _is_final(self, p: int) -> bool:
        return self.episode.has_final and p == self.episode.n

    def _last(self, name: str) -> int:
        return self.episode.last_row if name == "observation" else self.episode.n - 1

    def _row(self, name: str, p: int, exists: bool) -> int:
        if not exists and self.pad is not None:
            return int(self.pad)
        return self.episode.code(min(max(p, 0), self._last(name)))

    def _offsets(self, name: str) -> tuple[int, ...] | None:
        return dict(self.spec.stacks).get(name)

    def _value(self, name: str, p: int) -> Any:
        reaches_final = name == "observation" and self.spec.bootstrap > 0
        exists = self._exists(p) or (reaches_final and self._is_final(p))
        base = min(max(p, 0), self._last(name) if reaches_final else self.episode.n - 1)
        offsets = self._offsets(name)
        if offsets is None:
            return self._row(name, base, exists)
        return [self._row(name, base + o, exists and 0 <= base + o <= self._last(name)) for o in offsets]

    def _next(self, name: str, p: int) -> Any:
        episode = self.episode
        p = min(max(p, 0), episode.n - 1)
        leads_on = episode.has_final or episode.end == "terminated"
        reached = p + min(max(episode.n - 1 + leads_on - p, 0), self.spec.n_range[0])
        offsets = self._offsets(name)
        if offsets is None:
            return self._row(name, reached, True)
        last = max(reached, self._last(name))
        return [self._row(name, reached + o, 0 <= reached + o <= last) for o in offsets]


def check(batch: dict[str, Any], spec: Windows, episodes: Sequence[Episode], shown: dict[int, Episode]) -> None:
    del episodes
    for b, (_, number, t) in enumerate(batch["index"].tolist()):
        for key, values in Reference(shown[number], spec, t).expected().items():
            found = batch
            for part in key.split("/"):
                found = found[part]
            assert found[b].tolist() == values, (key, number, t)
    assert ("is_final" in batch) == (spec.bootstrap > 0)


def batches_of(reader: Reader, spec: Windows) -> Iterator[dict[str, Any]]:
    if not reader.n_windows(spec):
        return
    yield from reader.epoch(7, spec)
    with reader.batches(9, spec, prefetch=1) as batches:
        yield next(batches)
    with reader.staged(5, spec) as batches:
        yield next(batches)


@SLOW
@given(episodes(), kinds(), st.booleans())
def test_steps_ahead_next_values_and_bootstrap_reach_the_final_row(
    found: list[Episode], spec: Windows, compiled: bool
) -> None:
    shown = dict(enumerate(found))
    reader = Reader(record(found), compiled=compiled, cache_bytes=4096 if compiled else "1MB")
    for batch in batches_of(reader, spec):
        check(batch, spec, found, shown)


@SLOW
@given(episodes(), kinds())
def test_the_same_holds_for_steps_that_are_not_committed(found: list[Episode], spec: Windows) -> None:
    with ReplayBuffer(
        f"memory://finals-{uuid.uuid4().hex}", schema=SCHEMA, buffer_bytes="1MB", cache_bytes="4MB"
    ) as buffer:
        for episode in found:
            append(buffer, episode)
        if buffer.n_windows(spec):
            check(buffer.sample(16, spec), spec, found, dict(enumerate(found)))


def test_next_is_stacked_like_the_observation() -> None:
    reader = Reader(record([Episode(1, 5, "truncated", True)]))
    windows = Windows.transitions(offsets={"observation": FRAMES})
    index = torch.tensor([[0, 0, t] for t in (0, 2, 4)])
    batch = reader.at(index, windows)
    assert batch["observation"].tolist() == [[100] * 4, [100, 100, 101, 102], [101, 102, 103, 104]]
    assert batch["next"]["observation"].tolist() == [
        [100, 100, 100, 101],
        [100, 101, 102, 103],
        [102, 103, 104, 105],
    ]


def test_fields_that_are_only_stacked_have_a_next_value_too() -> None:
    reader = Reader(record([Episode(1, 3, "truncated", True)]))
    windows = Windows.transitions(fields=["action"], offsets={"observation": (-1, 0)})
    batch = reader.at(torch.tensor([[0, 0, 2]]), windows)
    assert batch["next"]["observation"].tolist() == [[102, 103]]


@pytest.mark.parametrize("compiled", [True, False])
def test_the_end_of_a_chain_of_episodes_has_its_final_row(compiled: bool) -> None:
    found = [Episode(1, 2, "truncated", True), Episode(2, 2, "truncated", True)]
    reader = Reader(record(found), compiled=compiled)
    windows = Windows(length=1, bootstrap=3, boundary="cross", squeeze=False)
    batch = reader.at(torch.tensor([[0, 0, 1], [0, 1, 1]]), windows)
    # Windows that cross continue in the next episode; only the last one has nothing but its final row after it.
    assert batch["observation"].tolist() == [[101, 200, 201, 202], [201, 202, 202, 202]]
    assert batch["is_final"].tolist() == [[False, False, False, True], [False, True, False, False]]
    assert batch["valid"].tolist() == [[True, True, True, False], [True, False, False, False]]


def test_goals_in_hindsight_replace_those_of_stacked_next_values() -> None:
    goal = Field("float32", (1,), final=True)
    schema = Schema({"achieved_goal": goal, "desired_goal": goal, "reward": Field("float32")})
    store = trajstore.create(f"memory://finals-{uuid.uuid4().hex}", schema)
    with store.writer() as writer:
        achieved = np.arange(5, dtype=np.float32)[:, None]
        writer.append_episode(
            {"achieved_goal": achieved, "desired_goal": achieved * 0 + 99, "reward": np.zeros(4, np.float32)},
            truncated=True,
        )
    store.refresh()
    reader = Reader(store)
    windows = Windows.transitions(
        offsets={"desired_goal": (-1, 0, 1), "achieved_goal": (0, 1), "reward": (-1, 0)},
        next_fields=("achieved_goal", "desired_goal", "reward"),
    )
    relabel = Hindsight("final", fraction=1.0, reward=lambda achieved, goal: (goal - achieved)[:, 0])
    batch = reader.at(torch.tensor([[0, 0, 3]]), windows, relabel=relabel)
    assert batch["desired_goal"].tolist() == [[[4.0]] * 3]
    assert batch["next"]["desired_goal"].tolist() == [[[4.0]] * 3]
    assert batch["next"]["achieved_goal"].tolist() == [[[4.0], [4.0]]]
    assert batch["reward"].tolist() == [[1.0, 0.0]]  # of the steps 2 and 3, which led to 3 and 4
    assert batch["next"]["reward"].tolist() == [[0.0, 0.0]]  # step 3 and no other


def test_late_rewards_in_hindsight_reach_the_final_row() -> None:
    value = Field("float32", (1,), final=True)
    schema = Schema(
        {
            "achieved_goal": value,
            "desired_goal": value,
            "reward": Field("float32", final=True),
            "a": Field("int64"),
        },
        reward_alignment="observation",
    )
    store = trajstore.create(f"memory://finals-{uuid.uuid4().hex}", schema)
    with store.writer() as writer:
        achieved = np.arange(4, dtype=np.float32)[:, None]
        data = {"achieved_goal": achieved, "desired_goal": achieved, "reward": achieved[:, 0], "a": np.arange(3)}
        writer.append_episode(data, truncated=True)
    store.refresh()
    relabel = Hindsight("final", fraction=1.0, reward=lambda achieved, goal: (10 * goal + achieved)[:, 0])
    batch = Reader(store).at(torch.tensor([[0, 0, 1]]), Windows(length=2, bootstrap=1), relabel=relabel)
    assert batch["reward"].tolist() == [[31.0, 32.0, 33.0]]
