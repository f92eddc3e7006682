"""The demo: what it records is what CartPole did, and what it draws is there."""

from __future__ import annotations

import importlib.util
import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import trajstore

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
N_EPISODES, N_ENVS, SEED = 24, 4, 3
LIMITS = np.array([2.4, np.inf, 12 * np.pi / 180, np.inf], np.float32)


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("trajstore_demo", SCRIPTS / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def out(demo: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the demo has put a store, from the command line on."""
    out = tmp_path_factory.mktemp("runs") / "demo"
    assert demo.main(arguments(out)) == 0
    return out


@pytest.fixture(scope="module")
def store(out: Path) -> trajstore.Store:
    return trajstore.open(out)


def arguments(out: Path, *more: str) -> list[str]:
    numbers = {"--episodes": N_EPISODES, "--envs": N_ENVS, "--seed": SEED, "--out": out}
    return [str(word) for pair in numbers.items() for word in pair] + list(more)


def states(store: trajstore.Store, i: int) -> np.ndarray[Any, Any]:
    """All observed states of an episode, the final one included."""
    state: np.ndarray[Any, Any] = store.read_episode(i)["observation"]["state"]
    return state


def is_outside(state: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return (np.abs(state) > LIMITS).any(axis=-1)


def replayed(demo: ModuleType, env: Any, episode: int, seed: int | None) -> dict[str, Any]:
    """One episode in a single environment, under the same plan."""
    planned = demo.plan(SEED, episode, N_EPISODES)
    state, _ = env.reset(seed=seed)
    seen, actions, rewards, ends = [state], [], [], (False, False)
    while not any(ends):
        action = int(demo.act(state[None], planned[[len(actions)]])[0])
        state, reward, *ends, _ = env.step(action)
        seen.append(state)
        actions.append(action)
        rewards.append(reward)
    return {"state": np.array(seen), "action": actions, "reward": rewards, "end": tuple(ends)}


def png_size(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", head[16:])


def test_the_demo_records_as_many_whole_episodes_as_asked(store: trajstore.Store) -> None:
    assert len(store) == N_EPISODES
    assert set(store.episodes["end"]) == {"terminated", "truncated"}
    assert store.episodes["has_final"].all()
    assert sorted(set(store.episodes["env"])) == list(range(N_ENVS))


def test_every_episode_is_what_a_single_environment_does(demo: ModuleType, store: trajstore.Store) -> None:
    table = store.episodes
    for lane in range(N_ENVS):
        with gym.make("CartPole-v1") as env:
            for k, i in enumerate(np.flatnonzero(table["env"] == lane)):
                want = replayed(demo, env, int(table["episode"][i]), SEED + lane if k == 0 else None)
                got = store.read_episode(int(i))
                np.testing.assert_array_equal(got["observation"]["state"], want["state"])
                assert got["action"].tolist() == want["action"]
                assert got["reward"].tolist() == want["reward"]
                assert (table["end"][i] == "terminated", table["end"][i] == "truncated") == want["end"]


def test_an_episode_terminates_where_and_only_where_cartpole_leaves_its_limits(store: trajstore.Store) -> None:
    for i, end in enumerate(store.episodes["end"]):
        outside = is_outside(states(store, i))
        assert outside[-1] == (end == "terminated")
        assert not outside[:-1].any()


def test_truncated_episodes_have_exactly_the_steps_of_the_time_limit(store: trajstore.Store) -> None:
    lengths, is_truncated = store.episodes["length"], store.episodes["end"] == "truncated"
    assert set(lengths[is_truncated]) == {500}
    assert lengths[~is_truncated].max() <= 500


def test_returns_equal_lengths_and_rise(store: trajstore.Store) -> None:
    returns = store.episodes["return"]
    np.testing.assert_array_equal(returns, store.episodes["length"])
    assert returns[-N_EPISODES // 4 :].mean() > 3 * returns[: N_EPISODES // 4].mean()


def test_every_episode_says_how_noisy_its_policy_was(demo: ModuleType, store: trajstore.Store) -> None:
    expected = [demo.noise_of(int(k), N_EPISODES) for k in store.episodes["episode"]]
    assert store.episodes["noise"].tolist() == expected


def test_frames_show_the_state_they_stand_beside(demo: ModuleType, store: trajstore.Store) -> None:
    observation = store.read_episode(0)["observation"]
    np.testing.assert_array_equal(observation["pixels"], demo.draw(observation["state"]))
    assert len(np.unique(observation["pixels"].reshape(len(observation["pixels"]), -1), axis=0)) > 2


def test_plain_zarr_walks_the_demos_store_without_a_warning(out: Path, store: trajstore.Store) -> None:
    names = [name for name, _ in store.zarr_group().members(max_depth=None)]
    assert any(name.endswith("steps/observation/pixels") for name in names)


def test_verifying_notices_a_single_byte_that_differs(
    demo: ModuleType, out: Path, store: trajstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert demo.verify(store, out) == store.snapshot.n_rows * demo.SCHEMA.row_bytes - N_EPISODES * (8 + 4)
    *first, (stream, episode, rows) = demo.read_with_zarr(out)
    rows["reward"][-1] += 1
    monkeypatch.setattr(demo, "read_with_zarr", lambda url: [*first, (stream, episode, rows)])
    with pytest.raises(RuntimeError, match="zarr reads 'reward' differently"):
        demo.verify(store, out)


def test_the_picture_is_a_png_of_readable_size(out: Path) -> None:
    width, height = png_size(out.with_name("demo.png"))
    assert 1000 <= width <= 3000
    assert 600 <= height <= 2000
    assert out.with_name("demo.png").stat().st_size > 20_000


def test_a_second_run_takes_a_fresh_directory_and_repeats_the_first(
    demo: ModuleType, out: Path, store: trajstore.Store
) -> None:
    assert demo.main(arguments(out)) == 0
    again = trajstore.open(out.with_name("demo-2"))
    assert out.with_name("demo-2.png").exists()
    np.testing.assert_array_equal(again.episodes["return"], store.episodes["return"])


def test_the_store_may_be_at_any_url(demo: ModuleType, tmp_path: Path) -> None:
    assert demo.main(["--episodes", "3", "--out", str(tmp_path / "x"), "--url", "memory://demo-of-the-tests"]) == 0
    assert len(trajstore.open("memory://demo-of-the-tests")) == 3
    assert [p.name for p in tmp_path.iterdir()] == ["x.png"]


def test_a_url_that_holds_a_store_is_refused_in_one_line(
    demo: ModuleType, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(["--out", str(out), "--url", str(out)]) == 1
    assert "is a store already" in capsys.readouterr().err


def test_the_report_says_what_was_recorded_and_where(
    demo: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert demo.main(["--episodes", "2", "--envs", "8", "--out", "x"]) == 0
    printed = capsys.readouterr().out
    assert "same bytes in plain zarr" in printed
    assert "trajstore.open('x')" in printed


@pytest.mark.parametrize("words", [["--episodes", "0"], ["--envs", "-1"], ["--seed", "x"]])
def test_numbers_out_of_range_are_refused(demo: ModuleType, words: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        demo.main(words)


def test_help_names_every_option() -> None:
    command = [sys.executable, str(SCRIPTS / "demo.py"), "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert all(option in shown for option in ("--out", "--url", "--episodes", "--envs", "--seed"))
