"""How learners draw from a buffer that is a service of Ray: which actors give how much, and one batch of it all."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import RayActorError, RayTaskError

from trajstore.arguments import check_positive
from trajstore.errors import DataError, NotReadyError
from trajstore.ray.actor import Piece, Shared, get, to_tensors
from trajstore.ray.shared_memory import Layout, Lease, LineLostError, Lines, Share
from trajstore.sampling.rng import CounterRng
from trajstore.sampling.windows import Windows
from trajstore.schema import Array

_REDRAWS = 8
_MAX_KINDS = 8
_MAX_LATE = 2  # updates of priorities for each actor that nobody has waited for yet
_MAX_FUNCTIONS = 64
_RESTRICTIONS = {"where", "recent_steps", "recent_episodes", "recent_fraction", "prioritised", "relabel"}
_CPU = torch.device("cpu")
Flat = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Kind:
    """What is asked for: batches of one kind have the same layout."""

    n: int
    windows: Windows | None
    which: tuple[tuple[str, Any], ...]


@dataclass
class _Part:
    """What one actor is to give of a batch: rows from ``start`` to ``stop``, over a line or through Ray."""

    rank: int
    start: int
    stop: int
    ref: Any = None


@dataclass(frozen=True)
class _Found:
    """What an actor gave; ``is_lost`` if it was first asked over a line that is lost."""

    actor: int
    share: Share
    tensors: Flat
    is_lost: bool = False


@dataclass
class _Asked:
    """A batch on its way."""

    kind: Kind
    chances: Array
    shares: list[Share]  # how much every actor has, as it was last heard
    lines: Lines | None
    lease: Lease | None
    parts: list[_Part] = field(default_factory=list)


class Learner:
    """Draws from actors; safe to use from several threads, one batch at a time."""

    def __init__(self, actors: Sequence[Any], seed: int) -> None:
        self._actors = actors
        self._rng = CounterRng(seed)
        self._layouts: dict[Kind, Layout] = {}
        self._lines: dict[Kind, Lines] = {}
        self._shared: dict[int, tuple[Any, Shared]] = {}
        self._updates: deque[tuple[Any, int]] = deque()
        self._lock = threading.RLock()

    def sample(self, n: int, windows: Windows | None, which: Mapping[str, Any]) -> Flat:
        kind = self._kind(n, windows, which)
        n_more = _REDRAWS if len(self._actors) > 1 else 0
        with self._lock:
            while True:
                lines = self._lines_of(kind)
                asked = self._ask(kind, self._shares(kind, lines), lines)
                try:
                    return self._received(asked)
                except NotReadyError:  # a partition may have lost its last window since it said what it has
                    if not n_more:
                        raise
                    n_more -= 1

    def _lines_of(self, kind: Kind) -> Lines | None:
        lines = self._lines.get(kind)
        if lines is None or lines.is_lost:
            lines = self._connected(kind)
            if lines is not None:
                self._lines[kind] = lines
                _drop_oldest(self._lines)
        return lines

    def batches(
        self, n: int, windows: Windows | None, prefetch: int, which: Mapping[str, Any]
    ) -> Generator[Flat, None, None]:
        if not isinstance(prefetch, int) or prefetch < 0:
            raise ValueError(f"prefetch: expected a number of batches, at least 0, got {prefetch!r}")
        return self._batches(self._kind(n, windows, which), prefetch)

    def _batches(self, kind: Kind, prefetch: int) -> Generator[Flat, None, None]:
        lines: Lines | None = None
        shares = self._shares(kind)
        asked: deque[_Asked] = deque()
        try:
            while True:
                if lines is None or lines.is_lost:
                    lines = self._connected(kind)
                while len(asked) <= prefetch:
                    asked.append(self._ask(kind, shares, lines))
                try:
                    flat = self._received(asked[0])
                except NotReadyError:
                    shares = self._shares(kind)  # raises if there is nothing anywhere
                    _close(lines)
                    asked.clear()
                    continue
                shares = asked.popleft().shares
                yield flat
                del flat  # its memory is free for the next one, if nobody else has it
        finally:
            _close(lines)

    def _kind(self, n: int, windows: Windows | None, which: Mapping[str, Any]) -> Kind:
        """What is asked for, with restrictions as actors understand them."""
        check_positive("batch_size", n)
        if unknown := which.keys() - _RESTRICTIONS:
            raise TypeError(f"unknown arguments {sorted(unknown)}; there are {', '.join(sorted(_RESTRICTIONS))}")
        settled = dict(which)
        for name in ("recent_steps", "recent_episodes"):
            if settled.get(name) is not None:
                check_positive(name, settled[name])
                settled[name] = -(-settled[name] // len(self._actors))
        for name in ("where", "relabel"):
            if settled.get(name) is not None:
                settled[name] = self._share_function(settled[name])
        return Kind(n, windows, tuple(sorted(settled.items())))

    def _share_function(self, function: Any) -> Shared:
        with self._lock:
            if id(function) not in self._shared:
                self._shared[id(function)] = function, Shared(uuid.uuid4().hex, ray.put(function))
                if len(self._shared) > _MAX_FUNCTIONS:
                    self._shared.pop(next(iter(self._shared)))
            return self._shared[id(function)][1]

    # ---- asking

    def _shares(self, kind: Kind, lines: Lines | None = None) -> list[Share]:
        """How much every actor has; nothing is asked where there is but one."""
        if len(self._actors) == 1:
            return [Share(((1.0, 1.0), (0.0, 0.0)))]
        if lines is not None and len(lines.lines) == len(self._actors):
            with contextlib.suppress(LineLostError):
                return lines.shares()
            lines.close()  # answers of the others may still be on their way
        refs = [actor.share.remote(kind.windows, dict(kind.which)) for actor in self._actors]
        return [get(ref) for ref in refs]

    def _connected(self, kind: Kind) -> Lines | None:
        """Lines to the actors on this machine, for batches of which one was seen before; None if there are none."""
        layout = self._layouts.get(kind)
        if layout is None or not Lines.are_possible():
            return None
        lines = Lines(layout)
        given = layout, kind.windows, dict(kind.which), len(self._actors) > 1
        lines.connect(lambda address: sum(get([a.serve.remote(address, *given) for a in self._actors])))
        return lines if lines.lines and not lines.is_lost else None

    def _ask(self, kind: Kind, shares: Sequence[Share], lines: Lines | None) -> _Asked:
        chances = _chances(shares)
        lease = lines.lease() if lines is not None else None
        asked = _Asked(kind, chances, list(shares), lines, lease)
        start = 0
        for rank, count in enumerate(self._split(kind.n, chances)):
            if count:
                part = _Part(rank, start, start + count)
                asked.parts.append(part)
                self._send(asked, part)
            start += count
        return asked

    def _split(self, n: int, chances: Array) -> list[int]:
        """How many windows of a batch each actor is to give: multinomial."""
        if len(chances) == 1:
            return [n]
        with self._lock:
            numbers = self._rng.uniform(n, _CPU)
        rank = np.searchsorted(np.cumsum(chances)[:-1], numbers.numpy(), side="right")
        return [int(count) for count in np.bincount(rank, minlength=len(chances))]

    def _send(self, asked: _Asked, part: _Part) -> None:
        line = asked.lines.lines.get(part.rank) if asked.lines is not None else None
        if line is not None and asked.lease is not None:
            with contextlib.suppress(LineLostError):
                line.ask(asked.lease.slot, part.start, part.stop)
                return
        self._call(asked, part)

    def _call(self, asked: _Asked, part: _Part) -> None:
        kind = asked.kind
        given = part.stop - part.start, kind.windows, dict(kind.which), len(self._actors) > 1
        part.ref = self._actors[part.rank].sample.remote(*given)

    # ---- receiving

    def _received(self, asked: _Asked) -> Flat:
        """A batch of what the actors gave."""
        layout = asked.lines.layout if asked.lines is not None else None
        whole = asked.lease.tensors(layout) if asked.lease is not None and layout is not None else {}
        found = [self._part(asked, part, whole) for part in asked.parts]
        is_torn = any(piece.is_lost for piece in found)
        if is_torn:  # the actor may still write there, whatever became of it
            whole = {}
            self._layouts.pop(asked.kind, None)
        flat = _joined(whole, asked.parts, [piece.tensors for piece in found])
        self._learn(asked, found, flat)
        counts = torch.tensor([part.stop - part.start for part in asked.parts])
        flat["actor"] = torch.tensor([piece.actor for piece in found]).repeat_interleave(counts)
        if len(self._actors) > 1 and "priority/probability" in flat:
            _weigh(flat, asked, counts)
        return flat

    def _learn(self, asked: _Asked, found: Sequence[_Found], flat: Flat) -> None:
        """Keep what the next batch needs: how much the actors have, and how a batch of this kind looks."""
        if len(self._actors) > 1:
            for part, piece in zip(asked.parts, found, strict=True):
                asked.shares[part.rank] = piece.share
        if asked.kind not in self._layouts:
            if "actor" in flat:
                raise DataError("batch: a field is named 'actor', as what says where rows are from; leave it out")
            self._layouts[asked.kind] = Layout.of(flat, asked.kind.n)
            _drop_oldest(self._layouts)

    def _part(self, asked: _Asked, part: _Part, whole: Flat) -> _Found:
        """What an actor gave, over its line or, if that is lost, through Ray."""
        is_lost = False
        if part.ref is None:
            assert asked.lines is not None
            try:
                actor, share = asked.lines.lines[part.rank].answer()
                return _Found(actor, share, {key: value[part.start : part.stop] for key, value in whole.items()})
            except LineLostError:
                is_lost = True
                self._call(asked, part)
        piece: Piece = get(part.ref)
        return _Found(piece.actor, piece.share, to_tensors(piece), is_lost)

    # ---- priorities

    def update_priorities(
        self,
        actor: torch.Tensor,
        index: torch.Tensor,
        priority: torch.Tensor,
        windows: Windows | None,
        *,
        wait: bool,
    ) -> int:
        for name in np.unique(actor.numpy()).tolist():
            of = actor == name
            given = index[of].numpy(), priority.detach()[of.to(priority.device)].cpu().numpy()
            incarnation, rank = divmod(name, len(self._actors))
            ref = self._actors[rank].update_priorities.remote(incarnation, *given, windows)
            self._updates.append((ref, int(of.sum())))
        n_ignored = 0
        while self._updates and (wait or len(self._updates) > _MAX_LATE * len(self._actors)):
            n_ignored += _ignored(*self._updates.popleft())
        return n_ignored if wait else 0

    def close(self) -> None:
        with self._lock:
            for lines in self._lines.values():
                lines.close()
            self._lines.clear()


def _close(lines: Lines | None) -> None:
    if lines is not None:
        lines.close()


def _drop_oldest(kept: dict[Kind, Any]) -> None:
    if len(kept) > _MAX_KINDS:
        oldest = kept.pop(next(iter(kept)))
        if isinstance(oldest, Lines):
            oldest.close()


def _chances(shares: Sequence[Share]) -> Array:
    """How likely each actor is to give a window.

    Raises:
        NotReadyError: None has any.
    """
    chances = np.zeros(len(shares))
    for parts in zip(*(share.parts for share in shares), strict=True):
        amounts = np.array([amount for _, amount in parts])
        if amounts.sum() > 0:
            chances += max(fraction for fraction, _ in parts) * amounts / amounts.sum()
    if not chances.sum() > 0:
        raise NotReadyError("no actor has a window that could be drawn yet; wait, or ask for other windows")
    whole: Array = chances / chances.sum()
    return whole


def _joined(whole: Flat, parts: Sequence[_Part], given: Sequence[Flat]) -> Flat:
    """The tensors of a batch: in the memory that it has, or in that of its only part, or in new memory."""
    if not whole or whole.keys() != given[0].keys():
        return given[0] if len(given) == 1 else {key: torch.cat([part[key] for part in given]) for key in given[0]}
    for part, tensors in zip(parts, given, strict=True):
        for key, value in tensors.items():
            target = whole[key][part.start : part.stop]
            if target.data_ptr() != value.data_ptr():
                target.copy_(value)
    return whole


def _weigh(flat: Flat, asked: _Asked, counts: torch.Tensor) -> None:
    """Make probabilities and weights those of the whole draw: an actor first, then a window of it."""
    chance = torch.from_numpy(asked.chances)
    ranks = torch.tensor([part.rank for part in asked.parts])
    probability = flat["priority/probability"] * chance[ranks].repeat_interleave(counts)
    least = float(probability.min())
    there = [(share, float(c)) for share, c in zip(asked.shares, chance, strict=True) if c]
    if all(share.is_by_buffer for share, _ in there):
        least = min(least, *(share.least * c for share, c in there))
    beta = max(share.beta for share, _ in there)
    flat["priority/probability"] = probability
    flat["priority/weight"] = (least / probability).pow(beta).clamp(max=1.0).to(torch.float32)


def _ignored(ref: Any, n: int) -> int:
    """How many of an update's priorities were ignored: all of them if the actor died with it."""
    try:
        return int(ray.get(ref))
    except RayTaskError as failure:
        raise failure.cause from failure
    except RayActorError:
        return n
