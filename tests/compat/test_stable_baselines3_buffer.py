"""Stable-Baselines3's algorithms train with the buffers of trajstore in the place of their own."""

from __future__ import annotations

import io
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trajstore

gymnasium = pytest.importorskip("gymnasium")
sb3 = pytest.importorskip("stable_baselines3")

from gymnasium import spaces  # noqa: E402
from stable_baselines3.common import buffers as theirs  # noqa: E402
from stable_baselines3.common.save_util import save_to_pkl  # noqa: E402
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize  # noqa: E402

from trajstore.compat.stable_baselines3 import HerReplayBuffer, ReplayBuffer  # noqa: E402

SMALL = {"net_arch": [16]}


class CountingEnv(gymnasium.Env):  # type: ignore[misc]
    """Observations count steps; even episodes terminate, odd ones are truncated, after 5 and 7 steps."""

    observation_space = spaces.Box(-1e6, 1e6, (2,), np.float32)
    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, offset: int = 0) -> None:
        self._episode, self._offset, self._t = -1, offset, 0

    def _observation(self) -> np.ndarray:
        return np.float32([self._offset + self._episode, self._t])

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._episode, self._t = self._episode + 1, 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._t += 1
        is_even = self._episode % 2 == 0
        is_last = self._t == (5 if is_even else 7)
        return self._observation(), float(self._t), is_last and is_even, is_last and not is_even, {}


class ReachEnv(gymnasium.Env):  # type: ignore[misc]
    """A point on a line that should be moved to a goal."""

    _number = spaces.Box(-100, 100, (1,), np.float32)
    observation_space = spaces.Dict({"observation": _number, "achieved_goal": _number, "desired_goal": _number})
    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def _observation(self) -> dict[str, np.ndarray]:
        here = np.float32([self._x])
        return {"observation": here, "achieved_goal": here, "desired_goal": np.float32([self._goal])}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._x, self._t, self._goal = 0.0, 0, 50.0
        return self._observation(), {}

    def compute_reward(self, achieved: np.ndarray, desired: np.ndarray, info: Any) -> np.ndarray:
        return (np.abs(achieved - desired) < 1e-6).astype(np.float32).reshape(-1) - 1.0  # type: ignore[no-any-return]

    def step(self, action: Any) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        self._x, self._t = self._x + 1.0, self._t + 1
        reward = float(self.compute_reward(np.float32([self._x]), np.float32([self._goal]), {})[0])
        return self._observation(), reward, False, self._t == 6, {}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    n = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n)


def run(buffer: Any, n_steps: int, n_envs: int = 1) -> None:
    """Fill a buffer as Stable-Baselines3's algorithms do."""
    env = DummyVecEnv([lambda i=i: CountingEnv(1000 * i) for i in range(n_envs)])
    obs = env.reset()
    rng = np.random.default_rng(0)
    for _ in range(n_steps):
        action = rng.uniform(-1, 1, (n_envs, 1)).astype(np.float32)
        after, reward, done, infos = env.step(action)
        stored = after.copy()
        for i in np.flatnonzero(done):
            stored[i] = infos[i]["terminal_observation"]
        buffer.add(obs, stored, action, reward, done, infos)
        obs = after


def make(n_envs: int = 1, size: int = 10_000, **options: Any) -> Any:
    return ReplayBuffer(
        size, CountingEnv.observation_space, CountingEnv.action_space, device="cpu", n_envs=n_envs, **options
    )


def rows(samples: Any) -> set[tuple[float, ...]]:
    parts = samples.observations, samples.actions, samples.next_observations, samples.dones, samples.rewards
    return set(map(tuple, torch.cat([part.reshape(len(part), -1) for part in parts], 1).tolist()))


@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("handle_timeout_termination", [True, False])
def test_it_draws_the_transitions_of_stable_baselines3s_own_buffer(
    n_envs: int, handle_timeout_termination: bool
) -> None:
    ours = make(n_envs, handle_timeout_termination=handle_timeout_termination)
    own = theirs.ReplayBuffer(
        10_000,
        CountingEnv.observation_space,
        CountingEnv.action_space,
        device="cpu",
        n_envs=n_envs,
        handle_timeout_termination=handle_timeout_termination,
    )
    for buffer in (ours, own):
        run(buffer, 36, n_envs)
    assert (ours.size(), ours.pos, ours.full) == (own.size(), own.pos, own.full)
    expected = rows(own.sample(20_000))
    assert len(expected) == 36 * n_envs
    assert rows(ours.sample(20_000)) == expected  # the last step of every environment ended an episode
    ours.close()


