"""Training that is killed with SIGKILL again and again goes on exactly: batch by batch as if nothing had happened.

Run as a script, this file is the nursery: it imports everything once and forks a child for every line on its
standard input, so that a life starts in milliseconds. Children report on the nursery's standard output.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trajstore
from trajstore import CheckpointNotFoundError, Field, Priorities, ReplayBuffer, Schema, Windows
from trajstore.sampling.priorities.priority_options import Linear

SCHEMA = Schema(
    {
        "obs": Field("float32", (4,), final=True, chunk_rows=32),
        "action": Field("int64", chunk_rows=16, shard_rows=64),
        "reward": Field("float32", chunk_rows=64),
    }
)
ENVS = 3
N_TURNS = 160
N_KILLS = 10
EVERY = 6  # turns between checkpoints

OPTIONS: dict[str, dict[str, Any]] = {
    "uniform": {"capacity": 150, "sample": Windows.transitions(n_step=(1, 3))},
    "prioritised": {
        "capacity": 400,
        "sample": Windows(length=3, boundary="pad_right"),
        "priorities": Priorities(alpha=0.7, beta=Linear(0.4, 1.0, 100), over="max", normalize="buffer"),
    },
}


# ---- the children ---------------------------------------------------------------------------------------


def train(url: str, kind: str) -> None:
    """Go on from the newest checkpoint, or begin; say what every batch holds, until the last turn or a kill."""
    buffer, first = _begun(url, kind)
    iterator = buffer.batches(8)
    say("begun", first)
    for turn in range(first, N_TURNS):
        collect(buffer, turn)
        for batch in (buffer.sample(16), next(iterator)):
            say("batch", turn, digest(batch))
            learn(buffer, batch)
        if turn % EVERY == EVERY - 1:
            for env in range(ENVS):
                buffer.end_episode(env, truncated=True)
            say("saving", turn)
            buffer.save_checkpoint(f"turn-{turn + 1}", wait=turn % 4 == 1, keep_last=3)
    buffer.close()
    say("over", first)


def _begun(url: str, kind: str) -> tuple[ReplayBuffer, int]:
    try:
        buffer = ReplayBuffer.resume(url, "latest", fsync=False)
    except (CheckpointNotFoundError, FileNotFoundError):
        made = {"seed": 5, "commit_seconds": 0.02, "grace_s": 0.0, "buffer_bytes": "256KB", "cache_bytes": "8MB"}
        buffer = ReplayBuffer(url, schema=SCHEMA, fsync=False, **made, **OPTIONS[kind])
        buffer.save_checkpoint(
            "turn-0", wait=True
        )  # else whoever comes after a kill would be shown what came before
        return buffer, 0
    name = trajstore.open(url, at="latest", fsync=False)._at
    assert name is not None
    return buffer, int(name.split("-")[1])


def collect(buffer: ReplayBuffer, turn: int) -> None:
    """Some steps that depend on the turn alone."""
    rng = np.random.default_rng(turn)
    for _ in range(int(rng.integers(1, 12))):
        values = rng.normal(size=(ENVS, 6)).astype(np.float32)
        ends = rng.random(ENVS) < 0.05 if turn % EVERY != EVERY - 1 else np.zeros(ENVS, bool)
        step = {"obs": values[:, :4], "action": rng.integers(0, 1 << 40, ENVS), "reward": values[:, 4]}
        buffer.append(step, envs=range(ENVS), terminated=ends, final={"obs": values[:, 2:]})


def learn(buffer: ReplayBuffer, batch: dict[str, Any]) -> None:
    if "priority" in batch:
        buffer.update_priorities(batch["index"], batch["reward"].abs().amax(1))


def digest(batch: dict[str, Any]) -> str:
    """A hash of everything but the names of streams and episodes, which are others after a resume."""
    found = hashlib.sha256()
    for name, value in sorted(batch.items()):
        if isinstance(value, dict):
            found.update(digest(value).encode())
        elif name != "index":
            found.update(name.encode() + value.numpy().tobytes())
    return found.hexdigest()


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def warm_up() -> None:
    """Load what a first batch loads, so that children need not."""
    torch.set_num_threads(1)
    for number, options in enumerate(OPTIONS.values()):
        made = {"commit_seconds": None, "buffer_bytes": "256KB", "cache_bytes": "8MB"}
        with ReplayBuffer(f"memory://warm-{number}", schema=SCHEMA, **made, **options) as buffer:
            collect(buffer, 0)
            learn(buffer, buffer.sample(16))


def nursery() -> None:
    warm_up()
    for line in sys.stdin:
        url, kind = line.rstrip("\n").split("\t")
        child = os.fork()
        if child == 0:
            train(url, kind)
            os._exit(0)
        say("born", child)
        os.waitpid(child, 0)
        say("gone", child)


# ---- the parent -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kill:
    """Some time after a word was heard so often."""

    word: str
    count: int
    seconds: float

    def is_now(self, heard: list[list[str]]) -> bool:
        if sum(words[0] == self.word for words in heard) < self.count:
            return False
        time.sleep(self.seconds)
        return True


def kills(rng: np.random.Generator) -> list[Kill]:
    """Between batches, and while a checkpoint is being written."""
    between = [Kill("batch", int(rng.integers(1, 60)), float(rng.uniform(0, 0.02))) for _ in range(N_KILLS // 2)]
    amid = [Kill("saving", int(rng.integers(1, 4)), float(rng.uniform(0, 0.04))) for _ in range(N_KILLS // 2)]
    return [kill for pair in zip(between, amid, strict=True) for kill in pair]


class Nursery:
    """Starts lives one at a time and hears their reports."""

    def __init__(self) -> None:
        paths = [str(Path(trajstore.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
        self._process = subprocess.Popen([sys.executable, __file__], **pipes)
        self._child = 0

    def live(self, url: str, kind: str, until: Kill | None) -> list[list[str]]:
        """One life, that ends by SIGKILL or by itself; returns all it reported."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(f"{url}\t{kind}\n")
        stdin.flush()
        heard: list[list[str]] = []
        for line in stdout:
            heard.append(line.split())
            if heard[-1][0] == "born":
                self._child = int(heard[-1][1])
            if heard[-1][0] == "gone":
                self._child = 0
                return heard
            if until is not None and self._child and until.is_now(heard):
                until = None
                os.kill(self._child, signal.SIGKILL)
        raise AssertionError(f"the nursery ended after it had said {heard[-3:]}")

    def end(self) -> None:
        if self._child:
            os.kill(self._child, signal.SIGKILL)
        assert self._process.stdin is not None
        self._process.stdin.close()
        for _ in self._process.stdout or ():
            pass
        self._process.wait(30)
        if self._process.stdout is not None:
            self._process.stdout.close()


