"""The rows of a snapshot's streams, read through one chunk cache."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import torch

from trajstore.cache.chunk_cache import ChunkCache
from trajstore.cache.row_request import RowRequest
from trajstore.errors import ClosedError, CorruptionError, NotReadyError, SnapshotExpiredError
from trajstore.sampling.index.episode_tensors import EpisodeTensors
from trajstore.schema import Array, Schema
from trajstore.store.snapshot import Snapshot
from trajstore.store.stream_reader import ChunkError, MissingChunkError

T = TypeVar("T")

_MAX_LISTED = 5  # episodes that an error names


class CachedRows:
    """A snapshot and the cache that reads its streams. Methods are called with the assembler's lock held.

    Args:
        snapshot: The snapshot to begin with.
        index: Gives streams their numbers, and names the episodes that a damaged chunk affects.
        device: Device of the cache.
        budget: Bound of the cache's memory in bytes.
        host_budget: Bound of the memory for compressed chunks in bytes.
        kernels: Compiled loops, if they can be used.
        has_writer: Whether a writer is followed, whose steps are shown before they are committed.

    Attributes:
        snapshot: The snapshot whose streams are read.
        is_closed: Whether `close` was called.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        index: EpisodeTensors,
        device: torch.device,
        budget: int,
        host_budget: int,
        kernels: ModuleType | None,
        *,
        has_writer: bool,
    ) -> None:
        self.snapshot = snapshot
        self.budget, self.host_budget = budget, host_budget
        self.is_closed = False
        self._index = index
        self._device = device
        self._kernels = kernels
        self._has_writer = has_writer
        self._cache: ChunkCache | None = None
        self._sources: tuple[Sequence[int], int] = ((), -1)  # the arguments of the last `set_sources`
        self._last_event: Any = None  # on a GPU, the event after the last work on the cache

    @property
    def has_cache(self) -> bool:
        """Whether the cache exists: a reader makes it for the first data."""
        return self._cache is not None

    @property
    def cache(self) -> ChunkCache:
        """The cache.

        Raises:
            ClosedError: `close` was called.
            NotReadyError: There is no data yet.
        """
        if self.is_closed:
            raise ClosedError(f"the buffer that reads {self.snapshot!r} is closed")
        if self._cache is None:
            raise self.not_ready()
        return self._cache

    def not_ready(self) -> NotReadyError:
        """The error for reading before there is data."""
        where = self.snapshot.storage.display
        if self._has_writer:
            return NotReadyError(f"{where} is empty: no step was appended yet, so there is nothing to read")
        return NotReadyError(
            f"{where} was empty when this reader was created or last refreshed, so there is nothing to read; call"
            " refresh() after the first commit"
        )

    def make_cache(self, schema: Schema, live_rows: int, marks: Sequence[int]) -> None:
        """Make the cache, if it does not exist yet, with room for ``live_rows`` rows that are not committed."""
        if self._cache is None:
            budgets = self.budget, self.host_budget
            self._cache = ChunkCache(
                schema, self._device, *budgets, self.snapshot.storage, live_rows=live_rows, kernels=self._kernels
            )
            self.set_sources(marks)

    def set_sources(self, marks: Sequence[int], written: int = -1) -> None:
        """Let the cache read the snapshot's streams, from row ``marks[source]`` on.

        Pages of the source ``written`` are kept: `ChunkCache.move_live` adds their new rows.
        """
        assert self._cache is not None
        self._sources = marks, written
        readers = {reader.record.id: reader for reader in self.snapshot.readers}
        with self.access():
            self._cache.set_sources([readers.get(name) for name in self._index.numbers], marks, written)

    def close(self) -> None:
        """Free the memory of the cache; nothing can be read afterwards."""
        self._cache, self.is_closed = None, True

    @contextlib.contextmanager
    def access(self) -> Iterator[None]:
        """Use the cache in this block.

        On a GPU the block runs after all earlier work on the cache, whatever CUDA stream did it: the assembler's
        lock orders work on the host only.

        Raises:
            CorruptionError: A chunk is damaged or lost; names the episodes in it.
            SnapshotExpiredError: A chunk was evicted.
        """
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        if stream is not None and self._last_event is not None:
            stream.wait_event(self._last_event)
        try:
            yield
        except ChunkError as error:
            raise self._explained(error) from error
        finally:
            if stream is not None:
                self._last_event = stream.record_event()

    def gather(self, wanted: Mapping[str, RowRequest], outs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Read rows by output key, into ``outs`` where it has the key."""
        return self._read(lambda: self.cache.gather(wanted, outs))

    def pin(self, wanted: Iterable[RowRequest]) -> None:
        """Keep the chunks of rows in the cache."""
        requests = list(wanted)
        self._read(lambda: self.cache.pin(requests))

    def load(self, wanted: Iterable[RowRequest]) -> None:
        """Read the chunks of rows ahead of time."""
        requests = list(wanted)
        self._read(lambda: self.cache.load(requests))

    def _read(self, read: Callable[[], T]) -> T:
        """Read through the cache; if a stream was packed and its original is gone, read it from the packed one.

        Packing moves no row, so the index, and what was drawn from it, stay as they are.
        """
        try:
            with self.access():
                return read()
        except SnapshotExpiredError:
            moved = self.snapshot.relocated()
            if moved is self.snapshot:
                raise
        self.snapshot = moved
        self.set_sources(*self._sources)
        with self.access():
            return read()

    def _explained(self, error: ChunkError) -> Exception:
        """The error to raise instead: one that names the affected episodes, or says that the rows were evicted."""
        if isinstance(error, MissingChunkError):
            reason = self.snapshot.reason(error, error.stop - 1)
            if not isinstance(reason, CorruptionError):
                return reason
        episodes = self._episodes_in(error.stream, error.start, error.stop).tolist()
        more = f" and {len(episodes) - _MAX_LISTED} more" if len(episodes) > _MAX_LISTED else ""
        return CorruptionError(f"{error}; it holds steps of episodes {episodes[:_MAX_LISTED]}{more}")

    def _episodes_in(self, stream: str, start: int, stop: int) -> Array:
        """Numbers of the episodes that have rows between ``start`` and ``stop`` of a stream; reads all spans."""
        index, source = self._index, self._index.numbers[stream] + 1
        rows = index.span_row.host  # evicted spans hold any value, but lie in no chunk that is read
        ends = rows + np.diff(np.append(index.span_logical.host, index.n_rows))
        spans = np.flatnonzero((index.span_source.host == source) & (rows < stop) & (ends > start))
        entries = np.unique(np.searchsorted(index.logical.host, index.span_logical.host[spans], side="right") - 1)
        episodes: Array = index.episode.host[entries]
        return episodes

    def stats(self) -> dict[str, Any]:
        """Counters and sizes of the cache."""
        cache = self._cache
        figures = asdict(cache.stats) if cache else {}
        return figures | {
            "cache_bytes": cache.nbytes if cache else 0,
            "host_cache_bytes": cache.tier.nbytes if cache else 0,
        }
