"""The priority sampler: draws windows by priority, computes their weights, and takes priority updates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from trajstore.arguments import check_positive
from trajstore.errors import DataError, NotReadyError
from trajstore.sampling.batches.batch_assembler import BatchAssembler, Where, WindowKind
from trajstore.sampling.compiled.selection import compiled_loops
from trajstore.sampling.draws import DrawScope
from trajstore.sampling.index.index_entries import StepIndex
from trajstore.sampling.priorities.compiled_priorities import CompiledPriorities, DrawnArrays, PriorityUpdate
from trajstore.sampling.priorities.priority_column import COLUMN, PriorityColumn
from trajstore.sampling.priorities.priority_masses import PriorityMasses
from trajstore.sampling.priorities.priority_options import Priorities, PriorityChanges
from trajstore.sampling.priorities.priority_tree import USES, PrioritisedWindows, PriorityTree, concat_prioritised
from trajstore.sampling.priorities.priority_updates import (
    checked_update,
    largest_per_address,
    per_step,
    plain_update,
)
from trajstore.sampling.rng import CounterRng
from trajstore.sampling.step_columns.step_handles import EVICTED
from trajstore.sampling.step_columns.step_table import StepTable
from trajstore.sampling.step_columns.step_updates import addresses_to_update
from trajstore.sampling.step_columns.stored_column import StoredColumn
from trajstore.sampling.window_starts import DrawnWindows
from trajstore.sampling.windows import Windows
from trajstore.schema import Array
from trajstore.writing.writer import Writer

_MAX_TREES = 16
_MASSES_STAY = {"beta", "normalize", "duplicates", "stratified", "uniform", "initial"}  # options that masses ignore


@dataclass(frozen=True, slots=True)
class WindowMass:
    """The mass of the windows that can be drawn, comparable between samplers.

    Attributes:
        total: The sum of (p + eps)^alpha over all windows.
        recent: The same sum over recent windows; 0 if the scope is not restricted to recent ones.
        n_windows: The number of windows in the scope.
        least: The smallest probability of any window with ``normalize="buffer"``; infinite otherwise.
    """

    total: float
    recent: float
    n_windows: int
    least: float


class PrioritySampler:
    """Draws windows by priority and takes updates; keeps one tree of masses for each window kind in use.

    Compiled loops do the work on the CPU, tensor operations elsewhere. On another device, a plain draw never makes
    the host wait. These do: updates, whose handles are looked up on the host; draws with ``max_uses``, a uniform
    part, recent windows or an ``over`` other than ``"start"``; and any draw once a step has the priority 0, to find
    out whether all have. Not thread-safe: call methods with the assembler's lock held.

    Attributes:
        priority_column: The priorities of steps.
        n_ignored: Number of updates to steps that were evicted.
        n_batches: Number of batches drawn so far; schedules count by it.
    """

    def __init__(self, assembler: BatchAssembler, options: Priorities, steps: StepTable) -> None:
        self.assembler = assembler
        self.options = options
        self.steps = steps
        self.priority_column = PriorityColumn(steps, _initial_priority(options))
        self._stored = StoredColumn(
            assembler, steps, COLUMN, self.priority_column.check_stored, self.priority_column.initial_value
        )
        self._attach_uses(options)
        kernels = compiled_loops(assembler.device, assembler.kernels is not None, "priority_loops")
        self._compiled = None if kernels is None else CompiledPriorities(kernels, steps)
        self.n_ignored = self.n_batches = 0
        self._trees: dict[tuple[Windows, Where | None], PriorityTree] = {}
        self._masses = PriorityMasses(options)
        self._seen = -1  # version of the index

    def follow(self) -> None:
        """Give priorities to steps that are new in the index."""
        index = self.assembler.index
        if self._seen == index.version or not index.numbers:
            return
        self._stored.follow()
        self._seen = index.version

    def save(self, writer: Writer) -> int:
        """Hand changed priorities to a writer, for its next commit; returns the number of values."""
        self.follow()
        return self._stored.save(writer)

    def configure(self, changes: PriorityChanges) -> None:
        """Change options by name. Options that masses depend on make the next draw recompute all masses.

        Raises:
            ValueError: An option has a bad value; nothing was changed.
            DataError: The largest priority has no finite mass with these options; nothing was changed.
        """
        options = replace(self.options, **changes)
        PriorityMasses(options).raw(self.priority_column.largest)
        self._attach_uses(options)
        if "initial" in changes:
            self.priority_column.set_initial(_initial_priority(options))
        if changes.keys() - _MASSES_STAY:
            self._masses = PriorityMasses(options)
            self._trees = {}
        if "normalize" in changes:
            self._trees = {}
        self.options = options

    def _attach_uses(self, options: Priorities) -> None:
        """Count uses from now on, if the options limit them."""
        if options.max_uses is not None and USES not in self.steps.columns:
            self.steps.attach(USES, torch.int32)

    def kind(self, windows: Windows, where: Where | None) -> WindowKind:
        """The window kind, up to date.

        Raises:
            ValueError: Such windows have no priority.
        """
        self._check_kind(windows)
        return self.assembler.kind(windows, where)

    def _check_kind(self, windows: Windows) -> None:
        if windows.weight != "window":
            raise ValueError(
                f"weight={windows.weight!r}: priorities decide which windows are drawn; use weight='window', or"
                " prioritised=False"
            )
        if windows.boundary in ("pad_left", "pad_both"):
            raise ValueError(
                f"boundary={windows.boundary!r}: a window that starts before its episode has no step whose priority"
                " it could have; use pad_right, short or burn_in"
            )

    def _rescale(self) -> None:
        """Choose the scale of masses for the priorities as they are now, and drop all trees."""
        self._masses.rescale(self.n_batches, self.priority_column)
        self._trees = {}

    def _tree(self, windows: Windows, where: Where | None) -> PriorityTree:
        """The tree of a window kind, up to date; the oldest tree is dropped when there are too many."""
        tree = self._trees.get((windows, where))
        if tree is None:
            tree = PriorityTree(self.assembler, self.priority_column, self.options, windows, where, self._compiled)
            self._trees[windows, where] = tree
            if len(self._trees) > _MAX_TREES:
                self._trees.pop(next(iter(self._trees)))
        tree.follow(self._masses)
        return tree

    # ---- drawing

    def draw(
        self, batch_size: int, windows: Windows, scope: DrawScope, rng: CounterRng
    ) -> tuple[WindowKind, DrawnWindows]:
        """Draw the windows of a batch, with their probabilities and weights.

        Raises:
            NotReadyError: No such window exists, or ``max_uses`` leaves too few.
            DataError: Every window has priority 0.
        """
        tree = self._tree_to_draw_from(batch_size, windows, scope)
        kind = tree.kind
        arrays = self._draw_arrays(tree, batch_size, scope, rng)
        if arrays is not None:
            entry, start, probability, weight = map(torch.from_numpy, arrays)
            n = kind.starts.with_n(DrawnWindows(entry, start), rng).n
            return kind, DrawnWindows(entry, start, n, probability, weight)
        if self.options.max_uses is not None:
            drawn = self._draw_limited(tree, batch_size, scope, rng, self.options.max_uses)
            self.n_batches += 1
            return kind, self._weighted(tree, drawn, scope, 0.0)
        n_uniform = round(batch_size * self.options.uniform)
        parts = []
        if n_uniform < batch_size:
            parts.append(tree.draw(batch_size - n_uniform, rng, scope, self.options.stratified))
        if n_uniform:
            parts.append(tree.draw_uniform(n_uniform, rng, scope))
        draw = self._weighted(tree, concat_prioritised(parts), scope, n_uniform / batch_size)
        self.n_batches += 1
        return kind, draw

    def draw_arrays(
        self, batch_size: int, windows: Windows, scope: DrawScope, rng: CounterRng
    ) -> tuple[WindowKind, DrawnArrays] | None:
        """Draw as `draw` does, into arrays on the host; None if only `draw` can, and then nothing has changed.

        Where the windows have a range of n-step returns, the caller draws n afterwards.
        """
        tree = self._tree_to_draw_from(batch_size, windows, scope)
        arrays = self._draw_arrays(tree, batch_size, scope, rng)
        return None if arrays is None else (tree.kind, arrays)

    def _tree_to_draw_from(self, batch_size: int, windows: Windows, scope: DrawScope) -> PriorityTree:
        """The tree of a window kind, up to date, after everything that `draw` refuses was checked."""
        check_positive("batch_size", batch_size)
        self.follow()
        if self._masses.is_stale(self.n_batches, self.priority_column):
            self._rescale()
        self._check_kind(windows)
        tree = self._tree(windows, scope.where)
        if not tree.kind.starts.total:
            raise self.assembler.no_windows(windows, "that the restrictions allow " if scope.where else "")
        if self._may_lack_mass and not tree.total:
            raise self._nothing_left(tree.kind)
        if self.options.uniform and scope.recent_fraction != 1.0:
            raise ValueError("uniform and recent_fraction can't be combined")
        return tree

    @property
    def _may_lack_mass(self) -> bool:
        """Whether all windows may have mass 0; to find out, the host has to wait for the device."""
        is_plain = self.options.over == "start" and self.options.max_uses is None
        return self._compiled is not None or not is_plain or self.priority_column.may_be_zero

    def _draw_arrays(
        self, tree: PriorityTree, batch_size: int, scope: DrawScope, rng: CounterRng
    ) -> DrawnArrays | None:
        """Draw by one compiled loop, if the options and the scope need no more than the tree."""
        options = self.options
        if self._compiled is None or options.uniform or options.max_uses is not None or scope.is_recent:
            return None
        out = DrawnArrays.empty(batch_size)
        tree.draw_into(out, rng, options.stratified, options.beta_at(self.n_batches))
        self.n_batches += 1
        return out

    def _draw_limited(
        self, tree: PriorityTree, n: int, scope: DrawScope, rng: CounterRng, max_uses: int
    ) -> PrioritisedWindows:
        """Draw windows, each at most ``max_uses`` times over the life of the sampler.

        Raises:
            NotReadyError: Too few draws are left; none was used up.
        """
        if scope.is_recent:
            raise ValueError("max_uses and recent windows can't be combined")
        parts: list[PrioritisedWindows] = []
        used = np.empty(0, np.int64)
        while len(used) < n and tree.total:
            address, drawn = tree.draw_with_addresses(n - len(used), rng)
            n_uses = self.steps.get(USES, address) + _n_earlier(address)
            allowed = np.flatnonzero(n_uses < max_uses)
            self._count_uses(address[allowed], 1, max_uses)
            used = np.append(used, address[allowed])
            parts.append(drawn.take(allowed))
        if len(used) < n:
            self._count_uses(used, -1, max_uses)
            raise NotReadyError(
                f"max_uses={max_uses}: {n} windows requested, {len(used)} draws are left; append more steps,"
                " request fewer windows, or allow more uses with set_priorities(max_uses=...)"
            )
        return concat_prioritised(parts)

    def _nothing_left(self, kind: WindowKind) -> DataError:
        """The error for draws where windows exist and none may be drawn."""
        n, max_uses = kind.starts.total, self.options.max_uses
        if max_uses is None:
            return DataError(
                f"all {n} windows that could be drawn have priority 0; set some above 0 with update_priorities"
            )
        return NotReadyError(
            f"max_uses={max_uses}: all {n} windows were drawn as often as allowed, or have priority 0; append more"
            " steps, or allow more uses with set_priorities(max_uses=...)"
        )

    def _count_uses(self, address: Array, change: int, max_uses: int) -> None:
        """Change how often windows were used, and update their masses in all trees."""
        distinct, count = np.unique(address, return_counts=True)
        uses = self.steps.get(USES, distinct) + change * count
        self.steps.set(USES, distinct, uses.astype(np.int32))
        changed = distinct[(uses >= max_uses) | (change < 0)]
        for tree in self._trees.values():
            tree.update_steps(changed, self._masses)

    def _weighted(
        self, tree: PriorityTree, drawn: PrioritisedWindows, scope: DrawScope, uniform: float
    ) -> DrawnWindows:
        """The windows with probabilities and weights, if the part ``uniform`` of the batch is drawn uniformly."""
        probability = drawn.probability
        if uniform:
            probability = probability * (1 - uniform) + uniform / tree.n_windows(scope)
        is_whole = self.options.normalize == "buffer" and not scope.is_recent
        least = tree.least_probability(scope, uniform) if is_whole else probability.min()
        weight = torch.empty(len(probability), dtype=torch.float32, device=probability.device)
        torch.pow(least / probability, self.options.beta_at(self.n_batches), out=weight)
        if is_whole:  # else every quotient is at most 1, and so is its power
            weight.clamp_(max=1.0)
        return replace(drawn.windows, probability=probability, weight=weight)

    def mass(self, windows: Windows, scope: DrawScope) -> WindowMass | None:
        """The mass of the windows in the scope; None if nothing can be drawn."""
        self.follow()
        if self._masses.is_stale(self.n_batches, self.priority_column):
            self._rescale()
        self.kind(windows, scope.where)
        tree, scale = self._tree(windows, scope.where), self._masses.scale
        if not tree.total:
            return None
        recent = tree.recent_total(scope) / scale if scope.is_recent else 0.0
        least = math.inf
        if self.options.normalize == "buffer":
            least = float(tree.least_probability(scope, self.options.uniform))
        return WindowMass(tree.total / scale, recent, tree.n_windows(scope), least)

    # ---- updates

    def update(self, index: StepIndex, priority: ArrayLike, windows: Windows | None) -> int:
        """Set priorities of steps; returns the number of updates ignored because their step was evicted.

        Raises:
            DataError: An index or a priority is wrong; nothing was changed.
        """
        self.follow()
        update = self._compiled_update(index, priority)
        if update is None:
            update = self._checked_update(index, priority, windows)
        if len(update.address):
            self._set(update)
        self.n_ignored += update.n_ignored
        return update.n_ignored

    def _compiled_update(self, index: StepIndex, priority: ArrayLike) -> PriorityUpdate | None:
        """Check an update by compiled loops; None if it is not plain, or if anything is wrong with it."""
        numbers = self.assembler.index.numbers
        plain = None if self._compiled is None else plain_update(index, priority, numbers)
        if self._compiled is None or plain is None:
            return None
        address, column = self.steps.addresses_of(plain[0]), self.steps.columns[COLUMN]
        update = self._compiled.update(address, plain[1], EVICTED, column, self._masses.eps)
        if update is None or self.options.duplicates != "max":
            return update
        address, value = largest_per_address(update.address, update.value)
        raised = value + np.float64(self._masses.eps)
        return PriorityUpdate(address, value, raised, update.n_ignored, update.largest_old, update.largest_new)

    def _checked_update(self, index: StepIndex, priority: ArrayLike, windows: Windows | None) -> PriorityUpdate:
        """Check any update.

        Raises:
            DataError: An index or a priority is wrong.
        """
        handles, values = checked_update(index, priority, self.assembler.index.numbers)
        is_per_window = values.ndim == 2
        if is_per_window:
            addresses_to_update(self.steps, handles, may_pass_end=False)  # the first steps must exist
            handles, values = per_step(handles, values, windows)
        address = addresses_to_update(self.steps, handles, may_pass_end=is_per_window)
        n_ignored = int((address == EVICTED).sum())
        address, values = address[address >= 0], values[address >= 0]
        if self.options.duplicates == "max":
            address, values = largest_per_address(address, values)
        self.priority_column.may_be_zero |= bool((values == 0).any())
        old, new = self.priority_column.get(address).max(initial=0.0), values.max(initial=0.0)
        return PriorityUpdate(address, values, None, n_ignored, float(old), float(new))

    def _set(self, update: PriorityUpdate) -> None:
        """Set priorities, and update the masses in all trees."""
        masses = self._masses
        must_rescale = masses.exceeds_scale(update.largest_new)  # raises before anything is changed
        masses.note_replaced(update.largest_old, update.largest_new)
        if self._compiled is None:
            self.steps.set(COLUMN, update.address, update.value)
        else:
            self._compiled.set(update, self.steps.columns[COLUMN])
        self.priority_column.largest = max(self.priority_column.largest, update.largest_new)
        if must_rescale:
            self._rescale()
        raw = None if update.raised is None else masses.raw_masses(update.value, update.raised)
        for tree in self._trees.values():
            if raw is None or not tree.put_update(update, raw, masses):
                tree.update_steps(update.address, masses)

    # ---- state and figures

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue with the same draws, priorities included."""
        self.follow()
        return {
            "n_batches": self.n_batches,
            "n_ignored": self.n_ignored,
            "largest": self.priority_column.largest,
            "steps": self.steps.state_dict(),
            "masses": self._masses.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.n_batches, self.n_ignored = int(state["n_batches"]), int(state["n_ignored"])
        self.follow()
        self.steps.load_state_dict(state["steps"])
        self.priority_column.largest = float(state["largest"])
        self.priority_column.may_be_zero = bool((self.priority_column.of_steps() == 0).any())
        self.priority_column.set_initial(self.priority_column.initial)
        self._masses.load_state_dict(state["masses"], self.assembler.device)
        self._trees = {}

    def stats(self, windows: Windows, where: Where | None, n_bins: int) -> dict[str, Any]:
        """Figures over all windows that can be drawn; reads all of them."""
        self.follow()
        if self._masses.is_stale(self.n_batches, self.priority_column):
            self._rescale()
        return self._tree(windows, where).stats(n_bins) | {
            "n_ignored": self.n_ignored,
            "largest": self.priority_column.largest,
        }


def _initial_priority(options: Priorities) -> float | None:
    return None if options.initial == "max" else float(options.initial)


def _n_earlier(values: Array) -> Array:
    """For each value, the number of equal values before it."""
    order = np.argsort(values, kind="stable")
    sorted_ = values[order]
    first = np.flatnonzero(np.append(True, sorted_[1:] != sorted_[:-1])[: len(values)])
    rank = np.empty(len(values), np.int64)
    rank[order] = np.arange(len(values)) - np.repeat(first, np.diff(np.append(first, len(values))))
    return rank
