"""One rank of a training run: it collects, learns with the others, and saves checkpoints that all ranks share.

torchrun starts it; see ddp_example.py. Each rank reports events as lines of JSON in its own file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _agent import GAMMA, Network
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from trajstore import CheckpointNotFoundError, Priorities, ReplayBuffer, StoreNotFoundError, Windows

N_ENVS = 4
WINDOWS = Windows.transitions(n_step=3, gamma=GAMMA, provenance=True)


class Worker:
    """Collects, learns and saves on one rank."""

    def __init__(self, folder: Path) -> None:
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        self._folder = folder
        self._log = (folder / f"{self.size}-ranks.{self.rank}.jsonl").open("a")
        # The buffer takes rank and world size from torch.distributed.
        try:
            self.buffer = ReplayBuffer.resume(folder / "store", "latest")
            self.step = int(self.buffer.checkpoints[-1].name.partition("-")[2])
        except (StoreNotFoundError, CheckpointNotFoundError):
            self.step = 0
            self.buffer = ReplayBuffer(
                folder / "store", capacity=20_000, sample=WINDOWS, priorities=Priorities(), seed=1
            )
        torch.manual_seed(0)
        self.network = DistributedDataParallel(Network())
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=1e-3)
        if self.step:
            state = torch.load(self._model_path(self.step), weights_only=True)
            self.network.module.load_state_dict(state["network"])
            self.optimizer.load_state_dict(state["optimizer"])
        partition = self.buffer.partition_report
        self.report(
            "begin",
            pid=os.getpid(),
            n_steps=self.buffer.n_steps,
            n_episodes=self.buffer.n_episodes,
            dropped=partition.total("dropped")["steps"] if partition else 0,
        )

    def _model_path(self, step: int) -> Path:
        return self._folder / f"model-{step}.pt"

    def report(self, event: str, **facts: Any) -> None:
        self._log.write(json.dumps({"event": event, "rank": self.rank, "step": self.step, **facts}) + "\n")
        self._log.flush()

    def train(self, n_steps: int, save_every: int) -> None:
        import gymnasium

        envs = gymnasium.make_vec("CartPole-v1", num_envs=N_ENVS, vectorization_mode="sync")
        state, _ = envs.reset(seed=1000 * self.step + self.rank)
        is_reset = np.zeros(N_ENVS, bool)  # the next call of step only resets these environments
        generator = np.random.default_rng([self.step, self.rank])
        loss = torch.zeros(())
        while self.step < n_steps:
            for _ in range(8):
                state, is_reset = self._collect(envs, state, is_reset, generator)
            loss = self._learn()
            self.step += 1
            if self.step % save_every == 0:
                self._save(float(loss))

    def _collect(self, envs: Any, state: Any, is_reset: Any, generator: Any) -> tuple[Any, Any]:
        with torch.no_grad():
            action = self.network.module(torch.from_numpy(state)).argmax(-1).numpy()
        action = np.where(generator.random(N_ENVS) < 0.2, generator.integers(0, 2, N_ENVS), action)
        following, reward, terminated, truncated, _ = envs.step(action)
        real = np.flatnonzero(~is_reset)
        if len(real):
            self.buffer.append(
                {"state": state[real], "action": action[real], "reward": reward[real].astype(np.float32)},
                envs=real.tolist(),
                terminated=terminated[real],
                truncated=truncated[real],
                final={"state": following[real]},
            )
        return following, terminated | truncated

    def _learn(self) -> torch.Tensor:
        batch = self.buffer.sample(64)
        values = self.network(batch["state"]).gather(1, batch["action"][:, None])[:, 0]
        with torch.no_grad():
            following = self.network.module(batch["next"]["state"]).max(-1).values
            target = batch["n_step"]["return"] + batch["n_step"]["discount"] * following
        error = (values - target) * batch["learn"]
        loss = (batch["priority"]["weight"] * error.pow(2)).mean()
        self.optimizer.zero_grad()
        loss.backward()  # averages over the ranks
        self.optimizer.step()
        self.buffer.update_priorities(batch["index"], error.abs().detach() + 1e-3)
        return loss.detach()

    def _save(self, loss: float) -> None:
        if self.rank == 0:  # all ranks have the same network; its file must exist before the checkpoint
            temporary = self._folder / "model.tmp"
            state = {"network": self.network.module.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save(state, temporary)
            os.replace(temporary, self._model_path(self.step))
        self.buffer.save_checkpoint(f"step-{self.step}", wait=True, keep_last=3)
        self.report("saved", n_steps=self.buffer.n_steps, loss=loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save-every", type=int, default=10)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    worker = Worker(arguments.folder)
    with worker.buffer:
        worker.train(arguments.steps, arguments.save_every)
        worker.report("end", n_steps=worker.buffer.n_steps)
    with contextlib.suppress(RuntimeError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
