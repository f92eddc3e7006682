"""ALF's calls, its table of behaviour, and right behaviour where its buffer was wrong."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import trajstore
from tests.support.faulty import Call, FailWhile, FaultyStorage, Plan, broken, no_space, real_storage, through
from tests.support.rank_threads import all_well
from trajstore import DataError, Hindsight, NotReadyError, StorageError, Windows
from trajstore.compat.alf import BatchInfo, ReplayBuffer, StepType
from trajstore.compat.alf import buffer as alf_buffer

FIRST, MID, LAST = StepType
OPTIONS = {"cache_bytes": "16MiB", "buffer_bytes": "256KiB"}


def experience(env_ids: Any, number: Any, step_type: Any, discount: Any = 1.0, prio: Any = 0.0) -> dict[str, Any]:
    """Steps whose observation says which row they were added to, and as which of its steps."""
    env, n = torch.as_tensor(env_ids), torch.as_tensor(number).expand(len(env_ids))
    ones = torch.ones(len(env))
    return {
        "step_type": torch.as_tensor(step_type, dtype=torch.int32).expand(len(env)).clone(),
        "reward": n * 0.5,
        "discount": torch.as_tensor(discount) * ones,
        "observation": {"code": torch.stack([env.float(), n.float()], 1)},
        "action": n.to(torch.int64),
        "env_id": env.to(torch.int64),
    }


def kind(t: int, length: int) -> int:
    """The type of step t if all episodes have the same length."""
    return int(FIRST if t % length == 0 else LAST if t % length == length - 1 else MID)


@pytest.fixture
def made() -> Iterator[Any]:
    buffers: list[ReplayBuffer] = []

    def make(n_rows: int, max_length: int = 64, **options: Any) -> ReplayBuffer:
        buffers.append(ReplayBuffer(None, n_rows, max_length, **(OPTIONS | options)))
        return buffers[-1]

    yield make
    for buffer in buffers:
        buffer.close()


def fill(buffer: ReplayBuffer, env: int, n_steps: int, first: int = 0, episode: int = 5) -> None:
    """Add steps to one environment, in episodes of one length that end with LAST."""
    for t in range(first, first + n_steps):
        buffer.add_batch(experience([env], t, kind(t, episode), 0.0 if t % 2 else 1.0), torch.tensor([env]))


def codes(batch: Any) -> list[list[tuple[int, int]]]:
    """Row and number of every step of every window."""
    return [[(int(e), int(n)) for e, n in window] for window in batch["observation"]["code"].tolist()]


def starts(buffer: ReplayBuffer, n: int, length: int) -> list[tuple[int, int]]:
    _, info = buffer.get_batch(n, length)
    return list(zip(info.env_ids.tolist(), info.positions.tolist(), strict=True))


# ---- rows, positions, episodes


def test_a_batch_adds_one_step_to_each_listed_row_and_rows_fill_by_themselves(made: Any) -> None:
    buffer = made(4, 8)
    buffer.add_batch(experience(range(4), 0, FIRST))
    buffer.add_batch(experience([3, 1], 1, MID), torch.tensor([3, 1]))
    buffer.add_batch(experience([1], 2, LAST), [1])
    assert buffer.current_size.tolist() == [1, 3, 1, 2]
    assert buffer.get_current_position().tolist() == [1, 3, 1, 2]
    assert buffer.total_size == 7
    assert buffer.num_environments == 4
    found = buffer.get_field("observation.code", torch.tensor([1, 1, 3]), torch.tensor([0, 2, 1]))
    assert found.tolist() == [[1, 0], [1, 2], [3, 1]]


@pytest.mark.parametrize(
    ("env_ids", "says"),
    [
        ([1, 1], "expected each environment once, got"),
        ([0, 4], "expected 0 to 3, got 0 to 4"),
        ([0.5, 1.0], "some integers"),
    ],
)
def test_rows_that_are_named_twice_or_do_not_exist_are_refused(made: Any, env_ids: Any, says: str) -> None:
    buffer = made(4)
    buffer.add_batch(experience(range(4), 0, FIRST))
    with pytest.raises(DataError, match=says):
        buffer.add_batch(experience([0, 1], 1, MID), torch.tensor(env_ids))
    assert buffer.current_size.tolist() == [1, 1, 1, 1]


@dataclass
class Step:
    env: int
    number: int
    kind: int
    begin: int
    stretch: int


class Model:
    """What rows hold, as lists."""

    def __init__(self, n_rows: int, length: int) -> None:
        self.rows: list[list[Step]] = [[] for _ in range(n_rows)]
        self.length, self.n_stretches = length, 0
        self.cut: set[int] = set()  # rows whose newest step was the last of a session

    def add(self, env: int, kind: int) -> None:
        row = self.rows[env]
        before = row[-1] if row else None
        goes_on = before is not None and before.kind != LAST and kind != FIRST and env not in self.cut
        self.cut.discard(env)
        follows = before is not None and (goes_on or (before.kind == LAST and kind == FIRST))
        self.n_stretches += not follows
        begin = before.begin if before is not None and goes_on else len(row)
        stretch = before.stretch if before is not None and follows else self.n_stretches
        row.append(Step(env, len(row), kind, begin, stretch))

    def first(self, env: int) -> int:
        return max(0, len(self.rows[env]) - self.length)

    def windows(self, length: int) -> set[tuple[int, int]]:
        return {
            (env, p)
            for env, row in enumerate(self.rows)
            for p in range(self.first(env), len(row) - length + 1)
            if row[p].stretch == row[p + length - 1].stretch
        }

    def end(self, env: int, position: int) -> int:
        row = self.rows[env]
        return max(step.number for step in row if step.begin == row[position].begin)


adds = st.lists(
    st.dictionaries(st.integers(0, 2), st.sampled_from([0, 1, 1, 1, 2]), min_size=1), min_size=1, max_size=40
)


@settings(max_examples=60)
@given(adds, st.integers(1, 12), st.integers(1, 4), st.booleans())
def test_rows_are_rings_whatever_is_added(
    batches: list[dict[int, int]], max_length: int, length: int, prioritised: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alf_buffer, "_MIN_EVICTION", 5)
        buffer = ReplayBuffer(None, 3, max_length, prioritized_sampling=prioritised, **OPTIONS)
        model = Model(3, max_length)
        add_all(buffer, model, batches)
        check_rows(buffer, model)
        check_windows(buffer, model, length)
        assert buffer.memory.n_steps <= 3 * max_length + 5 + 3  # those of the last batch
        buffer.close()


def add_all(buffer: ReplayBuffer, model: Model, batches: list[dict[int, int]]) -> None:
    for batch in batches:
        env = list(batch)
        number = [len(model.rows[e]) for e in env]
        buffer.add_batch(experience(env, number, list(batch.values())), torch.tensor(env))
        for e, step_kind in batch.items():
            model.add(e, step_kind)


def check_rows(buffer: ReplayBuffer, model: Model) -> None:
    for env, row in enumerate(model.rows):
        first = model.first(env)
        assert int(buffer.get_earliest_position(env)) == first
        position = torch.arange(first, len(row))
        if not len(position):
            continue
        ids = torch.full_like(position, env)
        found = buffer.get_field({"a": "action", "kind": "step_type"}, ids, position)
        assert found["a"].tolist() == position.tolist()
        assert found["kind"].tolist() == [step.kind for step in row[first:]]
        assert buffer.get_episode_begin_position(position, ids).tolist() == [step.begin for step in row[first:]]
        ends = [model.end(env, p) - p for p in position.tolist()]
        assert buffer.steps_to_episode_end(position, ids).tolist() == ends
        for gone in (first - 1, len(row)):
            with pytest.raises(IndexError, match=f"env {env}, position {gone}: no such step"):
                buffer.get_field("action", torch.tensor([env]), torch.tensor([gone]))


def check_windows(buffer: ReplayBuffer, model: Model, length: int) -> None:
    wanted = model.windows(length)
    if not wanted:
        with pytest.raises(NotReadyError, match=f"{length} consecutive steps"):
            buffer.get_batch(4, length)
        return
    batch, info = buffer.get_batch(len(wanted), length)
    drawn = list(zip(info.env_ids.tolist(), info.positions.tolist(), strict=True))
    assert set(drawn) == wanted  # spread evenly: each of them once
    assert codes(batch) == [[(env, p + i) for i in range(length)] for env, p in drawn]


def test_a_full_row_takes_nothing_from_another(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alf_buffer, "_MIN_EVICTION", 8)
    buffer = made(2, 20)
    fill(buffer, 0, 7)
    fill(buffer, 1, 300)
    assert buffer.current_size.tolist() == [7, 20]
    batch, _ = buffer.gather_all()
    assert batch["action"][0, :7].tolist() == list(range(7))
    assert batch["action"][1].tolist() == list(range(280, 300))
    assert buffer.memory.n_steps <= 27 + 8  # the store has given up what the row has


def test_an_episode_longer_than_its_row_stays_and_began_before(made: Any) -> None:
    buffer = made(1, 10)
    fill(buffer, 0, 35, episode=100)
    position, env = torch.arange(25, 35), torch.zeros(10, dtype=torch.int64)
    assert set(starts(buffer, 9, 2)) == {(0, p) for p in range(25, 34)}
    assert (buffer.get_episode_begin_position(position, env) == 0).all()
    assert buffer.steps_to_episode_end(position, env).tolist() == list(range(9, -1, -1))
    with pytest.raises(IndexError, match="that environment has 25 to 34"):
        buffer.get_field("reward", env[:1], torch.tensor([0]))


def test_the_store_knows_how_episodes_ended_and_when_rewards_arrived(made: Any) -> None:
    buffer = made(3, 50)
    for t in range(4):
        last = [LAST, LAST, MID] if t == 3 else FIRST if t == 0 else MID
        buffer.add_batch(experience(range(3), t, last, [0.0, 1.0, 1.0]))
    buffer.add_batch(experience([2], 4, FIRST), [2])  # it never got its LAST
    buffer.flush()
    store = buffer.memory.store
    store.refresh()
    ends = {
        (int(e), int(n)): str(end)
        for e, n, end in zip(*(store.episodes[c] for c in ("env", "length", "end")), strict=True)
    }
    assert ends == {(0, 4): "terminated", (1, 4): "truncated", (2, 4): "truncated", (2, 1): "open"}
    assert store.schema is not None
    assert store.schema.reward_alignment == "observation"
    batch = buffer.memory.sample(64, Windows(n_step=1, gamma=1.0, squeeze=True))
    assert torch.equal(batch["n_step"]["return"], batch["reward"] + 0.5)  # that of the next step


# ---- nests


class TimeStep(NamedTuple):
    step_type: Any = ()
    reward: Any = ()
    observation: Any = ()
    untransformed: Any = ()


@dataclass
class Info:
    value: Any
    logits: Any


class Experience(NamedTuple):
    time_step: TimeStep
    action: Any
    info: Info
    state: Any = ()


def nested(n: int, t: int) -> Experience:
    observation = [torch.full((n, 2), float(t)), {"image": torch.full((n, 4, 4), t, dtype=torch.uint8)}]
    step = TimeStep(torch.full((n,), kind(t, 5), dtype=torch.int32), torch.full((n,), float(t)), observation)
    return Experience(step, torch.full((n,), t), Info(torch.zeros(n), torch.zeros(n, 3)))


def test_batches_are_the_nests_that_were_added(made: Any) -> None:
    buffer = made(2)
    for t in range(10):
        buffer.add_batch(nested(2, t))
    batch, info = buffer.get_batch(6, 3)
    assert type(batch) is Experience
    assert type(batch.time_step) is TimeStep
    assert type(batch.info) is Info
    assert (batch.state, batch.time_step.untransformed) == ((), ())
    assert batch.time_step.observation[0].shape == (6, 3, 2)
    assert batch.time_step.observation[1]["image"].dtype == torch.uint8
    assert torch.equal(batch.action, info.positions[:, None] + torch.arange(3))
    assert type(info) is BatchInfo
    assert info.replay_buffer is buffer
    assert info.importance_weights == ()
    part = buffer.get_field(
        "time_step.observation", info.env_ids[:, None], info.positions[:, None] + torch.arange(2)
    )
    assert part[1]["image"].shape == (6, 2, 4, 4)
    with pytest.raises(KeyError, match="no field 'time_step/obs'; the fields at this level are step_type, reward"):
        buffer.get_field("time_step.obs", torch.tensor([0]), torch.tensor([0]))


def test_a_spec_says_what_steps_are_like_before_any_is_added(made: Any) -> None:
    spec = {"step_type": torch.zeros((), dtype=torch.int32), "reward": torch.zeros(()), "x": torch.zeros(3)}
    buffer = ReplayBuffer(spec, 2, 10, **OPTIONS)
    with pytest.raises(NotReadyError, match="2 consecutive steps; the fullest has 0 steps"):
        buffer.get_batch(4, 2)
    with pytest.raises(DataError, match="field 'x': expected float32"):
        buffer.add_batch({k: torch.stack([v, v]) for k, v in (spec | {"x": torch.zeros(4)}).items()})
    buffer.add_batch({k: torch.stack([v, v]) for k, v in spec.items()})
    assert buffer.get_batch(4, 1)[0]["x"].shape == (4, 1, 3)
    buffer.close()


# ---- drawing


def test_every_window_is_as_likely_however_much_its_row_holds(made: Any) -> None:
    buffer = made(4, 300, with_replacement=True, seed=1)  # theirs drew from the first row as often as from the last
    for env, n in enumerate([5, 200, 60, 1]):
        fill(buffer, env, n)
    counts = np.zeros((4, 300), int)
    for env, position in starts(buffer, 40_000, 2):
        counts[env, position] += 1
    sizes = [4, 199, 59, 0]  # the last environment is too short for a window and does not block the others
    assert (counts > 0).sum(1).tolist() == sizes
    expected = 40_000 / sum(sizes)
    drawn = counts[counts > 0]
    assert ((drawn - expected) ** 2 / expected).sum() < 356  # chi-square of 261 degrees: one in ten thousand


def test_windows_are_spread_evenly_unless_they_are_drawn_with_replacement(made: Any) -> None:
    buffer = made(3, 100, seed=2)
    for env in range(3):
        fill(buffer, env, 40)
    assert len(set(starts(buffer, 117, 2))) == 117
    assert sorted(np.unique(starts(buffer, 234, 2), axis=0, return_counts=True)[1]) == [2] * 117
    other = made(3, 100, seed=2, with_replacement=True)
    for env in range(3):
        fill(other, env, 40)
    assert len(set(starts(other, 117, 2))) < 100


def test_windows_go_on_from_last_into_first_and_never_where_a_recording_broke_off(made: Any) -> None:
    buffer = made(1, 100)
    for t, step_kind in enumerate([FIRST, MID, LAST, FIRST, MID, FIRST, LAST, MID, MID]):
        buffer.add_batch(experience([0], t, step_kind))
    # 4 has no LAST, and 7 no FIRST.
    assert {p for _, p in starts(buffer, 50, 2)} == {0, 1, 2, 3, 5, 7}
    assert {p for _, p in starts(buffer, 50, 4)} == {0, 1}


def test_draws_have_a_seed_of_their_own(made: Any) -> None:
    found = []
    for seed in (1, 1, 2):
        buffer = made(2, 50, seed=seed)
        fill(buffer, 0, 40)
        torch.manual_seed(len(found))
        found.append([starts(buffer, 16, 2) for _ in range(2)])
    assert found[0] == found[1] != found[2]
    assert found[0][0] != found[0][1]


def test_a_part_of_a_batch_comes_from_the_newest_windows_of_each_row(made: Any) -> None:
    buffer = made(2, 200, recent_data_steps=3, recent_data_ratio=0.25)
    fill(buffer, 0, 200)
    fill(buffer, 1, 90)
    _, info = buffer.get_batch(40, 4)
    newest = torch.tensor([196, 86])[info.env_ids[:10]]
    assert ((newest - info.positions[:10]) < 3).all()
    assert set(info.env_ids[:10].tolist()) == {0, 1}
    assert (info.positions[10:] < 100).any()
    few = made(2, 200, recent_data_steps=30, recent_data_ratio=0.25)  # an even draw gives as many
    fill(few, 0, 100)
    assert min(p for _, p in starts(few, 8, 1)) < 20


def test_the_earliest_frames_may_be_ignored(made: Any) -> None:
    for prioritised in (False, True):
        buffer = made(2, 20, num_earliest_frames_ignored=3, prioritized_sampling=prioritised)
        fill(buffer, 0, 10)
        fill(buffer, 1, 2)
        assert set(starts(buffer, 60, 2)) == {(0, p) for p in range(3, 9)}
        fill(buffer, 0, 25, first=10)
        assert set(starts(buffer, 160, 2)) == {(0, p) for p in range(18, 34)}
        batch, info = buffer.gather_all(ignore_earliest_frames=True)
        assert batch["action"][0].tolist() == list(range(18, 35))
        assert info.valid.sum(1).tolist() == [17, 0]


def test_a_thread_may_add_while_others_draw(made: Any) -> None:
    buffer = made(4, 50, prioritized_sampling=True)
    for t in range(5):
        buffer.add_batch(experience(range(4), t, kind(t, 7)))

    def learn(thread: int) -> None:
        if not thread:
            for t in range(5, 400):
                buffer.add_batch(experience(range(4), t, kind(t, 7)))
        for _ in range(60):
            batch, info = buffer.get_batch(16, 3)
            assert torch.equal(batch["action"], info.positions[:, None] + torch.arange(3))
            buffer.update_priority(info.env_ids, info.positions, torch.rand(16) + 0.1)

    all_well(3, learn)


# ---- priorities


def weighted(buffer: ReplayBuffer, n: int, length: int) -> dict[tuple[int, int], float]:
    _, info = buffer.get_batch(n, length)
    keys = zip(info.env_ids.tolist(), info.positions.tolist(), strict=True)
    return dict(zip(keys, info.importance_weights.tolist(), strict=True))


def test_weights_are_priorities_over_the_mean_of_those_that_are_not_0(made: Any) -> None:
    buffer = made(2, 16, prioritized_sampling=True)
    fill(buffer, 0, 6)
    fill(buffer, 1, 3)
    env, position = torch.tensor([0, 0, 0, 0, 0, 1, 1]), torch.tensor([0, 1, 2, 3, 4, 0, 1])
    priority = torch.tensor([1.0, 2.0, 0.0, 4.0, 1.0, 3.0, 1.0])
    buffer.update_priority(env, position, priority)
    found = weighted(buffer, 2000, 2)
    mean = 12 / 6
    expected = {
        (e, p): v / mean for e, p, v in zip(env.tolist(), position.tolist(), priority.tolist(), strict=True) if v
    }
    assert found == pytest.approx(expected, rel=1e-6)  # what has priority 0 never comes


def test_windows_come_in_proportion_to_their_priorities(made: Any) -> None:
    buffer = made(2, 32, prioritized_sampling=True, with_replacement=True, seed=5)
    fill(buffer, 0, 20)
    fill(buffer, 1, 9)
    env = torch.tensor([0] * 18 + [1] * 7)
    position = torch.tensor([*range(18), *range(7)])
    priority = torch.linspace(0.1, 5.0, 25)
    buffer.update_priority(env, position, priority)
    found = starts(buffer, 50_000, 3)
    counts = np.array([found.count(pair) for pair in zip(env.tolist(), position.tolist(), strict=True)])
    expected = (priority / priority.sum()).numpy() * 50_000
    assert counts.sum() == 50_000  # the last two steps of a row are no starts
    assert ((counts - expected) ** 2 / expected).sum() < 61  # chi-square of 24 degrees: one in ten thousand


def test_a_priority_that_is_set_twice_counts_once(made: Any) -> None:
    buffer = made(1, 16, prioritized_sampling=True)
    fill(buffer, 0, 5)
    zeros = torch.zeros(4, dtype=torch.int64)
    buffer.update_priority(zeros, torch.tensor([0, 1, 0, 0]), torch.tensor([7.0, 1.0, 9.0, 3.0]))
    expected = {(0, 0): 3 / 1.5, (0, 1): 1 / 1.5, (0, 2): 1 / 1.5, (0, 3): 1 / 1.5}  # theirs counted 6 windows
    assert weighted(buffer, 500, 2) == pytest.approx(expected, rel=1e-6)


def test_new_steps_get_the_largest_priority_and_windows_wait_until_they_are_complete(made: Any) -> None:
    buffer = made(1, 16, prioritized_sampling=True, initial_priority=0.5)
    fill(buffer, 0, 4)
    assert buffer.initial_priority == 0.5
    assert weighted(buffer, 100, 2) == pytest.approx({(0, 0): 1.0, (0, 1): 1.0, (0, 2): 1.0})
    buffer.update_priority(torch.tensor([0]), torch.tensor([1]), torch.tensor([2.0]))
    fill(buffer, 0, 2, first=4)
    assert buffer.initial_priority == 2.0
    expected = {(0, 0): 0.5, (0, 1): 2.0, (0, 2): 0.5, (0, 3): 0.5, (0, 4): 2.0}
    mean = sum(expected.values()) / 5
    assert weighted(buffer, 2000, 2) == pytest.approx({k: v / mean for k, v in expected.items()}, rel=1e-6)


def test_another_length_of_windows_changes_no_priority(made: Any) -> None:
    buffer = made(1, 16, prioritized_sampling=True)
    fill(buffer, 0, 6)
    buffer.update_priority(torch.zeros(6, dtype=torch.int64), torch.arange(6), torch.arange(1.0, 7.0))
    before = weighted(buffer, 5000, 2)
    assert set(weighted(buffer, 5000, 5)) == {(0, 0), (0, 1)}
    assert len(weighted(buffer, 5000, 1)) == 6
    assert weighted(buffer, 5000, 2) == pytest.approx(before)  # theirs forgot those of the steps in between


def test_an_update_that_comes_late_hits_no_other_step(made: Any) -> None:
    buffer = made(1, 8, prioritized_sampling=True)
    fill(buffer, 0, 8)
    buffer.get_batch(4, 2)
    fill(buffer, 0, 5, first=8)  # places 0 to 4 are taken by others now
    buffer.update_priority(torch.tensor([0, 0]), torch.tensor([2, 6]), torch.tensor([9.0, 3.0]))
    mean = (6 * 1.0 + 3.0) / 7
    assert weighted(buffer, 3000, 2) == pytest.approx(
        {(0, p): (3.0 if p == 6 else 1.0) / mean for p in range(5, 12)}, rel=1e-6
    )


def test_priorities_may_grow_without_bounds_and_bad_ones_are_refused(made: Any) -> None:
    buffer = made(1, 16, prioritized_sampling=True)
    fill(buffer, 0, 4)
    buffer.get_batch(1, 1)
    zeros = torch.zeros(4, dtype=torch.int64)
    buffer.update_priority(zeros, torch.arange(4), torch.tensor([1e30, 1e30, 2e30, 0.0]))
    assert weighted(buffer, 500, 1) == pytest.approx({(0, 0): 0.75, (0, 1): 0.75, (0, 2): 1.5}, rel=1e-6)
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(DataError, match="expected a finite number of at least 0"):
            buffer.update_priority(zeros[:1], torch.tensor([0]), torch.tensor([bad]))
    buffer.update_priority(zeros, torch.arange(4), torch.zeros(4))
    with pytest.raises(NotReadyError, match="has a priority above 0"):
        buffer.get_batch(1, 1)
    with pytest.raises(ValueError, match="prioritized_sampling=True"):
        made(1).update_priority(zeros, zeros, torch.ones(4))


def test_weights_take_into_account_that_recent_windows_come_more_often(made: Any) -> None:
    buffer = made(
        1, 200, prioritized_sampling=True, recent_data_steps=10, recent_data_ratio=0.5, with_replacement=True
    )
    fill(buffer, 0, 101)
    found = starts(buffer, 40_000, 2)
    weights = weighted(buffer, 10_000, 2)
    for window in ((0, 3), (0, 95)):
        share = found.count(window) / 40_000
        assert weights[window] == pytest.approx(share * 100, rel=0.15)
    assert weights[0, 3] == pytest.approx(0.5)
    assert weights[0, 95] == pytest.approx(0.5 + 0.5 * 100 / 10)


# ---- hindsight


def reached(achieved: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
    return (achieved == goal).all(-1).float() - 1


def goals(made: Any, n_rows: int = 2, episode: int = 7) -> ReplayBuffer:
    buffer: ReplayBuffer = made(n_rows, 100)
    for t in range(40):
        n = torch.full((n_rows, 1), float(t))
        step = experience(range(n_rows), t, kind(t, episode))
        step["observation"] |= {
            "achieved_goal": n + torch.arange(n_rows)[:, None] * 1000,
            "desired_goal": n * 0 - 1,
        }
        step["reward"] = torch.full((n_rows,), -1.0)
        buffer.add_batch(step)
    return buffer


@pytest.mark.parametrize("length", [1, 2, 5])
def test_hindsight_gives_goals_of_the_same_episode_for_windows_of_any_length(made: Any, length: int) -> None:
    buffer = goals(made)  # ALF takes exactly two steps
    relabel = Hindsight(
        "future",
        fraction=1.0,
        reward=reached,
        goal="observation/desired_goal",
        achieved="observation/achieved_goal",
    )
    before = buffer.gather_all()[0]
    batch, info = buffer.get_batch(70, length, relabel=relabel)
    t = info.positions[:, None] + torch.arange(length)
    is_same = t // 7 == t[:, :1] // 7  # the part of the window that lies in its first episode
    goal = batch["observation"]["desired_goal"][..., 0]
    number = goal - info.env_ids[:, None] * 1000
    is_new = goal >= 0
    assert is_new.float().mean() > 0.5  # the others have no later step
    assert torch.equal(number[is_new].long() // 7, t[is_new] // 7)  # of the episode that the step is in
    assert (number > t)[:, 0][is_new[:, 0]].all()
    assert (goal == goal[:, :1])[is_same].all()
    is_first = batch["step_type"] == FIRST
    hit = (batch["observation"]["achieved_goal"][..., 0] == goal) & ~is_first
    assert torch.equal(batch["reward"], hit.float() - 1)
    assert torch.equal(batch["action"], t)
    after = buffer.gather_all()[0]
    assert torch.equal(before["observation"]["desired_goal"], after["observation"]["desired_goal"])


# ---- all of it


def test_gather_all_gives_rows_of_equal_size_as_they_are(made: Any) -> None:
    buffer = made(3, 10)
    for t in range(25):
        buffer.add_batch(experience(range(3), t, kind(t, 5)))
    batch, info = buffer.gather_all()
    assert batch["action"].tolist() == [list(range(15, 25))] * 3
    assert (info.env_ids.tolist(), info.positions.tolist()) == ([0, 1, 2], [15, 15, 15])
    assert info.valid.all()


def test_gather_all_takes_rows_of_any_size_and_says_what_exists(made: Any) -> None:
    buffer = made(3, 10)
    with pytest.raises(NotReadyError, match="the buffer is empty"):
        buffer.gather_all()
    fill(buffer, 0, 13)
    fill(buffer, 2, 4)
    batch, info = buffer.gather_all()  # theirs refused it
    assert batch["observation"]["code"].shape == (3, 10, 2)
    assert info.positions.tolist() == [3, 0, 0]
    assert info.valid.sum(1).tolist() == [10, 0, 4]
    assert batch["action"][info.valid].tolist() == [*range(3, 13), *range(4)]
    assert (batch["action"][~info.valid] == 0).all()


@pytest.mark.parametrize("prioritised", [False, True])
def test_a_row_that_is_cleared_goes_on_with_positions_that_were_never_used(made: Any, prioritised: bool) -> None:
    buffer = made(2, 10, prioritized_sampling=prioritised)
    for env in range(2):
        fill(buffer, env, 7)
    buffer.get_batch(4, 2)
    buffer.clear(torch.tensor([0]))
    assert buffer.current_size.tolist() == [0, 7]
    assert buffer.memory.n_steps == 7
    assert {env for env, _ in starts(buffer, 30, 2)} == {1}
    fill(buffer, 0, 2, first=7)
    assert buffer.get_current_position().tolist() == [9, 7]  # theirs began with 0 again
    assert codes(buffer.get_batch(7, 2)[0])[0] == [(0, 7), (0, 8)]
    buffer.clear()
    assert buffer.total_size == 0
    with pytest.raises(NotReadyError):
        buffer.get_batch(1, 1)


# ---- checkpoints


def saved(tmp_path: Path, **options: Any) -> ReplayBuffer:
    buffer = ReplayBuffer(None, 3, 20, url=tmp_path / "run", fsync=False, **(OPTIONS | options))
    for env, n in enumerate([33, 12, 4]):
        fill(buffer, env, n)
    return buffer


@pytest.mark.parametrize("prioritised", [False, True])
def test_a_resumed_buffer_goes_on_as_if_nothing_had_happened(tmp_path: Path, prioritised: bool) -> None:
    buffer = saved(tmp_path, prioritized_sampling=prioritised)
    if prioritised:
        _, info = buffer.get_batch(16, 2)
        buffer.update_priority(info.env_ids, info.positions, torch.arange(16) / 4)
    buffer.save_checkpoint("a", wait=True)
    wanted = [buffer.get_batch(16, 2) for _ in range(2)]
    whole, about = buffer.gather_all()
    buffer.close()
    with ReplayBuffer.resume(
        tmp_path / "run",
        num_environments=3,
        max_length=20,
        prioritized_sampling=prioritised,
        fsync=False,
        **OPTIONS,
    ) as again:
        for batch, info in wanted:
            found, new = again.get_batch(16, 2)
            assert codes(found) == codes(batch)
            assert torch.equal(new.env_ids, info.env_ids)
            assert torch.equal(new.positions, info.positions)
            if prioritised:  # theirs lost the count that weights are made with
                torch.testing.assert_close(new.importance_weights, info.importance_weights, rtol=1e-6, atol=0)
        same, info = again.gather_all()
        assert torch.equal(same["observation"]["code"], whole["observation"]["code"])
        assert torch.equal(info.positions, about.positions)
        assert again.get_current_position().tolist() == [33, 12, 4]


def test_the_newest_step_is_no_last_after_resuming_and_nothing_goes_on_from_it(tmp_path: Path) -> None:
    buffer = saved(tmp_path)
    buffer.save_checkpoint("a", wait=True)
    before = buffer.get_field("step_type", torch.arange(3), buffer.get_current_position() - 1)
    buffer.close()
    with ReplayBuffer.resume(
        tmp_path / "run", "a", num_environments=3, max_length=20, fsync=False, **OPTIONS
    ) as again:
        newest = again.get_field("step_type", torch.arange(3), again.get_current_position() - 1)
        assert newest.tolist() == before.tolist() == [MID, MID, MID]  # theirs were all LAST
        for t in range(3):
            again.add_batch(experience(range(3), t, kind(t, 5)))
        found = starts(again, 600, 2)
        assert {p for env, p in found if env == 1} == {*range(11), 12, 13}
        assert again.get_episode_begin_position(torch.tensor([11, 12, 14]), torch.tensor([1, 1, 1])).tolist() == [
            10,
            12,
            12,
        ]
        assert again.steps_to_episode_end(torch.tensor([10, 12]), torch.tensor([1, 1])).tolist() == [1, 2]


@settings(max_examples=15)
@given(adds, adds, st.integers(1, 12), st.integers(1, 4), st.booleans())
def test_rows_are_the_same_rings_after_resuming_whatever_is_added(
    before: list[dict[int, int]], after: list[dict[int, int]], max_length: int, length: int, prioritised: bool
) -> None:
    before = [{0: MID, 1: MID, 2: MID}, *before]  # a row that has nothing forgets where it was
    url, options = f"memory://alf-{uuid.uuid4().hex}", OPTIONS | {"prioritized_sampling": prioritised}
    model = Model(3, max_length)
    with ReplayBuffer(None, 3, max_length, url=url, **options) as buffer:
        add_all(buffer, model, before)
        buffer.save_checkpoint("a", wait=True)
        add_all(buffer, Model(3, max_length), after)  # given up
    with ReplayBuffer.resume(url, num_environments=3, max_length=max_length, **options) as again:
        check_rows(again, model)
        model.cut = {0, 1, 2}
        add_all(again, model, after)
        check_rows(again, model)
        check_windows(again, model, length)


class FailFrom(Plan):
    """Everything is refused from the n-th put of a checkpoint on."""

    def __init__(self) -> None:
        self.at: int | None = None

    def before(self, call: Call) -> None:
        if self.at is not None and call.action == "put":
            self.at -= "checkpoints/" in call.key
            if self.at < 0:
                raise broken()


def test_a_save_that_breaks_off_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    for at in range(20):
        plan, url = FailFrom(), str(tmp_path / f"run{at}")
        with through(FaultyStorage(real_storage(url), plan)):
            buffer = ReplayBuffer(None, 1, 20, url=url, fsync=False, commit_seconds=None, **OPTIONS)
            fill(buffer, 0, 7)
            buffer.save_checkpoint("whole", wait=True)
            fill(buffer, 0, 4, first=7)
            plan.at = at
            try:
                buffer.save_checkpoint("torn", wait=True)
            except StorageError:
                torn = True
            else:
                torn = False
            plan.at = None
            buffer.memory._release()
        with ReplayBuffer.resume(url, num_environments=1, max_length=20, fsync=False, **OPTIONS) as again:
            assert again.current_size.tolist() == [7 if torn else 11]  # theirs picked the broken file
        if not torn:
            assert at > 0
            return
    raise AssertionError("a save takes fewer puts than that")


def ranks_of(url: str, world_size: int, call: Callable[[ReplayBuffer], Any], **options: Any) -> list[Any]:
    """Resume a checkpoint with several ranks; returns the function's result for the buffer of each."""
    common = OPTIONS | {
        "num_environments": 2,
        "max_length": 40,
        "prioritized_sampling": True,
        "world_size": world_size,
    }

    def resume(rank: int) -> Any:
        with ReplayBuffer.resume(url, rank=rank, **(common | options)) as buffer:
            return call(buffer)

    return all_well(world_size, resume)


