"""Recording environments: what is stored is what happened, every transition once, none across a reset."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.wrappers import RecordEpisodeStatistics
from gymnasium.wrappers.vector import RecordEpisodeStatistics as VectorStatistics
from hypothesis import given, settings
from hypothesis import strategies as st

import trajstore
from trajstore import DataError, Field, SchemaError, StorageError, Store, Writer
from trajstore.compat.gymnasium import Recorder, VectorRecorder, schema_of

MODES = list(AutoresetMode)
Script = list[tuple[int, str]]  # length and end of every episode, over and over

TREE = spaces.Dict(
    {
        "id": spaces.Box(0, 1 << 30, (3,), np.int64),
        "small": spaces.Tuple((spaces.Discrete(100), spaces.Dict({"bits": spaces.MultiBinary(2)}))),
    }
)


class Scripted(gymnasium.Env[Any, Any]):
    """Its observations say (env, episode, t), its rewards and infos the same in other words; it keeps the truth."""

    action_space = spaces.Discrete(1 << 20)

    def __init__(self, number: int, script: Script, space: spaces.Space[Any] = TREE) -> None:
        self.observation_space = space
        self.number, self.script = number, script
        self.episode, self.t = -1, 0
        self.truth: list[dict[str, Any]] = []
        self._buffer = np.zeros(3, np.int64)  # given out again and again, as careless environments do

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.episode, self.t = self.episode + 1, 0
        self._buffer = np.zeros(3, np.int64)  # a new array, or the final observation could not be kept
        if self.truth and self.truth[-1]["end"] == "open":
            self.truth[-1]["end"] = "truncated"
        self.truth.append({"action": [], "end": "open"})
        return self._observation(), self._info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        length, end = self.script[self.episode % len(self.script)]
        self.truth[-1]["action"].append(int(action))
        ends = end if self.t == length else "open"
        self.truth[-1]["end"] = "terminated" if ends == "both" else ends
        reward = reward_of(self.number, self.episode, self.t - 1)
        info = self._info()
        return self._observation(), reward, ends in ("terminated", "both"), ends in ("truncated", "both"), info

    def _info(self) -> dict[str, Any]:
        return {"cost": 100 * self.episode + self.t, "mask": np.array([self.episode, self.t], np.int16)}

    def _observation(self) -> Any:
        self._buffer[:] = self.number, self.episode, self.t
        if self.observation_space is not TREE:
            return self._buffer
        bits = np.array([self.t % 2, self.episode % 2], np.int8)
        return {"id": self._buffer, "small": (self.t % 100, {"bits": bits})}


def reward_of(number: int, episode: int, t: int) -> float:
    return number + episode / 7 + t / 1e3


INFO = {"cost": Field("int64"), "mask": Field("int16", (2,), final=True)}


def make_store(env: Any, **options: Any) -> Store:
    return trajstore.create(f"memory://{uuid.uuid4().hex}", schema_of(env, **options))


def actions_of(step: int, n: int) -> Any:
    return np.arange(n) * 1000 + step


def episodes_of(store: Store, env: int) -> list[dict[str, Any]]:
    store.refresh()
    table = store.episodes
    mine = [i for i in range(len(table)) if table["env"][i] == env]
    return [{"end": table["end"][i], **store.read_episode(i)} for i in mine]


def check_stored(episode: dict[str, Any], number: int, index: int, truth: dict[str, Any]) -> None:
    """An episode of a scripted environment is what happened, with a final observation."""
    n = len(truth["action"])
    ids = np.array([(number, index, t) for t in range(n + 1)])
    assert episode["end"] == truth["end"]
    assert episode["observation"]["id"].tolist() == ids.tolist()
    assert episode["observation"]["small"]["0"].tolist() == [t % 100 for t in range(n + 1)]
    assert episode["observation"]["small"]["1"]["bits"].tolist() == [[t % 2, index % 2] for t in range(n + 1)]
    assert episode["action"].tolist() == truth["action"]
    assert episode["reward"].tolist() == [reward_of(number, index, t) for t in range(n)]
    if "cost" in episode:
        assert episode["cost"].tolist() == [100 * index + t + 1 for t in range(n)]
        assert episode["mask"].tolist() == [[index, t] for t in range(n + 1)]


def check_all(store: Store, numbers: list[int], truths: list[list[dict[str, Any]]]) -> None:
    for number, truth in zip(numbers, truths, strict=True):
        stored = episodes_of(store, number)
        happened = [(i, episode) for i, episode in enumerate(truth) if episode["action"]]
        assert len(stored) == len(happened)
        for episode, (i, real) in zip(stored, happened, strict=True):
            check_stored(episode, number, i, real)


def spoil(observation: Any) -> None:
    """Write over what the caller was given, as one may who owns it."""
    if isinstance(observation, np.ndarray):
        observation[...] = 99
    elif isinstance(observation, (dict, tuple)):
        for part in observation.values() if isinstance(observation, dict) else observation:
            spoil(part)


def run(envs: Any, n: int, steps: int, mode: AutoresetMode, resets: dict[int, list[bool] | None]) -> None:
    """Step through, resetting by hand where the mode asks for it and wherever ``resets`` says."""
    envs.reset(seed=0)
    for step in range(steps):
        actions = actions_of(step, n)
        observations, _, terminated, truncated, _ = envs.step(actions)
        spoil(actions)
        if getattr(envs.unwrapped, "copy", True):
            spoil(observations)
        ended = terminated | truncated
        if mode is AutoresetMode.DISABLED and ended.any():
            envs.reset(options={"reset_mask": ended})
        if step in resets:
            mask = resets[step]
            envs.reset(options=None if mask is None or not any(mask) else {"reset_mask": np.array(mask)})


scripts = st.lists(
    st.tuples(st.integers(1, 6), st.sampled_from(["terminated", "truncated", "both"])), min_size=1, max_size=4
)


@st.composite
def runs(draw: st.DrawFn) -> dict[str, Any]:
    n, steps = draw(st.integers(1, 4)), draw(st.integers(1, 25))
    masks = st.none() | st.lists(st.booleans(), min_size=n, max_size=n)
    return {
        "scripts": draw(st.lists(scripts, min_size=n, max_size=n)),
        "steps": steps,
        "resets": draw(st.dictionaries(st.integers(0, steps - 1), masks, max_size=3)),
        "copy": draw(st.booleans()),
        "metadata": draw(st.sampled_from([None, {"task": "x"}])),
        "info_fields": draw(st.sampled_from([{}, INFO])),
    }


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=40)
@given(plan=runs())
def test_what_is_stored_is_what_happened_in_every_mode(mode: AutoresetMode, plan: dict[str, Any]) -> None:
    n, first = len(plan["scripts"]), 5
    made = [Scripted(first + i, script) for i, script in enumerate(plan["scripts"])]
    envs = SyncVectorEnv([lambda env=env: env for env in made], copy=plan["copy"], autoreset_mode=mode)
    store = make_store(envs, info_fields=plan["info_fields"])
    with store.writer() as writer:
        recorder = VectorRecorder(
            envs, writer, first_env=first, metadata=plan["metadata"], info_fields=plan["info_fields"]
        )
        run(recorder, n, plan["steps"], mode, plan["resets"])
        truths = [[{**e, "end": e["end"].replace("open", "truncated")} for e in env.truth] for env in made]
        recorder.close()
    check_all(store, [first + i for i in range(n)], truths)
    tasks = {str(metadata) for metadata in store.episodes["metadata"]}
    assert tasks <= {str(plan["metadata"] or {})}


@settings(max_examples=40)
@given(script=scripts, steps=st.integers(1, 30), resets=st.sets(st.integers(0, 29)), has_info=st.booleans())
def test_what_is_stored_of_a_single_environment_is_what_happened(
    script: Script, steps: int, resets: set[int], has_info: bool
) -> None:
    env = Scripted(3, script)
    fields = INFO if has_info else {}
    store = make_store(env, info_fields=fields)
    with store.writer() as writer:
        recorder = Recorder(env, writer, env_number=3, info_fields=fields)
        recorder.reset()
        for step in range(steps):
            observation, _, terminated, truncated, _ = recorder.step(step)
            spoil(observation)
            if terminated or truncated or step in resets:
                recorder.reset()
        if env.truth[-1]["end"] == "open":
            env.truth[-1]["end"] = "truncated"
        recorder.close()
    check_all(store, [3], [env.truth])


def scripted_pair() -> list[Callable[[], Scripted]]:
    script = [[(2, "terminated"), (3, "truncated")], [(4, "truncated"), (1, "terminated")]]
    return [lambda: Scripted(0, script[0]), lambda: Scripted(1, script[1])]


def checked_by_itself(store: Store, n: int) -> int:
    """Check each episode against the script, which tells what must have happened; returns how many there are."""
    scripts = [env().script for env in scripted_pair()]
    for number in range(n):
        for i, episode in enumerate(episodes_of(store, number)):
            length, end = scripts[number][i % 2]
            took = episode["action"].tolist()
            assert len(took) == length or i == len(episodes_of(store, number)) - 1
            truth = {"action": took, "end": end if len(took) == length else "truncated"}
            check_stored(episode, number, i, truth)
            assert all(action % 1000 >= 0 and action // 1000 == number for action in took)
    return len(store.episodes)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # forking beside threads
@pytest.mark.parametrize("mode", MODES)
def test_asynchronous_environments_are_recorded_alike(mode: AutoresetMode) -> None:
    envs = AsyncVectorEnv(scripted_pair(), autoreset_mode=mode, copy=False, shared_memory=mode != MODES[0])
    store = make_store(envs, info_fields=INFO)
    with store.writer() as writer:
        recorder = VectorRecorder(envs, writer, info_fields=INFO)
        try:
            run(recorder, 2, 20, mode, {})
        finally:
            recorder.close()
    assert checked_by_itself(store, 2) >= 10


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_second_reset_that_would_be_invisible_is_refused() -> None:
    envs = AsyncVectorEnv([scripted_pair()[0]], shared_memory=False)
    with make_store(envs).writer() as writer:
        recorder = VectorRecorder(envs, writer)
        try:
            recorder.reset()
            recorder.step([0])
            recorder.step([0])
            with pytest.raises(ResetNeeded, match="second time"):
                recorder.reset()
            recorder.step([0])
            recorder.reset()
        finally:
            recorder.close()


def test_observations_of_reused_buffers_are_those_before_the_step() -> None:
    envs = SyncVectorEnv(scripted_pair(), copy=False)
    store = make_store(envs)
    with store.writer() as writer:
        recorder = VectorRecorder(envs, writer)
        first, _ = recorder.reset()
        for step in range(3):
            observations, *_ = recorder.step(actions_of(step, 2))
            assert observations["id"] is first["id"]  # the environment does reuse it
        recorder.close()
    assert checked_by_itself(store, 2)


class Echo(gymnasium.Env[Any, Any]):
    """Always returns the same observation and reward, and ends after one step."""

    def __init__(self, space: Any, shows: Any, reward: Any = 0.0, action_space: Any = None) -> None:
        self.observation_space, self.shows, self.gives = space, shows, reward
        self.action_space = spaces.Discrete(2) if action_space is None else action_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self.shows, {}

    def step(self, action: Any) -> Any:
        return self.shows, self.gives, True, False, {}


def echoed(env: Echo, taken: Any = 0, **options: Any) -> dict[str, Any]:
    store = make_store(env, **options)
    with store.writer() as writer:
        recorder = Recorder(env, writer, **options)
        recorder.reset()
        recorder.step(taken)
    return episodes_of(store, 0)[0]


class Clipping(Echo):
    """Changes the action it is given, in place."""

    def step(self, action: Any) -> Any:
        action[...] = 0
        return super().step(action)


def test_the_action_recorded_is_the_one_that_was_given() -> None:
    space = spaces.Box(-1, 1, (2,), np.float32)
    episode = echoed(Clipping(spaces.Discrete(2), 0, action_space=space), np.ones(2, np.float32))
    assert episode["action"].tolist() == [[1, 1]]


class Counted:
    """A writer that counts calls."""

    schema = None

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self.calls.append(name)
            return getattr(self._writer, name)(*args, **options)

        return call


def test_a_step_of_many_environments_is_one_append() -> None:
    envs = SyncVectorEnv([lambda: Scripted(0, [(1, "terminated"), (3, "truncated")]) for _ in range(8)])
    with make_store(envs).writer() as writer:
        counted = Counted(writer)
        recorder = VectorRecorder(envs, counted)
        recorder.reset()
        counted.calls.clear()
        for step in range(9):
            recorder.step(actions_of(step, 8))
        assert counted.calls == ["append"] * 6  # every third step but one resets all of them
        recorder.close()


# Ends from outside


def stepped(writer: Writer, n: int = 2, **options: Any) -> Recorder:
    recorder = Recorder(Scripted(0, [(9, "terminated")]), writer, **options)
    recorder.reset()
    for step in range(n):
        recorder.step(step)
    return recorder


@pytest.mark.parametrize("how", ["reset", "close"])
def test_an_interrupted_episode_is_truncated_with_the_newest_observation_as_final(how: str) -> None:
    store = make_store(Scripted(0, []))
    with store.writer() as writer:
        getattr(stepped(writer, metadata=lambda info: {"last": info["cost"]}), how)()
    (episode,) = episodes_of(store, 0)
    check_stored(episode, 0, 0, {"action": [0, 1], "end": "truncated"})
    assert store.episodes["metadata"][0] == {"last": 2}


@pytest.mark.parametrize("how", ["reset", "close"])
def test_an_interrupted_episode_is_aborted_on_demand(how: str) -> None:
    store = make_store(Scripted(0, []))
    with store.writer() as writer:
        recorder = stepped(writer, on_reset="abort")
        writer.commit()
        recorder.step(2)
        getattr(recorder, how)()
        assert writer.stats()["dropped_steps"] == 1
    assert [(e["end"], len(e["action"])) for e in episodes_of(store, 0)] == [("aborted", 2)]


def test_a_reset_before_the_first_step_ends_nothing() -> None:
    store = make_store(Scripted(0, []))
    with store.writer() as writer:
        recorder = stepped(writer, 0)
        recorder.reset()
        recorder.close()
        recorder.close()
    assert len(episodes_of(store, 0)) == 0


def test_closing_after_the_writer_leaves_the_episode_cut() -> None:
    store = make_store(Scripted(0, []))
    with store.writer() as writer:
        recorder = stepped(writer)
    recorder.close()
    assert [e["end"] for e in episodes_of(store, 0)] == ["cut"]


def test_the_environment_is_closed_even_if_the_writer_fails() -> None:
    class Closing(Scripted):
        is_closed = False

        def close(self) -> None:
            self.is_closed = True

    env = Closing(0, [(9, "terminated")])
    with make_store(env).writer() as writer:
        recorder = Recorder(env, writer, metadata=lambda info: {"not JSON": object()})
        recorder.reset()
        recorder.step(0)
        with pytest.raises(DataError, match="JSON"):
            recorder.close()
    assert env.is_closed


def test_a_new_recorder_does_not_go_on_with_what_another_left_open() -> None:
    store = make_store(Scripted(0, []))
    with store.writer() as writer:
        stepped(writer, 2)
        stepped(writer, 3, metadata=lambda info: {"cost": info["cost"]}).close()
    assert [(e["end"], len(e["action"])) for e in episodes_of(store, 0)] == [("truncated", 2), ("truncated", 3)]
    assert store.episodes["has_final"].tolist() == [False, True]


def test_two_recorders_of_one_environment_number_are_found_out() -> None:
    with make_store(Scripted(0, [])).writer() as writer:
        one, two = stepped(writer), stepped(writer)
        with pytest.raises(DataError, match="its own environment numbers"):
            one.step(0)
        with pytest.raises(DataError, match="its own environment numbers"):
            two.step(0)


# Steps that can't be taken


def test_a_step_without_an_episode_needs_a_reset() -> None:
    store = make_store(Scripted(0, []))
    with store.writer() as writer:
        recorder = Recorder(Scripted(0, [(1, "terminated")]), writer)
        with pytest.raises(ResetNeeded, match="env 0"):
            recorder.step(0)
        recorder.reset()
        recorder.step(7)
        with pytest.raises(ResetNeeded):
            recorder.step(0)
    assert [e["action"].tolist() for e in episodes_of(store, 0)] == [[7]]


def test_without_autoreset_a_step_past_the_end_names_the_environment() -> None:
    envs = SyncVectorEnv(scripted_pair(), autoreset_mode="Disabled")
    with make_store(envs).writer() as writer:
        recorder = VectorRecorder(envs, writer, first_env=4)
        recorder.reset()
        recorder.step([0, 0])
        recorder.step([0, 0])
        with pytest.raises(ResetNeeded, match="env 4;"):
            recorder.step([0, 0])
        with pytest.raises(DataError, match="reset_mask"):
            recorder.reset(options={"reset_mask": np.array([1, 0])})


class Failing(Scripted):
    fails = False

    def reset(self, **options: Any) -> Any:
        if self.fails:
            raise OSError("the simulator crashed")
        return super().reset(**options)

    def step(self, action: Any) -> Any:
        if self.fails:
            raise OSError("the simulator crashed")
        return super().step(action)


def test_after_a_step_that_failed_the_episode_ends_without_a_final_observation() -> None:
    env = Failing(0, [(9, "terminated")])
    store = make_store(env)
    with store.writer() as writer:
        recorder = Recorder(env, writer)
        recorder.reset()
        recorder.step(5)
        env.fails = True
        with pytest.raises(OSError, match="crashed"):
            recorder.step(6)
        env.fails = False
        with pytest.raises(ResetNeeded):
            recorder.step(7)
        recorder.reset()
        recorder.step(8)
        recorder.close()
    one, two = episodes_of(store, 0)
    assert (one["end"], one["action"].tolist(), len(one["observation"]["id"])) == ("truncated", [5], 1)
    check_stored(two, 0, 1, {"action": [8], "end": "truncated"})


def test_after_a_reset_that_failed_another_is_needed_and_nothing_is_lost() -> None:
    env = Failing(0, [(9, "terminated")])
    store = make_store(env)
    with store.writer() as writer:
        recorder = Recorder(env, writer)
        recorder.reset()
        recorder.step(5)
        env.fails = True
        with pytest.raises(OSError, match="crashed"):
            recorder.reset()
        env.fails = False
        with pytest.raises(ResetNeeded):
            recorder.step(6)
        recorder.reset()
    check_all(store, [0], [env.truth])


class Flaky:
    """A writer whose next calls fail."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self.schema = writer.schema
        self.n_failures = 0

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self.n_failures -= 1
            if self.n_failures >= 0:
                raise StorageError("no space left")
            return getattr(self._writer, name)(*args, **options)

        return call


