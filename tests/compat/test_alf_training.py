"""What ALF's algorithms call on a replay buffer: episodic returns, dequeue, and fields of their experience."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trajstore import DataError, NotReadyError
from trajstore.compat.alf import BatchInfo, ReplayBuffer, StepType

FIRST, MID, LAST = StepType
OPTIONS: dict[str, Any] = {"cache_bytes": "16MiB", "buffer_bytes": "256KiB"}
DEFAULT, GAMMA = -50.0, 0.9


class TimeStep(NamedTuple):
    step_type: Any = ()
    reward: Any = ()
    discount: Any = ()
    observation: Any = ()
    prev_action: Any = ()
    env_id: Any = ()
    untransformed: Any = ()


class Experience(NamedTuple):
    """An experience as ALF's algorithms add it; the fields of its time step are properties."""

    time_step: Any = ()
    action: Any = ()
    rollout_info: Any = ()
    state: Any = ()
    batch_info: Any = ()
    replay_buffer: Any = ()
    rollout_info_field: Any = ()

    @property
    def step_type(self) -> Any:
        return self.time_step.step_type

    @property
    def reward(self) -> Any:
        return self.time_step.reward

    @property
    def discount(self) -> Any:
        return self.time_step.discount

    @property
    def observation(self) -> Any:
        return self.time_step.observation

    @property
    def env_id(self) -> Any:
        return self.time_step.env_id


class TensorSpec:  # a leaf of nests, as in ALF
    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
        self.shape, self.dtype = shape, dtype


def experience(env: Any, kind: Any, reward: Any, discount: Any, number: Any = 0) -> Experience:
    ids = torch.as_tensor(env)
    n = len(ids)

    def floats(values: Any) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.float32).expand(n).clone()

    time_step = TimeStep(
        step_type=torch.as_tensor(kind, dtype=torch.int32).expand(n).clone(),
        reward=floats(reward),
        discount=floats(discount),
        observation={"achieved_goal": floats(number)[:, None], "desired_goal": torch.zeros(n, 1)},
        prev_action=torch.zeros(n, 2),
        env_id=ids.to(torch.int64),
    )
    info = {"value": floats(number), "policy": {"logits": torch.zeros(n, 3)}}
    action = torch.zeros(n, 2, requires_grad=True) * 1.0  # ALF detaches what it stores
    return Experience(time_step, action, info)


SPEC = Experience(
    TimeStep(
        TensorSpec((), torch.int32),
        TensorSpec(()),
        TensorSpec(()),
        {"achieved_goal": TensorSpec((1,)), "desired_goal": TensorSpec((1,))},
        TensorSpec((2,)),
        TensorSpec((), torch.int64),
    ),
    TensorSpec((2,)),
    {"value": TensorSpec(()), "policy": {"logits": TensorSpec((3,))}},
)


@pytest.fixture
def made() -> Iterator[Any]:
    buffers: list[ReplayBuffer] = []

    def make(n_envs: int, max_length: int = 16, **options: Any) -> ReplayBuffer:
        buffers.append(ReplayBuffer(SPEC, n_envs, max_length, **(OPTIONS | options)))
        return buffers[-1]

    yield make
    for buffer in buffers:
        buffer.close()


# ---- episodic returns, against a model that follows each step


class Recorded(NamedTuple):
    position: int
    kind: int
    reward: float
    discount: float
    episode: int


