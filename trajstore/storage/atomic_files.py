"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Put a text file under its name once all of it is on disk."""
    replace_whole(path, lambda temporary: temporary.write_text(text))


def replace_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Put a file under its name once all of it, and the name, are on disk."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        write(temporary)
        sync_file(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_file(path.parent)


def sync_file(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
