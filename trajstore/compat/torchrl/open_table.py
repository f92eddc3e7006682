"""What an open storage holds, and how it ends; it lives on when the storage itself is garbage-collected."""

from __future__ import annotations

import threading

from trajstore.compat.private_store import free_private_store
from trajstore.compat.torchrl.slot_table import SlotTable
from trajstore.compat.torchrl.store_generations import StoreGenerations
from trajstore.unclosed import Registration


class OpenTable:
    """The rows of a `TrajStorage`. Nothing here refers to the storage, which the program may drop.

    Args:
        generations: The stores below the URL.
        private_url: URL of a store in RAM that is freed at the end; None: the rows are kept.

    Attributes:
        lock: Held during every change.
        is_closed: Whether `close` has succeeded.
    """

    def __init__(self, generations: StoreGenerations, private_url: str | None) -> None:
        self.lock = threading.RLock()
        self.is_closed = False
        self._generations = generations
        self._private_url = private_url
        self._table: SlotTable | None = None
        self._registration: Registration | None = None

    def use(self, table: SlotTable, storage: object) -> None:
        """Hold these rows from now on, for a storage; they are stored if it is dropped or left open."""
        self._table = table
        if self._registration is None:
            name = f"{type(storage).__name__} at {self._generations.url}"
            self._registration = Registration(storage, self.close, self.flush, name)
            if self._private_url is not None:
                self._registration.make_private(lambda: None)

    def flush(self) -> None:
        """Make all rows durable."""
        with self.lock:
            self._generations.finish_advance()
            if self._table is not None and not self.is_closed:
                self._table.log_changes()
                self._table.log.flush()

    def close(self) -> None:
        """Make all rows durable and release everything. A second call does nothing."""
        with self.lock:
            if self._table is not None and not self.is_closed:
                self._close(self._table)
            self.is_closed = True
            if self._registration is not None:
                self._registration.end()

    def _close(self, table: SlotTable) -> None:
        if self._private_url is not None:
            table.log.discard()
            free_private_store(self._private_url)
            return
        table.log_changes()
        table.log.close()
        self._generations.finish_advance()
