"""The keyword options of `TrajectoryReplayBuffer`, with the names that earlier versions of RLinf used."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any

from trajstore.arguments import parse_bytes
from trajstore.compat.options import SamplingOptionsDict
from trajstore.replay.options import ReplayOptions
from trajstore.schema import Schema

_MIN_BUFFER_BYTES = 64 << 20
_BUFFERED_ROWS = 2048
_FORMER_NAMES = {
    "storage_dir": "auto_save_path",
    "storage_format": "trajectory_format",
    "save_trajectories": "auto_save",
}


class BufferOptionsDict(SamplingOptionsDict, total=False):
    """Options of `trajstore.ReplayBuffer`, and RLinf's former names of ``auto_save_path`` and others."""

    storage_dir: str | os.PathLike[str]
    storage_format: str
    save_trajectories: bool


def take_former_names(options: dict[str, Any]) -> dict[str, Any]:
    """Remove RLinf's former names from ``options``; returns their values under the current names.

    Call it directly from a constructor: the warnings name the line that called the constructor.
    """
    found = {}
    for former, current in _FORMER_NAMES.items():
        if former in options:
            warnings.warn(f"{former} is now called {current}", DeprecationWarning, stacklevel=3)
            found[current] = options.pop(former)
    if "auto_save_path" in found:
        found.setdefault("auto_save", True)
    return found


def default_buffer_bytes(schema: Schema, options: Mapping[str, Any]) -> dict[str, int]:
    """Return the option ``buffer_bytes`` that takes large trajectories in few parts; nothing if it is given.

    Every part ends its episodes, which costs a row for each environment. The cache needs room for what is buffered.
    """
    if "buffer_bytes" in options:
        return {}
    cache_bytes = parse_bytes(options.get("cache_bytes", ReplayOptions().cache_bytes), "cache_bytes")
    wanted = min(cache_bytes // 4, _BUFFERED_ROWS * schema.row_bytes)
    return {"buffer_bytes": max(_MIN_BUFFER_BYTES, wanted)}


def checked_format(name: str) -> str:
    """Return the format of RLinf's files.

    Raises:
        ValueError: It is not supported.
    """
    if name == "pkl":
        raise ValueError("trajectory_format: a pickle can run any code when it is loaded; use 'pt'")
    if name == "zarr":
        raise ValueError("trajectory_format: expected 'pt', got 'zarr'; use checkpoint_layout='copy' instead")
    if name != "pt":
        raise ValueError(f"trajectory_format: expected 'pt', got {name!r}")
    return name
