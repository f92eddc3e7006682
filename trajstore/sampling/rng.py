"""Counter-based random numbers: the same on every device, whatever else happens between draws."""

from __future__ import annotations

from typing import Any

import torch

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number, as all constants here
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    """A logical shift: torch shifts int64 arithmetically."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)


class CounterRng:
    """Random numbers that are a function of (seed, position) alone: splitmix64 of a running counter.

    The state is two integers. int64 arithmetic wraps alike on every device, so draws are bit-identical there.
    """

    def __init__(self, seed: int = 0, counter: int = 0) -> None:
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise TypeError(f"seed: expected an int, got {type(seed).__name__}")
        self.seed = seed & ((1 << 64) - 1)
        self.counter = counter

    @property
    def mixed_seed(self) -> int:
        """What the counter is added to: the seed, spread over all bits."""
        return _mix(self.seed)

    def take(self, n: int) -> int:
        """Use up ``n`` numbers; returns the counter of the first."""
        start = self.counter
        self.counter += n
        return start

    def bits(self, n: int, device: torch.device) -> torch.Tensor:
        """The next ``n`` numbers of 64 random bits, as int64."""
        start = self.take(n)
        z = torch.arange(start + 1, start + n + 1, dtype=torch.int64, device=device)
        z = z.mul_(_GOLDEN).add_(_signed(self.mixed_seed))
        z = z.bitwise_xor_(_shift_right(z, 30)).mul_(_MIX_1)
        z = z.bitwise_xor_(_shift_right(z, 27)).mul_(_MIX_2)
        return z.bitwise_xor_(_shift_right(z, 31))

    def uniform(self, n: int, device: torch.device) -> torch.Tensor:
        """The next ``n`` numbers uniform in [0, 1), as float64 of 53 random bits."""
        return _shift_right(self.bits(n, device), 11).to(torch.float64).mul_(2.0**-53)

    def below(self, n: int, limit: torch.Tensor | int, device: torch.device) -> torch.Tensor:
        """The next ``n`` integers uniform in [0, limit), limit a number or a tensor of them."""
        scaled = self.uniform(n, device).mul_(limit).floor_().to(torch.int64)
        # For limits past 2**52 the product may round up to the limit itself.
        if isinstance(limit, int):
            return scaled.clamp_(max=limit - 1)
        return torch.minimum(scaled, limit - 1)

    def fork(self) -> CounterRng:
        """A generator of its own, whose seed is drawn from this one."""
        start = self.take(1)
        return CounterRng(_mix((self.mixed_seed + start * 0x9E3779B97F4A7C15) & ((1 << 64) - 1)))

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed, "counter": self.counter}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seed, self.counter = int(state["seed"]), int(state["counter"])


def rank_seed(seed: int, rank: int, world_size: int) -> int:
    """The seed of one of several ranks, unrelated to those of the others; a single one has the seed itself."""
    return seed if world_size == 1 else _mix(_mix(seed & ((1 << 64) - 1)) ^ _mix(rank + 1))


def _mix(seed: int) -> int:
    """Spread a seed over all bits, so that neighbouring seeds give unrelated numbers."""
    mask = (1 << 64) - 1
    z = (seed + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number
