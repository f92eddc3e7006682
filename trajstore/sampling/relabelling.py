"""Hindsight relabelling: plans batches in which some windows have achieved goals, and the rewards that follow.

Goals are drawn while a batch is planned. The rows that goals and new rewards need are read together with the batch.
After reading, values are changed in the batch only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from trajstore.cache.row_request import RowRequest
from trajstore.cache.tensor_dtypes import SIGNED_VIEW
from trajstore.errors import DataError, SnapshotExpiredError
from trajstore.sampling.batches.batch_assembler import BatchAssembler, WindowKind
from trajstore.sampling.batches.batch_plan import BatchPlan
from trajstore.sampling.hindsight import GOAL_INDEX, Hindsight, Outcome
from trajstore.sampling.index.index_entries import HAS_FINAL
from trajstore.sampling.rng import CounterRng
from trajstore.sampling.window_starts import DrawnWindows
from trajstore.sampling.windows import Windows, relative_positions
from trajstore.schema import Array, Field, Schema, nest, selected_paths

_GOAL, _AFTER = "hindsight/goal", "hindsight/after/"  # keys of rows that are read beside the batch
_RETURN, _TERMINATED = "n_step/return", "terminated"


@dataclass(frozen=True, slots=True)
class _GoalFields:
    """The fields of goals: the path of the goal, that of the achieved goal, and the suffix that they share."""

    fields: tuple[tuple[str, str, str], ...]
    has_final: bool  # the final row of an episode holds an achieved goal


@dataclass(frozen=True, slots=True)
class _Dependents:
    """Values under one key of a batch that depend on the goal, ``[B, ...]`` each."""

    position: torch.Tensor  # of the row that shows what was achieved, moved to one that exists
    is_known: torch.Tensor  # that row exists
    is_lost: torch.Tensor  # that row does not exist, but the step that the value belongs to does


@dataclass(frozen=True, slots=True)
class _WindowPlaces:
    """Where the windows of a batch lie in their episodes; ``[B]`` each, except for the steps."""

    entry: torch.Tensor
    n: torch.Tensor  # steps of the episode
    last: torch.Tensor  # position of the last row that holds an achieved goal
    reset: torch.Tensor  # position of the step at t = 0
    first: torch.Tensor  # position of the first learning step that exists
    steps: torch.Tensor  # [B, T]: positions of all steps, moved to the nearest that exists

    def dependents(self, position: torch.Tensor, depends: torch.Tensor, exists: torch.Tensor) -> _Dependents:
        """The values that depend on what was achieved at positions; others stay as they are."""
        last = _per_window(self.last, position)
        has_row = position <= last
        return _Dependents(torch.minimum(position, last), depends & has_row, depends & exists & ~has_row)


@dataclass(frozen=True, slots=True)
class _NewGoals:
    """Which windows get a new goal, and the row that it comes from; ``[B]`` each."""

    chosen: torch.Tensor
    entry: torch.Tensor
    position: torch.Tensor


class Relabeller:
    """Plans batches with hindsight. Not thread-safe: call methods with the assembler's lock held.

    Attributes:
        options: The options of relabelling.
        rng: The generator that goals are drawn from.
    """

    def __init__(self, assembler: BatchAssembler, options: Hindsight, rng: CounterRng) -> None:
        self.options = options
        self.rng = rng
        self._assembler = assembler
        self._goal_fields: _GoalFields | None = None
        self._distance_sums: torch.Tensor | None = None

    def plan(self, kind: WindowKind, drawn: DrawnWindows, goal_index: torch.Tensor | None = None) -> BatchPlan:
        """Plan a batch in which some windows have other goals.

        Does not synchronise with the host, unless ``goal_index`` is passed.

        Args:
            kind: The window kind.
            drawn: The windows.
            goal_index: Goals that an earlier plan for the same windows has drawn; their rows may have moved since.

        Raises:
            DataError: The goal fields do not fit, or the batch holds rewards and no reward function was passed.
            SnapshotExpiredError: A goal of ``goal_index`` was evicted.
        """
        if kind.windows.boundary == "cross":
            raise ValueError("hindsight: expected windows inside one episode, got boundary='cross'")
        schema, plan = self._assembler.schema, kind.plan(drawn)
        fields = self._goal_fields = self._goal_fields or _goal_fields(schema, self.options)
        _check_batch(plan, fields, schema, self.options)
        places = self._places(drawn, kind.windows, fields)
        dependents = self._dependents(plan, kind.windows, places)
        goals = self._draw_goals(places) if goal_index is None else self._find_goals(goal_index)
        for values in dependents.values():
            goals = replace(goals, chosen=goals.chosen & ~values.is_lost.flatten(1).any(1))
        return self._extended(plan, fields, places, dependents, goals)

    def _places(self, drawn: DrawnWindows, spec: Windows, fields: _GoalFields) -> _WindowPlaces:
        index, entry, start = self._assembler.index, drawn.entry, drawn.start
        has_final = index.flags.device[entry] & HAS_FINAL
        n = index.logical.device[entry + 1] - index.logical.device[entry] - has_final
        last = n - 1 + has_final if fields.has_final else n - 1
        first = torch.where(start < 0, start.remainder(spec.stride), start)
        steps = torch.minimum(
            (start[:, None] + relative_positions(spec, index.device)).clamp(min=0), n[:, None] - 1
        )
        return _WindowPlaces(entry, n, last, -index.t_base.device[entry], first, steps)

    def _dependents(self, plan: BatchPlan, spec: Windows, places: _WindowPlaces) -> dict[str, _Dependents]:
        """The values that depend on the goal, by key of the batch."""
        reward, valid, targets = self._assembler.schema.reward, plan.known["valid"], plan.targets
        found: dict[str, _Dependents] = {}
        if reward is not None and reward in plan.wanted:
            found[reward] = self._reward_dependents(plan, reward, places)
        if f"next/{reward}" in plan.wanted:
            found[f"next/{reward}"] = self._reward_dependents(plan, f"next/{reward}", places)
        if targets is not None and _RETURN in plan.wanted:
            # Also for rewards that arrive with the observation: the first one summed is that of the next step.
            ahead = torch.arange(spec.n_range[1], device=self._assembler.device)
            position = places.steps[..., None] + 1 + ahead
            found[_RETURN] = places.dependents(position, ahead < targets.n_steps[..., None], valid[..., None])
        if self.options.terminated is not None:
            found[_TERMINATED] = places.dependents(places.steps + 1, valid, valid)
        return found

    def _reward_dependents(self, plan: BatchPlan, key: str, places: _WindowPlaces) -> _Dependents:
        """Stored rewards: each judges the row after its own, or its own, by the reward alignment."""
        at, valid = plan.positions[key], plan.known["valid"]
        valid = valid.reshape(*valid.shape, *(1,) * (at.dim() - valid.dim()))
        exists = plan.exists.get(key, valid)
        if key.startswith("next/"):
            exists = exists & valid
        if self._assembler.schema.reward_alignment == "action":
            return places.dependents(at + 1, at < _per_window(places.n, at), exists)
        # No action led to the first observation, so the reward that came with it stays.
        return places.dependents(at, at != _per_window(places.reset, at), exists)

    def _draw_goals(self, places: _WindowPlaces) -> _NewGoals:
        n, device, first, last = len(places.entry), self._assembler.device, places.first, places.last
        chosen = self.rng.uniform(n, device) < self.options.fraction
        if self.options.strategy == "random":
            return _NewGoals(chosen, *self._random_steps(n))
        if self.options.strategy == "episode":
            return _NewGoals(chosen, places.entry, self.rng.below(n, last + 1, device))
        if self.options.strategy == "final":
            return _NewGoals(chosen, places.entry, last)
        distance = self._draw_distances((last - first).clamp(min=1))
        return _NewGoals(chosen & (first < last), places.entry, first + distance)

    def _draw_distances(self, limit: torch.Tensor) -> torch.Tensor:
        """Draw distances from 1 to ``limit``, both included."""
        n, device, p = len(limit), self._assembler.device, self.options.geometric
        if p is None:
            return self.rng.below(n, limit, device) + 1
        if self._distance_sums is None:
            self._distance_sums = torch.from_numpy(_geometric_sums(p)).to(device)
        # Only comparisons and products: logarithms differ between devices.
        sums = self._distance_sums
        number = self.rng.uniform(n, device) * sums[limit.clamp(max=len(sums)) - 1]
        return torch.minimum(torch.searchsorted(sums, number, right=True) + 1, limit)

    def _random_steps(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw entries and positions of steps uniformly from all episodes."""
        index = self._assembler.index
        sums, base = index.step_sums, index.step_base
        number = self.rng.below(n, int(sums.host[-1]) - base, index.device) + base
        entry = torch.searchsorted(sums.device, number, right=True)
        return entry, number - torch.where(entry > 0, sums.device[entry - 1], base)

    def has_goals(self, goal_index: torch.Tensor) -> bool:
        """Whether none of the steps that goals were drawn from has been evicted."""
        handles = goal_index.cpu().numpy()
        return bool(self._assembler.index.has_steps_from(*handles[handles[:, 0] >= 0].T).all())

    def _find_goals(self, goal_index: torch.Tensor) -> _NewGoals:
        """The present rows of goals that were drawn before."""
        if not self.has_goals(goal_index):
            raise SnapshotExpiredError(
                "a goal of a batch that was drawn ahead has been evicted; draw the batch again"
            )
        index, handles = self._assembler.index, goal_index.cpu().numpy()
        entry = index.find(handles[:, 0], handles[:, 1])
        position = handles[:, 2] - index.t_base.host[entry]
        at, t = (torch.from_numpy(values).to(index.device) for values in (entry, position))
        return _NewGoals(goal_index[:, 0].to(index.device) >= 0, at, t)

    def _extended(
        self,
        plan: BatchPlan,
        fields: _GoalFields,
        places: _WindowPlaces,
        dependents: Mapping[str, _Dependents],
        goals: _NewGoals,
    ) -> BatchPlan:
        """The plan, extended by the rows to read and by the edit that is applied to the values read."""
        index, chosen = self._assembler.index, goals.chosen
        entry = torch.where(chosen, goals.entry, places.entry)
        position = torch.where(chosen, goals.position, places.first)
        stream, t = index.stream.device[entry].to(torch.int64), index.t_base.device[entry] + position
        handles = torch.stack((stream, index.episode.device[entry], t), 1)
        known = {"hindsight/relabelled": chosen, GOAL_INDEX: torch.where(chosen[:, None], handles, -1)}
        rows = {_GOAL: index.rows(entry, position)}
        rows |= {_AFTER + key: index.rows(places.entry, values.position) for key, values in dependents.items()}
        wanted = {
            key + name: RowRequest(achieved, found.source, found.row)
            for key, found in rows.items()
            for _, achieved, name in fields.fields
        }
        edit = _GoalEdit(self.options, fields, dependents, chosen)
        return replace(plan, wanted={**plan.wanted, **wanted}, known={**plan.known, **known}, edit=edit)


