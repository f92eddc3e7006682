"""Chooses the windows of the next batch: at random, every window once, or from the part of a store in the cache."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trajstore.arguments import check_positive
from trajstore.errors import DataError
from trajstore.sampling.batches.batch_assembler import BatchAssembler, Where, WindowKind
from trajstore.sampling.index.entry_rows import EntryRows
from trajstore.sampling.permutation import Permutation
from trajstore.sampling.rng import CounterRng
from trajstore.sampling.window_starts import DrawnWindows, concat_drawn
from trajstore.sampling.windows import Windows
from trajstore.schema import Array

State = dict[str, Any]

_MAX_REDRAWS = 1000  # attempts to replace evicted windows of a batch


@dataclass(frozen=True, slots=True)
class DrawScope:
    """Restricts draws to the windows of chosen episodes, to recent windows, or to a mix of recent and all windows.

    Args:
        where: Returns which episodes of the episode table may be drawn; None for all.
        recent_steps: Draw windows that start among this many newest steps.
        recent_episodes: Draw windows of this many newest episodes.
        recent_fraction: Fraction of a batch that is restricted to recent windows; the rest comes from all windows.
    """

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
            raise ValueError("recent_fraction needs recent_steps or recent_episodes")

    @property
    def is_recent(self) -> bool:
        """Whether batches, or a fraction of each, are restricted to recent windows."""
        return self.recent_steps is not None or self.recent_episodes is not None


class RandomDraws:
    """Draws uniformly with replacement from the windows that the index shows at the moment of the draw."""

    def __init__(
        self, assembler: BatchAssembler, batch_size: int, windows: Windows, scope: DrawScope, rng: CounterRng
    ) -> None:
        check_positive("batch_size", batch_size)
        self._assembler = assembler
        self._batch_size = batch_size
        self._windows = windows
        self._scope = scope
        self._rng = rng

    def draw(self, batch_size: int | None = None) -> tuple[WindowKind, DrawnWindows] | None:
        """Draw the windows of a batch.

        Args:
            batch_size: How many, if not a whole batch: replacements of windows that were evicted after their draw.

        Raises:
            NotReadyError: No such window exists.
        """
        n = batch_size or self._batch_size
        kind, low, n_recent = self._range(n)
        parts = [(n_recent, low), (n - n_recent, 0)]
        drawn = [kind.starts.draw(count, self._rng, first) for count, first in parts if count]
        return kind, concat_drawn(drawn)

    def single_draw(self) -> tuple[WindowKind, tuple[int, CounterRng, int]] | None:
        """The draw of a batch that is uniform over one range of units: how many, the generator, and the first unit.

        None if the batch is drawn in two parts.

        Raises:
            NotReadyError: No such window exists.
        """
        kind, low, n_recent = self._range(self._batch_size)
        if n_recent not in (0, self._batch_size):
            return None
        return kind, (self._batch_size, self._rng, low if n_recent else 0)

    def _range(self, n: int) -> tuple[WindowKind, int, int]:
        """The kind of window, the number of the first recent one, and how many of ``n`` have to be recent."""
        scope = self._scope
        kind = self._assembler.kind(self._windows, scope.where)
        low = first_recent(kind, scope)
        n_recent = round(n * scope.recent_fraction) if low else 0
        if kind.starts.total <= (low if n_recent else 0):
            raise self._assembler.no_windows(
                self._windows, "that the restrictions allow " if low or scope.where else ""
            )
        return kind, low, n_recent

    @property
    def kind(self) -> WindowKind:
        return self._assembler.kind(self._windows, self._scope.where)

    def state_dict(self) -> State:
        return {"rng": self._rng.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rng.load_state_dict(state["rng"])

    def stats(self) -> State:
        return {}


def first_recent(kind: WindowKind, scope: DrawScope) -> int:
    """Return the number of the first recent window; 0 if all windows are in the scope."""
    low = 0
    if scope.recent_steps is not None:
        low = kind.starts.first_of_recent_steps(scope.recent_steps)
    if scope.recent_episodes is not None:
        low = max(low, kind.starts.first_of_recent_episodes(scope.recent_episodes))
    return low


class _FrozenWindows:
    """The numbered windows of one kind that existed at one moment.

    Windows that are evicted later keep their numbers, but are no longer drawn.
    """

    def __init__(self, assembler: BatchAssembler, kind: WindowKind) -> None:
        index = assembler.index
        self._assembler = assembler
        self.kind = kind
        self.total = kind.starts.total
        self.is_compiled = assembler.kernels is not None
        self._version = index.version
        self._streams = list(index.numbers)
        usable = kind.starts.usable_steps
        columns = (kind.starts.sums, index.stream.host, index.episode.host, index.t_base.host, usable)
        self._episodes = np.stack([column[: index.n].astype(np.int64) for column in columns])

    def draws(self, numbers: Array, rng: CounterRng) -> DrawnWindows:
        """Return the windows with these numbers, without those that were evicted."""
        (sums, _, _, _, usable), index, windows = self._episodes, self._assembler.index, self.kind.windows
        at = np.searchsorted(sums, numbers, side="right")
        offset = numbers - np.where(at > 0, sums[at - 1], 0)
        start = windows.start(torch.from_numpy(offset), torch.from_numpy(usable[at])).numpy()
        if not index.n:
            return DrawnWindows(*(torch.empty(0, dtype=torch.int64, device=index.device) for _ in range(2)))
        entry, n_evicted = self._entries(at)
        # Steps are evicted from the front of an episode. Windows that start behind them remain.
        kept = (entry >= 0) & ((n_evicted == 0) | (start - n_evicted >= windows.lead))
        self.kind.starts.update()
        entries, starts = (torch.from_numpy(a[kept]).to(self._assembler.device) for a in (entry, start - n_evicted))
        return self.kind.starts.with_n(DrawnWindows(entries, starts), rng)

    def _entries(self, at: Array) -> tuple[Array, Array]:
        """The index entries of numbered episodes, -1 for evicted ones, and how many steps they have lost."""
        _, stream, episode, t_base, _ = self._episodes
        index, entry = self._assembler.index, at
        if self._version != index.version:
            streams = np.array([index.numbers.get(name, -1) for name in self._streams], np.int64)
            entry = index.find(streams[stream[at]], episode[at])
        return entry, np.where(entry >= 0, index.t_base.host[entry] - t_base[at], 0)

    def rows(self, start: int, stop: int) -> EntryRows:
        """Return the rows that the windows with numbers ``[start, stop)`` have, and perhaps a few more."""
        sums, usable = self._episodes[0], self._episodes[4]
        if not self._assembler.index.n:
            return EntryRows.none()
        first, last = np.searchsorted(sums, [start, stop - 1], side="right")
        at = np.arange(first, last + 1)
        before = np.where(at > 0, sums[at - 1], 0)
        low, high = np.maximum(start - before, 0), np.minimum(stop, sums[at]) - before
        chosen = high > low
        at, low, high = at[chosen], low[chosen], high[chosen]
        windows, n = self.kind.windows, torch.from_numpy(usable[at])
        low, high = (windows.start(torch.from_numpy(offset), n).numpy() for offset in (low, high - 1))
        entry, n_evicted = self._entries(at)
        reach = windows.size * windows.stride + max(windows.n_range[1] if windows.n_step is not None else 0, 1)
        rows = EntryRows(entry, low - n_evicted - windows.burn_in * windows.stride, high - n_evicted + reach)
        return rows.take(entry >= 0)

    def state_dict(self) -> State:
        return {"streams": self._streams, "episodes": torch.from_numpy(self._episodes)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._streams, self._episodes = list(state["streams"]), state["episodes"].numpy()
        self.total = int(self._episodes[0, -1]) if self._episodes.shape[1] else 0
        self._version = -1


def _freeze(assembler: BatchAssembler, windows: Windows, where: Where | None, why: str) -> _FrozenWindows:
    """Number the windows that exist now.

    Raises:
        ValueError: The windows have a weight other than ``window``; ``why`` says why that is not possible.
        NotReadyError: No such window exists.
    """
    if windows.weight != "window":
        raise ValueError(f"weight={windows.weight!r}: {why}")
    kind = assembler.kind(windows, where)
    if not kind.starts.total:
        raise assembler.no_windows(windows, "that the restrictions allow " if where else "")
    return _FrozenWindows(assembler, kind)


class EpochDraws:
    """Draws every window once, shuffled or in order.

    An epoch consists of the windows that exist when it starts. Windows that are evicted before their turn are
    skipped and counted; windows that are added later belong to the next epoch.

    Args:
        assembler: Has the index and the kinds of window.
        batch_size: Windows in a batch.
        windows: The kind of window.
        where: Returns which episodes of the episode table may be drawn; None for all.
        rng: Gives the seed of the shuffle.
        shuffle: Whether to draw in random order.
        drop_last: Whether to leave out the last batch if it is not full.
        part: Which part of the epoch to draw: every ``n_parts``-th batch, from batch number ``part`` on.
        n_parts: Number of parts, which together cover the epoch.

    Attributes:
        n_skipped: Windows that were skipped because they had been evicted.
    """

    def __init__(
        self,
        assembler: BatchAssembler,
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
        self._frozen = _freeze(assembler, windows, where, "an epoch holds every window once, so all weigh the same")
        self.kind = self._frozen.kind
        self._batch_size, self._drop_last = batch_size, drop_last
        self._part, self._n_parts = part, n_parts
        self._seed, self._shuffle = rng.fork().seed, shuffle
        self._rng = rng
        self._order = Permutation(self._frozen.total, self._seed, compiled=self._frozen.is_compiled)
        self._position = part * batch_size
        self.n_skipped = 0

    @property
    def n_batches(self) -> int:
        """Number of batches of this part, if no window is evicted during the epoch."""
        total, size = self._frozen.total, self._batch_size
        n = total // size if self._drop_last else -(-total // size)
        return max(0, -(-(n - self._part) // self._n_parts))

    def draw(self) -> tuple[WindowKind, DrawnWindows] | None:
        """Return the windows of the next batch; None at the end of the epoch."""
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
        """Return at most ``n`` next numbers of this part, up to the end of the current batch; None at the end."""
        start = self._position
        if start >= self._frozen.total:
            return None
        stop, self._position = self._next(start, n)
        return self._order(start, stop) if self._shuffle else np.arange(start, stop)

    def _next(self, start: int, n: int) -> tuple[int, int]:
        """The end of at most ``n`` numbers from ``start`` on in one batch, and where the next ones begin."""
        size = self._batch_size
        stop = min(start + n, start - start % size + size, self._frozen.total)
        if stop == self._frozen.total or stop % size:
            return stop, stop
        return stop, stop + (self._n_parts - 1) * size

    @property
    def is_in_order(self) -> bool:
        """Whether windows are drawn in order of arrival."""
        return not self._shuffle

    @property
    def position(self) -> int:
        """Where the next batch begins."""
        return self._position

    def steps_between(self, start: int, stop: int) -> int:
        """About how many steps the windows between two positions have that other windows do not have."""
        return (stop - start) // self._n_parts

    def rows_ahead(self, position: int, n: int) -> tuple[EntryRows, int] | None:
        """The rows of at most ``n`` windows from a position on, and the position after them; None at the end."""
        if position >= self._frozen.total:
            return None
        if self._n_parts == 1:
            stop = after = min(position + n, self._frozen.total)
        else:
            stop, after = self._next(position, n)
        return self._frozen.rows(position, stop), after

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
        self._order = Permutation(self._frozen.total, self._seed, compiled=self._frozen.is_compiled)

    def stats(self) -> State:
        return {"n_skipped": self.n_skipped}


class StagedDraws:
    """Draws uniformly from the segments of a store that are in the cache, and replaces segments over time.

    The windows that exist at the start are numbered and divided into segments of equal size. Draws come from
    ``n_resident`` segments at a time. After ``reuse`` draws for every window of a segment, the oldest segment
    leaves and the next one of a shuffled order enters; that is one *turn*. Every *round* over all segments has its
    own order.

    Args:
        assembler: Has the index and the kinds of window.
        batch_size: Windows in a batch.
        windows: The kind of window.
        where: Returns which episodes of the episode table may be drawn; None for all.
        rng: Gives the random numbers.
        reuse: Draws for every window of a segment, on average, before the next segment enters.
        segment: Windows in a segment.
        n_resident: Segments that can be drawn from at a time.

    Attributes:
        n_skipped: Drawn windows that were replaced because they had been evicted.
    """

    def __init__(
        self,
        assembler: BatchAssembler,
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
        self._frozen = _freeze(assembler, windows, where, "staged draws give every window the same weight")
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
        """Return the segments that enter at ``n`` turns from ``turn`` on."""
        parts = []
        while n:
            round_, place = divmod(turn, self._n_segments)
            count = min(n, self._n_segments - place)
            parts.append(self._order(round_)(place, place + count))
            turn, n = turn + count, n - count
        return np.concatenate(parts)

    def _order(self, round_: int) -> Permutation:
        key = (self._n_segments, self._seed + round_)
        if key not in self._orders:  # keep two: where rounds meet, segments of both are resident
            order = Permutation(*key, compiled=self._frozen.is_compiled)
            self._orders = {**dict(list(self._orders.items())[-1:]), key: order}
        return self._orders[key]

    def windows_of(self, segment: int, every: int) -> DrawnWindows:
        """Return every ``every``-th window of a segment, and its last one."""
        stop = min((segment + 1) * self._segment, self._frozen.total)
        numbers = np.append(np.arange(segment * self._segment, stop, every), stop - 1)
        return self._frozen.draws(numbers, CounterRng(0))

    @property
    def next_segment(self) -> int:
        """The segment that enters next, to be loaded ahead of time."""
        return int(self._segments_at(self._n_turns + self._n_resident, 1)[0])

    def draw(self) -> tuple[WindowKind, DrawnWindows] | None:
        """Draw the windows of the next batch. There is no end, so the result is never None.

        Raises:
            DataError: Nearly all windows were evicted since the start.
        """
        drawn: list[DrawnWindows] = []
        missing = self._batch_size
        for _ in range(_MAX_REDRAWS):
            draw = self._frozen.draws(self._numbers(missing), self._rng)
            self.n_skipped += missing - len(draw.entry)
            missing -= len(draw.entry)
            drawn += [draw] if len(draw.entry) else []
            if not missing:
                return self.kind, concat_drawn(drawn)
        raise DataError(
            f"staged draws: nearly all of their {self._frozen.total} windows were evicted; call staged() again"
        )

    def _numbers(self, n: int) -> Array:
        parts = []
        while n:
            n_left = math.ceil((self._n_turns + 1) * self._reuse * self._segment) - self._n_drawn
            count = min(n, max(1, n_left))
            parts.append(self._numbers_of_turn(count))
            n -= count
        return np.concatenate(parts)

    def _numbers_of_turn(self, n: int) -> Array:
        # Where two rounds meet, a segment may be resident in both; it counts once.
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
        """Return how draws so far differ from uniform ones: reuse, and total variation distance over segments."""
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
