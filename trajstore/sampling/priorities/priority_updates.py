"""Priority updates as a caller passes them: checked, one value per step, duplicates resolved."""

from __future__ import annotations

import numpy as np
import torch

from trajstore.errors import DataError
from trajstore.sampling.index.index_entries import handles_of
from trajstore.sampling.step_columns.step_updates import learning_steps
from trajstore.sampling.windows import Windows
from trajstore.schema import Array


def checked_update(index: torch.Tensor, priority: torch.Tensor) -> tuple[Array, Array]:
    """The handles and the float32 priorities of an update, on the host.

    Raises:
        DataError: The shapes or dtypes are wrong, or a priority is negative or not finite.
    """
    handles = handles_of(index)
    if not isinstance(priority, torch.Tensor):
        raise DataError(f"priority: expected a tensor, got {type(priority).__name__}")
    if priority.dim() not in (1, 2) or len(priority) != len(index):
        raise DataError(
            f"priority: expected shape ({len(index)},) or ({len(index)}, length), got {tuple(priority.shape)}"
        )
    if not priority.is_floating_point():
        raise DataError(f"priority: expected floating point, got {priority.dtype}")
    values = priority.detach().to(torch.float32).cpu().numpy()
    bad = ~np.isfinite(values) | (values < 0)
    if bad.any():
        where = tuple(int(i[0]) for i in np.nonzero(bad))
        raise DataError(f"priority {list(where)}: expected a finite number of at least 0, got {values[where]}")
    if (values == 0).any():
        # Only an exact 0 means "never draw": a positive value that rounds to 0 in float32 must stay positive.
        was_positive = (priority.detach() > 0).cpu().numpy() & (values == 0)
        values = np.where(was_positive, np.finfo(np.float32).smallest_subnormal, values)
    return handles, values


def per_step(handles: Array, values: Array, windows: Windows | None) -> tuple[Array, Array]:
    """Handles and priorities of every learning step, from priorities of shape ``[batch, length]``.

    Raises:
        DataError: ``values`` has another length than the windows.
    """
    length, stride = (windows.length, windows.stride) if windows is not None else (values.shape[1], 1)
    if values.shape[1] != length:
        raise DataError(f"priority: expected shape ({len(values)}, {length}), got {values.shape}")
    return learning_steps(handles, length, stride), values.ravel()


def largest_per_address(address: Array, values: Array) -> tuple[Array, Array]:
    """Each address once, with the largest of its values."""
    order = np.lexsort((values, address))
    address, values = address[order], values[order]
    last = np.append(np.diff(address) != 0, True)[: len(address)]
    return address[last], values[last]
