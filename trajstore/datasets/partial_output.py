"""Write a file or directory next to its target, and move it there when it is complete.

A run that stops can be continued: a journal lists the episodes that are complete on disk.
"""

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


class PartialOutput:
    """The directory ``<name>.partial`` and the journal ``<name>.journal`` next to the target ``<name>``.

    Attributes:
        target: Where the output appears when it is complete.
        directory: Where files are written until they are published.
        records: The records of the journal in order, including those of earlier runs.
    """

    def __init__(self, target: Path, options: Mapping[str, Any]) -> None:
        """Only assign; `begin` checks the target and reads the journal."""
        self.target = target
        self.directory = target.with_name(f"{target.name}.partial")
        self.records: list[Record] = []
        self._journal = target.with_name(f"{target.name}.journal")
        self._options = json.loads(json.dumps(options))

    @staticmethod
    def begin(path: str | os.PathLike[str], options: Mapping[str, Any]) -> PartialOutput:
        """Start an output, or continue one that an earlier run with the same options left.

        Args:
            path: The target; nothing may exist there.
            options: The format and its options, as JSON values. Both runs must agree on them.

        Raises:
            StoreExistsError: The target exists, or the directory is not from an export.
            DataError: The earlier run had other options.
        """
        output = PartialOutput(Path(path).absolute(), options)
        output._check_free()
        output._load()
        output.directory.mkdir(parents=True, exist_ok=True)
        return output

    def _check_free(self) -> None:
        if self.target.exists():
            raise StoreExistsError(f"{self.target} already exists; choose another path for the dataset")
        if self.directory.exists() and not self._journal.exists():
            raise self._foreign_directory_error()

    def _foreign_directory_error(self) -> StoreExistsError:
        return StoreExistsError(
            f"{self.directory} exists and is not from an unfinished export; remove it, or choose another path"
        )

    def _load(self) -> None:
        if not self.directory.exists():  # a journal without it is from an export that was published or never began
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self._journal.unlink(missing_ok=True)
            self._append([self._options])
            return
        data = self._journal.read_bytes()
        complete_lines = data[: data.rfind(b"\n") + 1]  # a kill may leave an incomplete line at the end
        os.truncate(self._journal, len(complete_lines))
        options, *self.records = [json.loads(line) for line in complete_lines.splitlines()] or [None]
        if not isinstance(options, dict) or "format" not in options:
            raise self._foreign_directory_error()
        if options != self._options:
            self._restart(options)

    def _restart(self, options: Mapping[str, Any]) -> None:
        """Discard a run that had other options and wrote no episode.

        Raises:
            DataError: It wrote episodes, which would be lost.
        """
        if not self._is_empty:
            raise DataError(
                f"{self.directory} was written with other options: {_differences(options, self._options)};"
                f" give the same options, or remove it and {self._journal} to start over"
            )
        self._remove()
        self.records = []
        self._append([self._options])

    @property
    def _is_empty(self) -> bool:
        """Whether the journal lists no episode; formats may add other records."""
        return not any("key" in record for record in self.records)

    def _remove(self) -> None:
        shutil.rmtree(self.directory)
        self._journal.unlink()

    def suspend(self) -> None:
        """Keep the recorded episodes for the next run. Without any, remove the directory and the journal."""
        if self._is_empty:
            self._remove()

    def add_records(self, records: Iterable[Record]) -> None:
        """Record that episodes are complete and on disk.

        The records are synced to disk. After a crash, the journal holds a prefix of them.
        """
        new = list(records)
        self._append(new)
        self.records += new

    def _append(self, records: list[Record]) -> None:
        with self._journal.open("ab") as file:
            file.write(b"".join(json.dumps(record).encode() + b"\n" for record in records))
            file.flush()
            os.fsync(file.fileno())

    def publish(self) -> None:
        """Rename the directory to the target, atomically."""
        sync_tree(self.directory)
        os.rename(self.directory, self.target)
        sync_file(self.target.parent)
        self._journal.unlink()

    def publish_file(self, name: str) -> None:
        """Move one file of the directory to the target, atomically, and remove everything else."""
        sync_file(self.directory / name)
        self._publish_only(name)

    def publish_directory(self, name: str) -> None:
        """Move one subdirectory to the target, atomically, and remove everything else."""
        sync_tree(self.directory / name)
        self._publish_only(name)

    def _publish_only(self, name: str) -> None:
        # Remove the other files last: while the target does not exist, the run after a kill needs them.
        os.replace(self.directory / name, self.target)
        sync_file(self.target.parent)
        self._remove()


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return ", ".join(
        f"{name} was {json.dumps(before.get(name))} and is {json.dumps(now.get(name))}" for name in names
    )


def sync_tree(directory: Path) -> None:
    """Sync a directory to disk, with all files and directories in it."""
    for path, _, names in os.walk(directory):
        for name in names:
            sync_file(Path(path, name))
        sync_file(Path(path))


def make_empty_directory(directory: Path) -> Path:
    """Create a directory; if it exists, remove what is in it. Return it."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory
