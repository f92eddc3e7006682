"""Collectors and a learner on CartPole with a buffer in Ray actors, one of which is killed half-way.

    python scripts/ray_example.py            # about half a minute on two cores

Nothing stops when the actor dies. Ray starts it again, it opens its partition from the store, and continues.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

import trajstore
from trajstore import Priorities, Windows
from trajstore.compat.gymnasium import VectorRecorder, schema_of
from trajstore.ray import RayReplayBuffer

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from _agent import GAMMA, Agent  # noqa: E402
from _cartpole import WithFrames, make_envs  # noqa: E402

N_ACTORS = N_COLLECTORS = 2
N_ENVS = 8
WINDOWS = Windows.transitions(n_step=3, gamma=GAMMA, fields=("observation/state", "action", "reward"))


@ray.remote(num_cpus=0.5)
class Collector:
    """Runs environments with the newest weights, and records them into the buffer."""

    def __init__(self, buffer: RayReplayBuffer, seed: int) -> None:
        torch.set_num_threads(1)
        self._writer = buffer.writer(block_steps=128)
        self._envs = VectorRecorder(WithFrames(make_envs(N_ENVS)), self._writer)
        self._agent = Agent(seed)
        self._observation, _ = self._envs.reset(seed=seed)
        self._lengths = np.zeros(N_ENVS)

    def run(self, weights: dict[str, Any], noise: float, n_steps: int) -> tuple[list[float], int]:
        """Make ``n_steps`` steps in each environment.

        Returns the returns of the episodes that ended, and the number of steps lost so far.
        """
        self._agent.network.load_state_dict(weights)
        returns: list[float] = []
        for _ in range(n_steps):
            action = self._agent.act(self._observation["state"], noise)
            self._observation, reward, terminated, truncated, _ = self._envs.step(action)
            self._lengths += reward
            is_over = terminated | truncated
            returns += self._lengths[is_over].tolist()
            self._lengths[is_over] = 0
        self._writer.flush()
        return returns, self._writer.n_lost


@dataclass(frozen=True)
class Round:
    """The figures of one round."""

    n_steps: int
    n_updates: int
    mean_return: float
    n_lost: int
    pids: list[int]
    note: str


def run_rounds(url: str, n_rounds: int, n_steps: int, n_updates: int) -> list[Round]:
    """Collect and learn at the same time. The first actor is killed in the middle of the run."""
    schema = schema_of(WithFrames(make_envs(1)))
    options = {"sample": WINDOWS, "priorities": Priorities(alpha=0.6, beta=0.4), "cache_bytes": "256MB"}
    actor_options = {"num_cpus": 0.5}
    with RayReplayBuffer.start(
        url, n_actors=N_ACTORS, schema=schema, actor_options=actor_options, fsync=False, **options
    ) as buffer:
        collectors = [Collector.remote(buffer, seed) for seed in range(N_COLLECTORS)]
        agent, rounds = Agent(seed=0), []
        batches = buffer.batches(128)
        for number in range(n_rounds):
            weights, noise = ray.put(agent.network.state_dict()), max(0.1, 1 - 2 * number / n_rounds)
            running = [collector.run.remote(weights, noise, n_steps) for collector in collectors]
            note = ""
            if number == 0:
                ray.get(running)  # the buffer is empty before
            if number == n_rounds // 2:
                os.kill(buffer.stats()[0]["pid"], signal.SIGKILL)
                note = "killed actor 0"
            for _ in range(n_updates):
                batch = next(batches)
                errors, _ = agent.learn(batch)
                buffer.update_priorities(batch, errors, wait=False)
            rounds.append(_finished(buffer, agent, ray.get(running), note))
        batches.close()
        buffer.save_checkpoint("end")
        for collector in collectors:
            ray.kill(collector)
    return rounds


def _finished(buffer: RayReplayBuffer, agent: Agent, found: list[tuple[list[float], int]], note: str) -> Round:
    returns = [episode_return for episode_returns, _ in found for episode_return in episode_returns]
    mean = float(np.mean(returns)) if returns else float("nan")
    pids = [stats["pid"] for stats in buffer.stats()]
    return Round(buffer.n_steps, agent.n_updates, mean, sum(lost for _, lost in found), pids, note)


def table(rounds: list[Round]) -> str:
    lines = [f"{'round':>5} {'steps':>7} {'updates':>8} {'return':>7} {'lost':>5}  actors"]
    for number, one in enumerate(rounds):
        pids = ", ".join(map(str, one.pids))
        figures = f"{one.n_steps:>7,} {one.n_updates:>8,} {one.mean_return:>7.1f} {one.n_lost:>5}"
        lines.append(f"{number:>5} {figures}  {pids}  {one.note}".rstrip())
    return "\n".join(lines)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="trajstore-ray-") as directory:
        ray.init(
            num_cpus=4,
            include_dashboard=False,
            object_store_memory=200 << 20,
            log_to_driver=False,
            logging_level="error",
            **({"_node_ip_address": "127.0.0.2"} if sys.platform == "linux" else {}),  # which Ray leaves as it is
            runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)])}},
        )
        try:
            url = f"{directory}/store"
            rounds = run_rounds(url, n_rounds=6, n_steps=150, n_updates=150)
            print(table(rounds))
            store = trajstore.open(url)
            n_steps, n_lost = int(store.episodes["length"].sum()), rounds[-1].n_lost
            print(f"\n{n_steps:,} steps in {len(store):,} episodes are in the store; at most {n_lost} were lost")
        finally:
            ray.shutdown()


if __name__ == "__main__":
    main()
