"""Storage in memory or at a cloud service, through fsspec: one put is one request, which is atomic."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from typing import Any

from trajstore.storage.fsspec_client import package_of
from trajstore.storage.fsspec_connection import FsspecConnection
from trajstore.storage.interface import ABSENT, ANY, Data, Place, Storage, check_key
from trajstore.storage.merged_ranges import merge
from trajstore.storage.request_options import N_REQUESTS, ServiceOptions
from trajstore.storage.service import RefusedConditionError, ServiceStorage

_BYTES_PER_S = 1_000_000  # a put may take this much longer
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
        self._at = FsspecConnection(
            url, options, self._service.retries, display=self.display, secrets=self._secrets, given=filesystem
        )
        protocol = url.partition(":")[0]
        self.is_remote = protocol != "memory"
        self.transport = (package_of(protocol) or "fsspec") if self.is_remote else ""

    def __reduce__(self) -> tuple[Any, ...]:
        return FsspecStorage, (self._url, self._options, self._service, self._at.given)

    def renew(self) -> bool:
        """Connect again, so that the client looks for credentials where it first found them."""
        return self._at.renew()

    def ask_bytes(self, key: str, start: int, stop: int | None, timeout_s: float) -> bytes:
        if stop is not None:
            limit_s = timeout_s + (stop - start) / _BYTES_PER_S
            found = bytes(self._at.call("cat_file", limit_s, self._at.path(key), start=start, end=stop))
            if len(found) > stop - start:
                raise OSError(f"non-partial response: {len(found)} bytes for a range of {stop - start}")
            return found
        # The client itself notices a connection without progress; a large object may take longer than that.
        limit_s = max(timeout_s, self._service.retries.total_s)
        return bytes(self._at.call("cat_file", limit_s, self._at.path(key), **self._in_one_request()))

    def get_ranges(self, places: Sequence[Place]) -> Sequence[Data]:
        if len(places) <= 1 or self._service.hedge_s is not None or not self._at.is_async:
            return super().get_ranges(places)
        wave, cut = merge(places)
        options = {"batch_size": N_REQUESTS, **self._in_one_request()}
        total_s = self._service.retries.total_s
        found = self.tried(lambda timeout_s: self._at.ask_places(wave, timeout_s + total_s, **options))
        return cut(self.completed(wave, found))

    def ask_size(self, key: str, timeout_s: float) -> tuple[int, str]:
        info = self._at.call("info", timeout_s, self._at.path(key), refresh=True)
        has_version = self.compares_versions and "ETag" in info
        return int(info["size"]), str(info["ETag"]) if has_version else ANY

    def ask_names(self, prefix: str, timeout_s: float) -> list[str]:
        path = self._at.path(prefix)
        try:
            entries = self._at.call("ls", timeout_s, path, detail=False, refresh=True)
        except FileNotFoundError:
            return []
        found = {str(entry).rstrip("/").rpartition("/")[2] for entry in entries}
        return sorted(found - {path.rpartition("/")[2]} if str(path) in entries else found)

    def ask_tree(self, prefix: str, timeout_s: float) -> dict[str, int]:
        # A tree may take many requests, one after another.
        limit_s = max(timeout_s, self._service.retries.total_s)
        try:
            entries = self._at.call("find", limit_s, self._at.path(prefix), detail=True, refresh=True)
        except FileNotFoundError:
            return {}
        if not isinstance(entries, dict):  # adlfs, of an object: nothing is below it
            return {}
        below, root = f"{self._at.path(prefix)}/", f"{self._at.root}/"
        named = ((str(name), entry) for name, entry in entries.items())
        return {n.removeprefix(root): int(e["size"]) for n, e in named if n.startswith(below) and n[-1] != "/"}

    def copy_many(self, keys: Sequence[tuple[str, str]], other: Storage, *, may_link: bool = False) -> None:
        if not isinstance(other, FsspecStorage) or not self._is_same_service(other):
            return super().copy_many(keys, other)

        def copy(pair: tuple[str, str]) -> None:
            check_key(pair[1])
            paths = self._at.path(pair[0]), other._at.path(pair[1])
            self.retried("copy", pair[0], lambda timeout_s: self._at.call("cp_file", timeout_s, *paths))

        self.map(copy, keys)
        return None

    def _is_same_service(self, other: FsspecStorage) -> bool:
        """Whether the service itself can copy objects between the two storages, complete when it answers."""
        mine, theirs = self._at.filesystem, other._at.filesystem
        is_same = type(mine) is type(theirs) and mine.storage_options == theirs.storage_options
        return is_same and not _COPIES_ITSELF.isdisjoint(self._protocols())

    def ask_delete(self, keys: Sequence[str], timeout_s: float) -> None:
        for key in keys:
            with contextlib.suppress(FileNotFoundError):
                self._at.call("rm_file", timeout_s, self._at.path(key))

    def ask_put(self, key: str, data: bytes, expect: str, timeout_s: float) -> str:
        path, kwargs = self._at.path(key), dict[str, Any]()
        if expect not in (ANY, ABSENT):
            kwargs["IfMatch"] = expect
        if self.compares_versions:
            kwargs["chunksize"] = max(50 << 20, len(data))  # one request for any size
        limit_s = timeout_s + len(data) / _BYTES_PER_S
        mode = "create" if expect == ABSENT else "overwrite"
        try:
            with contextlib.nullcontext() if self._at.is_async else _memory_lock:
                answer = self._at.call("pipe_file", limit_s, path, data, mode=mode, **kwargs)
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
        protocol = self._at.filesystem.protocol
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
