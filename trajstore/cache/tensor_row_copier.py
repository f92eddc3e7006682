"""Copies rows of resident pages into batches, with tensor operations on any device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from trajstore.cache.column_pages import ColumnPages
from trajstore.cache.page_table import PageTable
from trajstore.cache.row_request import RowRequest

_MAX_KEPT = 64  # sets of columns whose layout is kept


class TensorRowCopier:
    """Copies rows with one operation for each column, and two that columns with the same rows share."""

    def __init__(self) -> None:
        self._layouts: dict[tuple[str, ...], _Layout] = {}

    def copy(
        self,
        columns: Mapping[str, ColumnPages],
        wanted: Mapping[str, RowRequest],
        outs: Mapping[str, torch.Tensor],
    ) -> None:
        """Copy the requested rows to ``outs``, by key. All their pages must be resident."""
        groups: dict[tuple[int, int], list[str]] = {}  # most fields of a batch need the same rows
        for key, w in wanted.items():
            groups.setdefault((id(w.source), id(w.row)), []).append(key)
        for keys in groups.values():
            w = wanted[keys[0]]
            chosen = [columns[wanted[key].path] for key in keys]
            for key, column, virtual in zip(keys, chosen, self._virtual_rows(chosen, w), strict=True):
                column.arena.read(column.table.arena_rows(virtual).reshape(-1), outs[key])

    def _virtual_rows(self, columns: Sequence[ColumnPages], wanted: RowRequest) -> torch.Tensor:
        """Return the virtual rows of the same rows in several columns: ``[columns, *row.shape]``."""
        source, row = wanted.source, wanted.row
        first = self._first_virtual_rows(columns).index_select(1, source.reshape(-1))
        return first.view(len(columns), *(1,) * (row.dim() - source.dim()), *source.shape) + row

    def _first_virtual_rows(self, columns: Sequence[ColumnPages]) -> torch.Tensor:
        """Return the virtual row of row 0 of each source, for several columns: ``[columns, sources]``."""
        paths = tuple(column.path for column in columns)
        layout = self._layouts.get(paths)
        if layout is None or not layout.is_current(columns):
            if len(self._layouts) >= _MAX_KEPT:
                self._layouts.clear()
            layout = self._layouts[paths] = _Layout([column.table for column in columns])
        return layout.first_virtual_rows


class _Layout:
    """The first virtual rows of several columns, on the device."""

    def __init__(self, tables: Sequence[PageTable]) -> None:
        self._versions = [(table, table.layout_version) for table in tables]
        self.first_virtual_rows = torch.stack([table.first_virtual_row.device for table in tables])

    def is_current(self, columns: Sequence[ColumnPages]) -> bool:
        known = zip(self._versions, columns, strict=True)
        return all(c.table is table and c.table.layout_version == version for (table, version), c in known)
