"""A directory that is written beside its place, and put there when it is whole."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trajstore.errors import DataError, StoreExistsError
from trajstore.storage.atomic_files import sync_file

Record = dict[str, Any]


class Unfinished:
    """The directory ``<name>.partial``, and ``<name>.journal`` with what is whole in it.

    Attributes:
        place: Where files are written until they are published.
        records: What was noted, by earlier runs too, in order.
    """

    def __init__(self, target: Path, about: Mapping[str, Any]) -> None:
        """Use `begin`."""
        self.target = target
        self.place = target.with_name(f"{target.name}.partial")
        self.records: list[Record] = []
        self._journal = target.with_name(f"{target.name}.journal")
        self._about = json.loads(json.dumps(about))

    @staticmethod
    def begin(path: str | os.PathLike[str], about: Mapping[str, Any]) -> Unfinished:
        """Begin, or go on with what an earlier run of the same options has left.

        Args:
            path: Where it goes in the end; nothing may be there.
            about: What both runs must agree on: format and options, as JSON.

        Raises:
            StoreExistsError: The place is taken.
            DataError: What is left was begun with other options.
        """
        unfinished = Unfinished(Path(path).absolute(), about)
        unfinished._check_free()
        unfinished._load()
        unfinished.place.mkdir(parents=True, exist_ok=True)
        return unfinished

    def _check_free(self) -> None:
        if self.target.exists():
            raise StoreExistsError(f"{self.target} is taken; choose another place for the dataset")
        if self.place.exists() and not self._journal.exists():
            raise self._foreign()

    def _foreign(self) -> StoreExistsError:
        return StoreExistsError(f"{self.place} is not what an export has left; remove it, or choose another place")

    def _load(self) -> None:
        if not self.place.exists():  # the journal of one that was published, or never begun
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self._journal.unlink(missing_ok=True)
            self._append([self._about])
            return
        data = self._journal.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]  # a kill may leave a line that is not
        os.truncate(self._journal, len(whole))
        about, *self.records = [json.loads(line) for line in whole.splitlines()] or [None]
        if not isinstance(about, dict) or "format" not in about:
            raise self._foreign()
        if about != self._about:
            self._begin_anew(about)

    def _begin_anew(self, about: Mapping[str, Any]) -> None:
        """Forget a run of other options, if no episode would be lost."""
        if not self._is_empty:
            raise DataError(
                f"{self.place} was begun with other options: {_differences(about, self._about)};"
                f" give the same, or remove it and {self._journal} to begin again"
            )
        self._remove()
        self.records = []
        self._append([self._about])

    @property
    def _is_empty(self) -> bool:
        """Whether no episode is noted; a format may note other things."""
        return not any("key" in record for record in self.records)

    def _remove(self) -> None:
        shutil.rmtree(self.place)
        self._journal.unlink()

    def abandon(self) -> None:
        """Leave what is noted for another run; where no episode is, leave nothing."""
        if self._is_empty:
            self._remove()

    def note(self, records: Iterable[Record]) -> None:
        """Say what is whole and on disk; records survive a crash in the order they came, or not at all."""
        new = list(records)
        self._append(new)
        self.records += new

    def _append(self, records: list[Record]) -> None:
        with self._journal.open("ab") as file:
            file.write(b"".join(json.dumps(record).encode() + b"\n" for record in records))
            file.flush()
            os.fsync(file.fileno())

    def publish(self) -> None:
        """Put the directory under its name; whole, or not at all."""
        sync_tree(self.place)
        os.rename(self.place, self.target)
        sync_file(self.target.parent)
        self._journal.unlink()

    def publish_file(self, name: str) -> None:
        """Put one file of the directory under the name instead, and drop the others."""
        sync_file(self.place / name)
        self._publish_only(name)

    def publish_directory(self, name: str) -> None:
        """Put one directory in the directory under the name instead, and drop what is beside it."""
        sync_tree(self.place / name)
        self._publish_only(name)

    def _publish_only(self, name: str) -> None:
        # The others go last: as long as there is nothing under the name, a run that was killed needs them.
        os.replace(self.place / name, self.target)
        sync_file(self.target.parent)
        self._remove()


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return ", ".join(
        f"{name} was {json.dumps(before.get(name))} and is {json.dumps(now.get(name))}" for name in names
    )


def sync_tree(place: Path) -> None:
    for directory, _, names in os.walk(place):
        for name in names:
            sync_file(Path(directory, name))
        sync_file(Path(directory))


def emptied(place: Path) -> Path:
    """The directory, with nothing in it."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    return place
