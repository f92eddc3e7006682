"""Which episodes satisfy a filter."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from functools import reduce
from typing import Any, TypeGuard

import numpy as np

from trajstore.errors import DataError
from trajstore.inspection import filter_syntax as syntax
from trajstore.inspection.episode_columns import Column, EpisodeColumns
from trajstore.schema import Array

_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
_TIME = "time"  # a number that may be compared with a date


def matches(columns: EpisodeColumns, filter_: str) -> Array:
    """Which rows of a table satisfy a filter, as one truth value an episode.

    An episode without a value satisfies no comparison. The language is described in `filter_syntax`.

    Raises:
        DataError: The filter is malformed, names an unknown column, or compares things that can't be compared.
    """
    if not filter_.strip():
        return np.ones(len(columns.table), bool)
    condition = syntax.parse(filter_)
    try:
        return _Evaluation(columns)(condition)
    except DataError as error:
        raise DataError(f"filter {filter_!r:.200}: {error}") from error


class _Evaluation:
    """Computes conditions as arrays of truth values, one an episode."""

    def __init__(self, columns: EpisodeColumns) -> None:
        self._columns = columns

    def __call__(self, condition: syntax.Condition) -> Array:
        found: Array
        match condition:
            case syntax.All(parts):
                found = reduce(np.logical_and, map(self, parts))
            case syntax.Any(parts):
                found = reduce(np.logical_or, map(self, parts))
            case syntax.Not(inner):
                found = ~self(inner)
            case _:
                found = self._predicate(condition)
        return found

    def _predicate(
        self, condition: syntax.Comparison | syntax.Contains | syntax.IsIn | syntax.IsNull | syntax.IsTrue
    ) -> Array:
        match condition:
            case syntax.Comparison(sign, left, right):
                return self._compare(sign, left, right)
            case syntax.IsIn(column, values):
                return self._is_among(column, values)
            case syntax.Contains(column, text):
                return self._contains(column, text)
            case syntax.IsNull(operand):
                return self._column(operand).is_missing
            case syntax.IsTrue(operand):
                return self._is_true(operand)

    def _is_among(self, operand: syntax.Operand, values: Iterable[syntax.Operand]) -> Array:
        values = dict.fromkeys(values)
        if self._is_column(operand) and not any(map(self._is_column, values)):
            column = self._columns[operand.name]
            if column.labels is not None:
                texts = {self._text_of(column, operand.name, value) for value in values}
                return _of_labels(column, texts.__contains__)
            numbers = [value.value for value in values if isinstance(value, syntax.Number)]
            if len(numbers) == len(values) and column.kind == "number":
                return np.isin(column.values, _as_dtype(numbers, column.values.dtype)) & ~column.is_missing
        found: Array = reduce(np.logical_or, (self._compare("==", operand, value) for value in values))
        return found

    def _compare(self, sign: str, left: syntax.Operand, right: syntax.Operand) -> Array:
        if self._is_column(left) and self._is_column(right):
            return _compare_columns(sign, self._columns[left.name], self._columns[right.name])
        if self._is_column(left):
            return self._compare_value(sign, left.name, right)
        if self._is_column(right):
            return self._compare_value(_MIRRORED.get(sign, sign), right.name, left)
        unknown = next((x for x in (left, right) if isinstance(x, syntax.Word)), None)
        if unknown is not None:
            raise self._columns.unknown(unknown.name)
        raise DataError("a comparison needs a column on one side")

    def _compare_value(self, sign: str, name: str, operand: syntax.Operand) -> Array:
        """Compare a column with a value; missing values satisfy nothing."""
        column = self._columns[name]
        if column.labels is None:
            value = self._number(name, column, operand)
            with np.errstate(over="ignore"):  # a number that is too large for the column is infinite
                found: Array = _OPERATORS[sign](column.values, value) & ~column.is_missing
            return found
        text = self._text_of(column, name, operand)
        return _of_labels(column, lambda label: _OPERATORS[sign](label, text))

    def _contains(self, operand: syntax.Operand, part: syntax.Operand) -> Array:
        column = self._column(operand)
        if column.labels is None:
            raise DataError("'contains' needs a column of text on its left")
        text = self._text(part).casefold()
        return _of_labels(column, lambda label: text in label.casefold())

    def _is_true(self, operand: syntax.Operand) -> Array:
        column = self._column(operand)
        if column.kind != "truth":
            name = operand.name if isinstance(operand, syntax.Word) else ""
            raise DataError(f"'{name}' is no truth value; compare it, as in {name} > 0")
        return column.values & ~column.is_missing

    def _is_column(self, operand: syntax.Operand) -> TypeGuard[syntax.Word]:
        return isinstance(operand, syntax.Word) and (operand.is_column or operand.name in self._columns)

    def _column(self, operand: syntax.Operand) -> Column:
        if not isinstance(operand, syntax.Word):
            raise DataError("expected a column, got a value")
        return self._columns[operand.name]

    def _number(self, name: str, column: Column, operand: syntax.Operand) -> int | float | bool:
        match operand:
            case syntax.Number(value) | syntax.Truth(value):
                return float(value) if column.values.dtype.kind == "f" else value
            case syntax.Text(text) | syntax.Word(text) if name == _TIME:
                return _seconds(text)
            case syntax.Word(text) if text.lower() in ("inf", "+inf", "-inf"):
                return float(text)
            case syntax.Word(text):
                raise self._columns.unknown(text)
        kind = "numbers" if column.kind == "number" else "truth values"
        raise DataError(f"'{name}' holds {kind}, so it can't be compared with text")

    def _text_of(self, column: Column, name: str, operand: syntax.Operand) -> str:
        text = self._text(operand)
        if column.choices is not None and text not in column.choices:
            raise DataError(f"'{name}' is one of {', '.join(column.choices)}, never {text!r:.80}")
        return text

    def _text(self, operand: syntax.Operand) -> str:
        match operand:
            case syntax.Text(text) | syntax.Word(text):
                return text
            case syntax.Number(value):
                return str(value)
        return "true" if operand.value else "false"


def _of_labels(column: Column, test: Callable[[str], bool]) -> Array:
    """Apply a test to each different text, and look the result up for every episode."""
    assert column.labels is not None
    passed = np.fromiter((test(label) for label in column.labels), bool, len(column.labels))
    found: Array = passed[column.values] & ~column.is_missing if len(passed) else ~column.is_missing
    return found


def _as_dtype(numbers: Iterable[int | float], dtype: np.dtype[Any]) -> Array:
    """Those of some numbers that a column of this dtype can hold."""
    if dtype.kind == "f":
        greatest = float(np.finfo(dtype).max)
        return np.array([x for x in numbers if abs(x) <= greatest or abs(x) == math.inf], dtype)
    limits = np.iinfo(dtype)
    return np.array([int(x) for x in numbers if limits.min <= x <= limits.max and x == int(x)], dtype)


def _compare_columns(sign: str, left: Column, right: Column) -> Array:
    if (left.labels is None) != (right.labels is None):
        raise DataError("a column of text can't be compared with one of numbers")
    values = [c.values if c.labels is None else c.labels[c.values] for c in (left, right)]
    found: Array = np.asarray(_OPERATORS[sign](*values), bool) & ~left.is_missing & ~right.is_missing
    return found


def _seconds(text: str) -> float:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise DataError(
            f"'{_TIME}': expected seconds or a date such as 2026-01-31T12:00, got {text!r:.80}"
        ) from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
