"""Replay buffers of diffusion_policy and UMI: Zarr v2, all steps one after the other, and where episodes end.

A directory, or the same in a zip file. What has no place there (final values, how episodes ended) stands in arrays
of ours in ``meta``, which diffusion_policy carries along.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from trajstore.datasets import zarr2
from trajstore.datasets.diffusion_policy.sink import ENDS, FINAL, FLAGS, HAS_FINAL
from trajstore.datasets.fields import check_skip, field_of, is_skipped
from trajstore.datasets.plain import plain
from trajstore.datasets.ports import Episode
from trajstore.errors import EpisodeNotFoundError, FormatError
from trajstore.schema import Array, Field, Schema, nest, selected_paths

_MOVED = "_temp"  # what diffusion_policy calls an array while it chunks it anew


def open_in_place(path: str | os.PathLike[str], *, skip: Collection[str] = ()) -> InPlace:
    """Open a replay buffer to read episodes of it where it is.

    Rows after the last end are of an episode that never became whole, and are not shown. An array of ends that was
    being moved or extended when its writer died is found.

    Args:
        path: Of the directory or the zip file.
        skip: Arrays to leave out, of ``data`` or as ``meta/<name>``; ``meta`` is all of those.

    Raises:
        FormatError: It is no replay buffer, or damaged.
        DataError: An array can't be stored.
        MissingExtraError: An array is compressed by a codec that is not installed.
    """
    files = zarr2.open_files(path)
    try:
        _check_groups(files, skip)
        ends = _ends(files)
        names = [name for name in files.children("data") if not is_skipped(name, skip)]
        arrays = {name: zarr2.open_array(files, f"data/{name}") for name in names}
        for name, array in arrays.items():
            _check_rows(files, f"data/{name}", array, int(ends[-1]) if len(ends) else 0)
        finals = _finals(files, arrays)
        meta = _meta(files, skip, finals)
        check_skip(files.display, skip, _names(files, finals))
        if finals:
            _check_finals(files, finals, meta.get(HAS_FINAL), len(ends))
        return InPlace(files, arrays, finals, ends, meta)
    except BaseException:
        files.close()
        raise


def _check_groups(files: zarr2.Files, skip: Collection[str]) -> None:
    names = files.children("data")
    if not names or not files.children("meta"):
        raise FormatError(f"{files.display}: expected the groups 'data' and 'meta', got {files.children('')}")
    if _MOVED in names and _MOVED not in skip:
        raise FormatError(
            f"{files.display}: data/{_MOVED} is left from an array that was being chunked anew; give it its name"
            f" back, or leave it out with skip=['{_MOVED}']"
        )


def _ends(files: zarr2.Files) -> Array:
    """Where episodes end: of the arrays that a crash may have left, the one with the most."""
    found = [name for name in (ENDS, _MOVED) if name in files.children("meta")]
    if not found:
        raise FormatError(f"{files.display}: expected meta/{ENDS}, got {files.children('meta')}")
    best = max((_whole(files, f"meta/{name}") for name in found), key=len)
    if (np.diff(best, prepend=0) <= 0).any():
        raise FormatError(f"{files.display}: meta/{ENDS}: expected whole numbers that rise, got {best!r:.100}")
    return best


def _whole(files: zarr2.Files, path: str) -> Array:
    """Ends, without the zeros that stand where others were to be written."""
    ends = zarr2.read_small(files, path)
    if ends.ndim != 1 or ends.dtype.kind not in "iu":
        raise FormatError(f"{files.display}: {path}: expected whole numbers, got {ends.dtype} of {ends.shape}")
    return ends[: np.flatnonzero(ends)[-1] + 1].astype(np.int64) if ends.any() else np.zeros(0, np.int64)


def _check_rows(files: zarr2.Files, path: str, array: Any, n: int) -> None:
    if not array.ndim or array.shape[0] < n:
        raise FormatError(
            f"{files.display}: {path}: expected at least the {n} rows that meta/{ENDS} tells of, got shape"
            f" {array.shape}; leave it out with skip"
        )


def _finals(files: zarr2.Files, names: Iterable[str]) -> dict[str, Any]:
    """By name in ``data``, the arrays of final values."""
    there = set(files.children("meta"))
    return {name: zarr2.open_array(files, f"meta/{FINAL}{name}") for name in names if f"{FINAL}{name}" in there}


def _check_finals(files: zarr2.Files, finals: Mapping[str, Any], has_final: Array | None, n: int) -> None:
    if has_final is None or has_final.shape != (n,):
        raise FormatError(f"{files.display}: expected meta/{HAS_FINAL} to say which of the {n} episodes have one")
    n_rows = int(np.flatnonzero(has_final)[-1]) + 1 if has_final.any() else 0
    for name, array in finals.items():
        _check_rows(files, f"meta/{FINAL}{name}", array, n_rows)


def _meta(files: zarr2.Files, skip: Collection[str], finals: Collection[str]) -> dict[str, Array]:
    names = [name for name in _other_meta(files, finals) if not is_skipped(f"meta/{name}", skip)]
    return {name: zarr2.read_small(files, f"meta/{name}") for name in names}


def _other_meta(files: zarr2.Files, finals: Collection[str]) -> list[str]:
    """What stands in ``meta`` and is neither ends nor final values."""
    known = {ENDS, _MOVED, *(f"{FINAL}{name}" for name in finals)}
    return [name for name in files.children("meta") if name not in known]


def _names(files: zarr2.Files, finals: Collection[str]) -> list[str]:
    """What can be left out."""
    return [*files.children("data"), *(f"meta/{name}" for name in _other_meta(files, finals))]


class InPlace:
    """Episodes of a replay buffer where it is; every read decodes the chunks that it needs.

    Attributes:
        display: Where it is.
        lengths: Steps of every episode.
        meta: What else stands in ``meta``, by name.
        schema: As an import has it. Dots in names make groups.
    """

    def __init__(
        self,
        files: zarr2.Files,
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
        return field_of(name, array.dtype.name, tuple(array.shape[1:]), final=name in self._finals)

    def __len__(self) -> int:
        """Number of episodes."""
        return len(self._ends)

    def read_episode(
        self, episode: int, *, fields: Iterable[str] | None = None, start: int = 0, stop: int | None = None
    ) -> dict[str, Any]:
        """Rows of one episode as numpy arrays.

        Args:
            episode: Its number.
            fields: Paths or names of groups to read; all by default.
            start: First step.
            stop: Step after the last; to the end by default.
        """
        if not 0 <= episode < len(self):
            raise EpisodeNotFoundError(f"{self.display} has {len(self)} episodes, counted from 0; got {episode}")
        n_steps = int(self.lengths[episode])
        last = n_steps if stop is None else stop
        if not 0 <= start <= last <= n_steps:
            raise IndexError(f"episode {episode}: steps {start} to {last}, but it has {n_steps}")
        first = int(self._ends[episode]) - n_steps
        has_final = bool(self._finals) and last == n_steps and bool(self.meta[HAS_FINAL][episode])
        rows = {path: self._rows(path, first + start, first + last) for path in selected_paths(self.schema, fields)}
        for path in rows if has_final else ():
            if self.schema[path].final:
                rows[path] = np.concatenate([rows[path], self._final(path, episode)])
        return nest(rows)

    def _rows(self, path: str, start: int, stop: int) -> Array:
        name = self._names[path]
        return zarr2.read(self._arrays[name], start, stop, f"{self.display}: data/{name}")

    def _final(self, path: str, episode: int) -> Array:
        name = self._names[path]
        return zarr2.read(self._finals[name], episode, episode + 1, f"{self.display}: meta/{FINAL}{name}")

    def close(self) -> None:
        self._files.close()


def open_source(path: str | os.PathLike[str], *, skip: Collection[str] = ()) -> DiffusionPolicySource:
    """Open a replay buffer to import it; see `open_in_place`."""
    return DiffusionPolicySource(open_in_place(path, skip=skip))


class DiffusionPolicySource:
    """The episodes of a replay buffer; their names are numbers, from 0."""

    def __init__(self, buffer: InPlace) -> None:
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
        metadata = {name: self._plain(name, values[i]) for name, values in self._per_episode.items()}
        if i == 0 and (facts := self._facts()):
            metadata["dataset"] = {"meta": facts}
        return Episode(key, self._buffer.read_episode(i), is_terminated, is_truncated, metadata)

    def _facts(self) -> dict[str, Any]:
        own = {*self._flags, *self._per_episode}
        return {name: self._plain(name, values) for name, values in self._buffer.meta.items() if name not in own}

    def _plain(self, name: str, value: Any) -> Any:
        return plain(f"{self.display}: meta/{name}", value)

    def close(self) -> None:
        self._buffer.close()
