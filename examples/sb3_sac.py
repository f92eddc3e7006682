"""Stable-Baselines3's SAC with a replay buffer on disk: larger than memory, and a dataset afterwards."""

import sys

import torch
from stable_baselines3 import SAC

import trajstore
from trajstore.compat.stable_baselines3 import ReplayBuffer

URL = sys.argv[1] if len(sys.argv) > 1 else "runs/sb3-sac"
STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 450

torch.set_num_threads(1)
model = SAC(
    "MlpPolicy",
    "Pendulum-v1",
    learning_starts=100,
    buffer_size=100_000,
    replay_buffer_class=ReplayBuffer,
    replay_buffer_kwargs={"url": URL},
    batch_size=64,
    policy_kwargs={"net_arch": [64, 64]},
    seed=0,
)
model.learn(STEPS)
model.replay_buffer.close()

episodes = trajstore.open(URL).episodes
finished = episodes["end"] == "truncated"
assert set(episodes["length"][finished]) == {200}, "Pendulum has episodes of 200 steps"
print(f"{finished.sum()} episodes, returns {episodes['return'][finished].round().tolist()}")
