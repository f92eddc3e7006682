"""From drawn windows to rows and masks: everything about a batch that needs no data.

A plan refers to rows of streams, which never move, so it can be carried out later and by another thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch

from trajstore.cache.chunk_cache import RowRequest
from trajstore.cache.page_table import UNSIGNED
from trajstore.errors import DataError
from trajstore.format.spans import End
from trajstore.sampling.episode_index import EpisodeIndex
from trajstore.sampling.index_entries import (
    BEGINS,
    HAS_FINAL,
    HEADLESS,
    MARK,
    OPEN,
    TERMINATED,
    TRUNCATED,
    RowLocations,
)
from trajstore.sampling.window_starts import DrawnWindows, WindowStarts
from trajstore.sampling.windows import Windows, relative
from trajstore.schema import Field, Schema, selected_paths

MASKS = ("valid", "learn", "is_first", "is_last", "terminated", "truncated")
WHOLE = (  # what a window has once, not at every step
    *("index", "priority/weight", "priority/probability"),
    *("hindsight/relabelled", "hindsight/goal_index"),
    *(f"provenance/{name}" for name in ("rank", "env", "source_rank", "source_env", "end", "is_headless")),
)
RESERVED = {*MASKS, "index", "next", "n_step", "priority", "hindsight", "provenance"}
_BFLOAT16_MAX = 3.3895313892515355e38
_NOTHING = torch.empty(0)
_NEVER = -(1 << 62)  # a position that no step has


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """What a batch consists of: rows to read by output key, and what is known without reading.

    ``exists`` says for keys that need padding which of their steps exist. ``index`` names the windows. ``edit``
    changes the values that were read, before anything is made of them, and gives the plan to go on with.
    """

    wanted: Mapping[str, RowRequest]
    exists: Mapping[str, torch.Tensor]
    known: Mapping[str, torch.Tensor]
    after: TransitionTargets | None
    edit: Callable[[BatchPlan, dict[str, torch.Tensor]], BatchPlan] | None = None

    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of what is known."""
        return {key: (tuple(value.shape), value.dtype) for key, value in self.known.items()}


@dataclass(frozen=True, slots=True)
class TransitionTargets:
    """Where the transitions of a batch's steps lead."""

    taken: torch.Tensor  # [B, T]: steps summed over; 0 where a step has no successor
    position: torch.Tensor  # [B, T]: of the next observation, moved to a row that exists
    is_terminal: torch.Tensor  # [B, T]: nothing follows, so nothing is bootstrapped


@dataclass(frozen=True, slots=True)
class _Steps:
    """Positions of a batch's steps, and what is known of their episodes."""

    entry: torch.Tensor  # [B], or [B, T] where windows cross episodes
    inside: torch.Tensor  # [B, T], moved to the nearest step that exists
    exists: torch.Tensor | None  # [B, T]; None: all do
    n: torch.Tensor  # [B, 1] or [B, T]: steps of the episode
    flags: torch.Tensor  # as n
    masks: tuple[torch.Tensor, ...]  # [B, T] each, in the order of MASKS
    handles: torch.Tensor  # [B, 3], of the windows
    rows: RowLocations | None = None  # where they lie, if that was found on the way


