"""Starts kernels on the current stream of a device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

_listeners: list[Callable[[str], None]] = []


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *numbers: int, **constants: Any) -> None:
    """Start a kernel; the host does not wait for it.

    Products are never fused with sums, so that results have the same bits on every device.

    Args:
        kernel: The kernel.
        grid: How many programs it has, by axis.
        device: Where its memory is.
        numbers: Its arguments.
        constants: Its constants, by name.
    """
    for listener in _listeners:
        listener(kernel.__name__)
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        kernel[grid](*numbers, **constants, enable_fp_fusion=False)


def uploaded(numbers: Iterable[int], device: torch.device) -> torch.Tensor:
    """Copy numbers to a device; the host does not wait for it."""
    is_locked = device.type == "cuda"
    return torch.tensor(list(numbers), dtype=torch.int64, pin_memory=is_locked).to(device, non_blocking=True)


@contextlib.contextmanager
def counted_launches() -> Iterator[list[str]]:
    """Collect the names of the kernels that are started in this block, by any thread."""
    names: list[str] = []
    _listeners.append(names.append)
    try:
        yield names
    finally:
        _listeners.remove(names.append)
