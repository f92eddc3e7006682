"""Checks appended values against the schema, or infers the schema from the first of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from trajstore.errors import DataError
from trajstore.schema import (
    Array,
    Schema,
    as_array,
    check_not_reserved,
    check_paths,
    check_value,
    flatten,
    infer_schema,
    observation_paths,
)

Step = Mapping[str, Any]


class StepValidator:
    """Turns nested values into checked arrays by field path. Changes nothing but its own schema.

    In a store without a declared schema, the first data defines it. Fields that are named like observations may
    have a final value. If there is evidence of other fields before the first commit (`settle`), the first counts:
    an episode in which some fields have one row more than the others, or a ``final=`` argument.

    Attributes:
        known: The schema; None before the first data, in a store that declared none.
    """

    def __init__(self, schema: Schema | None) -> None:
        self.known = schema
        self._is_open = schema is None  # whether the schema is inferred and may still change
        self._are_finals_guessed = False  # from the names of fields, without evidence
        self._is_inferred = schema is None
        self._column_names: set[str] = set()
        self._before = self.known, self._are_finals_guessed

    def reserve(self, name: str) -> None:
        """Refuse a field of this name, if the fields are not known yet: a derived column has it."""
        self._column_names.add(name)

    @property
    def schema(self) -> Schema:
        """The schema; a DataError if it is not known yet."""
        if self.known is None:
            raise DataError("nothing has been appended yet, so there is no schema")
        return self.known

    def settle(self) -> Schema:
        """Make the schema final, and return it."""
        self._is_open = False
        return self.schema

    def begin_attempt(self) -> None:
        """Remember the schema as it is, because data that follows may be refused."""
        if self._is_open:
            self._before = self.known, self._are_finals_guessed

    def undo_attempt(self, error: BaseException) -> None:
        """Undo what the schema learned since `begin_attempt`, if the error says that the data was refused."""
        if self._is_open and isinstance(error, DataError):
            self.known, self._are_finals_guessed = self._before

    def steps(self, data: Step, lead: tuple[int, ...], final: Step | None) -> dict[str, Array]:
        """Check one value for every field, each with the leading lengths ``lead``.

        Args:
            data: Nested values by field.
            lead: Leading lengths of each value.
            final: Final values, whose fields tell an open schema which fields have one.
        """
        flat = flatten(data)
        if self.known is None and not lead:
            _refuse_several_envs(flat)
        schema = self._schema_for(flat, len(lead), set(flatten(final)) if final is not None else set())
        check_paths(schema.fields, flat)
        try:
            return {path: check_value(path, spec, flat[path], lead) for path, spec in schema.fields.items()}
        except DataError as error:
            if not self._is_inferred:
                raise
            raise DataError(
                f"{error}; the fields were inferred from the first data, declare other ones with schema="
            ) from None

    def finals(self, final: Step | None, lead: tuple[int, ...]) -> dict[str, Array] | None:
        """Check a value for every field that has a final value; None if ``final`` is None."""
        if final is None:
            return None
        flat = flatten(final)
        self._learn_finals(set(flat))
        expected = {path: self.schema[path] for path in self.schema.final_fields}
        if expected.keys() != flat.keys():
            raise _unexpected_finals(expected, flat, self.schema)
        return {path: check_value(path, spec, flat[path], lead) for path, spec in expected.items()}

    def episode(self, data: Step) -> tuple[dict[str, Array], int, bool]:
        """Check a whole episode: return its arrays, the number of steps, and whether it has a final row."""
        flat = flatten(data)
        lengths = {path: _length(path, value) for path, value in flat.items()}
        longest = {path for path, n in lengths.items() if n == max(lengths.values())}
        schema = self._schema_for(flat, 1, longest)
        check_paths(schema.fields, flat)
        n_steps, has_final = _episode_length(schema, lengths)
        rows = {
            path: check_value(path, spec, flat[path], (n_steps + (spec.final and has_final),))
            for path, spec in schema.fields.items()
        }
        return rows, n_steps, has_final

    def amendment(self, values: Step) -> dict[str, Array]:
        """Check new values of some fields of one step."""
        flat = flatten(values)
        if unknown := [path for path in flat if path not in self.schema.fields]:
            raise DataError(f"fields: unexpected {', '.join(map(repr, unknown))}")
        return {path: check_value(path, self.schema[path], value, ()) for path, value in flat.items()}

    def _schema_for(self, flat: dict[str, Any], n_lead: int, finals: set[str]) -> Schema:
        evidence = finals if len(finals) < len(flat) else set()
        if self.known is None:
            check_not_reserved(flat)
            self._check_not_column(flat)
            schema = infer_schema(flat, n_lead)
            guessed = set(observation_paths(schema))
            self._are_finals_guessed = not evidence
            # If all fields could have a final value, the number of an episode's steps would be ambiguous.
            self.known = schema.with_final(evidence or (guessed if len(guessed) < len(schema) else set()))
        else:
            self._learn_finals(evidence)
        return self.known

    def _check_not_column(self, paths: Iterable[str]) -> None:
        for path in paths:
            if (name := path.partition("/")[0]) in self._column_names:
                raise DataError(f"field '{path}': there is a column {name!r}, which batches hold; rename the field")

    def _learn_finals(self, evidence: set[str]) -> None:
        schema = self.known
        if self._is_open and schema is not None and evidence and self._are_finals_guessed:
            self.known, self._are_finals_guessed = schema.with_final(evidence & set(schema.fields)), False


def _unexpected_finals(expected: Iterable[str], given: Iterable[str], schema: Schema) -> DataError:
    if unknown := [path for path in given if path not in schema.fields]:
        names = (", ".join(map(repr, paths)) for paths in (unknown, schema.fields))
        return DataError("final: no field {}; the fields are {}".format(*names))
    fields, got = (", ".join(map(repr, paths)) or "no field" for paths in (expected, given))
    return DataError(
        f"final: expected a final value of {fields}, got one of {got}. A declared schema, or the first commit,"
        " fixes which fields have one. In a new store, declare them with Field(..., final=True), or pass final="
        " with every step from the first one on: it is stored where an episode ends"
    )


def _refuse_several_envs(flat: Mapping[str, Any]) -> None:
    """Refuse the first step of one environment if it looks like a step of several.

    Raises:
        DataError: All fields, also the reward, have a first axis of the same length.
    """
    shapes = {path: as_array(path, value)[0].shape for path, value in flat.items()}
    lengths = {shape[:1] for shape in shapes.values()}
    if len(shapes) > 1 and shapes.get("reward") and len(lengths) == 1 and lengths != {(1,)}:
        ((n,),) = lengths
        raise DataError(
            f"field 'reward': every field has a first axis of {n}; if this is a step of {n} environments, pass"
            f" envs={n}, or envs=envs with the vector environment; if a step of one environment has such fields,"
            " declare them with schema="
        )


def leading_shape(data: Step, n: int) -> tuple[int, ...]:
    """The first ``n`` lengths of the first field; the other fields must have the same."""
    flat = flatten(data)
    if not flat:
        raise DataError("expected at least one field, got none")
    path, value = next(iter(flat.items()))
    shape: tuple[int, ...] = as_array(path, value)[0].shape[:n]
    if len(shape) < n or not all(shape):
        raise DataError(f"field '{path}': expected {n} leading axes of at least 1, got a leading shape of {shape}")
    return shape


def _length(path: str, value: Any) -> int:
    array, _ = as_array(path, value)
    if not array.ndim:
        raise DataError(f"field '{path}': expected an array with one row per step, got a scalar")
    return len(array)


def _episode_length(schema: Schema, lengths: dict[str, int]) -> tuple[int, bool]:
    plain = {n for path, n in lengths.items() if not schema[path].final}
    final = {n for path, n in lengths.items() if schema[path].final}
    n_steps = min(plain) if plain else min(final) - 1
    if len(plain) > 1 or len(final) > 1 or not final <= {n_steps, n_steps + 1}:
        raise DataError(
            "episode: expected the same number of rows in every field (one more if it has a final value),"
            f" got {', '.join(f'{path}: {n}' for path, n in lengths.items())}"
        )
    if n_steps < 1:
        raise DataError("episode: expected at least one step, got none")
    return n_steps, final == {n_steps + 1}
