"""Which store of a URL counts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from trajstore.errors import DataError
from trajstore.schema import Schema
from trajstore.storage import open_storage
from trajstore.store.store import Store, create
from trajstore.store.store import open as open_store


class Generations:
    """The stores of a URL: ``<url>/1``, and one with the next number for whatever takes its place as a whole.

    The lowest number counts: a store is removed once the next one holds everything. So that this is true of the
    first one too, it begins beside ``<url>/0``, which never holds anything.

    Attributes:
        number: Of the store that counts; -1: there is none, 0: none was ever filled.

    Raises:
        DataError: The URL is that of a store.
    """

    def __init__(self, url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None, fsync: bool) -> None:
        self._url = os.fspath(url).rstrip("/")
        self._how: dict[str, Any] = {"storage_options": storage_options, "fsync": fsync}
        self._storage = open_storage(self._url, storage_options, fsync=fsync)
        if "zarr.json" in self._storage.list_names(""):
            raise DataError(
                f"{self._url}: is a store itself, of episodes; a TrajStorage keeps rows by slot, in stores below"
                " its URL: give it a place of its own"
            )
        stores = [n for n in self._numbers() if "zarr.json" in self._storage.list_names(str(n))]
        self.number = min(stores, default=-1)
        self._is_passed = False  # the next one holds everything, and this one is perhaps not removed yet

    def _numbers(self) -> list[int]:
        return [int(name) for name in self._storage.list_names("") if name.isdecimal()]

    def open(self) -> Store | None:
        """The store that counts; what a change left that was not finished is removed. None: there is no store."""
        for number in self._numbers():
            if number != self.number:
                self._storage.remove_tree(str(number))
        return open_store(f"{self._url}/{self.number}", **self._how) if self.number >= 0 else None

    def create_next(self, schema: Schema | None) -> Store:
        """A store that does not count yet, in the place of one that was not finished."""
        self.settle()
        if self.number < 0:
            create(f"{self._url}/0", **self._how)
            self.number = 0
        self._storage.remove_tree(str(self.number + 1))
        return create(f"{self._url}/{self.number + 1}", schema, **self._how)

    def advance(self) -> None:
        """From now on the next one counts, which holds everything; where that fails, `settle` tries again."""
        self._is_passed = True
        self.settle()

    def settle(self) -> None:
        """See that the store that was made last is the one that counts."""
        if self._is_passed:
            self._storage.remove_tree(str(self.number))
            self.number, self._is_passed = self.number + 1, False
