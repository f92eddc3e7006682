"""Torch's default device, which ALF sets to the GPU. Results go there; it has no effect on the buffer itself."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from trajstore.compat.alf.nested_tensors import map_leaves

_CPU = torch.device("cpu")


def is_plain_torch() -> bool:
    """Return whether the default device is the CPU."""
    return torch.empty(0).is_cpu  # much cheaper than torch.get_default_device


def plain_torch() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which torch creates tensors on the CPU, as the buffer expects."""
    return contextlib.nullcontext() if is_plain_torch() else torch.device(_CPU)


def to_default_device(nest: Any) -> Any:
    """Return a nest with its tensors on the default device; as it is if that is the CPU."""
    if is_plain_torch():
        return nest
    device = torch.get_default_device()
    return map_leaves(nest, lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf)
