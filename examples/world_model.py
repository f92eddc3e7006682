"""A recurrent world model of images: learns to predict the next frame of a ball that bounces in a box."""

import sys

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import trajstore

URL = sys.argv[1] if len(sys.argv) > 1 else "runs/world-model"
UPDATES = int(sys.argv[2]) if len(sys.argv) > 2 else 150
N_ENVS, SIZE = 4, 16


class Balls:
    """Several boxes with a ball each; the action pushes it to the left or to the right."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.at, self.speed = self.rng.uniform(2, SIZE - 3, (N_ENVS, 2)), self.rng.uniform(-1, 1, (N_ENVS, 2))

    def frames(self) -> np.ndarray:
        y, x = np.mgrid[:SIZE, :SIZE]
        distance = (x - self.at[:, 0, None, None]) ** 2 + (y - self.at[:, 1, None, None]) ** 2
        return (255 * np.exp(-distance / 2)).astype(np.uint8)

    def step(self, action: np.ndarray) -> np.ndarray:
        self.speed[:, 0] += 0.2 * (2 * action - 1)
        self.at += self.speed
        hit = (self.at < 1) | (self.at > SIZE - 2)
        self.speed = np.where(hit, -self.speed, self.speed).clip(-1, 1)
        self.at = self.at.clip(1, SIZE - 2)
        return -np.abs(self.at[:, 0] - SIZE / 2).astype(np.float32)


class WorldModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Flatten(2), nn.Linear(SIZE * SIZE, 64), nn.ReLU())
        self.memory = nn.GRU(64 + 2, 128, batch_first=True)
        self.frame, self.reward = nn.Linear(128, SIZE * SIZE), nn.Linear(128, 1)

    def forward(self, frames: torch.Tensor, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.cat([self.encode(frames), F.one_hot(actions, 2).float()], -1)
        hidden, _ = self.memory(inputs)
        return self.frame(hidden).unflatten(-1, (SIZE, SIZE)), self.reward(hidden)[..., 0]


def collect(buffer: trajstore.ReplayBuffer, balls: Balls, n: int) -> None:
    for t in range(n):
        frames, action = balls.frames(), balls.rng.integers(0, 2, N_ENVS)
        reward, ended = balls.step(action), np.full(N_ENVS, t == n - 1)
        step = {"observation": frames, "action": action, "reward": reward}
        buffer.append(step, envs=N_ENVS, truncated=ended, final={"observation": balls.frames()})


torch.manual_seed(0)
torch.set_num_threads(1)
model, losses = WorldModel(), []
optimiser = torch.optim.Adam(model.parameters(), 3e-3)
windows = trajstore.Windows(length=16, burn_in=4, next_fields=("observation",))
with trajstore.ReplayBuffer(URL, exist="resume", sample=windows, seed=0) as buffer:
    collect(buffer, Balls(seed=0), 200)
    with buffer.batches(16, prefetch=2) as batches:
        for _, batch in zip(range(UPDATES), batches):
            frames, after = batch["observation"].float() / 255, batch["next"]["observation"].float() / 255
            predicted, reward = model(frames, batch["action"])
            mask = batch["learn"]  # burn-in steps only warm the memory up
            loss = F.mse_loss(predicted[mask], after[mask]) + 0.01 * F.mse_loss(reward[mask], batch["reward"][mask])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(float(loss.detach()))

assert np.mean(losses[-10:]) < 0.5 * np.mean(losses[:10]), "the model has learned"
print(f"loss {np.mean(losses[:10]):.4f} -> {np.mean(losses[-10:]):.4f}")
