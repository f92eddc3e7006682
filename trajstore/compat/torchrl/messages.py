"""Messages between the process that opened a storage and others: JSON and the bytes of tensors, without pickle."""

from __future__ import annotations

import json
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from trajstore.compat.torchrl.paged_tensor import PagedTensor
from trajstore.compat.torchrl.row_structure import Leaves

Message = dict[str, Any]


def send(connection: Connection, message: Message, tensors: Leaves) -> None:
    """Send a message and tensors by name; they must be sent completely before another message."""
    tensors = {name: _on_host(tensor) for name, tensor in tensors.items()}
    layout = {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()}
    connection.send_bytes(json.dumps({"message": message, "tensors": layout}).encode())
    for tensor in tensors.values():
        if tensor.numel():
            connection.send_bytes(_bytes_of(tensor))


def receive(connection: Connection) -> tuple[Message, Leaves]:
    """Wait for a message; returns it and its tensors.

    Raises:
        EOFError: The other side has closed the connection.
    """
    received = json.loads(connection.recv_bytes())
    return received["message"], dict(_receive_tensors(connection, received["tensors"]))


def _receive_tensors(connection: Connection, layout: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, (dtype, shape) in layout.items():
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        if tensor.numel():
            connection.recv_bytes_into(_bytes_of(tensor))
        yield name, tensor


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    held = tensor.read() if isinstance(tensor, PagedTensor) else tensor
    return held.detach().cpu().contiguous()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def pack_index(index: Any, tensors: Leaves) -> Any:
    """Return an index as JSON; its tensors are added to ``tensors``."""
    if isinstance(index, tuple):
        return {"parts": [pack_index(part, tensors) for part in index]}
    if isinstance(index, slice):
        return {"slice": [index.start, index.stop, index.step]}
    if isinstance(index, (int, np.integer)):
        return int(index)
    name = f"index{len(tensors)}"
    tensors[name] = index if isinstance(index, torch.Tensor) else torch.as_tensor(np.asarray(index))
    return {"tensor": name}


def unpack_index(packed: Any, tensors: Leaves) -> Any:
    """Return the index of `pack_index`; its tensors are removed from ``tensors``."""
    if isinstance(packed, int):
        return packed
    if "parts" in packed:
        return tuple(unpack_index(part, tensors) for part in packed["parts"])
    return slice(*packed["slice"]) if "slice" in packed else tensors.pop(packed["tensor"])
