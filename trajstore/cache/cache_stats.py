"""Counters of the chunk cache, reported by ``stats()``."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class CacheStats:
    """Totals since the cache was created.

    Attributes:
        hits: Pages that a batch needed and that were resident. Columns that are resident as a whole are not checked
            and count no hits.
        misses: Pages that had to be decoded.
        evictions: Pages that were dropped to make room for others.
        bytes_read: Bytes of encoded chunks read from storage.
        bytes_decoded: Bytes of decoded chunks.
        host_hits: Chunks found in the tier of compressed chunks.
        n_parts: Times that a column had fewer slots than the pages a batch needed of it, so that the batch was
            assembled in parts.
        n_syncs: Batches for which the host waited for the device to learn which rows they need.
        seconds: Time spent planning (which pages are missing), loading them, and gathering rows.
    """

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    bytes_read: int = 0
    bytes_decoded: int = 0
    host_hits: int = 0
    n_parts: int = 0
    n_syncs: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: {"plan": 0.0, "load": 0.0, "gather": 0.0})
