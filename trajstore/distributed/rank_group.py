"""The ranks that write one store together: how they find each other, and how they agree."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trajstore.distributed.rank_notes import (
    LocalNotes,
    RankNotes,
    StoreNotes,
    TorchNotes,
    member_bytes,
    member_key,
    poll_s,
    read_group,
    read_member,
    world_key,
)
from trajstore.errors import ClosedError, FormatError, RankError, RankTimeoutError, StorageError
from trajstore.format.ids import is_stream_id, new_id
from trajstore.format.zarr_json import FORMAT, GROUP, group_bytes, to_json_bytes
from trajstore.storage import Storage

_FIRST_POLL_S = 0.002
_KEPT_S = 30 * 86400.0  # what a world that began so long ago has left is removed


@dataclass(slots=True)
class RankGroup:
    """One rank's place among all that write a store together.

    Attributes:
        id: Of this set of sessions.
        rank: Of this one.
        size: How many there are.
        board: Where they leave notes.
        timeout_s: How long to wait for another rank.
    """

    id: str
    rank: int
    size: int
    board: RankNotes
    timeout_s: float
    is_closing: threading.Event = field(default_factory=threading.Event)

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def post(self, key: str, note: Any) -> None:
        self.board.post(key, note)

    def read(self, key: str, rank: int = 0) -> Any:
        """A rank's note as it is now; None where there is none."""
        return self.board.read([rank], key).get(rank)

    def gather(self, key: str, note: Any) -> list[Any]:
        """Leave a note and wait for those of all others; by rank.

        Raises:
            RankTimeoutError: Some rank left none.
        """
        self.post(key, note)
        return self.await_notes(key, range(self.size))

    def await_notes(self, key: str, ranks: Iterable[int], what: str | None = None) -> list[Any]:
        """Wait until these ranks have left a note.

        Raises:
            RankTimeoutError: Some did not in time; names them.
            ClosedError: The world was left meanwhile.
        """
        wanted = list(ranks)
        found: dict[int, Any] = {}
        until, pause = time.monotonic() + self.timeout_s, _FIRST_POLL_S
        while True:
            found |= self.board.read([rank for rank in wanted if rank not in found], key)
            if missing := [rank for rank in wanted if rank not in found]:
                if pause >= self.board.poll_s and (left := self.left(missing)):
                    raise RankError(
                        f"{rank_names(left)} of {self.size} closed the buffer before that ({what or key})"
                    )
                if time.monotonic() > until:
                    raise RankTimeoutError(
                        f"{rank_names(missing)} of {self.size} did not answer within {self.timeout_s:g} s"
                        f" ({what or key}): not running, or stuck"
                    )
                if self.is_closing.wait(pause) or not threading.main_thread().is_alive():
                    raise ClosedError(f"the buffer was closed while it waited for {rank_names(missing)}")
                pause = min(2 * pause, self.board.poll_s)
                continue
            return [found[rank] for rank in wanted]

    def leave(self) -> None:
        """Tell others not to wait for this rank."""
        if self.size > 1:
            self.post("left", True)

    def left(self, ranks: Iterable[int] | None = None) -> list[int]:
        """Which ranks have left."""
        if self.size == 1:
            return []
        return sorted(self.board.read(range(self.size) if ranks is None else ranks, "left"))

    def agree(self, key: str, facts: Mapping[str, Any]) -> None:
        """See that all ranks say the same of themselves; None: it has nothing to say of it.

        Raises:
            RankError: One differs; names it and what.
        """
        notes = self.gather(key, {name: fact for name, fact in facts.items() if fact is not None})
        for name in sorted({name for note in notes for name in note}):
            known = [(rank, note[name]) for rank, note in enumerate(notes) if name in note]
            for rank, fact in known:
                if fact != known[0][1]:
                    raise RankError(
                        f"rank {rank} has {name} {fact!r:.200}, rank {known[0][0]} has {known[0][1]!r:.200}; all"
                        " ranks of a world need the same"
                    )


