"""Which store of a URL counts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from trajstore.schema import Schema
from trajstore.storage import open_storage
from trajstore.store import Store, create
from trajstore.store import open as open_store


class Generations:
    """The stores of a URL: ``<url>/0``, and one with the next number for every change of the fields.

    The lowest number counts: a store is removed once the next one holds everything.
    """

    def __init__(self, url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None, fsync: bool) -> None:
        self._url = os.fspath(url).rstrip("/")
        self._how: dict[str, Any] = {"storage_options": storage_options, "fsync": fsync}
        self._storage = open_storage(self._url, storage_options, fsync=fsync)
        self.number = min(self._numbers(), default=-1)

    def _numbers(self) -> list[int]:
        names = [name for name in self._storage.list_names("") if name.isdecimal()]
        return [int(name) for name in names if "zarr.json" in self._storage.list_names(name)]

    def open(self) -> Store | None:
        """The store that counts; what a change left that was not finished is removed. None: there is no store."""
        for number in self._numbers():
            if number > self.number:
                self._storage.remove_tree(str(number))
        return open_store(f"{self._url}/{self.number}", **self._how) if self.number >= 0 else None

    def create_next(self, schema: Schema) -> Store:
        return create(f"{self._url}/{self.number + 1}", schema, **self._how)

    def drop_next(self) -> None:
        """Remove a next one that could not be filled."""
        self._storage.remove_tree(str(self.number + 1))

    def advance(self) -> None:
        """From now on the next one counts, which holds everything."""
        if self.number >= 0:
            self._storage.remove_tree(str(self.number))
        self.number += 1

    def remove(self) -> None:
        """Remove the store that counts."""
        if self.number >= 0:
            self._storage.remove_tree(str(self.number))
            self.number = -1
