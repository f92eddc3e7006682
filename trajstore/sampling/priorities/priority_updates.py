"""Priority updates as a caller passes them: checked, one value per step, duplicates resolved."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import ArrayLike

from trajstore.errors import DataError
from trajstore.sampling.index.index_entries import StepIndex, handles_of
from trajstore.sampling.step_columns.step_handles import in_one_piece
from trajstore.sampling.step_columns.step_updates import learning_steps
from trajstore.sampling.windows import Windows
from trajstore.schema import Array


def checked_update(index: StepIndex, priority: ArrayLike, numbers: Mapping[str, int]) -> tuple[Array, Array]:
    """The handles and the float32 priorities of an update, on the host.

    Raises:
        DataError: The shapes or dtypes are wrong, or a priority is negative or not finite.
    """
    handles = handles_of(index, numbers)
    n = len(handles)
    if not isinstance(priority, torch.Tensor):
        priority = _as_tensor(priority)
    if priority.dim() == 0 and n == 1:
        priority = priority[None]  # a number for the step of one handle
    if priority.dim() not in (1, 2) or len(priority) != n:
        raise DataError(f"priority: expected shape ({n},) or ({n}, length), got {tuple(priority.shape)}")
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


def plain_update(index: StepIndex, priority: ArrayLike, numbers: Mapping[str, int]) -> tuple[Array, Array] | None:
    """The handles and priorities of an update, if it has one float32 in memory for each handle; else None.

    The priorities are a view of what the caller passed, and are not checked.
    """
    if isinstance(priority, torch.Tensor):
        if priority.dtype is not torch.float32 or priority.device.type != "cpu":
            return None
        priority = priority.detach().numpy()
    if not isinstance(priority, np.ndarray) or priority.dtype != np.float32 or priority.ndim != 1:
        return None
    handles = handles_of(index, numbers)
    return (handles, in_one_piece(priority)) if len(handles) == len(priority) else None


def _as_tensor(priority: ArrayLike) -> torch.Tensor:
    try:
        return torch.as_tensor(np.asarray(priority))
    except (TypeError, ValueError) as error:
        raise DataError(f"priority: expected a tensor or an array, got {type(priority).__name__}") from error


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
