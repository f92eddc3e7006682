"""Launches of the kernels of a sum tree."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch

from trajstore.sampling.triton.launching import launch, uploaded
from trajstore.sampling.triton.selection import device_kernels

MAX_PUT = 4096  # masses that are set in one launch; its cost grows with the square of their number
BLOCK, PUT_BLOCK = 64, 32


class TreeLaunches:
    """Draws from a sum tree and changes it, in one launch each. The host does not wait for any of them."""

    def __init__(self, kernels: ModuleType, device: torch.device) -> None:
        self._kernels = kernels
        self._device = device

    def set_tree(self, sums: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> None:
        """Use another array of sums; ``offsets`` and ``lengths`` describe its levels, leaves first."""
        self._sums = sums
        self._n_levels = len(offsets)
        levels = [number for level in zip(offsets, lengths, strict=True) for number in level]
        self._levels = uploaded(levels, self._device)

    @property
    def _tree(self) -> tuple[int, int, int]:
        return self._sums.data_ptr(), self._levels.data_ptr(), self._n_levels

    def find(self, numbers: torch.Tensor, n_leaves: int) -> torch.Tensor:
        """Return the leaves that hold numbers."""
        numbers, leaf = numbers.contiguous(), torch.empty_like(numbers, memory_format=torch.contiguous_format)
        if n := len(numbers):
            arguments = *self._tree, n_leaves, numbers.data_ptr(), n, leaf.data_ptr()
            launch(self._kernels.find, (-(-n // BLOCK),), self._device, *arguments, block=BLOCK)
        return leaf

    def draw(
        self, n: int, n_leaves: int, seed: int, counter: int, is_stratified: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw ``n`` leaves; returns them and their masses. ``seed`` is a `signed_seed`."""
        leaf, mass = torch.empty((2, n), dtype=torch.int64, device=self._device)
        if n:
            arguments = (
                *self._tree,
                n_leaves,
                seed,
                counter,
                n,
                int(is_stratified),
                leaf.data_ptr(),
                mass.data_ptr(),
            )
            launch(self._kernels.draw, (-(-n // BLOCK),), self._device, *arguments, block=BLOCK)
        return leaf, mass

    def put(self, index: torch.Tensor, mass: torch.Tensor) -> None:
        """Set at most `MAX_PUT` masses; if an index occurs more than once, its last mass counts."""
        index, mass = index.contiguous(), mass.contiguous()
        if n := len(index):
            arguments = *self._tree, index.data_ptr(), mass.data_ptr(), n
            launch(self._kernels.put, (-(-n // PUT_BLOCK),), self._device, *arguments, block=PUT_BLOCK)


def tree_launches(device: torch.device) -> TreeLaunches | None:
    """Return the launches for a device; None if tensor operations have to do the work."""
    kernels = device_kernels(device, "tree_kernels")
    return None if kernels is None else TreeLaunches(kernels, device)
