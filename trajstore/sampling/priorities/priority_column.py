"""The priorities of steps: a float32 column of the step table."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from trajstore.errors import CorruptionError
from trajstore.sampling.step_columns.step_table import StepTable
from trajstore.schema import Array

COLUMN = "priority"


class PriorityColumn:
    """One priority per step, by address of the step table.

    Not thread-safe: call methods with the assembler's lock held.

    Attributes:
        initial: The priority of new steps; None stands for the largest priority so far.
        largest: The largest priority so far.
        may_be_zero: Whether a step may have the priority 0.
        steps: The table that holds the column.
    """

    def __init__(self, steps: StepTable, initial: float | None) -> None:
        self.steps = steps
        self.initial = initial
        self.largest = 1.0 if initial is None else initial
        self.may_be_zero = initial == 0.0
        self._column = steps.attach(COLUMN, torch.float32, initial=self.initial_value)

    def set_initial(self, initial: float | None) -> None:
        """Change the priority of new steps."""
        self.initial = initial
        self.may_be_zero |= self.initial_value() == 0.0

    def initial_value(self) -> float:
        """The priority that a step gets when it is first seen."""
        return self.largest if self.initial is None else self.initial

    @property
    def values(self) -> torch.Tensor:
        """Priorities by address, on the device; 0 at addresses without a step. A view, not a copy."""
        return self._column.values

    @property
    def size(self) -> int:
        return self.steps.size

    def get(self, address: Array) -> Array:
        """Priorities at addresses, on the host."""
        return self.steps.get(COLUMN, address)

    def maximum(self) -> float:
        """The largest priority of any step at present; reads all of them."""
        return float(self.values[: self.size].max()) if self.size else self.largest

    def of_steps(self) -> torch.Tensor:
        """Priorities of all steps in the index, in its order, on the device. A copy."""
        return self.values[torch.from_numpy(self.steps.all_steps()).to(self.values.device)]

    def check_stored(self, stored: Mapping[str, Array]) -> None:
        """Check values read from streams, and raise `largest` to the largest of them.

        Raises:
            CorruptionError: A stored value is not a priority.
        """
        for stream, values in stored.items():
            is_good = values.dtype == np.float32 and values.ndim == 1
            if not is_good or not (np.isfinite(values) & (values >= 0)).all():
                raise CorruptionError(
                    f"priorities of stream '{stream}': expected one finite float32 of at least 0 per row, got"
                    f" {_description(values)}"
                )
            self.largest = max(self.largest, float(values.max(initial=0.0)))
            self.may_be_zero |= bool((values == 0).any())


def _description(values: Array) -> str:
    if values.dtype != np.float32 or values.ndim != 1:
        return f"{values.dtype} of shape {values.shape}"
    return f"{values[~(np.isfinite(values) & (values >= 0))][0]}"
