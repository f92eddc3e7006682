"""Reads RLinf's directories of trajectories."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from trajstore.compat.rlinf.directory_index import (
    INDEX,
    LEGACY_INDEX,
    METADATA,
    TRAJECTORY_FILE,
    Info,
    info_of,
    local_path,
    parse_index,
    read_json,
)
from trajstore.compat.rlinf.trajectory import Trajectory
from trajstore.errors import FormatError


@dataclass(frozen=True, slots=True)
class DirectoryEntry:
    """A trajectory of a directory: its number, its file, and its entry in the index."""

    id: int
    path: Path
    info: Info


class Directory:
    """A directory of RLinf's trajectories, opened for reading.

    If the index is incomplete, as a killed writer leaves it, it is rebuilt from the file names.

    Args:
        path: The directory.
        trusted: Load pickled trajectories too. A pickle can run any code, so use it only for files that you made.

    Attributes:
        path: The directory.
        metadata: The content of ``metadata.json``; empty if it is missing.
        entries: The trajectories that have a file, in the order of the index.
        missing: Numbers of trajectories that the index lists and that have no file.
        is_rebuilt: The index was missing or incomplete.

    Raises:
        FileNotFoundError: The directory does not exist.
        FormatError: It holds no trajectories, or the index is not one.
    """

    def __init__(self, path: str | os.PathLike[str], *, trusted: bool = False) -> None:
        self.path = local_path(path)
        if not self.path.is_dir():
            raise FileNotFoundError(f"{self.path}: expected a directory of trajectories, found none")
        self._trusted = trusted
        self.metadata = read_json(self.path / METADATA) or {}
        files = self._files()
        index = read_json(self.path / INDEX) or read_json(self.path / LEGACY_INDEX)
        self.is_rebuilt = index is None
        infos, ids = parse_index(index, self.path) if index is not None else ({}, sorted(files))
        found = {number: self._find(number, infos.get(number, {}), files.get(number, [])) for number in ids}
        self.missing = [number for number, path in found.items() if path is None]
        self.entries = [DirectoryEntry(n, path, infos.get(n, {})) for n, path in found.items() if path is not None]
        if not self.entries and (self.missing or not self.metadata):
            raise FormatError(f"{self.path}: no trajectories; expected trajectory_<id>_<weights>.pt and {INDEX}")

    def _files(self) -> dict[int, list[Path]]:
        found: dict[int, list[Path]] = {}
        for path in sorted(self.path.iterdir()):
            match = TRAJECTORY_FILE.fullmatch(path.name)
            if match is not None:
                found.setdefault(int(match[1]), []).append(path)
        return found

    def _find(self, number: int, info: Info, files: Sequence[Path]) -> Path | None:
        """Return the file of a trajectory; its name may have a suffix that the index does not know."""
        stem = f"trajectory_{number}_{info.get('model_weights_id', '')}"
        matching = [path for path in files if path.stem == stem]
        if not matching:
            matching = [path for path in files if path.stem.startswith(f"{stem}_" if info else stem)]
        if len(matching) > 1:
            names = ", ".join(path.name for path in matching)
            raise FormatError(f"{self.path}: trajectory {number} could be any of {names}; remove the others")
        return matching[0] if matching else None

    def complete(self) -> list[DirectoryEntry]:
        """Return the entries with complete index information; reads the files of those that lack it."""
        found = []
        for entry in self.entries:
            info = entry.info if "num_samples" in entry.info else info_of(entry.id, self.load(entry))
            match = TRAJECTORY_FILE.fullmatch(entry.path.name)
            assert match is not None
            found.append(DirectoryEntry(entry.id, entry.path, {**info, "model_weights_id": match[2]}))
        return found

    def load(self, entry: DirectoryEntry) -> Trajectory:
        """Read a trajectory.

        Raises:
            FormatError: The file is damaged, or is a pickle and the directory is not trusted.
        """
        given = _load_pickle(entry.path, self._trusted) if entry.path.suffix == ".pkl" else _load(entry.path)
        if not isinstance(given, Mapping):
            known = {f.name for f in fields(Trajectory)}
            given = {name: value for name, value in vars(given).items() if name in known}
        given = {name: value for name, value in given.items() if value is not None}
        given.setdefault("max_episode_length", int(entry.info.get("max_episode_length", 0)))
        given.setdefault("model_weights_id", str(entry.info.get("model_weights_id", "")))
        return Trajectory.of(given, str(entry.path))


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise FormatError(f"{path}: damaged, or contains other objects than tensors: {error!r:.200}") from error


def _load_pickle(path: Path, trusted: bool) -> Any:
    if not trusted:
        raise FormatError(
            f"{path}: a pickle can run any code; if you made this file, give trusted=True, and then save it as 'pt'"
        )
    import pickle  # noqa: TID251 - the caller trusts the file

    try:
        return pickle.loads(path.read_bytes())  # noqa: S301
    except Exception as error:
        raise FormatError(f"{path}: damaged: {error!r:.200}") from error
