"""What do RLinf's and ObjectRL's calls cost over trajstore? Against what theirs cost, measured or rebuilt."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _harness import Case, Report, arguments, scratch, stopwatch
from misses import TrajectoryFiles
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer
from windows import case, threads

from trajstore.compat.objectrl import ReplayBuffer
from trajstore.compat.rlinf import Trajectory, TrajectoryReplayBuffer

BATCH = 256
RLINF_ROW_S = 5.6e-6  # of Python for each row of a batch, all of it cached: measured with RLinf's own code
OBJECTRL_ADD_S = 350e-6  # of its add, measured with its own code
STEPS, OBSERVATION, ACTION = 200, 64, 8


def walk(seed: int) -> np.ndarray[Any, Any]:
    return np.cumsum(np.random.default_rng(seed).standard_normal((STEPS + 1, OBSERVATION), np.float32), axis=0)


def trajectory(seed: int) -> Trajectory:
    """200 steps of one environment: 551 bytes a transition, as RLinf stores it."""
    obs = torch.from_numpy(walk(seed))[:, None]
    flags = {n: torch.zeros(STEPS + 1, 1, 1).bool() for n in ("terminations", "truncations", "dones")}
    return Trajectory(
        actions=torch.zeros(STEPS, 1, ACTION),
        rewards=torch.ones(STEPS, 1, 1),
        curr_obs={"states": obs[:-1]},
        next_obs={"states": obs[1:]},
        **flags,
    )


def rlinf_cached(report: Report, n_trajectories: int, n: int, rounds: int) -> None:
    buffer = TrajectoryReplayBuffer(sample_window_size=0)
    buffer.add_trajectories([trajectory(i) for i in range(n_trajectories)])
    buffer.flush()
    with threads(1) as label:
        name = f"RLinf, sample({BATCH}), all cached, {label}"
        report.run([case(name, "trajectories in RAM, window of all", lambda: buffer.sample(BATCH), n)], rounds)
        theirs = "RLinf's Python for such a batch"
        report.add(
            Case(theirs, f"{RLINF_ROW_S * 1e6} µs a row, stated, not run", Path.stat, 1, "batch"),  # type: ignore[arg-type]
            [RLINF_ROW_S * BATCH],
        )
        report.speedup(f"RLinf, sample({BATCH}), all cached", name, theirs, 5)
    buffer.close()


def rlinf_stored(report: Report, n_trajectories: int, n: int, rounds: int) -> None:
    """Trajectories on disk, all of them in the window, five kept in RAM by theirs."""
    with scratch() as directory, threads(1) as label:
        theirs = TrajectoryFiles(directory / "files", n_cached=5)
        zeros = np.zeros((STEPS, ACTION), np.float32)
        ones = np.ones(STEPS, np.float32)
        for i in range(n_trajectories):
            theirs.add({"obs": walk(i), "action": zeros, "reward": ones})
        n_bytes = n_trajectories * STEPS * (OBSERVATION + ACTION + 1) * 4
        budgets: dict[str, dict[str, int]] = {
            "as it is": {},
            "cache of a tenth": {"cache_bytes": n_bytes // 10, "buffer_bytes": n_bytes // 80},
        }
        buffers = {}
        for what, options in budgets.items():
            path = directory / what.replace(" ", "-")
            writer = TrajectoryReplayBuffer(sample_window_size=0, auto_save=True, auto_save_path=path)
            writer.add_trajectories([trajectory(i) for i in range(n_trajectories)])
            writer.close()
            buffers[what] = TrajectoryReplayBuffer(
                sample_window_size=0, auto_save=True, auto_save_path=path, **options
            )
            buffers[what].sample(BATCH)
        peer = f"RLinf's path to stored trajectories, {label}"
        names = {what: f"RLinf, stored, {what}, {label}" for what in buffers}
        cases = [
            case(peer, "rebuilt: whole files loaded, none kept", lambda: theirs.sample(BATCH), max(1, n // 40))
        ]
        for what, buffer in buffers.items():
            times = n if what == "as it is" else n // 10 or 1
            cases.append(case(names[what], "opened anew from disk", partial(buffer.sample, BATCH), times))
        report.run(cases, rounds)
        for what, buffer in buffers.items():
            report.speedup(f"RLinf, stored, {what}", names[what], peer, 50)
            buffer.close()


def transition(i: int) -> TensorDict:
    state = torch.zeros(OBSERVATION)
    return TensorDict(
        {"state": state, "action": torch.zeros(ACTION), "reward": torch.tensor(1.0), "next_state": state,
         "terminated": torch.tensor(False), "truncated": torch.tensor(False), "step": torch.tensor(i)}, []
    )  # fmt: skip


def objectrl(report: Report, n_adds: int, n: int, rounds: int) -> None:
    given = [transition(i) for i in range(n_adds)]

    def ours(_: Path) -> float:
        buffer = ReplayBuffer(torch.device("cpu"), torch.device("cpu"), 100_000)
        buffer.add(given[0])
        with stopwatch() as watch:
            for item in given:
                buffer.add(item)
        buffer.close()
        return watch.seconds

    def theirs(_: Path) -> float:
        buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage(100_000))
        buffer.add(given[0])
        with stopwatch() as watch:
            for item in given:
                buffer.add(item)
        return watch.seconds

    with threads(1) as label:
        names = [f"ObjectRL, add, {label}", f"TorchRL's buffer behind ObjectRL, add, {label}"]
        report.run(
            [
                Case(names[0], "one transition, in RAM", ours, n_adds, "transition"),
                Case(names[1], "one transition, memmap", theirs, n_adds, "transition"),
            ],
            rounds,
        )
        stated = "ObjectRL's add"
        report.add(Case(stated, "stated, not run", ours, 1, "transition"), [OBJECTRL_ADD_S])
        report.speedup("ObjectRL, add", names[0], stated, 5)
        report.speedup("ObjectRL, add, against TorchRL's here", names[0], names[1], 1)
        mine = ReplayBuffer(torch.device("cpu"), torch.device("cpu"), 100_000)
        others = TensorDictReplayBuffer(storage=LazyMemmapStorage(100_000), batch_size=BATCH)
        rows = torch.stack(given[: min(n_adds, 2000)])
        mine.add_batch(rows)
        others.extend(rows)
        names = [f"ObjectRL, sample_batch({BATCH}), {label}", f"TorchRL's buffer behind, sample, {label}"]
        report.run(
            [
                case(names[0], "in RAM", lambda: mine.sample_batch(BATCH), n),
                case(names[1], "memmap", lambda: others.sample().clone(), n),
            ],
            rounds,
        )
        report.speedup("ObjectRL, sample_batch, against TorchRL's here", names[0], names[1], 1)
        mine.close()


def main() -> None:
    args = arguments(__doc__)
    report = Report("drop_ins", str(__doc__), args.small)
    n_trajectories, n_adds, n, rounds = (20, 200, 10, 3) if args.small else (500, 5_000, 400, 9)
    rlinf_cached(report, n_trajectories, n, rounds)
    rlinf_stored(report, n_trajectories, n, rounds)
    objectrl(report, n_adds, n, rounds)
    report.notes.append("figures that are stated were measured elsewhere, on two cores with one thread of torch")
    report.finish(args.json)


if __name__ == "__main__":
    main()
