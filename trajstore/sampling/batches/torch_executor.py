"""Carries out batch programs with tensor operations, on any device: the reference for other executors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trajstore.cache.row_request import RowRequest
from trajstore.cache.tensor_dtypes import SIGNED_VIEW
from trajstore.format.spans import End
from trajstore.sampling.batches.batch_plan import BatchPlan, TransitionTargets
from trajstore.sampling.batches.batch_program import FINAL_MASK, MASKS, PER_WINDOW_KEYS, BatchProgram, RowGroup
from trajstore.sampling.index.episode_facts import (
    IS_FINAL,
    IS_FIRST,
    LAST_ROW,
    LAST_STATE,
    LAST_STEP,
    STREAM,
    T_BASE,
    TERMINAL,
)
from trajstore.sampling.index.episode_index import EpisodeIndex
from trajstore.sampling.index.index_entries import BEGINS, HEADLESS, OPEN, TERMINATED, TRUNCATED, RowLocations
from trajstore.sampling.window_starts import DrawnWindows, WindowStarts
from trajstore.sampling.windows import Windows, relative_positions


@dataclass(frozen=True, slots=True)
class _Steps:
    """The steps of a batch of B windows of T steps, and what is known of their episodes.

    Attributes:
        facts: [B, 1, facts], or [B, T, facts] if windows cross episodes: rows of the table `EpisodeIndex.facts`.
        wanted: [B, T]: the position of each step in its episode, outside of it if the step does not exist.
        position: [B, T]: the same, moved to the nearest step that exists.
        exists: [B, T], or None if all steps exist.
    """

    facts: torch.Tensor
    wanted: torch.Tensor
    position: torch.Tensor
    exists: torch.Tensor | None


@dataclass(slots=True)
class _Origins:
    """Positions [B, T] that groups of rows count from; each is computed once, if a group needs it.

    Attributes:
        observed: Like the position of the step, but the final row follows the last step.
        ahead: The position to which the transition would lead in an episode that does not end.
        reached: The position to which it leads.
    """

    observed: torch.Tensor | None = None
    ahead: torch.Tensor | None = None
    reached: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class _GroupRows:
    """Positions of the rows of a group, and which of them exist; None if all do or it does not matter."""

    position: torch.Tensor
    exists: torch.Tensor | None


class TorchExecutor:
    """Plans and finishes batches of one program, with as few operations as possible: each is a launch on a GPU."""

    def __init__(self, index: EpisodeIndex, program: BatchProgram) -> None:
        self.program = program
        self._index = index
        windows = self._windows = program.windows
        device = index.device
        self._relative = relative_positions(windows, device)
        self._is_learning = (self._relative >= 0) & (self._relative <= windows.reach)
        self._learns_everywhere = not (windows.burn_in or windows.bootstrap)
        self._inside = torch.stack((torch.ones_like(self._is_learning), self._is_learning))[:, None]
        self._offsets = [torch.tensor(group.offsets, device=device) for group in program.groups]
        self._zero = torch.zeros((), dtype=torch.int64, device=device)
        self._to_t = torch.tensor([0, 0, 1], device=device)
        self._last_state = LAST_STATE if program.leads_on & TERMINATED else LAST_ROW
        self._gamma = None if program.n_step is None else program.n_step.gamma.to(device)
        self._count = torch.arange(windows.n_range[1], device=device)

    def plan(self, draw: DrawnWindows, starts: WindowStarts) -> BatchPlan:
        """Plan a batch of drawn windows. The host does not wait for the device."""
        table = self._index.facts()
        facts = table[draw.entry]
        steps = self._steps(draw, starts, table, facts)
        origins, targets = self._origins(draw, steps), None
        if self._gamma is not None:
            assert origins.reached is not None
            is_terminal = origins.reached == steps.facts[..., TERMINAL]
            targets = TransitionTargets(origins.reached - steps.position, is_terminal)
        found = [
            self._group_rows(group, offsets, steps, origins)
            for group, offsets in zip(self.program.groups, self._offsets, strict=True)
        ]
        wanted, positions, exists = {}, {}, {}
        for group, rows, at in zip(self.program.groups, found, self._locations(steps, found), strict=True):
            for key, path in group.fields.items():
                wanted[key], positions[key] = RowRequest(path, at.source, at.row), rows.position
                if rows.exists is not None:
                    exists[key] = rows.exists
        known = self._masks(steps) | {"index": self._handles(draw, facts)}
        known |= drawn_facts(self._index, self._windows, draw)
        return BatchPlan(wanted, positions, exists, known, targets)

    def _handles(self, draw: DrawnWindows, facts: torch.Tensor) -> torch.Tensor:
        may_start_before = self._windows.boundary in ("pad_left", "pad_both")
        start = draw.start.clamp(min=0) if may_start_before else draw.start
        return torch.addcmul(facts[:, STREAM : T_BASE + 1], start[:, None], self._to_t)

    def _steps(self, draw: DrawnWindows, starts: WindowStarts, table: torch.Tensor, facts: torch.Tensor) -> _Steps:
        wanted = draw.start[:, None]
        if self._windows.size > 1:
            wanted = wanted + self._relative
        if starts.chains is not None:
            found = starts.chains.steps(draw.entry, wanted)
            return _Steps(table[found.entry], found.position + found.outside, found.position, found.exists)
        facts = facts[:, None]
        if self._windows.is_inside:
            return _Steps(facts, wanted, wanted, None)
        position = wanted.clamp(self._zero, facts[..., LAST_STEP])
        return _Steps(facts, wanted, position, position == wanted)

    def _masks(self, steps: _Steps) -> dict[str, torch.Tensor]:
        """All masks of a batch, [B, T] each."""
        # A step outside of its episode is at none of these positions.
        places = steps.facts[..., IS_FIRST : IS_FINAL + self.program.has_final_mask].movedim(-1, 0)
        shape = len(places), *steps.wanted.shape
        found = torch.empty(shape, dtype=torch.bool, device=places.device)
        masks = (*self._valid_and_learn(steps), *torch.eq(steps.wanted, places, out=found).unbind(0))
        return dict(zip((*MASKS, FINAL_MASK), masks, strict=False))

    def _valid_and_learn(self, steps: _Steps) -> Iterable[torch.Tensor]:
        position, exists = steps.position, steps.exists
        if not self._windows.needs_next:
            if exists is not None:
                return exists, exists & self._is_learning
            both = self._inside.expand(-1, *position.shape)
            return both.clone(memory_format=torch.contiguous_format).unbind(0)
        learns = position < steps.facts[..., self._last_state]
        if not self._learns_everywhere:
            learns = learns & self._is_learning
        if exists is None:
            return torch.ones_like(learns), learns
        return exists, exists & learns

    def _origins(self, draw: DrawnWindows, steps: _Steps) -> _Origins:
        origins, groups = _Origins(), self.program.groups
        if any(group.origin == "observed" for group in groups):
            last = steps.facts[..., LAST_ROW]
            is_inside = self._windows.is_inside
            origins.observed = steps.position if is_inside else steps.wanted.clamp(self._zero, last)
        if self._windows.needs_next:
            n = self._windows.n_range[0] if draw.n is None else draw.n[:, None]
            origins.ahead = steps.position + n
            if self._gamma is not None or any(group.origin == "reached" and group.is_stacked for group in groups):
                origins.reached = torch.minimum(origins.ahead, steps.facts[..., self._last_state])
        return origins

    def _group_rows(self, group: RowGroup, offsets: torch.Tensor, steps: _Steps, origins: _Origins) -> _GroupRows:
        if group.is_stacked:
            return self._stacked_rows(group, offsets, steps, origins)
        if group.origin == "reached":
            assert origins.ahead is not None
            # An episode is at least as long for `reached` as for rows, so `ahead` leads to the same row.
            last = steps.facts[..., LAST_ROW if group.reaches_final else LAST_STEP]
            return _GroupRows(torch.minimum(origins.ahead, last), None)
        position, exists = self._origin(group, steps, origins)
        return _GroupRows(position, exists if group.is_padded else None)

    def _origin(
        self, group: RowGroup, steps: _Steps, origins: _Origins
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The positions that a group counts from, and which of them exist."""
        if group.origin == "reached":
            assert origins.reached is not None
            return origins.reached, None
        if group.origin == "step":
            return steps.position, steps.exists
        assert origins.observed is not None
        return origins.observed, None if steps.exists is None else origins.observed == steps.wanted

    def _stacked_rows(self, group: RowGroup, offsets: torch.Tensor, steps: _Steps, origins: _Origins) -> _GroupRows:
        origin, is_origin = self._origin(group, steps, origins)
        last = steps.facts[..., LAST_ROW if group.reaches_final else LAST_STEP]
        moved = origin[..., None] + offsets
        nearest = moved.clamp(self._zero, last[..., None])
        if not group.is_padded:
            return _GroupRows(nearest, None)
        exists = nearest == moved
        if group.origin == "reached":
            exists = exists | ((moved > nearest) & (moved <= origin[..., None]))
        elif is_origin is not None:
            exists = exists & is_origin[..., None]
        return _GroupRows(nearest, exists)

    def _locations(self, steps: _Steps, found: Sequence[_GroupRows]) -> list[RowLocations]:
        """The rows of all groups. Where rows have to be searched, groups of the same shape are searched at once."""
        index, facts = self._index, steps.facts
        if index.is_simple:
            return [index.rows_of(_with_axes(facts, rows.position.dim()), rows.position) for rows in found]
        shapes: dict[torch.Size, list[int]] = {}
        for i, rows in enumerate(found):
            shapes.setdefault(rows.position.shape, []).append(i)
        locations: dict[int, RowLocations] = {}
        for shape, members in shapes.items():
            alike = [found[i].position for i in members]
            positions = torch.stack(alike) if len(alike) > 1 else alike[0][None]
            at = index.rows_of(_with_axes(facts, len(shape)), positions)
            locations |= {i: RowLocations(at.source[k], at.row[k]) for k, i in enumerate(members)}
        return [locations[i] for i in range(len(found))]

    def finish(self, plan: BatchPlan, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Make the flat batch from the values that were read: edit, pad, sum rewards, add masks, squeeze."""
        if plan.edit is not None:
            plan = plan.edit(plan, values)
        _pad(values, plan.exists, self._windows)
        if plan.targets is not None and self._gamma is not None:
            values |= n_step_sums(values.pop("n_step/return"), plan.targets, self._gamma, self._count)
        values |= plan.known
        if self._windows.squeeze:
            values = {key: value if key in PER_WINDOW_KEYS else value.squeeze(1) for key, value in values.items()}
        return values


def _with_axes(facts: torch.Tensor, n_axes: int) -> torch.Tensor:
    """Facts of steps, [B, T, facts], with axes added before the last one to broadcast against ``n_axes`` axes."""
    return facts.view(*facts.shape[:-1], *(1,) * (n_axes + 1 - facts.dim()), facts.shape[-1])


def drawn_facts(index: EpisodeIndex, windows: Windows, draw: DrawnWindows) -> dict[str, torch.Tensor]:
    """What a batch tells of the draw itself: weights and probabilities, and where its windows come from."""
    known: dict[str, torch.Tensor] = {}
    if draw.weight is not None and draw.probability is not None:
        known |= {"priority/weight": draw.weight, "priority/probability": draw.probability}
    if windows.provenance:
        known |= _provenance(index, draw.entry)
    return known


def _provenance(index: EpisodeIndex, entry: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return who holds and who recorded each episode, how it ended, and whether its first steps are gone."""
    flags = index.flags.device[entry].to(torch.int64)
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


def n_step_sums(
    rewards: torch.Tensor, targets: TransitionTargets, gamma: torch.Tensor, count: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Sum the rewards of transitions, ``[B, T, n]``, discounted by powers of ``gamma``; ``count`` counts to n.

    The order of the additions is fixed, so that every executor gives the same bits: four sums, each over every
    fourth reward, as far as there are four; then the rewards that are left over are added to the first sum, and the
    other sums to the result.
    """
    n_steps = targets.n_steps
    rewards = rewards.reshape(*n_steps.shape, -1)
    if rewards.dtype is not torch.float64:
        rewards = rewards.to(torch.float32)
    n = rewards.shape[-1]
    is_counted = count < n_steps[..., None]
    terms = torch.where(is_counted, rewards * gamma[:n], 0.0)
    n_whole = n - n % 4
    lanes = terms[..., : min(n, 4)]
    for i in range(4, n_whole, 4):
        lanes = lanes + terms[..., i : i + 4]
    first, *others = lanes.unbind(-1)
    total, left_over = first, terms[..., n_whole:].unbind(-1) if n_whole else ()
    for part in (*left_over, *others):
        total = total + part
    discount = gamma[n_steps].masked_fill(targets.is_terminal, 0.0)
    return {"n_step/return": total, "n_step/discount": discount, "n_step/n": n_steps}


def _pad(values: dict[str, torch.Tensor], exists: Mapping[str, torch.Tensor], windows: Windows) -> None:
    """Fill steps that do not exist with zeros or a number; they hold the nearest step's values until then."""
    if windows.pad == "repeat":
        return
    missing: dict[int, torch.Tensor] = {}  # most fields of a batch share one mask
    for key, mask in exists.items():
        value, fill = values[key], 0 if windows.pad == "zero" else windows.pad
        if value.dtype in SIGNED_VIEW:
            value = value.view(SIGNED_VIEW[value.dtype])
            fill = int(np.array(fill, f"uint{8 * value.itemsize}").astype(f"int{8 * value.itemsize}"))
        if id(mask) not in missing:
            missing[id(mask)] = ~mask
        axes = (1,) * (value.dim() - mask.dim())
        value.masked_fill_(missing[id(mask)].view(*mask.shape, *axes), fill)
