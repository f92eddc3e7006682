"""Integer masses of priorities, whose sums are exact and identical on every device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from trajstore.errors import DataError
from trajstore.sampling.priorities.priority_column import PriorityColumn
from trajstore.sampling.priorities.priority_options import Priorities
from trajstore.schema import Array

_HEADROOM_BITS = 3  # the largest mass may grow by this much before the scale is chosen again
_SLACK_BITS = 8  # the largest mass may shrink by this much more before the scale is chosen again
_LARGEST_RAW = 1e300
_MIN_CAPACITY = 1 << 20


class PriorityMasses:
    """Converts priorities to masses: (p + eps)^alpha, or (1 / rank)^alpha, times a scale and rounded.

    The scale is chosen so that the sum of all masses stays below 2**62. `rescale` chooses it; all masses computed
    before are then invalid. Not thread-safe: call methods with the assembler's lock held.
    """

    def __init__(self, options: Priorities) -> None:
        self._options = options
        self._scale = 0.0  # 0: not chosen yet
        self._limit = 0.0  # the largest raw mass that the scale has room for
        self._capacity = 0  # the number of masses that the scale has room for
        self._ranked_at = 0  # number of batches drawn when ranks were computed
        self._sorted_priorities: torch.Tensor | None = None  # only for kind="rank"
        self._may_be_loose = False  # one of the largest priorities was replaced by a far smaller one

    @property
    def scale(self) -> float:
        """The factor from raw masses to integer masses."""
        return self._scale

    @property
    def eps(self) -> float:
        """Added to every priority."""
        return float(self._options.eps)

    def is_stale(self, n_batches: int, column: PriorityColumn) -> bool:
        """Whether `rescale` must be called before the next draw."""
        is_ranked = self._options.kind == "rank"
        is_old = is_ranked and (
            self._sorted_priorities is None or n_batches - self._ranked_at >= self._options.rank_every
        )
        return self._scale == 0.0 or is_old or column.size > self._capacity or self._is_loose(column)

    def _is_loose(self, column: PriorityColumn) -> bool:
        """Whether the scale is far too coarse for the priorities; reads all of them at most once per doubt."""
        if not self._may_be_loose or self._options.kind == "rank":
            return False
        self._may_be_loose = False
        return bool(self.raw(column.maximum()) * 2 ** (_HEADROOM_BITS + _SLACK_BITS) < self._limit)

    def exceeds_scale(self, largest: float) -> bool:
        """Whether new priorities, the largest of which is given, are too large for the scale.

        Raises:
            DataError: The priority has no finite mass.
        """
        return self._options.kind != "rank" and self.raw(largest) > self._limit

    def note_replaced(self, old: float, new: float) -> None:
        """Record that priorities were replaced: without its largest ones, the scale may be too coarse.

        Args:
            old: The largest priority that was replaced.
            new: The largest of those that replace them.
        """
        if self.raw(old) * 2 ** (_HEADROOM_BITS + 1) >= self._limit:
            self._may_be_loose = self.raw(new) * 2 ** (_HEADROOM_BITS + _SLACK_BITS) < self._limit

    def raw(self, priority: float) -> float:
        """(p + eps)^alpha.

        Raises:
            DataError: The result is too large.
        """
        try:
            raw = float((priority + self._options.eps) ** self._options.alpha)
        except OverflowError:
            raw = math.inf
        if not raw < _LARGEST_RAW:
            raise DataError(f"priority {priority!r} is too large for alpha={self._options.alpha!r}")
        return raw

    def rescale(self, n_batches: int, column: PriorityColumn) -> None:
        """Choose the scale for the priorities as they are now, and compute ranks if masses go by rank."""
        self._capacity = max(2 * column.size, _MIN_CAPACITY)
        bits = 61 - (self._capacity - 1).bit_length()
        if self._options.kind == "rank":
            self._sorted_priorities = torch.sort(column.of_steps()).values
            self._ranked_at, self._limit = n_batches, 1.0
        else:
            self._limit = max(self.raw(column.maximum()), 1e-30) * 2**_HEADROOM_BITS
        self._scale, self._may_be_loose = 2.0**bits / self._limit, False

    def masses(self, priority: torch.Tensor) -> torch.Tensor:
        """Masses of priorities: 0 for a priority of 0, at least 1 for any other."""
        if self._sorted_priorities is None:
            raw = priority.to(torch.float64, copy=True).add_(self._options.eps).pow_(self._options.alpha)
        else:
            raw = self._raw_of_ranks(priority, self._sorted_priorities)
        mass = raw.mul_(self._scale).round_().to(torch.int64).clamp_(min=1)
        return mass.mul_(priority > 0)

    def _raw_of_ranks(self, priority: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
        rank = len(known) - torch.searchsorted(known, priority, right=True) + 1
        return rank.to(torch.float64).reciprocal_().pow_(self._options.alpha)

    def raw_masses(self, priority: Array, raised: Array) -> Array:
        """What `masses` multiplies by `scale` and rounds, for compiled loops.

        Args:
            priority: Priorities on the host.
            raised: The same plus `eps`, as float64. The result may overwrite it.
        """
        # torch.pow, not that of numpy or numba: another rounding would change masses, and so batches.
        if self._sorted_priorities is None:
            torch.from_numpy(raised).pow_(self._options.alpha)
            return raised
        return self._raw_of_ranks(torch.from_numpy(priority), self._sorted_priorities).numpy()

    def state_dict(self) -> dict[str, Any]:
        ranks = self._sorted_priorities
        return {
            "scale": self._scale,
            "limit": self._limit,
            "size": self._capacity,
            "ranked_at": self._ranked_at,
            "is_loose": self._may_be_loose,
            "ranks": None if ranks is None else ranks.cpu(),
        }

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        self._scale, self._limit = float(state["scale"]), float(state["limit"])
        self._capacity, self._ranked_at = int(state["size"]), int(state["ranked_at"])
        self._may_be_loose = bool(state["is_loose"])
        ranks = state["ranks"]
        self._sorted_priorities = None if ranks is None else torch.as_tensor(ranks).to(device)
