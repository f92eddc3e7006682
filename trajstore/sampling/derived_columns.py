"""Columns that are written back after collection: advantages, returns-to-go, latents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from trajstore.errors import CorruptionError, DataError
from trajstore.format.ids import is_column_name
from trajstore.sampling.batch_assembler import BatchAssembler, WindowKind
from trajstore.sampling.batch_plan import RESERVED, BatchPlan
from trajstore.sampling.hindsight import Relabeller
from trajstore.sampling.index_entries import handles_of
from trajstore.sampling.step_table import EVICTED, PAST_END, StepTable
from trajstore.sampling.stored_column import StoredColumn
from trajstore.sampling.window_starts import DrawnWindows
from trajstore.sampling.windows import relative_positions
from trajstore.schema import Array, Field
from trajstore.writing.writer import Writer


class DerivedColumns:
    """Values for every step that is here, in memory on the device; batches hold them beside the fields.

    Methods are called with the assembler's lock held.
    """

    def __init__(self, source: BatchAssembler, steps: StepTable) -> None:
        self._source, self._steps = source, steps
        self._fields: dict[str, tuple[Field, Any]] = {}
        self._stored: dict[str, StoredColumn] = {}
        self._seen = -1

    def __bool__(self) -> bool:
        return bool(self._fields)

    def add(self, name: str, field: Field, fill: float, of_new: Callable[[], float] | None = None) -> None:
        """Begin a column, or go on with one that is stored; new steps have what ``of_new`` says when they come.

        Raises:
            DataError: The name is taken, or no name for a column.
        """
        if not is_column_name(name) or name in RESERVED or name in self._steps.columns or name == "source":
            raise DataError(f"column {name!r}: expected a plain name that no field and nothing in a batch has")
        if self._source.has_schema:
            self._check_fields([name])
        if field.dtype == "bfloat16":
            raise DataError(f"column '{name}': expected a dtype that numpy has, got bfloat16")
        dtype = torch.from_numpy(np.empty(0, field.storage_dtype)).dtype
        self._steps.follow()
        self._steps.attach(name, dtype, field.shape, initial=of_new or (lambda: fill), fill=fill)
        self._fields[name] = field, fill
        self._stored[name] = StoredColumn(
            self._source, self._steps, name, lambda stored: _check_stored(name, field, stored), lambda: fill
        )
        self._stored[name].follow()

    def _check_fields(self, names: Iterable[str]) -> None:
        for name in set(names) & {path.split("/")[0] for path in self._source.schema}:
            raise DataError(f"column {name!r}: expected a plain name that no field and nothing in a batch has")

    def follow(self) -> None:
        """Catch up with the index."""
        if self._seen < 0 and self._source.has_schema:  # it may not have been known when columns were added
            self._check_fields(self._fields)
        if self._seen != self._source.index.version:
            for stored in self._stored.values():
                stored.follow()
            self._seen = self._source.index.version

    def save(self, writer: Writer) -> None:
        """Hand what has changed to a writer, for its next commit."""
        self.follow()
        for stored in self._stored.values():
            stored.save(writer)

    def write(self, name: str, index: torch.Tensor, values: torch.Tensor, stride: int = 1) -> int:
        """Set values of steps; returns how many were ignored because their steps were evicted.

        Raises:
            DataError: There is no such column or step, or the values have another dtype or shape.
        """
        field = self._field(name)
        handles = handles_of(index)
        self.follow()
        rows = _as_rows(name, field, values, len(handles))
        length = 1 if rows.ndim == 1 + len(field.shape) else rows.shape[1]
        steps = np.repeat(handles, length, axis=0)
        steps[:, 2] += np.tile(np.arange(length) * stride, len(handles))
        address = self._steps.addresses_of(steps)
        if (bad := address < (PAST_END if length > 1 else EVICTED)).any():
            raise DataError(f"index {steps[np.flatnonzero(bad)[0]].tolist()}: there is no such step here")
        flat = rows.reshape(-1, *field.shape)
        self._steps.set(name, address[address >= 0], flat[address >= 0])
        return int((address == EVICTED).sum())

    def write_all(self, name: str, blocks: Iterable[Any]) -> int:
        """Set the values of all steps, in the order of the index; returns how many that were.

        Raises:
            DataError: They are more or fewer than there are steps; then those that came are set.
        """
        field = self._field(name)
        self.follow()
        address, at = self._steps.all_steps(), 0
        for block in blocks:
            rows = _as_rows(name, field, block, len(block))
            if at + len(rows) > len(address):
                raise DataError(f"column '{name}': expected the values of {len(address)} steps, got more")
            self._steps.set(name, address[at : at + len(rows)], rows)
            at += len(rows)
        if at != len(address):
            raise DataError(f"column '{name}': expected the values of {len(address)} steps, got {at}")
        return at

    def _field(self, name: str) -> Field:
        if name not in self._fields:
            known = ", ".join(self._fields) or "none"
            raise DataError(f"no column {name!r}; there are {known}; begin one with add_column")
        return self._fields[name][0]

    def plan(
        self,
        kind: WindowKind,
        draw: DrawnWindows,
        relabeller: Relabeller | None = None,
        goals: torch.Tensor | None = None,
    ) -> BatchPlan:
        """The plan of a batch that holds the columns, as they are now, and goals in hindsight where asked for."""
        plan = kind.plan(draw) if relabeller is None else relabeller.plan(kind, draw, goals)
        return replace(plan, known={**plan.known, **self.of(kind, draw)}) if self._fields else plan

    def of(self, kind: WindowKind, draw: DrawnWindows) -> dict[str, torch.Tensor]:
        """The values of a batch's steps, as they are now, by name; ``[batch, window, ...]``."""
        self.follow()
        entry, position, exists = self._places(kind, draw)
        address = torch.from_numpy(self._steps.addresses(entry.ravel(), position.ravel())).to(self._source.device)
        found = {}
        for name in self._fields:
            values = self._steps.columns[name].values[address]
            values = values.reshape(*position.shape, *values.shape[1:])
            if kind.windows.pad != "repeat":
                mask = torch.from_numpy(~exists).to(values.device)
                values = values.masked_fill(mask.reshape(*mask.shape, *(1,) * (values.dim() - mask.dim())), 0)
            found[name] = values
        return found

    def _places(self, kind: WindowKind, draw: DrawnWindows) -> tuple[Array, Array, Array]:
        """Entries and positions of a batch's steps, moved to the nearest that exists, and which do."""
        wanted = draw.start[:, None] + relative_positions(kind.windows, self._source.device)
        chains = kind.starts.chains
        if chains is not None:
            found = chains.steps(draw.entry, wanted)
            return tuple(a.cpu().numpy() for a in (found.entry, found.position, found.exists))  # type: ignore
        entry = np.repeat(draw.entry.cpu().numpy()[:, None], wanted.shape[1], 1)
        position = wanted.cpu().numpy()
        n = self._source.index.lengths_of(entry.ravel()).reshape(entry.shape)
        inside = position.clip(0, n - 1)
        return entry, inside, inside == position

    def column(self, name: str) -> Array:
        """The values of all steps, in the order of the index, on the host."""
        self._field(name)
        self.follow()
        return self._steps.get(name, self._steps.all_steps())

    def state_dict(self) -> dict[str, Any]:
        return {
            name: {"dtype": field.dtype, "shape": list(field.shape), "fill": fill}
            for name, (field, fill) in self._fields.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin the columns of another buffer; their values come with the step table."""
        for name, about in state.items():
            if name not in self._fields:
                self.add(name, Field(about["dtype"], tuple(int(n) for n in about["shape"])), about["fill"])


def _as_rows(name: str, field: Field, values: Any, n: int) -> Array:
    """Values as an array ``[n, ...]`` or ``[n, length, ...]`` of the column's own dtype."""
    rows: Array = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    extra = rows.ndim - 1 - len(field.shape)
    is_good = rows.dtype == field.storage_dtype and extra in (0, 1) and len(rows) == n
    if not is_good or rows.shape[1 + extra :] != field.shape:
        windows = (n, "length", *field.shape)
        raise DataError(
            f"column '{name}': expected {field.dtype} of shape {(n, *field.shape)} or {windows}, got {rows.dtype}"
            f" of shape {rows.shape}"
        )
    return rows


def _check_stored(name: str, field: Field, stored: Mapping[str, Array]) -> None:
    for stream, values in stored.items():
        if values.dtype != field.storage_dtype or values.shape[1:] != field.shape:
            raise CorruptionError(
                f"column '{name}' of stream '{stream}': expected {field.dtype} of shape {field.shape}, stored is"
                f" {values.dtype} of shape {values.shape[1:]}"
            )
