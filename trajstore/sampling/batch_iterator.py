"""Batches one after the other, the next ones prepared in the background."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from trajstore.errors import ClosedError, NotReadyError
from trajstore.sampling.batch_assembler import BatchAssembler, WindowKind
from trajstore.sampling.batch_plan import BatchPlan
from trajstore.sampling.draws import Draws, RandomDraws, StagedDraws
from trajstore.sampling.hindsight import GOAL_INDEX
from trajstore.sampling.outputs import Ring, to_batch
from trajstore.sampling.prioritised_draws import PrioritisedDraws
from trajstore.sampling.window_starts import DrawnWindows
from trajstore.schema import Array

_NO_STREAM = 1 << 30
_PIECE = 64  # windows whose chunks are loaded at a time when a segment enters


@dataclass(slots=True)
class _Ready:
    """A batch, and on a GPU the event after which it may be read; None where windows of it were gone by then."""

    batch: dict[str, torch.Tensor] | None
    event: Any = None


@dataclass(frozen=True, slots=True)
class _Planned:
    """A batch to be read: its windows by handle and as they were drawn, and what is known of them."""

    kind: WindowKind
    plan: BatchPlan
    windows: torch.Tensor
    draw: DrawnWindows
    low: torch.Tensor  # [B]: the first t that was there of each window's episode
    live_epoch: int
    n_moves: int  # of live rows into the stream
    version: int  # of the index
    n_removed: int  # of the source
    slot: int  # of the ring


@dataclass(slots=True)
class _Queued:
    """A batch on its way: its windows, by handle, and the work."""

    kind: WindowKind
    windows: torch.Tensor  # [B, 3]: stream number, episode, t of the start, also where it lies outside
    low: torch.Tensor  # [B]: the first t that was there of each window's episode
    extras: tuple[torch.Tensor | None, ...]  # n, probability and weight, where they are drawn
    goals: torch.Tensor | None  # [B, 3]: where goals in hindsight come from; -1 where there is none
    n_removed: int  # of the source, when they were drawn
    slot: int  # of the ring
    work: Future[_Ready] | _Planned | None  # without prefetch it is read when it is asked for; None: not planned
    before: Future[_Ready] | None = None  # work for the same batch that was too late to be taken back
    is_admitted: bool = False


class BatchIterator(Iterator[Any]):
    """An iterator over batches; iterate, or take single ones with ``next``.

    Windows are drawn on the thread that iterates, in its order. With ``prefetch``, so many batches beyond the one
    that is given out are planned, and a thread reads and assembles them; the sequence is the same without. An
    exception of that thread is raised in place of its batch, and the batches after it go on.

    Of batches drawn at random, windows that were evicted before it was their turn are drawn anew when it is; of
    others they are left out, and counted as skipped.
    ``admit`` is called with the size of every batch before it is given out; ``plan`` makes a plan of drawn windows,
    with goals in hindsight that were drawn before where these are given.
    """

    def __init__(
        self,
        source: BatchAssembler,
        draws: Draws | PrioritisedDraws,
        *,
        prefetch: int = 0,
        ring: Ring | None = None,
        as_tensordict: bool,
        admit: Callable[[int], None] | None = None,
        plan: Callable[[WindowKind, DrawnWindows, torch.Tensor | None], BatchPlan] | None = None,
    ) -> None:
        if not isinstance(prefetch, int) or isinstance(prefetch, bool) or prefetch < 0:
            raise ValueError(f"prefetch: expected 0 or a positive integer, got {prefetch!r}")
        if ring is not None and len(ring) < prefetch + 2:
            raise ValueError(f"out: expected a ring of at least {prefetch + 2} (prefetch + 2), got {len(ring)}")
        self._source = source
        self._draws = draws
        self._prefetch = prefetch
        self._ring = ring
        self._as_tensordict = as_tensordict
        self._admit = admit
        self._plan = plan if plan is not None else lambda kind, draw, goals: kind.plan(draw)
        self._queue: deque[_Queued] = deque()
        self._is_over = self._is_closed = False
        self._taking = threading.Lock()  # several threads may take batches in turn
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="trajstore-prefetch") if prefetch else None
        self._loader = _Loader(source, draws) if isinstance(draws, StagedDraws) else None

    def __next__(self) -> Any:
        ready = None
        with self._taking:
            while ready is None:
                ready = self._taken()
        assert ready.batch is not None
        if ready.event is not None:
            stream = torch.cuda.current_stream(self._source.device)
            stream.wait_event(ready.event)
            for (
                tensor
            ) in ready.batch.values():  # made on another stream: not to be given back before this one is done
                tensor.record_stream(stream)
        return to_batch(ready.batch, self._as_tensordict)

    def _taken(self) -> _Ready | None:
        queued = self._next_queued()
        try:
            return self._delivered(queued)
        except NotReadyError:  # nothing can be drawn in place of what is gone: it is still the next
            with self._source.lock:
                self._queue.appendleft(replace(queued, work=None))
            raise

    def _next_queued(self) -> _Queued:
        if self._is_closed:
            raise ClosedError("these batches are closed")
        self._fill()
        with self._source.lock:
            if not self._queue:
                raise StopIteration
            size, is_admitted = len(self._queue[0].windows), self._queue[0].is_admitted
        if self._admit is not None and not is_admitted:
            self._admit(size)
        with self._source.lock:  # another thread may plan the queue anew, for a checkpoint
            if self._is_closed:
                raise ClosedError("these batches are closed")
            return replace(self._queue.popleft(), is_admitted=True)

    def _delivered(self, queued: _Queued) -> _Ready | None:
        """The batch, with other windows in place of those that are gone, or without them; None: nothing is left."""
        work = queued.work
        if isinstance(work, Future) and not (self._can_redraw and self._is_gone_by_now(queued)):
            ready = work.result()
            if ready.batch is not None:
                return ready
        for late in (work, queued.before):  # it would write into the same memory
            if isinstance(late, Future) and not late.cancel():
                late.exception()
        with self._source.lock:  # held until it is read: others may evict
            if isinstance(work, _Planned) and not self._is_gone_by_now(queued):
                return self._assemble(work, None)
            planned = self._renewed(queued) if self._can_redraw else self._reduced(queued)
            return None if planned is None else self._assemble(planned, None)

    def _is_gone_by_now(self, queued: _Queued) -> bool:
        if queued.n_removed == self._source.n_removed:
            return False
        with self._source.lock:
            return self._is_gone(queued)

    @property
    def _can_redraw(self) -> bool:
        return isinstance(self._draws, (RandomDraws, PrioritisedDraws))

    def _renewed(self, queued: _Queued) -> _Planned:
        """A plan of a batch with windows drawn anew in place of those that are gone."""
        assert isinstance(self._draws, (RandomDraws, PrioritisedDraws))
        kind, handles = queued.kind, queued.windows.cpu().numpy()
        gone = self._gone(kind, handles, queued.low.cpu().numpy())
        n, probability, weight = queued.extras
        draw = DrawnWindows(
            *(torch.zeros(len(gone), dtype=torch.int64, device=self._source.device) for _ in range(2))
        )
        draw = replace(draw, n=n, probability=probability, weight=weight)
        kept = np.flatnonzero(~gone)
        draw = _with(draw, kept, self._source.draw_at(kind, handles[kept], None, is_strict=False))
        if gone.any():
            drawn = self._draws.draw(int(gone.sum()))
            assert drawn is not None
            draw = _with(draw, np.flatnonzero(gone), drawn[1])
        return self._planned(kind, draw, queued.slot)

    def _reduced(self, queued: _Queued) -> _Planned | None:
        """A plan of a batch without the windows that are gone."""
        assert not isinstance(self._draws, (RandomDraws, PrioritisedDraws))
        kind, handles = queued.kind, queued.windows.cpu().numpy()
        gone = self._gone(kind, handles, queued.low.cpu().numpy())
        self._draws.n_skipped += int(gone.sum())
        kept, n = np.flatnonzero(~gone), queued.extras[0]
        if not len(kept):
            return None
        n = None if n is None else n[torch.from_numpy(kept).to(n.device)]
        return self._planned(kind, self._source.draw_at(kind, handles[kept], n, is_strict=False), queued.slot)

    def _are_goals_gone(self, given: torch.Tensor | None) -> bool:
        if given is None:
            return False
        goals = given.cpu().numpy()
        return not self._source.index.has_steps_from(*goals[goals[:, 0] >= 0].T).all()

    def _gone(self, kind: WindowKind, handles: Array, low: Array) -> Array:
        """Which windows touch steps that are there no more."""
        spec = kind.windows
        before = min([0, *(step for _, steps in spec.stacks for step in steps)]) - spec.burn_in * spec.stride
        first = np.maximum(handles[:, 2] + before, low)
        gone: Array = ~self._source.index.has_steps_from(handles[:, 0], handles[:, 1], first)
        if kind.starts.chains is not None:  # it goes on in other episodes, which may be gone as well
            kind.starts.update()
            entry = self._source.index.find(handles[~gone, 0], handles[~gone, 1])
            gone[~gone] = ~kind.starts.has_start(entry, handles[~gone, 2] - self._source.index.t_base.host[entry])
        return gone

    def _fill(self) -> None:
        while len(self._queue) <= self._prefetch and not self._is_over:
            with self._source.lock:
                self._source.publish()
                drawn = self._draws.draw()
                if drawn is None:
                    self._is_over = True
                    return
                self._enqueue(*drawn)
            if self._loader is not None:
                self._loader.follow()

    def _enqueue(self, kind: WindowKind, draw: DrawnWindows) -> None:
        planned = self._planned(kind, draw, self._reserve())
        extras = draw.n, draw.probability, draw.weight
        goals, n_removed = planned.plan.known.get(GOAL_INDEX), self._source.n_removed
        work, place = self._submit(planned), planned.slot
        self._queue.append(_Queued(kind, planned.windows, planned.low, extras, goals, n_removed, place, work))

    def _reserve(self) -> int:
        return self._ring.reserve() if self._ring is not None else 0

    def _planned(
        self, kind: WindowKind, draw: DrawnWindows, slot: int, goals: torch.Tensor | None = None
    ) -> _Planned:
        plan = self._plan(kind, draw, goals)
        source, windows = self._source, plan.known["index"].clone()
        low = source.index.t_base.device[draw.entry]
        windows[:, 2] = low + draw.start
        live = source.live_epoch, source.n_moves
        return _Planned(kind, plan, windows, draw, low, *live, source.index.version, source.n_removed, slot)

    def _submit(self, planned: _Planned) -> Future[_Ready] | _Planned:
        if self._is_closed:
            raise ClosedError("these batches are closed")
        if self._threads is None:
            return planned
        return self._threads.submit(self._assemble, planned, _event(self._source.device))

    def _assemble(self, planned: _Planned, before: Any) -> _Ready:
        kind, plan = planned.kind, planned.plan
        with self._source.lock, _side_stream(self._source.device, before) as side:
            if self._has_lost(planned):
                return _Ready(None)
            if planned.live_epoch != self._source.live_epoch:  # steps have moved from live rows into the stream
                plan = self._source.moved(plan, planned.n_moves) or self._plan_again(planned)
            if planned.version != self._source.index.version:
                self._source.check_plan(plan)
            outs, ring = {}, self._ring
            if ring is not None:
                outs = ring.take(planned.slot, (kind.windows, len(plan.known["index"])))
            batch = self._source.carry_out(kind, plan, outs)
            if ring is not None:
                ring.give(planned.slot, batch)
            return _Ready(batch, side.record_event() if side is not None else None)

    def _plan_again(self, planned: _Planned) -> BatchPlan:
        """The plan of the same windows as things are now: episodes may have grown or ended since."""
        kind, handles = planned.kind, planned.windows.cpu().numpy()
        draw = self._source.draw_at(kind, handles, planned.draw.n, is_strict=False)
        draw = replace(planned.draw, entry=draw.entry, start=draw.start)
        return self._plan(kind, draw, planned.plan.known.get(GOAL_INDEX))

    def take_back(self) -> None:
        """Plan anew what is queued, as whoever goes on from `state_dict` will: with episodes as they are now."""
        with self._source.lock:
            if self._can_redraw and not self._is_closed:
                queued, self._queue = list(self._queue), deque()
                for item in queued:
                    late = item.work if isinstance(item.work, Future) and not item.work.cancel() else item.before
                    self._requeue(replace(item, work=None, before=late))

    def _requeue(self, queued: _Queued) -> None:
        """Take up a batch that was drawn before; one of which windows are gone waits for its turn."""
        if queued.work is None and not self._is_gone(queued):
            queued = self._planned_again(queued)
        if isinstance(queued.work, _Planned):
            queued.work = self._submit(queued.work)
        self._queue.append(queued)

    def _has_lost(self, planned: _Planned) -> bool:
        """Whether windows are gone, or something beside them that they were planned with."""
        if planned.n_removed == self._source.n_removed:
            return False
        if planned.kind.starts.chains is not None or self._are_goals_gone(planned.plan.known.get(GOAL_INDEX)):
            return True
        handles, low = planned.windows.cpu().numpy(), planned.low.cpu().numpy()
        return bool(self._gone(planned.kind, handles, low).any())

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        """Batches of the whole epoch."""
        if not hasattr(self._draws, "n_batches"):
            raise TypeError("batches drawn at random have no end")
        return int(self._draws.n_batches)

    def stats(self) -> dict[str, Any]:
        """What was skipped, and for staged draws how far from uniform they are."""
        return self._draws.stats()

    def state_dict(self) -> dict[str, Any]:
        """What it takes to go on with the batch after the one given out last, with any ``prefetch``."""
        with self._source.lock:
            return {
                "draws": self._draws.state_dict(),
                "streams": list(self._source.index.numbers),
                "queued": [
                    (q.windows.cpu(), q.low.cpu(), *map(_on_host, (*q.extras, q.goals))) for q in self._queue
                ],
                "is_over": self._is_over,
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another iterator was, also one of another process.

        Raises:
            EpisodeNotFoundError: Windows that were planned are not here any more.
        """
        with self._source.lock:
            numbers = self._source.index.numbers
            stream = torch.tensor([numbers.get(name, -1) for name in state["streams"]], dtype=torch.int64)
            kind = self._draws.kind
            if self._threads is not None and self._ring is not None and len(self._ring) < len(state["queued"]) + 2:
                needed = len(state["queued"]) + 2
                raise ValueError(f"out: expected a ring of at least {needed} (queued + 2), got {len(self._ring)}")
            plans = []
            for windows, low, *extras, goals in state["queued"]:
                on_device = tuple(None if e is None else e.to(self._source.device) for e in extras)
                low, goals = low.to(self._source.device), None if goals is None else _renumbered(goals, stream)
                handles, place = _renumbered(windows, stream), self._reserve()
                queued = _Queued(kind, handles, low, on_device, goals, -1, place, None)
                plans.append(queued if self._can_redraw else self._planned_again(queued))
            self._draws.load_state_dict(state["draws"])
            self._is_over = bool(state["is_over"])
            self._drop_queue()
            for queued in plans:
                self._requeue(queued)

    def _is_gone(self, queued: _Queued) -> bool:
        gone = self._gone(queued.kind, queued.windows.cpu().numpy(), queued.low.cpu().numpy())
        return bool(gone.any()) or self._are_goals_gone(queued.goals)

    def _planned_again(self, queued: _Queued) -> _Queued:
        n, probability, weight = queued.extras
        draw = self._source.draw_at(queued.kind, queued.windows.cpu().numpy(), n, is_strict=False)
        draw = replace(draw, probability=probability, weight=weight)
        goals = None if queued.goals is None else queued.goals.to(self._source.device)
        planned = self._planned(queued.kind, draw, queued.slot, goals)
        return replace(queued, work=planned, n_removed=self._source.n_removed)

    def _drop_queue(self) -> None:
        while self._queue:
            work = self._queue.pop().work
            if isinstance(work, Future):
                work.cancel()

    def close(self) -> None:
        """End the background work; what was prepared is dropped. May be called again."""
        with self._source.lock:
            self._is_closed = True
            self._drop_queue()
        if self._threads is not None:
            self._threads.shutdown(wait=True)
        if self._loader is not None:
            self._loader.close()

    def __enter__(self) -> BatchIterator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Loader:
    """Loads the segment that enters next, some windows at a time, while others are drawn from."""

    def __init__(self, source: BatchAssembler, draws: StagedDraws) -> None:
        self._source = source
        self._draws = draws
        self._segment = -1
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="trajstore-staged")
        self._work: Future[None] | None = None

    def follow(self) -> None:
        """See whether another segment is next; raises what loading the last one raised."""
        if self._work is not None and self._work.done():
            work, self._work = self._work, None
            work.result()
        if self._draws.next_segment != self._segment:
            self._segment = self._draws.next_segment
            self._work = self._threads.submit(self._load, self._segment)

    def _load(self, segment: int) -> None:
        kind = self._draws.kind
        with self._source.lock:
            draw, version = self._windows_of(segment)
        for first in range(0, len(draw.entry), _PIECE):
            piece = slice(first, first + _PIECE)
            with self._source.lock:  # held for one piece at a time: batches are made in between
                if segment != self._segment or version != self._source.index.version:
                    return  # what moved meanwhile is read when it is asked for
                n = None if draw.n is None else draw.n[piece]
                self._source.load(kind, DrawnWindows(draw.entry[piece], draw.start[piece], n))

    def _windows_of(self, segment: int) -> tuple[DrawnWindows, int]:
        every = self._draws.kind.windows.size
        return self._draws.windows_of(segment, every=every), self._source.index.version

    def close(self) -> None:
        self._segment = -1
        self._threads.shutdown(wait=True)


def _renumbered(handles: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
    """Handles with other stream numbers: one that no stream has where it is not here; those of nothing stay so."""
    known = torch.where(stream >= 0, stream, _NO_STREAM)
    numbers = torch.where(handles[:, 0] >= 0, known[handles[:, 0].clamp(min=0)], -1)
    return torch.stack([numbers, handles[:, 1], handles[:, 2]], 1)


def _with(draw: DrawnWindows, where: Array, other: DrawnWindows) -> DrawnWindows:
    """A draw with the windows of another in some places."""
    at = torch.from_numpy(where).to(draw.entry.device)
    merged = {}
    for name in ("entry", "start", "n", "probability", "weight"):
        old, new = getattr(draw, name), getattr(other, name)
        merged[name] = old if old is None or new is None else old.index_copy(0, at, new.to(old.dtype))
    return DrawnWindows(**merged)


def _on_host(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.cpu()


def _event(device: torch.device) -> Any:
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


@contextlib.contextmanager
def _side_stream(device: torch.device, before: Any) -> Iterator[Any]:
    """A CUDA stream for background work, after ``before``; nothing elsewhere."""
    if device.type != "cuda" or before is None:
        yield None
        return
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_event(before)
    with torch.cuda.stream(side):
        yield side
