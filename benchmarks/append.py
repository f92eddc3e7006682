"""How fast do steps reach the disk? Whole episodes, single steps and vectorised steps, against TorchRL's memmap."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from _atari import GAMES, stacked
from _harness import Case, Report, arguments, stopwatch

import trajstore

Array = np.ndarray[Any, np.dtype[Any]]
Episode = Mapping[str, Array]
N_ENVS = 64


def peer() -> Any:
    """TorchRL's classes, or None where it is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a C++ extension that storages do not use
            import torch
            from tensordict import TensorDict
            from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer
    except ImportError:
        return None

    logging.getLogger("torchrl").setLevel(logging.WARNING)

    class Peer:
        tensordict = TensorDict
        from_numpy = staticmethod(torch.from_numpy)

        @staticmethod
        def buffer(n: int, directory: Path) -> Any:
            return TensorDictReplayBuffer(storage=LazyMemmapStorage(n, scratch_dir=directory))

        @staticmethod
        def of(episode: Episode) -> Any:
            return TensorDict({k: torch.from_numpy(v) for k, v in episode.items()}, [len(episode["reward"])])

    return Peer


def state_episodes(n: int, n_steps: int, seed: int = 0) -> list[Episode]:
    """Episodes of a random walk of 64 numbers, 8 actions and a reward, all float32."""
    rng = np.random.default_rng(seed)
    return [
        {
            "observation": np.cumsum(rng.standard_normal((n_steps, 64), np.float32), axis=0),
            "action": rng.standard_normal((n_steps, 8), np.float32),
            "reward": rng.standard_normal(n_steps, np.float32),
        }
        for _ in range(n)
    ]


def frame_episodes(n_steps: int) -> list[Episode]:
    """One episode a game: stacked Atari frames, an action and a reward."""
    return [
        {
            "observation": stacked(game, n_steps),
            "action": np.zeros(n_steps, np.int64),
            "reward": np.zeros(n_steps, np.float32),
        }
        for game in GAMES[:4]
    ]


def ours(episodes: list[Episode], fsync: bool) -> Callable[[Path], float]:
    def run(directory: Path) -> float:
        store = trajstore.create(directory / "store", fsync=fsync)
        writer = store.writer(commit_seconds=None)
        with stopwatch() as watch:
            for episode in episodes:
                writer.append_episode(episode, terminated=True)
            writer.commit()
        writer.close()
        return watch.seconds

    return run


def sync_files(directory: Path) -> None:
    """What it takes to make mapped files durable: written back, and waited for."""
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def theirs(torchrl: Any, episodes: list[Episode], *, fsync: bool) -> Callable[[Path], float]:
    blocks = {id(e): torchrl.of(e) for e in episodes}  # episodes repeat
    rows = sum(len(e["reward"]) for e in episodes)

    def run(directory: Path) -> float:
        buffer = torchrl.buffer(rows, directory)
        with stopwatch() as watch:
            for episode in episodes:
                buffer.extend(blocks[id(episode)])
            if fsync:
                sync_files(directory)
        return watch.seconds

    return run


def whole_episodes(report: Report, torchrl: Any, kind: str, episodes: list[Episode], rounds: int) -> None:
    work = sum(len(e["reward"]) for e in episodes)
    size = sum(column.nbytes for e in episodes for column in e.values())
    cases = [
        Case(f"{kind} episodes, ours", "append_episode, one commit, fsync on", ours(episodes, True)),
        Case(f"{kind} episodes, ours, no fsync", "the same without fsync", ours(episodes, False)),
    ]
    if torchrl:
        plain, synced = (theirs(torchrl, episodes, fsync=fsync) for fsync in (False, True))
        cases += [
            Case(f"{kind} episodes, TorchRL", "extend, first fill, nothing synced", plain),
            Case(f"{kind} episodes, TorchRL, fsync", "the same, then fsync of its files", synced),
        ]
    report.run([Case(c.name, c.isolates, c.run, work, "step", size) for c in cases], rounds)


def single_ours(episode: Episode, n: int) -> Callable[[Path], float]:
    observations, actions, rewards = (list(episode[k]) for k in ("observation", "action", "reward"))
    length = len(rewards)

    def run(directory: Path) -> float:
        writer = trajstore.create(directory / "store").writer(commit_seconds=None)
        with stopwatch() as watch:
            for i in range(n):
                t = i % length
                step = {"observation": observations[t], "action": actions[t], "reward": rewards[t]}
                writer.append(step, terminated=t == length - 1)
            writer.commit()
        writer.close()
        return watch.seconds

    return run


