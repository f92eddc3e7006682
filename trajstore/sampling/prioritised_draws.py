"""Prioritised draws: a tree of masses for every kind of window that is drawn so, kept up to date."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from trajstore.arguments import check_positive
from trajstore.errors import DataError, NotReadyError
from trajstore.format.spans import expand_ranges
from trajstore.sampling.batch_assembler import BatchAssembler, Where, WindowKind
from trajstore.sampling.draws import DrawScope, first_recent
from trajstore.sampling.index_entries import handles_of
from trajstore.sampling.priority_column import COLUMN, PriorityColumn
from trajstore.sampling.priority_options import Priorities
from trajstore.sampling.rng import CounterRng
from trajstore.sampling.step_table import EVICTED, PAST_END, AddressChange, StepTable
from trajstore.sampling.stored_column import StoredColumn
from trajstore.sampling.sum_tree import SumTree
from trajstore.sampling.window_starts import DrawnWindows, concat_drawn
from trajstore.sampling.windows import Windows
from trajstore.schema import Array
from trajstore.writing.writer import Writer

_HEADROOM = 3  # bits that the largest mass may grow by before all are scaled anew
_SLACK = 8  # bits by which it may shrink
_LARGEST_RAW = 1e300
_PIECE = 1 << 20  # leaves that are computed at a time
_MAX_KINDS = 16
USES = "uses"  # the column of how often windows were drawn that start at a step


class PrioritySampler:
    """Draws windows by priority and takes updates. Methods are called with the assembler's lock held.

    Attributes:
        n_ignored: Updates to steps that were evicted.
        n_batches: Batches drawn so far; what schedules go by.
    """

    def __init__(self, source: BatchAssembler, options: Priorities, steps: StepTable) -> None:
        self.source = source
        self.options = options
        self.steps = steps
        self.table = PriorityColumn(steps, None if options.initial == "max" else float(options.initial))
        self._stored = StoredColumn(source, steps, COLUMN, self.table.check, self.table.of_new)
        if options.max_uses is not None:
            steps.attach(USES, torch.int32)
        self.n_ignored = self.n_batches = 0
        self._trees: dict[tuple[Windows, Where | None], _Tree] = {}
        self._masses = _Masses(options)
        self._seen = -1

    def follow(self) -> None:
        """Catch up with the index."""
        index = self.source.index
        if self._seen == index.version or not index.numbers:
            return
        self._stored.follow()  # so steps which got no value yet get the largest so far
        self._seen = index.version

    def save(self, writer: Writer) -> int:
        """Hand what has changed to a writer, for its next commit; returns how many values that is."""
        self.follow()
        return self._stored.save(writer)

    def configure(self, **changes: Any) -> None:
        """Change options; a change of what masses are made of makes all of them anew."""
        options = replace(self.options, **changes)
        _Masses(options).raw_of(self.table.largest)  # refuses what has no power
        if "initial" in changes:
            self.table.initial = None if options.initial == "max" else float(options.initial)
        if changes.keys() - {"beta", "normalize", "duplicates", "stratified", "uniform", "initial"}:
            self._masses = _Masses(options)
            self._trees = {}
        if "normalize" in changes:
            self._trees = {}
        self.options = options

    def kind(self, windows: Windows, where: Where | None) -> WindowKind:
        if windows.weight != "window":
            raise ValueError(f"weight={windows.weight!r}: priorities decide which windows are drawn")
        if windows.boundary in ("pad_left", "pad_both"):
            raise ValueError(
                f"boundary={windows.boundary!r}: a window that starts before its episode has no step whose priority"
                " it could have; use pad_right, short or burn_in"
            )
        return self.source.kind(windows, where)

    def _settle(self) -> None:
        """Choose the scale of masses anew, and make all of them anew."""
        self._masses.settle(self.n_batches, self.table)
        self._trees = {}

    def _tree(self, windows: Windows, where: Where | None) -> _Tree:
        tree = self._trees.get((windows, where))
        if tree is None:
            tree = self._trees[windows, where] = _Tree(self, windows, where)
            if len(self._trees) > _MAX_KINDS:
                self._trees.pop(next(iter(self._trees)))
        tree.update(self._masses)
        return tree

    def draw(
        self, batch_size: int, windows: Windows, among: DrawScope, rng: CounterRng
    ) -> tuple[WindowKind, DrawnWindows]:
        """The windows of a batch, with their probabilities and weights."""
        check_positive("batch_size", batch_size)
        self.follow()
        if self._masses.is_stale(self.n_batches, self.table):
            self._settle()
        kind = self.kind(windows, among.where)
        tree = self._tree(windows, among.where)
        if not kind.starts.total:
            raise self.source.no_windows(windows, "that the restrictions allow " if among.where else "")
        if not tree.total:
            raise DataError("every window that could be drawn has priority 0, or was drawn as often as allowed")
        if self.options.uniform and among.recent_fraction != 1.0:
            raise ValueError("uniform and recent_fraction can't be combined")
        if self.options.max_uses is not None:
            drawn = self._draw_unused(tree, batch_size, among, rng, self.options.max_uses)
            self.n_batches += 1
            return kind, self._weighted(tree, drawn, among, 0.0)
        n_uniform = round(batch_size * self.options.uniform)
        parts = []
        if n_uniform < batch_size:
            parts.append(tree.draw(batch_size - n_uniform, rng, among, self.options.stratified))
        if n_uniform:
            parts.append(tree.uniform(n_uniform, rng, among))
        draw = self._weighted(tree, _joined(parts), among, n_uniform / batch_size)
        self.n_batches += 1
        return kind, draw

    def _draw_unused(self, tree: _Tree, n: int, among: DrawScope, rng: CounterRng, max_uses: int) -> _Drawn:
        """Windows none of which is drawn more often than allowed; those used up are never drawn again.

        Raises:
            NotReadyError: There are too few uses left; nothing is used.
        """
        if among.is_recent:
            raise ValueError("max_uses and recent windows can't be combined")
        parts: list[_Drawn] = []
        taken = np.empty(0, np.int64)
        while len(taken) < n and tree.total:
            leaf, drawn = tree.draw_leaves(n - len(taken), rng)
            used = self.steps.get(USES, leaf) + _rank(leaf)
            good = np.flatnonzero(used < max_uses)
            self._use(leaf[good], 1, max_uses)
            taken = np.append(taken, leaf[good])
            parts.append(drawn.some(good))
        if len(taken) < n:
            self._use(taken, -1, max_uses)
            raise NotReadyError(
                f"{len(taken)} windows are left that were drawn less than {max_uses} times, {n} asked"
            )
        return _joined(parts)

    def _use(self, address: Array, change: int, max_uses: int) -> None:
        """Count uses, and give windows the mass that they have then."""
        distinct, count = np.unique(address, return_counts=True)
        uses = self.steps.get(USES, distinct) + change * count
        self.steps.set(USES, distinct, uses.astype(np.int32))
        changed = distinct[(uses >= max_uses) | (change < 0)]
        where = torch.from_numpy(changed).to(self.source.device)
        for tree in self._trees.values():
            tree.put(where, changed, self._masses)

    def _weighted(self, tree: _Tree, drawn: _Drawn, among: DrawScope, uniform: float) -> DrawnWindows:
        """Weights and probabilities of a batch of which the part ``uniform`` is drawn uniformly."""
        n, probability = tree.n_windows(among), drawn.probability
        if uniform:
            probability = probability * (1 - uniform) + uniform / n
        least = probability.min()
        if self.options.normalize == "buffer" and not among.is_recent:
            smallest = tree.smallest * ((1 - uniform) * (not uniform or tree.is_all_positive))
            least = smallest + uniform / n
        weight = (least / probability).pow(self.options.beta_at(self.n_batches)).clamp(max=1.0)
        return replace(drawn.draw, probability=probability, weight=weight.to(torch.float32))

    def update(self, index: torch.Tensor, priority: torch.Tensor, windows: Windows | None) -> int:
        """Set priorities of steps; returns how many were ignored because they were evicted.

        Raises:
            DataError: Something is wrong with indices or priorities; nothing was changed.
        """
        self.follow()
        handles, values = _checked(index, priority)
        if values.ndim == 2:
            self._addresses(handles, is_spread=False)  # the windows' own steps must be there
            handles, values = _spread(handles, values, windows)
        address = self._addresses(handles, is_spread=values.ndim != priority.dim())
        n_ignored = int((address == EVICTED).sum())
        address, values = address[address >= 0], values[address >= 0]
        if self.options.duplicates == "max":
            address, values = _largest(address, values)
        where = torch.from_numpy(address).to(self.source.device)
        is_outgrown = self._masses.outgrown(values)  # refuses what has no power
        self._masses.replaced(self.table.get(address), values)
        self.table.set(address, values)
        if is_outgrown:
            self._settle()
        for tree in self._trees.values():
            tree.put(where, address, self._masses)
        self.n_ignored += n_ignored
        return n_ignored

    def _addresses(self, handles: Array, is_spread: bool) -> Array:
        """Addresses of steps, below 0 for those that were evicted and, where ``is_spread``, those past the end."""
        address = self.steps.addresses_of(handles)
        bad = address < (PAST_END if is_spread else EVICTED)
        if bad.any():
            raise DataError(f"index {handles[np.flatnonzero(bad)[0]].tolist()}: this reader has no such step")
        return address

    def mass(self, windows: Windows, among: DrawScope) -> WindowMass | None:
        """How much there is to draw from, to be compared with that of other samplers; None: nothing."""
        self.follow()
        if self._masses.is_stale(self.n_batches, self.table):
            self._settle()
        self.kind(windows, among.where)
        tree, scale = self._tree(windows, among.where), self._masses.scale
        if not tree.total:
            return None
        recent = tree.recent_mass(among) / scale if among.is_recent else 0.0
        uniform, n, least = self.options.uniform, tree.n_windows(among), math.inf
        if self.options.normalize == "buffer":
            least = float(tree.smallest * (1 - uniform) * (not uniform or tree.is_all_positive) + uniform / n)
        return WindowMass(tree.total / scale, recent, n, least)

    def state_dict(self) -> dict[str, Any]:
        """What it takes to go on as before, the priorities themselves included."""
        self.follow()
        return {
            "n_batches": self.n_batches,
            "n_ignored": self.n_ignored,
            "largest": self.table.largest,
            "steps": self.steps.state_dict(),
            "masses": self._masses.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.n_batches, self.n_ignored = int(state["n_batches"]), int(state["n_ignored"])
        self.follow()
        self.steps.load_state_dict(state["steps"])
        self.table.largest = float(state["largest"])
        self._masses.load_state_dict(state["masses"], self.source.device)
        self._trees = {}

    def stats(self, windows: Windows, where: Where | None, n_bins: int) -> dict[str, Any]:
        """Figures over the windows that can be drawn; reads all of them."""
        self.follow()
        if self._masses.is_stale(self.n_batches, self.table):
            self._settle()
        return self._tree(windows, where).stats(n_bins) | {
            "n_ignored": self.n_ignored,
            "largest": self.table.largest,
        }


@dataclass(frozen=True, slots=True)
class WindowMass:
    """Of windows that can be drawn.

    Attributes:
        total: The sum of (p + eps)^alpha over all of them.
        recent: The same over recent ones, where these are asked for.
        n_windows: How many there are, recent ones where these are asked for.
        least: The smallest probability that any of them has, where weights are relative to that of the buffer.
    """

    total: float
    recent: float
    n_windows: int
    least: float


@dataclass(frozen=True, slots=True)
class _Drawn:
    """Windows, and the probability that priorities give to each."""

    draw: DrawnWindows
    probability: torch.Tensor

    def some(self, chosen: Array) -> _Drawn:
        where = torch.from_numpy(chosen).to(self.draw.entry.device)
        n = None if self.draw.n is None else self.draw.n[where]
        return _Drawn(DrawnWindows(self.draw.entry[where], self.draw.start[where], n), self.probability[where])


def _joined(parts: list[_Drawn]) -> _Drawn:
    return _Drawn(concat_drawn([part.draw for part in parts]), torch.cat([part.probability for part in parts]))


class _Masses:
    """From priorities to the whole numbers that the trees add up: exact sums, the same on every device."""

    def __init__(self, options: Priorities) -> None:
        self._options = options
        self._scale = 0.0
        self._limit = 0.0  # the largest raw mass that this scale is good for
        self._size = 0
        self._ranked_at = 0
        self._ranks: torch.Tensor | None = None  # sorted priorities, for ranks
        self._is_loose = False  # the largest priority may have become far smaller

    @property
    def scale(self) -> float:
        """What raw masses are multiplied with."""
        return self._scale

    def is_stale(self, n_batches: int, table: PriorityColumn) -> bool:
        is_ranked = self._options.kind == "rank"
        is_old = is_ranked and (self._ranks is None or n_batches - self._ranked_at >= self._options.rank_every)
        return self._scale == 0.0 or is_old or table.size > self._size or self._is_too_loose(table)

    def _is_too_loose(self, table: PriorityColumn) -> bool:
        if not self._is_loose or self._options.kind == "rank":
            return False
        self._is_loose = False
        return bool(self.raw_of(table.maximum()) * 2 ** (_HEADROOM + _SLACK) < self._limit)

    def outgrown(self, values: Array) -> bool:
        """Whether new priorities are too large for the scale."""
        if self._options.kind == "rank" or not len(values):
            return False
        return self.raw_of(float(values.max())) > self._limit

    def replaced(self, old: Array, new: Array) -> None:
        """Take note where one of the largest priorities becomes a far smaller one."""
        if len(old) and self.raw_of(float(old.max())) * 2 ** (_HEADROOM + 1) >= self._limit:
            self._is_loose = self.raw_of(float(new.max())) * 2 ** (_HEADROOM + _SLACK) < self._limit

    def raw_of(self, priority: float) -> float:
        """(p + eps)^alpha.

        Raises:
            DataError: That is too large a number.
        """
        try:
            raw = float((priority + self._options.eps) ** self._options.alpha)
        except OverflowError:
            raw = math.inf
        if not raw < _LARGEST_RAW:
            raise DataError(f"priority {priority!r} is too large for alpha={self._options.alpha!r}")
        return raw

    def settle(self, n_batches: int, table: PriorityColumn) -> None:
        """Choose the scale anew: the sum of all masses stays below 2**62."""
        self._size = max(2 * table.size, 1 << 20)
        bits = 61 - (self._size - 1).bit_length()
        if self._options.kind == "rank":
            self._ranks = torch.sort(table.of_steps()).values
            self._ranked_at, self._limit = n_batches, 1.0
        else:
            self._limit = max(self.raw_of(table.maximum()), 1e-30) * 2**_HEADROOM
        self._scale, self._is_loose = 2.0**bits / self._limit, False

    def of(self, priority: torch.Tensor) -> torch.Tensor:
        """Masses of raw priorities; that of 0 is 0, others have at least 1."""
        value = priority.to(torch.float64)
        if self._ranks is None:
            raw = (value + self._options.eps).pow(self._options.alpha)
        else:
            rank = len(self._ranks) - torch.searchsorted(self._ranks, priority, right=True) + 1
            raw = rank.to(torch.float64).reciprocal().pow(self._options.alpha)
        mass = (raw * self._scale).round_().to(torch.int64).clamp_(min=1)
        return torch.where(value > 0, mass, 0)

    def state_dict(self) -> dict[str, Any]:
        return {
            "scale": self._scale,
            "limit": self._limit,
            "size": self._size,
            "ranked_at": self._ranked_at,
            "is_loose": self._is_loose,
            "ranks": None if self._ranks is None else self._ranks.cpu(),
        }

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        self._scale, self._limit = float(state["scale"]), float(state["limit"])
        self._size, self._ranked_at = int(state["size"]), int(state["ranked_at"])
        self._is_loose = bool(state["is_loose"])
        ranks = state["ranks"]
        self._ranks = None if ranks is None else torch.as_tensor(ranks).to(device)


class _Tree:
    """The masses of one kind of window: one leaf a row, positive where a window can start."""

    def __init__(self, owner: PrioritySampler, windows: Windows, where: Where | None) -> None:
        source = self._source = owner.source
        self._owner = owner
        self._table = owner.steps
        self._priorities = owner.table
        self._windows = windows
        self._where = where
        with_min = owner.options.normalize == "buffer"
        self._tree = SumTree(source.device, compiled=source.kernels is not None, with_min=with_min)
        self._seen = (-1, -1)  # versions of the index and of the step table
        self._n_closed = 0
        self._tail = np.empty((4, 0), np.int64)  # of open episodes: stream, episode, first t, t where starts stop
        self.kind = source.kind(windows, where)

    @property
    def total(self) -> int:
        return int(self._tree.total)

    # ---- following the index

    def update(self, masses: _Masses) -> None:
        index = self._source.index
        self.kind = self._source.kind(self._windows, self._where)
        seen = (index.version, self._table.version)
        if seen == self._seen:
            return
        removals = index.changes.removals_since(self._seen[0])
        changes = self._table.changes_since(self._seen[1])
        is_same = removals is not None and not any(removal.is_renumbered for removal in removals)
        if not is_same or changes is None or self._where is not None or self.kind.starts.chains is not None:
            self._rebuild(masses)
        else:
            self._tree.resize(self._table.size)
            for change in changes:
                self._follow_change(change)
            self._trim(max((removal.n_rewritten for removal in removals or ()), default=0), masses)
            self._extend(masses)
        self._n_closed, self._seen = index.n_closed, seen
        tail = slice(index.n_closed, index.n)
        base = index.t_base.host[tail]
        stop = self._valid(np.arange(index.n_closed, index.n))[1] + base
        self._tail = np.stack([index.stream.host[tail], index.episode.host[tail], base, stop])

    def _follow_change(self, change: AddressChange) -> None:
        """Steps have moved, or are gone."""
        old = torch.from_numpy(change.old).to(self._source.device)
        if change.new is not None:
            self._tree.put(torch.from_numpy(change.new).to(self._source.device), self._tree.get(old))
        self._tree.put(old, torch.zeros_like(old))

    def _trim(self, stop: int, masses: _Masses) -> None:
        """Take away the masses of windows that reach into evicted steps."""
        if stop and (self._windows.lead or self._windows.boundary == "short"):
            entry = np.arange(self._source.index.first, min(stop, self._n_closed))
            self._clear(entry, np.zeros_like(entry), self._source.index.lengths_of(entry))
            self._set(entry, *self._valid(entry), masses)

    def _valid(self, entry: Array) -> tuple[Array, Array]:
        """Positions at which windows can start, from and to, of index entries."""
        count, lead = self.kind.starts.counts(entry), self._windows.lead
        return np.where(count > 0, lead, 0), np.where(count > 0, count + lead, 0)

    def _extend(self, masses: _Masses) -> None:
        """Add the starts that are new: of episodes that ended or came since, and of those that are open."""
        index = self._source.index
        entry = np.arange(self._n_closed, index.n)
        first, stop = self._valid(entry)
        done = np.zeros(len(entry), np.int64)
        stream, episode, t_start, t_stop = self._tail
        was_open = index.find(stream, episode)
        for i in np.flatnonzero(was_open < 0):  # aborted, or evicted whole: rare
            gone = self._table.forget_episode(*(int(a[i]) for a in (stream, episode, t_start, t_stop)))
            self._follow_change(AddressChange(gone, None))
        here = was_open >= self._n_closed
        was_open = was_open[here]
        done[was_open - self._n_closed] = (t_stop[here] - index.t_base.host[was_open]).clip(0)
        lost = done > stop  # what ended without a successor may have lost its last start
        self._clear(entry[lost], stop[lost], done[lost])
        if self._windows.lead:
            done[:] = 0  # evictions and more steps change what the first steps count
            self._clear(entry, np.zeros_like(entry), np.minimum(first, self._source.index.lengths_of(entry)))
        if self._owner.options.over != "start":
            done = done - self._windows.reach  # windows near the old end have more steps now
        self._set(entry, np.maximum(first, np.minimum(done, stop)), stop, masses)

    def _clear(self, entry: Array, first: Array, stop: Array) -> None:
        owner, position = expand_ranges(first, stop)
        if len(position):
            address = torch.from_numpy(self._table.addresses(entry[owner], position)).to(self._source.device)
            self._tree.put(address, torch.zeros_like(address))

    def _rebuild(self, masses: _Masses) -> None:
        index = self._source.index
        self._tree.rebuild(torch.zeros(self._table.size, dtype=torch.int64, device=self._source.device))
        entry = np.arange(index.first, index.n)
        first, stop = self._valid(entry)
        sums = np.cumsum(stop - first)
        if not len(sums) or not sums[-1]:
            return
        cuts = np.searchsorted(sums, np.arange(0, int(sums[-1]), _PIECE), side="left")
        for low, high in zip(cuts, np.append(cuts[1:], len(entry)), strict=True):
            piece = slice(int(low), int(high))
            self._set(entry[piece], first[piece], stop[piece], masses)

    def _set(self, entry: Array, first: Array, stop: Array, masses: _Masses) -> None:
        """Give masses to the starts at positions from ``first`` to ``stop`` of index entries."""
        owner, position = expand_ranges(first, stop)
        if not len(position):
            return
        address = self._table.addresses(entry[owner], position)
        where = torch.from_numpy(address).to(self._source.device)
        mass = masses.of(self._priority(entry[owner], position, where))
        if len(address) == address[-1] - address[0] + 1 and (np.diff(address) == 1).all():
            self._tree.put_range(int(address[0]), mass)
        else:
            self._tree.put(where, mass)

    def _priority(self, entry: Array, position: Array, address: torch.Tensor) -> torch.Tensor:
        """Priorities of the windows that start at positions."""
        over, spec = self._owner.options.over, self._windows
        if over == "start" or spec.length == 1:
            return self._unused(address)
        steps = position[:, None] + np.arange(spec.length) * spec.stride
        owner, inside, exists = self._learned(entry, steps)
        where = self._table.addresses(owner.ravel(), inside.ravel()).reshape(steps.shape)
        values = self._priorities.values[torch.from_numpy(where).to(address.device)]
        is_there = torch.from_numpy(exists).to(address.device)
        largest = values.masked_fill(~is_there, 0.0).amax(1)
        mean = (values * is_there).sum(1) / is_there.sum(1)
        eta = {"max": 1.0, "mean": 0.0}[over] if isinstance(over, str) else over
        return largest * eta + mean * (1 - eta)

    def _unused(self, address: torch.Tensor) -> torch.Tensor:
        """Priorities of windows that start at addresses; 0 where they are used up."""
        values, max_uses = self._priorities.values[address], self._owner.options.max_uses
        if max_uses is None:
            return values
        return values * (self._table.columns[USES].values[address] < max_uses)

    def _learned(self, entry: Array, steps: Array) -> tuple[Array, Array, Array]:
        """Where steps of windows lie, and which are learned from."""
        starts = self.kind.starts
        if starts.chains is None:
            n = starts.usable_of(entry)[:, None]
            inside = np.minimum(steps, n - 1)
            return np.broadcast_to(entry[:, None], steps.shape), inside, inside == steps
        device = self._source.device
        found = starts.chains.steps(torch.from_numpy(entry).to(device), torch.from_numpy(steps).to(device))
        owner, inside = found.entry.cpu().numpy(), found.position.cpu().numpy()
        usable = starts.usable_of(owner.ravel()).reshape(owner.shape)
        return owner, inside, found.exists.cpu().numpy() & (inside < usable)

    def put(self, where: torch.Tensor, address: Array, masses: _Masses) -> None:
        """Take over changed priorities of steps."""
        is_simple = self._owner.options.over == "start" or self._windows.length == 1
        if not len(address):
            return
        if not is_simple and self.kind.starts.chains is not None:
            self._seen = (-1, -1)  # made anew when it is asked for
            return
        self.update(masses)
        if is_simple:
            old = self._tree.get(where)
            self._put_valid(where, address, old, masses.of(self._unused(where)))
            return
        self._put_windows(address, masses)

    def _put_valid(self, where: torch.Tensor, address: Array, old: torch.Tensor, mass: torch.Tensor) -> None:
        """Set masses where a window can start; one of mass 0 may be either, so those are looked up."""
        unsure = (old == 0).cpu().numpy()
        if unsure.any():
            entry, position = self._table.steps(address[unsure])
            first, stop = self._valid(entry)
            valid = np.ones(len(address), bool)
            valid[unsure] = (position >= first) & (position < stop)
            mass = torch.where(torch.from_numpy(valid).to(mass.device), mass, 0)
        self._tree.put(where, mass)

    def _put_windows(self, address: Array, masses: _Masses) -> None:
        """Compute anew the windows that the steps are in."""
        spec = self._windows
        entry, position = self._table.steps(address)
        start = (position[:, None] - np.arange(spec.length) * spec.stride).ravel()
        owner = np.repeat(entry, spec.length)
        first, stop = self._valid(owner)
        good = (start >= first) & (start < stop)
        pairs = np.unique(np.stack([owner[good], start[good]]), axis=1)
        order = np.lexsort((pairs[1], pairs[0]))
        entries, starts = pairs[0][order], pairs[1][order]
        self._set(entries, starts, starts + 1, masses)

    # ---- drawing

    def draw(self, n: int, rng: CounterRng, among: DrawScope, stratified: bool) -> _Drawn:
        if among.is_recent:
            return self._draw_recent(n, rng, among)
        leaf, mass = self._tree.draw(n, rng, stratified=stratified)
        return self._located(leaf, self._probability(mass), rng)

    def draw_leaves(self, n: int, rng: CounterRng) -> tuple[Array, _Drawn]:
        """Windows, and the addresses of the steps at which they start."""
        leaf, mass = self._tree.draw(n, rng)
        return leaf.cpu().numpy(), self._located(leaf, self._probability(mass), rng)

    def _probability(self, mass: torch.Tensor) -> torch.Tensor:
        return mass.to(torch.float64) / self._tree.total.to(torch.float64)

    def _located(self, leaf: torch.Tensor, probability: torch.Tensor, rng: CounterRng) -> _Drawn:
        entry, position = self._table.steps(leaf.cpu().numpy())
        device = self._source.device
        entries, start = (torch.from_numpy(a).to(device) for a in (entry, position))
        return _Drawn(self.kind.starts.with_n(DrawnWindows(entries, start), rng), probability)

    def _first_recent(self, among: DrawScope) -> int:
        return first_recent(self.kind, among) if among.is_recent else 0

    def _recent(self, among: DrawScope) -> tuple[Array, Array]:
        """Leaves and masses of recent windows; costs as much as there are."""
        starts, index = self.kind.starts, self._source.index
        number = torch.arange(self._first_recent(among), starts.total, device=index.device)
        draw = starts.locate(number, CounterRng(0))
        entry, start = draw.entry.cpu().numpy(), draw.start.clamp(min=0).cpu().numpy()
        address = np.unique(self._table.addresses(entry, start))
        return address, self._tree.get(torch.from_numpy(address).to(index.device)).cpu().numpy()

    def recent_mass(self, among: DrawScope) -> float:
        return float(self._recent(among)[1].sum())

    def _draw_recent(self, n: int, rng: CounterRng, among: DrawScope) -> _Drawn:
        address, mass = self._recent(among)
        sums = np.cumsum(mass)
        if not len(sums) or not sums[-1]:
            raise DataError("every recent window that could be drawn has priority 0")
        device, fraction = self._source.device, among.recent_fraction
        n_recent = round(n * fraction)
        number = rng.below(n_recent, int(sums[-1]), torch.device("cpu")).numpy()
        leaf = torch.from_numpy(address[np.searchsorted(sums, number, side="right")]).to(device)
        if n_recent < n:
            leaf = torch.cat([leaf, self._tree.draw(n - n_recent, rng)[0]])
        chosen = self._tree.get(leaf)
        is_recent = torch.from_numpy(np.isin(leaf.cpu().numpy(), address)).to(device)
        share = chosen.to(torch.float64) / float(sums[-1]) * is_recent
        return self._located(leaf, share * fraction + self._probability(chosen) * (1 - fraction), rng)

    def uniform(self, n: int, rng: CounterRng, among: DrawScope) -> _Drawn:
        """Windows drawn whatever their priorities, with the probability that these would give them."""
        draw = self.kind.starts.draw(n, rng, self._first_recent(among))
        entry, start = draw.entry.cpu().numpy(), draw.start.cpu().numpy()
        address = torch.from_numpy(self._table.addresses(entry, start.clip(0))).to(self._source.device)
        probability = self._probability(self._tree.get(address))
        if among.is_recent:
            probability = probability * (self._tree.total.to(torch.float64) / float(self._recent(among)[1].sum()))
        return _Drawn(draw, probability)

    def n_windows(self, among: DrawScope) -> int:
        """How many windows there are."""
        return self.kind.starts.total - self._first_recent(among)

    @property
    def is_all_positive(self) -> bool:
        """No window has priority 0."""
        return int(self._tree.n_positive) == self.kind.starts.total

    @property
    def smallest(self) -> torch.Tensor:
        """The smallest probability that is not 0."""
        return self._probability(self._tree.smallest)

    def stats(self, n_bins: int) -> dict[str, Any]:
        starts, index = self.kind.starts, self._source.index
        lowest, highest, total, squares, n = np.inf, 0.0, 0.0, 0.0, 0
        by_age = np.zeros(n_bins)
        mass_sum = max(float(self._tree.total), 1.0)
        for low in range(0, starts.total, _PIECE):
            number = torch.arange(low, min(low + _PIECE, starts.total), device=index.device)
            draw = starts.locate(number, CounterRng(0))
            entry, start = draw.entry.cpu().numpy(), draw.start.clamp(min=0).cpu().numpy()
            where = torch.from_numpy(self._table.addresses(entry, start)).to(index.device)
            values = self._priorities.values[where].to(torch.float64)
            share = self._tree.get(where).to(torch.float64) / mass_sum
            lowest, highest = min(lowest, float(values.min())), max(highest, float(values.max()))
            total, squares, n = total + float(values.sum()), squares + float((share**2).sum()), n + len(values)
            bins = np.minimum((number.cpu().numpy() * n_bins) // starts.total, n_bins - 1)
            by_age += np.bincount(bins, share.cpu().numpy(), n_bins)
        return {
            "n_windows": n,
            "min": lowest if n else None,
            "max": highest if n else None,
            "mean": total / n if n else None,
            "effective_sample_size": 1.0 / squares if squares else 0.0,
            "mass_by_age": by_age.tolist(),
        }


def _rank(values: Array) -> Array:
    """How often each value has come before."""
    order = np.argsort(values, kind="stable")
    sorted_ = values[order]
    first = np.flatnonzero(np.append(True, sorted_[1:] != sorted_[:-1])[: len(values)])
    rank = np.empty(len(values), np.int64)
    rank[order] = np.arange(len(values)) - np.repeat(first, np.diff(np.append(first, len(values))))
    return rank


def _checked(index: torch.Tensor, priority: torch.Tensor) -> tuple[Array, Array]:
    handles = handles_of(index)
    if not isinstance(priority, torch.Tensor):
        raise DataError(f"priority: expected a tensor, got {type(priority).__name__}")
    if priority.dim() not in (1, 2) or len(priority) != len(index):
        raise DataError(
            f"priority: expected shape ({len(index)},) or ({len(index)}, length), got {tuple(priority.shape)}"
        )
    if not priority.is_floating_point():
        raise DataError(f"priority: expected floating point, got {priority.dtype}")
    values = priority.detach().to(torch.float32).cpu().numpy()
    bad = ~np.isfinite(values) | (values < 0)
    if bad.any():
        where = tuple(int(i[0]) for i in np.nonzero(bad))
        raise DataError(f"priority {list(where)}: expected a finite number of at least 0, got {values[where]}")
    if (values == 0).any():  # only what was 0 before it was rounded means never
        was_positive = (priority.detach() > 0).cpu().numpy() & (values == 0)
        values = np.where(was_positive, np.finfo(np.float32).smallest_subnormal, values)
    return handles, values


def _spread(handles: Array, values: Array, windows: Windows | None) -> tuple[Array, Array]:
    """Handles of every learning step, for priorities of shape [batch, length]."""
    length, stride = (windows.length, windows.stride) if windows is not None else (values.shape[1], 1)
    if values.shape[1] != length:
        raise DataError(f"priority: expected shape ({len(values)}, {length}), got {values.shape}")
    steps = np.repeat(handles, length, axis=0)
    steps[:, 2] += np.tile(np.arange(length) * stride, len(handles))
    return steps, values.ravel()


def _largest(address: Array, values: Array) -> tuple[Array, Array]:
    """Each address once, with the largest of its values."""
    order = np.lexsort((values, address))
    address, values = address[order], values[order]
    last = np.append(np.diff(address) != 0, True)[: len(address)]
    return address[last], values[last]


class PrioritisedDraws:
    """Batches of prioritised windows, one after the other, from a generator of their own."""

    def __init__(
        self, sampler: PrioritySampler, batch_size: int, windows: Windows, among: DrawScope, rng: CounterRng
    ) -> None:
        check_positive("batch_size", batch_size)
        self._sampler = sampler
        self._batch_size, self._windows, self._among = batch_size, windows, among
        self._rng = rng

    def draw(self, batch_size: int | None = None) -> tuple[WindowKind, DrawnWindows] | None:
        """The windows of the next batch, or some in place of others that are gone."""
        return self._sampler.draw(batch_size or self._batch_size, self._windows, self._among, self._rng)

    @property
    def kind(self) -> WindowKind:
        return self._sampler.kind(self._windows, self._among.where)

    def state_dict(self) -> dict[str, Any]:
        return {"rng": self._rng.state_dict(), "priorities": self._sampler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rng.load_state_dict(state["rng"])
        if "priorities" in state:  # else they come another way
            self._sampler.load_state_dict(state["priorities"])

    def stats(self) -> dict[str, Any]:
        return {}
