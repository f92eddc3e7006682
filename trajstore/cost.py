"""What a store costs in an object store: arithmetic with prices and counts that the caller knows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

_GB = 10**9
_DAYS = 30.44  # of a month


def _check(name: str, value: Any) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name}: expected a number of at least 0, got {value!r}")


@dataclass(frozen=True)
class Prices:
    """Prices of an object store, in one currency. Taxes, minimum durations and discounts are not in them.

    Attributes:
        name: Provider, region, class of storage, and the date of the prices; shown with every `Cost`.
        gb_month: Storing 10^9 bytes for a month.
        put_1000: 1000 requests that write, list or copy.
        get_1000: 1000 requests that read.
        gb_out: 10^9 bytes that leave to where the trainers run: 0 within one region, more to the internet.
        is_example: Whether nobody has compared them with the provider's price page; a `Cost` says so.
    """

    name: str
    gb_month: float
    put_1000: float
    get_1000: float
    gb_out: float = 0.0
    is_example: bool = False

    def __post_init__(self) -> None:
        for name in ("gb_month", "put_1000", "get_1000", "gb_out"):
            _check(name, getattr(self, name))


def _example(where: str, gb_month: float) -> Prices:
    name = f"example: {where}, US dollars, list prices as of January 2025, rounded and not checked"
    return Prices(name, gb_month, 0.005, 0.0004, is_example=True)


# Examples for readers in the same region. Prices change, and these were never compared with a price page.
EXAMPLE_PRICES = {
    "s3": _example("Amazon S3 Standard, us-east-1", 0.023),
    "gcs": _example("Google Cloud Storage Standard, us-central1", 0.020),
    "azure": _example("Azure Blob Storage Hot LRS, East US 2", 0.018),
}


@dataclass(frozen=True)
class Cost:
    """The result of `estimate_cost`, a month each.

    Attributes:
        storage: For the bytes that are stored.
        writes: For the requests of commits and refreshes.
        reads: For the requests of readers.
        transfer: For the bytes that are read.
        prices: What was multiplied.
    """

    storage: float
    writes: float
    reads: float
    transfer: float
    prices: Prices

    @property
    def total(self) -> float:
        """The sum."""
        return self.storage + self.writes + self.reads + self.transfer

    def __str__(self) -> str:
        parts = ", ".join(
            f"{getattr(self, name):.2f} {name}" for name in ("storage", "writes", "reads", "transfer")
        )
        advice = "; look up yours and pass them as Prices" if self.prices.is_example else ""
        return f"{self.total:.2f} a month ({parts}), by these prices: {self.prices.name}{advice}"


def estimate_cost(
    stored_bytes: float,
    *,
    commits_per_day: float = 0,
    puts_per_commit: float = 10,
    reads_per_day: float = 0,
    bytes_per_read: float = 128 << 10,
    refreshes_per_day: float = 0,
    disk_cache_hits: float = 0.0,
    prices: Prices | str = "s3",
) -> Cost:
    """What a store costs a month. Makes no request: all numbers are the caller's.

    ``stats()`` of buffers and readers count requests, and ``trajstore info --sizes`` shows stored bytes.

    Args:
        stored_bytes: Bytes of all objects.
        commits_per_day: Commits of all writers: 86,400 divided by ``commit_seconds``, for each.
        puts_per_commit: Requests of a commit: about one for each field, and four.
        reads_per_day: Chunks that readers miss in their caches in RAM.
        bytes_per_read: Bytes of such a chunk.
        refreshes_per_day: How often readers look for new commits; each lists the streams once.
        disk_cache_hits: Share of the reads that a disk cache answers.
        prices: Your own `Prices`; or ``"s3"``, ``"gcs"`` or ``"azure"``, which are only examples: list prices as
            of January 2025, rounded and never checked, for one region each.

    Raises:
        ValueError: A number is negative or not finite, or the prices are unknown.

    >>> cost = estimate_cost(100e9, commits_per_day=8640, reads_per_day=1e6)
    >>> round(cost.storage, 2), round(cost.writes, 2), round(cost.reads, 2)
    (2.3, 13.15, 12.18)
    """
    given: dict[str, Any] = {name: value for name, value in locals().items() if name != "prices"}
    for name, value in given.items():
        _check(name, value)
    if disk_cache_hits > 1:
        raise ValueError(f"disk_cache_hits: expected a share between 0 and 1, got {disk_cache_hits!r}")
    if isinstance(prices, str):
        if prices not in EXAMPLE_PRICES:
            raise ValueError(f"prices: expected Prices or one of {', '.join(EXAMPLE_PRICES)}, got {prices!r}")
        prices = EXAMPLE_PRICES[prices]
    n_reads = reads_per_day * (1 - disk_cache_hits) * _DAYS
    n_writes = (commits_per_day * puts_per_commit + refreshes_per_day) * _DAYS
    return Cost(
        storage=stored_bytes / _GB * prices.gb_month,
        writes=n_writes / 1000 * prices.put_1000,
        reads=n_reads / 1000 * prices.get_1000,
        transfer=n_reads * bytes_per_read / _GB * prices.gb_out,
        prices=prices,
    )
