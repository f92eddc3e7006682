"""CUDA streams for work in the background; nothing on other devices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch


def current_event(device: torch.device) -> Any:
    """An event after all work on the current stream so far; None unless the device is a GPU."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


@contextlib.contextmanager
def side_stream(device: torch.device, after: Any) -> Iterator[Any]:
    """Run the block on a CUDA stream that first waits for the event ``after``; gives None on other devices."""
    if device.type != "cuda" or after is None:
        yield None
        return
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_event(after)
    with torch.cuda.stream(side):
        yield side


def wait_for(event: Any, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Let the current stream wait for an event before it uses tensors that another stream made."""
    stream = torch.cuda.current_stream(device)
    stream.wait_event(event)
    for tensor in tensors.values():
        tensor.record_stream(stream)  # keeps their memory until this stream has finished with it
