"""Stores in RAM that belong to one buffer and are freed with it."""

from __future__ import annotations

import uuid

from trajstore.storage import open_storage


def private_url(owner: str) -> str:
    """Return an unused ``memory://`` URL; ``owner`` is part of it, for debugging."""
    return f"memory://{owner}-{uuid.uuid4().hex}"


def free_private_store(url: str) -> None:
    """Free the memory of a private store, or of all private stores below a URL."""
    storage = open_storage(url)
    storage.delete(storage.list_tree(""))
