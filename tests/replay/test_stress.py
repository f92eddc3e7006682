"""Threads that append, end and abort episodes, draw in every way, evict, save, refresh and close one buffer.

Every step says whose it is, and a model says how each episode ended, so every mark of every batch can be checked.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trajstore import (
    ClosedError,
    EpisodeNotFoundError,
    Field,
    NotReadyError,
    Priorities,
    ReplayBuffer,
    Retention,
    Schema,
    Windows,
)

SCHEMA = Schema({"obs": Field("int64", (4,), chunk_rows=16, final=True), "pad": Field("uint8", (40,))})
KINDS = (
    Windows(),
    Windows(length=5),
    Windows(length=6, boundary="pad_right"),
    Windows(length=4, burn_in=2),
    Windows.transitions(),
)
N_APPENDERS, N_ENVS, N_STEPS = 3, 4, 1200  # environments and steps of each appender
SECONDS = 6.0  # bound of the appends, on a slow machine


@pytest.fixture(autouse=True)
def _frequent_switches() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def step(env: int, number: int, t: int) -> dict[str, Any]:
    """A step that names its environment, its episode in it, and its t."""
    return {"obs": obs(env, number, t), "pad": np.full(40, (env + number + t) % 251, np.uint8)}


def obs(env: int, number: int, t: int) -> Any:
    return np.array([env, number, t, 7 * env + 13 * number + t], np.int64)


class Stress:
    """One buffer, the threads that use it, and what they found wrong."""

    def __init__(self, buffer: ReplayBuffer, seed: int) -> None:
        self.buffer, self.seed = buffer, seed
        self.ends: dict[
            tuple[int, int], tuple[int, str]
        ] = {}  # by env and number: last t and how; set before the call
        self.wrong: list[str] = []
        self.is_over = threading.Event()
        self.n_windows = 0

    def append(self, which: int) -> None:
        """Append to some environments. The first of them has one episode that never ends."""
        chance, deadline = random.Random(f"{self.seed} {which}"), time.monotonic() + SECONDS
        envs = range(which * N_ENVS, (which + 1) * N_ENVS)
        number, t = dict.fromkeys(envs, 0), dict.fromkeys(envs, 0)
        for _ in range(N_STEPS):
            if time.monotonic() > deadline or self.is_over.is_set():
                return
            env = chance.choice(envs)
            is_last = env != envs[0] and chance.random() < 0.05
            if is_last:
                self._end(env, number[env], t[env], chance)
                number[env], t[env] = number[env] + 1, 0
            else:
                self.buffer.append(step(env, number[env], t[env]), env=env)
                t[env] += 1

    def _end(self, env: int, number: int, t: int, chance: random.Random) -> None:
        how = chance.choice(["terminated", "truncated"])
        final = {"obs": obs(env, number, t + 1)} if chance.random() < 0.5 else None
        way = chance.random()
        if way < 0.1 and t:
            self.buffer.abort_episode(env)
        elif way < 0.5:
            self.ends[env, number] = t, how
            self.buffer.append(step(env, number, t), env=env, final=final, **{how: True})  # type: ignore[arg-type]
        else:
            self.buffer.append(step(env, number, t), env=env)
            self.ends[env, number] = t, how
            self.buffer.end_episode(env, final=final, **{how: True})  # type: ignore[arg-type]

    def until_over(self, act: Callable[[random.Random], None]) -> None:
        chance = random.Random(f"{self.seed} {act.__name__}")
        while not self.is_over.is_set() and not self.wrong:
            try:
                act(chance)
            except (NotReadyError, EpisodeNotFoundError):
                time.sleep(0.001)
            except ClosedError:
                return
            except BaseException as error:
                self.wrong.append(f"{act.__name__}: {error!r}")
                raise

    # ---- what the threads do

    def sample(self, chance: random.Random) -> None:
        self.check(self.buffer.sample(chance.randint(1, 64), chance.choice(KINDS)))

    def episodes(self, chance: random.Random) -> None:
        self.check(self.buffer.sample_episodes(chance.randint(1, 8)))

    def update(self, chance: random.Random) -> None:
        index = self.buffer.sample(32)["index"]
        time.sleep(chance.random() * 0.002)
        if self.buffer.session.options.priorities is not None:
            self.buffer.update_priorities(index, torch.rand(len(index)))
        self.check(self.buffer.at(index, Windows(length=2, boundary="pad_right")))

    def batches(self, chance: random.Random) -> None:
        with self.buffer.batches(16, chance.choice(KINDS), prefetch=chance.choice([0, 1, 3])) as batches:
            for _ in range(20):
                self.check(next(batches))

    def epoch(self, chance: random.Random) -> None:
        with self.buffer.epoch(64, chance.choice(KINDS), prefetch=chance.choice([0, 2])) as epoch:
            for batch in epoch:
                self.check(batch)

    def in_order(self, chance: random.Random) -> None:
        with self.buffer.read_all_in_order(block_steps=128, prefetch=chance.choice([0, 1])) as blocks:
            for block in blocks:
                self.check(block)

    def manage(self, chance: random.Random) -> None:
        time.sleep(chance.random() * 0.05)
        buffer, name = self.buffer, f"c{chance.random()}"
        acts: list[Callable[[], Any]] = [buffer.refresh, buffer.refresh, buffer.flush, buffer.stats, buffer.clear]
        acts += [lambda: buffer.save_checkpoint(name), lambda: buffer.evict(chance.randint(1, 3))]
        if buffer.session.options.priorities is not None:
            acts.append(lambda: buffer.set_priorities(alpha=chance.random()))
        chance.choice(acts)()

    # ---- what a batch must be

    def check(self, batch: Any) -> None:
        shown = {name: batch[name] for name in ("obs", "pad", "is_first", "is_last", "terminated", "truncated")}
        shown["valid"] = batch.get("valid", torch.ones_like(batch["is_last"]))
        if shown["is_last"].dim() == 1:
            shown = {name: value[:, None] for name, value in shown.items()}
        found = {name: value.numpy() for name, value in shown.items()}
        valid, (env, number, t, sums) = found["valid"], np.moveaxis(found["obs"], -1, 0)
        is_right = (sums == 7 * env + 13 * number + t) & (found["pad"] == (env + number + t)[..., None] % 251).all(
            -1
        )
        is_right &= found["is_first"] == (t == 0)
        follows = (np.diff(t) == 1) & (np.diff(env) == 0) & (np.diff(number) == 0)
        self._require(is_right | ~valid, found, "values")
        self._require(follows | ~(valid[:, 1:] & valid[:, :-1]), found, "order")
        is_end = found["is_last"] | found["terminated"] | found["truncated"]
        for at in zip(*np.nonzero(is_end), strict=True):
            last, how = self.ends.get((int(env[at]), int(number[at])), (-1, "never"))
            marks = found["is_last"][at], found["terminated"][at], found["truncated"][at]
            expected = True, how == "terminated", how == "truncated"
            self._require(np.array(valid[at] and t[at] == last and marks == expected), found, f"{how} {marks}")
        self.n_windows += len(valid)

    def _require(self, is_right: Any, found: dict[str, Any], what: str) -> None:
        if not is_right.all():
            self.wrong.append(f"{what}: {found['obs'].tolist()}")


@pytest.mark.parametrize(
    ("seed", "capacity", "priorities", "commit_s"),
    [(0, None, Priorities(), 0.02), (1, Retention(episodes=60), None, 0.3)],
    ids=["prioritised", "limited"],
)
def test_every_mark_is_right_whatever_other_threads_do(
    tmp_path: Path, seed: int, capacity: Any, priorities: Any, commit_s: float
) -> None:
    buffer = ReplayBuffer(
        tmp_path / "store",
        schema=SCHEMA,
        capacity=capacity,
        priorities=priorities,
        cache_bytes="2MB",
        buffer_bytes="128KB",
        commit_seconds=commit_s,
        grace_s=0.0,
        seed=seed,
    )
    stress = Stress(buffer, seed)
    acts = (stress.sample, stress.episodes, stress.update, stress.batches, stress.epoch, stress.in_order)
    appending = [threading.Thread(target=stress.append, args=(which,)) for which in range(N_APPENDERS)]
    drawing = [threading.Thread(target=stress.until_over, args=(act,)) for act in (*acts, stress.manage)]
    for thread in (*appending, *drawing):
        thread.start()
    for thread in appending:
        thread.join()
    buffer.close()  # beside the threads that draw
    stress.is_over.set()
    for thread in drawing:
        thread.join(60)
        assert not thread.is_alive()
    assert not stress.wrong
    assert stress.n_windows > 0
