"""Which rank gets which episodes: deterministic arithmetic on lengths, and the report of what became of them."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch

from trajstore.errors import MissingExtraError
from trajstore.format.spans import END_LABELS, End
from trajstore.sampling.compiled.selection import compiled_loops
from trajstore.schema import Array

if TYPE_CHECKING:
    import pandas as pd

Policy = Literal["steps", "episodes", "contiguous", "interleaved"]
Fate = Literal["keep", "drop", "truncate"]
CAUSES = ("open", "headless", "cut")
_MANY_PLACES = 1 << 12  # a heap is faster than the loop then


def deal(lengths: Array, n: int, policy: Policy = "steps") -> Array:
    """The rank of each episode, given their lengths in order of arrival; a function of nothing else.

    ``steps``: longest first, each to the rank with fewest steps so far, so ranks differ by at most the longest
    episode. ``episodes``: numbers of episodes differ by at most one; dealt by length, there and back.
    ``contiguous``: blocks in order of arrival, cut where equal parts of all steps end. ``interleaved``: in turn.
    """
    if policy not in get_args(Policy):
        raise ValueError(f"policy: expected one of {', '.join(get_args(Policy))}, got {policy!r}")
    lengths = np.asarray(lengths, np.int64)
    if policy == "contiguous":
        before, total = np.cumsum(lengths) - lengths, max(1, int(lengths.sum()))
        middle: Array = (2 * before + lengths) / (2 * total)
        return np.minimum((middle * n).astype(np.int64), n - 1)
    in_turn = np.arange(len(lengths)) % n
    if policy == "interleaved":
        return in_turn
    order = np.argsort(-lengths, kind="stable")
    rank = np.empty(len(lengths), np.int64)
    if policy == "episodes":
        is_back = np.arange(len(lengths)) // n % 2 == 1
        rank[order] = np.where(is_back, n - 1 - in_turn, in_turn)
    else:
        rank[order] = _least_loaded(lengths[order], n)
    return rank


def _least_loaded(lengths: Array, n: int) -> Array:
    kernels = compiled_loops(torch.device("cpu"), True, "partition_loops")
    if kernels is not None and n <= _MANY_PLACES:
        found: Array = kernels.least_loaded(lengths, n)
        return found
    return least_loaded(lengths, n)


def least_loaded(lengths: Array, n: int) -> Array:
    """What the compiled loop does, with a heap."""
    heap = [(0, k) for k in range(n)]
    place = np.empty(len(lengths), np.int64)
    for i, length in enumerate(lengths.tolist()):
        load, k = heap[0]
        heapq.heapreplace(heap, (load + length, k))
        place[i] = k
    return place


def fates(incomplete: str | Mapping[str, str]) -> dict[str, str]:
    """What becomes of incomplete episodes, by cause.

    Raises:
        ValueError: It is none of keep, drop and truncate, or there is no such cause.
    """
    given = dict.fromkeys(CAUSES, incomplete) if isinstance(incomplete, str) else dict(incomplete)
    if unknown := given.keys() - set(CAUSES):
        raise ValueError(f"incomplete: expected any of {', '.join(CAUSES)}, got {', '.join(map(repr, unknown))}")
    for cause, fate in given.items():
        if fate not in get_args(Fate):
            raise ValueError(f"incomplete, {cause}: expected one of {', '.join(get_args(Fate))}, got {fate!r}")
    return dict.fromkeys(CAUSES, "keep") | given


@dataclass(frozen=True, slots=True)
class PartitionReport:
    """What became of the episodes of a checkpoint: counts of episodes and steps.

    Attributes:
        policy: How they were dealt out.
        n_sources: Ranks that saved the checkpoint.
        ranks: By new rank: ``episodes`` and ``steps``, and how many of these are ``open``, ``headless`` or ``cut``
            (an episode may be several of them).
        dropped: By cause and rank that saved it: what was left out.
        truncated: The same for what is shown as if it began or ended where its steps do.
        longest: Steps of the longest episode that was kept.
    """

    policy: str
    n_sources: int
    ranks: list[dict[str, Any]]
    dropped: dict[str, list[dict[str, int]]]
    truncated: dict[str, list[dict[str, int]]]
    longest: int

    def total(self, kind: Literal["dropped", "truncated"], cause: str | None = None) -> dict[str, int]:
        """Sum over all ranks that saved the checkpoint, and over all causes."""
        chosen = self.dropped if kind == "dropped" else self.truncated
        counts = [c for name, by_rank in chosen.items() if cause in (None, name) for c in by_rank]
        return {what: sum(c[what] for c in counts) for what in ("episodes", "steps")}

    def __str__(self) -> str:
        lines = [f"{self.n_sources} -> {len(self.ranks)} ranks, by {self.policy}; longest {self.longest} steps"]
        for rank, counts in enumerate(self.ranks):
            flagged = ", ".join(
                f"{cause} {counts[cause]['episodes']} ({counts[cause]['steps']})" for cause in CAUSES
            )
            lines.append(f"  rank {rank}: {counts['episodes']} episodes, {counts['steps']} steps; {flagged}")
        for kind in ("dropped", "truncated"):
            for cause in CAUSES:
                counts = self.total(kind, cause)
                if counts["episodes"]:
                    lines.append(f"  {kind}, {cause}: {counts['episodes']} episodes, {counts['steps']} steps")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Partitions:
    """Which rank gets which episodes of a checkpoint, one row each, in order of arrival.

    Attributes:
        checkpoint: Id of the checkpoint.
        world_size: Number of ranks that they go to.
        policy: How they are dealt out; ``unchanged``: every episode stays where it is.
        incomplete: What becomes of incomplete ones, by cause.
        streams: Ids that ``stream`` numbers.
        stream: By episode, the stream that holds it.
        episode: Its number there.
        t: Its first step that is left.
        length: Steps that are left.
        end: How it ended, as `End`; open where it had no end yet.
        holder: The rank that had it when the checkpoint was saved.
        source_rank: The rank that recorded it.
        source_env: The environment that recorded it.
        flags: What a redistribution before has made of its end, as the index has it.
        begin: The step that a redistribution before has made its first; far beyond all steps: none.
        rank: The rank that gets it; -1: none, it is dropped.
        env: Its environment there.
        n_sources: Number of ranks that saved the checkpoint.
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
        """Rows of the episodes that a rank gets."""
        return np.flatnonzero(self.rank == rank)

    def fate(self, cause: str, fate: str) -> Array:
        """Which episodes this happens to for this cause."""
        chosen: Array = self.is_cause[cause] & (self.incomplete[cause] == fate)
        return chosen

    @property
    def report(self) -> PartitionReport:
        """Counts of what is kept, flagged and dropped, by rank and cause."""
        kept = self.rank >= 0
        ranks = []
        totals = _counts(self.rank, self.length, kept, self.world_size)
        flagged = {c: _counts(self.rank, self.length, kept & self.is_cause[c], self.world_size) for c in CAUSES}
        for rank, counts in enumerate(totals):
            ranks.append({**counts, **{cause: by_rank[rank] for cause, by_rank in flagged.items()}})
        left = np.ones(len(self), bool)
        dropped = {}
        for cause in CAUSES:  # each is counted once, for the first cause that it goes for
            chosen = self.fate(cause, "drop") & left
            left &= ~chosen
            dropped[cause] = _counts(self.holder, self.length, chosen, self.n_sources)
        truncated = {
            c: _counts(self.holder, self.length, self.fate(c, "truncate") & kept, self.n_sources) for c in CAUSES
        }
        longest = int(self.length[kept].max(initial=0))
        return PartitionReport(self.policy, self.n_sources, ranks, dropped, truncated, longest)

    def to_pandas(self) -> pd.DataFrame:
        """One row an episode: where it is, where it comes from, and who gets it.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise MissingExtraError("to_pandas needs pandas: pip install 'trajstore[pandas]'") from error
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
    """The episodes of a plan that one rank gets, in order of arrival."""

    def __init__(self, plan: Partitions, rank: int) -> None:
        self._plan = plan
        self.rows = plan.of(rank)  # their rows in the plan

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def n_steps(self) -> int:
        return int(self._plan.length[self.rows].sum())

    def columns(self, *names: str) -> list[Array]:
        """Columns of the plan, for these episodes."""
        return [getattr(self._plan, name)[self.rows] for name in names]

    def held_by(self, holder: int) -> Array:
        """Positions, among these episodes, of those that an old rank had."""
        return np.flatnonzero(self._plan.holder[self.rows] == holder)


def _counts(rank: Array, length: Array, chosen: Array, n: int) -> list[dict[str, int]]:
    episodes = np.bincount(rank[chosen], minlength=n)
    steps = np.bincount(rank[chosen], length[chosen], minlength=n)
    return [{"episodes": int(e), "steps": int(s)} for e, s in zip(episodes, steps, strict=True)]


def causes(end: Array, t: Array, begin: Array | None = None) -> dict[str, Array]:
    """Why episodes are incomplete, as masks by cause; what begins where its steps do is not."""
    is_headless = t > 0 if begin is None else (t > 0) & (t != begin)
    return {"open": end == End.OPEN, "headless": is_headless, "cut": end == End.CUT}
