"""Stable-Baselines3's replay buffer over trajstore, for ``replay_buffer_class=``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Unpack

import numpy as np
import torch

from trajstore.arguments import check_positive
from trajstore.compat.options import ReplayOptionsDict, check_options
from trajstore.compat.private_store import free_private_store, private_url
from trajstore.compat.stable_baselines3.samples import ReplaySamples, replay_samples
from trajstore.errors import ClosedError, DataError, MissingExtraError, NotReadyError
from trajstore.replay.buffer import ReplayBuffer as Buffer
from trajstore.replay.session_start import Exist
from trajstore.sampling.hindsight import Hindsight
from trajstore.sampling.windows import Windows
from trajstore.schema import Array, Field, Schema

try:
    from gymnasium import spaces
    from stable_baselines3.common import buffers, type_aliases
except ImportError as error:
    raise MissingExtraError(
        "trajstore.compat.stable_baselines3 needs Stable-Baselines3: pip install stable-baselines3"
    ) from error

_OWN_OPTIONS = {
    "capacity": "say how many transitions to keep with buffer_size",
    "sample": "single transitions are drawn",
    "as_tensordict": "batches have Stable-Baselines3's form",
    "priorities": "Stable-Baselines3's algorithms do not update priorities",
}
_NO_BASE = "observations are always stored once, so leave optimize_memory_usage=False"


class ReplayBuffer(buffers.ReplayBuffer):
    """Keeps the transitions of Stable-Baselines3's off-policy algorithms in a store.

    Pass the class as ``replay_buffer_class``, and its own options in ``replay_buffer_kwargs``. Observations may be
    arrays or dicts. Next observations are not stored twice: they are read from the following step. Draws have their
    own seed. For use by one thread.

    The newest transition of each environment can be drawn after the next `add`, because its next observation is
    stored with the step that follows; until then, it is drawn only if there is no other transition.

    Args:
        buffer_size: Transitions to keep, of all environments together; the oldest are evicted first.
        observation_space: The space of observations.
        action_space: The space of actions.
        device: Device of the batches.
        n_envs: The number of environments.
        optimize_memory_usage: Must be False.
        handle_timeout_termination: Whether an end by time limit (``TimeLimit.truncated`` in ``infos``) is stored as
            truncated and left out of ``dones``. Otherwise every ``done`` is stored as terminated.
        url: Where to store transitions: a path or an fsspec URL. An existing store is opened and continued. By
            default they are kept compressed in RAM, and `save_replay_buffer` of the algorithm is not possible.
        n_steps: Steps of the returns in ``rewards``; 1 for single rewards.
        gamma: Discount factor of these returns.
        seed: Seed of the draws.
        exist: What to do with transitions of earlier runs, as for `trajstore.ReplayBuffer`: ``"join"`` (by default,
            with a warning), ``"resume"`` or ``"fail"``.
        options: Further options of `trajstore.ReplayBuffer`: ``cache_bytes``, ``commit_seconds``, ...
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        *,
        url: str | os.PathLike[str] | None = None,
        n_steps: int = 1,
        gamma: float = 0.99,
        seed: int = 0,
        exist: Exist | None = None,
        **options: Unpack[ReplayOptionsDict],
    ) -> None:
        check_options(ReplayBuffer.__init__, options, _OWN_OPTIONS)
        for name, value in (("buffer_size", buffer_size), ("n_envs", n_envs), ("n_steps", n_steps)):
            check_positive(name, value)
        if optimize_memory_usage:
            raise ValueError(f"optimize_memory_usage: {_NO_BASE}")
        if n_steps > 1 and not handle_timeout_termination:
            raise ValueError("n_steps above 1 needs handle_timeout_termination=True")
        # The constructor of Stable-Baselines3's own buffer would allocate its arrays.
        buffers.BaseBuffer.__init__(self, buffer_size, observation_space, action_space, device, n_envs=n_envs)
        self.buffer_size = max(buffer_size // n_envs, 1)
        self.optimize_memory_usage, self.handle_timeout_termination = False, handle_timeout_termination
        self.n_steps, self.gamma = n_steps, gamma
        self._is_private = url is None
        self._url = private_url("stable-baselines3") if url is None else os.fspath(url)
        # A private store has no other readers, and its commits make nothing durable.
        defaults: dict[str, Any] = {"commit_seconds": None, "grace_s": 0.0} if url is None else {}
        self._storage_options = options.get("storage_options")
        self._next: dict[str, Array] | None = None  # next observations of the last `add`, by path
        self._newest: dict[str, Any] = {}  # the transitions of the last `add`
        self._is_open = np.zeros(n_envs, bool)
        self._schema = _schema(observation_space, self.obs_shape, self._action_field())
        self._buffer: Buffer | None = Buffer(
            self._url,
            schema=self._schema,
            capacity=self.buffer_size * n_envs,
            device=str(self.device),
            sample=Windows.transitions(n_steps if n_steps > 1 else None, gamma),
            seed=seed,
            exist=exist,
            **{**defaults, **options},
        )
        self._count(len(self._buffer))

    def _action_field(self) -> Field:
        dtype = np.dtype(self._maybe_cast_dtype(self.action_space.dtype))
        return Field(dtype.name, (self.action_dim,))

    def _count(self, n_stored: int) -> None:
        """Set the position in the ring that Stable-Baselines3 sees, from a number of transitions."""
        n = -(-n_stored // self.n_envs)
        self.full, self.pos = n >= self.buffer_size, n % self.buffer_size

    @property
    def memory(self) -> Buffer:
        """The underlying `trajstore.ReplayBuffer`.

        Raises:
            ClosedError: This buffer is closed.
        """
        if self._buffer is None:
            raise ClosedError("the buffer is closed")
        return self._buffer

    # ---- adding

    def add(
        self,
        obs: Any,
        next_obs: Any,
        action: Array,
        reward: Array,
        done: Array,
        infos: Any,
    ) -> None:
        """Add one transition of each environment.

        If an environment was reset without an end (``obs`` is not the ``next_obs`` of the last call), its episode
        ends as truncated with that observation.
        """
        now, after = self._flat(obs), self._flat(next_obs)
        self._end_where_reset(now)
        ended = np.asarray(done, bool).reshape(self.n_envs)
        timeout = np.zeros(self.n_envs, bool)
        if self.handle_timeout_termination:
            timeout = ended & [bool(info.get("TimeLimit.truncated", False)) for info in infos]
        step = {
            "observation": _nested(now),
            "action": np.asarray(action, self._schema["action"].storage_dtype).reshape(self.n_envs, -1),
            "reward": np.asarray(reward, np.float32).reshape(self.n_envs),
        }
        self.memory.append(
            step,
            envs=range(self.n_envs),
            terminated=ended & ~timeout,
            truncated=timeout,
            final={"observation": _nested(after)} if ended.any() else None,
        )
        self._is_open, self._next = ~ended, after
        self._newest = step | {
            "next": {"observation": _nested(after)},
            "terminated": ended & ~timeout,
        }
        self.pos += 1
        if self.pos == self.buffer_size:
            self.full, self.pos = True, 0

    def _flat(self, obs: Any) -> dict[str, Array]:
        """Copies of an observation's arrays by path, with the dtypes and shapes that are stored."""
        fields = self._schema.fields
        given = obs if isinstance(obs, Mapping) else {"": obs}
        parts = {f"observation/{name}".rstrip("/"): value for name, value in given.items()}
        paths = {path for path in fields if path.partition("/")[0] == "observation"}
        if parts.keys() != paths:
            raise DataError(f"observation: expected {', '.join(sorted(paths))}; got {', '.join(sorted(parts))}")
        return {
            path: np.array(value, fields[path].storage_dtype).reshape(self.n_envs, *fields[path].shape)
            for path, value in parts.items()
        }

    def _end_where_reset(self, now: dict[str, Array]) -> None:
        if self._next is None:
            return
        same = np.ones(self.n_envs, bool)
        for path, before in self._next.items():
            equal = (before == now[path]) | ((before != before) & (now[path] != now[path]))
            same &= equal.reshape(self.n_envs, -1).all(1)
        for env in np.flatnonzero(self._is_open & ~same):
            final = {path: value[env] for path, value in self._next.items()}
            self.memory.end_episode(int(env), truncated=True, final={"observation": _nested(final)})

    def reset(self) -> None:
        """Remove all transitions."""
        self.memory.clear()
        self._next, self._newest, self._is_open = None, {}, np.zeros(self.n_envs, bool)
        super().reset()

    # ---- sampling

    def sample(self, batch_size: int, env: Any = None) -> Any:
        """Draw transitions uniformly, with replacement.

        Args:
            batch_size: The number of transitions.
            env: A ``VecNormalize`` that normalises observations and rewards.

        Returns:
            Stable-Baselines3's ``ReplayBufferSamples``, or ``DictReplayBufferSamples`` for dicts.

        Raises:
            NotReadyError: Nothing was added.
        """
        try:
            batch = self.memory.sample(batch_size, relabel=self._relabel())
        except NotReadyError:
            if not self._newest:
                raise
            batch = self._newest_batch(batch_size)
        samples = replay_samples(batch)
        return self._in_their_form(samples if env is None else self._normalised(samples, env))

    def _relabel(self) -> Hindsight | None:
        return None

    def _newest_batch(self, batch_size: int) -> dict[str, Any]:
        """A batch of the transitions of the last `add`, before any other can be drawn."""
        rows = np.arange(batch_size) % self.n_envs

        def rows_of(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {name: rows_of(each) for name, each in value.items()}
            return torch.from_numpy(np.asarray(value)[rows]).to(self.device)

        batch: dict[str, Any] = rows_of(self._newest)
        if self.n_steps > 1:
            discount = self.gamma * (~batch["terminated"]).to(torch.float32)
            batch["n_step"] = {"return": batch["reward"], "discount": discount, "n": torch.ones_like(rows_of(rows))}
        return batch

    def _normalised(self, samples: ReplaySamples, env: Any) -> ReplaySamples:
        if samples.discounts is not None and getattr(env, "norm_reward", False):
            raise ValueError("n_steps above 1: rewards can't be normalised; pass norm_reward=False to VecNormalize")
        observations = (
            _to_tensors(env.normalize_obs(_to_arrays(obs)), self.device)
            for obs in (samples.observations, samples.next_observations)
        )
        now, after = observations
        rewards = self._normalize_reward(samples.rewards.cpu().numpy(), env)
        scaled = torch.as_tensor(rewards, device=self.device)
        return ReplaySamples(now, samples.actions, after, samples.dones, scaled, samples.discounts)

    def _in_their_form(self, samples: ReplaySamples) -> Any:
        is_dict = isinstance(samples.observations, Mapping)
        form = type_aliases.DictReplayBufferSamples if is_dict else type_aliases.ReplayBufferSamples
        return form(**{name: value for name, value in samples._asdict().items() if name in form._fields})

    # ---- saving

    def flush(self) -> None:
        """Make everything added so far durable."""
        self.memory.flush()

    def close(self) -> None:
        """Store what was added, and release memory and threads. A buffer without a URL is lost."""
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None
            if self._is_private:
                free_private_store(self._url)

    def __getstate__(self) -> dict[str, Any]:
        # `save_replay_buffer` pickles the buffer: a checkpoint in the store, and a reference to it in the pickle.
        if self._is_private:
            raise TypeError(
                "this buffer keeps its transitions in RAM, so it can't be saved; pass"
                " replay_buffer_kwargs={'url': ...} to store them"
            )
        checkpoint = self.memory.save_checkpoint("sb3", wait=True)
        left_out = {"_buffer", "_storage_options", "_newest"}
        state = {name: value for name, value in self.__dict__.items() if name not in left_out}
        return state | {"_checkpoint": checkpoint}

    def __setstate__(self, state: dict[str, Any]) -> None:
        checkpoint = state.pop("_checkpoint")
        self.__dict__.update(state)
        self._storage_options, self._newest, self._next = None, {}, None
        self._is_open = np.zeros(self.n_envs, bool)  # episodes that were open read as cut in the resumed buffer
        self._buffer = Buffer.resume(self._url, checkpoint, device=str(self.device))


def _schema(space: spaces.Space[Any], shape: Any, action: Field) -> Schema:
    parts: Field | dict[str, Field]
    if isinstance(space, spaces.Dict):
        parts = {name: _observation_field(space[name], shape[name]) for name in space.spaces}
    else:
        parts = _observation_field(space, shape)
    return Schema({"observation": parts, "action": action, "reward": Field("float32")}, reward="reward")


def _observation_field(space: spaces.Space[Any], shape: tuple[int, ...]) -> Field:
    return Field(np.dtype(space.dtype).name, tuple(shape), final=True)


def _nested(flat: dict[str, Array]) -> Any:
    """An observation from its arrays by path: an array, or a dict."""
    if "observation" in flat:
        return flat["observation"]
    return {path.partition("/")[2]: value for path, value in flat.items()}


def _to_arrays(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: each.cpu().numpy() for name, each in value.items()}
    return value.cpu().numpy()


def _to_tensors(value: Any, device: torch.device) -> Any:
    if isinstance(value, Mapping):
        return {name: torch.as_tensor(each, device=device) for name, each in value.items()}
    return torch.as_tensor(value, device=device)
