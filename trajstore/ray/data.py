"""Ray Data over a store: a dataset of its episodes, and datasets written as episodes.

A row is an episode, so nothing that Ray does with rows (shuffling, splitting, batching) tears one apart. Columns:

- ``stream``, ``episode``, ``env``, ``length`` (steps), ``end`` (``terminated``, ``truncated``, ``cut``,
  ``aborted``, ``open``), ``return``, what the schema declares for episodes, and ``metadata`` as JSON text;
- every field by its path (``observation/pixels``), an array of ``[length, ...]``; fields with a final value have
  one row more where the episode has it.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray.data
import torch
from ray.data.block import Block, BlockAccessor, BlockMetadata
from ray.data.datasource import Datasink, Datasource, ReadTask

from trajstore.errors import DataError
from trajstore.format.episode_table import EpisodeTable
from trajstore.schema import Array, Schema, flatten, nest, selected_paths
from trajstore.store.snapshot import Snapshot
from trajstore.store.store import Store, Url, create
from trajstore.store.store import open as open_store
from trajstore.writing.writer import Writer

_BLOCK_BYTES = 32 << 20  # a block is closed when it has so much, and has one episode at the least
_TABLE = ("stream", "episode", "env", "length", "end", "return")
_ENDS = ("terminated", "truncated", "cut")


def read_episodes(
    url: Url,
    *,
    at: str | None = None,
    fields: Iterable[str] | None = None,
    where: Callable[[EpisodeTable], Array] | None = None,
    blocks: int | None = None,
    concurrency: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> ray.data.Dataset:
    """The episodes of a store as a dataset, one row each; what is committed now, whatever is written meanwhile.

    Read lazily, in tasks that each read their own episodes and give them out in blocks of about 32 MiB, so memory
    does not grow with the store.

    Args:
        url: Of the store.
        at: Name or id of a checkpoint, or ``"latest"``: what was there then.
        fields: Fields or groups to read; all by default.
        where: Only episodes that this function of the episode table says True for.
        blocks: Number of read tasks; chosen by Ray by default.
        concurrency: How many of them run at a time.
        storage_options: Options for fsspec's filesystem.
    """
    store = open_store(url, at=at, storage_options=storage_options)
    source = EpisodeSource(store.snapshot, fields=fields, where=where)
    read: Callable[..., ray.data.Dataset] = ray.data.read_datasource
    return read(source, override_num_blocks=blocks, concurrency=concurrency)


def write_episodes(
    dataset: ray.data.Dataset,
    url: Url,
    schema: Schema | None = None,
    *,
    name: str = "ray",
    concurrency: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    fsync: bool = True,
) -> Store:
    """Write a dataset whose rows are episodes, and return the store.

    Every write task has a stream of its own and commits once, at its end: all of its episodes or none. What a
    failed or repeated attempt left, or a job that failed as a whole, is not shown. A task holds what it writes in
    memory: a block or a few of the dataset.

    Args:
        dataset: Rows with the fields of the schema by path, ``[T, ...]`` each (one more where the episode has a
            final value); ``end`` (``cut`` by default), ``env``, declared columns and ``metadata`` where there are.
            Further columns that `read_episodes` gives are left out; others are refused.
        url: Of the store, which is created if there is none.
        schema: The fields; None: those of the store, or read off the first data.
        name: Of the streams.
        concurrency: How many tasks write at a time.
        storage_options: Options for fsspec's filesystem.
        fsync: Whether commits to a local directory survive a power cut.
    """
    sink = EpisodeSink(url, schema, name=name, storage_options=storage_options, fsync=fsync)
    dataset.write_datasink(sink, concurrency=concurrency)
    return open_store(url, storage_options=storage_options, fsync=fsync)


# ---- reading


class EpisodeSource(Datasource):
    """Episodes of a snapshot, for ``ray.data.read_datasource``; see `read_episodes`."""

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
        if taken := set(self._paths) & {*table.columns}:
            raise DataError(f"fields {sorted(taken)} have names of columns of the episode table; leave them out")
        kept = np.ones(len(table), bool) if where is None else np.asarray(where(table), bool)
        self._rows = np.flatnonzero(kept)
        row_bytes = sum(schema[path].row_bytes for path in self._paths) if schema is not None else 0
        self._sizes = (table["length"] + 1)[self._rows] * row_bytes

    def estimate_inmemory_data_size(self) -> int:
        return int(self._sizes.sum())

    def get_read_tasks(self, parallelism: int, *more: Any, **options: Any) -> list[ReadTask]:
        """Runs of episodes of about the same size each."""
        sums = np.cumsum(self._sizes)
        n = max(1, min(parallelism, len(self._rows)))
        cuts = np.searchsorted(sums, np.arange(1, n) * (sums[-1] / n if len(sums) else 0), side="left")
        parts = zip(np.split(self._rows, cuts), np.split(self._sizes, cuts), strict=True)
        return [self._task(rows, int(sizes.sum())) for rows, sizes in parts if len(rows)]

    def _task(self, rows: Array, n_bytes: int) -> ReadTask:
        snapshot, paths = self._snapshot, self._paths
        metadata = BlockMetadata(num_rows=len(rows), size_bytes=n_bytes, input_files=None, exec_stats=None)
        return ReadTask(lambda: _read_blocks(snapshot, paths, rows), metadata)


def _read_blocks(snapshot: Snapshot, paths: list[str], rows: Array) -> Iterator[Block]:
    episodes: list[dict[str, Any]] = []
    n_bytes = 0
    for i in rows:
        episode = _read(snapshot, paths, int(i))
        episodes.append(episode)
        n_bytes += sum(episode[path].nbytes for path in paths)
        if n_bytes >= _BLOCK_BYTES:
            yield _to_block(episodes, paths)
            episodes, n_bytes = [], 0
    if episodes:
        yield _to_block(episodes, paths)


def _read(snapshot: Snapshot, paths: list[str], i: int) -> dict[str, Any]:
    row = snapshot.episodes.row(i)
    declared = snapshot.schema.episode if snapshot.schema is not None else ()
    columns = {name: row[name] for name in (*_TABLE, *declared)} | {"metadata": json.dumps(row["metadata"])}
    return columns | flatten(snapshot.read_episode(i, fields=paths))


def _to_block(episodes: list[dict[str, Any]], paths: list[str]) -> Block:
    columns: dict[str, Any] = {}
    for name in episodes[0]:
        values = [episode[name] for episode in episodes]
        columns[name] = _objects(values) if name in paths else values
    return BlockAccessor.batch_to_block(columns)


def _objects(values: list[Array]) -> Array:
    """Arrays of different lengths as a column; never stacked, so that all blocks have the same type."""
    column = np.empty(len(values), object)
    column[:] = values
    return column


# ---- writing


@dataclass(frozen=True)
class Written:
    """What one task wrote."""

    stream: str
    n_episodes: int


class EpisodeSink(Datasink[Written]):
    """Writes rows as episodes, for ``Dataset.write_datasink``; see `write_episodes`."""

    def __init__(
        self,
        url: Url,
        schema: Schema | None = None,
        *,
        name: str = "ray",
        storage_options: Mapping[str, Any] | None = None,
        fsync: bool = True,
    ) -> None:
        self._place: dict[str, Any] = {"storage_options": storage_options, "fsync": fsync}
        self._url, self._schema = str(url), schema
        self._name = f"{name}-{uuid.uuid4().hex[:12]}"  # tells what this job wrote from all else

    def on_write_start(self, schema: Any = None) -> None:
        create(self._url, self._schema, exist_ok=True, **self._place)

    def write(self, blocks: Iterable[Block], ctx: Any) -> Written:
        """Write what one task has, and commit it at once."""
        given = list(blocks)  # mapped from Ray's memory, not copied
        rows: list[Mapping[str, Any]] = []
        for block in given:
            rows.extend(BlockAccessor.for_block(block).iter_rows(True))
        store = open_store(self._url, **self._place)
        # Twice as much as comes, and some: half full, a buffer commits by itself.
        n_bytes = sum(_n_bytes(row) for row in rows)
        options: dict[str, Any] = {"commit_seconds": None, "buffer_bytes": 4 * n_bytes + (1 << 20)}
        with store.writer(self._name, **options) as writer:
            for row in rows:
                _append(writer, store.schema, row)
            if writer.stats()["commits"]:
                raise DataError("a task's episodes are more than fits its buffer; write smaller blocks")
        return Written(writer.stream, len(rows))

    def on_write_complete(self, write_result: Any) -> None:
        """Hide what attempts wrote that are not the ones that count."""
        returned = write_result.write_returns if hasattr(write_result, "write_returns") else write_result
        self._hide({written.stream for written in returned})

    def on_write_failed(self, error: Exception) -> None:
        """Hide all that was written."""
        self._hide(set())

    def _hide(self, kept: set[str]) -> None:
        store = open_store(self._url, **self._place)
        table = store.episodes
        stream, episode = table["stream"], table["episode"]
        mine = np.array([name.startswith(f"{self._name}-") and name not in kept for name in stream], bool)
        if not mine.any():
            return
        hidden = {name: episode[mine & (stream == name)].tolist() for name in np.unique(stream[mine])}
        with store.writer(f"{self._name}-end") as writer:
            writer.set_view(discarded=hidden)
            writer.wait(writer.publish_view())


def _n_bytes(row: Mapping[str, Any]) -> int:
    return sum(
        getattr(value, "nbytes", len(value) if isinstance(value, str) else 8) + 256 for value in row.values()
    )


def _append(writer: Writer, schema: Schema | None, row: Mapping[str, Any]) -> None:
    schema = writer.schema or schema
    declared = set(schema.episode) if schema is not None else set()
    known = {*_TABLE, "metadata", "has_final", "is_headless", "time", *declared}
    end = row.get("end", "cut")
    if end not in _ENDS:
        raise DataError(f"end: expected one of {', '.join(_ENDS)}, got {end!r}; filter the dataset first")
    metadata = json.loads(row.get("metadata") or "{}")
    metadata |= {name: _plain(row[name]) for name in declared if row.get(name) is not None}
    fields = {path: _values(schema, path, value) for path, value in row.items() if path not in known}
    writer.append_episode(
        nest(fields),
        terminated=end == "terminated",
        truncated=end == "truncated",
        env=int(row.get("env", 0)),
        metadata=metadata,
    )


def _values(schema: Schema | None, path: str, value: Any) -> Any:
    """Values of a field; what is bfloat16 in the store is read as float32, which holds it exactly."""
    array = np.asarray(value)
    is_odd = schema is not None and path in schema.fields and schema[path].dtype == "bfloat16"
    return torch.tensor(array).to(torch.bfloat16) if is_odd and array.dtype == np.float32 else array


def _plain(value: Any) -> Any:
    """A number of numpy or Arrow as Python's own."""
    return value.item() if hasattr(value, "item") else value
