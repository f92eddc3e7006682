"""Storages in front of other storages: each passes calls on, and changes or counts some of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from trajstore.storage.file_maps import FileMap
from trajstore.storage.interface import ANY, Data, Place, Put, Storage

T = TypeVar("T")
D = TypeVar("D", bound=Data)


class StorageLayer(Storage):
    """Passes every call on to another storage.

    Attributes:
        inner: The storage behind this one.
    """

    def __init__(self, inner: Storage) -> None:
        super().__init__()
        self.inner = inner
        self.display = inner.display
        self.n_threads = inner.n_threads
        self.is_remote = inner.is_remote

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.inner,)

    @property
    def transport(self) -> str:  # type: ignore[override]
        return self.inner.transport

    @property
    def transport_reason(self) -> str:  # type: ignore[override]
        return self.inner.transport_reason

    @property
    def source(self) -> Storage:
        return self.inner.source

    @property
    def keeps_objects(self) -> bool:
        return self.inner.keeps_objects

    def note_rows(self, folder: str, arrays: Mapping[str, tuple[int, int]], *, is_final: bool) -> None:
        self.inner.note_rows(folder, arrays, is_final=is_final)

    def stats(self) -> dict[str, Any]:
        return self.inner.stats()

    def get(self, key: str) -> bytes:
        return self.inner.get(key)

    def get_into(self, key: str, buffer: bytearray) -> memoryview:
        return self.inner.get_into(key, buffer)

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        return self.inner.get_range(key, start, stop)

    def get_range_into(self, key: str, start: int, stop: int, room: memoryview) -> memoryview:
        return self.inner.get_range_into(key, start, stop, room)

    def get_many(self, keys: Sequence[str]) -> list[bytes]:
        return self.inner.get_many(keys)

    def get_ranges(self, places: Sequence[Place]) -> Sequence[Data]:
        return self.inner.get_ranges(places)

    @property
    def can_map(self) -> bool:
        return self.inner.can_map

    def map_object(self, key: str) -> FileMap:
        return self.inner.map_object(key)

    @property
    def may_map(self) -> bool:
        return self.inner.may_map

    def map_if_local(self, key: str) -> FileMap | None:
        return self.inner.map_if_local(key)

    def drop_local(self, key: str) -> bool:
        return self.inner.drop_local(key)

    def size(self, key: str) -> int:
        return self.inner.size(key)

    def put(self, key: str, data: bytes | memoryview, expect: str = ANY) -> str:
        return self.inner.put(key, data, expect)

    def put_many(self, puts: Iterable[Put]) -> dict[str, str]:
        return self.inner.put_many(puts)

    @property
    def is_exclusive(self) -> bool:
        return self.inner.is_exclusive

    def learn_conditions(self) -> None:
        self.inner.learn_conditions()

    def put_once(self, key: str, data: bytes) -> bool:
        return self.inner.put_once(key, data)

    @property
    def is_read_only(self) -> bool:
        return self.inner.is_read_only

    def check_writable(self) -> None:
        self.inner.check_writable()

    def list_names(self, prefix: str) -> list[str]:
        return self.inner.list_names(prefix)

    def delete(self, keys: Sequence[str]) -> None:
        self.inner.delete(keys)

    def list_tree(self, prefix: str) -> list[str]:
        return self.inner.list_tree(prefix)

    def tree_sizes(self, prefix: str) -> dict[str, int]:
        return self.inner.tree_sizes(prefix)

    def remove_tree(self, prefix: str) -> None:
        self.inner.remove_tree(prefix)

    def copy(self, source_key: str, other: Storage, key: str, *, may_link: bool = False) -> None:
        self.copy_many([(source_key, key)], other, may_link=may_link)

    def copy_many(self, keys: Sequence[tuple[str, str]], other: Storage, *, may_link: bool = False) -> None:
        # A service copies its own objects, which it can see only if neither side is behind a layer.
        while isinstance(other, StorageLayer):
            other.check_writable()
            other = other.inner
        self.inner.copy_many(keys, other, may_link=may_link)

    def map(self, function: Callable[[Any], T], items: Sequence[Any]) -> list[T]:
        return self.inner.map(function, items)

    def map_ahead(self, function: Callable[[Any], T], items: Iterable[Any], n_ahead: int) -> Iterator[T]:
        return self.inner.map_ahead(function, items, n_ahead)


class CountedStorage(StorageLayer):
    """Counts requests and bytes by kind, from the first call of this process on.

    What a backend does inside one call is not seen: repetitions after faults, pages of a long listing, ranges that
    it merges.
    """

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self._requests = dict.fromkeys(("get", "head", "list", "put", "copy", "delete"), 0)
        self._bytes = {"read": 0, "written": 0}

    def _count(self, kind: str, n: int = 1, *, n_read: int = 0, n_written: int = 0) -> None:
        with self._lock:
            self._requests[kind] += n
            self._bytes["read"] += n_read
            self._bytes["written"] += n_written

    def stats(self) -> dict[str, Any]:
        """Return requests by kind, and bytes read and written, beside what the storage behind reports."""
        with self._lock:
            own = {"requests": dict(self._requests)} | {f"bytes_{name}": n for name, n in self._bytes.items()}
        return {**self.inner.stats(), **own}

    def get(self, key: str) -> bytes:
        data: bytes = self._counted("get", self.inner.get, key)
        return self._got([data])[0]

    def get_into(self, key: str, buffer: bytearray) -> memoryview:
        view: memoryview = self._counted("get", self.inner.get_into, key, buffer)
        self._count("get", 0, n_read=len(view))
        return view

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        data: bytes = self._counted("get", self.inner.get_range, key, start, stop)
        return self._got([data])[0]

    def get_range_into(self, key: str, start: int, stop: int, room: memoryview) -> memoryview:
        view: memoryview = self._counted("get", self.inner.get_range_into, key, start, stop, room)
        self._count("get", 0, n_read=len(view))
        return view

    def get_many(self, keys: Sequence[str]) -> list[bytes]:
        self._count("get", len(keys))
        return list(self._got(self.inner.get_many(keys)))

    def get_ranges(self, places: Sequence[Place]) -> Sequence[Data]:
        self._count("get", len(places))
        return self._got(self.inner.get_ranges(places))

    def _got(self, found: Sequence[D]) -> Sequence[D]:
        self._count("get", 0, n_read=sum(map(len, found)))
        return found

    def _counted(self, kind: str, call: Callable[..., Any], *args: Any) -> Any:
        self._count(kind)  # before: a request that fails is a request, too
        return call(*args)

    def size(self, key: str) -> int:
        n: int = self._counted("head", self.inner.size, key)
        return n

    def put(self, key: str, data: bytes | memoryview, expect: str = ANY) -> str:
        self._count("put", n_written=memoryview(data).nbytes)
        return self.inner.put(key, data, expect)

    def put_many(self, puts: Iterable[Put]) -> dict[str, str]:
        def made(put: Put) -> bytes | memoryview:
            data = put.make()
            self._count("put", n_written=memoryview(data).nbytes)
            return data

        return self.inner.put_many([Put(p.key, lambda p=p: made(p), p.expect) for p in puts])  # type: ignore[misc]

    def put_once(self, key: str, data: bytes) -> bool:
        self._count("put", n_written=len(data))
        return self.inner.put_once(key, data)

    def list_names(self, prefix: str) -> list[str]:
        names: list[str] = self._counted("list", self.inner.list_names, prefix)
        return names

    def list_tree(self, prefix: str) -> list[str]:
        keys: list[str] = self._counted("list", self.inner.list_tree, prefix)
        return keys

    def tree_sizes(self, prefix: str) -> dict[str, int]:
        sizes: dict[str, int] = self._counted("list", self.inner.tree_sizes, prefix)
        return sizes

    def delete(self, keys: Sequence[str]) -> None:
        self._count("delete", len(keys))
        self.inner.delete(keys)

    def remove_tree(self, prefix: str) -> None:
        Storage.remove_tree(self, prefix)  # through `delete` and `list_tree`, which count

    def copy_many(self, keys: Sequence[tuple[str, str]], other: Storage, *, may_link: bool = False) -> None:
        self._count("copy", len(keys))
        super().copy_many(keys, other, may_link=may_link)
