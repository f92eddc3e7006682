"""RLinf's trajectory: a rollout fragment of B environments, with fields ``[T, B, ...]``.

Flags (`terminations`, `truncations`, `dones`) may have one extra row at the beginning of each epoch of the rollout:
the state before its first step. `prev_values` may have one extra row at the end of each epoch: the value to
bootstrap from.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np
import torch

from trajstore.compat.rlinf.field_paths import from_paths, to_paths
from trajstore.errors import DataError

Tensors = dict[str, Any]  # nested dicts of tensors

FLAGS = ("terminations", "truncations", "dones")  # may have a row before the first step of each epoch
VALUES = "prev_values"  # may have a row after the last step of each epoch
PLAIN = ("actions", "intervene_flags", "rewards", "prev_logprobs", "versions")
GROUPS = ("forward_inputs", "curr_obs", "next_obs")
FIELDS = (*PLAIN, *FLAGS, VALUES)


@dataclass
class Trajectory:
    """T steps of B environments; see the module. A field that is None is missing."""

    max_episode_length: int = 0
    model_weights_id: str = ""
    actions: torch.Tensor | None = None
    intervene_flags: torch.Tensor | None = None
    rewards: torch.Tensor | None = None
    terminations: torch.Tensor | None = None
    truncations: torch.Tensor | None = None
    dones: torch.Tensor | None = None
    prev_logprobs: torch.Tensor | None = None
    prev_values: torch.Tensor | None = None
    versions: torch.Tensor | None = None
    forward_inputs: Tensors = field(default_factory=dict)
    curr_obs: Tensors = field(default_factory=dict)
    next_obs: Tensors = field(default_factory=dict)

    @classmethod
    def of(cls, given: Any, what: str = "trajectory") -> Trajectory:
        """Convert a trajectory, a mapping, or an object with such attributes; arrays become tensors.

        Args:
            given: The object to convert.
            what: What to call it in errors.

        Raises:
            DataError: A field is unknown, or contains a value that is not a tensor.
        """
        if isinstance(given, Trajectory):
            found = {f.name: getattr(given, f.name) for f in fields(cls)}
        elif isinstance(given, Mapping):
            found = dict(given)
            if unknown := sorted(set(found) - {f.name for f in fields(cls)}):
                known = ", ".join(f.name for f in fields(cls))
                raise DataError(f"{what}: unknown field '{unknown[0]}'; the fields are {known}")
        else:
            found = {f.name: getattr(given, f.name) for f in fields(cls) if hasattr(given, f.name)}
        for name in (*FIELDS, *GROUPS):
            if found.get(name) is not None:
                found[name] = _tensors(found[name], f"{what}, {name}")
            elif name in GROUPS:
                found[name] = {}
        return cls(**found)

    @property
    def leaves(self) -> dict[str, torch.Tensor]:
        """All tensors, by field path."""
        return to_paths({n: v for n in (*FIELDS, *GROUPS) if (v := getattr(self, n)) is not None})

    @property
    def shape(self) -> tuple[int, int]:
        """The number of steps T and of environments B.

        Raises:
            DataError: No field has one row per step.
        """
        candidates = {path: leaf for path, leaf in self.leaves.items() if path not in (*FLAGS, VALUES)}
        first = next(iter(candidates.values()), None)
        if first is None or first.ndim < 2:
            raise DataError("trajectory: expected a field with a row for every step, such as rewards or actions")
        return first.shape[0], first.shape[1]

    def map(self, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Trajectory:
        """Return a trajectory whose tensors are ``change(path, tensor)``."""
        return replace(self, **from_paths({path: change(path, leaf) for path, leaf in self.leaves.items()}))

    def aligned(self) -> Trajectory:
        """Return a trajectory without extra rows: flags after each step, values before it.

        Raises:
            DataError: A field has neither T rows nor one extra row per epoch.
        """
        n_steps, _ = self.shape
        return self.map(lambda path, leaf: EpochRows.of(path, leaf, n_steps).step_rows(leaf))

    def extract_intervene_traj(self, mode: Literal["any", "all"] = "any") -> list[Trajectory] | None:
        """Return the steps that a human took over, as one trajectory per environment; None if there are none.

        Args:
            mode: Whether ``any`` or ``all`` elements of the action must be the human's.
        """
        if mode not in ("any", "all"):
            raise ValueError(f"mode: expected 'any' or 'all', got {mode!r}")
        if self.intervene_flags is None:
            return None
        flags = self.intervene_flags.bool().reshape(*self.intervene_flags.shape[:2], -1)
        chosen = flags.any(-1) if mode == "any" else flags.all(-1)
        whole = self.aligned()
        kept = []
        for env in chosen.any(0).nonzero().reshape(-1).tolist():
            rows = chosen[:, env]
            kept.append(whole.map(lambda _, leaf, rows=rows, env=env: leaf[rows, env : env + 1]))  # type: ignore[misc]
        return kept or None


@dataclass(frozen=True, slots=True)
class EpochRows:
    """The rows of a field: one row per step, and one extra row before or after the steps of each epoch.

    Attributes:
        n: Number of epochs with an extra row; 0 if the field has no extra rows.
        length: Steps per epoch.
        is_before: The extra row comes before the steps, not after them.
    """

    n: int
    length: int
    is_before: bool

    @classmethod
    def of(cls, path: str, leaf: torch.Tensor, n_steps: int) -> EpochRows:
        """Derive the epochs from the number of rows of a field.

        Raises:
            DataError: The field has neither ``n_steps`` rows nor one extra row per epoch.
        """
        extra = leaf.shape[0] - n_steps
        if extra == 0:
            return cls(0, n_steps, True)
        if path not in (*FLAGS, VALUES) or extra < 0 or n_steps % extra:
            alternative = " or one extra row for each of several equal epochs" if path in (*FLAGS, VALUES) else ""
            raise DataError(f"{path}: expected {n_steps} rows{alternative}, got {leaf.shape[0]}")
        return cls(extra, n_steps // extra, path != VALUES)

    def step_rows(self, leaf: torch.Tensor) -> torch.Tensor:
        """Return the row of each step."""
        if not self.n:
            return leaf
        blocks = self._blocks(leaf)
        kept = blocks[:, 1:] if self.is_before else blocks[:, :-1]
        return kept.reshape(-1, *leaf.shape[1:])

    def neighbour_rows(self, leaf: torch.Tensor) -> torch.Tensor:
        """Return the row before each step for flags, and after it for values; zeros without extra rows."""
        if not self.n:
            return torch.zeros_like(leaf)
        blocks = self._blocks(leaf)
        kept = blocks[:, :-1] if self.is_before else blocks[:, 1:]
        return kept.reshape(-1, *leaf.shape[1:])

    def join(self, steps: torch.Tensor, neighbours: torch.Tensor) -> torch.Tensor:
        """Return the rows that `step_rows` and `neighbour_rows` were taken from."""
        if not self.n:
            return steps
        shape = self.n, self.length, *steps.shape[1:]
        inner, outer = steps.reshape(shape), neighbours.reshape(shape)
        parts = [outer[:, :1], inner] if self.is_before else [inner, outer[:, -1:]]
        return torch.cat(parts, 1).reshape(-1, *steps.shape[1:])

    def _blocks(self, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.reshape(self.n, self.length + 1, *leaf.shape[1:])


def get_model_weights_id(versions: torch.Tensor | None) -> str:
    """Return an id for the policy versions of a trajectory; equal versions have equal ids."""
    data = bytes(4) if versions is None else np.ascontiguousarray(versions.detach().cpu().numpy()).tobytes()
    return str(uuid.uuid5(uuid.NAMESPACE_DNS, data.hex()))


def convert_trajectories_to_batch(trajectories: Sequence[Any]) -> Tensors:
    """Concatenate trajectories with the same number of steps: ``[T, sum of B, ...]`` by field.

    Raises:
        DataError: A trajectory has other fields than the first.
    """
    parts = [Trajectory.of(given).leaves for given in trajectories]
    for number, part in enumerate(parts):
        if odd := sorted(part.keys() ^ parts[0].keys()):
            raise DataError(f"trajectory {number}: '{odd[0]}' is in this one or in the first, not in both")
    return from_paths({path: torch.cat([part[path] for part in parts], 1) for path in (parts[0] if parts else ())})


def _tensors(value: Any, what: str) -> Any:
    """Return the same nested dicts with tensors on the CPU; refuses all other values."""
    if isinstance(value, Mapping):
        found = {str(name): _tensors(item, f"{what}/{name}") for name, item in value.items()}
        if len(found) < len(value):
            raise DataError(f"{what}: expected names that differ as text, got {list(value)!s:.80}")
        return found
    if isinstance(value, np.ndarray) and value.dtype != object and value.dtype.kind not in "US":
        value = torch.from_numpy(np.ascontiguousarray(value))
    if not isinstance(value, torch.Tensor):
        raise DataError(
            f"{what}: expected tensors [T, B, ...], got {type(value).__name__}; leave out values without numbers"
        )
    if value.ndim < 2:
        raise DataError(f"{what}: expected a tensor [T, B, ...], got shape {tuple(value.shape)}")
    return value.detach().cpu()


def check_consistent(trajectories: Iterable[Trajectory]) -> None:
    """Check that all fields of each trajectory have the same number of steps and environments.

    Raises:
        DataError: A trajectory's fields differ; the message names the trajectory and the field.
    """
    for number, trajectory in enumerate(trajectories):
        n_steps, n_envs = trajectory.shape
        if not n_steps or not n_envs:
            raise DataError(f"trajectory {number}: expected at least one step, got shape [{n_steps}, {n_envs}]")
        for path, leaf in trajectory.leaves.items():
            try:
                EpochRows.of(path, leaf, n_steps)
            except DataError as error:
                raise DataError(f"trajectory {number}, {error}") from None
            if leaf.shape[1] != n_envs:
                raise DataError(f"trajectory {number}, {path}: expected {n_envs} environments, got {leaf.shape[1]}")
        sizes = {name: len(leaf) for name in FLAGS if (leaf := getattr(trajectory, name)) is not None}
        if len(set(sizes.values())) > 1:
            raise DataError(f"trajectory {number}, flags: expected the same number of rows for each, got {sizes}")
