"""Where ranks leave short notes for each other: in memory, in the store itself, or in torch.distributed's store."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from trajstore.errors import FormatError, RankError
from trajstore.format.zarr_json import FORMAT, group_bytes, parse_json, trajstore_attributes
from trajstore.storage import Storage

_MAX_NOTE_BYTES = 16 << 20


class RankNotes(Protocol):
    """Notes by rank and key. A rank writes its own and reads those of all; a later note replaces an earlier one.

    Attributes:
        poll_s: How long to wait at most before looking again.
    """

    poll_s: float

    def post(self, key: str, note: Any) -> None:
        """Leave a note, or take it away (None); others see it when this returns."""

    def post_all(self, notes: Mapping[str, Any]) -> None:
        """Leave several at once."""

    def read(self, ranks: Iterable[int], key: str) -> dict[int, Any]:
        """The notes of some ranks, as far as there are any."""


class LocalNotes:
    """Notes of a rank that is alone."""

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
    """Notes in the store: one small object a rank, which that rank alone writes."""

    def __init__(
        self, storage: Storage, world: str, rank: int, nonce: str, notes: Mapping[str, Any] | None = None
    ) -> None:
        self.poll_s = poll_s(storage)
        self._storage = storage
        self._world = world
        self._rank = rank
        self._nonce = nonce
        self._lock = threading.Lock()  # puts of several threads must not overtake each other
        self._notes: dict[str, Any] = dict(notes or {})

    def post(self, key: str, note: Any) -> None:
        self.post_all({key: note})

    def post_all(self, notes: Mapping[str, Any]) -> None:
        with self._lock:
            all_ = {name: value for name, value in {**self._notes, **notes}.items() if value is not None}
            self._storage.put(member_key(self._world, self._rank), member_bytes(self._nonce, all_))
            self._notes = all_

    def read(self, ranks: Iterable[int], key: str) -> dict[int, Any]:
        wanted = list(ranks)
        found = self._storage.map(lambda rank: read_member(self._storage, self._world, rank), wanted)
        notes = {
            rank: member["notes"].get(key) for rank, member in zip(wanted, found, strict=True) if member is not None
        }
        return {rank: note for rank, note in notes.items() if note is not None}


def world_key(world: str) -> str:
    return f"worlds/{world}/zarr.json"


def member_key(world: str, rank: int) -> str:
    return f"worlds/{world}/{rank}/zarr.json"


def member_bytes(nonce: str, notes: Mapping[str, Any]) -> bytes:
    own = {"format": FORMAT, "kind": "member", "nonce": nonce, "notes": dict(notes)}
    return group_bytes(own)


def read_group(storage: Storage, key: str, kind: str) -> tuple[dict[str, Any] | None, str]:
    """The attributes of a group of some kind, None where there is none; and what to call it in messages."""
    what = f"{storage.display}/{key}"
    try:
        data = storage.get(key)
    except FileNotFoundError:
        return None, what
    return trajstore_attributes(parse_json(data, what), kind, what), what


def poll_s(storage: Storage) -> float:
    """How long to wait at most before looking again at what others put there."""
    return 0.5 if storage.is_remote else 0.05


def read_member(storage: Storage, world: str, rank: int) -> dict[str, Any] | None:
    """What a rank has to say of itself; None while it has not come.

    Raises:
        FormatError: It is not what a rank writes.
    """
    own, what = read_group(storage, member_key(world, rank), "member")
    if own is not None and not (isinstance(own.get("notes"), dict) and isinstance(own.get("nonce"), str)):
        raise FormatError(f"{what}: expected a nonce and notes")
    return own


class TorchNotes:
    """Notes in the key-value store of torch.distributed, which every process group has, whatever its backend."""

    poll_s = 0.02

    def __init__(self, store: Any, rank: int) -> None:
        self._store = store
        self._rank = rank

    def post_all(self, notes: Mapping[str, Any]) -> None:
        for key, note in notes.items():
            self.post(key, note)

    def post(self, key: str, note: Any) -> None:
        if note is None:
            self._drop(key)
            return
        text = json.dumps(note, allow_nan=False).encode()
        if len(text) > _MAX_NOTE_BYTES:
            raise RankError(f"a note of {len(text)} bytes for other ranks; at most {_MAX_NOTE_BYTES}")
        try:
            self._store.set(f"{key}/{self._rank}", text)
        except RuntimeError as error:
            raise _lost(error) from error

    def read(self, ranks: Iterable[int], key: str) -> dict[int, Any]:
        found = {}
        try:
            for rank in ranks:
                name = f"{key}/{rank}"
                if self._store.check([name]):  # get would wait for it, and keep all other threads from the store
                    found[rank] = json.loads(bytes(self._store.get(name)))
        except RuntimeError as error:
            raise _lost(error) from error
        return found

    def _drop(self, key: str) -> None:
        try:
            self._store.delete_key(f"{key}/{self._rank}")
        except RuntimeError as error:
            raise _lost(error) from error


def _lost(error: Exception) -> RankError:
    first = str(error).partition("\n")[0]
    return RankError(
        f"the store of torch.distributed is out of reach (is the process that hosts it dead?): {first}"
    )
