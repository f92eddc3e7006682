"""Writes directories of trajectories that RLinf can load.

Each file is replaced atomically, and the index comes last. So a directory is never half written.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from trajstore.compat.rlinf.directory_index import (
    INDEX,
    TRAJECTORY_FILE,
    Info,
    file_name,
    info_of,
    local_path,
    parse_index,
    read_json,
    write_index,
)
from trajstore.compat.rlinf.trajectory import Trajectory
from trajstore.errors import DataError
from trajstore.storage.atomic_files import replace_whole

_KEY = "trajstore_key"
_TEMPORARY = re.compile(r"\.(trajectory_\d+_.*\.pt|metadata\.json|trajectory_index\.json)\.[0-9a-f]{8}")


class DirectoryWriter:
    """Writes trajectories one by one, and with `finish` the index.

    Until `finish`, readers see the directory as it was. Trajectories that it already holds are not written again.

    Args:
        path: The directory; created if necessary.
        metadata: Further content of ``metadata.json``.

    Raises:
        DataError: The directory is a store.
    """

    def __init__(self, path: str | os.PathLike[str], metadata: Mapping[str, Any] | None = None) -> None:
        self.path = local_path(path)
        if (self.path / "zarr.json").exists():
            raise DataError(f"{self.path}: is a store; write RLinf's files to another directory")
        self.path.mkdir(parents=True, exist_ok=True)
        self._metadata = dict(metadata or {})
        self._listed_before = _read_index(self.path)
        self._index: dict[int, Info] = {}

    def has(self, number: int, key: str) -> bool:
        """Return whether an earlier `finish` listed a trajectory under this key; if so, it counts as written."""
        info = self._listed_before.get(number, {})
        exists = info.get(_KEY) == key and (self.path / file_name(number, info["model_weights_id"])).exists()
        if exists:
            self._index[number] = info
        return exists

    def write(self, number: int, trajectory: Trajectory, key: str | None = None) -> None:
        """Write a trajectory under a number; `has` recognises it later by its key."""
        info = info_of(number, trajectory) | ({} if key is None else {_KEY: key})
        data = {f.name: getattr(trajectory, f.name) for f in fields(Trajectory)}
        data = {name: value for name, value in data.items() if value is not None and value != {}}
        weights = data["model_weights_id"] = info["model_weights_id"]
        # The current index may list this name, so its file must not change before `finish`.
        while (self.path / file_name(number, info["model_weights_id"])).exists():
            info["model_weights_id"] = f"{weights}-{uuid.uuid4().hex[:8]}"
        target = self.path / file_name(number, info["model_weights_id"])
        replace_whole(target, lambda temporary: torch.save(_without_views(data), temporary))
        self._index[number] = info

    def write_all(
        self,
        keys: Mapping[int, str],
        load: Callable[[int], Trajectory],
        on_written: Callable[[int], None] | None = None,
    ) -> int:
        """Write the trajectories that the directory does not hold yet; returns how many were written.

        Args:
            keys: The key of each trajectory, by number.
            load: Returns the trajectory of a number.
            on_written: Called after each trajectory with the number of those done.
        """
        n_written = 0
        for n_done, (number, key) in enumerate(keys.items()):
            if not self.has(number, key):
                self.write(number, load(number), key)
                n_written += 1
            if on_written is not None:
                on_written(n_done + 1)
        return n_written

    def finish(self) -> None:
        """Write the index, which makes the trajectories visible; then delete files that it does not list."""
        ids = sorted(self._index)
        metadata = {
            "trajectory_format": "pt",
            "size": len(ids),
            "total_samples": sum(info["num_samples"] for info in self._index.values()),
            "trajectory_counter": max(ids, default=-1) + 1,
            **self._metadata,
        }
        write_index(self.path, metadata, {number: self._index[number] for number in ids})
        listed = {file_name(n, str(info.get("model_weights_id", ""))) for n, info in self._index.items()}
        for path in self.path.iterdir():  # including temporary files of a killed writer
            if path.name not in listed and (
                TRAJECTORY_FILE.fullmatch(path.name) or _TEMPORARY.fullmatch(path.name)
            ):
                path.unlink(missing_ok=True)


def _read_index(path: Path) -> dict[int, Info]:
    """Return the index of a directory that may not have one yet."""
    index = read_json(path / INDEX)
    return parse_index(index, path)[0] if index is not None else {}


def _without_views(value: Any) -> Any:
    """Copy tensors, because `torch.save` saves a view together with all elements of its base."""
    if isinstance(value, dict):
        return {name: _without_views(item) for name, item in value.items()}
    return value.clone() if isinstance(value, torch.Tensor) else value
