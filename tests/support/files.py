"""Looks at files of a store that threads write and remove at the same time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path


def bytes_of(files: Iterable[Path]) -> int:
    """Size of all files; one that is removed before it is looked at has none."""
    n_bytes = 0
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            n_bytes += file.stat().st_size
    return n_bytes
