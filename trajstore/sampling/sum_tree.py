"""Draws in proportion to integer masses: a tree of exact sums, the same on every device."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import numpy as np
import torch

from trajstore.errors import DataError
from trajstore.sampling.compiled.selection import compiled_loops
from trajstore.sampling.rng import CounterRng
from trajstore.schema import Array

BITS = 4  # of the fan-out: a row of 16 children is two cache lines
NOTHING = (1 << 63) - 1  # the smallest of no masses

_FAN_OUT = 1 << BITS
_SCANNED = 4096  # nodes of the level at which tensor operations start; one search of it replaces three steps down
_LOW_31 = (1 << 31) - 1


class _Layout(NamedTuple):
    """Where the levels lie in one array, leaves first in these tuples, while the array starts with the root.

    Position 0 is the root, position 1 the count of positive leaves. Levels are padded to whole rows of siblings.
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
        """The levels of an array that is laid out so."""
        return [array[at : at + length] for at, length in zip(self.offsets, self.lengths, strict=True)]


class SumTree:
    """Leaves with int64 masses; a leaf is drawn with the probability mass / total, one of mass 0 never.

    Sums are exact and random numbers depend on seed and counter alone, so both paths (compiled loops on the CPU,
    tensor operations anywhere) give the same results. The caller sees to it that indexes exist, masses are >= 0 and
    the total is at most 2**62. Compiled loops check the first two; tensor operations do not, as they never wait for
    the device. Not safe to change in one thread while another uses it.

    Args:
        device: Where the tree lives, and all tensors that are handed in and out.
        compiled: Use compiled loops if the device is the CPU and numba can be imported.
        with_min: Keep track of the smallest positive mass too, which makes ``put`` slower.
    """

    def __init__(self, device: torch.device, *, compiled: bool = True, with_min: bool = False) -> None:
        self._device = device
        self._with_min = with_min
        self._kernels = compiled_loops(device, compiled, "sum_tree_loops")
        self._n = 0
        self._allocate(0)
        self._leaves = self._levels[0][:0]

    def _allocate(self, capacity: int) -> None:
        """Set up a tree of zeros."""
        layout = _Layout.of(capacity)
        # The minima are laid out as the sums are, but need no leaves of their own.
        n_mins = layout.offsets[0] if self._with_min else 0
        if self._kernels is None:
            sums = torch.zeros(layout.size, dtype=torch.int64, device=self._device)
            mins = torch.full((n_mins,), NOTHING, dtype=torch.int64, device=self._device)
        else:
            self._arrays = _zeros(layout.size), np.full(n_mins, NOTHING), np.array(layout.offsets, np.int64)
            sums, mins = map(torch.from_numpy, self._arrays[:2])
        self._layout, self._sums, self._mins = layout, sums, mins
        self._set_views(layout)

    def _set_views(self, layout: _Layout) -> None:
        """Keep at hand what tensor operations need at every call."""
        self._levels = layout.views(self._sums)
        n_below = sum(length > _SCANNED for length in layout.lengths)
        self._top, self._rows = self._levels[n_below], [v.view(-1, _FAN_OUT) for v in self._levels[:n_below]]
        # A change to leaf i concerns the positions (i >> shift) + offset: one in each level, and the count at 1.
        shifts = [BITS * level for level in range(len(layout.offsets))]
        self._shifts = torch.tensor([*shifts, 63], device=self._device).unsqueeze(1)
        self._offsets = torch.tensor([*layout.offsets, 1], device=self._device).unsqueeze(1)

    @property
    def n(self) -> int:
        """How many leaves there are."""
        return self._n

    @property
    def nbytes(self) -> int:
        """Memory taken, room to grow included."""
        return self._sums.nbytes + self._mins.nbytes

    @property
    def total(self) -> torch.Tensor:
        """The sum of all masses, as it is now, on the device."""
        return self._sums[0].clone()

    @property
    def n_positive(self) -> torch.Tensor:
        """How many leaves can be drawn, as of now, on the device."""
        return self._sums[1].clone()

    @property
    def smallest(self) -> torch.Tensor:
        """The smallest positive mass, as it is now, on the device; ``NOTHING`` if no mass is positive."""
        if not self._with_min:
            raise DataError("smallest: the tree was made without with_min=True")
        return self._mins[0].clone()

    # ---- changing ----------------------------------------------------------------------------------

    def resize(self, n: int) -> None:
        """Add leaves of mass 0 at the end, or drop leaves there; what is there is copied only now and then."""
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
        """Replace all leaves; there are as many as masses afterwards.

        Raises:
            DataError: A mass is negative (compiled path only); nothing was changed.
        """
        self._check("rebuild", mass)
        if self._kernels is not None and bool((mass < 0).any()):
            raise DataError("rebuild: expected masses >= 0, got negative ones")
        self.resize(len(mass))
        self.put_range(0, mass)

    def put(self, index: torch.Tensor, mass: torch.Tensor) -> None:
        """Set the masses of some leaves; if an index comes more than once, its last mass counts.

        Raises:
            DataError: An index does not exist or a mass is negative (compiled path only); nothing was changed.
        """
        self._check("put", index, mass)
        if self._kernels is None:
            self._put(index, mass)
            return
        arrays = index.contiguous().numpy(), mass.contiguous().numpy()
        wrong = self._kernels.put(*self._arrays, self._n, *arrays)
        if wrong >= 0:
            raise DataError(
                f"put: expected indexes in [0, {self._n}) and masses >= 0, "
                f"got index {arrays[0][wrong]} and mass {arrays[1][wrong]} at position {wrong}"
            )

    def _put(self, index: torch.Tensor, mass: torch.Tensor) -> None:
        index, order = torch.sort(index, stable=True)
        is_last = torch.diff(index, append=index.new_full((1,), -1)) != 0
        old = self._leaves.index_select(0, index)
        change = (mass.index_select(0, order) - old).mul_(is_last)
        n_more = (old + change).sign_().sub_(old.sign())
        # Leaves, ancestors, root and count in one operation, which no interrupt tears. Integers add up to the same
        # in any order.
        where = (index >> self._shifts).add_(self._offsets)
        changes = torch.cat((change.expand(len(where) - 1, -1), n_more.unsqueeze(0)))
        self._sums.index_add_(0, where.view(-1), changes.view(-1))
        if self._with_min:
            self._put_minima(index)

    def _put_minima(self, index: torch.Tensor) -> None:
        node = index
        for level in range(1, len(self._levels)):
            node = node >> BITS
            rows = self._minima(level - 1).view(-1, _FAN_OUT).index_select(0, node)
            self._minima(level).index_copy_(0, node, _least(rows, is_leaf=level == 1))

    def _minima(self, level: int) -> torch.Tensor:
        """The smallest positive masses below the nodes of a level; the leaves are the masses, 0 included."""
        at, length = self._layout.offsets[level], self._layout.lengths[level]
        return self._mins[at : at + length] if level else self._levels[0]

    def put_range(self, start: int, mass: torch.Tensor) -> None:
        """Set the masses of consecutive leaves; costs what the block is long.

        Raises:
            DataError: The block does not fit, or a mass is negative (compiled path only); nothing was changed.
        """
        self._check("put_range", mass)
        stop = start + len(mass)
        if not 0 <= start <= stop <= self._n:
            raise DataError(f"put_range: expected a block inside the {self._n} leaves, got [{start}, {stop})")
        if self._kernels is None:
            self._put_range(start, stop, mass)
            return
        array = mass.contiguous().numpy()
        wrong = self._kernels.put_range(*self._arrays, start, array)
        if wrong >= 0:
            raise DataError(f"put_range: expected masses >= 0, got {array[wrong]} at position {wrong}")

    def _put_range(self, start: int, stop: int, mass: torch.Tensor) -> None:
        block = self._leaves[start:stop]
        self._sums[1].add_(mass.sign().sub_(block.sign()).sum())
        block.copy_(mass)
        self._sum_up(start, stop)

    def _sum_up(self, start: int, stop: int) -> None:
        """Make everything above the leaves ``[start, stop)`` right again."""
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
        """The masses of some leaves."""
        return self._leaves.index_select(0, index)

    def find(self, x: torch.Tensor) -> torch.Tensor:
        """The leaves that hold the numbers ``0 <= x < total``, if their masses are laid end to end.

        For other numbers some leaf comes back.
        """
        self._check("find", x)
        self._check_not_empty("find")
        if self._kernels is None:
            return self._descend(x.clamp(min=0))
        leaf, rest = np.empty(len(x), np.int64), x.numpy().copy()
        sums, _, offsets = self._arrays
        self._kernels.find(sums, offsets, self._n, leaf, rest)
        return torch.from_numpy(leaf)

    def draw(self, n: int, rng: CounterRng, *, stratified: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw ``n`` leaves with replacement, in proportion to their masses; uses ``n`` numbers of ``rng``.

        No leaf's probability is off by more than 2**-62.

        Args:
            n: How many.
            rng: Where the randomness comes from.
            stratified: Draw one from each of ``n`` equal parts of the total, in order: spread more evenly, but on
                the whole every leaf is as likely as before, up to the rounding of the parts.

        Returns:
            The leaves and their masses.

        Raises:
            DataError: There are no leaves, or (compiled path only) all have mass 0. Tensor operations would have to
                wait for the device to know: with them, leaves of mass 0 come back.
        """
        self._check_not_empty("draw")
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
        """Numbers uniform in [0, total)."""
        bits, total = rng.bits(n, self._device), self._sums[0]
        if not stratified:
            return _scaled(bits, total)
        # total * i // n, in two parts that do not overflow.
        i, parts = torch.arange(n + 1, device=self._device), max(n, 1)
        edges = (total // parts * i).add_((total % parts * i) // parts)
        return _scaled(bits, edges[1:] - edges[:-1]).add_(edges[:-1])

    def _descend(self, x: torch.Tensor) -> torch.Tensor:
        """From the level of few nodes to the leaves; a node starts where those before it end.

        The last child that starts at or before x holds x, because one of mass 0 starts where the next one does.
        """
        starts = _starts(self._top, 0)
        node = torch.searchsorted(starts, x, right=True).sub_(1)
        rest = x.sub(starts.index_select(0, node)).unsqueeze_(1)
        for level in reversed(self._rows):
            # Only if x is not below the total, the last node may be padding, which has no children.
            starts = _starts(level.index_select(0, node.clamp_(max=len(level) - 1)), 1)
            child = torch.searchsorted(starts, rest, right=True).sub_(1)
            if level is not self._rows[0]:
                rest.sub_(starts.gather(1, child))
            node = child.squeeze(1).add_(node, alpha=_FAN_OUT)
        return node.clamp_(max=self._n - 1)

    # ---- the rest ----------------------------------------------------------------------------------

    def _check(self, what: str, *tensors: torch.Tensor) -> None:
        shape = tensors[0].shape
        if len(shape) != 1 or any(t.dtype is not torch.int64 or t.shape != shape for t in tensors):
            got = ", ".join(f"{t.dtype} of shape {tuple(t.shape)}" for t in tensors)
            raise DataError(f"{what}: expected int64 of one dimension and one length, got {got}")

    def _check_not_empty(self, what: str) -> None:
        if not self._n:
            raise DataError(f"{what}: the tree has no leaves")

    def __getstate__(self) -> dict[str, Any]:
        # Arrays that share memory would not do so after a copy.
        options = {"compiled": self._kernels is not None, "with_min": self._with_min}
        return {"device": self._device, "options": options, "masses": self._leaves.clone()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        SumTree.__init__(self, state["device"], **state["options"])
        self.rebuild(state["masses"])


def _zeros(n: int) -> Array:
    """Zeros that start with a cache line; numpy asks for huge pages, from which random access gains."""
    spare = np.zeros(n + 7, np.int64)
    skip = -(spare.ctypes.data >> 3) % 8
    return spare[skip : skip + n]


def _whole_rows(n: int) -> int:
    return -(-n >> BITS) << BITS


def _starts(masses: torch.Tensor, dim: int) -> torch.Tensor:
    return masses.cumsum(dim).sub_(masses)


def _least(rows: torch.Tensor, is_leaf: bool) -> torch.Tensor:
    """The smallest positive number of each row."""
    # min is several times faster than amin on the CPU.
    return (torch.where(rows > 0, rows, NOTHING) if is_leaf else rows).min(1).values


def _scaled(bits: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """The upper 62 bits as a fraction of the limit, rounded down: a product of 124 bits from halves of 31.

    Exact for limits up to 2**62, and always below the limit.
    """
    high, low = (bits >> 33).bitwise_and_(_LOW_31), (bits >> 2).bitwise_and_(_LOW_31)
    limit_high, limit_low = limit >> 31, limit & _LOW_31
    middle = (low * limit_low).bitwise_right_shift_(31).addcmul_(high, limit_low).addcmul_(low, limit_high)
    return middle.bitwise_right_shift_(31).addcmul_(high, limit_high)
