"""Which trajectories a buffer holds, and which episodes of its store they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from trajstore.format.episode_table import EpisodeTable
from trajstore.schema import Array

_FIRST_ROOM = 256


class Held(NamedTuple):
    """A trajectory: its episodes follow each other in one stream."""

    id: int
    stream: str
    first_episode: int
    n_episodes: int
    n_samples: int

    @property
    def key(self) -> str:
        """What no other trajectory is ever called."""
        return f"{self.stream}/{self.first_episode}"


class Ledger:
    """Trajectories, oldest first; sums are kept, so that no question costs more the more there are."""

    def __init__(self) -> None:
        # id, stream, first episode, episodes, samples, and the episodes and samples before it
        self._data = np.empty((7, _FIRST_ROOM), np.int64)
        self._first = self._stop = 0
        self._n_episodes = self._n_samples = 0  # ever
        self._streams: list[str] = []
        self.counter = 0  # the number of the next trajectory
        self.serial = 0  # the same, never again
        self.has_leftovers = False  # parts of trajectories are there, see `is_leftover`

    @classmethod
    def of(cls, table: EpisodeTable) -> Ledger:
        """What a store holds."""
        ledger = cls()
        start, n_episodes, is_whole = _runs(table)
        number, length = table["trajectory"], np.append(0, np.cumsum(table["length"]))
        for i, n in zip(start[is_whole].tolist(), n_episodes[is_whole].tolist(), strict=True):
            ledger.push(Held(int(number[i]), *table.key(i), n, int(length[i + n] - length[i])))
        ledger.has_leftovers = not is_whole.all()
        if len(table):
            ledger.serial = int(np.ma.filled(table["serial"], -1).max()) + 1
        return ledger

    def cleared(self) -> Ledger:
        """An empty one, that counts on."""
        ledger = Ledger()
        ledger.serial = self.serial
        return ledger

    def __len__(self) -> int:
        return self._stop - self._first

    @property
    def ids(self) -> Array:
        return self._data[0, self._first : self._stop]

    @property
    def n_samples(self) -> int:
        return self._n_samples - int(self._data[6, self._first]) if len(self) else 0

    def __getitem__(self, i: int) -> Held:
        number, stream, *rest = self._data[:5, self._first + i].tolist()
        return Held(number, self._streams[stream], *rest)

    def __iter__(self) -> Iterator[Held]:
        return (self[i] for i in range(len(self)))

    def push(self, held: Held) -> None:
        """Take in a trajectory that is newer than all others."""
        if self._stop == self._data.shape[1]:
            kept = self._data[:, self._first : self._stop]
            self._data = np.empty((7, max(_FIRST_ROOM, 2 * kept.shape[1])), np.int64)
            self._data[:, : kept.shape[1]] = kept
            self._first, self._stop = 0, kept.shape[1]
        if held.stream not in self._streams[-1:]:
            self._streams.append(held.stream)
        stream = len(self._streams) - 1
        sums = self._n_episodes, self._n_samples
        self._data[:, self._stop] = (held.id, stream, held.first_episode, held.n_episodes, held.n_samples, *sums)
        self._stop += 1
        self._n_episodes += held.n_episodes
        self._n_samples += held.n_samples
        self.counter = max(self.counter, held.id + 1)
        self.serial += 1

    def n_episodes(self, n: int) -> int:
        """Episodes since the beginning of the n-th newest trajectory."""
        return self._n_episodes - int(self._data[5, self._stop - n]) if n else 0

    def drop(self, n: int) -> int:
        """Forget the oldest trajectories; returns how many episodes that are."""
        before = self.n_episodes(len(self))
        self._first += n
        return before - self.n_episodes(len(self))

    def find(self, number: int) -> int:
        """The place of a trajectory, the newest of that number.

        Raises:
            KeyError: It is not held.
        """
        found = np.flatnonzero(self.ids == number)
        if not len(found):
            raise KeyError(f"no trajectory {number}; there are {len(self)}")
        return int(found[-1])


def is_leftover(table: EpisodeTable) -> Array:
    """By episode, whether its trajectory did not get there whole, as when its writer was killed."""
    _, n_episodes, is_whole = _runs(table)
    return np.repeat(~is_whole, n_episodes)


def _runs(table: EpisodeTable) -> tuple[Array, Array, Array]:
    """Episodes of one trajectory that follow each other: the first, how many, and whether that is all of it."""
    if not len(table):
        return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, bool)
    serial, stream = np.ma.filled(table["serial"], -1), table.stream_positions
    is_new = np.ones(len(table), bool)
    is_new[1:] = (serial[1:] != serial[:-1]) | (stream[1:] != stream[:-1])
    start = np.flatnonzero(is_new)
    expected = np.ma.filled(table["trajectory_steps"] * table["trajectory_envs"], -1)[start]
    n_episodes = np.diff(np.append(start, len(table)))
    return start, n_episodes, np.add.reduceat(table["length"], start) == expected
