"""A batch, or a part of one, as an actor returns it through Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from trajstore.ray.draw_weights import DrawWeight
from trajstore.schema import Array


@dataclass(frozen=True)
class SampleReply:
    """The reply of an actor to a sample call: arrays by flat key, which Ray maps without a copy.

    Attributes:
        arrays: The values; bfloat16 values as int16 with the same bits.
        bfloat16: Keys of the arrays that are bfloat16.
        actor: Number of the actor: its rank and its incarnation in one number.
        weight: The actor's weight for the next draw.
    """

    arrays: dict[str, Array]
    bfloat16: tuple[str, ...]
    actor: int
    weight: DrawWeight

    @staticmethod
    def of(flat: Mapping[str, torch.Tensor], actor: int, weight: DrawWeight) -> SampleReply:
        bfloat16 = tuple(key for key, value in flat.items() if value.dtype == torch.bfloat16)
        plain = {key: (value.view(torch.int16) if key in bfloat16 else value).cpu() for key, value in flat.items()}
        arrays = {key: value.contiguous().numpy() for key, value in plain.items()}
        return SampleReply(arrays, bfloat16, actor, weight)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The values as tensors that share the memory of the arrays."""
        flat = {key: _to_tensor(array) for key, array in self.arrays.items()}
        return flat | {key: flat[key].view(torch.bfloat16) for key in self.bfloat16}


def _to_tensor(array: Array) -> torch.Tensor:
    return torch.from_numpy(array if array.flags.writeable or not array.size else np.asarray(_Writable(array)))


class _Writable:
    """Presents a read-only array as writable, because torch warns of read-only ones.

    Ray maps its memory for writing too, and a reply belongs to the caller, so writing does no harm.
    """

    def __init__(self, array: Array) -> None:
        self._array = array  # keeps Ray's memory as long as the view lives
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}