def test_n_step_returns_are_those_of_stable_baselines3s_own_buffer() -> None:
    ours = make(n_steps=3, gamma=0.5)
    own = theirs.NStepReplayBuffer(
        10_000, CountingEnv.observation_space, CountingEnv.action_space, device="cpu", n_steps=3, gamma=0.5
    )
    for buffer in (ours, own):
        run(buffer, 36)

    def targets(samples: Any) -> set[tuple[float, ...]]:
        discount = samples.discounts * (1 - samples.dones)
        alive = discount > 0
        after = samples.next_observations * alive  # where the episode terminated, no value is used
        return set(map(tuple, torch.cat([samples.observations, samples.rewards, discount, after], 1).tolist()))

    assert targets(ours.sample(20_000)) == targets(own.sample(20_000))
    ours.close()


def test_a_reset_without_an_end_does_not_join_two_episodes() -> None:
    buffer = make()
    run(buffer, 3)
    run(buffer, 3)  # begins with a reset, as a second call of learn() does
    samples = buffer.sample(2_000)
    assert (samples.next_observations[:, 1] == samples.observations[:, 1] + 1).all()
    assert not samples.dones.any()
    buffer.close()


def test_the_first_transition_can_be_drawn_at_once() -> None:
    buffer = make(2, n_steps=1)
    with pytest.raises(trajstore.NotReadyError):
        buffer.sample(1)
    run(buffer, 1, 2)
    samples = buffer.sample(4)
    assert samples.next_observations[:, 1].tolist() == [1, 1, 1, 1]
    assert samples.observations[:, 0].tolist() == [0, 1000, 0, 1000]
    buffer.close()


def test_the_oldest_transitions_are_evicted() -> None:
    buffer = make(2, size=100)
    run(buffer, 400, 2)
    assert buffer.full
    assert buffer.size() == 50
    assert len(buffer.memory) <= 100
    buffer.reset()
    assert buffer.size() == 0
    with pytest.raises(trajstore.NotReadyError):
        buffer.sample(1)
    buffer.close()


@pytest.mark.parametrize("algorithm", ["SAC", "DQN"])
def test_algorithms_train_with_it_and_the_store_holds_their_episodes(algorithm: str, tmp_path: Path) -> None:
    task = {"SAC": "Pendulum-v1", "DQN": "CartPole-v1"}[algorithm]
    model = getattr(sb3, algorithm)(
        "MlpPolicy",
        task,
        learning_starts=50,
        batch_size=32,
        replay_buffer_class=ReplayBuffer,
        replay_buffer_kwargs={"url": tmp_path / "run", "seed": 1},
        policy_kwargs=dict(SMALL),
        seed=0,
    )
    model.learn(300)
    assert model._n_updates > 50
    before = model.replay_buffer.memory
    model.save_replay_buffer(tmp_path / "buffer.pkl")
    model.load_replay_buffer(tmp_path / "buffer.pkl")
    assert model.replay_buffer.size() == 300
    assert len(model.replay_buffer.memory) == len(before)
    before.close()
    model.learn(100, reset_num_timesteps=False)
    model.replay_buffer.close()
    store = trajstore.open(tmp_path / "run")
    observation = store.read_episode(0)["observation"]
    assert observation.shape[1:] == model.observation_space.shape
    assert (tmp_path / "buffer.pkl").stat().st_size < 50_000  # a reference, not the data


def test_observations_and_rewards_are_normalised_as_in_their_buffer() -> None:
    env = VecNormalize(DummyVecEnv([CountingEnv]))
    env.reset()
    for _ in range(20):
        env.step(np.zeros((1, 1), np.float32))
    ours, own = make(), theirs.ReplayBuffer(1000, CountingEnv.observation_space, CountingEnv.action_space, "cpu")
    for buffer in (ours, own):
        run(buffer, 24)
    assert rows(ours.sample(5_000, env)) == rows(own.sample(5_000, env))
    ours.close()


