"""Bytes at a URL: the only module that knows fsspec and the file system.

Keys are relative paths with ``/``. A put is atomic (readers see the old bytes or the new, never a mix)
and durable when it returns. Storages are safe to share between threads, to fork and to pickle.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import fsspec
import fsspec.core
import fsspec.utils

from trajstore.errors import ConflictError, MissingExtraError, StorageError

T = TypeVar("T")
_log = logging.getLogger(__name__)

ANY: Final = "*any*"  # put whatever is there
ABSENT: Final = "*absent*"  # put only where nothing is

_LOCAL_THREADS = 4
_REMOTE_THREADS = 32
_ATTEMPTS = 5
_SCRATCH = "scratch"
# The directory of an array node is invisible to whoever walks the hierarchy, so temporary files go there.
_SCRATCH_NODE = (
    b'{"zarr_format":3,"node_type":"array","shape":[0],"data_type":"uint8",'
    b'"chunk_grid":{"name":"regular","configuration":{"chunk_shape":[1]}},'
    b'"chunk_key_encoding":{"name":"default","configuration":{"separator":"."}},'
    b'"fill_value":0,"codecs":[{"name":"bytes"}],"storage_transformers":[],'
    b'"attributes":{"trajstore_note":"temporary files of running writers; readers ignore them"}}'
)
_SECRET_OPTION = re.compile(r"key|secret|token|pass|credential|connection|sas|auth", re.IGNORECASE)
_EXTRAS = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gcs",
    "gcs": "gcs",
    "az": "azure",
    "abfs": "azure",
    "abfss": "azure",
}


@dataclass(frozen=True, slots=True)
class Put:
    """One object of a wave: made when its turn comes, so that few encoded objects exist at a time."""

    key: str
    make: Callable[[], bytes]
    expect: str = ANY


class Storage:
    """What every backend offers; `open_storage` chooses the backend by URL.

    Attributes:
        display: The URL without credentials, for messages.
    """

    display: str
    _n_threads: int
    _executor: ThreadPoolExecutor | None = None
    _pid: int = 0
    _lock: threading.Lock

    def get(self, key: str) -> bytes:
        """The object's bytes; FileNotFoundError where there is none."""
        raise NotImplementedError

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        raise NotImplementedError

    def size(self, key: str) -> int:
        raise NotImplementedError

    def put(self, key: str, data: bytes, expect: str = ANY) -> str:
        """Replace the object atomically and durably; return its version.

        Args:
            key: Which object.
            data: Its new bytes.
            expect: `ANY`, `ABSENT`, or the version that the last put returned.

        Raises:
            FileExistsError: ``expect`` is `ABSENT` and something else is there.
            ConflictError: ``expect`` is a version and something else is there.
        """
        raise NotImplementedError

    def list_names(self, prefix: str) -> list[str]:
        """Names directly below a prefix, never from a cache; empty where there are none."""
        raise NotImplementedError

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; those already gone are fine."""
        raise NotImplementedError

    def get_many(self, keys: Sequence[str]) -> list[bytes]:
        """Many objects in one concurrent wave."""
        return self.map(self.get, keys)

    def put_many(self, puts: Iterable[Put]) -> dict[str, str]:
        """Many objects in one concurrent wave; durable when it returns. Returns their versions."""
        wave = list(puts)
        versions = self.map(lambda p: self.put(p.key, p.make(), p.expect), wave)
        return {p.key: version for p, version in zip(wave, versions, strict=True)}

    def map(self, function: Callable[[Any], T], items: Sequence[Any]) -> list[T]:
        """Apply in threads, in order; the first error is raised once all have ended."""
        if len(items) <= 1:
            return [function(item) for item in items]
        futures = [self._threads().submit(function, item) for item in items]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]
        return [future.result() for future in futures]

    def _threads(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._executor is None or self._pid != os.getpid():
                self._executor = ThreadPoolExecutor(self._n_threads, thread_name_prefix="trajstore-io")
                self._pid = os.getpid()
            return self._executor

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.display}>"


def open_storage(
    url: str | os.PathLike[str], options: Mapping[str, Any] | None = None, *, fsync: bool = True
) -> Storage:
    """The storage at a URL; touches nothing yet.

    Args:
        url: A path or any fsspec URL.
        options: What fsspec's filesystem for that URL takes (credentials, endpoints).
        fsync: Whether local puts survive a power cut; without it they survive only a crash of the process.
    """
    text = os.fspath(url)
    protocol, path = fsspec.core.split_protocol(text)
    if protocol in (None, "file", "local"):
        if options:
            raise TypeError(f"{text}: a local directory takes no storage options, got {sorted(options)}")
        return LocalStorage(Path(path).expanduser().absolute(), fsync=fsync)
    return FsspecStorage(text, dict(options or {}))


def _fail(action: str, where: str, error: BaseException, secrets: Iterable[str] = ()) -> StorageError:
    """Wrap a backend's error, without the credentials it may quote."""
    reason = f"{type(error).__name__}: {error}"
    leaked = False
    for secret in secrets:
        leaked = leaked or secret in reason
        reason = reason.replace(secret, "***")
    failure = StorageError(f"can't {action} {where}: {reason}")
    failure.errno = getattr(error, "errno", None)
    failure.__cause__ = None if leaked else error
    failure.__suppress_context__ = True
    return failure


