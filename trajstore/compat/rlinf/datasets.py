"""Endless batches from a replay buffer; optionally, half of each batch comes from demonstrations."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset

from trajstore.arguments import check_positive
from trajstore.compat.rlinf.buffer import TrajectoryReplayBuffer
from trajstore.compat.rlinf.field_paths import from_paths, to_paths
from trajstore.errors import DataError, NotReadyError

Batch = dict[str, Any]

_POLL_S = 0.05  # seconds between checks whether the buffers are ready


class ReplayBufferDataset(IterableDataset[Batch]):
    """Yields batches without end; waits until both buffers are ready.

    Args:
        replay_buffer: The buffer to sample from.
        demo_buffer: The buffer of demonstrations, from which half of every batch comes; of an odd batch size, the
            smaller half.
        batch_size: Transitions per batch.
        min_replay_buffer_size: Trajectories to wait for.
        min_demo_buffer_size: Trajectories of demonstrations to wait for.
        prefetch_size: Accepted, and ignored: RLinf's workers give it to this class, too.
    """

    def __init__(
        self,
        replay_buffer: TrajectoryReplayBuffer,
        demo_buffer: TrajectoryReplayBuffer | None,
        batch_size: int,
        min_replay_buffer_size: int,
        min_demo_buffer_size: int,
        prefetch_size: int | None = None,
    ) -> None:
        check_positive("batch_size", batch_size)
        if demo_buffer is not None and batch_size < 2:
            raise ValueError("batch_size: expected at least 2, as half of it comes from the demonstrations, got 1")
        self._parts = [(replay_buffer, batch_size, min_replay_buffer_size)]
        if demo_buffer is not None:
            n_demos = batch_size // 2
            if demo_buffer.seed == replay_buffer.seed:
                demo_buffer.draw_apart()
            self._parts = [
                (replay_buffer, batch_size - n_demos, min_replay_buffer_size),
                (demo_buffer, n_demos, min_demo_buffer_size),
            ]
        self._is_closed = threading.Event()

    def __iter__(self) -> Iterator[Batch]:
        while not self._is_closed.is_set():
            batch = self._next()
            if batch is None:
                self._is_closed.wait(_POLL_S)
            else:
                yield batch

    def _next(self) -> Batch | None:
        """Return a batch; None while the buffers are not ready."""
        if not self._is_ready():
            return None
        try:
            return self._batch()
        except NotReadyError:  # another thread just cleared a buffer, and may have filled it again
            return self._batch() if self._is_ready() else None

    def _is_ready(self) -> bool:
        return all(buffer.is_ready(n) for buffer, _, n in self._parts)

    def _batch(self) -> Batch:
        batches = [buffer.sample(n) for buffer, n, _ in self._parts]
        return batches[0] if len(batches) == 1 else concat_batch(*batches)

    def close(self) -> None:
        """End the iteration."""
        self._is_closed.set()


class PreloadReplayBufferDataset(ReplayBufferDataset):
    """A `ReplayBufferDataset` whose batches a thread prepares in advance.

    An error in the thread is raised by the iteration.

    Args:
        replay_buffer: The buffer to sample from.
        demo_buffer: The buffer of demonstrations; see `ReplayBufferDataset`.
        batch_size: Transitions per batch.
        min_replay_buffer_size: Trajectories to wait for.
        min_demo_buffer_size: Trajectories of demonstrations to wait for.
        prefetch_size: Number of batches to prepare in advance.
    """

    def __init__(
        self,
        replay_buffer: TrajectoryReplayBuffer,
        demo_buffer: TrajectoryReplayBuffer | None,
        batch_size: int,
        min_replay_buffer_size: int,
        min_demo_buffer_size: int,
        prefetch_size: int = 5,
    ) -> None:
        super().__init__(replay_buffer, demo_buffer, batch_size, min_replay_buffer_size, min_demo_buffer_size)
        check_positive("prefetch_size", prefetch_size)
        self._ready: queue.Queue[Batch | BaseException] = queue.Queue(prefetch_size)
        self._thread: threading.Thread | None = None

    def __iter__(self) -> Iterator[Batch]:
        if self._thread is None:
            self._thread = threading.Thread(target=self._produce, name="rlinf-preload", daemon=True)
            self._thread.start()
        while not self._is_closed.is_set():
            try:
                batch = self._ready.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            if isinstance(batch, BaseException):
                self._put(batch)  # the next iteration raises it again
                raise batch
            yield batch

    def _produce(self) -> None:
        try:
            for batch in super().__iter__():
                self._put(batch)
        except BaseException as error:
            self._put(error)

    def _put(self, item: Batch | BaseException) -> None:
        while not self._is_closed.is_set():
            try:
                return self._ready.put(item, timeout=_POLL_S)
            except queue.Full:
                continue
        return None

    def close(self) -> None:
        """End the iteration and the thread."""
        super().close()
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def concat_batch(first: Batch, second: Batch) -> Batch:
    """Concatenate two batches.

    Raises:
        DataError: Their fields differ.
    """
    left, right = to_paths(first), to_paths(second)
    if odd := sorted(left.keys() ^ right.keys()):
        where = "the first" if odd[0] in left else "the second"
        raise DataError(f"batches: '{odd[0]}' is only in {where} of the two")
    return from_paths({path: torch.cat([leaf, right[path]]) for path, leaf in left.items()})


def replay_buffer_collate_fn(batch: list[Batch]) -> Batch:
    """Return the only batch of a list: the ``collate_fn`` of a DataLoader with ``batch_size=1``."""
    return batch[0]
