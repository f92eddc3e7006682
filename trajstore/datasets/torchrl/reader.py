"""Read dumps of TorchRL's replay buffers. Nothing in them is unpickled."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from trajstore.datasets.episode_arrays import append_final, make_field
from trajstore.datasets.interfaces import Episode
from trajstore.datasets.torchrl.storage import RING_INDEX, Leaf, Ring, load_leaves, load_ring
from trajstore.datasets.torchrl.trajectories import END_FLAGS, TRAJECTORY_IDS, Run, Trajectories
from trajstore.errors import DataError, EpisodeNotFoundError
from trajstore.schema import Field, Schema, nest


def open_reader(
    path: str | os.PathLike[str],
    *,
    skip: Collection[str] = (RING_INDEX,),
    keep_next: bool = False,
    cursor: int | None = None,
) -> TorchRLReader:
    """Open the result of ``rb.dumps(path)``.

    Args:
        path: The directory of the dump.
        skip: Entries to leave out, by path (``next/obs``), or groups of entries. By default the slot in the ring,
            which the buffer adds to every step.
        keep_next: Keep next observations as separate fields. Otherwise they must equal the observations of the
            following step, and are stored once.
        cursor: The slot that would be written next, for dumps whose writer does not state it.

    Raises:
        StoreNotFoundError: A file of the dump does not exist.
        FormatError: It is not a dump of tensors, or it is damaged.
        DataError: The dump does not say where episodes end.
    """
    place = Path(path).absolute()
    return TorchRLReader(place, load_leaves(place / "storage", skip), load_ring(place, cursor), keep_next)


class TorchRLReader:
    """Reads the episodes of a ring of steps. Several environments may be stored side by side."""

    def __init__(self, place: Path, leaves: Mapping[str, Leaf], ring: Ring, keep_next: bool) -> None:
        self._place = place
        self._leaves = leaves
        self._ring = ring
        try:
            self._trajectories = Trajectories(leaves, ring)
        except DataError as error:
            raise DataError(f"{place}: {error}") from error
        self._observations = {} if keep_next else self._trajectories.pairs
        self._fields = self._name_fields()

    @property
    def display(self) -> str:
        return str(self._place)

    @cached_property
    def schema(self) -> Schema:
        fields = {name: _field(leaf, name, name in self._observations) for name, leaf in self._fields.items()}
        reward = next((name for name in ("reward", "next/reward") if name in fields), None)
        return Schema(nest(fields), reward=reward)

    def keys(self) -> Sequence[str]:
        return [str(i) for i in range(len(self._trajectories.episodes))]

    def read(self, key: str) -> Episode:
        if not key.isdecimal() or int(key) >= len(self._trajectories.episodes):
            raise EpisodeNotFoundError(f"{self._place} has no episode '{key}'")
        runs = self._trajectories.episodes[int(key)]
        try:
            self._check_starts(runs)
            steps = {name: self._values(name, leaf, runs) for name, leaf in self._fields.items()}
            terminated, truncated = self._end(runs[-1])
        except DataError as error:
            raise DataError(f"{self._place}: episode '{key}': {error}") from error
        return Episode(key, nest(steps), terminated, truncated, self._metadata(runs, terminated and truncated))

    def close(self) -> None:
        """Do nothing: the memory maps need no closing."""

    def _name_fields(self) -> dict[str, Leaf]:
        """Return the entries that become fields, by path in the store."""
        known = {*END_FLAGS, *(f"next/{name}" for name in (*END_FLAGS, *self._observations)), *TRAJECTORY_IDS}
        kept = {path: leaf for path, leaf in self._leaves.items() if path not in known}
        if "reward" not in kept and "next/reward" in kept:
            kept["reward"] = kept.pop("next/reward")
        return kept

    def _values(self, name: str, leaf: Leaf, runs: Sequence[Run]) -> Any:
        rows = self._trajectories.rows(leaf, runs)
        if name in self._observations:
            _, next_leaf = self._observations[name]
            rows = append_final(name, rows, next_leaf.path, self._trajectories.rows(next_leaf, runs))
        return leaf.with_dtype(rows[:, 0] if _is_reward_column(name, leaf) else rows)

    def _check_starts(self, runs: Sequence[Run]) -> None:
        """Refuse set end flags at the root. They say that an episode ended before a step, and would be lost."""
        for name in END_FLAGS:
            if name in self._leaves and self._trajectories.rows(self._leaves[name], runs).any():
                raise DataError(f"'{name}' is set at the start of a step; leave it out with skip=['{name}']")

    def _end(self, run: Run) -> tuple[bool, bool]:
        ends = self._trajectories.ends
        flags = {name: bool(self._trajectories.rows(leaf, [run.last]).any()) for name, leaf in ends.items()}
        truncated = flags.get("truncated", False)
        terminated = flags.get("terminated", flags.get("done", False) and not truncated)
        if flags.get("done") and not (terminated or truncated):
            raise DataError(
                "'next/done' is set at the last step, but neither 'next/terminated' nor 'next/truncated' is"
            )
        return terminated, truncated

    def _metadata(self, runs: Sequence[Run], is_both: bool) -> dict[str, Any]:
        metadata: dict[str, Any] = {"truncated": True} if is_both else {}  # a store records terminated
        if self._ring.n_lanes > 1:
            metadata["lane"] = runs[0].lane
        trajectory_id = self._trajectories.trajectory_id(runs[0])
        if trajectory_id is not None:
            metadata["traj_id"] = trajectory_id
        if self._trajectories.may_lack_start(runs):
            metadata["headless"] = True
        return metadata


def _field(leaf: Leaf, name: str, is_final: bool) -> Field:
    return make_field(leaf.path, leaf.dtype, () if _is_reward_column(name, leaf) else leaf.shape, final=is_final)


def _is_reward_column(name: str, leaf: Leaf) -> bool:
    """Return whether an entry is the reward, which has an extra axis of length 1 in TorchRL."""
    return name == "reward" and leaf.path == "next/reward" and leaf.shape == (1,)
