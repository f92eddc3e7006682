"""Which windows come next: at random, in epochs, or from the part of a large store that is resident."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trajstore.arguments import check_positive
from trajstore.errors import DataError
from trajstore.sampling.batch_assembler import BatchAssembler, Where, WindowKind
from trajstore.sampling.permutation import Permutation
from trajstore.sampling.rng import CounterRng
from trajstore.sampling.window_starts import DrawnWindows, concat_drawn
from trajstore.sampling.windows import Windows
from trajstore.schema import Array

State = dict[str, Any]


@dataclass(frozen=True, slots=True)
class DrawScope:
    """Which windows may be drawn: those of chosen episodes, or recent ones, or a mix of recent and all."""

    where: Where | None = None
    recent_steps: int | None = None
    recent_episodes: int | None = None
    recent_fraction: float = 1.0

    def __post_init__(self) -> None:
        for name in ("recent_steps", "recent_episodes"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        if not 0.0 <= self.recent_fraction <= 1.0:
            raise ValueError(f"recent_fraction: expected a number from 0 to 1, got {self.recent_fraction!r}")
        if self.recent_fraction != 1.0 and self.recent_steps is None and self.recent_episodes is None:
            raise ValueError("recent_fraction goes with recent_steps or recent_episodes")

    @property
    def is_recent(self) -> bool:
        """Whether recent windows are asked for."""
        return self.recent_steps is not None or self.recent_episodes is not None


class RandomDraws:
    """Uniform with replacement, over what the index shows at that moment."""

    def __init__(
        self, source: BatchAssembler, batch_size: int, windows: Windows, among: DrawScope, rng: CounterRng
    ) -> None:
        check_positive("batch_size", batch_size)
        self._source = source
        self._batch_size = batch_size
        self._windows = windows
        self._among = among
        self._rng = rng

    def draw(self, batch_size: int | None = None) -> tuple[WindowKind, DrawnWindows] | None:
        """The windows of the next batch, or some in place of others that are gone."""
        among, n = self._among, batch_size or self._batch_size
        kind = self._source.kind(self._windows, among.where)
        low = first_recent(kind, among)
        n_recent = round(n * among.recent_fraction) if low else 0
        if kind.starts.total <= (low if n_recent else 0):
            raise self._source.no_windows(
                self._windows, "that the restrictions allow " if low or among.where else ""
            )
        parts = [(n_recent, low), (n - n_recent, 0)]
        drawn = [kind.starts.draw(count, self._rng, first) for count, first in parts if count]
        return kind, concat_drawn(drawn)

    @property
    def kind(self) -> WindowKind:
        return self._source.kind(self._windows, self._among.where)

    def state_dict(self) -> State:
        return {"rng": self._rng.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rng.load_state_dict(state["rng"])

    def stats(self) -> State:
        return {}


def first_recent(kind: WindowKind, among: DrawScope) -> int:
    """The number of the first recent window."""
    low = 0
    if among.recent_steps is not None:
        low = kind.starts.of_recent_steps(among.recent_steps)
    if among.recent_episodes is not None:
        low = max(low, kind.starts.of_recent_episodes(among.recent_episodes))
    return low


class _Frozen:
    """The windows of one kind as they were at one moment, numbered; what was evicted since is left out."""

    def __init__(self, source: BatchAssembler, kind: WindowKind) -> None:
        index = source.index
        self._source = source
        self.kind = kind
        self.total = kind.starts.total
        self._version = index.version
        self._streams = list(index.numbers)
        usable = kind.starts.usable_steps
        columns = (kind.starts.sums, index.stream.host, index.episode.host, index.t_base.host, usable)
        self._episodes = np.stack([column[: index.n].astype(np.int64) for column in columns])

    def draws(self, numbers: Array, rng: CounterRng) -> DrawnWindows:
        """The windows of these numbers that are still there."""
        sums, stream, episode, t_base, usable = self._episodes
        at = np.searchsorted(sums, numbers, side="right")
        offset = numbers - np.where(at > 0, sums[at - 1], 0)
        spec = self.kind.windows
        start = spec.start(torch.from_numpy(offset), torch.from_numpy(usable[at])).numpy()
        index, entry = self._source.index, at
        if not index.n:
            return DrawnWindows(*(torch.empty(0, dtype=torch.int64, device=index.device) for _ in range(2)))
        if self._version != index.version:
            names = np.array([index.numbers.get(name, -1) for name in self._streams], np.int64)
            entry = index.find(names[stream[at]], episode[at])
        evicted = np.where(entry >= 0, index.t_base.host[entry] - t_base[at], 0)
        # Steps go from the front. Of an episode that lost some, windows that start later are left.
        kept = (entry >= 0) & ((evicted == 0) | (start - evicted >= spec.lead))
        self.kind.starts.update()
        entries, starts = (torch.from_numpy(a[kept]).to(self._source.device) for a in (entry, start - evicted))
        return self.kind.starts.with_n(DrawnWindows(entries, starts), rng)

    def state_dict(self) -> State:
        return {"streams": self._streams, "episodes": torch.from_numpy(self._episodes)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._streams, self._episodes = list(state["streams"]), state["episodes"].numpy()
        self.total = int(self._episodes[0, -1]) if self._episodes.shape[1] else 0
        self._version = -1


def _freeze(source: BatchAssembler, windows: Windows, where: Where | None, why: str) -> _Frozen:
    """The windows there are now; ``why`` no weights are taken.

    Raises:
        ValueError: Windows have weights.
        DataError: There are none.
    """
    if windows.weight != "window":
        raise ValueError(f"weight={windows.weight!r}: {why}")
    kind = source.kind(windows, where)
    if not kind.starts.total:
        raise source.no_windows(windows, "that the restrictions allow " if where else "")
    return _Frozen(source, kind)


class EpochDraws:
    """Every window once, in random order or in order; the windows are those there are when the epoch begins.

    Windows that were evicted meanwhile are skipped and counted, later ones wait for the next epoch. ``part`` of
    ``n_parts`` takes every n-th batch, so that all parts together cover the epoch.
    """

    def __init__(
        self,
        source: BatchAssembler,
        batch_size: int,
        windows: Windows,
        where: Where | None,
        rng: CounterRng,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        part: int = 0,
        n_parts: int = 1,
    ) -> None:
        check_positive("batch_size", batch_size)
        self._frozen = _freeze(source, windows, where, "an epoch holds every window once, so all weigh the same")
        self.kind = self._frozen.kind
        self._batch_size, self._drop_last = batch_size, drop_last
        self._part, self._n_parts = part, n_parts
        self._seed, self._shuffle = rng.fork().seed, shuffle
        self._rng = rng
        self._order = Permutation(self._frozen.total, self._seed)
        self._position = part * batch_size
        self.n_skipped = 0

    @property
    def n_batches(self) -> int:
        """Batches of this part, if nothing is evicted meanwhile."""
        total, size = self._frozen.total, self._batch_size
        n = total // size if self._drop_last else -(-total // size)
        return max(0, -(-(n - self._part) // self._n_parts))

    def draw(self) -> tuple[WindowKind, DrawnWindows] | None:
        """The windows of the next batch; None at the end of the epoch."""
        drawn: list[DrawnWindows] = []
        missing = self._batch_size
        while missing and (numbers := self._numbers(missing)) is not None:
            draw = self._frozen.draws(numbers, self._rng)
            self.n_skipped += len(numbers) - len(draw.entry)
            missing -= len(draw.entry)
            drawn += [draw] if len(draw.entry) else []
        if not drawn or (missing and self._drop_last):
            return None
        return self.kind, concat_drawn(drawn)

    def _numbers(self, n: int) -> Array | None:
        """The next numbers of this part, up to the end of a batch of the whole epoch."""
        size, start = self._batch_size, self._position
        if start >= self._frozen.total:
            return None
        stop = min(start + n, start - start % size + size, self._frozen.total)
        self._position = stop if stop % size else stop + (self._n_parts - 1) * size
        if stop == self._frozen.total:
            self._position = stop
        return self._order(start, stop) if self._shuffle else np.arange(start, stop)

    def state_dict(self) -> State:
        return {
            "rng": self._rng.state_dict(),
            "seed": self._seed,
            "position": self._position,
            "n_skipped": self.n_skipped,
            "frozen": self._frozen.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rng.load_state_dict(state["rng"])
        self._frozen.load_state_dict(state["frozen"])
        self._seed, self._position = int(state["seed"]), int(state["position"])
        self.n_skipped = int(state["n_skipped"])
        self._order = Permutation(self._frozen.total, self._seed)

    def stats(self) -> State:
        return {"n_skipped": self.n_skipped}


class StagedDraws:
    """Uniform over the segments of the store that are resident; they change as draws go on.

    Windows are numbered and cut into segments of equal size. ``n_resident`` segments at a time can be drawn from;
    after ``reuse`` draws for every window of a segment the oldest leaves and the next of a shuffled order enters.
    """

    def __init__(
        self,
        source: BatchAssembler,
        batch_size: int,
        windows: Windows,
        where: Where | None,
        rng: CounterRng,
        *,
        reuse: float,
        segment: int,
        n_resident: int,
    ) -> None:
        check_positive("batch_size", batch_size)
        if not reuse > 0:
            raise ValueError(f"reuse: expected a positive number, got {reuse!r}")
        self._frozen = _freeze(source, windows, where, "staged draws give every window the same weight")
        self.kind = self._frozen.kind
        self._batch_size, self._reuse, self._segment = batch_size, reuse, segment
        self._n_segments = -(-self._frozen.total // segment)
        self._n_resident = min(n_resident, self._n_segments)
        self._rng = rng
        self._seed = rng.fork().seed
        self._orders: dict[tuple[int, int], Permutation] = {}
        self._n_drawn = self._n_turns = self.n_skipped = 0
        self._counts = np.zeros(self._n_segments, np.int64)

    def _segments_at(self, turn: int, n: int) -> Array:
        """The segments that enter at so many turns; every round over all of them has an order of its own."""
        parts = []
        while n:
            cycle, place = divmod(turn, self._n_segments)
            taken = min(n, self._n_segments - place)
            parts.append(self._order(cycle)(place, place + taken))
            turn, n = turn + taken, n - taken
        return np.concatenate(parts)

    def _order(self, cycle: int) -> Permutation:
        kind = (self._n_segments, self._seed + cycle)
        if kind not in self._orders:
            self._orders = {**dict(list(self._orders.items())[-1:]), kind: Permutation(*kind)}  # two rounds meet
        return self._orders[kind]

    def windows_of(self, segment: int, every: int) -> DrawnWindows:
        """Some windows of a segment: every so many-th, and the last."""
        stop = min((segment + 1) * self._segment, self._frozen.total)
        numbers = np.append(np.arange(segment * self._segment, stop, every), stop - 1)
        return self._frozen.draws(numbers, CounterRng(0))

    @property
    def next_segment(self) -> int:
        """The segment that enters next."""
        return int(self._segments_at(self._n_turns + self._n_resident, 1)[0])

    def draw(self) -> tuple[WindowKind, DrawnWindows] | None:
        """The windows of the next batch; an epoch has no end here."""
        drawn: list[DrawnWindows] = []
        missing = self._batch_size
        for _ in range(1000):
            draw = self._frozen.draws(self._numbers(missing), self._rng)
            self.n_skipped += missing - len(draw.entry)
            missing -= len(draw.entry)
            drawn += [draw] if len(draw.entry) else []
            if not missing:
                return self.kind, concat_drawn(drawn)
        raise DataError(f"nearly all of the {self._frozen.total} windows were evicted since; begin anew")

    def _numbers(self, n: int) -> Array:
        parts = []
        while n:
            left = math.ceil((self._n_turns + 1) * self._reuse * self._segment) - self._n_drawn
            taken = min(n, max(1, left))
            parts.append(self._numbers_of_turn(taken))
            n -= taken
        return np.concatenate(parts)

    def _numbers_of_turn(self, n: int) -> Array:
        # Where two rounds meet, a segment may be in both.
        resident = np.unique(self._segments_at(self._n_turns, self._n_resident))
        sizes = np.minimum((resident + 1) * self._segment, self._frozen.total) - resident * self._segment
        sums = np.cumsum(sizes)
        number = self._rng.below(n, int(sums[-1]), torch.device("cpu")).numpy()
        at = np.searchsorted(sums, number, side="right")
        np.add.at(self._counts, resident[at], 1)
        self._n_drawn += n
        while self._n_drawn >= (self._n_turns + 1) * self._reuse * self._segment:
            self._n_turns += 1
        numbers: Array = resident[at] * self._segment + number - (sums - sizes)[at]
        return numbers

    def stats(self) -> State:
        """How far this is from uniform draws: the reuse so far, and the total variation distance by segment."""
        sizes = np.full(self._n_segments, self._segment)
        sizes[-1] = self._frozen.total - (self._n_segments - 1) * self._segment
        n = max(1, self._n_drawn)
        entered = min(self._n_turns + self._n_resident, self._n_segments) * self._segment
        return {
            "n_skipped": self.n_skipped,
            "n_segments": self._n_segments,
            "n_resident": self._n_resident,
            "resident_fraction": self._n_resident / self._n_segments,
            "reuse": self._n_drawn / min(entered, self._frozen.total),
            "distance": float(np.abs(self._counts / n - sizes / self._frozen.total).sum() / 2),
        }

    def state_dict(self) -> State:
        return {
            "rng": self._rng.state_dict(),
            "seed": self._seed,
            "n_drawn": self._n_drawn,
            "n_turns": self._n_turns,
            "segments": (self._segment, self._n_resident),
            "n_skipped": self.n_skipped,
            "counts": torch.from_numpy(self._counts.copy()),
            "frozen": self._frozen.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rng.load_state_dict(state["rng"])
        self._frozen.load_state_dict(state["frozen"])
        self._seed, self._n_drawn = int(state["seed"]), int(state["n_drawn"])
        self._n_turns, self.n_skipped = int(state["n_turns"]), int(state["n_skipped"])
        self._segment, self._n_resident = (int(n) for n in state["segments"])
        self._n_segments = -(-self._frozen.total // self._segment)
        self._counts = state["counts"].numpy().copy()


Draws = RandomDraws | EpochDraws | StagedDraws