def contents(buffer: ReplayBuffer) -> list[tuple[int, int, int, float]]:
    """Code of every step, the id that it has, and the weight of its window of one step."""
    batch, info = buffer.gather_all()
    weights = weighted(buffer, 4000, 1)
    position = info.positions[:, None] + torch.arange(info.valid.shape[1])
    env, row = info.env_ids[:, None].expand_as(position)[info.valid], batch["env_id"][info.valid]
    assert torch.equal(env, row)  # ALF keeps environments that no longer exist
    assert ((row >= 0) & (row < buffer.num_environments)).all()
    keys = list(zip(env.tolist(), position[info.valid].tolist(), strict=True))
    code = batch["observation"]["code"][info.valid].long().tolist()
    return [(*c, e, weights.get(key, 0.0)) for c, (e, _), key in zip(code, keys, keys, strict=True)]


def save_ranks(url: str, world_size: int) -> None:
    def train(rank: int) -> None:
        with ReplayBuffer(
            None, 2, 40, url=url, rank=rank, world_size=world_size, prioritized_sampling=True, **OPTIONS
        ) as buffer:
            for env in range(2):
                for t in range(11 + 6 * rank + 9 * env):
                    step = experience([rank * 2 + env], t, kind(t, 5 + rank))
                    step["env_id"][:] = env
                    buffer.add_batch(step, [env])
            row, position = (a.ravel() for a in np.mgrid[0:2, 0:11])
            priority = torch.as_tensor((1.0 + rank * 2 + row + position / 100) * (position != 3))
            buffer.update_priority(row, position, priority)
            buffer.save_checkpoint("a", wait=True)

    all_well(world_size, train)