@pytest.mark.parametrize("metadata", [None, {"task": "x"}])
@pytest.mark.parametrize("at", range(4))
def test_a_step_whose_append_failed_is_appended_by_the_next_call(at: int, metadata: Any) -> None:
    env = Scripted(0, [(4, "terminated")])
    store = make_store(env)
    with store.writer() as writer:
        flaky = Flaky(writer)
        recorder = Recorder(env, flaky, metadata=metadata)
        recorder.reset()
        for step in range(4):
            flaky.n_failures = 2 if step == at else 0
            if step == at:
                with pytest.raises(StorageError):
                    recorder.step(step)
                with pytest.raises(StorageError):  # before the environment moves
                    recorder.step(step)
            else:
                recorder.step(step)
        recorder.reset()
        recorder.close()
    check_all(store, [0], [env.truth])


@pytest.mark.parametrize("action", [1.5, np.float32(1), [1], "x", None, 1 << 63])
def test_an_action_that_does_not_fit_never_reaches_the_environment(action: Any) -> None:
    store = make_store(Scripted(0, []))
    with store.writer() as writer:
        recorder = stepped(writer, 1)
        with pytest.raises(DataError, match="action"):
            recorder.step(action)
        recorder.step(1)
        recorder.close()
    check_stored(episodes_of(store, 0)[0], 0, 0, {"action": [0, 1], "end": "truncated"})


