"""Removes checkpoints, and the remains of checkpoints that were never completed."""

from __future__ import annotations

import time

from trajstore.errors import FormatError
from trajstore.format.checkpoint_record import Checkpoint, checkpoint_to_bytes, parse_checkpoint
from trajstore.format.ids import is_stream_id
from trajstore.storage import Storage
from trajstore.store.checkpoints.objects import (
    PENDING_S,
    is_pending,
    place_of,
    read_checkpoint,
    read_checkpoints,
    read_object,
    read_parts,
)


def remove(storage: Storage, checkpoint_id: str) -> None:
    """Remove a checkpoint, complete or not.

    Readers stop seeing it at once; then its objects are deleted. Removing it again does no harm.
    """
    if not is_stream_id(checkpoint_id):
        raise ValueError(f"{checkpoint_id!r:.80} is not the id of a checkpoint")
    remove_at(storage, checkpoint_id, place_of(checkpoint_id))


def withdraw(storage: Storage, checkpoint_id: str) -> None:
    """Remove the remains of a checkpoint that will not be published; a published one is kept."""
    found = read_checkpoint(storage, checkpoint_id)
    if found is None or not found.is_complete:
        remove(storage, checkpoint_id)


def remove_incomplete(storage: Storage, *, pending_s: float = PENDING_S) -> list[str]:
    """Remove the remains of checkpoints whose saving did not finish.

    Args:
        storage: Storage of the store.
        pending_s: Keep those begun less than this many seconds ago: another session may be saving them.

    Returns:
        The ids of the removed checkpoints.
    """
    found = {c.id: c for c in read_checkpoints(storage)}
    stale = [c.id for c in found.values() if not c.is_complete and not is_pending(c, pending_s)]
    without_record = [n for n in storage.list_names("checkpoints") if is_stream_id(n) and n not in found]
    stale += [name for name in without_record if not _has_pending_parts(storage, name, pending_s)]
    for id_ in stale:
        remove(storage, id_)
    return stale


def remove_at(storage: Storage, checkpoint_id: str, place: str) -> None:
    """Remove a checkpoint, or one rank's part of it, below a key prefix."""
    key = f"{place}/zarr.json"
    data = read_object(storage, key)
    if data is not None:
        # A group without its zarr.json makes Zarr readers warn, so the record is deleted last.
        storage.put(key, _removed_record(storage, checkpoint_id, data))
        storage.delete([other for other in storage.list_tree(place) if other != key])
    storage.remove_tree(place)


def _removed_record(storage: Storage, checkpoint_id: str, data: bytes) -> bytes:
    """The record of a checkpoint that is being removed: incomplete, pinned at time 0, without streams."""
    n_ranks: int | None = None
    try:
        known, _, nodes = parse_checkpoint(data, checkpoint_id, storage.display)
        n_ranks = known.n_ranks
    except FormatError:
        nodes = {}  # a damaged checkpoint can be removed as well
    name = checkpoint_id.rpartition("-")[0]
    removed = Checkpoint(checkpoint_id, name, time.time(), pinned_at=0.0, n_ranks=n_ranks)
    return checkpoint_to_bytes(removed, {"arrays": 0}, nodes if n_ranks is None else None)


def _has_pending_parts(storage: Storage, checkpoint_id: str, pending_s: float) -> bool:
    """Whether a checkpoint without a record has a part created less than ``pending_s`` seconds ago."""
    parts = read_parts(storage, checkpoint_id)
    return any(time.time() - part.created_at < pending_s for part in parts)
