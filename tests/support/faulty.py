"""A storage that counts its calls and fails, blocks or dies at the ones that a plan chooses."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

import trajstore.store.store
from trajstore.errors import StorageError
from trajstore.storage import ANY, LocalStorage, Put, Storage, open_storage

T = TypeVar("T")


class Died(BaseException):
    """The process is gone: whoever catches `Exception` does not catch this."""


@dataclass(frozen=True)
class Call:
    """One storage call; numbers count from 1 in the order in which the calls are made."""

    number: int
    action: str
    key: str


class Plan:
    """What happens at each call; by default nothing."""

    def before(self, call: Call) -> None:
        """Runs before the call has any effect."""

    def after(self, call: Call) -> None:
        """Runs once the call has had its effect, before its caller learns of it."""


@dataclass(frozen=True)
class FailOnce(Plan):
    """Call ``at`` raises ``error``, without its effect or (a lost answer) with it."""

    at: int
    is_after: bool
    error: Callable[[], Exception]

    def before(self, call: Call) -> None:
        if call.number == self.at and not self.is_after:
            raise self.error()

    def after(self, call: Call) -> None:
        if call.number == self.at and self.is_after:
            raise self.error()


@dataclass(frozen=True)
class DieAt(Plan):
    """The process is gone from call ``at`` on, which itself still has its effect if ``is_after``."""

    at: int
    is_after: bool

    def before(self, call: Call) -> None:
        if call.number > self.at or (call.number == self.at and not self.is_after):
            raise Died(f"before {call}")

    def after(self, call: Call) -> None:
        if call.number == self.at:
            raise Died(f"after {call}")


class FailWhile(Plan):
    """Calls fail as long as ``error`` is set and the call is one of ``actions``."""

    def __init__(self, actions: Sequence[str] = ("put",)) -> None:
        self.error: Callable[[], Exception] | None = None
        self.n_failed = 0
        self._actions = actions

    def before(self, call: Call) -> None:
        if self.error is not None and call.action in self._actions:
            self.n_failed += 1
            raise self.error()


class BlockPuts(Plan):
    """Puts wait while ``gate`` is clear; ``reached`` says that one waits."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.reached = threading.Event()

    def before(self, call: Call) -> None:
        if call.action == "put" and not self.gate.is_set():
            self.reached.set()
            assert self.gate.wait(60), "nobody opened the gate"


def storage_error(code: int) -> Callable[[], Exception]:
    """Makes what a backend raises for an error number, as a fresh object each time."""

    def make() -> Exception:
        failure = StorageError(f"can't write: {os.strerror(code)}")
        failure.errno = code
        return failure

    return make


def server_error() -> Exception:
    return StorageError("can't write: 500 Internal Server Error")


no_space = storage_error(errno.ENOSPC)
no_access = storage_error(errno.EACCES)
broken = storage_error(errno.EIO)


class FaultyStorage(Storage):
    """Delegates to ``inner`` call by call, as ``plan`` lets it.

    Waves run one item after the other so that call numbers are the same in every run; like the real ones they
    go through to their end and raise the first error then. ``is_reversed`` runs them from the last item: in a
    real wave any item may be first.

    Attributes:
        calls: Every call made so far.
    """

    n_threads = 1

    def __init__(self, inner: Storage, plan: Plan | None = None, *, is_reversed: bool = False) -> None:
        super().__init__()
        self.display = inner.display
        self.calls: list[Call] = []
        self.plan = plan or Plan()
        self._inner = inner
        self._is_reversed = is_reversed
        self._calls_lock = threading.Lock()

    def n_calls(self, action: str, key_part: str = "") -> int:
        """How many calls of one kind were made, on keys that contain ``key_part``."""
        return sum(call.action == action and key_part in call.key for call in self.calls)

    def get(self, key: str) -> bytes:
        return self._call("get", key, lambda: self._inner.get(key))

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        return self._call("get_range", key, lambda: self._inner.get_range(key, start, stop))

    def size(self, key: str) -> int:
        return self._call("size", key, lambda: self._inner.size(key))

    def put(self, key: str, data: bytes, expect: str = ANY) -> str:
        return self._call("put", key, lambda: self._inner.put(key, data, expect))

    def list_names(self, prefix: str) -> list[str]:
        return self._call("list_names", prefix, lambda: self._inner.list_names(prefix))

    def tree_sizes(self, prefix: str) -> dict[str, int]:
        return self._call("tree_sizes", prefix, lambda: self._inner.tree_sizes(prefix))

    def remove_tree(self, prefix: str) -> None:
        if isinstance(self._inner, LocalStorage):  # at once; elsewhere object by object
            self._call("remove_tree", prefix, lambda: self._inner.remove_tree(prefix))
        else:
            super().remove_tree(prefix)

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._call("delete", key, lambda key=key: self._inner.delete([key]))  # type: ignore[misc]

    def put_many(self, puts: Iterable[Put]) -> dict[str, str]:
        wave = list(puts)
        versions = self.map(lambda put: self.put(put.key, put.make(), put.expect), wave)
        return {put.key: version for put, version in zip(wave, versions, strict=True)}

    def map(self, function: Callable[[Any], T], items: Sequence[Any]) -> list[T]:
        done: dict[int, T] = {}
        errors: list[BaseException] = []
        for i in reversed(range(len(items))) if self._is_reversed else range(len(items)):
            try:
                done[i] = function(items[i])
            except BaseException as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return [done[i] for i in range(len(items))]

    def _call(self, action: str, key: str, effect: Callable[[], T]) -> T:
        with self._calls_lock:
            call = Call(len(self.calls) + 1, action, key)
            self.calls.append(call)
        self.plan.before(call)
        try:
            return effect()
        finally:
            self.plan.after(call)  # a refusal may be the answer that is lost


@contextlib.contextmanager
def through(storage: Storage) -> Iterator[Storage]:
    """Let `trajstore.create` and `trajstore.open` go through this storage inside the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trajstore.store.store, "open_storage", lambda *_, **__: storage)
        yield storage


def real_storage(url: str, options: Mapping[str, Any] | None = None) -> Storage:
    """The storage at a URL; local puts are not synced, which only a power cut would show."""
    return open_storage(url, options, fsync=False)
