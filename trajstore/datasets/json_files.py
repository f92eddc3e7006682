"""Read JSON files of datasets, which are not trusted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trajstore.errors import FormatError, StoreNotFoundError

_MAX_BYTES = 64 << 20


def load_json_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file.

    Raises:
        StoreNotFoundError: The file does not exist.
        FormatError: The file is larger than 64 MiB, or does not hold a JSON object.
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
