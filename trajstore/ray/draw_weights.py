"""How much each actor has of what batches are drawn in proportion to: windows, or the masses of priorities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trajstore.errors import NotReadyError
from trajstore.ray.draw_restrictions import DrawRestrictions
from trajstore.replay.buffer import ReplayBuffer
from trajstore.sampling.draws import DrawScope, first_recent
from trajstore.sampling.priorities.priority_sampler import PrioritySampler
from trajstore.sampling.windows import Windows
from trajstore.schema import Array

DrawPart = tuple[float, float]  # fraction of a batch, and the actor's amount that this fraction is drawn by


@dataclass(frozen=True)
class DrawWeight:
    """How much one actor has of what a batch is drawn in proportion to.

    A batch has two parts that may be drawn in proportion to different amounts: recent windows and all windows, or
    windows by priority and uniformly.

    Attributes:
        parts: The two parts: the fraction of the batch, and the number or mass of this actor's windows.
        least_probability: The smallest probability of a window within this actor; for importance weights.
        beta: The exponent of the importance weights.
        is_by_buffer: Whether weights are divided by the largest of the buffer; otherwise by that of the batch.
    """

    parts: tuple[DrawPart, DrawPart] = ((0.0, 0.0), (0.0, 0.0))
    least_probability: float = math.inf
    beta: float = 0.0
    is_by_buffer: bool = False


ONLY_ACTOR = DrawWeight(((1.0, 1.0), (0.0, 0.0)))  # of an actor that has no others beside it


def measure_draw_weight(buffer: ReplayBuffer, windows: Windows, restrictions: DrawRestrictions) -> DrawWeight:
    """The weight of an actor's buffer for draws of some windows."""
    scope = restrictions.scope()
    assembler, sampler = buffer.reader.assembler, buffer.reader.priority_sampler
    with assembler.lock:
        assembler.publish()
        if not assembler.index.n_steps:
            return DrawWeight()
        kind = assembler.kind(windows, scope.where)
        if sampler is not None and restrictions.prioritised:
            return _priority_weight(sampler, windows, scope)
        total = float(kind.starts.total)
        if not scope.is_recent:
            return DrawWeight(((1.0, total), (0.0, 0.0)))
        fraction = scope.recent_fraction
        return DrawWeight(((fraction, total - first_recent(kind, scope)), (1 - fraction, total)))


def _priority_weight(sampler: PrioritySampler, windows: Windows, scope: DrawScope) -> DrawWeight:
    """The sum of (p + eps)^alpha over all windows in scope; the scale is the same for all partitions."""
    mass, options, fraction = sampler.mass(windows, scope), sampler.options, scope.recent_fraction
    if mass is None:
        return DrawWeight()
    parts = (1 - options.uniform, mass.total), (options.uniform, float(mass.n_windows))
    if scope.is_recent:
        parts = (fraction, mass.recent), (1 - fraction, mass.total)
    is_by_buffer = options.normalize == "buffer" and not scope.is_recent
    least = mass.least if is_by_buffer else math.inf
    return DrawWeight(parts, least, options.beta_at(sampler.n_batches), is_by_buffer)


def actor_probabilities(weights: Sequence[DrawWeight]) -> Array:
    """The probability that a window is drawn from each actor.

    Raises:
        NotReadyError: No actor has a window.
    """
    probabilities = np.zeros(len(weights))
    for parts in zip(*(weight.parts for weight in weights), strict=True):
        amounts = np.array([amount for _, amount in parts])
        if amounts.sum() > 0:
            probabilities += max(fraction for fraction, _ in parts) * amounts / amounts.sum()
    if not probabilities.sum() > 0:
        raise NotReadyError("no actor has a window that could be drawn yet; wait, or ask for other windows")
    normalized: Array = probabilities / probabilities.sum()
    return normalized
