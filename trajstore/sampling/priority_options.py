"""How priorities become probabilities and weights: options, and schedules for them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

Normalize = Literal["batch", "buffer"]
Duplicates = Literal["last", "max"]
Kind = Literal["proportional", "rank"]
Over = Literal["start", "max", "mean"]


@dataclass(frozen=True, slots=True)
class Linear:
    """A value that goes from ``start`` to ``stop`` over ``n`` samples, and stays there.

    >>> beta = Linear(0.4, 1.0, 100)
    >>> beta(0), beta(50), beta(1000)
    (0.4, 0.7, 1.0)
    """

    start: float
    stop: float
    n: int

    def __call__(self, count: int) -> float:
        return self.start + (self.stop - self.start) * min(1.0, count / self.n)


@dataclass(frozen=True, slots=True)
class Priorities:
    """Prioritised sampling: what is stored are raw priorities, a window is drawn in proportion to (p + eps)^alpha.

    A priority of exactly 0 means never, whatever eps is.

    Args:
        alpha: How much priorities count; 0 is uniform.
        beta: How much of the bias the weights take back; a number, or a function of the number of batches so far
            such as `Linear`.
        eps: Added to priorities, so that small ones are not forgotten.
        initial: The priority of new steps: ``"max"``, the largest so far (1 at first), or a number.
        over: The priority of a window: that of its ``start``, the ``max`` or ``mean`` over its learning steps, or a
            number eta for eta * max + (1 - eta) * mean.
        normalize: Weights are divided by the largest of the ``batch``, or of the ``buffer`` (of the batch where
            only recent windows are drawn).
        duplicates: Which one counts where an update names a step twice: the ``last`` or the ``max``.
        kind: ``proportional``, or by ``rank``: in proportion to (1 / rank)^alpha, ranks taken anew every
            ``rank_every`` batches.
        rank_every: See there.
        stratified: Draw one window from each of as many equal parts of the total: spread more evenly.
        uniform: The part of each batch that is drawn uniformly, whatever the priorities; probabilities and weights
            take it into account.
        max_uses: Draw each window at most so often, also within one batch; then it is used up for good, whatever
            its priority is set to. With ``alpha=0`` that is uniform consumption of what is left.
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
            raise ValueError("max_uses goes with plain proportional draws: no uniform part, strata, ranks or over=")

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
        """Beta after so many batches."""
        beta = self.beta(count) if callable(self.beta) else self.beta
        _check_number("beta", beta, math.inf)
        return float(beta)


def _check_number(name: str, value: object, high: float) -> None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= high
    if not good or not math.isfinite(value):  # type: ignore[arg-type]
        limit = "at least 0" if high == math.inf else f"from 0 to {high:g}"
        raise ValueError(f"{name}: expected a number {limit}, got {value!r}")
