"""Reads windows and fields of steps, and gives them the nesting of the experience that was added."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from trajstore.compat.alf import nested_tensors
from trajstore.compat.alf.environment_rings import EnvironmentRings
from trajstore.compat.alf.step_schema import POSITION
from trajstore.replay.buffer import ReplayBuffer
from trajstore.sampling.hindsight import Hindsight
from trajstore.sampling.windows import Windows
from trajstore.schema import Array, Schema, flatten, nest


class StepReader:
    """Reads the steps of rings from a buffer, by environment and position.

    Attributes:
        form: A nest of paths with the structure of the experience; None: nested dicts.
    """

    def __init__(self, buffer: ReplayBuffer, rings: EnvironmentRings, device: str) -> None:
        assert buffer.schema is not None
        self._buffer, self._rings, self._device = buffer, rings, device
        self._schema: Schema = buffer.schema
        self._fields = tuple(path for path in buffer.schema if path != POSITION)
        self._all_fields = Windows(squeeze=True, fields=self._fields)
        self._env_id = nested_tensors.shallowest_path(buffer.schema, "env_id")
        self.form: Any = None

    def windows(
        self, env: Array, position: Array, length: int, relabel: Hindsight | None
    ) -> dict[str, torch.Tensor]:
        """Return the fields of windows that start at held steps, by path: ``[n, length, ...]``."""
        parts = self._rings.window_parts(env, position, length)
        handles = torch.from_numpy(self._rings.handles(parts.env, parts.position))
        batch = flatten(self._buffer.at(handles, _windows_in_episodes(length, self._fields), relabel=relabel))
        values = {path: batch[path] for path in self._fields}
        if len(parts.window) > len(env):
            target, origin = to_tensors(self._device, *parts.joints(len(env), length))
            for path, value in values.items():
                steps = value.flatten(0, 1)
                steps.index_copy_(0, target, steps.index_select(0, origin))
                values[path] = value[: len(env)]
        return self._with_env_ids(values, np.repeat(env[:, None], length, 1))

    def values(self, env: Array, position: Array, fields: tuple[str, ...] | None = None) -> dict[str, torch.Tensor]:
        """Return fields of held steps by path, with the axes of ``position`` in front; by default all fields."""
        paths = self._fields if fields is None else fields
        windows = self._all_fields if fields is None else Windows(squeeze=True, fields=fields)
        if not position.size:
            empty, schema = functools.partial(torch.empty, device=self._device), self._schema
            return {p: empty((*env.shape, *schema[p].shape), dtype=getattr(torch, schema[p].dtype)) for p in paths}
        handles = torch.from_numpy(self._rings.handles(env, position).reshape(-1, 3))
        batch = flatten(self._buffer.at(handles, windows))
        shaped = {path: batch[path].reshape((*env.shape, *batch[path].shape[1:])) for path in paths}
        return self._with_env_ids(shaped, env)

    def _with_env_ids(self, values: dict[str, torch.Tensor], env: Array) -> dict[str, torch.Tensor]:
        """Set ``env_id`` to the environments that have the steps now; others may have recorded them."""
        path = self._env_id
        if path in values and values[path].shape == env.shape:
            values[path] = to_tensors(self._device, env)[0].to(values[path].dtype)
        return values

    def named_fields(self, names: Any, env: Array, position: Array) -> Any:
        """Return the fields of held steps that a nest of names asks for, as the same nest.

        Raises:
            KeyError: A field does not exist.
        """
        asked = {at: name.replace(".", "/") for at, name in nested_tensors.leaves_by_path(names).items()}
        forms = {path: nested_tensors.part_at(self._form_of_steps(), path) for path in asked.values()}
        paths = dict.fromkeys(
            leaf for form in forms.values() for leaf in nested_tensors.leaves_by_path(form).values()
        )
        values = self.values(env, position, tuple(paths))
        found = {path: nested_tensors.map_leaves(form, values.__getitem__) for path, form in forms.items()}
        return nested_tensors.rebuild_nest(names, lambda at: found[asked[at]])

    def nested(self, values: Mapping[str, torch.Tensor]) -> Any:
        """Return fields by path as a nest with the structure of the experience."""
        return nested_tensors.rebuild_nest(self._form_of_steps(), values.__getitem__)

    def _form_of_steps(self) -> Any:
        return nest({path: path for path in self._fields}) if self.form is None else self.form


def to_tensors(device: str, *arrays: Array) -> tuple[torch.Tensor, ...]:
    """Return arrays as tensors on a device."""
    return tuple(torch.from_numpy(np.asarray(array, order="C")).to(device) for array in arrays)


@functools.lru_cache(64)
def _windows_in_episodes(length: int, fields: tuple[str, ...]) -> Windows:
    """Return windows that end with the episode they start in, padded to ``length``."""
    return Windows(length=length, boundary="pad_right", fields=fields)
