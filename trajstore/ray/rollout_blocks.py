"""Steps that a collector sends to an actor: calls of the buffer, and blocks that steps are stacked into."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from trajstore.format.spans import End
from trajstore.schema import Array, flatten, nest
from trajstore.writing.validation import Step


class BufferCall(NamedTuple):
    """A method of the buffer and its arguments; ``envs`` among them are the environments as the writer counts."""

    method: str
    arguments: dict[str, Any]


class RolloutBlock:
    """Steps of the same environments, copied into one ``[T, B]`` block as they arrive.

    Args:
        envs: The environments.
        step: A step of all environments, from which shapes and dtypes are taken; `add` adds it.
        max_steps: Number of time steps that the block has room for.
    """

    def __init__(self, envs: tuple[int, ...], step: Mapping[str, Array], max_steps: int) -> None:
        self.envs, self.n_steps, self._max_steps = envs, 0, max_steps
        self._columns = {path: np.empty((max_steps, *value.shape), value.dtype) for path, value in step.items()}
        self._ends = np.zeros((max_steps, len(envs)), np.int64)
        self._finals: dict[str, Array] | None = None
        self._has_ends = False

    def fits(
        self, envs: tuple[int, ...], step: Mapping[str, Array], ends: Array, final: Mapping[str, Array] | None
    ) -> bool:
        """Whether `add` can add a step without a change of its values or of those of earlier steps."""
        if envs != self.envs or self.n_steps == self._max_steps or not _are_alike(self._columns, step):
            return False
        if final is None:
            return self._finals is None or not ends.any()
        return not self._has_ends if self._finals is None else _are_alike(self._finals, final)

    def add(self, step: Mapping[str, Array], ends: Array, final: Mapping[str, Array] | None) -> None:
        """Copy one step of all environments, which must fit."""
        for path, value in step.items():
            self._columns[path][self.n_steps] = value
        self._ends[self.n_steps] = ends
        self._has_ends |= bool(ends.any())
        if final is not None and self._finals is None:
            self._finals = {path: np.zeros((self._max_steps, *v.shape), v.dtype) for path, v in final.items()}
        for path, value in (final or {}).items():
            assert self._finals is not None
            self._finals[path][self.n_steps] = value
        self.n_steps += 1

    def to_call(self) -> BufferCall:
        """The call that appends the block; its arrays are views of the block."""
        arguments: dict[str, Any] = {"data": _first_steps(self._columns, self.n_steps), "envs": self.envs}
        if self._has_ends:
            arguments |= end_flags(self._ends[: self.n_steps])
        if self._finals is not None:
            arguments["final"] = _first_steps(self._finals, self.n_steps)
        return BufferCall("extend", arguments)


def _first_steps(columns: Mapping[str, Array], n_steps: int) -> dict[str, Any]:
    return nest({path: column[:n_steps] for path, column in columns.items()})


def _are_alike(columns: Mapping[str, Array], values: Mapping[str, Array]) -> bool:
    return columns.keys() == values.keys() and all(
        column.dtype == values[path].dtype and column.shape[1:] == values[path].shape
        for path, column in columns.items()
    )


def to_env_arrays(data: Step | None, n_envs: int | None) -> dict[str, Array] | None:
    """The values of one step as arrays with a leading axis over environments.

    Args:
        data: The step.
        n_envs: Number of environments; None: a single one, without an axis in ``data``.

    Returns:
        The arrays by path; None if a value is not a plain array or has another number of environments. (The actor
        then raises the error.)
    """
    arrays: dict[str, Array] = {}
    for path, value in flatten(data or {}).items():
        array = value.detach().cpu().numpy() if _is_plain_tensor(value) else value
        if not isinstance(array, (np.ndarray, np.generic)) or isinstance(array, np.ma.MaskedArray):
            return None
        arrays[path] = np.asarray(array)[None] if n_envs is None else np.asarray(array)
        if arrays[path].shape[:1] != (1 if n_envs is None else n_envs,):
            return None
    return arrays


def end_flags(ends: Array) -> dict[str, Array]:
    """Ends of episodes as the two flags that the buffer's methods take."""
    return {"terminated": ends == End.TERMINATED, "truncated": ends == End.TRUNCATED}


def add_time_axis(value: Any) -> Any:
    """One step of several environments as a block of one time step."""
    if isinstance(value, Mapping):
        return {name: add_time_axis(item) for name, item in value.items()}
    if value is None or isinstance(value, torch.Tensor):
        return value if value is None else value[None]
    return np.asarray(value)[None]


def _is_plain_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype != torch.bfloat16


def copy_values(value: Any) -> Any:
    """A copy of nested arrays and tensors, so that later changes by the caller have no effect."""
    if isinstance(value, Mapping) or hasattr(value, "items"):
        return {name: copy_values(item) for name, item in value.items()}
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    return np.array(value) if isinstance(value, np.ndarray) else value


def count_steps(call: BufferCall) -> int:
    """The number of steps that a call appends, as far as the shapes of its data tell."""
    if call.method in ("end_episode", "abort_episode"):
        return 0
    if call.method == "append":
        return 1
    shapes = [np.shape(value) for value in flatten(call.arguments["data"]).values()]
    n_axes = 1 if call.method == "add_episode" else 2
    return min((math.prod(shape[:n_axes]) for shape in shapes), default=0)


def count_bytes(value: Any) -> int:
    """The size of nested arrays; 8 bytes for each other value."""
    if isinstance(value, Mapping):
        return sum(map(count_bytes, value.values()))
    return int(getattr(value, "nbytes", 8))
