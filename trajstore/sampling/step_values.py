"""Values kept for every step beside the stored fields: priorities, and columns computed after collection."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, Unpack

import numpy as np
import torch
from numpy.typing import ArrayLike

from trajstore.errors import DataError, EpisodeNotFoundError
from trajstore.sampling.batches.batch_assembler import BatchAssembler, Where
from trajstore.sampling.index.index_entries import StepIndex, handles_of
from trajstore.sampling.priorities.priority_column import COLUMN
from trajstore.sampling.priorities.priority_options import Priorities, PriorityChanges
from trajstore.sampling.priorities.priority_sampler import PrioritySampler
from trajstore.sampling.step_columns.derived_columns import DerivedColumns
from trajstore.sampling.step_columns.step_table import StepTable
from trajstore.sampling.step_columns.step_updates import addresses_to_update
from trajstore.sampling.windows import Windows
from trajstore.schema import Array, Field
from trajstore.writing.writer import Writer

_T = TypeVar("_T")


class StepValues:
    """The part of a `Reader` that keeps values of steps and changes them by handle.

    Thread-safe: every method that reads or changes values takes the assembler's lock.

    Attributes:
        assembler: Shows the steps.
        priority_sampler: Draws by priority; None without priorities.
    """

    def __init__(self, assembler: BatchAssembler, priorities: Priorities | None) -> None:
        self.assembler = assembler
        self._steps = StepTable(assembler.index)
        self._columns = DerivedColumns(assembler, self._steps)
        self.priority_sampler = (
            PrioritySampler(assembler, priorities, self._steps) if priorities is not None else None
        )

    def _with_all_steps(self, act: Callable[[], _T]) -> _T:
        """Do something with handles, which are valid as soon as their steps are appended."""
        self.assembler.publish()
        try:
            return act()
        except (DataError, EpisodeNotFoundError):  # of steps that another thread is just appending, perhaps
            self.assembler.publish(waits=True)
            return act()

    # ---- priorities

    @property
    def _sampler(self) -> PrioritySampler:
        if self.priority_sampler is None:
            raise ValueError("this reader has no priorities; create it with priorities=Priorities(...)")
        return self.priority_sampler

    def update_priorities(self, index: StepIndex, priority: ArrayLike, windows: Windows | None = None) -> int:
        """Set the priorities of the steps of a batch, or of other steps.

        Args:
            index: The batch, its ``index``, or handles that `append` returned. An update may come late, from
                another thread and in any order.
            priority: A tensor or an array: ``[batch]`` for the named steps, or ``[batch, length]`` for all learning
                steps of the windows; finite and at least 0. Values past the end of an episode are ignored.
            windows: The sampled windows; needed if their stride is not 1.

        Returns:
            The number of values ignored because their steps were evicted.

        Raises:
            DataError: An index names no step of this reader, or a priority is negative or not finite; nothing was
                changed.
            ValueError: The reader has no priorities.
        """
        with self.assembler.lock:
            return self._with_all_steps(lambda: self._sampler.update(index, priority, windows))

    def priorities(self, index: torch.Tensor | None = None) -> Array:
        """The priorities of steps, as float32 on the host.

        Args:
            index: ``[batch, 3]``, as in a batch: the priority of each window's first learning step, NaN if the step
                was evicted. By default the priorities of all steps, in the order of `read_all_in_order`.

        Raises:
            DataError: An index names no step of this reader.
            ValueError: The reader has no priorities.
        """
        sampler = self._sampler
        with self.assembler.lock:
            self.assembler.publish()
            sampler.follow()
            return self._with_all_steps(lambda: self._priorities(index))

    def _priorities(self, index: torch.Tensor | None) -> Array:
        if index is None:
            return self._steps.get(COLUMN, self._steps.all_steps())
        address = addresses_to_update(
            self._steps, handles_of(index, self.assembler.index.numbers), may_pass_end=False
        )
        values = np.full(len(address), np.nan, np.float32)
        values[address >= 0] = self._steps.get(COLUMN, address[address >= 0])
        return values

    def save_priorities(self, writer: Writer) -> int:
        """Hand changed priorities to a writer of the same store; its next commit makes them durable.

        A reader created later with ``priorities`` reads exactly these values. Use one writer for all calls: the
        first call writes all values, later calls only changes. Returns the number of values handed over.
        """
        with self.assembler.lock:
            return self._sampler.save(writer)

    def follow_priorities(self) -> None:
        """Give priorities to new steps and drop those of evicted steps; `sample` does this too."""
        if self.priority_sampler is not None:
            with self.assembler.lock:
                self.priority_sampler.follow()

    def set_priorities(self, **changes: Unpack[PriorityChanges]) -> None:
        """Change options of `Priorities` from the next batch on; options that are not passed stay as they are.

        A change of ``alpha``, ``eps``, ``over``, ``kind``, ``rank_every`` or ``max_uses`` recomputes the masses of
        all windows; the others cost nothing, except that ``normalize`` rebuilds the trees.

        Raises:
            ValueError: An option has a bad value, or the reader has no priorities; nothing was changed.
            DataError: The largest priority is too large for the new ``alpha``; nothing was changed.
        """
        with self.assembler.lock:
            self._sampler.configure(changes)

    def priority_stats(self, windows: Windows, *, where: Where | None = None, n_bins: int = 20) -> dict[str, Any]:
        """Figures over the windows that can be drawn: priorities, effective sample size, mass by age.

        Cost is proportional to the number of windows.

        Args:
            windows: Which windows.
            where: As in `sample`.
            n_bins: The number of bins of ``mass_by_age``, oldest windows first.
        """
        with self.assembler.lock:
            return self._sampler.stats(windows, where, n_bins)

    # ---- derived columns

    def add_column(
        self,
        name: str,
        field: Field | str = "float32",
        *,
        fill: float = 0,
        of_new: Callable[[], float] | None = None,
    ) -> None:
        """Keep one more value for every step, computed after collection; batches hold it as ``name``.

        The values of all present steps are kept in memory, on the device. If the store has a column of this name
        (see `save_columns`), its values are read; other steps have ``fill``. Adding a column again with the same
        field and fill changes nothing.

        Args:
            name: The name of the column, here and in the store.
            field: The dtype and shape of a value; the name of a dtype for single numbers.
            fill: The value of steps that were not given one.
            of_new: Returns the value of a step that comes later, when it is first seen; ``fill`` by default.

        Raises:
            DataError: The name is not allowed, or is used by a field or by another column.
            CorruptionError: The store has a column of this name with another dtype or shape.
        """
        with self.assembler.lock:
            self.assembler.publish()
            self._columns.add(name, Field(field) if isinstance(field, str) else field, fill, of_new)

    def write_column(
        self, name: str, index: StepIndex, values: torch.Tensor | Array, windows: Windows | None = None
    ) -> int:
        """Set a column's values at the steps of a batch, or at others; batches drawn from now on hold them.

        Args:
            name: The name of the column.
            index: The batch, its ``index``, or handles that `append` returned; an update may come late.
            values: ``[batch, ...]`` for the named steps, or ``[batch, length, ...]`` for all learning steps.
            windows: The sampled windows; needed if their stride is not 1.

        Returns:
            The number of values ignored because their steps were evicted.

        Raises:
            DataError: No such column or step exists, or the values have another dtype or shape; nothing was
                changed.
        """
        with self.assembler.lock:
            stride = 1 if windows is None else windows.stride
            return self._with_all_steps(lambda: self._columns.write(name, index, values, stride))

    def write_all(self, name: str, values: Array | torch.Tensor | Iterable[Array | torch.Tensor]) -> None:
        """Set a column's values of all steps, in the order of `read_all_in_order`.

        Args:
            name: The name of the column.
            values: One array or tensor, or an iterable of blocks.

        Raises:
            DataError: No such column exists, or ``values`` has more or fewer values than there are steps. Blocks
                before the error have been set.
        """
        blocks: Iterable[Any] = [values] if hasattr(values, "dtype") else values
        with self.assembler.lock:
            self.assembler.publish()
            self._columns.write_all(name, blocks)

    def column(self, name: str) -> Array:
        """A column's values of all steps, in the order of `read_all_in_order`. A copy on the host."""
        with self.assembler.lock:
            self.assembler.publish(may_commit=False)
            return self._columns.column(name)

    def save_values(self, writer: Writer) -> int:
        """Hand changed priorities and column values to a writer; returns the number of values handed over."""
        with self.assembler.lock:
            n = self.priority_sampler.save(writer) if self.priority_sampler is not None else 0
            return n + self._columns.save(writer)

    def follow_columns(self) -> None:
        """Give column values to new steps; `sample` does this too."""
        with self.assembler.lock:
            self._columns.follow()

    @property
    def has_columns(self) -> bool:
        """Whether `add_column` was called."""
        return bool(self._columns)

    @property
    def column_names(self) -> tuple[str, ...]:
        """The names passed to `add_column`."""
        return self._columns.names

    def save_columns(self, writer: Writer) -> None:
        """Hand changed column values to a writer of the same store; its next commit makes them durable."""
        with self.assembler.lock:
            self._columns.save(writer)
