"""Values that are no steps, as JSON can hold them: exactly, or not at all."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from trajstore.errors import DataError

_EXACT = ("bool", "int64", "float64")  # numbers that JSON gives back as they were


def plain(what: str, value: Any) -> Any:
    """Text, numbers, and lists of text as they are; other arrays as their bytes, for `restored`."""
    if isinstance(value, (str, bytes)):
        return _text(what, value)
    if not isinstance(value, (np.ndarray, np.generic)):
        raise DataError(f"{what}: expected text or numbers, got {value!r:.60}; leave it out with skip")
    if value.dtype.kind in "OSU" and value.ndim <= 1:
        return [_text(what, item) for item in value.tolist()] if value.ndim else _text(what, value.item())
    if value.dtype.kind not in "biuf":
        raise DataError(f"{what}: expected text or numbers, got {value.dtype}; leave it out with skip")
    if value.dtype.name in _EXACT and not value.shape and np.isfinite(value):
        return value.item()
    data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
    return {"dtype": value.dtype.str, "shape": list(value.shape), "base64": data}


def restored(value: Any) -> Any:
    """What `plain` was given."""
    if not isinstance(value, Mapping) or set(value) != {"dtype", "shape", "base64"}:
        return value
    try:
        data = np.frombuffer(base64.b64decode(value["base64"]), np.dtype(str(value["dtype"])))
        return data.reshape(value["shape"])
    except (TypeError, ValueError) as error:
        raise DataError(f"metadata: expected the bytes of an array, got {value!r:.100}") from error


def mapping(value: Any) -> dict[str, Any]:
    """Metadata that are a mapping, of which others may have made something else."""
    return dict(value) if isinstance(value, Mapping) else {}


def _text(what: str, value: Any) -> str:
    try:
        return (value if isinstance(value, bytes) else value.encode()).decode()
    except (AttributeError, UnicodeError) as error:
        raise DataError(f"{what}: expected text in UTF-8, got {value!r:.60}; leave it out with skip") from error