# Spaces and values


def test_the_schema_is_that_of_the_spaces() -> None:
    env = Scripted(0, [])
    schema = schema_of(env, info_fields=INFO, episode={"score": float}, reward_dtype="float32")
    assert schema.fields == {
        "observation/id": Field("int64", (3,), final=True),
        "observation/small/0": Field("int64", final=True),
        "observation/small/1/bits": Field("int8", (2,), final=True),
        "action": Field("int64"),
        "reward": Field("float32"),
        "cost": Field("int64"),
        "mask": Field("int16", (2,), final=True),
    }
    assert schema.episode == {"score": "float64"}
    assert schema == schema_of(
        SyncVectorEnv([lambda: env]), info_fields=INFO, episode={"score": float}, reward_dtype="float32"
    )


def with_spaces(observation: Any, action: Any = None) -> gymnasium.Env[Any, Any]:
    env = Scripted(0, [], observation)
    env.action_space = spaces.Discrete(2) if action is None else action
    return env


@pytest.mark.parametrize(
    ("space", "field"),
    [
        (spaces.Box(0, 255, (84, 84, 4), np.uint8), Field("uint8", (84, 84, 4), final=True)),
        (spaces.Box(-1, 1, (), np.float16), Field("float16", final=True)),
        (spaces.Discrete(5, start=-2), Field("int64", final=True)),
        (spaces.Discrete(5, dtype=np.int32), Field("int32", final=True)),
        (spaces.MultiBinary((2, 3)), Field("int8", (2, 3), final=True)),
        (spaces.MultiDiscrete([[3, 4]], dtype=np.uint8), Field("uint8", (1, 2), final=True)),
    ],
)
def test_every_plain_space_is_a_field(space: Any, field: Field) -> None:
    assert schema_of(with_spaces(space))["observation"] == field


