"""Map the array names of a dataset to fields of a store, and store observations only once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trajstore.datasets.episode_arrays import append_final, count_steps, make_field
from trajstore.datasets.skip_names import is_skipped
from trajstore.errors import DataError, SchemaError
from trajstore.schema import Array, Field, Schema, nest

_NEXT = "next_observation"


@dataclass(frozen=True, slots=True)
class FieldMapping:
    """The names of a dataset format. Arrays and groups that are not listed keep their names.

    Attributes:
        observation: Group or array of observations in the dataset; in the store it is ``observation``.
        next_observation: The same, one step later. In the store it is ``next_observation``, if it is kept.
        names: Further names, dataset to store.
        unnamed: Name, in the dataset's group, of an observation that has no name of its own in the store. None if
            the dataset then has an array in place of the group.
    """

    observation: str
    next_observation: str
    names: Mapping[str, str]
    unnamed: str | None = None

    def to_store_paths(self, paths: Iterable[str]) -> dict[str, str]:
        """Map paths of the dataset to paths of the store.

        Raises:
            DataError: Two paths would become one.
        """
        known = list(paths)
        heads = {**self.names, self.observation: "observation", self.next_observation: _NEXT}
        in_group = [path for path in known if path.startswith(f"{self.observation}/")]
        is_unnamed = in_group == [f"{self.observation}/{self.unnamed}"]
        renamed = {}
        for path in known:
            head, _, rest = path.partition("/")
            is_group = not (is_unnamed and head in (self.observation, self.next_observation))
            renamed[path] = f"{heads.get(head, head)}/{rest}" if rest and is_group else heads.get(head, head)
        return _check_distinct(renamed)

    def to_dataset_paths(self, paths: Iterable[str]) -> dict[str, str]:
        """Map paths of the store to paths of the dataset.

        Raises:
            DataError: Two paths would become one.
        """
        heads = {in_store: in_dataset for in_dataset, in_store in self.names.items()}
        heads |= {"observation": self.observation, _NEXT: self.next_observation}
        renamed = {}
        for path in paths:
            head, _, rest = path.partition("/")
            if not rest and head in ("observation", _NEXT) and self.unnamed:
                rest = self.unnamed
            renamed[path] = f"{heads.get(head, head)}/{rest}" if rest else heads.get(head, head)
        return _check_distinct(renamed)

    def next_path(self, path: str) -> str | None:
        """Return the dataset's path of the next observation; None if ``path`` is not an observation."""
        head, slash, rest = path.partition("/")
        return f"{self.next_observation}{slash}{rest}" if head == self.observation else None

    def is_skipped(self, path: str, skip: Collection[str]) -> bool:
        """Return whether an array is left out. Next observations are left out with their observations."""
        head, slash, rest = path.partition("/")
        observation = f"{self.observation}{slash}{rest}" if head == self.next_observation else path
        return is_skipped(path, skip) or is_skipped(observation, skip)

    def schema(self, display: str, arrays: Mapping[str, Any], *, keep_next: bool) -> Schema:
        """Return the schema of the store that arrays of the dataset become.

        Args:
            display: Where the dataset is, for messages.
            arrays: Arrays by the dataset's path; only dtypes and shapes are used.
            keep_next: Next observations are fields. Otherwise, observations get a final value.

        Raises:
            SchemaError: A store cannot hold an array.
        """
        try:
            return Schema(nest(self._fields(arrays, keep_next)))
        except SchemaError as error:
            raise SchemaError(f"{display}: {error}; leave it out with skip") from error

    def _fields(self, arrays: Mapping[str, Any], keep_next: bool) -> dict[str, Field]:
        renamed = self.to_store_paths(arrays)
        next_paths = set() if keep_next else {self.next_path(path) for path in arrays}
        has_final = {path for path in arrays if not keep_next and self.next_path(path) in arrays}
        return {
            renamed[path]: make_field(path, array.dtype.name, tuple(array.shape[1:]), final=path in has_final)
            for path, array in arrays.items()
            if path not in next_paths
        }

    def to_store_fields(self, rows: Mapping[str, Array], *, keep_next: bool) -> dict[str, Array]:
        """Convert an episode's arrays to fields of the store.

        Without ``keep_next``, each observation is stored once, and the last next observation becomes its final
        value.

        Raises:
            DataError: A next observation differs from the observation of the following step.
        """
        renamed = self.to_store_paths(rows)
        if keep_next:
            return {renamed[path]: values for path, values in rows.items()}
        pairs = {path: self.next_path(path) for path in rows if self.next_path(path) in rows}
        steps = {path: values for path, values in rows.items() if path not in pairs.values()}
        for path, next_path in pairs.items():
            assert next_path is not None
            steps[path] = _with_final(path, rows[path], next_path, rows[next_path])
        return {renamed[path]: values for path, values in steps.items()}

    def to_dataset_arrays(self, flat: Mapping[str, Any]) -> dict[str, Array]:
        """Convert an episode's fields to arrays of the dataset, each with T rows.

        Raises:
            DataError: The dataset has no array for a field, or for its final value.
        """
        n_steps, renamed = count_steps(flat), self.to_dataset_paths(flat)
        arrays: dict[str, Array] = {}
        for path, values in flat.items():
            arrays[renamed[path]] = values[:n_steps]
            if len(values) > n_steps:
                arrays[self._free_next_path(path, renamed)] = values[1:]
        return arrays

    def _free_next_path(self, path: str, renamed: Mapping[str, str]) -> str:
        next_path = self.next_path(renamed[path])
        if next_path is None or next_path in renamed.values():
            raise DataError(f"field '{path}' has a final value, which the format cannot hold; leave the field out")
        return next_path


def _check_distinct(renamed: dict[str, str]) -> dict[str, str]:
    taken: dict[str, str] = {}
    for path, name in renamed.items():
        if taken.setdefault(name, path) != path:
            raise DataError(f"'{taken[name]}' and '{path}' would both be called '{name}'; leave one out")
    return renamed


def _with_final(path: str, values: Array, next_path: str, next_values: Array) -> Array:
    if (values.dtype, values.shape) != (next_values.dtype, next_values.shape):
        got = f"{next_values.dtype} of shape {next_values.shape}"
        raise DataError(f"'{next_path}': expected {values.dtype} of shape {values.shape} like '{path}', got {got}")
    return append_final(path, values, next_path, next_values)
