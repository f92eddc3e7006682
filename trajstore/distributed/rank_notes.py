"""Where ranks leave short notes for each other: in memory, in the store itself, or in torch.distributed's store."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from trajstore.distributed.world_records import member_bytes, member_key, read_member
from trajstore.errors import RankError
from trajstore.storage import Storage

_MAX_NOTE_BYTES = 16 << 20


class RankNotes(Protocol):
    """Notes by rank and key. A rank writes its own notes and reads those of all ranks.

    A later note of the same rank and key replaces the earlier one. Notes are JSON values.

    Attributes:
        poll_s: Longest time to wait before reading again, in seconds.
    """

    poll_s: float

    def post(self, key: str, note: Any) -> None:
        """Leave a note, or remove it (None); other ranks see it when this returns."""

    def post_all(self, notes: Mapping[str, Any]) -> None:
        """Leave or remove several notes."""

    def read(self, ranks: Iterable[int], key: str) -> dict[int, Any]:
        """The notes under a key, by rank; ranks without such a note are left out."""


class LocalNotes:
    """Notes of a single rank, in memory."""

    poll_s = 0.01

    def __init__(self) -> None:
        self._notes: dict[str, Any] = {}

    def post(self, key: str, note: Any) -> None:
        self.post_all({key: note})

    def post_all(self, notes: Mapping[str, Any]) -> None:
        self._notes |= notes

    def read(self, ranks: Iterable[int], key: str) -> dict[int, Any]:
        note = self._notes.get(key)
        return {} if note is None else dict.fromkeys(ranks, note)


class StoreNotes:
    """Notes in the store: one small object per rank, which only that rank writes. Safe to use from several threads.

    Args:
        storage: Storage of the store.
        world: Id of the world.
        rank: The rank whose notes this object posts.
        nonce: Identifies this process.
        notes: Notes that the rank has left before.
    """

    def __init__(
        self, storage: Storage, world: str, rank: int, nonce: str, notes: Mapping[str, Any] | None = None
    ) -> None:
        self.poll_s = longest_poll_s(storage)
        self._storage = storage
        self._world = world
        self._rank = rank
        self._nonce = nonce
        self._lock = threading.Lock()  # an older put must not replace a newer one
        self._notes: dict[str, Any] = dict(notes or {})

    def post(self, key: str, note: Any) -> None:
        self.post_all({key: note})

    def post_all(self, notes: Mapping[str, Any]) -> None:
        with self._lock:
            kept = {name: value for name, value in {**self._notes, **notes}.items() if value is not None}
            self._storage.put(member_key(self._world, self._rank), member_bytes(self._nonce, kept))
            self._notes = kept

    def read(self, ranks: Iterable[int], key: str) -> dict[int, Any]:
        wanted = list(ranks)
        members = self._storage.map(lambda rank: read_member(self._storage, self._world, rank), wanted)
        notes = {
            rank: member["notes"].get(key)
            for rank, member in zip(wanted, members, strict=True)
            if member is not None
        }
        return {rank: note for rank, note in notes.items() if note is not None}


def longest_poll_s(storage: Storage) -> float:
    """The longest time to wait, in seconds, before reading again what other ranks put into a store."""
    return 0.5 if storage.is_remote else 0.05


class TorchNotes:
    """Notes in the key-value store of torch.distributed, which every process group has, whatever its backend.

    Args:
        store: The key-value store.
        rank: The rank whose notes this object posts.
    """

    poll_s = 0.02

    def __init__(self, store: Any, rank: int) -> None:
        self._store = store
        self._rank = rank

    def post_all(self, notes: Mapping[str, Any]) -> None:
        for key, note in notes.items():
            self.post(key, note)

    def post(self, key: str, note: Any) -> None:
        if note is None:
            self._remove(key)
            return
        text = json.dumps(note, allow_nan=False).encode()
        if len(text) > _MAX_NOTE_BYTES:
            raise RankError(f"note '{key}': expected at most {_MAX_NOTE_BYTES} bytes, got {len(text)}")
        try:
            self._store.set(f"{key}/{self._rank}", text)
        except RuntimeError as error:
            raise _unreachable(error) from error

    def read(self, ranks: Iterable[int], key: str) -> dict[int, Any]:
        found = {}
        try:
            for rank in ranks:
                name = f"{key}/{rank}"
                if self._store.check([name]):  # get would wait for it, and block all other threads' calls
                    found[rank] = json.loads(bytes(self._store.get(name)))
        except RuntimeError as error:
            raise _unreachable(error) from error
        return found

    def _remove(self, key: str) -> None:
        try:
            self._store.delete_key(f"{key}/{self._rank}")
        except RuntimeError as error:
            raise _unreachable(error) from error


def _unreachable(error: Exception) -> RankError:
    first_line = str(error).partition("\n")[0]
    return RankError(
        f"the store of torch.distributed is out of reach (is the process that hosts it dead?): {first_line}"
    )
