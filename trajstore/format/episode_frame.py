"""The episode table as a pandas DataFrame."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from trajstore.errors import MissingExtraError
from trajstore.schema import Array

if TYPE_CHECKING:
    import pandas as pd

_NULLABLE = {"bool": "boolean", "int64": "Int64", "float64": "Float64"}
_KINDS: dict[frozenset[type], str] = {
    frozenset({bool}): "boolean",
    frozenset({int}): "Int64",
    frozenset({float}): "Float64",
    frozenset({int, float}): "Float64",
    frozenset({str}): "object",
}


def to_frame(
    columns: Mapping[str, Array], declared: Mapping[str, str], free: Sequence[Mapping[str, Any]]
) -> pd.DataFrame:
    """A DataFrame of the columns, followed by one column for each key of free metadata.

    Args:
        columns: By name; masked where an episode has no value.
        declared: Kinds of the columns that the schema declares.
        free: The free metadata of each episode.

    Raises:
        MissingExtraError: pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise MissingExtraError("to_pandas needs pandas: pip install 'trajstore[pandas]'") from error
    data: dict[str, Any] = {}
    for name, column in columns.items():
        if name in ("stream", "end"):
            data[name] = pd.Categorical(column)
        elif name == "time":
            data[name] = pd.to_datetime(column, unit="s", utc=True)
        elif isinstance(column, np.ma.MaskedArray):
            series = pd.Series(column.data, dtype=_NULLABLE[declared[name]])
            data[name] = series.mask(np.ma.getmaskarray(column))
        else:
            data[name] = column
    for key in dict.fromkeys(key for metadata in free for key in metadata):
        name = key if key not in data else f"metadata.{key}"
        data[name] = _free_column([metadata.get(key) for metadata in free])
    return pd.DataFrame(data)


def _free_column(values: Sequence[Any]) -> pd.Series[Any]:
    """Values of one kind with that kind's dtype; lists, objects and mixed kinds as JSON text."""
    import pandas as pd

    kind = _KINDS.get(frozenset(type(value) for value in values if value is not None))
    if kind == "Int64" and not _fits_int64(values):
        kind = None
    if kind is None:
        texts = [None if value is None else json.dumps(value, ensure_ascii=False) for value in values]
        return pd.Series(texts, dtype="object")
    return pd.Series(list(values), dtype=kind)


def _fits_int64(values: Iterable[Any]) -> bool:
    return all(value is None or -(1 << 63) <= value < 1 << 63 for value in values)
