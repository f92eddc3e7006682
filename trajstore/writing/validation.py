"""Checks appended values against the schema, or infers the schema from the first of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from trajstore.errors import DataError
from trajstore.schema import Array, Schema, as_array, check_paths, check_value, flatten, infer_schema

Step = Mapping[str, Any]


class StepValidator:
    """Turns nested values into checked arrays by field path. Changes nothing but its own schema.

    In a store without a declared schema, the first data defines it. The fields that have a final value are
    inferred from the first evidence before the first commit (`settle`): an episode in which some fields have one
    row more than the others, or a ``final=`` argument.

    Attributes:
        known: The schema; None before the first data, in a store that declared none.
    """

    def __init__(self, schema: Schema | None) -> None:
        self.known = schema
        self._is_open = schema is None  # whether the schema is inferred and may still change

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

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Undo what the schema learned from data that is then refused."""
        before = self.known
        try:
            yield
        except DataError:
            if self._is_open:
                self.known = before
            raise

    def steps(self, data: Step, lead: tuple[int, ...], final: Step | None) -> dict[str, Array]:
        """Check one value for every field, each with the leading lengths ``lead``.

        Args:
            data: Nested values by field.
            lead: Leading lengths of each value.
            final: Final values, whose fields tell an open schema which fields have one.
        """
        flat = flatten(data)
        schema = self._schema_for(flat, len(lead), set(flatten(final)) if final is not None else set())
        check_paths(schema.fields, flat)
        return {path: check_value(path, spec, flat[path], lead) for path, spec in schema.fields.items()}

    def finals(self, final: Step | None, lead: tuple[int, ...]) -> dict[str, Array] | None:
        """Check a value for every field that has a final value; None if ``final`` is None."""
        if final is None:
            return None
        flat = flatten(final)
        self._learn_finals(set(flat))
        expected = {path: self.schema[path] for path in self.schema.final_fields}
        if not expected:
            raise DataError(
                "final: no field has a final value in the schema, which is fixed from the first commit on;"
                " declare one with Field(..., final=True) in a new store"
            )
        check_paths(expected, flat)
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
            self.known = infer_schema(flat, n_lead).with_final(evidence)
        else:
            self._learn_finals(evidence)
        return self.known

    def _learn_finals(self, evidence: set[str]) -> None:
        schema = self.known
        if self._is_open and schema is not None and evidence and not schema.final_fields:
            self.known = schema.with_final(evidence & set(schema.fields))


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
