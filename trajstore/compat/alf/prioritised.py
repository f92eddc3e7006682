"""Draws by priority over the rows: a tree for each length of windows, whose leaves are the places of the rings."""

from __future__ import annotations

import math

import numpy as np
import torch

from trajstore.compat.alf.inside import priorities_of, priority_table, random_numbers
from trajstore.compat.alf.rows import Rows
from trajstore.errors import NotReadyError
from trajstore.format.spans import expand_ranges
from trajstore.replay.buffer import ReplayBuffer
from trajstore.sampling.sum_tree import SumTree
from trajstore.schema import Array

_HEADROOM = 8  # bits that the largest priority may grow by before all masses are made anew, at most
_MAX_LENGTHS = 4  # of windows whose trees are kept


class PrioritisedDraws:
    """Draws windows in proportion to the priorities of their first steps, which the buffer keeps.

    Windows that can't start at a step have no mass there, and keep the priority for when they can.
    """

    def __init__(self, buffer: ReplayBuffer, rows: Rows) -> None:
        self._buffer, self._rows = buffer, rows
        self._device = torch.device(buffer.options.device)
        self._trees: dict[int, _Tree] = {}
        self._exponent = 0

    @property
    def initial_priority(self) -> float:
        """That of new steps: the largest so far."""
        return priority_table(self._buffer).initial_value()

    def forget(self) -> None:
        """Make the trees anew: steps went that are not the oldest of rows."""
        self._trees = {}

    def follow(self, length: int, low: Array) -> None:
        """Catch up with the rows, for windows of so many steps that start at ``low`` of each row or later."""
        self._settle_scale()
        tree = self._trees.get(length)
        if tree is None:
            tree = self._trees[length] = _Tree(length, self._rows, self._device)
            if len(self._trees) > _MAX_LENGTHS:
                self._trees.pop(next(iter(self._trees)))
        self._follow(tree, low)

    def draw(self, n: int, length: int, stratified: bool) -> tuple[Array, Array]:
        """Rows and positions of windows of a length that was just followed.

        Raises:
            NotReadyError: There are none, or all have priority 0.
        """
        sums = self._trees[length].sums
        if not int(sums.total):
            raise NotReadyError(f"no window of {length} steps that follow each other has a priority above 0")
        leaf, _ = sums.draw(n, random_numbers(self._buffer), stratified=stratified)
        row, place = np.divmod(leaf.cpu().numpy(), self._rows.length)
        return row, place + (self._rows.stop[row] - 1 - place) // self._rows.length * self._rows.length

    def weights(self, row: Array, position: Array, length: int) -> torch.Tensor:
        """Priorities of windows, relative to the mean of all that are not 0."""
        sums = self._trees[length].sums
        mass = sums.get(self._leaf(row, position)).to(torch.float64)
        return mass * sums.n_positive.to(torch.float64) / sums.total.to(torch.float64)

    def n_positive(self, length: int) -> int:
        """Windows that can be drawn."""
        return int(self._trees[length].sums.n_positive)

    def update(self, row: Array, position: Array, priority: torch.Tensor) -> None:
        """Set priorities of steps that are here."""
        self._buffer.update_priorities(torch.from_numpy(self._rows.handles(row, position)), priority)
        self._settle_scale()
        for tree in self._trees.values():
            self._put(tree, row, position)

    def _settle_scale(self) -> None:
        """Masses are whole numbers whose sum stays below 2**62; their scale follows from the largest priority."""
        exponent = math.frexp(priority_table(self._buffer).largest)[1]
        exponent = -(-exponent // _HEADROOM) * _HEADROOM
        if exponent != self._exponent:
            self._exponent, self._trees = exponent, {}

    def _follow(self, tree: _Tree, low: Array) -> None:
        """Put in new steps and windows that they complete, and take out starts that are passed."""
        rows, changed = self._rows, np.flatnonzero((self._rows.stop > tree.seen) | (low > tree.low))
        if not len(changed):
            return
        first = rows.first[changed]
        starts = np.maximum(first, tree.seen[changed] - tree.length + 1), np.maximum(first, tree.low[changed])
        owner, position = expand_ranges(np.concatenate(starts), np.append(rows.stop[changed], low[changed]))
        tree.seen[changed], tree.low[changed] = rows.stop[changed], low[changed]
        self._put(tree, np.tile(changed, 2)[owner], position)

    def _put(self, tree: _Tree, row: Array, position: Array) -> None:
        here = self._rows.has(row, position)
        row, position = row[here], position[here]
        can_start = self._rows.is_start(row, position, tree.length) & (position >= tree.low[row])
        priority = priorities_of(self._buffer, self._rows.handles(row, position))
        bits = 61 - (len(self._rows) * self._rows.length).bit_length() - self._exponent
        mass = priority.mul(2.0**bits).round_().to(torch.int64).clamp_(min=1)
        is_drawn = torch.from_numpy(can_start).to(self._device) & (priority > 0)
        tree.sums.put(self._leaf(row, position), torch.where(is_drawn, mass, 0))

    def _leaf(self, row: Array, position: Array) -> torch.Tensor:
        place = row * self._rows.length + position % self._rows.length
        return torch.from_numpy(place).to(self._device)


class _Tree:
    """Masses of the windows of one length, and up to where the rows are known to it."""

    def __init__(self, length: int, rows: Rows, device: torch.device) -> None:
        self.length = length
        self.sums = SumTree(device)
        self.sums.resize(len(rows) * rows.length)
        self.seen, self.low = rows.first.copy(), rows.first.copy()