@pytest.mark.parametrize(("old", "new"), [(1, 3), (3, 1), (2, 4), (3, 2)])
def test_the_rows_of_some_ranks_go_to_another_number_of_ranks(old: int, new: int) -> None:
    url = f"memory://alf-ranks-{old}-{new}"
    save_ranks(url, old)
    found = [step for steps in ranks_of(url, new, contents, max_length=200) for step in steps]
    lengths = {rank * 2 + env: 11 + 6 * rank + 9 * env for rank in range(old) for env in range(2)}
    assert sorted(step[:2] for step in found) == [(env, t) for env, n in sorted(lengths.items()) for t in range(n)]
    assert [s for steps in ranks_of(url, new, contents, max_length=200) for s in steps] == found  # every time


def priorities(buffer: ReplayBuffer) -> dict[tuple[int, int], float]:
    batch, info = buffer.get_batch(4000, 1)
    handles = zip(codes(batch), info.importance_weights.tolist(), strict=True)
    return {window[0]: weight for window, weight in handles}


def test_priorities_go_with_their_steps_to_other_ranks() -> None:
    url = "memory://alf-ranks-priorities"
    save_ranks(url, 2)
    before = ranks_of(url, 2, priorities)
    together = ranks_of(url, 1, priorities, max_length=200)[0]
    for part in before:
        some = next(iter(part))
        scale = together[some] / part[some]
        assert {code: together[code] for code in part} == pytest.approx(
            {code: weight * scale for code, weight in part.items()}, rel=1e-5
        )
    assert len(together) == sum(map(len, before)) == 11 + 20 + 17 + 26 - 4  # what had priority 0 has it still


