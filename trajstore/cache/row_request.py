"""Which rows of a column a batch needs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from trajstore.schema import Array


@dataclass(frozen=True, slots=True)
class RowRequest:
    """Rows to read from one column.

    ``source`` and ``row`` have shapes that broadcast. Source 0 holds the live rows, which are not committed yet;
    source ``i + 1`` is stream number ``i``.
    """

    path: str
    source: torch.Tensor
    row: torch.Tensor


def as_matrices(source: torch.Tensor, row: torch.Tensor) -> tuple[Array, Array]:
    """Return sources and rows as two-dimensional numpy arrays ``[windows, rows]``, for compiled loops.

    The second axis of the sources has length 1 if all rows of a window come from one source.
    """
    n, sources = len(row), source.numpy()
    if source.shape != row.shape and source.shape != (n, 1):
        sources = np.ascontiguousarray(source.expand(row.shape).numpy())
    return sources.reshape(n, math.prod(sources.shape[1:])), row.numpy().reshape(n, math.prod(row.shape[1:]))
