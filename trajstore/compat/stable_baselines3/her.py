"""Stable-Baselines3's hindsight replay buffer over trajstore."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from trajstore.compat.stable_baselines3.buffer import ReplayBuffer
from trajstore.errors import MissingExtraError
from trajstore.sampling.hindsight import Hindsight, Strategy
from trajstore.schema import Array

try:
    from gymnasium import spaces
    from stable_baselines3.her import her_replay_buffer
except ImportError as error:
    raise MissingExtraError(
        "trajstore.compat.stable_baselines3 needs Stable-Baselines3: pip install stable-baselines3"
    ) from error


class HerReplayBuffer(ReplayBuffer, her_replay_buffer.HerReplayBuffer):
    """Replaces goals in part of every batch by goals that were achieved, in the place of Stable-Baselines3's class.

    Observations are dicts with ``observation``, ``achieved_goal`` and ``desired_goal``. Rewards of new goals come
    from the environment's ``compute_reward``, which is called once a batch. Each transition gets another goal with
    probability ``n_sampled_goal / (n_sampled_goal + 1)``. Unlike Stable-Baselines3's class, it also draws from
    episodes that have not ended, with goals achieved so far.

    Args:
        buffer_size: As for `ReplayBuffer`, like the next two arguments.
        observation_space: See there.
        action_space: See there.
        env: The training environment; algorithms pass it themselves.
        device: As for `ReplayBuffer`, like the next three arguments.
        n_envs: See there.
        optimize_memory_usage: See there.
        handle_timeout_termination: See there.
        n_sampled_goal: Transitions with another goal for each one with its own.
        goal_selection_strategy: ``"future"``, ``"final"`` or ``"episode"``; see `Hindsight`.
        copy_info_dict: Must be False: infos are not stored.
        options: The options of `ReplayBuffer`: ``url``, ``n_steps``, ``gamma``, ``seed``, ...
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Dict,
        action_space: spaces.Space[Any],
        env: Any,
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        n_sampled_goal: int = 4,
        goal_selection_strategy: Any = "future",
        copy_info_dict: bool = False,
        **options: Any,
    ) -> None:
        if copy_info_dict:
            raise ValueError("copy_info_dict: infos are not stored, so compute_reward can't use them")
        ReplayBuffer.__init__(
            self,
            buffer_size,
            observation_space,
            action_space,
            device,
            n_envs,
            optimize_memory_usage,
            handle_timeout_termination,
            **options,
        )
        self.env = env
        self.copy_info_dict, self.n_sampled_goal = False, n_sampled_goal
        self.her_ratio = 1 - 1.0 / (n_sampled_goal + 1)
        self._strategy = _strategy(goal_selection_strategy)
        self._hindsight = self._options_of_goals()

    def _options_of_goals(self) -> Hindsight:
        return Hindsight(
            self._strategy,
            fraction=self.her_ratio,
            goal="observation/desired_goal",
            achieved="observation/achieved_goal",
            reward=self._compute_reward,
        )

    def _relabel(self) -> Hindsight | None:
        return self._hindsight

    def _compute_reward(self, achieved: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
        if self.env is None:
            raise ValueError("a loaded buffer has no environment for compute_reward; call set_env first")
        arrays: tuple[Array, Array] = achieved.cpu().numpy(), goal.cpu().numpy()
        infos: list[dict[str, Any]] = [{} for _ in range(len(goal))]
        found = self.env.env_method("compute_reward", *arrays, infos, indices=[0])[0]
        return torch.as_tensor(np.asarray(found, np.float32).reshape(len(goal)), device=achieved.device)

    def truncate_last_trajectory(self) -> None:
        """Do nothing: episodes that were open when the buffer was saved read as cut in a loaded one."""

    def __getstate__(self) -> dict[str, Any]:
        state = ReplayBuffer.__getstate__(self)
        return {name: value for name, value in state.items() if name not in ("env", "_hindsight")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        ReplayBuffer.__setstate__(self, state)
        self.env = None
        self._hindsight = self._options_of_goals()


def _strategy(value: Any) -> Strategy:
    """The name of a strategy, from a name or from Stable-Baselines3's enumeration."""
    name = value.lower() if isinstance(value, str) else str(getattr(value, "name", value)).lower()
    if name not in ("future", "final", "episode"):
        raise ValueError(f"goal_selection_strategy: expected future, final or episode, got {value!r}")
    return name  # type: ignore[return-value]