def go_on(buffer: ReplayBuffer) -> tuple[list[int], list[int]]:
    """Train a little more, and save."""
    first = buffer.get_current_position().tolist()
    for t in range(12):
        step = experience([90, 91], t, kind(t, 6))
        step["env_id"] = torch.arange(2)
        buffer.add_batch(step)
        batch, info = buffer.get_batch(8, 3)
        assert torch.equal(batch["env_id"], info.env_ids[:, None].expand(8, 3))
        is_joint = batch["step_type"][:, :-1] == LAST
        assert torch.equal(is_joint, batch["step_type"][:, 1:] == FIRST)
        buffer.update_priority(info.env_ids, info.positions, torch.rand(8) + 0.1)
    buffer.save_checkpoint("b", wait=True)
    return first, places(buffer)


def places(buffer: ReplayBuffer) -> list[Any]:
    batch, info = buffer.gather_all()
    return [info.positions.tolist(), info.valid.tolist(), batch["observation"]["code"].tolist()]


def test_training_goes_on_after_redistribution_and_positions_stay_from_then_on() -> None:
    url = "memory://alf-ranks-training"
    save_ranks(url, 3)
    found = ranks_of(url, 2, go_on, max_length=150)
    for first, _ in found:
        assert min(first) >= 1 << 40  # no position that was given before is given again
    assert ranks_of(url, 2, places, max_length=150) == [after for _, after in found]


