"""The last observations of episodes, in environments that reset within the step that ends an episode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from trajstore.schema import Array


def final_observations(observations: Any, infos: Mapping[str, Any]) -> Any:
    """Return what to pass as ``final=`` to `append`, from what ``step`` of a vector environment returned.

    In mode ``SAME_STEP``, an environment that ended returns the first observation of its next episode, and its last
    one in ``infos["final_obs"]``. In the other modes the observations are returned as they are.

    ```
    observations, rewards, terminated, truncated, infos = envs.step(actions)
    final = {"observation": final_observations(observations, infos)}
    ```
    """
    given = infos.get("final_obs")
    if given is None:
        return observations
    is_array = isinstance(given, np.ndarray)
    default = np.array([row is not None for row in given]) if is_array else np.ones(_length(given), bool)
    where = np.flatnonzero(np.asarray(infos.get("_final_obs", default), bool))
    if is_array and given.dtype.kind == "O":  # one object for each environment
        return _replaced(observations, [given[i] for i in where], where)
    return _replaced(observations, _rows(given, where), where)


def _replaced(values: Any, rows: Any, where: Array) -> Any:
    """A copy of nested arrays with other rows at some positions."""
    if not len(where):
        return values
    if isinstance(values, Mapping):
        return {name: _replaced(value, _part(rows, name), where) for name, value in values.items()}
    if isinstance(values, tuple):
        return tuple(_replaced(value, _part(rows, i), where) for i, value in enumerate(values))
    copy = np.array(values)
    copy[where] = np.stack(rows) if isinstance(rows, list) else rows
    return copy


def _part(rows: Any, name: Any) -> Any:
    return [row[name] for row in rows] if isinstance(rows, list) else rows[name]


def _rows(values: Any, where: Array) -> Any:
    """The rows at some positions of nested arrays."""
    if isinstance(values, Mapping):
        return {name: _rows(value, where) for name, value in values.items()}
    return tuple(_rows(value, where) for value in values) if isinstance(values, tuple) else values[where]


def _length(values: Any) -> int:
    """The first length of nested arrays."""
    while isinstance(values, (Mapping, tuple)):
        values = next(iter(values.values())) if isinstance(values, Mapping) else values[0]
    return len(values)
