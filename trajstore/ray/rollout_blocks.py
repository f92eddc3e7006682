"""Blocks of steps that a collector sends to an actor: gathered and copied as they come."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from trajstore.format.spans import End
from trajstore.schema import Array, flatten, nest
from trajstore.writing.validation import Step

Op = tuple[str, dict[str, Any]]  # a verb of the buffer, and what it is given


class Rollout:
    """Steps of the same environments, copied into one ``[T, B]`` block as they come."""

    def __init__(self, envs: tuple[int, ...], step: Mapping[str, Array], n_rows: int) -> None:
        self.envs, self.n, self._n_rows = envs, 0, n_rows
        self._columns = {path: np.empty((n_rows, *value.shape), value.dtype) for path, value in step.items()}
        self._ends = np.zeros((n_rows, len(envs)), np.int64)
        self._finals: dict[str, Array] | None = None
        self._has_ends = False

    def fits(
        self, envs: tuple[int, ...], step: Mapping[str, Array], ends: Array, final: Mapping[str, Array] | None
    ) -> bool:
        """Whether a step can be stacked on those that are here, with nothing changed by it."""
        if envs != self.envs or self.n == self._n_rows or not _are_alike(self._columns, step):
            return False
        if final is None:
            return self._finals is None or not ends.any()
        return not self._has_ends if self._finals is None else _are_alike(self._finals, final)

    def add(self, step: Mapping[str, Array], ends: Array, final: Mapping[str, Array] | None) -> None:
        for path, value in step.items():
            self._columns[path][self.n] = value
        self._ends[self.n] = ends
        self._has_ends |= bool(ends.any())
        if final is not None and self._finals is None:
            self._finals = {path: np.zeros((self._n_rows, *v.shape), v.dtype) for path, v in final.items()}
        for path, value in (final or {}).items():
            assert self._finals is not None
            self._finals[path][self.n] = value
        self.n += 1

    def op(self) -> Op:
        given: dict[str, Any] = {"data": _cut(self._columns, self.n), "envs": self.envs}
        if self._has_ends:
            given |= flags_of(self._ends[: self.n])
        if self._finals is not None:
            given["final"] = _cut(self._finals, self.n)
        return "extend", given


def _cut(columns: Mapping[str, Array], n: int) -> dict[str, Any]:
    return nest({path: column[:n] for path, column in columns.items()})


def _are_alike(columns: Mapping[str, Array], values: Mapping[str, Array]) -> bool:
    return columns.keys() == values.keys() and all(
        column.dtype == values[path].dtype and column.shape[1:] == values[path].shape
        for path, column in columns.items()
    )


def rows_of(data: Step | None, n_envs: int | None) -> dict[str, Array] | None:
    """Values as arrays with an axis over environments; None where one is no plain array."""
    rows: dict[str, Array] = {}
    for path, value in flatten(data or {}).items():
        array = value.detach().cpu().numpy() if _is_plain_tensor(value) else value
        if not isinstance(array, (np.ndarray, np.generic)) or isinstance(array, np.ma.MaskedArray):
            return None
        rows[path] = np.asarray(array)[None] if n_envs is None else np.asarray(array)
        if rows[path].shape[:1] != (1 if n_envs is None else n_envs,):
            return None  # the actor says what is wrong with it
    return rows


def flags_of(ends: Array) -> dict[str, Array]:
    return {"terminated": ends == End.TERMINATED, "truncated": ends == End.TRUNCATED}


def led(value: Any) -> Any:
    """Values of one step of several environments as those of a block of one step."""
    if isinstance(value, Mapping):
        return {name: led(item) for name, item in value.items()}
    if value is None or isinstance(value, torch.Tensor):
        return value if value is None else value[None]
    return np.asarray(value)[None]


def _is_plain_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype != torch.bfloat16


def copied(value: Any) -> Any:
    """What was handed in, so that later changes of it do not count."""
    if isinstance(value, Mapping) or hasattr(value, "items"):
        return {name: copied(item) for name, item in value.items()}
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    return np.array(value) if isinstance(value, np.ndarray) else value


def n_steps_of(op: Op) -> int:
    """Steps that a call appends, as far as can be told here."""
    verb, given = op
    if verb in ("end_episode", "abort_episode"):
        return 0
    if verb == "append":
        return 1
    lengths = [np.shape(value) for value in flatten(given["data"]).values()]
    n_axes = 1 if verb == "add_episode" else 2
    return min((math.prod(shape[:n_axes]) for shape in lengths), default=0)


def n_bytes_of(value: Any) -> int:
    if isinstance(value, Mapping):
        return sum(map(n_bytes_of, value.values()))
    return int(getattr(value, "nbytes", 8))
