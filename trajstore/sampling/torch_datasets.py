"""Datasets for torch's DataLoader, with worker processes that are forked or spawned.

Every process opens the snapshot itself and has a cache of its own. Workers cost a copy of every batch between
processes; within one process a reader's `batches` with prefetch does the same without.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from trajstore.arguments import parse_bytes
from trajstore.sampling.batch_assembler import BatchAssembler, Where
from trajstore.sampling.batch_iterator import BatchIterator
from trajstore.sampling.draws import Draws, DrawScope, EpochDraws, RandomDraws
from trajstore.sampling.outputs import flat_outputs, to_batch
from trajstore.sampling.rng import CounterRng
from trajstore.sampling.window_starts import DrawnWindows
from trajstore.sampling.windows import Windows
from trajstore.schema import nest
from trajstore.store.snapshot import Snapshot
from trajstore.store.store import Store

_CPU = torch.device("cpu")


class _Opened:
    """A snapshot, and what this process has made of it; another process makes its own."""

    def __init__(self, store: Store | Snapshot, cache_bytes: int | str) -> None:
        self.snapshot = store.snapshot if isinstance(store, Store) else store
        self._budget = parse_bytes(cache_bytes, "cache_bytes")
        self._source: BatchAssembler | None = None
        self._pid = 0

    @property
    def source(self) -> BatchAssembler:
        if self._source is None or self._pid != os.getpid():
            self._source, self._pid = BatchAssembler(self.snapshot, _CPU, self._budget, self._budget), os.getpid()
        return self._source

    def __getstate__(self) -> dict[str, Any]:
        return {"snapshot": self.snapshot, "_budget": self._budget, "_source": None, "_pid": 0}


class BatchDataset(IterableDataset[Any]):
    """Whole batches: pass it to a DataLoader with ``batch_size=None``.

    Without an epoch it has no end, and every worker draws from a generator of its own. With one, it gives every
    window once, the workers share its batches, and iterating again begins another.

    Args:
        store: The store, as it is now, or a snapshot.
        batch_size: Windows in a batch.
        windows: Which, and what comes with them.
        epoch: Give every window once, rather than draw with replacement.
        shuffle: Epochs in random order; else in order of arrival.
        drop_last: Leave out a last batch that is not full.
        where: Only from episodes that this function of the episode table says True for; where workers are spawned
            it must be one that can be pickled.
        seed: Of the draws.
        cache_bytes: Bound of the memory for decoded chunks, in each process; as much again for compressed ones.
    """

    def __init__(
        self,
        store: Store | Snapshot,
        batch_size: int,
        windows: Windows,
        *,
        epoch: bool = False,
        shuffle: bool = True,
        drop_last: bool = False,
        where: Where | None = None,
        seed: int = 0,
        cache_bytes: int | str = "1GiB",
    ) -> None:
        super().__init__()
        self._opened = _Opened(store, cache_bytes)
        self._batch_size, self._windows = batch_size, windows
        self._epoch, self._shuffle, self._drop_last, self._where = epoch, shuffle, drop_last, where
        self._rng = CounterRng(seed)
        self._n_begun = 0

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        part, n_parts = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        draws = self._draws(part, n_parts)
        self._n_begun += 1
        with BatchIterator(self._opened.source, draws, as_tensordict=False) as batches:
            yield from batches

    def _draws(self, part: int, n_parts: int) -> Draws:
        rng = CounterRng(self._rng.seed, self._n_begun << 32)
        if self._epoch:
            with self._opened.source.lock:
                return EpochDraws(
                    self._opened.source,
                    self._batch_size,
                    self._windows,
                    self._where,
                    rng.fork(),
                    shuffle=self._shuffle,
                    drop_last=self._drop_last,
                    part=part,
                    n_parts=n_parts,
                )
        rng.take(part)
        return RandomDraws(self._opened.source, self._batch_size, self._windows, DrawScope(self._where), rng.fork())

    def set_epoch(self, n: int) -> None:
        """Say which epoch begins next; needed where workers end with every epoch (no ``persistent_workers``)."""
        self._n_begun = n


class WindowDataset(Dataset[Any]):
    """Single windows by number, in order of arrival; for DataLoaders with a sampler of their own.

    A DataLoader asks for all windows of a batch at once (``__getitems__``), so each chunk is read once a batch.
    """

    def __init__(self, store: Store | Snapshot, windows: Windows, *, cache_bytes: int | str = "1GiB") -> None:
        if windows.weight != "window":
            raise ValueError(
                f"weight={windows.weight!r}: items are windows, which the DataLoader's sampler chooses"
            )
        self._opened = _Opened(store, cache_bytes)
        self._windows = windows

    def __len__(self) -> int:
        return self._opened.source.kind(self._windows).starts.total

    def __getitem__(self, number: int) -> Any:
        if not -len(self) <= number < len(self):
            raise IndexError(f"window {number} of {len(self)}")
        return self.__getitems__([number % len(self)])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """Several windows, each as a nested dict without the batch axis."""
        flat = flat_outputs(self.batch(torch.as_tensor(numbers, dtype=torch.int64)))
        return [nest({key: value[i] for key, value in flat.items()}) for i in range(len(numbers))]

    def batch(self, numbers: torch.Tensor) -> Mapping[str, Any]:
        """Several windows as one batch."""
        source = self._opened.source
        with source.lock:
            kind = source.kind(self._windows)
            draw: DrawnWindows = kind.starts.locate(numbers, CounterRng(0))
            batch: Mapping[str, Any] = to_batch(source.read_batch(kind, kind.plan(draw), {}), as_tensordict=False)
            return batch
