"""Carries out batch programs with Triton's kernels, on GPUs.

A batch whose columns are resident takes two launches, a third if it has n-step returns and a fourth if it has
provenance; the host does not wait for any of them. Windows that cross episodes are left to tensor operations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from trajstore.cache.chunk_cache import ChunkCache
from trajstore.cache.column_pages import ColumnPages
from trajstore.cache.row_request import RowRequest
from trajstore.sampling.batches.batch_plan import BatchPlan, TransitionTargets
from trajstore.sampling.batches.batch_program import FINAL_MASK, MASKS, N_STEP, PER_WINDOW_KEYS, BatchProgram
from trajstore.sampling.batches.device_tables import (
    TILE,
    ColumnTable,
    Regions,
    Shape,
    aligned,
    column_facts,
    column_table,
    first_rows,
    lane_table,
    program_table,
)
from trajstore.sampling.batches.outputs import check_outputs
from trajstore.sampling.batches.torch_executor import TorchExecutor, drawn_facts
from trajstore.sampling.index.episode_index import EpisodeIndex
from trajstore.sampling.rng import CounterRng
from trajstore.sampling.triton.launching import launch, uploaded
from trajstore.sampling.triton.selection import device_kernels
from trajstore.sampling.window_starts import DrawnWindows, WindowStarts

PROVENANCE = tuple(
    f"provenance/{name}" for name in ("rank", "env", "source_rank", "source_env", "end", "is_headless")
)
_RETURN, _DISCOUNT, _TAKEN = N_STEP
BLOCKS = (128, 1), (4, 32)  # windows of a program of the grid, and steps of each: for one step, and for more
_MAX_SIZES = 8  # batch sizes whose tables are kept
_MAX_STEPS = 1 << 20  # steps of a window; longer ones are left to tensor operations
SUM_BLOCK = 128
TRITON_DTYPES = {
    torch.bool: "uint8",
    torch.uint8: "uint8",
    torch.int8: "int8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.uint16: "uint16",
    torch.uint32: "uint32",
    torch.uint64: "uint64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
}


class DeviceCounter:
    """The random numbers of a `CounterRng`, with the counter in device memory, which every batch advances.

    A CUDA graph repeats its kernels with the same arguments. With this counter, each replay draws the next batch.

    Attributes:
        signed_seed: Of the generator.
        counter: The counter of the next number: int64 of shape (1,).
    """

    def __init__(self, rng: CounterRng, device: torch.device) -> None:
        self.signed_seed = rng.signed_seed
        self.counter = uploaded([rng.counter], device)


@dataclass(frozen=True, slots=True)
class _BatchMemory:
    """Memory of batches of one size.

    Attributes:
        outputs: What a batch consists of, in order.
        scratch: What kernels hand to each other.
        table: The columns; None if the batch is too large.
    """

    outputs: Regions
    scratch: Regions
    table: ColumnTable | None


@dataclass(slots=True)
class _Draw:
    """Where windows come from: random numbers, or memory that holds them.

    Attributes:
        n_windows: How many.
        entry: Address of their index entries.
        start: Address of their starts.
        n: Address of the numbers of steps of their n-step returns; 0 if these are not drawn.
        rng: The random numbers; None if the windows are given.
        low: Number of the first unit that may be drawn.
        kept: Tensors whose memory the addresses name.
    """

    n_windows: int
    entry: int
    start: int
    n: int
    rng: CounterRng | DeviceCounter | None = None
    low: int = 0
    kept: tuple[torch.Tensor | None, ...] = ()


class TritonExecutor(TorchExecutor):
    """Plans, finishes and runs batches of one program on a GPU.

    Args:
        index: The episodes.
        program: The program.
        kernels: `trajstore.sampling.triton.batch_kernels`.
    """

    def __init__(self, index: EpisodeIndex, program: BatchProgram, kernels: ModuleType) -> None:
        super().__init__(index, program)
        self._kernels = kernels
        self._reward_kernels = device_kernels(index.device, "reward_kernels")
        self._device = index.device
        self._program_table = uploaded(program_table(program), index.device)
        self._lane_table = uploaded(lane_table(program), index.device)
        self._powers = None if program.n_step is None else program.n_step.gamma.to(index.device)
        self._firsts = first_rows(program)
        self._paths = list(dict.fromkeys(path for group in program.groups for path in group.fields.values()))
        low, high = self._windows.n_range
        self._draws_n = low < high
        self._n_numbers = 1 + (self._windows.weight != "window") + self._draws_n
        self._memory: dict[int, _BatchMemory] = {}

    # ---- planned batches

    def plan(self, draw: DrawnWindows, starts: WindowStarts) -> BatchPlan:
        """Plan a batch of drawn windows, in one launch. The host does not wait for the device."""
        n = len(draw.entry)
        if not n or not self._can_run(starts):
            return super().plan(draw, starts)
        shape = n, self._windows.size
        known_shapes = self._known_shapes(shape)
        regions = Regions(known_shapes | self._step_shapes(shape) | self._row_shapes(shape, True))
        block = regions.allocate(self._device)
        found = regions.tensors(block)
        self._frame(_given(draw), starts, {name: block.data_ptr() + at for name, at in regions.offsets.items()})
        known = {key: found[key] for key in known_shapes}
        known |= drawn_facts(self._index, self._windows, draw)
        targets = TransitionTargets(found[_TAKEN], found["is_terminal"]) if self._windows.needs_next else None
        return BatchPlan(*self._requests(shape, found), known, targets)

    def _requests(
        self, shape: tuple[int, int], found: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, RowRequest], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The rows, their positions, and whether they exist, by output key."""
        wanted, positions, exists = dict[str, RowRequest](), dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        n_steps = shape[0] * shape[1]
        for i, group in enumerate(self.program.groups):
            part = slice(self._firsts[i] * n_steps, self._firsts[i + 1] * n_steps)
            whole = (*shape, len(group.offsets)) if group.is_stacked else shape
            names = ("sources", "rows", "positions", "is_real")
            source, row, position, is_real = (found[name][part].view(whole) for name in names)
            for key, path in group.fields.items():
                wanted[key], positions[key] = RowRequest(path, source, row), position
                if group.is_padded:
                    exists[key] = is_real
        return wanted, positions, exists

    # ---- whole batches

    def run(
        self,
        cache: ChunkCache,
        starts: WindowStarts,
        drawn: DrawnWindows | tuple[int, CounterRng | DeviceCounter, int],
        outs: Mapping[str, torch.Tensor],
    ) -> dict[str, torch.Tensor] | None:
        """Make a flat batch; returns None, and draws nothing, if that is not possible. The host does not wait.

        It is not possible if columns are not resident as a whole, and for windows that cross episodes.

        Args:
            cache: Has the columns. Call this in the block of `CachedRows.access`.
            starts: Which windows exist.
            drawn: Windows, or how to draw them: their number, the generator, and the first unit to draw from.
            outs: Memory to write to, by key. That of an earlier batch is written to at once, other memory takes a
                copy.

        Raises:
            ValueError: A tensor of ``outs`` has another shape or dtype.
        """
        given = drawn if isinstance(drawn, DrawnWindows) else None
        draw = _given(drawn) if isinstance(drawn, DrawnWindows) else _random(*drawn)
        memory = self._memory_of(draw.n_windows, starts, cache)
        if memory is None:
            return None
        flat = self._run(draw, starts, memory, outs)
        if given is not None and given.weight is not None and given.probability is not None:
            facts = {"priority/weight": given.weight, "priority/probability": given.probability}
            flat |= {key: outs[key].copy_(fact) if key in outs else fact for key, fact in facts.items()}
        return flat

    def _can_run(self, starts: WindowStarts) -> bool:
        return starts.chains is None and self._windows.size <= _MAX_STEPS and self._index.n > 0

    def _memory_of(self, batch_size: int, starts: WindowStarts, cache: ChunkCache) -> _BatchMemory | None:
        """The memory of a batch; None if its columns are not resident, or kernels can not make it."""
        found = cache.resident_columns(self._paths) if batch_size and self._can_run(starts) else None
        if found is None:
            return None
        memory = self._memory.get(batch_size)
        if memory is None or (memory.table is not None and memory.table.facts != column_facts(found)):
            columns = dict(zip(self._paths, found, strict=True))
            memory = self._memory[batch_size] = self._new_memory(batch_size, columns)
            if len(self._memory) > _MAX_SIZES:
                self._memory.pop(next(iter(self._memory)))
        return None if memory.table is None else memory

    def _new_memory(self, batch_size: int, columns: Mapping[str, ColumnPages]) -> _BatchMemory:
        windows, shape = self._windows, (batch_size, self._windows.size)
        outputs: dict[str, Shape] = {}
        scratch = self._row_shapes(shape, False) | self._step_shapes(shape)
        scratch |= dict.fromkeys(("entry", "start", "n"), ((batch_size,), torch.int64))
        for group in self.program.groups:
            whole = (*shape, len(group.offsets)) if group.is_stacked else shape
            for key, path in group.fields.items():
                arena = columns[path].arena
                (scratch if key == _RETURN else outputs)[key] = (*whole, *arena.row_shape), arena.dtype
        if self.program.n_step is not None:
            is_double = scratch[_RETURN][1] is torch.float64
            outputs[_RETURN] = shape, torch.float64 if is_double else torch.float32
            outputs[_DISCOUNT] = shape, torch.float32
            outputs[_TAKEN] = scratch.pop(_TAKEN)
        outputs |= self._known_shapes(shape)
        if windows.provenance:
            outputs |= dict.fromkeys(PROVENANCE[:-1], ((batch_size,), torch.int64))
            outputs[PROVENANCE[-1]] = (batch_size,), torch.bool
        if windows.squeeze:
            outputs = {
                key: (shape if key in PER_WINDOW_KEYS else (shape[0], *shape[2:]), dtype)
                for key, (shape, dtype) in outputs.items()
            }
        regions = Regions(outputs), Regions(scratch)
        table = column_table(self.program, batch_size * windows.size, columns, *regions, self._device)
        return _BatchMemory(*regions, table)

    def _known_shapes(self, shape: tuple[int, int]) -> dict[str, Shape]:
        found: dict[str, Shape] = dict.fromkeys(MASKS, (shape, torch.bool))
        if self.program.has_final_mask:
            found[FINAL_MASK] = shape, torch.bool
        return found | {"index": ((shape[0], 3), torch.int64)}

    def _step_shapes(self, shape: tuple[int, int]) -> dict[str, Shape]:
        if not self._windows.needs_next:
            return {}
        return {_TAKEN: (shape, torch.int64), "is_terminal": (shape, torch.bool)}

    def _row_shapes(self, shape: tuple[int, int], has_positions: bool) -> dict[str, Shape]:
        n = (shape[0] * shape[1] * self._firsts[-1],)
        dtypes = {"rows": torch.int64, "sources": torch.int32, "is_real": torch.bool}
        dtypes |= {"positions": torch.int64} if has_positions else {}
        return {name: (n, dtype) for name, dtype in dtypes.items()}

    def _run(
        self, draw: _Draw, starts: WindowStarts, memory: _BatchMemory, outs: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        outputs, scratch = memory.outputs, memory.scratch
        check_outputs(outs, outputs.shapes)
        out_at = outputs.address_of(outs)
        if out_at is not None:
            flat = {key: outs[key] for key in outputs.offsets}
        else:
            block = outputs.allocate(self._device)
            out_at, flat = block.data_ptr(), outputs.tensors(block)
        # New for each batch, because another stream may still use the scratch memory of the batch before.
        scratch_block = scratch.allocate(self._device)
        scratch_at = scratch_block.data_ptr()
        at = {name: scratch_at + offset for name, offset in scratch.offsets.items()}
        rewards_at = at.pop(_RETURN, 0)
        at |= {key: out_at + offset for key, offset in outputs.offsets.items()}
        if draw.rng is not None:
            draw.entry, draw.start, draw.n = at["entry"], at["start"], at["n"]
        n_used = self._frame(draw, starts, at)
        self._gather(memory, draw, at, out_at, scratch_at, n_used)
        if self.program.n_step is not None:
            self._sum_rewards(scratch.shapes[_RETURN][1], draw.n_windows * self._windows.size, rewards_at, at)
        if self._windows.provenance:
            self._provenance(draw, at)
        for key in outs.keys() & flat.keys():
            if flat[key] is not outs[key]:
                flat[key] = outs[key].copy_(flat[key])
        return flat

    # ---- launches

    def _launch(self, kernel: Any, grid: tuple[int, ...], *numbers: int, **constants: Any) -> None:
        launch(kernel, grid, self._device, *numbers, **constants)

    def _frame(self, draw: _Draw, starts: WindowStarts, at: Mapping[str, int]) -> int:
        """Draw windows, or take given ones, and find their rows; returns how many random numbers this takes."""
        index, n, size = self._index, draw.n_windows, self._windows.size
        arrays = index.logical, index.flags, index.t_base, index.stream, index.episode
        spans = index.span_logical, index.span_row, index.span_source
        sums, n_entries, base = starts.addresses()
        n_used = 0
        seed = counter = counter_at = 0
        if draw.rng is not None:
            seed, n_used = draw.rng.signed_seed, n * self._n_numbers
            if isinstance(draw.rng, DeviceCounter):
                counter_at = draw.rng.counter.data_ptr()
            else:
                counter = draw.rng.take(n_used)
        names = ("index", MASKS[0], FINAL_MASK, _TAKEN, "is_terminal", "rows", "sources", "is_real", "positions")
        block = BLOCKS[size > 1]
        self._launch(
            self._kernels.frame,
            (-(-n // block[0]), -(-size // block[1])),
            *(self._program_table.data_ptr(), self._lane_table.data_ptr()),
            *(array.data_ptr for array in arrays),
            *(array.data_ptr for array in spans),
            *(0 if index.is_simple else index.span_row.n, sums, n_entries, base),
            *(draw.low, starts.total - draw.low, seed, counter, counter_at, n),
            *(draw.entry, draw.start, draw.n if self._draws_n else 0),
            *(at.get(name, 0) for name in names),
            aligned(n * size),
            is_drawn=draw.rng is not None,
            block_windows=block[0],
            block_steps=block[1],
        )
        return n_used

    def _gather(
        self, memory: _BatchMemory, draw: _Draw, at: Mapping[str, int], out_at: int, scratch_at: int, n_used: int
    ) -> None:
        table = memory.table
        assert table is not None
        counter_at = draw.rng.counter.data_ptr() if isinstance(draw.rng, DeviceCounter) else 0
        self._launch(
            self._kernels.gather,
            (table.n_tiles,),
            *(table.columns.data_ptr(), table.tiles.data_ptr(), table.n_columns),
            *(draw.n_windows * self._windows.size, at["rows"], at["sources"], at["is_real"]),
            *(out_at, scratch_at, counter_at, n_used),
            block=TILE,
        )

    def _sum_rewards(self, stored: torch.dtype, n_steps: int, rewards_at: int, at: Mapping[str, int]) -> None:
        assert self._powers is not None
        assert self._reward_kernels is not None
        language, n = self._reward_kernels.tl, self._windows.n_range[1]
        self._launch(
            self._reward_kernels.sum_rewards,
            (-(-n_steps // SUM_BLOCK),),
            *(rewards_at, self._powers.data_ptr(), at[_TAKEN], at["is_terminal"], at[_RETURN], at[_DISCOUNT]),
            *(n_steps, n),
            stored=getattr(language, TRITON_DTYPES[stored]),
            dtype=language.float64 if stored is torch.float64 else language.float32,
            n_sums=min(n, 4),
            n_left_over=n % 4 if n >= 4 else 0,
            block=SUM_BLOCK,
        )

    def _provenance(self, draw: _Draw, at: Mapping[str, int]) -> None:
        index, n = self._index, draw.n_windows
        arrays = index.flags, index.stream, index.env, index.shown_env
        self._launch(
            self._kernels.provenance,
            (-(-n // SUM_BLOCK),),
            *(array.data_ptr for array in arrays),
            *(index.source_ranks().data_ptr(), draw.entry, index.rank, n),
            *(at[PROVENANCE[0]], aligned(8 * n) // 8, at[PROVENANCE[-1]]),
            block=SUM_BLOCK,
        )


def _given(draw: DrawnWindows) -> _Draw:
    """Windows that were drawn before."""
    entry, start = draw.entry.contiguous(), draw.start.contiguous()
    n = None if draw.n is None else draw.n.contiguous()
    numbers = len(entry), entry.data_ptr(), start.data_ptr(), 0 if n is None else n.data_ptr()
    return _Draw(*numbers, kept=(entry, start, n))


def _random(n: int, rng: CounterRng | DeviceCounter, low: int) -> _Draw:
    """Windows that the kernel draws."""
    return _Draw(n, 0, 0, 0, rng, low)


def new_executor(index: EpisodeIndex, program: BatchProgram) -> TorchExecutor:
    """The executor for a device: kernels on a GPU if Triton is installed, else tensor operations."""
    kernels = device_kernels(index.device) if index.kernels is None else None
    return TorchExecutor(index, program) if kernels is None else TritonExecutor(index, program, kernels)
