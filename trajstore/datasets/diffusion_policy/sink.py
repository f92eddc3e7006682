"""Replay buffers of diffusion_policy, written episode by episode."""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np

from trajstore.datasets.fields import length_of
from trajstore.datasets.ports import Episode
from trajstore.datasets.unfinished import Unfinished
from trajstore.errors import DataError
from trajstore.schema import Array, flatten

ENDS = "episode_ends"
FINAL, HAS_FINAL = "final_", "has_final"  # in meta: last values of a field, and of which episodes
FLAGS = ("terminated", "truncated")
_CHUNK_BYTES = 2_000_000  # as diffusion_policy has it
_BATCH_BYTES = 1 << 26  # held in memory: what a kill may lose


def open_sink(path: str | os.PathLike[str]) -> DiffusionPolicySink:
    """Begin a replay buffer, or go on with one that is not finished; a zip file if the name ends so.

    What a run that was killed had written is gone on with; after a power cut, begin again.
    """
    unfinished = Unfinished.begin(path, {"format": "diffusion_policy"})
    for left in unfinished.place.rglob("*.partial"):  # of puts that did not come to their end
        left.unlink()
    return DiffusionPolicySink(unfinished)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """An episode that is not written yet: what is noted of it, and its arrays by name."""

    record: dict[str, Any]
    arrays: dict[str, Array]
    n_steps: int


class DiffusionPolicySink:
    """A replay buffer on its way. Episodes are written many at a time: each time, a chunk of each array is anew."""

    def __init__(self, unfinished: Unfinished) -> None:
        self._unfinished = unfinished
        self._root = import_module("zarr").open_group(str(unfinished.place), mode="a", zarr_format=2)
        self._waiting: list[_Waiting] = []
        self._n_bytes = 0  # of those that wait

    @property
    def display(self) -> str:
        return str(self._unfinished.target)

    def done(self) -> Sequence[str]:
        return [str(record["key"]) for record in self._unfinished.records]

    def kept(self, episode: Episode) -> Episode:
        return episode

    def write(self, episode: Episode) -> None:
        arrays = _flat(flatten(episode.steps))
        n_steps = length_of(arrays)
        has_final = any(len(values) > n_steps for values in arrays.values())
        record = {"key": episode.key, "terminated": episode.terminated, "truncated": episode.truncated}
        self._waiting.append(_Waiting({**record, HAS_FINAL: has_final}, arrays, n_steps))
        self._n_bytes += sum(values.nbytes for values in arrays.values())
        if self._n_bytes >= _BATCH_BYTES:
            self._flush()

    def _flush(self) -> None:
        """Write the episodes that wait: data first, and last the note that says that they are there."""
        known, waiting = self._unfinished.records, self._waiting
        start = int(known[-1]["stop"]) if known else 0
        for name in waiting[0].arrays if waiting else ():
            self._put(f"data/{name}", start, np.concatenate([w.arrays[name][: w.n_steps] for w in waiting]))
            if any(len(w.arrays[name]) > w.n_steps for w in waiting):
                self._put(f"meta/{FINAL}{name}", len(known), np.stack([_final(w, name) for w in waiting]))
        stops = start + np.cumsum([w.n_steps for w in waiting])
        self._unfinished.note({**w.record, "stop": int(stop)} for w, stop in zip(waiting, stops, strict=True))
        self._waiting, self._n_bytes = [], 0

    def _put(self, path: str, start: int, values: Array) -> None:
        """Put rows at ``start``; what stands there is left of a run that died."""
        if path not in self._root:
            self._create(path, values)
        array: Any = self._root[path]
        array.resize((start + len(values), *array.shape[1:]))
        array[start:] = values

    def _create(self, path: str, values: Array) -> None:
        row_bytes = values.dtype.itemsize * math.prod(values.shape[1:])
        self._root.create_array(
            path,
            shape=(0, *values.shape[1:]),
            chunks=(max(1, _CHUNK_BYTES // row_bytes), *values.shape[1:]),
            dtype=values.dtype,
            compressors=numcodecs.Blosc("zstd", clevel=5, shuffle=numcodecs.Blosc.BITSHUFFLE),
            fill_value=0,
            config={"write_empty_chunks": True},
        )

    def finish(self) -> None:
        self._flush()
        records = self._unfinished.records
        self._put_meta(ENDS, np.array([record["stop"] for record in records], np.int64))
        has_finals = any(record[HAS_FINAL] for record in records)
        for name in (*FLAGS, HAS_FINAL) if has_finals else FLAGS:
            self._put_meta(name, np.array([record[name] for record in records]))
        for name, array in self._root["meta"].arrays():
            if name.startswith(FINAL):
                array.resize((len(records), *array.shape[1:]))
        if self._unfinished.target.suffix == ".zip":
            self._unfinished.publish_file(_packed(self._unfinished.place))
        else:
            self._unfinished.publish()

    def _put_meta(self, name: str, values: Array) -> None:
        if f"meta/{name}" in self._root:
            del self._root[f"meta/{name}"]
        self._root.create_array(f"meta/{name}", data=values, chunks=values.shape, compressors=None)

    def abandon(self) -> None:
        self._flush()
        self._unfinished.abandon()


def _final(waiting: _Waiting, name: str) -> Array:
    """The final value of a field; zeros where an episode has none."""
    values = waiting.arrays[name]
    return values[-1] if len(values) > waiting.n_steps else np.zeros_like(values[-1])


def _flat(steps: Mapping[str, Any]) -> dict[str, Array]:
    """Arrays by their names in ``data``, where there are no groups."""
    flat: dict[str, Array] = {}
    for path, values in steps.items():
        name = path.replace("/", ".")
        if name in flat:
            raise DataError(f"field '{path}' and another would both be called '{name}'; leave one out")
        flat[name] = np.asarray(values)
    return flat


def _packed(place: Path) -> str:
    """A zip file of all that is in a directory; its name there."""
    name = "whole.zip"
    (place / name).unlink(missing_ok=True)
    files = sorted(path for path in place.rglob("*") if path.is_file())
    with zipfile.ZipFile(place / name, "w", zipfile.ZIP_STORED) as packed:
        for path in files:
            packed.write(path, path.relative_to(place).as_posix())
    return name
