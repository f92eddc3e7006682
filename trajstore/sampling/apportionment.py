"""How many windows of a batch each source gives: exactly in proportion, or drawn at random."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from trajstore.sampling.rng import CounterRng

_CPU = torch.device("cpu")


def apportion(n: int, wanted: Mapping[int, float], at_least: Sequence[int]) -> list[int]:
    """Divide ``n`` into integers as close as possible to ``wanted``, none below ``at_least``.

    Uses the largest-remainder method; of equal remainders the first gets more.

    >>> apportion(5, {0: 2.5, 1: 2.5}, [0, 0])
    [3, 2]
    """
    counts = list(at_least)
    for i, share in wanted.items():
        counts[i] = max(at_least[i], math.floor(share))
    while sum(counts) < n:
        counts[max(wanted, key=lambda i: wanted[i] - counts[i])] += 1
    while sum(counts) > n:
        counts[min((i for i in wanted if counts[i] > at_least[i]), key=lambda i: wanted[i] - counts[i])] -= 1
    return counts


def draw_counts(n: int, weights: Mapping[int, float], at_least: Sequence[int], rng: CounterRng) -> list[int]:
    """Draw a source for each of ``n`` windows by weight, and add the counts to ``at_least``."""
    bounds = torch.tensor(list(weights.values()), dtype=torch.float64).cumsum(0)
    found = torch.searchsorted(bounds, rng.uniform(n, _CPU) * bounds[-1], right=True)
    drawn = torch.bincount(found.clamp_(max=len(weights) - 1), minlength=len(weights)).tolist()
    counts = list(at_least)
    for i, more in zip(weights, drawn, strict=True):
        counts[i] += more
    return counts
