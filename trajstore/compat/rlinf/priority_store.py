"""What was made by the newest policies, kept while there is room."""

from __future__ import annotations

import bisect
import itertools
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

from trajstore.arguments import check_positive

Priority = tuple[float, float]  # the oldest version of what was made, and the mean


class PriorityStore:
    """Keeps the items of the highest priority; what is full drops the lowest. Safe to use from several threads.

    Args:
        maxsize: How many.
    """

    def __init__(self, maxsize: int) -> None:
        check_positive("maxsize", maxsize)
        self.maxsize = maxsize
        self._items: list[tuple[Priority, int, Any]] = []  # rising
        self._used: set[int] = set()
        self._numbers = itertools.count()
        self._n_discarded_unused = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._items)

    def add(self, priority: Priority, data: Any) -> bool:
        """Keep an item; False where there is no room and all others are higher. Of equals the oldest goes first."""
        item = (float(priority[0]), float(priority[1])), next(self._numbers), data
        with self._lock:
            if len(self._items) >= self.maxsize:
                if item[0] < self._items[0][0]:
                    self._n_discarded_unused += 1
                    return False
                self._forget(1)
            bisect.insort(self._items, item, key=lambda kept: kept[:2])
            return True

    def topn(self, n: int) -> list[Any]:
        """Items of the highest priority, highest first; they stay, and count as used."""
        check_positive("n", n)
        with self._lock:
            chosen = self._items[: -n - 1 : -1]
            self._used.update(number for _, number, _ in chosen)
            return [data for _, _, data in chosen]

    def remove_below(self, threshold: float) -> int:
        """Drop the items with something older than a version; returns how many."""
        with self._lock:
            n = bisect.bisect_left(self._items, threshold, key=lambda kept: kept[0][0])
            self._forget(n)
            return n

    def _forget(self, n: int) -> None:
        gone = {number for _, number, _ in self._items[:n]}
        self._n_discarded_unused += len(gone - self._used)
        self._used -= gone
        del self._items[:n]

    def get_metric(self) -> dict[str, Any]:
        """What part of all steps each version made (``ratio``), and how many items went without use.

        Items without ``versions`` count as one step of their oldest version.
        """
        with self._lock:
            counts: Counter[int] = Counter()
            for priority, _, data in self._items:
                versions = data.get("versions") if isinstance(data, Mapping) else getattr(data, "versions", None)
                made = [priority[0]] if versions is None else versions.reshape(-1).tolist()
                counts.update(int(version) for version in made)
            total = counts.total()
            ratios: dict[Any, Any] = {version: {"ratio": n / total} for version, n in sorted(counts.items())}
            return {**ratios, "discarded_unused": self._n_discarded_unused}
