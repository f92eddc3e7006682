"""What storages at a service share: conditions on puts, lost answers, merged ranges, hedged reads."""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from trajstore.background_pool import BackgroundPool
from trajstore.errors import ConflictError
from trajstore.storage.interface import ABSENT, ANY, OWN, UNSEEN, Data, Place, check_key
from trajstore.storage.merged_ranges import grouped, merge
from trajstore.storage.request_options import N_REQUESTS, ServiceOptions
from trajstore.storage.retried_storage import RetriedStorage

_log = logging.getLogger(__name__)

SETTLE_S = 2.0  # where the server ignores conditions: seconds until the last of several creators counts


class RefusedConditionError(OSError):
    """The object is not as the put expected."""


class ServiceStorage(RetriedStorage):
    """Base class of storages at a service. A subclass makes single requests; this class makes them reliable.

    The methods of a subclass that begin with ``ask_`` make one request each, which ends after ``timeout_s`` without
    progress. They raise `FileNotFoundError`, `FileExistsError` and `RefusedConditionError`, and whatever else the
    client raises.
    """

    n_threads = N_REQUESTS

    def __init__(self, url: str, options: dict[str, Any], service: ServiceOptions) -> None:
        super().__init__(url, options, service)
        self._refuses_existing: bool | None = None  # whether the server heeds conditions on puts; None: not known
        self._hedges: BackgroundPool | None = None
        self._hedges_pid = 0

    # ---- single requests, made by subclasses -------------------------------------------------------

    def ask_bytes(self, key: str, start: int, stop: int | None, timeout_s: float) -> Data:
        """Bytes ``[start, stop)`` of an object, or all of them."""
        raise NotImplementedError

    def ask_ranges(self, key: str, ranges: Sequence[tuple[int, int]], timeout_s: float) -> Sequence[Data]:
        """Several ranges of one object, at most `ranges_at_once`, all under way at the same time."""
        raise NotImplementedError

    def ask_size(self, key: str, timeout_s: float) -> tuple[int, str]:
        """The size and the version of an object; `ANY` if versions can't be compared."""
        raise NotImplementedError

    def ask_put(self, key: str, data: bytes, expect: str, timeout_s: float) -> str:
        """Put an object whole, if it is `ANY`, `ABSENT` or, where that can be compared, of a version.

        Returns its version.
        """
        raise NotImplementedError

    def ask_names(self, prefix: str, timeout_s: float) -> list[str]:
        """Names directly below a prefix."""
        raise NotImplementedError

    def ask_tree(self, prefix: str, timeout_s: float) -> dict[str, int]:
        """Sizes of all objects below a prefix by key."""
        raise NotImplementedError

    def ask_delete(self, keys: Sequence[str], timeout_s: float) -> None:
        """Delete objects; those that do not exist are ignored."""
        raise NotImplementedError

    @property
    def compares_versions(self) -> bool:
        """Whether a put can expect a version."""
        return False

    @property
    def ranges_at_once(self) -> int:
        """How many ranges of one object one call of the client reads."""
        return 1

    @property
    def deletes_at_once(self) -> int:
        """How many objects one request deletes."""
        return 1

    # ---- reading -----------------------------------------------------------------------------------

    def get(self, key: str) -> bytes:
        return bytes(self._read(key, 0, None))

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        return bytes(self._read(key, start, stop))

    def _get_place(self, place: Place) -> Data:
        return self._read(*place)

    def _read(self, key: str, start: int, stop: int | None) -> Data:
        if start == stop:
            check_key(key)
            return b""
        if self._service.hedge_s is None:
            return self.retried("read", key, lambda timeout_s: self.ask_bytes(key, start, stop, timeout_s))
        return self.retried("read", key, lambda timeout_s: self._read_hedged(key, start, stop, timeout_s))

    def _read_hedged(self, key: str, start: int, stop: int | None, timeout_s: float) -> Data:
        pool = self._hedge_threads()
        first: Future[Data] = pool.submit(self.ask_bytes, key, start, stop, timeout_s)
        if wait([first], self._service.hedge_s).done:
            return first.result()
        both = [first, pool.submit(self.ask_bytes, key, start, stop, timeout_s)]
        done, late = wait(both, return_when=FIRST_COMPLETED)
        if all(answer.exception() is not None for answer in done):
            wait(late)
        return next((a for a in both if a.done() and a.exception() is None), first).result()

    def _hedge_threads(self) -> BackgroundPool:
        with self._lock:
            if self._hedges is None or self._hedges_pid != os.getpid():
                self._hedges, self._hedges_pid = BackgroundPool(2 * N_REQUESTS, "trajstore-hedge"), os.getpid()
            return self._hedges

    def get_many(self, keys: Sequence[str]) -> list[bytes]:
        return self.map(self.get, keys)

    def get_ranges(self, places: Sequence[Place]) -> Sequence[Data]:
        if len(places) <= 1:
            return super().get_ranges(places)
        merged, cut = merge(places)
        return cut(self._read_wave(merged))

    def _read_wave(self, places: Sequence[Place]) -> Sequence[Data]:
        """Read places that are sorted by key. Ranges of one object share a thread, which saves time."""
        if (most := self.ranges_at_once) == 1 or self._service.hedge_s is not None:
            return self.map(self._get_place, places)
        groups = list(grouped(places, most))
        found = self.map(lambda group: self._try_group(places[group]), groups)
        return self.completed(places, [data for group in found for data in group])

    def _try_group(self, places: Sequence[Place]) -> Sequence[Data | None]:
        """The bytes of several ranges of one object; None for each if one of them fails."""
        if len(places) == 1:
            return [self._get_place(places[0])]
        key, ranges = places[0][0], [(start, stop) for _, start, stop in places if stop is not None]
        check_key(key)
        found = self.tried(lambda timeout_s: self.ask_ranges(key, ranges, timeout_s))
        return [None] * len(places) if found is None else found

    def size(self, key: str) -> int:
        return self.retried("read", key, lambda timeout_s: self.ask_size(key, timeout_s)[0])

    def list_names(self, prefix: str) -> list[str]:
        return self.retried("list", prefix, lambda timeout_s: self.ask_names(prefix, timeout_s))

    def tree_sizes(self, prefix: str) -> dict[str, int]:
        return self.retried("list", prefix, lambda timeout_s: self.ask_tree(prefix, timeout_s))

    # ---- writing -----------------------------------------------------------------------------------

    def put(self, key: str, data: bytes | memoryview, expect: str = ANY) -> str:
        """One request, repeated with the same bytes until the server answers."""
        body = bytes(data)  # no copy of what is bytes already
        return self.retried("write", key, lambda timeout_s: self._put_once(key, body, expect, timeout_s))

    def _put_once(self, key: str, data: bytes, expect: str, timeout_s: float) -> str:
        # A new chunk is created, never replaced: a duplicate request that arrives late can't undo a later put.
        condition = ABSENT if expect in (ABSENT, UNSEEN, OWN) else expect
        if condition != ABSENT and not self.compares_versions:
            condition = ANY
        try:
            return self.ask_put(key, data, condition, timeout_s)
        except FileExistsError:
            return self._resolve_lost_answer(key, data, FileExistsError(f"{self.display}/{key}"), timeout_s)
        except (RefusedConditionError, FileNotFoundError) as error:
            if condition in (ANY, ABSENT) and isinstance(error, FileNotFoundError):
                raise  # no bucket
            conflict: OSError = ConflictError(
                f"{self.display}/{key} was written by another process; a stream has only one writer"
            )
            if expect == ABSENT:
                conflict = FileExistsError(f"{self.display}/{key}")
            return self._resolve_lost_answer(key, data, conflict, timeout_s, condition)

    def _resolve_lost_answer(
        self, key: str, data: bytes, conflict: OSError, timeout_s: float, expected: str = ABSENT
    ) -> str:
        """The version after a refused put, if our own earlier try succeeded and only its answer was lost.

        Otherwise another process wrote the object, and ``conflict`` is raised. If the object is as the put
        expected, the service met another request under way, and the put is asked again.
        """
        try:
            is_ours = self.get(key) == data
            version = self.ask_size(key, timeout_s)[1] if self.compares_versions else ANY
        except FileNotFoundError:
            if expected == ABSENT:
                raise InterruptedError(
                    f"{self.display}/{key}: refused as existing, but it does not exist"
                ) from None
            raise conflict from None
        if is_ours:
            return version
        if version == expected:
            raise InterruptedError(f"{self.display}/{key}: refused as changed, but it did not change") from None
        raise conflict

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_key(key)
        n = self.deletes_at_once
        waves = [keys[i : i + n] for i in range(0, len(keys), n)]
        self.map(lambda wave: self.retried("delete", wave[0], lambda t: self.ask_delete(wave, t)), waves)

    @property
    def is_exclusive(self) -> bool:
        return self._refuses_existing is not False

    def learn_conditions(self) -> None:
        if self.is_remote:
            self._heeds_conditions()

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
            return self.retried("write", key, lambda timeout_s: self._refuses_another(key, timeout_s))
        finally:
            self.delete([key])

    def _refuses_another(self, key: str, timeout_s: float) -> bool:
        try:
            self.ask_put(key, b"[]", ABSENT, timeout_s)
        except (FileExistsError, RefusedConditionError):
            return True
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
