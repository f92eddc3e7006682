"""A planned batch: rows to read and everything that needs no reading.

A plan refers to rows of streams, which never move, so it can be executed later and by another thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from trajstore.cache.row_request import RowRequest


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Everything about a batch except the values of its rows.

    Attributes:
        wanted: By output key: the rows to read.
        positions: By output key: the positions of these rows in their episodes.
        exists: By output key, for keys that need padding: which of the steps exist.
        known: By output key: tensors that need no reading, such as masks and ``index``, the handles of the windows.
        targets: Where the transitions of the steps lead, if the batch has n-step returns.
        edit: Changes the values right after they were read, and returns the plan to finish the batch with.
    """

    wanted: Mapping[str, RowRequest]
    positions: Mapping[str, torch.Tensor]
    exists: Mapping[str, torch.Tensor]
    known: Mapping[str, torch.Tensor]
    targets: TransitionTargets | None
    edit: Callable[[BatchPlan, dict[str, torch.Tensor]], BatchPlan] | None = None

    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return the shapes and dtypes of the tensors in `known`, by key."""
        return {key: (tuple(value.shape), value.dtype) for key, value in self.known.items()}


@dataclass(frozen=True, slots=True)
class TransitionTargets:
    """Where the transition of each step of a batch leads; all tensors are [B, T].

    Attributes:
        n_steps: Number of steps that the transition covers; 0 if the step has no successor.
        is_terminal: Whether the episode terminated there, so that nothing is bootstrapped.
    """

    n_steps: torch.Tensor
    is_terminal: torch.Tensor
