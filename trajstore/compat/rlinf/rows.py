"""How a trajectory lies in a store.

Each environment of a trajectory becomes one of the store's episodes, or several: one ends wherever the next
observation is not, bit by bit, the observation of the following step. So observations are stored once, the last
``next_obs`` of an episode as its final value, and both come back exactly. Episodes carry the number of their
trajectory, and what else it takes to build it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trajstore.compat.rlinf.names import flat, nested, shown
from trajstore.compat.rlinf.trajectory import FIELDS, FLAGS, GROUPS, VALUES, Epochs, Trajectory
from trajstore.errors import DataError
from trajstore.sampling.windows import Windows
from trajstore.schema import Field, Schema, nest

OBSERVATION = "obs"  # what curr_obs and next_obs have in common
STEP = "step"  # of the trajectory
_BEFORE, _AFTER = "before", "after"  # the rows that flags and values have beyond those of the steps
_INTERNAL = (OBSERVATION, STEP, _BEFORE, _AFTER)
_SIDES = {**dict.fromkeys(FLAGS, (_BEFORE, "flag_epochs")), VALUES: (_AFTER, "value_epochs")}
_AT_ONCE = 1 << 24  # bytes compared in one go

COLUMNS = {  # of episodes: what they know of their trajectory
    "trajectory": int,  # its number, which may come again after `clear`
    "serial": int,  # never comes again
    "trajectory_steps": int,
    "trajectory_envs": int,
    "flag_epochs": int,
    "value_epochs": int,
    "max_episode_length": int,
    "model_weights_id": str,
}


@dataclass(frozen=True, slots=True)
class Rows:
    """A trajectory as a store takes it.

    Attributes:
        steps: ``[T, B, ...]`` by path.
        final: The same of what follows each step, for fields that have a final value.
        ends: ``[T, B]``: whether an episode of the store ends there.
        is_terminal: ``[T, B]``: whether it ends there because the environment's episode did.
        metadata: Of every episode, but for the number of the trajectory.
        schema: Of a store for such trajectories.
    """

    steps: dict[str, torch.Tensor]
    final: dict[str, torch.Tensor]
    ends: torch.Tensor
    is_terminal: torch.Tensor
    metadata: dict[str, Any]
    schema: Schema

    def blocks(self, n: int) -> Iterator[Rows]:
        """The same, ``n`` steps at a time; episodes end with their block, so that none is open after it."""
        for start in range(0, len(self.ends), n):
            part = slice(start, start + n)
            steps, final = ({path: leaf[part] for path, leaf in flat.items()} for flat in (self.steps, self.final))
            ends = self.ends[part].clone()
            ends[-1] = True
            yield Rows(steps, final, ends, self.is_terminal[part], self.metadata, self.schema)


def to_rows(trajectory: Trajectory) -> Rows:
    """Lay out a trajectory whose fields are alike in T and B."""
    n_steps, n_envs = trajectory.shape
    shared = _shared(trajectory)
    steps = {f"{OBSERVATION}/{name}": pair[0] for name, pair in shared.items()}
    final = {f"{OBSERVATION}/{name}": pair[1] for name, pair in shared.items()}
    about = {
        "trajectory_steps": n_steps,
        "trajectory_envs": n_envs,
        "flag_epochs": 0,
        "value_epochs": 0,
        "max_episode_length": int(trajectory.max_episode_length),
        "model_weights_id": trajectory.model_weights_id,
    }
    for path, leaf in trajectory.leaves.items():
        group, _, name = path.partition("/")
        if group in ("curr_obs", "next_obs") and name in shared:
            continue
        layout = Epochs.of(path, leaf, n_steps)
        steps[path] = layout.steps(leaf)
        if path in _SIDES:
            side, kind = _SIDES[path]
            steps[f"{side}/{path}"], about[kind] = layout.others(leaf), layout.n
    steps[STEP] = torch.arange(n_steps)[:, None].expand(n_steps, n_envs)
    ends = _breaks(shared.values(), n_steps, n_envs)
    terminal = steps.get("terminations", torch.zeros_like(ends))
    is_terminal = terminal.bool().reshape(n_steps, n_envs, -1).any(-1)
    return Rows(steps, final, ends, ends & is_terminal, about, _schema(steps, final))


def _schema(steps: Mapping[str, torch.Tensor], final: Mapping[str, torch.Tensor]) -> Schema:
    fields = {
        path: Field(str(leaf.dtype).removeprefix("torch."), leaf.shape[2:], final=path in final)
        for path, leaf in steps.items()
    }
    return Schema(nest(fields), episode=COLUMNS, reward="rewards" if "rewards" in fields else None)


def to_trajectory(rows: Mapping[str, torch.Tensor], env: torch.Tensor, about: Mapping[str, Any]) -> Trajectory:
    """Build a trajectory from the rows of its steps by path, in any order; see `rows_of`.

    Raises:
        DataError: Some of its steps are not there.
    """
    n_steps, n_envs = about["trajectory_steps"], about["trajectory_envs"]
    order = torch.argsort(rows[STEP] * n_envs + env)
    if len(order) != n_steps * n_envs:
        raise DataError(
            f"trajectory {about['trajectory']}: expected {n_steps * n_envs} transitions, found {len(order)}"
        )
    given = {path: leaf[order].reshape(n_steps, n_envs, *leaf.shape[1:]) for path, leaf in rows.items()}
    for path in _SIDES.keys() & given.keys():
        side, kind = _SIDES[path]
        layout = Epochs(about[kind], n_steps // max(about[kind], 1), path != VALUES)
        given[path] = layout.join(given[path], given[f"{side}/{path}"])
    fields = nested({path: leaf for path, leaf in given.items() if path.split("/")[0] not in _INTERNAL})
    return Trajectory.of({**fields, **{k: about[k] for k in ("max_episode_length", "model_weights_id")}})


def sampling(schema: Schema, *, whole: bool = False) -> Windows:
    """The windows that hold transitions; ``whole`` adds what only a trajectory needs."""
    groups = list(dict.fromkeys(path.split("/")[0] for path in schema.fields))
    chosen = tuple(g for g in groups if whole or g not in (STEP, _BEFORE, _AFTER))
    shared = (OBSERVATION,) if OBSERVATION in groups else ()
    return Windows(squeeze=True, fields=chosen, next_fields=shared)


def to_batch(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A batch of `sampling` under RLinf's names."""
    given = {name: batch[name] for name in (*FIELDS, *GROUPS) if name in batch}
    if OBSERVATION in batch:
        for group, shared in (("curr_obs", batch[OBSERVATION]), ("next_obs", batch["next"][OBSERVATION])):
            own = given.get(group)
            given[group] = shared if own is None else _joined(shared, own)
    return shown(given)


