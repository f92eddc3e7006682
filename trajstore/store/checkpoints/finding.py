"""Lists checkpoints, and finds one by id, name or descent."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

from trajstore.errors import AmbiguousCheckpointError, CheckpointNotFoundError, FormatError
from trajstore.format.checkpoint_record import Checkpoint, CheckpointList
from trajstore.format.ids import is_stream_id
from trajstore.storage import Storage
from trajstore.store.checkpoints.objects import LATEST, read_checkpoint, read_checkpoints


def list_checkpoints(storage: Storage) -> CheckpointList:
    """Every complete checkpoint, parents before children, otherwise by time of creation.

    Costs one listing and one wave of concurrent reads.

    Raises:
        FormatError: A checkpoint is damaged; the message names it.
    """
    return CheckpointList(_by_descent(storage, [c for c in read_checkpoints(storage) if c.is_complete]))


def lineage(storage: Storage, checkpoint_id: str) -> list[Checkpoint]:
    """A checkpoint and the existing checkpoints that it descends from, oldest first; empty if it does not exist."""
    existing = list_checkpoints(storage)
    by_id = {c.id: c for c in existing}
    if checkpoint_id not in by_id:
        return []
    known = {checkpoint_id, *_ancestor_ids(by_id, by_id[checkpoint_id])}
    return [c for c in existing if c.id in known]


def find(storage: Storage, which: str) -> Checkpoint:
    """Find a checkpoint by its id or name, or the ``"latest"``.

    Among several checkpoints of one name, this is the one that descends from all others. The latest checkpoint is
    the only one that no other descends from.

    Raises:
        CheckpointNotFoundError: No checkpoint matches.
        AmbiguousCheckpointError: Several match, and none descends from all others.
    """
    if is_stream_id(which):
        found = read_checkpoint(storage, which)
        if found is not None and found.is_complete:
            return found
    existing = list_checkpoints(storage)
    matching = existing if which == LATEST else [c for c in existing if which in (c.id, c.name)]
    if not matching:
        known = f"the store has {_listed(existing)}" if existing else "the store has none"
        raise CheckpointNotFoundError(f"{storage.display}: no checkpoint {which!r:.200}; {known}")
    by_id = {c.id: c for c in existing}
    older = {id_ for c in matching for id_ in _ancestor_ids(by_id, c)}
    newest = [c for c in matching if c.id not in older]
    if len(newest) > 1:
        raise AmbiguousCheckpointError(
            f"{storage.display}: checkpoint {which!r:.200} could be any of {_listed(newest)}; give the id of one"
        )
    return newest[0]


def _parent_ids(by_id: Mapping[str, Checkpoint], checkpoint: Checkpoint) -> set[str]:
    """Ids of existing checkpoints that a checkpoint names as its parent or ancestors."""
    return {id_ for id_ in (*checkpoint.ancestors, checkpoint.parent) if id_ is not None and id_ in by_id}


def _ancestor_ids(by_id: Mapping[str, Checkpoint], checkpoint: Checkpoint) -> set[str]:
    """Ids of all existing checkpoints that a checkpoint descends from."""
    known: set[str] = set()
    unvisited = _parent_ids(by_id, checkpoint)
    while unvisited:
        known |= unvisited
        unvisited = {id_ for other in unvisited for id_ in _parent_ids(by_id, by_id[other])} - known
    return known


def _by_descent(storage: Storage, checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Sort topologically: parents before children, otherwise by time of creation."""
    by_id = {c.id: c for c in checkpoints}
    waits_for = {c.id: _parent_ids(by_id, c) for c in checkpoints}
    children: dict[str, list[str]] = {}
    for id_, parents in waits_for.items():
        for parent in parents:
            children.setdefault(parent, []).append(id_)
    ready = [(c.created_at, c.id) for c in checkpoints if not waits_for[c.id]]
    heapq.heapify(ready)
    ordered = []
    while ready:
        _, id_ = heapq.heappop(ready)
        ordered.append(by_id[id_])
        for child in children.get(id_, ()):
            waits_for[child].remove(id_)
            if not waits_for[child]:
                heapq.heappush(ready, (by_id[child].created_at, child))
    if len(ordered) < len(checkpoints):
        circle = sorted(by_id.keys() - {c.id for c in ordered})
        raise FormatError(f"{storage.display}: checkpoints descend from themselves: {', '.join(circle)}")
    return ordered


def _listed(checkpoints: Iterable[Checkpoint]) -> str:
    return ", ".join(f"'{c.name}' of {_as_utc(c.created_at)} (id {c.id})" for c in checkpoints)


def _as_utc(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(sep=" ", timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return f"{seconds} s"
