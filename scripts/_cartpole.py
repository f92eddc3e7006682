"""CartPole environments that step side by side, with frames."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space

Array = np.ndarray[Any, np.dtype[Any]]

TASK = "CartPole-v1"
HEIGHT, WIDTH = 48, 64
_FLOOR, _POLE = HEIGHT - 12, 26.0


def make_envs(n: int) -> VectorEnv[Any, Any, Any]:
    """Create environments that reset themselves in the step after an end."""
    return gym.make_vec(TASK, num_envs=n, vectorization_mode="sync")


def draw(state: Array) -> Array:
    """Draw grey frames ``[n, HEIGHT, WIDTH]`` of states ``[n, 4]``. The pole is drawn at twice its length."""
    row, column = np.ogrid[:HEIGHT, :WIDTH]
    x = (WIDTH / 2 + state[:, 0] * WIDTH / 5.6)[:, None, None]
    sin, cos = np.sin(state[:, 2])[:, None, None], np.cos(state[:, 2])[:, None, None]
    along = np.clip((column - x) * sin - (row - _FLOOR) * cos, 0, _POLE)
    distance = np.hypot(column - x - along * sin, row - _FLOOR + along * cos)
    frames = 255 - 150 * np.clip(2 - distance, 0, 1)
    is_cart = (np.abs(column - x) < 7) & (row >= _FLOOR) & (row < _FLOOR + 6)
    frames = np.where(is_cart, 40, frames)
    frames[:, _FLOOR + 6] = 120
    return frames.astype(np.uint8)


class WithFrames(VectorWrapper[Any, Any, Any, Any, Any]):
    """Adds frames: observations have ``state``, from which the agent learns, and ``pixels``, for people."""

    def __init__(self, envs: VectorEnv[Any, Any, Any]) -> None:
        super().__init__(envs)
        pixels = spaces.Box(0, 255, (HEIGHT, WIDTH), np.uint8)
        space = spaces.Dict({"state": envs.single_observation_space, "pixels": pixels})
        self.single_observation_space = space
        self.observation_space = batch_space(space, envs.num_envs)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        state, infos = self.env.reset(seed=seed, options=options)
        return _add_frames(state), infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        state, *outcome, infos = self.env.step(actions)
        rewards, terminated, truncated = outcome
        return _add_frames(state), rewards, terminated, truncated, infos


def _add_frames(state: Array) -> dict[str, Array]:
    return {"state": state, "pixels": draw(state)}
