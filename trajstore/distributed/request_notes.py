"""Notes that ask for a checkpoint and announce one: their content, and the checks when a rank reads them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from trajstore.distributed.world_records import read_attributes
from trajstore.errors import FormatError, SchemaError
from trajstore.format.ids import is_stream_id
from trajstore.format.zarr_json import FORMAT, group_bytes
from trajstore.storage import Storage
from trajstore.store import checkpoints


@dataclass(frozen=True, slots=True)
class CheckpointRequest:
    """A request that a rank posts for all ranks.

    Attributes:
        number: Counts the requests of this rank, from 1.
        name: Name of the checkpoint.
    """

    number: int
    name: str

    def to_note(self) -> dict[str, Any]:
        return {"n": self.number, "name": self.name}


@dataclass(frozen=True, slots=True)
class RequestedCheckpoint:
    """A checkpoint that rank 0 has announced and all ranks take.

    Attributes:
        number: Counts the announcements of a world, from 1.
        id: Id of the checkpoint.
        name: Name of the checkpoint.
        answers: By rank, the number of its last request that this checkpoint answers.
    """

    number: int
    id: str
    name: str
    answers: tuple[int, ...]

    def to_note(self) -> dict[str, Any]:
        return {"n": self.number, "id": self.id, "name": self.name, "answers": list(self.answers)}


@dataclass(frozen=True, slots=True)
class OutsideRequest:
    """A request that another process has put into the store; the nonce tells it from the one before."""

    nonce: str
    name: str


def parse_request(note: Any, rank: int) -> CheckpointRequest:
    """Read a rank's request.

    Raises:
        FormatError: The note is malformed.
    """
    if not isinstance(note, dict) or not _is_count(note.get("n")) or not _is_name(note.get("name")):
        raise FormatError(f"rank {rank} asks for a checkpoint with {note!r:.80}, expected a number and a name")
    return CheckpointRequest(note["n"], note["name"])


def parse_announcement(note: Any, size: int) -> RequestedCheckpoint:
    """Read rank 0's announcement to ``size`` ranks.

    Raises:
        FormatError: The note is malformed.
    """
    values = note if isinstance(note, dict) else {}
    number, id_, name, answers = (values.get(key) for key in ("n", "id", "name", "answers"))
    if (
        not _is_count(number)
        or not _is_id(id_, name)
        or not isinstance(answers, list)
        or len(answers) != size
        or not all(map(_is_count, answers))
    ):
        raise FormatError(f"rank 0 announces a checkpoint with {note!r:.80}, expected n, id, name and answers")
    return RequestedCheckpoint(values["n"], values["id"], values["name"], tuple(answers))


def _is_id(id_: object, name: object) -> bool:
    return _is_name(name) and isinstance(id_, str) and is_stream_id(id_) and id_.rpartition("-")[0] == name


def _is_name(name: object) -> bool:
    try:
        return isinstance(name, str) and checkpoints.new_checkpoint_id(name) is not None
    except SchemaError:
        return False


def _is_count(n: object) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 62


def put_outside_request(storage: Storage, world: str, name: str) -> None:
    """Ask a world for a checkpoint; replaces an earlier request."""
    attributes = {"format": FORMAT, "kind": "request", "nonce": os.urandom(16).hex(), "name": name}
    storage.put(_request_key(world), group_bytes(attributes))


def read_outside_request(storage: Storage, world: str) -> OutsideRequest | None:
    """The last request that another process has made of a world; None if there was none.

    Raises:
        FormatError: The object holds something else.
    """
    attributes, what = read_attributes(storage, _request_key(world), "request")
    if attributes is None:
        return None
    name, nonce = attributes.get("name"), attributes.get("nonce")
    if not isinstance(nonce, str) or not _is_name(name):
        raise FormatError(f"{what}: expected a name and a nonce")
    return OutsideRequest(nonce, str(name))


def _request_key(world: str) -> str:
    return f"worlds/{world}/request/zarr.json"
