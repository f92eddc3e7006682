"""The plan that gives the episodes of M ranks to N ranks. It reads metadata only; no step is read or written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from trajstore.arguments import check_positive
from trajstore.distributed.incomplete_episodes import fates_by_cause, masks_by_cause
from trajstore.distributed.partitions import Partitions, Policy, assign_episodes
from trajstore.errors import CorruptionError
from trajstore.format.spans import End, join_spans_by_episode, span_table
from trajstore.sampling.index.episode_lookup import EpisodeFinder
from trajstore.sampling.index.index_entries import GONE
from trajstore.schema import Array
from trajstore.storage import Storage
from trajstore.store import checkpoints
from trajstore.store.checkpoints import Checkpoint, parts_of
from trajstore.store.schema_objects import read_schema
from trajstore.store.snapshot import Snapshot
from trajstore.store.store import Url
from trajstore.store.store import open as open_store

_MAX_THREADS = 16

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
    """Plan which rank gets which episodes of a checkpoint; `ReplayBuffer.resume` carries out the same plan.

    The plan depends only on the checkpoint and these arguments. Only metadata is read, nothing is written.

    Args:
        url: URL of the store.
        checkpoint: Name or id of a checkpoint, or "latest".
        world_size: Number of ranks that get the episodes.
        policy: ``steps``: the same number of steps each, to within the longest episode. ``episodes``: the same
            number of episodes each, to within one. ``contiguous``: runs of episodes in order of arrival.
            ``interleaved``: in turn, in order of arrival.
        incomplete: What happens to episodes that are ``open`` (not ended yet), ``headless`` (their first steps were
            evicted) or ``cut``: ``keep`` them as they are, ``drop`` them, or ``truncate`` them: show them as
            truncated where their steps end, and as started where their steps start. One word for all causes, or a
            mapping from cause to word.
        n_envs: Number of environments of a rank, to which its episodes are assigned; by default the largest number
            that any rank had.
        storage_options: Options for fsspec's filesystem (credentials, endpoints); never stored or shown.

    Raises:
        CheckpointNotFoundError: No such checkpoint exists.
        AmbiguousCheckpointError: Several checkpoints of different lineages could be "latest".
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
    """Plan as `redistribute` does, for a checkpoint that is already read.

    Args:
        snapshot: The streams as far as the checkpoint shows them.
        checkpoint: The checkpoint.
        world_size: Number of ranks that get the episodes.
        policy: As for `redistribute`; None: every rank keeps its episodes.
        incomplete: As for `redistribute`.
        n_envs: As for `redistribute`.
    """
    check_positive("world_size", world_size)
    fates = fates_by_cause(incomplete)
    orders = [part["order"] for part in read_parts(snapshot.storage, checkpoint, ("order",))]
    episodes = _CheckpointEpisodes.read(snapshot, orders)
    is_cause = masks_by_cause(episodes.end, episodes.t, episodes.begin)
    is_dropped = np.zeros(len(episodes.t), bool)
    for cause, mask in is_cause.items():
        is_dropped |= mask & (fates[cause] == "drop")
    rank, kept = np.full(len(is_dropped), -1), np.flatnonzero(~is_dropped)
    if policy is None:
        rank[kept] = episodes.holder[kept]
    else:
        rank[kept] = assign_episodes(episodes.length[kept], world_size, policy)
    keeps_envs = policy is None and n_envs is None
    env = episodes.env if keeps_envs else _assign_envs(episodes, rank, world_size, n_envs)
    return Partitions(
        checkpoint.id,
        world_size,
        policy or "unchanged",
        fates,
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


def _assign_envs(episodes: _CheckpointEpisodes, rank: Array, world_size: int, n_envs: int | None) -> Array:
    """The environment of each episode at its new rank, so that a rank's environments get about as many steps."""
    if n_envs is not None:
        check_positive("n_envs", n_envs)
    n = n_envs or int(episodes.source_env.max(initial=0)) + 1
    env = np.full(len(rank), -1)
    for r in range(world_size):
        mine = np.flatnonzero(rank == r)
        env[mine] = assign_episodes(episodes.length[mine], n)
    return env


def read_parts(storage: Storage, checkpoint: Checkpoint, keys: Sequence[str]) -> list[Any]:
    """Some keys of the states of all ranks that saved a checkpoint, by rank."""
    return _map_in_threads(
        lambda rank: checkpoints.read_state(storage, checkpoint, rank, keys), parts_of(checkpoint)
    )


def _map_in_threads(function: Callable[[Any], T], items: Sequence[Any]) -> list[T]:
    # Not in the storage's own threads: the function waits for these.
    if len(items) == 1:
        return [function(items[0])]
    with ThreadPoolExecutor(min(_MAX_THREADS, len(items)), thread_name_prefix="trajstore-parts") as threads:
        return list(threads.map(function, items))


class _CheckpointEpisodes:
    """All episodes of a checkpoint, in order of arrival; attributes are columns, as those of `Partitions`.

    The order of arrival at each rank is known. All ranks were saved at one time, so episodes of different ranks are
    ordered by the number of steps that arrived at their rank since. Clocks are not used: two runs that do the same
    get the same partitions.
    """

    def __init__(self, streams: Sequence[str], columns: Mapping[str, Array]) -> None:
        self.streams = streams
        self.stream, self.episode, self.t, self.holder = (columns[n] for n in ("stream", "episode", "t", "holder"))
        self.length, self.end, self.source_rank = (columns[n] for n in ("length", "end", "source_rank"))
        self.source_env, self.env = columns["source_env"], columns["env"]
        self.flags, self.begin = columns["flags"], columns["begin"]

    @staticmethod
    def read(snapshot: Snapshot, orders: Sequence[Mapping[str, Any]]) -> _CheckpointEpisodes:
        """Join the episodes that ranks held with the span tables of the streams.

        Args:
            snapshot: The streams.
            orders: By rank, its saved order of episodes, with the rank's own stream numbers.

        Raises:
            CorruptionError: A stream lacks an episode that a rank held.
        """
        numbers = {name: i for i, name in enumerate(snapshot.names)}
        held = [_held_episodes(holder, order, numbers) for holder, order in enumerate(orders)]
        columns = _without_repeats({name: np.concatenate([one[name] for one in held]) for name in held[0]})
        columns |= _recorded_columns(snapshot, columns)
        arrived_since = _steps_since(columns["holder"], columns["length"])
        order = np.lexsort((columns["holder"], -arrived_since))
        return _CheckpointEpisodes(snapshot.names, {name: column[order] for name, column in columns.items()})


def _recorded_columns(snapshot: Snapshot, held: Mapping[str, Array]) -> dict[str, Array]:
    """What the streams say of held episodes: length, end, and who recorded them."""
    # Not finished: so episodes without an end read as open, and not as cut by their writer.
    parts = [replace(part, is_finished=False) for part in snapshot.parts()]
    joined = join_spans_by_episode(span_table(parts, None))
    spans, last = joined.columns, joined.last
    at = EpisodeFinder(spans["stream"][last], spans["episode"][last]).find(held["stream"], held["episode"])
    if (at < 0).any():
        raise _missing_episode(snapshot, held, int(np.flatnonzero(at < 0)[0]))
    rank_by_stream = {record.id: record.rank or 0 for record in snapshot.streams}
    ranks = np.array([rank_by_stream.get(name, 0) for name in snapshot.names], np.int64)
    env, end, has_final = (spans[name][last][at] for name in ("env", "end", "has_final"))
    stop = joined.first_t[at] + joined.n_rows[at] - has_final
    return {
        "length": stop - held["t"],
        "source_env": env,
        "end": np.where(held["flags"] > 0, int(End.TRUNCATED), end),
        "source_rank": ranks[held["stream"]],
        "env": np.where(held["env"] >= 0, held["env"], env),
    }


def _missing_episode(snapshot: Snapshot, held: Mapping[str, Array], i: int) -> CorruptionError:
    stream, episode = int(held["stream"][i]), held["episode"][i]
    name = snapshot.names[stream] if stream >= 0 else "unknown"
    return CorruptionError(
        f"the checkpoint lists episode {episode} of stream '{name}', which the stream does not have"
    )


def _steps_since(holder: Array, length: Array) -> Array:
    """By episode, the steps of its holder from this episode on; each holder's episodes are in order of arrival."""
    since = np.empty(len(length), np.int64)
    for rank in np.unique(holder):
        mine = np.flatnonzero(holder == rank)
        since[mine] = np.cumsum(length[mine][::-1])[::-1]
    return since


def _without_repeats(columns: dict[str, Array]) -> dict[str, Array]:
    """Each episode once; if several ranks held it, as the first of them did."""
    pairs = np.stack([columns["stream"], columns["episode"]])
    order = np.lexsort((columns["holder"], *pairs[::-1]))
    is_repeat = (np.diff(pairs[:, order]) == 0).all(0)
    if not is_repeat.any():
        return columns
    kept = np.sort(order[np.append(True, ~is_repeat)])
    return {name: column[kept] for name, column in columns.items()}


def _held_episodes(holder: int, order: Mapping[str, Any], numbers: Mapping[str, int]) -> dict[str, Array]:
    """The episodes that a rank held, with the stream numbers of the snapshot instead of the rank's own."""
    own_numbers = np.array([numbers.get(name, -1) for name in order["streams"]], np.int64)
    n = len(order["stream"])
    defaults = {"env": np.full(n, -1), "flags": np.zeros(n, np.int64), "begin": np.full(n, GONE)}
    return {
        "stream": own_numbers[np.asarray(order["stream"], np.int64)],
        "episode": np.asarray(order["episode"], np.int64),
        "t": np.asarray(order["t"], np.int64),
        "holder": np.full(n, holder),
        **{name: np.asarray(order.get(name, default), np.int64) for name, default in defaults.items()},
    }