def test_a_row_that_is_dealt_more_than_it_keeps_keeps_it() -> None:
    url = "memory://alf-ranks-long"
    save_ranks(url, 4)
    sizes = ranks_of(url, 1, lambda buffer: (buffer.max_length, buffer.current_size.tolist()), max_length=10)
    n_steps = sum(2 * (11 + 6 * rank) + 9 for rank in range(4))
    assert sum(sizes[0][1]) == n_steps
    assert sizes[0][0] == max(sizes[0][1])


def test_incomplete_episodes_may_be_dropped(tmp_path: Path) -> None:
    buffer = saved(tmp_path)
    buffer.save_checkpoint("a", wait=True)
    buffer.close()
    common = {"num_environments": 3, "max_length": 20, "fsync": False} | OPTIONS
    with ReplayBuffer.resume(tmp_path / "run", incomplete="drop", policy="steps", **common) as again:
        assert again.total_size == 15 + 10  # of the first row, 13 and 14 had lost the beginning of their episode
        report = again.memory.partition_report
        assert report is not None
        batch, info = again.gather_all()
        types = batch["step_type"][info.valid]
        assert (types == FIRST).sum() == (types == LAST).sum() == 5


def test_rows_have_no_gaps_where_episodes_were_dropped_from_them(tmp_path: Path) -> None:
    for n_steps in (10, 8):  # of the first session, the last two steps are an episode that was cut
        with ReplayBuffer(None, 1, 50, url=tmp_path / "run", fsync=False, **OPTIONS) as buffer:
            fill(buffer, 0, n_steps, episode=4)
            buffer.save_checkpoint("a", wait=True)
    common = {"num_environments": 1, "max_length": 50, "fsync": False} | OPTIONS
    with ReplayBuffer.resume(
        tmp_path / "run", buffer.memory.checkpoints[-1].id, incomplete="drop", **common
    ) as again:
        _, info = again.gather_all()
        assert again.current_size.tolist() == [16]
        assert info.valid.all()
        assert {p - int(info.positions) for _, p in starts(again, 100, 2)} == set(range(15))


def test_redistributed_environments_have_no_gaps(tmp_path: Path) -> None:
    common = {"max_length": 50, "fsync": False} | OPTIONS
    with ReplayBuffer(None, 2, url=tmp_path / "run", **common) as buffer:
        for env in range(2):
            fill(buffer, env, 8, episode=4)
        buffer.save_checkpoint("a", wait=True)
    how: dict[str, Any] = {"policy": "steps"}
    for name, n_steps in (("b", 2), ("c", 4)):  # the first two are an episode that was cut
        with ReplayBuffer.resume(tmp_path / "run", num_environments=1, **how, **common) as buffer:
            fill(buffer, 0, n_steps, episode=4)
            buffer.save_checkpoint(name, wait=True)
        how = {}
    with ReplayBuffer.resume(tmp_path / "run", num_environments=1, incomplete="drop", **common) as again:
        _, info = again.gather_all()
        assert again.current_size.tolist() == [20]
        assert {p - int(info.positions) for _, p in starts(again, 100, 2)} == set(range(19))


