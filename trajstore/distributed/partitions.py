"""Which rank gets which episodes of a checkpoint: the assignment by a policy, and the resulting plan."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch

from trajstore.distributed.incomplete_episodes import CAUSES
from trajstore.distributed.partition_report import PartitionReport, count_by_rank
from trajstore.errors import MissingExtraError
from trajstore.format.spans import END_LABELS
from trajstore.sampling.compiled.selection import compiled_loops
from trajstore.schema import Array

if TYPE_CHECKING:
    import pandas as pd

Policy = Literal["steps", "episodes", "contiguous", "interleaved"]
_MAX_BINS_OF_LOOP = 1 << 12  # with more bins, a heap is faster than the compiled loop


def assign_episodes(lengths: Array, n_bins: int, policy: Policy = "steps") -> Array:
    """Assign episodes to ranks, or to environments; returns the bin of each. Depends on nothing but the arguments.

    Args:
        lengths: Number of steps of each episode, in order of arrival.
        n_bins: Number of ranks or environments.
        policy: ``steps``: longest episode first, each to the bin with the fewest steps so far, so that bins differ
            by at most the longest episode. ``episodes``: numbers of episodes differ by at most one; assigned by
            length, to bins in turn, back and forth. ``contiguous``: runs of episodes in order of arrival with
            about the same number of steps. ``interleaved``: to bins in turn, in order of arrival.
    """
    if policy not in get_args(Policy):
        raise ValueError(f"policy: expected one of {', '.join(get_args(Policy))}, got {policy!r}")
    lengths = np.asarray(lengths, np.int64)
    if policy == "contiguous":
        before, total = np.cumsum(lengths) - lengths, max(1, int(lengths.sum()))
        middle: Array = (2 * before + lengths) / (2 * total)
        return np.minimum((middle * n_bins).astype(np.int64), n_bins - 1)
    in_turn = np.arange(len(lengths)) % n_bins
    if policy == "interleaved":
        return in_turn
    longest_first = np.argsort(-lengths, kind="stable")
    assigned = np.empty(len(lengths), np.int64)
    if policy == "episodes":
        is_backward = np.arange(len(lengths)) // n_bins % 2 == 1
        assigned[longest_first] = np.where(is_backward, n_bins - 1 - in_turn, in_turn)
    else:
        assigned[longest_first] = _assign_to_least_loaded(lengths[longest_first], n_bins)
    return assigned


def _assign_to_least_loaded(lengths: Array, n_bins: int) -> Array:
    loops = compiled_loops(torch.device("cpu"), True, "partition_loops")
    if loops is not None and n_bins <= _MAX_BINS_OF_LOOP:
        assigned: Array = loops.least_loaded(lengths, n_bins)
        return assigned
    return least_loaded(lengths, n_bins)


def least_loaded(lengths: Array, n_bins: int) -> Array:
    """The same result as the compiled loop of this name, with a heap: each length to the bin with the least sum."""
    heap = [(0, k) for k in range(n_bins)]
    assigned = np.empty(len(lengths), np.int64)
    for i, length in enumerate(lengths.tolist()):
        load, k = heap[0]
        heapq.heapreplace(heap, (load + length, k))
        assigned[i] = k
    return assigned


@dataclass(frozen=True, slots=True)
class Partitions:
    """Which rank gets which episodes of a checkpoint; one row per episode, in order of arrival.

    Attributes:
        checkpoint: Id of the checkpoint.
        world_size: Number of ranks that get the episodes.
        policy: How episodes are assigned; ``unchanged``: every rank keeps its own.
        incomplete: What happens to incomplete episodes, by cause.
        streams: Ids of the streams that ``stream`` numbers.
        stream: By episode, the number of the stream that holds it.
        episode: Its number in the stream.
        t: Its first step that was not evicted.
        length: Its number of steps from ``t`` on.
        end: How it ended, as `End`; open if it had not ended yet.
        holder: The rank that held it when the checkpoint was saved.
        source_rank: The rank that recorded it.
        source_env: The environment that recorded it.
        flags: Flags that an earlier redistribution has set, as in the episode index.
        begin: The step that an earlier redistribution has made its first; beyond all steps: none has.
        rank: The rank that gets it; -1: none, it is dropped.
        env: Its environment at that rank.
        n_sources: Number of ranks that saved the checkpoint.
        is_cause: By cause, which episodes are incomplete for it.
    """

    checkpoint: str
    world_size: int
    policy: str
    incomplete: Mapping[str, str]
    streams: tuple[str, ...]
    stream: Array
    episode: Array
    t: Array
    length: Array
    end: Array
    holder: Array
    source_rank: Array
    source_env: Array
    flags: Array
    begin: Array
    rank: Array
    env: Array
    n_sources: int
    is_cause: Mapping[str, Array] = field(repr=False)

    def __len__(self) -> int:
        """Number of episodes, dropped ones included."""
        return len(self.stream)

    def of(self, rank: int) -> Array:
        """Positions of the episodes that a rank gets."""
        return np.flatnonzero(self.rank == rank)

    def fate(self, cause: str, fate: str) -> Array:
        """Which episodes are incomplete for this cause and have this fate, as a mask."""
        chosen: Array = self.is_cause[cause] & (self.incomplete[cause] == fate)
        return chosen

    @property
    def report(self) -> PartitionReport:
        """Counts of kept, flagged and dropped episodes and steps, by rank and cause."""
        kept = self.rank >= 0
        ranks = []
        totals = count_by_rank(self.rank, self.length, kept, self.world_size)
        flagged = {
            c: count_by_rank(self.rank, self.length, kept & self.is_cause[c], self.world_size) for c in CAUSES
        }
        for rank, counts in enumerate(totals):
            ranks.append({**counts, **{cause: by_rank[rank] for cause, by_rank in flagged.items()}})
        uncounted = np.ones(len(self), bool)
        dropped = {}
        for cause in CAUSES:  # an episode is counted once, for the first cause that drops it
            chosen = self.fate(cause, "drop") & uncounted
            uncounted &= ~chosen
            dropped[cause] = count_by_rank(self.holder, self.length, chosen, self.n_sources)
        truncated = {
            c: count_by_rank(self.holder, self.length, self.fate(c, "truncate") & kept, self.n_sources)
            for c in CAUSES
        }
        longest = int(self.length[kept].max(initial=0))
        return PartitionReport(self.policy, self.n_sources, ranks, dropped, truncated, longest)

    def to_pandas(self) -> pd.DataFrame:
        """The plan as a table, one row per episode.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise MissingExtraError("to_pandas needs pandas: pip install pandas") from error
        names = ("episode", "t", "length", "holder", "source_rank", "source_env", "rank", "env")
        frame: dict[str, Any] = {"stream": pd.Categorical.from_codes(self.stream, pd.Index(self.streams))}
        frame |= {name: getattr(self, name) for name in names}
        return pd.DataFrame(frame | {"end": pd.Categorical(END_LABELS[self.end])})

    def __repr__(self) -> str:
        return (
            f"<Partitions of checkpoint '{self.checkpoint}': {len(self)} episodes, {self.n_sources} ->"
            f" {self.world_size} ranks by {self.policy}>"
        )


class RankEpisodes:
    """The episodes of a plan that one rank gets, in order of arrival.

    Attributes:
        positions: Their positions in the plan.
    """

    def __init__(self, plan: Partitions, rank: int) -> None:
        self._plan = plan
        self.positions = plan.of(rank)

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def n_steps(self) -> int:
        return int(self._plan.length[self.positions].sum())

    def columns(self, *names: str) -> list[Array]:
        """Attributes of the plan by name, for these episodes only."""
        return [getattr(self._plan, name)[self.positions] for name in names]

    def held_by(self, holder: int) -> Array:
        """Positions, among these episodes, of those that an old rank held."""
        return np.flatnonzero(self._plan.holder[self.positions] == holder)
