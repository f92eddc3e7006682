"""Facts about episodes that differ from what their recorder stored."""

from __future__ import annotations

import numpy as np

from trajstore.sampling.index.episode_numbers import EpisodeNumberMap
from trajstore.sampling.index.index_entries import GONE
from trajstore.schema import Array


class EpisodeOverrides:
    """The environment, further flags and first step that a redistribution gave to episodes, by stream number."""

    def __init__(self) -> None:
        self._tables: list[
            tuple[EpisodeNumberMap, EpisodeNumberMap, EpisodeNumberMap]
        ] = []  # env, flags, first step
        self._is_empty = True

    def __bool__(self) -> bool:
        return not self._is_empty

    def add_stream(self) -> None:
        self._tables.append((EpisodeNumberMap(-1), EpisodeNumberMap(0), EpisodeNumberMap(GONE)))

    def put(self, stream: Array, episode: Array, env: Array, flags: Array, begin: Array) -> None:
        """Set the env, the flags to add, and the step that counts as the first (`GONE`: none) of episodes."""
        self._is_empty = False
        for number in np.unique(stream):
            mine = stream == number
            for table, values in zip(self._tables[number], (env, flags, begin), strict=True):
                table.put(episode[mine], values[mine])

    def get(self, stream: Array, episode: Array) -> tuple[Array, Array, Array]:
        """Env (-1: as recorded), flags to add, and first step (`GONE`: none) of episodes."""
        found = tuple(np.empty(len(stream), np.int64) for _ in range(3))
        for number in np.unique(stream):
            mine = stream == number
            for table, values in zip(self._tables[number], found, strict=True):
                values[mine] = table.get(episode[mine])
        return found[0], found[1], found[2]
