"""What a checkpoint keeps of a reader and its index, and how the states of several ranks become one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trajstore.errors import CorruptionError
from trajstore.format.spans import expand_ranges
from trajstore.sampling.index.episode_lookup import EpisodeFinder
from trajstore.schema import Array

_NEW_MASSES = {"scale": 0.0, "limit": 0.0, "size": 0, "ranked_at": 0, "is_loose": False, "ranks": None}


def stream_numbers(streams: Sequence[str], names: Sequence[str]) -> Array:
    """The position in ``streams`` of each name; -1 for names that are not in it."""
    position = {name: i for i, name in enumerate(streams)}
    return np.array([position.get(name, -1) for name in names], np.int64)


@dataclass(frozen=True, slots=True)
class IndexOrder:
    """Which episodes an index shows, in order.

    Attributes:
        streams: Ids of streams; the other fields name them by position.
        newest: By stream: the newest episode that the index has seen; -1: none.
        stream, episode: By entry: names the episode.
        t: By entry: the first step that is shown.
        env, flags, begin: By entry, after a redistribution: environment, end and first step as the plan decided;
            None: as they are stored.
    """

    streams: list[str]
    newest: Array
    stream: Array
    episode: Array
    t: Array
    env: Array | None = None
    flags: Array | None = None
    begin: Array | None = None

    def to_tree(self) -> dict[str, Any]:
        names = ("streams", "newest", "stream", "episode", "t", "env", "flags", "begin")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @staticmethod
    def from_tree(tree: Mapping[str, Any]) -> IndexOrder:
        shown = {name: np.asarray(tree[name]) for name in ("env", "flags", "begin") if name in tree}
        columns = {name: np.asarray(tree[name]) for name in ("newest", "stream", "episode", "t")}
        return IndexOrder(list(tree["streams"]), **columns, **shown)

    def raise_newest(self, streams: Sequence[str], newest: Array) -> None:
        """Raise ``newest``, which counts by position in ``streams``, to what this index has seen."""
        numbers = stream_numbers(streams, self.streams)
        known = numbers >= 0
        np.maximum.at(newest, numbers[known], self.newest[: len(numbers)][known])


class StepTableMerge:
    """Collects the per-step values of chosen episodes from the step tables of several ranks.

    Args:
        streams: Ids of streams; ``stream`` names them by position.
        stream, episode: The chosen episodes, in their new order.
        t: By episode: its first step.
        length: By episode: its number of steps.
    """

    def __init__(self, streams: Sequence[str], stream: Array, episode: Array, t: Array, length: Array) -> None:
        self._streams = list(streams)
        self._stream, self._episode, self._t, self._length = stream, episode, t, length
        self._start = np.cumsum(length) - length
        self._size = int(length.sum())
        self._columns: dict[str, Array] = {}
        self._typical: list[float] = []

    @property
    def has_columns(self) -> bool:
        return bool(self._columns)

    def add(self, table: Mapping[str, Any], held: Array, fill: Mapping[str, Any], where: str) -> None:
        """Copy the values of those chosen episodes (``held``, by position) that this table has.

        Args:
            table: The state of a `StepTable`.
            held: Which of the chosen episodes to take from it.
            fill: By derived column: the value of steps of ranks that did not keep it.
            where: Names the checkpoint in errors.
        """
        stream = stream_numbers(self._streams, table["streams"])[np.asarray(table["stream"], np.int64)]
        finder = EpisodeFinder(stream, np.asarray(table["episode"]))
        at = finder.find(self._stream[held], self._episode[held])
        if (at < 0).any():
            raise CorruptionError(f"{where}: the values of some episodes are missing")
        first = (np.asarray(table["home"])[at] + self._t[held]).astype(np.int64)
        owner, source = expand_ranges(first, first + self._length[held])
        target = source - first[owner] + self._start[held][owner]
        for name, values in table["columns"].items():
            values = np.asarray(values)
            if name not in self._columns:
                self._columns[name] = np.full((self._size, *values.shape[1:]), fill.get(name, 0), values.dtype)
            self._columns[name][target] = values[source]
        self._typical.append(float(table["typical"]))

    def result(self) -> dict[str, Any]:
        """The state of a `StepTable` with the chosen episodes, one after the other."""
        stop = self._t + self._length
        return {
            "streams": self._streams,
            "stream": self._stream,
            "episode": self._episode,
            "home": self._start - self._t,
            "limit": stop,
            "known": stop,
            "size": self._size,
            "columns": self._columns,
            "typical": float(np.mean(self._typical)) if self._typical else 0.0,
        }


class ReaderMerge:
    """Makes the state of one reader from those of several ranks; the arguments are those of `StepTableMerge`."""

    def __init__(self, streams: Sequence[str], stream: Array, episode: Array, t: Array, length: Array) -> None:
        self._steps = StepTableMerge(streams, stream, episode, t, length)
        self._derived: dict[str, Any] = {}  # derived columns that any rank had
        self._readers: list[dict[str, Any]] = []  # states without per-step values

    def add(self, state: Mapping[str, Any], held: Array, where: str) -> None:
        reader = dict(state)
        priorities = dict(reader.pop("priorities")) if "priorities" in reader else None
        table = priorities.pop("steps") if priorities is not None else reader.pop("steps", None)
        self._derived |= {name: about for name, about in reader["columns"].items() if name not in self._derived}
        if table is not None:
            fill = {name: about["fill"] for name, about in self._derived.items()}
            self._steps.add(table, held, fill, where)
        self._readers.append(reader if priorities is None else {**reader, "priorities": priorities})

    def result(self, own: int, seed: int, share: Callable[[int], int]) -> dict[str, Any]:
        """The merged state.

        Args:
            own: Position of the rank whose kind of state (with priorities or without) is kept.
            seed: Seed of the new rank.
            share: Gives the new rank's share of a count over all ranks.
        """
        state = {
            "seed": seed,
            "counter": max(int(reader["counter"]) for reader in self._readers),
            "columns": self._derived,
        }
        if "priorities" not in self._readers[own]:
            return state | ({"steps": self._steps.result()} if self._steps.has_columns else {})
        priorities = [reader["priorities"] for reader in self._readers]
        return state | {
            "priorities": {
                "n_batches": max(int(p["n_batches"]) for p in priorities),
                "n_ignored": share(sum(int(p["n_ignored"]) for p in priorities)),
                "largest": max(float(p["largest"]) for p in priorities),
                "steps": self._steps.result(),
                "masses": dict(_NEW_MASSES),
            }
        }
