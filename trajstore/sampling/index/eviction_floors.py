"""Which steps were evicted in this session only, whatever the commit records of their streams say."""

from __future__ import annotations

import numpy as np

from trajstore.sampling.index.episode_numbers import EpisodeNumberMap
from trajstore.schema import Array


class EvictionFloors:
    """The first step that each episode still shows, by stream number and episode: 0 by default, `GONE` for none."""

    def __init__(self) -> None:
        self._floors: dict[int, EpisodeNumberMap] = {}

    def __bool__(self) -> bool:
        return bool(self._floors)

    def of(self, stream: Array, episode: Array) -> Array:
        """The floors of episodes."""
        floor = np.zeros(len(stream), np.int64)
        for number in np.unique(stream).tolist():
            if number in self._floors:
                mine = stream == number
                floor[mine] = self._floors[number].get(episode[mine])
        return floor

    def set_to(self, stream: Array, episode: Array, t: Array) -> None:
        for number in np.unique(stream).tolist():
            mine = stream == number
            self._floors.setdefault(number, EpisodeNumberMap(default=0)).put(episode[mine], t[mine])

    def raise_to(self, stream: Array, episode: Array, t: Array) -> None:
        """Raise the floors of episodes; a floor that is higher stays."""
        self.set_to(stream, episode, np.maximum(self.of(stream, episode), t))