class ReturnModel:
    """The steps of each environment as lists, and the returns of those that are held, computed step by step."""

    def __init__(self, n_envs: int, length: int, clip: tuple[float, float] | None) -> None:
        self.steps: list[list[Recorded]] = [[] for _ in range(n_envs)]
        self.first = [0] * n_envs
        self.n_positions, self.length, self.clip = [0] * n_envs, length, clip

    def add(self, env: int, kind: int, reward: float, discount: float) -> None:
        steps = self.steps[env]
        begins = not steps or kind == FIRST or steps[-1].kind == LAST
        episode = (steps[-1].episode if steps else 0) + begins
        steps.append(Recorded(self.n_positions[env], kind, reward, discount, episode))
        self.n_positions[env] += 1
        self.first[env] = max(self.first[env], self.n_positions[env] - self.length)

    def remove(self, env: int, n: int) -> list[Recorded]:
        taken = [step for step in self.steps[env] if step.position >= self.first[env]][:n]
        self.first[env] += n
        return taken

    def size(self, env: int) -> int:
        return self.n_positions[env] - self.first[env]

    def return_at(self, env: int, position: int) -> float:
        episode = self.steps[env][position].episode
        later = [step for step in self.steps[env][position + 1 :] if step.episode == episode]
        if all(step.discount != 0 for step in later):
            return DEFAULT
        total, factor = 0.0, 1.0
        for step in later:
            total += factor * (step.reward if self.clip is None else float(np.clip(step.reward, *self.clip)))
            factor *= GAMMA * step.discount
            if not step.discount:
                break
        return total

    def returns(self) -> dict[tuple[int, int], float]:
        return {
            (env, position): self.return_at(env, position)
            for env in range(len(self.steps))
            for position in range(self.first[env], self.n_positions[env])
        }


def returns_of(buffer: ReplayBuffer) -> dict[tuple[int, int], float]:
    """The return of every held step, as batches show them: without replacement, all windows of one step come."""
    _, info = buffer.get_batch(int(buffer.total_size), 1)
    keys = zip(info.env_ids.tolist(), info.positions.tolist(), strict=True)
    return dict(zip(keys, info.discounted_return.tolist(), strict=True))


def check_returns(buffer: ReplayBuffer, model: ReturnModel) -> None:
    assert buffer.current_size.tolist() == [model.size(env) for env in range(len(model.steps))]
    if int(buffer.total_size):
        expected = model.returns()
        found = returns_of(buffer)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert found[key] == pytest.approx(value, rel=1e-5, abs=1e-5), key


STEPS = st.lists(
    st.dictionaries(
        st.integers(0, 2),
        st.tuples(
            st.sampled_from([FIRST, MID, MID, MID, LAST]),
            st.sampled_from([-2.0, -0.5, 0.0, 1.0, 3.0]),
            st.sampled_from([1.0, 1.0, 1.0, 0.5, 0.0]),
        ),
        min_size=1,
    ),
    min_size=1,
    max_size=40,
)


@given(batches=STEPS, clip=st.sampled_from([None, (-1.0, 1.0)]), every=st.integers(1, 7), taken=st.integers(0, 3))
@settings(max_examples=25, deadline=None)
def test_returns_and_dequeued_steps_are_those_of_a_model_whatever_is_added(
    batches: list[dict[int, tuple[int, float, float]]], clip: Any, every: int, taken: int
) -> None:
    model = ReturnModel(3, 6, clip)
    how = {"record_episodic_return": True, "default_return": DEFAULT, "gamma": GAMMA, "reward_clip": clip}
    with ReplayBuffer(SPEC, 3, 6, **how, **OPTIONS) as buffer:
        for t, batch in enumerate(batches):
            env = list(batch)
            columns = [list(column) for column in zip(*batch.values(), strict=True)]
            numbers = [model.n_positions[e] for e in env]
            buffer.add_batch(experience(env, *columns, number=numbers), torch.tensor(env))
            for number, step in batch.items():
                model.add(number, *step)
            if t % every == 0:
                check_returns(buffer, model)
                ready = [e for e in range(3) if model.size(e) >= taken]
                if taken and ready:
                    steps = buffer.dequeue(torch.tensor(ready), n=taken)
                    assert steps.time_step.reward.shape == (len(ready), taken)
                    expected = [[step.position for step in model.remove(e, taken)] for e in ready]
                    assert steps.rollout_info["value"].tolist() == expected
        check_returns(buffer, model)


def test_an_episode_that_runs_out_of_time_has_the_default_return(made: Any) -> None:
    buffer = made(1, record_episodic_return=True, default_return=DEFAULT, gamma=GAMMA)
    for kind, discount in ((FIRST, 1.0), (MID, 1.0), (LAST, 1.0)):  # truncated
        buffer.add_batch(experience([0], kind, 1.0, discount), [0])
    assert set(returns_of(buffer).values()) == {DEFAULT}
    for kind, discount in ((FIRST, 1.0), (MID, 1.0), (LAST, 0.0)):  # terminated
        buffer.add_batch(experience([0], kind, 1.0, discount), [0])
    assert list(returns_of(buffer).values())[3:] == [pytest.approx(1.9), pytest.approx(1.0), DEFAULT]


