"""Read Zarr v2 arrays that are not trusted, from a directory or a zip file.

Sizes are checked before memory is allocated, and only known codecs run.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import zipfile
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from trajstore.datasets.decompression_limit import exceeds_decoded_size
from trajstore.errors import CorruptionError, DataError, FormatError, MissingExtraError, StoreNotFoundError
from trajstore.schema import DTYPES, Array

_COMPRESSORS = frozenset({"blosc", "bz2", "gzip", "lz4", "lzma", "zlib", "zstd"})  # none of them executes code
_FILTERS = frozenset({"shuffle", "delta"})
_IMAGE_CODEC_PREFIX = "imagecodecs_"
_MAX_METADATA_BYTES = 1 << 20
_MAX_COMPRESSION = 200_000  # array bytes per chunk byte; zeros compress that well
_MIN_LIMIT_BYTES = 1 << 26  # arrays up to this size are accepted, however small their chunks are
_MAX_FILTER_GROWTH = 16  # a filter may turn bytes into complex numbers
_HEADER_BYTES = 1 << 16  # of any chunk
_TEXT_KINDS = "SU"


class Zarr2Files(Protocol):
    """The files of a Zarr v2 group."""

    display: str

    def children(self, group: str) -> list[str]:
        """Return the names of the arrays and groups in a group."""

    def get(self, key: str) -> bytes:
        """Read a small file, at most one byte more than metadata may have.

        Raises:
            KeyError: The file does not exist.
        """

    def sizes(self, group: str) -> list[int]:
        """Return the sizes in bytes of all files below a group."""

    @property
    def store(self) -> Any:
        """The same files as a store of zarr-python."""

    def close(self) -> None: ...


def open_files(path: str | os.PathLike[str]) -> Zarr2Files:
    """Open a directory or a zip file.

    Raises:
        StoreNotFoundError: It does not exist.
        FormatError: It is a file, but not a zip file.
    """
    place = Path(path)
    if place.is_dir():
        return _Directory(place)
    if not place.is_file():
        raise StoreNotFoundError(f"{path}: file or directory not found")
    try:
        return _Zip(place)
    except (zipfile.BadZipFile, OSError) as error:
        raise FormatError(f"{path}: expected a directory or a zip file: {error}") from error


class _Directory:
    def __init__(self, path: Path) -> None:
        self.display = str(path)
        self._path = path

    def children(self, group: str) -> list[str]:
        place = self._path / group
        names = sorted(node.name for node in place.iterdir() if node.is_dir()) if place.is_dir() else []
        return [name for name in names if any((place / name / f).exists() for f in (".zarray", ".zgroup"))]

    def get(self, key: str) -> bytes:
        try:
            with (self._path / key).open("rb") as file:
                return file.read(_MAX_METADATA_BYTES + 1)
        except FileNotFoundError as error:
            raise KeyError(key) from error

    def sizes(self, group: str) -> list[int]:
        return [file.stat().st_size for file in (self._path / group).rglob("*") if file.is_file()]

    @property
    def store(self) -> Any:
        return import_module("zarr").storage.LocalStore(self._path, read_only=True)

    def close(self) -> None:
        """Do nothing: no file is kept open."""


class _Zip:
    def __init__(self, path: Path) -> None:
        self.display = str(path)
        with zipfile.ZipFile(path) as file:
            self._sizes = {info.filename: info.file_size for info in file.infolist()}
        self._path = path
        self.store = import_module("zarr").storage.ZipStore(path, mode="r")

    def children(self, group: str) -> list[str]:
        prefix = f"{group}/" if group else ""
        keys = [key.removeprefix(prefix) for key in self._sizes if key.startswith(prefix)]
        return sorted({key.split("/")[0] for key in keys if key.endswith(("/.zarray", "/.zgroup"))})

    def get(self, key: str) -> bytes:
        with zipfile.ZipFile(self._path) as file, file.open(key) as entry:
            return entry.read(_MAX_METADATA_BYTES + 1)

    def sizes(self, group: str) -> list[int]:
        return [size for key, size in self._sizes.items() if key.startswith(f"{group}/")]

    def close(self) -> None:
        self.store.close()


def open_array(files: Zarr2Files, path: str) -> Any:
    """Open an array of numbers after checking its metadata; no chunk is read.

    Raises:
        FormatError: It is not an array, or its size exceeds what its chunks can hold.
        DataError: It holds something other than numbers.
        MissingExtraError: Its codec is not installed.
    """
    where = f"{files.display}: {path}"
    metadata = _metadata(files, path)
    dtype = _dtype(metadata.get("dtype"))
    if dtype is None or dtype.name not in DTYPES:
        raise DataError(
            f"{where}: expected numbers or bools, got dtype {metadata.get('dtype')!r:.60}; leave it out with skip"
        )
    return _open_array(files, path, metadata, dtype)


def _open_array(files: Zarr2Files, path: str, metadata: dict[str, Any], dtype: np.dtype[Any]) -> Any:
    where = f"{files.display}: {path}"
    compressor = _codec(where, metadata.get("compressor"), _COMPRESSORS)
    filters = metadata.get("filters")
    for codec in _check_list(where, "filters", [] if filters is None else filters):
        _codec(where, codec, _FILTERS)
    sizes = files.sizes(path)
    limit_bytes = max(_MIN_LIMIT_BYTES, _MAX_COMPRESSION * sum(sizes))
    for name, least in (("shape", 0), ("chunks", 1)):
        lengths = _check_list(where, name, metadata.get(name))
        if not all(type(n) is int and n >= least for n in lengths):
            raise FormatError(f"{where}: expected {name} of at least {least}, got {lengths!r:.60}")
        if math.prod(lengths) * dtype.itemsize > limit_bytes:
            raise FormatError(
                f"{where} claims {name} {lengths}, more than its chunks can hold; leave it out with skip"
            )
    max_chunk_bytes = _MAX_FILTER_GROWTH * math.prod(metadata["chunks"]) * dtype.itemsize + _HEADER_BYTES
    if max(sizes) > max(max_chunk_bytes, _MAX_METADATA_BYTES):
        raise FormatError(
            f"{where} has a file of {max(sizes)} bytes, more than a chunk can take; leave it out with skip"
        )
    zarr = import_module("zarr")
    try:
        store = _limiting_store(zarr.storage.WrapperStore)(files.store, compressor, max_chunk_bytes)
        return zarr.open_array(store, path=path, mode="r", zarr_format=2)
    except (ValueError, TypeError, KeyError, ArithmeticError) as error:
        raise FormatError(f"{where} can't be read: {error}") from error


@functools.cache
def _limiting_store(wrapper: Any) -> Any:
    """Return a store class of zarr-python that refuses chunks whose decoded size exceeds a limit."""

    class LimitingStore(wrapper):  # type: ignore[misc]
        def __init__(self, store: Any, codec: str, max_bytes: int) -> None:
            super().__init__(store)
            self._limit = codec, max_bytes

        async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
            found = await super().get(key, prototype, byte_range)
            codec, max_bytes = self._limit
            is_chunk = not key.rpartition("/")[2].startswith(".z")
            if found is not None and is_chunk and exceeds_decoded_size(codec, found.to_bytes(), max_bytes):
                raise ValueError(f"chunk '{key}' is damaged, or larger than {max_bytes} bytes")
            return found

    return LimitingStore


def _check_list(where: str, name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise FormatError(f"{where}: expected {name} as a list, got {value!r:.60}")
    return value


def _metadata(files: Zarr2Files, path: str) -> dict[str, Any]:
    where = f"{files.display}: {path}"
    try:
        data = files.get(f"{path}/.zarray")
    except KeyError:
        raise FormatError(f"{where} is not an array; leave it out with skip") from None
    try:
        metadata = json.loads(data) if len(data) <= _MAX_METADATA_BYTES else None
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where}/.zarray is not JSON: {error}") from error
    if not isinstance(metadata, dict):
        raise FormatError(f"{where}/.zarray is not the metadata of an array")
    return metadata


def _dtype(name: object) -> np.dtype[Any] | None:
    with contextlib.suppress(TypeError, ValueError):
        return np.dtype(name) if isinstance(name, str) else None
    return None


def _codec(where: str, codec: Any, known: frozenset[str]) -> str:
    """Return the name of a codec, and "" if there is none.

    Raises:
        FormatError: It is not one of the ``known`` codecs, and not an image codec.
    """
    if codec is None:
        return ""
    name = codec.get("id") if isinstance(codec, dict) else codec
    if isinstance(name, str) and name.startswith(_IMAGE_CODEC_PREFIX):
        _register_image_codec(where, name)
    elif not isinstance(name, str) or name not in known:
        raise FormatError(f"{where} uses the codec {name!r:.60}; expected one of {', '.join(sorted(known))}")
    return name


def _register_image_codec(where: str, name: str) -> None:
    try:
        import_module("imagecodecs.numcodecs").register_codecs([name], verbose=False)
    except ImportError as error:
        raise MissingExtraError(
            f"{where} uses the codec {name!r}, which needs imagecodecs: pip install imagecodecs"
        ) from error


def read_rows(array: Any, start: int, stop: int, where: str) -> Array:
    """Read rows of an array, converted to the byte order of this machine."""
    return _selected(array, slice(start, stop), f"{where}: rows {start} to {stop}")


def _selected(array: Any, selection: Any, what: str) -> Array:
    try:
        values = np.asarray(array[selection])
    except (ValueError, RuntimeError, OSError) as error:
        raise CorruptionError(f"{what} can't be read: {error}") from error
    return values.astype(values.dtype.newbyteorder("="), copy=False)


def read_small_array(files: Zarr2Files, path: str) -> Array:
    """Read a whole array of numbers or text that describes episodes.

    Raises:
        DataError: It holds something else, or is larger than 64 MiB.
    """
    metadata = _metadata(files, path)
    dtype = _dtype(metadata.get("dtype"))
    if dtype is None or (dtype.name not in DTYPES and dtype.kind not in _TEXT_KINDS):
        raise DataError(f"{files.display}: {path}: expected numbers or text; leave it out with skip=['{path}']")
    array = _open_array(files, path, metadata, dtype)
    if array.size * dtype.itemsize > _MIN_LIMIT_BYTES:
        raise DataError(f"{files.display}: {path} has {array.size} values; leave it out with skip=['{path}']")
    return _selected(array, ..., f"{files.display}: {path}")
