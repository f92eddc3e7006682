"""RLinf's `PriorityStore`: keeps the items that the newest policy versions produced, in memory."""

from __future__ import annotations

import bisect
import itertools
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

from trajstore.arguments import check_positive

Priority = tuple[float, float]  # the oldest policy version of an item, and the mean of its versions


class PriorityStore:
    """Keeps the items of the highest priority; a full store drops the lowest. Safe to use from several threads.

    Args:
        maxsize: Number of items to keep.
    """

    def __init__(self, maxsize: int) -> None:
        check_positive("maxsize", maxsize)
        self.maxsize = maxsize
        self._items: list[tuple[Priority, int, Any]] = []  # in increasing order of (priority, number)
        self._used: set[int] = set()
        self._numbers = itertools.count()
        self._n_discarded_unused = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._items)

    def add(self, priority: Priority, data: Any) -> bool:
        """Add an item; returns False if the store is full and all its items have a higher priority.

        Among items of equal priority, the oldest is dropped first.
        """
        item = (float(priority[0]), float(priority[1])), next(self._numbers), data
        with self._lock:
            if len(self._items) >= self.maxsize:
                if item[0] < self._items[0][0]:
                    self._n_discarded_unused += 1
                    return False
                self._drop_lowest(1)
            bisect.insort(self._items, item, key=lambda kept: kept[:2])
            return True

    def topn(self, n: int) -> list[Any]:
        """Return the ``n`` items of the highest priority, highest first. They stay, and count as used."""
        check_positive("n", n)
        with self._lock:
            chosen = self._items[: -n - 1 : -1]
            self._used.update(number for _, number, _ in chosen)
            return [data for _, _, data in chosen]

    def remove_below(self, threshold: float) -> int:
        """Drop the items whose oldest version is below ``threshold``; returns how many."""
        with self._lock:
            n = bisect.bisect_left(self._items, threshold, key=lambda kept: kept[0][0])
            self._drop_lowest(n)
            return n

    def _drop_lowest(self, n: int) -> None:
        dropped = {number for _, number, _ in self._items[:n]}
        self._n_discarded_unused += len(dropped - self._used)
        self._used -= dropped
        del self._items[:n]

    def get_metric(self) -> dict[str, Any]:
        """Return the share of all steps of each version (``ratio``), and how many items were dropped unused.

        An item without ``versions`` counts as one step of its oldest version.
        """
        with self._lock:
            counts: Counter[int] = Counter()
            for priority, _, data in self._items:
                versions = data.get("versions") if isinstance(data, Mapping) else getattr(data, "versions", None)
                step_versions = [priority[0]] if versions is None else versions.reshape(-1).tolist()
                counts.update(int(version) for version in step_versions)
            total = counts.total()
            ratios: dict[Any, Any] = {version: {"ratio": n / total} for version, n in sorted(counts.items())}
            return {**ratios, "discarded_unused": self._n_discarded_unused}
