"""Arrays of Zarr v2 that others wrote, in a directory or a zip file, read with care."""

from __future__ import annotations

import contextlib
import json
import math
import os
import zipfile
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from trajstore.errors import CorruptionError, DataError, FormatError, MissingExtraError, StoreNotFoundError
from trajstore.schema import DTYPES, Array

_CODECS = frozenset({"blosc", "bz2", "gzip", "lz4", "lzma", "zlib", "zstd", "shuffle", "delta"})  # none runs code
_IMAGES = "imagecodecs_"  # what codecs of that package are called
_MAX_METADATA_BYTES = 1 << 20
_MAX_RATIO = 200_000  # of an array to its chunks: zeros are made that small
_MIN_BOUND = 1 << 26  # bytes; so large an array may be whatever its chunks are
_KINDS_OF_TEXT = "SU"


class Files(Protocol):
    """The files of a group."""

    display: str

    def children(self, group: str) -> list[str]:
        """Names of the arrays and groups in a group."""

    def get(self, key: str) -> bytes:
        """A small file.

        Raises:
            KeyError: There is none.
        """

    def n_bytes(self, group: str) -> int:
        """Size of the files in a group."""

    def open_array(self, path: str) -> Any: ...

    def close(self) -> None: ...


def open_files(path: str | os.PathLike[str]) -> Files:
    """A directory, or a zip file."""
    place = Path(path)
    if place.is_dir():
        return _Directory(place)
    if not place.is_file():
        raise StoreNotFoundError(f"{path}: there is no such file or directory")
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

    def n_bytes(self, group: str) -> int:
        with os.scandir(self._path / group) as found:
            return sum(entry.stat().st_size for entry in found)

    def open_array(self, path: str) -> Any:
        return import_module("zarr").open_array(str(self._path), path=path, mode="r", zarr_format=2)

    def close(self) -> None:
        """Nothing stays open."""


class _Zip:
    def __init__(self, path: Path) -> None:
        self.display = str(path)
        with zipfile.ZipFile(path) as file:
            self._sizes = {info.filename: info.file_size for info in file.infolist()}
        self._path = path
        self._store = import_module("zarr").storage.ZipStore(path, mode="r")

    def children(self, group: str) -> list[str]:
        prefix = f"{group}/" if group else ""
        keys = [key.removeprefix(prefix) for key in self._sizes if key.startswith(prefix)]
        return sorted({key.split("/")[0] for key in keys if key.endswith(("/.zarray", "/.zgroup"))})

    def get(self, key: str) -> bytes:
        with zipfile.ZipFile(self._path) as file, file.open(key) as entry:
            return entry.read(_MAX_METADATA_BYTES + 1)

    def n_bytes(self, group: str) -> int:
        return sum(size for key, size in self._sizes.items() if key.startswith(f"{group}/"))

    def open_array(self, path: str) -> Any:
        return import_module("zarr").open_array(self._store, path=path, mode="r", zarr_format=2)

    def close(self) -> None:
        self._store.close()


def open_array(files: Files, path: str) -> Any:
    """An array of numbers, once its metadata was looked at; no chunk is read.

    Raises:
        FormatError: It is none, or claims more than its chunks can hold.
        DataError: It holds something else than numbers.
        MissingExtraError: Its codec is not installed.
    """
    where = f"{files.display}: {path}"
    metadata = _metadata(files, path)
    dtype = _dtype(metadata.get("dtype"))
    if dtype is None or dtype.name not in DTYPES:
        raise DataError(
            f"{where}: expected numbers or bools, got dtype {metadata.get('dtype')!r:.60}; leave it out with skip"
        )
    return _opened(files, path, metadata, dtype)


def _opened(files: Files, path: str, metadata: dict[str, Any], dtype: np.dtype[Any]) -> Any:
    where = f"{files.display}: {path}"
    for codec in (metadata.get("compressor"), *(metadata.get("filters") or ())):
        _check_codec(where, codec)
    shape = metadata.get("shape")
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise FormatError(f"{where}: expected a shape, got {shape!r:.60}")
    if math.prod(shape) * dtype.itemsize > max(_MIN_BOUND, _MAX_RATIO * files.n_bytes(path)):
        raise FormatError(f"{where} claims shape {shape}, more than its chunks can hold; leave it out with skip")
    try:
        return files.open_array(path)
    except (ValueError, TypeError, KeyError) as error:
        raise FormatError(f"{where} can't be read: {error}") from error


def _metadata(files: Files, path: str) -> dict[str, Any]:
    where = f"{files.display}: {path}"
    try:
        data = files.get(f"{path}/.zarray")
    except KeyError:
        raise FormatError(f"{where} is no array; leave it out with skip") from None
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


def _check_codec(where: str, codec: Any) -> None:
    if codec is None:
        return
    name = codec.get("id") if isinstance(codec, dict) else codec
    if isinstance(name, str) and name.startswith(_IMAGES):
        _register_images(where, name)
    elif name not in _CODECS:
        raise FormatError(f"{where} is encoded by {name!r:.60}; expected one of {', '.join(sorted(_CODECS))}")


def _register_images(where: str, name: str) -> None:
    try:
        import_module("imagecodecs.numcodecs").register_codecs([name], verbose=False)
    except ImportError as error:
        raise MissingExtraError(f"{where} is encoded by {name!r}: pip install imagecodecs") from error


def read(array: Any, start: int, stop: int, where: str) -> Array:
    """Rows of an array, in the byte order of this machine."""
    try:
        values = np.asarray(array[start:stop])
    except (ValueError, RuntimeError, OSError) as error:
        raise CorruptionError(f"{where}: rows {start} to {stop} can't be read: {error}") from error
    return values.astype(values.dtype.newbyteorder("="), copy=False)


def read_small(files: Files, path: str) -> Array:
    """A whole array of numbers or text.

    Raises:
        DataError: It is too large to be one about episodes.
    """
    metadata = _metadata(files, path)
    dtype = _dtype(metadata.get("dtype"))
    if dtype is None or (dtype.name not in DTYPES and dtype.kind not in _KINDS_OF_TEXT):
        raise DataError(f"{files.display}: {path}: expected numbers or text; leave it out with skip=['{path}']")
    array = _opened(files, path, metadata, dtype)
    if array.size * dtype.itemsize > _MIN_BOUND:
        raise DataError(f"{files.display}: {path} has {array.size} values; leave it out with skip=['{path}']")
    return np.asarray(array[...])
