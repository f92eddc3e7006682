"""A tensor that reads its rows from the log when they are used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from trajstore.errors import DataError

Read = Callable[[torch.Tensor], torch.Tensor]
_aten = torch.ops.aten
_ALIASES = {_aten.detach.default, _aten.alias.default}


class PagedTensor(torch.Tensor):
    """Rows by slot. Slicing the first axis reads nothing, indexing it reads those rows, all else reads all rows.

    It is read-only: rows are written through the storage.
    """

    _read: Read
    _rows: range

    @staticmethod
    def __new__(
        cls, read: Read, rows: range, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> PagedTensor:
        tensor: PagedTensor = torch.Tensor._make_wrapper_subclass(
            cls, (len(rows), *shape), dtype=dtype, device=device
        )
        tensor._read, tensor._rows = read, rows
        return tensor

    def __init__(self, *_: Any) -> None:
        pass

    def read(self) -> torch.Tensor:
        """Read all rows."""
        return self._read_at(torch.arange(len(self._rows)))

    def sliced(self, rows: range) -> PagedTensor:
        """Return a tensor of some of the rows, without reading them."""
        return PagedTensor(self._read, rows, tuple(self.shape[1:]), self.dtype, self.device)

    def _read_at(self, index: torch.Tensor) -> torch.Tensor:
        index = index.cpu()
        n = len(self._rows)
        if not index.numel():
            return torch.empty((*index.shape, *self.shape[1:]), dtype=self.dtype, device=self.device)
        if not -n <= int(index.min()) <= int(index.max()) < n:
            raise IndexError(f"index: expected {-n} to {n - 1}, got {int(index.min())} to {int(index.max())}")
        slots = self._rows.start + self._rows.step * torch.where(index < 0, index + n, index)
        rows = self._read(slots.reshape(-1))
        return rows.reshape((*index.shape, *self.shape[1:]))

    def is_shared(self) -> bool:
        return False

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PagedTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func._schema.is_mutable:
            raise DataError(
                f"{func._schema.name}: fields that are not in memory cannot be changed in place; write rows with"
                " rb[index] = data, or give the storage more cache_bytes"
            )
        found = _on_first_axis(func, args) if isinstance(args[0], PagedTensor) else None
        if found is not None:
            return found
        args, kwargs = tree_map(lambda x: x.read() if isinstance(x, PagedTensor) else x, (args, kwargs or {}))
        return func(*args, **kwargs)


def _on_first_axis(func: Any, args: Any) -> torch.Tensor | None:
    """Return the result of slicing or indexing the first axis; None for any other operation."""
    paged, arguments = args[0], args[1:]
    if func in _ALIASES:
        return paged.sliced(paged._rows)  # type: ignore[no-any-return]
    if func is _aten.slice.Tensor and (not arguments or arguments[0] == 0):
        return paged.sliced(paged._rows[slice(*arguments[1:])])  # type: ignore[no-any-return]
    if func is _aten.select.int and arguments[0] == 0:
        return paged._read_at(torch.tensor(arguments[1]))  # type: ignore[no-any-return]
    if func is _aten.index_select.default and arguments[0] == 0:
        return paged._read_at(arguments[1])  # type: ignore[no-any-return]
    if func is _aten.index.Tensor and arguments[0][0] is not None:
        return _indexed(paged, *arguments[0])
    return None


def _indexed(paged: PagedTensor, first: torch.Tensor, *others: torch.Tensor | None) -> torch.Tensor:
    if first.dtype == torch.bool and first.dim() > 1:
        return paged.read()[(first, *others)]
    rows = first.nonzero().squeeze(1) if first.dtype == torch.bool else first
    if all(index is None for index in others):
        return paged._read_at(rows)
    needed, where = np.unique(rows.cpu().numpy(), return_inverse=True)  # reads each row once
    rest = (slice(None) if index is None else index for index in others)
    return paged._read_at(torch.from_numpy(needed))[(torch.from_numpy(where), *rest)]
