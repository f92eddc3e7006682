"""The steps of a store as arrays."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from trajstore.schema import Array


@dataclass(frozen=True, slots=True)
class StoredSteps:
    """Steps of a store in order of arrival, episode after episode; every array is ``[n]``.

    Attributes:
        env: The environment that has the step now.
        stream: Number of its stream.
        episode: Number of its episode in the stream.
        t: Its index in the episode.
        recorded: The position it was recorded at.
        position: The position it has now.
        is_first: Its type is FIRST.
        is_last: Its type is LAST.
    """

    env: Array
    stream: Array
    episode: Array
    t: Array
    recorded: Array
    position: Array
    is_first: Array
    is_last: Array

    def take(self, chosen: Array) -> StoredSteps:
        """Return the steps that an index or mask selects."""
        return StoredSteps(*(getattr(self, name)[chosen] for name in self.__slots__))

    def with_contiguous_positions(self, first: int, renumber_all: bool) -> StoredSteps:
        """Return the steps with consecutive positions in every environment.

        Args:
            first: The position that renumbered environments begin with.
            renumber_all: Renumber all environments; otherwise only those with gaps between positions.
        """
        position = self.position.copy()
        for env in np.unique(self.env):
            at = np.flatnonzero(self.env == env)
            if renumber_all or (np.diff(np.sort(position[at])) != 1).any():
                position[at] = first + np.arange(len(at))
        return replace(self, position=position)
