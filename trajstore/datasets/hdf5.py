"""HDF5 files of others, read with care; and files of ours, written in parts."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trajstore.datasets.fields import is_skipped
from trajstore.datasets.libraries import needed
from trajstore.datasets.plain import plain
from trajstore.datasets.unfinished import Unfinished
from trajstore.errors import DataError, FormatError, StoreNotFoundError
from trajstore.schema import DTYPES, MAX_METADATA_BYTES, Array
from trajstore.storage.atomic_files import sync_file

_MAX_DEPTH = 16  # of groups
_MAX_NODES = 10_000  # groups and arrays of a dataset or an episode
_MAX_RATIO = 2000  # of an array to its file: more than any filter of HDF5's own can do
_MIN_BOUND = 1 << 26  # bytes
_MAX_SMALL_BYTES = MAX_METADATA_BYTES // 2  # as base64 it takes a third more
_PART_BYTES, _PART_S = 1 << 26, 10.0  # of an export: what a kill may lose


def library() -> Any:
    """h5py."""
    return needed("h5py", "HDF5 files need h5py: pip install 'trajstore[hdf5]'")


def opened(path: str | os.PathLike[str]) -> Any:
    """A file, open for reading."""
    h5py = library()
    if not Path(path).is_file():
        raise StoreNotFoundError(f"{path}: there is no such file")
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise FormatError(f"{path} can't be read as HDF5, or was not closed by its writer: {error}") from error


def place(node: Any) -> str:
    """Where a group or array is, for messages."""
    return f"{node.file.filename}: {node.name}"


def has(group: Any, name: str) -> bool:
    """Whether there is a group, array or link of that name; no link is followed, as ``in`` would."""
    return bool(group.id.links.exists(name.encode("utf-8", "surrogateescape")))


def child(group: Any, name: str) -> Any:
    """A group or array that stands in the file itself.

    Raises:
        FormatError: There is none, or it lies elsewhere.
    """
    h5py = library()
    if not has(group, name):
        raise FormatError(f"{place(group)}: expected '{name}', which is not there")
    link = group.id.links.get_info(name.encode("utf-8", "surrogateescape"))
    if link.type != h5py.h5l.TYPE_HARD:
        raise FormatError(f"{place(group)}: '{name}' is a link; only what stands in the file itself is read")
    node = group[name]
    if isinstance(node, h5py.Dataset) and (node.is_virtual or node.external):
        raise FormatError(f"{place(node)} lies in other files; only what stands in the file itself is read")
    if not isinstance(node, (h5py.Group, h5py.Dataset)):
        raise FormatError(f"{place(node)}: expected a group or an array, got {type(node).__name__}")
    return node


def walk(group: Any, skip: Collection[str] = (), prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The arrays below a group, by path; none is read.

    Raises:
        FormatError: Groups or arrays have several names, which could make millions of a few, or are too many.
    """
    return ((path, node) for path, node in _nodes(group, skip, prefix) if isinstance(node, library().Dataset))


def names(group: Any, skip: Collection[str]) -> Iterator[str]:
    """The paths of all groups and arrays below a group, of those too that are left out."""
    return (path for path, _ in _nodes(group, skip))


