"""Saves a checkpoint, or one rank's part of it, all or nothing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trajstore.errors import ConflictError, DataError, StorageError
from trajstore.format.checkpoint_record import Checkpoint, checkpoint_to_bytes, parse_checkpoint
from trajstore.format.ids import is_stream_id
from trajstore.format.zarr_json import GROUP, to_json_bytes
from trajstore.storage import ABSENT, Put, Storage
from trajstore.store import state_codec
from trajstore.store.checkpoints.objects import PENDING_S, place_of, read_checkpoint, record_key
from trajstore.store.checkpoints.reading import STATE_TREE
from trajstore.store.checkpoints.removal import remove_at
from trajstore.store.state_codec import StoredArray

_MAX_TREE_BYTES = 1 << 20  # of a state's JSON in the record; longer JSON is stored as an array


def save(
    storage: Storage, checkpoint: Checkpoint, state: Any, *, check: Callable[[], None] | None = None
) -> Checkpoint:
    """Put a checkpoint, all or nothing; returns it as readers see it. After any failure it may be saved again.

    Args:
        storage: Storage of the store.
        checkpoint: The checkpoint to put; `new_checkpoint_id` makes its id.
        state: A tree of mappings with text keys, lists, tuples, numbers, text, bools, None, arrays and tensors.
            Its arrays are read while they are put, so they must not change until this returns.
        check: Called once the rows are pinned; raises if a mark has already passed them.

    Raises:
        DataError: The state or the checkpoint can't be stored.
        ConflictError: Another checkpoint has this id, or this one was removed while it was being saved.
    """
    checkpoint = replace(checkpoint, ancestors=_ancestors(storage, checkpoint))
    return _PreparedSave.of(storage, checkpoint, state, place_of(checkpoint.id)).save(check)


def save_part(
    storage: Storage, whole: Checkpoint, rank: int, state: Any, *, check: Callable[[], None] | None = None
) -> None:
    """Put one rank's part of a checkpoint. It is durable when this returns; readers ignore it until `publish`.

    Args:
        storage: Storage of the store.
        whole: The checkpoint, with the extents that this rank needs and the number of ranks that take it.
        rank: The rank that saves this part.
        state: As for `save`.
        check: As for `save`.

    Raises:
        DataError: The state can't be stored.
        ConflictError: A complete checkpoint has this id.
    """
    prepared = _PreparedSave.of(storage, replace(whole, n_ranks=None), state, place_of(whole.id, rank))
    pin = checkpoint_to_bytes(
        replace(whole, streams={}, is_complete=False, pinned_at=time.time()), {"arrays": 0}, None
    )
    groups = {record_key(whole.id): pin, f"{place_of(whole.id)}/ranks/zarr.json": to_json_bytes(GROUP)}
    storage.map(lambda key: storage.put_once(key, groups[key]), list(groups))
    prepared.save(check)


def publish(storage: Storage, whole: Checkpoint) -> Checkpoint:
    """Complete a checkpoint whose ranks have all saved their parts: one put. Returns it as readers see it.

    Args:
        storage: Storage of the store.
        whole: The checkpoint, with the extents that any rank needs.

    Raises:
        ConflictError: It was removed before this call, or another checkpoint has this id.
    """
    reads: list[Callable[[], Any]] = [
        lambda: _ancestors(storage, whole),
        lambda: read_checkpoint(storage, whole.id),
    ]
    ancestors, found = storage.map(lambda read: read(), reads)
    whole = replace(whole, is_complete=True, pinned_at=None, ancestors=ancestors)
    if found is None or found.is_complete or found.world != whole.world:
        raise ConflictError(
            f"{storage.display}: checkpoint '{whole.id}' was removed, or saved by others; save it again"
        )
    try:
        data = checkpoint_to_bytes(whole, {"arrays": 0}, None)
        whole, _, _ = parse_checkpoint(data, whole.id, storage.display)
    except (TypeError, ValueError) as error:
        raise DataError(f"the checkpoint can't be stored: {error}") from error
    storage.put(record_key(whole.id), data)
    return whole


@dataclass(frozen=True, slots=True)
class _PreparedSave:
    """A checkpoint, or one rank's part of it, encoded and checked but for the chunks of its arrays.

    Attributes:
        place: Key prefix.
        arrays: Arrays of the state, by name.
        pin: The record to put first: incomplete.
        complete: The record to put last.
    """

    storage: Storage
    checkpoint: Checkpoint
    place: str
    arrays: Mapping[str, StoredArray]
    pin: bytes
    complete: bytes

    @staticmethod
    def of(storage: Storage, checkpoint: Checkpoint, state: Any, place: str) -> _PreparedSave:
        """Encode and check everything before anything is put."""
        tree, arrays = state_codec.encode(state)
        text = state_codec.dump(tree)
        named = {str(i): array for i, array in enumerate(arrays)}
        description: dict[str, Any] = {"arrays": len(arrays)}
        if len(text) <= _MAX_TREE_BYTES:
            description["tree"] = tree
        else:
            named[STATE_TREE] = StoredArray.of(np.frombuffer(text, np.uint8), "uint8")
        checkpoint = replace(checkpoint, is_complete=True, pinned_at=None)
        pin = replace(checkpoint, is_complete=False, pinned_at=time.time())
        try:
            complete = checkpoint_to_bytes(checkpoint, description, _nodes(named))
            checkpoint, _, nodes = parse_checkpoint(complete, checkpoint.id, storage.display)
        except (TypeError, ValueError) as error:
            raise DataError(f"the checkpoint can't be stored: {error}") from error
        # Every node that a Zarr reader finds must be in the consolidated metadata, so the pin lists them too.
        pin_bytes = checkpoint_to_bytes(pin, {"arrays": 0}, nodes)
        return _PreparedSave(storage, checkpoint, place, named, pin_bytes, complete)

    def save(self, check: Callable[[], None] | None) -> Checkpoint:
        try:
            self._put(check)
        except BaseException:
            with contextlib.suppress(StorageError):  # the remains are incomplete, so readers ignore them
                self._withdraw()
            raise
        return self.checkpoint

    @property
    def _key(self) -> str:
        return f"{self.place}/zarr.json"

    def _put(self, check: Callable[[], None] | None) -> None:
        started = time.monotonic()
        version = self._put_pin()
        if version is None:
            return
        if check is not None:
            check()
        self._put_arrays()
        if check is not None and time.monotonic() - started > PENDING_S / 2:
            check()  # the pin is about to expire, so marks may have passed it
        # Not every backend compares versions, so look first: a complete record without its arrays would be damage.
        with contextlib.suppress(FileNotFoundError):
            if self.storage.get(self._key) == self.pin:
                self.storage.put(self._key, self.complete, version)
                return
        raise ConflictError(f"{self._name()} was removed while it was being saved; save it again")

    def _withdraw(self) -> None:
        """Remove what this has put; a complete checkpoint that existed before is kept."""
        try:
            found = self.storage.get(self._key)
        except FileNotFoundError:
            found = self.pin
        if found in (self.pin, self.complete) or not self._is_complete(found):
            remove_at(self.storage, self.checkpoint.id, self.place)

    def _put_pin(self) -> str | None:
        """Put the incomplete record, which pins the rows; returns its version.

        Returns None if an earlier attempt, whose answer was lost, has already put everything.
        """
        try:
            return self.storage.put(self._key, self.pin, ABSENT)
        except FileExistsError:
            found = self.storage.get(self._key)
        if found == self.complete:
            return None
        if self._is_complete(found) and self._is_published():
            raise ConflictError(f"{self._name()} exists already")
        remove_at(self.storage, self.checkpoint.id, self.place)  # the remains of an earlier attempt
        return self.storage.put(self._key, self.pin, ABSENT)

    def _is_published(self) -> bool:
        """Whether readers see the checkpoint. A rank may replace its own part until then."""
        found = read_checkpoint(self.storage, self.checkpoint.id)
        return found is not None and found.is_complete

    def _put_arrays(self) -> None:
        # A group before its members, an array before its chunks: nothing exists without its zarr.json.
        if not self.arrays:
            return
        prefix = f"{self.place}/state"
        self.storage.put(f"{prefix}/zarr.json", to_json_bytes(GROUP))
        nodes = {
            f"{prefix}/{name}/zarr.json": to_json_bytes(array.metadata()) for name, array in self.arrays.items()
        }
        self.storage.put_many([Put(key, lambda data=data: data) for key, data in nodes.items()])  # type: ignore[misc]
        self.storage.put_many(
            [put for name, array in self.arrays.items() for put in array.puts(f"{prefix}/{name}")]
        )

    def _is_complete(self, record: bytes) -> bool:
        return parse_checkpoint(record, self.checkpoint.id, self.storage.display)[0].is_complete

    def _name(self) -> str:
        return f"{self.storage.display}: checkpoint '{self.checkpoint.id}'"


def _nodes(arrays: Mapping[str, StoredArray]) -> dict[str, Any]:
    nodes = {f"state/{name}": array.metadata() for name, array in arrays.items()}
    return {"state": GROUP, **nodes} if nodes else {}


def _ancestors(storage: Storage, checkpoint: Checkpoint) -> tuple[str, ...]:
    """Ids of the existing checkpoints that the parent descends from.

    Each checkpoint lists all its ancestors, so the lineage stays known when some of them are removed.
    """
    if checkpoint.parent is None or not is_stream_id(checkpoint.parent):
        return ()
    parent = read_checkpoint(storage, checkpoint.parent)
    if parent is None:
        return ()
    existing = set(storage.list_names("checkpoints"))
    return tuple(id_ for id_ in (*parent.ancestors, parent.parent) if id_ in existing and id_ is not None)
