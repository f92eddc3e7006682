"""Raw priorities, one a step: a column of the step table."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from trajstore.errors import CorruptionError
from trajstore.sampling.step_table import StepTable
from trajstore.schema import Array

COLUMN = "priority"


class PriorityColumn:
    """A float32 for every step.

    Attributes:
        initial: Of new steps; None: the largest so far.
        largest: The largest priority so far.
        steps: Where the steps are.
    """

    def __init__(self, steps: StepTable, initial: float | None) -> None:
        self.steps = steps
        self.initial = initial
        self.largest = 1.0 if initial is None else initial
        self._column = steps.attach(COLUMN, torch.float32, initial=self.of_new)

    def of_new(self) -> float:
        """The priority of steps that got none yet."""
        return self.largest if self.initial is None else self.initial

    @property
    def values(self) -> torch.Tensor:
        """By address; 0 where there is no step."""
        return self._column.values

    @property
    def size(self) -> int:
        return self.steps.size

    def set(self, address: Array, values: Array) -> None:
        """Overwrite priorities; of several at one address the last counts. The caller has checked them."""
        self.steps.set(COLUMN, address, values)
        if len(values):
            self.largest = max(self.largest, float(values.max()))

    def get(self, address: Array) -> Array:
        """Priorities at addresses, on the host."""
        return self.steps.get(COLUMN, address)

    def maximum(self) -> float:
        """The largest priority there is; looks at all of them."""
        return float(self.values[: self.size].max()) if self.size else self.largest

    def of_steps(self) -> torch.Tensor:
        """Priorities of all steps in the index."""
        return self.values[torch.from_numpy(self.steps.all_steps()).to(self.values.device)]

    def check(self, stored: Mapping[str, Array]) -> None:
        """Refuse stored values that are no priorities, and know the largest.

        Raises:
            CorruptionError: Something else stands there.
        """
        for stream, values in stored.items():
            is_good = values.dtype == np.float32 and values.ndim == 1
            if not is_good or not (np.isfinite(values) & (values >= 0)).all():
                raise CorruptionError(
                    f"priorities of stream '{stream}': expected finite float32 of at least 0 a row"
                )
            self.largest = max(self.largest, float(values.max(initial=0.0)))
