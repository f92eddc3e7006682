"""How a buffer's session begins: with a new or existing store, from a checkpoint, or in place of a dead rank."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from trajstore.distributed.joining import join_group, rejoin_group
from trajstore.distributed.partitions import Partitions, Policy
from trajstore.distributed.rank_group import RankGroup
from trajstore.distributed.redistribution import plan_partitions, read_parts
from trajstore.errors import RankError, SchemaError, StoreExistsError
from trajstore.format.lineage import Lineage
from trajstore.format.marks import Marks
from trajstore.replay.merged_state import merged_state
from trajstore.replay.options import (
    OptionChanges,
    ReplayOptions,
    check_options,
    from_json,
    raised_capacity,
    with_ranks,
)
from trajstore.replay.session_state import RankShare
from trajstore.sampling.rng import rank_seed
from trajstore.sampling.windows import Windows
from trajstore.schema import Schema, check_not_reserved, has_reserved, selected_paths
from trajstore.storage import Storage
from trajstore.store import checkpoints
from trajstore.store.checkpoints import Checkpoint
from trajstore.store.snapshot import Snapshot
from trajstore.store.store import Store, check_root

_log = logging.getLogger(__name__)

Exist = Literal["join", "resume", "fail"]


@dataclass(frozen=True, slots=True)
class RedistributionOptions:
    """How the episodes of a checkpoint are redistributed; see `redistribute`. Policy None: chosen by the buffer."""

    policy: Policy | None = None
    incomplete: str | Mapping[str, str] = "keep"
    n_envs: int | None = None

    def to_json(self) -> dict[str, Any]:
        incomplete = self.incomplete if isinstance(self.incomplete, str) else dict(self.incomplete)
        return {"policy": self.policy, "incomplete": incomplete, "n_envs": self.n_envs}


@dataclass(frozen=True, slots=True)
class SessionStart:
    """What a session begins with.

    Attributes:
        store: Where it writes.
        options: Checked options.
        group: The ranks; all of them have joined.
        checkpoint: The checkpoint that it continues; None for a fresh session.
        state: This rank's state in that checkpoint.
        plan: How episodes were redistributed; None if they were not.
        own_streams: Streams that this rank has written before in this world.
        shown_by_checkpoint: The snapshot that the checkpoint names.
        is_back: Whether this session replaces a rank that died.
        lineage: What a session without a checkpoint shows of the streams that existed when it began. Sessions that
            resume later do not change it.
    """

    store: Store
    options: ReplayOptions
    group: RankGroup
    checkpoint: Checkpoint | None = None
    state: Mapping[str, Any] | None = None
    plan: Partitions | None = None
    own_streams: frozenset[str] = frozenset()
    shown_by_checkpoint: Snapshot | None = None
    is_back: bool = False
    lineage: Lineage = field(default_factory=Lineage)

    def shown(self) -> Snapshot:
        """What can be sampled of the store, as of its last refresh."""
        return self.shown_of(self.store.snapshot)

    def shown_of(self, fresh: Snapshot) -> Snapshot:
        """What can be sampled of a snapshot of the store."""
        options = self.options
        fresh = fresh.within(self.lineage)
        if self.group.size > 1 and options.share == "partition":
            fresh = fresh.only(lambda record: record.rank == options.rank)
        if self.shown_by_checkpoint is not None:
            fresh = self.shown_by_checkpoint.joined(fresh, self.group.id)
        return fresh.ended(self.own_streams) if self.own_streams else fresh

    def first_shown(self) -> Snapshot:
        """What can be sampled when the session begins."""
        shown = self.shown_by_checkpoint
        return shown if shown is not None and not self.is_back else self.shown()

    def first_marks(self) -> dict[str, int]:
        """The first row that this session wants of each stream that exists already."""
        marks = {stream: row for stream, row in Marks.wanted(self.store.snapshot.streams).items() if row}
        if self.checkpoint is not None:  # also 0: the earlier session may have given up rows since
            return marks | dict(Marks.pinned_by(self.checkpoint))
        if self.group.size > 1:  # each rank speaks for the streams that it shows
            return {record.id: marks.get(record.id, 0) for record in self.shown().streams}
        return marks

    @property
    def dead(self) -> list[str]:
        """Streams whose writers this session declares dead."""
        streams = self.store.snapshot.streams
        if self.is_back:
            mine = [record for record in streams if record.id in self.own_streams]
            known = {stream for record in mine for stream in record.view.dead}
            return sorted(known | {record.id for record in mine if not record.is_sealed})
        if self.checkpoint is None:
            return []
        return [r.id for r in streams if r.id in self.checkpoint.streams and not r.is_sealed]

    @property
    def abandoned(self) -> dict[str, int]:
        """By stream: rows that sessions outside this lineage committed after the checkpoint."""
        if self.shown_by_checkpoint is None or self.is_back:
            return {}
        kept = {record.id: record.rows for record in self.shown_by_checkpoint.streams}
        lost = {record.id: record.rows - kept.get(record.id, 0) for record in self.store.snapshot.streams}
        lost = {stream: n for stream, n in lost.items() if n > 0}
        if lost:
            _log.info("%d rows in %d streams were written after the checkpoint", sum(lost.values()), len(lost))
        return lost

    @property
    def growing(self) -> frozenset[str]:
        """Streams that show more episodes than the state knows."""
        if self.group.size > 1 and self.options.share == "whole":
            return frozenset(record.id for record in self.first_shown().streams)
        return self.own_streams

    @property
    def known_spans(self) -> dict[str, int] | None:
        """The number of spans of each stream that the state knows; None: all that are shown."""
        if not self.is_back or self.checkpoint is None:
            return None
        return {stream: extent.spans for stream, extent in self.checkpoint.streams.items()}


def check_exist(exist: object) -> None:
    """Refuse what is not an `Exist`.

    Raises:
        ValueError: It is something else.
    """
    if exist not in (None, "join", "resume", "fail"):
        raise ValueError(f"exist: expected 'join', 'resume' or 'fail', got {exist!r}")


def start_at(store: Store, options: ReplayOptions, given: OptionChanges, exist: Exist | None) -> SessionStart:
    """Begin at a store that may hold steps of earlier sessions; see `ReplayBuffer`.

    Args:
        store: The store.
        options: Checked options.
        given: The same options as they were given, for a resume.
        exist: What to do with steps and checkpoints of earlier sessions; None: join, and say so.

    Raises:
        StoreExistsError: There are some, and ``exist`` is "fail".
    """
    if exist == "resume" and checkpoints.list_checkpoints(store.snapshot.storage):
        return start_resumed(store, "latest", given, RedistributionOptions())
    records = [record for record in store.snapshot.streams if record.rows]
    n_rows = sum(record.rows - record.first_row for record in records)
    if exist == "fail" and records:
        raise StoreExistsError(
            f"{store.url} holds {n_rows} rows of earlier sessions; choose another URL for a new run, or continue"
            " with exist='join' or exist='resume'"
        )
    if records:
        level = logging.WARNING if exist is None else logging.INFO
        _log.log(
            level,
            "%s holds %d rows of %d earlier sessions, which can be sampled too; choose with exist='join', 'resume'"
            " or 'fail'",
            store.url,
            n_rows,
            len(records),
        )
    if store.schema is not None:
        _check_can_be_sampled(store.url, store.schema, options.sample)
    return start_fresh(store, options)


def _check_can_be_sampled(url: str, schema: Schema, windows: Windows) -> None:
    """Refuse a store with fields that no batch can hold, unless the windows leave them out.

    Raises:
        SchemaError: There is such a field. New stores have none.
    """
    try:
        check_not_reserved(selected_paths(schema, windows.fields))
    except SchemaError as error:
        others = [path for path in schema if not has_reserved([path])]
        raise SchemaError(
            f"{url}: {error}. To sample this store, leave it out: sample=Windows(fields={others!r:.200})"
        ) from None


def start_fresh(store: Store, options: ReplayOptions) -> SessionStart:
    """Begin with an empty store, or continue with everything an existing one holds.

    Raises:
        RankError: Another number of ranks has written the store, or the ranks disagree.
    """
    size = options.world_size or 1
    for record in store.snapshot.streams:
        if record.world is not None and record.rows and (record.world_size or 1) != size:
            raise RankError(
                f"{store.url} was written by {record.world_size or 1} ranks, this is one of {size}: continue with"
                " ReplayBuffer.resume(url, checkpoint), which redistributes the episodes"
            )
    group = _joined_group(store, options, None, RedistributionOptions())
    return SessionStart(store, options, group, lineage=store.snapshot.lineage)


def start_resumed(store: Store, which: str, changes: OptionChanges, how: RedistributionOptions) -> SessionStart:
    """Continue from a checkpoint."""
    changes = with_ranks(changes)
    check_options(ReplayOptions(), changes)  # refuses unknown options before anything is read
    found = checkpoints.find(store.snapshot.storage, which)
    shown = Snapshot.at(store.snapshot.storage, store.schema, found)
    options, state, plan = _resumed(store, found, shown, changes, how)
    group = _joined_group(store, options, found.id, how)
    return SessionStart(store, options, group, found, state, plan, shown_by_checkpoint=shown)


def start_rejoined(store: Store, world: str | None, changes: OptionChanges) -> SessionStart:
    """Take the place of a rank that died alone, with all committed steps of its partition.

    Raises:
        RankError: No world has such a rank.
    """
    given = check_options(ReplayOptions(), changes)
    rank, size, storage = given.rank or 0, given.world_size or 1, store.snapshot.storage
    group, began_at = rejoin_group(storage, rank, size, world=world, timeout_s=given.rank_timeout_s)
    own = frozenset(r.id for r in store.snapshot.streams if r.world == group.id and r.rank == rank)
    ours = [c for c in checkpoints.list_checkpoints(storage) if c.world == group.id and (c.n_ranks or 1) == size]
    found = ours[-1] if ours else checkpoints.find(storage, began_at) if began_at is not None else None
    if found is None:
        lineage = store.snapshot.lineage
        return SessionStart(store, given, group, own_streams=own, is_back=True, lineage=lineage)
    how = RedistributionOptions() if ours else RedistributionOptions(**(group.read("how", rank) or {}))
    shown = Snapshot.at(storage, store.schema, found)
    options, state, plan = _resumed(store, found, shown, changes, how)
    return SessionStart(store, options, group, found, state, plan, own, shown, is_back=True)


def _resumed(
    store: Store, found: Checkpoint, shown: Snapshot, changes: OptionChanges, how: RedistributionOptions
) -> tuple[ReplayOptions, dict[str, Any], Partitions | None]:
    state, plan = _resumed_state(store, found, shown, changes, how)
    options = from_json(state["options"], changes)
    if "capacity" in changes:
        state["retention"].pop("least", None)  # a limit that is given applies to all episodes
    elif plan is not None:
        options = replace(options, capacity=raised_capacity(options.capacity, options.sample))
    return check_options(options, changes), state, plan


def _resumed_state(
    store: Store, found: Checkpoint, shown: Snapshot, changes: OptionChanges, how: RedistributionOptions
) -> tuple[dict[str, Any], Partitions | None]:
    """The state that this rank continues with, and the plan where episodes are redistributed."""
    storage, rank, size = store.snapshot.storage, changes.get("rank") or 0, changes.get("world_size") or 1
    n_old = found.n_ranks or 1
    saved = "partition"
    if n_old > 1 or size > 1:  # a single session has nothing to share
        saved = checkpoints.read_state(storage, found, 0, ("options",))["options"].get("share", saved)
    was_whole = saved == "whole" and n_old > 1
    is_whole = changes.get("share", saved) == "whole" and size > 1
    if size == n_old and how == RedistributionOptions() and was_whole == is_whole:
        return checkpoints.read_state(storage, found, rank), None
    if is_whole and how != RedistributionOptions():
        raise ValueError(f"share='whole': every rank shows everything, so {how} has no effect; leave it out")
    if was_whole and is_whole:
        return _shared_state(storage, found, RankShare(rank, size)), None
    stays = size == n_old and not was_whole and not is_whole
    policy = how.policy if how.policy is not None or stays else "steps"
    n_parts = 1 if is_whole else size
    plan = plan_partitions(shown, found, n_parts, policy=policy, incomplete=how.incomplete, n_envs=how.n_envs)
    part = 0 if is_whole else rank
    state = merged_state(storage, found, plan, store.schema, part=part, share=RankShare(rank, size))
    return state, None if is_whole else plan


def _shared_state(storage: Storage, found: Checkpoint, share: RankShare) -> dict[str, Any]:
    """The state of a rank that shows everything: that of an old rank, with a share of what all ranks counted."""
    state: dict[str, Any] = checkpoints.read_state(storage, found, share.rank % (found.n_ranks or 1))
    state["reader"]["seed"] = rank_seed(int(state["options"]["seed"]), share.rank, share.world_size)
    state["iterators"] = []
    parts = read_parts(storage, found, ("counters", "limiter"))
    counted = [{name: part["counters"][name] for name in ("sampled", "redrawn")} for part in parts]
    state["counters"] |= share.of_sums(counted)
    if state["limiter"] is not None:
        state["limiter"] = share.of_sums([part["limiter"] for part in parts])
    return state


def _joined_group(
    store: Store, options: ReplayOptions, checkpoint: str | None, how: RedistributionOptions
) -> RankGroup:
    """Join the other ranks; returns when all have joined and agree on what they do."""
    storage, rank, size = store.snapshot.storage, options.rank or 0, options.world_size or 1
    timeout_s, through = options.rank_timeout_s, options.through
    group = join_group(storage, rank, size, checkpoint=checkpoint, timeout_s=timeout_s, through=through)
    if size > 1:
        schema = store.schema.to_json() if store.schema is not None else None
        facts: dict[str, Any] = {
            "seed": options.seed,
            "share": options.share,
            "checkpoint": checkpoint or "none",
            "schema": schema,
        }
        # Redistribution needs these to be alike on all ranks, now and later.
        for name in ("priorities", "statistics", "capacity"):
            facts[f"kind of {name}"] = type(getattr(options, name)).__name__
        group.post("how", how.to_json())
        group.agree("hello", {"store": check_root(storage), **facts, "how": how.to_json()})
    return group
