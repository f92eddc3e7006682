"""Stores that nobody else knows of: they live in RAM, and go with their owner."""

from __future__ import annotations

import uuid

from trajstore.storage import open_storage


def private_url(owner: str) -> str:
    """A new place in RAM."""
    return f"memory://{owner}-{uuid.uuid4().hex}"


def forget(url: str) -> None:
    """Free the memory of a private store, or of several below one URL."""
    storage = open_storage(url)
    storage.delete(storage.list_tree(""))
