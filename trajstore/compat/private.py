"""Stores that nobody else knows of: they live in RAM, and go with their owner."""

from __future__ import annotations

import uuid

import fsspec

_SCHEME = "memory://"


def private_url(owner: str) -> str:
    """A new place in RAM."""
    return f"{_SCHEME}{owner}-{uuid.uuid4().hex}"


def forget(url: str) -> None:
    """Free the memory of a private store."""
    memory, path = fsspec.filesystem("memory"), url.removeprefix(_SCHEME)
    if memory.exists(path):
        memory.rm(path, recursive=True)
