"""Chooses between Triton's kernels and tensor operations."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import torch

_OLDEST = 3, 3  # earlier versions of Triton can not compile all kernels

is_interpreted = False
"""Whether kernels are also used on the CPU. That works only in Triton's interpreter, which is slow: for tests."""


def device_kernels(device: torch.device, module: str = "batch_kernels") -> ModuleType | None:
    """Return a module of kernels, or None if tensor operations have to do the work.

    Args:
        device: Kernels work on GPUs.
        module: Name of the module in ``trajstore.sampling.triton``. It can not be imported without Triton.
    """
    if device.type != "cuda" and not (is_interpreted and device.type == "cpu"):
        return None
    try:
        version = import_module("triton").__version__
    except ImportError:
        return None
    if tuple(map(int, version.split(".")[:2])) < _OLDEST:
        return None
    return import_module(f"trajstore.sampling.triton.{module}")
