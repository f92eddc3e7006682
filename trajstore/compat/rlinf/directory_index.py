"""The files of RLinf's directories: their names, the index and the metadata.

A directory holds ``metadata.json``, ``trajectory_index.json`` and one file per trajectory.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trajstore.compat.rlinf.trajectory import Trajectory, get_model_weights_id
from trajstore.errors import DataError, FormatError
from trajstore.storage.atomic_files import replace_text

METADATA = "metadata.json"
INDEX = "trajectory_index.json"
LEGACY_INDEX = "trajector_index.json"  # the spelling of RLinf's merge tool
TRAJECTORY_FILE = re.compile(r"trajectory_(\d+)_([A-Za-z0-9._-]*)\.(pt|pkl)")
_WEIGHTS_ID = re.compile(r"[A-Za-z0-9._-]*")

Info = dict[str, Any]  # the entry of a trajectory in the index


def info_of(number: int, trajectory: Trajectory) -> Info:
    """Return the entry of a trajectory in the index."""
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
    """Write the index and then the metadata; each file is replaced atomically."""
    entries = {str(number): info for number, info in index.items()}
    replace_text(path / INDEX, json.dumps({"trajectory_index": entries, "trajectory_id_list": list(index)}))
    replace_text(path / METADATA, json.dumps(dict(metadata)))


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file; None if the file is missing or incomplete."""
    try:
        found = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def parse_index(index: Mapping[str, Any], path: Path) -> tuple[dict[int, Info], list[int]]:
    """Return the entries of an index by trajectory number, and the numbers in order.

    Raises:
        FormatError: It is not an index, or an entry has an unsafe ``model_weights_id``.
    """
    try:
        infos = {int(number): dict(info) for number, info in index["trajectory_index"].items()}
        ids = [int(number) for number in index["trajectory_id_list"]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"{path / INDEX}: not an index of trajectories: {error!r:.120}") from error
    for number, info in infos.items():
        weights = info.get("model_weights_id", "")
        if not isinstance(weights, str) or not _WEIGHTS_ID.fullmatch(weights):
            raise FormatError(f"{path / INDEX}: trajectory {number} has the model_weights_id {weights!r:.80}")
    return infos, ids


def check_weights_id(weights: object, what: str) -> None:
    """Refuse a ``model_weights_id`` that cannot be part of a file name.

    Raises:
        DataError: It contains other characters than letters, digits, '.', '_' and '-'.
    """
    if not isinstance(weights, str) or not _WEIGHTS_ID.fullmatch(weights):
        raise DataError(f"{what}, model_weights_id: expected letters, digits, '.', '_', '-', got {weights!r:.80}")


def file_name(number: int, weights: str) -> str:
    """Return the file name of a trajectory."""
    check_weights_id(weights, f"trajectory {number}")
    return f"trajectory_{number}_{weights}.pt"


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return a path of the local file system.

    Raises:
        ValueError: It is a URL.
    """
    if "://" in os.fspath(path):
        raise ValueError(
            f"{os.fspath(path)}: expected a local directory for RLinf's files; only stores (zarr) may be at a URL"
        )
    return Path(path)


def is_rlinf_directory(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a directory with RLinf's files; False for a URL."""
    root = Path(path)
    return any((root / name).exists() for name in (METADATA, INDEX, LEGACY_INDEX))


def share_of(items: Sequence[Any], rank: int, world_size: int) -> Sequence[Any]:
    """Return the contiguous block of one rank; if the sizes are not equal, the first ranks have one item more.

    Raises:
        ValueError: The rank does not exist.
    """
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"local_rank: expected 0 to {world_size - 1}, got {rank}")
    size, n_larger = divmod(len(items), world_size)
    start = rank * size + min(rank, n_larger)
    return items[start : start + size + (rank < n_larger)]