def test_an_empty_environment_does_not_restart_its_positions_after_resuming(tmp_path: Path) -> None:
    buffer = saved(tmp_path)
    buffer.clear([1])
    buffer.save_checkpoint("a", wait=True)
    buffer.close()
    common = {"num_environments": 3, "max_length": 20, "fsync": False} | OPTIONS
    with ReplayBuffer.resume(tmp_path / "run", **common) as again:
        position = again.get_current_position().tolist()
        assert (position[0], position[2]) == (33, 4)
        assert position[1] >= 12
        assert again.current_size.tolist() == [20, 0, 4]


def test_an_episode_without_its_beginning_begins_in_its_own_steps_after_a_redistribution(
    tmp_path: Path,
) -> None:
    with ReplayBuffer(None, 2, 10, url=tmp_path / "run", fsync=False, **OPTIONS) as buffer:
        fill(buffer, 0, 10)
        fill(buffer, 1, 35, episode=100)
        buffer.save_checkpoint("a", wait=True)
    common = {"num_environments": 1, "max_length": 50, "fsync": False} | OPTIONS
    with ReplayBuffer.resume(tmp_path / "run", policy="steps", **common) as again:
        batch, info = again.gather_all()
        position = info.positions + torch.arange(20)
        begin = again.get_episode_begin_position(position, torch.zeros(20, dtype=torch.int64))
        code = again.get_field("observation.code", torch.zeros(20, dtype=torch.int64), begin)
        source = batch["observation"]["code"][0]
        assert torch.equal(code[:, 0], source[:, 0])
        assert torch.equal(code[:, 1], torch.where(source[:, 0] == 1, 25, source[:, 1] // 5 * 5))


def test_a_store_of_other_steps_is_refused(tmp_path: Path) -> None:
    with trajstore.ReplayBuffer(tmp_path / "other", fsync=False, buffer_bytes="256KiB") as other:
        other.append({"step_type": np.int32(0), "reward": 0.0})
        other.save_checkpoint("a", wait=True)
    with pytest.raises(DataError, match="expected a field 'row_position', got step_type, reward"):
        ReplayBuffer.resume(tmp_path / "other", num_environments=1, fsync=False, **OPTIONS)


def test_fewer_rows_than_were_saved_need_a_policy(tmp_path: Path) -> None:
    buffer = saved(tmp_path)
    buffer.save_checkpoint("a", wait=True)
    buffer.close()
    common = {"max_length": 60, "fsync": False} | OPTIONS
    with pytest.raises(
        DataError, match="num_environments: expected at least 3, as in the store, got 2; give a policy"
    ):
        ReplayBuffer.resume(tmp_path / "run", num_environments=2, **common)
    with ReplayBuffer.resume(tmp_path / "run", num_environments=2, policy="steps", **common) as again:
        assert again.total_size == 20 + 12 + 4


def test_a_store_that_is_there_is_gone_on_with(tmp_path: Path) -> None:
    saved(tmp_path).close()
    with ReplayBuffer(None, 3, 20, url=tmp_path / "run", fsync=False, **OPTIONS) as again:
        again.add_batch(experience(range(3), 0, FIRST))
        assert again.get_current_position().tolist() == [34, 13, 5]
    assert len(trajstore.open(tmp_path / "run").episodes) > 3


# ---- what is refused


def test_bad_input_is_refused_by_name_and_changes_nothing(made: Any) -> None:
    buffer = made(2)
    buffer.add_batch(experience(range(2), 0, FIRST))
    good = experience(range(2), 1, FIRST)
    with pytest.raises(DataError, match="missing 'reward'"):
        buffer.add_batch({name: value for name, value in good.items() if name != "reward"})
    with pytest.raises(DataError, match="field 'action': expected int64"):
        buffer.add_batch(good | {"action": torch.zeros(2)})
    with pytest.raises(DataError, match="step_type: expected one for each of 2 environments"):
        buffer.add_batch(experience([0], 1, MID))
    with pytest.raises(DataError, match="each environment once"):
        buffer.add_batch(good, [1, 1])
    with pytest.raises(ValueError, match="blocking"):
        buffer.add_batch(good, blocking=True)
    with pytest.raises(IndexError, match="env 2, position 0"):
        buffer.get_field("action", torch.tensor([2]), torch.tensor([0]))
    buffer.add_batch(experience(range(2), 1, MID))  # the episodes continue
    assert buffer.get_episode_begin_position(torch.tensor([1, 1]), torch.tensor([0, 1])).tolist() == [0, 0]
    with pytest.raises(DataError, match="expected a field 'step_type', got reward"):
        made(1).add_batch({"reward": torch.zeros(1)})
    with pytest.raises(NotReadyError, match="the buffer is empty"):
        made(1).get_batch(1, 1)
    for options in (
        {"recent_data_ratio": 2.0},
        {"recent_data_steps": 0},
        {"num_earliest_frames_ignored": -1},
        {"initial_priority": 0.0},
    ):
        with pytest.raises(ValueError, match=next(iter(options))):
            made(1, **options)


# ---- what is easily got wrong


def pairs(info: BatchInfo) -> list[tuple[int, int]]:
    return list(zip(info.env_ids.tolist(), info.positions.tolist(), strict=True))


def resumed(tmp_path: Path, n_rows: int, max_length: int = 20, **options: Any) -> ReplayBuffer:
    common = OPTIONS | {"fsync": False, "num_environments": n_rows, "max_length": max_length}
    return ReplayBuffer.resume(tmp_path / "run", **(common | options))


def test_any_number_of_short_episodes_can_be_drawn_at_once() -> None:
    with ReplayBuffer(None, 64, 1000) as buffer:  # as it comes: nothing is committed for long
        for t in range(300):
            buffer.add_batch(experience(range(64), t, kind(t, 3)) | {"wide": torch.zeros(64, 100)})
            if t % 5 == 4:
                batch, info = buffer.get_batch(64, 2)
                assert torch.equal(batch["action"], info.positions[:, None] + torch.arange(2))
        batch, _ = buffer.gather_all()
        assert torch.equal(batch["action"], torch.arange(300).expand(64, 300))


def test_a_private_store_goes_with_its_with_block() -> None:
    files = fsspec.filesystem("memory").store
    before = len(files)
    with ReplayBuffer(None, 1, 10, **OPTIONS) as buffer:
        fill(buffer, 0, 3)
        assert len(files) > before
    assert len(files) == before


def test_a_private_store_keeps_nothing_for_readers_that_it_can_not_have(made: Any, tmp_path: Path) -> None:
    for url, grace_s in ((None, 0), (tmp_path / "run", 10.0)):
        buffer = made(1, 10, url=url)
        fill(buffer, 0, 1)
        assert buffer.memory.options.grace_s == grace_s


@pytest.mark.parametrize("prioritised", [False, True])
def test_a_position_is_never_given_again_whatever_is_cleared_in_whatever_session(
    tmp_path: Path, prioritised: bool
) -> None:
    options: dict[str, Any] = {"prioritized_sampling": prioritised}
    given: list[set[int]] = [set(), set()]
    cleared: list[list[int]] = [[0, 1], [0], [0], [1], []]
    for session, rows in enumerate(cleared):
        buffer = (
            resumed(tmp_path, 2, **options)
            if session
            else ReplayBuffer(None, 2, 20, url=tmp_path / "run", fsync=False, **OPTIONS, **options)
        )
        with buffer:
            for env in range(2):
                new = range(int(buffer.get_current_position()[env]), int(buffer.get_current_position()[env]) + 5)
                assert not given[env] & set(new)
                given[env] |= set(new)
                fill(buffer, env, 5)
            batch, info = buffer.get_batch(10, 2)
            assert torch.equal(batch["env_id"], info.env_ids[:, None].expand(10, 2))
            if rows:
                buffer.clear(rows)
            buffer.save_checkpoint(f"s{session}", wait=True)


def test_a_store_that_was_cleared_and_is_gone_on_with_gives_no_position_again(tmp_path: Path) -> None:
    with saved(tmp_path) as buffer:
        buffer.clear()
    with ReplayBuffer(None, 3, 20, url=tmp_path / "run", fsync=False, **OPTIONS) as again:
        again.add_batch(experience(range(3), 0, FIRST))
        assert (again.get_earliest_position(torch.arange(3)) >= torch.tensor([33, 12, 4])).all()


def named(buffer: ReplayBuffer) -> dict[tuple[int, int], tuple[int, ...]]:
    """The step that each row and position names."""
    batch, info = buffer.gather_all()
    position = info.positions[:, None] + torch.arange(info.valid.shape[1])
    env = info.env_ids[:, None].expand_as(position)
    keys = zip(env[info.valid].tolist(), position[info.valid].tolist(), strict=True)
    return dict(zip(keys, map(tuple, batch["observation"]["code"][info.valid].long().tolist()), strict=True))


def test_a_position_names_one_step_after_any_number_of_redistributions() -> None:
    url = f"memory://alf-{uuid.uuid4().hex}"
    save_ranks(url, 2)
    known: dict[tuple[int, ...], tuple[int, ...]] = {}
    for rank, steps in enumerate(ranks_of(url, 2, named)):
        known |= {(rank, *place): code for place, code in steps.items()}

    def train(buffer: ReplayBuffer) -> dict[tuple[int, int], tuple[int, ...]]:
        code = 100 * len(buffer.memory.checkpoints) + 10 * buffer.memory.rank
        for t in range(2):
            step = experience([code, code + 1], t, 2 * t)
            step["env_id"] = torch.arange(2)
            buffer.add_batch(step)
        buffer.save_checkpoint("again", wait=True)
        return named(buffer)

    for world_size in (5, 3, 1, 3, 5):  # of five, some are dealt a single episode
        for rank, steps in enumerate(ranks_of(url, world_size, train, max_length=200)):
            for (env, position), code in steps.items():
                assert known.setdefault((rank, env, position), code) == code


def test_redistributed_steps_keep_their_positions_if_nothing_is_added() -> None:
    url = f"memory://alf-{uuid.uuid4().hex}"
    save_ranks(url, 3)

    def save(buffer: ReplayBuffer) -> Any:
        buffer.save_checkpoint("again", wait=True)
        return named(buffer), buffer.get_episode_begin_position(*at_all(buffer)).tolist()

    first = ranks_of(url, 2, save, max_length=200)
    assert ranks_of(url, 2, save, max_length=200) == first
    assert ranks_of(url, 2, save, max_length=200) == first


def at_all(buffer: ReplayBuffer) -> tuple[torch.Tensor, torch.Tensor]:
    env, position = zip(*named(buffer), strict=True)
    return torch.tensor(position), torch.tensor(env)


def test_positions_of_dropped_steps_are_not_given_again(tmp_path: Path) -> None:
    with ReplayBuffer(None, 1, 50, url=tmp_path / "run", fsync=False, **OPTIONS) as buffer:
        fill(buffer, 0, 7)
        buffer.save_checkpoint("a", wait=True)
    with resumed(tmp_path, 1, incomplete="drop") as again:
        assert again.current_size.tolist() == [5]  # 5 and 6 were an open episode
        fill(again, 0, 2)
        assert not {5, 6} & {position for _, position in named(again)}


@pytest.mark.parametrize(
    "name", ["valid", "index", "priority", "provenance", "hindsight", "row_position", "row_position_now"]
)
def test_names_that_batches_need_are_refused_before_anything_is_stored(made: Any, name: str) -> None:
    buffer = made(2)
    step = {"step_type": torch.zeros(2, dtype=torch.int32), "x": torch.zeros(2)}
    with pytest.raises(
        DataError, match=f"field '{name}': stores and batches use this name for something else; rename it"
    ):
        buffer.add_batch(step | {name: torch.ones(2)})
    with pytest.raises(DataError, match=f"field '{name}/a'"):
        ReplayBuffer({"step_type": torch.zeros(()), name: {"a": torch.zeros(())}}, 2, 10)
    buffer.add_batch(step | {"more": {name: torch.ones(2)}})  # they may stand deeper
    assert buffer.get_batch(2, 1)[0]["more"][name].tolist() == [[1.0], [1.0]]


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"step_type": torch.zeros(2, 1, dtype=torch.int32)}, "field 'step_type': expected one number"),
        ({"step_type": torch.zeros(3, dtype=torch.int32)}, "field 'step_type'"),
        ({"discount": torch.zeros(2, 1)}, "field 'discount': expected one number"),
        ({"x": torch.zeros(5, 2)}, "field 'x'"),
    ],
)
def test_a_first_batch_that_is_refused_decides_nothing(tmp_path: Path, bad: dict[str, Any], says: str) -> None:
    good = {
        "step_type": torch.zeros(2, dtype=torch.int32),
        "discount": torch.ones(2),
        "x": torch.zeros(2, 5),
    }
    with ReplayBuffer(None, 2, 10, url=tmp_path / "run", fsync=False, **OPTIONS) as buffer:
        with pytest.raises(DataError, match=says):
            buffer.add_batch(good | bad)
        with pytest.raises(DataError, match="each environment once"):
            buffer.add_batch(good, [1, 1])
        assert not (tmp_path / "run").exists()
        buffer.add_batch(good)
        assert buffer.get_batch(2, 1)[0]["x"].shape == (2, 1, 5)
        with pytest.raises(
            DataError, match=r"discount: expected one for each of 2 environments, got shape \(2, 1\)"
        ):
            buffer.add_batch(good | {"discount": torch.zeros(2, 1)})