def single_theirs(torchrl: Any, episode: Episode, n: int, *, build: bool) -> Callable[[Path], float]:
    columns = {k: list(torchrl.from_numpy(v)) for k, v in episode.items()}
    length = len(columns["reward"])

    def make(t: int) -> Any:
        return torchrl.tensordict({k: column[t] for k, column in columns.items()}, [])

    built = [make(t) for t in range(length)]

    def run(directory: Path) -> float:
        buffer = torchrl.buffer(n, directory)
        with stopwatch() as watch:
            for i in range(n):
                buffer.add(make(i % length) if build else built[i % length])
        return watch.seconds

    return run


def vector_ours(episode: Episode, n: int) -> Callable[[Path], float]:
    def run(directory: Path) -> float:
        writer = trajstore.create(directory / "store").writer(commit_seconds=None)
        envs, goes_on = range(N_ENVS), np.zeros(N_ENVS, bool)
        with stopwatch() as watch:
            for i in range(n):
                block = slice(i % 8 * N_ENVS, (i % 8 + 1) * N_ENVS)
                step = {name: column[block] for name, column in episode.items()}
                ends = ~goes_on if i % 1000 == 999 else goes_on
                writer.append(step, envs=envs, terminated=ends)
            writer.commit()
        writer.close()
        return watch.seconds

    return run


def vector_theirs(torchrl: Any, episode: Episode, n: int) -> Callable[[Path], float]:
    columns = {k: torchrl.from_numpy(v) for k, v in episode.items()}

    def run(directory: Path) -> float:
        buffer = torchrl.buffer(n * N_ENVS, directory)
        with stopwatch() as watch:
            for i in range(n):
                block = slice(i % 8 * N_ENVS, (i % 8 + 1) * N_ENVS)
                buffer.extend(torchrl.tensordict({k: c[block] for k, c in columns.items()}, [N_ENVS]))
        return watch.seconds

    return run


def steps(report: Report, torchrl: Any, n_single: int, n_vector: int, rounds: int) -> None:
    (episode,) = state_episodes(1, 1000)
    n_rows = n_vector * N_ENVS
    cases = [
        Case("single steps, ours", "append, until committed", single_ours(episode, n_single), n_single, "step"),
        Case("64 environments, ours", "append(envs=...), until committed", vector_ours(episode, n_vector),
             n_rows, "step"),
    ]  # fmt: skip
    if torchrl:
        built, given = (single_theirs(torchrl, episode, n_single, build=b) for b in (True, False))
        cases += [
            Case("single steps, TorchRL add", "TensorDict built and added", built, n_single, "step"),
            Case("single steps, TorchRL add, given", "TensorDict built before", given, n_single, "step"),
            Case("64 environments, TorchRL extend", "TensorDict of 64 rows built and extended",
                 vector_theirs(torchrl, episode, n_vector), n_rows, "step"),
        ]  # fmt: skip
    report.run(cases, rounds)


def main() -> None:
    args = arguments(__doc__)
    report = Report("append", "how fast do steps reach the disk?", args.small)
    torchrl = peer()
    n_state, n_frames, length = (8, 4, 100) if args.small else (1000, 40, 1000)
    rounds = 1 if args.small else 5
    whole_episodes(report, torchrl, "state", state_episodes(n_state, length), rounds)
    games = frame_episodes(length)
    whole_episodes(report, torchrl, "frame", [games[i % len(games)] for i in range(n_frames)], rounds)
    steps(report, torchrl, *((500, 20) if args.small else (20_000, 2000)), rounds)
    for kind, target in (("state", 1), ("frame", 2)):
        mine, peers = f"{kind} episodes, ours", f"{kind} episodes, TorchRL"
        report.speedup(f"{kind} episodes, fsync against none", mine, peers, target)
        report.speedup(f"{kind} episodes, both without fsync", f"{mine}, no fsync", peers, target)
        report.speedup(f"{kind} episodes, both durable", mine, f"{peers}, fsync", target)
    report.speedup("single steps", "single steps, ours", "single steps, TorchRL add", 5)
    report.speedup("single steps, built before", "single steps, ours", "single steps, TorchRL add, given", 5)
    report.speedup("64 environments, against add", "64 environments, ours", "single steps, TorchRL add", 20)
    report.speedup("64 environments, against extend", "64 environments, ours", "64 environments, TorchRL extend", 1)
    report.notes.append("ours is timed until commit() has returned; TorchRL's data is then still in the page cache")
    if torchrl is None:
        report.notes.append("torchrl is not installed: its cases are skipped")
    report.finish(args.json)


if __name__ == "__main__":
    main()
