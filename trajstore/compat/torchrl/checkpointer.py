"""Dumps of a storage: a store of its own, without pickle."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from torchrl.data.replay_buffers.checkpointers import StorageCheckpointerBase

from trajstore.compat.torchrl.generations import Generations
from trajstore.compat.torchrl.layout import Layout
from trajstore.compat.torchrl.past import Past
from trajstore.compat.torchrl.table import Table
from trajstore.errors import DataError

if TYPE_CHECKING:
    from trajstore.compat.torchrl.storage import TrajStorage


class TrajStorageCheckpointer(StorageCheckpointerBase):  # type: ignore[misc]
    """Writes what a storage holds to a store below a directory or URL, whole or not at all, and reads it back."""

    def dumps(self, storage: TrajStorage, path: str | os.PathLike[str]) -> None:
        """Replace what is there by what the storage holds now."""
        self._check_hooks()
        generations = Generations(path, None, True)
        generations.open()
        table = storage.table
        if table is None or not len(storage):
            generations.remove()
            return
        store = generations.create_next(table.layout.schema)
        dump = Table(store, table.layout, table.n_slots, 1, torch.device("cpu"), grace_s=0.0, options={})
        table.copy_to(dump)
        dump.log.close()
        generations.advance()

    def loads(self, storage: TrajStorage, path: str | os.PathLike[str]) -> None:
        """Let a storage hold what was dumped, and nothing else.

        Raises:
            DataError: It has no room for it; nothing was changed.
        """
        self._check_hooks()
        store = Generations(path, None, True).open()
        layout = Layout.of_store(store.schema) if store is not None else None
        if store is None or layout is None:
            storage._empty()
            return
        past = Past(store.snapshot)
        cursor = past.cursor if past.cursor >= 0 else None
        storage.load_rows(layout, past.rows(list(layout.fields)), len(past.place), cursor)

    def _check_hooks(self) -> None:
        if self._save_hooks or self._load_hooks:
            raise DataError(
                "hooks of checkpointers are not called here; see trajstore.compat.torchrl.ted_to_episodes"
            )
