"""Storage at S3, GCS or Azure through obstore, whose requests run in Rust, without Python's event loop."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from trajstore.storage.interface import ABSENT, ANY, Data, Storage, check_key
from trajstore.storage.obstore_options import ObstoreClient
from trajstore.storage.request_options import ServiceOptions
from trajstore.storage.service import RefusedConditionError, ServiceStorage

_DELETED_AT_ONCE = 1000  # by one request to S3
_RANGES_AT_ONCE = 10  # that obstore has under way for one call; further ones would wait for these

# obstore's threads exist only in the process that started them; a call in a forked child would wait for ever.
_has_lost_threads = False


def _after_fork() -> None:
    global _has_lost_threads
    _has_lost_threads = "obstore" in sys.modules


os.register_at_fork(after_in_child=_after_fork)


class ObstoreStorage(ServiceStorage):
    """A bucket or container through obstore. One put is one atomic request.

    In a forked child of a process that used obstore, another storage makes the requests.

    Args:
        url: Where the objects are.
        options: The storage options that ``client`` was made from.
        client: How obstore reaches the place.
        service: How requests are made.
        substitute: Makes the storage that asks in forked children.
    """

    is_remote = True

    def __init__(
        self,
        url: str,
        options: dict[str, Any],
        client: ObstoreClient,
        service: ServiceOptions,
        substitute: Callable[[str, dict[str, Any], ServiceOptions], ServiceStorage],
    ) -> None:
        super().__init__(url, options, service)
        self._client = client
        self._make_substitute = substitute
        self._substitute: ServiceStorage | None = None
        self._store: Any = None
        self._calls: Any = None  # the module obstore
        self._root = f"{client.root}/" if client.root else ""

    def __reduce__(self) -> tuple[Any, ...]:
        return ObstoreStorage, (self._url, self._options, self._client, self._service, self._make_substitute)

    @property
    def transport(self) -> str:  # type: ignore[override]
        return "obstore" if self._other() is None else f"{self._other().transport} (in a forked child)"  # type: ignore[union-attr]

    def _other(self) -> ServiceStorage | None:
        """The storage that asks instead of obstore; None where obstore works."""
        if not _has_lost_threads:
            return None
        with self._lock:
            if self._substitute is None:
                self._substitute = self._make_substitute(self._url, self._options, self._service)
            return self._substitute

    def _connect(self) -> Any:
        store = self._store
        if store is None:
            import obstore

            policy = self._service.retries
            store = self._client.connect(policy.request_s, max(policy.total_s, policy.request_s))
            self._calls, self._store = obstore, store
        return store

    def renew(self) -> bool:
        """Connect again, so that the client looks for credentials where it first found them."""
        other = self._other()
        self._store = None
        return self._client.keys is None if other is None else other.renew()

    def ask_bytes(self, key: str, start: int, stop: int | None, timeout_s: float) -> Data:
        if (other := self._other()) is not None:
            return other.ask_bytes(key, start, stop, timeout_s)
        store, path = self._connect(), self._root + key
        if stop is None:
            return memoryview(self._calls.get(store, path).bytes())
        return memoryview(self._calls.get_range(store, path, start=start, end=stop))

    def ask_ranges(self, key: str, ranges: Sequence[tuple[int, int]], timeout_s: float) -> Sequence[Data]:
        store, (starts, stops) = self._connect(), zip(*ranges, strict=True)
        found = self._calls.get_ranges(store, self._root + key, starts=starts, ends=stops, coalesce=0)
        return [memoryview(data) for data in found]

    @property
    def ranges_at_once(self) -> int:
        return _RANGES_AT_ONCE if self._other() is None else 1

    def ask_size(self, key: str, timeout_s: float) -> tuple[int, str]:
        if (other := self._other()) is not None:
            return other.ask_size(key, timeout_s)
        store = self._connect()
        found = self._calls.head(store, self._root + key)
        return int(found["size"]), self._version(found)

    def _version(self, answer: Any) -> str:
        return str(answer.get("version" if self._client.service == "gcs" else "e_tag") or ANY)

    def ask_put(self, key: str, data: bytes, expect: str, timeout_s: float) -> str:
        if (other := self._other()) is not None:
            return other.ask_put(key, data, expect, timeout_s)
        store, mode = self._connect(), self._mode(expect)
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        try:
            answer = self._calls.put(store, self._root + key, data, mode=mode, use_multipart=False)
        except AlreadyExistsError:
            raise (FileExistsError if expect == ABSENT else RefusedConditionError)(key) from None
        except PreconditionError:
            raise RefusedConditionError(key) from None
        return self._version(answer)

    def _mode(self, expect: str) -> Any:
        if expect in (ANY, ABSENT):
            return "overwrite" if expect == ANY else "create"
        return {"version": expect} if self._client.service == "gcs" else {"e_tag": expect}

    def ask_names(self, prefix: str, timeout_s: float) -> list[str]:
        if (other := self._other()) is not None:
            return other.ask_names(prefix, timeout_s)
        store = self._connect()
        found = self._calls.list_with_delimiter(store, (self._root + prefix).rstrip("/") or None)
        paths = [*found["common_prefixes"], *(entry["path"] for entry in found["objects"])]
        return sorted({str(path).rstrip("/").rpartition("/")[2] for path in paths})

    def ask_tree(self, prefix: str, timeout_s: float) -> dict[str, int]:
        if (other := self._other()) is not None:
            return other.ask_tree(prefix, timeout_s)
        store, below = self._connect(), (self._root + prefix).rstrip("/")
        entries = self._calls.list(store, below or None, chunk_size=1000)
        return {
            entry["path"].removeprefix(self._root): int(entry["size"])
            for chunk in entries
            for entry in chunk
            if entry["path"].startswith(f"{below}/" if below else "")
        }

    def ask_delete(self, keys: Sequence[str], timeout_s: float) -> None:
        if (other := self._other()) is not None:
            other.ask_delete(keys, timeout_s)
            return
        store = self._connect()
        try:
            self._calls.delete(store, [self._root + key for key in keys])
        except FileNotFoundError:
            if len(keys) == 1:
                return
            for key in keys:  # the service stopped at one that does not exist
                self.ask_delete([key], timeout_s)

    @property
    def deletes_at_once(self) -> int:
        return _DELETED_AT_ONCE if self._client.service == "s3" and self._other() is None else 1

    @property
    def compares_versions(self) -> bool:
        other = self._other()
        return True if other is None else other.compares_versions

    def copy_many(self, keys: Sequence[tuple[str, str]], other: Storage, *, may_link: bool = False) -> None:
        if not isinstance(other, ObstoreStorage) or not self._is_same_service(other):
            return super().copy_many(keys, other)

        def copy(pair: tuple[str, str]) -> None:
            check_key(pair[1])
            paths = self._root + pair[0], other._root + pair[1]
            self.retried("copy", pair[0], lambda timeout_s: self._calls.copy(self._connect(), *paths))

        self._connect()
        self.map(copy, keys)
        return None

    def _is_same_service(self, other: ObstoreStorage) -> bool:
        """Whether the service itself can copy objects between the two storages, complete when it answers."""
        mine, theirs = self._client, other._client
        is_same = (mine.bucket, mine.config, mine.keys, mine.profile) == (
            theirs.bucket,
            theirs.config,
            theirs.keys,
            theirs.profile,
        )
        return is_same and mine.service == theirs.service != "azure" and self._other() is None
