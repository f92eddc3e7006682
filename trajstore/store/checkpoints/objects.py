"""Ids, keys and records of checkpoints and of the parts that ranks save."""

from __future__ import annotations

import time
from collections.abc import Mapping

from trajstore.errors import SchemaError
from trajstore.format.checkpoint_record import Checkpoint, parse_checkpoint
from trajstore.format.commit_record import StreamExtent
from trajstore.format.ids import is_stream_id, new_id
from trajstore.schema import check_name
from trajstore.storage import Storage

LATEST = "latest"
PENDING_S = 3600.0  # an incomplete checkpoint older than this is treated as abandoned


def new_checkpoint_id(name: str) -> str:
    """Make a unique id for a checkpoint of this name."""
    if check_name(name, "checkpoint name") == LATEST:
        raise SchemaError(f"checkpoint name '{LATEST}' is reserved for the newest checkpoint; choose another")
    return new_id(name)


def new_checkpoint(
    checkpoint_id: str,
    name: str,
    *,
    parent: str | None = None,
    world: str | None = None,
    streams: Mapping[str, StreamExtent],
    n_ranks: int | None = None,
) -> Checkpoint:
    """A checkpoint to `save`, with the current time as its time of creation."""
    return Checkpoint(checkpoint_id, name, time.time(), parent, world, streams, n_ranks=n_ranks)


def place_of(checkpoint_id: str, rank: int | None = None) -> str:
    """Key prefix of a checkpoint, or of one rank's part of it."""
    return f"checkpoints/{checkpoint_id}" + ("" if rank is None else f"/ranks/{rank}")


def record_key(checkpoint_id: str) -> str:
    return f"{place_of(checkpoint_id)}/zarr.json"


def parts_of(checkpoint: Checkpoint) -> list[int | None]:
    """The ranks that have a part of a checkpoint; ``[None]`` if a single session took it."""
    return [None] if checkpoint.n_ranks is None else list(range(checkpoint.n_ranks))


def is_pending(checkpoint: Checkpoint, pending_s: float) -> bool:
    """Whether saving an incomplete checkpoint began less than ``pending_s`` seconds ago."""
    return checkpoint.pinned_at is not None and time.time() - checkpoint.pinned_at < pending_s


def read_object(storage: Storage, key: str) -> bytes | None:
    """The bytes of an object; None if it does not exist."""
    try:
        return storage.get(key)
    except FileNotFoundError:
        return None  # a checkpoint that is being removed, or a directory that is not a checkpoint


def read_checkpoint(storage: Storage, checkpoint_id: str) -> Checkpoint | None:
    """A checkpoint, complete or not; None if it does not exist.

    Raises:
        FormatError: Its record is damaged.
    """
    data = read_object(storage, record_key(checkpoint_id))
    return None if data is None else parse_checkpoint(data, checkpoint_id, storage.display)[0]


def read_checkpoints(storage: Storage) -> list[Checkpoint]:
    """Every checkpoint, complete or not: one listing, then concurrent reads."""
    names = [name for name in storage.list_names("checkpoints") if is_stream_id(name)]
    found = storage.map(lambda name: read_checkpoint(storage, name), names)
    return [checkpoint for checkpoint in found if checkpoint is not None]


def read_parts(storage: Storage, checkpoint_id: str) -> list[Checkpoint]:
    """The parts of a checkpoint that ranks have put so far, complete or not."""
    names = [name for name in storage.list_names(f"{place_of(checkpoint_id)}/ranks") if name.isdecimal()]
    found = storage.map(lambda name: read_object(storage, f"{place_of(checkpoint_id, int(name))}/zarr.json"), names)
    return [parse_checkpoint(data, checkpoint_id, storage.display)[0] for data in found if data is not None]