def test_returns_of_very_long_episodes_are_exact(made: Any) -> None:
    buffer = made(1, 3000, record_episodic_return=True, default_return=DEFAULT, gamma=0.5)
    for t in range(3000):
        kind = FIRST if t == 0 else LAST if t == 2999 else MID
        buffer.add_batch(experience([0], kind, 1.0, float(kind != LAST)), [0])
    found = list(returns_of(buffer).values())
    assert found[:2900] == pytest.approx([2.0] * 2900)  # 0.5 ** 3000 is 0 in float64
    assert found[-3:] == [1.5, 1.0, DEFAULT]


@pytest.mark.parametrize("resumes", [True, False])
def test_returns_are_known_again_after_a_store_was_opened_again(tmp_path: Path, resumes: bool) -> None:
    how: dict[str, Any] = {"record_episodic_return": True, "default_return": DEFAULT, "gamma": GAMMA, **OPTIONS}
    rng, model = np.random.default_rng(5), ReturnModel(2, 40, None)
    buffer = ReplayBuffer(SPEC, 2, 40, url=tmp_path / "run", **how)
    for t in range(100):
        kind = FIRST if t % 9 == 0 else LAST if t % 9 == 8 else MID
        rewards, discount = rng.normal(size=2).astype(np.float32), float(kind != LAST or t % 2 == 0)
        buffer.add_batch(experience([0, 1], kind, rewards, discount))
        for env in range(2):
            model.add(env, kind, float(rewards[env]), discount)
    check_returns(buffer, model)
    buffer.save_checkpoint(wait=True)
    buffer.close()
    if resumes:
        buffer = ReplayBuffer.resume(tmp_path / "run", num_environments=2, max_length=40, data_spec=SPEC, **how)
    else:
        buffer = ReplayBuffer(None, 2, 40, url=tmp_path / "run", **how)
    with buffer:
        check_returns(buffer, model)
        for kind, discount in ((FIRST, 1.0), (MID, 1.0), (LAST, 0.0)):
            buffer.add_batch(experience([0, 1], kind, 1.0, discount))
            for env in range(2):
                model.add(env, kind, 1.0, discount)
        check_returns(buffer, model)