def _joined(mine: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dicts of both."""
    joined = {**mine, **others}
    for name in mine.keys() & others.keys():
        joined[name] = _joined(mine[name], others[name])
    return joined


def rows_of(batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The rows of a batch of ``sampling(whole=True)`` by path, as `to_trajectory` takes them."""
    others = {name: batch[name] for name in (STEP, _BEFORE, _AFTER) if name in batch}
    return flat({**to_batch(batch), **others})


def _shared(trajectory: Trajectory) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """What the observation and the next one have in common, by path."""
    leaves = trajectory.leaves
    found = {}
    for path, leaf in leaves.items():
        group, _, name = path.partition("/")
        after = leaves.get(f"next_obs/{name}")
        if group == "curr_obs" and after is not None and (after.dtype, after.shape) == (leaf.dtype, leaf.shape):
            found[name] = (leaf, after)
    return found


def _breaks(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], n_steps: int, n_envs: int) -> torch.Tensor:
    """Where what follows a step is not what the next one begins with, bit by bit; the last step is such a place."""
    differs = torch.zeros(n_steps, n_envs, dtype=torch.bool)
    differs[-1] = True
    for current, after in pairs:
        size = max(1, after[:1].numel() * after.element_size())
        block = max(1, _AT_ONCE // size)
        for start in range(0, n_steps - 1, block):
            stop = min(start + block, n_steps - 1)
            mine, others = _bits(after[start:stop]), _bits(current[start + 1 : stop + 1])
            if not torch.equal(mine, others):
                differs[start:stop] |= (mine != others).reshape(stop - start, n_envs, -1).any(-1)
    return differs


def _bits(leaf: torch.Tensor) -> torch.Tensor:
    leaf = leaf.contiguous()
    return leaf.reshape(*leaf.shape, 1).view(torch.uint8)
