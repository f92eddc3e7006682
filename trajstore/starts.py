"""Which windows can start where: prefix sums over the episode index, and draws from them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from trajstore.growing import Growing
from trajstore.index import HAS_FINAL, EpisodeIndex
from trajstore.rng import Counter
from trajstore.schema import Array
from trajstore.windows import Windows, usable_steps


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
        self, index: EpisodeIndex, spec: Windows, reward_with_observation: bool, mask: Array | None = None
    ) -> None:
        self._index = index
        self._spec = spec
        self._reward_with_observation = reward_with_observation
        self._mask = mask  # by entry: episodes that may be drawn; those past its end may not
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
        start = self._n_closed if self._seen[0] == index.generation else 0
        mass = self._mass(start)
        before = int(self._sums.host[start - 1]) if start else 0
        self._sums.rewrite(start, before + np.cumsum(mass))
        self._n_closed = index.n_closed
        self._seen = (index.generation, index.version)

    def _mass(self, start: int) -> Array:
        n = self._usable(start)
        counts = self._spec.n_starts(n)
        if self._mask is not None:
            chosen = np.zeros(len(counts), bool)
            part = self._mask[start : start + len(counts)]
            chosen[: len(part)] = part
            counts = counts * chosen
        if self._spec.weight == "window":
            return counts
        return (counts > 0) * (n if self._spec.weight == "step" else 1)

    @property
    def total(self) -> int:
        """What a draw is uniform over: windows, steps or episodes."""
        return int(self._sums.host[-1]) if self._sums.n else 0

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
