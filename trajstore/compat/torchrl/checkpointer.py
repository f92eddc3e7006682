"""Dumps of a storage: a store of its own, without pickle."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from torchrl.data.replay_buffers.checkpointers import StorageCheckpointerBase

from trajstore.compat.torchrl.generations import Generations
from trajstore.compat.torchrl.layout import Layout
from trajstore.compat.torchrl.log import Log
from trajstore.compat.torchrl.past import Past
from trajstore.compat.torchrl.table import Table
from trajstore.errors import DataError, StoreNotFoundError
from trajstore.store.store import Store

if TYPE_CHECKING:
    from trajstore.compat.torchrl.storage import TrajStorage

_BUFFER_BYTES = 64 << 20


class TrajStorageCheckpointer(StorageCheckpointerBase):  # type: ignore[misc]
    """Writes what a storage holds to a store below a directory or URL, whole or not at all, and reads it back."""

    def dumps(self, storage: TrajStorage, path: str | os.PathLike[str]) -> None:
        """Replace what is there by what the storage holds now."""
        self._check_hooks()
        generations = Generations(path, None, True)
        generations.open()
        if storage.table is None or not len(storage):
            generations.create_next(None)
        else:
            _write(storage.table, generations.create_next(storage.table.layout.schema))
        generations.advance()

    def loads(self, storage: TrajStorage, path: str | os.PathLike[str]) -> None:
        """Let a storage hold what was dumped, and nothing else.

        Raises:
            DataError: It has no room for it; nothing was changed.
            StoreNotFoundError: Nothing was dumped there, or not to its end.
        """
        self._check_hooks()
        generations = Generations(path, None, True)
        store = generations.open()
        if store is None or not generations.number:
            raise StoreNotFoundError(
                f"{os.fspath(path)}: expected what a TrajStorage has dumped, found nothing whole"
            )
        layout = Layout.of_store(store.schema)
        if layout is None:
            storage._empty()
            return
        past = Past(store.snapshot)
        cursor = past.cursor if past.cursor >= 0 else None
        storage.load_rows(layout, past.rows(list(layout.fields)), len(past.place), cursor, past.n_slots)

    def _check_hooks(self) -> None:
        if self._save_hooks or self._load_hooks:
            raise DataError(
                "hooks of checkpointers are not called here; see trajstore.compat.torchrl.ted_to_episodes"
            )


def _write(table: Table, store: Store) -> None:
    """Write all rows of a table to a store."""
    log = Log(
        store,
        table.layout,
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
