"""Opens the checkpoints that `TrajectoryReplayBuffer.load_checkpoint` reads: RLinf's files, or a store."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any

from trajstore.compat.rlinf.directory import Directory
from trajstore.compat.rlinf.directory_index import is_rlinf_directory
from trajstore.compat.rlinf.stored_trajectories import StoredTrajectories
from trajstore.compat.rlinf.trajectory import Trajectory
from trajstore.errors import StoreNotFoundError

DRAW_STATE = "trajstore"  # the key in metadata.json for the seed and counter of the draws


class DirectoryCheckpoint:
    """A checkpoint in RLinf's files; warns if trajectories are listed that have no file.

    Attributes:
        numbers: Numbers of the trajectories.
        draw_state: Seed and counter of the draws; None in a checkpoint of RLinf itself.
    """

    def __init__(self, path: str | os.PathLike[str], trusted: bool) -> None:
        self._directory = Directory(path, trusted=trusted)
        self._entries = {entry.id: entry for entry in self._directory.entries}
        self.numbers = list(self._entries)
        self.draw_state = self._directory.metadata.get(DRAW_STATE)
        if missing := self._directory.missing:
            warnings.warn(
                f"{os.fspath(path)}: {len(missing)} of {len(missing) + len(self.numbers)} trajectories are listed "
                f"and have no file: {missing[:5]}",
                stacklevel=3,
            )

    def load(self, number: int) -> Trajectory:
        return self._directory.load(self._entries[number])


def open_checkpoint(
    path: str | os.PathLike[str], trusted: bool, storage_options: Mapping[str, Any] | None
) -> DirectoryCheckpoint | StoredTrajectories:
    """Open a directory of RLinf's files, or a store.

    Raises:
        StoreNotFoundError: The path is neither.
    """
    if is_rlinf_directory(path):
        return DirectoryCheckpoint(path, trusted)
    try:
        return StoredTrajectories.open(path, storage_options)
    except StoreNotFoundError as error:
        raise StoreNotFoundError(f"{os.fspath(path)}: expected RLinf's files or a store, found neither") from error
