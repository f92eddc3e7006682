"""The discounted return of each step, known once a step with discount 0 follows in the same episode."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trajstore.compat.alf.environment_rings import EnvironmentRings
from trajstore.compat.alf.nested_tensors import shallowest_path
from trajstore.compat.alf.step_reader import StepReader
from trajstore.errors import DataError
from trajstore.schema import Array, Schema

_BATCH_STEPS = 1 << 16  # read together
_NEVER = np.iinfo(np.int64).max  # a position that no step has


@dataclass(frozen=True, slots=True)
class ReturnOptions:
    """How returns are computed; see `trajstore.compat.alf.ReplayBuffer`."""

    default: float
    gamma: float
    reward_clip: tuple[float, float] | None

    def __post_init__(self) -> None:
        if not math.isfinite(self.default):
            raise ValueError(f"default_return: expected a finite number, got {self.default!r}")
        if not 0.0 <= self.gamma <= 1.0:
            raise ValueError(f"gamma: expected a number from 0 to 1, got {self.gamma!r}")
        clip = self.reward_clip
        if clip is not None and not (len(clip) == 2 and clip[0] <= clip[1]):
            raise ValueError(f"reward_clip: expected None or (min, max) with min <= max, got {clip!r}")


def return_fields(schema: Schema) -> tuple[str, str]:
    """Return the paths of the reward and the discount.

    Raises:
        DataError: One of them does not exist, or is not one number for each step.
    """
    found = []
    for name in ("reward", "discount"):
        path = shallowest_path(schema, name)
        if path is None:
            raise DataError(f"record_episodic_return: expected a field '{name}', got {', '.join(schema)}")
        if schema[path].shape:
            raise DataError(
                f"record_episodic_return: expected one number for each step in field '{path}', got shape"
                f" {schema[path].shape}; leave record_episodic_return out for such rewards"
            )
        found.append(path)
    return found[0], found[1]


class EpisodicReturns:
    """The returns of the steps in the rings.

    The return of a step is the next reward of its episode, plus ``gamma`` times the next discount times the return
    of the next step. Steps have the default return until a step with discount 0 follows in their episode. Nothing
    is stored: returns are computed again from the rewards and discounts of a store.
    """

    def __init__(self, rings: EnvironmentRings, options: ReturnOptions) -> None:
        self._rings, self._options = rings, options
        shape = len(rings), rings.length  # by environment and index in the ring
        self._reward, self._discount = np.zeros(shape), np.zeros(shape)
        self._returns = np.full(shape, options.default, np.float32)
        self._known = np.full(len(rings), -1)  # position of each environment's newest step with discount 0

    def at(self, env: Array, position: Array) -> Array:
        """Return the returns of held steps, as float32."""
        returns: Array = self._returns[env, position % self._rings.length]
        return returns

    def add(self, env: Array, reward: Any, discount: Any) -> None:
        """Add the newest step of each of some rings; call it after the rings have the steps."""
        position = self._rings.stop[env] - 1
        self._put(env, position, _numbers(reward), _numbers(discount))
        is_end = self._discount[env, position % self._rings.length] == 0
        if is_end.any():
            env, position = env[is_end], position[is_end]
            self._update_before(env, position)
            self._known[env] = position

    def _put(self, env: Array | int, position: Array, reward: Array, discount: Array) -> None:
        place = position % self._rings.length
        clip = self._options.reward_clip
        self._reward[env, place] = reward if clip is None else reward.clip(*clip)
        self._discount[env, place] = discount
        self._returns[env, place] = self._options.default

    def _update_before(self, env: Array, end: Array) -> None:
        """Set the returns of the steps before those at ``end``, back to the previous discount of 0."""
        rings = self._rings
        first = np.maximum(np.maximum(rings.episode_begins(env, end), rings.first[env]), self._known[env])
        row, position = env[:, None], end[:, None] - np.arange(int((end - first).max()), 0, -1)
        following = (position + 1) % rings.length
        link = self._options.gamma * self._discount[row, following]
        sums, chosen = _sum_ahead(self._reward[row, following], link), position >= first[:, None]
        rows = np.broadcast_to(row, position.shape)[chosen]
        self._returns[rows, position[chosen] % rings.length] = sums[chosen]

    def recover(self, steps: StepReader, fields: tuple[str, str]) -> None:
        """Compute the returns of all steps in the rings from the stored rewards and discounts."""
        rings = self._rings
        for env in np.flatnonzero(rings.sizes).tolist():
            for first in range(int(rings.first[env]), int(rings.stop[env]), _BATCH_STEPS):
                position = np.arange(first, min(first + _BATCH_STEPS, int(rings.stop[env])))
                values = steps.values(np.full(len(position), env), position, fields)
                self._put(env, position, *(_numbers(values[path]) for path in fields))
            self._update_all(env)

    def _update_all(self, env: int) -> None:
        rings, position = self._rings, np.arange(self._rings.first[env], self._rings.stop[env])
        place, last = position % rings.length, rings.episode_ends(np.full(len(position), env), position)
        reward, discount = self._reward[env, place], self._discount[env, place]
        zeros = np.append(np.where(discount == 0, position, _NEVER), _NEVER)
        next_zero = np.minimum.accumulate(zeros[::-1])[::-1][1:]
        continues = position < last
        value = np.where(continues, np.append(reward[1:], 0.0), 0.0)
        link = np.where(continues, self._options.gamma * np.append(discount[1:], 0.0), 0.0)
        self._returns[env, place] = np.where(next_zero <= last, _sum_ahead(value, link), self._options.default)
        self._known[env] = position[discount == 0][-1] if (discount == 0).any() else -1


def _numbers(values: Any) -> Array:
    numbers: Array = torch.as_tensor(values).detach().to("cpu", torch.float64).numpy()
    return numbers


def _sum_ahead(value: Array, link: Array) -> Array:
    """Return the series ``y[t] = value[t] + link[t] * y[t + 1]`` along the last axis, with 0 after the end.

    Each pass doubles the number of values that a sum covers. Nothing is divided by a power, so long series lose no
    precision.
    """
    total, link, covered = value.copy(), link.copy(), 1
    while covered < total.shape[-1]:
        before, after = link[..., :-covered], total[..., covered:]
        # A value without a link has no effect, even if it is not finite.
        total[..., :-covered] += np.multiply(before, after, out=np.zeros_like(after), where=before != 0)
        link[..., :-covered] *= link[..., covered:]
        link[..., -covered:] = 0.0
        covered *= 2
    return total
