"""Trajectories read back from a store, whole and exactly as they came."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from trajstore.compat.rlinf.ledger import Held
from trajstore.compat.rlinf.rows import COLUMNS, rows_of, sampling, to_trajectory
from trajstore.compat.rlinf.trajectory import Trajectory
from trajstore.episodes import EpisodeKey, EpisodeTable
from trajstore.schema import Schema
from trajstore.windows import Windows

At = Callable[[torch.Tensor, Windows], Any]  # the steps of handles: stream number, episode, t

_AT_ONCE = 1 << 26  # bytes of a trajectory that are gathered in one go


def read_trajectory(held: Held, table: EpisodeTable, schema: Schema, streams: Sequence[str], at: At) -> Trajectory:
    """Read a trajectory of a store.

    Args:
        held: Which one.
        table: The episodes of the store.
        schema: Its fields.
        streams: Its streams, as handles number them.
        at: Gives the steps of handles.
    """
    first = table.find(EpisodeKey(held.stream, held.first_episode))
    rows = slice(first, first + held.n_episodes)
    length, episode, env = (table[name][rows] for name in ("length", "episode", "env"))
    owner = np.repeat(np.arange(len(length)), length)
    t = np.arange(len(owner)) - np.repeat(np.cumsum(length) - length, length)
    handles = np.stack([np.full(len(owner), streams.index(held.stream)), episode[owner], t], 1)
    windows = sampling(schema, whole=True)
    block = max(1, _AT_ONCE // schema.row_bytes)
    parts = [
        rows_of(at(torch.from_numpy(handles[start : start + block]), windows)) for start in range(0, len(t), block)
    ]
    joined = {path: torch.cat([part[path] for part in parts]).cpu() for path in parts[0]}
    about = table.row(first)
    return to_trajectory(joined, torch.from_numpy(env[owner]), {name: about[name] for name in COLUMNS})
