"""Write one HDF5 file from many episodes, so that a killed export can be continued."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from trajstore.datasets.hdf5 import import_h5py
from trajstore.datasets.interfaces import Episode
from trajstore.datasets.partial_output import PartialOutput
from trajstore.storage.atomic_files import sync_file

_FILE_BYTES, _FILE_SECONDS = 1 << 26, 10.0  # a temporary file is closed at this size or age; a kill loses it


class Hdf5Output:
    """Collects episodes in temporary HDF5 files until all are written.

    A process that dies while it writes an HDF5 file may leave a file that cannot be opened. So an episode counts as
    written when its temporary file is closed, and a closed file is never changed.
    """

    def __init__(self, output: PartialOutput) -> None:
        self._output = output
        self._file: Any = None  # the open temporary file
        self._keys: list[str] = []  # of the episodes in the open file
        self._opened_at = 0.0

    @staticmethod
    def begin(path: str | os.PathLike[str], format_name: str) -> Hdf5Output:
        """Start a file, or continue an unfinished one."""
        import_h5py()
        return Hdf5Output(PartialOutput.begin(path, {"format": format_name}))

    @property
    def display(self) -> str:
        return str(self._output.target)

    def __len__(self) -> int:
        """Number of episodes, including those in the open file."""
        return len(self._output.records) + len(self._keys)

    def written_keys(self) -> Sequence[str]:
        """Return the keys of the episodes in closed files, in order."""
        return [str(record["key"]) for record in self._output.records]

    def write(self, key: str, fill: Callable[[Any], None]) -> None:
        """Add an episode as a group, which ``fill`` writes. If ``fill`` fails, the group is removed."""
        if self._file is None:
            self._file = import_h5py().File(self._path(self._n_closed), "w")
            self._opened_at = time.monotonic()
        name = str(len(self._keys))
        try:
            fill(self._file.create_group(name))
        except BaseException:
            del self._file[name]
            raise
        self._keys.append(key)
        if self._file.id.get_filesize() >= _FILE_BYTES or time.monotonic() - self._opened_at >= _FILE_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Close the open file and record its episodes as written."""
        if self._file is None:
            return
        n = self._n_closed
        self._file.close()
        self._file = None
        sync_file(self._path(n))
        self._output.add_records({"key": key, "part": n} for key in self._keys)
        self._keys = []

    def suspend(self) -> None:
        """Keep the written episodes for the next run."""
        self.flush()
        self._output.suspend()

    @property
    def _n_closed(self) -> int:
        records = self._output.records
        return int(records[-1]["part"]) + 1 if records else 0

    def __iter__(self) -> Iterator[Any]:
        """Yield the group of every episode in closed files."""
        for n, records in itertools.groupby(self._output.records, lambda record: int(record["part"])):
            with import_h5py().File(self._path(n), "r") as file:
                for i, _ in enumerate(records):
                    yield file[str(i)]

    def finish(self, fill: Callable[[Any], None]) -> None:
        """Create the final file, which ``fill`` writes from all episodes, and move it to the target."""
        self.flush()
        name = "whole.hdf5"
        with import_h5py().File(self._output.directory / name, "w") as whole:
            fill(whole)
        self._output.publish_file(name)

    def _path(self, n: int) -> Path:
        return self._output.directory / f"{n:08d}.hdf5"


class Hdf5Writer:
    """The common part of the writers of single HDF5 files, which can hold every episode completely.

    Subclasses define `write`, and `_join`, which builds the final file from the groups of all episodes.
    """

    def __init__(self, episodes: Hdf5Output) -> None:
        self._episodes = episodes

    @property
    def display(self) -> str:
        return self._episodes.display

    def written_keys(self) -> Sequence[str]:
        return self._episodes.written_keys()

    def trim(self, episode: Episode) -> Episode:
        return episode

    def finish(self) -> None:
        self._episodes.finish(self._join)

    def suspend(self) -> None:
        self._episodes.suspend()

    def _join(self, whole: Any) -> None:
        raise NotImplementedError