@pytest.mark.parametrize(
    "space",
    [
        spaces.Text(4),
        spaces.Sequence(spaces.Discrete(2)),
        spaces.Graph(spaces.Discrete(2), None),
        spaces.OneOf([spaces.Discrete(2)]),
    ],
)
def test_spaces_without_a_fixed_shape_are_refused_by_name(space: Any) -> None:
    with pytest.raises(SchemaError, match=rf"space 'observation/0/x': {type(space).__name__}\("):
        schema_of(with_spaces(spaces.Tuple([spaces.Dict({"x": space})])))
    with pytest.raises(SchemaError, match="space 'action'"):
        schema_of(with_spaces(spaces.Discrete(2), space))


def test_names_that_can_not_be_stored_or_come_twice_are_refused() -> None:
    with pytest.raises(SchemaError, match="name in space 'observation'"):
        schema_of(with_spaces(spaces.Dict({"a/b": spaces.Discrete(2)})))
    with pytest.raises(SchemaError, match="'reward' is named twice"):
        schema_of(with_spaces(spaces.Discrete(2)), action="reward")
    with pytest.raises(ValueError, match="reward_dtype"):
        schema_of(with_spaces(spaces.Discrete(2)), reward_dtype="int8")  # type: ignore[typeddict-item]


@pytest.mark.parametrize(
    ("space", "value", "stored"),
    [
        (spaces.Box(-9, 9, (2,), np.float32), [1, 0.1], np.array([1, 0.1], np.float32)),
        (spaces.Box(-9, 9, (), np.float64), np.float32(0.1), np.float64(np.float32(0.1))),
        (spaces.Box(-9, 9, (1,), np.float32), torch.tensor([2.0]), np.array([2], np.float32)),
        (spaces.Box(-9, 9, (1,), np.float32), np.array([2], ">f4"), np.array([2], np.float32)),
        (spaces.MultiDiscrete([3, 3]), np.array([1, 2], np.int32), np.array([1, 2])),
        (spaces.MultiBinary(2), np.array([True, False]), np.array([1, 0], np.int8)),
        (spaces.Discrete(200, dtype=np.uint8), 199, np.uint8(199)),
    ],
)
def test_values_come_in_the_dtype_of_the_space_where_that_changes_nothing(
    space: Any, value: Any, stored: Any
) -> None:
    for episode in (echoed(Echo(space, value)), echoed(Echo(space, value, action_space=space), value)):
        assert episode["observation"].dtype == np.asarray(stored).dtype
        np.testing.assert_array_equal(episode["observation"], [stored, stored])
    np.testing.assert_array_equal(episode["action"], [stored])


