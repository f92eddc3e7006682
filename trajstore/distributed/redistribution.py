"""From M ranks to N: who gets which episodes of a checkpoint. Metadata alone; no step is read or written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from trajstore.arguments import check_positive
from trajstore.distributed.partitions import Partitions, Policy, causes, deal, fates
from trajstore.errors import CorruptionError
from trajstore.format.spans import End, join_spans_by_episode, span_table
from trajstore.sampling.episode_lookup import EpisodeFinder
from trajstore.sampling.index_entries import GONE
from trajstore.schema import Array
from trajstore.storage import Storage
from trajstore.store import checkpoints
from trajstore.store.checkpoints import Checkpoint, parts_of
from trajstore.store.snapshot import Snapshot
from trajstore.store.store import Url, read_schema
from trajstore.store.store import open as open_store

_THREADS = 16


T = TypeVar("T")


def redistribute(
    url: Url,
    *,
    checkpoint: str = "latest",
    world_size: int,
    policy: Policy = "steps",
    incomplete: str | Mapping[str, str] = "keep",
    n_envs: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Partitions:
    """Plan how the episodes of a checkpoint go to a number of ranks; `ReplayBuffer.resume` does it.

    The plan depends on the checkpoint and these arguments alone. Only metadata is read, nothing is written.

    Args:
        url: Of the store.
        checkpoint: Name or id of a checkpoint, or "latest".
        world_size: Number of ranks that go on.
        policy: ``steps``: as many steps each, to within the longest episode. ``episodes``: as many episodes each.
            ``contiguous``: blocks in order of arrival. ``interleaved``: in turn.
        incomplete: What becomes of episodes that are ``open`` (no end yet), ``headless`` (their first steps were
            evicted) or ``cut``: ``keep`` them as they are, ``drop`` them, or ``truncate``: show them as truncated
            where their steps end, and as begun where these begin. One word for all, or one by cause.
        n_envs: Environments of a rank, among which its episodes are dealt out; by default the most that any had.
        storage_options: Options for fsspec's filesystem (credentials, endpoints); never stored or shown.

    Raises:
        CheckpointNotFoundError: There is no such checkpoint.
        AmbiguousCheckpointError: "latest" could be one of several, of different lineages.
    """
    storage = open_store(url, at=checkpoint, storage_options=storage_options).snapshot.storage
    found = checkpoints.find(storage, checkpoint)
    snapshot = Snapshot.at(storage, read_schema(storage), found)
    return plan_partitions(snapshot, found, world_size, policy=policy, incomplete=incomplete, n_envs=n_envs)


def plan_partitions(
    snapshot: Snapshot,
    checkpoint: Checkpoint,
    world_size: int,
    *,
    policy: Policy | None = "steps",
    incomplete: str | Mapping[str, str] = "keep",
    n_envs: int | None = None,
) -> Partitions:
    """The same of a checkpoint that is at hand, and what it shows; policy None: every episode stays where it is."""
    check_positive("world_size", world_size)
    what = fates(incomplete)
    orders = read_parts(snapshot.storage, checkpoint, ("order",))
    episodes = _Episodes.of(snapshot, [part["order"] for part in orders])
    is_cause = causes(episodes.end, episodes.t, episodes.begin)
    dropped = np.zeros(len(episodes.t), bool)
    for cause, mask in is_cause.items():
        dropped |= mask & (what[cause] == "drop")
    rank, kept = np.full(len(dropped), -1), np.flatnonzero(~dropped)
    rank[kept] = episodes.holder[kept] if policy is None else deal(episodes.length[kept], world_size, policy)
    env = episodes.env if policy is None and n_envs is None else _envs(episodes, rank, world_size, n_envs)
    return Partitions(
        checkpoint.id,
        world_size,
        policy or "unchanged",
        what,
        tuple(episodes.streams),
        episodes.stream,
        episodes.episode,
        episodes.t,
        episodes.length,
        episodes.end,
        episodes.holder,
        episodes.source_rank,
        episodes.source_env,
        episodes.flags,
        episodes.begin,
        rank,
        env,
        len(orders),
        is_cause,
    )


def _envs(episodes: _Episodes, rank: Array, world_size: int, n_envs: int | None) -> Array:
    """The environments that episodes go to: of a rank, the one that has least so far."""
    if n_envs is not None:
        check_positive("n_envs", n_envs)
    n = n_envs or int(episodes.source_env.max(initial=0)) + 1
    env = np.full(len(rank), -1)
    for r in range(world_size):
        mine = np.flatnonzero(rank == r)
        env[mine] = deal(episodes.length[mine], n)
    return env


def read_parts(storage: Storage, checkpoint: Checkpoint, keys: Sequence[str]) -> list[Any]:
    """What the states of all ranks have under some keys."""
    return in_threads(lambda rank: checkpoints.read_state(storage, checkpoint, rank, keys), parts_of(checkpoint))


def in_threads(function: Callable[[Any], T], items: Sequence[Any]) -> list[T]:
    """Apply in threads of its own: what is done there uses those of the storage."""
    if len(items) == 1:
        return [function(items[0])]
    with ThreadPoolExecutor(min(_THREADS, len(items)), thread_name_prefix="trajstore-parts") as threads:
        return list(threads.map(function, items))


class _Episodes:
    """All episodes of a checkpoint, in order of arrival.

    Of each rank that order is known. Between ranks it goes by the steps that came after, as all were saved at one
    time: clocks have no say, so two runs that do the same are dealt out alike.
    """

    def __init__(self, streams: Sequence[str], columns: Mapping[str, Array]) -> None:
        self.streams = streams
        self.stream, self.episode, self.t, self.holder = (columns[n] for n in ("stream", "episode", "t", "holder"))
        self.length, self.end, self.source_rank = (columns[n] for n in ("length", "end", "source_rank"))
        self.source_env, self.env = columns["source_env"], columns["env"]
        self.flags, self.begin = columns["flags"], columns["begin"]

    @staticmethod
    def of(snapshot: Snapshot, orders: Sequence[Mapping[str, Any]]) -> _Episodes:
        """Bring together what ranks hold, by their own numbering of streams, with what the streams say of it."""
        number = {name: i for i, name in enumerate(snapshot.names)}
        blocks = [_held(holder, order, number) for holder, order in enumerate(orders)]
        columns = _each_once({name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]})
        # What had no end yet is told apart from what a writer has cut.
        parts = [replace(part, is_finished=False) for part in snapshot.parts()]
        joined = join_spans_by_episode(span_table(parts, None))
        spans, last = joined.columns, joined.last
        at = EpisodeFinder(spans["stream"][last], spans["episode"][last]).find(
            columns["stream"], columns["episode"]
        )
        if (at < 0).any():
            lost = int(np.flatnonzero(at < 0)[0])
            name = snapshot.names[int(columns["stream"][lost])] if columns["stream"][lost] >= 0 else "unknown"
            raise CorruptionError(f"the checkpoint lists episode {columns['episode'][lost]} of stream '{name}'")
        ranks = {record.id: record.rank or 0 for record in snapshot.streams}
        of_stream = np.array([ranks.get(name, 0) for name in snapshot.names], np.int64)
        facts = {name: spans[name][last][at] for name in ("env", "end", "has_final")}
        stop = joined.first_t[at] + joined.n_rows[at] - facts["has_final"]
        columns |= {"length": stop - columns["t"], "source_env": facts["env"]}
        end = facts["end"]
        columns |= {"end": np.where(columns["flags"] > 0, int(End.TRUNCATED), end)}
        columns |= {"source_rank": of_stream[columns["stream"]]}
        columns["env"] = np.where(columns["env"] >= 0, columns["env"], facts["env"])
        columns["after"] = _after(columns["holder"], columns["length"])
        order = np.lexsort((columns["holder"], -columns["after"]))
        return _Episodes(snapshot.names, {name: column[order] for name, column in columns.items()})


def _after(holder: Array, length: Array) -> Array:
    """By episode, in the order that each rank had them: steps of that rank from there on."""
    after = np.empty(len(length), np.int64)
    for rank in np.unique(holder):
        mine = np.flatnonzero(holder == rank)
        after[mine] = np.cumsum(length[mine][::-1])[::-1]
    return after


def _each_once(columns: dict[str, Array]) -> dict[str, Array]:
    """Episodes that several ranks show, as the first of them does."""
    pairs = np.stack([columns["stream"], columns["episode"]])
    order = np.lexsort((columns["holder"], *pairs[::-1]))
    is_again = (np.diff(pairs[:, order]) == 0).all(0)
    if not is_again.any():
        return columns
    kept = np.sort(order[np.append(True, ~is_again)])
    return {name: column[kept] for name, column in columns.items()}


def _held(holder: int, order: Mapping[str, Any], number: Mapping[str, int]) -> dict[str, Array]:
    """The episodes that a rank had, by the numbers that streams have here."""
    numbers = np.array([number.get(name, -1) for name in order["streams"]], np.int64)
    n = len(order["stream"])
    shown = {"env": np.full(n, -1), "flags": np.zeros(n, np.int64), "begin": np.full(n, GONE)}
    return {
        "stream": numbers[np.asarray(order["stream"], np.int64)],
        "episode": np.asarray(order["episode"], np.int64),
        "t": np.asarray(order["t"], np.int64),
        "holder": np.full(n, holder),
        **{name: np.asarray(order.get(name, default), np.int64) for name, default in shown.items()},
    }
