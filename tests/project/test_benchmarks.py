"""Every benchmark runs in its small form and says what it promises, so that none can rot unseen."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.warm_python import WarmPython, warm_python

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
EXPECTED = {
    "append": [
        "state episodes, ours",
        "frame episodes, ours, no fsync",
        "single steps, ours",
        "64 environments, ours",
    ],
    "commit": ["beside 10 episodes", "beside 1,000 episodes", "beside 1,000 episodes, written"],
    "open": ["2,000 x 10 steps, cold: all", "2,000 x 10 steps, warm: open", "2,000 x 10 steps: refresh"],
    "frames": ["84x84x4 Breakout", "84x84 noise", "all games, 84x84 zstd:1 x 8"],
    "memory": ["frame episodes", "frame steps", "64 environments", "narrow rows"],
    "windows": [
        "state, ours, 1 thread",
        "append between, ours, 20,000 steps, 1 thread",
        "pixels, ours, out=, 1 thread",
        "draw, 1,000 episodes of 1,000 steps",
        "64 open environments, 4 spans each: index",
    ],
    "misses": ["windows, ours, 1 thread", "windows, zarr", "state transitions, RLinf's path"],
    "disk_cache": [
        "remote",
        "parts of objects on the disk",
        "whole objects on the disk",
        "local copy",
        "until warm",
    ],
    "priorities": [
        "compiled, 10,000 leaves",
        "compiled, 100,000 leaves",
        "tensor operations, 10,000 leaves, torch threads 1",
    ],
}
EXPECTED["replay"] = [
    "sample, buffer, 1 thread",
    "append 16, sample, ours, 20,000 steps, 1 thread",
    "sample, beside a thread that appends flat out",
    "append 16, sample, update, evict, ours, 20,000 steps, 1 thread",
    "checkpoint of 2,377 steps",
]
EXPECTED["verify"] = ["state, raw: verify", "state, blosc-lz4: decode", "frames: verify"]
EXPECTED["viewer"] = [
    "2,000 episodes: info",
    "2,000 episodes: first page, from the start",
    "0 GB: an episode and its series",
    "0 GB, 20 ms: opened and first page",
]
EXPECTED["object_store"] = [
    "0 ms: 20 reads, fsspec",
    "20 ms: open",
    "20 ms: cold batch of 256 windows",
    "training, 16 windows of 64, local",
    "puts",
]
EXPECTED["ranks"] = [
    "4,000 episodes, 8 to 16 ranks: plan",
    "4,000 episodes, 8 to 16 ranks: storage calls",
    "checkpoint, 2 ranks of 200 episodes",
]
EXPECTED["ray_service"] = [
    "256 transitions, in process",
    "256 transitions, 2 actors, batches",
    "256 transitions, TorchRL",
]
EXPECTED["drop_ins"] = [
    "RLinf, sample(256), all cached, 1 thread",
    "RLinf, stored, cache of a tenth, 1 thread",
    "ObjectRL, add, 1 thread",
]
EXPECTED["rlinf_add_checkpoint"] = [
    "stored, add, ours",
    "stored, save_checkpoint, RLinf's path",
    "in RAM, load_checkpoint, ours",
    "in RAM, load_checkpoint of RLinf's files, ours",
]
EXPECTED["torchrl_storage"] = ["sample 256, state, TrajStorage, 1 thread", "sample 256, pixels by pages, 1 thread"]
EXPECTED["loops"] = [
    "4,096 transitions, ours, 2 threads",
    "256 transitions, bare, 1 thread",
    "256 transitions, 40 fields, ours, 1 thread",
    "256 transitions, cache of a quarter, ours, 1 thread",
    "256 prioritised, update, ours, 2 threads",
    "append 1, draw 32, n-step 3, ours, 1 thread",
    "append 64, draw 512, ours, 1 thread",
    "append 4, draw 16 x 64 frames, ours, 1 thread",
    "windows 64 x 200, ours, 2 threads",
    "append 1, windows 256 x 32, ours, 1 thread",
    "one prioritised transition, ours, 1 thread",
    "windows 256 x 32, ours, beside appends, 1 thread",
]
EXPECTED["cold_rows"] = [
    "256 state transitions, warm, ours, 1 thread",
    "256 frame transitions, warm, ours, 1 thread",
    "state transitions: objects for each GB",
]
EXPECTED["pack"] = [
    "state, written",
    "state, packed",
    "state, read in order, cold, packed",
    "state: objects",
    "state: memory of pack",
]
EXPECTED["scans"] = [
    "read_episode, one after the other, 20 ms",
    "read_all_in_order, 20 ms",
    "epoch of windows in order, 20 ms, not ahead",
    "read_all_in_order, local, cold",
]
PEER = ["state episodes, TorchRL", "single steps, TorchRL add, given", "64 environments, TorchRL extend"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not find_spec("ale_py"), reason="needs ale-py"),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]


@pytest.fixture(scope="module")
def python() -> Iterator[WarmPython]:
    """With the peers that are installed."""
    peers = ("torchrl.data", "stable_baselines3", "gymnasium", "cpprb")
    with warm_python(*filter(find_spec, peers)) as python:
        yield python


def run(python: WarmPython, name: str, path: Path, *options: str) -> dict[str, Any]:
    """Run a benchmark in its small form and return the JSON it wrote."""
    options = (*options, "--small", "--json", str(path))
    done = python.run_script(BENCHMARKS / f"{name}.py", *options, timeout=400, cwd=BENCHMARKS)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(path.read_text())
    return report


def run_without(modules: str, name: str, path: Path, *options: str) -> dict[str, Any]:
    """The same in a process that cannot import some modules."""
    script = str(BENCHMARKS / f"{name}.py")
    hide = f"import runpy, sys; sys.modules |= dict.fromkeys({modules.split()!r});"
    code = f"{hide} sys.path.insert(0, {str(BENCHMARKS)!r}); runpy.run_path({script!r}, run_name='__main__')"
    command = [sys.executable, "-c", code, *options, "--small", "--json", str(path)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=400, cwd=BENCHMARKS)
    report: dict[str, Any] = json.loads(path.read_text())
    return report


@pytest.mark.parametrize("name", EXPECTED)
def test_a_benchmark_completes_and_writes_its_cases(python: WarmPython, name: str, tmp_path: Path) -> None:
    report = run(python, name, tmp_path / "report.json")
    assert report["benchmark"] == name
    assert report["small"] is True
    assert set(EXPECTED[name]) <= set(report["cases"])
    assert report["environment"].keys() >= {"python", "cpus", "load", "filesystem", "trajstore"}
    assert all(case["seconds"] for case in report["cases"].values() if "median_s" in case)
    assert all(ratio["value"] > 0 for ratio in report["ratios"].values())
    if name == "append" and find_spec("torchrl"):
        assert set(PEER) <= set(report["cases"])


def test_without_torchrl_its_cases_are_skipped_with_a_note(tmp_path: Path) -> None:
    report = run_without("torch", "append", tmp_path / "report.json")
    assert not set(PEER) & set(report["cases"])
    assert set(EXPECTED["append"]) <= set(report["cases"])
    assert "torchrl is not installed: its cases are skipped" in report["notes"]


def test_one_loop_runs_alone_with_the_given_steps_rounds_and_threads(python: WarmPython, tmp_path: Path) -> None:
    options = ["--only", "dqn", "--steps", "2000", "--rounds", "2", "--threads", "1"]
    report = run(python, "loops", tmp_path / "report.json", *options)
    loop = "append 1, draw 32, n-step 3"
    assert set(report["cases"]) >= {f"{loop}, {who}, 1 thread" for who in ("ours", "bare")}
    assert all(name.startswith(loop) and name.endswith("1 thread") for name in report["cases"])
    assert {case["rounds"] for case in report["cases"].values()} == {2}
    targets = {"TorchRL": ("torchrl", 2), "cpprb": ("cpprb", 1.3), "SB3": ("stable_baselines3", None)}
    for who, (package, target) in targets.items():
        if find_spec(package):
            ratio = report["ratios"][f"{loop}, against {who}, 1 thread"]
            assert ratio["target"] == target
            assert (ratio["met"] is None) is (target is None)


def test_loops_without_peers_skip_their_cases_with_a_note(tmp_path: Path) -> None:
    hidden, options = "torchrl cpprb stable_baselines3", ["--only", "dqn", "--threads", "1"]
    report = run_without(hidden, "loops", tmp_path / "report.json", *options)
    assert {name.split(", ")[-2] for name in report["cases"]} == {"ours", "bare"}
    for peer in ("TorchRL", "cpprb", "SB3"):
        assert f"{peer} is not installed: its cases are skipped" in report["notes"]


def test_run_runs_every_benchmark_there_is() -> None:
    source = (BENCHMARKS / "run.py").read_text()
    scripts = {path.stem for path in BENCHMARKS.glob("[a-z]*.py")} - {"run"}
    assert scripts == set(EXPECTED)
    assert all(f'"{name}"' in source for name in scripts)
