"""Which checkpoint follows which: parents of new checkpoints, and pruning of old ones."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from trajstore.errors import CheckpointNotFoundError
from trajstore.storage import Storage
from trajstore.store import checkpoints


@dataclass(slots=True)
class CheckpointLineage:
    """The newest checkpoint of a session, which is the parent of the next one.

    Attributes:
        newest: Id of the checkpoint that was saved last, or that the session continued.
        lock: Guards the other two.
        doubtful: Id of a checkpoint whose saving failed; it may have been published all the same.
    """

    newest: str | None
    lock: threading.Lock = field(default_factory=threading.Lock)
    doubtful: str | None = None

    def next_parent(self, storage: Storage, checkpoint_id: str) -> str | None:
        """The parent of a checkpoint that is about to be saved; called with the lock held."""
        if self.doubtful is not None and self.doubtful != checkpoint_id and is_published(storage, self.doubtful):
            self.newest = self.doubtful
        self.doubtful = checkpoint_id
        return self.newest

    def add(self, checkpoint_id: str) -> None:
        """Note that a checkpoint was published; called with the lock held."""
        self.newest, self.doubtful = checkpoint_id, None


def is_published(storage: Storage, checkpoint_id: str) -> bool:
    """Whether the store has this checkpoint, complete."""
    try:
        return checkpoints.find(storage, checkpoint_id).id == checkpoint_id
    except CheckpointNotFoundError:
        return False


def prune(storage: Storage, newest: str | None, keep: int) -> list[str]:
    """Remove the oldest ancestors of a checkpoint so that ``keep`` remain with it; returns the removed ids.

    If ``newest`` is None, all checkpoints of the store count.
    """
    found = checkpoints.list_checkpoints(storage) if newest is None else checkpoints.lineage(storage, newest)
    chain = [checkpoint.id for checkpoint in found]
    removed = chain[: max(0, len(chain) - keep)]
    for old in removed:  # oldest first: a crash in between leaves a chain without gaps
        checkpoints.remove(storage, old)
    return removed
