"""How often steps were used, and how old the policy is that took them: for learning (nearly) on policy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from trajstore.arguments import check_positive
from trajstore.errors import DataError

_FIRST = 1024


class UseCounts:
    """How often each step was used, by address: a number that grows with every step, from 0.

    Four bytes for every address from the first that is not forgotten to the last that was used. Not safe to use
    from several threads.

    Args:
        max_uses: How often a step may be used; without a bound by default.
        device: Where counts and answers are.
    """

    def __init__(self, max_uses: int | None = None, *, device: str | torch.device = "cpu") -> None:
        if max_uses is not None:
            check_positive("max_uses", max_uses)
        self._max_uses = max_uses
        self._device = torch.device(device)
        self._base = 0  # the address of the first count
        self._first = 0  # the first address that is not forgotten; at least the base
        self._counts = torch.zeros(_FIRST, dtype=torch.int32, device=self._device)

    @property
    def nbytes(self) -> int:
        return self._counts.nbytes

    def take(self, address: torch.Tensor) -> torch.Tensor:
        """Count a use of each address; one that is named twice is used twice.

        Returns:
            Which of them are used up now: they have been used ``max_uses`` times, or are forgotten. Of the shape of
            the addresses.
        """
        address = self._checked(address)
        if address.numel():
            low, high = address.aminmax()
            if low < 0:
                raise DataError(f"address: expected numbers of at least 0, got {int(low)}")
            self._cover(int(high) + 1)
            flat = address.reshape(-1)
            self._counts.index_add_(0, (flat - self._base).clamp_(min=0), (flat >= self._first).to(torch.int32))
        return self.is_used_up(address)

    def uses(self, address: torch.Tensor) -> torch.Tensor:
        """How often each was used, as int32; 0 of those that are forgotten."""
        address = self._checked(address)
        is_known = (address >= self._first) & (address < self._base + len(self._counts))
        return self._counts[torch.where(is_known, address - self._base, 0)] * is_known

    def is_used_up(self, address: torch.Tensor) -> torch.Tensor:
        """Which were used ``max_uses`` times, or are forgotten."""
        is_forgotten = self._checked(address) < self._first
        if self._max_uses is None:
            return is_forgotten
        return is_forgotten | (self.uses(address) >= self._max_uses)

    def used_up(self, start: int, stop: int) -> torch.Tensor:
        """The addresses from ``start`` to ``stop`` that were used ``max_uses`` times and are not forgotten."""
        start, stop = max(start, self._first), min(stop, self._base + len(self._counts))
        if self._max_uses is None or start >= stop:
            return torch.empty(0, dtype=torch.int64, device=self._device)
        counts = self._counts[start - self._base : stop - self._base]
        return (counts >= self._max_uses).nonzero().squeeze(1) + start

    def forget(self, start: int, stop: int) -> None:
        """The steps from ``start`` to ``stop`` are gone.

        Where that leaves none before ``stop`` their memory is freed, and they count as used up for ever; elsewhere
        their counts are 0 again.
        """
        if not 0 <= start <= stop:
            raise ValueError(f"forget: expected 0 <= start <= stop, got {start} and {stop}")
        if start > self._first:
            self._counts[start - self._base : stop - self._base] = 0
        elif stop > self._first:
            self._first = stop
            if 2 * (self._first - self._base) > len(self._counts):
                self._rebase(0)

    def state_dict(self) -> dict[str, Any]:
        return {"first": self._first, "counts": self._counts[self._first - self._base :].cpu().clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._first = self._base = int(state["first"])
        self._counts = state["counts"].to(self._device, torch.int32)
        self._rebase(0)

    def _checked(self, address: torch.Tensor) -> torch.Tensor:
        if address.dtype != torch.int64:
            raise DataError(f"address: expected int64, got {address.dtype}")
        return address.to(self._device)

    def _cover(self, stop: int) -> None:
        """Have a count for every address below ``stop``; an eighth more, so that most calls find one."""
        if stop - self._base > len(self._counts):
            n = stop - self._first
            self._rebase(n + n // 8)

    def _rebase(self, n: int) -> None:
        """Drop what is forgotten, and have memory for ``n`` counts at least."""
        counts = self._counts[self._first - self._base :]
        self._counts = torch.zeros(max(_FIRST, n, len(counts)), dtype=torch.int32, device=self._device)
        self._counts[: len(counts)] = counts
        self._base = self._first


def staleness_weights(version: torch.Tensor, current: int, half_life: float) -> torch.Tensor:
    """Weights that halve with every ``half_life`` versions of age, as float32; 1 for the current one and later.

    Args:
        version: The policy version that took each step.
        current: The policy version now.
        half_life: In versions; infinite for weights that are all 1.
    """
    if math.isnan(half_life) or half_life <= 0:
        raise ValueError(f"half_life: expected a number above 0, got {half_life!r}")
    age = (current - version).clamp(min=0).to(torch.float32)
    return torch.exp2(age / -half_life)


def fresh_mask(version: torch.Tensor, current: int, max_staleness: int) -> torch.Tensor:
    """Which steps were taken by a policy at most ``max_staleness`` versions old."""
    if max_staleness < 0:
        raise ValueError(f"max_staleness: expected at least 0, got {max_staleness!r}")
    return version >= current - max_staleness
