"""How long until a store with a million episodes can be used, and until one more commit is seen?"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from _harness import Case, Report, arguments, forget_pages, scratch, stopwatch

import trajstore

N_ENVS = 1000
SCHEMA = trajstore.Schema({"action": trajstore.Field("uint8")})


def fill(directory: Path, n_episodes: int, n_steps: int) -> float:
    """Write that many episodes of one-byte steps; returns the seconds it took."""
    store = trajstore.create(directory, SCHEMA, fsync=False)
    n_envs = min(N_ENVS, n_episodes)
    ends = np.zeros((n_steps, n_envs), bool)
    ends[-1] = True
    data = {"action": np.random.default_rng(0).integers(0, 18, ends.shape, np.uint8)}
    start = time.perf_counter()
    with store.writer(buffer_bytes="16MiB") as writer:
        for _ in range(n_episodes // n_envs):
            writer.append_rollout(data, terminated=ends)
    return time.perf_counter() - start


def timed(action: Callable[[], object]) -> float:
    with stopwatch() as watch:
        action()
    return watch.seconds


def opening(report: Report, label: str, directory: Path, rounds: int, *, cold: bool) -> None:
    stages: dict[str, list[float]] = {"open": [], "episode table": [], "a column of it": [], "all": []}
    for _ in range(rounds):
        if cold:
            forget_pages(directory)
        opened: list[trajstore.Store] = []
        stages["open"].append(timed(lambda: opened.append(trajstore.open(directory))))  # noqa: B023
        stages["episode table"].append(timed(lambda: len(opened[0])))  # noqa: B023
        stages["a column of it"].append(timed(lambda: opened[0].episodes["length"]))  # noqa: B023
        stages["all"].append(sum(stages[name][-1] for name in list(stages)[:3]))
    isolates = {
        "open": "root, schema and records",
        "episode table": "span arrays read, decoded, checked and joined",
        "a column of it": "episodes['length']",
        "all": "the three together",
    }
    for stage, seconds in stages.items():
        name = f"{label}, {'cold' if cold else 'warm'}: {stage}"
        report.add(Case(name, isolates[stage], lambda _: 0.0), seconds)


def refreshing(report: Report, label: str, directory: Path, rounds: int) -> None:
    store = trajstore.open(directory)
    n = len(store)
    stages: dict[str, list[float]] = {"refresh": [], "episode table after it": []}
    with trajstore.open(directory, fsync=False).writer(commit_seconds=None) as writer:
        for i in range(rounds):
            writer.append_episode({"action": np.zeros(10, np.uint8)}, terminated=True)
            writer.commit()
            stages["refresh"].append(timed(store.refresh))
            stages["episode table after it"].append(timed(lambda: len(store)))
            assert len(store) == n + i + 1
    for stage, seconds in stages.items():
        report.add(Case(f"{label}: {stage}", "one episode more than before", lambda _: 0.0), seconds)


def importing(report: Report, rounds: int) -> None:
    command = [sys.executable, "-c", "import trajstore"]
    empty = [sys.executable, "-c", ""]
    seconds = [
        timed(lambda: subprocess.run(command, check=True)) - timed(lambda: subprocess.run(empty, check=True))
        for _ in range(rounds)
    ]
    report.add(Case("import trajstore", "a process with it less one without", lambda _: 0.0), seconds)


def main() -> None:
    args = arguments(__doc__)
    report = Report("open", "how long until a store with a million episodes can be used?", args.small)
    rounds = 2 if args.small else 7
    sizes = ((2000, 10),) if args.small else ((1_000_000, 10), (1_000_000, 100))
    importing(report, rounds)
    for n_episodes, n_steps in sizes:
        label = f"{n_episodes:,} x {n_steps} steps"
        with scratch() as directory:
            seconds = fill(directory / "store", n_episodes, n_steps)
            report.notes.append(f"{label}: written in {seconds:.1f} s by append_rollout")
            opening(report, label, directory / "store", rounds, cold=True)
            opening(report, label, directory / "store", rounds, cold=False)
            refreshing(report, label, directory / "store", rounds)
        for kind in ("cold", "warm"):
            median = report.cases[f"{label}, {kind}: all"]["median_s"]
            report.ratio(f"{label}, {kind}, seconds", median, 1, at_most=True)
    report.finish(args.json)


if __name__ == "__main__":
    main()
