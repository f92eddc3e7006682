"""Which windows of the rows come next: all as likely, the recent ones more often, or by priority."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from trajstore.arguments import check_positive
from trajstore.compat.alf.inside import random_numbers
from trajstore.compat.alf.prioritised import PrioritisedDraws
from trajstore.compat.alf.rows import NO_STARTS, Rows, Starts
from trajstore.errors import NotReadyError
from trajstore.replay.buffer import ReplayBuffer
from trajstore.sampling.rng import CounterRng
from trajstore.schema import Array

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
            self.priorities = PrioritisedDraws(buffer, rows)

    def draw(self, n: int, length: int) -> Drawn:
        """So many windows, the recent ones first.

        Raises:
            NotReadyError: There are none.
        """
        low = self._rows.first + self._options.n_ignored
        newest = np.maximum(low, self._rows.stop - (length - 1 + self._options.recent_steps))
        n_recent, recent = self._recent(n, length, newest)
        if self.priorities is not None:
            self.priorities.follow(length, low)
        parts = [self._uniform(n_recent, recent)] if n_recent else []
        if n_recent < n:
            parts.append(self._of_all(n - n_recent, length, low))
        row, position = (np.concatenate(column) for column in zip(*parts, strict=True))
        if self.priorities is None:
            return Drawn(row, position, None)
        weight = self.priorities.weights(row, position, length) * (1 - n_recent / n)
        if n_recent:  # a recent one may have come either way
            share = n_recent / n * self.priorities.n_positive(length) / recent.total
            weight = weight + torch.from_numpy((position >= newest[row]) * share).to(weight.device)
        return Drawn(row, position, weight.to(torch.float32))

    def _recent(self, n: int, length: int, newest: Array) -> tuple[int, Starts]:
        """How many windows are to be recent ones, where an even draw would not give as many; and which are."""
        options = self._options
        n_windows = float(self._rows.sizes.mean()) - (length - 1 + options.n_ignored)
        if n_windows * options.recent_ratio <= options.recent_steps:
            return 0, NO_STARTS
        recent = self._rows.starts(length, newest)  # none, where a recording has just broken off in all rows
        return math.ceil(n * options.recent_ratio) if recent.total else 0, recent

    def _of_all(self, n: int, length: int, low: Array) -> tuple[Array, Array]:
        if self.priorities is not None:
            return self.priorities.draw(n, length, stratified=not self._options.with_replacement)
        starts = self._rows.starts(length, low)
        if not starts.total:
            raise NotReadyError(
                f"no row has {length} steps that follow each other; the fullest has {self._rows.sizes.max()}"
            )
        return self._uniform(n, starts)

    def _uniform(self, n: int, starts: Starts) -> tuple[Array, Array]:
        numbers = random_numbers(self._buffer)
        if self._options.with_replacement:
            return starts.at(numbers.below(n, starts.total, _CPU).numpy())
        return starts.at(_spread(n, starts.total, numbers))


def _spread(n: int, total: int, numbers: CounterRng) -> Array:
    """One number of each of n parts of [0, total), rising, all as likely; each equally often if there are too few.

    Parts are of whole numbers, so not all are of one size; where they begin is random, or else the numbers of
    smaller ones would come more often.
    """
    first = (np.arange(n + 1) * total + numbers.below(1, total, _CPU).numpy()) // n
    size = torch.from_numpy(np.diff(first).clip(1))
    return np.sort((first[:-1] + numbers.below(n, size, _CPU).numpy()) % total)
