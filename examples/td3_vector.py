"""TD3 on Pendulum with eight environments at once. Run it again, and it continues from its last checkpoint."""

import copy
import sys

import gymnasium as gym
import torch
from torch import nn
from torch.nn import functional as F

import trajstore

URL = sys.argv[1] if len(sys.argv) > 1 else "runs/td3"
STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 450  # of each environment
GAMMA, TAU, BATCH = 0.98, 0.01, 128


def mlp(n_in: int, n_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(n_in, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, n_out))


class TD3:
    def __init__(self) -> None:
        self.actor, self.critics = mlp(3, 1), nn.ModuleList([mlp(4, 1), mlp(4, 1)])
        self.targets = copy.deepcopy(nn.ModuleList([self.actor, self.critics]))
        self.actor_optimiser = torch.optim.Adam(self.actor.parameters(), 1e-3)
        self.critic_optimiser = torch.optim.Adam(self.critics.parameters(), 1e-3)

    def act(self, observation: torch.Tensor, noise: float) -> torch.Tensor:
        action = 2 * torch.tanh(self.actor(observation))
        return (action + noise * torch.randn_like(action)).clamp(-2, 2)

    def learn(self, batch: trajstore.Batch, n_updates: int) -> float:
        state = torch.cat([batch["observation"], batch["action"]], 1)
        after, (target_actor, target_critics) = batch["next"]["observation"], self.targets
        with torch.no_grad():
            action = 2 * torch.tanh(target_actor(after))
            action = (action + (0.2 * torch.randn_like(action)).clamp(-0.5, 0.5)).clamp(-2, 2)
            value = torch.stack([q(torch.cat([after, action], 1)) for q in target_critics]).amin(0)[:, 0]
            target = batch["reward"] / 10 + GAMMA * ~batch["terminated"] * value
        loss = sum(F.mse_loss(q(state)[:, 0], target) for q in self.critics)
        self.critic_optimiser.zero_grad()
        loss.backward()
        self.critic_optimiser.step()
        if n_updates % 2 == 0:
            action = 2 * torch.tanh(self.actor(batch["observation"]))
            gain = self.critics[0](torch.cat([batch["observation"], action], 1)).mean()
            self.actor_optimiser.zero_grad()
            (-gain).backward()
            self.actor_optimiser.step()
            for old, new in zip(self.targets.parameters(), [*self.actor.parameters(), *self.critics.parameters()]):
                old.data.lerp_(new.data, TAU)
        return float(loss.detach())


torch.manual_seed(0)
torch.set_num_threads(1)
agent, losses = TD3(), []
envs = gym.make_vec("Pendulum-v1", num_envs=8)
observation, _ = envs.reset(seed=0)
windows = trajstore.Windows.transitions()
with trajstore.ReplayBuffer(URL, exist="resume", capacity=200_000, sample=windows, seed=0) as buffer:
    for t in range(STEPS):
        with torch.no_grad():
            action = agent.act(torch.from_numpy(observation), noise=0.3).numpy()
        following, reward, terminated, truncated, _ = envs.step(action)
        step = {"observation": observation, "action": action, "reward": reward.astype("float32")}
        final = {"observation": following}  # stored where an episode ends
        buffer.append(step, envs=envs, terminated=terminated, truncated=truncated, final=final)
        observation = following
        if buffer.is_ready(min_steps=800):
            losses.append(agent.learn(buffer.sample(BATCH), t))
    buffer.save_checkpoint("last", wait=True)

episodes = trajstore.open(URL).episodes
done = episodes["end"] == "truncated"
assert done.sum() >= 16 and set(episodes["length"][done]) == {200}, "Pendulum has episodes of 200 steps"
print(f"{len(losses)} updates, {done.sum()} episodes, last returns {episodes['return'][done][-8:].mean():.0f}")
