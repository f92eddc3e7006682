"""The open episode of each environment, and the episode and t of appended steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from trajstore.errors import DataError, EpisodeNotFoundError
from trajstore.format.spans import MAX_ENV, End
from trajstore.schema import Array, as_array

Flags = Any  # bool for one environment, boolean array or tensor for several


@dataclass(frozen=True, slots=True)
class RolloutPositions:
    """The episode and t of each step of a block: ``[T, B]``, or ``[B]`` for a single step."""

    episode: Array
    t: Array


class OpenEpisodes:
    """The open episode of every environment; environments are numbers from 0.

    Attributes:
        episode: By env, the open episode or -1.
        t: By env, rows appended to it.
        placed: By env, how many of them have their place on disk.
        has_ended: By env, whether its episode ended with the last step that was appended to it.
        n_episodes: Episodes started so far; the next one gets this number.
    """

    def __init__(self) -> None:
        self.episode = np.full(0, -1, np.int64)
        self.t = np.zeros(0, np.int64)
        self.placed = np.zeros(0, np.int64)
        self.has_ended = np.zeros(0, bool)
        self.n_episodes = 0
        self._last_envs = np.empty(0, np.int64)  # the environments that were checked last
        self._last_range: tuple[range, Array] = (range(0), np.empty(0, np.int64))

    def check_env(self, env: object) -> int:
        """The number of an environment as an int.

        Raises:
            DataError: It is not a number in the allowed range.
        """
        if not isinstance(env, (int, np.integer)) or isinstance(env, bool) or not 0 <= env < MAX_ENV:
            several = "; several environments at once go into envs=" if hasattr(env, "__len__") else ""
            raise DataError(f"env: expected a number from 0 to {MAX_ENV - 1}, got {env!r:.80}{several}")
        self._cover(int(env))
        return int(env)

    def check_envs(self, envs: Any) -> Array:
        """Distinct environments as an int64 array.

        Raises:
            DataError: They are not distinct numbers in the allowed range.
        """
        if isinstance(envs, range) and envs == self._last_range[0]:
            return self._last_range[1]
        if isinstance(envs, str) or not isinstance(envs, Iterable):
            raise DataError(f"envs: expected numbers of environments or how many there are, got {envs!r:.80}")
        array, name = as_array("envs", envs if hasattr(envs, "dtype") else list(envs))
        if array.ndim != 1 or not len(array) or array.dtype.kind not in "iu":
            raise DataError(f"envs: expected a non-empty sequence of integers, got {name} of shape {array.shape}")
        if array.min() < 0 or array.max() >= MAX_ENV:
            raise DataError(f"envs: expected numbers from 0 to {MAX_ENV - 1}, got {array.min()} to {array.max()}")
        array = array.astype(np.int64)
        if array.shape == self._last_envs.shape and (array == self._last_envs).all():
            return array
        distinct, counts = np.unique(array, return_counts=True)
        if len(distinct) != len(array):
            raise DataError(f"envs: expected each environment once, got {distinct[counts > 1][0]} twice or more")
        self._cover(int(array.max()))
        self._last_envs = array.copy()
        if isinstance(envs, range):
            self._last_range = (envs, array)
        return array

    def _cover(self, env: int) -> None:
        missing = env + 1 - len(self.episode)
        if missing > 0:
            missing = max(missing, len(self.episode))
            self.episode = np.append(self.episode, np.full(missing, -1))
            self.t = np.append(self.t, np.zeros(missing, np.int64))
            self.placed = np.append(self.placed, np.zeros(missing, np.int64))
            self.has_ended = np.append(self.has_ended, np.zeros(missing, bool))

    def open_episode(self, env: object) -> int:
        """The open episode of an environment.

        Raises:
            EpisodeNotFoundError: It has none.
        """
        if isinstance(env, bool):
            raise DataError(
                f"env: expected the number of an environment, got {env}; pass flags by name: terminated={env}"
            )
        number = int(env) if isinstance(env, (int, np.integer)) else -1
        if 0 <= number < len(self.episode) and self.episode[number] >= 0:
            return int(self.episode[number])
        raise EpisodeNotFoundError(f"env {env!r} has no open episode")

    def open_envs(self) -> list[int]:
        return [int(env) for env in np.flatnonzero(self.episode >= 0)]

    def stats(self) -> dict[str, int]:
        return {"episodes": self.n_episodes, "open_episodes": len(self.open_envs())}

    def mark_placed(self) -> None:
        """Note that all steps appended so far get their places on disk."""
        self.placed[:] = self.t

    def start_one(self, env: int) -> int:
        """Start an episode in an environment that has none open; return its number."""
        self.episode[env], self.t[env], self.placed[env] = self.n_episodes, 0, 0
        self.has_ended[env] = False
        self.n_episodes += 1
        return self.n_episodes - 1

    def start(self, env: Array) -> Array:
        """Start an episode in each of these environments, which have none open; return the numbers."""
        ids = np.arange(self.n_episodes, self.n_episodes + len(env))
        self.n_episodes += len(ids)
        self.episode[env] = ids
        self.t[env] = 0
        self.placed[env] = 0
        self.has_ended[env] = False
        return ids

    def end(self, env: int | Array) -> None:
        """Note that the open episodes of these environments have ended."""
        self.episode[env], self.has_ended[env] = -1, True

    def forget_ends(self, env: Array | slice = slice(None)) -> None:
        """Note that the next steps of these environments are first steps of episodes."""
        self.has_ended[env] = False

    def step(self, env: Array) -> RolloutPositions:
        """Advance each of these environments by one step, starting episodes where none is open."""
        numbers, last = self._last_range
        is_whole = env is last and numbers.start == 0 and numbers.step == 1
        where: Any = slice(0, len(env)) if is_whole else env  # a slice is copied far faster than single elements
        idle = self.episode[where] < 0
        if idle.any():
            self.start(env[idle])
        positions = RolloutPositions(self.episode[where].copy(), self.t[where].copy())
        self.t[where] += 1
        return positions

    def resetting(self, env: Array, ends: Array) -> Array:
        """Which steps of a ``[T, B]`` block only reset their environments: those that follow an end."""
        resets = np.empty(ends.shape, bool)
        resets[0] = self.has_ended[env]
        resets[1:] = ends[:-1] > 0
        return resets

    def block(self, env: Array, ends: Array, resets: Array | None = None) -> RolloutPositions:
        """Advance by a ``[T, B]`` block; ``ends`` is nonzero where an episode ends with that step.

        Every step that follows an end, or a reset, starts an episode. Episodes are numbered in order of time. Where
        ``resets`` is set, the position has no meaning.
        """
        starts = np.empty(ends.shape, bool)
        starts[0] = self.episode[env] < 0
        starts[1:] = ends[:-1] > 0
        if resets is not None:
            starts[1:] |= resets[:-1]
            starts &= ~resets
        ids = (self.n_episodes - 1 + np.cumsum(starts)).reshape(ends.shape)
        time = np.arange(len(ends))[:, None]
        since = np.maximum.accumulate(np.where(starts, time, -1), axis=0)  # when the current episode started
        column = np.arange(len(env))
        is_new = since >= 0
        episode = np.where(is_new, ids[since, column], self.episode[env])
        t = np.where(is_new, time - since, self.t[env] + time)
        self.n_episodes += int(starts.sum())
        self.placed[env] = np.where(is_new[-1], 0, self.placed[env])
        is_over = ends[-1] > 0 if resets is None else (ends[-1] > 0) | resets[-1]
        self.episode[env] = np.where(is_over, -1, episode[-1])
        self.has_ended[env] = ends[-1] > 0
        self.t[env] = t[-1] + 1
        return RolloutPositions(episode, t)


def check_ends(terminated: Flags, truncated: Flags, shape: tuple[int, ...]) -> Array:
    """End codes of many steps, 0 where the episode continues. Where both flags are set, terminated counts.

    Raises:
        DataError: The flags are not bools of this shape.
    """
    ends = np.zeros(shape, np.int64)
    for name, flags, code in (
        ("truncated", truncated, End.TRUNCATED),
        ("terminated", terminated, End.TERMINATED),
    ):
        if flags is None:
            continue
        array, dtype = as_array(name, flags)
        if dtype != "bool" or array.shape != shape:
            raise DataError(f"{name}: expected bool of shape {shape}, got {dtype} of shape {array.shape}")
        ends[array] = code
    return ends


def end_of(terminated: Flags, truncated: Flags, neither: End) -> End:
    """How one episode ended, from two flags; terminated counts where both are set.

    Raises:
        DataError: A flag is not a bool.
    """
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if flag is not None and not isinstance(flag, (bool, np.bool_)):
            shape = getattr(flag, "shape", None) or ((len(flag),) if hasattr(flag, "__len__") else ())
            if shape:
                raise DataError(
                    f"{name}: expected a bool for the step of one environment, got {type(flag).__name__} of shape"
                    f" {tuple(shape)}; for {shape[0]} environments at once, pass envs={shape[0]}, or envs=envs with"
                    " the vector environment"
                )
            raise DataError(f"{name}: expected a bool, got {type(flag).__name__}")
    if terminated:
        return End.TERMINATED
    return End.TRUNCATED if truncated else neither
