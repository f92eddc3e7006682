"""From a recorded dataset to online training: batches mix both, with fewer recorded steps as training goes on."""

import copy
import sys

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import trajstore

URL = sys.argv[1] if len(sys.argv) > 1 else "runs/offline-to-online"
STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 1_500
GAMMA = 0.98


def record(store: trajstore.Store, n_episodes: int) -> None:
    """Record episodes of a simple controller, as a robot's demonstrations would be."""
    env, rng = gym.make("CartPole-v1", max_episode_steps=150), np.random.default_rng(0)
    with store.writer("demonstrations") as writer:
        for seed in range(n_episodes):
            observation, _ = env.reset(seed=seed)
            is_over = False
            while not is_over:
                action = int(observation[2] + 0.5 * observation[3] > 0)
                action = int(rng.integers(2)) if rng.random() < 0.2 else action
                following, reward, terminated, truncated, _ = env.step(action)
                step = {"observation": observation, "action": action, "reward": np.float32(reward)}
                is_over = terminated or truncated
                writer.append(step, terminated=terminated, truncated=truncated, final={"observation": following})
                observation = following


torch.manual_seed(0)
torch.set_num_threads(1)
network = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))
target = copy.deepcopy(network)
optimiser = torch.optim.Adam(network.parameters(), 2e-3)
demonstrations = trajstore.create(f"{URL}/demonstrations", exist_ok=True)
if not len(demonstrations):
    record(demonstrations, 20)
recorded = trajstore.Reader(demonstrations, seed=0)
windows, share = trajstore.Windows.transitions(), trajstore.Linear(1.0, 0.25, STEPS)
env, rng, returns = gym.make("CartPole-v1"), np.random.default_rng(0), [0.0]
observation, _ = env.reset(seed=0)
with trajstore.ReplayBuffer(f"{URL}/online", seed=1) as online:
    sources = {"recorded": (recorded, share), "online": (online, lambda n: 1 - share(n))}
    mixture = trajstore.Mixture(sources, when_empty="others")
    for t in range(STEPS):
        values = network(torch.from_numpy(observation))
        action = int(rng.integers(2)) if rng.random() < 0.05 else int(values.argmax())
        following, reward, terminated, truncated, _ = env.step(action)
        step = {"observation": observation, "action": action, "reward": np.float32(reward)}
        online.append(step, terminated=terminated, truncated=truncated, final={"observation": following})
        observation, returns[-1] = following, returns[-1] + reward
        if terminated or truncated:
            observation, _ = env.reset()
            returns.append(0.0)
        batch = mixture.sample(64, windows)
        with torch.no_grad():
            after = target(batch["next"]["observation"]).amax(1)
            goal = batch["reward"] + GAMMA * ~batch["terminated"] * after
        loss = F.mse_loss(network(batch["observation"]).gather(1, batch["action"][:, None])[:, 0], goal)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if t % 50 == 0:
            target.load_state_dict(network.state_dict())
    counts = mixture.stats()["counts"]

assert 0.5 < counts["recorded"] / sum(counts.values()) < 0.75, "the schedule goes from all recorded to a quarter"
assert len(trajstore.open(f"{URL}/online")) >= len(returns) - 1
print(f"windows drawn {counts}; first returns {returns[:3]}, last {returns[-4:-1]}")
