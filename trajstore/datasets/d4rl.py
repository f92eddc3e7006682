"""D4RL's flat HDF5 files: the steps of all episodes in a row, with flags where episodes end."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from trajstore.datasets import hdf5
from trajstore.datasets.field_mapping import FieldMapping
from trajstore.datasets.hdf5_output import Hdf5Output, Hdf5Writer
from trajstore.datasets.interfaces import Episode
from trajstore.datasets.json_values import as_mapping, from_json_value
from trajstore.datasets.skip_names import check_skip
from trajstore.errors import DataError, FormatError
from trajstore.schema import Array, Schema, flatten, nest

FIELD_MAPPING = FieldMapping("observations", "next_observations", {"actions": "action", "rewards": "reward"})
_FLAGS = ("terminals", "timeouts")
_FLAGS_PER_READ = 1 << 20
_METADATA = "metadata"


def open_reader(
    path: str | os.PathLike[str],
    *,
    skip: Collection[str] = (),
    keep_next: bool = False,
    max_episode_steps: int | None = None,
) -> D4rlReader:
    """Open a file for reading. Only the flags are read now, in blocks.

    Args:
        path: The file.
        skip: Arrays and groups to leave out, by their names in the file.
        keep_next: Keep ``next_observations`` as a separate field, even where it differs from the observation of
            the following step.
        max_episode_steps: Also end episodes after this many steps; old files have no ``timeouts``. 0 means that
            only ``terminals`` end episodes.

    Raises:
        FormatError: It is not a D4RL file, or it is damaged.
        DataError: A store cannot hold an array, or the file does not say where episodes end.
    """
    if max_episode_steps is not None and not (type(max_episode_steps) is int and max_episode_steps >= 0):
        raise DataError(f"max_episode_steps: expected a number of steps, 0 or None, got {max_episode_steps!r}")
    file = hdf5.open_file(path)
    try:
        found = hdf5.step_arrays(file, {*skip, _METADATA})
        arrays = {name: array for name, array in found.items() if not FIELD_MAPPING.is_skipped(name, skip)}
        flags = {name: arrays.pop(name) for name in _FLAGS if name in arrays}
        n_steps = _count_steps(file, flags, arrays)
        _check_timeouts(file, flags, max_episode_steps)
        stops = _find_stops(flags, n_steps, max_episode_steps)
        schema = FIELD_MAPPING.schema(file.filename, arrays, keep_next=keep_next)
        facts = _read_dataset_facts(file, skip)
        check_skip(file.filename, skip, hdf5.iter_names(file, skip))
    except BaseException:
        file.close()
        raise
    return D4rlReader(file, schema, arrays, flags, stops, facts, keep_next, max_episode_steps)


def _count_steps(file: Any, flags: Mapping[str, Any], arrays: Mapping[str, Any]) -> int:
    if "terminals" not in flags or not arrays:
        raise FormatError(f"{file.filename}: expected arrays of steps and 'terminals', got {', '.join(file)}")
    n_steps = len(flags["terminals"])
    hdf5.check_row_counts({**flags, **arrays}, n_steps)
    return n_steps


def _check_timeouts(file: Any, flags: Mapping[str, Any], max_episode_steps: int | None) -> None:
    """Refuse a file without time limits: episodes that ended by one would be joined."""
    if "timeouts" not in flags and max_episode_steps is None:
        raise DataError(
            f"{file.filename} has no 'timeouts', so it does not say where time limits ended episodes:"
            " give the environment's max_episode_steps, or 0 if only terminals end episodes"
        )


def _find_stops(flags: Mapping[str, Any], n_steps: int, max_episode_steps: int | None) -> list[int]:
    """Return the row after the last step of each episode. The last episode stops at the end of the file."""
    stops: list[int] = []
    for start in range(0, n_steps, _FLAGS_PER_READ):
        stop = min(start + _FLAGS_PER_READ, n_steps)
        is_end = np.any([_read_flags(array, start, stop) for array in flags.values()], axis=0)
        stops += (start + 1 + np.flatnonzero(is_end)).tolist()
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


def _read_flags(flags: Any, start: int, stop: int) -> Array:
    values = hdf5.read_rows(flags, start, stop)
    return np.asarray(values.reshape(len(values), -1).any(axis=1))


def _read_dataset_facts(file: Any, skip: Collection[str]) -> dict[str, Any]:
    """Read the group ``metadata``, which describes the whole file."""
    if not hdf5.has_child(file, _METADATA) or _METADATA in skip:
        return {}
    prefix = f"{_METADATA}/"
    found = hdf5.iter_arrays(hdf5.get_child(file, _METADATA), skip, prefix)
    facts = {path.removeprefix(prefix): hdf5.read_metadata_value(array, path) for path, array in found}
    return {_METADATA: facts} if facts else {}


class D4rlReader:
    """Reads the episodes of a flat file. Their keys are numbers from 0."""

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
        rows = {path: hdf5.read_rows(array, start, stop) for path, array in self._arrays.items()}
        try:
            steps = FIELD_MAPPING.to_store_fields(rows, keep_next=self._keep_next)
        except DataError as error:
            raise DataError(f"{self.display}: episode {key}, which starts at row {start}: {error}") from error
        flags = {name: bool(_read_flags(array, stop - 1, stop)[0]) for name, array in self._flags.items()}
        is_timeout = flags.get("timeouts", False) or stop - start == self._max_episode_steps
        metadata: dict[str, Any] = {"timeout": True} if is_timeout and flags["terminals"] else {}
        if i == 0 and self._facts:
            metadata["dataset"] = dict(self._facts)
        return Episode(key, nest(steps), flags["terminals"], is_timeout, metadata)

    def close(self) -> None:
        self._file.close()


def open_writer(path: str | os.PathLike[str]) -> D4rlWriter:
    """Start a file, or continue an unfinished one."""
    return D4rlWriter(Hdf5Output.begin(path, "d4rl"))


class D4rlWriter(Hdf5Writer):
    """Writes a flat file.

    Metadata of episodes are dropped. Metadata of the dataset are kept if they were imported from a D4RL file.
    """

    def __init__(self, episodes: Hdf5Output) -> None:
        super().__init__(episodes)
        self._array_types: dict[str, str] | None = None  # of the first episode

    def write(self, episode: Episode) -> None:
        arrays = FIELD_MAPPING.to_dataset_arrays(flatten(episode.steps))
        _check_names(arrays)
        n_steps = len(next(iter(arrays.values())))
        is_timeout = episode.truncated or bool(episode.metadata.get("timeout"))
        for name, is_set in zip(_FLAGS, (episode.terminated, is_timeout), strict=True):
            arrays[name] = np.zeros(n_steps, bool)
            arrays[name][-1] = is_set
        self._check_same_arrays(arrays)
        facts = as_mapping(as_mapping(episode.metadata.get("dataset")).get(_METADATA))
        values = {f"{_METADATA}/{name}": from_json_value(value) for name, value in facts.items()}
        self._episodes.write(episode.key, lambda group: _write_group(group, {**arrays, **values}))

    def _check_same_arrays(self, arrays: Mapping[str, Array]) -> None:
        """Refuse an episode whose arrays differ from the first one's: all steps are rows of the same arrays."""
        types = _array_types(arrays)
        if self._array_types is None:
            written = (_array_types(hdf5.step_arrays(group, {_METADATA})) for group in self._episodes)
            self._array_types = next(written, types)
        if different := sorted(types.items() ^ self._array_types.items()):
            raise DataError(
                f"'{different[0][0]}': expected {self._array_types} as in the first episode, got {types}"
            )

    def _join(self, whole: Any) -> None:
        n_steps = sum(len(episode["terminals"]) for episode in self._episodes)
        stop = 0
        for episode in self._episodes:
            start, stop = stop, stop + len(episode["terminals"])
            for path, array in hdf5.iter_arrays(episode):
                if path.startswith(f"{_METADATA}/"):
                    episode.copy(array, whole, name=path)
                    continue
                joined = whole.require_dataset(path, (n_steps, *array.shape[1:]), array.dtype, exact=True)
                joined[start:stop] = array[()]


def _check_names(paths: Iterable[str]) -> None:
    for path in paths:
        if path.split("/")[0] in (*_FLAGS, _METADATA):
            raise DataError(f"field '{path}' has a name that D4RL files use for something else; leave it out")


def _array_types(arrays: Mapping[str, Any]) -> dict[str, str]:
    return {path: f"{array.dtype}{list(array.shape[1:])}" for path, array in arrays.items()}


def _write_group(group: Any, arrays: Mapping[str, Any]) -> None:
    for path, values in arrays.items():
        group[path] = values
