"""The dataset formats that can be imported and exported. A format's module is imported on first use."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

from trajstore.datasets.interfaces import DatasetReader, DatasetWriter

Path = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Format:
    """How to open datasets of one format.

    Attributes:
        module: Name of the module that defines ``open_reader`` and ``open_writer``.
        help: A few words for the command line.
    """

    module: str
    help: str

    def open_reader(self, path: Path, **options: Any) -> DatasetReader:
        """Open a dataset for reading. The options are those of the module's ``open_reader``."""
        return cast(DatasetReader, import_module(self.module).open_reader(path, **options))

    def open_writer(self, path: Path, **options: Any) -> DatasetWriter:
        """Start a dataset, or continue an unfinished one. The options are those of the module's ``open_writer``."""
        return cast(DatasetWriter, import_module(self.module).open_writer(path, **options))


FORMATS: dict[str, Format] = {
    "robomimic": Format("trajstore.datasets.robomimic", "robomimic's HDF5 files"),
    "d4rl": Format("trajstore.datasets.d4rl", "D4RL's flat HDF5 files"),
    "diffusion-policy": Format("trajstore.datasets.diffusion_policy", "replay buffers of diffusion_policy and UMI"),
    "minari": Format("trajstore.datasets.minari", "Minari datasets"),
    "lerobot": Format("trajstore.datasets.lerobot", "LeRobot datasets of version 3"),
    "torchrl": Format("trajstore.datasets.torchrl", "dumps of TorchRL's replay buffers"),
}
