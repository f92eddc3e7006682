"""Which windows can start where: prefix sums over the episode index, and draws from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from trajstore.growing import Growing
from trajstore.index import HAS_FINAL, EpisodeIndex
from trajstore.rng import Counter
from trajstore.schema import Array
from trajstore.windows import Windows, starts_before, usable_steps


@dataclass(frozen=True, slots=True)
class Draw:
    """Windows: the index entry of their episode and the position of their first learning step."""

    entry: torch.Tensor
    start: torch.Tensor


class Starts:
    """Running sums of what may be drawn, over the episodes of an index, for one kind of window.

    Follows the index as it grows: entries of episodes that ended are summed once, the open tail at every update.
    """

    def __init__(
        self,
        index: EpisodeIndex,
        spec: Windows,
        reward_with_observation: bool,
        mask: Callable[[], Array] | None = None,
    ) -> None:
        self._index = index
        self._spec = spec
        self._reward_with_observation = reward_with_observation
        self._mask = mask  # gives, by entry, which episodes may be drawn
        self._sums = Growing(np.int64, index.device)
        self._n_closed = 0
        self._seen = (-1, -1)

    def _usable(self, start: int) -> Array:
        index = self._index
        lengths = index.lengths(start)
        return usable_steps(lengths, index.flags.host[start : index.n], self._spec, self._reward_with_observation)

    def update(self) -> None:
        """Catch up with the index; costs what is new and what is open."""
        index = self._index
        if self._seen == (index.generation, index.version):
            return
        is_same = self._seen[0] == index.generation and self._mask is None
        start = self._n_closed if is_same else 0
        mass = self._mass(start)
        before = int(self._sums.host[start - 1]) if start else 0
        self._sums.rewrite(start, before + np.cumsum(mass))
        self._n_closed = index.n_closed
        self._seen = (index.generation, index.version)

    def _mass(self, start: int) -> Array:
        n = self._usable(start)
        counts = self._spec.n_starts(n)
        if self._mask is not None:
            counts = counts * self._mask()[start:]
        if self._spec.weight == "window":
            return counts
        return (counts > 0) * (n if self._spec.weight == "step" else 1)

    @property
    def total(self) -> int:
        """What a draw is uniform over: windows, steps or episodes."""
        return int(self._sums.host[-1]) if self._sums.n else 0

    def of_recent_episodes(self, n: int) -> int:
        """What lies before the last ``n`` episodes."""
        first = max(0, self._index.n - n)
        return int(self._sums.host[first - 1]) if first else 0

    def of_recent_steps(self, n: int) -> int:
        """What lies before the last ``n`` steps; windows may start there and later."""
        sums = self._index.step_sums.host
        before = int(sums[-1]) - n if len(sums) else 0
        if before <= 0:
            return 0
        entry = int(np.searchsorted(sums, before, side="right"))
        if entry == self._index.n:
            return self.total
        low = int(self._sums.host[entry - 1]) if entry else 0
        if self._spec.weight != "window" or int(self._sums.host[entry]) == low:
            return low  # an episode is drawn as a whole
        skipped = before - (int(sums[entry - 1]) if entry else 0)
        return low + starts_before(self._spec, int(self._usable(entry)[0]), skipped)

    def draw(self, n: int, rng: Counter, low: int = 0, high: int | None = None) -> Draw:
        """Draw ``n`` with replacement from ``[low, high)`` of the total."""
        device = self._index.device
        high = self.total if high is None else high
        number = rng.below(n, high - low, device)
        return self.locate(number.add_(low) if low else number, rng)

    def locate(self, number: torch.Tensor, rng: Counter | None = None) -> Draw:
        """The windows of given numbers; with weights other than ``window`` the start is drawn."""
        sums = self._sums.device
        entry = torch.searchsorted(sums, number, right=True)
        spec = self._spec
        if spec.weight == "window":
            offset = number - torch.where(entry > 0, sums[entry - 1], 0)
            if spec.boundary not in ("pad_both", "pad_left"):
                return Draw(entry, offset + spec.lead if spec.lead else offset)
        n = self.usable(entry)
        if spec.weight != "window":
            assert rng is not None
            offset = rng.below(len(entry), spec.n_starts(n), self._index.device)
        return Draw(entry, spec.start(offset, n))

    def usable(self, entry: torch.Tensor) -> torch.Tensor:
        """Steps that a window may learn from, of the episodes at these entries."""
        index = self._index
        logical, flags = index.logical.device, index.flags.device[entry]
        n = logical[entry + 1] - logical[entry] - (flags & HAS_FINAL)
        return usable_steps(n, flags, self._spec, self._reward_with_observation)