@dataclass(frozen=True, slots=True)
class _GoalEdit:
    """Puts new goals, and the values that depend on them, into a batch that was read."""

    options: Hindsight
    fields: _GoalFields
    dependents: Mapping[str, _Dependents]
    chosen: torch.Tensor

    def __call__(self, plan: BatchPlan, values: dict[str, torch.Tensor]) -> BatchPlan:
        goal = self._pop(values, _GOAL)
        achieved = {key: self._pop(values, _AFTER + key) for key in self.dependents}
        for path, _, name in self.fields.fields:
            for key in (path, f"next/{path}"):
                if key in values:
                    n_axes = values[key].dim() - goal[name].dim()
                    values[key] = _where(self.chosen, _with_step_axes(goal[name], n_axes), values[key])
        for key in (key for key in self.dependents if key != _TERMINATED):
            assert self.options.reward is not None
            found = self._evaluate("reward", self.options.reward, achieved[key], goal, values[key].dtype)
            values[key] = _where(self._is_changed(key), found.reshape(values[key].shape), values[key])
        return self._terminated(plan, achieved, goal)

    def _pop(self, values: dict[str, torch.Tensor], key: str) -> dict[str, torch.Tensor]:
        """Remove the goals read under a key from the batch; returns them by the suffix of their field."""
        return {name: values.pop(key + name) for _, _, name in self.fields.fields}

    def _is_changed(self, key: str) -> torch.Tensor:
        is_known = self.dependents[key].is_known
        return is_known & _per_window(self.chosen, is_known)

    def _evaluate(
        self,
        what: str,
        function: Outcome,
        achieved: Mapping[str, torch.Tensor],
        goal: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Call a user's function with all achieved goals and their goals, flattened to one axis.

        Raises:
            DataError: The function returned something else than one value of ``dtype`` per achieved goal.
        """
        rows, goals = {}, {}
        for name, reached in achieved.items():
            shape = goal[name].shape[1:]
            goals[name] = _with_step_axes(goal[name], reached.dim() - goal[name].dim()).expand(reached.shape)
            rows[name], goals[name] = (value.reshape(-1, *shape) for value in (reached, goals[name]))
        n = len(next(iter(rows.values())))
        with torch.no_grad():
            found = function(_as_argument(rows), _as_argument(goals))
        if not isinstance(found, torch.Tensor) or found.shape != (n,) or found.dtype != dtype:
            is_tensor = isinstance(found, torch.Tensor)
            returned = f"{found.dtype} of shape {tuple(found.shape)}" if is_tensor else type(found).__name__
            raise DataError(f"{what}: expected the function to give {dtype} of shape ({n},), got {returned}")
        return found

    def _terminated(
        self, plan: BatchPlan, achieved: Mapping[str, Mapping[str, torch.Tensor]], goal: Mapping[str, torch.Tensor]
    ) -> BatchPlan:
        """The plan with episodes that terminate where ``options.terminated`` says so."""
        if self.options.terminated is None:
            return plan
        found = {}
        for key in (key for key in (_TERMINATED, _RETURN) if key in self.dependents):
            ends = self._evaluate("terminated", self.options.terminated, achieved[key], goal, torch.bool)
            found[key] = ends.reshape(self.dependents[key].position.shape)
        terminated = _where(self._is_changed(_TERMINATED), found[_TERMINATED], plan.known[_TERMINATED])
        plan = replace(plan, known={**plan.known, _TERMINATED: terminated})
        if plan.targets is None or _RETURN not in found:
            return plan
        # Rewards count up to and including the step that terminates.
        ends = found[_RETURN] & self._is_changed(_RETURN)
        n_steps = torch.minimum(plan.targets.n_steps, (ends.cumsum(-1) == 0).sum(-1) + 1)
        is_terminal = torch.where(self.chosen[:, None], ends.any(-1), plan.targets.is_terminal)
        return replace(plan, targets=replace(plan.targets, n_steps=n_steps, is_terminal=is_terminal))


def _goal_fields(schema: Schema, options: Hindsight) -> _GoalFields:
    """The fields of goals and achieved goals, in pairs.

    Raises:
        DataError: A field does not exist, or the two of a pair differ.
    """
    found: list[dict[str, str]] = []
    for option in ("goal", "achieved"):
        name = getattr(options, option)
        try:
            found.append({path.removeprefix(name): path for path in selected_paths(schema, [name])})
        except KeyError as error:
            raise DataError(f"hindsight: {option}: {error.args[0]}") from error
    goal, achieved = found
    for name in goal.keys() | achieved.keys():
        mine, other = (schema[paths[name]] if name in paths else None for paths in found)
        if mine is None or other is None or (mine.dtype, mine.shape) != (other.dtype, other.shape):
            raise DataError(
                f"hindsight: expected '{options.goal + name}' and '{options.achieved + name}' to be alike, got"
                f" {_description(mine)} and {_description(other)}"
            )
    fields = tuple((path, achieved[name], name) for name, path in goal.items())
    return _GoalFields(fields, all(schema[path].final for path in achieved.values()))


def _description(field: Field | None) -> str:
    return f"{field.dtype} of shape {field.shape}" if field is not None else "no such field"


def _check_batch(plan: BatchPlan, fields: _GoalFields, schema: Schema, options: Hindsight) -> None:
    """Check that a batch holds its goals, and holds no rewards that would be those of the old goals.

    Raises:
        DataError: It does not hold a goal, or holds a reward that can't be computed.
    """
    for path, _, _ in fields.fields:
        if path not in plan.wanted:
            raise DataError(f"hindsight: the batch does not hold the goal '{path}'; add it to fields=")
    rewards = [key for key in (schema.reward, f"next/{schema.reward}", _RETURN) if key in plan.wanted]
    if not rewards or schema.reward is None:
        return
    if options.reward is None:
        raise DataError(
            f"hindsight: '{rewards[0]}' would be that of another goal; give reward=, or leave it out with fields="
        )
    if math.prod(schema[schema.reward].shape) != 1:
        shape = schema[schema.reward].shape
        raise DataError(f"hindsight: field '{schema.reward}' has shape {shape}, expected one number per step")


def _geometric_sums(p: float) -> Array:
    """Probabilities of a distance of at most 1, 2, ..., as far as 53 random bits can resolve them."""
    n = 1 if p == 1 else math.ceil(53 * math.log(2) / -math.log1p(-p))
    sums: Array = 1.0 - np.cumprod(np.full(n, 1.0 - p))
    return sums


def _as_argument(values: Mapping[str, torch.Tensor]) -> Any:
    """Goals as a user's function gets them: a tensor for a field, a nested dict for a group."""
    return values[""] if "" in values else nest({name[1:]: value for name, value in values.items()})


def _per_window(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Values of windows, ``[B]``, with axes added to broadcast against ``like``."""
    return values.view(-1, *(1,) * (like.dim() - 1))


def _with_step_axes(values: torch.Tensor, n_axes: int) -> torch.Tensor:
    """Values of windows, ``[B, ...]``, with ``n_axes`` axes of size 1 added after the first."""
    return values.view(len(values), *(1,) * n_axes, *values.shape[1:])


def _where(mask: torch.Tensor, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """New values where the mask is True; the mask's axes are the first axes of the values."""
    bits = SIGNED_VIEW.get(old.dtype, old.dtype)
    mask = mask.reshape(*mask.shape, *(1,) * (old.dim() - mask.dim()))
    return torch.where(mask, new.view(bits), old.view(bits)).view(old.dtype)
