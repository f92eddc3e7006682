"""The objects below ``worlds/`` in a store: a record per world, and an object with the notes of each rank."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from trajstore.errors import FormatError
from trajstore.format.ids import is_stream_id
from trajstore.format.zarr_json import (
    FORMAT,
    GROUP,
    group_bytes,
    parse_json,
    to_json_bytes,
    trajstore_attributes,
)
from trajstore.storage import Storage

_MAX_AGE_S = 30 * 86400.0  # worlds created longer ago are removed
_N_KEPT = 8  # the newest worlds, which are never removed


def world_key(world: str) -> str:
    return f"worlds/{world}/zarr.json"


def member_key(world: str, rank: int) -> str:
    return f"worlds/{world}/{rank}/zarr.json"


def member_bytes(nonce: str, notes: Mapping[str, Any]) -> bytes:
    """The object that holds a rank's notes; the nonce identifies the process that took the rank's place."""
    attributes = {"format": FORMAT, "kind": "member", "nonce": nonce, "notes": dict(notes)}
    return group_bytes(attributes)


def read_attributes(storage: Storage, key: str, kind: str) -> tuple[dict[str, Any] | None, str]:
    """The trajstore attributes of a group, or None if it does not exist; and its name for messages.

    Raises:
        FormatError: The object is not a group of this kind.
    """
    what = f"{storage.display}/{key}"
    try:
        data = storage.get(key)
    except FileNotFoundError:
        return None, what
    return trajstore_attributes(parse_json(data, what), kind, what), what


def read_member(storage: Storage, world: str, rank: int) -> dict[str, Any] | None:
    """A rank's nonce and notes; None if the rank has not joined this world.

    Raises:
        FormatError: The object holds something else.
    """
    member, what = read_attributes(storage, member_key(world, rank), "member")
    if member is not None and not (isinstance(member.get("notes"), dict) and isinstance(member.get("nonce"), str)):
        raise FormatError(f"{what}: expected a nonce and notes")
    return member


def put_world(storage: Storage, world: str, size: int, checkpoint: str | None, *, is_joined: bool = True) -> None:
    """Put the record by which ranks and other processes find a world.

    Args:
        storage: Storage of the store.
        world: Id of the world.
        size: Number of ranks.
        checkpoint: Id of the checkpoint that all ranks continue.
        is_joined: Whether all ranks have joined. If so, old worlds are removed.
    """
    record = {
        "format": FORMAT,
        "kind": "world",
        "size": size,
        "joined": is_joined,
        "checkpoint": checkpoint,
        "created_at": time.time(),
    }
    storage.put("worlds/zarr.json", to_json_bytes(GROUP))
    storage.put(world_key(world), group_bytes(record))
    if is_joined:
        _remove_old_worlds(storage)


def list_worlds(storage: Storage) -> list[str]:
    """Ids of all worlds in the store, newest first."""
    return sorted((name for name in storage.list_names("worlds") if is_stream_id(name)), reverse=True)


def read_world(storage: Storage, world: str) -> dict[str, Any] | None:
    """The record of a world; None if it was removed.

    Raises:
        FormatError: The object holds something else.
    """
    record, what = read_attributes(storage, world_key(world), "world")
    if record is not None and not (
        isinstance(record.get("size"), int) and isinstance(record.get("created_at"), (int, float))
    ):
        raise FormatError(f"{what}: expected a size and a creation time")
    return record


def _remove_old_worlds(storage: Storage) -> None:
    for name in list_worlds(storage)[_N_KEPT:]:
        record = read_world(storage, name)
        if record is not None and time.time() - record["created_at"] > _MAX_AGE_S:
            storage.remove_tree(f"worlds/{name}")
