"""Chains of consecutive episodes of one environment, for windows that cross the ends of episodes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from trajstore.sampling.index.episode_index import EpisodeIndex
from trajstore.schema import Array


@dataclass(frozen=True, slots=True)
class ChainSteps:
    """Steps of chains: the index entry of the episode that each lies in, and its position there.

    ``exists`` is False for steps before the start or after the end of a chain; the nearest step stands in for them,
    and ``outside`` tells how far from it they would lie: negative before the start.
    """

    entry: torch.Tensor
    position: torch.Tensor
    exists: torch.Tensor
    outside: torch.Tensor


class EnvironmentChains:
    """The episodes of an index, grouped by stream and environment and sorted by episode number.

    Immutable: build new chains when the index changes, at a cost proportional to all its episodes.

    Attributes:
        n_left: By index entry: steps from the first step of the episode to the end of its chain.
        n_left_on_device: The same, on the device.
    """

    def __init__(self, index: EpisodeIndex) -> None:
        shown = slice(index.first, index.n)
        n = index.n - index.first
        keys = (index.episode.host[shown], index.env.host[shown], index.stream.host[shown])
        order = index.first + np.lexsort(keys)
        lengths = index.lengths()[order]
        sums = np.cumsum(lengths)
        stream, env = index.stream.host[order], index.env.host[order]
        is_last = np.ones(n, bool)
        is_last[:-1] = (stream[:-1] != stream[1:]) | (env[:-1] != env[1:])
        chain = np.cumsum(is_last) - is_last
        stop = sums[is_last][chain]
        place = np.zeros(index.n, np.int64)
        place[order] = np.arange(n)
        self.n_left = np.zeros(index.n, np.int64)
        self.n_left[order] = stop - (sums - lengths)
        device = index.device
        self.n_left_on_device = torch.from_numpy(self.n_left).to(device)
        self._order, self._place = (torch.from_numpy(a).to(device) for a in (order, place))
        self._sums, self._before = (torch.from_numpy(a).to(device) for a in (sums, sums - lengths))
        self._start, self._stop = (torch.from_numpy(a).to(device) for a in (_starts(stop, chain), stop))

    def steps(self, entry: torch.Tensor, position: torch.Tensor) -> ChainSteps:
        """Return the steps at positions [B, T], counted along the chains from the first step of episodes [B]."""
        place = self._place[entry]
        wanted = self._before[place][:, None] + position
        near = torch.minimum(torch.maximum(wanted, self._start[place][:, None]), self._stop[place][:, None] - 1)
        found = torch.searchsorted(self._sums, near, right=True)
        return ChainSteps(self._order[found], near - self._before[found], near == wanted, wanted - near)


def _starts(stop: Array, chain: Array) -> Array:
    """Return where the chain of each episode starts: where the chain before it stops."""
    ends = np.unique(stop) if len(stop) else stop
    starts: Array = np.concatenate([np.zeros(1, np.int64), ends])[chain]
    return starts