class LocalStorage(Storage):
    """A directory. Puts go through a temporary file, fsync and rename, so they are all or nothing."""

    _n_threads = _LOCAL_THREADS

    def __init__(self, root: Path, *, fsync: bool) -> None:
        self._root = root
        self._fsync_on = fsync
        self._lock = threading.Lock()
        self._scratch_ready = 0  # process id that made sure of the scratch directory
        self._counter = 0
        self.display = str(root)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (str(self._root), {}, self._fsync_on)

    def get(self, key: str) -> bytes:
        with self._translated("read", key), open(self._path(key), "rb", buffering=0) as file:
            return _read_all(file)

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        with self._translated("read", key), open(self._path(key), "rb", buffering=0) as file:
            return os.pread(file.fileno(), stop - start, start)

    def size(self, key: str) -> int:
        with self._translated("read", key):
            return self._path(key).stat().st_size

    def put(self, key: str, data: bytes, expect: str = ANY) -> str:
        with self._translated("write", key):
            self._sync_directories(self._publish(key, data, expect))
        return ANY

    def put_many(self, puts: Iterable[Put]) -> dict[str, str]:
        wave = list(puts)

        def publish(put: Put) -> set[str]:
            with self._translated("write", put.key):
                return self._publish(put.key, put.make(), put.expect)

        dirty: set[str] = set().union(*self.map(publish, wave))
        with self._translated("sync", ""):
            self._sync_directories(dirty)
        return {put.key: ANY for put in wave}

    def list_names(self, prefix: str) -> list[str]:
        with self._translated("list", prefix):
            try:
                return sorted(os.listdir(self._path(prefix)))
            except (FileNotFoundError, NotADirectoryError):
                return []

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            with self._translated("delete", key), contextlib.suppress(FileNotFoundError):
                os.unlink(self._path(key))

    def _path(self, key: str) -> Path:
        if ".." in key.split("/") or key.startswith("/"):
            raise ValueError(f"key {key!r} leaves the store")
        return self._root / key

    def _publish(self, key: str, data: bytes, expect: str) -> set[str]:
        """Write, sync and rename; return the directories whose entries still need syncing."""
        target = self._path(key)
        temporary = self._scratch() / self._unique()
        try:
            self._write_file(temporary, data)
            while True:
                try:
                    _link_or_rename(temporary, target, expect)
                    return {str(target.parent)}
                except FileNotFoundError:
                    if made := self._publish_with_parents(temporary, target):
                        return made
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def _publish_with_parents(self, temporary: Path, target: Path) -> set[str]:
        """Make the missing directories and the file appear at once, by renaming a whole directory.

        A directory without its ``zarr.json``, if only for an instant, is one that a walker warns about
        and that a crash would leave for ever. Returns nothing when somebody else made it first.
        """
        top = target.parent
        while not top.parent.exists():
            top = top.parent
        base = self._scratch() / self._unique()
        inside = base / target.relative_to(top)
        os.makedirs(inside.parent)
        os.rename(temporary, inside)
        try:
            self._sync_directories({str(d) for d in (inside.parent, *inside.parents) if base in (d, *d.parents)})
            os.rename(base, top)
        except OSError as error:
            os.rename(inside, temporary)
            shutil.rmtree(base, ignore_errors=True)
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                return set()
            raise
        return {str(top.parent)}

    def _write_file(self, path: Path, data: bytes) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            if self._fsync_on:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _sync_directories(self, paths: set[str]) -> None:
        if not self._fsync_on:
            return
        for path in sorted(paths):
            descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def _scratch(self) -> Path:
        scratch = self._root / _SCRATCH
        if self._scratch_ready != os.getpid():
            os.makedirs(scratch, exist_ok=True)
            node = scratch / "zarr.json"
            if not node.exists():
                temporary = scratch / self._unique()
                self._write_file(temporary, _SCRATCH_NODE)
                os.replace(temporary, node)
            self._scratch_ready = os.getpid()
        return scratch

    def _unique(self) -> str:
        with self._lock:
            self._counter += 1
            return f"{os.getpid()}-{threading.get_ident()}-{time.time_ns()}-{self._counter}.tmp"

    @contextlib.contextmanager
    def _translated(self, action: str, key: str) -> Iterator[None]:
        try:
            yield
        except (FileExistsError, StorageError):
            raise
        except OSError as error:
            if isinstance(error, FileNotFoundError) and action == "read":
                raise  # the caller decides what a missing object means
            raise _fail(action, f"{self.display}/{key}", error) from error


