"""Hindsight: windows of a batch get goals that were achieved, and the rewards that go with them.

Goals are drawn while a batch is planned, and the rows that they and the new rewards need are read with it, in one
wave. Values are changed after they were read, in the batch alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import torch

from trajstore.cache.row_request import RowRequest
from trajstore.cache.tensor_dtypes import SIGNED_VIEW
from trajstore.errors import DataError, SnapshotExpiredError
from trajstore.sampling.batch_assembler import BatchAssembler, WindowKind
from trajstore.sampling.batch_plan import BatchPlan
from trajstore.sampling.index_entries import HAS_FINAL
from trajstore.sampling.rng import CounterRng
from trajstore.sampling.window_starts import DrawnWindows
from trajstore.sampling.windows import Windows, relative_positions
from trajstore.schema import Array, Schema, nest, selected_paths

Strategy = Literal["future", "final", "episode", "random"]
Outcome = Callable[[Any, Any], torch.Tensor]

GOAL_INDEX = "hindsight/goal_index"
_GOAL, _AFTER = "hindsight/goal", "hindsight/after/"  # what is read beside the batch
_RETURN, _TERMINATED = "n_step/return", "terminated"
_MIN_GEOMETRIC = 1e-4  # the table of distances then takes 3 MB


@dataclass(frozen=True, slots=True)
class Hindsight:
    """Which windows get another goal, which goal, and what follows from it. Nothing that is stored changes.

    A window has one goal, at all of its steps. It is given another only where everything that follows from it can
    be computed: the last step of an episode without a final row has no outcome, and windows with such a step stay
    as they are.

    Args:
        strategy: Whose achieved goal it is. ``future``: that of a row after the window's first learning step, in
            the same episode, the final one included; ``final``: of the last row; ``episode``: of any row of the
            episode; ``random``: of any step of any episode.
        fraction: The part of windows that get one, each by chance.
        goal: The field that holds the goal, or a group of them.
        achieved: The field that holds what was achieved, of the same dtype and shape, or a group of such fields.
        reward: A function of n achieved goals and n goals, ``[n, ...]`` each, that gives n rewards, of the dtype of
            the reward field. What was achieved is that of the observation which the rewarded step led to. It is
            also asked about windows that stay as they are, and maybe on another thread. Needed where batches hold
            rewards.
        terminated: A function of the same arguments that gives n bools: the episode terminates where that is
            achieved. Takes the place of what is stored, also in n-step returns. Without it, ``terminated`` stays.
        geometric: With ``future``, draw the distance to the goal not uniformly but from the geometric distribution
            of this parameter (``1 - gamma``, say), as far as the episode goes.
    """

    strategy: Strategy = "future"
    _: KW_ONLY
    fraction: float = 0.8
    goal: str = "desired_goal"
    achieved: str = "achieved_goal"
    reward: Outcome | None = None
    terminated: Outcome | None = None
    geometric: float | None = None

    def __post_init__(self) -> None:
        if self.strategy not in get_args(Strategy):
            raise ValueError(f"strategy: expected one of {', '.join(get_args(Strategy))}, got {self.strategy!r}")
        if not _is_number(self.fraction, 0.0):
            raise ValueError(f"fraction: expected a number from 0 to 1, got {self.fraction!r}")
        for name in ("goal", "achieved"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"{name}: expected the name of a field or group, got {getattr(self, name)!r}")
        for name in ("reward", "terminated"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise TypeError(f"{name}: expected a function, got {getattr(self, name)!r}")
        self._check_geometric()

    def _check_geometric(self) -> None:
        if self.geometric is None:
            return
        if not _is_number(self.geometric, _MIN_GEOMETRIC):
            raise ValueError(f"geometric: expected a number from {_MIN_GEOMETRIC} to 1, got {self.geometric!r}")
        if self.strategy != "future":
            raise ValueError(f"geometric goes with strategy='future', got {self.strategy!r}")


def _is_number(value: object, low: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= 1.0


@dataclass(frozen=True, slots=True)
class _Goals:
    """The fields of a goal: path of the goal, path of what was achieved, and what their paths end in alike."""

    fields: tuple[tuple[str, str, str], ...]
    has_final: bool  # the final row says what was achieved


@dataclass(frozen=True, slots=True)
class _Asked:
    """Values of a batch that follow from the goal, ``[B, ...]`` each."""

    position: torch.Tensor  # of the row that says what was achieved, moved to one that exists
    is_known: torch.Tensor  # there is such a row
    is_lost: torch.Tensor  # there is none, though the value belongs to a step that exists


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the windows of a batch lie in their episodes; ``[B]`` each, but for the steps."""

    entry: torch.Tensor
    n: torch.Tensor  # steps of the episode
    last: torch.Tensor  # position of the last row that says what was achieved
    reset: torch.Tensor  # position of the step at t = 0
    first: torch.Tensor  # position of the first learning step that exists
    steps: torch.Tensor  # [B, T]: positions of all steps, moved to the nearest that exists

    def asked(self, position: torch.Tensor, holds: torch.Tensor, exists: torch.Tensor) -> _Asked:
        """Values that follow from rows; those that hold nothing of the kind stay as they are."""
        last = _leading(self.last, position)
        has_row = position <= last
        return _Asked(torch.minimum(position, last), holds & has_row, holds & exists & ~has_row)


