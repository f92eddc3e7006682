"""A small agent: double Q-learning on n-step returns. It does not depend on where the batches come from."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from _cartpole import Array, make_envs
from torch import Tensor, nn

GAMMA = 0.99
_SCALE = (
    1 / 2.4,
    1 / 2.0,
    1 / 0.2,
    1 / 2.0,
)  # scales position, speed, angle and angular speed to about 1
_REWARD_SCALE = 0.2  # scales values to between 0 and 20
_TAU = 0.02  # share by which the target moves towards the network in each update
_LEAST_ERROR = 1e-3  # in units of reward; a step with priority 0 would never be drawn again
_HIDDEN = 128


class Network(nn.Module):
    """Computes the values of the two actions, as a common part and an advantage."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(_SCALE))
        self.body = nn.Sequential(nn.Linear(4, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, _HIDDEN), nn.ReLU())
        self.common, self.advantage = nn.Linear(_HIDDEN, 1), nn.Linear(_HIDDEN, 2)

    def forward(self, state: Tensor) -> Tensor:
        hidden = self.body(state * self.scale)
        advantage = self.advantage(hidden)
        values: Tensor = self.common(hidden) + advantage - advantage.mean(-1, keepdim=True)
        return values


class Agent:
    """Network, target network, optimizer and exploration. `state_dict` holds all of it, with the random state."""

    def __init__(self, seed: int, learning_rate: float = 1e-3) -> None:
        torch.manual_seed(seed)  # for the initial weights; nothing else uses the global generator
        self.network = Network()
        self.target = copy.deepcopy(self.network)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=learning_rate)
        self.generator = torch.Generator().manual_seed(seed)
        self.learning_rate = learning_rate
        self.n_updates = 0

    @torch.no_grad()
    def act(self, state: Array, noise: float) -> Array:
        """Return the best action for each state, or with probability ``noise`` a random one."""
        best = self.network(torch.from_numpy(state)).argmax(-1)
        is_random = torch.rand(len(best), generator=self.generator) < noise
        chosen: Array = torch.where(
            is_random, torch.randint(0, 2, best.shape, generator=self.generator), best
        ).numpy()
        return chosen

    def learn(self, batch: Mapping[str, Any], *, rate: float = 1.0) -> tuple[Tensor, float]:
        """Make one update with ``rate`` times the learning rate.

        Returns the errors in units of reward, and the loss.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate * rate
        value = self.network(batch["observation"]["state"]).gather(-1, batch["action"][:, None]).squeeze(-1)
        error = self._goal(batch) - value
        losses = nn.functional.huber_loss(error, torch.zeros_like(error), reduction="none")
        loss = (batch["priority"]["weight"] * losses).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self._follow()
        self.n_updates += 1
        return (error.detach().abs() / _REWARD_SCALE).clamp(min=_LEAST_ERROR), float(loss.detach())

    @torch.no_grad()
    def _goal(self, batch: Mapping[str, Any]) -> Tensor:
        after, n_step = batch["next"]["observation"]["state"], batch["n_step"]
        best = self.network(after).argmax(-1, keepdim=True)
        future: Tensor = self.target(after).gather(-1, best).squeeze(-1)
        goal: Tensor = _REWARD_SCALE * n_step["return"] + n_step["discount"] * future
        return goal

    @torch.no_grad()
    def _follow(self) -> None:
        for slow, fast in zip(self.target.parameters(), self.network.parameters(), strict=True):
            slow.lerp_(fast, _TAU)

    @torch.no_grad()
    def greedy_returns(self, n: int, seed: int) -> Array:
        """Return the returns of ``n`` episodes without exploration. They are not recorded."""
        envs = make_envs(n)
        state, _ = envs.reset(seed=seed)
        returns, is_going = np.zeros(n), np.ones(n, bool)
        while is_going.any():
            best = self.target(torch.from_numpy(state)).argmax(-1).numpy()
            state, reward, terminated, truncated, _ = envs.step(best)
            returns += reward * is_going
            is_going &= ~(terminated | truncated)
        envs.close()
        return returns

    def state_dict(self) -> dict[str, Any]:
        return {
            "network": self.network.state_dict(),
            "target": self.target.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "n_updates": self.n_updates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.network.load_state_dict(state["network"])
        self.target.load_state_dict(state["target"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        self.n_updates = int(state["n_updates"])


def digest(*trees: Mapping[str, Any]) -> str:
    """Return a hash of every name, dtype, shape and bit in nested mappings of tensors."""
    found = hashlib.sha256()
    for tree in trees:
        for name, value in _leaves(tree, ""):
            found.update(f"{name} {value.dtype} {tuple(value.shape)};".encode())
            found.update(value.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def _leaves(tree: Mapping[str, Any], path: str) -> Iterator[tuple[str, Tensor]]:
    for name in sorted(tree):
        value = tree[name]
        if isinstance(value, Tensor):
            yield path + name, value
        else:
            yield from _leaves(value, f"{path}{name}/")
