"""Write replay buffers of diffusion_policy."""

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

from trajstore.datasets.episode_arrays import count_steps
from trajstore.datasets.interfaces import Episode
from trajstore.datasets.partial_output import PartialOutput
from trajstore.errors import DataError
from trajstore.schema import Array, flatten

ENDS = "episode_ends"
FINAL, HAS_FINAL = "final_", "has_final"  # in meta: prefix of arrays of final values, and which episodes have one
FLAGS = ("terminated", "truncated")
_CHUNK_BYTES = 2_000_000  # diffusion_policy's default
_BATCH_BYTES = 1 << 26  # episodes are written in batches of this size; a kill loses the batch in memory


def open_writer(path: str | os.PathLike[str]) -> DiffusionPolicyWriter:
    """Start a replay buffer, or continue an unfinished one. A name that ends in ``.zip`` makes a zip file.

    A run that was killed is continued. After a power failure, start over.
    """
    output = PartialOutput.begin(path, {"format": "diffusion_policy"})
    for leftover in output.directory.rglob("*.partial"):  # of writes that a kill interrupted
        leftover.unlink()
    return DiffusionPolicyWriter(output)


@dataclass(frozen=True, slots=True)
class _PendingEpisode:
    """An episode that is not written yet: its journal record, and its arrays by name."""

    record: dict[str, Any]
    arrays: dict[str, Array]
    n_steps: int


class DiffusionPolicyWriter:
    """Writes a replay buffer.

    Episodes are written in batches, because each batch rewrites the last chunk of every array.
    """

    def __init__(self, output: PartialOutput) -> None:
        self._output = output
        self._root = import_module("zarr").open_group(str(output.directory), mode="a", zarr_format=2)
        self._pending: list[_PendingEpisode] = []
        self._pending_bytes = 0

    @property
    def display(self) -> str:
        return str(self._output.target)

    def written_keys(self) -> Sequence[str]:
        return [str(record["key"]) for record in self._output.records]

    def trim(self, episode: Episode) -> Episode:
        return episode

    def write(self, episode: Episode) -> None:
        arrays = _rename_fields(flatten(episode.steps))
        n_steps = count_steps(arrays)
        has_final = any(len(values) > n_steps for values in arrays.values())
        record = {"key": episode.key, "terminated": episode.terminated, "truncated": episode.truncated}
        self._pending.append(_PendingEpisode({**record, HAS_FINAL: has_final}, arrays, n_steps))
        self._pending_bytes += sum(values.nbytes for values in arrays.values())
        if self._pending_bytes >= _BATCH_BYTES:
            self._flush()

    def _flush(self) -> None:
        """Write the pending episodes: first the data, then the journal records that make them count."""
        known, pending = self._output.records, self._pending
        start = int(known[-1]["stop"]) if known else 0
        for name in pending[0].arrays if pending else ():
            self._write_rows(f"data/{name}", start, np.concatenate([p.arrays[name][: p.n_steps] for p in pending]))
            if any(len(p.arrays[name]) > p.n_steps for p in pending):
                self._write_rows(
                    f"meta/{FINAL}{name}", len(known), np.stack([_final_value(p, name) for p in pending])
                )
        stops = start + np.cumsum([p.n_steps for p in pending])
        self._output.add_records({**p.record, "stop": int(stop)} for p, stop in zip(pending, stops, strict=True))
        self._pending, self._pending_bytes = [], 0

    def _write_rows(self, path: str, start: int, values: Array) -> None:
        """Write rows from ``start`` on. Rows there were left by a run that died, and are replaced."""
        if path not in self._root:
            self._create_array(path, values)
        array: Any = self._root[path]
        array.resize((start + len(values), *array.shape[1:]))
        array[start:] = values

    def _create_array(self, path: str, values: Array) -> None:
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
        records = self._output.records
        self._write_meta(ENDS, np.array([record["stop"] for record in records], np.int64))
        has_finals = any(record[HAS_FINAL] for record in records)
        for name in (*FLAGS, HAS_FINAL) if has_finals else FLAGS:
            self._write_meta(name, np.array([record[name] for record in records]))
        for name, array in self._root["meta"].arrays():
            if name.startswith(FINAL):
                array.resize((len(records), *array.shape[1:]))
        if self._output.target.suffix == ".zip":
            self._output.publish_file(_write_zip(self._output.directory))
        else:
            self._output.publish()

    def _write_meta(self, name: str, values: Array) -> None:
        if f"meta/{name}" in self._root:
            del self._root[f"meta/{name}"]
        self._root.create_array(f"meta/{name}", data=values, chunks=values.shape, compressors=None)

    def suspend(self) -> None:
        self._flush()
        self._output.suspend()


def _final_value(pending: _PendingEpisode, name: str) -> Array:
    """Return the final value of a field; zeros if the episode has none."""
    values = pending.arrays[name]
    return values[-1] if len(values) > pending.n_steps else np.zeros_like(values[-1])


def _rename_fields(steps: Mapping[str, Any]) -> dict[str, Array]:
    """Return arrays by their names in the group ``data``, which has no subgroups."""
    flat: dict[str, Array] = {}
    for path, values in steps.items():
        name = path.replace("/", ".")
        if name in flat:
            raise DataError(f"field '{path}' and another would both be called '{name}'; leave one out")
        flat[name] = np.asarray(values)
    return flat


def _write_zip(place: Path) -> str:
    """Pack all files of a directory into a zip file in it; return the name of the zip file."""
    name = "whole.zip"
    (place / name).unlink(missing_ok=True)
    files = sorted(path for path in place.rglob("*") if path.is_file())
    with zipfile.ZipFile(place / name, "w", zipfile.ZIP_STORED) as archive:
        for path in files:
            archive.write(path, path.relative_to(place).as_posix())
    return name
