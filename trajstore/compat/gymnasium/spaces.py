"""Which fields the spaces of an environment become, and their values as those fields hold them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypedDict

import numpy as np
from gymnasium import Env, Space, spaces
from gymnasium.vector import VectorEnv

from trajstore.errors import DataError, SchemaError
from trajstore.schema import Array, Field, as_array, check_name

AnyEnv: TypeAlias = Env[Any, Any] | VectorEnv[Any, Any, Any]
Flat: TypeAlias = dict[str, Array]  # values by the path of their field
Info: TypeAlias = Mapping[str, Any]

_PLAIN = (spaces.Box, spaces.Discrete, spaces.MultiBinary, spaces.MultiDiscrete)


class FieldOptions(TypedDict, total=False):
    """Which fields a step has, and what they are called.

    Attributes:
        observation: Name of the observation; for Dict and Tuple spaces, of a group of fields.
        action: The same for the action.
        reward: Name of the reward.
        reward_dtype: ``"float64"`` holds every reward exactly; ``"float32"`` rounds.
        info_fields: Entries of ``info`` to record, by name. One declared ``final`` belongs to the observation it
            comes with, also to that of a reset (an action mask, say); others belong to the step that gave them, as
            the reward does. Every such step must give a value.
    """

    observation: str
    action: str
    reward: str
    reward_dtype: Literal["float32", "float64"]
    info_fields: Mapping[str, Field]


@dataclass(frozen=True, slots=True)
class Layout:
    """Which field holds what.

    Attributes:
        observation: Name of the observation.
        action: Name of the action.
        reward: Name of the reward.
        spaces: Of observation and action, by name.
        info_fields: Those that are entries of info.
        fields: All of them, by path.
    """

    observation: str
    action: str
    reward: str
    spaces: dict[str, Space[Any]]
    info_fields: dict[str, Field]
    fields: dict[str, Field]

    def flat(self, name: str, value: Any, lead: tuple[int, ...]) -> Flat:
        """Copies of the parts of an observation or action, in the dtypes of their spaces."""
        parts = _parts(name, self.spaces[name], value)
        return {path: _exact(path, self.fields[path], part, lead) for path, part in parts}

    def earned(self, reward: Any, lead: tuple[int, ...]) -> Flat:
        return {self.reward: _number(self.reward, self.fields[self.reward], reward, lead)}

    def info(self, info: Info, *, is_final: bool) -> Flat:
        """Values of one environment."""
        return {name: _exact(name, spec, _entry(info, name), ()) for name, spec in self._entries(is_final)}

    def info_rows(self, infos: Info, mask: Array, *, is_final: bool) -> Flat:
        """Rows of all environments, of which those of the mask are filled."""
        return {name: _info_rows(name, spec, infos, mask) for name, spec in self._entries(is_final)}

    def _entries(self, is_final: bool) -> list[tuple[str, Field]]:
        return [(name, spec) for name, spec in self.info_fields.items() if spec.final is is_final]


def layout_of(
    env: AnyEnv,
    *,
    observation: str = "observation",
    action: str = "action",
    reward: str = "reward",
    reward_dtype: str = "float64",
    info_fields: Mapping[str, Field] | None = None,
) -> Layout:
    if reward_dtype not in ("float32", "float64"):
        raise ValueError(f"reward_dtype: expected 'float32' or 'float64', got {reward_dtype!r}")
    seen, taken = _spaces_of(env)
    parts = [
        _fields(observation, seen, is_final=True),
        _fields(action, taken, is_final=False),
        {reward: Field(reward_dtype)},
        dict(info_fields or {}),
    ]
    paths = [path for part in parts for path in part]
    if twice := [path for path in dict.fromkeys(paths) if paths.count(path) > 1]:
        raise SchemaError(f"field '{twice[0]}' is named twice; expected different names for all that is recorded")
    fields = {path: spec for part in parts for path, spec in part.items()}
    return Layout(observation, action, reward, {observation: seen, action: taken}, parts[-1], fields)


def _spaces_of(env: AnyEnv) -> tuple[Space[Any], Space[Any]]:
    if isinstance(env, VectorEnv):
        return env.single_observation_space, env.single_action_space
    return env.observation_space, env.action_space


def _children(space: Space[Any]) -> dict[str, Space[Any]] | None:
    """The spaces a space is made of, by name; None for one that is a field."""
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
        return {path: spec for part in parts for path, spec in part.items()}
    if not isinstance(space, _PLAIN) or space.shape is None:
        raise SchemaError(
            f"space '{path}': {space} can't be stored; expected Box, Discrete, MultiBinary or MultiDiscrete,"
            " or Dict and Tuple of them"
        )
    return {path: Field(np.dtype(space.dtype).name, space.shape, final=is_final)}


def _parts(path: str, space: Space[Any], value: Any) -> Iterator[tuple[str, Any]]:
    """The values of the fields that a space is made of, by path."""
    children = _children(space)
    if children is None:
        yield path, value
        return
    if isinstance(value, (tuple, list)) and isinstance(space, spaces.Tuple):
        value = {str(i): part for i, part in enumerate(value)}
    if not isinstance(value, Mapping) or value.keys() != children.keys():
        came = f"those of {', '.join(map(str, value))}" if isinstance(value, Mapping) else type(value).__name__
        raise DataError(f"'{path}': expected values of {', '.join(children)}, got {came}")
    for name, child in children.items():
        yield from _parts(f"{path}/{name}", child, value[name])


def _exact(path: str, spec: Field, value: Any, lead: tuple[int, ...]) -> Array:
    """A copy in the dtype of the field, if that changes no value; Python floats are rounded to it."""
    if type(value) is np.ndarray and value.dtype == spec.storage_dtype and value.shape == lead + spec.shape:
        return value.copy()  # the common case, without looking at names
    array, name = as_array(path, value)
    is_exact = name == spec.dtype or _keeps(array, spec.storage_dtype, is_plain=not hasattr(value, "dtype"))
    if array.shape != lead + spec.shape or not is_exact:
        raise DataError(
            f"field '{path}': expected {spec.dtype} of shape {lead + spec.shape}, got {name} of shape {array.shape}"
        )
    return _cast(path, array, spec.storage_dtype)


def _keeps(array: Array, dtype: np.dtype[Any], *, is_plain: bool) -> bool:
    """Whether every value stays what it is; numbers of Python have no dtype of their own, so their values count."""
    given, wanted = array.dtype.kind, dtype.kind
    if not is_plain or given == "b":
        return np.can_cast(array.dtype, dtype, "safe") and (wanted != "f" or given == "f")
    if given == "f":
        return wanted == "f"
    return wanted != "b" and np.array_equal(array.astype(dtype), array)


def _number(path: str, spec: Field, value: Any, lead: tuple[int, ...]) -> Array:
    """A copy of a real number of any dtype, in that of the field."""
    array, name = as_array(path, value)
    if array.shape != lead or name == "bfloat16":
        raise DataError(f"field '{path}': expected numbers of shape {lead}, got {name} of shape {array.shape}")
    return _cast(path, array, spec.storage_dtype)


def _cast(path: str, array: Array, dtype: np.dtype[Any]) -> Array:
    if array.dtype == dtype:
        return array.copy()
    try:
        with np.errstate(over="raise"):
            return array.astype(dtype)
    except FloatingPointError as error:
        raise DataError(f"field '{path}': a value is out of range for {dtype}") from error


def flags(name: str, value: Any, n: int) -> Array:
    """A copy of one bool for each environment."""
    array = value if type(value) is np.ndarray else as_array(name, value)[0]
    if array.dtype != bool or array.shape != (n,):
        raise DataError(f"{name}: expected bool of shape ({n},), got {array.dtype} of shape {array.shape}")
    return array.copy()


def _entry(info: Info, name: str) -> Any:
    if name not in info:
        raise DataError(f"info field '{name}': expected a value at every step, got info with {', '.join(info)}")
    return info[name]


def _info_rows(name: str, spec: Field, infos: Info, mask: Array) -> Array:
    n = int(mask.sum())
    if not n:
        return np.zeros((len(mask), *spec.shape), spec.storage_dtype)
    values, is_given = np.asarray(_entry(infos, name)), infos.get(f"_{name}", mask)
    if values.shape[:1] != mask.shape or not np.all(is_given[mask]):
        raise DataError(f"info field '{name}': expected a value of every environment at every step, got {values}")
    rows = values[mask]
    return spread(_exact(name, spec, list(rows) if rows.dtype.kind == "O" else rows, (n,)), mask)


def spread(rows: Array, mask: Array) -> Array:
    """As many rows as the mask has; those of the mask in order, zeros elsewhere."""
    everywhere = np.zeros((len(mask), *rows.shape[1:]), rows.dtype)
    everywhere[mask] = rows
    return everywhere


def patched(values: Flat, others: Flat, mask: Array) -> Flat:
    """A copy with other rows where the mask is set; fields that have no others stay."""
    changed = {path: values[path].copy() for path in others}
    for path, rows in changed.items():
        rows[mask] = others[path][mask]
    return values | changed
