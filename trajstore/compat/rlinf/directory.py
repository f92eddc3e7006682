"""RLinf's directories: ``metadata.json``, ``trajectory_index.json`` and one file for each trajectory.

Files are put under their names whole, and the index last, so that a directory is never half written.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from trajstore.compat.rlinf.trajectory import Trajectory, get_model_weights_id
from trajstore.errors import DataError, FormatError
from trajstore.storage.atomic_files import replace_text, replace_whole

METADATA = "metadata.json"
INDEX = "trajectory_index.json"
LEGACY_INDEX = "trajector_index.json"  # as RLinf's merge tool spells it
_KEY = "trajstore_key"
_FILE = re.compile(r"trajectory_(\d+)_([A-Za-z0-9._-]*)\.(pt|pkl)")
_TEMPORARY = re.compile(r"\.(trajectory_\d+_.*\.pt|metadata\.json|trajectory_index\.json)\.[0-9a-f]{8}")
_WEIGHTS = re.compile(r"[A-Za-z0-9._-]*")

Info = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Entry:
    """A trajectory of a directory: its number, its file, and what the index says of it."""

    id: int
    path: Path
    info: Info


class Directory:
    """A directory of RLinf's, for reading.

    An index that is torn, as a killed writer leaves it, is made anew from the names of the files. Trajectories that
    the index lists and that have no file are `missing`.

    Args:
        path: Of the directory.
        trusted: Whether to load pickled trajectories. A pickle can run any code: only files that you made.
    """

    def __init__(self, path: str | os.PathLike[str], *, trusted: bool = False) -> None:
        self.path = local_path(path)
        if not self.path.is_dir():
            raise FileNotFoundError(f"{self.path}: expected a directory of trajectories, found none")
        self._trusted = trusted
        self.metadata = _read_json(self.path / METADATA) or {}
        files = self._files()
        index = _read_json(self.path / INDEX) or _read_json(self.path / LEGACY_INDEX)
        self.is_rebuilt = index is None
        infos, ids = _parse(index, self.path) if index is not None else ({}, sorted(files))
        found = {number: self._find(number, infos.get(number, {}), files.get(number, [])) for number in ids}
        self.missing = [number for number, path in found.items() if path is None]
        self.entries = [Entry(n, path, infos.get(n, {})) for n, path in found.items() if path is not None]
        if not self.entries and (self.missing or not self.metadata):
            raise FormatError(f"{self.path}: no trajectories; expected trajectory_<id>_<weights>.pt and {INDEX}")

    def _files(self) -> dict[int, list[Path]]:
        found: dict[int, list[Path]] = {}
        for path in sorted(self.path.iterdir()):
            match = _FILE.fullmatch(path.name)
            if match is not None:
                found.setdefault(int(match[1]), []).append(path)
        return found

    def _find(self, number: int, info: Info, files: Sequence[Path]) -> Path | None:
        """The file of a trajectory, which may have more in its name than the index knows."""
        stem = f"trajectory_{number}_{info.get('model_weights_id', '')}"
        exact = [path for path in files if path.stem == stem]
        if not exact:
            exact = [path for path in files if path.stem.startswith(f"{stem}_" if info else stem)]
        if len(exact) > 1:
            names = ", ".join(path.name for path in exact)
            raise FormatError(f"{self.path}: trajectory {number} could be any of {names}; remove the others")
        return exact[0] if exact else None

    def complete(self) -> list[Entry]:
        """The same entries, with all that an index says of them; reads the files where it does not."""
        found = []
        for entry in self.entries:
            info = entry.info if "num_samples" in entry.info else info_of(entry.id, self.load(entry))
            match = _FILE.fullmatch(entry.path.name)
            assert match is not None
            found.append(Entry(entry.id, entry.path, {**info, "model_weights_id": match[2]}))
        return found

    def load(self, entry: Entry) -> Trajectory:
        """Read a trajectory.

        Raises:
            FormatError: The file is damaged, or a pickle that nobody vouches for.
        """
        given = _load_pickle(entry.path, self._trusted) if entry.path.suffix == ".pkl" else _load(entry.path)
        if not isinstance(given, Mapping):
            known = {f.name for f in fields(Trajectory)}
            given = {name: value for name, value in vars(given).items() if name in known}
        given = {name: value for name, value in given.items() if value is not None}
        given.setdefault("max_episode_length", int(entry.info.get("max_episode_length", 0)))
        given.setdefault("model_weights_id", str(entry.info.get("model_weights_id", "")))
        return Trajectory.of(given, str(entry.path))


class DirectoryWriter:
    """Writes a directory as RLinf does: trajectories one by one, then `finish`.

    Until then what was there before stays as it was. Files that are there already are not written again.

    Args:
        path: Of the directory; made if need be.
        metadata: What else to put into ``metadata.json``.
    """

    def __init__(self, path: str | os.PathLike[str], metadata: Mapping[str, Any] | None = None) -> None:
        self.path = local_path(path)
        if (self.path / "zarr.json").exists():
            raise DataError(f"{self.path}: holds a store; RLinf's files need a directory of their own")
        self.path.mkdir(parents=True, exist_ok=True)
        self._metadata = dict(metadata or {})
        self._before = _listed(self.path)
        self._index: dict[int, Info] = {}

    def has(self, number: int, key: str) -> bool:
        """Whether an earlier `finish` listed a trajectory under this key; if so, it counts as written."""
        info = self._before.get(number, {})
        is_there = info.get(_KEY) == key and (self.path / _file_name(number, info["model_weights_id"])).exists()
        if is_there:
            self._index[number] = info
        return is_there

    def write(self, number: int, trajectory: Trajectory, key: str | None = None) -> None:
        """Write a trajectory under a number, and a key by which to know it again."""
        info = info_of(number, trajectory) | ({} if key is None else {_KEY: key})
        data = {f.name: getattr(trajectory, f.name) for f in fields(Trajectory)}
        data = {name: value for name, value in data.items() if value is not None and value != {}}
        weights = data["model_weights_id"] = info["model_weights_id"]
        while (self.path / _file_name(number, info["model_weights_id"])).exists():  # what is listed stays as it is
            info["model_weights_id"] = f"{weights}-{uuid.uuid4().hex[:8]}"
        target = self.path / _file_name(number, info["model_weights_id"])
        replace_whole(target, lambda temporary: torch.save(_compact(data), temporary))
        self._index[number] = info

    def write_all(
        self, keys: Mapping[int, str], load: Callable[[int], Trajectory], told: Callable[[int], None] | None = None
    ) -> int:
        """Write the trajectories of these numbers and keys, unless they are there; returns how many were not.

        Args:
            keys: By number.
            load: Gives a trajectory.
            told: Called after each with how many are there.
        """
        n_written = 0
        for done, (number, key) in enumerate(keys.items()):
            if not self.has(number, key):
                self.write(number, load(number), key)
                n_written += 1
            if told is not None:
                told(done + 1)
        return n_written

    def finish(self) -> None:
        """Put the index, which makes all of it count; then remove files of trajectories that it does not list."""
        ids = sorted(self._index)
        about = {
            "trajectory_format": "pt",
            "size": len(ids),
            "total_samples": sum(info["num_samples"] for info in self._index.values()),
            "trajectory_counter": max(ids, default=-1) + 1,
            **self._metadata,
        }
        write_index(self.path, about, {number: self._index[number] for number in ids})
        listed = _names(self._index)
        for path in self.path.iterdir():  # also what a run that was killed has left
            if path.name not in listed and (_FILE.fullmatch(path.name) or _TEMPORARY.fullmatch(path.name)):
                path.unlink(missing_ok=True)


def info_of(number: int, trajectory: Trajectory) -> Info:
    """What an index says of a trajectory."""
    n_steps, n_envs = trajectory.shape
    shape = next(
        (t.shape for t in (trajectory.rewards, trajectory.prev_logprobs) if t is not None), (n_steps, n_envs)
    )
    return {
        "num_samples": n_steps * n_envs,
        "trajectory_id": number,
        "max_episode_length": int(trajectory.max_episode_length),
        "shape": list(shape),
        "model_weights_id": trajectory.model_weights_id or get_model_weights_id(trajectory.versions),
    }


def write_index(path: Path, metadata: Mapping[str, Any], index: Mapping[int, Info]) -> None:
    """Put the index and then the metadata, each whole."""
    entries = {str(number): info for number, info in index.items()}
    replace_text(path / INDEX, json.dumps({"trajectory_index": entries, "trajectory_id_list": list(index)}))
    replace_text(path / METADATA, json.dumps(dict(metadata)))


def local_path(path: str | os.PathLike[str]) -> Path:
    """A path of this machine.

    Raises:
        ValueError: It is the URL of something else.
    """
    if "://" in os.fspath(path):
        raise ValueError(f"{os.fspath(path)}: RLinf's files lie in directories; stores (zarr) may be anywhere")
    return Path(path)


def is_directory_of_rlinf(path: str | os.PathLike[str]) -> bool:
    """Whether there is one."""
    root = Path(path)  # of a URL, one that is not there
    return any((root / name).exists() for name in (METADATA, INDEX, LEGACY_INDEX))


def share_of(items: Sequence[Any], rank: int, world_size: int) -> Sequence[Any]:
    """The contiguous block of one rank; the first ranks get one more where it does not come out even."""
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"local_rank: expected 0 to {world_size - 1}, got {rank}")
    size, more = divmod(len(items), world_size)
    start = rank * size + min(rank, more)
    return items[start : start + size + (rank < more)]


def check_weights_id(weights: object, what: str) -> None:
    """Refuse what can't be part of a file's name."""
    if not isinstance(weights, str) or not _WEIGHTS.fullmatch(weights):
        raise DataError(f"{what}, model_weights_id: expected letters, digits, '.', '_', '-', got {weights!r:.80}")


def _file_name(number: int, weights: str) -> str:
    check_weights_id(weights, f"trajectory {number}")
    return f"trajectory_{number}_{weights}.pt"


def _names(index: Mapping[int, Info]) -> set[str]:
    return {_file_name(number, str(info.get("model_weights_id", ""))) for number, info in index.items()}


def _listed(path: Path) -> dict[int, Info]:
    """What a directory that may not be there yet lists."""
    index = _read_json(path / INDEX)
    return _parse(index, path)[0] if index is not None else {}


def _read_json(path: Path) -> dict[str, Any] | None:
    """What a file holds; None where there is none, or not all of it."""
    try:
        found = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _parse(index: Mapping[str, Any], path: Path) -> tuple[dict[int, Info], list[int]]:
    try:
        infos = {int(number): dict(info) for number, info in index["trajectory_index"].items()}
        ids = [int(number) for number in index["trajectory_id_list"]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"{path / INDEX}: not an index of trajectories: {error!r:.120}") from error
    for number, info in infos.items():
        weights = info.get("model_weights_id", "")
        if not isinstance(weights, str) or not _WEIGHTS.fullmatch(weights):
            raise FormatError(f"{path / INDEX}: trajectory {number} has the model_weights_id {weights!r:.80}")
    return infos, ids


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise FormatError(f"{path}: damaged, or holds more than tensors: {error!r:.200}") from error


def _load_pickle(path: Path, trusted: bool) -> Any:
    if not trusted:
        raise FormatError(
            f"{path}: a pickle can run any code; if you made it yourself say trusted=True, and save as 'pt' after"
        )
    import pickle  # noqa: TID251 - the caller vouches for the file

    try:
        return pickle.loads(path.read_bytes())  # noqa: S301
    except Exception as error:
        raise FormatError(f"{path}: damaged: {error!r:.200}") from error


def _compact(value: Any) -> Any:
    """The same with tensors that hold their own elements and no others: a view is saved with all it looks at."""
    if isinstance(value, dict):
        return {name: _compact(item) for name, item in value.items()}
    return value.clone() if isinstance(value, torch.Tensor) else value
