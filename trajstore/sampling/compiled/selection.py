"""Whether the compiled loops can be used."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import torch


def compiled_loops(device: torch.device, compiled: bool, module: str = "batch_loops") -> ModuleType | None:
    """Compiled loops, or None where tensor operations do the work: on other devices, or without numba."""
    if not compiled or device.type != "cpu":
        return None
    try:
        return import_module(f"trajstore.sampling.compiled.{module}")
    except ImportError:  # numba follows new versions of Python with some delay
        return None
