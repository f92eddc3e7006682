"""JSON files of others, read with care."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trajstore.errors import FormatError, StoreNotFoundError

_MAX_BYTES = 64 << 20


def load_object(path: Path) -> dict[str, Any]:
    """The object in a file.

    Raises:
        StoreNotFoundError: There is no such file.
        FormatError: It holds something else.
    """
    if not path.is_file():
        raise StoreNotFoundError(f"{path} is missing")
    if path.stat().st_size > _MAX_BYTES:
        raise FormatError(f"{path}: expected at most {_MAX_BYTES} bytes, got {path.stat().st_size}")
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise FormatError(f"{path}: expected an object, got {type(found).__name__}")
    return found
