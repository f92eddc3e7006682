"""Finds episodes by stream number and episode number."""

from __future__ import annotations

import numpy as np

from trajstore.schema import Array


class EpisodeFinder:
    """Finds positions in arrays of episodes, each named by its stream number and its number in the stream."""

    def __init__(self, stream: Array, episode: Array) -> None:
        self._order = np.lexsort((episode, stream))
        self._stream, self._episode = stream[self._order], episode[self._order]

    def find(self, stream: Array, episode: Array) -> Array:
        """The position of each named episode; -1 for those that are missing."""
        found = np.full(len(stream), -1)
        for number in np.unique(stream):
            low, high = np.searchsorted(self._stream, [number, number + 1])
            mine = np.flatnonzero(stream == number)
            at = low + np.searchsorted(self._episode[low:high], episode[mine])
            is_here = at < high
            is_here[is_here] = self._episode[at[is_here]] == episode[mine][is_here]
            found[mine[is_here]] = self._order[at[is_here]]
        return found
