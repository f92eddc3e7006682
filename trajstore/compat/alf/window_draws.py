"""Chooses which windows come next: uniformly, with a share of recent ones, or by priority."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from trajstore.arguments import check_positive
from trajstore.compat.alf.environment_rings import EnvironmentRings
from trajstore.compat.alf.prioritised_windows import PrioritisedWindows
from trajstore.compat.alf.replay_internals import random_numbers
from trajstore.compat.alf.ring_windows import NO_STARTS, WindowStarts
from trajstore.errors import NotReadyError
from trajstore.replay.buffer import ReplayBuffer
from trajstore.sampling.rng import CounterRng
from trajstore.schema import Array

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class DrawOptions:
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
class DrawnWindows:
    """Environments and positions at which windows start, and with priorities their weights; ``[n]`` each."""

    env: Array
    position: Array
    weight: torch.Tensor | None


class WindowDraws:
    """Draws windows of the rings with the random numbers and priorities of the buffer, which checkpoints save."""

    def __init__(self, buffer: ReplayBuffer, rings: EnvironmentRings, options: DrawOptions) -> None:
        self._buffer, self._rings, self._options = buffer, rings, options
        self.prioritised: PrioritisedWindows | None = None
        if buffer.options.priorities is not None:
            self.prioritised = PrioritisedWindows(buffer, rings)

    def draw(self, n: int, length: int) -> DrawnWindows:
        """Draw ``n`` windows of ``length`` steps; those drawn as recent ones come first.

        Raises:
            NotReadyError: No such window exists.
        """
        low = self._rings.first + self._options.n_ignored
        newest = np.maximum(low, self._rings.stop - (length - 1 + self._options.recent_steps))
        n_recent, recent = self._recent(n, length, newest)
        if self.prioritised is not None:
            self.prioritised.update_tree(length, low)
        parts = [self._draw_uniformly(n_recent, recent)] if n_recent else []
        if n_recent < n:
            parts.append(self._draw_from_all(n - n_recent, length, low))
        env, position = (np.concatenate(column) for column in zip(*parts, strict=True))
        if self.prioritised is None:
            return DrawnWindows(env, position, None)
        weight = self.prioritised.weights(env, position, length) * (1 - n_recent / n)
        if n_recent:  # a recent window may have been drawn as a recent one or among all windows
            share = n_recent / n * self.prioritised.n_positive(length) / recent.total
            weight = weight + torch.from_numpy((position >= newest[env]) * share).to(weight.device)
        return DrawnWindows(env, position, weight.to(torch.float32))

    def _recent(self, n: int, length: int, newest: Array) -> tuple[int, WindowStarts]:
        """Return how many windows to draw as recent ones, and the starts of the recent windows.

        The number is 0 where a uniform draw already gives enough recent windows.
        """
        options = self._options
        n_windows = float(self._rings.sizes.mean()) - (length - 1 + options.n_ignored)
        if n_windows * options.recent_ratio <= options.recent_steps:
            return 0, NO_STARTS
        # There are no recent starts when the recording just broke off in all environments.
        recent = self._rings.window_starts(length, newest)
        return math.ceil(n * options.recent_ratio) if recent.total else 0, recent

    def _draw_from_all(self, n: int, length: int, low: Array) -> tuple[Array, Array]:
        if self.prioritised is not None:
            return self.prioritised.draw(n, length, stratified=not self._options.with_replacement)
        starts = self._rings.window_starts(length, low)
        if not starts.total:
            raise NotReadyError(
                f"no environment has {length} consecutive steps; the fullest has {self._rings.sizes.max()} steps"
            )
        return self._draw_uniformly(n, starts)

    def _draw_uniformly(self, n: int, starts: WindowStarts) -> tuple[Array, Array]:
        numbers = random_numbers(self._buffer)
        if self._options.with_replacement:
            return starts.at(numbers.below(n, starts.total, _CPU).numpy())
        return starts.at(_spread(n, starts.total, numbers))


def _spread(n: int, total: int, numbers: CounterRng) -> Array:
    """Draw one number from each of ``n`` parts of [0, total), in increasing order, all equally likely.

    If ``n`` exceeds ``total``, all numbers come equally often. Parts have integer bounds, so their sizes differ by
    one. Their offset is random: otherwise numbers of smaller parts would come more often.
    """
    first = (np.arange(n + 1) * total + numbers.below(1, total, _CPU).numpy()) // n
    size = torch.from_numpy(np.diff(first).clip(1))
    return np.sort((first[:-1] + numbers.below(n, size, _CPU).numpy()) % total)
