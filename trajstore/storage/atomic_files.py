"""Writing files so that a reader, also after a crash, sees a whole file or none."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Write a text file and give it its name once all of it is on disk."""
    replace_whole(path, lambda temporary: temporary.write_text(text))


def replace_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file and give it its name once all of it is on disk; the name is on disk when this returns.

    Args:
        path: The file; an existing one is replaced.
        write: Writes the file at the path it is called with.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        write(temporary)
        sync_file(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_file(path.parent)


def sync_file(path: str | Path, flags: int = 0) -> None:
    """Wait until a file, or the names in a directory, are on disk.

    Args:
        path: The file or directory.
        flags: Further flags to open it with.
    """
    descriptor = os.open(path, os.O_RDONLY | flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
