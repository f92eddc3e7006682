"""Recognises steps that have the same form as the step before, and copies them without checking them in full.

Programs append steps of the same form all the time: the same fields, of the same types, dtypes and shapes. Once a
step was checked against the schema, it is enough to compare the next one with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from trajstore.schema import Array, Field, Schema
from trajstore.writing.staging import Staging

_MAX_MISSES = 8  # steps in a row of another form than the one before, after which forms are learned rarely
_RARELY = 64

# A value: its name, its type, dtype and shape if it is an array, bounds if it is a Python number, and its column.
_Value = tuple[str, Any, Any, Any, Any, Any, Array]
# A mapping within a step: the keys that lead to it, how many items it has, and those of them that are values.
_Group = tuple[tuple[str, ...], int, list[_Value]]


class StepForm:
    """The form of the step that was checked last. Callers hold the writer's lock.

    It is compared exactly: anything that differs is left to the full check, which has the last word and the error
    messages. Only dicts of numpy arrays and scalars, and of Python numbers, have a form.

    Args:
        lead: Number of leading axes of the values: 0 for a step of one environment, 1 for one of several.
    """

    def __init__(self, lead: int) -> None:
        self._lead = lead
        self._schema: Schema | None = None
        self._staging: Staging | None = None
        self._groups: list[_Group] = []
        self._final_groups: list[_Group] | None = None
        self._n_misses = 0
        self._is_known = False

    def is_of(self, schema: Schema | None, staging: Staging | None) -> bool:
        """Whether the form was learned with this schema and this staging."""
        return self._is_known and staging is self._staging and schema is self._schema

    def learn(
        self, step: Mapping[str, Any], final: Mapping[str, Any] | None, schema: Schema, staging: Staging
    ) -> None:
        """Remember the form of a step that was checked in full."""
        if staging is self._staging and schema is self._schema:
            self._n_misses += 1
            if self._n_misses > _MAX_MISSES and self._n_misses % _RARELY:
                return  # steps differ from one to the next, or have no form
        groups, finals = self._read(step, schema, staging), None
        if final is not None:
            finals = self._read(final, schema, staging)
        self._is_known = groups is not None and (final is None or finals is not None)
        self._groups, self._final_groups = groups or [], finals
        self._schema, self._staging = schema, staging

    def _read(self, data: Mapping[str, Any], schema: Schema, staging: Staging) -> list[_Group] | None:
        groups: list[_Group] = []
        waiting: list[tuple[tuple[str, ...], Any]] = [((), data)]
        while waiting:
            keys, node = waiting.pop()
            if type(node) is not dict:
                return None
            values: list[_Value] = []
            for name, value in node.items():
                path = "/".join((*keys, name))
                if path not in schema.fields:
                    waiting.append(((*keys, name), value))
                    continue
                described = self._describe(value, schema[path])
                if described is None:
                    return None
                values.append((name, *described, staging.columns[path]))
            groups.append((keys, len(node), values))
        return groups

    def _describe(self, value: Any, spec: Field) -> tuple[Any, ...] | None:
        """Type, dtype, shape and bounds of a value, if other values of these are as good; else None."""
        kind, dtype = type(value), spec.storage_dtype
        if spec.dtype == "bfloat16":
            return None
        if kind is np.ndarray:
            is_same = value.dtype == dtype and value.dtype.isnative and value.shape[self._lead :] == spec.shape
            return (kind, value.dtype, value.shape, None, None) if is_same else None
        if self._lead or spec.shape:
            return None
        if isinstance(value, np.generic):
            return (kind, None, None, None, None) if value.dtype == dtype else None
        bounds = _bounds(kind, dtype)
        return None if bounds is None else (kind, None, None, *bounds)

    def copy(self, step: Any, final: Any, where: Any) -> bool:
        """Copy a step of this form to rows of the staging that are free; returns whether it has this form.

        Rows that are not counted yet do not exist, so it does not matter if a part was copied.
        """
        is_same = _is_of_groups(step, self._groups, where)
        if is_same and final is not None:
            is_same = self._final_groups is not None and _is_of_groups(final, self._final_groups, None)
        if is_same and self._n_misses:
            self._n_misses -= 1
        return is_same


def _is_of_groups(data: Any, groups: list[_Group], where: Any) -> bool:
    """Whether data has this form; copies its values to the rows ``where`` of their columns, unless that is None."""
    try:
        for keys, n, values in groups:
            node = _node(data, keys) if keys else data
            if type(node) is not dict or len(node) != n or not _are_values(node, values, where):
                return False
    except KeyError:
        return False
    return True


def _node(node: Any, keys: tuple[str, ...]) -> Any:
    for key in keys:
        if type(node) is not dict:
            return None
        node = node[key]
    return node


def _are_values(node: dict[str, Any], values: list[_Value], where: Any) -> bool:
    for name, kind, dtype, shape, low, high, column in values:
        value = node[name]
        if type(value) is not kind:
            return False
        if dtype is not None:
            if value.dtype is not dtype or value.shape != shape:
                return False
        elif low is not None and not low <= value <= high:
            return False
        if where is not None:
            column[where] = value
    return True


def _bounds(kind: type, dtype: np.dtype[Any]) -> tuple[Any, Any] | None:
    """Bounds within which the full check accepts every Python number of this type; None: there are none."""
    if kind is bool:
        return (False, True) if dtype.kind == "b" else None
    if kind is int and dtype.kind in "iu":
        return int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    if kind is int and dtype.kind == "f":
        exact = 1 << (np.finfo(dtype).nmant + 1)
        return -exact, exact
    if kind is float and dtype.kind == "f":
        return float(np.finfo(dtype).min), float(np.finfo(dtype).max)
    return None
