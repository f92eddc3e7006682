"""Which rows checkpoints keep from being deleted."""

from __future__ import annotations

from trajstore.format.checkpoint_record import Checkpoint
from trajstore.format.marks import Marks
from trajstore.storage import Storage
from trajstore.store.checkpoints.objects import PENDING_S, is_pending, read_checkpoints, read_parts


def pins(storage: Storage, *, pending_s: float = PENDING_S) -> Marks:
    """By stream id, the smallest row that any checkpoint needs; includes every stream that a checkpoint lists.

    Args:
        storage: Storage of the store.
        pending_s: Count incomplete checkpoints begun less than this many seconds ago.
    """
    pinned = Marks()
    for checkpoint in read_checkpoints(storage):
        if checkpoint.is_complete or is_pending(checkpoint, pending_s):
            for pinning in (checkpoint, *_unpublished_parts(storage, checkpoint)):
                pinned = pinned.merged(Marks.pinned_by(pinning))
    return pinned


def _unpublished_parts(storage: Storage, checkpoint: Checkpoint) -> list[Checkpoint]:
    """Parts of a checkpoint that ranks are saving: until it is published, each part pins its own rows."""
    return [] if checkpoint.is_complete or checkpoint.n_ranks is None else read_parts(storage, checkpoint.id)
