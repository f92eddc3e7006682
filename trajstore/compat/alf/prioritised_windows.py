"""Draws windows in proportion to priorities.

There is one sum tree per window length, with one leaf for each environment and index in its ring.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from trajstore.compat.alf.environment_rings import EnvironmentRings
from trajstore.compat.alf.replay_internals import priorities_of, priority_column, random_numbers
from trajstore.errors import NotReadyError
from trajstore.format.spans import expand_ranges
from trajstore.replay.buffer import ReplayBuffer
from trajstore.sampling.priorities.sum_tree import SumTree
from trajstore.schema import Array

_HEADROOM = 8  # bits by which the largest priority may grow, at most, before all masses are computed again
_MAX_TREES = 4  # window lengths whose trees are kept


class PrioritisedWindows:
    """Draws windows in proportion to the priorities of their first steps, which the buffer keeps.

    A step at which no window can start has no mass in the tree. It keeps its priority for when a window can start
    there.
    """

    def __init__(self, buffer: ReplayBuffer, rings: EnvironmentRings) -> None:
        self._buffer, self._rings = buffer, rings
        self._device = torch.device(buffer.options.device)
        self._trees: dict[int, _WindowTree] = {}
        self._exponent = 0

    @property
    def initial_priority(self) -> float:
        """The priority of new steps: the largest so far."""
        return priority_column(self._buffer).initial_value()

    def discard_trees(self) -> None:
        """Rebuild the trees at the next draw, because steps other than the oldest of a ring were dropped."""
        self._trees = {}

    def update_tree(self, length: int, low: Array) -> None:
        """Update the tree for windows of ``length`` steps that start at ``low`` of each environment or later."""
        self._update_scale()
        tree = self._trees.get(length)
        if tree is None:
            tree = self._trees[length] = _WindowTree(length, self._rings, self._device)
            if len(self._trees) > _MAX_TREES:
                self._trees.pop(next(iter(self._trees)))
        self._update(tree, low)

    def draw(self, n: int, length: int, stratified: bool) -> tuple[Array, Array]:
        """Draw environments and positions of windows; call `update_tree` for this length first.

        Raises:
            NotReadyError: No window exists, or all have priority 0.
        """
        sums = self._trees[length].sums
        if not int(sums.total):
            raise NotReadyError(f"no window of {length} consecutive steps has a priority above 0")
        leaf, _ = sums.draw(n, random_numbers(self._buffer), stratified=stratified)
        env, place = np.divmod(leaf.cpu().numpy(), self._rings.length)
        return env, place + (self._rings.stop[env] - 1 - place) // self._rings.length * self._rings.length

    def weights(self, env: Array, position: Array, length: int) -> torch.Tensor:
        """Return the priorities of windows, divided by the mean of all priorities that are not 0."""
        sums = self._trees[length].sums
        mass = sums.get(self._leaf(env, position)).to(torch.float64)
        return mass * sums.n_positive.to(torch.float64) / sums.total.to(torch.float64)

    def n_positive(self, length: int) -> int:
        """Return the number of windows that can be drawn."""
        return int(self._trees[length].sums.n_positive)

    def update_priorities(self, env: Array, position: Array, priority: torch.Tensor) -> None:
        """Set the priorities of held steps."""
        self._buffer.update_priorities(torch.from_numpy(self._rings.handles(env, position)), priority)
        self._update_scale()
        for tree in self._trees.values():
            self._put(tree, env, position)

    def _update_scale(self) -> None:
        """Choose the scale of the masses by the largest priority: they are integers with a sum below 2**62."""
        exponent = math.frexp(priority_column(self._buffer).largest)[1]
        exponent = -(-exponent // _HEADROOM) * _HEADROOM
        if exponent != self._exponent:
            self._exponent, self._trees = exponent, {}

    def _update(self, tree: _WindowTree, low: Array) -> None:
        """Add new steps and the windows that they complete, and remove the starts below ``low``."""
        rings, changed = self._rings, np.flatnonzero((self._rings.stop > tree.stop) | (low > tree.low))
        if not len(changed):
            return
        first = rings.first[changed]
        starts = np.maximum(first, tree.stop[changed] - tree.length + 1), np.maximum(first, tree.low[changed])
        owner, position = expand_ranges(np.concatenate(starts), np.append(rings.stop[changed], low[changed]))
        tree.stop[changed], tree.low[changed] = rings.stop[changed], low[changed]
        self._put(tree, np.tile(changed, 2)[owner], position)

    def _put(self, tree: _WindowTree, env: Array, position: Array) -> None:
        is_held = self._rings.has(env, position)
        env, position = env[is_held], position[is_held]
        can_start = self._rings.is_window_start(env, position, tree.length) & (position >= tree.low[env])
        priority = priorities_of(self._buffer, self._rings.handles(env, position))
        bits = 61 - (len(self._rings) * self._rings.length).bit_length() - self._exponent
        mass = priority.mul(2.0**bits).round_().to(torch.int64).clamp_(min=1)
        is_drawn = torch.from_numpy(can_start).to(self._device) & (priority > 0)
        tree.sums.put(self._leaf(env, position), torch.where(is_drawn, mass, 0))

    def _leaf(self, env: Array, position: Array) -> torch.Tensor:
        place = env * self._rings.length + position % self._rings.length
        return torch.from_numpy(place).to(self._device)


class _WindowTree:
    """The masses of all windows of one length.

    Attributes:
        length: Steps of a window.
        sums: The masses, by environment and index in the ring.
        stop: For each environment, the `EnvironmentRings.stop` that the tree was last updated to.
        low: For each environment, the first start that the tree was last updated to.
    """

    def __init__(self, length: int, rings: EnvironmentRings, device: torch.device) -> None:
        self.length = length
        self.sums = SumTree(device)
        self.sums.resize(len(rings) * rings.length)
        self.stop, self.low = rings.first.copy(), rings.first.copy()
