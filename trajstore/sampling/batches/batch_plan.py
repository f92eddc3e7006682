"""Plans batches: turns drawn windows into rows to read and masks, without reading data.

A plan refers to rows of streams, which never move, so it can be executed later and by another thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch

from trajstore.cache.row_request import RowRequest
from trajstore.cache.tensor_dtypes import SIGNED_VIEW
from trajstore.errors import DataError
from trajstore.format.spans import End
from trajstore.sampling.index.episode_index import EpisodeIndex
from trajstore.sampling.index.index_entries import (
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
from trajstore.sampling.windows import Windows, relative_positions
from trajstore.schema import Field, Schema, selected_paths

MASKS = ("valid", "learn", "is_first", "is_last", "terminated", "truncated")
PER_WINDOW_KEYS = (  # keys of a batch with one value for each window, not for each of its steps
    *("index", "priority/weight", "priority/probability"),
    *("hindsight/relabelled", "hindsight/goal_index"),
    *(f"provenance/{name}" for name in ("rank", "env", "source_rank", "source_env", "end", "is_headless")),
)
# Names that batches use for other things than fields.
RESERVED = {*MASKS, "index", "next", "n_step", "priority", "hindsight", "provenance"}
_BFLOAT16_MAX = 3.3895313892515355e38
_NOT_NEEDED = torch.empty(0)
_NOWHERE = -(1 << 62)  # a position that no step has


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Everything about a batch except the values of its rows.

    Attributes:
        wanted: By output key: the rows to read.
        exists: By output key, for keys that need padding: which of the steps exist.
        known: By output key: tensors that need no reading, such as masks and ``index``, the handles of the windows.
        targets: Where the transitions of the steps lead, if the batch has next fields or n-step returns.
        edit: Changes the values right after they were read, and returns the plan to finish the batch with.
    """

    wanted: Mapping[str, RowRequest]
    exists: Mapping[str, torch.Tensor]
    known: Mapping[str, torch.Tensor]
    targets: TransitionTargets | None
    edit: Callable[[BatchPlan, dict[str, torch.Tensor]], BatchPlan] | None = None

    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return the shapes and dtypes of the tensors in `known`, by key."""
        return {key: (tuple(value.shape), value.dtype) for key, value in self.known.items()}


@dataclass(frozen=True, slots=True)
class TransitionTargets:
    """Where the transition of each step of a batch leads; all tensors are [B, T].

    Attributes:
        n_steps: Number of steps that the transition covers; 0 if the step has no successor.
        position: Position of the next observation, or of the nearest row if that was not recorded.
        is_terminal: Whether the episode terminated there, so that nothing is bootstrapped.
    """

    n_steps: torch.Tensor
    position: torch.Tensor
    is_terminal: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Steps:
    """The steps of a batch of B windows of T steps, and what is known of their episodes.

    Attributes:
        entry: Index entries of the episodes: [B], or [B, T] if windows cross episodes.
        position: [B, T]: the position of each step, or of the nearest step if it does not exist.
        exists: [B, T], or None if all steps exist.
        n: [B, 1] or [B, T]: steps of the episode. Empty if no output needs them.
        flags: Flags of the episode, shaped like ``n``.
        masks: [B, T] each, in the order of ``MASKS``.
        handles: [B, 3]: the handles of the windows' first learning steps.
        rows: The rows of the steps, if the compiled loop has found them.
    """

    entry: torch.Tensor
    position: torch.Tensor
    exists: torch.Tensor | None
    n: torch.Tensor
    flags: torch.Tensor
    masks: tuple[torch.Tensor, ...]
    handles: torch.Tensor
    rows: RowLocations | None = None


class BatchPlanner:
    """Plans and finishes batches of one kind of window."""

    def __init__(self, index: EpisodeIndex, schema: Schema, windows: Windows, kernels: ModuleType | None) -> None:
        self._index = index
        self._schema = schema
        self._windows = windows
        self._kernels = kernels
        self._paths = selected_paths(schema, windows.fields)
        self._next_paths = _next_paths(schema, windows)
        self._stacks = [(selected_paths(schema, [name]), steps) for name, steps in windows.stacks]
        self._check()
        device = index.device
        self._relative = relative_positions(windows, device)
        self._is_learning = (self._relative >= 0) & (self._relative <= windows.reach)
        self._needs_lengths = windows.n_step is not None or bool(windows.stacks)
        self._constants = (self._relative.numpy(), self._is_learning.numpy()) if kernels is not None else ()
        self._offsets = [torch.tensor(steps, device=device) for _, steps in self._stacks]

    def _check(self) -> None:
        schema, windows = self._schema, self._windows
        for path in {*self._paths, *(path for paths, _ in self._stacks for path in paths)}:
            if path.split("/")[0] in RESERVED:
                raise DataError(
                    f"field '{path}': batches hold something else under that name; leave it out with fields="
                )
            if isinstance(windows.pad, (int, float)):
                _check_pad(path, schema[path], windows.pad)
        if windows.n_step is not None:
            if schema.reward is None:
                raise DataError("n_step: the schema has no reward field")
            if math.prod(schema[schema.reward].shape) != 1:
                shape = schema[schema.reward].shape
                raise DataError(
                    f"n_step: field '{schema.reward}' has shape {shape}, expected one number for each step"
                )

    def plan(self, draw: DrawnWindows, starts: WindowStarts) -> BatchPlan:
        """Plan a batch of drawn windows. The host does not wait for the device."""
        steps = self._steps(draw, starts)
        targets = self._targets(steps, draw) if self._windows.needs_next else None
        wanted: dict[str, RowRequest] = {}
        exists: dict[str, torch.Tensor] = {}
        self._request_fields(steps, wanted, exists)
        self._request_stacks(steps, wanted, exists)
        masks = steps.masks
        if targets is not None:
            self._request_next(steps, targets, wanted)
            masks = (masks[0], masks[1] & (targets.n_steps > 0), *masks[2:])
        known = dict(zip(MASKS, masks, strict=True)) | {"index": steps.handles}
        if draw.weight is not None and draw.probability is not None:
            known |= {"priority/weight": draw.weight, "priority/probability": draw.probability}
        if self._windows.provenance:
            known |= self._provenance(draw.entry)
        return BatchPlan(wanted, exists, known, targets)

    def _provenance(self, entry: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return who holds and who recorded each episode, how it ended, and whether its first steps are gone."""
        index, flags = self._index, self._index.flags.device[entry].to(torch.int64)
        ended = torch.where((flags & TRUNCATED) != 0, int(End.TRUNCATED), int(End.CUT))
        ended = torch.where((flags & TERMINATED) != 0, int(End.TERMINATED), ended)
        columns = {
            "rank": torch.full_like(entry, index.rank),
            "env": index.shown_env.device[entry].to(torch.int64),
            "source_rank": index.source_ranks()[index.stream.device[entry].to(torch.int64)],
            "source_env": index.env.device[entry].to(torch.int64),
            "end": torch.where((flags & OPEN) != 0, int(End.OPEN), ended),
            "is_headless": (flags & (HEADLESS | BEGINS)) == HEADLESS,
        }
        return {f"provenance/{name}": value for name, value in columns.items()}

    def _handles(self, draw: DrawnWindows) -> torch.Tensor:
        index = self._index
        t = index.t_base.device[draw.entry] + draw.start.clamp(min=0)
        stream = index.stream.device[draw.entry].to(torch.int64)
        return torch.stack((stream, index.episode.device[draw.entry], t), 1)

    def _steps(self, draw: DrawnWindows, starts: WindowStarts) -> _Steps:
        if starts.chains is not None:
            found = starts.chains.steps(draw.entry, draw.start[:, None] + self._relative)
            n, flags = self._lengths_and_flags(found.entry)
            position = torch.where(found.exists, found.position, _NOWHERE)
            masks = self._masks(found.entry, position, found.exists, n, flags)
            return _Steps(found.entry, found.position, found.exists, n, flags, masks, self._handles(draw))
        if self._kernels is not None:
            return self._compiled_steps(draw)
        n, flags = (fact[:, None] for fact in self._lengths_and_flags(draw.entry))
        position = draw.start[:, None] + self._relative
        nearest = position if self._windows.is_inside else torch.minimum(position.clamp(min=0), n - 1)
        exists = None if self._windows.is_inside else nearest == position
        masks = self._masks(draw.entry[:, None], position, exists, n, flags)
        return _Steps(draw.entry, nearest, exists, n, flags, masks, self._handles(draw))

    def _compiled_steps(self, draw: DrawnWindows) -> _Steps:
        assert self._kernels is not None
        index, shape = self._index, (len(draw.entry), self._windows.size)
        # Many small arrays: numpy allocates them in a fraction of the time that torch takes.
        integers = np.empty((2, *shape), np.int64)
        outputs = (
            np.empty((len(MASKS), *shape), np.bool_),
            integers[0],
            np.empty((shape[0], 3), np.int64),
            integers[1],
            np.empty(shape, np.int32),
        )
        self._kernels.window_steps(
            draw.entry.numpy(), draw.start.numpy(), *self._constants, *index.kernel_arrays(), *outputs
        )
        stacked, position, handles, row, source = map(torch.from_numpy, outputs)
        rows, masks = RowLocations(source, row), stacked.unbind(0)
        exists = None if self._windows.is_inside else masks[0]
        if not self._needs_lengths:
            return _Steps(draw.entry, position, exists, _NOT_NEEDED, _NOT_NEEDED, masks, handles, rows)
        n, flags = (fact[:, None] for fact in self._lengths_and_flags(draw.entry))
        return _Steps(draw.entry, position, exists, n, flags, masks, handles, rows)

    def _lengths_and_flags(self, entry: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the number of steps and the flags of episodes."""
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
        # How the episode ended, at its last step; 0 elsewhere.
        end = (flags + MARK) * (position == n - 1)
        return (
            exists,
            exists & self._is_learning,
            exists & (position == torch.where((flags & BEGINS) != 0, 0, -self._index.t_base.device[entry])),
            (end & (MARK | OPEN)) == MARK,
            (end & TERMINATED) != 0,
            (end & TRUNCATED) != 0,
        )

    def _targets(self, steps: _Steps, draw: DrawnWindows) -> TransitionTargets:
        """Find where each step's transition leads: n steps ahead, or to the end of the episode if nearer."""
        leads_on = HAS_FINAL if self._schema.reward_alignment == "observation" else HAS_FINAL | TERMINATED
        if self._kernels is not None and steps.entry.dim() == 1:
            return self._compiled_targets(steps, draw, leads_on)
        stop = steps.n - 1 + ((steps.flags & leads_on) != 0)
        ahead = (stop - steps.position).clamp(min=0)
        low = self._windows.n_range[0]
        n_steps = ahead.clamp(max=low) if draw.n is None else torch.minimum(ahead, draw.n[:, None])
        position = steps.position + n_steps
        is_terminal = (position == steps.n) & ((steps.flags & TERMINATED) != 0)
        last_row = steps.n - 1 + (steps.flags & HAS_FINAL)
        return TransitionTargets(n_steps, torch.minimum(position, last_row), is_terminal)

    def _compiled_targets(self, steps: _Steps, draw: DrawnWindows, leads_on: int) -> TransitionTargets:
        assert self._kernels is not None
        index, shape = self._index, tuple(steps.position.shape)
        n = np.full(shape[0], self._windows.n_range[0]) if draw.n is None else draw.n.numpy()
        integers, is_terminal = np.empty((2, *shape), np.int64), np.empty(shape, np.bool_)
        facts = index.logical.host, index.flags.host
        outputs = *integers, is_terminal
        self._kernels.transition_targets(steps.entry.numpy(), steps.position.numpy(), n, leads_on, *facts, *outputs)
        return TransitionTargets(*map(torch.from_numpy, outputs))

    def _request_fields(
        self, steps: _Steps, wanted: dict[str, RowRequest], exists: dict[str, torch.Tensor]
    ) -> None:
        rows = steps.rows or self._index.rows(steps.entry, steps.position)
        for path in self._paths:
            wanted[path] = RowRequest(path, rows.source, rows.row)
            if steps.exists is not None:
                exists[path] = steps.exists

    def _request_stacks(
        self, steps: _Steps, wanted: dict[str, RowRequest], exists: dict[str, torch.Tensor]
    ) -> None:
        for (paths, _), offsets in zip(self._stacks, self._offsets, strict=True):
            position = steps.position[..., None] + offsets
            nearest = torch.minimum(position.clamp(min=0), (steps.n - 1)[..., None])
            rows = self._index.rows(steps.entry, nearest)
            for path in paths:
                wanted[path] = RowRequest(path, rows.source, rows.row)
                exists[path] = nearest == position
                if steps.exists is not None:
                    exists[path] = exists[path] & steps.exists[..., None]

    def _request_next(self, steps: _Steps, targets: TransitionTargets, wanted: dict[str, RowRequest]) -> None:
        if self._next_paths:
            rows = self._index.rows(steps.entry, targets.position)
            wanted |= {f"next/{path}": RowRequest(path, rows.source, rows.row) for path in self._next_paths}
        if self._windows.n_step is None:
            return
        assert self._schema.reward is not None
        shift = int(self._schema.reward_alignment == "observation")
        ahead = torch.arange(shift, shift + self._windows.n_range[1], device=self._index.device)
        last_row = (steps.n - 1 + (steps.flags & HAS_FINAL))[..., None]
        rows = self._index.rows(steps.entry, torch.minimum(steps.position[..., None] + ahead, last_row))
        wanted["n_step/return"] = RowRequest(self._schema.reward, rows.source, rows.row)

    def finish(self, plan: BatchPlan, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Make the flat batch from the values that were read: edit, pad, sum rewards, add masks, squeeze."""
        if plan.edit is not None:
            plan = plan.edit(plan, values)
        _pad(values, plan.exists, self._windows)
        if plan.targets is not None and self._windows.n_step is not None:
            values |= self._n_step(values.pop("n_step/return"), plan.targets)
        values |= plan.known
        if self._windows.squeeze:
            values = {key: value if key in PER_WINDOW_KEYS else value.squeeze(1) for key, value in values.items()}
        return values

    def _n_step(self, rewards: torch.Tensor, targets: TransitionTargets) -> dict[str, torch.Tensor]:
        gamma = self._windows.gamma
        rewards = rewards.reshape(*targets.n_steps.shape, -1)
        if rewards.dtype is not torch.float64:
            rewards = rewards.to(torch.float32)
        power = torch.arange(rewards.shape[-1], device=rewards.device)
        weight = torch.pow(gamma, power) * (power < targets.n_steps[..., None])
        discount = torch.pow(gamma, targets.n_steps).masked_fill(targets.is_terminal, 0.0)
        total = (rewards * weight).sum(-1)
        return {"n_step/return": total, "n_step/discount": discount, "n_step/n": targets.n_steps}


def _next_paths(schema: Schema, windows: Windows) -> list[str]:
    if windows.next_fields != "final":
        return selected_paths(schema, windows.next_fields)
    chosen = [path for path in selected_paths(schema, windows.fields) if schema[path].final]
    if not chosen:
        raise DataError(
            "next_fields='final': no chosen field of the schema has final=True; declare Field(..., final=True)"
            " before anything is committed, or name fields with next_fields=[...]"
        )
    return chosen


def _pad(values: dict[str, torch.Tensor], exists: Mapping[str, torch.Tensor], windows: Windows) -> None:
    """Fill steps that do not exist with zeros or a number; they hold the nearest step's values until then."""
    if windows.pad == "repeat":
        return
    for key, mask in exists.items():
        value, fill = values[key], 0 if windows.pad == "zero" else windows.pad
        if value.dtype in SIGNED_VIEW:
            value = value.view(SIGNED_VIEW[value.dtype])
            fill = int(np.array(fill, f"uint{8 * value.itemsize}").astype(f"int{8 * value.itemsize}"))
        value.masked_fill_(~mask.reshape(*mask.shape, *(1,) * (value.dim() - mask.dim())), fill)


def _check_pad(path: str, field: Field, pad: float) -> None:
    """Check that the field's dtype can represent the padding value.

    Raises:
        DataError: It can not.
    """
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