def test_a_spec_whose_step_type_is_no_number_is_refused() -> None:
    with pytest.raises(
        DataError, match=r"field 'step_type': expected one number for each environment, got shape \(1,\)"
    ):
        ReplayBuffer({"step_type": torch.zeros(1, dtype=torch.int32)}, 2, 10)


def test_steps_are_found_in_the_shape_that_they_are_asked_for(made: Any) -> None:
    buffer = made(2)
    fill(buffer, 0, 7)
    for shape in ((), (0,), (2, 0), (3,), (2, 2)):
        env, position = torch.zeros(shape, dtype=torch.int64), torch.ones(shape, dtype=torch.int64)
        assert buffer.get_field("action", env, position).shape == shape
        assert buffer.get_field("observation.code", env, position).shape == (*shape, 2)
        assert buffer.steps_to_episode_end(position, env).shape == shape
        assert buffer.get_episode_begin_position(position, env).shape == shape
        assert buffer.get_earliest_position(env).shape == shape


@pytest.mark.parametrize("prioritised", [False, True])
@pytest.mark.parametrize("kinds", [[0, 1, 0, 1, 1, 0, 1, 1, 2, 0], [1, 1, 2, 0, 1, 2, 0, 0, 1, 1]])
def test_the_next_batch_after_resuming_does_not_depend_on_the_order_in_which_rows_were_stepped(
    tmp_path: Path, kinds: list[int], prioritised: bool
) -> None:
    options: dict[str, Any] = {"prioritized_sampling": prioritised}
    with ReplayBuffer(None, 3, 50, url=tmp_path / "run", fsync=False, **OPTIONS, **options) as buffer:
        fill(buffer, 2, 9)
        fill(buffer, 1, 4)
        for t, step_kind in enumerate(kinds):
            buffer.add_batch(experience([0, 1], t, step_kind), [0, 1])
        buffer.save_checkpoint("a", wait=True)
        wanted = [pairs(buffer.get_batch(6, length)[1]) for length in (2, 1, 3)]
    with resumed(tmp_path, 3, 50, **options) as again:
        assert [pairs(again.get_batch(6, length)[1]) for length in (2, 1, 3)] == wanted


