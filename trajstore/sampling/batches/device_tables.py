"""Tables and memory of a batch on a GPU: which numbers kernels read, and where their outputs lie."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trajstore.cache.column_pages import ColumnPages
from trajstore.cache.tensor_dtypes import SIGNED_VIEW
from trajstore.sampling.batches.batch_program import BatchProgram
from trajstore.sampling.triton import table_layout as layout
from trajstore.sampling.triton.launching import uploaded
from trajstore.sampling.windows import Windows

TILE = 1024  # pieces that one program of the grid copies
_ALIGNMENT = 64
_WIDE, _NARROW = 16, 4  # bytes that are copied at a time where addresses allow it
_MAX_TILES = 1 << 31

Shape = tuple[tuple[int, ...], torch.dtype]


def aligned(n_bytes: int) -> int:
    """The number of bytes that a region of this size takes in a block."""
    return -(-n_bytes // _ALIGNMENT) * _ALIGNMENT


class Regions:
    """Tensors that lie one after the other in one block of memory.

    Attributes:
        shapes: Shape and dtype of each tensor.
        offsets: Where each begins, in bytes.
        nbytes: Bytes of the block.
    """

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        self.shapes = dict(shapes)
        self.offsets: dict[str, int] = {}
        self.nbytes = 0
        self._views: list[tuple[str, torch.dtype, tuple[int, ...], tuple[int, ...], int]] = []
        for name, (shape, dtype) in self.shapes.items():
            self.offsets[name] = self.nbytes
            self._views.append((name, dtype, shape, _strides(shape), self.nbytes // dtype.itemsize))
            self.nbytes += aligned(math.prod(shape) * dtype.itemsize)

    def allocate(self, device: torch.device) -> torch.Tensor:
        """A block of memory, not initialised."""
        return torch.empty(self.nbytes, dtype=torch.uint8, device=device)

    def tensors(self, block: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors of a block."""
        typed: dict[torch.dtype, torch.Tensor] = {}
        found = {}
        for name, dtype, shape, strides, offset in self._views:
            if dtype not in typed:
                typed[dtype] = block.view(dtype)
            found[name] = typed[dtype].as_strided(shape, strides, offset)
        return found

    def address_of(self, tensors: Mapping[str, torch.Tensor]) -> int | None:
        """The address of the block that tensors lie in as these regions do; None if they lie elsewhere."""
        if not self.offsets or not tensors.keys() >= self.offsets.keys():
            return None
        addresses = {tensors[name].data_ptr() - offset for name, offset in self.offsets.items()}
        address = addresses.pop()
        return address if not addresses and address % _ALIGNMENT == 0 else None


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def program_table(program: BatchProgram) -> list[int]:
    """The facts of a program, in the order of `table_layout.PROGRAM`."""
    windows = program.windows
    starts = {"pad_left": layout.PAD_LEFT_START, "pad_both": layout.PAD_BOTH_START}
    counts = {
        "strict": layout.STRICT_COUNT,
        "short": layout.SHORT_COUNT,
        "pad_both": layout.PAD_BOTH_COUNT,
    }
    low, high = windows.n_range
    facts = {
        "size": windows.size,
        "burn_in": windows.burn_in,
        "stride": windows.stride,
        "length": windows.length,
        "lead": windows.lead,
        "reach": windows.reach,
        "start_rule": starts.get(windows.boundary, layout.PLAIN_START),
        "is_by_window": windows.weight == "window",
        "count_rule": counts.get(windows.boundary, layout.EVERY_STEP_COUNT),
        "context": (windows.burn_in + windows.bootstrap) * windows.stride if windows.strict_context else 0,
        "needs_next": windows.needs_next,
        "leads_on": program.leads_on,
        "n_low": low,
        "n_choices": high - low + 1,
        "n_lanes": sum(len(group.offsets) for group in program.groups),
    }
    return [int(facts[name]) for name in layout.PROGRAM]


def first_rows(program: BatchProgram) -> list[int]:
    """For each group: the rows of all groups before it, for each step; and at the end those of all groups."""
    return [0, *np.cumsum([len(group.offsets) for group in program.groups]).tolist()]