@pytest.mark.parametrize(
    ("space", "value"),
    [
        (spaces.Box(-9, 9, (2,), np.float32), np.zeros(2)),
        (spaces.Box(-9, 9, (2,), np.float32), np.zeros(3, np.float32)),
        (spaces.Box(-9, 9, (2,), np.float64), np.zeros(2, np.int64)),
        (spaces.Box(-9, 9, (), np.float32), 1e300),
        (spaces.Discrete(5, dtype=np.uint8), 256),
        (spaces.Discrete(5), np.uint64(1)),
        (spaces.Dict({"a": spaces.Discrete(2)}), {"a": 0, "b": 0}),
        (spaces.Dict({"a": spaces.Discrete(2)}), {}),
        (spaces.Dict({"a": spaces.Discrete(2)}), np.zeros(1)),
        (spaces.Tuple([spaces.Discrete(2)]), (0, 1)),
        (spaces.Tuple([spaces.Discrete(2)]), 0),
    ],
)
def test_observations_that_do_not_fit_are_refused(space: Any, value: Any) -> None:
    with pytest.raises(DataError, match="observation"):
        echoed(Echo(space, value))


@pytest.mark.parametrize("reward", [1, True, 0.1, np.float32(0.1), np.array(0.1), np.int8(3), torch.tensor(0.25)])
def test_rewards_are_stored_exactly(reward: Any) -> None:
    stored = echoed(Echo(spaces.Discrete(2), 0, reward))["reward"]
    assert stored.dtype == np.float64
    assert stored.tolist() == [float(reward)]