@pytest.mark.parametrize(("total", "n"), [(3, 2), (100, 64), (101, 100), (7, 7), (3, 5), (3, 8)])
def test_no_window_comes_twice_without_replacement_and_all_come_as_often(made: Any, total: int, n: int) -> None:
    buffer = made(1, total, seed=3)
    fill(buffer, 0, total)
    n_batches = 2000
    counts = np.zeros(total)
    for _ in range(n_batches):
        batch = np.bincount(buffer._draws.draw(n, 1).position, minlength=total)
        assert set(batch) <= {n // total, -(-n // total)}
        counts += batch
    # By chance a window comes in this part of all batches once more; five standard deviations are allowed.
    part = n / total % 1
    bound = 5 * (part * (1 - part) * n_batches) ** 0.5
    assert np.abs(counts - n_batches * n / total).max() <= bound


def test_windows_without_replacement_do_not_stand_at_equal_distances(made: Any) -> None:
    buffer = made(1, 1000)
    fill(buffer, 0, 1000, episode=10)
    phases = {position % 10 for _, position in starts(buffer, 100, 1)}
    assert len(phases) > 5  # of episodes that are as long as a part


@pytest.mark.parametrize("joins", [False, True])
def test_a_store_without_priorities_is_gone_on_with_by_the_initial_one(tmp_path: Path, joins: bool) -> None:
    with saved(tmp_path) as buffer:
        buffer.save_checkpoint("a", wait=True)
    options: dict[str, Any] = {"prioritized_sampling": True, "initial_priority": 5.0}
    if joins:
        again = ReplayBuffer(None, 3, 20, url=tmp_path / "run", fsync=False, **OPTIONS, **options)
        again.add_batch(experience(range(3), 0, FIRST))
    else:
        again = resumed(tmp_path, 3, **options)
    with again:
        fill(again, 0, 1)
        assert again.initial_priority == 5.0
        assert set(weighted(again, 500, 1).values()) == {1.0}  # old steps and new ones alike


def test_the_largest_priority_is_known_after_all_was_cleared(tmp_path: Path) -> None:
    options: dict[str, Any] = {"prioritized_sampling": True, "initial_priority": 2.0}
    with saved(tmp_path, **options) as buffer:
        buffer.update_priority([0], [20], torch.tensor([9.0]))
        buffer.clear()
        buffer.save_checkpoint("a", wait=True)
    with resumed(tmp_path, 3, **options) as again:
        assert again.initial_priority == 9.0


@pytest.mark.parametrize("strategy", ["episode", "random", "future", "final"])
def test_hindsight_takes_no_goals_that_rows_gave_up(made: Any, strategy: Any) -> None:
    buffer = made(1, 20)
    for t in range(200):
        step = experience([0], t, kind(t, 100))
        step["observation"] |= {"achieved_goal": torch.full((1, 1), float(t)), "desired_goal": -torch.ones(1, 1)}
        buffer.add_batch(step)
    relabel = Hindsight(
        strategy,
        fraction=1.0,
        reward=reached,
        goal="observation/desired_goal",
        achieved="observation/achieved_goal",
    )
    goal = buffer.get_batch(50, 3, relabel=relabel)[0]["observation"]["desired_goal"]
    assert goal[goal >= 0].min() >= 180
    assert (goal >= 0).any()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"zz": torch.zeros(2)}, "unexpected 'zz'"),
        ({"action": None}, "missing 'action'"),
        ({"action": torch.zeros(())}, r"data_spec, field 'action': expected int64 of shape \(\), .*, got float32"),
        ({"reward": torch.zeros(2)}, r"data_spec, field 'reward': .* got float32 of shape \(2,\)"),
    ],
)
def test_a_spec_of_other_steps_is_refused_when_resuming(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    with saved(tmp_path) as buffer:
        buffer.save_checkpoint("a", wait=True)
    step = {name: value for name, value in experience([0], 0, FIRST).items() if name != "observation"}
    spec = {name: value[0] for name, value in step.items()} | {"observation": {"code": torch.zeros(2)}}
    resumed(tmp_path, 3, data_spec=spec).close()
    with pytest.raises(DataError, match=says):
        resumed(tmp_path, 3, data_spec={k: v for k, v in (spec | change).items() if v is not None})


@pytest.mark.parametrize("again", [FIRST, MID])
def test_a_row_goes_on_after_an_add_that_failed(tmp_path: Path, again: int) -> None:
    plan, url = FailWhile(), str(tmp_path / "run")
    with through(FaultyStorage(real_storage(url), plan)):
        options = {"fsync": False, "commit_seconds": None, "cache_bytes": "4MiB", "buffer_bytes": "6KiB"}
        buffer = ReplayBuffer(None, 2, 1000, url=url, **options)
        buffer.add_batch(experience(range(2), 0, FIRST))
        plan.error = no_space
        n = fill_up(buffer)
        for _ in range(5):  # some calls only tell what failed before
            with pytest.raises(StorageError):
                buffer.add_batch(experience(range(2), n, [FIRST, MID]))
        plan.error = None
        flush_surely(buffer)
        assert buffer.get_current_position().tolist() == [n, n]
        for t, step_kind in enumerate(([again, MID], [MID, MID], [MID, LAST], [FIRST, FIRST]), n):
            buffer.add_batch(experience(range(2), t, step_kind))
        check_codes(buffer, n + 4)
        assert buffer.get_episode_begin_position([n, n + 1, n + 1], [0, 0, 1]).tolist() == [n, n, 0]
        buffer.close()


def fill_up(buffer: ReplayBuffer) -> int:
    """Add steps to both rows until there is no room for more; returns how many each has."""
    n, n_failed = int(buffer.get_current_position()[0]), 0
    while n_failed < 10:
        try:
            buffer.add_batch(experience(range(2), n, MID))
        except StorageError:
            n_failed += 1
        else:
            n, n_failed = n + 1, 0
    return n


def flush_surely(buffer: ReplayBuffer) -> None:
    """Make everything durable, though calls may still tell what failed before."""
    for _ in range(10):
        with contextlib.suppress(StorageError):
            buffer.flush()
            return
    buffer.flush()


def check_codes(buffer: ReplayBuffer, n: int) -> None:
    """See that both rows have the steps 0 to n - 1 at these positions, also in windows."""
    position, env = torch.arange(n).expand(2, n), torch.arange(2)[:, None]
    assert torch.equal(buffer.get_field("action", env, position), position)
    batch, info = buffer.get_batch(2 * n, 3)
    assert codes(batch) == [[(env, p + i) for i in range(3)] for env, p in pairs(info)]


@pytest.mark.parametrize("prioritised", [False, True])
def test_recent_windows_are_not_waited_for_where_all_rows_have_just_broken_off(
    tmp_path: Path, prioritised: bool
) -> None:
    options: dict[str, Any] = {"recent_data_ratio": 0.25, "prioritized_sampling": prioritised}
    with ReplayBuffer(None, 2, 100, url=tmp_path / "run", fsync=False, **OPTIONS, **options) as buffer:
        for t in range(53):
            buffer.add_batch(experience(range(2), t, kind(t, 10)))
        buffer.save_checkpoint("a", wait=True)
    with resumed(tmp_path, 2, 100, **options) as again:
        again.add_batch(experience(range(2), 53, FIRST))
        _, info = again.get_batch(104, 2)
        assert len(set(pairs(info))) == 104  # all that there are, none more often than others
        if prioritised:
            assert set(info.importance_weights.tolist()) == {1.0}
        again.add_batch(experience([0], 54, MID), [0])
        assert pairs(again.get_batch(8, 2)[1])[:2] == [(0, 53)] * 2


def test_a_buffer_at_a_store_that_is_there_has_its_steps_at_once(tmp_path: Path) -> None:
    options: dict[str, Any] = {"url": tmp_path / "run", "fsync": False, **OPTIONS}
    with ReplayBuffer(None, 2, 100, **options) as buffer:
        fill(buffer, 0, 7)
        fill(buffer, 1, 3)
    with ReplayBuffer(None, 2, 100, **options) as again:
        assert again.current_size.tolist() == [7, 3]
        assert set(starts(again, 100, 1)) == {(0, t) for t in range(7)} | {(1, t) for t in range(3)}
        again.add_batch(experience(range(2), 7, FIRST))
        assert again.current_size.tolist() == [8, 4]
    trajstore.create(tmp_path / "other", trajstore.Schema({"x": trajstore.Field("float32")}))
    with pytest.raises(DataError, match="expected a field 'step_type', got x"):
        ReplayBuffer(None, 2, 100, url=tmp_path / "other")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"capacity": 10},
            "capacity: this buffer sets it itself; say how many steps an environment keeps with max_length",
        ),
        ({"sample": Windows()}, "sample: this buffer sets it itself"),
        (
            {"priorities": None},
            "priorities: this buffer sets it itself; draw by priority with prioritized_sampling",
        ),
        ({"prioritised_sampling": True}, r"unknown options \['prioritised_sampling'\].* prioritized_sampling,"),
    ],
)
def test_options_that_are_not_taken_are_refused_at_once(options: dict[str, Any], says: str) -> None:
    with pytest.raises(TypeError, match=says):
        ReplayBuffer(None, 2, 100, **options)


@pytest.mark.parametrize(
    "look",
    [
        lambda buffer: buffer.current_size[0],
        lambda buffer: buffer.total_size,
        lambda buffer: buffer.get_current_position()[0],
        lambda buffer: buffer.get_earliest_position([0])[0],
    ],
)
def test_sizes_are_not_read_in_the_middle_of_a_change(made: Any, look: Callable[[ReplayBuffer], Any]) -> None:
    buffer, seen = made(1, 8), []
    fill(buffer, 0, 3)
    expected, rows = int(look(buffer)), buffer._rings
    reader = threading.Thread(target=lambda: seen.append(int(look(buffer))))
    with buffer._lock:  # as add_batch does
        rows.stop += 10
        rows.first += 5
        reader.start()
        reader.join(0.2)  # time to read what it must not
        rows.stop -= 10
        rows.first -= 5
    reader.join()
    assert seen == [expected]
