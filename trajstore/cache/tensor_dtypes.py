"""The torch dtypes that fields are held in, including unsigned ones that torch barely supports."""

from __future__ import annotations

import torch

from trajstore.schema import Field

# torch implements few operations on these dtypes. The same bits are viewed as signed integers for the others.
SIGNED_VIEW = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def arena_dtypes(spec: Field) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtype that an arena stores a field in, and the dtype that batches show it in."""
    shown: torch.dtype = getattr(torch, spec.dtype)
    return SIGNED_VIEW.get(shown, shown), shown


def index_copy(result: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> None:
    """Do ``result[index] = values`` along the first axis, for every dtype that a field can have."""
    if result.dtype in SIGNED_VIEW:
        result, values = result.view(SIGNED_VIEW[result.dtype]), values.view(SIGNED_VIEW[values.dtype])
    result.index_copy_(0, index, values)
