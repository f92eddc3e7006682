"""Flat HDF5 files as D4RL has them: all steps one after the other, with flags where episodes end."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from trajstore.datasets import hdf5
from trajstore.datasets.field_names import Layout
from trajstore.datasets.fields import check_skip
from trajstore.datasets.plain import mapping, restored
from trajstore.datasets.ports import Episode
from trajstore.errors import DataError, FormatError
from trajstore.schema import Array, Schema, flatten, nest

LAYOUT = Layout("observations", "next_observations", {"actions": "action", "rewards": "reward"})
_FLAGS = ("terminals", "timeouts")
_BLOCK = 1 << 20  # flags read at a time
_METADATA = "metadata"


def open_source(
    path: str | os.PathLike[str],
    *,
    skip: Collection[str] = (),
    keep_next: bool = False,
    max_episode_steps: int | None = None,
) -> D4rlSource:
    """Open a file to read; only its flags are read now, some at a time.

    Args:
        path: Of the file.
        skip: Arrays and groups to leave out, as they are called in the file.
        keep_next: Keep ``next_observations`` as a field of its own, also where it is not what comes next.
        max_episode_steps: Episodes end after so many steps, too: for old files, which have no ``timeouts``. 0: they
            end by ``terminals`` only.

    Raises:
        FormatError: It is no such file, or damaged.
        DataError: Something in it can't be stored, or nobody knows where its episodes end.
    """
    if max_episode_steps is not None and not (type(max_episode_steps) is int and max_episode_steps >= 0):
        raise DataError(f"max_episode_steps: expected a number of steps, 0 or None, got {max_episode_steps!r}")
    file = hdf5.opened(path)
    try:
        found = hdf5.arrays(file, {*skip, _METADATA})
        arrays = {name: array for name, array in found.items() if not LAYOUT.is_skipped(name, skip)}
        flags = {name: arrays.pop(name) for name in _FLAGS if name in arrays}
        n_steps = _n_steps(file, flags, arrays)
        _check_timeouts(file, flags, max_episode_steps)
        stops = _stops(flags, n_steps, max_episode_steps)
        schema = LAYOUT.schema(file.filename, arrays, keep_next=keep_next)
        facts = _facts(file, skip)
        check_skip(file.filename, skip, hdf5.names(file, skip))
    except BaseException:
        file.close()
        raise
    return D4rlSource(file, schema, arrays, flags, stops, facts, keep_next, max_episode_steps)


def _n_steps(file: Any, flags: Mapping[str, Any], arrays: Mapping[str, Any]) -> int:
    if "terminals" not in flags or not arrays:
        raise FormatError(f"{file.filename}: expected arrays of steps and 'terminals', got {', '.join(file)}")
    n_steps = len(flags["terminals"])
    for name, array in {**flags, **arrays}.items():
        if len(array) != n_steps:
            raise DataError(
                f"{hdf5.place(array)}: expected {n_steps} rows, one a step, got {len(array)};"
                f" leave it out with skip=['{name}']"
            )
    return n_steps


def _check_timeouts(file: Any, flags: Mapping[str, Any], max_episode_steps: int | None) -> None:
    """Refuse to guess: episodes that ended by a time limit would be joined."""
    if "timeouts" not in flags and max_episode_steps is None:
        raise DataError(
            f"{file.filename} has no 'timeouts', so nobody knows where episodes were cut off:"
            " give max_episode_steps (the environment's), or 0 if episodes end by terminals only"
        )


def _stops(flags: Mapping[str, Any], n_steps: int, max_episode_steps: int | None) -> list[int]:
    """Where episodes stop; the last one stops with the file."""
    stops: list[int] = []
    for start in range(0, n_steps, _BLOCK):
        stop = min(start + _BLOCK, n_steps)
        ended = np.any([_is_set(array, start, stop) for array in flags.values()], axis=0)
        stops += (start + 1 + np.flatnonzero(ended)).tolist()
    if n_steps and (not stops or stops[-1] < n_steps):
        stops.append(n_steps)
    if not max_episode_steps:
        return stops
    starts = [0, *stops[:-1]]
    return [
        min(begin + max_episode_steps, stop)
        for first, stop in zip(starts, stops, strict=True)
        for begin in range(first, stop, max_episode_steps)
    ]


def _is_set(flags: Any, start: int, stop: int) -> Array:
    values = hdf5.rows(flags, start, stop)
    return np.asarray(values.reshape(len(values), -1).any(axis=1))


def _facts(file: Any, skip: Collection[str]) -> dict[str, Any]:
    """What a file says of itself as a whole."""
    if not hdf5.has(file, _METADATA) or _METADATA in skip:
        return {}
    prefix = f"{_METADATA}/"
    found = hdf5.walk(hdf5.child(file, _METADATA), skip, prefix)
    facts = {path.removeprefix(prefix): hdf5.small_value(array, path) for path, array in found}
    return {_METADATA: facts} if facts else {}


class D4rlSource:
    """The episodes of a flat file; their names are numbers, from 0."""

    def __init__(
        self,
        file: Any,
        schema: Schema,
        arrays: Mapping[str, Any],
        flags: Mapping[str, Any],
        stops: Sequence[int],
        facts: Mapping[str, Any],
        keep_next: bool,
        max_episode_steps: int | None,
    ) -> None:
        self.schema = schema
        self.display = str(file.filename)
        self._file = file
        self._arrays = arrays
        self._flags = flags
        self._stops = stops
        self._facts = facts
        self._keep_next = keep_next
        self._max_episode_steps = max_episode_steps

    def keys(self) -> Sequence[str]:
        return [str(i) for i in range(len(self._stops))]

    def read(self, key: str) -> Episode:
        i = int(key)
        start, stop = self._stops[i - 1] if i else 0, self._stops[i]
        rows = {path: hdf5.rows(array, start, stop) for path, array in self._arrays.items()}
        try:
            steps = LAYOUT.joined(rows, keep_next=self._keep_next)
        except DataError as error:
            raise DataError(f"{self.display}: episode {key}, from row {start} on: {error}") from error
        flags = {name: bool(_is_set(array, stop - 1, stop)[0]) for name, array in self._flags.items()}
        is_timeout = flags.get("timeouts", False) or stop - start == self._max_episode_steps
        metadata: dict[str, Any] = {"timeout": True} if is_timeout and flags["terminals"] else {}
        if i == 0 and self._facts:
            metadata["dataset"] = dict(self._facts)
        return Episode(key, nest(steps), flags["terminals"], is_timeout, metadata)

    def close(self) -> None:
        self._file.close()


def open_sink(path: str | os.PathLike[str]) -> D4rlSink:
    """Begin a file, or go on with one that is not finished."""
    return D4rlSink(hdf5.Parts.begin(path, "d4rl"))


class D4rlSink:
    """A flat file on its way. Of metadata it has only those of the dataset, if they came from such a file."""

    def __init__(self, parts: hdf5.Parts) -> None:
        self._parts = parts
        self._kinds: dict[str, str] | None = None  # what the first episode has

    @property
    def display(self) -> str:
        return self._parts.display

    def done(self) -> Sequence[str]:
        return self._parts.done()

    def kept(self, episode: Episode) -> Episode:
        return episode

    def write(self, episode: Episode) -> None:
        arrays = LAYOUT.split(flatten(episode.steps))
        _check_names(arrays)
        n_steps = len(next(iter(arrays.values())))
        is_timeout = episode.truncated or bool(episode.metadata.get("timeout"))
        for name, is_set in zip(_FLAGS, (episode.terminated, is_timeout), strict=True):
            arrays[name] = np.zeros(n_steps, bool)
            arrays[name][-1] = is_set
        self._check_same(arrays)
        facts = mapping(mapping(episode.metadata.get("dataset")).get(_METADATA))
        about = {f"{_METADATA}/{name}": restored(value) for name, value in facts.items()}
        self._parts.write(episode.key, lambda group: _fill(group, {**arrays, **about}))

    def _check_same(self, arrays: Mapping[str, Array]) -> None:
        """Refuse an episode that has more or less than the first: all steps are rows of the same arrays."""
        kinds = _kinds(arrays)
        if self._kinds is None:
            self._kinds = next((_kinds(hdf5.arrays(group, {_METADATA})) for group in self._parts), kinds)
        if others := sorted(kinds.items() ^ self._kinds.items()):
            raise DataError(f"'{others[0][0]}': expected {self._kinds} as the first episode has, got {kinds}")

    def finish(self) -> None:
        self._parts.finish(self._join)

    def _join(self, whole: Any) -> None:
        n_steps = sum(len(episode["terminals"]) for episode in self._parts)
        stop = 0
        for episode in self._parts:
            start, stop = stop, stop + len(episode["terminals"])
            for path, array in hdf5.walk(episode):
                if path.startswith(f"{_METADATA}/"):
                    episode.copy(array, whole, name=path)
                    continue
                into = whole.require_dataset(path, (n_steps, *array.shape[1:]), array.dtype, exact=True)
                into[start:stop] = array[()]

    def abandon(self) -> None:
        self._parts.abandon()


def _check_names(arrays: Iterable[str]) -> None:
    for path in arrays:
        if path.split("/")[0] in (*_FLAGS, _METADATA):
            raise DataError(f"field '{path}' stands where such files have something else; leave it out")


def _kinds(arrays: Mapping[str, Any]) -> dict[str, str]:
    return {path: f"{array.dtype}{list(array.shape[1:])}" for path, array in arrays.items()}


def _fill(group: Any, arrays: Mapping[str, Any]) -> None:
    for path, values in arrays.items():
        group[path] = values
