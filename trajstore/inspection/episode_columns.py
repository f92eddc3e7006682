"""The columns of an episode table in a form that is quick to compare and to sort."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from trajstore.errors import DataError
from trajstore.format.episode_table import EpisodeTable
from trajstore.format.spans import END_LABELS
from trajstore.schema import Array

Kind = Literal["number", "truth", "text"]
FREE_PREFIX = "metadata."  # before a key of free metadata
ROW = "row"  # the position of an episode in its table
_N_ASKED = 1000  # episodes whose metadata are searched for a name that is no column
_KEPT_FREE = 16  # columns of free metadata; others are computed again when they are asked for


@dataclass(frozen=True, slots=True)
class Column:
    """One value an episode.

    Attributes:
        kind: Numbers, truth values or text.
        values: The numbers or truth values; of text, positions in ``labels``.
        is_missing: Where an episode has no value: absent, or NaN.
        labels: The different texts, sorted; None if this is no text.
        choices: The only texts that the column may hold; None: any.
    """

    kind: Kind
    values: Array
    is_missing: Array
    labels: Array | None = None
    choices: tuple[str, ...] | None = None

    def sort_keys(self) -> tuple[Array, Array]:
        """Two keys that sort the column upwards; the first one puts missing values last."""
        values = self.values
        if values.dtype.kind == "f" and self.is_missing.any():
            values = np.where(self.is_missing, 0, values)  # NaN would sort by itself
        return self.is_missing, values


class EpisodeColumns:
    """The columns of an episode table, each computed when it is first asked for, and kept.

    Of free metadata, whose keys have no limit, the last few that were asked for are kept.

    Besides the table's own columns and summaries, there are ``row``, the position in the table, and
    ``metadata.KEY``, a key of the episodes' free metadata.
    """

    def __init__(self, table: EpisodeTable) -> None:
        self.table = table
        self._columns: dict[str, Column] = {}
        self._metadata: Array | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """All columns that can be compared and sorted, except keys of free metadata."""
        own = (name for name in self.table.columns if name != "metadata")
        return tuple(dict.fromkeys((ROW, *own, *self.table.summaries)))

    def __contains__(self, name: str) -> bool:
        return name in self.names or (name.startswith(FREE_PREFIX) and len(name) > len(FREE_PREFIX))

    def __getitem__(self, name: str) -> Column:
        if name not in self._columns and name not in self:
            raise self.unknown(name)
        column = self._columns.pop(name, None) or self._column(name)
        self._columns[name] = column  # the last one that was asked for
        free = [kept for kept in self._columns if kept not in self.names]
        for kept in free[:-_KEPT_FREE]:
            del self._columns[kept]
        return column

    def unknown(self, name: str) -> DataError:
        """The error for a name that is no column."""
        near = difflib.get_close_matches(name, self.names, 1)
        if not near and any(name in metadata for metadata in self._free()[:_N_ASKED]):
            near = [FREE_PREFIX + name]
        guess = f"did you mean '{near[0]}'? The" if near else "the"
        known = ", ".join(self.names)
        return DataError(f"no episode column '{name:.80}'; {guess} columns are {known}, {FREE_PREFIX}KEY")

    def _column(self, name: str) -> Column:
        table = self.table
        if name == ROW and ROW not in table.columns:
            return _plain(np.arange(len(table)))
        if name in ("stream", "end"):
            codes, labels = table.codes(name)
            choices = tuple(END_LABELS) if name == "end" else None
            return _from_codes(codes, labels, choices)
        if name in table.columns or name in table.summaries:
            values = table[name]
            return _from_objects(values) if values.dtype == object else _plain(values)
        return _from_objects([metadata.get(name.removeprefix(FREE_PREFIX)) for metadata in self._free()])

    def _free(self) -> Array:
        if self._metadata is None:
            self._metadata = self.table["metadata"]
        return self._metadata


def _plain(values: Array) -> Column:
    is_missing = (
        np.ma.getmaskarray(values) if isinstance(values, np.ma.MaskedArray) else np.zeros(len(values), bool)
    )
    data: Array = np.ma.getdata(values)
    if data.dtype.kind == "f":
        is_missing = is_missing | np.isnan(data)
    return Column("truth" if data.dtype == bool else "number", data, is_missing)


def _from_codes(codes: Array, labels: Array, choices: tuple[str, ...] | None) -> Column:
    """A column of text from positions in labels that are not sorted, and may repeat."""
    ordered, rank = np.unique(labels.astype(str), return_inverse=True)
    return Column("text", rank.reshape(-1)[codes], np.zeros(len(codes), bool), ordered.astype(object), choices)


def _from_objects(values: Iterable[Any]) -> Column:
    """A column of numbers or truth values if all values are, else of text; other values become JSON."""
    held = list(values)
    kinds = {type(value) for value in held} - {type(None)}
    is_missing = np.fromiter((value is None for value in held), bool, len(held))
    if kinds == {bool}:
        return Column("truth", np.array([bool(value) for value in held]), is_missing)
    if kinds and kinds <= {int, float}:
        return _plain(_numbers(held))
    texts = [value if isinstance(value, str) else "" if value is None else json.dumps(value) for value in held]
    labels = sorted(set(texts))
    place = {label: i for i, label in enumerate(labels)}
    codes = np.fromiter(map(place.__getitem__, texts), np.int64, len(texts))
    named = np.empty(len(labels), object)
    named[:] = labels
    return Column("text", codes, is_missing, named)


def _numbers(values: Sequence[Any]) -> Array:
    """Floats, with NaN for None and infinity for integers that are too large for a float."""
    out = np.empty(len(values), np.float64)
    for i, value in enumerate(values):
        try:
            out[i] = np.nan if value is None else value
        except OverflowError:
            out[i] = np.inf if value > 0 else -np.inf
    return out
