"""The state of one of N ranks, made from what M ranks saved in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trajstore.arguments import parse_bytes
from trajstore.distributed.partitions import Partitions, RankEpisodes
from trajstore.replay.merged_arrivals import ArrivalsMerge
from trajstore.replay.session_state import Counters, RankShare
from trajstore.replay.statistics import RunningStatistics
from trajstore.sampling.index.index_entries import TRUNCATED
from trajstore.sampling.reader_state import IndexOrder, ReaderMerge
from trajstore.sampling.rng import rank_seed
from trajstore.schema import Schema
from trajstore.storage import Storage
from trajstore.store import checkpoints
from trajstore.store.checkpoints import Checkpoint, parts_of


def merged_state(
    storage: Storage,
    checkpoint: Checkpoint,
    plan: Partitions,
    schema: Schema | None,
    *,
    part: int,
    share: RankShare,
) -> dict[str, Any]:
    """The state of a rank that shows one part of a plan. Reads the states of the old ranks one after the other.

    Per-step values (priorities, written columns, uses) are carried over bit by bit. Sums over ranks (batches
    sampled, steps evicted, inserts counted) are kept: every new rank gets an equal share. Draws continue at the
    largest counter that any old rank had reached, with the new rank's own seed, so no random number is used twice.
    """
    merge = _Merge(plan, RankEpisodes(plan, part), share)
    for holder, old in enumerate(parts_of(checkpoint)):
        merge.add(holder, checkpoints.read_state(storage, checkpoint, old))
    return merge.result(schema)


class _Merge:
    """Adds the state of one old rank after the other; each part of the state knows how to merge itself."""

    def __init__(self, plan: Partitions, episodes: RankEpisodes, share: RankShare) -> None:
        self._plan = plan
        self._episodes = episodes
        self._share = share
        self._newest = np.full(len(plan.streams), -1)
        self._reader = ReaderMerge(plan.streams, *episodes.columns("stream", "episode", "t", "length"))
        self._retention = ArrivalsMerge(plan.streams, *episodes.columns("stream", "episode"))
        self._others: list[dict[str, Any]] = []  # the small rest of each rank's state

    def add(self, holder: int, state: dict[str, Any]) -> None:
        held = self._episodes.held_by(holder)
        IndexOrder.from_tree(state.pop("order")).raise_newest(self._plan.streams, self._newest)
        self._reader.add(state.pop("reader"), held, f"checkpoint '{self._plan.checkpoint}'")
        self._retention.add(state.pop("retention"), held, holder)
        self._others.append(state)

    def result(self, schema: Schema | None) -> dict[str, Any]:
        share, episodes = self._share, self._episodes
        options = [state["options"] for state in self._others]
        own = options[min(share.rank, len(options) - 1)]
        seed = rank_seed(int(options[0]["seed"]), share.rank, share.world_size)
        own_reader = min(share.rank, len(options) - 1)
        return {
            "options": own | {"capacity": self._capacity(options), "samples_per_insert": self._pace(options)},
            "order": self._order().to_tree(),
            "reader": self._reader.result(own_reader, seed, share.of),
            "retention": self._retention.result(share, episodes.n_steps, len(episodes)),
            "iterators": [],
            "limiter": self._limiter(),
            "statistics": self._statistics(schema, own),
            "counters": self._counters().to_tree(),
        }

    def _order(self) -> IndexOrder:
        """The episodes of this rank in order; open and cut ones may be truncated, headless ones begin later."""
        plan, mine = self._plan, self._episodes.positions
        is_ended = (plan.fate("open", "truncate") | plan.fate("cut", "truncate"))[mine]
        is_begun = plan.fate("headless", "truncate")[mine]
        return IndexOrder(
            streams=list(plan.streams),
            newest=self._newest,
            stream=plan.stream[mine],
            episode=plan.episode[mine],
            t=plan.t[mine],
            env=plan.env[mine],
            flags=np.where(is_ended, TRUNCATED, plan.flags[mine]),
            begin=np.where(is_begun, plan.t[mine], plan.begin[mine]),
        )

    def _capacity(self, options: Sequence[Mapping[str, Any]]) -> Any:
        """An equal share of the limits of all old ranks; unchanged if the number of ranks is the same."""
        limits = [one["capacity"] for one in options]
        if len(limits) == self._share.world_size or any(type(limit) is not type(limits[0]) for limit in limits):
            return limits[min(self._share.rank, len(limits) - 1)]
        if isinstance(limits[0], Mapping):
            summed = {name: self._summed(name, limits) for name in ("steps", "episodes", "bytes")}
            return {**limits[0], **summed}
        return None if limits[0] is None else max(1, self._share.of(sum(limits)))

    def _summed(self, name: str, limits: Sequence[Mapping[str, Any]]) -> int | None:
        values = [limit[name] for limit in limits]
        if any(value is None for value in values):
            return None
        return max(1, self._share.of(sum(parse_bytes(v, name) if name == "bytes" else v for v in values)))

    def _pace(self, options: Sequence[Mapping[str, Any]]) -> Any:
        """Options of the pacing, with a share of the steps that must come before the first sample."""
        paces = [one.get("samples_per_insert") for one in options]
        if paces[0] is None or any(pace is None for pace in paces):
            return paces[min(self._share.rank, len(paces) - 1)]
        return {**paces[0], "min_steps": self._share.of(sum(int(pace["min_steps"]) for pace in paces if pace))}

    def _limiter(self) -> dict[str, int] | None:
        counts = [state["limiter"] for state in self._others if state["limiter"] is not None]
        return self._share.of_sums(counts) if counts else None

    def _counters(self) -> Counters:
        counters = [Counters.from_tree(state["counters"]) for state in self._others]
        return Counters.merged(counters, self._share)

    def _statistics(self, schema: Schema | None, options: Mapping[str, Any]) -> dict[str, Any] | None:
        states = [s["statistics"] for s in self._others if s.get("statistics") is not None]
        if not states or schema is None:
            return None
        chosen = options["statistics"]
        total = RunningStatistics(schema, fields=None if isinstance(chosen, bool) else chosen)
        total.load_state_dict(states[0])
        for state in states[1:]:
            total.merge_state(state)
        return total.shared_state(self._share.rank, self._share.world_size)
