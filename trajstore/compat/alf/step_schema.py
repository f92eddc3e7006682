"""The schema of ALF's steps in a store, and checks that a batch fits it."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Any

from trajstore.compat.alf.nested_tensors import shallowest_path
from trajstore.errors import DataError
from trajstore.schema import RESERVED, Array, Field, Schema, as_array, check_paths, check_value, nest

POSITION = "row_position"  # the field that stores the position a step was recorded at
MOVED_POSITION = "row_position_now"  # the column that stores the position of a step moved by a redistribution


class StepType(enum.IntEnum):
    """A step's place in its episode."""

    FIRST = 0
    MID = 1
    LAST = 2


def check_field_names(paths: Iterable[str]) -> None:
    """Refuse fields that are not those of ALF's steps.

    Raises:
        DataError: ``step_type`` or the position is missing.
    """
    if missing := [name for name in ("step_type", POSITION) if shallowest_path(paths, name) is None]:
        raise DataError(f"expected a field '{missing[0]}', got {', '.join(paths) or 'none'}")


def schema_of_step(leaves: Mapping[str, Any], n_leading_axes: int) -> Schema:
    """Return the schema for steps like this one, whose leaves have the given number of leading axes.

    Raises:
        DataError: The store cannot hold such steps.
    """
    fields = {path: Field(leaf.dtype, tuple(leaf.shape)[n_leading_axes:]) for path, leaf in leaves.items()}
    for path in fields:
        if path.partition("/")[0] in {*RESERVED, POSITION, MOVED_POSITION}:
            raise DataError(f"field '{path}': stores and batches use this name for something else; rename it")
    fields[POSITION] = Field("int64")
    check_field_names(fields)
    for leaf in ("step_type", "discount"):
        found = shallowest_path(fields, leaf)
        if found is not None and fields[found].shape:
            raise DataError(
                f"field '{found}': expected one number for each environment, got shape {fields[found].shape}"
            )
    return Schema(nest(fields), reward=shallowest_path(fields, "reward"), reward_alignment="observation")


def check_same_fields(given: Schema, stored: Schema) -> None:
    """Refuse a ``data_spec`` that differs from the steps of the store.

    Raises:
        DataError: A field is missing, is new, or has another dtype or shape.
    """
    check_paths(stored.fields, given.fields)
    for path, field in stored.fields.items():
        if (field.dtype, field.shape) != (given[path].dtype, given[path].shape):
            raise DataError(
                f"data_spec, field '{path}': expected {field.dtype} of shape {field.shape}, as in the store, got"
                f" {given[path].dtype} of shape {given[path].shape}"
            )


def check_steps(schema: Schema, step: Mapping[str, Any], n_envs: int) -> None:
    """Refuse a batch that could not be appended.

    Raises:
        DataError: A field is missing, is new, or has another dtype or shape.
    """
    check_paths(schema.fields, step)
    for path, field in schema.fields.items():
        check_value(path, field, step[path], (n_envs,))


def classify_steps(
    step: Mapping[str, Any], step_type: str, discount: str | None, n_envs: int
) -> tuple[Array, Array, Array]:
    """Return which steps of a batch are FIRST, which are LAST, and which of the LAST ones are terminal.

    Args:
        step: Fields by path.
        step_type: Path of the step type.
        discount: Path of the discount; None or missing: all LAST steps are terminal.
        n_envs: Number of steps, one per environment.

    Raises:
        DataError: A field does not have one value per environment.
    """
    types = _one_per_env("step_type", step.get(step_type, ()), n_envs)
    discounts = step.get(discount or "")
    is_last = types == StepType.LAST
    is_terminal = True if discounts is None else _one_per_env("discount", discounts, n_envs) == 0
    return types == StepType.FIRST, is_last, is_last & is_terminal


def _one_per_env(name: str, value: Any, n_envs: int) -> Array:
    array = as_array(name, value)[0]
    if array.shape != (n_envs,):
        raise DataError(f"{name}: expected one for each of {n_envs} environments, got shape {array.shape}")
    return array
