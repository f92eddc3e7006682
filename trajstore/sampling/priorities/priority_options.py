"""Options of prioritised sampling: how priorities become probabilities and weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypedDict, get_args

Normalize = Literal["batch", "buffer"]
Duplicates = Literal["last", "max"]
Kind = Literal["proportional", "rank"]
Over = Literal["start", "max", "mean"]


class PriorityChanges(TypedDict, total=False):
    """Options of `Priorities` by name; those that are left out stay as they are."""

    alpha: float
    beta: float | Callable[[int], float]
    eps: float
    initial: Literal["max"] | float
    over: Over | float
    normalize: Normalize
    duplicates: Duplicates
    kind: Kind
    rank_every: int
    stratified: bool
    uniform: float
    max_uses: int | None


@dataclass(frozen=True, slots=True)
class Linear:
    """A schedule: changes linearly from ``start`` to ``stop`` over ``n`` batches, then stays at ``stop``.

    >>> beta = Linear(0.4, 1.0, 100)
    >>> beta(0), beta(50), beta(1000)
    (0.4, 0.7, 1.0)

    Args:
        start: The value at 0 batches.
        stop: The value from ``n`` batches on.
        n: The number of batches in between.
    """

    start: float
    stop: float
    n: int

    def __call__(self, count: int) -> float:
        return self.start + (self.stop - self.start) * min(1.0, count / self.n)


@dataclass(frozen=True, slots=True)
class Priorities:
    """Options of prioritised sampling. A window of priority p is drawn in proportion to (p + eps)^alpha.

    Priorities are stored as they are passed to `Reader.update_priorities`. A window whose priority is exactly 0 is
    never drawn, whatever ``eps`` is. Immutable, so safe to share between threads.

    Args:
        alpha: How strongly priorities count; 0 draws uniformly.
        beta: How much of the sampling bias the weights correct; a number, or a function of the number of batches
            drawn so far, such as `Linear`.
        eps: Added to every priority, so that windows with small priorities are still drawn.
        initial: The priority of new steps: ``"max"``, the largest priority so far (1 at first), or a number.
        over: The priority of a window: that of its first learning step (``"start"``), the ``"max"`` or ``"mean"``
            over its learning steps, or a number eta for eta * max + (1 - eta) * mean.
        normalize: Weights are divided by the largest weight of the ``"batch"``, or of the ``"buffer"``. With
            ``recent_steps`` or ``recent_episodes`` it is always that of the batch.
        duplicates: Which value counts when one update names a step more than once: the ``"last"`` or the ``"max"``.
        kind: ``"proportional"`` draws in proportion to (p + eps)^alpha, ``"rank"`` in proportion to
            (1 / rank)^alpha.
        rank_every: With ``kind="rank"``, the number of batches after which ranks are computed again.
        stratified: Divide the total mass into as many equal parts as the batch has windows, and draw one window
            from each part. This spreads the batch more evenly.
        uniform: The fraction of each batch that is drawn uniformly, whatever the priorities. Probabilities and
            weights take it into account.
        max_uses: The number of times that each window may be drawn, also within one batch. A window that was drawn
            that often is never drawn again, whatever its priority. With ``alpha=0`` this is uniform sampling
            without replacement. None: no limit.

    Raises:
        ValueError: An option is out of range, or ``max_uses`` is combined with an option that it excludes.
    """

    alpha: float = 0.6
    beta: float | Callable[[int], float] = 0.4
    eps: float = 1e-6
    initial: Literal["max"] | float = "max"
    over: Over | float = "start"
    normalize: Normalize = "batch"
    duplicates: Duplicates = "last"
    kind: Kind = "proportional"
    rank_every: int = 1000
    stratified: bool = False
    uniform: float = 0.0
    max_uses: int | None = None

    def __post_init__(self) -> None:
        for name, high in (("alpha", math.inf), ("eps", math.inf), ("uniform", 1.0)):
            _check_number(name, getattr(self, name), high)
        if not callable(self.beta):
            _check_number("beta", self.beta, math.inf)
        self._check_choices()
        if not isinstance(self.rank_every, int) or self.rank_every < 1:
            raise ValueError(f"rank_every: expected a positive integer, got {self.rank_every!r}")
        self._check_uses()

    def _check_uses(self) -> None:
        if self.max_uses is None:
            return
        if not isinstance(self.max_uses, int) or isinstance(self.max_uses, bool) or self.max_uses < 1:
            raise ValueError(f"max_uses: expected a positive integer or None, got {self.max_uses!r}")
        if self.uniform or self.stratified or self.kind == "rank" or self.over != "start":
            raise ValueError(
                "max_uses goes with plain proportional draws; leave out uniform, stratified, kind and over"
            )

    def _check_choices(self) -> None:
        if self.initial != "max":
            _check_number("initial", self.initial, math.inf)
        if isinstance(self.over, str) and self.over not in get_args(Over):
            raise ValueError(f"over: expected one of {', '.join(get_args(Over))} or a number, got {self.over!r}")
        if not isinstance(self.over, str):
            _check_number("over", self.over, 1.0)
        for name, kinds in (("normalize", Normalize), ("duplicates", Duplicates), ("kind", Kind)):
            if getattr(self, name) not in get_args(kinds):
                raise ValueError(
                    f"{name}: expected one of {', '.join(get_args(kinds))}, got {getattr(self, name)!r}"
                )

    def beta_at(self, count: int) -> float:
        """The value of beta after ``count`` batches.

        Raises:
            ValueError: The schedule returned a negative or infinite number.
        """
        beta = self.beta(count) if callable(self.beta) else self.beta
        _check_number("beta", beta, math.inf)
        return float(beta)


def _check_number(name: str, value: object, high: float) -> None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= high
    if not good or not math.isfinite(value):  # type: ignore[arg-type]
        limit = "at least 0" if high == math.inf else f"from 0 to {high:g}"
        raise ValueError(f"{name}: expected a number {limit}, got {value!r}")
