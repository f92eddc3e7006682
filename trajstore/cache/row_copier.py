"""Copies rows of resident pages into batches, with compiled loops."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import ModuleType

import numpy as np
import torch

from trajstore.cache.column_pages import ColumnPages
from trajstore.cache.row_request import RowRequest, as_matrices
from trajstore.schema import Array
from trajstore.storage import Storage

_MIN_THREAD_BYTES = 4 << 20  # per thread: starting one takes as long as copying half a megabyte


class RowCopier:
    """Copies rows on the CPU; large batches are copied in several of the storage's threads."""

    def __init__(self, kernels: ModuleType, storage: Storage) -> None:
        self._kernels = kernels
        self._storage = storage

    def copy(
        self,
        columns: Mapping[str, ColumnPages],
        wanted: Mapping[str, RowRequest],
        outs: Mapping[str, torch.Tensor],
    ) -> None:
        """Copy the requested rows to ``outs``, by key. All their pages must be resident."""
        groups: dict[int, list[str]] = {}  # most fields of a batch need the same rows: these are copied together
        for key, w in wanted.items():
            groups.setdefault(id(w.row), []).append(key)
        for keys in groups.values():
            w = wanted[keys[0]]
            sources, rows = as_matrices(w.source, w.row)
            arguments = np.array([columns[wanted[key].path].copy_arguments(outs[key]) for key in keys])
            for failed in self._copy_group(arguments, sources, rows):
                if failed >= 0:
                    raise _not_resident(columns[wanted[keys[failed]].path], sources, rows)

    def _copy_group(self, columns: Array, sources: Array, rows: Array) -> Iterable[int]:
        """Copy the same rows of several columns; returns what ``copy_columns`` returned in each thread."""
        window_bytes = columns[:, 1] * rows.shape[1]
        n_bytes = int(window_bytes.sum()) * len(rows)
        n_threads = min(torch.get_num_threads(), n_bytes // _MIN_THREAD_BYTES, len(rows))
        if n_threads <= 1:
            return [self._kernels.copy_columns(columns, sources, rows)]
        bounds = [len(rows) * i // n_threads for i in range(n_threads + 1)]

        def copy_part(i: int) -> int:
            part, windows = columns.copy(), slice(bounds[i], bounds[i + 1])
            part[:, 5] += bounds[i] * window_bytes
            failed: int = self._kernels.copy_columns(part, sources[windows], rows[windows])
            return failed

        return self._storage.map(copy_part, range(n_threads))


def _not_resident(column: ColumnPages, sources: Array, rows: Array) -> RuntimeError:
    table = column.table
    sources = np.broadcast_to(sources, rows.shape)
    virtual = rows + table.first_virtual_row.host[sources]
    row = rows[table.slots(virtual // column.page_rows) < 0][0]
    return RuntimeError(
        f"field '{column.path}': row {row} of a batch is not in the cache (internal error; please report)"
    )