def test_batches_have_no_return_unless_it_is_recorded(made: Any) -> None:
    buffer = made(2)
    buffer.add_batch(experience([0, 1], FIRST, 0.0, 1.0))
    assert buffer.get_batch(2, 1)[1].discounted_return == ()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"gamma": 1.5}, "gamma: expected a number from 0 to 1, got 1.5"),
        ({"default_return": float("nan")}, "default_return: expected a finite number, got nan"),
        ({"reward_clip": (1.0, -1.0)}, r"reward_clip: expected None or \(min, max\)"),
        ({"enable_checkpoint": True}, "enable_checkpoint: expected False, got True;.* call save_checkpoint"),
    ],
)
def test_options_of_returns_and_checkpoints_are_checked_at_construction(options: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ReplayBuffer(SPEC, 2, 8, **options)


def test_returns_of_rewards_with_several_numbers_are_refused_before_anything_is_stored(tmp_path: Path) -> None:
    spec = SPEC._replace(time_step=SPEC.time_step._replace(reward=TensorSpec((3,))))
    with pytest.raises(DataError, match=r"record_episodic_return: .* field 'time_step/reward', got shape \(3,\)"):
        ReplayBuffer(spec, 2, 8, url=tmp_path / "run", record_episodic_return=True)
    assert not (tmp_path / "run").exists()
    without = SPEC._replace(time_step=SPEC.time_step._replace(discount=()))
    with pytest.raises(DataError, match="expected a field 'discount'"):
        ReplayBuffer(without, 2, 8, record_episodic_return=True)


# ---- dequeue


def test_dequeue_takes_all_or_nothing_and_says_what_is_missing(made: Any) -> None:
    buffer = made(2, 8)
    with pytest.raises(NotReadyError, match="dequeue: expected 1 steps in each environment, env 0 has 0"):
        buffer.dequeue()
    for t in range(3):
        buffer.add_batch(experience([0], FIRST if t == 0 else MID, 0.0, 1.0, t), [0])
    with pytest.raises(NotReadyError, match="env 1 has 0"):
        buffer.dequeue()
    with pytest.raises(ValueError, match="n: expected up to 8 steps, got 9"):
        buffer.dequeue(n=9)
    with pytest.raises(ValueError, match="blocking: expected False, got True; catch NotReadyError"):
        buffer.dequeue(blocking=True)
    assert buffer.current_size.tolist() == [3, 0]
    assert buffer.dequeue([0], 2).rollout_info["value"].tolist() == [[0.0, 1.0]]
    assert buffer.current_size.tolist() == [1, 0]
    assert buffer.get_earliest_position([0]).tolist() == [2]
    with pytest.raises(IndexError, match="env 0, position 1"):
        buffer.get_field("reward", torch.tensor([0]), torch.tensor([1]))


@pytest.mark.parametrize("prioritised", [False, True])
def test_dequeued_steps_are_drawn_no_longer_and_windows_go_on(made: Any, prioritised: bool) -> None:
    buffer = made(1, 8, prioritized_sampling=prioritised)
    for t in range(20):
        buffer.add_batch(experience([0], FIRST if t == 0 else MID, 0.0, 1.0, t), [0])
        if t % 4 == 3:
            buffer.get_batch(4, 2)  # builds the trees
            buffer.dequeue(n=3)
            _, info = buffer.get_batch(50, 1)
            assert set(info.positions.tolist()) == set(range(int(buffer.get_earliest_position(0)), t + 1))


@pytest.mark.parametrize("prioritised", [False, True])
def test_dequeued_steps_are_not_in_a_checkpoint(tmp_path: Path, prioritised: bool) -> None:
    how: dict[str, Any] = {"prioritized_sampling": prioritised, **OPTIONS}
    buffer = ReplayBuffer(SPEC, 2, 100, url=tmp_path / "run", **how)
    for t in range(10):
        buffer.add_batch(experience([0, 1], FIRST if t == 0 else MID, 0.0, 1.0, t))
    assert buffer.dequeue(n=4).rollout_info["value"].tolist() == [[0.0, 1.0, 2.0, 3.0]] * 2
    assert buffer.dequeue([1], n=2).rollout_info["value"].tolist() == [[4.0, 5.0]]
    buffer.save_checkpoint(wait=True)
    buffer.close()
    with ReplayBuffer.resume(tmp_path / "run", num_environments=2, max_length=100, data_spec=SPEC, **how) as again:
        assert again.current_size.tolist() == [6, 4]
        assert again.dequeue().rollout_info["value"].tolist() == [[4.0], [6.0]]
        assert set(again.get_batch(20, 1)[1].positions.tolist()) == set(range(5, 10))


# ---- the calls of ALF's algorithms and data transformers


def test_the_buffer_is_made_and_filled_as_algorithms_do_it() -> None:
    """`Algorithm._set_replay_buffer`, `observe_for_replay` and `train_from_replay_buffer`."""
    with ReplayBuffer(
        data_spec=SPEC,
        num_environments=2,
        max_length=32,
        prioritized_sampling=True,
        num_earliest_frames_ignored=1,
        name="SacAlgorithm_replay_buffer",
    ) as buffer:
        assert bool(buffer)  # `if self._replay_buffer and ...`
        assert buffer._name == "SacAlgorithm_replay_buffer"  # type: ignore[attr-defined]  # for summaries
        for t in range(12):
            kind = FIRST if t % 6 == 0 else LAST if t % 6 == 5 else MID
            exp = experience([0, 1], kind, 0.0, float(kind != LAST), t)
            buffer.add_batch(exp, exp.env_id)
        assert not buffer.total_size < 24
        batch, info = buffer.get_batch(batch_size=8, batch_length=2)
        batch = batch._replace(batch_info=info, replay_buffer=info.replay_buffer)
        assert isinstance(batch, Experience)
        assert batch.step_type.shape == (8, 2)
        assert batch.state == ()
        chosen = torch.randperm(8)[:4]
        part = BatchInfo(*(x[chosen] if isinstance(x, torch.Tensor) else x for x in info))
        buffer.update_priority(part.env_ids, part.positions, torch.rand(4) + 0.1)
        everything, info = buffer.gather_all(ignore_earliest_frames=True, convert_to_default_device=False)
        assert everything.reward.shape == (2, 11)
        assert info.positions.tolist() == [1, 1]


def test_fields_of_the_time_step_are_found_as_properties_of_the_experience(made: Any) -> None:
    """MuZero asks for 'discount' and nests of names, with shapes [B, 1] and [B, T]; empty nests stay empty."""
    buffer = made(2, 32)
    for t in range(12):
        last = t % 6 == 5
        buffer.add_batch(experience([0, 1], FIRST if t % 6 == 0 else LAST if last else MID, t, float(not last), t))
    env, position = torch.tensor([[0], [1]]), torch.tensor([[3, 4, 5], [8, 9, 10]])
    ends = position + buffer.steps_to_episode_end(position, env)
    assert ends.tolist() == [[5, 5, 5], [11, 11, 11]]
    capped = torch.min(position + 4, buffer.get_current_position()[env[:, 0], None] - 1)
    assert capped.tolist() == [[7, 8, 9], [11, 11, 11]]
    assert buffer.get_field("discount", env, position).tolist() == [[1, 1, 0], [1, 1, 1]]
    observation, kind = buffer.get_field(("observation", "step_type"), env, position)
    assert observation["achieved_goal"].shape == (2, 3, 1)
    assert kind.tolist() == [[MID, MID, LAST], [MID, MID, MID]]
    assert buffer.get_field("rollout_info.policy", env, position)["logits"].shape == (2, 3, 3)
    assert buffer.get_field("state", env, position) == ()
    assert buffer.get_field("", env, position).reward.tolist() == position.tolist()
    for name in ("no_such_field", "_fields", "index"):
        with pytest.raises(LookupError, match=f"no field '{name}'"):
            buffer.get_field(name, env, position)


def test_options_have_the_order_of_alf() -> None:
    given = (SPEC, 2, 8, 0, True, 2.0, 3, 0.25, True, "cpu", False, True, True, -7.0, 0.5, (-1.0, 1.0), False)
    with ReplayBuffer(*given, **OPTIONS) as buffer:
        assert float(buffer.initial_priority) == 2.0
        buffer.add_batch(experience([0, 1], FIRST, 0.0, 1.0))
        assert buffer.get_batch(2, 1)[1].discounted_return.tolist() == [-7.0, -7.0]


# ---- torch's default device, which ALF sets to the GPU


@pytest.mark.parametrize("prioritised", [False, True])
def test_results_are_on_the_default_device_and_it_has_no_effect_on_the_buffer(prioritised: bool) -> None:
    steps = [experience([0, 1], FIRST if t == 0 else MID, 1.0, 1.0, t) for t in range(20)]
    env, position, priority = torch.tensor([0, 1]), torch.tensor([3, 4]), torch.rand(8) + 0.1
    how: dict[str, Any] = {"prioritized_sampling": prioritised, "record_episodic_return": True}
    with torch.device("meta"), ReplayBuffer(SPEC, 2, 16, recent_data_ratio=0.3, **how, **OPTIONS) as buffer:
        for step in steps:
            buffer.add_batch(step, step.env_id)
        batch, info = buffer.get_batch(8, 2)
        found = [batch.reward, batch.observation["achieved_goal"], info.env_ids, info.positions]
        found += [info.discounted_return, buffer.total_size, buffer.get_field("reward", env, position + 4)]
        found += [info.importance_weights] if prioritised else []
        if prioritised:
            buffer.update_priority(env.repeat(4), position.repeat(4) + 4, priority)
        found += [buffer.gather_all()[0].reward, buffer.dequeue(n=2).reward]
        assert {str(value.device) for value in found} == {"meta"}
        here = [buffer.current_size, buffer.get_current_position(), buffer.get_earliest_position(env)]
        here += [buffer.steps_to_episode_end(position + 4, env), buffer.gather_all(False, False)[0].reward]
        assert {str(value.device) for value in here} == {"cpu"}
        assert buffer.current_size.tolist() == [14, 14]
        buffer.clear()
