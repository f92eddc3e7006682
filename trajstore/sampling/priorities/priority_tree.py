"""The sum tree of one window kind: masses of the windows that can be drawn, kept in step with the index."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trajstore.errors import DataError
from trajstore.format.spans import expand_ranges
from trajstore.sampling.batches.batch_assembler import BatchAssembler, Where
from trajstore.sampling.draws import DrawScope, first_recent
from trajstore.sampling.priorities.compiled_priorities import CompiledPriorities, DrawnArrays, PriorityUpdate
from trajstore.sampling.priorities.priority_column import PriorityColumn
from trajstore.sampling.priorities.priority_masses import PriorityMasses
from trajstore.sampling.priorities.priority_options import Priorities
from trajstore.sampling.priorities.sum_tree import SumTree
from trajstore.sampling.rng import CounterRng
from trajstore.sampling.step_columns.step_table import AddressChange
from trajstore.sampling.window_starts import DrawnWindows, concat_drawn
from trajstore.sampling.windows import Windows
from trajstore.schema import Array

USES = "uses"  # column of the step table: how often the window that starts at a step was drawn
_PIECE = 1 << 20  # windows processed at a time when all of them are read
_NEVER = (-1, -1)


@dataclass(frozen=True, slots=True)
class PrioritisedWindows:
    """Drawn windows, and the probability that their priorities give to each."""

    windows: DrawnWindows
    probability: torch.Tensor

    def take(self, chosen: Array) -> PrioritisedWindows:
        """The windows at some positions of the draw."""
        where = torch.from_numpy(chosen).to(self.windows.entry.device)
        n = None if self.windows.n is None else self.windows.n[where]
        windows = DrawnWindows(self.windows.entry[where], self.windows.start[where], n)
        return PrioritisedWindows(windows, self.probability[where])


def concat_prioritised(parts: list[PrioritisedWindows]) -> PrioritisedWindows:
    """The windows of several draws, as one."""
    if len(parts) == 1:
        return parts[0]
    windows = concat_drawn([part.windows for part in parts])
    return PrioritisedWindows(windows, torch.cat([part.probability for part in parts]))


class PriorityTree:
    """Masses of the windows of one kind, one leaf per address of the step table.

    A leaf is positive if a window can start at its step and the window's priority is not 0. `follow` brings the
    tree up to date with the index; its cost is proportional to what changed, except for windows with ``where`` or
    ``boundary="cross"``, whose tree is rebuilt. Not thread-safe: call methods with the assembler's lock held.

    Args:
        assembler: Provides the index and the window kinds.
        column: The priorities of steps.
        options: ``over``, ``max_uses`` and ``normalize`` count here.
        windows: The window kind.
        where: Restricts the tree to some episodes.
        compiled: Compiled loops, for the CPU.

    Attributes:
        kind: The window kind, as of the last `follow`.
    """

    def __init__(
        self,
        assembler: BatchAssembler,
        column: PriorityColumn,
        options: Priorities,
        windows: Windows,
        where: Where | None,
        compiled: CompiledPriorities | None = None,
    ) -> None:
        self._assembler = assembler
        self._column = column
        self._steps = column.steps
        self._options = options
        self._windows = windows
        self._where = where
        with_min = options.normalize == "buffer"
        self._tree = SumTree(assembler.device, compiled=assembler.kernels is not None, with_min=with_min)
        self._compiled = compiled
        # Whether a window has the priority of the step that it starts at.
        self._is_simple = options.over == "start" or windows.length == 1
        self._seen = _NEVER  # versions of the index and of the step table
        self._n_closed = 0
        self._tail = np.empty((4, 0), np.int64)  # of open episodes: stream, episode, first t, t where starts stop
        self.kind = assembler.kind(windows, where)

    @property
    def total(self) -> int:
        """The sum of all masses; on a device, the host waits for it."""
        arrays = self._tree.arrays
        return int(self._tree.total if arrays is None else arrays[0][0])

    # ---- following the index

    def follow(self, masses: PriorityMasses) -> None:
        """Take over episodes and steps that came, moved or were evicted since the last call."""
        index = self._assembler.index
        seen = (index.version, self._steps.version)
        if seen == self._seen:
            return
        self.kind = self._assembler.kind(self._windows, self._where)
        removals = index.changes.removals_since(self._seen[0])
        changes = self._steps.changes_since(self._seen[1])
        if removals == [] and changes == [] and self._follow_new_starts(masses):
            self._seen = seen
            return
        is_same = removals is not None and not any(removal.is_renumbered for removal in removals)
        if not is_same or changes is None or self._where is not None or self.kind.starts.chains is not None:
            self._rebuild(masses)
        else:
            self._tree.resize(self._steps.size)
            for change in changes:
                self._follow_change(change)
            self._follow_eviction(max((removal.n_rewritten for removal in removals or ()), default=0), masses)
            self._follow_growth(masses)
        self._n_closed, self._seen = index.n_closed, seen
        tail = slice(index.n_closed, index.n)
        base = index.t_base.host[tail]
        stop = self._start_range(np.arange(index.n_closed, index.n))[1] + base
        self._tail = np.stack([index.stream.host[tail], index.episode.host[tail], base, stop]).astype(np.int64)

    def _follow_new_starts(self, masses: PriorityMasses) -> bool:
        """Follow open episodes that got longer, by compiled loops; returns False if anything else may matter."""
        compiled, starts, index = self._compiled, self.kind.starts, self._assembler.index
        if index.n_closed != self._n_closed or index.n - index.n_closed != self._tail.shape[1]:
            return False
        is_plain = self._is_simple and self._options.max_uses is None and not self._windows.lead
        if compiled is None or not is_plain or self._where is not None or starts.chains is not None:
            return False
        address = compiled.new_starts(index, starts, self._tail)
        if address is None:
            return False
        if self._tree.n != self._steps.size:
            self._tree.resize(self._steps.size)
        if len(address):
            value = self._column.get(address)
            raw = masses.raw_masses(value, value + np.float64(masses.eps))
            compiled.put(self._tree, starts, address, value, raw, masses.scale, are_starts=True)
        return True

    def _follow_change(self, change: AddressChange) -> None:
        """Move the masses of steps that have a new address, and clear those of steps that have none."""
        old = torch.from_numpy(change.old).to(self._assembler.device)
        if change.new is not None:
            self._tree.put(torch.from_numpy(change.new).to(self._assembler.device), self._tree.get(old))
        self._tree.put(old, torch.zeros_like(old))

    def _follow_eviction(self, stop: int, masses: PriorityMasses) -> None:
        """Recompute closed episodes below entry ``stop``, where windows may reach into evicted steps."""
        if stop and (self._windows.lead or self._windows.boundary == "short"):
            entry = np.arange(self._assembler.index.first, min(stop, self._n_closed))
            self._clear(entry, np.zeros_like(entry), self._assembler.index.lengths_of(entry))
            self._compute(entry, *self._start_range(entry), masses)

    def _start_range(self, entry: Array) -> tuple[Array, Array]:
        """First position at which a window can start, and the position after the last, per index entry."""
        count, lead = self.kind.starts.counts(entry), self._windows.lead
        return np.where(count > 0, lead, 0), np.where(count > 0, count + lead, 0)

    def _follow_growth(self, masses: PriorityMasses) -> None:
        """Compute the starts that are new: of episodes that ended or began since, and of open ones."""
        index = self._assembler.index
        entry = np.arange(self._n_closed, index.n)
        first, stop = self._start_range(entry)
        done = np.zeros(len(entry), np.int64)  # per entry: the position up to which masses are computed
        stream, episode, t_start, t_stop = self._tail
        was_open = index.find(stream, episode)
        for i in np.flatnonzero(was_open < 0):  # aborted, or evicted whole: rare
            forgotten = self._steps.forget_episode(*(int(a[i]) for a in (stream, episode, t_start, t_stop)))
            self._follow_change(AddressChange(forgotten, None))
        is_shown = was_open >= self._n_closed
        was_open = was_open[is_shown]
        done[was_open - self._n_closed] = (t_stop[is_shown] - index.t_base.host[was_open]).clip(0)
        lost = done > stop  # an episode that ended without a successor may have lost its last start
        self._clear(entry[lost], stop[lost], done[lost])
        if self._windows.lead:
            done[:] = 0  # evictions move the first valid start
            self._clear(entry, np.zeros_like(entry), np.minimum(first, self._assembler.index.lengths_of(entry)))
        if self._options.over != "start":
            done = done - self._windows.reach  # windows near the old end have more steps now
        self._compute(entry, np.maximum(first, np.minimum(done, stop)), stop, masses)

    def _clear(self, entry: Array, first: Array, stop: Array) -> None:
        """Set masses to 0 at positions from ``first`` to ``stop`` of index entries."""
        owner, position = expand_ranges(first, stop)
        if len(position):
            address = torch.from_numpy(self._steps.addresses(entry[owner], position)).to(self._assembler.device)
            self._tree.put(address, torch.zeros_like(address))

    def _rebuild(self, masses: PriorityMasses) -> None:
        index = self._assembler.index
        self._tree.rebuild(torch.zeros(self._steps.size, dtype=torch.int64, device=self._assembler.device))
        entry = np.arange(index.first, index.n)
        first, stop = self._start_range(entry)
        sums = np.cumsum(stop - first)
        if not len(sums) or not sums[-1]:
            return
        bounds = np.searchsorted(sums, np.arange(0, int(sums[-1]), _PIECE), side="left")
        for low, high in zip(bounds, np.append(bounds[1:], len(entry)), strict=True):
            piece = slice(int(low), int(high))
            self._compute(entry[piece], first[piece], stop[piece], masses)

    def _compute(self, entry: Array, first: Array, stop: Array, masses: PriorityMasses) -> None:
        """Compute the masses of the starts at positions from ``first`` to ``stop`` of index entries."""
        owner, position = expand_ranges(first, stop)
        if not len(position):
            return
        address = self._steps.addresses(entry[owner], position)
        on_device = torch.from_numpy(address).to(self._assembler.device)
        mass = masses.masses(self._window_priorities(entry[owner], position, on_device))
        if len(address) == address[-1] - address[0] + 1 and (np.diff(address) == 1).all():
            self._tree.put_range(int(address[0]), mass)
        else:
            self._tree.put(on_device, mass)

    def _window_priorities(self, entry: Array, position: Array, address: torch.Tensor) -> torch.Tensor:
        """Priorities of the windows that start at positions of index entries, which are at ``address``."""
        over, spec = self._options.over, self._windows
        if over == "start" or spec.length == 1:
            return self._start_priorities(address)
        steps = position[:, None] + np.arange(spec.length) * spec.stride
        step_entry, step_position, exists = self._learning_steps(entry, steps)
        where = self._steps.addresses(step_entry.ravel(), step_position.ravel()).reshape(steps.shape)
        values = self._column.values[torch.from_numpy(where).to(address.device)]
        counts = torch.from_numpy(exists).to(address.device)
        largest = values.masked_fill(~counts, 0.0).amax(1)
        mean = (values * counts).sum(1) / counts.sum(1)
        eta = {"max": 1.0, "mean": 0.0}[over] if isinstance(over, str) else over
        return largest * eta + mean * (1 - eta)

    def _start_priorities(self, address: torch.Tensor) -> torch.Tensor:
        """Priorities of the steps at addresses; 0 where ``max_uses`` is reached."""
        values, max_uses = self._column.values[address], self._options.max_uses
        if max_uses is None:
            return values
        return values * (self._steps.columns[USES].values[address] < max_uses)

    def _learning_steps(self, entry: Array, steps: Array) -> tuple[Array, Array, Array]:
        """Entries and positions of steps of windows, and which of them exist and are learned from."""
        starts = self.kind.starts
        if starts.chains is None:
            n = starts.usable_of(entry)[:, None]
            inside = np.minimum(steps, n - 1)
            return np.broadcast_to(entry[:, None], steps.shape), inside, inside == steps
        device = self._assembler.device
        found = starts.chains.steps(torch.from_numpy(entry).to(device), torch.from_numpy(steps).to(device))
        owner, inside = found.entry.cpu().numpy(), found.position.cpu().numpy()
        usable = starts.usable_of(owner.ravel()).reshape(owner.shape)
        return owner, inside, found.exists.cpu().numpy() & (inside < usable)

    # ---- following priorities

    def update_steps(self, address: Array, masses: PriorityMasses) -> None:
        """Recompute the masses of all windows that contain the steps at addresses, whose priority changed."""
        if not len(address):
            return
        if not self._is_simple and self.kind.starts.chains is not None:
            self._seen = _NEVER  # the next `follow` rebuilds the tree
            return
        self.follow(masses)
        if self._is_simple:
            on_device = torch.from_numpy(address).to(self._assembler.device)
            old = self._tree.get(on_device)
            self._set_starts(on_device, address, old, masses.masses(self._start_priorities(on_device)))
            return
        self._recompute_windows(address, masses)

    def _set_starts(self, on_device: torch.Tensor, address: Array, old: torch.Tensor, mass: torch.Tensor) -> None:
        """Set masses where a window can start.

        A positive old mass proves that one can; where it is 0, the position is looked up.
        """
        unsure = (old == 0).cpu().numpy()
        if unsure.any():
            entry, position = self._steps.steps(address[unsure])
            first, stop = self._start_range(entry)
            is_start = np.ones(len(address), bool)
            is_start[unsure] = (position >= first) & (position < stop)
            mass = torch.where(torch.from_numpy(is_start).to(mass.device), mass, 0)
        self._tree.put(on_device, mass)

    def _recompute_windows(self, address: Array, masses: PriorityMasses) -> None:
        """Recompute the masses of all windows that contain the steps at addresses."""
        spec = self._windows
        entry, position = self._steps.steps(address)
        start = (position[:, None] - np.arange(spec.length) * spec.stride).ravel()
        owner = np.repeat(entry, spec.length)
        first, stop = self._start_range(owner)
        is_start = (start >= first) & (start < stop)
        pairs = np.unique(np.stack([owner[is_start], start[is_start]]), axis=1)
        order = np.lexsort((pairs[1], pairs[0]))
        entries, starts = pairs[0][order], pairs[1][order]
        self._compute(entries, starts, starts + 1, masses)

    def put_update(self, update: PriorityUpdate, raw: Array, masses: PriorityMasses) -> bool:
        """Do the same for an update whose raw masses are known; returns False if `update_steps` has to do it."""
        if self._compiled is None or not self._is_simple or self._options.max_uses is not None:
            return False
        self.follow(masses)
        self._compiled.put(self._tree, self.kind.starts, update.address, update.value, raw, masses.scale)
        return True

    # ---- drawing

    def draw_into(self, out: DrawnArrays, rng: CounterRng, stratified: bool, beta: float) -> bool:
        """Draw windows with weights into arrays, by one compiled loop; returns False if that is not possible."""
        if self._compiled is None:
            return False
        self._compiled.draw(self._tree, out, rng, stratified, beta)
        return True

    def draw(self, n: int, rng: CounterRng, scope: DrawScope, stratified: bool) -> PrioritisedWindows:
        """Draw windows with replacement, in proportion to their masses."""
        if scope.is_recent:
            return self._draw_recent(n, rng, scope)
        address, mass = self._tree.draw(n, rng, stratified=stratified)
        return self._windows_at(address, self._tree.fractions(mass), rng)

    def draw_with_addresses(self, n: int, rng: CounterRng) -> tuple[Array, PrioritisedWindows]:
        """Draw windows; returns also the addresses of the steps at which they start, on the host."""
        address, mass = self._tree.draw(n, rng)
        return address.cpu().numpy(), self._windows_at(address, self._tree.fractions(mass), rng)

    def _windows_at(self, address: torch.Tensor, probability: torch.Tensor, rng: CounterRng) -> PrioritisedWindows:
        windows = DrawnWindows(*self._steps.ranges.steps_on_device(address))
        return PrioritisedWindows(self.kind.starts.with_n(windows, rng), probability)

    def _first_recent(self, scope: DrawScope) -> int:
        return first_recent(self.kind, scope) if scope.is_recent else 0

    def _recent_masses(self, scope: DrawScope) -> tuple[Array, Array]:
        """Addresses and masses of recent windows; the cost is proportional to their number."""
        starts, index = self.kind.starts, self._assembler.index
        number = torch.arange(self._first_recent(scope), starts.total, device=index.device)
        windows = starts.locate(number, CounterRng(0))
        entry, start = windows.entry.cpu().numpy(), windows.start.clamp(min=0).cpu().numpy()
        address = np.unique(self._steps.addresses(entry, start))
        return address, self._tree.get(torch.from_numpy(address).to(index.device)).cpu().numpy()

    def recent_total(self, scope: DrawScope) -> float:
        """The sum of the masses of recent windows."""
        return float(self._recent_masses(scope)[1].sum())

    def _draw_recent(self, n: int, rng: CounterRng, scope: DrawScope) -> PrioritisedWindows:
        address, mass = self._recent_masses(scope)
        sums = np.cumsum(mass)
        if not len(sums) or not sums[-1]:
            raise DataError("every recent window that could be drawn has priority 0")
        device, fraction = self._assembler.device, scope.recent_fraction
        n_recent = round(n * fraction)
        number = rng.below(n_recent, int(sums[-1]), torch.device("cpu")).numpy()
        drawn = torch.from_numpy(address[np.searchsorted(sums, number, side="right")]).to(device)
        if n_recent < n:
            drawn = torch.cat([drawn, self._tree.draw(n - n_recent, rng)[0]])
        chosen = self._tree.get(drawn)
        is_recent = torch.from_numpy(np.isin(drawn.cpu().numpy(), address)).to(device)
        share = chosen.to(torch.float64) / float(sums[-1]) * is_recent
        return self._windows_at(drawn, share * fraction + self._tree.fractions(chosen) * (1 - fraction), rng)

    def draw_uniform(self, n: int, rng: CounterRng, scope: DrawScope) -> PrioritisedWindows:
        """Draw windows uniformly, with the probability that their priorities would give them."""
        windows = self.kind.starts.draw(n, rng, self._first_recent(scope))
        entry, start = windows.entry.cpu().numpy(), windows.start.cpu().numpy()
        address = torch.from_numpy(self._steps.addresses(entry, start.clip(0))).to(self._assembler.device)
        probability = self._tree.fractions(self._tree.get(address))
        if scope.is_recent:
            probability = probability * (self._tree.total.to(torch.float64) / self.recent_total(scope))
        return PrioritisedWindows(windows, probability)

    # ---- figures

    def n_windows(self, scope: DrawScope) -> int:
        """The number of windows in the scope, those of priority 0 included."""
        return self.kind.starts.total - self._first_recent(scope)

    def least_probability(self, scope: DrawScope, uniform: float) -> torch.Tensor:
        """The smallest probability of any window if the part ``uniform`` of a batch is drawn uniformly.

        Windows of priority 0 count only if a part is drawn uniformly.
        """
        if not uniform:
            return self._tree.fractions(self._tree.smallest)
        counts = (1 - uniform) * self._is_all_positive
        return self._tree.fractions(self._tree.smallest) * counts + uniform / self.n_windows(scope)

    @property
    def _is_all_positive(self) -> bool:
        """Whether no window has priority 0."""
        return int(self._tree.n_positive) == self.kind.starts.total

    def stats(self, n_bins: int) -> dict[str, Any]:
        """Figures over all windows; reads all of them."""
        starts, index = self.kind.starts, self._assembler.index
        lowest, highest, total, squares, n = np.inf, 0.0, 0.0, 0.0, 0
        by_age = np.zeros(n_bins)
        mass_sum = max(float(self._tree.total), 1.0)
        for low in range(0, starts.total, _PIECE):
            number = torch.arange(low, min(low + _PIECE, starts.total), device=index.device)
            windows = starts.locate(number, CounterRng(0))
            entry, start = windows.entry.cpu().numpy(), windows.start.clamp(min=0).cpu().numpy()
            address = torch.from_numpy(self._steps.addresses(entry, start)).to(index.device)
            values = self._column.values[address].to(torch.float64)
            share = self._tree.get(address).to(torch.float64) / mass_sum
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
