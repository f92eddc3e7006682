"""Places that can be read and not written: web servers, dataset hubs, zip files, URL chains."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import fsspec.core

from trajstore.errors import MissingExtraError, StorageError
from trajstore.storage.interface import ANY, Place, Put, Storage, check_key, check_tree, storage_error

T = TypeVar("T")
_log = logging.getLogger(__name__)

_N_THREADS = 16
_N_CONNECTIONS = 64
_ATTEMPTS = 4
_PACKAGES = {
    "hf": "huggingface_hub",
    "http": "aiohttp",
    "https": "aiohttp",
    "s3": "s3fs",
    "gs": "gcsfs",
    "az": "adlfs",
}
_DEFINITE = (FileNotFoundError, PermissionError, StorageError, MissingExtraError, ValueError)


class ReadOnlyStorage(Storage):
    """Any fsspec filesystem, for reading. Whatever would write raises, and says what to do instead."""

    n_threads = _N_THREADS
    is_remote = True

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        super().__init__()
        self._url = url
        self._options = options
        self._filesystem: Any = None
        self._root = ""
        self._pid = 0
        self._heeds_ranges: bool | None = None  # whether the server sends parts of objects; None: not known
        self._is_web = bool(re.match(r"https?:", url))
        self.display = re.sub(r"//[^/@:]*(:[^/@]*)?@", "//", re.sub(r"\?[^:]*", "", url))
        self._secrets = tuple(_secrets(url, options))

    def __reduce__(self) -> tuple[Any, ...]:
        return ReadOnlyStorage, (self._url, self._options)

    @property
    def _fs(self) -> Any:
        # Neither event loops nor the position in an open zip file may be shared with a forked process.
        with self._lock:
            if self._pid != os.getpid():
                self._filesystem, self._root = self._connect()
                self._pid = os.getpid()
            return self._filesystem

    def _connect(self) -> tuple[Any, str]:
        defaults = {"use_listings_cache": False} if self._is_web else {}
        try:
            found, path = fsspec.core.url_to_fs(
                self._url, **{"skip_instance_cache": True, **defaults, **self._options}
            )
        except ImportError as error:
            protocols = re.findall(r"(\w+):", self._url)
            names = [_PACKAGES[p] for p in protocols if p in _PACKAGES]
            hint = f"pip install {' '.join(names)}" if names else str(error)
            raise MissingExtraError(f"{self.display} needs a package that is not installed: {hint}") from error
        except Exception as error:
            raise storage_error("open", self.display, error, self._secrets) from None
        return found, str(path).rstrip("/")

    def _path(self, key: str) -> str:
        check_key(key)
        self._fs  # noqa: B018  (sets the root)
        return "/".join(part for part in (self._root, key) if part)

    # ---- reading

    def get(self, key: str) -> bytes:
        return bytes(self._retried("read", key, lambda: self._fs.cat_file(self._path(key))))

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        if start == stop:
            return b""
        if not self._sends_ranges():
            return self.get(key)[start:stop]
        return bytes(self._retried("read", key, lambda: self._fs.cat_file(self._path(key), start=start, end=stop)))

    def get_ranges(self, places: Sequence[Place]) -> list[bytes]:
        if len(places) <= 1 or not getattr(self._fs, "async_impl", False) or not self._sends_ranges():
            return super().get_ranges(places)
        paths = [self._path(key) for key, _, _ in places]
        starts = [None if stop is None else start for _, start, stop in places]
        stops = [stop for _, _, stop in places]
        found = self._fs.cat_ranges(paths, starts, stops, batch_size=_N_CONNECTIONS, on_error="return")
        # Those that failed are read again one by one, with repetitions and a proper error.
        return [d if isinstance(d, bytes) else self._get_place(p) for p, d in zip(places, found, strict=True)]

    def get_many(self, keys: Sequence[str]) -> list[bytes]:
        return self.get_ranges([(key, 0, None) for key in keys])

    def _sends_ranges(self) -> bool:
        """Whether parts of objects can be read; a plain web server may send the whole object instead."""
        if self._heeds_ranges is None and self._is_web:
            path = self._path("zarr.json")
            part = self._retried("read", "zarr.json", lambda: self._fs.cat_file(path, start=1, end=3))
            self._heeds_ranges = len(part) == 2
            if not self._heeds_ranges:
                _log.warning("%s: the server ignores byte ranges, so whole objects are read", self.display)
        return self._heeds_ranges is not False

    def size(self, key: str) -> int:
        size = self._retried("read", key, lambda: self._fs.info(self._path(key))["size"])
        return len(self.get(key)) if size is None else int(size)

    def list_names(self, prefix: str) -> list[str]:
        names = sorted(name.rstrip("/") for name in self._entries(prefix))
        if self._is_web and "zarr.json" not in names and self._exists(f"{prefix}/zarr.json".lstrip("/")):
            raise StorageError(
                f"{self.display}/{prefix}: the web server shows no index of this directory, so its streams can't be"
                f" found; turn the index on, or put the store in a zip file there and open zip::{self.display}.zip"
            )
        return names

    def _entries(self, prefix: str) -> set[str]:
        """Names directly below a prefix; on a web server those of directories end with a slash."""
        path = self._path(prefix)
        try:
            found = self._retried(
                "list", prefix, lambda: self._fs.ls(f"{path}/" if self._is_web else path, detail=False)
            )
        except (FileNotFoundError, NotADirectoryError):
            return set()
        below = f"{path}/" if path else ""
        names = (str(entry).lstrip("/" if not below else "").removeprefix(below) for entry in found)
        return {name for name in names if name.rstrip("/") and "/" not in name.rstrip("/") and "?" not in name}

    def _exists(self, key: str) -> bool:
        try:
            self.get(key)
        except FileNotFoundError:
            return False
        return True

    def tree_sizes(self, prefix: str) -> dict[str, int]:
        if self._is_web:
            keys = list(self._walk(prefix))
            return dict(zip(keys, self.map(self.size, keys), strict=True))
        try:
            found = self._retried("list", prefix, lambda: self._fs.find(self._path(prefix), detail=True))
        except FileNotFoundError:
            return {}
        root = f"{self._root}/" if self._root else ""
        named = ((str(name).lstrip("" if root else "/").removeprefix(root), entry) for name, entry in found.items())
        return {key: int(entry["size"]) for key, entry in named if key.startswith(f"{prefix}/" if prefix else "")}

    def _walk(self, prefix: str) -> Iterator[str]:
        for name in sorted(self._entries(prefix)):
            key = f"{prefix}/{name}".lstrip("/")
            if name.endswith("/"):
                yield from self._walk(key.rstrip("/"))
            else:
                yield key

    def _retried(self, action: str, key: str, call: Callable[[], T]) -> T:
        """Call again after temporary faults; definite answers are raised at once."""
        check_key(key)
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return call()
            except (FileNotFoundError, NotADirectoryError):
                raise
            except Exception as error:
                failure = (
                    error
                    if isinstance(error, (StorageError, MissingExtraError))
                    else storage_error(action, f"{self.display}/{key}", error, self._secrets)
                )
                if attempt == _ATTEMPTS or isinstance(error, _DEFINITE):
                    break
            time.sleep(0.1 * 2**attempt)
        raise failure  # outside the handler: the original error may quote credentials

    # ---- what can't be done

    @property
    def is_read_only(self) -> bool:
        return True

    def check_writable(self) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise StorageError(
            f"{self.display} is read-only; copy the store to a directory or an object store with trajstore.copy,"
            " and open the copy"
        )

    def put(self, key: str, data: bytes | memoryview, expect: str = ANY) -> str:
        check_key(key)
        self._refuse()

    def put_many(self, puts: Iterable[Put]) -> dict[str, str]:
        self._refuse()

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_key(key)
        self._refuse()

    def remove_tree(self, prefix: str) -> None:
        check_tree(prefix)
        self._refuse()


def _secrets(url: str, options: Mapping[str, Any]) -> Iterator[str]:
    """What messages of libraries must not quote: user names and queries of URLs, and text among the options."""
    for found in re.findall(r"//([^/@]*)@", url):
        yield from (part for part in found.split(":") if part)
    yield from re.findall(r"\?([^:]+)", url)
    for value in options.values():
        if isinstance(value, Mapping):
            yield from _secrets("", value)
        elif isinstance(value, str) and len(value) >= 4:
            yield value
