"""Convert metadata values to JSON and back without loss."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from trajstore.errors import DataError

_EXACT_DTYPES = ("bool", "int64", "float64")  # JSON returns these numbers unchanged


def to_json_value(what: str, value: Any) -> Any:
    """Convert text, numbers and arrays to a JSON value that `from_json_value` converts back.

    Text, lists of text and exact numbers stay as they are; other numbers and arrays become their bytes in base64.

    Args:
        what: Names the value, for messages.
        value: Text, bytes in UTF-8, a NumPy number or a NumPy array.

    Raises:
        DataError: JSON cannot hold it.
    """
    if isinstance(value, (str, bytes)):
        return _to_text(what, value)
    if not isinstance(value, (np.ndarray, np.generic)):
        raise DataError(f"{what}: expected text or numbers, got {value!r:.60}; leave it out with skip")
    if value.dtype.kind in "OSU" and value.ndim <= 1:
        return [_to_text(what, item) for item in value.tolist()] if value.ndim else _to_text(what, value.item())
    if value.dtype.kind not in "biuf":
        raise DataError(f"{what}: expected text or numbers, got {value.dtype}; leave it out with skip")
    if value.dtype.name in _EXACT_DTYPES and not value.shape and np.isfinite(value):
        return value.item()
    data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
    return {"dtype": value.dtype.str, "shape": list(value.shape), "base64": data}


def from_json_value(value: Any) -> Any:
    """Return the value that `to_json_value` converted; other JSON values are returned unchanged.

    Raises:
        DataError: It looks like an array, but its bytes do not fit its dtype and shape.
    """
    if not isinstance(value, Mapping) or set(value) != {"dtype", "shape", "base64"}:
        return value
    try:
        data = np.frombuffer(base64.b64decode(value["base64"]), np.dtype(str(value["dtype"])))
        return data.reshape(value["shape"])
    except (TypeError, ValueError) as error:
        raise DataError(f"metadata: expected the bytes of an array, got {value!r:.100}") from error


def as_mapping(value: Any) -> dict[str, Any]:
    """Return a copy of a mapping, and an empty dict for anything else.

    Users may have stored another value under a name at which an import stores a mapping.
    """
    return dict(value) if isinstance(value, Mapping) else {}


def _to_text(what: str, value: Any) -> str:
    try:
        return (value if isinstance(value, bytes) else value.encode()).decode()
    except (AttributeError, UnicodeError) as error:
        raise DataError(f"{what}: expected text in UTF-8, got {value!r:.60}; leave it out with skip") from error
