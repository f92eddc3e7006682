"""PPO on CartPole: advantages are computed over whole episodes, written back, and sampled beside the steps."""

import sys

import gymnasium as gym
import numpy as np
import torch
from torch import nn

import trajstore
from trajstore.sampling.returns import advantages

URL = sys.argv[1] if len(sys.argv) > 1 else "runs/ppo"
ITERATIONS = int(sys.argv[2]) if len(sys.argv) > 2 else 12
N_ENVS, STEPS, GAMMA, LAMBDA = 8, 128, 0.99, 0.95

torch.manual_seed(0)
torch.set_num_threads(1)
actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))
optimiser = torch.optim.Adam([*actor.parameters(), *critic.parameters()], 3e-3)
envs = gym.make_vec("CartPole-v1", num_envs=N_ENVS)


def collect(buffer: trajstore.ReplayBuffer, observation: np.ndarray) -> np.ndarray:
    for _ in range(STEPS):
        with torch.no_grad():
            policy = torch.distributions.Categorical(logits=actor(torch.from_numpy(observation)))
            action = policy.sample()
        following, reward, terminated, truncated, _ = envs.step(action.numpy())
        step = {
            "observation": observation,
            "action": action,
            "reward": reward.astype(np.float32),
            "log_prob": policy.log_prob(action),
        }
        final = {"observation": following}
        buffer.append(step, envs=envs, terminated=terminated, truncated=truncated, final=final)
        observation = following
    return observation


def write_advantages(buffer: trajstore.ReplayBuffer) -> None:
    for block in buffer.read_episodes_in_order(fields=["observation", "reward"]):
        with torch.no_grad():
            value = critic(block["observation"])[:, 0]
            after = critic(block["next"]["observation"])[:, 0]
        ends = block["terminated"], block["segment_end"]
        options = {"gamma": GAMMA, "lambda_": LAMBDA, "has_next": block["has_next"]}
        found = advantages(block["reward"], value, after, *ends, **options)
        buffer.write_column("advantage", block["index"], found)
        buffer.write_column("target", block["index"], found + value)


def learn(buffer: trajstore.ReplayBuffer) -> None:
    for _ in range(4):
        for batch in buffer.epoch(256, trajstore.Windows(squeeze=True)):
            policy = torch.distributions.Categorical(logits=actor(batch["observation"]))
            ratio = (policy.log_prob(batch["action"]) - batch["log_prob"]).exp()
            gain = (batch["advantage"] - batch["advantage"].mean()) / (batch["advantage"].std() + 1e-6)
            clipped = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
            error = (critic(batch["observation"])[:, 0] - batch["target"]).square().mean()
            optimiser.zero_grad()
            (0.5 * error - clipped - 0.01 * policy.entropy().mean()).backward()
            optimiser.step()


with trajstore.ReplayBuffer(URL, exist="fail", capacity=N_ENVS * STEPS, seed=0) as buffer:
    buffer.add_column("advantage")
    buffer.add_column("target")
    observation, _ = envs.reset(seed=0)
    for _ in range(ITERATIONS):
        observation = collect(buffer, observation)
        write_advantages(buffer)
        learn(buffer)

returns = trajstore.open(URL).history()["return"]  # of all episodes, evicted ones included
assert returns[-20:].mean() > 1.5 * returns[:20].mean(), "it has learned to balance"
print(f"{len(returns)} episodes, returns {returns[:20].mean():.0f} -> {returns[-20:].mean():.0f}")