def rank_names(ranks: Iterable[int]) -> str:
    listed = [str(rank) for rank in ranks]
    return f"rank{'s' if len(listed) > 1 else ''} {', '.join(listed)}"


def check_ranks(rank: int | None, world_size: int | None) -> None:
    """Refuse ranks that can't be.

    Raises:
        ValueError: They are not two numbers of which the first is smaller, or only one is given.
    """
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank and world_size go together, got rank={rank!r} and world_size={world_size!r}")
    if rank is None or world_size is None:
        return
    for name, value, low in (("world_size", world_size, 1), ("rank", rank, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise ValueError(f"{name}: expected an integer of at least {low}, got {value!r}")
    if rank >= world_size:
        raise ValueError(f"rank: expected less than the world_size {world_size}, got {rank}")


def torch_ranks() -> tuple[int, int] | None:
    """This process's rank and the number of processes, where torch.distributed is in use."""
    from torch import distributed

    if not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def single_rank(rank: int = 0) -> RankGroup:
    """A world of one."""
    return RankGroup(new_id("world"), rank, 1, LocalNotes(), 0.0)


def join_group(
    storage: Storage, rank: int, size: int, *, checkpoint: str | None, timeout_s: float, through: str | None = None
) -> RankGroup:
    """Find the other ranks; returns when all of them are here.

    Args:
        storage: Of the store that they write.
        rank: Of this one.
        size: How many there are.
        checkpoint: Id of the checkpoint that all of them go on from.
        timeout_s: How long to wait for another rank, now and later.
        through: ``"torch"`` or ``"store"``; by default torch.distributed where it has the same ranks.

    Raises:
        RankTimeoutError: Some did not come; names them.
    """
    if through not in (None, "torch", "store"):
        raise ValueError(f"through: expected 'torch', 'store' or None, got {through!r}")
    there = torch_ranks() if through != "store" else None
    if through == "torch" and there != (rank, size):
        raise ValueError(f"through='torch': torch.distributed has (rank, size) {there}, the buffer {(rank, size)}")
    if size == 1 and through != "store":
        return single_rank(rank)
    if there == (rank, size):
        return _join_by_torch(storage, rank, size, checkpoint, timeout_s)
    return _Joining(storage, rank, size, checkpoint, timeout_s).join_group()


def _join_by_torch(storage: Storage, rank: int, size: int, checkpoint: str | None, timeout_s: float) -> RankGroup:
    """Find the other ranks in torch.distributed's store: as through ours, but there is only one newest world."""
    begun = TorchNotes(_torch_store("trajstore"), 0)  # rank 0's note there names the world
    if rank == 0:
        id_ = new_id("world")
        world = RankGroup(id_, 0, size, _torch_board(id_, 0), timeout_s)
        begun.post("world", world.id)
        world.post("members", world.gather("here", "0"))
        put_world(storage, world.id, size, checkpoint)
        return world
    nonce, mine, until = os.urandom(16).hex(), "", time.monotonic() + timeout_s
    while time.monotonic() < until:
        newest = str(begun.read([0], "world").get(0, ""))
        if newest != mine:
            mine, world = newest, RankGroup(newest, rank, size, _torch_board(newest, rank), timeout_s)
            world.post("here", nonce)
        if mine and nonce in (world.read("members") or ()):
            return world
        time.sleep(TorchNotes.poll_s)
    raise RankTimeoutError(f"rank 0 of {size} did not begin, or not all ranks came, within {timeout_s:g} s")


def _torch_board(world: str, rank: int) -> TorchNotes:
    return TorchNotes(_torch_store(f"trajstore/{world}"), rank)


def _torch_store(prefix: str) -> Any:
    from torch.distributed import distributed_c10d

    return distributed_c10d.PrefixStore(prefix, distributed_c10d._get_default_store())


def rejoin_group(
    storage: Storage, rank: int, size: int, *, world: str | None, timeout_s: float
) -> tuple[RankGroup, str | None]:
    """Take a rank's place again that died, in a world that goes on; and the checkpoint that this started from.

    Raises:
        RankError: There is no such world.
    """
    for name in [world] if world is not None else list_worlds(storage):
        known = read_world(storage, name)
        before = read_member(storage, name, rank)
        if known is not None and known["size"] == size and before is not None:
            board = StoreNotes(storage, name, rank, os.urandom(16).hex(), before["notes"])
            board.post("left", None)
            return RankGroup(name, rank, size, board, timeout_s), known.get("checkpoint")
    which = f"'{world}'" if world is not None else f"of {size} ranks"
    raise RankError(f"{storage.display}: no world {which} that rank {rank} has been in, through the store")


def put_world(storage: Storage, world: str, size: int, checkpoint: str | None, *, is_joined: bool = True) -> None:
    """Leave a place in the store for a world's notes, where others can find it."""
    own = {
        "format": FORMAT,
        "kind": "world",
        "size": size,
        "joined": is_joined,
        "checkpoint": checkpoint,
        "created_at": time.time(),
    }
    storage.put_once("worlds/zarr.json", to_json_bytes(GROUP))
    storage.put(world_key(world), group_bytes(own))
    if is_joined:
        _remove_old(storage)


def list_worlds(storage: Storage) -> list[str]:
    """Ids of all worlds that have left something, newest first."""
    return sorted((name for name in storage.list_names("worlds") if is_stream_id(name)), reverse=True)


def read_world(storage: Storage, world: str) -> dict[str, Any] | None:
    """What is known of a world; None if it is gone."""
    own, what = read_group(storage, world_key(world), "world")
    if own is not None and not (
        isinstance(own.get("size"), int) and isinstance(own.get("created_at"), (int, float))
    ):
        raise FormatError(f"{what}: expected a size and a time")
    return own


def _remove_old(storage: Storage) -> None:
    for name in list_worlds(storage)[8:]:
        known = read_world(storage, name)
        if known is not None and time.time() - known["created_at"] > _KEPT_S:
            storage.remove_tree(f"worlds/{name}")


class _Joining:
    """Finds the other ranks through the store.

    Rank 0 begins a new world; the others take their places in the newest one that fits, and move on to a newer one
    that appears, until rank 0 has seen all places taken and says so. So what an earlier launch left behind, dead
    before it was complete, holds nobody up.
    """

    def __init__(self, storage: Storage, rank: int, size: int, checkpoint: str | None, timeout_s: float) -> None:
        self._storage = storage
        self._rank = rank
        self._size = size
        self._checkpoint = checkpoint
        self._timeout_s = timeout_s
        self._nonce = os.urandom(16).hex()
        self._seen: dict[str, str] = {}  # worlds that can't be ours, and why

    def join_group(self) -> RankGroup:
        if self._rank == 0:
            newest = next(iter(list_worlds(self._storage)), None)
            world = self._world(new_id("world", after=newest))  # whatever the clock of an earlier launch said
            put_world(self._storage, world.id, self._size, self._checkpoint, is_joined=False)
            self._take(world.id)
            try:
                return self._lead(world)
            except RankTimeoutError as error:
                with contextlib.suppress(StorageError):
                    world.post("failed", str(error))  # so that the others know why
                raise
        until, pause, mine = time.monotonic() + self._timeout_s, _FIRST_POLL_S, ""
        while True:
            mine = self._newest(mine) or mine
            if mine and self._is_in(mine):
                return self._world(mine)
            if time.monotonic() > until:
                raise RankTimeoutError(self._reason(mine))
            time.sleep(pause)
            pause = min(2 * pause, poll_s(self._storage))

    def _world(self, id_: str) -> RankGroup:
        board = StoreNotes(self._storage, id_, self._rank, self._nonce)
        return RankGroup(id_, self._rank, self._size, board, self._timeout_s)

    def _take(self, world: str) -> bool:
        """Take this rank's place; False if somebody else has it."""
        if self._storage.put_once(member_key(world, self._rank), member_bytes(self._nonce, {})):
            return True
        found = read_member(self._storage, world, self._rank)
        return found is not None and found["nonce"] == self._nonce

    def _lead(self, world: RankGroup) -> RankGroup:
        """Wait for all others, then say who is in."""
        members: dict[int, str] = {0: self._nonce}
        until, pause = time.monotonic() + self._timeout_s, _FIRST_POLL_S
        while missing := [rank for rank in range(self._size) if rank not in members]:
            found = self._storage.map(lambda rank: read_member(self._storage, world.id, rank), missing)
            members |= {r: m["nonce"] for r, m in zip(missing, found, strict=True) if m is not None}
            if len(members) < self._size:
                if time.monotonic() > until:
                    raise RankTimeoutError(self._absent(missing, world.id))
                time.sleep(pause)
                pause = min(2 * pause, world.board.poll_s)
        world.post("members", [members[rank] for rank in range(self._size)])
        put_world(self._storage, world.id, self._size, self._checkpoint)
        return world

    def _absent(self, missing: list[int], world: str) -> str:
        newer = [name for name in list_worlds(self._storage) if name > world]
        why = f"; another process of rank 0 has begun '{newer[0]}' since: is a rank there twice?" if newer else ""
        return f"{rank_names(missing)} of {self._size} did not join within {self._timeout_s:g} s{why}"

    def _newest(self, mine: str) -> str | None:
        """The newest world with a place for this rank, which is taken then; None: there is none newer than ours."""
        for name in list_worlds(self._storage):
            if name == mine:
                return None
            if name in self._seen:
                continue
            why = self._unfit(name)
            if why is None:
                return name
            self._seen[name] = why
        return None

    def _unfit(self, name: str) -> str | None:
        known = read_world(self._storage, name)
        if known is None:
            return "is gone"
        if known["size"] != self._size:
            return f"has {known['size']} ranks, this one was told {self._size}"
        if known.get("checkpoint") != self._checkpoint:
            return f"goes on from checkpoint {known.get('checkpoint')!r}, this rank from {self._checkpoint!r}"
        leader = read_member(self._storage, name, 0)
        return self._taken(leader, name) or (None if self._take(name) else self._twice)

    @property
    def _twice(self) -> str:
        return f"has another process of rank {self._rank}"

    def _taken(self, leader: dict[str, Any] | None, name: str) -> str | None:
        """Why rank 0 does not wait for this rank in a world, if it does not."""
        if leader is not None and "failed" in leader["notes"]:
            return f"failed: {leader['notes']['failed']!s:.200}"
        members = self._members(leader, name)
        return self._twice if members is not None and self._nonce not in members else None

    def _members(self, leader: dict[str, Any] | None, name: str) -> list[str] | None:
        members = None if leader is None else leader["notes"].get("members")
        if members is not None and not (isinstance(members, list) and all(isinstance(m, str) for m in members)):
            raise FormatError(f"{self._storage.display}/worlds/{name}: rank 0 has the members {members!r:.80}")
        return members

    def _is_in(self, name: str) -> bool:
        leader = read_member(self._storage, name, 0)
        if why := self._taken(leader, name):
            self._seen[name] = why
            return False
        members = self._members(leader, name)
        return members is not None and self._nonce in members

    def _reason(self, mine: str) -> str:
        if mine and mine not in self._seen:
            ranks = range(self._size)
            found = self._storage.map(lambda rank: read_member(self._storage, mine, rank), ranks)
            missing = [rank for rank, member in zip(ranks, found, strict=True) if member is None]
            who = rank_names(missing) if missing else "rank 0"
            return f"{who} of {self._size} did not join '{mine}' within {self._timeout_s:g} s"
        newest = max(self._seen, default=None)
        why = f"; the newest world, '{newest}', {self._seen[newest]}" if newest is not None else ""
        return f"rank 0 of {self._size} did not begin within {self._timeout_s:g} s{why}"
