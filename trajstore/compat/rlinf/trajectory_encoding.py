"""How a trajectory is stored as episodes, and how it is restored.

Each environment of a trajectory becomes one or more episodes of the store. An episode ends wherever ``next_obs`` of
a step differs, bit by bit, from ``curr_obs`` of the following step. So observations are stored once; the last
``next_obs`` of an episode is its final value, and both come back exactly. Episodes carry the number of their
trajectory and the other facts needed to rebuild it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trajstore.compat.rlinf.field_paths import from_paths, to_paths, unescape_names
from trajstore.compat.rlinf.trajectory import FIELDS, FLAGS, GROUPS, VALUES, EpochRows, Trajectory
from trajstore.errors import DataError
from trajstore.sampling.windows import Windows
from trajstore.schema import Array, Field, Schema, nest

OBSERVATION = "obs"  # group of the fields that are both in curr_obs and in next_obs
STEP = "step"  # field with the index of the step in its trajectory
_BEFORE, _AFTER = "before", "after"  # groups of the rows that flags and values have beside one row per step
_INTERNAL_GROUPS = (OBSERVATION, STEP, _BEFORE, _AFTER)
# For each field with extra rows: the group that stores them, and the episode column with the number of epochs.
_EXTRA_ROWS = {**dict.fromkeys(FLAGS, (_BEFORE, "flag_epochs")), VALUES: (_AFTER, "value_epochs")}
_COMPARED_BYTES = 1 << 20  # compared at once
# Frames of cameras hold noise, on which the default codec is up to 20 times slower than this one and saves nothing.
# Rendered frames become as small with it.
_FRAME_CODEC = "zstd:-1"
_FRAME_BYTES = 4096  # of a row; smaller rows keep the default codec

COLUMNS = {  # of the episode table: the facts about an episode's trajectory
    "trajectory": int,  # its number, which may repeat after `clear`
    "serial": int,  # never repeats
    "trajectory_steps": int,
    "trajectory_envs": int,
    "flag_epochs": int,
    "value_epochs": int,
    "max_episode_length": int,
    "model_weights_id": str,
}


@dataclass(frozen=True, slots=True)
class EncodedTrajectory:
    """A trajectory in the form that `trajstore.ReplayBuffer.extend` takes.

    Attributes:
        steps: Fields by path, ``[T, B, ...]``.
        final: For fields with a final value, by path: the value after each step, ``[T, B, ...]``.
        ends: Whether an episode of the store ends at a step, ``[T, B]``.
        is_terminal: Whether it ends because the environment's episode terminated, ``[T, B]``.
        metadata: Metadata of every episode, without the number of the trajectory.
        schema: Schema of a store for such trajectories.
    """

    steps: dict[str, torch.Tensor]
    final: dict[str, torch.Tensor]
    ends: torch.Tensor
    is_terminal: torch.Tensor
    metadata: dict[str, Any]
    schema: Schema

    def blocks(self, n_rows: int) -> Iterator[EncodedTrajectory]:
        """Divide into blocks of at most ``n_rows`` rows, final rows included, and of at least one step.

        Episodes end with their block, so none stays open.
        """
        n_envs = self.ends.shape[1]
        # Rows before each step. A block also needs a final row for every environment whose episode it cuts.
        before = torch.cat([torch.zeros(1, dtype=torch.int64), (n_envs + self.ends.sum(1)).cumsum(0)])
        start = 0
        while start < len(self.ends):
            fitting = int(torch.searchsorted(before, before[start] + n_rows - n_envs, right=True)) - 1
            stop = min(max(fitting, start + 1), len(self.ends))
            yield self._part(slice(start, stop))
            start = stop

    def _part(self, part: slice) -> EncodedTrajectory:
        steps, final = ({path: leaf[part] for path, leaf in flat.items()} for flat in (self.steps, self.final))
        ends = self.ends[part].clone()
        ends[-1] = True
        return EncodedTrajectory(steps, final, ends, self.is_terminal[part], self.metadata, self.schema)


def encode(trajectory: Trajectory) -> EncodedTrajectory:
    """Encode a trajectory that `check_consistent` accepts."""
    n_steps, n_envs = trajectory.shape
    shared = _shared_observations(trajectory)
    steps = {f"{OBSERVATION}/{name}": pair[0] for name, pair in shared.items()}
    final = {f"{OBSERVATION}/{name}": pair[1] for name, pair in shared.items()}
    metadata = {
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
        epochs = EpochRows.of(path, leaf, n_steps)
        steps[path] = epochs.step_rows(leaf)
        if path in _EXTRA_ROWS:
            extra_group, column = _EXTRA_ROWS[path]
            steps[f"{extra_group}/{path}"], metadata[column] = epochs.neighbour_rows(leaf), epochs.n
    steps[STEP] = torch.arange(n_steps)[:, None].expand(n_steps, n_envs)
    ends = _breaks(shared.values(), n_steps, n_envs)
    terminal = steps.get("terminations", torch.zeros_like(ends))
    is_terminal = terminal.bool().reshape(n_steps, n_envs, -1).any(-1)
    return EncodedTrajectory(steps, final, ends, ends & is_terminal, metadata, _schema(steps, final))


def _schema(steps: Mapping[str, torch.Tensor], final: Mapping[str, torch.Tensor]) -> Schema:
    fields = {path: _field(leaf, path in final) for path, leaf in steps.items()}
    return Schema(nest(fields), episode=COLUMNS, reward="rewards" if "rewards" in fields else None)


def _field(leaf: torch.Tensor, has_final: bool) -> Field:
    is_frame = leaf.dtype == torch.uint8 and leaf[0, 0].numel() >= _FRAME_BYTES
    codec = _FRAME_CODEC if is_frame else None
    return Field(str(leaf.dtype).removeprefix("torch."), leaf.shape[2:], final=has_final, codec=codec)


def decode(steps: Mapping[str, torch.Tensor], env: torch.Tensor, metadata: Mapping[str, Any]) -> Trajectory:
    """Rebuild a trajectory from its steps.

    Args:
        steps: Fields by path as `step_fields` gives them, ``[n, ...]``, in any order.
        env: The environment of each step, ``[n]``.
        metadata: The `COLUMNS` of one of its episodes.

    Raises:
        DataError: Some steps are missing.
    """
    n_steps, n_envs = metadata["trajectory_steps"], metadata["trajectory_envs"]
    order = torch.argsort(steps[STEP] * n_envs + env)
    if len(order) != n_steps * n_envs:
        raise DataError(
            f"trajectory {metadata['trajectory']}: expected {n_steps * n_envs} transitions, found {len(order)}"
        )
    sorted_ = {path: leaf[order].reshape(n_steps, n_envs, *leaf.shape[1:]) for path, leaf in steps.items()}
    for path in _EXTRA_ROWS.keys() & sorted_.keys():
        extra_group, column = _EXTRA_ROWS[path]
        epochs = EpochRows(metadata[column], n_steps // max(metadata[column], 1), path != VALUES)
        sorted_[path] = epochs.join(sorted_[path], sorted_[f"{extra_group}/{path}"])
    fields = from_paths({p: leaf for p, leaf in sorted_.items() if p.split("/")[0] not in _INTERNAL_GROUPS})
    return Trajectory.of({**fields, **{k: metadata[k] for k in ("max_episode_length", "model_weights_id")}})


def transition_windows(schema: Schema, *, all_fields: bool = False) -> Windows:
    """Return the windows that read single transitions.

    Args:
        schema: Schema of the store.
        all_fields: Read also the fields that only `decode` needs.
    """
    groups = list(dict.fromkeys(path.split("/")[0] for path in schema.fields))
    chosen = tuple(g for g in groups if all_fields or g not in (STEP, _BEFORE, _AFTER))
    shared = (OBSERVATION,) if OBSERVATION in groups else ()
    return Windows(squeeze=True, fields=chosen, next_fields=shared)


def to_rlinf_batch(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch of `transition_windows` under RLinf's names."""
    found = {name: batch[name] for name in (*FIELDS, *GROUPS) if name in batch}
    if OBSERVATION in batch:
        for group, shared in (("curr_obs", batch[OBSERVATION]), ("next_obs", batch["next"][OBSERVATION])):
            own = found.get(group)
            found[group] = shared if own is None else _merged(shared, own)
    return unescape_names(found)


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested dicts with the leaves of both."""
    merged = {**first, **second}
    for name in first.keys() & second.keys():
        merged[name] = _merged(first[name], second[name])
    return merged


def step_fields(batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return a batch of ``transition_windows(all_fields=True)`` by path, as `decode` takes it."""
    internal = {name: batch[name] for name in (STEP, _BEFORE, _AFTER) if name in batch}
    return to_paths({**to_rlinf_batch(batch), **internal})


