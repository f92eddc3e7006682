"""The keyword options of `TrajectoryReplayBuffer`, with the names that earlier versions of RLinf used."""

from __future__ import annotations

import os
import warnings
from typing import Any

from trajstore.compat.options import SamplingOptionsDict

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
