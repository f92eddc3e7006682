"""The episode table as an Arrow table, and as a Parquet file."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trajstore.errors import MissingExtraError
from trajstore.schema import Array

_TYPES = {"bool": "bool_", "int64": "int64", "float64": "float64"}
_MAX_SECONDS = 1e12  # what microseconds in 64 bits can hold, and more than any clock shows


def to_arrow(
    columns: Mapping[str, Array], labels: Mapping[str, tuple[Array, Array]], declared: Mapping[str, str]
) -> Any:
    """An Arrow table of the columns.

    Args:
        columns: By name; masked where an episode has no value. ``metadata`` holds dicts.
        labels: Columns that are given as positions in an array of labels.
        declared: Kinds of the columns that the schema declares.

    Raises:
        MissingExtraError: pyarrow is not installed.
    """
    pa = _import_pyarrow("pyarrow", "to_arrow")
    arrays: dict[str, Any] = {}
    for name, column in columns.items():
        if name in labels:
            codes, texts = labels[name]
            arrays[name] = pa.DictionaryArray.from_arrays(
                pa.array(codes, pa.int32()), pa.array([_text(label) for label in texts], pa.string())
            )
        elif name == "time":
            arrays[name] = _timestamps(pa, column)
        elif name == "metadata":
            arrays[name] = pa.array([_json(metadata) for metadata in column], pa.string())
        elif declared.get(name) == "str":
            arrays[name] = pa.array([_text(value) for value in column], pa.string())
        else:
            kind = getattr(pa, _TYPES[declared[name]])() if name in declared else None
            mask = np.ma.getmaskarray(column) if isinstance(column, np.ma.MaskedArray) else None
            arrays[name] = pa.array(np.ma.getdata(column), kind, mask=mask)
    return pa.table(arrays)


def write_parquet(table: Any, path: str | os.PathLike[str]) -> None:
    """Write an Arrow table to a Parquet file, which appears when it is complete.

    Raises:
        MissingExtraError: pyarrow is not installed.
    """
    pq, target = _import_pyarrow("pyarrow.parquet", "to_parquet"), Path(path)
    partial = target.with_name(f".{target.name}-{uuid.uuid4().hex}")
    try:
        pq.write_table(table, str(partial), compression="zstd")
        partial.replace(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _timestamps(pa: Any, seconds: Array) -> Any:
    is_time = np.abs(seconds) < _MAX_SECONDS  # false for NaN
    micros = np.where(is_time, np.rint(np.where(is_time, seconds, 0.0) * 1e6), 0).astype(np.int64)
    return pa.array(micros, pa.timestamp("us", tz="UTC"), mask=~is_time)


def _json(metadata: Mapping[str, Any]) -> str | None:
    return _text(json.dumps(metadata, ensure_ascii=False)) if metadata else None


def _text(value: Any) -> str | None:
    """Text that UTF-8 can hold: half a surrogate pair, which only damaged stores have, becomes ``?``."""
    return None if value is None else str(value).encode("utf-8", "replace").decode()


def _import_pyarrow(module: str, what: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(f"{what} needs pyarrow: pip install 'trajstore[parquet]'") from error
