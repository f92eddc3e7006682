"""Names of another library and ours, and observations that it stores twice."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trajstore.datasets.fields import field_of, followed, is_skipped, length_of
from trajstore.errors import DataError, SchemaError
from trajstore.schema import Array, Field, Schema, nest

_NEXT = "next_observation"


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a library keeps what; fields and groups that are not named keep their names.

    Attributes:
        observation: Group or array of observations; ours is ``observation``.
        next_observation: The same, one step later; ours, where it is kept apart, is ``next_observation``.
        names: Other names, theirs to ours.
        alone: What an observation without a name of its own is called in their group; None: it stands in its place.
    """

    observation: str
    next_observation: str
    names: Mapping[str, str]
    alone: str | None = None

    def ours(self, paths: Iterable[str]) -> dict[str, str]:
        """Their paths to ours."""
        known = list(paths)
        heads = {**self.names, self.observation: "observation", self.next_observation: _NEXT}
        in_group = [path for path in known if path.startswith(f"{self.observation}/")]
        is_alone = in_group == [f"{self.observation}/{self.alone}"]
        renamed = {}
        for path in known:
            head, _, rest = path.partition("/")
            is_group = not (is_alone and head in (self.observation, self.next_observation))
            renamed[path] = f"{heads.get(head, head)}/{rest}" if rest and is_group else heads.get(head, head)
        return _checked(renamed)

    def theirs(self, paths: Iterable[str]) -> dict[str, str]:
        """Our paths to theirs."""
        heads = {ours: theirs for theirs, ours in self.names.items()}
        heads |= {"observation": self.observation, _NEXT: self.next_observation}
        renamed = {}
        for path in paths:
            head, _, rest = path.partition("/")
            if not rest and head in ("observation", _NEXT) and self.alone:
                rest = self.alone
            renamed[path] = f"{heads.get(head, head)}/{rest}" if rest else heads.get(head, head)
        return _checked(renamed)

    def next_of(self, path: str) -> str | None:
        """Where, in their names, the next observation of an observation stands; None if it is none."""
        head, slash, rest = path.partition("/")
        return f"{self.next_observation}{slash}{rest}" if head == self.observation else None

    def is_skipped(self, path: str, skip: Collection[str]) -> bool:
        """Whether it is left out: next observations go with their observations."""
        head, slash, rest = path.partition("/")
        of = f"{self.observation}{slash}{rest}" if head == self.next_observation else path
        return is_skipped(path, skip) or is_skipped(of, skip)

    def schema(self, display: str, arrays: Mapping[str, Any], *, keep_next: bool) -> Schema:
        """Of the store that arrays of a dataset become.

        Raises:
            SchemaError: An array can't be stored.
        """
        try:
            return Schema(nest(self._fields(arrays, keep_next)))
        except SchemaError as error:
            raise SchemaError(f"{display}: {error}; leave it out with skip") from error

    def _fields(self, arrays: Mapping[str, Any], keep_next: bool) -> dict[str, Field]:
        renamed = self.ours(arrays)
        joined = set() if keep_next else {self.next_of(path) for path in arrays}
        return {
            renamed[path]: field_of(
                path, array.dtype.name, tuple(array.shape[1:]), final=not keep_next and self.next_of(path) in arrays
            )
            for path, array in arrays.items()
            if path not in joined
        }

    def joined(self, rows: Mapping[str, Array], *, keep_next: bool) -> dict[str, Array]:
        """Our fields of an episode, with observations stored once.

        Raises:
            DataError: A next observation is not the observation of the next step.
        """
        renamed = self.ours(rows)
        if keep_next:
            return {renamed[path]: values for path, values in rows.items()}
        pairs = {path: self.next_of(path) for path in rows if self.next_of(path) in rows}
        steps = {path: values for path, values in rows.items() if path not in pairs.values()}
        for path, later in pairs.items():
            assert later is not None
            steps[path] = _extended(path, rows[path], later, rows[later])
        return {renamed[path]: values for path, values in steps.items()}

    def split(self, flat: Mapping[str, Any]) -> dict[str, Array]:
        """Their arrays, of T rows each, for our fields of an episode.

        Raises:
            DataError: A field has no place there.
        """
        n_steps, renamed = length_of(flat), self.theirs(flat)
        arrays: dict[str, Array] = {}
        for path, values in flat.items():
            arrays[renamed[path]] = values[:n_steps]
            if len(values) > n_steps:
                arrays[self._place_of_next(path, renamed)] = values[1:]
        return arrays

    def _place_of_next(self, path: str, renamed: Mapping[str, str]) -> str:
        later = self.next_of(renamed[path])
        if later is None or later in renamed.values():
            raise DataError(f"field '{path}' has a final value, for which there is no place; leave it out")
        return later


def _checked(renamed: dict[str, str]) -> dict[str, str]:
    taken: dict[str, str] = {}
    for path, name in renamed.items():
        if taken.setdefault(name, path) != path:
            raise DataError(f"'{taken[name]}' and '{path}' would both be called '{name}'; leave one out")
    return renamed


def _extended(path: str, values: Array, later: str, next_values: Array) -> Array:
    """Observations and the last next one, if all others are the same."""
    if (values.dtype, values.shape) != (next_values.dtype, next_values.shape):
        came = f"{next_values.dtype} of shape {next_values.shape}"
        raise DataError(f"'{later}': expected {values.dtype} of shape {values.shape} as '{path}' has, got {came}")
    return followed(path, values, later, next_values)
