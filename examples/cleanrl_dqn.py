"""DQN on CartPole in one file, in CleanRL's style: one environment, one step at a time."""

import copy
import sys

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import trajstore

URL = sys.argv[1] if len(sys.argv) > 1 else "runs/cleanrl-dqn"
STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 3_000
LEARNING_STARTS, BATCH, GAMMA, TARGET_EVERY = 500, 64, 0.98, 100

torch.manual_seed(0)
torch.set_num_threads(1)
env, rng = gym.make("CartPole-v1"), np.random.default_rng(0)
network = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
target = copy.deepcopy(network)
optimiser = torch.optim.Adam(network.parameters(), 1e-3)
windows = trajstore.Windows.transitions()
buffer = trajstore.ReplayBuffer(URL, exist="fail", capacity=100_000, sample=windows, seed=0)

observation, _ = env.reset(seed=0)
for t in range(STEPS):
    epsilon = max(0.05, 1 - t / 1_500)
    if rng.random() < epsilon:
        action = int(rng.integers(2))
    else:
        with torch.no_grad():
            action = int(network(torch.from_numpy(observation)).argmax())
    following, reward, terminated, truncated, _ = env.step(action)
    step = {"observation": observation, "action": action, "reward": np.float32(reward)}
    buffer.append(step, terminated=terminated, truncated=truncated, final={"observation": following})
    observation = env.reset()[0] if terminated or truncated else following

    if t > LEARNING_STARTS:
        batch = buffer.sample(BATCH)
        with torch.no_grad():
            value = target(batch["next"]["observation"]).amax(1)
            goal = batch["reward"] + GAMMA * ~batch["terminated"] * value
        q = network(batch["observation"]).gather(1, batch["action"][:, None])[:, 0]
        loss = F.mse_loss(q, goal)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if t % TARGET_EVERY == 0:
            target.load_state_dict(network.state_dict())
buffer.close()

returns = trajstore.open(URL).episodes["return"]
assert returns[-10:].mean() > 1.5 * returns[:10].mean(), "it has learned to balance"
print(f"{len(returns)} episodes, returns {returns[:10].mean():.0f} -> {returns[-10:].mean():.0f}")
