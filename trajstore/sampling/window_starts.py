"""Which windows exist: running sums of the windows of every episode in the index, and uniform draws from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch

from trajstore.sampling.index.environment_chains import EnvironmentChains
from trajstore.sampling.index.episode_facts import LAST_ROW, LAST_STATE, LAST_STEP
from trajstore.sampling.index.episode_index import EpisodeIndex
from trajstore.sampling.index.index_entries import OPEN
from trajstore.sampling.rng import CounterRng
from trajstore.sampling.running_sums import RunningSums
from trajstore.sampling.windows import Windows, leading_flags, starts_before, usable_steps
from trajstore.schema import Array


@dataclass(frozen=True, slots=True)
class DrawnWindows:
    """The windows of a batch.

    Attributes:
        entry: The index entry of each window's episode.
        start: The position of its first learning step.
        n: The number of steps of its n-step return, if that is drawn from a range.
        probability: The probability with which the window was drawn, if draws follow priorities.
        weight: The importance weight that corrects the bias of draws by priority.
    """

    entry: torch.Tensor
    start: torch.Tensor
    n: torch.Tensor | None = None
    probability: torch.Tensor | None = None
    weight: torch.Tensor | None = None

    def replaced(self, where: Array, other: DrawnWindows) -> DrawnWindows:
        """The same draw with the windows at positions ``where`` replaced by those of another draw."""
        at = torch.from_numpy(where).to(self.entry.device)
        merged = {}
        for name in ("entry", "start", "n", "probability", "weight"):
            old, new = getattr(self, name), getattr(other, name)
            merged[name] = old if old is None or new is None else old.index_copy(0, at, new.to(old.dtype))
        return DrawnWindows(**merged)


def concat_drawn(draws: Sequence[DrawnWindows]) -> DrawnWindows:
    """Join several draws into one. Probabilities and weights are dropped if there are several."""
    if len(draws) == 1:
        return draws[0]
    n = [draw.n for draw in draws if draw.n is not None]
    entry, start = torch.cat([draw.entry for draw in draws]), torch.cat([draw.start for draw in draws])
    return DrawnWindows(entry, start, torch.cat(n) if n else None)


class WindowStarts:
    """Running sums, over the episodes of an index, of what a draw of one kind of window is uniform over.

    Depending on the kind's ``weight`` that is windows, steps or episodes; below they are called *units*. A draw is
    a random unit number and a binary search. `update` follows the index as it grows: entries of episodes that ended
    are summed once, those of open episodes at every update.

    Args:
        index: The episodes.
        windows: The kind of window.
        reward_with_observation: Whether the reward of a step's action is stored with the next observation.
        episode_mask: Returns, by entry, which episodes may be drawn; None for all.
        kernels: Compiled loops, for the CPU.

    Attributes:
        chains: The episodes of each environment, if windows cross the ends of episodes.
    """

    def __init__(
        self,
        index: EpisodeIndex,
        windows: Windows,
        reward_with_observation: bool,
        episode_mask: Callable[[], Array] | None = None,
        kernels: ModuleType | None = None,
    ) -> None:
        self._index = index
        self.windows = windows
        self._reward_with_observation = reward_with_observation
        self._episode_mask = episode_mask
        self._kernels = kernels
        self._sums = RunningSums(index.device)
        self._n_closed = 0  # entries whose sums are final
        self._version = -1  # of the index, at the last update
        self.chains: EnvironmentChains | None = None
        is_plain = index.growth_kernels is not None and episode_mask is None and windows.weight == "window"
        self._growth = windows.start_arithmetic if is_plain else None

    def _usable(self, start: int, stop: int | None = None) -> Array:
        index = self._index
        stop = index.n if stop is None else stop
        lengths = index.lengths(start, stop)
        flags = index.flags.host[start:stop]
        usable = usable_steps(lengths, flags, self.windows, self._reward_with_observation)
        return usable.clip(0)  # evicted entries have no steps at all

    def update(self) -> None:
        """Follow the index. The cost is proportional to the new and the open episodes."""
        index = self._index
        if self._version == index.version:
            return
        if self._growth is not None and 0 <= index.changes.reordered_at <= self._version:
            self._extend(*self._growth)
            return
        if self.windows.boundary == "cross":
            self.chains = EnvironmentChains(index)
        removals = index.changes.removals_since(self._version)
        is_same = removals is not None and not any(removal.is_renumbered for removal in removals)
        is_extended = is_same and self._episode_mask is None and self.chains is None
        start = self._n_closed if is_extended else 0
        self._update_head(min(start, max((removal.n_rewritten for removal in removals or ()), default=0)))
        if not start:
            self._sums.base = 0
        before = int(self._sums.host[start - 1]) if start else 0
        self._sums.rewrite(start, before + np.cumsum(self._units(start, index.n)))
        self._n_closed, self._version = index.n_closed, index.version

    def _extend(self, shape: int, reach: int, stride: int) -> None:
        """Follow an index to which steps were only added, in one compiled loop."""
        index, start = self._index, self._n_closed
        assert index.growth_kernels is not None
        before = int(self._sums.host[start - 1]) if start else 0
        leads_on = leading_flags(self._reward_with_observation)
        facts = index.logical.host, index.flags.host, start, before, self.windows.needs_next, leads_on
        index.growth_kernels.sum_starts(*facts, shape, reach, stride, self._sums.resize(index.n))
        self._n_closed, self._version = index.n_closed, index.version

    def _update_head(self, stop: int) -> None:
        """Recompute the sums of the entries before ``stop``, backwards from its sum, so that later sums stay."""
        if stop:
            units = self._units(0, stop)
            after = np.cumsum(units[::-1])[::-1] - units
            last = int(self._sums.host[stop - 1])
            self._sums.put(np.arange(stop), last - after)
            self._sums.base = last - int(units.sum())

    def _units(self, start: int, stop: int) -> Array:
        """Return, by entry, how many units a draw can hit in the episode."""
        n = self._usable(start, stop)
        counts = self._window_counts(n)
        if self._episode_mask is not None:
            counts = counts * self._episode_mask()[start:stop]
        if self.windows.weight == "window":
            return counts
        return (counts > 0) * (n if self.windows.weight == "step" else 1)

    def _window_counts(self, n: Array) -> Array:
        if self.chains is None:
            return self.windows.n_starts(n)
        counts: Array = np.minimum(n, self.chains.n_left - self.windows.reach).clip(0)
        return counts

    @property
    def base(self) -> int:
        """The value that the stored sums start from.

        Evictions at the front raise it, so that later sums need not change.
        """
        return self._sums.base

    @property
    def total(self) -> int:
        """How many units (windows, steps or episodes) a draw is uniform over."""
        return int(self._sums.host[-1]) - self.base if self._sums.n else 0

    @property
    def usable_steps(self) -> Array:
        """By entry: how many steps a window may learn from."""
        return self._usable(0)

    def steps_left_out(self) -> tuple[int, int]:
        """How many steps of ended and of open episodes no window may learn from, because they lack a successor."""
        index = self._index
        left_out = index.lengths() - self._usable(0)
        if self._episode_mask is not None:
            left_out = left_out * self._episode_mask()
        is_open = (index.flags.host[: index.n] & OPEN) != 0
        return int(left_out[~is_open].sum()), int(left_out[is_open].sum())

    @property
    def sums(self) -> Array:
        """By entry: the number of units up to and including it."""
        return self._sums.host - self.base

    def addresses(self) -> tuple[int, int, int]:
        """Memory address of the running sums, their number, and `base`, for `program_loops`."""
        return self._sums.data_ptr, self._sums.n, self.base

    def counts(self, entry: Array) -> Array:
        """Return how many units these episodes have: windows, if every window has the same weight."""
        sums = self._sums.host
        before = np.where(entry > 0, sums[entry - 1], self.base) if len(sums) else entry
        counts: Array = sums[entry] - before
        return counts

    def has_start(self, entry: Array, position: Array) -> Array:
        """Return whether a window can have its first learning step at these positions of episodes."""
        windows, n = self.windows, self.usable_of(entry)
        if windows.boundary == "pad_left":
            stop = (n - windows.reach).clip(1) * (n > 0)
        elif windows.boundary == "pad_both":
            stop = n
        elif self.chains is not None:
            stop = np.minimum(n, self.chains.n_left[entry] - windows.reach)
        else:
            stop = windows.n_starts(n) + windows.lead
        found: Array = (position >= windows.lead) & (position < stop)
        return found

    def usable_of(self, entry: Array) -> Array:
        """Return how many steps of these episodes a window may learn from, on the host."""
        lengths, flags = self._index.lengths_of(entry), self._index.flags.host[entry]
        return usable_steps(lengths, flags, self.windows, self._reward_with_observation).clip(0)

    @property
    def nbytes(self) -> int:
        return self._sums.nbytes

    @property
    def stored_sums(self) -> Array:
        """`sums` plus `base`. A view, valid until the next update."""
        return self._sums.host

    def first_of_recent_episodes(self, n: int) -> int:
        """Return the number of the first unit of the last ``n`` episodes."""
        first = max(self._index.first, self._index.n - n)
        return self._units_before(first)

    def first_of_recent_steps(self, n: int) -> int:
        """Return the number of the first unit of the last ``n`` steps.

        Windows are recent if they start at one of these steps. Weights other than ``window`` draw episodes as a
        whole, so for them the episode that the first of these steps lies in is recent.
        """
        index = self._index
        sums = index.step_sums.host
        before = int(sums[-1]) - n if len(sums) else 0
        if before <= index.step_base:
            return 0
        entry = int(np.searchsorted(sums, before, side="right"))
        if entry == index.n:
            return self.total
        low = self._units_before(entry)
        count = int(self._sums.host[entry]) - self.base - low
        if self.windows.weight != "window" or count == 0:
            return low
        skipped = before - (int(sums[entry - 1]) if entry else index.step_base)
        if self.chains is not None:
            return low + min(count, skipped)
        return low + starts_before(self.windows, int(self._usable(entry, entry + 1)[0]), skipped)

    def _units_before(self, entry: int) -> int:
        return int(self._sums.host[entry - 1]) - self.base if entry else 0

    def draw(self, n: int, rng: CounterRng, low: int = 0) -> DrawnWindows:
        """Draw ``n`` windows with replacement, uniformly over the units from number ``low`` on."""
        if self._kernels is None or self.windows.weight != "window":
            return self._draw_on_device(n, rng, low)
        entry, offset = np.empty((2, n), np.int64)
        state = np.uint64(rng.mixed_seed), np.uint64(rng.take(n))
        limits = self.base, low + self.base, self.total - low
        self._kernels.draw(*state, *limits, self._sums.host, entry, offset)
        entries = torch.from_numpy(entry)
        return self._with_n(entries, self._start(entries, torch.from_numpy(offset)), rng)

    def _draw_on_device(self, n: int, rng: CounterRng, low: int) -> DrawnWindows:
        fewest, most = self.windows.n_range
        limits = [self.total - low]
        if self.windows.weight == "window" and fewest < most:  # the next numbers, because starts are not drawn
            limits.append(most - fewest + 1)
        number, *n_steps = rng.below_each(n, limits, self._index.device)
        number = number.add_(low + self.base) if low + self.base else number
        if not n_steps:
            return self._located(number, rng)
        return self._located(number, rng, n_steps[0].add_(fewest))

    def locate(self, number: torch.Tensor, rng: CounterRng) -> DrawnWindows:
        """Return the windows of unit numbers. For weights other than ``window`` the start is drawn with ``rng``."""
        return self._located(number + self.base, rng)

    def _located(self, number: torch.Tensor, rng: CounterRng, n_steps: torch.Tensor | None = None) -> DrawnWindows:
        """Return the windows of unit numbers to which `base` is added; draws what is not passed."""
        entry = torch.searchsorted(self._sums.device, number, right=True)
        if self.windows.weight == "window":
            offset = number - self._sums.before[entry]
        else:
            offset = rng.below(len(entry), self._n_starts(entry), self._index.device)
        return self.with_n(DrawnWindows(entry, self._start(entry, offset), n_steps), rng)

    def _n_starts(self, entry: torch.Tensor) -> torch.Tensor:
        n = self._usable_on_device(entry)
        if self.chains is None:
            return self.windows.n_starts(n)
        return torch.minimum(n, self.chains.n_left_on_device[entry] - self.windows.reach)

    def _start(self, entry: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        windows = self.windows
        if windows.boundary == "pad_both":
            return windows.start(offset, self._usable_on_device(entry))
        shift = -windows.reach if windows.boundary == "pad_left" else windows.lead
        return offset + shift if shift else offset

    def _with_n(self, entry: torch.Tensor, start: torch.Tensor, rng: CounterRng) -> DrawnWindows:
        low, high = self.windows.n_range
        if low == high:
            return DrawnWindows(entry, start)
        return DrawnWindows(entry, start, rng.below(len(entry), high - low + 1, self._index.device).add_(low))

    def with_n(self, draw: DrawnWindows, rng: CounterRng) -> DrawnWindows:
        """Return the same windows; if n is drawn from a range and they have none yet, with n drawn from ``rng``."""
        return self._with_n(draw.entry, draw.start, rng) if draw.n is None else draw

    def _usable_on_device(self, entry: torch.Tensor) -> torch.Tensor:
        """Return how many steps of these episodes a window may learn from, on the device."""
        if self._kernels is not None:
            return torch.from_numpy(self.usable_of(entry.numpy()))
        facts = self._index.facts()
        if not self.windows.needs_next:
            return facts[:, LAST_STEP][entry] + 1
        return facts[:, LAST_ROW if self._reward_with_observation else LAST_STATE][entry]
