"""How a buffer begins: afresh, from a checkpoint, or in the place of a rank that died."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from trajstore.distributed.partitions import Partitions, Policy
from trajstore.distributed.rank_group import RankGroup, join_group, rejoin_group
from trajstore.distributed.redistribution import plan_partitions as plan_partitions
from trajstore.distributed.redistribution import read_parts
from trajstore.errors import RankError
from trajstore.format.marks import Marks
from trajstore.replay.merged_state import merged_state, rank_share
from trajstore.replay.options import ReplayOptions, check_options, from_json, holding, with_ranks
from trajstore.sampling.rng import rank_seed
from trajstore.storage import Storage
from trajstore.store import checkpoints
from trajstore.store.checkpoints import Checkpoint
from trajstore.store.snapshot import Snapshot
from trajstore.store.store import Store, check_root

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RedistributionOptions:
    """How the episodes of a checkpoint are dealt out; see `redistribute`. Policy None: as it seems best."""

    policy: Policy | None = None
    incomplete: str | Mapping[str, str] = "keep"
    n_envs: int | None = None

    def to_json(self) -> dict[str, Any]:
        incomplete = self.incomplete if isinstance(self.incomplete, str) else dict(self.incomplete)
        return {"policy": self.policy, "incomplete": incomplete, "n_envs": self.n_envs}


@dataclass(frozen=True, slots=True)
class SessionStart:
    """What a buffer begins with.

    Attributes:
        store: Where it writes.
        options: As settled.
        world: The ranks, all here.
        checkpoint: That it goes on from.
        state: Of this rank, as it was there.
        plan: How episodes were dealt out, if they were.
        before: Streams that this rank has written before in this world.
        cut: What the checkpoint shows.
        is_back: Whether this is a rank that died and came back.
    """

    store: Store
    options: ReplayOptions
    world: RankGroup
    checkpoint: Checkpoint | None = None
    state: Mapping[str, Any] | None = None
    plan: Partitions | None = None
    before: frozenset[str] = frozenset()
    cut: Snapshot | None = None
    is_back: bool = False

    def shown(self) -> Snapshot:
        """What can be sampled of the store as it was last looked at."""
        fresh, options = self.store.snapshot, self.options
        if self.world.size > 1 and options.share == "partition":
            fresh = fresh.only(lambda record: record.rank == options.rank)
        if self.cut is not None:
            fresh = self.cut.joined(fresh, self.world.id)
        return fresh.ended(self.before) if self.before else fresh

    def first_shown(self) -> Snapshot:
        """What can be sampled at the beginning."""
        return self.cut if self.cut is not None and not self.is_back else self.shown()

    def first_marks(self) -> dict[str, int]:
        """The first rows that this session wants of the streams that are there."""
        marks = {stream: row for stream, row in Marks.live(self.store.snapshot.streams).items() if row}
        if self.checkpoint is not None:  # also where it is 0: the session before may have given up rows since
            return marks | dict(Marks.pinned_by(self.checkpoint))
        if self.world.size > 1:  # of what other ranks have, they speak
            return {record.id: marks.get(record.id, 0) for record in self.shown().streams}
        return marks

    @property
    def dead(self) -> list[str]:
        """Streams whose writers this session declares dead."""
        streams = self.store.snapshot.streams
        if self.is_back:
            mine = [record for record in streams if record.id in self.before]
            known = {stream for record in mine for stream in record.view.dead}
            return sorted(known | {record.id for record in mine if not record.is_sealed})
        if self.checkpoint is None:
            return []
        return [r.id for r in streams if r.id in self.checkpoint.streams and not r.is_sealed]

    @property
    def abandoned(self) -> dict[str, int]:
        """Rows that were committed after the checkpoint by sessions that are none of ours, by stream."""
        if self.cut is None or self.is_back:
            return {}
        kept = {record.id: record.rows for record in self.cut.streams}
        lost = {record.id: record.rows - kept.get(record.id, 0) for record in self.store.snapshot.streams}
        lost = {stream: n for stream, n in lost.items() if n > 0}
        if lost:
            _log.info("%d rows in %d streams were written after the checkpoint", sum(lost.values()), len(lost))
        return lost

    @property
    def growing(self) -> frozenset[str]:
        """Streams of which more is shown than the state knows."""
        if self.world.size > 1 and self.options.share == "whole":
            return frozenset(record.id for record in self.first_shown().streams)
        return self.before

    @property
    def seen(self) -> dict[str, int] | None:
        """Spans of each stream that the state knows of; None: all that are shown."""
        if not self.is_back or self.checkpoint is None:
            return None
        return {stream: cut.spans for stream, cut in self.checkpoint.streams.items()}


def start_fresh(store: Store, options: ReplayOptions) -> SessionStart:
    """Begin, or go on with all that is there.

    Raises:
        RankError: Another number of ranks has written it, so nobody would know whose it is; or ranks disagree.
    """
    size = options.world_size or 1
    for record in store.snapshot.streams:
        if record.world is not None and record.rows and (record.world_size or 1) != size:
            raise RankError(
                f"{store.url} was written by {record.world_size or 1} ranks, this is one of {size}: go on with"
                " ReplayBuffer.resume(url, checkpoint), which deals out the episodes anew"
            )
    return SessionStart(store, options, _joined_world(store, options, None, RedistributionOptions()))


def start_resumed(store: Store, which: str, changes: Mapping[str, Any], how: RedistributionOptions) -> SessionStart:
    """Go on from a checkpoint."""
    changes = with_ranks(changes)
    check_options(ReplayOptions(), changes)  # refuses what there is not, before anything is read
    found = checkpoints.find(store.snapshot.storage, which)
    cut = Snapshot.at(store.snapshot.storage, store.schema, found)
    options, state, plan = _resumed(store, found, cut, changes, how)
    world = _joined_world(store, options, found.id, how)
    return SessionStart(store, options, world, found, state, plan, cut=cut)


def start_rejoined(store: Store, world_id: str | None, changes: Mapping[str, Any]) -> SessionStart:
    """Take the place of a rank that died alone, with all of its partition that was committed.

    Raises:
        RankError: There is no world in which it had a place.
    """
    given = check_options(ReplayOptions(), changes)
    rank, size, storage = given.rank or 0, given.world_size or 1, store.snapshot.storage
    world, began_at = rejoin_group(storage, rank, size, world=world_id, timeout_s=given.rank_timeout_s)
    streams = store.snapshot.streams
    before = frozenset(r.id for r in streams if r.world == world.id and r.rank == rank)
    ours = [c for c in checkpoints.list_checkpoints(storage) if c.world == world.id and (c.n_ranks or 1) == size]
    found = ours[-1] if ours else checkpoints.find(storage, began_at) if began_at is not None else None
    if found is None:
        return SessionStart(store, given, world, before=before, is_back=True)
    how = RedistributionOptions() if ours else RedistributionOptions(**(world.read("how", rank) or {}))
    cut = Snapshot.at(storage, store.schema, found)
    options, state, plan = _resumed(store, found, cut, changes, how)
    return SessionStart(store, options, world, found, state, plan, before, cut, is_back=True)


def _resumed(
    store: Store, found: Checkpoint, cut: Snapshot, changes: Mapping[str, Any], how: RedistributionOptions
) -> tuple[ReplayOptions, dict[str, Any], Partitions | None]:
    state, plan = _resumed_state(store, found, cut, changes, how)
    options = from_json(state["options"], changes)
    if "capacity" in changes:
        state["retention"].pop("least", None)  # a limit that is given anew holds at once
    elif plan is not None:
        options = replace(options, capacity=holding(options.capacity, options.sample))
    return check_options(options, changes), state, plan


def _resumed_state(
    store: Store, found: Checkpoint, cut: Snapshot, changes: Mapping[str, Any], how: RedistributionOptions
) -> tuple[dict[str, Any], Partitions | None]:
    """The state that a rank goes on with, and, where episodes were dealt out anew, how."""
    storage, rank, size = store.snapshot.storage, changes["rank"] or 0, changes["world_size"] or 1
    n_old = found.n_ranks or 1
    saved = "partition"
    if n_old > 1 or size > 1:  # else there is nothing to share
        saved = checkpoints.read_state(storage, found, 0, ("options",))["options"].get("share", saved)
    was_whole = saved == "whole" and n_old > 1
    is_whole = changes.get("share", saved) == "whole" and size > 1
    if size == n_old and how == RedistributionOptions() and was_whole == is_whole:
        return checkpoints.read_state(storage, found, rank), None
    if is_whole and how != RedistributionOptions():
        raise ValueError(f"share='whole': nothing is dealt out, so {how} has no meaning")
    if was_whole and is_whole:
        return _shared_state(storage, found, rank, size), None
    stays = size == n_old and not was_whole and not is_whole
    policy = how.policy if how.policy is not None or stays else "steps"
    n_parts = 1 if is_whole else size
    plan = plan_partitions(cut, found, n_parts, policy=policy, incomplete=how.incomplete, n_envs=how.n_envs)
    part = 0 if is_whole else rank
    state = merged_state(storage, found, plan, store.schema, part=part, rank=rank, world_size=size)
    return state, None if is_whole else plan


def _shared_state(storage: Storage, found: Checkpoint, rank: int, size: int) -> dict[str, Any]:
    """The state of a rank that shows everything, as an old rank did, with its share of what they counted."""
    state: dict[str, Any] = checkpoints.read_state(storage, found, rank % (found.n_ranks or 1))
    state["reader"]["seed"] = rank_seed(int(state["options"]["seed"]), rank, size)
    state["iterators"] = []
    parts = read_parts(storage, found, ("counters", "limiter"))
    for name in ("sampled", "redrawn"):
        state["counters"][name] = rank_share(sum(int(part["counters"][name]) for part in parts), rank, size)
    if state["limiter"] is not None:
        counts = [part["limiter"] for part in parts]
        state["limiter"] = {key: rank_share(sum(int(c[key]) for c in counts), rank, size) for key in counts[0]}
    return state


def _joined_world(
    store: Store, options: ReplayOptions, checkpoint: str | None, how: RedistributionOptions
) -> RankGroup:
    """This rank's place, once all are here and agree on what they do."""
    storage, rank, size = store.snapshot.storage, options.rank or 0, options.world_size or 1
    timeout_s, through = options.rank_timeout_s, options.through
    world = join_group(storage, rank, size, checkpoint=checkpoint, timeout_s=timeout_s, through=through)
    if size > 1:
        schema = store.schema.to_json() if store.schema is not None else None
        facts: dict[str, Any] = {
            "seed": options.seed,
            "share": options.share,
            "checkpoint": checkpoint or "none",
            "schema": schema,
        }
        # What redistribution counts on to be alike, now and later.
        for name in ("priorities", "statistics", "capacity"):
            facts[f"kind of {name}"] = type(getattr(options, name)).__name__
        world.post("how", how.to_json())
        world.agree("hello", {"store": check_root(storage), **facts, "how": how.to_json()})
    return world


def as_tensors(tree: Any) -> Any:
    """A state as it was before it was stored: arrays are tensors."""
    if isinstance(tree, Mapping):
        return {name: as_tensors(value) for name, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [as_tensors(value) for value in tree]
    if hasattr(tree, "dtype") and not isinstance(tree, torch.Tensor):
        return torch.as_tensor(tree)
    return tree
