"""Prioritised draws and updates on the CPU, each by one or two compiled loops."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import numpy as np

from trajstore.errors import DataError
from trajstore.sampling.index.episode_index import EpisodeIndex
from trajstore.sampling.priorities.sum_tree import SumTree
from trajstore.sampling.rng import CounterRng
from trajstore.sampling.step_columns.step_table import StepColumn, StepTable
from trajstore.sampling.window_starts import WindowStarts
from trajstore.schema import Array

_MAX_NEW = 1 << 12  # new starts that a compiled loop takes up


class DrawnArrays(NamedTuple):
    """Windows drawn by priority, on the host.

    Attributes:
        entry: The index entry of each window's episode.
        start: The position of its first learning step.
        probability: The probability with which it was drawn, float64.
        weight: Its importance weight, float32.
    """

    entry: Array
    start: Array
    probability: Array
    weight: Array

    @classmethod
    def empty(cls, n: int) -> DrawnArrays:
        """Memory for ``n`` windows."""
        return cls(np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.float64), np.empty(n, np.float32))


class PriorityUpdate(NamedTuple):
    """A checked update of priorities.

    Attributes:
        address: Addresses of the steps that still exist.
        value: Their new priorities, float32.
        raised: The same plus ``eps``, as float64; None if no compiled loops are used.
        n_ignored: The number of values whose steps were evicted.
        largest_old: The largest present priority of the steps.
        largest_new: The largest new priority.
    """

    address: Array
    value: Array
    raised: Array | None
    n_ignored: int
    largest_old: float
    largest_new: float


class CompiledPriorities:
    """Calls the compiled loops with the arrays of a step table, a sum tree and the starts of windows.

    Not thread-safe: call methods with the assembler's lock held. Trees must have compiled loops, and the step table
    must be up to date with the index.

    Args:
        kernels: The loops.
        steps: The table of steps.
    """

    def __init__(self, kernels: ModuleType, steps: StepTable) -> None:
        self._kernels, self._steps = kernels, steps
        self._new = np.empty(_MAX_NEW, np.int64)

    def _places(self) -> tuple[Array, Array, Array]:
        ranges = self._steps.ranges
        return ranges.starts.host, ranges.entry.host, ranges.origin.host

    def draw(self, tree: SumTree, out: DrawnArrays, rng: CounterRng, stratified: bool, beta: float) -> None:
        """Draw windows into ``out``, as many as it has room for; the tree must have a positive mass."""
        assert tree.arrays is not None
        state = np.uint64(rng.mixed_seed), np.uint64(rng.take(len(out.entry)))
        self._kernels.draw_windows(*tree.arrays, *state, stratified, beta, *self._places(), *out)

    def update(
        self, address: Array, value: Array, lowest: int, column: StepColumn, eps: float
    ) -> PriorityUpdate | None:
        """Check an update; None if a priority or an address is wrong.

        Args:
            address: Addresses of the steps; negative if they do not exist. It is overwritten.
            value: One float32 for each.
            lowest: The lowest address that is not an error.
            column: The present priorities.
            eps: Added to the new ones in the result's ``raised``.
        """
        kept, raised, found = np.empty(len(value), np.float32), np.empty(len(value)), np.empty(3)
        n = self._kernels.checked_values(address, value, lowest, column.values.numpy(), eps, kept, raised, found)
        if n < 0:
            return None
        old, new, n_ignored = found.tolist()
        return PriorityUpdate(address[:n], kept[:n], raised[:n], int(n_ignored), old, new)

    def set(self, update: PriorityUpdate, column: StepColumn) -> None:
        """Set the new priorities in the column."""
        self._kernels.set_values(update.address, update.value, column.values.numpy(), column.dirty)

    def put(
        self,
        tree: SumTree,
        starts: WindowStarts,
        address: Array,
        value: Array,
        raw: Array,
        scale: float,
        *,
        are_starts: bool = False,
    ) -> None:
        """Put masses into a tree where a window can start.

        Args:
            tree: The tree.
            starts: Where windows can start, up to date.
            address: Addresses of the steps.
            value: Their priorities.
            raw: Their raw masses.
            scale: The factor from raw masses to masses.
            are_starts: Whether a window is known to start at every step.
        """
        assert tree.arrays is not None
        sums = starts.stored_sums, starts.base, starts.windows.lead
        mass = np.empty(len(address), np.int64)
        invalid = self._kernels.put_masses(
            *tree.arrays, address, value, raw, scale, are_starts, *self._places(), *sums, mass
        )
        if invalid >= 0:
            raise DataError(f"address {address[invalid]} is not in the tree (internal error; please report)")

    def new_starts(self, index: EpisodeIndex, starts: WindowStarts, tail: Array) -> Array | None:
        """Addresses of new starts of windows; None if open episodes did something else than getting longer.

        Args:
            index: The episodes.
            starts: Where windows can start, up to date.
            tail: By entry of an open episode, as the tree knows them: stream, episode, first t, and the t where
                starts stop, which is updated. The result is valid until the next call.
        """
        steps, ranges = self._steps, self._steps.ranges
        if steps.n_closed != index.n_closed or len(steps.tail) != tail.shape[1]:
            return None
        entries = index.stream.host, index.episode.host, index.t_base.host
        sums = starts.stored_sums, starts.base
        n = self._kernels.new_starts(index.n_closed, tail, *entries, *sums, steps.tail, ranges.home.host, self._new)
        return None if n < 0 else self._new[:n]