def test_rewards_are_rounded_only_where_asked() -> None:
    env = Echo(spaces.Discrete(2), 0, 0.1)
    assert echoed(env, reward_dtype="float32")["reward"].tolist() == [float(np.float32(0.1))]
    for reward, dtype in [(1e300, "float32"), (np.zeros(1), "float64"), ("x", "float64"), (None, "float64")]:
        env.gives = reward
        with pytest.raises(DataError, match="reward"):
            echoed(env, reward_dtype=dtype)


def test_fields_have_the_names_they_are_given() -> None:
    env = Echo(spaces.Discrete(2), 0, 2.5)
    episode = echoed(env, observation="state", action="control", reward="gain")
    assert set(episode) == {"end", "state", "control", "gain"}
    assert schema_of(env, reward="gain").reward == "gain"


def test_without_a_declared_schema_it_becomes_that_of_the_environment(url: str) -> None:
    for name, make in (("one", Recorder), ("many", VectorRecorder)):
        env: Any = Scripted(0, [(9, "terminated")])
        env = env if make is Recorder else SyncVectorEnv([lambda env=env: env])
        store = trajstore.create(f"{url}-{name}")
        with store.writer() as writer:
            recorder: Any = make(env, writer)
            recorder.reset()
            recorder.step(0 if make is Recorder else [0])
            writer.commit()  # before any episode has ended
            recorder.reset()
        store.refresh()
        assert store.schema == schema_of(env)
        assert store.episodes["has_final"].tolist() == [True]


# Infos and metadata


def test_an_info_field_must_be_there_at_every_step() -> None:
    fields = {"lives": Field("int64")}
    with make_store(Scripted(0, []), info_fields=fields).writer() as writer:
        recorder = Recorder(Scripted(0, [(9, "terminated")]), writer, info_fields=fields)
        recorder.reset()
        with pytest.raises(DataError, match="'lives': expected a value at every step"):
            recorder.step(0)

    class Sometimes(Scripted):
        def _info(self) -> dict[str, Any]:
            return {"lives": 3} if self.number == 0 else {}

    envs = SyncVectorEnv([lambda: Sometimes(0, [(9, "terminated")]), lambda: Sometimes(1, [(9, "terminated")])])
    with make_store(envs, info_fields=fields).writer() as writer:
        vector = VectorRecorder(envs, writer, info_fields=fields)
        vector.reset()
        with pytest.raises(DataError, match="'lives': expected a value of every environment"):
            vector.step([0, 0])


def test_infos_without_a_dtype_of_their_own_are_recorded() -> None:
    class Flagged(Scripted):
        def _info(self) -> dict[str, Any]:
            return {"is_lit": np.bool_(self.t % 2)}  # gymnasium keeps these as objects

    fields = {"is_lit": Field("bool")}
    envs = SyncVectorEnv([lambda: Flagged(0, [(3, "terminated")])])
    store = make_store(envs, info_fields=fields)
    with store.writer() as writer:
        recorder = VectorRecorder(envs, writer, info_fields=fields)
        recorder.reset()
        for _ in range(3):
            recorder.step([0])
    assert episodes_of(store, 0)[0]["is_lit"].tolist() == [True, False, True]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_inside", [True, False])
