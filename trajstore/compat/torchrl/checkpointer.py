"""Writes and reads dumps of a `TrajStorage`: a store, without pickle."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from torchrl.data.replay_buffers.checkpointers import StorageCheckpointerBase, TensorStorageCheckpointer

from trajstore.compat.torchrl.earlier_sessions import EarlierSessions
from trajstore.compat.torchrl.foreign_dumps import dump_with, load_with
from trajstore.compat.torchrl.row_log import RowLog
from trajstore.compat.torchrl.row_structure import RowStructure
from trajstore.compat.torchrl.slot_table import SlotTable
from trajstore.compat.torchrl.store_generations import StoreGenerations
from trajstore.errors import StoreNotFoundError
from trajstore.store.store import Store

if TYPE_CHECKING:
    from trajstore.compat.torchrl.storage import TrajStorage

_BUFFER_BYTES = 64 << 20


class TrajStorageCheckpointer(StorageCheckpointerBase):  # type: ignore[misc]
    """Writes the rows of a storage to a store below a directory or URL, atomically, and reads them back."""

    def dumps(self, storage: TrajStorage, path: str | os.PathLike[str]) -> None:
        """Replace the dump at ``path`` by the rows that the storage holds now.

        With save hooks, TorchRL's checkpointer calls them and writes files of its own instead, not atomically.

        Raises:
            DataError: There are save hooks, and no rows.
        """
        if self._save_hooks:
            dump_with(self._of_torchrl(), storage, path)
            return
        generations = StoreGenerations(path, None, True)
        generations.open()
        if storage.table is None or not len(storage):
            generations.create_next(None)
        else:
            _write(storage.table, generations.create_next(storage.table.structure.schema))
        generations.advance()

    def loads(self, storage: TrajStorage, path: str | os.PathLike[str]) -> None:
        """Replace the rows of a storage by those of a dump.

        With load hooks, TorchRL's checkpointer reads its own files and calls them.

        Raises:
            DataError: The storage is too small, and was not changed.
            StoreNotFoundError: There is no complete dump.
        """
        if self._load_hooks:
            load_with(self._of_torchrl(), storage, path)
            return
        generations = StoreGenerations(path, None, True)
        store = generations.open()
        if store is None or not generations.number:
            raise StoreNotFoundError(f"{os.fspath(path)}: expected a dump of a TrajStorage, found no complete one")
        structure = RowStructure.of_store(store.schema)
        if structure is None:
            storage._empty()
            return
        dumped = EarlierSessions(store.snapshot)
        cursor = dumped.cursor if dumped.cursor >= 0 else None
        rows = dumped.rows(list(structure.fields))
        storage.load_rows(structure, rows, len(dumped.place), cursor, dumped.n_slots)

    def _of_torchrl(self) -> TensorStorageCheckpointer:
        theirs = TensorStorageCheckpointer()
        theirs._save_hooks, theirs._load_hooks = self._save_hooks, self._load_hooks
        return theirs


def _write(table: SlotTable, store: Store) -> None:
    """Write all rows of a table to a store."""
    log = RowLog(
        store,
        table.structure,
        table.n_slots,
        paged=[],
        cache_bytes=0,
        device=torch.device("cpu"),
        grace_s=0.0,
        options={"buffer_bytes": _BUFFER_BYTES},
    )
    log.cursor = table.log.cursor
    try:
        for slots, rows in table.blocks():
            log.append(slots, rows)
        log.close()
    except BaseException:
        log.discard()
        raise
