"""Real frames: Atari games as ale-py ships them, played by a random policy."""

from __future__ import annotations

from functools import cache
from typing import Any

import ale_py
import gymnasium as gym
import numpy as np
from gymnasium.wrappers import AtariPreprocessing

GAMES = ("Breakout", "Pong", "MsPacman", "SpaceInvaders", "Seaquest", "Enduro")
STACK = 4
Array = np.ndarray[Any, np.dtype[Any]]


@cache
def frames(game: str, n: int, seed: int = 0) -> Array:
    """``[n, 84, 84]`` grayscale frames, four game frames apart, episodes one after the other."""
    gym.register_envs(ale_py)
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    env = AtariPreprocessing(gym.make(f"ALE/{game}-v5", frameskip=1), screen_size=84, frame_skip=4)
    env.action_space.seed(seed)
    out = np.empty((n, 84, 84), np.uint8)
    out[0] = env.reset(seed=seed)[0]
    for i in range(1, n):
        observation, _, terminated, truncated, _ = env.step(env.action_space.sample())
        out[i] = env.reset()[0] if terminated or truncated else observation
    env.close()
    return out


@cache
def stacked(game: str, n: int, seed: int = 0) -> Array:
    """``[n, 84, 84, 4]``: every frame with the three before it, oldest first, as most agents see them."""
    single = frames(game, n, seed)
    first = np.repeat(single[:1], STACK - 1, axis=0)
    padded = np.concatenate([first, single])
    return np.ascontiguousarray(np.stack([padded[i : i + n] for i in range(STACK)], axis=-1))


def noise(n: int, shape: tuple[int, ...], seed: int = 0) -> Array:
    """Frames that no codec can compress: the honest worst case."""
    return np.random.default_rng(seed).integers(0, 256, (n, *shape), np.uint8)
