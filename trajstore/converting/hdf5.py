"""HDF5 files of others, read with care; and files of ours, written in parts."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from trajstore.converting.fields import is_skipped
from trajstore.converting.plain import plain
from trajstore.converting.unfinished import Unfinished, sync_file
from trajstore.errors import DataError, FormatError, MissingExtraError, StoreNotFoundError
from trajstore.schema import DTYPES, Array

_MAX_DEPTH = 16  # of groups; links may make circles
_MAX_RATIO = 2000  # of an array to its file: more than any filter of HDF5's own can do
_MIN_BOUND = 1 << 26  # bytes


def library() -> Any:
    """h5py.

    Raises:
        MissingExtraError: It is not installed.
    """
    try:
        return import_module("h5py")
    except ImportError as error:
        raise MissingExtraError("HDF5 files need h5py: pip install 'trajstore[hdf5]'") from error


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


def child(group: Any, name: str) -> Any:
    """A group or array that stands in the file itself.

    Raises:
        FormatError: There is none, or a link: those lead out of the file, or to nothing.
    """
    link = group.get(name, getlink=True) if name in group else None
    if link is None:
        raise FormatError(f"{place(group)}: expected '{name}', which is not there")
    if not isinstance(link, library().HardLink):
        raise FormatError(f"{place(group)}: '{name}' is a link; only what stands in the file itself is read")
    return group[name]


def walk(group: Any, skip: Collection[str] = (), prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The arrays below a group, by path; none is read."""
    if prefix.count("/") > _MAX_DEPTH:
        raise FormatError(f"{place(group)}: groups are nested deeper than {_MAX_DEPTH} levels")
    for name in group:
        path = prefix + name
        if is_skipped(path, skip):
            continue
        node = child(group, name)
        if isinstance(node, library().Group):
            yield from walk(node, skip, f"{path}/")
        else:
            yield path, node


def arrays(group: Any, skip: Collection[str]) -> dict[str, Any]:
    """The arrays of steps below a group, by path.

    Raises:
        DataError: One can't be stored; the message says how to leave it out.
    """
    found = dict(walk(group, skip))
    for path, array in found.items():
        _check_array(array, path)
    return found


def _check_array(array: Any, path: str) -> None:
    if array.is_virtual or array.external:
        raise FormatError(f"{place(array)} lies in other files; only what stands in the file itself is read")
    if array.dtype.name not in DTYPES or not array.ndim:
        raise DataError(
            f"{place(array)}: expected numbers or bools, one row a step, got {array.dtype} of shape {array.shape};"
            f" leave it out with skip=['{path}']"
        )
    bound = max(_MIN_BOUND, _MAX_RATIO * Path(array.file.filename).stat().st_size)
    if array.size * array.dtype.itemsize > bound:
        raise FormatError(f"{place(array)} claims shape {array.shape}, more than a file of this size can hold")


def rows(array: Any, start: int, stop: int) -> Array:
    """Rows of an array, in the byte order of this machine."""
    try:
        values: Array = array[start:stop]
    except OSError as error:
        raise FormatError(f"{place(array)}: rows {start} to {stop} can't be read: {error}") from error
    return values.astype(values.dtype.newbyteorder("="), copy=False)


def attributes(node: Any, skip: Collection[str] = ()) -> dict[str, Any]:
    """Attributes of a group as JSON can hold them."""
    named = {name: value for name, value in node.attrs.items() if name not in skip}
    return {name: plain(f"{place(node)}: '{name}'", value) for name, value in named.items()}


# ---- files of ours -------------------------------------------------------------------------------------


class Parts:
    """Episodes on their way to one file, each in a file of its own until all are there.

    A process that dies while it writes an HDF5 file may leave one that nobody can open; so a file is only
    gone on with when it is closed.
    """

    def __init__(self, unfinished: Unfinished) -> None:
        self._unfinished = unfinished

    @staticmethod
    def begin(path: str | os.PathLike[str], about: str) -> Parts:
        library()
        return Parts(Unfinished.begin(path, {"format": about}))

    @property
    def display(self) -> str:
        return str(self._unfinished.target)

    def done(self) -> Sequence[str]:
        return [str(record["key"]) for record in self._unfinished.records]

    def write(self, key: str, fill: Callable[[Any], None]) -> None:
        """Add a part that ``fill`` writes."""
        path = self._path(len(self._unfinished.records))
        with library().File(path, "w") as part:
            fill(part)
        sync_file(path)
        self._unfinished.note([{"key": key}])

    def __iter__(self) -> Iterator[Any]:
        for i in range(len(self._unfinished.records)):
            with library().File(self._path(i), "r") as part:
                yield part

    def finish(self, fill: Callable[[Any], None]) -> None:
        """Put a file that ``fill`` writes, from all parts, under its name."""
        name = "whole.hdf5"
        with library().File(self._unfinished.place / name, "w") as whole:
            fill(whole)
        self._unfinished.publish_file(name)

    def _path(self, i: int) -> Path:
        return self._unfinished.place / f"{i:08d}.hdf5"
