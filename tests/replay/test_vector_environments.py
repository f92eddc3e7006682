"""A loop over a vector environment stores the episodes that single environments would have given, in every mode."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

import numpy as np
import pytest

import trajstore
from trajstore import ReplayBuffer

gymnasium = pytest.importorskip("gymnasium")
from gymnasium.vector import AutoresetMode  # noqa: E402

from trajstore.compat.gymnasium import final_observations  # noqa: E402

Episode = dict[str, np.ndarray]
MODES = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED]
N, T = 3, 90


def make_envs(name: str, mode: AutoresetMode, **options: Any) -> Any:
    return gymnasium.make_vec(
        name, num_envs=N, vectorization_mode="sync", vector_kwargs={"autoreset_mode": mode}, **options
    )


def policy(observation: np.ndarray) -> np.ndarray:
    """A function of the observation, so that single environments can take the same actions."""
    if observation.shape[-1] == 4:  # CartPole
        return (observation[..., 2] + observation[..., 3] > 0).astype(np.int64)
    return np.sin(observation.sum(-1, keepdims=True)).astype(np.float32)  # Pendulum


def single_rollouts(name: str, n_steps: int, **options: Any) -> list[list[Episode]]:
    """The episodes of each environment, alone: the reference."""
    found = []
    for i in range(N):
        env = gymnasium.make(name, **options)
        episodes, steps = [], {"observation": [], "action": [], "reward": []}
        observation, _ = env.reset(seed=10 + i)
        for _ in range(n_steps):
            action = policy(observation[None])[0]
            following, reward, terminated, truncated, _ = env.step(action)
            for field, value in (("observation", observation), ("action", action), ("reward", reward)):
                steps[field].append(value)
            observation = following
            if terminated or truncated:
                steps["observation"].append(following)
                episodes.append({field: np.array(values) for field, values in steps.items()})
                steps = {"observation": [], "action": [], "reward": []}
                observation, _ = env.reset()
        found.append(episodes)
    return found


def stored_episodes(url: str) -> list[list[Episode]]:
    store = trajstore.open(url)
    found: list[list[Episode]] = [[] for _ in range(N)]
    for i, (env, end) in enumerate(zip(store.episodes["env"], store.episodes["end"], strict=True)):
        if end in ("terminated", "truncated"):
            found[env].append(store.read_episode(i))
    return found


def check_same(url: str, name: str, **options: Any) -> None:
    reference = single_rollouts(name, T, **options)
    stored = stored_episodes(url)
    assert sum(map(len, stored)) >= N
    for mine, theirs in zip(stored, reference, strict=True):
        assert len(mine) <= len(theirs)
        for episode, expected in itertools.zip_longest(mine, theirs[: len(mine)]):
            assert len(episode["reward"]) == len(expected["reward"])
            for field in ("observation", "action", "reward"):
                np.testing.assert_allclose(episode[field], expected[field], rtol=1e-6)


ENVIRONMENTS = [("CartPole-v1", {"max_episode_steps": 25}), ("Pendulum-v1", {"max_episode_steps": 20})]


@pytest.mark.parametrize(("name", "options"), ENVIRONMENTS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("as_object", [True, False])
def test_a_vector_loop_stores_what_single_environments_give(
    name: str, options: dict[str, Any], mode: AutoresetMode, as_object: bool
) -> None:
    url = f"memory://vector-{name}-{mode.name}-{as_object}"
    envs = make_envs(name, mode, **options)
    how: dict[str, Any] = {"envs": envs} if as_object else {"envs": N, "autoreset": mode}
    buffer = ReplayBuffer(url, buffer_bytes="1MB")
    observation, _ = envs.reset(seed=[10 + i for i in range(N)])
    n_stored = 0
    for _ in range(T):
        action = policy(observation)
        following, reward, terminated, truncated, infos = envs.step(action)
        handles = buffer.append(
            {"observation": observation, "action": action, "reward": reward},
            terminated=terminated,
            truncated=truncated,
            final={"observation": final_observations(following, infos)},
            **how,
        )
        n_stored += int((handles.episode >= 0).sum())
        observation = following
        ended = terminated | truncated
        if mode is AutoresetMode.DISABLED and ended.any():
            observation, _ = envs.reset(options={"reset_mask": ended})
    assert buffer.n_steps == n_stored
    assert n_stored < N * T if mode is AutoresetMode.NEXT_STEP else n_stored == N * T
    buffer.close()
    check_same(url, name, **options)


@pytest.mark.parametrize(("name", "options"), ENVIRONMENTS)
def test_blocks_of_a_vector_environment_leave_out_its_resets(name: str, options: dict[str, Any]) -> None:
    url = f"memory://vector-blocks-{name}"
    envs = make_envs(name, AutoresetMode.NEXT_STEP, **options)
    buffer = ReplayBuffer(url, buffer_bytes="1MB")
    observation, _ = envs.reset(seed=[10 + i for i in range(N)])
    block: dict[str, list[np.ndarray]] = {}
    for t in range(T):
        action = policy(observation)
        following, reward, terminated, truncated, _ = envs.step(action)
        values = (observation, action, reward, terminated, truncated, following)
        for key, value in zip(("observation", "action", "reward", "te", "tr", "final"), values, strict=True):
            block.setdefault(key, []).append(value)
        observation = following
        if (t + 1) % 7 == 0 or t == T - 1:
            arrays = {key: np.stack(rows) for key, rows in block.items()}
            handles = buffer.extend(
                {key: arrays[key] for key in ("observation", "action", "reward")},
                envs=envs,
                terminated=arrays["te"],
                truncated=arrays["tr"],
                final={"observation": arrays["final"]},
            )
            assert handles.episode.shape == arrays["te"].shape
            block = {}
    buffer.close()
    check_same(url, name, **options)


def loop(vector: Any, buffer: ReplayBuffer, n: int, **how: Any) -> None:
    observation, _ = vector.reset(seed=0)
    for _ in range(n):
        action = policy(observation)
        following, reward, terminated, truncated, _ = vector.step(action)
        buffer.append(
            {"observation": observation, "action": action, "reward": reward},
            terminated=terminated,
            truncated=truncated,
            final={"observation": following},
            **how,
        )
        observation = following


@pytest.mark.parametrize("mode", MODES[:2])
def test_resets_that_the_caller_does_not_know_of_are_refused(mode: AutoresetMode) -> None:
    envs = make_envs("CartPole-v1", mode, max_episode_steps=15)
    buffer = ReplayBuffer(f"memory://unknown-{mode.name}", buffer_bytes="1MB")
    with pytest.raises(trajstore.DataError, match=r"envs=envs.*next_step.*final_obs"):
        loop(envs, buffer, 60, envs=range(N))
    buffer.close()


def test_the_final_observation_of_a_reset_within_the_step_must_be_the_last_one() -> None:
    envs = make_envs("CartPole-v1", AutoresetMode.SAME_STEP, max_episode_steps=15)
    buffer = ReplayBuffer("memory://wrong-final", buffer_bytes="1MB")
    with pytest.raises(trajstore.DataError, match="final_obs"):
        loop(envs, buffer, 60, envs=envs)
    buffer.close()


def test_episodes_may_continue_where_the_last_one_ended_if_the_caller_says_so() -> None:
    buffer = ReplayBuffer("memory://continuing", buffer_bytes="1MB")
    for t in range(20):
        now, following = (np.full((2, 1), float(x)) for x in (t, t + 1))
        ends = np.full(2, t % 5 == 4)
        buffer.append(
            {"observation": now}, envs=2, truncated=ends, final={"observation": following}, autoreset="disabled"
        )
    assert buffer.n_steps == 40
    buffer.close()


def test_constant_observations_are_no_evidence_of_resets() -> None:
    buffer = ReplayBuffer("memory://constant", buffer_bytes="1MB")
    zeros = {"observation": np.zeros((2, 3))}
    for t in range(40):
        buffer.append(zeros | {"reward": np.zeros(2)}, envs=2, truncated=np.full(2, t % 5 == 4), final=zeros)
    assert buffer.n_steps == 80
    buffer.close()


def test_a_start_that_equals_an_end_by_chance_is_accepted() -> None:
    rng = np.random.default_rng(0)
    buffer = ReplayBuffer("memory://chance", buffer_bytes="1MB")
    for _ in range(3000):
        now, following = rng.integers(0, 4, (2, 2, 1))
        ends = rng.random(2) < 0.3
        buffer.append({"observation": now}, envs=2, terminated=ends, final={"observation": following})
    assert buffer.n_steps == 6000
    buffer.close()


def test_after_a_reset_by_the_caller_the_next_step_is_a_first_one() -> None:
    envs = make_envs("CartPole-v1", AutoresetMode.NEXT_STEP, max_episode_steps=10)
    url = "memory://own-reset"
    buffer = ReplayBuffer(url, buffer_bytes="1MB")
    for _ in range(3):
        loop(envs, buffer, 14, envs=envs)  # begins with a reset; every environment has ended once
        buffer.cut_episodes()
    loop(envs, buffer, 10, envs=envs)  # all environments end with the last step
    buffer.cut_episodes()
    loop(envs, buffer, 10, envs=envs)
    buffer.close()
    episodes = trajstore.open(url).episodes
    lengths = [episodes["length"][episodes["end"] == end].tolist() for end in ("truncated", "cut")]
    assert lengths == [[10] * 5 * N, [3] * 3 * N]  # 14 steps: 10 of an episode, a reset, 3 of the next one


def test_a_reset_that_the_buffer_does_not_know_of_is_refused() -> None:
    envs = make_envs("CartPole-v1", AutoresetMode.NEXT_STEP, max_episode_steps=10)
    buffer = ReplayBuffer("memory://own-reset-unsaid", buffer_bytes="1MB")
    loop(envs, buffer, 10, envs=envs)
    with pytest.raises(trajstore.DataError, match="cut_episodes"):
        loop(envs, buffer, 1, envs=envs)
    buffer.close()


def test_ends_by_call_count_as_ends_too() -> None:
    with trajstore.create("memory://ends-by-call").writer() as writer:
        step = {"observation": np.zeros((2, 1))}
        writer.append(step, envs=2, autoreset="next_step")
        writer.end_episode(1, terminated=True, metadata={"success": True})
        handles = writer.append(step, envs=2, autoreset="next_step")
        assert handles.t.tolist() == [1, -1]
        assert writer.append(step, envs=2, autoreset="next_step").t.tolist() == [2, 0]


def test_resets_do_not_count_as_inserts() -> None:
    pace = trajstore.SamplesPerInsert(1.0, min_steps=10)
    buffer = ReplayBuffer("memory://paced-resets", samples_per_insert=pace, buffer_bytes="1MB")
    ends = np.array([True, False])
    for _ in range(2):
        buffer.append({"x": np.zeros(2)}, envs=2, terminated=ends, autoreset="next_step")
        ends = ends & False
    assert buffer.stats()["samples_per_insert"]["n_inserted"] == buffer.n_steps == 3
    buffer.close()


def test_a_vector_environment_that_does_not_say_when_it_resets_is_refused() -> None:
    class Envs:
        num_envs = 2
        metadata: ClassVar[dict[str, Any]] = {}

    buffer = ReplayBuffer("memory://silent-envs", buffer_bytes="1MB")
    with pytest.raises(trajstore.DataError, match="autoreset='next_step', 'same_step' or 'disabled'"):
        buffer.append({"x": np.zeros(2)}, envs=Envs())
    with pytest.raises(trajstore.DataError, match="autoreset: expected"):
        buffer.append({"x": np.zeros(2)}, envs=Envs(), autoreset="sometimes")
    buffer.append({"x": np.zeros(2)}, envs=Envs(), autoreset="same_step")
    buffer.close()


@pytest.mark.parametrize("kind", ["dict", "tuple", "array"])
def test_final_observations_of_nested_spaces(kind: str) -> None:
    now = {"a": np.zeros((3, 2)), "b": np.zeros(3)}
    last = {"a": np.ones((3, 2)), "b": np.ones(3)}
    mask = np.array([True, False, True])
    if kind == "dict":
        rows: Any = np.array([{"a": np.ones(2), "b": 1.0}, None, {"a": np.ones(2), "b": 1.0}], object)
        found = final_observations(now, {"final_obs": rows, "_final_obs": mask})
        assert found["a"][:, 0].tolist() == found["b"].tolist() == [1, 0, 1]
    elif kind == "tuple":
        found = final_observations((now["a"], now["b"]), {"final_obs": (last["a"], last["b"]), "_final_obs": mask})
        assert found[1].tolist() == [1, 0, 1]
    else:
        assert final_observations(now["b"], {"final_obs": last["b"], "_final_obs": mask}).tolist() == [1, 0, 1]
    assert not now["b"].any()
    assert final_observations(now, {}) is now
