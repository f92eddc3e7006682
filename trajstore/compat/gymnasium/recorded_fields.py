"""Which fields the spaces of an environment become, and its data as values of those fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypedDict

import numpy as np
from gymnasium import Env, Space, spaces
from gymnasium.vector import VectorEnv

from trajstore.compat.gymnasium.field_values import (
    FieldValues,
    Info,
    exact_values,
    info_entry,
    info_rows,
    real_numbers,
)
from trajstore.errors import DataError, SchemaError
from trajstore.schema import Array, Field, check_name

AnyEnv: TypeAlias = Env[Any, Any] | VectorEnv[Any, Any, Any]

_FIELD_SPACES = (spaces.Box, spaces.Discrete, spaces.MultiBinary, spaces.MultiDiscrete)


class FieldOptions(TypedDict, total=False):
    """Which fields a step has, and their names.

    Attributes:
        observation: Name of the observation, or of its group of fields for Dict and Tuple spaces; by default
            ``"observation"``.
        action: Name of the action, or of its group of fields; by default ``"action"``.
        reward: Name of the reward; by default ``"reward"``.
        reward_dtype: ``"float64"``, the default, holds every reward exactly; ``"float32"`` rounds.
        info_fields: Entries of ``info`` to record, by name. An entry declared ``final`` belongs to the observation
            it comes with, also to that of a reset; for example an action mask. Other entries belong to the step
            that returned them, like the reward. Every such step must return a value.
    """

    observation: str
    action: str
    reward: str
    reward_dtype: Literal["float32", "float64"]
    info_fields: Mapping[str, Field]


@dataclass(frozen=True, slots=True)
class RecordedFields:
    """The fields that a recorder stores.

    Attributes:
        observation: Name of the observation.
        action: Name of the action.
        reward: Name of the reward.
        spaces: The spaces of observation and action, by name.
        info_fields: The fields that are entries of the info, by name.
        fields: All fields, by path.
    """

    observation: str
    action: str
    reward: str
    spaces: dict[str, Space[Any]]
    info_fields: dict[str, Field]
    fields: dict[str, Field]

    def space_values(self, name: str, value: Any, lead: tuple[int, ...]) -> FieldValues:
        """Return copies of the parts of an observation or action, in the dtypes of their spaces."""
        parts = _parts(name, self.spaces[name], value)
        return {path: exact_values(path, self.fields[path], part, lead) for path, part in parts}

    def reward_values(self, reward: Any, lead: tuple[int, ...]) -> FieldValues:
        return {self.reward: real_numbers(self.reward, self.fields[self.reward], reward, lead)}

    def info_values(self, info: Info, *, is_final: bool) -> FieldValues:
        """Return the recorded values of one environment's info: ``final`` fields, or those that are not."""
        entries = self._info_entries(is_final)
        return {name: exact_values(name, field, info_entry(info, name), ()) for name, field in entries}

    def info_rows(self, infos: Info, mask: Array, *, is_final: bool) -> FieldValues:
        """Return rows of all environments' infos; rows outside ``mask`` are zero."""
        return {name: info_rows(name, field, infos, mask) for name, field in self._info_entries(is_final)}

    def _info_entries(self, is_final: bool) -> list[tuple[str, Field]]:
        return [(name, field) for name, field in self.info_fields.items() if field.final is is_final]


def recorded_fields(
    env: AnyEnv,
    *,
    observation: str = "observation",
    action: str = "action",
    reward: str = "reward",
    reward_dtype: str = "float64",
    info_fields: Mapping[str, Field] | None = None,
) -> RecordedFields:
    """Derive the fields from the spaces of an environment; `FieldOptions` describes the parameters.

    Raises:
        SchemaError: A space has no fixed dtype and shape, or two fields have the same name.
    """
    if reward_dtype not in ("float32", "float64"):
        raise ValueError(f"reward_dtype: expected 'float32' or 'float64', got {reward_dtype!r}")
    observation_space, action_space = _spaces_of(env)
    parts = [
        _fields(observation, observation_space, is_final=True),
        _fields(action, action_space, is_final=False),
        {reward: Field(reward_dtype)},
        dict(info_fields or {}),
    ]
    paths = [path for part in parts for path in part]
    if twice := [path for path in dict.fromkeys(paths) if paths.count(path) > 1]:
        raise SchemaError(f"field '{twice[0]}' is named twice; expected different names for all recorded fields")
    fields = {path: field for part in parts for path, field in part.items()}
    named_spaces = {observation: observation_space, action: action_space}
    return RecordedFields(observation, action, reward, named_spaces, parts[-1], fields)


def _spaces_of(env: AnyEnv) -> tuple[Space[Any], Space[Any]]:
    if isinstance(env, VectorEnv):
        return env.single_observation_space, env.single_action_space
    return env.observation_space, env.action_space


def _children(space: Space[Any]) -> dict[str, Space[Any]] | None:
    """Return the spaces that a space consists of, by name; None for a space that becomes one field."""
    if isinstance(space, spaces.Tuple):
        return {str(i): child for i, child in enumerate(space.spaces)}
    if isinstance(space, spaces.Dict):
        return dict(space.spaces)
    return None


def _fields(path: str, space: Space[Any], *, is_final: bool) -> dict[str, Field]:
    children = _children(space)
    if children is not None:
        names = [check_name(name, f"name in space '{path}'") for name in children]
        parts = [_fields(f"{path}/{name}", children[name], is_final=is_final) for name in names]
        return {path: field for part in parts for path, field in part.items()}
    if not isinstance(space, _FIELD_SPACES) or space.shape is None:
        raise SchemaError(
            f"space '{path}': {space} cannot be stored; expected Box, Discrete, MultiBinary or MultiDiscrete,"
            " or Dict and Tuple of them"
        )
    return {path: Field(np.dtype(space.dtype).name, space.shape, final=is_final)}


def _parts(path: str, space: Space[Any], value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the path and value of each field that a space consists of."""
    children = _children(space)
    if children is None:
        yield path, value
        return
    if isinstance(value, (tuple, list)) and isinstance(space, spaces.Tuple):
        value = {str(i): part for i, part in enumerate(value)}
    if not isinstance(value, Mapping) or value.keys() != children.keys():
        given = f"those of {', '.join(map(str, value))}" if isinstance(value, Mapping) else type(value).__name__
        raise DataError(f"'{path}': expected values of {', '.join(children)}, got {given}")
    for name, child in children.items():
        yield from _parts(f"{path}/{name}", child, value[name])
