"""What every storage does, whatever is behind it."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from trajstore.errors import StorageError

T = TypeVar("T")

ANY: Final = "*any*"  # put whatever is there
ABSENT: Final = "*absent*"  # put only where nothing is
UNSEEN: Final = "*unseen*"  # put where nothing is or our own same bytes; nobody looks yet, so it need not be atomic
OWN: Final = "*own*"  # put where nothing is or our own bytes of an earlier try, which somebody may be looking at


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
        n_threads: How many calls `map` makes at a time.
        is_remote: Whether a read is a request over the network, rather than a look into this machine's memory.
    """

    display: str
    n_threads: int
    is_remote = False

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._executor_pid = 0
        _alive.add(self)

    def get(self, key: str) -> bytes:
        """The object's bytes; FileNotFoundError where there is none."""
        raise NotImplementedError

    def get_into(self, key: str, buffer: bytearray) -> memoryview:
        """The object's bytes; read into ``buffer`` (made longer if need be) where the backend can."""
        return memoryview(self.get(key))

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        raise NotImplementedError

    def size(self, key: str) -> int:
        raise NotImplementedError

    def put(self, key: str, data: bytes, expect: str = ANY) -> str:
        """Replace the object atomically and durably; return its version.

        Args:
            key: Which object.
            data: Its new bytes.
            expect: `ANY`, `ABSENT`, `UNSEEN`, `OWN`, or the version that the last put returned.

        Raises:
            FileExistsError: ``expect`` is `ABSENT` and something else is there.
            ConflictError: ``expect`` is a version and something else is there.
        """
        raise NotImplementedError

    def put_once(self, key: str, data: bytes) -> bool:
        """Put an object where there is none; False if there is one."""
        try:
            self.put(key, data, ABSENT)
        except FileExistsError:
            return False
        return True

    def list_names(self, prefix: str) -> list[str]:
        """Names directly below a prefix, never from a cache; empty where there are none."""
        raise NotImplementedError

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; those already gone are fine."""
        raise NotImplementedError

    def list_tree(self, prefix: str) -> list[str]:
        """Keys of all objects below a prefix, in order, never from a cache; empty where there are none."""
        return sorted(self.tree_sizes(prefix))

    def tree_sizes(self, prefix: str) -> dict[str, int]:
        """Sizes of all objects below a prefix, by key, never from a cache; what goes away meanwhile is left out."""
        raise NotImplementedError

    def remove_tree(self, prefix: str) -> None:
        """Remove all objects below a prefix; that there are none is fine.

        Its ``zarr.json`` goes before all others, so whoever still finds it finds the others too.
        """
        check_tree(prefix)
        self.delete([f"{prefix}/zarr.json"])
        self.delete(self.list_tree(prefix))

    def copy(self, source_key: str, other: Storage, key: str, *, may_link: bool = False) -> None:
        """Copy an object into another storage, or to another place in this one; see `copy_many`."""
        self.copy_many([(source_key, key)], other, may_link=may_link)

    def copy_many(self, keys: Sequence[tuple[str, str]], other: Storage, *, may_link: bool = False) -> None:
        """Copy many objects in one concurrent wave; durable when it returns. What is there is replaced.

        Where both storages are one service, it makes the copies itself.

        Args:
            keys: Pairs of where an object is, and what to call it in the other storage.
            other: Where to; may be this one.
            may_link: Whether the copies may share their bytes with the objects, in a local file system. Only for
                objects that never change.

        Raises:
            FileNotFoundError: An object is not there.
        """
        other.put_many([Put(key, lambda source=source: self.get(source)) for source, key in keys])  # type: ignore[misc]

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
            if self._executor is None or self._executor_pid != os.getpid():
                self._executor = ThreadPoolExecutor(self.n_threads, thread_name_prefix="trajstore-io")
                self._executor_pid = os.getpid()
            return self._executor

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.display}>"


_alive: weakref.WeakSet[Storage] = weakref.WeakSet()


def _after_fork() -> None:
    for storage in list(_alive):
        storage._lock = threading.Lock()  # whoever held it is not here to release it


os.register_at_fork(after_in_child=_after_fork)


def check_key(key: str) -> None:
    if ".." in key.split("/") or key.startswith("/"):
        raise ValueError(f"key {key!r} leaves the store")


def check_tree(prefix: str) -> None:
    check_key(prefix)
    if not prefix.strip("/."):
        raise ValueError(f"prefix {prefix!r}: expected a part of the store, not all of it")


def failed(action: str, where: str, error: BaseException, secrets: Iterable[str] = ()) -> StorageError:
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
