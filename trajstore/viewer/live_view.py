"""The store as it was last read: refreshed for the page at most so often, and what was computed from it."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from trajstore.errors import StorageError
from trajstore.format.episode_table import EpisodeTable
from trajstore.format.ids import is_stream_id
from trajstore.store.checkpoints import Checkpoint, list_checkpoints
from trajstore.store.snapshot import Snapshot
from trajstore.store.store import Store

T = TypeVar("T")

LOCAL_REFRESH_S = 1.0
REMOTE_REFRESH_S = 10.0
_KEPT = 24  # results that a moment keeps, such as its plots
_KEPT_BYTES = 256 << 20  # of arrays among them


@dataclass
class Moment:
    """A snapshot with what was computed from it.

    Attributes:
        number: Rises with every change of the store that the viewer saw.
        snapshot: The snapshot.
        checkpoints: Ids of the checkpoints, also of those that are not complete yet.
    """

    number: int
    snapshot: Snapshot
    checkpoints: tuple[str, ...]
    _kept: OrderedDict[Hashable, Any] = field(default_factory=OrderedDict)
    _computing: dict[Hashable, threading.Lock] = field(default_factory=dict)
    _n_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def keep(self, key: Hashable, compute: Callable[[], T]) -> T:
        """A result for ``key``, computed once while it is among the last few that were asked for.

        Threads that ask for it at the same time wait for the first one. Large arrays are not kept for long.
        """
        with self._lock:
            computing = self._computing.setdefault(key, threading.Lock())
        with computing:
            with self._lock:
                if key in self._kept:
                    self._kept.move_to_end(key)
                    found: T = self._kept[key]
                    return found
            try:
                result = compute()
            except BaseException:
                with self._lock:
                    self._computing.pop(key, None)
                raise
            with self._lock:
                self._kept[key] = result
                self._n_bytes += _n_bytes(result)
                while len(self._kept) > _KEPT or (self._n_bytes > _KEPT_BYTES and len(self._kept) > 1):
                    oldest, dropped = self._kept.popitem(last=False)
                    self._computing.pop(oldest, None)
                    self._n_bytes -= _n_bytes(dropped)
        return result

    @property
    def episodes(self) -> EpisodeTable:
        """The episode table, made once however many threads ask for it."""
        return self.keep("table", lambda: self.snapshot.episodes)


class LiveView:
    """The newest moment of a store. Thread-safe.

    Args:
        store: The store. It is refreshed here, so give a store of its own.
        refresh_s: Least seconds between two looks at the storage; by default one for local stores, ten for others.
    """

    def __init__(self, store: Store, *, refresh_s: float | None = None) -> None:
        self._store = store
        is_remote = store.snapshot.storage.is_remote
        self.refresh_s = (REMOTE_REFRESH_S if is_remote else LOCAL_REFRESH_S) if refresh_s is None else refresh_s
        self._lock = threading.Lock()
        self._moment = Moment(1, store.snapshot, self._checkpoint_names())
        self._looked_at = time.monotonic()
        self._read: tuple[tuple[str, ...], list[Checkpoint]] | None = None  # names, and what was read
        self.problem = ""  # why the last look failed; empty if it did not

    @property
    def moment(self) -> Moment:
        return self._moment

    @property
    def url(self) -> str:
        return self._store.url

    def checkpoints(self, moment: Moment) -> list[Checkpoint]:
        """The complete checkpoints of a moment; read again only if one may have been added since the last call."""
        if self._read is not None and self._read[0] == moment.checkpoints:
            return self._read[1]
        found = list_checkpoints(moment.snapshot.storage)
        is_final = {c.id for c in found} == set(moment.checkpoints)
        self._read = (moment.checkpoints, found) if is_final else None
        return found

    def refresh(self, *, at_once: bool = False) -> Moment:
        """Look at the storage, unless that was done just now; returns the newest moment.

        If the storage fails, the last moment stays and `problem` says why.

        Args:
            at_once: Look even if that was done just now, because rows of the snapshot are known to be evicted.
        """
        with self._lock:
            if not at_once and time.monotonic() - self._looked_at < self.refresh_s:
                return self._moment
            try:
                self._look()
                self.problem = ""
            except StorageError as error:
                self.problem = str(error)
            self._looked_at = time.monotonic()
            return self._moment

    def _look(self) -> None:
        before = self._moment
        snapshot, names = self._store.refresh(), self._checkpoint_names()
        if before.snapshot.streams and not snapshot.streams:
            read_root(snapshot)
        if names != before.checkpoints or _commits(snapshot) != _commits(before.snapshot):
            self._moment = Moment(before.number + 1, snapshot, names)

    def _checkpoint_names(self) -> tuple[str, ...]:
        return tuple(filter(is_stream_id, self._store.snapshot.storage.list_names("checkpoints")))


def read_root(snapshot: Snapshot) -> bytes:
    """Return the root of a store.

    Raises:
        StorageError: It was removed since the store was opened.
    """
    try:
        return snapshot.storage.get("zarr.json")
    except FileNotFoundError as error:
        raise StorageError(f"{snapshot.storage.display}: the store was removed or moved") from error


def _n_bytes(result: object) -> int:
    return result.nbytes if isinstance(result, np.ndarray) else 0


def _commits(snapshot: Snapshot) -> list[tuple[str, str, int, bool]]:
    return [(r.id, r.folder, r.commit, r.is_sealed) for r in snapshot.streams]
