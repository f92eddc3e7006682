"""Reads the episodes of a snapshot for Ray Data, one row each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from ray.data.block import Block, BlockAccessor, BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from trajstore.errors import DataError
from trajstore.format.episode_table import EpisodeTable
from trajstore.schema import Array, flatten, selected_paths
from trajstore.store.snapshot import Snapshot

_BLOCK_BYTES = 32 << 20  # a block is complete at this size; it has at least one episode
TABLE_COLUMNS = ("stream", "episode", "env", "length", "end", "return")


class EpisodeSource(Datasource):
    """The episodes of a snapshot, for ``ray.data.read_datasource``; see `trajstore.ray.data.read_episodes`."""

    def __init__(
        self,
        snapshot: Snapshot,
        *,
        fields: Iterable[str] | None = None,
        where: Callable[[EpisodeTable], Array] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        table, schema = snapshot.episodes, snapshot.schema
        self._snapshot = snapshot
        self._paths = selected_paths(schema, fields) if schema is not None else []
        if ambiguous := set(self._paths) & {*table.columns}:
            raise DataError(
                f"fields {sorted(ambiguous)} have names of columns of the episode table; leave them out"
            )
        is_chosen = np.ones(len(table), bool) if where is None else np.asarray(where(table), bool)
        self._positions = np.flatnonzero(is_chosen)  # in the episode table
        step_bytes = sum(schema[path].row_bytes for path in self._paths) if schema is not None else 0
        self._sizes = (table["length"] + 1)[self._positions] * step_bytes

    def estimate_inmemory_data_size(self) -> int:
        return int(self._sizes.sum())

    def get_read_tasks(self, parallelism: int, *more: Any, **options: Any) -> list[ReadTask]:
        """Tasks that each read a run of episodes; the runs have about the same size in bytes."""
        sums = np.cumsum(self._sizes)
        n = max(1, min(parallelism, len(self._positions)))
        bounds = np.searchsorted(sums, np.arange(1, n) * (sums[-1] / n if len(sums) else 0), side="left")
        runs = zip(np.split(self._positions, bounds), np.split(self._sizes, bounds), strict=True)
        return [self._task(positions, int(sizes.sum())) for positions, sizes in runs if len(positions)]

    def _task(self, positions: Array, n_bytes: int) -> ReadTask:
        snapshot, paths = self._snapshot, self._paths
        metadata = BlockMetadata(num_rows=len(positions), size_bytes=n_bytes, input_files=None, exec_stats=None)
        return ReadTask(lambda: _read_blocks(snapshot, paths, positions), metadata)


def _read_blocks(snapshot: Snapshot, paths: list[str], positions: Array) -> Iterator[Block]:
    episodes: list[dict[str, Any]] = []
    n_bytes = 0
    for i in positions:
        episode = _read_row(snapshot, paths, int(i))
        episodes.append(episode)
        n_bytes += sum(episode[path].nbytes for path in paths)
        if n_bytes >= _BLOCK_BYTES:
            yield _to_block(episodes, paths)
            episodes, n_bytes = [], 0
    if episodes:
        yield _to_block(episodes, paths)


def _read_row(snapshot: Snapshot, paths: list[str], i: int) -> dict[str, Any]:
    row = snapshot.episodes.row(i)
    declared = snapshot.schema.episode if snapshot.schema is not None else ()
    columns = {name: row[name] for name in (*TABLE_COLUMNS, *declared)}
    columns["metadata"] = json.dumps(row["metadata"])
    return columns | flatten(snapshot.read_episode(i, fields=paths))


def _to_block(episodes: list[dict[str, Any]], paths: list[str]) -> Block:
    columns: dict[str, Any] = {}
    for name in episodes[0]:
        values = [episode[name] for episode in episodes]
        columns[name] = _object_column(values) if name in paths else values
    return BlockAccessor.batch_to_block(columns)


def _object_column(values: list[Array]) -> Array:
    """Arrays as a column of objects. They are never stacked, so that all blocks have the same type."""
    column = np.empty(len(values), object)
    column[:] = values
    return column
