"""The formats that episodes come from and go to. Their modules are imported when they are asked for."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

from trajstore.datasets.ports import Sink, Source

Path = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Format:
    """How to open datasets of one kind.

    Attributes:
        module: Has ``open_source`` and ``open_sink``.
        help: What it is called, in a few words.
    """

    module: str
    help: str

    def open_source(self, path: Path, **options: Any) -> Source:
        """Open a dataset to read; the options are those of the module's function."""
        return cast(Source, import_module(self.module).open_source(path, **options))

    def open_sink(self, path: Path, **options: Any) -> Sink:
        """Begin a dataset, or go on with one that is not finished; the options are the function's too."""
        return cast(Sink, import_module(self.module).open_sink(path, **options))


FORMATS: dict[str, Format] = {
    "robomimic": Format("trajstore.datasets.robomimic", "robomimic's HDF5 files"),
    "d4rl": Format("trajstore.datasets.d4rl", "flat HDF5 files as D4RL has them"),
    "diffusion-policy": Format("trajstore.datasets.diffusion_policy", "replay buffers of diffusion_policy and UMI"),
    "minari": Format("trajstore.datasets.minari", "Minari datasets"),
    "lerobot": Format("trajstore.datasets.lerobot", "LeRobot datasets of version 3"),
    "torchrl": Format("trajstore.datasets.torchrl", "dumps of TorchRL's replay buffers"),
}
