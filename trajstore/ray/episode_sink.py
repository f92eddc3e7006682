"""Writes rows of Ray Data as episodes."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from ray.data.block import Block, BlockAccessor
from ray.data.datasource import Datasink

from trajstore.errors import DataError
from trajstore.ray.episode_source import TABLE_COLUMNS
from trajstore.schema import Schema, nest
from trajstore.store.store import Url, create_imported
from trajstore.store.store import open as open_store
from trajstore.writing.writer import Writer

_ENDS = ("terminated", "truncated", "cut")
_IGNORED_COLUMNS = ("has_final", "is_headless", "time")


@dataclass(frozen=True)
class WrittenStream:
    """The result of one write task."""

    stream: str
    n_episodes: int


class EpisodeSink(Datasink[WrittenStream]):
    """Writes rows as episodes, for ``Dataset.write_datasink``; see `trajstore.ray.data.write_episodes`."""

    def __init__(
        self,
        url: Url,
        schema: Schema | None = None,
        *,
        name: str = "ray",
        storage_options: Mapping[str, Any] | None = None,
        fsync: bool = True,
    ) -> None:
        self._store_options: dict[str, Any] = {"storage_options": storage_options, "fsync": fsync}
        self._url, self._schema = str(url), schema
        self._name = f"{name}-{uuid.uuid4().hex[:12]}"  # only streams of this job have this name

    def on_write_start(self, schema: Any = None) -> None:
        create_imported(self._url, self._schema, exist_ok=True, **self._store_options)

    def write(self, blocks: Iterable[Block], ctx: Any) -> WrittenStream:
        """Write the rows of one task as one stream, with a single commit."""
        held = list(blocks)  # mapped from Ray's memory, not copied
        rows: list[Mapping[str, Any]] = []
        for block in held:
            rows.extend(BlockAccessor.for_block(block).iter_rows(True))
        store = open_store(self._url, **self._store_options)
        # Large enough that the writer does not commit by itself, which it does when the buffer is half full.
        n_bytes = sum(_count_bytes(row) for row in rows)
        options: dict[str, Any] = {"commit_seconds": None, "buffer_bytes": 4 * n_bytes + (1 << 20)}
        with store.writer(self._name, **options) as writer:
            for row in rows:
                _append(writer, store.schema, row)
            if writer.stats()["commits"]:
                raise DataError("the episodes of a task do not fit its buffer; write smaller blocks")
        return WrittenStream(writer.stream, len(rows))

    def on_write_complete(self, write_result: Any) -> None:
        """Hide the episodes of attempts that Ray has repeated."""
        returned = write_result.write_returns if hasattr(write_result, "write_returns") else write_result
        self._hide_streams({written.stream for written in returned})

    def on_write_failed(self, error: Exception) -> None:
        """Hide all episodes that this job has written."""
        self._hide_streams(set())

    def _hide_streams(self, kept: set[str]) -> None:
        """Discard all episodes in streams of this job except the kept ones."""
        store = open_store(self._url, **self._store_options)
        table = store.episodes
        stream, episode = table["stream"], table["episode"]
        mine = np.array([name.startswith(f"{self._name}-") and name not in kept for name in stream], bool)
        if not mine.any():
            return
        discarded = {name: episode[mine & (stream == name)].tolist() for name in np.unique(stream[mine])}
        with store.writer(f"{self._name}-end") as writer:
            writer.set_view(discarded=discarded)
            writer.wait(writer.publish_view())


def _count_bytes(row: Mapping[str, Any]) -> int:
    return sum(
        getattr(value, "nbytes", len(value) if isinstance(value, str) else 8) + 256 for value in row.values()
    )


def _append(writer: Writer, schema: Schema | None, row: Mapping[str, Any]) -> None:
    schema = writer.schema or schema
    declared = set(schema.episode) if schema is not None else set()
    known = {*TABLE_COLUMNS, "metadata", *_IGNORED_COLUMNS, *declared}
    end = row.get("end", "cut")
    if end not in _ENDS:
        raise DataError(f"end: expected one of {', '.join(_ENDS)}, got {end!r}; filter the dataset first")
    metadata = json.loads(row.get("metadata") or "{}")
    metadata |= {name: _to_python(row[name]) for name in declared if row.get(name) is not None}
    fields = {path: _to_field_values(schema, path, value) for path, value in row.items() if path not in known}
    writer.append_episode(
        nest(fields),
        terminated=end == "terminated",
        truncated=end == "truncated",
        env=int(row.get("env", 0)),
        metadata=metadata,
    )


def _to_field_values(schema: Schema | None, path: str, value: Any) -> Any:
    """Values of a field. Stores give bfloat16 as float32, which is exact; this converts them back."""
    array = np.asarray(value)
    is_bfloat16 = schema is not None and path in schema.fields and schema[path].dtype == "bfloat16"
    return torch.tensor(array).to(torch.bfloat16) if is_bfloat16 and array.dtype == np.float32 else array


def _to_python(value: Any) -> Any:
    """A number of numpy or Arrow as a Python number."""
    return value.item() if hasattr(value, "item") else value
