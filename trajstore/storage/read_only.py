"""Places that can be read and not written: web servers, dataset hubs, zip files, URL chains."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from trajstore.errors import StorageError
from trajstore.storage.fsspec_connection import FsspecConnection
from trajstore.storage.interface import ANY, Data, Place, Put, check_key, check_tree
from trajstore.storage.request_options import OWN_OPTIONS, ServiceOptions, client_options, service_options
from trajstore.storage.retried_storage import RetriedStorage

_log = logging.getLogger(__name__)

_N_THREADS = 16
_N_CONNECTIONS = 64


def open_read_only(url: str, options: Mapping[str, Any]) -> ReadOnlyStorage:
    """The storage at a URL, or chain of URLs, that is read through fsspec. Makes no request.

    Raises:
        ValueError: An option of this library has an impossible value, or one that is for object stores only.
    """
    others = {n for n in OWN_OPTIONS - {"retry_s", "request_s"} if options.get(n) is not None}
    if options.get("transport") in ("auto", "fsspec"):
        others -= {"transport"}
    if others:
        raise ValueError(
            f"storage_options: {', '.join(sorted(others))}: only for object stores (s3://, gs://, abfs://), not for"
            f" {url.partition(':')[0]}:"
        )
    return ReadOnlyStorage(url, client_options(options), service_options(options))


class ReadOnlyStorage(RetriedStorage):
    """Any fsspec filesystem, for reading. Whatever would write raises, and says what to do instead."""

    n_threads = _N_THREADS
    is_remote = True
    transport = "fsspec"
    transport_reason = "the place is not an object store, or is reached through another"

    def __init__(self, url: str, options: dict[str, Any], service: ServiceOptions) -> None:
        super().__init__(url, options, service)
        self._at = FsspecConnection(url, options, service.retries, display=self.display, secrets=self._secrets)
        self._heeds_ranges: bool | None = None  # whether the server sends parts of objects; None: not known
        self._is_web = bool(re.match(r"https?:", url))
        self._is_hub = url.startswith("hf:")
        # Its filesystem keeps listings, and takes the sizes of files from them; they change when somebody uploads.
        self._fresh = {"refresh": True} if self._is_hub else {}

    def __reduce__(self) -> tuple[Any, ...]:
        return ReadOnlyStorage, (self._url, self._options, self._service)

    def renew(self) -> bool:
        """Connect again, so that the client looks for credentials where it first found them."""
        return self._at.renew()

    def _asked(self, action: str, key: str, method: str, **kwargs: Any) -> Any:
        """Call a method of the filesystem with the path of an object, within the retry policy."""
        return self.retried(action, key, lambda t: self._call(method, t, self._at.path(key), **kwargs))

    def _call(self, method: str, timeout_s: float, *args: Any, **kwargs: Any) -> Any:
        # The client itself notices a connection without progress; a large object may take longer than that.
        return self._at.call(method, max(timeout_s, self._service.retries.total_s), *args, **kwargs)

    # ---- reading

    def get(self, key: str) -> bytes:
        return bytes(self._asked("read", key, "cat_file"))

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        if start == stop:
            return b""
        if not self._sends_ranges():
            return self.get(key)[start:stop]
        # Given a size, the Hub's filesystem asks for none, and for no bytes behind the range.
        size = {"size": stop} if self._is_hub else {}
        return bytes(self._asked("read", key, "cat_file", start=start, end=stop, **size))

    def get_ranges(self, places: Sequence[Place]) -> Sequence[Data]:
        if len(places) <= 1:
            return super().get_ranges(places)
        for key in {key for key, _, _ in places}:
            check_key(key)
        if not self._at.is_async or not self._sends_ranges():
            return super().get_ranges(places)
        total_s = self._service.retries.total_s
        found = self.tried(
            lambda timeout_s: self._at.ask_places(places, max(timeout_s, total_s), batch_size=_N_CONNECTIONS)
        )
        return self.completed(places, found)

    def get_many(self, keys: Sequence[str]) -> list[bytes]:
        return list(map(bytes, self.get_ranges([(key, 0, None) for key in keys])))

    def _sends_ranges(self) -> bool:
        """Whether parts of objects can be read; a plain web server may send the whole object instead."""
        if self._heeds_ranges is None and self._is_web:
            part = self._asked("read", "zarr.json", "cat_file", start=1, end=3)
            self._heeds_ranges = len(part) == 2
            if not self._heeds_ranges:
                _log.warning("%s: the server ignores byte ranges, so whole objects are read", self.display)
        return self._heeds_ranges is not False

    def size(self, key: str) -> int:
        size = self._asked("read", key, "info")["size"]
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
        found = self.retried("list", prefix, lambda timeout_s: self._listed(prefix, timeout_s))
        path = self._at.path(prefix)
        below = f"{path}/" if path else ""
        names = (str(entry).lstrip("/" if not below else "").removeprefix(below) for entry in found)
        return {name for name in names if name.rstrip("/") and "/" not in name.rstrip("/") and "?" not in name}

    def _listed(self, prefix: str, timeout_s: float) -> list[Any]:
        try:
            path = self._at.path(prefix)
            return list(
                self._call("ls", timeout_s, f"{path}/" if self._is_web else path, detail=False, **self._fresh)
            )
        except (FileNotFoundError, NotADirectoryError):
            return []

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
        found = self.retried("list", prefix, lambda timeout_s: self._found_below(prefix, timeout_s))
        root = f"{self._at.root}/" if self._at.root else ""
        named = ((str(name).lstrip("" if root else "/").removeprefix(root), entry) for name, entry in found.items())
        return {key: int(entry["size"]) for key, entry in named if key.startswith(f"{prefix}/" if prefix else "")}

    def _found_below(self, prefix: str, timeout_s: float) -> dict[str, Any]:
        try:
            return dict(self._call("find", timeout_s, self._at.path(prefix), detail=True, **self._fresh))
        except FileNotFoundError:
            return {}

    def _walk(self, prefix: str) -> Iterator[str]:
        for name in sorted(self._entries(prefix)):
            key = f"{prefix}/{name}".lstrip("/")
            if name.endswith("/"):
                yield from self._walk(key.rstrip("/"))
            else:
                yield key

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
