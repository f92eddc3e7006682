"""Does a commit cost more in a large store? One episode and a commit, beside 1,000 and beside 100,000 episodes."""

from __future__ import annotations

import os
import statistics
from pathlib import Path

import numpy as np
from _harness import Case, Report, arguments, scratch, stopwatch

import trajstore

N_OLD = 10  # steps in each of the episodes that are there already
N_ENVS = 1000
SCHEMA = trajstore.Schema(
    {
        "observation": trajstore.Field("float32", (64,)),
        "action": trajstore.Field("float32", (8,)),
        "reward": trajstore.Field("float32"),
    }
)
Files = dict[str, tuple[int, int]]
Measured = dict[int, list[tuple[float, list[int]]]]  # by size: seconds, and bytes of each object written


def block(n_steps: int, seed: int = 0, lead: tuple[int, ...] = ()) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        path: rng.standard_normal((n_steps, *lead, *spec.shape), np.float32) for path, spec in SCHEMA.fields.items()
    }


def filled(directory: Path, n_episodes: int) -> trajstore.Writer:
    """A writer whose stream has that many short episodes."""
    writer = trajstore.create(directory, SCHEMA).writer(commit_seconds=None)
    n_envs = min(N_ENVS, n_episodes)
    data, ends = block(N_OLD, lead=(n_envs,)), np.zeros((N_OLD, n_envs), bool)
    ends[-1] = True
    for _ in range(n_episodes // n_envs):
        writer.append_rollout(data, terminated=ends)
    writer.commit()
    return writer


def files(directory: Path) -> Files:
    """Inode and size of every file: a put always makes a new inode."""
    found = ((f.path, f.stat()) for d, _, _ in os.walk(directory) for f in os.scandir(d) if f.is_file())
    return {path: (stat.st_ino, stat.st_size) for path, stat in found}


def written(before: Files, after: Files) -> list[int]:
    return [size for path, (inode, size) in after.items() if before.get(path, (0, 0))[0] != inode]


def commit(writer: trajstore.Writer, episode: dict[str, np.ndarray]) -> float:
    with stopwatch() as watch:
        writer.append_episode(episode, terminated=True)
        writer.commit()
    return watch.seconds


def alternate(directory: Path, sizes: tuple[int, int], rounds: int, measured: Measured) -> None:
    """Fill two stores, then commit to them in turn."""
    writers = {n: filled(directory / str(n), n) for n in sizes}
    for i in range(rounds):
        episode = block(1000, seed=i)
        for n in sizes if i % 2 else reversed(sizes):
            before = files(directory / str(n))
            seconds = commit(writers[n], episode)
            measured[n].append((seconds, written(before, files(directory / str(n)))))
    for writer in writers.values():
        writer.close()


def main() -> None:
    args = arguments(__doc__)
    report = Report("commit", "does a commit cost more in a large store?", args.small)
    sizes, n_pairs, rounds = ((10, 1000), 1, 4) if args.small else ((1000, 100_000), 4, 30)
    measured: Measured = {n: [] for n in sizes}
    with scratch() as directory:
        # What a file system charges for a new file depends on where it put the directory, so several pairs of
        # stores, made in turn in either order, share the rounds.
        for pair in range(n_pairs):
            alternate(directory / str(pair), sizes if pair % 2 else sizes[::-1], rounds, measured)
    seconds = {n: [s for s, _ in measured[n]] for n in sizes}
    puts = {n: [sizes_written for _, sizes_written in measured[n]] for n in sizes}
    for n in sizes:
        name = f"beside {n:,} episodes"
        report.add(Case(name, "append_episode of 1,000 steps and commit, fsync on", lambda _: 0.0), seconds[n])
        report.cases[name]["objects"] = statistics.mean(len(p) for p in puts[n])
        report.cases[name]["bytes"] = statistics.mean(sum(p) for p in puts[n])
        report.fact(
            f"{name}, written",
            "mean of what one commit puts",
            objects=report.cases[name]["objects"],
            kB=report.cases[name]["bytes"] / 1e3,
            raw_kB=1000 * SCHEMA.row_bytes / 1e3,
        )
    median, fastest = (of(seconds[sizes[1]]) / of(seconds[sizes[0]]) for of in (statistics.median, min))
    name = f"{sizes[1]:,} episodes against {sizes[0]:,}"
    report.ratio(name, median, 1.2, at_most=True, fastest=fastest)
    report.finish(args.json)


if __name__ == "__main__":
    main()
