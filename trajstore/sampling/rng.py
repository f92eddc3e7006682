"""Counter-based random numbers: a function of a seed and a counter, identical on every device."""

from __future__ import annotations

from typing import Any

import torch

# The constants of splitmix64 as signed integers, because torch has no uint64 arithmetic.
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift in zeros; torch shifts copies of the sign bit into int64."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)


class CounterRng:
    """A random number generator whose state is two integers: a seed and a counter.

    Number ``i`` is splitmix64 of the seed and ``i``, so the numbers do not depend on what happens between draws.
    int64 arithmetic wraps around in the same way on every device, so the numbers are bit-identical there.
    """

    def __init__(self, seed: int = 0, counter: int = 0) -> None:
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise TypeError(f"seed: expected an int, got {type(seed).__name__}")
        self.seed = seed & ((1 << 64) - 1)
        self.counter = counter

    @property
    def mixed_seed(self) -> int:
        """The seed with its bits mixed; multiples of the counter are added to this number."""
        return _mix(self.seed)

    def take(self, n: int) -> int:
        """Advance the counter past the next ``n`` numbers, and return the counter of the first of them."""
        start = self.counter
        self.counter += n
        return start

    def bits(self, n: int, device: torch.device) -> torch.Tensor:
        """Return the next ``n`` numbers of 64 random bits, as int64."""
        start = self.take(n)
        z = torch.arange(start + 1, start + n + 1, dtype=torch.int64, device=device)
        z = z.mul_(_GOLDEN).add_(_signed(self.mixed_seed))
        z = z.bitwise_xor_(_shift_right(z, 30)).mul_(_MIX_1)
        z = z.bitwise_xor_(_shift_right(z, 27)).mul_(_MIX_2)
        return z.bitwise_xor_(_shift_right(z, 31))

    def uniform(self, n: int, device: torch.device) -> torch.Tensor:
        """Return the next ``n`` numbers uniform in [0, 1), as float64 with 53 random bits."""
        return _shift_right(self.bits(n, device), 11).to(torch.float64).mul_(2.0**-53)

    def below(self, n: int, limit: torch.Tensor | int, device: torch.device) -> torch.Tensor:
        """Return the next ``n`` integers uniform in [0, limit); ``limit`` is one number, or one for each."""
        scaled = self.uniform(n, device).mul_(limit).floor_().to(torch.int64)
        # For limits above 2**52 the product may round up to the limit itself.
        if isinstance(limit, int):
            return scaled.clamp_(max=limit - 1)
        return torch.minimum(scaled, limit - 1)

    def fork(self) -> CounterRng:
        """Return an independent generator whose seed is drawn from this one."""
        start = self.take(1)
        return CounterRng(_mix((self.mixed_seed + start * 0x9E3779B97F4A7C15) & ((1 << 64) - 1)))

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed, "counter": self.counter}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seed, self.counter = int(state["seed"]), int(state["counter"])


def rank_seed(seed: int, rank: int, world_size: int) -> int:
    """Return the seed of one rank, unrelated to the seeds of other ranks; a single rank uses ``seed`` itself."""
    return seed if world_size == 1 else _mix(_mix(seed & ((1 << 64) - 1)) ^ _mix(rank + 1))


def _mix(seed: int) -> int:
    """Mix all bits of a seed, so that neighbouring seeds give unrelated numbers."""
    mask = (1 << 64) - 1
    z = (seed + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def _signed(number: int) -> int:
    """Return the signed 64-bit integer with the bits of an unsigned one."""
    return number - (1 << 64) if number >= 1 << 63 else number
