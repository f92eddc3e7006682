"""Directories of RLinf's into a store and out of it: one trajectory at a time, resumable, verified."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trajstore.compat.rlinf.buffer import TrajectoryReplayBuffer
from trajstore.compat.rlinf.directory import Directory, DirectoryWriter
from trajstore.compat.rlinf.stored import StoredTrajectories
from trajstore.compat.rlinf.trajectory import Trajectory
from trajstore.errors import CorruptionError, DataError

Path = str | os.PathLike[str]
Progress = Callable[[int, int], None]  # trajectories done, trajectories in all; verifying counts too


@dataclass(frozen=True, slots=True)
class Report:
    """What a run did.

    Attributes:
        n_trajectories: Written by this run.
        n_skipped: That were there already.
        n_verified: Read back and found equal, bit by bit.
        missing: Numbers of those that the directory lists and has no file of.
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
) -> Report:
    """Write the trajectories of a directory to a store, as a `TrajectoryReplayBuffer` with ``auto_save`` has it.

    A run that was killed is gone on with: none is there twice, none is lost.

    Args:
        path: The directory.
        url: Of the store; made where there is none.
        trusted: Whether to load pickled trajectories; see `Directory`.
        verify: Read every trajectory back, and compare.
        progress: Called after every trajectory.
        storage_options: As in `trajstore.open`.

    Raises:
        DataError: The store has trajectories that the directory has not.
        CorruptionError: What is stored is not what the directory has.
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
        if strangers := sorted(held - {entry.id for entry in entries}):
            raise DataError(f"{os.fspath(url)}: holds trajectory {strangers[0]}, which {directory.path} has not")
        for done, entry in enumerate(entries):
            if entry.id not in held:
                buffer.add_numbered(entry.id, directory.load(entry))
            _tell(progress, done + 1, total)
        buffer.flush()
        for done, entry in enumerate(entries if verify else ()):
            _check_equal(directory.load(entry), buffer.get_trajectory(entry.id), f"trajectory {entry.id}")
            _tell(progress, len(entries) + done + 1, total)
    finally:
        buffer.close()
    return Report(len(entries) - len(held), len(held), len(entries) if verify else 0, tuple(directory.missing))


def export_directory(
    url: Path,
    path: Path,
    *,
    verify: bool = True,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Report:
    """Write the trajectories of a store as a directory that RLinf loads.

    Args:
        url: Of a store that a `TrajectoryReplayBuffer` has made, or `import_directory`.
        path: The directory. Trajectories that an earlier export put there are not written again.
        verify: Read every trajectory back, and compare.
        progress: Called after every trajectory.
        storage_options: As in `trajstore.open`.
    """
    source = StoredTrajectories.open(url, storage_options)
    keys, writer = source.keys, DirectoryWriter(path)
    total = len(keys) * (2 if verify else 1)
    n_written = writer.write_all(keys, source.load, lambda done: _tell(progress, done, total))
    writer.finish()
    directory = Directory(path)
    for done, entry in enumerate(directory.entries if verify else ()):
        _check_equal(source.load(entry.id), directory.load(entry), str(entry.path))
        _tell(progress, len(keys) + done + 1, total)
    return Report(n_written, len(keys) - n_written, len(keys) if verify else 0)


def _tell(progress: Progress | None, done: int, total: int) -> None:
    if progress is not None:
        progress(done, total)


def _check_equal(expected: Trajectory, found: Trajectory, what: str) -> None:
    mine, others = expected.leaves, found.leaves
    for path in {**mine, **others}:
        if path not in mine or path not in others or not _is_equal(mine[path], others[path]):
            raise CorruptionError(f"{what}, {path}: is not what it was made from")


def _is_equal(mine: torch.Tensor, others: torch.Tensor) -> bool:
    is_alike = (mine.dtype, mine.shape) == (others.dtype, others.shape)
    return is_alike and torch.equal(mine.contiguous().view(torch.uint8), others.contiguous().view(torch.uint8))
