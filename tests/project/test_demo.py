"""The demo: a real process is really killed, the next goes on exactly, and what is left is what was said."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import struct
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
import zarr

import trajstore
from trajstore.store.verify import verify

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


class Modules:
    """The scripts, which find each other only beside each other."""

    def __init__(self) -> None:
        names = ("demo", "_plan", "_learner", "_agent", "_plots", "_cartpole")
        modules = map(importlib.import_module, names)
        self.demo, self.plan, self.learner, self.agent, self.plots, self.cartpole = modules


@pytest.fixture(scope="module")
def scripts() -> Iterator[Modules]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        yield Modules()


@pytest.fixture(scope="module")
def demo(scripts: Modules) -> ModuleType:
    return scripts.demo


def run_demo(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / "demo.py"), "--quick", "--directory", str(directory), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs") / "demo"


@pytest.fixture(scope="module")
def finished(directory: Path) -> subprocess.CompletedProcess[str]:
    """A quick run from the command line on, with its kill."""
    return run_demo(directory, "--seed", "3")


@pytest.fixture(scope="module")
def printed(finished: subprocess.CompletedProcess[str]) -> str:
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.fixture(scope="module")
def store(printed: str, directory: Path) -> trajstore.Store:
    return trajstore.open(directory / "store")


@pytest.fixture
def files(scripts: Modules, printed: str, directory: Path, tmp_path: Path) -> Any:
    """The files of the run, to be changed."""
    shutil.copytree(directory, tmp_path / "copy")
    return scripts.plan.Files(tmp_path / "copy")


def resumed(scripts: Modules, files: Any, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What a session tells that resumes from these files."""
    plan = scripts.plan.plan_of(3, scripts.demo.QUICK_STEPS, is_quick=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        scripts.learner.resume(plan, files).buffer.close()
    finally:
        torch.set_num_threads(threads)
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


# ---- the run


def test_the_killed_process_is_resumed_bit_by_bit(printed: str) -> None:
    pid, again = re.findall(r"\(pid (\d+)\)", printed)
    assert pid != again
    assert f"kill -9 {pid}" in printed
    assert "before the kill, bit by bit" in printed
    assert "FAILED" not in printed


def test_the_second_session_came_of_the_checkpoint_that_is_named(printed: str, store: trajstore.Store) -> None:
    named = re.search(r"Buffer and agent of (\S+) are back", printed)
    assert named is not None
    assert store.streams[-1].checkpoint == named[1]
    assert [stream.is_sealed for stream in store.streams] in (
        [True],
        [False, True],
    )  # the first, if not all evicted


def test_steps_were_evicted_and_the_buffer_holds_its_capacity(printed: str, demo: ModuleType) -> None:
    held = re.search(r"buffer +([\d,]+) steps in [\d,]+ episodes; ([\d,]+) steps evicted", printed)
    assert held is not None
    n_steps, n_evicted = (int(text.replace(",", "")) for text in held.groups())
    capacity = demo.plan_of(3, demo.QUICK_STEPS, is_quick=True).capacity
    assert 0.9 * capacity < n_steps <= capacity
    assert n_evicted > 0


def test_figures_and_places_are_printed_in_plain_lines(printed: str, directory: Path) -> None:
    names = ("throughput", "drawing", "buffer", "priorities", "bytes", "cache", "commits", "plain zarr")
    assert all(re.search(rf"^ +{name} ", printed, re.MULTILINE) for name in names)
    assert f"trajstore.open('{directory / 'store'}')" in printed
    assert f"info {directory / 'store'}" in printed
    assert "\x1b" not in printed


def test_the_code_that_is_printed_runs(printed: str, tmp_path: Path) -> None:
    lines = re.findall(r"^  (import .*|store.*|zarr\..*)$", printed, re.MULTILINE)
    assert len(lines) >= 6
    subprocess.run([sys.executable, "-W", "error", "-c", "\n".join(lines)], check=True, cwd=tmp_path, timeout=120)


# ---- what is left


def test_every_check_of_the_store_is_clean(store: trajstore.Store) -> None:
    assert verify(store.url).problems == []


def test_plain_zarr_walks_the_store_without_a_warning(store: trajstore.Store) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        names = {name for name, _ in zarr.open_group(store.url, mode="r").members(max_depth=None)}
    for stream in store.streams:
        assert {f"streams/{stream.id}/steps/observation/{name}" for name in ("pixels", "state")} <= names


def test_there_is_an_agent_for_every_checkpoint_and_no_other(
    scripts: Modules, store: trajstore.Store, directory: Path
) -> None:
    files = scripts.plan.Files(directory)
    ids = [checkpoint.id for checkpoint in store.checkpoints]
    assert len(ids) == scripts.plan.N_KEPT
    assert all(files.has_pair(id_) for id_ in ids)
    assert len(list((directory / "agent").iterdir())) == 2 * len(ids)
    saved = [torch.load(files.agent(id_), weights_only=True)["step"] for id_ in ids]
    assert saved == sorted(saved)
    assert files.newest_pair() == ids[-1]


def test_episodes_are_what_cartpole_does(store: trajstore.Store) -> None:
    n_steps = 0
    with gym.make("CartPole-v1") as env:
        env.reset(seed=0)
        for i, end in enumerate(store.episodes["end"]):
            episode = store.read_episode(i)
            state, n_steps = episode["observation"]["state"], n_steps + len(episode["action"])
            for t in range(len(state) - 1):
                after, reward, terminated = stepped(env.unwrapped, state[t], int(episode["action"][t]))
                np.testing.assert_allclose(state[t + 1], after, atol=1e-5)
                assert reward == episode["reward"][t]
                assert terminated == (end == "terminated" and t == len(state) - 2)
    assert n_steps >= 300


def stepped(cartpole: Any, state: np.ndarray[Any, Any], action: int) -> tuple[Any, float, bool]:
    cartpole.state, cartpole.steps_beyond_terminated = tuple(state.astype(float)), None
    after, reward, terminated, _, _ = cartpole.step(action)
    return after, reward, terminated


def test_episodes_that_were_open_at_a_checkpoint_read_as_cut(store: trajstore.Store) -> None:
    ends = trajstore.open(store.url, at=store.checkpoints[-1].id).episodes["end"]
    assert 1 <= (ends == "cut").sum() <= 8
    assert set(ends) <= {"terminated", "truncated", "cut"}


def test_episodes_say_how_noisy_their_policy_was(store: trajstore.Store) -> None:
    noise = store.episodes["noise"][store.episodes["end"] == "terminated"]
    assert ((noise >= 0.2) & (noise <= 1)).all()


def test_frames_show_the_state_they_stand_beside(scripts: Modules, store: trajstore.Store) -> None:
    longest = int(np.argmax(store.episodes["length"]))
    observation = store.read_episode(longest)["observation"]
    np.testing.assert_array_equal(observation["pixels"], scripts.cartpole.draw(observation["state"]))
    assert len(np.unique(observation["pixels"], axis=0)) > 2


@pytest.mark.parametrize("name", ["learning.png", "buffer.png"])
def test_the_pictures_are_of_readable_size(printed: str, directory: Path, name: str) -> None:
    head = (directory / name).read_bytes()[:24]
    assert head.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", head[16:])
    assert 1000 <= width <= 3000
    assert 600 <= height <= 2000
    assert (directory / name).stat().st_size > 20_000


# ---- what would be noticed


def test_a_run_that_is_resumed_again_is_exact_again(
    scripts: Modules, files: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    told = resumed(scripts, files, capsys)
    assert told["digest"] == told["expected"]


def test_a_pair_without_its_proof_is_passed_over(
    scripts: Modules, files: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = files.newest_pair()
    files.proof(newest).unlink()
    told = resumed(scripts, files, capsys)
    assert told["checkpoint"] != newest
    assert told["digest"] == told["expected"]


def test_an_agent_that_differs_in_one_weight_is_noticed(
    scripts: Modules, files: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = files.agent(files.newest_pair())
    saved = torch.load(path, weights_only=True)
    saved["agent"]["target"]["common.bias"] += 1e-6
    torch.save(saved, path)
    told = resumed(scripts, files, capsys)
    assert told["digest"] != told["expected"]


def test_a_fingerprint_depends_on_every_bit_name_and_shape(scripts: Modules) -> None:
    digest, ones = scripts.agent.digest, torch.ones(2, 2)
    other = torch.ones(2, 2)
    other[1, 1] += 1e-7
    trees = [
        {"a": ones},
        {"b": ones},
        {"a": {"b": ones}},
        {"a": ones.flatten()},
        {"a": ones.double()},
        {"a": other},
    ]
    assert len({digest(tree) for tree in trees}) == len(trees)
    assert digest({"a": ones, "b": other}) == digest({"b": other.clone(), "a": ones.clone()})


def outcome(demo: ModuleType, plan: Any, *sessions: list[dict[str, Any]]) -> list[str]:
    told = demo.Demo(plan, None, None)
    told.sessions = list(sessions)
    problems: list[str] = told.problems()
    return problems


def test_runs_that_do_not_show_what_they_should_are_failures(demo: ModuleType) -> None:
    plan = demo.plan_of(0, demo.N_STEPS)
    good = {"event": "resumed", "digest": "a", "expected": "a"}
    reached, missed = ({"event": "finished", "is_reached": value} for value in (True, False))
    assert outcome(demo, plan, [], [good, reached]) == []
    assert "not reached" in outcome(demo, plan, [], [good, missed])[0]
    assert "differ" in outcome(demo, plan, [], [good | {"digest": "b"}, reached])[0]
    assert "nothing was resumed" in outcome(demo, plan, [reached])[0]
    assert outcome(demo, replace(plan, kill_at=None), [reached]) == []
    assert outcome(demo, replace(plan, goal=None), [], [good, missed]) == []


def test_a_problem_ends_the_command_with_a_failure(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "command", lambda *_, **__: [sys.executable, "-c", "raise SystemExit(3)"])
    assert demo.main(["--quick", "--directory", str(tmp_path / "x")]) == 1
    assert "training ended with exit code 3" in capsys.readouterr().err


def test_a_process_does_not_outlive_what_started_it(demo: ModuleType) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        demo.started([sys.executable, "-c", "import time; time.sleep(600)"]) as process,
    ):
        raise KeyboardInterrupt
    assert process.returncode == -9


def test_what_was_lost_with_the_kill_is_told_from_what_was_kept(scripts: Modules) -> None:
    first: list[dict[str, Any]] = [{"event": "evaluated", "step": step} for step in (100, 200, 300)]
    first.append({"event": "progress", "step": 320, "ended": [{"step": 150}, {"step": 310}]})
    second = [{"event": "resumed", "step": 200}, {"event": "evaluated", "step": 300}]
    run = scripts.plots.Run([first, second])
    assert (run.resumed_at, run.killed_at) == (200, 320)
    assert [e["step"] for e in run.of("evaluated")] == [100, 200, 300]
    assert [e["step"] for e in run.of("evaluated", is_lost=True)] == [300]
    assert run.ended() == [{"step": 150}]
    assert run.ended(is_lost=True) == [{"step": 310}]


def test_shares_of_draws_add_up_for_every_time(scripts: Modules) -> None:
    told = [{"drawn": [[0, 0, 4], [1, 0, 3]]}, {"drawn": [[1, 1, 1], [3, 2, 5]]}]
    shares = scripts.plots.drawn_shares(told)
    np.testing.assert_array_equal(shares, [[1, 0, 0, 0], [0.75, 0.25, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0]])


def test_files_and_directories_that_go_while_they_are_counted_count_nothing(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [tmp_path / directory / name for directory in "ab" for name in "cd"]
    for place in places:
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(b"12345")
    measured = demo.os.path.getsize

    def measure_and_remove_the_rest(path: str) -> int:
        size: int = measured(path)
        for place in places:
            if place.parent != Path(path).parent:
                shutil.rmtree(place.parent, ignore_errors=True)
            elif place != Path(path):
                place.unlink(missing_ok=True)
        return size

    monkeypatch.setattr(demo.os.path, "getsize", measure_and_remove_the_rest)
    assert demo.stored_bytes(tmp_path) == 5


# ---- the command


def test_without_a_kill_one_process_trains_to_the_end_and_finds_a_directory_of_its_own(
    printed: str, directory: Path
) -> None:
    finished = run_demo(directory, "--no-kill", "--steps", "800")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "Resuming" not in finished.stdout
    second = directory.with_name("demo-2")
    assert len(trajstore.open(second / "store").streams) == 1
    assert {"learning.png", "buffer.png"} <= {path.name for path in second.iterdir()}


@pytest.mark.parametrize("words", [["--steps", "0"], ["--steps", "100"], ["--seed", "-1"], ["--seed", "x"]])
def test_numbers_out_of_range_are_refused(demo: ModuleType, words: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        demo.main(words)


def test_help_names_every_option(demo: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        demo.main(["--help"])
    shown = capsys.readouterr().out
    assert all(option in shown for option in ("--seed", "--steps", "--directory", "--no-kill", "--quick"))
