"""Read replay buffers of diffusion_policy and UMI: Zarr v2 with the steps of all episodes in a row.

A buffer is a directory or a zip file. An export stores final values and how episodes ended in further arrays of the
group ``meta``, which diffusion_policy copies along.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from trajstore.datasets import zarr2
from trajstore.datasets.diffusion_policy.writer import ENDS, FINAL, FLAGS, HAS_FINAL
from trajstore.datasets.episode_arrays import make_field
from trajstore.datasets.interfaces import Episode
from trajstore.datasets.json_values import to_json_value
from trajstore.datasets.skip_names import check_skip, is_skipped
from trajstore.errors import EpisodeNotFoundError, FormatError
from trajstore.schema import Array, Field, Schema, nest, selected_paths

_TEMPORARY = "_temp"  # diffusion_policy's name for an array while it changes its chunks


def open_in_place(path: str | os.PathLike[str], *, skip: Collection[str] = ()) -> InPlaceBuffer:
    """Open a replay buffer to read its episodes without importing them.

    Rows after the last episode end belong to an episode that was never completed, and are ignored. If the writer
    died while it moved or extended the array of episode ends, the ends are recovered.

    Args:
        path: The directory or zip file.
        skip: Arrays to leave out: names in ``data``, or ``meta/<name>``. ``meta`` leaves out all of the latter.

    Raises:
        FormatError: It is not a replay buffer, or it is damaged.
        DataError: A store cannot hold an array.
        MissingExtraError: The codec of an array is not installed.
    """
    files = zarr2.open_files(path)
    try:
        _check_groups(files, skip)
        ends = _read_ends(files)
        names = [name for name in files.children("data") if not is_skipped(name, skip)]
        arrays = {name: zarr2.open_array(files, f"data/{name}") for name in names}
        for name, array in arrays.items():
            _check_rows(files, f"data/{name}", array, int(ends[-1]) if len(ends) else 0)
        finals = _open_finals(files, arrays)
        meta = _read_meta(files, skip, finals)
        check_skip(files.display, skip, _skippable_names(files, finals))
        if finals:
            _check_finals(files, finals, meta.get(HAS_FINAL), len(ends))
        return InPlaceBuffer(files, arrays, finals, ends, meta)
    except BaseException:
        files.close()
        raise


def _check_groups(files: zarr2.Zarr2Files, skip: Collection[str]) -> None:
    names = files.children("data")
    if not names or not files.children("meta"):
        raise FormatError(f"{files.display}: expected the groups 'data' and 'meta', got {files.children('')}")
    if _TEMPORARY in names and _TEMPORARY not in skip:
        raise FormatError(
            f"{files.display}: data/{_TEMPORARY} is left over from changing the chunks of an array; rename it"
            f" to the array's name, or leave it out with skip=['{_TEMPORARY}']"
        )


def _read_ends(files: zarr2.Zarr2Files) -> Array:
    """Return the row after the last step of each episode, from the longest of the arrays that a crash may leave."""
    found = [name for name in (ENDS, _TEMPORARY) if name in files.children("meta")]
    if not found:
        raise FormatError(f"{files.display}: expected meta/{ENDS}, got {files.children('meta')}")
    best = max((_read_written_ends(files, f"meta/{name}") for name in found), key=len)
    if (np.diff(best, prepend=0) <= 0).any():
        raise FormatError(f"{files.display}: meta/{ENDS}: expected increasing integers, got {best!r:.100}")
    return best


def _read_written_ends(files: zarr2.Zarr2Files, path: str) -> Array:
    """Read an array of ends without the trailing zeros, which a crash leaves where ends were not written yet."""
    ends = zarr2.read_small_array(files, path)
    if ends.ndim != 1 or ends.dtype.kind not in "iu":
        raise FormatError(f"{files.display}: {path}: expected integers, got {ends.dtype} of {ends.shape}")
    return ends[: np.flatnonzero(ends)[-1] + 1].astype(np.int64) if ends.any() else np.zeros(0, np.int64)


def _check_rows(files: zarr2.Zarr2Files, path: str, array: Any, n: int) -> None:
    if not array.ndim or array.shape[0] < n:
        raise FormatError(
            f"{files.display}: {path}: expected at least the {n} rows in meta/{ENDS}, got shape"
            f" {array.shape}; leave it out with skip"
        )


def _open_finals(files: zarr2.Zarr2Files, names: Iterable[str]) -> dict[str, Any]:
    """Open the arrays of final values, by name of the array in ``data``."""
    existing = set(files.children("meta"))
    return {name: zarr2.open_array(files, f"meta/{FINAL}{name}") for name in names if f"{FINAL}{name}" in existing}


def _check_finals(files: zarr2.Zarr2Files, finals: Mapping[str, Any], has_final: Array | None, n: int) -> None:
    if has_final is None or has_final.shape != (n,):
        raise FormatError(f"{files.display}: expected meta/{HAS_FINAL} with a flag for each of the {n} episodes")
    n_rows = int(np.flatnonzero(has_final)[-1]) + 1 if has_final.any() else 0
    for name, array in finals.items():
        _check_rows(files, f"meta/{FINAL}{name}", array, n_rows)


def _read_meta(files: zarr2.Zarr2Files, skip: Collection[str], finals: Collection[str]) -> dict[str, Array]:
    names = [name for name in _other_meta_names(files, finals) if not is_skipped(f"meta/{name}", skip)]
    return {name: zarr2.read_small_array(files, f"meta/{name}") for name in names}


def _other_meta_names(files: zarr2.Zarr2Files, finals: Collection[str]) -> list[str]:
    """Return the names in ``meta`` that are neither ends nor final values."""
    known = {ENDS, _TEMPORARY, *(f"{FINAL}{name}" for name in finals)}
    return [name for name in files.children("meta") if name not in known]


def _skippable_names(files: zarr2.Zarr2Files, finals: Collection[str]) -> list[str]:
    """Return the names that can be left out."""
    return [*files.children("data"), *(f"meta/{name}" for name in _other_meta_names(files, finals))]


class InPlaceBuffer:
    """Episodes of a replay buffer, read from where it is. Every read decodes the chunks that it needs.

    Attributes:
        display: Path of the buffer.
        lengths: Number of steps of each episode.
        meta: The other arrays of ``meta``, by name.
        schema: The schema that an import would use. Dots in names become groups.
    """

    def __init__(
        self,
        files: zarr2.Zarr2Files,
        arrays: Mapping[str, Any],
        finals: Mapping[str, Any],
        ends: Array,
        meta: Mapping[str, Array],
    ) -> None:
        self.display = files.display
        self.meta = meta
        self.lengths: Array = np.diff(ends, prepend=0)
        self._files = files
        self._names = {name.replace(".", "/"): name for name in arrays}
        self._arrays, self._finals = arrays, finals
        self._ends = ends
        self.schema = Schema(nest({path: self._field(name) for path, name in self._names.items()}))

    def _field(self, name: str) -> Field:
        array = self._arrays[name]
        return make_field(name, array.dtype.name, tuple(array.shape[1:]), final=name in self._finals)

    def __len__(self) -> int:
        """Number of episodes."""
        return len(self._ends)

    def read_episode(
        self, episode: int, *, fields: Iterable[str] | None = None, start: int = 0, stop: int | None = None
    ) -> dict[str, Any]:
        """Read steps of one episode as NumPy arrays.

        Args:
            episode: Number of the episode, from 0.
            fields: Paths of fields or groups to read; by default all.
            start: First step.
            stop: Step after the last one; by default the end. Final values are included if it is the end.


        Raises:
            EpisodeNotFoundError: The episode does not exist.
            IndexError: The steps do not exist.
        """
        if not 0 <= episode < len(self):
            raise EpisodeNotFoundError(f"{self.display} has {len(self)} episodes, numbered from 0; got {episode}")
        n_steps = int(self.lengths[episode])
        last = n_steps if stop is None else stop
        if not 0 <= start <= last <= n_steps:
            raise IndexError(f"episode {episode} has {n_steps} steps, got start {start} and stop {last}")
        first = int(self._ends[episode]) - n_steps
        has_final = bool(self._finals) and last == n_steps and bool(self.meta[HAS_FINAL][episode])
        rows = {path: self._rows(path, first + start, first + last) for path in selected_paths(self.schema, fields)}
        for path in rows if has_final else ():
            if self.schema[path].final:
                rows[path] = np.concatenate([rows[path], self._final(path, episode)])
        return nest(rows)

    def _rows(self, path: str, start: int, stop: int) -> Array:
        name = self._names[path]
        return zarr2.read_rows(self._arrays[name], start, stop, f"{self.display}: data/{name}")

    def _final(self, path: str, episode: int) -> Array:
        name = self._names[path]
        return zarr2.read_rows(self._finals[name], episode, episode + 1, f"{self.display}: meta/{FINAL}{name}")

    def close(self) -> None:
        self._files.close()


def open_reader(path: str | os.PathLike[str], *, skip: Collection[str] = ()) -> DiffusionPolicyReader:
    """Open a replay buffer for an import. The arguments and errors are those of `open_in_place`."""
    return DiffusionPolicyReader(open_in_place(path, skip=skip))


class DiffusionPolicyReader:
    """Reads the episodes of a replay buffer. Their keys are numbers from 0."""

    def __init__(self, buffer: InPlaceBuffer) -> None:
        self.display, self.schema = buffer.display, buffer.schema
        self._buffer = buffer
        per_episode = {name: values for name, values in buffer.meta.items() if values.shape[:1] == (len(buffer),)}
        self._flags = {name: per_episode.pop(name) for name in (*FLAGS, HAS_FINAL) if name in per_episode}
        self._per_episode = per_episode

    def keys(self) -> Sequence[str]:
        return [str(i) for i in range(len(self._buffer))]

    def read(self, key: str) -> Episode:
        i = int(key)
        is_terminated, is_truncated = (
            bool(self._flags[name][i]) if name in self._flags else False for name in FLAGS
        )
        metadata = {name: self._to_json_value(name, values[i]) for name, values in self._per_episode.items()}
        if i == 0 and (facts := self._facts()):
            metadata["dataset"] = {"meta": facts}
        return Episode(key, self._buffer.read_episode(i), is_terminated, is_truncated, metadata)

    def _facts(self) -> dict[str, Any]:
        about_episodes = {*self._flags, *self._per_episode}
        return {
            name: self._to_json_value(name, values)
            for name, values in self._buffer.meta.items()
            if name not in about_episodes
        }

    def _to_json_value(self, name: str, value: Any) -> Any:
        return to_json_value(f"{self.display}: meta/{name}", value)

    def close(self) -> None:
        self._buffer.close()
