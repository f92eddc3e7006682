"""Storage in memory or at a cloud service, through fsspec: one put is one request, which is atomic."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import fsspec.asyn
import fsspec.core

from trajstore.errors import MissingExtraError
from trajstore.storage.interface import ABSENT, ANY, Place, Storage, check_key, storage_error
from trajstore.storage.merged_ranges import merge
from trajstore.storage.service import N_REQUESTS, RefusedConditionError, ServiceOptions, ServiceStorage

_LOOP_DELAY_S = 5.0  # what a busy event loop may add to a request's timeout
_BYTES_PER_S = 1_000_000  # a put may take this much longer
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


class FsspecStorage(ServiceStorage):
    """An fsspec filesystem: memory, S3, GCS or Azure. One put is one atomic request.

    Args:
        url: Where the objects are.
        options: Arguments of the filesystem for that URL.
        service: How requests are made.
        filesystem: The filesystem to use, instead of one made from ``options``.
    """

    n_threads = 32  # more only wait for the one event loop

    def __init__(
        self,
        url: str,
        options: dict[str, Any],
        service: ServiceOptions | None = None,
        filesystem: Any = None,
    ) -> None:
        super().__init__(url, options, service or ServiceOptions())
        self._fs_pid = 0
        self._given = filesystem
        self._filesystem: Any = None
        self._path_root = ""
        self.is_remote = not url.startswith("memory:")
        self.transport = _PACKAGES.get(url.partition(":")[0], "fsspec") if self.is_remote else ""

    def __reduce__(self) -> tuple[Any, ...]:
        return FsspecStorage, (self._url, self._options, self._service, self._given)

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
            if self._given is not None:
                return self._given, fsspec.core.split_protocol(self._url)[1].rstrip("/")
            filesystem, path = fsspec.core.url_to_fs(self._url, **(self._options | self._defaults()))
        except ImportError as error:
            package = _PACKAGES.get(self._url.partition(":")[0])
            hint = f"pip install {package}" if package else str(error)
            raise MissingExtraError(f"{self.display} needs a package that is not installed: {hint}") from error
        except ValueError as error:
            raise storage_error("open", self.display, error, self._secrets) from None
        if self.is_remote:
            _make_one_try(filesystem)
            _leave_open_at_exit(filesystem)
        return filesystem, str(path).rstrip("/")

    def _defaults(self) -> dict[str, Any]:
        """Options of the client that make one try a request, notice hung connections, and share nothing."""
        policy = self._service.retries
        defaults: dict[str, Any] = {"use_listings_cache": False}
        if not self.is_remote:
            return defaults
        defaults["skip_instance_cache"] = True  # its retries are changed, which another user would not expect
        if self._url.startswith(("s3:", "s3a:")):
            config = {
                "max_pool_connections": N_REQUESTS,  # the default allows ten requests at a time
                "retries": {"total_max_attempts": 1},
                "connect_timeout": policy.request_s,
                "read_timeout": policy.request_s,
            }
            defaults["config_kwargs"] = config | self._options.get("config_kwargs", {})
        if self._url.startswith(("az:", "abfs")):
            defaults |= {name: math.ceil(policy.request_s) for name in ("connection_timeout", "read_timeout")}
        if self._url.startswith(("gs:", "gcs:")):
            import aiohttp  # gcsfs needs it anyway

            defaults["requests_timeout"] = aiohttp.ClientTimeout(
                total=None, sock_connect=policy.request_s, sock_read=policy.request_s
            )
        return defaults

    def renew(self) -> bool:
        """Connect again, so that the client looks for credentials where it first found them."""
        if self._given is not None:
            return False
        with self._lock:
            self._fs_pid = 0
        return True

    def _path(self, key: str) -> str:
        self._fs  # noqa: B018  (sets the root path)
        return f"{self._path_root}/{key}" if key else self._path_root

    def _call(self, name: str, timeout_s: float, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the filesystem; one that is asynchronous is cancelled after the timeout."""
        filesystem = self._fs
        if not getattr(filesystem, "async_impl", False):
            return getattr(filesystem, name)(*args, **kwargs)
        function = getattr(filesystem, f"_{name}")
        limit_s = timeout_s + _LOOP_DELAY_S

        async def call() -> Any:
            return await asyncio.wait_for(function(*args, **kwargs), limit_s)

        return fsspec.asyn.sync(filesystem.loop, call)

    def ask_bytes(self, key: str, start: int, stop: int | None, timeout_s: float) -> bytes:
        if stop is not None:
            limit_s = timeout_s + (stop - start) / _BYTES_PER_S
            return bytes(self._call("cat_file", limit_s, self._path(key), start=start, end=stop))
        # The client itself notices a connection without progress; a large object may take longer than that.
        limit_s = max(timeout_s, self._service.retries.total_s)
        return bytes(self._call("cat_file", limit_s, self._path(key), **self._in_one_request()))

    def get_ranges(self, places: Sequence[Place]) -> list[bytes]:
        if len(places) <= 1 or self._service.hedge_s is not None or not getattr(self._fs, "async_impl", False):
            return super().get_ranges(places)
        requests, cut = merge(places)
        paths = [self._path(key) for key, _, _ in requests]
        starts = [None if stop is None else start for _, start, stop in requests]
        stops = [stop for _, _, stop in requests]
        limit_s = self._service.retries.request_s + self._service.retries.total_s
        try:
            found = self._call(
                "cat_ranges",
                limit_s,
                paths,
                starts,
                stops,
                batch_size=N_REQUESTS,
                on_error="return",
                **self._in_one_request(),
            )
        except Exception:  # of the client, for all of them
            found = [None] * len(requests)
        # One wave for all; objects that failed are read again, with retries and a proper error.
        failed = [i for i, data in enumerate(found) if not isinstance(data, bytes)]
        for i, data in zip(failed, self.map(self._get_place, [requests[i] for i in failed]), strict=True):
            found[i] = data
        return cut(found)

    def ask_size(self, key: str, timeout_s: float) -> tuple[int, str]:
        info = self._call("info", timeout_s, self._path(key), refresh=True)
        has_version = self.compares_versions and "ETag" in info
        return int(info["size"]), str(info["ETag"]) if has_version else ANY

    def ask_names(self, prefix: str, timeout_s: float) -> list[str]:
        path = self._path(prefix)
        try:
            entries = self._call("ls", timeout_s, path, detail=False, refresh=True)
        except FileNotFoundError:
            return []
        found = {str(entry).rstrip("/").rpartition("/")[2] for entry in entries}
        return sorted(found - {path.rpartition("/")[2]} if str(path) in entries else found)

    def ask_tree(self, prefix: str, timeout_s: float) -> dict[str, int]:
        # A tree may take many requests, one after another.
        limit_s = max(timeout_s, self._service.retries.total_s)
        try:
            entries = self._call("find", limit_s, self._path(prefix), detail=True, refresh=True)
        except FileNotFoundError:
            return {}
        if not isinstance(entries, dict):  # adlfs, of an object: nothing is below it
            return {}
        below, root = f"{self._path(prefix)}/", f"{self._path_root}/"
        named = ((str(name), entry) for name, entry in entries.items())
        return {n.removeprefix(root): int(e["size"]) for n, e in named if n.startswith(below) and n[-1] != "/"}

    def copy_many(self, keys: Sequence[tuple[str, str]], other: Storage, *, may_link: bool = False) -> None:
        if not isinstance(other, FsspecStorage) or not self._is_same_service(other):
            return super().copy_many(keys, other)

        def copy(pair: tuple[str, str]) -> None:
            check_key(pair[1])
            paths = self._path(pair[0]), other._path(pair[1])
            self.retried("copy", pair[0], lambda timeout_s: self._call("cp_file", timeout_s, *paths))

        self.map(copy, keys)
        return None

    def _is_same_service(self, other: FsspecStorage) -> bool:
        """Whether the service itself can copy objects between the two storages, complete when it answers."""
        mine, theirs = self._fs, other._fs
        is_same = type(mine) is type(theirs) and mine.storage_options == theirs.storage_options
        return is_same and not _COPIES_ITSELF.isdisjoint(self._protocols())

    def ask_delete(self, keys: Sequence[str], timeout_s: float) -> None:
        for key in keys:
            with contextlib.suppress(FileNotFoundError):
                self._call("rm_file", timeout_s, self._path(key))

    def ask_put(self, key: str, data: bytes, expect: str, timeout_s: float) -> str:
        path, kwargs = self._path(key), dict[str, Any]()
        if expect not in (ANY, ABSENT):
            kwargs["IfMatch"] = expect
        if self.compares_versions:
            kwargs["chunksize"] = max(50 << 20, len(data))  # one request for any size
        limit_s = timeout_s + len(data) / _BYTES_PER_S
        mode = "create" if expect == ABSENT else "overwrite"
        try:
            with contextlib.nullcontext() if getattr(self._fs, "async_impl", False) else _memory_lock:
                answer = self._call("pipe_file", limit_s, path, data, mode=mode, **kwargs)
        except FileExistsError:
            raise
        except OSError as error:
            if not _is_refused_condition(error):
                raise
            raise RefusedConditionError(f"{self.display}/{key}") from None
        return str(answer["ETag"]) if isinstance(answer, dict) and "ETag" in answer else ANY

    def _in_one_request(self) -> dict[str, int]:
        # Else s3fs asks for the size first and splits large objects, which may mix two versions.
        return {"max_concurrency": 1} if self.compares_versions else {}

    @property
    def compares_versions(self) -> bool:
        return "s3" in self._protocols()

    def _protocols(self) -> tuple[str, ...]:
        protocol = self._fs.protocol
        return (protocol,) if isinstance(protocol, str) else tuple(protocol)


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


def _make_one_try(filesystem: Any) -> None:
    """Switch off the retries of a client whose instance is ours; where that is impossible, timeouts bound them."""
    if hasattr(type(filesystem), "retries") and "s3" in filesystem.protocol:
        filesystem.retries = 1
    pipeline = getattr(getattr(filesystem, "service_client", None), "_pipeline", None)
    for policy in getattr(pipeline, "_impl_policies", ()):  # azure-core; its own pauses begin with 15 seconds
        if hasattr(policy, "total_retries"):
            policy.total_retries = 0


def _leave_open_at_exit(filesystem: Any) -> None:
    """Have the system close the connections of a client whose instance is ours when the process ends.

    Its own finalizers need an event loop. At exit that may have ended, which is printed as an error, and in a
    forked child it does not exist, so the child would wait for ever.
    """
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        found = finalizer.peek()
        if found is not None and found[0] is filesystem:
            finalizer.atexit = False
