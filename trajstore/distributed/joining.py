"""How ranks find each other: when a run starts, and when a rank that died is started again."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

from trajstore.distributed.rank_group import FIRST_POLL_S, RankGroup, rank_names, single_rank, torch_ranks
from trajstore.distributed.rank_notes import StoreNotes, TorchNotes, longest_poll_s
from trajstore.distributed.world_records import (
    list_worlds,
    member_bytes,
    member_key,
    put_world,
    read_member,
    read_world,
)
from trajstore.errors import FormatError, RankError, RankTimeoutError, StorageError
from trajstore.format.ids import new_id
from trajstore.storage import Storage


def join_group(
    storage: Storage, rank: int, size: int, *, checkpoint: str | None, timeout_s: float, through: str | None = None
) -> RankGroup:
    """Find the other ranks; returns when all of them have joined.

    Args:
        storage: Storage of the store that the ranks write.
        rank: The rank of this process.
        size: Number of ranks.
        checkpoint: Id of the checkpoint that all ranks continue.
        timeout_s: How long to wait for another rank, now and later, in seconds.
        through: ``"torch"`` or ``"store"``; by default torch.distributed if it has the same rank and size.

    Raises:
        RankTimeoutError: Some ranks did not join in time; names them.
    """
    if through not in (None, "torch", "store"):
        raise ValueError(f"through: expected 'torch', 'store' or None, got {through!r}")
    in_torch = torch_ranks() if through != "store" else None
    if through == "torch" and in_torch != (rank, size):
        raise ValueError(
            f"through='torch': torch.distributed has (rank, size) {in_torch}, the buffer {(rank, size)}"
        )
    if size == 1 and through != "store":
        return single_rank(rank)
    if in_torch == (rank, size):
        return _join_through_torch(storage, rank, size, checkpoint, timeout_s)
    return _JoinThroughStore(storage, rank, size, checkpoint, timeout_s).join()


def rejoin_group(
    storage: Storage, rank: int, size: int, *, world: str | None, timeout_s: float
) -> tuple[RankGroup, str | None]:
    """Take the place of a rank that died while the others continue.

    Args:
        storage: Storage of the store.
        rank: The rank that died.
        size: Number of ranks.
        world: Id of the world; None: the newest one of this size that the rank has joined through the store.
        timeout_s: How long to wait for another rank, in seconds.

    Returns:
        The group, and the id of the checkpoint that its world started from.

    Raises:
        RankError: No such world exists.
    """
    for name in [world] if world is not None else list_worlds(storage):
        record = read_world(storage, name)
        before = read_member(storage, name, rank)
        if record is not None and record["size"] == size and before is not None:
            notes = StoreNotes(storage, name, rank, os.urandom(16).hex(), before["notes"])
            notes.post("left", None)
            return RankGroup(name, rank, size, notes, timeout_s), record.get("checkpoint")
    which = f"'{world}'" if world is not None else f"of {size} ranks"
    raise RankError(f"{storage.display}: no world {which} that rank {rank} has joined through the store")


# ---- through torch.distributed


def _join_through_torch(
    storage: Storage, rank: int, size: int, checkpoint: str | None, timeout_s: float
) -> RankGroup:
    """Find the other ranks with notes in torch.distributed's store, where rank 0's newest world is named."""
    newest_world = TorchNotes(_torch_store("trajstore"), 0)  # only rank 0 posts here
    if rank == 0:
        world = new_id("world")
        group = RankGroup(world, 0, size, _torch_notes(world, 0), timeout_s)
        newest_world.post("world", world)
        group.post("members", group.gather("here", "0"))
        put_world(storage, world, size, checkpoint)
        return group
    nonce, joined, until = os.urandom(16).hex(), "", time.monotonic() + timeout_s
    while time.monotonic() < until:
        newest = str(newest_world.read([0], "world").get(0, ""))
        if newest != joined:
            joined, group = newest, RankGroup(newest, rank, size, _torch_notes(newest, rank), timeout_s)
            group.post("here", nonce)
        if joined and nonce in (group.read("members") or ()):
            return group
        time.sleep(TorchNotes.poll_s)
    raise RankTimeoutError(f"rank 0 of {size} did not start, or not all ranks joined, within {timeout_s:g} s")


def _torch_notes(world: str, rank: int) -> TorchNotes:
    return TorchNotes(_torch_store(f"trajstore/{world}"), rank)


def _torch_store(prefix: str) -> Any:
    from torch.distributed import distributed_c10d

    return distributed_c10d.PrefixStore(prefix, distributed_c10d._get_default_store())


# ---- through the store


class _JoinThroughStore:
    """Finds the other ranks with objects in the store.

    Rank 0 creates a new world. Every other rank takes its place in the newest world that fits, and moves on to a
    newer one that appears, until rank 0 has seen all places taken and lists the members. So ranks do not wait in
    the world of an earlier launch that died before all of its ranks had joined.
    """

    def __init__(self, storage: Storage, rank: int, size: int, checkpoint: str | None, timeout_s: float) -> None:
        self._storage = storage
        self._rank = rank
        self._size = size
        self._checkpoint = checkpoint
        self._timeout_s = timeout_s
        self._nonce = os.urandom(16).hex()
        self._rejected: dict[str, str] = {}  # worlds that this rank can't join, and why

    def join(self) -> RankGroup:
        return self._create_world() if self._rank == 0 else self._follow()

    def _group(self, world: str) -> RankGroup:
        notes = StoreNotes(self._storage, world, self._rank, self._nonce)
        return RankGroup(world, self._rank, self._size, notes, self._timeout_s)

    def _take_place(self, world: str) -> bool:
        """Take this rank's place in a world; False if another process has it."""
        if self._storage.put_once(member_key(world, self._rank), member_bytes(self._nonce, {})):
            return True
        member = read_member(self._storage, world, self._rank)
        return member is not None and member["nonce"] == self._nonce

    # ---- rank 0

    def _create_world(self) -> RankGroup:
        newest = next(iter(list_worlds(self._storage)), None)
        # The new id sorts last, even if the clock of an earlier launch was ahead.
        group = self._group(new_id("world", after=newest))
        put_world(self._storage, group.id, self._size, self._checkpoint, is_joined=False)
        self._take_place(group.id)
        try:
            return self._await_members(group)
        except RankTimeoutError as error:
            with contextlib.suppress(StorageError):
                group.post("failed", str(error))  # the other ranks report it
            raise

    def _await_members(self, group: RankGroup) -> RankGroup:
        """Wait until all ranks have taken their places, then list the members."""
        members: dict[int, str] = {0: self._nonce}
        until, pause = time.monotonic() + self._timeout_s, FIRST_POLL_S
        while missing := [rank for rank in range(self._size) if rank not in members]:
            found = self._storage.map(lambda rank: read_member(self._storage, group.id, rank), missing)
            members |= {r: m["nonce"] for r, m in zip(missing, found, strict=True) if m is not None}
            if len(members) < self._size:
                if time.monotonic() > until:
                    raise RankTimeoutError(self._describe_missing(missing, group.id))
                time.sleep(pause)
                pause = min(2 * pause, group.notes.poll_s)
        group.post("members", [members[rank] for rank in range(self._size)])
        put_world(self._storage, group.id, self._size, self._checkpoint)
        return group

    def _describe_missing(self, missing: list[int], world: str) -> str:
        newer = [name for name in list_worlds(self._storage) if name > world]
        hint = (
            f"; another process of rank 0 has started '{newer[0]}' since: is rank 0 running twice?" if newer else ""
        )
        return f"{rank_names(missing)} of {self._size} did not join within {self._timeout_s:g} s{hint}"

    # ---- other ranks

    def _follow(self) -> RankGroup:
        """Take this rank's place in the newest world until rank 0 lists it as a member."""
        until, pause, joined = time.monotonic() + self._timeout_s, FIRST_POLL_S, ""
        while True:
            joined = self._join_newer(joined) or joined
            if joined and self._is_member(joined):
                return self._group(joined)
            if time.monotonic() > until:
                raise RankTimeoutError(self._describe_failure(joined))
            time.sleep(pause)
            pause = min(2 * pause, longest_poll_s(self._storage))

    def _join_newer(self, joined: str) -> str | None:
        """Take this rank's place in the newest world that fits; None if none is newer than ``joined``."""
        for world in list_worlds(self._storage):
            if world == joined:
                return None
            if world in self._rejected:
                continue
            reason = self._reason_to_reject(world)
            if reason is None:
                return world
            self._rejected[world] = reason
        return None

    def _reason_to_reject(self, world: str) -> str | None:
        """Why this rank can't join a world; None: it has taken its place there."""
        record = read_world(self._storage, world)
        if record is None:
            return "was removed"
        if record["size"] != self._size:
            return f"has {record['size']} ranks, this rank expects {self._size}"
        if record.get("checkpoint") != self._checkpoint:
            return f"continues checkpoint {record.get('checkpoint')!r}, this rank continues {self._checkpoint!r}"
        leader = read_member(self._storage, world, 0)
        return self._reason_of_leader(leader, world) or (None if self._take_place(world) else self._duplicate)

    @property
    def _duplicate(self) -> str:
        return f"has another process of rank {self._rank}"

    def _reason_of_leader(self, leader: dict[str, Any] | None, world: str) -> str | None:
        """Why rank 0 of a world does not wait for this process; None: it waits, or lists it as a member."""
        if leader is not None and "failed" in leader["notes"]:
            return f"failed: {leader['notes']['failed']!s:.200}"
        members = self._members(leader, world)
        return self._duplicate if members is not None and self._nonce not in members else None

    def _members(self, leader: dict[str, Any] | None, world: str) -> list[str] | None:
        """The nonces of all ranks, as rank 0 lists them; None before all have joined."""
        members = None if leader is None else leader["notes"].get("members")
        if members is not None and not (isinstance(members, list) and all(isinstance(m, str) for m in members)):
            raise FormatError(
                f"{self._storage.display}/worlds/{world}: expected a list of members from rank 0,"
                f" got {members!r:.80}"
            )
        return members

    def _is_member(self, world: str) -> bool:
        leader = read_member(self._storage, world, 0)
        if reason := self._reason_of_leader(leader, world):
            self._rejected[world] = reason
            return False
        members = self._members(leader, world)
        return members is not None and self._nonce in members

    def _describe_failure(self, joined: str) -> str:
        """Why this rank is in no complete world."""
        if joined and joined not in self._rejected:
            ranks = range(self._size)
            found = self._storage.map(lambda rank: read_member(self._storage, joined, rank), ranks)
            missing = [rank for rank, member in zip(ranks, found, strict=True) if member is None]
            who = rank_names(missing) if missing else "rank 0"
            return f"{who} of {self._size} did not join '{joined}' within {self._timeout_s:g} s"
        newest = max(self._rejected, default=None)
        why = f"; the newest world, '{newest}', {self._rejected[newest]}" if newest is not None else ""
        return f"rank 0 of {self._size} did not start within {self._timeout_s:g} s{why}"
