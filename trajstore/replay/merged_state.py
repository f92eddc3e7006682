"""The state that a rank goes on with, made of what M other ranks saved: its own episodes of each, as they were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trajstore.arguments import parse_bytes
from trajstore.distributed.partitions import Partitions
from trajstore.distributed.redistribution import EpisodeFinder
from trajstore.errors import CorruptionError
from trajstore.format.spans import expand_ranges
from trajstore.replay.statistics import RunningStatistics
from trajstore.sampling.index_entries import TRUNCATED
from trajstore.sampling.rng import rank_seed
from trajstore.schema import Array, Schema
from trajstore.storage import Storage
from trajstore.store import checkpoints
from trajstore.store.checkpoints import Checkpoint, parts_of

_FRESH_MASSES = {"scale": 0.0, "limit": 0.0, "size": 0, "ranked_at": 0, "is_loose": False, "ranks": None}


def merged_state(
    storage: Storage,
    checkpoint: Checkpoint,
    plan: Partitions,
    schema: Schema | None,
    *,
    part: int,
    rank: int,
    world_size: int,
) -> dict[str, Any]:
    """The state of a rank that shows one part of a plan; what the old ranks saved is read one after the other.

    Per-step values (priorities, written columns, uses) are carried bit by bit. Sums over ranks (batches sampled,
    steps evicted, inserts counted) stay what they were: every new rank gets an equal share. Draws go on at the
    largest counter that any old rank had reached, with the new rank's own seed, so no number is used twice.
    """
    merging = _Merging(plan, plan.of(part), rank, world_size)
    for holder, old in enumerate(parts_of(checkpoint)):
        merging.add(holder, checkpoints.read_state(storage, checkpoint, old))
    return merging.result(schema)


def rank_share(total: int, rank: int, world_size: int) -> int:
    """A rank's equal share of a count: all shares add up to it."""
    return int(total) // world_size + (rank < int(total) % world_size)


