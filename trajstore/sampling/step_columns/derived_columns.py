"""Derived columns: values per step that are written back after collection, such as advantages or latents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from trajstore.errors import CorruptionError, DataError
from trajstore.format.ids import is_column_name
from trajstore.sampling.batches.batch_assembler import BatchAssembler, WindowKind
from trajstore.sampling.batches.batch_plan import BatchPlan
from trajstore.sampling.index.index_entries import StepIndex, handles_of
from trajstore.sampling.joined_batches import SOURCE
from trajstore.sampling.relabelling import Relabeller
from trajstore.sampling.step_columns.step_handles import EVICTED
from trajstore.sampling.step_columns.step_table import StepTable
from trajstore.sampling.step_columns.step_updates import addresses_to_update, learning_steps
from trajstore.sampling.step_columns.stored_column import StoredColumn
from trajstore.sampling.window_starts import DrawnWindows
from trajstore.sampling.windows import relative_positions
from trajstore.schema import DTYPES, RESERVED, Array, Field
from trajstore.writing.writer import Writer


class DerivedColumns:
    """Keeps named values of every step in memory, on the device, and puts them into batches.

    Not thread-safe: call methods with the assembler's lock held.
    """

    def __init__(self, assembler: BatchAssembler, steps: StepTable) -> None:
        self._assembler, self._steps = assembler, steps
        self._fields: dict[str, tuple[Field, Any]] = {}  # with the fill value
        self._stored: dict[str, StoredColumn] = {}
        self._seen = -1  # version of the index
        self._are_fields_checked = False

    def __bool__(self) -> bool:
        return bool(self._fields)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._fields)

    def add(self, name: str, field: Field, fill: float, new_value: Callable[[], float] | None = None) -> None:
        """Create a column, or load it if it is stored.

        Args:
            name: The name of the column.
            field: The dtype and shape of a value.
            fill: The value of present steps that have none stored.
            new_value: Returns the value of a step that comes later; ``fill`` by default.

        Raises:
            DataError: The name is not allowed or is already used.
            CorruptionError: A column of that name is stored with another dtype or shape.
        """
        if name in self._fields:
            self._check_same(name, field, fill)
            return
        if not is_column_name(name) or name in RESERVED or name in self._steps.columns or name == SOURCE:
            raise _bad_name(name)
        if field.dtype == "bfloat16":
            raise DataError(f"column '{name}': expected a dtype that numpy has, got bfloat16")
        dtype = torch.from_numpy(np.empty(0, field.storage_dtype)).dtype
        self._assembler.reserve_name(name)  # first, because another thread may append the first step now
        if self._assembler.has_schema:
            self._check_fields([name])
        self._steps.follow()
        self._steps.attach(name, dtype, field.shape, initial=new_value or (lambda: fill), fill=fill)
        self._fields[name] = field, fill
        self._stored[name] = StoredColumn(
            self._assembler, self._steps, name, lambda stored: _check_stored(name, field, stored), lambda: fill
        )
        self._stored[name].follow()

    def _check_same(self, name: str, field: Field, fill: float) -> None:
        """Refuse to change a column that exists."""
        known, known_fill = self._fields[name]
        if field != known or not (fill == known_fill or (fill != fill and known_fill != known_fill)):
            raise DataError(
                f"column {name!r} exists with {known.dtype} of shape {known.shape} and fill {known_fill}; got"
                f" {field.dtype} of shape {field.shape} and fill {fill}; choose another name"
            )

    def _check_fields(self, names: Iterable[str]) -> None:
        for name in set(names) & {path.split("/")[0] for path in self._assembler.schema}:
            raise _bad_name(name, "a field has this name")

    def follow(self) -> None:
        """Give values to steps that are new in the index."""
        if not self._are_fields_checked and self._assembler.has_schema:  # it may have been unknown in `add`
            self._check_fields(self._fields)
            self._are_fields_checked = True
        if self._seen != self._assembler.index.version:
            for stored in self._stored.values():
                stored.follow()
            self._seen = self._assembler.index.version

    def save(self, writer: Writer) -> int:
        """Hand changed values to a writer, for its next commit; returns the number of values."""
        self.follow()
        return sum(stored.save(writer) for stored in self._stored.values())

    def write(self, name: str, index: StepIndex, values: torch.Tensor | Array, stride: int = 1) -> int:
        """Set values of steps; returns the number of values ignored because their step was evicted.

        Raises:
            DataError: No such column or step exists, or the values have another dtype or shape; nothing was
                changed.
        """
        field = self._field(name)
        handles = handles_of(index, self._assembler.index.numbers)
        self.follow()
        rows = _as_rows(name, field, values, len(handles))
        length = 1 if rows.ndim == 1 + len(field.shape) else rows.shape[1]
        steps = learning_steps(handles, length, stride)
        address = addresses_to_update(self._steps, steps, may_pass_end=length > 1)
        flat = rows.reshape(-1, *field.shape)
        self._steps.set(name, address[address >= 0], flat[address >= 0])
        return int((address == EVICTED).sum())

    def write_all(self, name: str, blocks: Iterable[Any]) -> None:
        """Set the values of all steps, in the order of the index.

        Raises:
            DataError: The blocks have more or fewer values than there are steps, or another dtype or shape; blocks
                before the error have been set.
        """
        field = self._field(name)
        self.follow()
        address, n_set = self._steps.all_steps(), 0
        for block in blocks:
            rows = _as_rows(name, field, block, len(block))
            if n_set + len(rows) > len(address):
                raise DataError(f"column '{name}': expected the values of {len(address)} steps, got more")
            self._steps.set(name, address[n_set : n_set + len(rows)], rows)
            n_set += len(rows)
        if n_set != len(address):
            raise DataError(f"column '{name}': expected the values of {len(address)} steps, got {n_set}")

    def _field(self, name: str) -> Field:
        if name not in self._fields:
            known = ", ".join(self._fields) or "none"
            raise DataError(f"no column {name!r}; existing columns: {known}; create it with add_column")
        return self._fields[name][0]

    def plan(
        self,
        kind: WindowKind,
        drawn: DrawnWindows,
        relabeller: Relabeller | None = None,
        goals: torch.Tensor | None = None,
    ) -> BatchPlan:
        """Plan a batch that holds the columns as they are now, and relabelled goals if a relabeller is passed.

        ``goals`` names goals that were drawn before, as in `Relabeller.plan`.
        """
        plan = kind.plan(drawn) if relabeller is None else relabeller.plan(kind, drawn, goals)
        return replace(plan, known={**plan.known, **self._values(kind, drawn)}) if self._fields else plan

    def _values(self, kind: WindowKind, drawn: DrawnWindows) -> dict[str, torch.Tensor]:
        """The present values of a batch's steps, by column name; ``[batch, window, ...]``."""
        self.follow()
        entry, position, exists = self._locate(kind, drawn)
        address = torch.from_numpy(self._steps.addresses(entry.ravel(), position.ravel()))
        address = address.to(self._assembler.device)
        found = {}
        for name in self._fields:
            values = self._steps.columns[name].values[address]
            values = values.reshape(*position.shape, *values.shape[1:])
            if kind.windows.pad != "repeat":
                mask = torch.from_numpy(~exists).to(values.device)
                values = values.masked_fill(mask.reshape(*mask.shape, *(1,) * (values.dim() - mask.dim())), 0)
            found[name] = values
        return found

    def _locate(self, kind: WindowKind, drawn: DrawnWindows) -> tuple[Array, Array, Array]:
        """Entries and positions of a batch's steps, moved to the nearest existing step, and which steps exist."""
        wanted = drawn.start[:, None] + relative_positions(kind.windows, self._assembler.device)
        chains = kind.starts.chains
        if chains is not None:
            found = chains.steps(drawn.entry, wanted)
            return tuple(a.cpu().numpy() for a in (found.entry, found.position, found.exists))  # type: ignore
        entry = np.repeat(drawn.entry.cpu().numpy()[:, None], wanted.shape[1], 1)
        position = wanted.cpu().numpy()
        n = self._assembler.index.lengths_of(entry.ravel()).reshape(entry.shape)
        inside = position.clip(0, n - 1)
        return entry, inside, inside == position

    def column(self, name: str) -> Array:
        """The values of all steps, in the order of the index. A copy on the host."""
        self._field(name)
        self.follow()
        return self._steps.get(name, self._steps.all_steps())

    def state_dict(self) -> dict[str, Any]:
        """Name, dtype, shape and fill value of every column; the step table's state holds the values."""
        return {
            name: {"dtype": field.dtype, "shape": list(field.shape), "fill": fill}
            for name, (field, fill) in self._fields.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Create the columns of a `state_dict`; their values come with the step table's state."""
        for name, about in state.items():
            if name not in self._fields:
                self.add(name, Field(about["dtype"], tuple(int(n) for n in about["shape"])), about["fill"])


def _bad_name(name: str, why: str = "it is a key of batches, or no plain name") -> DataError:
    return DataError(
        f"column {name!r}: expected a plain name that is no field, no other column and no key of a batch; {why}"
    )


def _as_rows(name: str, field: Field, values: Any, n: int) -> Array:
    """Values as an array ``[n, ...]`` or ``[n, length, ...]`` of the column's dtype."""
    rows: Array = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    extra = rows.ndim - 1 - len(field.shape)
    is_good = rows.dtype == field.storage_dtype and extra in (0, 1) and len(rows) == n
    if not is_good or rows.shape[1 + extra :] != field.shape:
        per_window = (n, "length", *field.shape)
        is_cast = rows.dtype != field.storage_dtype and rows.dtype.name in DTYPES
        cast = f"; convert the values, or add the column with Field('{rows.dtype}', ...)" if is_cast else ""
        raise DataError(
            f"column '{name}': expected {field.dtype} of shape {(n, *field.shape)} or {per_window}, got"
            f" {rows.dtype} of shape {rows.shape}{cast}"
        )
    return rows


def _check_stored(name: str, field: Field, stored: Mapping[str, Array]) -> None:
    for stream, values in stored.items():
        if values.dtype != field.storage_dtype or values.shape[1:] != field.shape:
            raise CorruptionError(
                f"column '{name}' of stream '{stream}': expected {field.dtype} of shape {field.shape}, stored is"
                f" {values.dtype} of shape {values.shape[1:]}"
            )
