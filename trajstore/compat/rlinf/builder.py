"""Builds a trajectory step by step; the last step can still be changed."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch

from trajstore.compat.rlinf.field_paths import from_paths, to_paths
from trajstore.compat.rlinf.trajectory import FIELDS, Tensors, Trajectory, get_model_weights_id
from trajstore.errors import DataError

_RESULT_FIELDS = tuple(name for name in FIELDS if name != "intervene_flags")


@dataclass(kw_only=True)
class ChunkStepResult:
    """The results of one step of B environments, ``[B, ...]`` each; a field that is None is missing."""

    actions: torch.Tensor | None = None
    rewards: torch.Tensor | None = None
    terminations: torch.Tensor | None = None
    truncations: torch.Tensor | None = None
    dones: torch.Tensor | None = None
    prev_logprobs: torch.Tensor | None = None
    prev_values: torch.Tensor | None = None
    versions: torch.Tensor | None = None
    forward_inputs: Tensors = field(default_factory=dict)


class EmbodiedTrajectoryBuilder:
    """Collects the steps of B environments into a `Trajectory`.

    Args:
        max_episode_length: Copied to the trajectory.
        model_weights_id: Copied to the trajectory; by default the id of its versions.
    """

    def __init__(self, *, max_episode_length: int = 0, model_weights_id: str = "") -> None:
        self.max_episode_length, self.model_weights_id = max_episode_length, model_weights_id
        self._rows: dict[str, list[torch.Tensor]] = {}
        self._left_out: set[str] = set()  # paths that a warning was given for
        self._is_amended = False  # a human's action replaced the model's

    def append_step_result(self, result: Any) -> None:
        """Add a `ChunkStepResult`, or a mapping or object with such fields. Its tensors are copied.

        Raises:
            DataError: A field is unknown, or its dtype or shape differs from earlier steps.
        """
        known = {f.name for f in fields(ChunkStepResult)}
        given = dict(result) if isinstance(result, Mapping) else {n: getattr(result, n, None) for n in known}
        if unknown := sorted(set(given) - known):
            raise DataError(f"step result: unknown field '{unknown[0]}'; the fields are {', '.join(sorted(known))}")
        for name in _RESULT_FIELDS:
            if given.get(name) is not None:
                self._append(name, _row(name, given[name]))
        if given.get("actions") is not None:
            self._append("intervene_flags", torch.zeros_like(self._rows["actions"][-1], dtype=torch.bool))
        self._append_group("forward_inputs", given.get("forward_inputs") or {})

    def append_transitions(self, curr_obs: Mapping[str, Any], next_obs: Mapping[str, Any]) -> None:
        """Add the observations before and after a step. Values that are not numbers are left out with a warning."""
        self._append_group("curr_obs", curr_obs)
        self._append_group("next_obs", next_obs)

    def _append_group(self, group: str, given: Mapping[str, Any]) -> None:
        for path, value in to_paths({group: given}).items():
            if isinstance(value, torch.Tensor) or (isinstance(value, np.ndarray) and value.dtype.kind in "biuf"):
                self._append(path, _row(path, value))
            elif value is not None and path not in self._left_out:
                self._left_out.add(path)
                warnings.warn(f"{path}: {type(value).__name__} is left out, as it is not numeric", stacklevel=3)

    def _append(self, path: str, row: torch.Tensor) -> None:
        rows = self._rows.setdefault(path, [])
        if rows and (rows[0].shape, rows[0].dtype) != (row.shape, row.dtype):
            raise DataError(
                f"{path}: expected {rows[0].dtype} {tuple(rows[0].shape)}, got {row.dtype} {tuple(row.shape)}"
            )
        rows.append(row)

    def mark_last_step_with_intervene_flags(self, intervene_flags: torch.Tensor) -> None:
        """Mark the environments, or the action chunks, that a human took over in the last step.

        Args:
            intervene_flags: ``[B]`` or ``[B, chunks]``.
        """
        if "actions" in self._rows:
            self._rows["intervene_flags"][-1] = self._expanded(intervene_flags)

    mark_last_step_with_flags = mark_last_step_with_intervene_flags  # its name in RLinf 0.3

    def update_last_actions(self, intervene_actions: torch.Tensor, intervene_flags: torch.Tensor) -> None:
        """Replace the last action by a human's action where the flags are set, and mark the step with the flags.

        ``forward_inputs["action"]``, if it exists, is set to the same action. ``"model_action"``, which would
        contradict it, is left out of the trajectory.
        """
        if "actions" not in self._rows:
            return
        last, flags = self._rows["actions"][-1], self._expanded(intervene_flags)
        actions = intervene_actions.detach().cpu().reshape(last.shape).to(last.dtype)
        self._rows["actions"][-1] = merged = torch.where(flags, actions, last)
        if inputs := self._rows.get("forward_inputs/action"):
            inputs[-1] = merged.reshape(inputs[-1].shape).to(inputs[-1].dtype)
        self._is_amended = True
        self.mark_last_step_with_intervene_flags(intervene_flags)

    def _expanded(self, flags: torch.Tensor) -> torch.Tensor:
        """Expand flags of environments or chunks to every element of the last action."""
        last = self._rows["actions"][-1]
        flags = flags.detach().cpu().bool().reshape(len(flags), -1)
        size, n = last[0].numel(), flags.shape[1]
        if len(flags) != len(last) or size % n:
            raise DataError(
                f"intervene_flags: expected [{len(last)}] or [{len(last)}, chunks] for actions of {size} elements, "
                f"got {tuple(flags.shape)}"
            )
        return flags.repeat_interleave(size // n, 1).reshape(last.shape)

    def clear(self) -> None:
        """Remove all steps."""
        self._rows.clear()
        self._is_amended = False

    def to_trajectory(self) -> Trajectory:
        """Return a trajectory of all steps so far.

        Raises:
            DataError: No step was added.
        """
        if not self._rows:
            raise DataError("trajectory: expected at least one step, got none")
        left_out = {"forward_inputs/model_action"} if self._is_amended else set()
        found = from_paths({path: torch.stack(rows) for path, rows in self._rows.items() if path not in left_out})
        weights = self.model_weights_id or get_model_weights_id(found.get("versions"))
        return Trajectory(max_episode_length=self.max_episode_length, model_weights_id=weights, **found)

    def to_splited_trajectories(self, split_size: int) -> list[Trajectory]:
        """Return the trajectory divided into at most ``split_size`` groups of environments of even size."""
        whole = self.to_trajectory()
        n_envs = whole.shape[1]
        size = -(-n_envs // split_size)
        return _split_by_envs(whole, [min(size, n_envs - start) for start in range(0, n_envs, size)])

    def to_splited_trajectories_by_sizes(self, split_sizes: Sequence[int]) -> list[Trajectory]:
        """Return the trajectory divided into groups of the given numbers of environments."""
        return _split_by_envs(self.to_trajectory(), split_sizes)


def _split_by_envs(trajectory: Trajectory, sizes: Sequence[int]) -> list[Trajectory]:
    """Divide a trajectory into groups of environments.

    Raises:
        ValueError: The sizes do not add up to the number of environments.
    """
    n_envs = trajectory.shape[1]
    if sum(sizes) != n_envs or min(sizes, default=0) < 1:
        raise ValueError(f"sizes: expected positive numbers that add up to {n_envs}, got {list(sizes)}")
    stops = np.cumsum(sizes)
    return [
        trajectory.map(lambda _, leaf, low=stop - size, high=stop: leaf[:, low:high])  # type: ignore[misc]
        for stop, size in zip(stops.tolist(), sizes, strict=True)
    ]


def _row(path: str, value: Any) -> torch.Tensor:
    row = torch.as_tensor(value).detach()
    if not row.ndim:
        raise DataError(f"{path}: expected one row per environment, got a single number")
    return row.cpu().clone()