def test_statistics_of_gymnasium_become_metadata(mode: AutoresetMode, is_inside: bool) -> None:
    makers: list[Any] = scripted_pair()
    if is_inside:
        makers = [lambda make=make: RecordEpisodeStatistics(make()) for make in makers]
    envs: Any = SyncVectorEnv(makers, autoreset_mode=mode)
    envs = envs if is_inside else VectorStatistics(envs)
    store = make_store(envs, episode={"n": int})

    def metadata(info: dict[str, Any]) -> dict[str, Any]:
        about = {"cost": info["cost"]}
        return about | {"n": info["episode"]["l"], "r": info["episode"]["r"]} if "episode" in info else about

    with store.writer() as writer:
        recorder = VectorRecorder(envs, writer, metadata=metadata)
        run(recorder, 2, 12, mode, {})
        recorder.close()
    store.refresh()
    table = store.episodes
    ended = ~table["n"].mask
    assert ended.sum() >= 5
    costs = [metadata["cost"] % 100 for metadata in table["metadata"]]
    assert costs == table["length"].tolist()  # not those of a reset
    # gymnasium (as of 1.4) forgets the statistics of all environments when some of them are reset by hand.
    if is_inside or mode is not AutoresetMode.DISABLED:
        assert table["n"][ended].tolist() == table["length"][ended].tolist()
        returns = [metadata["r"] for metadata in table["metadata"][ended]]
        assert returns == pytest.approx(table["return"][ended].tolist())


def test_metadata_of_a_single_environment_is_that_of_its_last_step() -> None:
    env = RecordEpisodeStatistics(Scripted(0, [(3, "terminated")]))
    store = make_store(env, episode={"n": int})
    with store.writer() as writer:
        recorder = Recorder(env, writer, metadata=lambda info: {"n": info["episode"]["l"]})
        recorder.reset()
        for step in range(3):
            recorder.step(step)
    assert episodes_of(store, 0)[0]["end"] == "terminated"
    assert store.episodes["n"].tolist() == [3]


# Vector environments of others


class Batched(VectorEnv[Any, Any, Any]):
    """Resets within the step and gives final observations as rows of all environments, as ale_py's does."""

    single_observation_space = spaces.Box(-99, 99, (2,), np.float32)
    single_action_space = spaces.Discrete(9)
    num_envs = 3

    def __init__(self, mode: Any = "SameStep", has_final: bool = True) -> None:
        self.metadata = {} if mode is None else {"autoreset_mode": mode}
        self.observation_space, self.action_space = self.single_observation_space, spaces.MultiDiscrete([9] * 3)
        self.has_final = has_final
        self.t = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self.observe(0), {}

    def observe(self, t: int) -> Any:
        return np.stack([np.arange(3), np.full(3, t)], 1).astype(np.float32)

    def step(self, actions: Any) -> Any:
        self.t += 1
        last, now = self.observe(self.t), self.observe(self.t)
        ended = np.array([self.t == 2, False, False])
        now[ended] = [0, 0]
        infos = {"final_obs": last} | ({} if self.has_final else {"_final_obs": np.zeros(3, bool)})
        return now, np.ones(3, np.float32), ended, np.zeros(3, bool), infos


def test_final_observations_may_come_as_rows() -> None:
    store = make_store(Batched())
    with store.writer() as writer:
        recorder = VectorRecorder(Batched(), writer)
        recorder.reset()
        for _ in range(3):
            recorder.step(np.zeros(3, np.int32))
        recorder.close()
    one, two = episodes_of(store, 0)
    assert one["observation"].tolist() == [[0, 0], [0, 1], [0, 2]]
    assert two["observation"].tolist() == [[0, 0], [0, 3]]


def test_final_observations_that_are_missing_are_missed() -> None:
    envs = Batched(has_final=False)
    with make_store(envs).writer() as writer:
        recorder = VectorRecorder(envs, writer)
        recorder.reset()
        recorder.step(np.zeros(3, np.int64))
        with pytest.raises(DataError, match="final_obs"):
            recorder.step(np.zeros(3, np.int64))


def test_an_environment_must_say_when_it_resets_itself() -> None:
    with make_store(Batched()).writer() as writer:
        with pytest.raises(ValueError, match="autoreset_mode"):
            VectorRecorder(Batched(None), writer)
        with pytest.raises(ValueError, match="on_reset"):
            VectorRecorder(Batched(), writer, on_reset="cut")  # type: ignore[arg-type]


class InTensors(VectorWrapper):
    """Everything as tensors, as wrappers for training give it."""

    def reset(self, **options: Any) -> Any:
        observations, infos = self.env.reset(**options)
        return torch.from_numpy(observations), infos

    def step(self, actions: Any) -> Any:
        *values, infos = self.env.step(actions.numpy())
        return *map(torch.from_numpy, values), infos