class BatchPlanner:
    """Plans batches of one kind of window. Tensors that do not change are made once."""

    def __init__(self, index: EpisodeIndex, schema: Schema, spec: Windows, kernels: ModuleType | None) -> None:
        self._index = index
        self._schema = schema
        self._spec = spec
        self._kernels = kernels
        self._paths = selected_paths(schema, spec.fields)
        self._next_paths = _next_paths(schema, spec)
        self._stacks = [(selected_paths(schema, [name]), steps) for name, steps in spec.stacks]
        self._check()
        device = index.device
        self._relative = relative(spec, device)
        self._is_learning = (self._relative >= 0) & (self._relative <= spec.reach)
        self._needs_facts = spec.n_step is not None or bool(spec.stacks)
        self._constants = (self._relative.numpy(), self._is_learning.numpy()) if kernels is not None else ()
        self._offsets = [torch.tensor(steps, device=device) for _, steps in self._stacks]

    def _check(self) -> None:
        schema, spec = self._schema, self._spec
        for path in {*self._paths, *(path for paths, _ in self._stacks for path in paths)}:
            if path.split("/")[0] in RESERVED:
                raise DataError(
                    f"field '{path}': batches hold something else under that name; leave it out with fields="
                )
            if isinstance(spec.pad, (int, float)):
                _check_pad(path, schema[path], spec.pad)
        if spec.n_step is not None:
            if schema.reward is None:
                raise DataError("n_step: the schema has no reward field")
            if math.prod(schema[schema.reward].shape) != 1:
                shape = schema[schema.reward].shape
                raise DataError(f"n_step: field '{schema.reward}' has shape {shape}, expected one number a step")

    def plan(self, draw: DrawnWindows, starts: WindowStarts) -> BatchPlan:
        """Rows and masks of a batch. No synchronisation with the host."""
        steps = self._steps(draw, starts)
        after = self._after(steps, draw) if self._spec.needs_next else None
        wanted: dict[str, RowRequest] = {}
        exists: dict[str, torch.Tensor] = {}
        self._want_fields(steps, wanted, exists)
        self._want_stacks(steps, wanted, exists)
        masks = steps.masks
        if after is not None:
            self._want_next(steps, after, wanted)
            masks = (masks[0], masks[1] & (after.taken > 0), *masks[2:])
        known = dict(zip(MASKS, masks, strict=True)) | {"index": steps.handles}
        if draw.weight is not None and draw.probability is not None:
            known |= {"priority/weight": draw.weight, "priority/probability": draw.probability}
        if self._spec.provenance:
            known |= self._provenance(draw.entry)
        return BatchPlan(wanted, exists, known, after)

    def _provenance(self, entry: torch.Tensor) -> dict[str, torch.Tensor]:
        """Who holds the episodes of windows, who recorded them, and what they lack."""
        index, flags = self._index, self._index.flags.device[entry].to(torch.int64)
        ended = torch.where((flags & TRUNCATED) != 0, int(End.TRUNCATED), int(End.CUT))
        ended = torch.where((flags & TERMINATED) != 0, int(End.TERMINATED), ended)
        found = {
            "rank": torch.full_like(entry, index.rank),
            "env": index.shown_env.device[entry].to(torch.int64),
            "source_rank": index.source_ranks()[index.stream.device[entry].to(torch.int64)],
            "source_env": index.env.device[entry].to(torch.int64),
            "end": torch.where((flags & OPEN) != 0, int(End.OPEN), ended),
            "is_headless": (flags & (HEADLESS | BEGINS)) == HEADLESS,
        }
        return {f"provenance/{name}": value for name, value in found.items()}

    def _handles(self, draw: DrawnWindows) -> torch.Tensor:
        index = self._index
        t = index.t_base.device[draw.entry] + draw.start.clamp(min=0)
        stream = index.stream.device[draw.entry].to(torch.int64)
        return torch.stack((stream, index.episode.device[draw.entry], t), 1)

    def _steps(self, draw: DrawnWindows, starts: WindowStarts) -> _Steps:
        if starts.chains is not None:
            found = starts.chains.steps(draw.entry, draw.start[:, None] + self._relative)
            n, flags = self._facts(found.entry)
            position = torch.where(found.exists, found.position, _NEVER)
            masks = self._masks(found.entry, position, found.exists, n, flags)
            return _Steps(found.entry, found.position, found.exists, n, flags, masks, self._handles(draw))
        if self._kernels is not None:
            return self._compiled_steps(draw)
        n, flags = (fact[:, None] for fact in self._facts(draw.entry))
        position = draw.start[:, None] + self._relative
        inside = position if self._spec.is_inside else torch.minimum(position.clamp(min=0), n - 1)
        exists = None if self._spec.is_inside else inside == position
        masks = self._masks(draw.entry[:, None], position, exists, n, flags)
        return _Steps(draw.entry, inside, exists, n, flags, masks, self._handles(draw))

    def _compiled_steps(self, draw: DrawnWindows) -> _Steps:
        assert self._kernels is not None
        index, shape = self._index, (len(draw.entry), self._spec.size)
        # numpy gives out memory in a fraction of the time that torch takes, and there are many small arrays.
        integers = np.empty((2, *shape), np.int64)
        outputs = (
            np.empty((len(MASKS), *shape), np.bool_),
            integers[0],
            np.empty((shape[0], 3), np.int64),
            integers[1],
            np.empty(shape, np.int32),
        )
        self._kernels.frame(
            draw.entry.numpy(), draw.start.numpy(), *self._constants, *index.kernel_arrays(), *outputs
        )
        block, inside, handles, row, source = map(torch.from_numpy, outputs)
        rows, masks = RowLocations(source, row), block.unbind(0)
        exists = None if self._spec.is_inside else masks[0]
        if not self._needs_facts:
            return _Steps(draw.entry, inside, exists, _NOTHING, _NOTHING, masks, handles, rows)
        n, flags = (fact[:, None] for fact in self._facts(draw.entry))
        return _Steps(draw.entry, inside, exists, n, flags, masks, handles, rows)

    def _facts(self, entry: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Steps and flags of episodes."""
        logical, flags = self._index.logical.device, self._index.flags.device[entry]
        return logical[entry + 1] - logical[entry] - (flags & HAS_FINAL), flags

    def _masks(
        self,
        entry: torch.Tensor,
        position: torch.Tensor,
        exists: torch.Tensor | None,
        n: torch.Tensor,
        flags: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        if exists is None:
            exists = torch.ones_like(position, dtype=torch.bool)
        # How the episode ended, where its last step is, else 0.
        end = (flags + MARK) * (position == n - 1)
        return (
            exists,
            exists & self._is_learning,
            exists & (position == torch.where((flags & BEGINS) != 0, 0, -self._index.t_base.device[entry])),
            (end & (MARK | OPEN)) == MARK,
            (end & TERMINATED) != 0,
            (end & TRUNCATED) != 0,
        )

    def _after(self, steps: _Steps, draw: DrawnWindows) -> TransitionTargets:
        """Where each step's transition leads: n steps on, or to where the episode stops before."""
        good = HAS_FINAL if self._schema.reward_alignment == "observation" else HAS_FINAL | TERMINATED
        if self._kernels is not None and steps.entry.dim() == 1:
            return self._compiled_after(steps, draw, good)
        stop = steps.n - 1 + ((steps.flags & good) != 0)
        ahead = (stop - steps.inside).clamp(min=0)
        low = self._spec.n_range[0]
        taken = ahead.clamp(max=low) if draw.n is None else torch.minimum(ahead, draw.n[:, None])
        position = steps.inside + taken
        is_terminal = (position == steps.n) & ((steps.flags & TERMINATED) != 0)
        last_row = steps.n - 1 + (steps.flags & HAS_FINAL)
        return TransitionTargets(taken, torch.minimum(position, last_row), is_terminal)

    def _compiled_after(self, steps: _Steps, draw: DrawnWindows, good: int) -> TransitionTargets:
        assert self._kernels is not None
        index, shape = self._index, tuple(steps.inside.shape)
        n = np.full(shape[0], self._spec.n_range[0]) if draw.n is None else draw.n.numpy()
        integers, is_terminal = np.empty((2, *shape), np.int64), np.empty(shape, np.bool_)
        facts = index.logical.host, index.flags.host
        outputs = *integers, is_terminal
        self._kernels.after(steps.entry.numpy(), steps.inside.numpy(), n, good, *facts, *outputs)
        taken, position, ends = map(torch.from_numpy, outputs)
        return TransitionTargets(taken, position, ends)

    def _want_fields(self, steps: _Steps, wanted: dict[str, RowRequest], exists: dict[str, torch.Tensor]) -> None:
        rows = steps.rows or self._index.rows(steps.entry, steps.inside)
        for path in self._paths:
            wanted[path] = RowRequest(path, rows.source, rows.row)
            if steps.exists is not None:
                exists[path] = steps.exists

    def _want_stacks(self, steps: _Steps, wanted: dict[str, RowRequest], exists: dict[str, torch.Tensor]) -> None:
        for (paths, _), offsets in zip(self._stacks, self._offsets, strict=True):
            position = steps.inside[..., None] + offsets
            inside = torch.minimum(position.clamp(min=0), (steps.n - 1)[..., None])
            rows = self._index.rows(steps.entry, inside)
            for path in paths:
                wanted[path] = RowRequest(path, rows.source, rows.row)
                exists[path] = inside == position
                if steps.exists is not None:
                    exists[path] = exists[path] & steps.exists[..., None]

    def _want_next(self, steps: _Steps, after: TransitionTargets, wanted: dict[str, RowRequest]) -> None:
        if self._next_paths:
            rows = self._index.rows(steps.entry, after.position)
            wanted |= {f"next/{path}": RowRequest(path, rows.source, rows.row) for path in self._next_paths}
        if self._spec.n_step is None:
            return
        assert self._schema.reward is not None
        shift = int(self._schema.reward_alignment == "observation")
        ahead = torch.arange(shift, shift + self._spec.n_range[1], device=self._index.device)
        last_row = (steps.n - 1 + (steps.flags & HAS_FINAL))[..., None]
        rows = self._index.rows(steps.entry, torch.minimum(steps.inside[..., None] + ahead, last_row))
        wanted["n_step/return"] = RowRequest(self._schema.reward, rows.source, rows.row)

    def finish(self, plan: BatchPlan, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The whole batch, flat, from the values that were read."""
        if plan.edit is not None:
            plan = plan.edit(plan, values)
        _pad(values, plan.exists, self._spec)
        if plan.after is not None and self._spec.n_step is not None:
            values |= self._n_step(values.pop("n_step/return"), plan.after)
        values |= plan.known
        if self._spec.squeeze:
            values = {key: value if key in WHOLE else value.squeeze(1) for key, value in values.items()}
        return values

    def _n_step(self, rewards: torch.Tensor, after: TransitionTargets) -> dict[str, torch.Tensor]:
        gamma = self._spec.gamma
        rewards = rewards.reshape(*after.taken.shape, -1)
        if rewards.dtype is not torch.float64:
            rewards = rewards.to(torch.float32)
        power = torch.arange(rewards.shape[-1], device=rewards.device)
        weight = torch.pow(gamma, power) * (power < after.taken[..., None])
        discount = torch.pow(gamma, after.taken).masked_fill(after.is_terminal, 0.0)
        total = (rewards * weight).sum(-1)
        return {"n_step/return": total, "n_step/discount": discount, "n_step/n": after.taken}


def _next_paths(schema: Schema, spec: Windows) -> list[str]:
    if spec.next_fields != "final":
        return selected_paths(schema, spec.next_fields)
    chosen = [path for path in selected_paths(schema, spec.fields) if schema[path].final]
    if not chosen:
        raise DataError(
            "transitions hold next observations, and no chosen field of the schema is final: declare Field(...,"
            " final=True) before anything is committed, or name fields with next_fields=[...]"
        )
    return chosen


def _pad(values: dict[str, torch.Tensor], exists: Mapping[str, torch.Tensor], spec: Windows) -> None:
    """Overwrite steps that do not exist, unless they repeat the nearest."""
    if spec.pad == "repeat":
        return
    for key, mask in exists.items():
        value, fill = values[key], 0 if spec.pad == "zero" else spec.pad
        if value.dtype in UNSIGNED:
            value = value.view(UNSIGNED[value.dtype])
            fill = int(np.array(fill, f"uint{8 * value.itemsize}").astype(f"int{8 * value.itemsize}"))
        value.masked_fill_(~mask.reshape(*mask.shape, *(1,) * (value.dim() - mask.dim())), fill)


def _check_pad(path: str, field: Field, pad: float) -> None:
    """Refuse a padding value that the field's dtype would change."""
    kind = field.storage_dtype.kind
    low, high = (0, 1) if kind == "b" else (-math.inf, math.inf)
    if kind in "iu":
        low, high = np.iinfo(field.storage_dtype).min, np.iinfo(field.storage_dtype).max
    is_float = kind == "f" or field.dtype == "bfloat16"
    if is_float and math.isfinite(pad):
        largest = _BFLOAT16_MAX if field.dtype == "bfloat16" else float(np.finfo(field.storage_dtype).max)
        if abs(pad) > largest:
            raise DataError(f"pad: field '{path}' of {field.dtype} can't hold {pad!r}")
    if not is_float and not (float(pad).is_integer() and low <= pad <= high):
        raise DataError(f"pad: field '{path}' of {field.dtype} can't hold {pad!r}")
