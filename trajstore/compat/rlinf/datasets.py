"""Endless batches from a replay buffer, half of them from demonstrations where there are any."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset

from trajstore.arguments import check_positive
from trajstore.compat.rlinf.buffer import TrajectoryReplayBuffer
from trajstore.compat.rlinf.names import flat, nested
from trajstore.errors import DataError, NotReadyError

Batch = dict[str, Any]

_LOOK_S = 0.05  # how often to look whether there is enough to sample from


class ReplayBufferDataset(IterableDataset[Batch]):
    """Batches without an end; waits until both buffers are ready.

    Args:
        replay_buffer: What to sample from.
        demo_buffer: Half of every batch comes from here; of an odd number, the smaller half.
        batch_size: Of a batch.
        min_replay_buffer_size: Trajectories to wait for.
        min_demo_buffer_size: The same for the demonstrations.
        other: Accepted, and without a meaning.
    """

    def __init__(
        self,
        replay_buffer: TrajectoryReplayBuffer,
        demo_buffer: TrajectoryReplayBuffer | None,
        batch_size: int,
        min_replay_buffer_size: int,
        min_demo_buffer_size: int,
        **other: Any,
    ) -> None:
        check_positive("batch_size", batch_size)
        if demo_buffer is not None and batch_size < 2:
            raise ValueError("batch_size: half of it comes from the demonstrations; expected at least 2, got 1")
        self._sources = [(replay_buffer, batch_size, min_replay_buffer_size)]
        if demo_buffer is not None:
            n_demos = batch_size // 2
            if demo_buffer.seed == replay_buffer.seed:
                demo_buffer.draw_apart()
            self._sources = [
                (replay_buffer, batch_size - n_demos, min_replay_buffer_size),
                (demo_buffer, n_demos, min_demo_buffer_size),
            ]
        self._is_closed = threading.Event()

    def __iter__(self) -> Iterator[Batch]:
        while not self._is_closed.is_set():
            batch = self._next()
            if batch is None:
                self._is_closed.wait(_LOOK_S)
            else:
                yield batch

    def _next(self) -> Batch | None:
        """A batch; None while there is not enough to sample from."""
        if not self._is_ready():
            return None
        try:
            return self._batch()
        except NotReadyError:  # somebody has cleared a buffer just now, and may have filled it again
            return self._batch() if self._is_ready() else None

    def _is_ready(self) -> bool:
        return all(buffer.is_ready(n) for buffer, _, n in self._sources)

    def _batch(self) -> Batch:
        batches = [buffer.sample(n) for buffer, n, _ in self._sources]
        return batches[0] if len(batches) == 1 else concat_batch(*batches)

    def close(self) -> None:
        """End the iteration."""
        self._is_closed.set()


class PreloadReplayBufferDataset(ReplayBufferDataset):
    """The same, with batches made ahead by a thread. What goes wrong there is raised to whoever asks for a batch.

    Args:
        given: As for `ReplayBufferDataset`.
        prefetch_size: How many batches.
        named: As for `ReplayBufferDataset`.
    """

    def __init__(self, *given: Any, prefetch_size: int = 5, **named: Any) -> None:
        super().__init__(*given, **named)
        check_positive("prefetch_size", prefetch_size)
        self._ready: queue.Queue[Batch | BaseException] = queue.Queue(prefetch_size)
        self._thread: threading.Thread | None = None

    def __iter__(self) -> Iterator[Batch]:
        if self._thread is None:
            self._thread = threading.Thread(target=self._produce, name="rlinf-preload", daemon=True)
            self._thread.start()
        while not self._is_closed.is_set():
            try:
                batch = self._ready.get(timeout=_LOOK_S)
            except queue.Empty:
                continue
            if isinstance(batch, BaseException):
                self._put(batch)  # for whoever asks next
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
                return self._ready.put(item, timeout=_LOOK_S)
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
    """The rows of two batches, one after the other.

    Raises:
        DataError: They have not the same fields.
    """
    mine, others = flat(first), flat(second)
    if odd := sorted(mine.keys() ^ others.keys()):
        where = "the first" if odd[0] in mine else "the second"
        raise DataError(f"batches: '{odd[0]}' is only in {where} of the two")
    return nested({path: torch.cat([leaf, others[path]]) for path, leaf in mine.items()})


def replay_buffer_collate_fn(batch: list[Batch]) -> Batch:
    """For a DataLoader with ``batch_size=1``: the batch itself."""
    return batch[0]
