"""Storage in memory or at a cloud service, through fsspec: one put is one request, which is atomic."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import fsspec.core

from trajstore.errors import ConflictError, MissingExtraError, StorageError
from trajstore.storage.interface import ABSENT, ANY, OWN, UNSEEN, Place, Storage, check_key, storage_error

T = TypeVar("T")
_log = logging.getLogger(__name__)

_N_THREADS = 32
_N_CONNECTIONS = 256
SETTLE_S = 2.0  # where the server ignores conditions: seconds until the last of several creators counts
_ATTEMPTS = 5
_SECRET_OPTION = re.compile(r"key|secret|token|pass|credential|connection|sas|auth", re.IGNORECASE)
_PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
}

_COPIES_ITSELF = frozenset({"memory", "s3", "gs"})  # not Azure, which answers before the copy is made

_memory_lock = threading.Lock()  # fsspec's in-memory "create" checks and writes in two steps


def _after_fork() -> None:
    global _memory_lock
    _memory_lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


class FsspecStorage(Storage):
    """An fsspec filesystem: memory, S3, GCS or Azure. One put is one atomic request."""

    n_threads = _N_THREADS

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        super().__init__()
        self._url = url
        self._options = options
        self._fs_pid = 0
        self._filesystem: Any = None
        self._path_root = ""
        self.display = _without_credentials(url)
        self.is_remote = not url.startswith("memory:")
        self._secrets = tuple(_secrets(url, options))
        self._refuses_existing: bool | None = None  # whether the server heeds conditions on puts; None: not known

    def __reduce__(self) -> tuple[Any, ...]:
        return FsspecStorage, (self._url, self._options)

    @property
    def _fs(self) -> Any:
        # An async filesystem does not survive a fork: its event loop thread is missing in the child.
        with self._lock:
            if self._fs_pid != os.getpid():
                self._filesystem, self._path_root = self._connect()
                self._fs_pid = os.getpid()
            return self._filesystem

    def _connect(self) -> tuple[Any, str]:
        try:
            defaults: dict[str, Any] = {"use_listings_cache": False}
            if self._url.startswith(("s3:", "s3a:")):  # the default allows ten requests at a time
                defaults["config_kwargs"] = {"max_pool_connections": _N_CONNECTIONS}
            filesystem, path = fsspec.core.url_to_fs(self._url, **(defaults | self._options))
        except ImportError as error:
            package = _PACKAGES.get(self._url.partition(":")[0])
            hint = f"pip install {package}" if package else str(error)
            raise MissingExtraError(f"{self.display} needs a package that is not installed: {hint}") from error
        except ValueError as error:
            raise storage_error("open", self.display, error, self._secrets) from None
        return filesystem, str(path).rstrip("/")

    def _path(self, key: str) -> str:
        self._fs  # noqa: B018  (sets the root path)
        return f"{self._path_root}/{key}" if key else self._path_root

    def get(self, key: str) -> bytes:
        return bytes(
            self._retried("read", key, lambda: self._fs.cat_file(self._path(key), **self._in_one_request()))
        )

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        if start == stop:
            return b""
        return bytes(self._retried("read", key, lambda: self._fs.cat_file(self._path(key), start=start, end=stop)))

    def size(self, key: str) -> int:
        return int(self._retried("read", key, lambda: self._fs.info(self._path(key), refresh=True)["size"]))

    def get_many(self, keys: Sequence[str]) -> list[bytes]:
        return self.get_ranges([(key, 0, None) for key in keys])

    def get_ranges(self, places: Sequence[Place]) -> list[bytes]:
        if len(places) <= 1 or not getattr(self._fs, "async_impl", False):
            return super().get_ranges(places)
        paths = [self._path(key) for key, _, _ in places]
        starts = [None if stop is None else start for _, start, stop in places]
        stops = [stop for _, _, stop in places]
        found = self._fs.cat_ranges(
            paths, starts, stops, batch_size=_N_CONNECTIONS, on_error="return", **self._in_one_request()
        )
        # One wave for all; objects that failed are read again one by one, with retries and a proper error.
        return [d if isinstance(d, bytes) else self._get_place(p) for p, d in zip(places, found, strict=True)]

    def list_names(self, prefix: str) -> list[str]:
        def names() -> list[str]:
            path = self._path(prefix)
            try:
                entries = self._fs.ls(path, detail=False, refresh=True)
            except FileNotFoundError:
                return []
            found = {str(entry).rstrip("/").rpartition("/")[2] for entry in entries}
            return sorted(found - {path.rpartition("/")[2]} if str(path) in entries else found)

        return self._retried("list", prefix, names)

    def tree_sizes(self, prefix: str) -> dict[str, int]:
        def sizes() -> dict[str, int]:
            try:
                entries = self._fs.find(self._path(prefix), detail=True, refresh=True)
            except FileNotFoundError:
                return {}
            if not isinstance(entries, dict):  # adlfs, of an object: nothing is below it
                return {}
            below, root = f"{self._path(prefix)}/", f"{self._path_root}/"
            named = ((str(name), entry) for name, entry in entries.items())
            return {n.removeprefix(root): int(e["size"]) for n, e in named if n.startswith(below) and n[-1] != "/"}

        return self._retried("list", prefix, sizes)

    def copy_many(self, keys: Sequence[tuple[str, str]], other: Storage, *, may_link: bool = False) -> None:
        if not isinstance(other, FsspecStorage) or not self._is_same_service(other):
            return super().copy_many(keys, other)

        def copy(pair: tuple[str, str]) -> None:
            check_key(pair[1])
            paths = self._path(pair[0]), other._path(pair[1])
            self._retried("copy", pair[0], lambda: self._fs.cp_file(*paths))

        self.map(copy, keys)
        return None

    def _is_same_service(self, other: FsspecStorage) -> bool:
        """Whether the service itself can copy objects between the two storages, complete when it answers."""
        mine, theirs = self._fs, other._fs
        is_same = type(mine) is type(theirs) and mine.storage_options == theirs.storage_options
        return is_same and not _COPIES_ITSELF.isdisjoint(self._protocols())

    def delete(self, keys: Sequence[str]) -> None:
        def remove(key: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._path(key))

        self.map(lambda key: self._retried("delete", key, lambda: remove(key)), list(keys))

    @property
    def is_exclusive(self) -> bool:
        return self._refuses_existing is not False

    def put_once(self, key: str, data: bytes) -> bool:
        if not self.is_remote or self._heeds_conditions():
            return super().put_once(key, data)
        return not self._exists(key) and super().put_once(key, data) and self._has_settled(key, data)

    def _heeds_conditions(self) -> bool:
        """Whether the server refuses to create an object that exists; found out once, with an object of its own."""
        if self._refuses_existing is None:  # two threads may both find out
            self._refuses_existing = self._refuses_to_create_twice(f"scratch/probe-{uuid.uuid4().hex}")
        return self._refuses_existing

    def _refuses_to_create_twice(self, key: str) -> bool:
        self.put(key, b"{}", ABSENT)
        try:
            self._pipe(self._path(key), b"[]", "create", {})
        except FileExistsError:
            return True
        except OSError as error:
            if not _is_refused_condition(error):
                raise storage_error("write", f"{self.display}/{key}", error, self._secrets) from None
            return True
        finally:
            self.delete([key])
        _log.warning(
            "%s: the server ignores conditions on puts; where several processes create the same store at once, the"
            " content that stays after %s seconds decides",
            self.display,
            SETTLE_S,
        )
        return False

    def _exists(self, key: str) -> bool:
        try:
            self.size(key)
        except FileNotFoundError:
            return False
        return True

    def _has_settled(self, key: str, data: bytes) -> bool:
        """Whether the object still holds these bytes after others that put it at the same time are done."""
        time.sleep(SETTLE_S)
        try:
            return self.get(key) == data
        except FileNotFoundError:
            return False

    def put(self, key: str, data: bytes | memoryview, expect: str = ANY) -> str:
        """One request, repeated with the same bytes until the server answers."""
        body = bytes(data)  # no copy of what is bytes already
        return self._retried("write", key, lambda: self._put_once(key, body, expect))

    def _put_once(self, key: str, data: bytes, expect: str) -> str:
        path, kwargs = self._path(key), dict[str, Any]()
        if expect not in (ANY, ABSENT, UNSEEN, OWN) and self._compares_versions():
            kwargs["IfMatch"] = expect
        try:
            # A new chunk is created, never replaced: a duplicate request that arrives late can't undo a later put.
            is_new = expect in (ABSENT, UNSEEN, OWN)
            answer = self._pipe(path, data, "create" if is_new else "overwrite", kwargs)
        except FileExistsError:
            return self._resolve_lost_answer(key, data, FileExistsError(f"{self.display}/{key}"))
        except OSError as error:
            is_gone = "IfMatch" in kwargs and isinstance(error, FileNotFoundError)
            if not is_gone and not _is_refused_condition(error):
                raise
            conflict: OSError = ConflictError(
                f"{self.display}/{key} was written by another process; a stream has only one writer"
            )
            if expect == ABSENT:
                conflict = FileExistsError(f"{self.display}/{key}")
            return self._resolve_lost_answer(key, data, conflict)
        return str(answer["ETag"]) if isinstance(answer, dict) and "ETag" in answer else ANY

    def _pipe(self, path: str, data: bytes, mode: str, kwargs: dict[str, Any]) -> Any:
        if getattr(self._fs, "async_impl", False):
            if self._compares_versions():
                kwargs["chunksize"] = max(50 << 20, len(data))  # one request for any size
            return self._fs.pipe_file(path, data, mode=mode, **kwargs)
        with _memory_lock:
            return self._fs.pipe_file(path, data, mode=mode)

    def _resolve_lost_answer(self, key: str, data: bytes, conflict: OSError) -> str:
        """The version after a refused put, if our own earlier try succeeded and only its answer was lost.

        Otherwise another process wrote the object, and ``conflict`` is raised.
        """
        try:
            is_ours = self.get(key) == data
        except FileNotFoundError:
            is_ours = False
        if not is_ours:
            raise conflict
        if not self._compares_versions():
            return ANY
        info = self._fs.info(self._path(key), refresh=True)
        return str(info["ETag"]) if "ETag" in info else ANY

    def _in_one_request(self) -> dict[str, int]:
        # Else s3fs asks for the size first and splits large objects, which may mix two versions.
        return {"max_concurrency": 1} if self._compares_versions() else {}

    def _compares_versions(self) -> bool:
        return "s3" in self._protocols()

    def _protocols(self) -> tuple[str, ...]:
        protocol = self._fs.protocol
        return (protocol,) if isinstance(protocol, str) else tuple(protocol)

    def _retried(self, action: str, key: str, call: Callable[[], T]) -> T:
        """Call again after temporary faults; definite answers are raised at once."""
        check_key(key)
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return call()
            except (FileExistsError, StorageError, MissingExtraError):
                raise
            except Exception as error:
                if isinstance(error, FileNotFoundError) and action in ("read", "copy"):
                    raise
                failure = storage_error(action, f"{self.display}/{key}", error, self._secrets)
                if attempt == _ATTEMPTS or isinstance(error, (PermissionError, FileNotFoundError)):
                    break
                _log.warning(
                    "%s %s/%s failed, will be retried: %s", action, self.display, key, type(error).__name__
                )
            time.sleep(0.05 * 2**attempt)
        raise failure  # outside the handler: the original error may quote credentials


def _is_refused_condition(error: BaseException) -> bool:
    """Whether a server refused a conditional put, by the code of its answer; messages differ between servers."""
    cause: BaseException | None = error
    while cause is not None:
        response = getattr(cause, "response", None)
        if isinstance(response, dict):
            return response.get("Error", {}).get("Code") in (
                "PreconditionFailed",
                "412",
            )
        cause = cause.__cause__
    return False


def _without_credentials(url: str) -> str:
    return re.sub(r"//[^/@]*@", "//", url.partition("?")[0])


def _secrets(url: str, options: Mapping[str, Any]) -> Iterator[str]:
    if found := re.search(r"//([^/@]*)@", url):
        yield from (part for part in found.group(1).split(":") if part)
    if query := url.partition("?")[2]:
        yield query
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _secrets("", value)
        elif isinstance(value, str) and value and _SECRET_OPTION.search(str(name)):
            yield value
