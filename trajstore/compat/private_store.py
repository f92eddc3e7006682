"""Stores in RAM that belong to one buffer and are freed with it."""

from __future__ import annotations

import uuid

from trajstore.replay.buffer import ReplayBuffer
from trajstore.storage import open_storage


def private_url(owner: str) -> str:
    """Return an unused ``memory://`` URL; ``owner`` is part of it, for debugging."""
    return f"memory://{owner}-{uuid.uuid4().hex}"


def free_with_buffer(buffer: ReplayBuffer, url: str) -> None:
    """Have a private store freed when its buffer is dropped, without a warning: nothing can be lost."""
    if (registration := buffer.session.registration) is not None:
        registration.make_private(lambda: free_private_store(url))


def free_private_store(url: str) -> None:
    """Free the memory of a private store, or of all private stores below a URL."""
    storage = open_storage(url)
    storage.delete(storage.list_tree(""))
