"""Carries out batch programs with compiled loops on the CPU: one call a batch if everything is resident."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch

from trajstore.cache.chunk_cache import ChunkCache
from trajstore.cache.row_request import RowRequest
from trajstore.sampling.batches.batch_plan import BatchPlan, TransitionTargets
from trajstore.sampling.batches.batch_program import FINAL_MASK, MASKS, PER_WINDOW_KEYS, BatchProgram
from trajstore.sampling.batches.outputs import check_outputs
from trajstore.sampling.batches.scratch import Scratch
from trajstore.sampling.batches.torch_executor import TorchExecutor, drawn_facts
from trajstore.sampling.compiled import program_layout as at
from trajstore.sampling.compiled.torch_threads import TorchThreads, with_gil
from trajstore.sampling.index.episode_index import EpisodeIndex
from trajstore.sampling.rng import CounterRng
from trajstore.sampling.window_starts import DrawnWindows, WindowStarts
from trajstore.schema import Array, Schema

_PLAN_SCRATCH = (at.FACTS, at.SPANS, at.ROWS_OF_STARTS, at.PART_NUMBERS)
_ORIGINS = ("step", "observed", "reached")
# Fewer bytes are copied in less time than it takes to get the GIL back, or to start a thread.
_MANY_BYTES = 1 << 18
_PART_ROWS = 2048  # of a part of a large batch: intermediate results of these take some 100 KB
_PARTS_OF_THREAD = 4  # at least, so that threads end together
_MAX_MISSES = 8  # after misses in a row, at least one batch in so many is tried
_REWARD_BYTES = {"float32": 4, "float64": 8}  # rewards of these dtypes are summed by the compiled loop


@dataclass(frozen=True, slots=True)
class _Output:
    """One output of a batch.

    Attributes:
        key: Its key in the flat batch.
        path: The field that it is read from; None if it is computed.
        shape: Its shape after the axes of windows and steps.
        dtype: The dtype that numpy knows it by.
        shown: The dtype to show it in, if numpy lacks that.
    """

    key: str
    path: str | None
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    shown: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class _Layout:
    """What batches of one size have in common.

    Attributes:
        n: Number of windows.
        n_threads: Number of threads that make them.
        generation: Of the scratch memory that ``numbers`` refers to.
        numbers: The argument ``call`` of the compiled loops; addresses of outputs are still missing.
        rewards: Address of the rewards to sum.
        part: Number of windows of a part.
        outputs: Key, shape and dtypes of each output but the masks.
        masks: Shape of all masks together.
    """

    n: int
    n_threads: int
    generation: int
    numbers: list[int]
    rewards: int
    part: int
    outputs: list[tuple[str, tuple[int, ...], np.dtype[Any], torch.dtype | None]]
    masks: tuple[int, ...]


class CompiledExecutor(TorchExecutor):
    """Plans, reads and finishes batches of one program with compiled loops.

    Args:
        index: The episodes, on the CPU.
        program: What batches consist of.
        schema: The fields.
        loops: The module `program_loops`.
        scratch: Memory for intermediate results.
    """

    def __init__(
        self, index: EpisodeIndex, program: BatchProgram, schema: Schema, loops: ModuleType, scratch: Scratch
    ) -> None:
        super().__init__(index, program)
        self._loops = loops
        self._scratch = scratch
        self._outputs = _outputs(schema, program)
        self._n_columns = sum(output.path is not None for output in self._outputs)
        self._n_offsets = sum(len(group.offsets) for group in program.groups)
        self._offset_numbers = np.array([o for group in program.groups for o in group.offsets] or [0], np.int64)
        self._program_numbers = self._as_numbers(schema)
        self._index_numbers = np.zeros(at.INDEX_SIZE, np.int64)
        self._index_version = -1
        self._columns = np.zeros((self._n_columns, at.COLUMN_SIZE), np.int64)
        self._cache_version = -1  # when the table of columns was made
        self._is_resident = False
        self._has_blocks = False
        self._is_mapped = [False] * self._n_columns  # whether pages of a column may be absent
        self._n_misses = 0  # batches in a row with a page that was not mapped yet
        self._n_misses_expected = 0  # batches that are not tried, because others before them missed a page
        self._call = np.zeros(at.CALL_SIZE, np.int64)
        self._addresses = np.zeros(self._n_columns, np.int64)
        self._pads = self._pad_rows(schema)
        self._layout: _Layout | None = None
        self._mask_names = (*MASKS, FINAL_MASK) if program.has_final_mask else MASKS
        self._sums_rewards = program.n_step is None or bool(self._program_numbers[at.REWARD_BYTES])
        windows = program.windows
        self._can_draw = windows.weight == "window" and not windows.provenance
        self._given: list[torch.Tensor] = []  # keeps the memory of given windows during a call
        self._threads = TorchThreads()
        self._run_with_gil = with_gil(loops.run_parts.address)
        self._window_bytes = 0  # of the rows of one window
        self._shifts = np.zeros((at.CALL_SIZE + self._n_columns, 2), np.int64)
        self._job = np.zeros(at.JOB_SIZE, np.int64)
        self._job_address = self._job.ctypes.data
        arrays = (
            *(self._program_numbers, self._offset_numbers, self._index_numbers, self._columns, self._addresses),
            *(self._call, self._shifts),
        )
        self._job[: len(arrays)] = [array.ctypes.data for array in arrays]
        self._job[at.JOB_N_COLUMNS] = self._n_columns
        self._draws_n = windows.n_range[0] != windows.n_range[1]

    def _as_numbers(self, schema: Schema) -> Array:
        """The argument ``program`` of the compiled loops."""
        windows, program = self._windows, self.program
        low, high = windows.n_range
        numbers = np.zeros(at.GROUPS, np.int64)
        boundary = {"pad_left": at.PAD_LEFT, "pad_both": at.PAD_BOTH}.get(windows.boundary, at.PLAIN)
        values = {
            at.SIZE: windows.size,
            at.BURN_IN: windows.burn_in,
            at.STRIDE: windows.stride,
            at.LENGTH: windows.length,
            at.N_GROUPS: len(program.groups),
            at.LEADS_ON: program.leads_on,
            at.N_STEPS: low,
            at.NEEDS_NEXT: windows.needs_next,
            at.HAS_FINAL_MASK: program.has_final_mask,
            at.N_DRAWN: high - low + 1 if high > low else 0,
            at.BOUNDARY: boundary,
            at.LEAD: windows.lead,
            at.REACH: windows.reach,
        }
        if program.n_step is not None and schema.reward is not None:
            values[at.REWARD_BYTES] = _REWARD_BYTES.get(schema[schema.reward].dtype, 0)
            values[at.MOST_STEPS] = high
        for position, value in values.items():
            numbers[position] = value
        before, groups = 0, []
        for group in program.groups:
            n = len(group.offsets)
            groups += [_ORIGINS.index(group.origin), group.reaches_final, group.is_padded, n, before, before]
            before += n
        return np.append(numbers, np.array(groups, np.int64))

    def _pad_rows(self, schema: Schema) -> list[Array | None]:
        """For each output: a row that stands for steps that do not exist; None if it is not padded so."""
        pad = self._windows.pad
        if pad == "repeat":
            return [None] * self._n_columns
        fill = 0 if pad == "zero" else pad
        rows: list[Array | None] = []
        for group in self.program.groups:
            for path in group.fields.values():
                field = schema[path]
                if not group.is_padded:
                    rows.append(None)
                elif field.dtype == "bfloat16":
                    row = torch.full(field.shape, fill, dtype=torch.bfloat16).view(torch.int16).numpy()
                    rows.append(row)
                else:
                    rows.append(np.full(field.shape, fill, field.storage_dtype))
        return rows

    # ---- planning ahead

    def plan(self, draw: DrawnWindows, starts: WindowStarts) -> BatchPlan:
        """Plan a batch of drawn windows."""
        if starts.chains is not None:
            return super().plan(draw, starts)
        n = len(draw.entry)
        shape = (n, self._windows.size)
        n_rows = self._n_offsets * n * self._windows.size
        rows, sources = _new(n_rows, np.int64), _new(n_rows, np.int32)
        positions, exists = _new(n_rows, np.int64), _new(n_rows, np.bool_)
        masks = _new((len(self._mask_names), *shape), np.bool_).unbind(0)
        handles, targets = _new((n, 3), np.int64), None
        numbers = [0] * at.CALL_SIZE
        if self._windows.needs_next:
            targets = TransitionTargets(_new(shape, np.int64), _new(shape, np.bool_))
            numbers[at.TAKEN] = targets.n_steps.data_ptr()
            numbers[at.IS_TERMINAL] = targets.is_terminal.data_ptr()
        numbers[at.ROWS], numbers[at.SOURCES] = rows.data_ptr(), sources.data_ptr()
        numbers[at.POSITIONS], numbers[at.EXISTS] = positions.data_ptr(), exists.data_ptr()
        numbers[at.HANDLES] = handles.data_ptr()
        sizes = (8 * at.N_FACTS * n, 8 * n, 8 * n, 8 * (at.CALL_SIZE + self._n_columns))
        addresses = self._scratch.addresses(sizes)
        for position, address in zip(_PLAN_SCRATCH, addresses, strict=True):
            numbers[position] = address
        numbers[at.MASKS : at.MASKS + len(masks)] = [mask.data_ptr() for mask in masks]
        self._give_windows(numbers, draw)
        self._call[:] = numbers
        self._execute(starts, n)
        known = dict(zip(self._mask_names, masks, strict=True)) | {"index": handles}
        known |= drawn_facts(self._index, self._windows, draw)
        return self._as_plan(shape, (rows, sources, positions, exists), known, targets)

    def _as_plan(
        self,
        shape: tuple[int, int],
        found: tuple[torch.Tensor, ...],
        known: Mapping[str, torch.Tensor],
        targets: TransitionTargets | None,
    ) -> BatchPlan:
        wanted, positions, exists, before = {}, {}, {}, 0
        is_inside, n_steps = self._windows.is_inside, shape[0] * shape[1]
        for group in self.program.groups:
            n = len(group.offsets)
            group_shape = (*shape, n) if group.is_stacked else shape
            row, source, position, is_there = (
                values[before * n_steps : (before + n) * n_steps].view(group_shape) for values in found
            )
            before += n
            for key, path in group.fields.items():
                wanted[key] = RowRequest(path, source, row)
                positions[key] = position
                if group.is_padded and not (is_inside and not group.is_stacked):
                    exists[key] = is_there
        return BatchPlan(wanted, positions, exists, known, targets)

    # ---- whole batches

    def run(
        self,
        cache: ChunkCache,
        starts: WindowStarts,
        drawn: DrawnWindows | tuple[int, CounterRng, int],
        outs: Mapping[str, torch.Tensor],
    ) -> dict[str, torch.Tensor] | None:
        """Make a flat batch in one call; returns None, and draws nothing, if that is not possible.

        It is not possible if columns are not resident as a whole or mapped, if a page of the batch is not mapped
        yet or can't be decoded, for windows that cross episodes, and for rewards of rare dtypes.

        Args:
            cache: Has the columns.
            starts: Which windows exist.
            drawn: Windows, or how to draw them: their number, the generator, and the first unit to draw from.
            outs: Memory to write to, by key.
        """
        given = drawn if isinstance(drawn, DrawnWindows) else None
        if self._n_misses_expected:
            self._n_misses_expected -= 1
            return None
        if not self._can_run(starts, is_given=given is not None) or not self._find_columns(cache):
            return None
        layout = self._layout_of(drawn[0] if isinstance(drawn, tuple) else len(drawn.entry))
        if outs:
            check_outputs(outs, self._shapes(layout))
        numbers = layout.numbers.copy()
        if isinstance(drawn, tuple):
            self._give_draw(numbers, starts, *drawn)
        else:
            self._give_windows(numbers, drawn)
        flat = self._allocate(layout, numbers, outs)
        numbers[at.DECODERS], self._shifts[at.DECODERS, 1] = self._decoders(cache, layout)
        self._call[:] = numbers
        if (failed := self._execute_batch(starts, layout)) >= 0:
            self._note_miss(failed)
            if isinstance(drawn, tuple):
                drawn[1].counter = int(self._call[at.COUNTER])  # the same windows are drawn again
            return None
        self._n_misses = 0
        if given is not None:
            flat |= drawn_facts(self._index, self._windows, given)
        return flat

    def _decoders(self, cache: ChunkCache, layout: _Layout) -> tuple[int, int]:
        return cache.decoders(layout.n_threads) if self._has_blocks else (0, 0)

    def _note_miss(self, output: int) -> None:
        """Note that a page was not mapped yet. After several misses in a row, do not try every batch."""
        if not self._is_mapped[output]:
            path = self._outputs[output].path
            raise RuntimeError(f"field '{path}': a row is not in the cache (internal error; please report)")
        self._n_misses = min(self._n_misses + 1, _MAX_MISSES)
        self._n_misses_expected = self._n_misses - 1

    def _can_run(self, starts: WindowStarts, *, is_given: bool) -> bool:
        return starts.chains is None and self._sums_rewards and (is_given or self._can_draw)

    def _n_threads(self, n: int) -> int:
        """How many threads are worth using for a batch of ``n`` windows."""
        return max(1, min(self._threads.n, n, n * self._window_bytes // _MANY_BYTES))

    def _execute_batch(self, starts: WindowStarts, layout: _Layout) -> int:
        """Make the whole batch; a large one without the GIL, by several threads if possible."""
        if layout.n * self._window_bytes < _MANY_BYTES:
            return self._execute(starts, layout.n)
        drawn = bool(self._call[at.IS_DRAWN])
        for position in (at.ENTRY, at.START, at.N_OF_WINDOW):
            self._shifts[position] = (0, -(-8 * layout.part // 64) * 64) if drawn else (8, 0)
        return self._execute(starts, layout.part, layout.n_threads)

    def _find_columns(self, cache: ChunkCache) -> bool:
        """Bring the table of columns up to date; returns whether all of them are resident."""
        if self._cache_version != cache.version:  # an assembler has one cache all its life
            paths = [output.path for output in self._outputs[: self._n_columns] if output.path is not None]
            found = cache.resident_columns(paths)
            self._is_resident, self._has_blocks = found is not None, False
            groups = [g for g, group in enumerate(self.program.groups) for _ in group.fields]
            for i, column in enumerate(found or ()):
                pad = self._pads[i]
                self._is_mapped[i] = column.is_mapped
                self._has_blocks |= column.has_blocks
                self._columns[i] = (*column.addresses(), groups[i], 0 if pad is None else pad.ctypes.data)
            rows = [len(self.program.groups[g].offsets) for g in groups]
            self._window_bytes = int(self._columns[:, 1] @ rows) * self._windows.size if rows else 0
            self._cache_version = cache.version
        return self._is_resident

    def _layout_of(self, n: int) -> _Layout:
        layout, n_threads = self._layout, self._n_threads(n)
        is_known = layout is not None and (layout.n, layout.n_threads) == (n, n_threads)
        if layout is None or not is_known or layout.generation != self._scratch.generation:
            layout = self._layout = self._new_layout(n, n_threads)
        return layout

    def _new_layout(self, n: int, n_threads: int) -> _Layout:
        windows = self._windows
        sizes, part = self._scratch_sizes(), self._part_of(n, n_threads)
        per_thread = {position: size * part for position, size in sizes.items()}
        per_thread[at.PART_NUMBERS] = 8 * (at.CALL_SIZE + self._n_columns)
        # No cache line belongs to two threads.
        per_thread = {position: -(-size // 64) * 64 for position, size in per_thread.items()}
        numbers = [0] * at.CALL_SIZE
        addresses = self._scratch.addresses([size * n_threads for size in per_thread.values()])
        for position, address in zip(per_thread, addresses, strict=True):
            numbers[position] = address
        numbers[at.N_WINDOWS], numbers[at.COPIES] = n, 1
        if self.program.n_step is not None:
            numbers[at.GAMMA] = self.program.n_step.gamma.data_ptr()
        self._set_shifts(per_thread)
        lead = (n,) if windows.squeeze else (n, windows.size)
        outputs = [
            (o.key, ((n,) if o.key in PER_WINDOW_KEYS else lead) + o.shape, o.dtype, o.shown) for o in self._outputs
        ]
        masks = (len(self._mask_names), *lead)
        return _Layout(n, n_threads, self._scratch.generation, numbers, numbers[at.REWARDS], part, outputs, masks)

    def _part_of(self, n: int, n_threads: int) -> int:
        """How many of ``n`` windows a part of a batch has: all of them, if it is small."""
        if n * self._window_bytes < _MANY_BYTES:
            return n
        part = max(1, _PART_ROWS // (self._n_offsets * self._windows.size))
        return min(part, n if n_threads == 1 else -(-n // (_PARTS_OF_THREAD * n_threads)))

    def _scratch_sizes(self) -> dict[int, int]:
        """Bytes of intermediate results for each window, by position in ``call``."""
        size, most, n_rows = self._windows.size, self.program.most_steps, self._n_offsets * self._windows.size
        return {
            at.ROWS: 8 * n_rows,
            at.SOURCES: 4 * n_rows,
            at.EXISTS: n_rows,
            at.SEGMENTS: 32 * n_rows,
            at.ENTRY: 8,
            at.START: 8,
            at.N_OF_WINDOW: 8,
            at.IS_TERMINAL: size,
            at.TAKEN: 8 * size,
            at.REWARDS: 8 * size * most,
            at.FACTS: 8 * at.N_FACTS,
            at.SPANS: 8,
            at.ROWS_OF_STARTS: 8,
        }

    def _set_shifts(self, per_thread: Mapping[int, int]) -> None:
        """Note how far apart the memory of threads lies, and the outputs of windows."""
        size, shifts = self._windows.size, self._shifts
        shifts[:] = 0
        for position, n_bytes in per_thread.items():
            shifts[position, 1] = n_bytes
        shifts[[at.COUNTER, at.N_COUNTER], 0] = 1
        shifts[at.HANDLES, 0] = 3 * 8
        shifts[at.MASKS : at.CALL_SIZE, 0] = size
        rows = [len(group.offsets) for group in self.program.groups for _ in group.fields]
        shifts[at.CALL_SIZE :, 0] = self._columns[:, 1] * rows * size
        if self.program.n_step is not None:
            reward_bytes = int(self._program_numbers[at.REWARD_BYTES])
            outputs = ((at.RETURNS, reward_bytes), (at.DISCOUNTS, 4), (at.TAKEN, 8))
            for position, n_bytes in outputs:
                shifts[position] = n_bytes * size, 0
            shifts[-1] = 0, shifts[at.REWARDS, 1]

    def _allocate(
        self, layout: _Layout, numbers: list[int], outs: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Make the outputs of a batch, except those in ``outs``, and note their addresses."""
        flat: dict[str, torch.Tensor] = {}
        addresses = []
        for key, shape, dtype, shown in layout.outputs:
            if key in outs:
                out = outs[key]
            else:
                out = _new(shape, dtype)
                if shown is not None:
                    out = out.view(shown)
            flat[key] = out
            addresses.append(out.data_ptr())
        n = self._n_columns
        numbers[at.HANDLES] = addresses[-1]
        if self.program.n_step is not None:
            # What is read for this key are the rewards, which are summed into the output.
            numbers[at.RETURNS] = addresses[n - 1]
            numbers[at.DISCOUNTS], numbers[at.TAKEN] = addresses[n : n + 2]
            addresses[n - 1] = layout.rewards
        self._addresses[:] = addresses[:n]
        names = self._mask_names
        masks = [outs[name] for name in names] if "valid" in outs else _new(layout.masks, np.bool_).unbind(0)
        numbers[at.MASKS : at.MASKS + len(names)] = [mask.data_ptr() for mask in masks]
        index = flat.pop("index")
        flat.update(zip(names, masks, strict=True))
        flat["index"] = index
        return flat

    def _shapes(self, layout: _Layout) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The shapes and dtypes of outputs, by key."""
        found = {
            key: (shape, torch.from_numpy(np.empty(0, dtype)).dtype if shown is None else shown)
            for key, shape, dtype, shown in layout.outputs
        }
        return found | dict.fromkeys(self._mask_names, (layout.masks[1:], torch.bool))

    # ---- calls of the compiled loops

    def _give_windows(self, numbers: list[int], drawn: DrawnWindows) -> None:
        numbers[at.N_WINDOWS], numbers[at.IS_DRAWN] = len(drawn.entry), 0
        self._given = [values.contiguous() for values in (drawn.entry, drawn.start, drawn.n) if values is not None]
        for position, values in zip((at.ENTRY, at.START, at.N_OF_WINDOW), self._given, strict=False):
            numbers[position] = values.data_ptr()

    def _give_draw(self, numbers: list[int], starts: WindowStarts, n: int, rng: CounterRng, low: int) -> None:
        numbers[at.IS_DRAWN], numbers[at.SEED] = 1, rng.signed_seed
        numbers[at.COUNTER] = rng.take(2 * n if self._draws_n else n)
        numbers[at.N_COUNTER] = numbers[at.COUNTER] + n
        numbers[at.LOW], numbers[at.LIMIT] = low + starts.base, starts.total - low

    def _execute(self, starts: WindowStarts, part: int, n_threads: int = 0) -> int:
        """Make a batch in parts of so many windows; without threads, this one makes it and keeps the GIL."""
        self._follow_index(starts)
        job = self._job
        job[at.JOB_PART : at.JOB_SIZE] = part, 0, 0, -1
        if n_threads:
            self._threads.call(self._loops.run_parts.address, self._job_address, n_threads)
        else:
            self._run_with_gil(self._job_address)
        return int(job[at.JOB_FAILED])

    def _follow_index(self, starts: WindowStarts) -> None:
        index = self._index
        if self._index_version != index.version:
            self._index_numbers[:] = (*index.addresses(), *starts.addresses())
            self._index_version = index.version


def _outputs(schema: Schema, program: BatchProgram) -> list[_Output]:
    """The outputs of batches but the masks: those that are read, then those that are computed."""
    read: list[_Output] = []
    computed: list[_Output] = []
    for group in program.groups:
        for key, path in group.fields.items():
            field = schema[path]
            shape = (len(group.offsets), *field.shape) if group.is_stacked else field.shape
            shown = torch.bfloat16 if field.dtype == "bfloat16" else None
            read.append(_Output(key, path, shape, field.storage_dtype, shown))
    if program.n_step is not None:  # the rewards come last; the output is their sum
        dtype = read[-1].dtype if read[-1].dtype == np.float64 else np.dtype(np.float32)
        read[-1] = _Output(read[-1].key, read[-1].path, (), dtype)
        computed = [
            _Output("n_step/discount", None, (), np.dtype(np.float32)),
            _Output("n_step/n", None, (), np.dtype(np.int64)),
        ]
    return [*read, *computed, _Output("index", None, (3,), np.dtype(np.int64))]


def _new(shape: int | tuple[int, ...], dtype: Any) -> torch.Tensor:
    """Uninitialised memory. numpy allocates it faster than torch, and asks the system for huge pages."""
    return torch.from_numpy(np.empty(shape, dtype))
