"""RLinf's trajectory: a rollout fragment of B environments, ``[T, B, ...]`` by field, checked and aligned.

Flags (`terminations`, `truncations`, `dones`) may come with one row more for each epoch of the rollout, the state
before its first step; `prev_values` with one row more at the end of each, the value to bootstrap from.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np
import torch

from trajstore.compat.rlinf.names import flat, nested
from trajstore.errors import DataError

Tensors = dict[str, Any]  # of tensors, nested

FLAGS = ("terminations", "truncations", "dones")  # with rows before the first step of an epoch
VALUES = "prev_values"  # with rows after the last step of an epoch
PLAIN = ("actions", "intervene_flags", "rewards", "prev_logprobs", "versions")
GROUPS = ("forward_inputs", "curr_obs", "next_obs")
FIELDS = (*PLAIN, *FLAGS, VALUES)


@dataclass
class Trajectory:
    """What B environments did for T steps; see the module. Fields that are None are not there."""

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
        """Take a trajectory, a mapping, or anything with such attributes; arrays become tensors.

        Raises:
            DataError: A field is unknown, or holds something other than tensors.
        """
        if isinstance(given, Trajectory):
            found = {f.name: getattr(given, f.name) for f in fields(cls)}
        elif isinstance(given, Mapping):
            found = dict(given)
            if unknown := sorted(set(found) - {f.name for f in fields(cls)}):
                known = ", ".join(f.name for f in fields(cls))
                raise DataError(f"{what}: unknown field '{unknown[0]}'; there are {known}")
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
        """All tensors, by path."""
        return flat({n: v for n in (*FIELDS, *GROUPS) if (v := getattr(self, n)) is not None})

    @property
    def shape(self) -> tuple[int, int]:
        """T and B."""
        given = {path: leaf for path, leaf in self.leaves.items() if path not in (*FLAGS, VALUES)}
        first = next(iter(given.values()), None)
        if first is None or first.ndim < 2:
            raise DataError("trajectory: expected a field with a row for every step (rewards, actions, curr_obs)")
        return first.shape[0], first.shape[1]

    def map(self, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Trajectory:
        """The same with every tensor changed, given its path."""
        return replace(self, **nested({path: change(path, leaf) for path, leaf in self.leaves.items()}))

    def aligned(self) -> Trajectory:
        """The same with a row for every step in every field: flags as after the step, values as before it.

        Raises:
            DataError: The rows of a field fit neither T steps nor whole epochs of them.
        """
        n_steps, _ = self.shape
        return self.map(lambda path, leaf: Epochs.of(path, leaf, n_steps).steps(leaf))

    def extract_intervene_traj(self, mode: Literal["any", "all"] = "any") -> list[Trajectory] | None:
        """The steps that a human took over, one trajectory for each environment that has any.

        Args:
            mode: Whether ``any`` or ``all`` elements of the action were theirs.
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
class Epochs:
    """How the rows of a field lie: blocks of one row per step, each with one more before or after."""

    n: int  # blocks with a row more; 0 where there is none
    length: int  # steps in each
    is_before: bool

    @classmethod
    def of(cls, path: str, leaf: torch.Tensor, n_steps: int) -> Epochs:
        extra = leaf.shape[0] - n_steps
        if extra == 0:
            return cls(0, n_steps, True)
        if path not in (*FLAGS, VALUES) or extra < 0 or n_steps % extra:
            more = " or whole epochs with one more each" if path in (*FLAGS, VALUES) else ""
            raise DataError(f"{path}: expected {n_steps} rows{more}, got {leaf.shape[0]}")
        return cls(extra, n_steps // extra, path != VALUES)

    def steps(self, leaf: torch.Tensor) -> torch.Tensor:
        """The rows of the steps."""
        if not self.n:
            return leaf
        blocks = self._blocks(leaf)
        kept = blocks[:, 1:] if self.is_before else blocks[:, :-1]
        return kept.reshape(-1, *leaf.shape[1:])

    def others(self, leaf: torch.Tensor) -> torch.Tensor:
        """For each step the row on its other side: before it for flags, after it for values; 0 if there is none."""
        if not self.n:
            return torch.zeros_like(leaf)
        blocks = self._blocks(leaf)
        kept = blocks[:, :-1] if self.is_before else blocks[:, 1:]
        return kept.reshape(-1, *leaf.shape[1:])

    def join(self, steps: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        """What `steps` and `others` were taken from."""
        if not self.n:
            return steps
        shape = self.n, self.length, *steps.shape[1:]
        inner, outer = steps.reshape(shape), others.reshape(shape)
        parts = [outer[:, :1], inner] if self.is_before else [inner, outer[:, -1:]]
        return torch.cat(parts, 1).reshape(-1, *steps.shape[1:])

    def _blocks(self, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.reshape(self.n, self.length + 1, *leaf.shape[1:])


def get_model_weights_id(versions: torch.Tensor | None) -> str:
    """A name for the policy versions that a trajectory was made with; the same versions give the same name."""
    data = bytes(4) if versions is None else np.ascontiguousarray(versions.detach().cpu().numpy()).tobytes()
    return str(uuid.uuid5(uuid.NAMESPACE_DNS, data.hex()))


def convert_trajectories_to_batch(trajectories: Sequence[Any]) -> Tensors:
    """Put trajectories of as many steps beside each other: ``[T, sum of B, ...]`` by field.

    Raises:
        DataError: One has other fields than the first.
    """
    parts = [Trajectory.of(given).leaves for given in trajectories]
    for number, part in enumerate(parts):
        if odd := sorted(part.keys() ^ parts[0].keys()):
            raise DataError(f"trajectory {number}: '{odd[0]}' is in this one or in the first, not in both")
    return nested({path: torch.cat([part[path] for part in parts], 1) for path in (parts[0] if parts else ())})


def _tensors(value: Any, what: str) -> Any:
    """Tensors on the CPU, nested as they are; refuses all else."""
    if isinstance(value, Mapping):
        found = {str(name): _tensors(item, f"{what}/{name}") for name, item in value.items()}
        if len(found) < len(value):
            raise DataError(f"{what}: expected names that differ as text, got {list(value)!s:.80}")
        return found
    if isinstance(value, np.ndarray) and value.dtype != object and value.dtype.kind not in "US":
        value = torch.from_numpy(np.ascontiguousarray(value))
    if not isinstance(value, torch.Tensor):
        raise DataError(
            f"{what}: expected tensors [T, B, ...], got {type(value).__name__}; leave out what is not numbers"
        )
    if value.ndim < 2:
        raise DataError(f"{what}: expected a tensor [T, B, ...], got the shape {tuple(value.shape)}")
    return value.detach().cpu()


def check_alike(trajectories: Iterable[Trajectory]) -> None:
    """Check that all fields of each have as many steps and environments.

    Raises:
        DataError: One does not; the message names it.
    """
    for number, trajectory in enumerate(trajectories):
        n_steps, n_envs = trajectory.shape
        if not n_steps or not n_envs:
            raise DataError(f"trajectory {number}: expected steps, got the shape [{n_steps}, {n_envs}]")
        for path, leaf in trajectory.leaves.items():
            try:
                Epochs.of(path, leaf, n_steps)
            except DataError as error:
                raise DataError(f"trajectory {number}, {error}") from None
            if leaf.shape[1] != n_envs:
                raise DataError(f"trajectory {number}, {path}: expected {n_envs} environments, got {leaf.shape[1]}")
        sizes = {name: len(leaf) for name in FLAGS if (leaf := getattr(trajectory, name)) is not None}
        if len(set(sizes.values())) > 1:
            raise DataError(f"trajectory {number}, flags: expected as many rows of each, got {sizes}")