class _Merging:
    """Takes up one old rank's state after the other."""

    def __init__(self, plan: Partitions, mine: Array, rank: int, world_size: int) -> None:
        self._plan = plan
        self._rank, self._world_size = rank, world_size
        self._mine = mine
        self._number = {name: i for i, name in enumerate(plan.streams)}
        self._start = np.cumsum(plan.length[self._mine]) - plan.length[self._mine]
        self._size = int(plan.length[self._mine].sum())
        self._columns: dict[str, Array] = {}
        self._about: dict[str, Any] = {}  # columns that were added, of any rank
        self._arrivals: list[Array] = []
        self._states: list[dict[str, Any]] = []  # without what grows with the data
        self._newest = np.full(len(plan.streams), -1)
        self._typical: list[float] = []

    def add(self, holder: int, state: dict[str, Any]) -> None:
        order, reader = state.pop("order"), dict(state.pop("reader"))
        numbers = self._numbers(order["streams"])
        known = numbers >= 0
        np.maximum.at(self._newest, numbers[known], np.asarray(order["newest"])[: len(numbers)][known])
        steps = reader["priorities"].pop("steps") if "priorities" in reader else reader.pop("steps", None)
        self._about |= {name: about for name, about in reader["columns"].items() if name not in self._about}
        if steps is not None:
            self._add_steps(holder, steps)
        self._add_arrivals(holder, state["retention"])
        retention = {name: state["retention"][name] for name in ("is_limited", "page_time", "evicted")}
        self._states.append({**state, "reader": reader, "retention": retention})

    def _numbers(self, streams: Sequence[str]) -> Array:
        return np.array([self._number.get(name, -1) for name in streams], np.int64)

    def _held(self, holder: int) -> Array:
        """Which of this rank's episodes an old rank had."""
        return np.flatnonzero(self._plan.holder[self._mine] == holder)

    def _add_steps(self, holder: int, steps: Mapping[str, Any]) -> None:
        """Copy the values of steps to where they lie here: episode after episode."""
        plan, held = self._plan, self._held(holder)
        rows = self._mine[held]
        stream = self._numbers(steps["streams"])[np.asarray(steps["stream"], np.int64)]
        at = EpisodeFinder(stream, np.asarray(steps["episode"])).find(plan.stream[rows], plan.episode[rows])
        if (at < 0).any():
            raise CorruptionError(f"checkpoint '{plan.checkpoint}': the values of some episodes are missing")
        first = (np.asarray(steps["home"])[at] + plan.t[rows]).astype(np.int64)
        owner, source = expand_ranges(first, first + plan.length[rows])
        target = source - first[owner] + self._start[held][owner]
        for name, values in steps["columns"].items():
            values = np.asarray(values)
            if name not in self._columns:
                fill = self._about[name]["fill"] if name in self._about else 0  # of ranks that did not keep it
                self._columns[name] = np.full((self._size, *values.shape[1:]), fill, values.dtype)
            self._columns[name][target] = values[source]
        self._typical.append(float(steps["typical"]))

    def _add_arrivals(self, holder: int, retention: Mapping[str, Any]) -> None:
        """Keep what arrived, of this rank's episodes: time, order, stream, episode, t, rows, holder."""
        numbers = self._numbers(retention["streams"])
        blocks = []
        for name, items in retention["queues"].items():
            items = np.asarray(items, np.float64)
            stream = np.full(items.shape[1], numbers[int(name)])
            blocks.append(np.stack([items[4], items[0], stream, *items[1:4]]))
        page = np.asarray(retention["page"], np.int64)
        if page.shape[1]:
            pairs, first, count = np.unique(page, axis=1, return_index=True, return_counts=True)
            t = np.asarray(retention["page_arrived"])[first]
            order = float(retention["order"]) + first
            time = np.full(len(first), float(retention["page_time"]))
            blocks.append(np.stack([time, order, numbers[pairs[0]], pairs[1], t, count]).astype(np.float64))
        if blocks:
            items = np.concatenate(blocks, 1)
            rows = self._mine[self._held(holder)]
            finder = EpisodeFinder(self._plan.stream[rows], self._plan.episode[rows])
            items = items[:, finder.find(items[2].astype(np.int64), items[3].astype(np.int64)) >= 0]
            self._arrivals.append(np.concatenate([items, np.full((1, items.shape[1]), float(holder))]))

    # ---- all together

    def result(self, schema: Schema | None) -> dict[str, Any]:
        first = self._states[min(self._rank, len(self._states) - 1)]
        return {
            "options": first["options"] | {"capacity": self._capacity(), "samples_per_insert": self._pace()},
            "order": self._order(),
            "reader": self._reader(first["reader"]),
            "retention": self._retention(),
            "iterators": [],
            "limiter": self._shared_counts("limiter"),
            "statistics": self._statistics(schema, first["options"]),
            "counters": self._counters(),
        }

    def _share(self, total: int) -> int:
        return rank_share(total, self._rank, self._world_size)

    def _capacity(self) -> Any:
        """The limits of all old ranks together, and of that an equal share."""
        limits = [state["options"]["capacity"] for state in self._states]
        if len(limits) == self._world_size or any(type(limit) is not type(limits[0]) for limit in limits):
            return limits[min(self._rank, len(limits) - 1)]
        if isinstance(limits[0], Mapping):
            summed = {name: self._summed(name, limits) for name in ("steps", "episodes", "bytes")}
            return {**limits[0], **summed}
        return None if limits[0] is None else max(1, self._share(sum(limits)))

    def _pace(self) -> Any:
        """The limiter's options, with a share of the steps that nobody samples before: so it is as far ahead."""
        paces = [state["options"].get("samples_per_insert") for state in self._states]
        if paces[0] is None or any(pace is None for pace in paces):
            return paces[min(self._rank, len(paces) - 1)]
        return {**paces[0], "min_steps": self._share(sum(int(pace["min_steps"]) for pace in paces))}

    def _summed(self, name: str, limits: Sequence[Mapping[str, Any]]) -> int | None:
        values = [limit[name] for limit in limits]
        if any(value is None for value in values):
            return None
        return max(1, self._share(sum(parse_bytes(v, name) if name == "bytes" else v for v in values)))

    def _order(self) -> dict[str, Any]:
        plan, mine = self._plan, self._mine
        is_ended = (plan.fate("open", "truncate") | plan.fate("cut", "truncate"))[mine]
        is_begun = plan.fate("headless", "truncate")[mine]
        return {
            "streams": list(plan.streams),
            "newest": self._newest,
            "stream": plan.stream[mine],
            "episode": plan.episode[mine],
            "t": plan.t[mine],
            "env": plan.env[mine],
            "flags": np.where(is_ended, TRUNCATED, plan.flags[mine]),
            "begin": np.where(is_begun, plan.t[mine], plan.begin[mine]),
        }

    def _steps(self) -> dict[str, Any]:
        plan, mine = self._plan, self._mine
        stop = plan.t[mine] + plan.length[mine]
        return {
            "streams": list(plan.streams),
            "stream": plan.stream[mine],
            "episode": plan.episode[mine],
            "home": self._start - plan.t[mine],
            "limit": stop,
            "known": stop,
            "size": self._size,
            "columns": self._columns,
            "typical": float(np.mean(self._typical)) if self._typical else 0.0,
        }

    def _reader(self, first: Mapping[str, Any]) -> dict[str, Any]:
        readers = [state["reader"] for state in self._states]
        seed = int(self._states[0]["options"]["seed"])
        state = {
            "seed": rank_seed(seed, self._rank, self._world_size),
            "counter": max(int(reader["counter"]) for reader in readers),
            "columns": self._about,
        }
        if "priorities" not in first:
            return state | ({"steps": self._steps()} if self._columns else {})
        priorities = [reader["priorities"] for reader in readers]
        return state | {
            "priorities": {
                "n_batches": max(int(p["n_batches"]) for p in priorities),
                "n_ignored": self._share(sum(int(p["n_ignored"]) for p in priorities)),
                "largest": max(float(p["largest"]) for p in priorities),
                "steps": self._steps(),
                "masses": dict(_FRESH_MASSES),
            }
        }

    def _retention(self) -> dict[str, Any]:
        arrived = np.concatenate([np.empty((7, 0)), *self._arrivals], 1)
        arrived = arrived[:, np.lexsort((arrived[1], arrived[6], arrived[0]))]
        order, time, stream = np.arange(arrived.shape[1]), arrived[0], arrived[2].astype(np.int64)
        items = np.stack([order, *arrived[3:6], time])
        parts = [state["retention"] for state in self._states]
        evicted = {
            cause: {what: self._share(sum(int(p["evicted"][cause][what]) for p in parts)) for what in counts}
            for cause, counts in parts[0]["evicted"].items()
        }
        return {
            "streams": list(self._plan.streams),
            "queues": {str(n): items[:, stream == n] for n in np.unique(stream).tolist()},
            "page": np.empty((2, 0), np.int64),
            "page_arrived": np.empty(0, np.int64),
            "is_limited": all(part["is_limited"] for part in parts),
            "page_time": max(float(part["page_time"]) for part in parts),
            "order": len(order),
            "evicted": evicted,
            "least": [self._size, len(self._mine)],  # what it was given is not over any limit
        }

    def _shared_counts(self, name: str) -> dict[str, int] | None:
        counts = [state[name] for state in self._states if state[name] is not None]
        return {key: self._share(sum(int(c[key]) for c in counts)) for key in counts[0]} if counts else None

    def _counters(self) -> dict[str, Any]:
        counters = [state["counters"] for state in self._states]
        versions = [c["policy_version"] for c in counters if c["policy_version"] is not None]
        held = np.bincount(self._plan.holder, self._plan.length, len(counters))
        known = [(c["bytes_per_step"], n) for c, n in zip(counters, held, strict=True) if c["bytes_per_step"]]
        sizes, weights = zip(*known, strict=True) if known else ((), ())
        return {
            "sampled": self._share(sum(int(c["sampled"]) for c in counters)),
            "redrawn": self._share(sum(int(c["redrawn"]) for c in counters)),
            "bytes_per_step": float(np.average(sizes, weights=np.maximum(weights, 1))) if sizes else None,
            "policy_version": max(versions, default=None),
        }

    def _statistics(self, schema: Schema | None, options: Mapping[str, Any]) -> dict[str, Any] | None:
        """What all ranks have counted, and of the counts an equal share, so that their sums stay."""
        states = [s["statistics"] for s in self._states if s.get("statistics") is not None]
        if not states or schema is None:
            return None
        chosen = options["statistics"]
        total = RunningStatistics(schema, fields=None if isinstance(chosen, bool) else chosen)
        total.load_state_dict(states[0])
        for other in states[1:]:
            one = RunningStatistics(schema, fields=None if isinstance(chosen, bool) else chosen)
            one.load_state_dict(other)
            total.merge(one)
        return {path: self._shared_moments(moments) for path, moments in total.state_dict().items()}

    def _shared_moments(self, moments: Mapping[str, Array]) -> dict[str, Array]:
        n, count = self._world_size, moments["count"]
        mine, nonfinite = (a // n + (self._rank < a % n) for a in (count, moments["n_nonfinite"]))
        m2 = moments["m2"] * (mine / np.maximum(count, 1))
        return {**moments, "count": mine, "n_nonfinite": nonfinite, "m2": m2}
