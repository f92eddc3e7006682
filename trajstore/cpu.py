"""Whether the compiled loops can be used."""

from __future__ import annotations

from types import ModuleType

import torch


def kernels_for(device: torch.device, compiled: bool) -> ModuleType | None:
    """The compiled loops, or None where tensor operations do the work: on other devices, or without numba."""
    if not compiled or device.type != "cpu":
        return None
    try:
        from trajstore import kernels
    except ImportError:  # numba follows new versions of Python with some delay
        return None
    return kernels