@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
def test_hindsight_gives_goals_that_were_achieved(strategy: str, tmp_path: Path) -> None:
    model = sb3.SAC(
        "MultiInputPolicy",
        DummyVecEnv([ReachEnv, ReachEnv]),
        learning_starts=20,
        batch_size=32,
        replay_buffer_class=HerReplayBuffer,
        replay_buffer_kwargs={"n_sampled_goal": 3, "goal_selection_strategy": strategy, "url": tmp_path / "her"},
        policy_kwargs=dict(SMALL),
        seed=0,
    )
    model.learn(96)
    samples = model.replay_buffer.sample(2_000)
    goal, achieved = samples.observations["desired_goal"], samples.next_observations["achieved_goal"]
    assert torch.equal(goal, samples.next_observations["desired_goal"])
    assert torch.equal(samples.rewards, (goal == achieved).float() - 1)
    is_new = goal != 50
    assert 0.7 < is_new.float().mean() < 0.8
    if strategy == "future":
        assert (goal >= achieved)[is_new].all()
    if strategy == "final":
        assert (goal == 6)[is_new].float().mean() > 0.9  # episodes in progress have an earlier last step
    model.save_replay_buffer(tmp_path / "her.pkl")
    model.replay_buffer.close()
    model.load_replay_buffer(tmp_path / "her.pkl")
    model.learn(24, reset_num_timesteps=False)
    model.replay_buffer.close()


def test_wrong_options_are_refused_at_construction() -> None:
    for options, message in (
        ({"optimize_memory_usage": True}, "observations are always stored once"),
        ({"n_steps": 3, "handle_timeout_termination": False}, "n_steps above 1 needs"),
        ({"n_steps": 0}, "n_steps: expected a positive integer"),
    ):
        with pytest.raises(ValueError, match=message):
            make(**options)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="capacity: this buffer sets it itself; say how many"):
        make(capacity=3)
    with pytest.raises(TypeError, match="unknown options"):
        make(capcity=3)


def test_a_buffer_in_ram_says_that_it_cannot_be_saved() -> None:
    buffer = make()
    with pytest.raises(TypeError, match=r"keeps its transitions in RAM.*replay_buffer_kwargs=\{'url'"):
        save_to_pkl(io.BytesIO(), buffer)
    buffer.close()


def test_batches_can_be_converted_without_stable_baselines3() -> None:
    code = (
        "import sys; sys.modules['stable_baselines3'] = None\n"
        "import trajstore\nfrom trajstore.compat.stable_baselines3 import replay_samples\n"
        "try:\n    from trajstore.compat.stable_baselines3 import ReplayBuffer\n"
        "except trajstore.MissingExtraError as error:\n    assert 'pip install stable-baselines3' in str(error)\n"
        "else:\n    raise SystemExit('no error')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_the_calls_of_cleanrl_work(tmp_path: Path) -> None:
    envs = gymnasium.make_vec(
        "CartPole-v1", 2, vectorization_mode="sync", vector_kwargs={"autoreset_mode": "SameStep"}
    )
    buffer = ReplayBuffer(
        1_000,
        envs.single_observation_space,
        envs.single_action_space,
        "cpu",
        n_envs=2,
        handle_timeout_termination=False,
        url=tmp_path / "run",
    )
    obs, _ = envs.reset(seed=0)
    envs.action_space.seed(0)
    for _ in range(120):
        actions = envs.action_space.sample()
        after, rewards, terminations, truncations, infos = envs.step(actions)
        real_next_obs = after.copy()
        for i, is_over in enumerate(terminations | truncations):
            if is_over:
                real_next_obs[i] = infos["final_obs"][i]
        buffer.add(obs, real_next_obs, actions, rewards, terminations, infos)
        obs = after
    samples = buffer.sample(4_000)
    assert samples.actions.dtype == torch.int64
    ended = samples.dones[:, 0] > 0
    outside = (samples.next_observations[:, 0].abs() > 2.4) | (
        samples.next_observations[:, 2].abs() > 12 * math.pi / 180
    )
    assert torch.equal(ended, outside)
    buffer.close()
    ends = set(trajstore.open(tmp_path / "run").episodes["end"])
    assert "terminated" in ends


def test_transitions_of_an_earlier_run_are_joined_resumed_or_refused(tmp_path: Path) -> None:
    first = make(url=tmp_path / "run", exist="fail")
    run(first, 10)
    first.memory.save_checkpoint("c", wait=True)
    run(first, 5)
    first.close()
    with pytest.raises(trajstore.StoreExistsError, match="rows of earlier sessions"):
        make(url=tmp_path / "run", exist="fail")
    joined = make(url=tmp_path / "run", exist="join")
    assert joined.size() == 15
    joined.close()
    resumed = make(url=tmp_path / "run", exist="resume")
    assert resumed.size() == 10
    resumed.close()
