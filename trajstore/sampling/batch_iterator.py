"""An iterator over batches, with the next ones prepared in the background."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from trajstore.background_pool import BackgroundPool
from trajstore.errors import ClosedError, NotReadyError
from trajstore.sampling.batches.batch_assembler import BatchAssembler, WindowKind
from trajstore.sampling.batches.batch_plan import BatchPlan
from trajstore.sampling.batches.cuda_streams import current_event, side_stream, wait_for
from trajstore.sampling.batches.evicted_windows import are_goals_evicted, evicted_windows
from trajstore.sampling.batches.outputs import Batch, Ring, to_batch
from trajstore.sampling.draws import Draws, RandomDraws
from trajstore.sampling.episode_blocks import EpisodeBlockDraws
from trajstore.sampling.hindsight import GOAL_INDEX
from trajstore.sampling.priorities.prioritised_draws import PrioritisedDraws
from trajstore.sampling.scan_ahead import loader_for
from trajstore.sampling.window_starts import DrawnWindows
from trajstore.schema import Array

Outputs = Mapping[str, torch.Tensor]

_NO_STREAM = 1 << 30
_NO_SLOT = -1


@dataclass(slots=True)
class _ReadyBatch:
    """A batch, and on a GPU the event after which it may be read; None if windows of it were evicted."""

    batch: dict[str, torch.Tensor] | None
    event: Any = None


@dataclass(frozen=True, slots=True)
class _PlannedBatch:
    """A batch to read, and the version of the index that its plan was made for."""

    kind: WindowKind
    plan: BatchPlan
    windows: torch.Tensor  # [B, 3]: stream number, episode, t of the start, which may lie outside the episode
    draw: DrawnWindows
    first_t: torch.Tensor  # [B]: the first t that each window's episode had
    version: int
    slot: int  # of the ring


@dataclass(slots=True)
class _QueuedBatch:
    """A batch of the queue: its windows by handle, and the work that reads it."""

    kind: WindowKind
    windows: torch.Tensor  # [B, 3]: stream number, episode, t of the start, which may lie outside the episode
    first_t: torch.Tensor  # [B]: the first t that each window's episode had
    extras: tuple[torch.Tensor | None, ...]  # n, probability and weight, where they are drawn
    goals: torch.Tensor | None  # [B, 3]: steps that give goals in hindsight; -1 where there is none
    version: int  # of the index, when the windows were drawn; -1 if that was another index
    slot: int  # of the ring
    work: Future[_ReadyBatch] | _PlannedBatch | None  # without prefetch it is read when its turn comes
    late_work: Future[_ReadyBatch] | None = None  # earlier work for this batch that could not be cancelled
    is_admitted: bool = False


class BatchIterator(Iterator[Batch]):
    """An iterator over batches: iterate, or get single batches with ``next``. Several threads may take turns.

    The iterating thread draws windows. With ``prefetch``, that many batches beyond the current one are planned, and
    a background thread reads them. The sequence of batches is the same without prefetch. An exception in the
    background is raised in place of its batch; later batches follow as usual.

    Windows may be evicted before their batch is delivered. Batches drawn at random draw other windows in their
    place. Other batches leave them out and count them as skipped.

    Args:
        assembler: Reads the batches.
        draws: Says which windows come next.
        prefetch: Number of batches to prepare in the background.
        ring: Memory for the batches, of at least ``prefetch + 2`` slots.
        as_tensordict: Whether batches are TensorDicts.
        admit: Called with the size of each batch before it is delivered; may wait or raise.
        count: Called with the size of each batch that is delivered; does not wait.
        plan: Plans drawn windows, with goals in hindsight that were drawn before if the third argument is given.
        run: Makes a flat batch of drawn windows in one go, or returns None if that is not possible.

    Attributes:
        owner: An object that must not be garbage-collected while the iterator is in use, if there is one.
    """

    def __init__(
        self,
        assembler: BatchAssembler,
        draws: Draws | PrioritisedDraws | EpisodeBlockDraws,
        *,
        prefetch: int = 0,
        ring: Ring | None = None,
        as_tensordict: bool,
        admit: Callable[[int], None] | None = None,
        count: Callable[[int], None] | None = None,
        plan: Callable[[WindowKind, DrawnWindows, torch.Tensor | None], BatchPlan] | None = None,
        run: Callable[[WindowKind, DrawnWindows, Outputs], dict[str, torch.Tensor] | None] | None = None,
    ) -> None:
        if not isinstance(prefetch, int) or isinstance(prefetch, bool) or prefetch < 0:
            raise ValueError(f"prefetch: expected 0 or a positive integer, got {prefetch!r}")
        if ring is not None and len(ring) < prefetch + 2:
            raise ValueError(f"out: expected a ring of at least {prefetch + 2} (prefetch + 2), got {len(ring)}")
        self.owner: object = None
        self._assembler = assembler
        self._draws = draws
        self._prefetch = prefetch
        self._ring = ring
        self._as_tensordict = as_tensordict
        self._admit, self._count = admit, count
        # A batch that is planned and read at once need not be queued. While `admit` waits, the index may change.
        self._run = run if not prefetch and admit is None else None
        self._plan = plan if plan is not None else lambda kind, draw, goals: kind.plan(draw)
        self._queue: deque[_QueuedBatch] = deque()  # guarded by the assembler's lock
        self._is_over = self._is_closed = False
        self._turn = threading.Lock()  # held by the thread whose turn it is to take a batch
        self._threads = BackgroundPool(1, "trajstore-prefetch") if prefetch else None
        self._loader = loader_for(assembler, draws, prefetch)

    # ---- delivering batches

    def __next__(self) -> Batch:
        with self._turn:
            ready = self._run_next()
            while ready is None:
                ready = self._take_next()
        assert ready.batch is not None
        if self._count is not None:
            self._count(len(ready.batch["index"]))
        if ready.event is not None:
            wait_for(ready.event, ready.batch, self._assembler.device)
        batch: Batch = to_batch(ready.batch, self._as_tensordict)
        return batch

    def _run_next(self) -> _ReadyBatch | None:
        """Draw and read a batch in one go; None if that is not possible."""
        if self._run is None:
            return None
        with self._assembler.lock:
            if self._is_closed or self._is_over or self._queue:
                return None
            self._assembler.publish()
            drawn = self._draws.draw()
            if drawn is None:
                self._is_over = True
                return None
            slot = self._reserve_slot()
            batch = self._run(*drawn, self._outputs(drawn[0], len(drawn[1].entry), slot))
            if batch is None:
                self._enqueue(*drawn, slot)
                return None
            if self._ring is not None:
                self._ring.give(slot, batch)
            return _ReadyBatch(batch)

    def _outputs(self, kind: WindowKind, n: int, slot: int) -> Outputs:
        return {} if self._ring is None else self._ring.take(slot, (kind.windows, n))

    def _take_next(self) -> _ReadyBatch | None:
        """The next batch; None if all of its windows were evicted."""
        queued = self._dequeue()
        try:
            ready = self._deliver(queued)
        except NotReadyError:  # nothing can be drawn in place of evicted windows, so it stays the next batch
            with self._assembler.lock:
                self._queue.appendleft(replace(queued, work=None))
            raise
        if ready is None:
            with self._assembler.lock:
                self._give_slot_back(queued)
        return ready

    def _dequeue(self) -> _QueuedBatch:
        """Remove the next batch from the queue, once it is admitted."""
        if self._is_closed:
            raise _closed()
        self._fill()
        with self._assembler.lock:
            if not self._queue:
                raise StopIteration
            size, is_admitted = len(self._queue[0].windows), self._queue[0].is_admitted
        if self._admit is not None and not is_admitted:
            self._admit(size)
        with self._assembler.lock:  # a checkpoint may have planned the queue again since
            if self._is_closed:
                raise _closed()
            return replace(self._queue.popleft(), is_admitted=True)

    def _deliver(self, queued: _QueuedBatch) -> _ReadyBatch | None:
        """The batch, with evicted windows replaced or left out; None if no window is left."""
        work = queued.work
        if isinstance(work, Future) and not (self._can_redraw and self._is_evicted(queued)):
            ready = work.result()
            if ready.batch is not None:
                return ready
        for late in (work, queued.late_work):  # would write into the same memory
            if isinstance(late, Future) and not late.cancel():
                late.exception()
        with self._assembler.lock:  # until the batch is read: other threads may evict
            if isinstance(work, _PlannedBatch) and not self._is_evicted(queued):
                return self._read(work, None)
            planned = self._redraw_evicted(queued) if self._can_redraw else self._leave_out_evicted(queued)
            return None if planned is None else self._read(planned, None)

    @property
    def _can_redraw(self) -> bool:
        return isinstance(self._draws, (RandomDraws, PrioritisedDraws))

    def _redraw_evicted(self, queued: _QueuedBatch) -> _PlannedBatch:
        """Plan a batch with newly drawn windows in place of evicted ones."""
        assert isinstance(self._draws, (RandomDraws, PrioritisedDraws))
        kind, handles = queued.kind, queued.windows.cpu().numpy()
        evicted = self._evicted_windows(queued)
        n, probability, weight = queued.extras
        zeros = torch.zeros(len(evicted), dtype=torch.int64, device=self._assembler.device)
        draw = DrawnWindows(zeros, zeros, n, probability, weight)
        kept = np.flatnonzero(~evicted)
        draw = draw.replaced(kept, self._assembler.draw_at(kind, handles[kept], None, is_strict=False))
        if evicted.any():
            drawn = self._draws.draw(int(evicted.sum()))
            assert drawn is not None
            draw = draw.replaced(np.flatnonzero(evicted), drawn[1])
        return self._make_plan(kind, draw, queued.slot)

    def _leave_out_evicted(self, queued: _QueuedBatch) -> _PlannedBatch | None:
        """Plan a batch without its evicted windows; None if no window is left."""
        assert not isinstance(self._draws, (RandomDraws, PrioritisedDraws))
        kind, handles = queued.kind, queued.windows.cpu().numpy()
        evicted = self._evicted_windows(queued)
        self._draws.n_skipped += int(evicted.sum())
        kept, n = np.flatnonzero(~evicted), queued.extras[0]
        if not len(kept):
            return None
        n = None if n is None else n[torch.from_numpy(kept).to(n.device)]
        return self._make_plan(kind, self._assembler.draw_at(kind, handles[kept], n, is_strict=False), queued.slot)

    # ---- evictions

    def _evicted_windows(self, batch: _QueuedBatch | _PlannedBatch) -> Array:
        handles, first_t = batch.windows.cpu().numpy(), batch.first_t.cpu().numpy()
        return evicted_windows(self._assembler.index, batch.kind, handles, first_t)

    def _is_evicted(self, queued: _QueuedBatch) -> bool:
        """Whether windows or goals of a batch were evicted since they were drawn."""
        if queued.version >= self._assembler.index.changes.removed_at:
            return False
        with self._assembler.lock:
            return self._lacks_steps(queued)

    def _lacks_steps(self, queued: _QueuedBatch) -> bool:
        is_evicted = bool(self._evicted_windows(queued).any())
        return is_evicted or are_goals_evicted(self._assembler.index, queued.goals)

    def _may_be_evicted(self, planned: _PlannedBatch) -> bool:
        """Whether steps that a plan refers to were removed; True as well for windows that cross episodes."""
        goals = planned.plan.known.get(GOAL_INDEX)
        if planned.kind.starts.chains is not None or are_goals_evicted(self._assembler.index, goals):
            return True
        return bool(self._evicted_windows(planned).any())

    # ---- preparing batches

    def _fill(self) -> None:
        """Draw batches until the queue holds one more than ``prefetch``."""
        if self._loader is not None:
            self._loader.follow()
        while self._draw_next():
            if self._loader is not None:
                self._loader.follow()

    def _draw_next(self) -> bool:
        """Draw one more batch; returns False if the queue is full or all batches are drawn."""
        # The length is read under the lock as well: `plan_queue_again` empties the queue for a moment.
        with self._assembler.lock:
            if len(self._queue) > self._prefetch or self._is_over:
                return False
            self._assembler.publish()
            drawn = self._draws.draw()
            if drawn is None:
                self._is_over = True
                return False
            self._enqueue(*drawn, self._reserve_slot())
            return True

    def _enqueue(self, kind: WindowKind, draw: DrawnWindows, slot: int) -> None:
        planned = self._make_plan(kind, draw, slot)
        extras = draw.n, draw.probability, draw.weight
        goals = planned.plan.known.get(GOAL_INDEX)
        facts = kind, planned.windows, planned.first_t, extras, goals, planned.version, planned.slot
        self._queue.append(_QueuedBatch(*facts, self._submit(planned)))

    def _reserve_slot(self) -> int:
        return self._ring.reserve() if self._ring is not None else 0

    def _give_slot_back(self, queued: _QueuedBatch) -> None:
        if self._ring is not None:
            self._ring.give_back(queued.slot)

    def _make_plan(
        self, kind: WindowKind, draw: DrawnWindows, slot: int, goals: torch.Tensor | None = None
    ) -> _PlannedBatch:
        plan = self._plan(kind, draw, goals)
        index, windows = self._assembler.index, plan.known["index"].clone()
        first_t = index.t_base.device[draw.entry]
        windows[:, 2] = first_t + draw.start
        return _PlannedBatch(kind, plan, windows, draw, first_t, index.version, slot)

    def _submit(self, planned: _PlannedBatch) -> Future[_ReadyBatch] | _PlannedBatch:
        """Let the background thread read a batch; without prefetch, return it as it is."""
        if self._is_closed:
            raise _closed()
        if self._threads is None:
            return planned
        return self._threads.submit(self._read, planned, current_event(self._assembler.device))

    def _read(self, planned: _PlannedBatch, after: Any) -> _ReadyBatch:
        """Read a planned batch, on a GPU after the event ``after``."""
        kind, assembler = planned.kind, self._assembler
        with assembler.lock, side_stream(assembler.device, after) as side:
            plan = self._up_to_date(planned)
            if plan is None:
                return _ReadyBatch(None)
            outs = self._outputs(kind, len(plan.known["index"]), planned.slot)
            batch = assembler.read_batch(kind, plan, outs)
            if self._ring is not None:
                self._ring.give(planned.slot, batch)
            return _ReadyBatch(batch, side.record_event() if side is not None else None)

    def _up_to_date(self, planned: _PlannedBatch) -> BatchPlan | None:
        """The plan for the index as it is now; None if steps of it were removed.

        Raises:
            SnapshotExpiredError: Rows of it were evicted.
        """
        plan, version, changes = planned.plan, planned.version, self._assembler.index.changes
        if version >= changes.touched_at:
            return plan
        is_removed = version < changes.removed_at
        if is_removed and self._may_be_evicted(planned):
            return None
        if version < changes.released_at:  # live rows of the plan may hold other steps now
            plan = self._assembler.with_moved_rows(plan, version) or self._plan_again(planned)
        if is_removed:
            self._assembler.check_plan(plan)
        return plan

    def _plan_again(self, planned: _PlannedBatch) -> BatchPlan:
        """Plan the same windows for the index as it is now: episodes may have grown or ended since."""
        kind, handles = planned.kind, planned.windows.cpu().numpy()
        draw = self._assembler.draw_at(kind, handles, planned.draw.n, is_strict=False)
        draw = replace(planned.draw, entry=draw.entry, start=draw.start)
        return self._plan(kind, draw, planned.plan.known.get(GOAL_INDEX))

    # ---- state

    def plan_queue_again(self) -> None:
        """Plan the queued batches for the episodes as they are now.

        A session that resumes from `state_dict` plans them so, and both must give the same batches.
        """
        with self._assembler.lock:
            if self._can_redraw and not self._is_closed:
                queued, self._queue = list(self._queue), deque()
                for item in queued:
                    late = item.work if isinstance(item.work, Future) and not item.work.cancel() else item.late_work
                    self._requeue(replace(item, work=None, late_work=late))

    def _requeue(self, queued: _QueuedBatch) -> None:
        """Queue a batch that was drawn before; one with evicted windows is planned when its turn comes."""
        if queued.work is None and not self._lacks_steps(queued):
            queued = self._planned_again(queued)
        if isinstance(queued.work, _PlannedBatch):
            queued.work = self._submit(queued.work)
        self._queue.append(queued)

    def _planned_again(self, queued: _QueuedBatch) -> _QueuedBatch:
        n, probability, weight = queued.extras
        draw = self._assembler.draw_at(queued.kind, queued.windows.cpu().numpy(), n, is_strict=False)
        draw = replace(draw, probability=probability, weight=weight)
        goals = None if queued.goals is None else queued.goals.to(self._assembler.device)
        planned = self._make_plan(queued.kind, draw, queued.slot, goals)
        return replace(queued, work=planned, version=planned.version)

    def state_dict(self) -> dict[str, Any]:
        """State from which an iterator, with any ``prefetch``, continues after the last delivered batch."""
        with self._assembler.lock:
            return {
                "draws": self._draws.state_dict(),
                "streams": list(self._assembler.index.numbers),
                "queued": [
                    (q.windows.cpu(), q.first_t.cpu(), *map(_on_host, (*q.extras, q.goals))) for q in self._queue
                ],
                "is_over": self._is_over,
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another iterator was, which may have run in another process.

        Raises:
            EpisodeNotFoundError: Planned windows belong to episodes that this reader does not have.
            ValueError: The ring has too few slots for the planned batches.
        """
        with self._assembler.lock:
            numbers = self._assembler.index.numbers
            stream = torch.tensor([numbers.get(name, -1) for name in state["streams"]], dtype=torch.int64)
            kind = self._draws.kind
            needed = len(state["queued"]) + 1  # and one for the batch in use
            if self._threads is not None and self._ring is not None and len(self._ring) < needed:
                raise ValueError(f"out: expected a ring of at least {needed} (queued + 1), got {len(self._ring)}")
            batches = []
            for windows, first_t, *extras, goals in state["queued"]:
                on_device = tuple(None if e is None else e.to(self._assembler.device) for e in extras)
                first_t = first_t.to(self._assembler.device)
                goals = None if goals is None else _renumbered(goals, stream)
                handles = _renumbered(windows, stream)
                queued = _QueuedBatch(kind, handles, first_t, on_device, goals, -1, _NO_SLOT, None)
                batches.append(queued if self._can_redraw else self._planned_again(queued))
            self._draws.load_state_dict(state["draws"])
            self._is_over = bool(state["is_over"])
            late = self._drop_queue()
            for queued in batches:
                slot = self._reserve_slot()
                work = replace(queued.work, slot=slot) if isinstance(queued.work, _PlannedBatch) else None
                self._requeue(replace(queued, slot=slot, work=work, late_work=late.get(slot)))

    def __len__(self) -> int:
        """Number of batches of the whole epoch."""
        if not hasattr(self._draws, "n_batches"):
            raise TypeError("batches drawn at random have no end, so their iterator has no length")
        return int(self._draws.n_batches)

    def __bool__(self) -> bool:
        return True

    def stats(self) -> dict[str, Any]:
        """The number of skipped windows, and for staged draws how far from uniform they are."""
        return self._draws.stats()

    # ---- closing

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def _drop_queue(self) -> dict[int, Future[_ReadyBatch]]:
        """Give up all queued batches; returns, by slot of the ring, work that can't be cancelled."""
        late = {}
        while self._queue:
            queued = self._queue.popleft()
            self._give_slot_back(queued)
            for work in (queued.late_work, queued.work):
                if isinstance(work, Future) and not work.cancel():
                    late[queued.slot] = work
        return late

    def close(self) -> None:
        """Stop the background work and drop prepared batches. May be called again."""
        with self._assembler.lock:
            self._is_closed = True
            self._drop_queue()
        if self._threads is not None:
            self._threads.shutdown()
        if self._loader is not None:
            self._loader.close()

    def __enter__(self) -> BatchIterator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _closed() -> ClosedError:
    return ClosedError("these batches are closed: `close` was called on their iterator")


def _renumbered(handles: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
    """Handles with stream numbers mapped by ``stream``; unknown streams get a number that no stream has.

    Handles with stream -1 mean no step and stay as they are.
    """
    known = torch.where(stream >= 0, stream, _NO_STREAM)
    numbers = torch.where(handles[:, 0] >= 0, known[handles[:, 0].clamp(min=0)], -1)
    return torch.stack([numbers, handles[:, 1], handles[:, 2]], 1)


def _on_host(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.cpu()