def test_environments_that_give_tensors_are_recorded() -> None:
    envs = InTensors(gymnasium.make_vec("Pendulum-v1", 2, vectorization_mode="sync"))
    store = make_store(envs)
    with store.writer() as writer:
        recorder = VectorRecorder(envs, writer)
        seen = [recorder.reset(seed=0)[0], *(recorder.step(torch.zeros(2, 1))[0] for _ in range(3))]
        recorder.close()
    np.testing.assert_array_equal(episodes_of(store, 1)[0]["observation"], torch.stack(seen)[:, 1])


# Real tasks


def played(env: gymnasium.Env[Any, Any], n: int) -> Iterator[tuple[Any, ...]]:
    """What an environment did under fixed random actions, by itself."""
    observation, _ = env.reset(seed=7)
    env.action_space.seed(7)
    for _ in range(n):
        action = env.action_space.sample()
        following, reward, terminated, truncated, _ = env.step(action)
        yield observation, action, reward, terminated, truncated, following
        observation = env.reset()[0] if terminated or truncated else following


TASKS = ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1", "Taxi-v4", "Blackjack-v1"]


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for part in value.values() for leaf in leaves(part)]
    return [leaf for part in value for leaf in leaves(part)] if isinstance(value, tuple) else [value]


@pytest.mark.parametrize("task", TASKS)
def test_real_tasks_are_recorded_bit_by_bit(task: str) -> None:
    env = gymnasium.make(task)
    store = make_store(env)
    with store.writer() as writer:
        recorder = Recorder(env, writer)
        for _ in played(recorder, 300):
            pass
        recorder.close()
    rows: list[tuple[Any, ...]] = []
    for episode in episodes_of(store, 0):
        n = len(episode["action"])
        seen = [leaves(episode["observation"])]
        for t in range(n):
            before, after = ([leaf[k] for leaf in seen[0]] for k in (t, t + 1))
            end = episode["end"] if t == n - 1 else "open"
            rows.append((before, episode["action"][t], episode["reward"][t], end, after))
    expected = list(played(gymnasium.make(task), 300))
    assert len(rows) == 300
    for t, (before, action, reward, end, after) in enumerate(rows):
        observation, took, earned, terminated, truncated, following = expected[t]
        np.testing.assert_array_equal(before, leaves(observation))
        np.testing.assert_array_equal(after, leaves(following))
        np.testing.assert_array_equal(action, took)
        assert reward == earned
        if t < 299:
            assert end == ("terminated" if terminated else "truncated" if truncated else "open")


@pytest.mark.parametrize(
    ("task", "how"), [("CartPole-v1", "sync"), ("CartPole-v1", "vector_entry_point"), ("Blackjack-v1", "sync")]
)
def test_real_vector_tasks_have_whole_episodes(task: str, how: str) -> None:
    envs = gymnasium.make_vec(task, 4, vectorization_mode=how)
    store = make_store(envs)
    n_steps = 0
    with store.writer() as writer:
        recorder = VectorRecorder(envs, writer)
        recorder.reset(seed=3)
        recorder.action_space.seed(3)
        ended = np.zeros(4, bool)
        for _ in range(100):
            n_steps += int((~ended).sum())
            _, _, terminated, truncated, _ = recorder.step(recorder.action_space.sample())
            ended = terminated | truncated
        recorder.close()
    store.refresh()
    table = store.episodes
    assert table["length"].sum() == n_steps
    assert table["has_final"].all()
    if task == "CartPole-v1":
        assert (table["return"] == table["length"]).all()
        starts = np.array([store.read_episode(i)["observation"][0] for i in range(len(table))])
        assert (np.abs(starts) <= 0.05).all()  # every episode begins where a reset leaves the pole


# Importing


def test_importing_trajstore_does_not_import_gymnasium() -> None:
    code = "import sys, trajstore; assert 'gymnasium' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_without_gymnasium_the_error_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['gymnasium'] = None\n"
        "import trajstore\n"
        "try:\n    import trajstore.compat.gymnasium\n"
        "except trajstore.MissingExtraError as error:\n    assert \"pip install 'gymnasium>=1.1'\" in str(error)\n"
        "else:\n    raise SystemExit('imported')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_recorder_may_record_episodes_that_continue_where_the_last_one_ended() -> None:
    """The recorder knows which steps are resets, so equal observations around an end are no evidence of any."""

    class Continuing(gymnasium.Env[Any, Any]):
        observation_space = gymnasium.spaces.Box(0, 1e9, (1,), np.float32)
        action_space = gymnasium.spaces.Discrete(2)
        t = 0

        def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
            return np.full(1, self.t, np.float32), {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            self.t += 1
            return np.full(1, self.t, np.float32), 0.0, False, self.t % 3 == 0, {}

    envs = gymnasium.vector.SyncVectorEnv([Continuing] * 2)
    store = trajstore.create("memory://continuing-recorder")
    with store.writer() as writer:
        recorder = VectorRecorder(envs, writer)
        recorder.reset()
        for _ in range(40):
            recorder.step(np.zeros(2, np.int64))
        recorder.close()
    assert store.refresh().episodes["length"].tolist() == [3] * 20
