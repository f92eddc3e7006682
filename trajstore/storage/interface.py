"""The interface of all storages, and what they share."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from trajstore.background_pool import BackgroundPool
from trajstore.credentials import redacted, shows_secrets
from trajstore.errors import StorageError
from trajstore.storage.file_maps import FileMap

T = TypeVar("T")

# What a put expects to find under its key.
ANY: Final = "*any*"  # anything: replace it
ABSENT: Final = "*absent*"  # the key must not exist
UNSEEN: Final = "*unseen*"  # nothing, or the same bytes; no reader looks yet, so the put need not be atomic
OWN: Final = "*own*"  # nothing, or bytes of an earlier attempt of this writer, which a reader may be reading


Data = bytes | memoryview  # read-only; a view may show a part of a larger answer, which it keeps in memory
Place = tuple[str, int, int | None]  # an object's key, and bytes [start, stop) of it; the whole object without stop


@dataclass(frozen=True, slots=True)
class Put:
    """One object to put. ``make`` is called when its turn comes, so that few encoded objects exist at a time.

    Attributes:
        key: Which object.
        make: Returns its bytes.
        expect: What is there already; see `Storage.put`.
        make_pieces: Yields the same bytes in pieces, for a backend that can write them one after the other;
            None: use `make`.
    """

    key: str
    make: Callable[[], bytes | memoryview]
    expect: str = ANY
    make_pieces: Callable[[], Iterator[bytes | memoryview]] | None = None


class Storage:
    """Base class of all backends; `open_storage` chooses the backend by URL.

    Attributes:
        display: The URL without credentials, for messages.
        n_threads: The most calls that `map` makes at a time.
        is_remote: Whether a read is a request over the network.
        transport: What makes the requests of a remote storage; empty elsewhere.
        transport_reason: Why that is not obstore; empty if it is.
    """

    display: str
    n_threads: int
    is_remote = False
    transport: str = ""
    transport_reason: str = ""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._executors: dict[int, BackgroundPool] = {}  # by number of threads
        self._executor_pid = 0
        _alive.add(self)

    def reset_locks(self) -> None:
        """Make new locks, in a process that was forked."""
        self._lock = threading.Lock()

    @property
    def source(self) -> Storage:
        """The storage itself, without copies that are kept nearer."""
        return self

    @property
    def keeps_objects(self) -> bool:
        """Whether copies of objects are kept nearer, so that `note_rows` should be called."""
        return False

    def note_rows(self, folder: str, arrays: Mapping[str, tuple[int, int]], *, is_final: bool) -> None:
        """Learn how many rows the arrays of a stream have: objects that are full of rows never change.

        Called before any of these rows are read.

        Args:
            folder: The stream's folder.
            arrays: By path in the folder: rows in an object, and rows of the array.
            is_final: Whether a reader of these rows expects no more. The last object may still be replaced, by one
                that has these rows and others.
        """

    def stats(self) -> dict[str, Any]:
        """What was counted: requests, bytes, copies that were found nearer; nothing for a local directory."""
        return {}

    def get(self, key: str) -> bytes:
        """The object's bytes.

        Raises:
            FileNotFoundError: It does not exist.
        """
        raise NotImplementedError

    def get_into(self, key: str, buffer: bytearray) -> memoryview:
        """The object's bytes, read into ``buffer`` (which grows if it is too short) if the backend can do that."""
        return memoryview(self.get(key))

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        """Bytes ``[start, stop)`` of an object."""
        raise NotImplementedError

    def get_range_into(self, key: str, start: int, stop: int, room: memoryview) -> memoryview:
        """As `get_range`, read into ``room`` (which is long enough) if the backend can do that."""
        return memoryview(self.get_range(key, start, stop))

    @property
    def can_map(self) -> bool:
        """Whether `map_object` can be called."""
        return False

    def map_object(self, key: str) -> FileMap:
        """The object in the address space of the process: reading it needs no call and no copy.

        Raises:
            FileNotFoundError: It does not exist.
        """
        raise NotImplementedError

    @property
    def may_map(self) -> bool:
        """Whether `map_if_local` may find objects, now or later."""
        return self.can_map

    def map_if_local(self, key: str) -> FileMap | None:
        """As `map_object`; None if no file of this machine has the object, or not all of it.

        Its bytes were not checked: call `drop_local` if they turn out to be damaged.
        """
        return self.map_object(key)

    def drop_local(self, key: str) -> bool:
        """Remove a damaged copy that `map_if_local` found; returns False if the object itself is damaged."""
        return False

    def size(self, key: str) -> int:
        """The size of an object in bytes, never from a cache."""
        raise NotImplementedError

    def put(self, key: str, data: bytes | memoryview, expect: str = ANY) -> str:
        """Replace the object atomically and durably; return its version.

        Args:
            key: Which object.
            data: Its new bytes.
            expect: `ANY`, `ABSENT`, `UNSEEN`, `OWN`, or the version that the last put returned.

        Raises:
            FileExistsError: ``expect`` is `ABSENT` and the object exists with other bytes.
            ConflictError: ``expect`` is a version and the object has another one.
        """
        raise NotImplementedError

    @property
    def is_exclusive(self) -> bool:
        """Whether the place refuses to create an object that exists, so that of several creators one succeeds."""
        return True

    def learn_conditions(self) -> None:
        """Find out what `put_once` has to know of the place, so that it costs one request."""

    def put_once(self, key: str, data: bytes) -> bool:
        """Put an object unless it exists; return whether it was put.

        Of several processes that put the same object at once, one succeeds. Where `is_exclusive` is False, that is
        so unless one of them pauses for seconds in the middle of the call.
        """
        try:
            self.put(key, data, ABSENT)
        except FileExistsError:
            return False
        return True

    @property
    def is_read_only(self) -> bool:
        """Whether nothing can ever be put here."""
        return False

    def check_writable(self) -> None:
        """Refuse a place that is known to be read-only, without a request.

        Raises:
            StorageError: Nothing can be put there.
        """

    def list_names(self, prefix: str) -> list[str]:
        """Names directly below a prefix, sorted, never from a cache; empty if there are none."""
        raise NotImplementedError

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; those that do not exist are ignored."""
        raise NotImplementedError

    def list_tree(self, prefix: str) -> list[str]:
        """Keys of all objects below a prefix, sorted, never from a cache; empty if there are none."""
        return sorted(self.tree_sizes(prefix))

    def tree_sizes(self, prefix: str) -> dict[str, int]:
        """Sizes of all objects below a prefix, by key, never from a cache.

        Objects that are removed during the call are left out.
        """
        raise NotImplementedError

    def remove_tree(self, prefix: str) -> None:
        """Remove all objects below a prefix, if there are any.

        Its ``zarr.json`` is removed first, so a reader that still finds it finds the others too.
        """
        check_tree(prefix)
        self.delete([f"{prefix}/zarr.json"])
        self.delete(self.list_tree(prefix))

    def copy(self, source_key: str, other: Storage, key: str, *, may_link: bool = False) -> None:
        """Copy an object to another storage, or to another key of this one; see `copy_many`."""
        self.copy_many([(source_key, key)], other, may_link=may_link)

    def copy_many(self, keys: Sequence[tuple[str, str]], other: Storage, *, may_link: bool = False) -> None:
        """Copy many objects in one concurrent wave; durable when it returns. Existing objects are replaced.

        If both storages are the same service, the service makes the copies itself.

        Args:
            keys: Pairs of an object's key here and its key in the other storage.
            other: The storage to copy to; may be this one.
            may_link: Whether copies in a local file system may share their bytes with the originals. Only for
                objects that never change.

        Raises:
            FileNotFoundError: An object does not exist.
        """
        other.put_many([Put(key, lambda source=source: self.get(source)) for source, key in keys])  # type: ignore[misc]

    def get_many(self, keys: Sequence[str]) -> list[bytes]:
        """Get many objects in one concurrent wave."""
        return self.map(self.get, keys)

    def get_ranges(self, places: Sequence[Place]) -> Sequence[Data]:
        """Get bytes of objects, or whole objects, in one concurrent wave. They are not copied where that can be."""
        return self.map(self._get_place, places)

    def _get_place(self, place: Place) -> Data:
        key, start, stop = place
        return self.get(key) if stop is None else self.get_range(key, start, stop)

    def put_many(self, puts: Iterable[Put]) -> dict[str, str]:
        """Put many objects in one concurrent wave; durable when it returns. Returns their versions by key."""
        wave = list(puts)
        versions = self.map(lambda p: self.put(p.key, p.make(), p.expect), wave)
        return {p.key: version for p, version in zip(wave, versions, strict=True)}

    def map(self, function: Callable[[Any], T], items: Sequence[Any]) -> list[T]:
        """Call a function with each item, in threads; the results are in order.

        If calls fail, the first error is raised after all calls have ended.
        """
        if len(items) <= 1:
            return [function(item) for item in items]
        found = self._threads(self.n_threads).map(function, items)
        for result in found:
            if isinstance(result, BaseException):
                raise result
        return found  # type: ignore[return-value]

    def map_ahead(self, function: Callable[[Any], T], items: Iterable[Any], n_ahead: int) -> Iterator[T]:
        """Call a function with each item, in threads; give the results in order, as they are asked for.

        Calls that have begun end before the iteration does, also if it ends early.

        Args:
            function: What to call.
            items: What to call it with.
            n_ahead: The most calls whose results were not taken yet.
        """
        threads, pending = self._threads(self.n_threads), deque[Future[T]]()
        try:
            for item in items:
                pending.append(threads.submit(function, item))
                if len(pending) >= n_ahead:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            wait([future for future in pending if not future.cancel()])

    def _threads(self, n_threads: int) -> BackgroundPool:
        with self._lock:
            if self._executor_pid != os.getpid():
                self._executors, self._executor_pid = {}, os.getpid()
            if n_threads not in self._executors:
                self._executors[n_threads] = BackgroundPool(n_threads, "trajstore-io")
            return self._executors[n_threads]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.display}>"


_alive: weakref.WeakSet[Storage] = weakref.WeakSet()


def _after_fork() -> None:
    for storage in list(_alive):
        storage.reset_locks()  # the thread that held one does not exist in the child


os.register_at_fork(after_in_child=_after_fork)


def check_key(key: str) -> None:
    """Refuse a key that names something outside the store.

    Raises:
        ValueError: It does.
    """
    if ".." in key.split("/") or key.startswith("/"):
        raise ValueError(f"key {key!r} leaves the store")


def check_tree(prefix: str) -> None:
    """Refuse a prefix that is the whole store, or outside it.

    Raises:
        ValueError: It is.
    """
    check_key(prefix)
    if not prefix.strip("/."):
        raise ValueError(f"prefix {prefix!r}: expected a part of the store, not all of it")


def storage_error(
    action: str, where: str, error: BaseException, secrets: Iterable[str] = (), story: str = ""
) -> StorageError:
    """A StorageError for a backend's error, without the credentials that the backend's message may quote.

    The backend's error is its cause if neither that nor what it came from shows any.
    """
    known = tuple(secrets)
    text = str(error).partition("\n\nDebug source")[0]  # of obstore
    failure = StorageError(redacted(f"can't {action} {where}: {story}{type(error).__name__}: {text}", known))
    failure.errno = getattr(error, "errno", None)
    failure.__cause__ = None if shows_secrets(error, known) else error
    failure.__suppress_context__ = True
    return failure
