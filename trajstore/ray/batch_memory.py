"""Memory for batches that a learner shares with actors on the same machine, and how a batch lies in it."""

from __future__ import annotations

import math
import mmap
import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trajstore.schema import Array

_ALIGNMENT = 64


@dataclass(frozen=True)
class TensorLayout:
    """Where one tensor of a batch lies in the memory of the batch.

    Attributes:
        offset: First byte.
        dtype: As numpy writes it; that of int16 for bfloat16.
        shape: Shape of one window.
        is_bfloat16: Whether the values are bfloat16.
    """

    offset: int
    dtype: str
    shape: tuple[int, ...]
    is_bfloat16: bool

    def view(self, memory: Any, n_windows: int) -> Array:
        """The values of all windows, as an array that shares the memory."""
        count = n_windows * math.prod(self.shape)
        return np.frombuffer(memory, self.dtype, count, self.offset).reshape(n_windows, *self.shape)

    def to_tensor(self, array: Array) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor.view(torch.bfloat16) if self.is_bfloat16 else tensor


@dataclass(frozen=True)
class BatchLayout:
    """Where the tensors of a batch lie in its memory, one after the other.

    Attributes:
        n_windows: Number of windows of the batch.
        tensors: By flat key.
        n_bytes: Size of the memory.
    """

    n_windows: int
    tensors: Mapping[str, TensorLayout]
    n_bytes: int

    @classmethod
    def of(cls, flat: Mapping[str, torch.Tensor], n_windows: int) -> BatchLayout:
        """The layout for batches like this one."""
        tensors, offset = {}, 0
        for key, value in flat.items():
            is_bfloat16 = value.dtype == torch.bfloat16
            dtype = np.dtype(np.int16) if is_bfloat16 else value[:0].numpy().dtype
            tensors[key] = TensorLayout(offset, dtype.str, tuple(value.shape[1:]), is_bfloat16)
            n_bytes = n_windows * math.prod(value.shape[1:]) * dtype.itemsize
            offset += -(-n_bytes // _ALIGNMENT) * _ALIGNMENT
        return cls(n_windows, tensors, max(offset, 1))


class BatchMemory:
    """Memory for one batch at a time; a learner creates it, actors map it by its file descriptor.

    It has no name in any file system, so nothing is left behind when processes die.

    Args:
        number: Tells it from the learner's other memory for the same kind of batch.
        n_bytes: Its size.
    """

    def __init__(self, number: int, n_bytes: int) -> None:
        self.number, self.n_bytes = number, n_bytes
        self.descriptor = os.memfd_create("trajstore")
        try:
            os.posix_fallocate(self.descriptor, 0, n_bytes)  # fails here, instead of a fatal signal at a write
            self.mapped = map_memory(self.descriptor, n_bytes)
        except BaseException:
            os.close(self.descriptor)
            raise

    def __del__(self) -> None:
        if hasattr(self, "mapped"):
            os.close(self.descriptor)


def map_memory(descriptor: int, n_bytes: int) -> mmap.mmap:
    return mmap.mmap(descriptor, n_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


class MemoryLease:
    """Memory in use by a batch; it returns to the free memory when the last tensor on it is deleted."""

    def __init__(self, memory: BatchMemory, free: deque[BatchMemory]) -> None:
        self.memory, self._free = memory, free

    def __del__(self) -> None:
        self._free.append(self.memory)

    def tensors(self, layout: BatchLayout) -> dict[str, torch.Tensor]:
        """The tensors of the whole batch; each of them holds the lease."""
        return {
            key: tensor.to_tensor(np.asarray(_Owned(tensor.view(self.memory.mapped, layout.n_windows), self)))
            for key, tensor in layout.tensors.items()
        }


class _Owned:
    """An array that keeps its owner alive."""

    def __init__(self, array: Array, owner: object) -> None:
        self._array, self._owner = array, owner
        self.__array_interface__ = array.__array_interface__
