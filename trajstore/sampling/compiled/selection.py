"""Chooses between compiled loops and tensor operations."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import torch


def compiled_loops(device: torch.device, compiled: bool, module: str = "batch_loops") -> ModuleType | None:
    """Return a module of compiled loops, or None if tensor operations have to do the work.

    Args:
        device: Compiled loops only work on the CPU.
        compiled: Whether the caller wants compiled loops.
        module: Name of the module in ``trajstore.sampling.compiled``. It can not be imported without numba.
    """
    if not compiled or device.type != "cpu":
        return None
    try:
        return import_module(f"trajstore.sampling.compiled.{module}")
    except ImportError:  # numba supports new versions of Python with some delay
        return None
