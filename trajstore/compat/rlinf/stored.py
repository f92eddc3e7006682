"""Trajectories read back from a store, whole and exactly as they came."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from trajstore.compat.rlinf.ledger import Held, Ledger
from trajstore.compat.rlinf.rows import COLUMNS, rows_of, sampling, to_trajectory
from trajstore.compat.rlinf.trajectory import Trajectory
from trajstore.errors import DataError
from trajstore.format.handles import EpisodeKey
from trajstore.replay.buffer import ReplayBuffer
from trajstore.sampling.reader import Reader
from trajstore.store.store import Store
from trajstore.store.store import open as open_store

_AT_ONCE = 1 << 26  # bytes of a trajectory that are gathered in one go


class StoredTrajectories:
    """The trajectories of a store, by number.

    Args:
        store: The store; its newest commits are shown.
        source: Gives the steps of handles.
        held: Which trajectories.
    """

    draws = None  # a store does not say where a sampler was

    def __init__(self, store: Store, source: ReplayBuffer | Reader, held: Iterable[Held]) -> None:
        self._source, self._table = source, store.refresh().episodes
        self._columns = [self._table[name] for name in ("length", "episode", "env")]
        self._held = {item.id: item for item in held}

    @classmethod
    def open(
        cls, url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
    ) -> StoredTrajectories:
        """All of a store at a URL, to read.

        Raises:
            DataError: It is a store of other things.
        """
        store = open_store(url, storage_options=storage_options)
        return cls(store, Reader(store), ledger_of(store))

    @property
    def numbers(self) -> list[int]:
        return list(self._held)

    @property
    def keys(self) -> dict[int, str]:
        """By number, what no other trajectory is ever called."""
        return {number: held.key for number, held in self._held.items()}

    def load(self, number: int) -> Trajectory:
        held, table, source = self._held[number], self._table, self._source
        assert source.schema is not None
        first = table.find(EpisodeKey(held.stream, held.first_episode))
        rows = slice(first, first + held.n_episodes)
        length, episode, env = (column[rows] for column in self._columns)
        owner = np.repeat(np.arange(len(length)), length)
        t = np.arange(len(owner)) - np.repeat(np.cumsum(length) - length, length)
        stream = np.full(len(owner), source.streams.index(held.stream))
        handles = torch.from_numpy(np.stack([stream, episode[owner], t], 1))
        windows, n = sampling(source.schema, whole=True), _AT_ONCE // source.schema.row_bytes + 1
        parts = [rows_of(source.at(handles[at : at + n], windows)) for at in range(0, len(t), n)]
        joined = {path: torch.cat([part[path] for part in parts]).cpu() for path in parts[0]}
        about = table.row(first)
        return to_trajectory(joined, torch.from_numpy(env[owner]), {name: about[name] for name in COLUMNS})


def ledger_of(store: Store) -> Ledger:
    """Which trajectories a store holds.

    Raises:
        DataError: It is a store of other things.
    """
    columns = store.schema.episode if store.schema is not None else {}
    if list(columns) != list(COLUMNS):
        raise DataError(f"{store.url}: a store, but not one of trajectories of RLinf's")
    return Ledger.of(store.episodes)
