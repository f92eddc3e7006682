"""Bytes at a URL: the only package that knows fsspec and the file system.

Keys are relative paths with ``/``. A put is atomic (readers see the old bytes or the new, never a mix)
and durable when it returns. Storages are safe to share between threads, to fork and to pickle.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec.core

from trajstore.storage.interface import ABSENT, ANY, OWN, UNSEEN, Put, Storage
from trajstore.storage.local import LocalStorage
from trajstore.storage.remote import FsspecStorage

# Where one put is one request that replaces an object whole.
_ATOMIC = frozenset({"memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"})

__all__ = ["ABSENT", "ANY", "OWN", "UNSEEN", "FsspecStorage", "LocalStorage", "Put", "Storage", "open_storage"]


def open_storage(
    url: str | os.PathLike[str], options: Mapping[str, Any] | None = None, *, fsync: bool = True
) -> Storage:
    """The storage at a URL; touches nothing yet.

    Args:
        url: A path, or an fsspec URL of memory, S3, GCS or Azure.
        options: What fsspec's filesystem for that URL takes (credentials, endpoints).
        fsync: Whether local puts survive a power cut; without it they survive only a crash of the process.
    """
    text = os.fspath(url)
    protocol, path = fsspec.core.split_protocol(text)
    if protocol in (None, "file", "local"):
        if options:
            raise TypeError(f"{text}: a local directory takes no storage options, got {sorted(options)}")
        return LocalStorage(Path(path).expanduser().absolute(), fsync=fsync)
    if protocol not in _ATOMIC:
        raise ValueError(
            f"{protocol}://: a put there is not known to be atomic, so commits would not be safe; use a directory"
            f" or one of {', '.join(sorted(_ATOMIC))}"
        )
    return FsspecStorage(text, dict(options or {}))
