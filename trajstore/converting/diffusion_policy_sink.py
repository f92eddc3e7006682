"""Replay buffers of diffusion_policy, written episode by episode."""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np

from trajstore.converting.fields import length_of
from trajstore.converting.ports import Episode
from trajstore.converting.unfinished import Unfinished
from trajstore.errors import DataError
from trajstore.schema import Array, flatten

ENDS = "episode_ends"
FINAL, HAS_FINAL = "final_", "has_final"  # in meta: last values of a field, and of which episodes
FLAGS = ("terminated", "truncated")
_CHUNK_BYTES = 2_000_000  # as diffusion_policy has it


def open_sink(path: str | os.PathLike[str]) -> DiffusionPolicySink:
    """Begin a replay buffer, or go on with one that is not finished; a zip file if the name ends so.

    A run that is killed loses nothing; after a power cut, begin again.
    """
    unfinished = Unfinished.begin(path, {"format": "diffusion_policy"})
    for left in unfinished.place.rglob("*.partial"):  # of puts that did not come to their end
        left.unlink()
    return DiffusionPolicySink(unfinished)


class DiffusionPolicySink:
    """A replay buffer on its way."""

    def __init__(self, unfinished: Unfinished) -> None:
        self._unfinished = unfinished
        self._root = import_module("zarr").open_group(str(unfinished.place), mode="a", zarr_format=2)

    @property
    def display(self) -> str:
        return str(self._unfinished.target)

    def done(self) -> Sequence[str]:
        return [str(record["key"]) for record in self._unfinished.records]

    def write(self, episode: Episode) -> None:
        flat = _flat(flatten(episode.steps))
        n_steps = length_of(flat)
        records = self._unfinished.records
        start, n = int(records[-1]["stop"]) if records else 0, len(records)
        for name, values in flat.items():
            self._put(f"data/{name}", start, values[:n_steps])
            if len(values) > n_steps:
                self._put(f"meta/{FINAL}{name}", n, values[n_steps:])
        has_final = any(len(values) > n_steps for values in flat.values())
        flags = {"terminated": episode.terminated, "truncated": episode.truncated, HAS_FINAL: has_final}
        self._unfinished.note([{"key": episode.key, "stop": start + n_steps, **flags}])

    def _put(self, path: str, start: int, values: Array) -> None:
        """Put rows at ``start``; what stands there is left of a run that died."""
        if path not in self._root:
            self._create(path, values)
        array: Any = self._root[path]
        if (array.dtype, array.shape[1:]) != (values.dtype, values.shape[1:]):
            came = f"{values.dtype} of shape {values.shape}"
            raise DataError(
                f"'{path}': expected {array.dtype} of shape {(len(values), *array.shape[1:])}, got {came}"
            )
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
        records = self._unfinished.records
        self._put_meta(ENDS, np.array([record["stop"] for record in records], np.int64))
        has_finals = any(record[HAS_FINAL] for record in records)
        for name in (*FLAGS, HAS_FINAL) if has_finals else FLAGS:
            self._put_meta(name, np.array([record[name] for record in records]))
        if self._unfinished.target.suffix == ".zip":
            self._unfinished.publish_file(_packed(self._unfinished.place))
        else:
            self._unfinished.publish()

    def _put_meta(self, name: str, values: Array) -> None:
        if f"meta/{name}" in self._root:
            del self._root[f"meta/{name}"]
        self._root.create_array(f"meta/{name}", data=values, chunks=values.shape, compressors=None)

    def abandon(self) -> None:
        """Nothing is open between two episodes."""


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