def lane_table(program: BatchProgram) -> list[int]:
    """The lanes of a program, each in the order of `table_layout.LANE`."""
    numbers: list[int] = []
    for group, first in zip(program.groups, first_rows(program), strict=False):
        origin, n = layout.ORIGINS.index(group.origin), len(group.offsets)
        for place, offset in enumerate(group.offsets):
            numbers += [origin, offset, group.reaches_final, first, place, n]
    return numbers


@dataclass(frozen=True, slots=True)
class ColumnTable:
    """The columns of a batch of one size, for the kernel that copies their rows.

    Attributes:
        columns: Numbers in the order of `table_layout.COLUMN` for each column.
        tiles: The first tile of each column.
        n_columns: Number of columns.
        n_tiles: Number of tiles.
        facts: Where the columns were when the table was made; see `column_facts`.
    """

    columns: torch.Tensor
    tiles: torch.Tensor
    n_columns: int
    n_tiles: int
    facts: list[tuple[int, ...]]


def column_facts(columns: Iterable[ColumnPages]) -> list[tuple[int, ...]]:
    """Addresses of columns. A table of columns is valid while they stay the same."""
    return [
        (
            column.arena.address,
            0 if column.table.is_direct else column.table.slot_of_page.data_ptr,
            column.page_rows,
            column.table.first_virtual_row.data_ptr,
        )
        for column in columns
    ]


def column_table(
    program: BatchProgram,
    n_steps: int,
    columns: Mapping[str, ColumnPages],
    outputs: Regions,
    scratch: Regions,
    device: torch.device,
) -> ColumnTable | None:
    """Make the table of columns of a batch; None if the batch is too large for one launch.

    Args:
        program: The program.
        n_steps: Steps of the batch.
        columns: By path.
        outputs: Where rows go, by output key.
        scratch: The same, for rows that are not output themselves.
        device: Where the table goes.
    """
    numbers: list[int] = []
    tiles = [0]
    firsts, places = first_rows(program), dict(zip(columns, column_facts(columns.values()), strict=True))
    for group, first in zip(program.groups, firsts, strict=False):
        for key, path in group.fields.items():
            column, (arena, slots, page_rows, first_virtual) = columns[path], places[path]
            is_scratch, row_bytes = key in scratch.offsets, column.arena.row_bytes
            offset = (scratch if is_scratch else outputs).offsets[key]
            is_padded = group.is_padded and program.windows.pad != "repeat"
            pattern = padding_pattern(program.windows, column.arena.dtype) if is_padded else 0
            width = _width(row_bytes, arena, offset)
            numbers += [arena, row_bytes, slots, page_rows, first_virtual, first, len(group.offsets)]
            numbers += [is_scratch, offset, is_padded, pattern, width]
            n_pieces = n_steps * len(group.offsets) * (row_bytes // width)
            tiles.append(tiles[-1] - (-n_pieces // TILE))
    if not numbers:  # one tile without rows, because that launch also advances a counter on the device
        numbers, tiles = [int(name in ("row_bytes", "page_rows", "width")) for name in layout.COLUMN], [0, 1]
    if tiles[-1] >= _MAX_TILES:
        return None
    n_columns = len(tiles) - 1
    facts = list(places.values())
    return ColumnTable(uploaded(numbers, device), uploaded(tiles, device), n_columns, tiles[-1], facts)


def _width(*numbers: int) -> int:
    return next((width for width in (_WIDE, _NARROW) if not any(n % width for n in numbers)), 1)


def padding_pattern(windows: Windows, dtype: torch.dtype) -> int:
    """Eight bytes of padding values, as a signed integer."""
    fill = windows.pad if isinstance(windows.pad, (int, float)) else 0
    if dtype in SIGNED_VIEW:
        bits = 8 * dtype.itemsize
        dtype, fill = SIGNED_VIEW[dtype], int(np.array(fill, f"uint{bits}").astype(f"int{bits}"))
    values = torch.full((8 // dtype.itemsize,), fill, dtype=dtype)
    return int(values.view(torch.int64).item())
