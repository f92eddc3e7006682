"""The append side of a buffer: pacing, and taking turns with sampling threads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trajstore.replay.pacing import SamplesPerInsert
from trajstore.replay.readiness import Readiness
from trajstore.replay.turns import TurnTaking
from trajstore.sampling.batches.batch_assembler import BatchAssembler

_PUBLISH_ROWS = 1 << 14  # appended rows after which limits are applied even if no thread samples


@dataclass(slots=True)
class Insert:
    """How many steps a call appends."""

    n: int


class Appending:
    """Surrounds each append to the writer; safe to use from several threads."""

    def __init__(
        self, assembler: BatchAssembler, pace: SamplesPerInsert | None, turns: TurnTaking, readiness: Readiness
    ) -> None:
        self._assembler = assembler
        self._pace = pace
        self._turns = turns
        self._readiness = readiness
        self._n_unpublished = 0

    @contextlib.contextmanager
    def inserting(self, n: int) -> Iterator[Insert]:
        """Append ``n`` steps in the block, or those that it says. A block that raises counts as no insert."""
        insert = Insert(n)
        self.begin(n)
        try:
            yield insert
        except BaseException:
            self.cancel(n)
            raise
        self.cancel(n - insert.n)
        self.end(insert.n)

    def begin(self, n: int) -> None:
        """Wait until the pace allows ``n`` steps, and count them. `cancel` or `end` follows."""
        if self._pace is not None:
            self._pace.await_insert(n)
        self._turns.before_append()

    def cancel(self, n: int) -> None:
        """Take back the count of ``n`` steps that were not appended."""
        if self._pace is not None and n > 0:
            self._pace.cancel_insert(n)

    def end(self, n: int) -> None:
        """Note that ``n`` steps were appended."""
        self._n_unpublished += n
        if self._n_unpublished >= _PUBLISH_ROWS:
            self._publish_if_free()
        self._readiness.notify_appended()
        self._turns.after_append()

    def _publish_if_free(self) -> None:
        """Make appended steps visible, which applies the limits, unless another thread holds the lock."""
        if self._assembler.lock.acquire(blocking=False):
            try:
                self._n_unpublished = 0
                self._assembler.publish(may_commit=False)
            finally:
                self._assembler.lock.release()


def count_steps(data: Any, n_axes: int) -> int:
    """Steps in nested arrays with ``n_axes`` leading axes of time and environment; 0 where they have no shape.

    The count is taken from the smallest field, before anything is checked, and serves pacing only.
    """
    if not isinstance(data, Mapping):
        return 0
    counts = [count_steps(v, n_axes) if isinstance(v, Mapping) else _size(v, n_axes) for v in data.values()]
    return min(counts, default=0)


def _size(value: Any, n_axes: int) -> int:
    shape = getattr(value, "shape", None) or (len(value) if hasattr(value, "__len__") else 1,)
    n = 1
    for length in shape[:n_axes]:
        n *= int(length)
    return n
