"""A tree of exact integer sums, for draws in proportion to masses that are identical on every device."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import numpy as np
import torch

from trajstore.errors import DataError
from trajstore.sampling.compiled.selection import compiled_loops
from trajstore.sampling.rng import HALF_SHIFTS, CounterRng
from trajstore.sampling.triton.tree_launches import MAX_PUT, tree_launches
from trajstore.schema import Array

BITS = 4  # log2 of the fan-out: a row of 16 children is two cache lines
NO_POSITIVE_MASS = (1 << 63) - 1  # the value of `SumTree.smallest` if no mass is positive

_FAN_OUT = 1 << BITS
_SCANNED = 4096  # largest level that tensor operations search as a whole, instead of going down three levels to it
_WIDE = 1 << 2 * BITS  # children that they search together, two levels below a node
_LOW_31 = (1 << 31) - 1


class _Layout(NamedTuple):
    """Where the levels of the tree lie in one array.

    The array starts with the root; these tuples start with the leaves. Position 0 holds the root, position 1 the
    number of positive leaves. Levels are padded to whole rows of siblings.
    """

    lengths: tuple[int, ...]
    offsets: tuple[int, ...]
    size: int

    @classmethod
    def of(cls, capacity: int) -> Self:
        lengths = [_whole_rows(max(capacity, 1))]
        while lengths[-1] > _FAN_OUT:
            lengths.append(_whole_rows(lengths[-1] >> BITS))
        offsets, size = [0], _FAN_OUT
        for length in reversed(lengths):
            offsets.insert(0, size)
            size += length
        return cls((*lengths, 1), tuple(offsets), size)

    def views(self, array: torch.Tensor) -> list[torch.Tensor]:
        """Return views of the levels of an array with this layout, leaves first."""
        return [array[at : at + length] for at, length in zip(self.offsets, self.lengths, strict=True)]


class SumTree:
    """Leaves with int64 masses, drawn with probability mass / total. A leaf of mass 0 is never drawn.

    Sums are exact and random numbers depend only on seed and counter, so compiled loops (on the CPU), kernels (on a
    GPU, if Triton is installed) and tensor operations (on any device) give the same results. The caller ensures
    that indexes exist, masses are >= 0 and the total is at most 2**62. Compiled loops check the first two; the
    others do not, because that would make the host wait for the device. Not thread-safe.

    Args:
        device: Where the tree is, and all tensors that its methods take and return.
        compiled: Whether to use compiled loops if the device is the CPU and numba can be imported.
        with_min: Whether to keep track of the smallest positive mass; that makes ``put`` slower.
    """

    def __init__(self, device: torch.device, *, compiled: bool = True, with_min: bool = False) -> None:
        self._device = device
        self._with_min = with_min
        self._kernels = compiled_loops(device, compiled, "sum_tree_loops")
        self._launches = tree_launches(device) if self._kernels is None else None
        self._n = 0
        self._allocate(0)
        self._leaves = self._levels[0][:0]

    def _allocate(self, capacity: int) -> None:
        """Allocate a tree of zeros."""
        layout = _Layout.of(capacity)
        # The minima have the same layout without leaves: a leaf's minimum is its mass.
        n_mins = layout.offsets[0] if self._with_min else 0
        if self._kernels is None:
            spare = _WIDE if layout.lengths[0] > _SCANNED else 0  # behind the last row; see `_set_views`
            sums = torch.zeros(layout.size + spare, dtype=torch.int64, device=self._device)
            mins = torch.full((n_mins,), NO_POSITIVE_MASS, dtype=torch.int64, device=self._device)
        else:
            self._arrays = (
                _zeros(layout.size),
                np.full(n_mins, NO_POSITIVE_MASS),
                np.array(layout.offsets, np.int64),
            )
            sums, mins = map(torch.from_numpy, self._arrays[:2])
        self._layout, self._sums, self._mins = layout, sums, mins
        self._set_views(layout)
        if self._launches is not None:
            self._launches.set_tree(sums, layout.offsets, layout.lengths)

    def _set_views(self, layout: _Layout) -> None:
        """Prepare the views and constants that tensor operations need at every call."""
        self._levels = layout.views(self._sums)
        if self._kernels is None:
            level = sum(length > _SCANNED for length in layout.lengths)
            self._top, self._rows = self._levels[level], []
            self._top_sums = self._top.new_zeros(len(self._top) + 1)
            self._half_shifts = torch.tensor(HALF_SHIFTS, device=self._device)
            while level:  # two levels at a time, the first time one level if their number is odd
                width = _FAN_OUT if level % 2 else _WIDE
                level -= 1 if level % 2 else 2
                # The last row may run into other numbers behind its level, which no number below the total reaches.
                n_rows, at = -(-layout.lengths[level] // width), layout.offsets[level]
                self._rows.append(self._sums[at : at + n_rows * width].view(n_rows, width))
        # A change of leaf i changes the positions (i >> shift) + offset: one in each level, and the count at 1.
        shifts = [BITS * level for level in range(len(layout.offsets))]
        self._shifts = torch.tensor([*shifts, 63], device=self._device).unsqueeze(1)
        self._offsets = torch.tensor([*layout.offsets, 1], device=self._device).unsqueeze(1)

    @property
    def n(self) -> int:
        """Number of leaves."""
        return self._n

    @property
    def nbytes(self) -> int:
        """Bytes of memory, including room to grow."""
        return self._sums.nbytes + self._mins.nbytes

    @property
    def arrays(self) -> tuple[Array, Array, Array, int] | None:
        """Sums, minima and offsets of levels for compiled loops, and `n`; None without compiled loops."""
        return None if self._kernels is None else (*self._arrays, self._n)

    @property
    def total(self) -> torch.Tensor:
        """The sum of all masses: a copy, on the device."""
        return self._sums[0].clone()

    def fractions(self, mass: torch.Tensor) -> torch.Tensor:
        """Masses divided by the total, as float64."""
        return mass.to(torch.float64).div_(self._sums[0])

    @property
    def n_positive(self) -> torch.Tensor:
        """The number of leaves that can be drawn: a copy, on the device."""
        return self._sums[1].clone()

    @property
    def smallest(self) -> torch.Tensor:
        """The smallest positive mass, or ``NO_POSITIVE_MASS`` if no mass is positive: a copy, on the device."""
        if not self._with_min:
            raise DataError("smallest: the tree was made without with_min=True")
        return self._mins[0].clone()

    # ---- changing ----------------------------------------------------------------------------------

    def resize(self, n: int) -> None:
        """Add leaves of mass 0 at the end, or drop leaves there. The cost of copying leaves is amortised."""
        if n < 0:
            raise DataError(f"resize: expected n >= 0, got {n}")
        if n < self._n:
            self.put_range(n, torch.zeros(self._n - n, dtype=torch.int64, device=self._device))
        capacity = self._layout.lengths[0]
        if n > capacity:
            self._move(n, max(n, capacity + capacity // 4))
        elif n < capacity // 4 and capacity > _FAN_OUT:
            self._move(n, n + n // 4)
        self._n = n
        self._leaves = self._levels[0][:n]

    def _move(self, n: int, capacity: int) -> None:
        kept, n_positive = self._leaves[:n], self._sums[1]
        self._allocate(capacity)
        self._levels[0][: len(kept)] = kept
        self._sums[1] = n_positive
        self._sum_up(0, len(kept))

    def rebuild(self, mass: torch.Tensor) -> None:
        """Replace all leaves by as many as there are masses.

        Raises:
            DataError: A mass is negative (checked by compiled loops only); nothing has changed.
        """
        self._check("rebuild", mass)
        if self._kernels is not None and bool((mass < 0).any()):
            raise DataError("rebuild: expected masses >= 0, got negative ones")
        self.resize(len(mass))
        self.put_range(0, mass)

    def put(self, index: torch.Tensor, mass: torch.Tensor) -> None:
        """Set the masses of some leaves. If an index occurs more than once, its last mass counts.

        Raises:
            DataError: An index does not exist or a mass is negative (checked by compiled loops only); nothing has
                changed.
        """
        self._check("put", index, mass)
        if self._kernels is None:
            self._put(index, mass)
            return
        arrays = index.contiguous().numpy(), mass.contiguous().numpy()
        invalid = self._kernels.put(*self._arrays, self._n, *arrays)
        if invalid >= 0:
            raise DataError(
                f"put: expected indexes in [0, {self._n}) and masses >= 0, "
                f"got index {arrays[0][invalid]} and mass {arrays[1][invalid]} at position {invalid}"
            )

    def _put(self, index: torch.Tensor, mass: torch.Tensor) -> None:
        if self._launches is not None and len(index) <= MAX_PUT:
            self._launches.put(index, mass)
        else:
            self._put_with_tensors(index, mass)
        if self._with_min:
            self._put_minima(index)

    def _put_with_tensors(self, index: torch.Tensor, mass: torch.Tensor) -> None:
        index, order = torch.sort(index, stable=True)
        is_last = torch.diff(index, append=index.new_full((1,), -1)) != 0
        old = self._leaves.index_select(0, index)
        change = (mass.index_select(0, order) - old).mul_(is_last)
        n_more = (old + change).sign_().sub_(old.sign())
        # Leaves, ancestors, root and count change in one operation, so an interrupt can't leave them inconsistent.
        # Sums of integers do not depend on their order.
        where = (index >> self._shifts).add_(self._offsets)
        changes = torch.cat((change.expand(len(where) - 1, -1), n_more.unsqueeze(0)))
        self._sums.index_add_(0, where.view(-1), changes.view(-1))

    def _put_minima(self, index: torch.Tensor) -> None:
        node = index
        for level in range(1, len(self._levels)):
            node = node >> BITS
            rows = self._minima(level - 1).view(-1, _FAN_OUT).index_select(0, node)
            self._minima(level).index_copy_(0, node, _least(rows, is_leaf=level == 1))

    def _minima(self, level: int) -> torch.Tensor:
        """Return the smallest positive mass below each node of a level; for leaves, their masses, 0 included."""
        at, length = self._layout.offsets[level], self._layout.lengths[level]
        return self._mins[at : at + length] if level else self._levels[0]

    def put_range(self, start: int, mass: torch.Tensor) -> None:
        """Set the masses of consecutive leaves, in time proportional to their number.

        Raises:
            DataError: The range does not fit, or a mass is negative (checked by compiled loops only); nothing has
                changed.
        """
        self._check("put_range", mass)
        stop = start + len(mass)
        if not 0 <= start <= stop <= self._n:
            raise DataError(f"put_range: expected a range inside the {self._n} leaves, got [{start}, {stop})")
        if self._kernels is None:
            self._put_range(start, stop, mass)
            return
        array = mass.contiguous().numpy()
        invalid = self._kernels.put_range(*self._arrays, start, array)
        if invalid >= 0:
            raise DataError(f"put_range: expected masses >= 0, got {array[invalid]} at position {invalid}")

    def _put_range(self, start: int, stop: int, mass: torch.Tensor) -> None:
        leaves = self._leaves[start:stop]
        self._sums[1].add_(mass.sign().sub_(leaves.sign()).sum())
        leaves.copy_(mass)
        self._sum_up(start, stop)

    def _sum_up(self, start: int, stop: int) -> None:
        """Recompute all nodes above the leaves ``[start, stop)``."""
        if self._kernels is not None:
            self._kernels.sum_up(*self._arrays, start, stop)
            return
        for level in range(1, len(self._levels)):
            start, stop = start >> BITS, -(-stop >> BITS)
            below = slice(start << BITS, stop << BITS)
            self._levels[level][start:stop] = self._levels[level - 1][below].view(-1, _FAN_OUT).sum(1)
            if self._with_min:
                rows = self._minima(level - 1)[below].view(-1, _FAN_OUT)
                self._minima(level)[start:stop] = _least(rows, is_leaf=level == 1)

    # ---- looking up --------------------------------------------------------------------------------

    def get(self, index: torch.Tensor) -> torch.Tensor:
        """Return the masses of some leaves."""
        return self._leaves.index_select(0, index)

    def find(self, x: torch.Tensor) -> torch.Tensor:
        """Return the leaf that holds each number ``0 <= x < total``, if the masses are laid end to end.

        Other numbers give an arbitrary leaf.
        """
        self._check("find", x)
        self._check_not_empty("find")
        if self._launches is not None:
            return self._launches.find(x, self._n)
        if self._kernels is None:
            return self._descend(x.clamp(min=0))
        leaf, rest = np.empty(len(x), np.int64), x.numpy().copy()
        sums, _, offsets = self._arrays
        self._kernels.find(sums, offsets, self._n, leaf, rest)
        return torch.from_numpy(leaf)

    def draw(self, n: int, rng: CounterRng, *, stratified: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw ``n`` leaves with replacement, in proportion to their masses; uses ``n`` numbers of ``rng``.

        The probability of each leaf is exact to 2**-62.

        Args:
            n: How many leaves to draw.
            rng: The source of random numbers.
            stratified: Whether to draw one leaf from each of ``n`` equal parts of the total, in order. That spreads
                the draws more evenly; each leaf is drawn as often on average, up to the rounding of the parts.

        Returns:
            The leaves and their masses.

        Raises:
            DataError: The tree has no leaves, or all have mass 0. Tensor operations do not check the second,
                because that would make the host wait for the device: they return leaves of mass 0.
        """
        self._check_not_empty("draw")
        if self._launches is not None:
            return self._launches.draw(n, self._n, rng.signed_seed, rng.take(n), stratified)
        if self._kernels is None:
            leaf = self._descend(self._numbers(n, rng, stratified))
            return leaf, self.get(leaf)
        sums, _, offsets = self._arrays
        if not sums[0]:
            raise DataError(f"draw: all {self._n} leaves have mass 0")
        out = np.empty(n, np.int64), np.empty(n, np.int64)
        state = np.uint64(rng.mixed_seed), np.uint64(rng.take(n))
        self._kernels.draw(sums, offsets, self._n, *state, stratified, *out)
        return torch.from_numpy(out[0]), torch.from_numpy(out[1])

    def _numbers(self, n: int, rng: CounterRng, stratified: bool) -> torch.Tensor:
        """Return ``n`` numbers uniform in [0, total)."""
        halves, total = rng.halves(n, self._half_shifts), self._sums[0]
        if not stratified:
            return _scaled(halves, total)
        # total * i // n, computed in two parts that do not overflow.
        i, parts = torch.arange(n + 1, device=self._device), max(n, 1)
        edges = (total // parts * i).add_((total % parts * i) // parts)
        return _scaled(halves, edges[1:] - edges[:-1]).add_(edges[:-1])

    def _descend(self, x: torch.Tensor) -> torch.Tensor:
        """Search from a level of few nodes down to the leaves.

        The first child whose sum with all children before it is above x holds x. None is if x is not below the
        total: then some child is taken.
        """
        rows = self._rows
        top = self._top if not rows else self._top[: len(rows[0])]  # without padding, which has no children
        sums = self._top_sums[: len(top) + 1]
        torch.cumsum(top, 0, out=sums[1:])
        node = torch.searchsorted(sums[1:-1], x, right=True)
        for i, row in enumerate(rows):
            if i == 0:
                rest = x.sub(sums.index_select(0, node)).unsqueeze_(1)
            children = row.index_select(0, node)
            sums = children.cumsum(1)
            child = torch.searchsorted(sums, rest, right=True)
            if i < len(rows) - 1:
                child.clamp_(max=row.shape[1] - 1)
                rest = rest - sums.sub_(children).gather(1, child)
            node = child.squeeze(1).add_(node, alpha=row.shape[1])
            node.clamp_(max=(self._n if row is rows[-1] else len(rows[i + 1])) - 1)
        return node if rows else node.clamp_(max=self._n - 1)

    # ---- checks and pickling -----------------------------------------------------------------------

    def _check(self, method: str, *tensors: torch.Tensor) -> None:
        shape = tensors[0].shape
        if len(shape) != 1 or any(t.dtype is not torch.int64 or t.shape != shape for t in tensors):
            got = ", ".join(f"{t.dtype} of shape {tuple(t.shape)}" for t in tensors)
            raise DataError(f"{method}: expected int64 of one dimension and one length, got {got}")

    def _check_not_empty(self, method: str) -> None:
        if not self._n:
            raise DataError(f"{method}: the tree has no leaves")

    def __getstate__(self) -> dict[str, Any]:
        # Only the masses: tensors and arrays that share memory would not share it after unpickling.
        options = {"compiled": self._kernels is not None, "with_min": self._with_min}
        return {"device": self._device, "options": options, "masses": self._leaves.clone()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        SumTree.__init__(self, state["device"], **state["options"])
        self.rebuild(state["masses"])


def _zeros(n: int) -> Array:
    """Return zeros that start at a cache line. numpy asks for huge pages, which makes random access faster."""
    spare = np.zeros(n + 7, np.int64)
    skip = -(spare.ctypes.data >> 3) % 8
    return spare[skip : skip + n]


def _whole_rows(n: int) -> int:
    return -(-n >> BITS) << BITS


def _least(rows: torch.Tensor, is_leaf: bool) -> torch.Tensor:
    """Return the smallest positive number of each row."""
    # min is several times faster than amin on the CPU.
    return (torch.where(rows > 0, rows, NO_POSITIVE_MASS) if is_leaf else rows).min(1).values


def _scaled(halves: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """Return ``limit`` times the fraction that 62 random bits stand for, as `CounterRng.halves`, rounded down.

    The product of 124 bits is computed from halves of 31 bits. It is exact for limits up to 2**62, and always below
    the limit.
    """
    high, low = halves.unbind()
    limit_high, limit_low = limit >> 31, limit & _LOW_31
    middle = (low * limit_low).bitwise_right_shift_(31).addcmul_(high, limit_low).addcmul_(low, limit_high)
    return middle.bitwise_right_shift_(31).addcmul_(high, limit_high)
