"""Which trajectories a buffer holds, and which episodes of its store belong to each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from trajstore.format.episode_table import EpisodeTable
from trajstore.schema import Array

_MIN_CAPACITY = 256  # entries that the arrays of a ledger have room for at first


class LedgerEntry(NamedTuple):
    """A trajectory: consecutive episodes of one stream."""

    id: int
    stream: str
    first_episode: int
    n_episodes: int
    n_samples: int

    @property
    def key(self) -> str:
        """A name that no other trajectory ever has, unlike ``id``."""
        return f"{self.stream}/{self.first_episode}"


class TrajectoryLedger:
    """Trajectories, oldest first. It keeps running sums, so counts do not take longer with more trajectories.

    Attributes:
        counter: The number of the next trajectory; `cleared` begins with 0 again.
        serial: Counts all trajectories ever added; never repeats.
        has_leftovers: The store holds parts of incomplete trajectories; see `is_leftover`.
    """

    def __init__(self) -> None:
        # Rows: id, stream, first episode, episodes, samples, episodes before it, samples before it.
        self._data = np.empty((7, _MIN_CAPACITY), np.int64)
        self._first = self._stop = 0
        self._n_episodes = self._n_samples = 0  # of all trajectories ever added
        self._streams: list[str] = []
        self.counter = 0
        self.serial = 0
        self.has_leftovers = False

    @classmethod
    def from_table(cls, table: EpisodeTable) -> TrajectoryLedger:
        """Return the ledger of all complete trajectories of a store."""
        ledger = cls()
        start, n_episodes, is_whole = _runs(table)
        number, length = table["trajectory"], np.append(0, np.cumsum(table["length"]))
        for i, n in zip(start[is_whole].tolist(), n_episodes[is_whole].tolist(), strict=True):
            ledger.push(LedgerEntry(int(number[i]), *table.key(i), n, int(length[i + n] - length[i])))
        ledger.has_leftovers = not is_whole.all()
        if len(table):
            ledger.serial = int(np.ma.filled(table["serial"], -1).max()) + 1
        return ledger

    def cleared(self) -> TrajectoryLedger:
        """Return an empty ledger that continues the serial numbers."""
        return self.only(())

    def only(self, entries: Iterable[LedgerEntry]) -> TrajectoryLedger:
        """Return a ledger of these trajectories that continues the serial numbers."""
        ledger = TrajectoryLedger()
        for entry in entries:
            ledger.push(entry)
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

    def __getitem__(self, i: int) -> LedgerEntry:
        number, stream, *rest = self._data[:5, self._first + i].tolist()
        return LedgerEntry(number, self._streams[stream], *rest)

    def __iter__(self) -> Iterator[LedgerEntry]:
        return (self[i] for i in range(len(self)))

    def push(self, entry: LedgerEntry) -> None:
        """Add a trajectory that is newer than all others."""
        if self._stop == self._data.shape[1]:
            kept = self._data[:, self._first : self._stop]
            self._data = np.empty((7, max(_MIN_CAPACITY, 2 * kept.shape[1])), np.int64)
            self._data[:, : kept.shape[1]] = kept
            self._first, self._stop = 0, kept.shape[1]
        if entry.stream not in self._streams[-1:]:
            self._streams.append(entry.stream)
        stream = len(self._streams) - 1
        sums = self._n_episodes, self._n_samples
        self._data[:, self._stop] = (
            entry.id,
            stream,
            entry.first_episode,
            entry.n_episodes,
            entry.n_samples,
            *sums,
        )
        self._stop += 1
        self._n_episodes += entry.n_episodes
        self._n_samples += entry.n_samples
        self.counter = max(self.counter, entry.id + 1)
        self.serial += 1

    def n_episodes(self, n: int) -> int:
        """Return the number of episodes of the newest ``n`` trajectories."""
        return self._n_episodes - int(self._data[5, self._stop - n]) if n else 0

    def drop(self, n: int) -> int:
        """Remove the oldest ``n`` trajectories; returns how many episodes they have."""
        before = self.n_episodes(len(self))
        self._first += n
        return before - self.n_episodes(len(self))

    def find(self, number: int) -> int:
        """Return the index of a trajectory, the newest one with that number.

        Raises:
            KeyError: The ledger has no trajectory of that number.
        """
        found = np.flatnonzero(self.ids == number)
        if not len(found):
            raise KeyError(f"no trajectory {number}; the buffer holds {len(self)} trajectories")
        return int(found[-1])


def is_leftover(table: EpisodeTable) -> Array:
    """Return for each episode whether its trajectory is incomplete, as when its writer was killed."""
    _, n_episodes, is_whole = _runs(table)
    return np.repeat(~is_whole, n_episodes)


def _runs(table: EpisodeTable) -> tuple[Array, Array, Array]:
    """Return the runs of consecutive episodes of one trajectory.

    Returns:
        The index of each run's first episode, its number of episodes, and whether the trajectory is complete.
    """
    if not len(table):
        return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, bool)
    serial, stream = np.ma.filled(table["serial"], -1), table.stream_positions
    is_new = np.ones(len(table), bool)
    is_new[1:] = (serial[1:] != serial[:-1]) | (stream[1:] != stream[:-1])
    start = np.flatnonzero(is_new)
    expected = np.ma.filled(table["trajectory_steps"] * table["trajectory_envs"], -1)[start]
    n_episodes = np.diff(np.append(start, len(table)))
    return start, n_episodes, np.add.reduceat(table["length"], start) == expected
