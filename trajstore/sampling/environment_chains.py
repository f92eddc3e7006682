"""What each environment experienced, episode after episode: the order in which windows cross their ends."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from trajstore.sampling.episode_index import EpisodeIndex
from trajstore.schema import Array


@dataclass(frozen=True, slots=True)
class ChainSteps:
    """Steps of a chain: the episode they are in and their position there; ``exists`` where the chain has one."""

    entry: torch.Tensor
    position: torch.Tensor
    exists: torch.Tensor


class EnvironmentChains:
    """The episodes of an index, brought together by stream and environment. Made anew when the index changes."""

    def __init__(self, index: EpisodeIndex) -> None:
        here = slice(index.first, index.n)
        n = index.n - index.first
        order = index.first + np.lexsort((index.episode.host[here], index.env.host[here], index.stream.host[here]))
        lengths = index.lengths()[order]
        sums = np.cumsum(lengths)
        stream, env = index.stream.host[order], index.env.host[order]
        is_last = np.ones(n, bool)
        is_last[:-1] = (stream[:-1] != stream[1:]) | (env[:-1] != env[1:])
        chain = np.cumsum(is_last) - is_last
        stop = sums[is_last][chain]
        place = np.zeros(index.n, np.int64)
        place[order] = np.arange(n)
        self.left = np.zeros(index.n, np.int64)  # by entry: steps from its first to the last of its chain
        self.left[order] = stop - (sums - lengths)
        device = index.device
        self.left_on_device = torch.from_numpy(self.left).to(device)
        self._order, self._place = (torch.from_numpy(a).to(device) for a in (order, place))
        self._sums, self._before = (torch.from_numpy(a).to(device) for a in (sums, sums - lengths))
        self._start, self._stop = (torch.from_numpy(a).to(device) for a in (_starts(stop, chain), stop))

    def steps(self, entry: torch.Tensor, position: torch.Tensor) -> ChainSteps:
        """Steps at positions [B, T] counted from the first step of episodes [B], wherever in the chain they lie."""
        place = self._place[entry]
        wanted = self._before[place][:, None] + position
        near = torch.minimum(torch.maximum(wanted, self._start[place][:, None]), self._stop[place][:, None] - 1)
        found = torch.searchsorted(self._sums, near, right=True)
        return ChainSteps(self._order[found], near - self._before[found], near == wanted)


def _starts(stop: Array, chain: Array) -> Array:
    """Where the chain of each place begins: where the one before stops."""
    ends = np.unique(stop) if len(stop) else stop
    starts: Array = np.concatenate([np.zeros(1, np.int64), ends])[chain]
    return starts
