"""Which windows of the rows come next: all as likely, the recent ones more often, or by priority."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from trajstore.compat.alf.inside import random_numbers
from trajstore.compat.alf.prioritised import PrioritisedDraws
from trajstore.compat.alf.rows import Rows
from trajstore.errors import NotReadyError
from trajstore.replay import ReplayBuffer
from trajstore.schema import Array
from trajstore.sizes import check_positive

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How windows are drawn; see `trajstore.compat.alf.ReplayBuffer`."""

    n_ignored: int
    recent_steps: int
    recent_ratio: float
    with_replacement: bool
    initial_priority: float

    def __post_init__(self) -> None:
        check_positive("recent_data_steps", self.recent_steps)
        if not 0.0 <= self.recent_ratio <= 1.0:
            raise ValueError(f"recent_data_ratio: expected a number from 0 to 1, got {self.recent_ratio!r}")
        if not 0.0 < self.initial_priority < math.inf:
            raise ValueError(f"initial_priority: expected a positive number, got {self.initial_priority!r}")
        if not isinstance(self.n_ignored, int) or self.n_ignored < 0:
            raise ValueError(f"num_earliest_frames_ignored: expected at least 0, got {self.n_ignored!r}")


@dataclass(frozen=True, slots=True)
class Drawn:
    """Rows and positions at which windows start, and their weights where there are priorities; ``[n]`` each."""

    row: Array
    position: Array
    weight: torch.Tensor | None


class Draws:
    """Draws windows of the rows, by the random numbers and priorities of the buffer, which checkpoints hold."""

    def __init__(self, buffer: ReplayBuffer, rows: Rows, options: Sampling) -> None:
        self._buffer, self._rows, self._options = buffer, rows, options
        self.priorities: PrioritisedDraws | None = None
        if buffer.options.priorities is not None:
            self.priorities = PrioritisedDraws(buffer, rows, options.initial_priority)

    def draw(self, n: int, length: int) -> Drawn:
        """So many windows, the recent ones first.

        Raises:
            NotReadyError: There are none.
        """
        low = self._rows.first + self._options.n_ignored
        n_recent = self._n_recent(n, length)
        recent = np.maximum(low, self._rows.stop - (length - 1 + self._options.recent_steps))
        parts = [self._uniform(n_recent, length, recent)] if n_recent else []
        is_even = not self._options.with_replacement
        if self.priorities is not None:
            self.priorities.follow(length, low)
        if n_recent < n and self.priorities is not None:
            parts.append(self.priorities.draw(n - n_recent, length, is_even))
        elif n_recent < n:
            parts.append(self._uniform(n - n_recent, length, low))
        row, position = (np.concatenate(column) for column in zip(*parts, strict=True))
        return Drawn(row, position, self._weights(row, position, length, recent, n_recent / n))

    def _n_recent(self, n: int, length: int) -> int:
        """How many windows are to be recent ones, where an even draw would not give as many."""
        options = self._options
        if not options.recent_ratio:
            return 0
        n_windows = float(self._rows.sizes.mean()) - (length - 1 + options.n_ignored)
        is_few = n_windows * options.recent_ratio <= options.recent_steps
        return 0 if is_few else math.ceil(n * options.recent_ratio)

    def _uniform(self, n: int, length: int, low: Array) -> tuple[Array, Array]:
        starts = self._rows.starts(length, low)
        if not starts.total:
            raise NotReadyError(
                f"no row has {length} steps that follow each other; the fullest has {self._rows.sizes.max()}"
            )
        numbers = random_numbers(self._buffer)
        if self._options.with_replacement:
            return starts.at(numbers.below(n, starts.total, _CPU).numpy())
        part = (np.arange(n) + numbers.uniform(n, _CPU).numpy()) / n  # one of each n-th part of all windows
        return starts.at(np.minimum((part * starts.total).astype(np.int64), starts.total - 1))

    def _weights(
        self, row: Array, position: Array, length: int, recent: Array, ratio: float
    ) -> torch.Tensor | None:
        """How much more often windows are drawn than if all that can be were as likely."""
        if self.priorities is None:
            return None
        weight = self.priorities.weights(row, position, length) * (1 - ratio)
        if ratio:  # a recent one may have come either way
            share = ratio * self.priorities.n_positive(length) / self._rows.starts(length, recent).total
            weight = weight + torch.from_numpy((position >= recent[row]) * share).to(weight.device)
        return weight.to(torch.float32)
