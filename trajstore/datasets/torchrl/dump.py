"""Dumps of TorchRL's replay buffers (``rb.dumps``), read from their memory maps; nothing of them is unpickled."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from trajstore.datasets.fields import field_of, followed
from trajstore.datasets.ports import Episode
from trajstore.datasets.torchrl.episodes import ENDS, TRAJECTORY, Run, Trajectories
from trajstore.datasets.torchrl.storage import OWN_INDEX, Leaf, Ring, load_leaves, load_ring
from trajstore.errors import DataError, EpisodeNotFoundError
from trajstore.schema import Field, Schema, nest


def open_source(
    path: str | os.PathLike[str],
    *,
    skip: Collection[str] = (OWN_INDEX,),
    keep_next: bool = False,
    cursor: int | None = None,
) -> TorchRLDump:
    """Open what ``rb.dumps(path)`` wrote.

    Args:
        path: The directory of the dump.
        skip: Entries to leave out, by path (``next/obs``), or groups of them. By default what the buffer itself
            adds to every step, its place in the ring.
        keep_next: Keep next observations as fields of their own, as they are. Otherwise they must be the
            observations of the following step, and are stored once.
        cursor: The place that would be written next, for dumps of writers that do not say.
    """
    place = Path(path).absolute()
    return TorchRLDump(place, load_leaves(place / "storage", skip), load_ring(place, cursor), keep_next)


class TorchRLDump:
    """A ring of steps, or of steps of several environments side by side, as episodes."""

    def __init__(self, place: Path, leaves: Mapping[str, Leaf], ring: Ring, keep_next: bool) -> None:
        self._place = place
        self._leaves = leaves
        self._ring = ring
        try:
            self._trajectories = Trajectories(leaves, ring)
        except DataError as error:
            raise DataError(f"{place}: {error}") from error
        self._observations = {} if keep_next else self._trajectories.pairs
        self._fields = self._named()

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
        """Nothing is held open."""

    def _named(self) -> dict[str, Leaf]:
        """What becomes a field, by the name it gets."""
        known = {*ENDS, *(f"next/{name}" for name in (*ENDS, *self._observations)), *TRAJECTORY}
        kept = {path: leaf for path, leaf in self._leaves.items() if path not in known}
        if "reward" not in kept and "next/reward" in kept:
            kept["reward"] = kept.pop("next/reward")
        return kept

    def _values(self, name: str, leaf: Leaf, runs: Sequence[Run]) -> Any:
        rows = self._trajectories.rows(leaf, runs)
        if name in self._observations:
            _, later = self._observations[name]
            rows = followed(name, rows, later.path, self._trajectories.rows(later, runs))
        return leaf.given(rows[:, 0] if _is_column(name, leaf) else rows)

    def _check_starts(self, runs: Sequence[Run]) -> None:
        """In TorchRL's data, flags at the root say that nothing ended before a step; others would be lost."""
        for name in ENDS:
            if name in self._leaves and self._trajectories.rows(self._leaves[name], runs).any():
                raise DataError(f"'{name}' is set at the start of a step; leave it out with skip=['{name}']")

    def _end(self, run: Run) -> tuple[bool, bool]:
        ends = self._trajectories.ends
        flags = {name: bool(self._trajectories.rows(leaf, [run.last]).any()) for name, leaf in ends.items()}
        truncated = flags.get("truncated", False)
        terminated = flags.get("terminated", flags.get("done", False) and not truncated)
        if flags.get("done") and not (terminated or truncated):
            raise DataError(
                "'next/done' is set at its last step, but neither 'next/terminated' nor 'next/truncated'"
            )
        return terminated, truncated

    def _metadata(self, runs: Sequence[Run], is_both: bool) -> dict[str, Any]:
        about: dict[str, Any] = {"truncated": True} if is_both else {}  # of both, a store keeps terminated
        if self._ring.n_lanes > 1:
            about["lane"] = runs[0].lane
        number = self._trajectories.number(runs[0])
        if number is not None:
            about["traj_id"] = number
        if self._trajectories.may_lack_start(runs):
            about["headless"] = True
        return about


def _field(leaf: Leaf, name: str, is_final: bool) -> Field:
    return field_of(leaf.path, leaf.dtype, () if _is_column(name, leaf) else leaf.shape, final=is_final)


def _is_column(name: str, leaf: Leaf) -> bool:
    """Whether it is the reward, which has an axis of its own there."""
    return name == "reward" and leaf.path == "next/reward" and leaf.shape == (1,)
