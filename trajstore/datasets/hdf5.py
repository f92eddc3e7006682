"""Read HDF5 files that are not trusted: links are not followed, and claimed sizes are checked first."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trajstore.datasets.json_values import to_json_value
from trajstore.datasets.optional_imports import import_optional
from trajstore.datasets.skip_names import is_skipped
from trajstore.errors import DataError, FormatError, StoreNotFoundError
from trajstore.schema import DTYPES, MAX_METADATA_BYTES, Array

_MAX_DEPTH = 16  # of nested groups
_MAX_NODES = 10_000  # groups and arrays of a dataset or an episode
_MAX_COMPRESSION = 2000  # array bytes per file byte; no filter of HDF5 itself reaches it
_MIN_LIMIT_BYTES = 1 << 26  # arrays up to this size are accepted in any file
_MAX_METADATA_VALUE_BYTES = MAX_METADATA_BYTES // 2  # base64 takes a third more


def import_h5py() -> Any:
    return import_optional("h5py", "HDF5 files need h5py: pip install h5py")


def open_file(path: str | os.PathLike[str]) -> Any:
    """Open a file for reading.

    Raises:
        StoreNotFoundError: The file does not exist.
        FormatError: It is not a complete HDF5 file.
    """
    h5py = import_h5py()
    if not Path(path).is_file():
        raise StoreNotFoundError(f"{path}: file not found")
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise FormatError(f"{path} can't be read as HDF5, or was not closed by its writer: {error}") from error


def location(node: Any) -> str:
    """Return the file and path of a group or array, for messages."""
    return f"{node.file.filename}: {node.name}"


def has_child(group: Any, name: str) -> bool:
    """Return whether a group, array or link of that name exists. Unlike ``in``, this follows no link."""
    return bool(group.id.links.exists(name.encode("utf-8", "surrogateescape")))


def get_child(group: Any, name: str) -> Any:
    """Return a group or array that is stored in the file itself.

    Raises:
        FormatError: It does not exist, or is stored in another file.
    """
    h5py = import_h5py()
    if not has_child(group, name):
        raise FormatError(f"{location(group)}: '{name}' is missing")
    link = group.id.links.get_info(name.encode("utf-8", "surrogateescape"))
    if link.type != h5py.h5l.TYPE_HARD:
        raise FormatError(f"{location(group)}: '{name}' is a link; only data in the file itself is read")
    node = group[name]
    if isinstance(node, h5py.Dataset) and (node.is_virtual or node.external):
        raise FormatError(f"{location(node)} is stored in other files; only data in the file itself is read")
    if not isinstance(node, (h5py.Group, h5py.Dataset)):
        raise FormatError(f"{location(node)}: expected a group or an array, got {type(node).__name__}")
    return node


def iter_arrays(group: Any, skip: Collection[str] = (), prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and array of every array below a group; no data is read.

    Raises:
        FormatError: A group or array has several names, which could turn a few arrays into millions; or there are
            too many groups and arrays.
    """
    return ((path, node) for path, node in _nodes(group, skip, prefix) if isinstance(node, import_h5py().Dataset))


def iter_names(group: Any, skip: Collection[str]) -> Iterator[str]:
    """Yield the paths of all groups and arrays below a group, including skipped ones."""
    return (path for path, _ in _nodes(group, skip))


