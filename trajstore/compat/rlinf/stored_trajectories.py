"""Reads whole trajectories back from a store, exactly as they were added."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from trajstore.compat.rlinf.trajectory import Trajectory
from trajstore.compat.rlinf.trajectory_encoding import COLUMNS, decode, step_fields, transition_windows
from trajstore.compat.rlinf.trajectory_ledger import LedgerEntry, TrajectoryLedger
from trajstore.errors import DataError
from trajstore.format.handles import EpisodeKey
from trajstore.replay.buffer import ReplayBuffer
from trajstore.sampling.reader import Reader
from trajstore.schema import Schema
from trajstore.store.checkpoints import find, read_state
from trajstore.store.store import Store
from trajstore.store.store import open as open_store

_GATHERED_BYTES = 1 << 26  # bytes of a trajectory that are gathered at once


class StoredTrajectories:
    """The trajectories of a store, by number.

    Args:
        store: The store, as far as its newest commits or a checkpoint show it.
        reader: Reads steps by handle.
        entries: The trajectories.

    Attributes:
        draw_state: Seed and counter of the draws; None if the store was not opened at a checkpoint.
    """

    def __init__(self, store: Store, reader: ReplayBuffer | Reader, entries: Iterable[LedgerEntry]) -> None:
        self.draw_state: dict[str, Any] | None = None
        self._reader, self._table = reader, store.episodes
        self._columns = [self._table[name] for name in ("length", "episode", "env")]
        self._entries = {entry.id: entry for entry in entries}

    @classmethod
    def open(
        cls,
        url: str | os.PathLike[str],
        storage_options: Mapping[str, Any] | None = None,
        *,
        at: str | None = None,
    ) -> StoredTrajectories:
        """Open all trajectories of the store at a URL, read-only.

        Args:
            url: URL of the store.
            storage_options: As for `trajstore.open`.
            at: Id of a checkpoint: open the trajectories that it shows, with the state of its draws.

        Raises:
            DataError: The store does not hold RLinf's trajectories.
        """
        store = open_store(url, at=at, storage_options=storage_options)
        found = cls(store, Reader(store), ledger_of(store))
        if at is not None:
            storage = store.snapshot.storage
            found.draw_state = read_state(storage, find(storage, at), 0, ("reader",))["reader"]
        return found

    def keep_newest(self, n: int) -> None:
        """Forget all trajectories but the newest ``n``."""
        numbers = self.numbers
        self._entries = {number: self._entries[number] for number in numbers[max(0, len(numbers) - n) :]}

    @property
    def schema(self) -> Schema:
        assert self._reader.schema is not None
        return self._reader.schema

    @property
    def numbers(self) -> list[int]:
        return list(self._entries)

    @property
    def entries(self) -> dict[int, LedgerEntry]:
        """The trajectories, by number."""
        return self._entries

    @property
    def keys(self) -> dict[int, str]:
        """The permanent name of each trajectory, by number."""
        return {number: entry.key for number, entry in self._entries.items()}

    def load(self, number: int) -> Trajectory:
        """Return a trajectory as it was added, tensors on the CPU."""
        entry, table, reader = self._entries[number], self._table, self._reader
        assert reader.schema is not None
        first = table.find(EpisodeKey(entry.stream, entry.first_episode))
        rows = slice(first, first + entry.n_episodes)
        length, episode, env = (column[rows] for column in self._columns)
        owner = np.repeat(np.arange(len(length)), length)
        t = np.arange(len(owner)) - np.repeat(np.cumsum(length) - length, length)
        stream = np.full(len(owner), reader.streams.index(entry.stream))
        handles = torch.from_numpy(np.stack([stream, episode[owner], t], 1))
        windows = transition_windows(reader.schema, all_fields=True)
        n = _GATHERED_BYTES // reader.schema.row_bytes + 1
        parts = [step_fields(reader.at(handles[at : at + n], windows)) for at in range(0, len(t), n)]
        steps = {path: torch.cat([part[path] for part in parts]).cpu() for path in parts[0]}
        metadata = table.row(first)
        return decode(steps, torch.from_numpy(env[owner]), {name: metadata[name] for name in COLUMNS})


def ledger_of(store: Store) -> TrajectoryLedger:
    """Return the ledger of the trajectories in a store.

    Raises:
        DataError: The store does not hold RLinf's trajectories.
    """
    columns = store.schema.episode if store.schema is not None else {}
    if list(columns) != list(COLUMNS):
        raise DataError(f"{store.url}: expected a store of RLinf's trajectories, found a store of other data")
    return TrajectoryLedger.from_table(store.episodes)
