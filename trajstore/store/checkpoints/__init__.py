"""Checkpoints: named extents of several streams, with the state of the session that took them.

A checkpoint holds no step data. Saving one takes three steps. First its record is put, marked incomplete: it pins
the rows that it lists against eviction, and readers ignore it. Then the arrays of its state are put. Last, the
record is replaced by the complete one.
"""

from trajstore.format.checkpoint_record import Checkpoint
from trajstore.format.commit_record import StreamExtent
from trajstore.store.checkpoints.finding import find, lineage, list_checkpoints
from trajstore.store.checkpoints.objects import (
    LATEST,
    PENDING_S,
    new_checkpoint,
    new_checkpoint_id,
    parts_of,
    place_of,
)
from trajstore.store.checkpoints.pinned_rows import pins
from trajstore.store.checkpoints.reading import read_state, stored_objects
from trajstore.store.checkpoints.removal import remove, remove_incomplete, withdraw
from trajstore.store.checkpoints.saving import publish, save, save_part

__all__ = [
    "LATEST",
    "PENDING_S",
    "Checkpoint",
    "StreamExtent",
    "find",
    "lineage",
    "list_checkpoints",
    "new_checkpoint",
    "new_checkpoint_id",
    "parts_of",
    "pins",
    "place_of",
    "publish",
    "read_state",
    "remove",
    "remove_incomplete",
    "save",
    "save_part",
    "stored_objects",
    "withdraw",
]
