"""The sequence of draws by priority behind an iterator or a single batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trajstore.arguments import check_positive
from trajstore.sampling.batches.batch_assembler import WindowKind
from trajstore.sampling.draws import DrawScope
from trajstore.sampling.priorities.priority_sampler import PrioritySampler
from trajstore.sampling.rng import CounterRng
from trajstore.sampling.window_starts import DrawnWindows
from trajstore.sampling.windows import Windows


class PrioritisedDraws:
    """Draws batch after batch of windows by priority, with its own random number generator.

    Not thread-safe: call methods with the assembler's lock held.
    """

    def __init__(
        self, sampler: PrioritySampler, batch_size: int, windows: Windows, scope: DrawScope, rng: CounterRng
    ) -> None:
        check_positive("batch_size", batch_size)
        self._sampler = sampler
        self._batch_size, self._windows, self._scope = batch_size, windows, scope
        self._rng = rng

    def draw(self, batch_size: int | None = None) -> tuple[WindowKind, DrawnWindows] | None:
        """Draw the windows of the next batch, or ``batch_size`` windows to replace evicted ones."""
        return self._sampler.draw(batch_size or self._batch_size, self._windows, self._scope, self._rng)

    @property
    def kind(self) -> WindowKind:
        return self._sampler.kind(self._windows, self._scope.where)

    def state_dict(self) -> dict[str, Any]:
        return {"rng": self._rng.state_dict(), "priorities": self._sampler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; without ``priorities`` in it, the sampler's state is restored elsewhere."""
        self._rng.load_state_dict(state["rng"])
        if "priorities" in state:
            self._sampler.load_state_dict(state["priorities"])

    def stats(self) -> dict[str, Any]:
        return {}
