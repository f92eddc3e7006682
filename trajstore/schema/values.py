"""Values of fields as numpy arrays: checked against a field, or used to infer a schema."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from trajstore.errors import DataError
from trajstore.schema.definition import DTYPES, Array, Field, Schema
from trajstore.schema.nesting import nest


def as_array(path: str, value: Any) -> tuple[Array, str]:
    """An array, tensor or Python number as a numpy array, and the name of its dtype.

    A view where possible. bfloat16 values come as their uint16 bits.

    Raises:
        DataError: The value has no dtype that can be stored.
    """
    if type(value) is np.ndarray:
        array = value
    elif hasattr(value, "detach"):
        return _from_torch(path, value)
    else:
        array = _from_other(path, value)
    name = array.dtype.name
    if name not in DTYPES:
        raise _not_storable(path, name, value)
    return (array.view(np.uint16), name) if name == "bfloat16" else (array, name)


def _not_storable(path: str, dtype: str, value: Any) -> DataError:
    message = (
        f"field '{path}': dtype {dtype} can't be stored (from {type(value).__name__}); expected numbers or bools"
    )
    if dtype.startswith(("str", "bytes")):
        message += "; text is stored by episode: pass it as metadata= where the episode ends"
    return DataError(message)


def _from_other(path: str, value: Any) -> Array:
    if isinstance(value, np.ma.MaskedArray):
        raise DataError(f"field '{path}': a masked array would lose its mask; fill it first")
    try:
        return np.asarray(value)
    except ValueError as error:
        raise DataError(f"field '{path}': can't convert {type(value).__name__} to an array: {error}") from error


def _from_torch(path: str, tensor: Any) -> tuple[Array, str]:
    tensor = tensor.detach().cpu()
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise _not_storable(path, name, tensor)
    if name == "bfloat16":
        # The value is a tensor, so torch is loaded; an import would make users without torch wait or fail.
        signed: Array = tensor.contiguous().view(sys.modules["torch"].int16).numpy()
        return signed.view(np.uint16), name
    try:
        return tensor.numpy(), name
    except (TypeError, RuntimeError) as error:
        raise DataError(f"field '{path}': can't convert this tensor to an array: {error}") from error


def _from_scalar(path: str, spec: Field, value: bool | int | float) -> Array:
    """A Python number in the field's dtype.

    Raises:
        DataError: The dtype does not hold an int exactly, or a float is out of range.
    """
    kind = "f" if spec.dtype == "bfloat16" else spec.storage_dtype.kind
    kinds = "b" if isinstance(value, bool) else "iuf" if isinstance(value, int) else "f"
    if kind not in kinds or spec.shape:
        raise _mismatch(path, spec, (), type(value).__name__, ())
    try:
        return _cast_scalar(spec, value)
    except (OverflowError, ValueError) as error:
        raise DataError(f"field '{path}': {value!r} is out of range for {spec.dtype}") from error


def _cast_scalar(spec: Field, value: bool | int | float) -> Array:
    with np.errstate(over="ignore"):
        array = np.asarray(value).astype(np.float32) if spec.dtype == "bfloat16" else np.asarray(value)
        if spec.dtype == "bfloat16":
            cast = round_to_bfloat16(array)
            is_finite = bool(np.isfinite(widen_bfloat16(cast)))
        elif spec.storage_dtype.kind == "f":
            cast = array.astype(spec.storage_dtype)
            is_finite = bool(np.isfinite(cast))
        else:
            return np.asarray(value, spec.storage_dtype)
    if math.isfinite(value) and not is_finite:
        raise OverflowError
    if isinstance(value, int) and int(widen_bfloat16(cast) if spec.dtype == "bfloat16" else cast) != value:
        raise OverflowError
    return cast


def stored_fill(spec: Field) -> Array:
    """The fill value of a field that declares one, in the dtype that is stored."""
    assert spec.fill is not None
    return _cast_scalar(spec, spec.fill)


def round_to_bfloat16(values: Array) -> Array:
    """Bits of the bfloat16 values nearest to float32 values (ties to even); NaN stays NaN."""
    flat = np.ascontiguousarray(values, np.float32).reshape(-1)
    bits = flat.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(flat), (bits >> 16) | 0x40, rounded).astype(np.uint16).reshape(np.shape(values))


def widen_bfloat16(bits: Array) -> Array:
    """Exact float32 values of bfloat16 bit patterns."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _mismatch(path: str, spec: Field, lead: tuple[Any, ...], dtype: str, shape: tuple[int, ...]) -> DataError:
    expected = f"({', '.join(str(n) for n in (*lead, *spec.shape))})"
    return DataError(
        f"field '{path}': expected {spec.dtype} of shape {expected}, "
        f"got {dtype} of shape ({', '.join(map(str, shape))})"
    )


def check_value(path: str, spec: Field, value: Any, lead: tuple[int, ...]) -> Array:
    """The value as an array of shape ``lead + spec.shape`` in the field's storage dtype; a view where possible.

    Args:
        path: The field's path, for the message.
        spec: The field.
        value: An array or tensor, or a Python number if ``lead`` is empty.
        lead: Expected leading lengths.

    Raises:
        DataError: The value has another dtype or shape.
    """
    if type(value) is np.ndarray and value.dtype == spec.storage_dtype and value.shape == lead + spec.shape:
        if spec.dtype != "bfloat16":  # the common case, without comparing names
            return value
    elif not lead and isinstance(value, (bool, int, float)):
        return _from_scalar(path, spec, value)
    array, name = as_array(path, value)
    if name != spec.dtype or array.shape != lead + spec.shape or not array.dtype.isnative:
        got = name if array.dtype.isnative else f"byte-swapped {name}"
        raise _mismatch(path, spec, lead, got, array.shape)
    return array


def infer_schema(flat: Mapping[str, Any], n_lead: int) -> Schema:
    """The schema of example data whose values have ``n_lead`` leading axes.

    Python numbers become bool, int64 or float64; as a reward, an int becomes float64, because the next one may be a
    float.

    Raises:
        DataError: There are no fields, or a value can't be stored.
    """
    if not flat:
        raise DataError("expected at least one field, got none")
    fields: dict[str, Field] = {}
    for path, value in flat.items():
        array, name = as_array(path, value)
        if array.ndim < n_lead:
            raise DataError(f"field '{path}': expected at least {n_lead} leading axes, got shape {array.shape}")
        is_int_reward = path == "reward" and type(value) is int
        fields[path] = Field("float64" if is_int_reward else name, array.shape[n_lead:])
    return Schema(nest(fields))
