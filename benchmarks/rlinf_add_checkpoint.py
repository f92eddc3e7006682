"""What do RLinf's add, checkpoint and load cost over trajstore? Against RLinf's path, rebuilt, with cameras."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _harness import Case, Report, arguments, scratch, stopwatch, tree_bytes
from windows import threads

from trajstore.compat.rlinf import Trajectory, TrajectoryReplayBuffer

STEPS, STATE, ACTION = 80, 32, 7
CAMERAS = ("main_images", "wrist_images")
N_THREADS = 20  # that RLinf writes and copies with
OURS, THEIRS = "ours", "RLinf's path"
FROM_FILES = " of RLinf's files"
MEANING = {
    "add": "returned: both can sample it, neither is on disk",
    "add and write": "ours is durable, RLinf's is in the page cache",
    "save_checkpoint": "ours is durable, RLinf's is in the page cache",
    "load_checkpoint": "what the same class saved",
    f"load_checkpoint{FROM_FILES}": "decoded and added one by one",
}
Leaves = dict[str, torch.Tensor]


class RebuiltBuffer:
    """RLinf's buffer as far as adding, checkpoints and loading go, rebuilt from how it is described.

    Every trajectory is copied into a slot of one preallocated block, flattened to ``[T * B, ...]``, with next
    observations in full. With a directory, a thread also writes it to a file; `add` does not wait for that, and
    nothing waits for the disk. Without one, a checkpoint writes the slots to files; with one, it copies the files
    after waiting for their writers. Loading fills the slots with the newest trajectories again.
    """

    def __init__(self, n_slots: int, directory: Path | None = None) -> None:
        self._n_slots, self._directory = n_slots, directory
        if directory is not None:
            directory.mkdir()
        self._slots: Leaves | None = None
        self._slot_rows = 0
        self._shapes: dict[int, tuple[int, int]] = {}
        self._pool = ThreadPoolExecutor(N_THREADS)
        self._writing: dict[int, Future[None]] = {}

    def add(self, leaves: Leaves) -> None:
        number = len(self._shapes)
        if self._directory is not None:
            self._writing[number] = self._pool.submit(_save_clone, leaves, _file(self._directory, number))
        self._put(number, leaves)
        if self._directory is not None:
            self._pool.submit(self._write_index, self._directory)

    def _put(self, number: int, leaves: Leaves) -> None:
        n_steps, n_envs = leaves["rewards"].shape[:2]
        self._shapes[number] = n_steps, n_envs
        flat = {name: leaf[len(leaf) - n_steps :].flatten(0, 1) for name, leaf in leaves.items()}
        if self._slots is None:
            self._slot_rows = n_steps * n_envs
            n_rows = self._n_slots * self._slot_rows
            self._slots = {name: torch.empty(n_rows, *v.shape[1:], dtype=v.dtype) for name, v in flat.items()}
        start = number % self._n_slots * self._slot_rows
        for name, values in flat.items():
            self._slots[name][start : start + len(values)] = values

    def _held(self) -> list[int]:
        return list(self._shapes)[-self._n_slots :]

    def save_checkpoint(self, path: Path) -> None:
        path.mkdir()
        jobs = []
        for number in self._held() if self._directory is None else self._shapes:
            if self._directory is None:
                jobs.append(self._pool.submit(_save_clone, self._leaves(number), _file(path, number)))
            else:
                self._writing[number].result()
                jobs.append(self._pool.submit(_copy, _file(self._directory, number), _file(path, number)))
        for job in jobs:
            job.result()
        self._write_index(path)

    def _leaves(self, number: int) -> Leaves:
        assert self._slots is not None
        start = number % self._n_slots * self._slot_rows
        shape = self._shapes[number]
        rows = slice(start, start + shape[0] * shape[1])
        return {name: values[rows].unflatten(0, shape) for name, values in self._slots.items()}

    def _write_index(self, path: Path) -> None:
        (path / "index.json").write_text(json.dumps({str(n): shape for n, shape in self._shapes.items()}))

    def load_checkpoint(self, path: Path) -> None:
        index = json.loads((path / "index.json").read_text())
        self._shapes = {int(number): tuple(shape) for number, shape in index.items()}
        self._slots = None
        for number in self._held():
            self._put(number, torch.load(_file(path, number), map_location="cpu"))

    def wait(self) -> None:
        """Wait until all trajectories are written."""
        for job in self._writing.values():
            job.result()

    def close(self) -> None:
        self._pool.shutdown()


def _file(directory: Path, number: int) -> Path:
    return directory / f"trajectory_{number}.pt"


def _save_clone(leaves: Leaves, path: Path) -> None:
    torch.save({name: leaf.contiguous().clone() for name, leaf in leaves.items()}, path)


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)


def frames(n_steps: int, n_envs: int, size: int, seed: int) -> torch.Tensor:
    """Frames like those of a camera: a still, textured scene, a thing that moves, and noise of the sensor."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:size, :size]
    found = np.empty((n_steps, n_envs, size, size, 3), np.uint8)
    noise = rng.integers(-1, 2, (n_steps, size, size, 3), np.int8)
    for env in range(n_envs):
        waves = 128 + 60 * np.sin(x / (20 + 5 * env)) + 60 * np.cos(y / (15 + 3 * env))
        scene = np.clip(waves[..., None] + rng.normal(0, 4, (size, size, 3)), 2, 250).astype(np.uint8)
        for t in range(n_steps):
            frame = scene.copy()
            top, left = (int(size * (0.4 + 0.3 * f(t / 10 + env))) for f in (np.sin, np.cos))
            frame[top : top + size // 6, left : left + size // 6] = 200
            found[t, env] = frame + noise[(t + 7 * env) % n_steps]
    return torch.from_numpy(found)


def trajectory(n_envs: int, size: int) -> Trajectory:
    """80 steps of some environments with two cameras; current and next observations are tensors of their own."""
    seen = {name: frames(STEPS + 1, n_envs, size, seed) for seed, name in enumerate(CAMERAS)}
    seen["states"] = torch.randn(STEPS + 1, n_envs, STATE)
    flags = {n: torch.zeros(STEPS + 1, n_envs, 1).bool() for n in ("terminations", "truncations", "dones")}
    return Trajectory(
        max_episode_length=STEPS,
        actions=torch.randn(STEPS, n_envs, ACTION),
        rewards=torch.randn(STEPS, n_envs, 1),
        curr_obs={name: value[:-1].clone() for name, value in seen.items()},
        next_obs={name: value[1:].clone() for name, value in seen.items()},
        **flags,
    )


class Comparison:
    """Adds the same trajectory several times, saves a checkpoint and loads it, over trajstore and as RLinf does."""

    def __init__(self, given: Trajectory, n_adds: int) -> None:
        self._given, self._n_adds = given, n_adds
        self._leaves = given.leaves

    def run(self, report: Report, kind: str, rounds: int) -> None:
        """Measure buffers with a directory ("stored") or without ("in RAM"), in turns."""
        seconds: dict[str, list[float]] = {}
        n_bytes: dict[str, int] = {}
        for i in range(rounds):
            for who in (OURS, THEIRS)[:: 1 if i % 2 else -1]:
                with scratch() as directory:
                    os.sync()
                    measure = self._ours if who == OURS else self._theirs
                    for what, value in measure(directory, kind == "stored").items():
                        seconds.setdefault(f"{kind}, {what}, {who}", []).append(value)
                    n_bytes[who] = tree_bytes(directory / "checkpoint")
        for name, values in seconds.items():
            what = name.split(", ")[1]
            work, unit = (self._n_adds, "trajectory") if what.startswith("add") else (1, "")
            report.add(Case(name, MEANING[what], Path.stat, work, unit), values)  # type: ignore[arg-type]
        for what in (what for what in MEANING if f"{kind}, {what}, {OURS}" in seconds):
            theirs = what.removesuffix(FROM_FILES)
            report.speedup(f"{kind}, {what}", f"{kind}, {what}, {OURS}", f"{kind}, {theirs}, {THEIRS}", 1)
        report.fact(f"{kind}, checkpoint", "bytes of its files", ours=n_bytes[OURS], rlinf=n_bytes[THEIRS])

    def _ours(self, directory: Path, is_stored: bool) -> dict[str, float]:
        where: dict[str, Any] = {"auto_save": True, "auto_save_path": directory / "store"} if is_stored else {}
        buffer = TrajectoryReplayBuffer(**where)
        found = {}
        with stopwatch() as watch:
            for _ in range(self._n_adds):
                buffer.add_trajectories([self._given])
        found["add"] = watch.seconds
        with stopwatch() as watch:
            buffer.flush()
        if is_stored:
            found["add and write"] = found["add"] + watch.seconds
        buffer.sample(16)
        found["save_checkpoint"] = timed(lambda: buffer.save_checkpoint(directory / "checkpoint"))
        if not is_stored:
            buffer.save_checkpoint(directory / "files", layout="rlinf")
        buffer.close()
        buffer = TrajectoryReplayBuffer(**where)
        found["load_checkpoint"] = timed(lambda: buffer.load_checkpoint(directory / "checkpoint"))
        if not is_stored:
            found[f"load_checkpoint{FROM_FILES}"] = timed(lambda: buffer.load_checkpoint(directory / "files"))
        assert len(buffer) == self._n_adds
        buffer.close()
        return found

    def _theirs(self, directory: Path, is_stored: bool) -> dict[str, float]:
        n_slots, where = (5, directory / "store") if is_stored else (self._n_adds, None)
        buffer = RebuiltBuffer(n_slots, where)
        found = {}
        with stopwatch() as watch:
            for _ in range(self._n_adds):
                buffer.add(self._leaves)
        found["add"] = watch.seconds
        if is_stored:
            found["add and write"] = found["add"] + timed(buffer.wait)
        found["save_checkpoint"] = timed(lambda: buffer.save_checkpoint(directory / "checkpoint"))
        buffer.close()
        again = RebuiltBuffer(n_slots)
        found["load_checkpoint"] = timed(lambda: again.load_checkpoint(directory / "checkpoint"))
        again.close()
        return found


def timed(work: Callable[[], object]) -> float:
    with stopwatch() as watch:
        work()
    return watch.seconds


def main() -> None:
    args = arguments(__doc__)
    report = Report("rlinf_add_checkpoint", str(__doc__), args.small)
    n_envs, size, n_adds, rounds = (2, 16, 3, 2) if args.small else (4, 224, 6, 5)
    given = trajectory(n_envs, size)
    with threads(1):
        comparison = Comparison(given, n_adds)
        for kind in ("stored", "in RAM"):
            comparison.run(report, kind, rounds)
    report.finish(args.json)


if __name__ == "__main__":
    main()
