"""The steps of a snapshot as a lazy xarray Dataset."""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from trajstore.errors import MissingExtraError
from trajstore.schema import Array, Schema, selected_paths, widen_bfloat16
from trajstore.store.snapshot import Snapshot
from trajstore.store.visible_rows import VisibleRows

if TYPE_CHECKING:
    import xarray

_COORDINATES = {"stream": "int32", "episode": "int64", "t": "int64", "episode_row": "int64"}
_TAKEN = {"step", "is_final", *_COORDINATES}
_COORDINATE_ROWS = 1 << 20  # in a dask chunk of a coordinate


def to_xarray(snapshot: Snapshot, fields: Iterable[str] | None, *, final: bool, chunk_bytes: int) -> xarray.Dataset:
    """The steps of all episodes, one after the other in the order in which they are stored; see `Store.to_xarray`.

    Raises:
        KeyError: A name is neither a field nor a group.
        MissingExtraError: xarray or dask is not installed.
    """
    dask_array, library = _import("dask.array"), _import("xarray")
    rows = VisibleRows(snapshot, final=final)
    schema = snapshot.schema
    variables = {
        _variable_name(path): _variable(dask_array, rows, schema, path, chunk_bytes)
        for path in (selected_paths(schema, fields) if schema is not None else ())
    }
    dtypes = _COORDINATES | ({"is_final": "bool"} if final else {})
    coordinates = {name: _coordinate(dask_array, rows, name, dtype) for name, dtype in dtypes.items()}
    attributes = {"url": snapshot.storage.display}
    dataset: xarray.Dataset = library.Dataset(variables, coordinates, attributes)
    dataset["stream"].attrs["ids"] = snapshot.names
    return dataset


class _Rows:
    """An array whose rows are read when they are asked for; what dask needs of an array. Can be pickled."""

    def __init__(self, rows: VisibleRows, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        self.dtype, self.shape = np.dtype(dtype), (len(rows), *shape)
        self.ndim = len(self.shape)
        self._rows, self._name = rows, name

    def __getitem__(self, key: Any) -> Array:
        first, *rest = key if isinstance(key, tuple) else (key,)
        start, stop, step = first.indices(self.shape[0])
        values = self._read(start, max(start, stop))
        part: Array = values[(slice(None, None, step), *rest)]
        return part

    def _read(self, start: int, stop: int) -> Array:
        return self._rows.coordinate(self._name, start, stop).astype(self.dtype, copy=False)


class _FieldRows(_Rows):
    """The values of a field; bfloat16 as float32, which holds it exactly."""

    def _read(self, start: int, stop: int) -> Array:
        values = self._rows.read(f"steps/{self._name}", start, stop)
        return widen_bfloat16(values) if values.dtype != self.dtype else values


def _variable(dask_array: Any, rows: VisibleRows, schema: Schema | None, path: str, chunk_bytes: int) -> Any:
    assert schema is not None  # it has a field
    spec = schema[path]
    dtype = "float32" if spec.dtype == "bfloat16" else spec.dtype
    axes = [f"{path.replace('/', '.')}:{i}" for i in range(len(spec.shape))]
    edges = rows.chunk_edges(f"steps/{path}", chunk_bytes)
    return ("step", *axes), _lazy(dask_array, _FieldRows(rows, path, dtype, spec.shape), edges)


def _coordinate(dask_array: Any, rows: VisibleRows, name: str, dtype: str) -> Any:
    edges = np.append(np.arange(0, len(rows), _COORDINATE_ROWS), len(rows))
    return ("step",), _lazy(dask_array, _Rows(rows, name, dtype, ()), edges)


def _lazy(dask_array: Any, rows: _Rows, edges: Array) -> Any:
    chunks = tuple(np.diff(edges).tolist()) or (0,)
    meta = np.empty((0,) * rows.ndim, rows.dtype)
    name = f"trajstore-{uuid.uuid4().hex}"
    return dask_array.from_array(rows, (chunks, *rows.shape[1:]), name=name, asarray=True, fancy=False, meta=meta)


def _variable_name(path: str) -> str:
    return f"steps.{path}" if path in _TAKEN else path.replace("/", ".")


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError("to_xarray needs xarray and dask: pip install 'trajstore[xarray]'") from error
