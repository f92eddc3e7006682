"""Which of several stores below a URL is the current one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from trajstore.errors import DataError
from trajstore.schema import Schema
from trajstore.storage import open_storage
from trajstore.store.store import Store, create
from trajstore.store.store import open as open_store


class StoreGenerations:
    """The numbered stores below a URL: ``<url>/1``, and the next number for each store that replaces it.

    The lowest number is the current store: a store is removed only when the next one is complete. To make this true
    for the first one too, it is created beside ``<url>/0``, which is always empty.

    Attributes:
        number: Number of the current store; -1: none exists, 0: none was ever completed.

    Raises:
        DataError: The URL itself is a store.
    """

    def __init__(self, url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None, fsync: bool) -> None:
        self._url = os.fspath(url).rstrip("/")
        self._store_options: dict[str, Any] = {"storage_options": storage_options, "fsync": fsync}
        self._storage = open_storage(self._url, storage_options, fsync=fsync)
        if "zarr.json" in self._storage.list_names(""):
            raise DataError(
                f"{self._url}: is itself a store of episodes; a TrajStorage keeps its rows in stores below its URL,"
                " so give it another URL"
            )
        stores = [n for n in self._numbers() if "zarr.json" in self._storage.list_names(str(n))]
        self.number = min(stores, default=-1)
        self._is_replaced = False  # the next store is complete, and the current one may still exist

    @property
    def url(self) -> str:
        """The URL, without credentials."""
        return self._storage.display

    def _numbers(self) -> list[int]:
        return [int(name) for name in self._storage.list_names("") if name.isdecimal()]

    def open(self) -> Store | None:
        """Open the current store and remove all others, which are incomplete; None if there is no store."""
        for number in self._numbers():
            if number != self.number:
                self._storage.remove_tree(str(number))
        return open_store(f"{self._url}/{self.number}", **self._store_options) if self.number >= 0 else None

    def create_next(self, schema: Schema | None) -> Store:
        """Create the next store, in place of an incomplete one; it becomes the current one with `advance`."""
        self.finish_advance()
        if self.number < 0:
            create(f"{self._url}/0", **self._store_options)
            self.number = 0
        self._storage.remove_tree(str(self.number + 1))
        return create(f"{self._url}/{self.number + 1}", schema, **self._store_options)

    def advance(self) -> None:
        """Make the next store, which is complete, the current one; if that fails, `finish_advance` tries again."""
        self._is_replaced = True
        self.finish_advance()

    def finish_advance(self) -> None:
        """Remove the replaced store, if an earlier `advance` could not."""
        if self._is_replaced:
            self._storage.remove_tree(str(self.number))
            self.number, self._is_replaced = self.number + 1, False
