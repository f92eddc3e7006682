"""Which windows can start where: prefix sums over the episode index, and draws from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch

from trajstore.cache.growable_array import GrowableArray
from trajstore.sampling.environment_chains import EnvironmentChains
from trajstore.sampling.episode_index import EpisodeIndex
from trajstore.sampling.index_entries import HAS_FINAL
from trajstore.sampling.rng import CounterRng
from trajstore.sampling.windows import Windows, starts_before, usable_steps
from trajstore.schema import Array


@dataclass(frozen=True, slots=True)
class DrawnWindows:
    """Windows: the index entry of their episode and the position of their first learning step.

    ``n`` is the number of steps of each window's n-step return, where it is drawn from a range.
    """

    entry: torch.Tensor
    start: torch.Tensor
    n: torch.Tensor | None = None
    probability: torch.Tensor | None = None  # of drawing this window, where priorities decide
    weight: torch.Tensor | None = None  # that takes back the bias


def concat_drawn(draws: Sequence[DrawnWindows]) -> DrawnWindows:
    """The windows of several draws, as one."""
    if len(draws) == 1:
        return draws[0]
    n = [draw.n for draw in draws if draw.n is not None]
    entry, start = torch.cat([draw.entry for draw in draws]), torch.cat([draw.start for draw in draws])
    return DrawnWindows(entry, start, torch.cat(n) if n else None)


class WindowStarts:
    """Running sums of what may be drawn, over the episodes of an index, for one kind of window.

    Follows the index as it grows: entries of episodes that ended are summed once, the open tail at every update.
    """

    def __init__(
        self,
        index: EpisodeIndex,
        spec: Windows,
        reward_with_observation: bool,
        mask: Callable[[], Array] | None = None,
        kernels: ModuleType | None = None,
    ) -> None:
        self._index = index
        self._spec = spec
        self._reward_with_observation = reward_with_observation
        self._mask = mask  # gives, by entry, which episodes may be drawn
        self._kernels = kernels
        self._sums = GrowableArray(np.int64, index.device)
        self.base = 0  # what the sums begin with: evictions take away from the front
        self._n_closed = 0
        self._version = -1  # of the index, that the sums are up to date with
        self.chains: EnvironmentChains | None = None

    def _usable(self, start: int, stop: int | None = None) -> Array:
        index = self._index
        stop = index.n if stop is None else stop
        lengths = index.lengths(start, stop)
        usable = usable_steps(lengths, index.flags.host[start:stop], self._spec, self._reward_with_observation)
        return usable.clip(0)  # entries that were evicted have no steps at all

    def update(self) -> None:
        """Catch up with the index; costs what is new and what is open."""
        index = self._index
        if self._version == index.version:
            return
        if self._spec.boundary == "cross":
            self.chains = EnvironmentChains(index)
        removals = index.changes.removals_since(self._version)
        is_same = removals is not None and not any(removal.is_renumbered for removal in removals)
        start = self._n_closed if is_same and self._mask is None and self.chains is None else 0
        self._update_head(min(start, max((removal.n_rewritten for removal in removals or ()), default=0)))
        if not start:
            self.base = 0
        before = int(self._sums.host[start - 1]) if start else 0
        self._sums.rewrite(start, before + np.cumsum(self._mass(start, index.n)))
        self._n_closed, self._version = index.n_closed, index.version

    def _update_head(self, stop: int) -> None:
        """Sum again what lies before an eviction's last entry, backwards: later sums stay as they are."""
        if stop:
            mass = self._mass(0, stop)
            after = np.cumsum(mass[::-1])[::-1] - mass
            last = int(self._sums.host[stop - 1])
            self._sums.put(np.arange(stop), last - after)
            self.base = last - int(mass.sum())

    def _mass(self, start: int, stop: int) -> Array:
        n = self._usable(start, stop)
        counts = self._counts(n)
        if self._mask is not None:
            counts = counts * self._mask()[start:stop]
        if self._spec.weight == "window":
            return counts
        return (counts > 0) * (n if self._spec.weight == "step" else 1)

    def _counts(self, n: Array) -> Array:
        if self.chains is None:
            return self._spec.n_starts(n)
        counts: Array = np.minimum(n, self.chains.left - self._spec.reach).clip(0)
        return counts

    @property
    def total(self) -> int:
        """What a draw is uniform over: windows, steps or episodes."""
        return int(self._sums.host[-1]) - self.base if self._sums.n else 0

    @property
    def usable_steps(self) -> Array:
        """By entry: steps that a window may learn from."""
        return self._usable(0)

    @property
    def sums(self) -> Array:
        """By entry: what may be drawn up to and including it."""
        return self._sums.host - self.base

    def counts(self, entry: Array) -> Array:
        """How many windows episodes have, where all weigh the same."""
        sums = self._sums.host
        before = np.where(entry > 0, sums[entry - 1], self.base) if len(sums) else entry
        counts: Array = sums[entry] - before
        return counts

    def has_start(self, entry: Array, position: Array) -> Array:
        """Whether windows have their first learning step at positions of episodes."""
        spec, n = self._spec, self.usable_of(entry)
        if spec.boundary == "pad_left":
            stop = (n - spec.reach).clip(1) * (n > 0)
        elif spec.boundary == "pad_both":
            stop = n
        elif self.chains is not None:
            stop = np.minimum(n, self.chains.left[entry] - spec.reach)
        else:
            stop = spec.n_starts(n) + spec.lead
        found: Array = (position >= spec.lead) & (position < stop)
        return found

    def usable_of(self, entry: Array) -> Array:
        """Steps that a window may learn from, of some episodes, on the host."""
        flags = self._index.flags.host[entry]
        return usable_steps(self._index.lengths_of(entry), flags, self._spec, self._reward_with_observation).clip(0)

    @property
    def nbytes(self) -> int:
        return self._sums.nbytes

    def of_recent_episodes(self, n: int) -> int:
        """What lies before the last ``n`` episodes."""
        first = max(self._index.first, self._index.n - n)
        return self._before(first)

    def of_recent_steps(self, n: int) -> int:
        """What lies before the last ``n`` steps; windows may start there and later."""
        index = self._index
        sums = index.step_sums.host
        before = int(sums[-1]) - n if len(sums) else 0
        if before <= index.step_base:
            return 0
        entry = int(np.searchsorted(sums, before, side="right"))
        if entry == index.n:
            return self.total
        low = self._before(entry)
        count = int(self._sums.host[entry]) - self.base - low
        if self._spec.weight != "window" or count == 0:
            return low  # an episode is drawn as a whole
        skipped = before - (int(sums[entry - 1]) if entry else index.step_base)
        if self.chains is not None:
            return low + min(count, skipped)
        return low + starts_before(self._spec, int(self._usable(entry, entry + 1)[0]), skipped)

    def _before(self, entry: int) -> int:
        return int(self._sums.host[entry - 1]) - self.base if entry else 0

    def draw(self, n: int, rng: CounterRng, low: int = 0) -> DrawnWindows:
        """Draw ``n`` with replacement from what lies at ``low`` and after."""
        if self._kernels is None or self._spec.weight != "window":
            number = rng.below(n, self.total - low, self._index.device)
            return self.locate(number.add_(low), rng)
        entry, offset = np.empty((2, n), np.int64)
        state = np.uint64(rng.mixed_seed), np.uint64(rng.take(n))
        limits = self.base, low + self.base, self.total - low
        self._kernels.draw(*state, *limits, self._sums.host, entry, offset)
        entries = torch.from_numpy(entry)
        return self._with_n(entries, self._start(entries, torch.from_numpy(offset)), rng)

    def locate(self, number: torch.Tensor, rng: CounterRng) -> DrawnWindows:
        """The windows of given numbers; with weights other than ``window`` the start is drawn."""
        sums, spec = self._sums.device, self._spec
        number = number + self.base
        entry = torch.searchsorted(sums, number, right=True)
        if spec.weight == "window":
            offset = number - torch.where(entry > 0, sums[entry - 1], self.base)
            return self._with_n(entry, self._start(entry, offset), rng)
        offset = rng.below(len(entry), self._n_starts(entry), self._index.device)
        return self._with_n(entry, self._start(entry, offset), rng)

    def _n_starts(self, entry: torch.Tensor) -> torch.Tensor:
        n = self.usable(entry)
        if self.chains is None:
            return self._spec.n_starts(n)
        return torch.minimum(n, self.chains.left_on_device[entry] - self._spec.reach)

    def _start(self, entry: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        spec = self._spec
        if spec.boundary in ("pad_both", "pad_left"):
            return spec.start(offset, self.usable(entry))
        return offset + spec.lead if spec.lead else offset

    def _with_n(self, entry: torch.Tensor, start: torch.Tensor, rng: CounterRng) -> DrawnWindows:
        low, high = self._spec.n_range
        if low == high:
            return DrawnWindows(entry, start)
        return DrawnWindows(entry, start, rng.below(len(entry), high - low + 1, self._index.device).add_(low))

    def with_n(self, draw: DrawnWindows, rng: CounterRng) -> DrawnWindows:
        """The same windows, with the steps of their n-step returns drawn where that is asked for."""
        return self._with_n(draw.entry, draw.start, rng) if draw.n is None else draw

    def usable(self, entry: torch.Tensor) -> torch.Tensor:
        """Steps that a window may learn from, of the episodes at these entries."""
        index = self._index
        logical, flags = index.logical.device, index.flags.device[entry]
        n = logical[entry + 1] - logical[entry] - (flags & HAS_FINAL)
        return usable_steps(n, flags, self._spec, self._reward_with_observation)