def _nodes(group: Any, skip: Collection[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and node of groups and arrays. The node is None for skipped ones, which are not opened."""
    if not isinstance(group, import_h5py().Group):
        raise FormatError(f"{location(group)}: expected a group, got an array")
    return _walk(group, skip, prefix, {_file_address(group): prefix})


def _walk(group: Any, skip: Collection[str], prefix: str, seen: dict[int, str]) -> Iterator[tuple[str, Any]]:
    if prefix.count("/") > _MAX_DEPTH:
        raise FormatError(f"{location(group)}: groups are nested deeper than {_MAX_DEPTH} levels")
    for name in group:
        if not isinstance(name, str):
            raise FormatError(f"{location(group)}: expected names in UTF-8, got {name!r:.80}")
        path = prefix + name
        if is_skipped(path, skip):
            yield path, None
            continue
        node = get_child(group, name)
        _check_seen_once(node, path, seen)
        yield path, node
        if isinstance(node, import_h5py().Group):
            yield from _walk(node, skip, f"{path}/", seen)


def _check_seen_once(node: Any, path: str, seen: dict[int, str]) -> None:
    first = seen.setdefault(_file_address(node), path)
    if first != path:
        raise FormatError(
            f"{location(node)} has two names, '{first or '/'}' and '{path}'; leave one out with skip=['{path}']"
        )
    if len(seen) > _MAX_NODES:
        raise FormatError(f"{location(node)}: expected at most {_MAX_NODES} groups and arrays")


def _file_address(node: Any) -> int:
    """Return the byte address of a node in its file, which is the same under all its names."""
    address: int = import_h5py().h5o.get_info(node.id).addr
    return address


def step_arrays(group: Any, skip: Collection[str]) -> dict[str, Any]:
    """Return the arrays below a group by path, after checking that a store can hold them as fields.

    Raises:
        DataError: A store cannot hold one; the message says how to leave it out.
        FormatError: Their sizes together exceed what the file can hold.
    """
    found = dict(iter_arrays(group, skip))
    for path, array in found.items():
        check_array(array, path)
    claimed_bytes = sum(array.size * array.dtype.itemsize for array in found.values())
    if claimed_bytes > _limit_bytes(group):
        raise FormatError(
            f"{location(group)}: arrays claim {claimed_bytes} bytes, more than a file of this size can hold"
        )
    return found


def check_array(array: Any, path: str) -> None:
    """Check that a node is an array of numbers, no larger than its file can hold.

    Raises:
        DataError: It does not hold one row of numbers per step.
        FormatError: It is a group, or its size exceeds what the file can hold.
    """
    if not isinstance(array, import_h5py().Dataset):
        raise FormatError(f"{location(array)}: expected an array, got a group")
    if array.dtype.name not in DTYPES or not array.ndim:
        raise DataError(
            f"{location(array)}: expected numbers or bools, one row per step, got {array.dtype} of shape"
            f" {array.shape}; leave it out with skip=['{path}']"
        )
    check_size(array)


def check_size(array: Any) -> None:
    """Check that an array of any dtype is no larger than its file can hold."""
    if array.size is None or array.size * array.dtype.itemsize > _limit_bytes(array):
        raise FormatError(f"{location(array)} claims shape {array.shape}, more than a file of this size can hold")


def check_row_counts(arrays: Mapping[str, Any], n_steps: int) -> None:
    """Check that every array has one row per step.

    Raises:
        DataError: One has another number of rows; the message says how to leave it out.
    """
    for path, array in arrays.items():
        if len(array) != n_steps:
            raise DataError(
                f"{location(array)}: expected {n_steps} rows, one per step, got {len(array)};"
                f" leave it out with skip=['{path}']"
            )


def _limit_bytes(node: Any) -> int:
    return max(_MIN_LIMIT_BYTES, _MAX_COMPRESSION * Path(node.file.filename).stat().st_size)


def read_rows(array: Any, start: int, stop: int) -> Array:
    """Read rows of an array, converted to the byte order of this machine."""
    try:
        values: Array = array[start:stop]
    except OSError as error:
        raise FormatError(f"{location(array)}: rows {start} to {stop} can't be read: {error}") from error
    return values.astype(values.dtype.newbyteorder("="), copy=False)


def read_metadata_value(array: Any, path: str) -> Any:
    """Read an array that is not a field, as a JSON value for metadata.

    Raises:
        DataError: It is too large for metadata, or JSON cannot hold it.
    """
    if array.size is None or array.size * array.dtype.itemsize > _MAX_METADATA_VALUE_BYTES:
        raise DataError(
            f"{location(array)}: {array.size} values are too many for metadata; leave it out with skip=['{path}']"
        )
    try:
        return to_json_value(location(array), np.asarray(array[()]))
    except OSError as error:
        raise FormatError(f"{location(array)} can't be read: {error}") from error


def read_attributes(node: Any, skip: Collection[str] = ()) -> dict[str, Any]:
    """Read the attributes of a group as JSON values."""
    named = {name: value for name, value in node.attrs.items() if not is_skipped(name, skip)}
    return {name: to_json_value(f"{location(node)}: '{name}'", value) for name, value in named.items()}