def _read_all(file: Any) -> bytes:
    data: bytes = file.readall()
    return data


def _link_or_rename(temporary: Path, target: Path, expect: str) -> None:
    if expect == ABSENT:
        os.link(temporary, target)
        os.unlink(temporary)
    else:
        os.replace(temporary, target)


class FsspecStorage(Storage):
    """Any other fsspec filesystem: memory, S3, GCS, Azure. One put is one request, atomic by itself."""

    _n_threads = _REMOTE_THREADS

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self._url = url
        self._options = options
        self._lock = threading.Lock()
        self._put_lock = threading.Lock()
        self._fs_pid = 0
        self._filesystem: Any = None
        self._path_root = ""
        self.display = _without_credentials(url)
        self._secrets = tuple(_secrets(url, options))

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self._url, self._options, True)

    @property
    def _fs(self) -> Any:
        # An async filesystem does not survive a fork: its event loop thread is gone. Make it anew.
        with self._lock:
            if self._fs_pid != os.getpid():
                self._filesystem, self._path_root = self._connect()
                self._fs_pid = os.getpid()
            return self._filesystem

    def _connect(self) -> tuple[Any, str]:
        try:
            filesystem, path = fsspec.core.url_to_fs(self._url, **self._options)
        except ImportError as error:
            extra = _EXTRAS.get(self._url.partition(":")[0])
            hint = f"pip install 'trajstore[{extra}]'" if extra else str(error)
            raise MissingExtraError(f"{self.display} needs a package that is not installed: {hint}") from error
        except ValueError as error:
            raise _fail("open", self.display, error, self._secrets) from None
        return filesystem, str(path).rstrip("/")

    def _path(self, key: str) -> str:
        self._fs  # noqa: B018  (sets the root path)
        if ".." in key.split("/") or key.startswith("/"):
            raise ValueError(f"key {key!r} leaves the store")
        return f"{self._path_root}/{key}" if key else self._path_root

    def get(self, key: str) -> bytes:
        return bytes(self._retried("read", key, lambda: self._fs.cat_file(self._path(key))))

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        return bytes(self._retried("read", key, lambda: self._fs.cat_file(self._path(key), start=start, end=stop)))

    def size(self, key: str) -> int:
        return int(self._retried("read", key, lambda: self._fs.info(self._path(key), refresh=True)["size"]))

    def get_many(self, keys: Sequence[str]) -> list[bytes]:
        if len(keys) <= 1 or not getattr(self._fs, "async_impl", False):
            return super().get_many(keys)
        paths = [self._path(key) for key in keys]
        nothing = [None] * len(paths)
        found = self._fs.cat_ranges(paths, nothing, nothing, on_error="return")
        # One wave for all; whatever failed is asked again, with patience and a proper error.
        return [d if isinstance(d, bytes) else self.get(k) for k, d in zip(keys, found, strict=True)]

    def list_names(self, prefix: str) -> list[str]:
        path = self._path(prefix)

        def names() -> list[str]:
            try:
                entries = self._fs.ls(path, detail=False, refresh=True)
            except FileNotFoundError:
                return []
            found = {str(entry).rstrip("/").rpartition("/")[2] for entry in entries}
            return sorted(found - {path.rpartition("/")[2]} if str(path) in entries else found)

        return self._retried("list", prefix, names)

    def delete(self, keys: Sequence[str]) -> None:
        def remove(key: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._path(key))

        self.map(lambda key: self._retried("delete", key, lambda: remove(key)), list(keys))

    def put(self, key: str, data: bytes, expect: str = ANY) -> str:
        """One request; asked again with the same bytes until the server answers."""
        return self._retried("write", key, lambda: self._put_once(key, data, expect))

    def _put_once(self, key: str, data: bytes, expect: str) -> str:
        path, kwargs = self._path(key), {}
        if expect not in (ANY, ABSENT) and self._compares_versions():
            kwargs["IfMatch"] = expect
        try:
            answer = self._pipe(path, data, "create" if expect == ABSENT else "overwrite", kwargs)
        except FileExistsError:
            return self._resolve_lost_answer(key, data, FileExistsError(f"{self.display}/{key}"))
        except OSError as error:
            if not _is_refused_condition(error):
                raise
            conflict = ConflictError(
                f"{self.display}/{key} was written by somebody else; a stream has one writer, ever"
            )
            return self._resolve_lost_answer(key, data, conflict)
        return str(answer["ETag"]) if isinstance(answer, dict) and "ETag" in answer else ANY

    def _pipe(self, path: str, data: bytes, mode: str, kwargs: dict[str, str]) -> Any:
        if getattr(self._fs, "async_impl", False):
            return self._fs.pipe_file(path, data, mode=mode, **kwargs)
        with self._put_lock:  # fsspec's in-memory "create" looks first and writes then
            return self._fs.pipe_file(path, data, mode=mode)

    def _resolve_lost_answer(self, key: str, data: bytes, conflict: OSError) -> str:
        """The server says no: either somebody else wrote, or our own earlier try went through unheard."""
        if self.get(key) != data:
            raise conflict
        if not self._compares_versions():
            return ANY
        info = self._fs.info(self._path(key), refresh=True)
        return str(info["ETag"]) if "ETag" in info else ANY

    def _compares_versions(self) -> bool:
        return "s3" in self._protocols()

    def _protocols(self) -> tuple[str, ...]:
        protocol = self._fs.protocol
        return (protocol,) if isinstance(protocol, str) else tuple(protocol)

    def _retried(self, action: str, key: str, call: Callable[[], T]) -> T:
        """Call again after passing faults; certain answers are final at once."""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return call()
            except (FileExistsError, StorageError, MissingExtraError):
                raise
            except Exception as error:
                if isinstance(error, FileNotFoundError) and action == "read":
                    raise  # the caller decides what a missing object means
                if attempt == _ATTEMPTS or isinstance(error, (PermissionError, FileNotFoundError)):
                    raise _fail(action, f"{self.display}/{key}", error, self._secrets) from None
                _log.warning("%s %s/%s failed, trying again: %s", action, self.display, key, type(error).__name__)
                time.sleep(0.05 * 2**attempt)
        raise AssertionError("unreachable")


def _is_refused_condition(error: BaseException) -> bool:
    """Whether a server refused a conditional put, by the code of its answer; its words differ."""
    cause: BaseException | None = error
    while cause is not None:
        response = getattr(cause, "response", None)
        if isinstance(response, dict):
            return response.get("Error", {}).get("Code") in (
                "PreconditionFailed",
                "ConditionalRequestConflict",
                "412",
            )
        cause = cause.__cause__
    return False


def _reopen(url: str, options: dict[str, Any], fsync: bool) -> Storage:
    return open_storage(url, options, fsync=fsync)


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
