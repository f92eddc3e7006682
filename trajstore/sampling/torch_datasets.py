"""Datasets for torch's DataLoader, with worker processes that are forked or spawned.

Every process opens the snapshot itself and has its own cache. Workers cost one copy of every batch between
processes; inside one process, `Reader.batches` with ``prefetch`` does the same without that copy.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from trajstore.arguments import parse_bytes
from trajstore.sampling.batch_iterator import BatchIterator
from trajstore.sampling.batches.batch_assembler import BatchAssembler, Where
from trajstore.sampling.batches.outputs import Batch, flat_outputs, to_batch
from trajstore.sampling.draws import Draws, DrawScope, EpochDraws, RandomDraws
from trajstore.sampling.rng import CounterRng
from trajstore.sampling.windows import Windows
from trajstore.schema import nest
from trajstore.store.snapshot import Snapshot
from trajstore.store.store import Store, check_is_store

_CPU = torch.device("cpu")


class _ProcessAssembler:
    """A snapshot, and an assembler of it that every process creates for itself."""

    def __init__(self, store: Store | Snapshot, cache_bytes: int | str) -> None:
        check_is_store(store)
        self.snapshot = store.snapshot if isinstance(store, Store) else store
        self._budget = parse_bytes(cache_bytes, "cache_bytes")
        self._assembler: BatchAssembler | None = None
        self._pid = 0

    @property
    def assembler(self) -> BatchAssembler:
        """The assembler of this process."""
        if self._assembler is None or self._pid != os.getpid():
            self._assembler = BatchAssembler(self.snapshot, _CPU, self._budget, self._budget)
            self._pid = os.getpid()
        return self._assembler

    def __getstate__(self) -> dict[str, Any]:
        return {"snapshot": self.snapshot, "_budget": self._budget, "_assembler": None, "_pid": 0}


class BatchDataset(IterableDataset[Batch]):
    """An iterable dataset of whole batches; pass it to a DataLoader with ``batch_size=None``.

    By default it is endless and draws with replacement; every worker has its own random number generator. With
    ``epoch=True`` it returns every window once, workers share the batches of an epoch, and every new iteration is
    another epoch.

    Not thread-safe: iterate in one thread. It can be pickled and forked; each process opens the snapshot itself.

    Args:
        store: The store as it is now, or one of its snapshots.
        batch_size: The number of windows in a batch.
        windows: Which windows, and which fields.
        epoch: Return every window once, rather than draw with replacement.
        shuffle: Epochs in random order; otherwise in order of arrival.
        drop_last: Leave out a last batch that is not full.
        where: A function of the episode table that returns one bool per episode: use only episodes with True. If
            workers are spawned, it must be possible to pickle it.
        seed: Seed of the draws.
        cache_bytes: Limit of the memory for decoded chunks in each process, and the same again for compressed ones.
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
        self._process = _ProcessAssembler(store, cache_bytes)
        self._batch_size, self._windows = batch_size, windows
        self._epoch, self._shuffle, self._drop_last, self._where = epoch, shuffle, drop_last, where
        self._rng = CounterRng(seed)
        self._n_begun = 0

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        part, n_parts = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        draws = self._draws(part, n_parts)
        self._n_begun += 1
        with BatchIterator(self._process.assembler, draws, as_tensordict=False) as batches:
            yield from batches

    def _draws(self, part: int, n_parts: int) -> Draws:
        """The draws of one of ``n_parts`` workers."""
        assembler, rng = self._process.assembler, CounterRng(self._rng.seed, self._n_begun << 32)
        if self._epoch:
            with assembler.lock:
                return EpochDraws(
                    assembler,
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
        return RandomDraws(assembler, self._batch_size, self._windows, DrawScope(self._where), rng.fork())

    def set_epoch(self, n: int) -> None:
        """Set the number of the next epoch.

        Call it before every epoch if workers end with the epoch (no ``persistent_workers``): new workers start
        counting from this number.
        """
        self._n_begun = n


class WindowDataset(Dataset[Batch]):
    """Single windows by number, in order of arrival, for DataLoaders that have a sampler.

    A DataLoader requests all windows of a batch at once (``__getitems__``), so each chunk is read once per batch.
    An item is a nested dict of tensors without the batch axis.

    Not thread-safe. It can be pickled and forked; each process opens the snapshot itself.

    Args:
        store: The store as it is now, or one of its snapshots.
        windows: Which windows, and which fields.
        cache_bytes: Limit of the memory for decoded chunks in each process, and the same again for compressed ones.

    Raises:
        ValueError: ``windows.weight`` is not ``"window"``.
    """

    def __init__(self, store: Store | Snapshot, windows: Windows, *, cache_bytes: int | str = "1GiB") -> None:
        if windows.weight != "window":
            raise ValueError(
                f"weight={windows.weight!r}: items are windows, which the DataLoader's sampler chooses; use"
                " weight='window'"
            )
        self._process = _ProcessAssembler(store, cache_bytes)
        self._windows = windows

    def __len__(self) -> int:
        return self._process.assembler.kind(self._windows).starts.total

    def __getitem__(self, number: int) -> Batch:
        if not -len(self) <= number < len(self):
            raise IndexError(f"window {number}: the dataset has {len(self)} windows")
        return self.__getitems__([number % len(self)])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Batch]:
        """Several windows, each as a nested dict without the batch axis."""
        flat = flat_outputs(self.batch(torch.as_tensor(numbers, dtype=torch.int64)))
        return [nest({key: value[i] for key, value in flat.items()}) for i in range(len(numbers))]

    def batch(self, numbers: torch.Tensor) -> Batch:
        """Several windows as one batch."""
        assembler = self._process.assembler
        with assembler.lock:
            kind = assembler.kind(self._windows)
            drawn = kind.starts.locate(numbers, CounterRng(0))
            batch: Batch = to_batch(assembler.read_batch(kind, kind.plan(drawn), {}), as_tensordict=False)
            return batch
