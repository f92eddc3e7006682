"""DQN with priorities, three-step returns and stacks of four frames, on a small game of catch."""

import copy
import sys

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import trajstore

URL = sys.argv[1] if len(sys.argv) > 1 else "runs/dqn-catch"
STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 2_500
SIZE, STACK = 8, (-3, -2, -1, 0)


class Catch:
    """A ball falls straight down; the bat on the bottom row moves left, stays, or moves right."""

    rng = np.random.default_rng(0)

    def reset(self) -> np.ndarray:
        self.row, self.ball, self.bat = 0, int(self.rng.integers(SIZE)), int(self.rng.integers(SIZE))
        return self.frame()

    def frame(self) -> np.ndarray:
        image = np.zeros((SIZE, SIZE), np.uint8)
        image[self.row, self.ball] = image[-1, self.bat] = 255
        return image

    def step(self, action: int) -> tuple[np.ndarray, float, bool]:
        self.bat, self.row = min(max(self.bat + action - 1, 0), SIZE - 1), self.row + 1
        is_over = self.row == SIZE - 1
        return self.frame(), float(self.ball == self.bat) if is_over else 0.0, is_over


torch.manual_seed(0)
torch.set_num_threads(1)
network = nn.Sequential(nn.Flatten(), nn.Linear(len(STACK) * SIZE * SIZE, 128), nn.ReLU(), nn.Linear(128, 3))
target = copy.deepcopy(network)
optimiser = torch.optim.Adam(network.parameters(), 2e-3)
windows = trajstore.Windows.transitions(n_step=3, gamma=0.95, offsets={"observation": STACK})
priorities = trajstore.Priorities(alpha=0.6, beta=trajstore.Linear(0.4, 1.0, STEPS))


def learn(buffer: trajstore.ReplayBuffer) -> None:
    batch = buffer.sample(32)
    frames, after = batch["observation"].float() / 255, batch["next"]["observation"].float() / 255
    with torch.no_grad():
        value = target(after).gather(1, network(after).argmax(1, keepdim=True))[:, 0]
        goal = batch["n_step"]["return"] + batch["n_step"]["discount"] * value
    q = network(frames).gather(1, batch["action"][:, None])[:, 0]
    loss = (batch["priority"]["weight"] * F.smooth_l1_loss(q, goal, reduction="none")).mean()
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    buffer.update_priorities(batch, (q - goal).detach().abs() + 1e-3)


game, rng, caught = Catch(), np.random.default_rng(0), []
frames = [game.reset()] * len(STACK)  # the stack that the policy sees; the buffer stores each frame once
with trajstore.ReplayBuffer(URL, capacity=50_000, sample=windows, priorities=priorities, seed=0) as buffer:
    for t in range(STEPS):
        values = network(torch.from_numpy(np.stack(frames))[None].float() / 255)
        action = int(rng.integers(3)) if rng.random() < max(0.05, 1 - 2 * t / STEPS) else int(values.argmax())
        following, reward, is_over = game.step(action)
        step = {"observation": frames[-1], "action": action, "reward": np.float32(reward)}
        buffer.append(step, terminated=is_over, final={"observation": following})
        frames = [*frames[1:], following]
        if is_over:
            caught, frames = [*caught, reward], [game.reset()] * len(STACK)
        if t > 200:
            learn(buffer)
        if t % 100 == 0:
            target.load_state_dict(network.state_dict())

assert np.mean(caught[-50:]) > np.mean(caught[:50]) + 0.2, "it has learned to catch"
print(f"caught {np.mean(caught[:50]):.0%} of the first balls, {np.mean(caught[-50:]):.0%} of the last")
