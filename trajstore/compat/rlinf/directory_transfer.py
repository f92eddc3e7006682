"""Imports RLinf's directories into a store and exports them, one trajectory at a time, resumable and verified."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trajstore.compat.rlinf.buffer import TrajectoryReplayBuffer
from trajstore.compat.rlinf.directory import Directory
from trajstore.compat.rlinf.directory_writer import DirectoryWriter
from trajstore.compat.rlinf.stored_trajectories import StoredTrajectories
from trajstore.compat.rlinf.trajectory import Trajectory
from trajstore.errors import CorruptionError, DataError

Path = str | os.PathLike[str]
Progress = Callable[[int, int], None]  # trajectories done, all trajectories; verifying counts as a second pass


@dataclass(frozen=True, slots=True)
class TransferReport:
    """The result of an import or export.

    Attributes:
        n_trajectories: Trajectories that this run wrote.
        n_skipped: Trajectories that an earlier run wrote.
        n_verified: Trajectories that were read back and are equal, bit by bit.
        missing: Numbers of trajectories that the directory lists and that have no file.
    """

    n_trajectories: int
    n_skipped: int
    n_verified: int
    missing: tuple[int, ...] = ()


def import_directory(
    path: Path,
    url: Path,
    *,
    trusted: bool = False,
    verify: bool = True,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> TransferReport:
    """Write the trajectories of a directory to a store that `TrajectoryReplayBuffer` opens with ``auto_save``.

    After a kill, call it again: it continues, and no trajectory is duplicated or lost.

    Args:
        path: The directory.
        url: URL of the store; created if it does not exist.
        trusted: Load pickled trajectories too; see `Directory`.
        verify: Read every trajectory back and compare it.
        progress: Called after every trajectory.
        storage_options: As for `trajstore.open`.

    Raises:
        DataError: The store has a trajectory that the directory does not have.
        CorruptionError: A stored trajectory differs from the directory's.
    """
    directory = Directory(path, trusted=trusted)
    entries = directory.entries
    total = len(entries) * (2 if verify else 1)
    buffer = TrajectoryReplayBuffer(
        sample_window_size=0,
        auto_save=True,
        auto_save_path=url,
        storage_options=storage_options,
    )
    try:
        held = set(buffer.trajectory_ids)
        if unexpected := sorted(held - {entry.id for entry in entries}):
            raise DataError(f"{os.fspath(url)}: holds trajectory {unexpected[0]}, which {directory.path} lacks")
        for n_done, entry in enumerate(entries):
            if entry.id not in held:
                buffer.add_numbered(entry.id, directory.load(entry))
            _report(progress, n_done + 1, total)
        buffer.flush()
        for n_done, entry in enumerate(entries if verify else ()):
            _check_equal(directory.load(entry), buffer.get_trajectory(entry.id), f"trajectory {entry.id}")
            _report(progress, len(entries) + n_done + 1, total)
    finally:
        buffer.close()
    return TransferReport(
        len(entries) - len(held), len(held), len(entries) if verify else 0, tuple(directory.missing)
    )


def export_directory(
    url: Path,
    path: Path,
    *,
    verify: bool = True,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> TransferReport:
    """Write the trajectories of a store to a directory that RLinf can load.

    Args:
        url: URL of a store that `TrajectoryReplayBuffer` or `import_directory` created.
        path: The directory. Trajectories of an earlier export are not written again.
        verify: Read every trajectory back and compare it.
        progress: Called after every trajectory.
        storage_options: As for `trajstore.open`.

    Raises:
        CorruptionError: A written trajectory differs from the store's.
    """
    stored = StoredTrajectories.open(url, storage_options)
    keys, writer = stored.keys, DirectoryWriter(path)
    total = len(keys) * (2 if verify else 1)
    n_written = writer.write_all(keys, stored.load, lambda n_done: _report(progress, n_done, total))
    writer.finish()
    directory = Directory(path)
    for n_done, entry in enumerate(directory.entries if verify else ()):
        _check_equal(stored.load(entry.id), directory.load(entry), str(entry.path))
        _report(progress, len(keys) + n_done + 1, total)
    return TransferReport(n_written, len(keys) - n_written, len(keys) if verify else 0)


def _report(progress: Progress | None, n_done: int, total: int) -> None:
    if progress is not None:
        progress(n_done, total)


def _check_equal(expected: Trajectory, found: Trajectory, what: str) -> None:
    left, right = expected.leaves, found.leaves
    for path in {**left, **right}:
        if path not in left or path not in right or not _is_equal(left[path], right[path]):
            raise CorruptionError(f"{what}, {path}: the copy differs from the original")


def _is_equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    is_alike = (left.dtype, left.shape) == (right.dtype, right.shape)
    return is_alike and torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