def _shared_observations(trajectory: Trajectory) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the fields that ``curr_obs`` and ``next_obs`` share, by path: (current, next)."""
    leaves = trajectory.leaves
    found = {}
    for path, leaf in leaves.items():
        group, _, name = path.partition("/")
        after = leaves.get(f"next_obs/{name}")
        if group == "curr_obs" and after is not None and (after.dtype, after.shape) == (leaf.dtype, leaf.shape):
            found[name] = (leaf, after)
    return found


def _breaks(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], n_steps: int, n_envs: int) -> torch.Tensor:
    """Return at which steps ``next_obs`` differs, bit by bit, from ``curr_obs`` of the following step; ``[T, B]``.

    The last step always counts.
    """
    differs = np.zeros((n_steps, n_envs), bool)
    differs[-1] = True
    for current, after in pairs:
        row_bytes = max(1, after[:1].numel() * after.element_size())
        block = max(1, _COMPARED_BYTES // row_bytes)
        for start in range(0, n_steps - 1, block):
            stop = min(start + block, n_steps - 1)
            unequal = _words(after[start:stop]) != _words(current[start + 1 : stop + 1])
            if unequal.any():
                differs[start:stop] |= unequal.any(-1)
    return torch.from_numpy(differs)


def _words(leaf: torch.Tensor) -> Array:
    """Return the bits of a leaf as ``[T, B, words]``, in the longest words that fit: comparing them is faster."""
    data = leaf.contiguous().reshape(*leaf.shape[:2], math.prod(leaf.shape[2:]), 1).view(torch.uint8).numpy()
    data = data.reshape(*leaf.shape[:2], math.prod(data.shape[2:]))
    return data if data.shape[-1] % 8 else data.view(np.int64)
