"""Copies rows of resident pages into batches, with compiled loops."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType

import numpy as np
import torch

from trajstore.cache.block_decoders import BlockDecoders
from trajstore.cache.column_pages import ColumnPages
from trajstore.cache.row_request import RowRequest, as_matrices
from trajstore.schema import Array
from trajstore.storage import Storage

_MIN_THREAD_ROWS = 64  # per thread, of rows that have to be decoded
_MIN_THREAD_BYTES = 4 << 20  # per thread: starting one takes as long as copying half a megabyte


class DamagedBlockError(Exception):
    """Some of the virtual rows of a field lie in a mapped chunk that can't be decoded."""

    def __init__(self, path: str, virtual: Array) -> None:
        super().__init__(path)
        self.path, self.virtual = path, virtual


class RowCopier:
    """Copies rows on the CPU; large batches are copied in several of the storage's threads."""

    def __init__(self, kernels: ModuleType, storage: Storage, decoders: BlockDecoders) -> None:
        self._kernels = kernels
        self._storage = storage
        self._decoders = decoders

    def copy(
        self,
        columns: Mapping[str, ColumnPages],
        wanted: Mapping[str, RowRequest],
        outs: Mapping[str, torch.Tensor],
    ) -> None:
        """Copy the requested rows to ``outs``, by key. All their pages must be resident or mapped.

        Raises:
            DamagedBlockError: A mapped chunk can't be decoded.
        """
        blocked: dict[str, list[str]] = {}
        groups: dict[int, list[str]] = {}  # most fields of a batch need the same rows: these are copied together
        for key, w in wanted.items():
            if columns[w.path].has_blocks:
                blocked.setdefault(w.path, []).append(key)
                continue
            groups.setdefault(id(w.row), []).append(key)
        for keys in groups.values():
            w = wanted[keys[0]]
            sources, rows = as_matrices(w.source, w.row)
            arguments = np.array([columns[wanted[key].path].copy_arguments(outs[key]) for key in keys])
            for failed in self._copy_group(arguments, sources, rows):
                if failed >= 0:
                    raise _not_resident(columns[wanted[keys[failed]].path], sources, rows)
        for path, keys in blocked.items():
            self._copy_blocked(columns[path], [(wanted[key], outs[key]) for key in keys])

    def _copy_blocked(self, column: ColumnPages, wanted: Sequence[tuple[RowRequest, torch.Tensor]]) -> None:
        """Copy rows of one column in the order in which they are stored, so that each block is decoded once."""
        table, row_bytes = column.table, column.arena.row_bytes
        rows, places = [], []
        for w, out in wanted:
            sources, row = as_matrices(w.source, w.row)
            rows.append((row + table.first_virtual_row.host[sources]).reshape(-1))
            places.append(out.data_ptr() + row_bytes * np.arange(row.size))
        virtual, place = np.concatenate(rows), np.concatenate(places)
        order = np.argsort(virtual, kind="stable")
        virtual, place = virtual[order], place[order]
        n_threads = max(1, min(torch.get_num_threads(), len(virtual) // _MIN_THREAD_ROWS))
        bounds = [len(virtual) * i // n_threads for i in range(n_threads + 1)]
        decoders, stride = self._decoders.address(n_threads), self._decoders.stride
        argument = np.array(column.addresses())
        loops = self._kernels.block_loops

        def copy_part(i: int) -> int:
            part = slice(bounds[i], bounds[i + 1])
            copied: int = loops.copy_blocked_rows(decoders + i * stride, argument, virtual[part], place[part])
            return copied

        found = list(self._storage.map(copy_part, range(n_threads)))
        if loops.ABSENT in found:
            zeros = np.zeros((1, len(virtual)), np.int64)
            raise _not_resident(column, zeros, virtual[None] - table.first_virtual_row.host[0])
        if loops.DAMAGED in found:
            raise DamagedBlockError(column.path, virtual)

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
