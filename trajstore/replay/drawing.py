"""The sampling side of a buffer: pacing, redraws after evictions elsewhere, and iterators in checkpoints."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trajstore.errors import SnapshotExpiredError
from trajstore.replay.pacing import SamplesPerInsert
from trajstore.replay.session_state import as_tensors
from trajstore.replay.turns import TurnTaking
from trajstore.sampling.batch_iterator import BatchIterator
from trajstore.sampling.batches.outputs import Batch
from trajstore.sampling.reader import Reader

_MAX_REDRAWS = 8


class Drawing:
    """Draws batches for a buffer; safe to use from several threads.

    Args:
        reader: What draws and reads.
        pace: Keeps the ratio of samples to inserts.
        turns: Lets appending threads give way.
        refresh: Shows what other sessions have committed or evicted.
        saved: States of the iterators of a checkpoint, in the order in which they were created.
    """

    def __init__(
        self,
        reader: Reader,
        pace: SamplesPerInsert | None,
        turns: TurnTaking,
        refresh: Callable[[], None],
        saved: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._reader = reader
        self._pace = pace
        self._turns = turns
        self._refresh = refresh
        self._iterators: list[weakref.ref[BatchIterator]] = []
        self._saved = list(saved)
        self.n_sampled = self.n_redrawn = 0
        self._counting = threading.Lock()

    def sample(self, batch_size: int, draw: Callable[[], Batch]) -> Batch:
        """Wait until the pace allows a batch, then draw it. A draw that raises counts as no sample."""
        self.admit(batch_size)
        self._turns.begin_batch()
        try:
            return self._drawn(draw)
        except BaseException:
            self._count(-batch_size)
            if self._pace is not None:
                self._pace.cancel_sample(batch_size)
            raise
        finally:
            self._turns.end_batch()

    @property
    def is_paced(self) -> bool:
        """Whether batches may have to wait for appends."""
        return self._pace is not None

    def count(self, batch_size: int) -> None:
        """Count a batch that nothing has to wait for."""
        self._count(batch_size)

    def admit(self, batch_size: int) -> None:
        """Wait until the pace allows a batch, and count it."""
        if self._pace is not None:
            self._pace.await_sample(batch_size)
        self._count(batch_size)

    def _count(self, n_sampled: int, n_redrawn: int = 0) -> None:
        with self._counting:  # several threads sample
            self.n_sampled += n_sampled
            self.n_redrawn += n_redrawn

    def _drawn(self, draw: Callable[[], Batch]) -> Batch:
        for _ in range(_MAX_REDRAWS):
            try:
                return draw()
            except SnapshotExpiredError:  # another session has evicted rows that were drawn
                self._refresh()
                self._count(0, n_redrawn=1)
        return draw()

    def iterate(self, create: Callable[[], BatchIterator]) -> BatchIterator:
        """Create an iterator that checkpoints keep; after a resume, continue the next saved one."""
        assembler, rng = self._reader.assembler, self._reader.rng
        with assembler.lock:  # other threads may sample, create iterators or take a checkpoint
            counter = rng.counter
            iterator = create()
            if self._saved:
                assembler.publish()
                iterator.load_state_dict(as_tensors(self._saved.pop(0)))
                rng.counter = counter  # the saved iterator took its random numbers when it was first created
            self._iterators = [*(ref for ref in self._iterators if ref() is not None), weakref.ref(iterator)]
        return iterator

    def iterator_states(self) -> list[Any]:
        """The states of open iterators, and of saved ones that were not continued yet.

        Plans prefetched batches again, as a resumed session will. Called with the assembler's lock held.
        """
        iterators = [i for ref in self._iterators if (i := ref()) is not None and not i.is_closed]
        for iterator in iterators:
            iterator.plan_queue_again()
        return [_without_priorities(i.state_dict()) for i in iterators] + self._saved


def _without_priorities(state: dict[str, Any]) -> dict[str, Any]:
    """The state of an iterator without the priorities, which the checkpoint keeps once, with the reader."""
    return state | {"draws": {name: value for name, value in state["draws"].items() if name != "priorities"}}