def _nodes(group: Any, skip: Collection[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Groups and arrays by path; None for what is left out, at which nobody looks."""
    if not isinstance(group, library().Group):
        raise FormatError(f"{place(group)}: expected a group, got an array")
    return _walk(group, skip, prefix, {_address(group): prefix})


def _walk(group: Any, skip: Collection[str], prefix: str, seen: dict[int, str]) -> Iterator[tuple[str, Any]]:
    if prefix.count("/") > _MAX_DEPTH:
        raise FormatError(f"{place(group)}: groups are nested deeper than {_MAX_DEPTH} levels")
    for name in group:
        if not isinstance(name, str):
            raise FormatError(f"{place(group)}: expected names in UTF-8, got {name!r:.80}")
        path = prefix + name
        if is_skipped(path, skip):
            yield path, None
            continue
        node = child(group, name)
        _note(node, path, seen)
        yield path, node
        if isinstance(node, library().Group):
            yield from _walk(node, skip, f"{path}/", seen)


def _note(node: Any, path: str, seen: dict[int, str]) -> None:
    first = seen.setdefault(_address(node), path)
    if first != path:
        raise FormatError(
            f"{place(node)} is there twice, as '{first or '/'}' and as '{path}'; leave one out with skip=['{path}']"
        )
    if len(seen) > _MAX_NODES:
        raise FormatError(f"{place(node)}: expected at most {_MAX_NODES} groups and arrays")


def _address(node: Any) -> int:
    """Where it stands in the file, whatever it is called."""
    address: int = library().h5o.get_info(node.id).addr
    return address


def arrays(group: Any, skip: Collection[str]) -> dict[str, Any]:
    """The arrays of steps below a group, by path.

    Raises:
        DataError: One can't be stored; the message says how to leave it out.
    """
    found = dict(walk(group, skip))
    for path, array in found.items():
        check_array(array, path)
    claimed, bound = sum(array.size * array.dtype.itemsize for array in found.values()), _bound(group)
    if claimed > bound:
        raise FormatError(f"{place(group)}: arrays claim {claimed} bytes, more than a file of this size can hold")
    return found


def check_array(array: Any, path: str) -> None:
    """See that it is an array of numbers, of no more than its file can hold.

    Raises:
        DataError: It is none.
        FormatError: It claims more.
    """
    if not isinstance(array, library().Dataset):
        raise FormatError(f"{place(array)}: expected an array, got a group")
    if array.dtype.name not in DTYPES or not array.ndim:
        raise DataError(
            f"{place(array)}: expected numbers or bools, one row a step, got {array.dtype} of shape {array.shape};"
            f" leave it out with skip=['{path}']"
        )
    check_size(array)


def check_size(array: Any) -> None:
    """See that an array, of whatever kind, claims no more than its file can hold."""
    if array.size is None or array.size * array.dtype.itemsize > _bound(array):
        raise FormatError(f"{place(array)} claims shape {array.shape}, more than a file of this size can hold")


def _bound(node: Any) -> int:
    return max(_MIN_BOUND, _MAX_RATIO * Path(node.file.filename).stat().st_size)


def rows(array: Any, start: int, stop: int) -> Array:
    """Rows of an array, in the byte order of this machine."""
    try:
        values: Array = array[start:stop]
    except OSError as error:
        raise FormatError(f"{place(array)}: rows {start} to {stop} can't be read: {error}") from error
    return values.astype(values.dtype.newbyteorder("="), copy=False)


def small_value(array: Any, path: str) -> Any:
    """An array that is no step, as JSON can hold it."""
    if array.size is None or array.size * array.dtype.itemsize > _MAX_SMALL_BYTES:
        raise DataError(f"{place(array)}: no place for its {array.size} values; leave it out with skip=['{path}']")
    try:
        return plain(place(array), np.asarray(array[()]))
    except OSError as error:
        raise FormatError(f"{place(array)} can't be read: {error}") from error


def attributes(node: Any, skip: Collection[str] = ()) -> dict[str, Any]:
    """Attributes of a group as JSON can hold them."""
    named = {name: value for name, value in node.attrs.items() if not is_skipped(name, skip)}
    return {name: plain(f"{place(node)}: '{name}'", value) for name, value in named.items()}


# ---- files of ours -------------------------------------------------------------------------------------


class Parts:
    """Episodes on their way to one file, in other files until all are there.

    A process that dies while it writes an HDF5 file may leave one that nobody can open; so episodes count as
    written when their part is closed, and none is gone on with.
    """

    def __init__(self, unfinished: Unfinished) -> None:
        self._unfinished = unfinished
        self._file: Any = None  # the part that is open
        self._keys: list[str] = []  # of the episodes in it
        self._opened_at = 0.0

    @staticmethod
    def begin(path: str | os.PathLike[str], about: str) -> Parts:
        library()
        return Parts(Unfinished.begin(path, {"format": about}))

    @property
    def display(self) -> str:
        return str(self._unfinished.target)

    def __len__(self) -> int:
        """Number of episodes, those in the open part included."""
        return len(self._unfinished.records) + len(self._keys)

    def done(self) -> Sequence[str]:
        return [str(record["key"]) for record in self._unfinished.records]

    def write(self, key: str, fill: Callable[[Any], None]) -> None:
        """Add an episode, as a group that ``fill`` writes."""
        if self._file is None:
            self._file = library().File(self._path(self._n_closed), "w")
            self._opened_at = time.monotonic()
        name = str(len(self._keys))
        try:
            fill(self._file.create_group(name))
        except BaseException:
            del self._file[name]
            raise
        self._keys.append(key)
        if self._file.id.get_filesize() >= _PART_BYTES or time.monotonic() - self._opened_at >= _PART_S:
            self.flush()

    def flush(self) -> None:
        """Close the part that is open; what is in it is written now."""
        if self._file is None:
            return
        n = self._n_closed
        self._file.close()
        self._file = None
        sync_file(self._path(n))
        self._unfinished.note({"key": key, "part": n} for key in self._keys)
        self._keys = []

    def abandon(self) -> None:
        """Keep what is written, for another run."""
        self.flush()
        self._unfinished.abandon()

    @property
    def _n_closed(self) -> int:
        records = self._unfinished.records
        return int(records[-1]["part"]) + 1 if records else 0

    def __iter__(self) -> Iterator[Any]:
        """The groups of all episodes that are written."""
        for n, records in itertools.groupby(self._unfinished.records, lambda record: int(record["part"])):
            with library().File(self._path(n), "r") as part:
                for i, _ in enumerate(records):
                    yield part[str(i)]

    def finish(self, fill: Callable[[Any], None]) -> None:
        """Put a file that ``fill`` writes, from all episodes, under its name."""
        self.flush()
        name = "whole.hdf5"
        with library().File(self._unfinished.place / name, "w") as whole:
            fill(whole)
        self._unfinished.publish_file(name)

    def _path(self, n: int) -> Path:
        return self._unfinished.place / f"{n:08d}.hdf5"
