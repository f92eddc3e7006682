"""Ray Data over a store: its episodes as a dataset, and datasets written as episodes.

A row is an episode, so nothing that Ray does with rows (shuffling, splitting, batching) tears one apart. Columns:

- ``stream``, ``episode``, ``env``, ``length`` (steps), ``end`` (``terminated``, ``truncated``, ``cut``,
  ``aborted``, ``open``), ``return``, the columns that the schema declares for episodes, and ``metadata`` as JSON
  text;
- every field by its path (``observation/pixels``), an array of ``[length, ...]``; fields with a final value have
  one row more if the episode has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ray.data

from trajstore.format.episode_table import EpisodeTable
from trajstore.ray.episode_sink import EpisodeSink
from trajstore.ray.episode_source import EpisodeSource
from trajstore.schema import Array, Schema
from trajstore.store.store import Store, Url
from trajstore.store.store import open as open_store

__all__ = ["EpisodeSink", "EpisodeSource", "read_episodes", "write_episodes"]


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
    """The episodes of a store as a dataset, one row each.

    The dataset shows what is committed now; later commits do not change it. Reading is lazy: each task reads its
    own episodes and returns them in blocks of about 32 MiB, so memory does not grow with the store.

    Args:
        url: URL of the store.
        at: Name or id of a checkpoint, or ``"latest"``: show what the checkpoint holds.
        fields: Fields or groups to read; all by default.
        where: Read only episodes for which this function of the episode table returns True.
        blocks: Number of read tasks; chosen by Ray by default.
        concurrency: Number of read tasks that run at the same time.
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

    Every write task writes its own stream and commits once, at its end: all of its episodes or none. Episodes of
    failed or repeated attempts are hidden, and so are all episodes of a job that fails. A task holds the episodes
    that it writes in memory: one or a few blocks of the dataset.

    Args:
        dataset: Rows with the fields of the schema by path, ``[T, ...]`` each (one more if the episode has a final
            value), and optionally ``end`` (``cut`` by default), ``env``, declared columns and ``metadata``. Other
            columns of `read_episodes` are ignored; unknown columns are refused.
        url: URL of the store, which is created if it does not exist.
        schema: The fields; None: those of the store, or inferred from the first data.
        name: Name of the streams.
        concurrency: Number of tasks that write at the same time.
        storage_options: Options for fsspec's filesystem.
        fsync: Whether commits to a local directory survive a power cut.
    """
    sink = EpisodeSink(url, schema, name=name, storage_options=storage_options, fsync=fsync)
    dataset.write_datasink(sink, concurrency=concurrency)
    return open_store(url, storage_options=storage_options, fsync=fsync)