@pytest.fixture(scope="module")
def lives() -> Iterator[Nursery]:
    home = Nursery()
    yield home
    home.end()


def batches_of(reports: list[list[str]]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for word, *rest in reports:
        if word == "batch":
            found.setdefault(int(rest[0]), []).append(rest[1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(OPTIONS))
def test_killed_training_goes_on_batch_by_batch_as_if_nothing_had_happened(
    lives: Nursery, tmp_path: Path, kind: str
) -> None:
    reports = lives.live(str(tmp_path / "whole"), kind, None)
    assert ["over", "0"] in reports
    expected = batches_of(reports)
    assert len(expected) == N_TURNS
    url, rng, first_turns = str(tmp_path / "killed"), np.random.default_rng(len(kind)), []
    for kill in [*kills(rng), None]:
        reports = lives.live(url, kind, kill)
        first_turns += [int(words[1]) for words in reports if words[0] == "begun"]
        for turn, found in batches_of(reports).items():
            assert found == expected[turn][: len(found)], f"turn {turn} of a life that began at {first_turns[-1]}"
        if ["over", str(first_turns[-1])] in reports:
            break
    assert turn == N_TURNS - 1
    assert len(set(first_turns)) > 3  # lives that went on from different checkpoints


if __name__ == "__main__":
    nursery()