@dataclass(frozen=True, slots=True)
class _Drawn:
    """New goals, ``[B]`` each: which windows get one, and of which row."""

    chosen: torch.Tensor
    entry: torch.Tensor
    position: torch.Tensor


class Relabeller:
    """Plans batches with hindsight; called with the assembler's lock held, as the assembler is."""

    def __init__(self, source: BatchAssembler, options: Hindsight, rng: CounterRng) -> None:
        self.options = options
        self.rng = rng
        self._source = source
        self._goals: _Goals | None = None
        self._distances: torch.Tensor | None = None
        self._offsets: dict[tuple[int, ...], torch.Tensor] = {}  # of stacked rewards

    def plan(self, kind: WindowKind, draw: DrawnWindows, goal_index: torch.Tensor | None = None) -> BatchPlan:
        """The plan of a batch in which some windows have other goals.

        No synchronisation with the host, unless ``goal_index`` says which goals they are: that of an earlier plan
        for the same windows, whose rows may have moved since.

        Raises:
            DataError: The fields do not fit, or the batch holds rewards and there is no function for them.
            SnapshotExpiredError: Goals that were drawn earlier were evicted.
        """
        if kind.windows.boundary == "cross":
            raise ValueError("hindsight: expected windows inside one episode, got boundary='cross'")
        schema, plan = self._source.schema, kind.plan(draw)
        goals = self._goals = self._goals or _goals(schema, self.options)
        _check_batch(plan, goals, schema, self.options)
        places = self._places(draw, kind.windows, goals)
        asked = self._asked(plan, kind.windows, places)
        new = self._draw(places) if goal_index is None else self._find(goal_index)
        for part in asked.values():
            new = replace(new, chosen=new.chosen & ~part.is_lost.flatten(1).any(1))
        return self._extended(plan, goals, places, asked, new)

    def _places(self, draw: DrawnWindows, spec: Windows, goals: _Goals) -> _Places:
        index, entry, start = self._source.index, draw.entry, draw.start
        has_final = index.flags.device[entry] & HAS_FINAL
        n = index.logical.device[entry + 1] - index.logical.device[entry] - has_final
        last = n - 1 + has_final if goals.has_final else n - 1
        first = torch.where(start < 0, start.remainder(spec.stride), start)
        position = start[:, None] + relative_positions(spec, index.device)
        steps = torch.minimum(position.clamp(min=0), n[:, None] - 1)
        return _Places(entry, n, last, -index.t_base.device[entry], first, steps)

    def _asked(self, plan: BatchPlan, spec: Windows, places: _Places) -> dict[str, _Asked]:
        """What follows from the goal, by key of the batch."""
        reward, valid, after = self._source.schema.reward, plan.known["valid"], plan.targets
        asked: dict[str, _Asked] = {}
        if reward is not None and reward in plan.wanted:
            at = self._reward_steps(reward, spec, places)
            asked[reward] = self._of_rewards(at, plan.exists.get(reward, valid), places)
        if after is not None and f"next/{reward}" in plan.wanted:
            asked[f"next/{reward}"] = self._of_rewards(after.position, valid, places)
        if after is not None and _RETURN in plan.wanted:
            # Of rewards that arrive with the observation too, the first is that of the next step.
            ahead = torch.arange(spec.n_range[1], device=self._source.device)
            position = places.steps[..., None] + 1 + ahead
            asked[_RETURN] = places.asked(position, ahead < after.n_steps[..., None], valid[..., None])
        if self.options.terminated is not None:
            asked[_TERMINATED] = places.asked(places.steps + 1, valid, valid)
        return asked

    def _reward_steps(self, path: str, spec: Windows, places: _Places) -> torch.Tensor:
        """Positions of the steps whose rewards a batch holds: those of the window, or stacks of them."""
        stacks = [steps for name, steps in spec.stacks if path == name or path.startswith(f"{name}/")]
        if not stacks:
            return places.steps
        if stacks[-1] not in self._offsets:
            self._offsets[stacks[-1]] = torch.tensor(stacks[-1], device=self._source.device)
        stacked = (places.steps[..., None] + self._offsets[stacks[-1]]).clamp(min=0)
        return torch.minimum(stacked, _leading(places.n, stacked) - 1)

    def _of_rewards(self, at: torch.Tensor, exists: torch.Tensor, places: _Places) -> _Asked:
        """Rewards that stand in rows: they say how good the row after is, or how good their own."""
        if self._source.schema.reward_alignment == "action":
            return places.asked(at + 1, at < _leading(places.n, at), exists)
        return places.asked(at, at != _leading(places.reset, at), exists)  # nothing led to the first observation

    def _draw(self, places: _Places) -> _Drawn:
        n, device, first, last = len(places.entry), self._source.device, places.first, places.last
        chosen = self.rng.uniform(n, device) < self.options.fraction
        if self.options.strategy == "random":
            return _Drawn(chosen, *self._any_steps(n))
        if self.options.strategy == "episode":
            return _Drawn(chosen, places.entry, self.rng.below(n, last + 1, device))
        if self.options.strategy == "final":
            return _Drawn(chosen, places.entry, last)
        return _Drawn(chosen & (first < last), places.entry, first + self._distance((last - first).clamp(min=1)))

    def _distance(self, limit: torch.Tensor) -> torch.Tensor:
        """Numbers from 1 to limits."""
        n, device, p = len(limit), self._source.device, self.options.geometric
        if p is None:
            return self.rng.below(n, limit, device) + 1
        if self._distances is None:
            self._distances = torch.from_numpy(_geometric_sums(p)).to(device)
        # Only comparisons and products, which are the same on every device; logarithms are not.
        sums = self._distances
        number = self.rng.uniform(n, device) * sums[limit.clamp(max=len(sums)) - 1]
        return torch.minimum(torch.searchsorted(sums, number, right=True) + 1, limit)

    def _any_steps(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Steps of all episodes, by entry and position."""
        index = self._source.index
        sums, base = index.step_sums, index.step_base
        number = self.rng.below(n, int(sums.host[-1]) - base, index.device) + base
        entry = torch.searchsorted(sums.device, number, right=True)
        return entry, number - torch.where(entry > 0, sums.device[entry - 1], base)

    def is_here(self, goal_index: torch.Tensor) -> bool:
        """Whether the steps are still there that goals were drawn from."""
        handles = goal_index.cpu().numpy()
        handles = handles[handles[:, 0] >= 0]
        entry = self._source.index.find(handles[:, 0], handles[:, 1])
        return bool(((entry >= 0) & (self._source.index.t_base.host[entry] <= handles[:, 2])).all())

    def _find(self, goal_index: torch.Tensor) -> _Drawn:
        """Where goals lie that were drawn before."""
        if not self.is_here(goal_index):
            raise SnapshotExpiredError("goals that were drawn ahead have been evicted meanwhile")
        index, handles = self._source.index, goal_index.cpu().numpy()
        entry = index.find(handles[:, 0], handles[:, 1])
        position = handles[:, 2] - index.t_base.host[entry]
        at, t = (torch.from_numpy(values).to(index.device) for values in (entry, position))
        return _Drawn(goal_index[:, 0].to(index.device) >= 0, at, t)

    def _extended(
        self, plan: BatchPlan, goals: _Goals, places: _Places, asked: Mapping[str, _Asked], new: _Drawn
    ) -> BatchPlan:
        """The plan with what is to be read beside it, and what is done with that."""
        index, chosen = self._source.index, new.chosen
        entry = torch.where(chosen, new.entry, places.entry)
        position = torch.where(chosen, new.position, places.first)
        stream, t = index.stream.device[entry].to(torch.int64), index.t_base.device[entry] + position
        handles = torch.stack((stream, index.episode.device[entry], t), 1)
        known = {"hindsight/relabelled": chosen, GOAL_INDEX: torch.where(chosen[:, None], handles, -1)}
        rows = {_GOAL: index.rows(entry, position)}
        rows |= {_AFTER + key: index.rows(places.entry, part.position) for key, part in asked.items()}
        wanted = {
            key + name: RowRequest(achieved, found.source, found.row)
            for key, found in rows.items()
            for _, achieved, name in goals.fields
        }
        edit = _Edit(self.options, goals, asked, chosen)
        return replace(plan, wanted={**plan.wanted, **wanted}, known={**plan.known, **known}, edit=edit)


@dataclass(frozen=True, slots=True)
class _Edit:
    """Puts new goals, and what follows from them, into the values of a batch."""

    options: Hindsight
    goals: _Goals
    asked: Mapping[str, _Asked]
    chosen: torch.Tensor

    def __call__(self, plan: BatchPlan, values: dict[str, torch.Tensor]) -> BatchPlan:
        goal = self._taken(values, _GOAL)
        achieved = {key: self._taken(values, _AFTER + key) for key in self.asked}
        for path, _, name in self.goals.fields:
            for key in (path, f"next/{path}"):
                if key in values:
                    n_axes = values[key].dim() - goal[name].dim()
                    values[key] = _where(self.chosen, _spread(goal[name], n_axes), values[key])
        for key in (key for key in self.asked if key != _TERMINATED):
            assert self.options.reward is not None
            found = self._judged("reward", self.options.reward, achieved[key], goal, values[key].dtype)
            values[key] = _where(self._is_changed(key), found.reshape(values[key].shape), values[key])
        return self._ended(plan, achieved, goal)

    def _taken(self, values: dict[str, torch.Tensor], key: str) -> dict[str, torch.Tensor]:
        return {name: values.pop(key + name) for _, _, name in self.goals.fields}

    def _is_changed(self, key: str) -> torch.Tensor:
        is_known = self.asked[key].is_known
        return is_known & _leading(self.chosen, is_known)

    def _judged(
        self,
        what: str,
        function: Outcome,
        achieved: Mapping[str, torch.Tensor],
        goal: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """What a function says of achieved goals, all in one row."""
        rows, goals = {}, {}
        for name, reached in achieved.items():
            shape = goal[name].shape[1:]
            goals[name] = _spread(goal[name], reached.dim() - goal[name].dim()).expand(reached.shape)
            rows[name], goals[name] = (value.reshape(-1, *shape) for value in (reached, goals[name]))
        n = len(next(iter(rows.values())))
        with torch.no_grad():
            found = function(_as_given(rows), _as_given(goals))
        if not isinstance(found, torch.Tensor) or found.shape != (n,) or found.dtype != dtype:
            is_tensor = isinstance(found, torch.Tensor)
            came = f"{found.dtype} of shape {tuple(found.shape)}" if is_tensor else type(found).__name__
            raise DataError(f"{what}: expected the function to give {dtype} of shape ({n},), got {came}")
        return found

    def _ended(
        self, plan: BatchPlan, achieved: Mapping[str, Mapping[str, torch.Tensor]], goal: Mapping[str, torch.Tensor]
    ) -> BatchPlan:
        """The plan as it is where achieving the goal terminates the episode."""
        if self.options.terminated is None:
            return plan
        found = {}
        for key in (key for key in (_TERMINATED, _RETURN) if key in self.asked):
            ends = self._judged("terminated", self.options.terminated, achieved[key], goal, torch.bool)
            found[key] = ends.reshape(self.asked[key].position.shape)
        terminated = _where(self._is_changed(_TERMINATED), found[_TERMINATED], plan.known[_TERMINATED])
        plan = replace(plan, known={**plan.known, _TERMINATED: terminated})
        if plan.targets is None or _RETURN not in found:
            return plan
        # Rewards count up to the step that terminates; what lies behind it is another matter.
        ends = found[_RETURN] & self._is_changed(_RETURN)
        taken = torch.minimum(plan.targets.n_steps, (ends.cumsum(-1) == 0).sum(-1) + 1)
        is_terminal = torch.where(self.chosen[:, None], ends.any(-1), plan.targets.is_terminal)
        return replace(plan, targets=replace(plan.targets, n_steps=taken, is_terminal=is_terminal))


def _goals(schema: Schema, options: Hindsight) -> _Goals:
    """The fields of goals.

    Raises:
        DataError: There are none, or they do not match.
    """
    found: list[dict[str, str]] = []
    for what in ("goal", "achieved"):
        name = getattr(options, what)
        try:
            found.append({path.removeprefix(name): path for path in selected_paths(schema, [name])})
        except KeyError as error:
            raise DataError(f"hindsight: {what}: {error.args[0]}") from error
    goal, achieved = found
    for name in goal.keys() | achieved.keys():
        mine, other = (schema[paths[name]] if name in paths else None for paths in found)
        if mine is None or other is None or (mine.dtype, mine.shape) != (other.dtype, other.shape):
            raise DataError(
                f"hindsight: expected '{options.goal + name}' and '{options.achieved + name}' to be alike, got"
                f" {_described(mine)} and {_described(other)}"
            )
    fields = tuple((path, achieved[name], name) for name, path in goal.items())
    return _Goals(fields, all(schema[path].final for path in achieved.values()))


def _described(field: Any) -> str:
    return f"{field.dtype} of shape {field.shape}" if field is not None else "no such field"


def _check_batch(plan: BatchPlan, goals: _Goals, schema: Schema, options: Hindsight) -> None:
    """Refuse batches that would lack goals, or keep rewards of other goals."""
    for path, _, _ in goals.fields:
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
        raise DataError(f"hindsight: field '{schema.reward}' has shape {shape}, expected one number a step")


def _geometric_sums(p: float) -> Array:
    """By distance, from 1 on: how likely it or a shorter one is, as far as 53 random bits can tell."""
    n = 1 if p == 1 else math.ceil(53 * math.log(2) / -math.log1p(-p))
    sums: Array = 1.0 - np.cumprod(np.full(n, 1.0 - p))
    return sums


def _as_given(values: Mapping[str, torch.Tensor]) -> Any:
    """A tensor for a field, a nested dict for a group."""
    return values[""] if "" in values else nest({name[1:]: value for name, value in values.items()})


def _leading(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Values of windows, with axes to broadcast against another tensor's."""
    return values.view(-1, *(1,) * (like.dim() - 1))


def _spread(values: torch.Tensor, n_axes: int) -> torch.Tensor:
    """Values of windows, with so many axes of steps after the first."""
    return values.view(len(values), *(1,) * n_axes, *values.shape[1:])


def _where(mask: torch.Tensor, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """New values where the mask, whose axes are the first, says so."""
    bits = SIGNED_VIEW.get(old.dtype, old.dtype)
    mask = mask.reshape(*mask.shape, *(1,) * (old.dim() - mask.dim()))
    return torch.where(mask, new.view(bits), old.view(bits)).view(old.dtype)
