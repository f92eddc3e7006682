"""Counter-based random numbers: a function of a seed and a counter, identical on every device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

# The constants of splitmix64 as signed integers, because torch has no uint64 arithmetic.
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
_MAX_KEPT = 1 << 20  # multiples of the golden ratio that a generator keeps

HALF_SHIFTS = ((33,), (2,))  # an argument of `CounterRng.halves`


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
        self._signed_seed = -1, 0  # a seed, and the number that it is mixed to
        self._multiples: torch.Tensor | None = None  # of the golden ratio, from 1 on

    @property
    def mixed_seed(self) -> int:
        """The seed with its bits mixed; multiples of the counter are added to this number."""
        return _mix(self.seed)

    @property
    def signed_seed(self) -> int:
        """`mixed_seed` as a signed integer."""
        if self._signed_seed[0] != self.seed:
            self._signed_seed = self.seed, _signed(self.mixed_seed)
        return self._signed_seed[1]

    def take(self, n: int) -> int:
        """Advance the counter past the next ``n`` numbers, and return the counter of the first of them."""
        start = self.counter
        self.counter += n
        return start

    def bits(self, n: int, device: torch.device) -> torch.Tensor:
        """Return the next ``n`` numbers of 64 random bits, as int64."""
        z = self._unmixed(n, device)
        return z.bitwise_xor_(_shift_right(z, 31))

    def _unmixed(self, n: int, device: torch.device) -> torch.Tensor:
        """Return the next ``n`` numbers before the last step of splitmix64."""
        first = self.mixed_seed + self.take(n) * 0x9E3779B97F4A7C15
        z = self._golden_multiples(n, device) + _signed(first & ((1 << 64) - 1))
        z = z.bitwise_xor_(_shift_right(z, 30)).mul_(_MIX_1)
        return z.bitwise_xor_(_shift_right(z, 27)).mul_(_MIX_2)

    def _golden_multiples(self, n: int, device: torch.device) -> torch.Tensor:
        """Return the first ``n`` multiples of the golden ratio, kept from one call to the next."""
        kept = self._multiples
        if kept is None or len(kept) < n or kept.device != device:
            kept = torch.arange(1, n + 1, dtype=torch.int64, device=device).mul_(_GOLDEN)
            self._multiples = kept if n <= _MAX_KEPT else None
        return kept[:n]

    def halves(self, n: int, shifts: torch.Tensor) -> torch.Tensor:
        """Return the upper 62 bits of the next ``n`` numbers, as ``[2, n]``: the upper and the lower 31 of them.

        ``shifts`` is `HALF_SHIFTS` on the device.
        """
        # The last step of splitmix64 changes the lower 33 bits alone, by the bits from 31 on.
        halves = self._unmixed(n, shifts.device) >> shifts
        halves[1].bitwise_xor_(halves[0])
        return halves.bitwise_and_((1 << 31) - 1)

    def uniform(self, n: int, device: torch.device) -> torch.Tensor:
        """Return the next ``n`` numbers uniform in [0, 1), as float64 with 53 random bits."""
        return self._upper_bits(n, device).mul_(2.0**-64)

    def _upper_bits(self, n: int, device: torch.device) -> torch.Tensor:
        """Return the next ``n`` numbers uniform in [0, 2**64), as float64: their upper 53 bits, exactly."""
        return self.bits(n, device).bitwise_and_(-(1 << 11)).view(torch.uint64).to(torch.float64)

    def below(self, n: int, limit: torch.Tensor | int, device: torch.device) -> torch.Tensor:
        """Return the next ``n`` integers uniform in [0, limit).

        ``limit`` is one number, or a tensor of one number for each, of at most 2**53. A number is the integer part
        of the limit times a number uniform in [0, 1), rounded to float64. Scaling by a power of two is exact, so it
        does not matter when that is done. Up to limits of 2**53 the rounded product is below the limit: the
        distance is at least limit * 2**-53, which is more than half the distance to the float64 before the limit.
        """
        if not isinstance(limit, int):
            return self.uniform(n, device).mul_(limit).to(torch.int64)
        return self.below_each(n, (limit,), device)[0]

    def below_each(self, n: int, limits: Sequence[int], device: torch.device) -> list[torch.Tensor]:
        """Return what calls of `below` with these limits return, one after the other; but mix the bits at once."""
        uppers = self._upper_bits(n * len(limits), device).view(len(limits), n)
        scaled = [
            upper.mul_(limit * 2.0**-64).to(torch.int64)
            for upper, limit in zip(uppers.unbind(0), limits, strict=True)
        ]
        return [
            number.clamp_(max=limit - 1) if limit > 1 << 53 else number
            for number, limit in zip(scaled, limits, strict=True)
        ]

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
