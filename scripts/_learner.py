"""The process that trains: it collects, learns, and saves checkpoints in pairs. It may be killed at any moment.

A pair is a checkpoint of the buffer, and a file of the agent that is named after the checkpoint. The process
reports events as lines of JSON on standard output.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _agent import GAMMA, Agent, digest
from _cartpole import Array, WithFrames, make_envs
from _plan import N_KEPT, N_PROOF, Files, Plan

from trajstore import Linear, Priorities, ReplayBuffer, Windows
from trajstore.compat.gymnasium import VectorRecorder, schema_of

N_RECENT = 20  # episodes in the mean return that is shown while training
WINDOWS = Windows.transitions(
    n_step=3, gamma=GAMMA, fields=("observation/state", "action"), next_fields=("observation/state",)
)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Any]:
    """Open a file for writing that replaces ``path`` atomically when it is complete."""
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


# ---- a session -----------------------------------------------------------------------------------------------


class Session:
    """The part of a run that one process does."""

    def __init__(self, plan: Plan, files: Files, buffer: ReplayBuffer, agent: Agent, step: int) -> None:
        self.plan, self.files, self.buffer, self.agent = plan, files, buffer, agent
        self.step = self._first_step = step
        self._loss = 0.0
        self._n_updates = 0
        self._seconds = dict.fromkeys(("collect", "sample", "learn", "prioritise", "evaluate", "save"), 0.0)
        self._recent: deque[float] = deque(maxlen=N_RECENT)
        self._ended: list[dict[str, Any]] = []  # episodes since the last report
        self._drawn: Counter[tuple[int, int]] = Counter()  # since the last report: (when drawn, when collected)
        self._start = self._reported_at = time.perf_counter()

    def train(self) -> None:
        """Collect and learn until the goal is reached or all steps are used."""
        envs = WithFrames(make_envs(self.plan.n_envs))
        options = {"metadata": lambda _: {"noise": self.plan.noise(self.step)}, "reward_dtype": "float32"}
        recorder = VectorRecorder(envs, self.buffer, **options)  # type: ignore[arg-type]
        observation, _ = recorder.reset(seed=1_000_000 * self.plan.seed + self.step)
        returns = np.zeros(self.plan.n_envs)
        is_reached = False
        while self.step < self.plan.n_steps and not is_reached:
            with self._timed("collect"):
                observation = self._collect(recorder, observation["state"], returns)
            if self.step >= self.plan.warm_up:
                for _ in range(self.plan.n_updates):
                    self._update()
            is_due = self._is_due(self.plan.save_every)
            self._report_progress(0.0 if is_due else 0.25)
            if is_due:
                is_reached = self._evaluate()
                self._save()
        self._finish(is_reached)
        recorder.close()

    def _is_due(self, every: int) -> bool:
        """Return whether the last step of the environments reached a multiple of ``every``."""
        return self.step // every > (self.step - self.plan.n_envs) // every

    def _collect(self, recorder: VectorRecorder, state: Array, returns: Array) -> Any:
        self.buffer.policy_version = self.agent.n_updates
        action = self.agent.act(state, self.plan.noise(self.step))
        observation, reward, terminated, truncated, _ = recorder.step(action)
        self.step += self.plan.n_envs
        returns += reward
        for env in np.flatnonzero(terminated | truncated):
            self._recent.append(float(returns[env]))
            end = "terminated" if terminated[env] else "truncated"
            self._ended.append({"step": self.step, "return": float(returns[env]), "end": end})
            returns[env] = 0
        return observation

    def _update(self) -> tuple[dict[str, Any], torch.Tensor]:
        with self._timed("sample"):
            batch = self.buffer.sample(self.plan.batch_size)
        with self._timed("learn"):
            error, self._loss = self.agent.learn(batch, rate=self.plan.rate(self.step))
        with self._timed("prioritise"):
            self.buffer.update_priorities(batch["index"], error)
        when, what = self.agent.n_updates // self.plan.bin_updates, batch["policy_version"] // self.plan.bin_updates
        self._drawn.update((when, collected) for collected in what.tolist())
        self._n_updates += 1
        return batch, error

    # ---- checkpoints

    def _save(self) -> None:
        """Save a pair, and a digest of the next updates."""
        with self._timed("save"):
            start = time.perf_counter()
            checkpoint = self.buffer.save_checkpoint(f"step-{self.step}", wait=True, keep_last=N_KEPT)
            with replacing(self.files.agent(checkpoint)) as file:
                torch.save({"agent": self.agent.state_dict(), "step": self.step}, file)
            seconds = time.perf_counter() - start
        with replacing(self.files.proof(checkpoint)) as file:
            file.write(json.dumps({"digest": self.prove(), "n_updates": N_PROOF}).encode())
        self.files.drop_all_but({c.id for c in self.buffer.checkpoints})
        report("checkpoint", step=self.step, id=checkpoint, seconds=seconds)

    def prove(self) -> str:
        """Make the next few updates; return a digest of their batches, their errors and the resulting agent."""
        updates = [self._update() for _ in range(N_PROOF)]
        learned = {"network": self.agent.network.state_dict(), "target": self.agent.target.state_dict()}
        return digest(*({"batch": batch, "error": error} for batch, error in updates), learned)

    # ---- reports

    def _evaluate(self) -> bool:
        """Play greedy episodes; return whether the run may end. The goal must be reached twice in a row."""
        with self._timed("evaluate"):
            mean = self._greedy_mean(0)
            report("evaluated", step=self.step, mean=mean)
            if self.plan.goal is None or self.step < self.plan.least_steps or mean < self.plan.goal:
                return False
            confirmed = self._greedy_mean(1)
            report("confirmed", step=self.step, mean=confirmed)
            return confirmed >= self.plan.goal

    def _greedy_mean(self, attempt: int) -> float:
        n = self.plan.n_greedy
        seed = 1_000_000 * self.plan.seed + 500_000 + 2 * n * self.step + n * attempt
        return float(self.agent.greedy_returns(n, seed).mean())

    def _report_progress(self, every_s: float) -> None:
        now = time.perf_counter()
        if now - self._reported_at >= every_s:
            self._reported_at = now
            report("progress", **self._figures())

    def _figures(self) -> dict[str, Any]:
        stats = self.buffer.stats()
        seconds = time.perf_counter() - self._start
        ended, drawn, self._ended, self._drawn = self._ended, self._drawn, [], Counter()
        return {
            "step": self.step,
            "n_updates": self.agent.n_updates,
            "loss": self._loss,
            "return": float(np.mean(self._recent)) if self._recent else None,
            "noise": self.plan.noise(self.step),
            "steps_per_s": (self.step - self._first_step) / seconds,
            "updates_per_s": self._n_updates / seconds,
            "n_steps": stats["n_steps"],
            "n_episodes": stats["n_episodes"],
            "evicted": stats["evicted"]["steps"],
            "ended": ended,
            "drawn": [[*pair, n] for pair, n in sorted(drawn.items())],
        }

    def _finish(self, is_reached: bool) -> None:
        self.buffer.flush()
        sampling = self._n_updates * self.plan.batch_size / max(self._seconds["sample"], 1e-9)
        report(
            "finished",
            is_reached=is_reached,
            **self._figures(),
            seconds=self._seconds | {"all": time.perf_counter() - self._start},
            sampled_per_s=sampling,
            stats=self.buffer.stats(),
            priorities=self.buffer.reader.priority_stats(WINDOWS),
        )

    @contextlib.contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds[what] += time.perf_counter() - start


def report(event: str, **facts: Any) -> None:
    print(json.dumps({"event": event, **facts}), flush=True)


def begin(plan: Plan, files: Files) -> Session:
    envs = WithFrames(make_envs(plan.n_envs))
    schema = schema_of(envs, episode={"noise": float}, reward_dtype="float32")
    envs.close()
    n_updates = plan.n_updates * plan.n_steps // plan.n_envs
    buffer = ReplayBuffer(
        files.store,
        schema=schema,
        capacity=plan.capacity,
        sample=WINDOWS,
        priorities=Priorities(alpha=0.5, beta=Linear(0.4, 1.0, n_updates)),
        cache_bytes="256MiB",
        buffer_bytes="32MiB",
        commit_seconds=0.5,
        grace_s=2.0,
        seed=plan.seed,
    )
    report("began", stream=buffer.stream, pid=os.getpid())
    return Session(plan, files, buffer, Agent(plan.seed), 0)


def resume(plan: Plan, files: Files) -> Session:
    """Continue from the newest pair, and report whether the next updates repeat those of the first process."""
    checkpoint = files.newest_pair()
    start = time.perf_counter()
    buffer = ReplayBuffer.resume(files.store, checkpoint)
    seconds = time.perf_counter() - start
    saved = torch.load(files.agent(checkpoint), weights_only=True)
    agent = Agent(plan.seed)
    agent.load_state_dict(saved["agent"])
    session = Session(plan, files, buffer, agent, int(saved["step"]))
    expected = json.loads(files.proof(checkpoint).read_bytes())["digest"]
    report(
        "resumed",
        stream=buffer.stream,
        pid=os.getpid(),
        checkpoint=checkpoint,
        step=session.step,
        seconds=seconds,
        n_steps=buffer.n_steps,
        abandoned=sum(buffer.abandoned.values()),
        expected=expected,
        digest=session.prove(),
    )
    return session


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/_learner.py", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("plan", type=lambda text: Plan(**json.loads(text)), help="a Plan as JSON")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # the network is tiny, and one thread makes sums reproducible
    files = Files(args.directory)
    session = (resume if args.resume else begin)(args.plan, files)
    with session.buffer:
        session.train()
    return 0


if __name__ == "__main__":
    sys.exit(main())
