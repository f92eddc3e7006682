"""Read LeRobot datasets of version 3: Parquet files of steps and images, and video files."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from trajstore.datasets.arrow_tables import as_single_array, column_dtype, column_rows, import_pyarrow, open_parquet
from trajstore.datasets.episode_arrays import make_field
from trajstore.datasets.images import decode_images
from trajstore.datasets.interfaces import Episode
from trajstore.datasets.lerobot import video as lerobot_video
from trajstore.datasets.lerobot.metadata_reader import (
    END_COLUMN,
    INDEX_COLUMNS,
    METADATA_COLUMN,
    EpisodeLocations,
    Feature,
    Info,
    load_tasks,
    select_features,
)
from trajstore.errors import DataError, EpisodeNotFoundError, FormatError
from trajstore.schema import Array, Field, Schema, nest

End = Literal["cut", "truncated", "terminated"]
_REWARDS = ("next/reward", "reward")
_COUNTS = ("total_episodes", "total_frames", "total_tasks", "splits")  # an export counts again


def open_reader(
    path: str | os.PathLike[str],
    *,
    skip: Collection[str] = (),
    videos: bool = True,
    end: End = "cut",
) -> LeRobotReader:
    """Open a dataset for reading.

    Args:
        path: Its directory, which holds ``meta``, ``data`` and ``videos``.
        skip: Features or groups of features (``observation.images``) to leave out.
        videos: Decode video frames. False leaves out all video features.
        end: How episodes ended; a LeRobot dataset does not say.

    Raises:
        StoreNotFoundError: A metadata file does not exist.
        FormatError: It is not a LeRobot dataset of version 3, or it is malformed.
        MissingExtraError: pyarrow is not installed; or PyAV, if there are videos.
    """
    if end not in ("cut", "truncated", "terminated"):
        raise ValueError(f"end: expected 'cut', 'truncated' or 'terminated', got {end!r}")
    info = Info.load(Path(path).absolute())
    features = select_features(info, skip, videos=videos)
    if any(feature.kind == "video" for feature in features):
        lerobot_video.import_pyav()
    return LeRobotReader(info, features, EpisodeLocations(info), load_tasks(info.root), end)


class LeRobotReader:
    """Reads the episodes of a dataset. Their keys are their numbers."""

    def __init__(
        self,
        info: Info,
        features: Sequence[Feature],
        episodes: EpisodeLocations,
        tasks: Mapping[int, str],
        end: End,
    ) -> None:
        self._info = info
        self._features = features
        self._episodes = episodes
        self._tasks = tasks
        self._end = end
        self._opened: tuple[Path, Any] | None = None  # the open data file
        self._cached: tuple[tuple[Path, int, int], Any] | None = None  # row groups may hold many episodes

    @property
    def display(self) -> str:
        return str(self._info.root)

    @cached_property
    def schema(self) -> Schema:
        types = self._open_file(self._data_file(0)).schema_arrow
        fields = {feature.path: self._field(feature, types) for feature in self._features}
        reward = next((path for path in _REWARDS if path in fields and not fields[path].shape), None)
        return Schema(nest(fields), episode={"task": str}, reward=reward)

    def keys(self) -> Sequence[str]:
        return [str(i) for i in range(len(self._episodes))]

    def read(self, key: str) -> Episode:
        if not key.isdecimal() or int(key) >= len(self._episodes):
            raise EpisodeNotFoundError(f"{self.display} has no episode '{key}'")
        i = int(key)
        try:
            rows = self._read_rows(i)
            steps = {feature.path: self._values(feature, rows, i) for feature in self._features}
            end, metadata = self._end_and_metadata(i, rows)
        except DataError as error:
            raise DataError(f"{self.display}: episode '{key}': {error}") from error
        return Episode(key, nest(steps), end == "terminated", end == "truncated", metadata)

    def close(self) -> None:
        if self._opened is not None:
            self._opened[1].close()
        self._opened = self._cached = None

    # ---- rows

    def _field(self, feature: Feature, types: Any) -> Field:
        if feature.kind in ("image", "video"):
            return make_field(feature.path, "uint8", feature.shape)
        if feature.name not in types.names:
            raise FormatError(
                f"{self.display}: feature '{feature.name}' is not in the data;"
                f" leave it out with skip=['{feature.name}']"
            )
        try:
            dtype = column_dtype(f"{self.display}: feature '{feature.name}'", types.field(feature.name).type)
        except DataError as error:
            raise DataError(f"{error}; leave it out with skip=['{feature.name}']") from error
        return make_field(feature.path, dtype.name, feature.shape)

    def _values(self, feature: Feature, rows: Any, i: int) -> Array:
        if feature.kind == "video":
            return self._read_frames(feature, i)
        column = as_single_array(rows.column(feature.name))
        if feature.kind == "image":
            images = (image.as_py() for image in column.field("bytes"))
            return decode_images(feature.path, images, feature.shape, "PNG")
        return column_rows(f"field '{feature.path}'", column, feature.shape)

    def _read_frames(self, feature: Feature, i: int) -> Array:
        location = {
            n: self._episodes.column(f"videos/{feature.name}/{n}")[i] for n in ("chunk_index", "file_index")
        }
        start_s = float(self._episodes.column(f"videos/{feature.name}/from_timestamp")[i])
        path = self._info.video_file(feature.name, int(location["chunk_index"]), int(location["file_index"]))
        return lerobot_video.read_frames(path, start_s, self._length(i), self._info.fps, feature.shape)

    def _length(self, i: int) -> int:
        return int(self._episodes.stop[i] - self._episodes.start[i])

    def _read_rows(self, i: int) -> Any:
        """Read the rows of an episode, and check that their index columns agree with the table of episodes."""
        first = int(self._episodes.start[i]) - self._episodes.file_start(i)
        rows = self._read_table(self._data_file(i), first, first + self._length(i))
        start, n = int(self._episodes.start[i]), self._length(i)
        expected = {
            "episode_index": np.full(n, i),
            "frame_index": np.arange(n),
            "index": np.arange(start, start + n),
        }
        for name in INDEX_COLUMNS:
            if not np.array_equal(column_rows(name, rows.column(name), ()), expected[name]):
                raise FormatError(f"{self._data_file(i)}: '{name}' of episode {i} contradicts meta/episodes")
        return rows

    def _read_table(self, path: Path, start: int, stop: int) -> Any:
        """Read rows of a file. Only the row groups that hold them are read."""
        metadata = self._open_file(path).metadata
        edges = np.cumsum([0, *(metadata.row_group(g).num_rows for g in range(metadata.num_row_groups))])
        if stop > edges[-1]:
            raise FormatError(f"{path}: expected at least {stop} rows according to meta/episodes, got {edges[-1]}")
        low, high = int(np.searchsorted(edges, start, "right")) - 1, int(np.searchsorted(edges, stop))
        if self._cached is None or self._cached[0] != (path, low, high):
            self._cached = (path, low, high), self._read_row_groups(path, range(low, high))
        return self._cached[1].slice(start - edges[low], stop - start)

    def _read_row_groups(self, path: Path, groups: range) -> Any:
        wanted = dict.fromkeys(
            [*INDEX_COLUMNS, "task_index", *(f.name for f in self._features if f.kind != "video")]
        )
        existing = self._open_file(path).schema_arrow.names
        if missing := [name for name in wanted if name not in existing]:
            raise FormatError(f"{path}: expected a column '{missing[0]}', got {', '.join(existing)}")
        try:
            return self._open_file(path).read_row_groups(groups, columns=list(wanted))
        except (import_pyarrow().ArrowException, OSError) as error:
            raise FormatError(f"{path}: rows can't be read: {error}") from error

    def _data_file(self, i: int) -> Path:
        return self._info.data_file(int(self._episodes.chunk[i]), int(self._episodes.file[i]))

    def _open_file(self, path: Path) -> Any:
        if self._opened is None or self._opened[0] != path:
            self.close()
            self._opened = path, open_parquet(path)
        return self._opened[1]

    # ---- end and metadata

    def _end_and_metadata(self, i: int, rows: Any) -> tuple[str, dict[str, Any]]:
        others = self._episodes.other_columns(i)
        end = others.pop(END_COLUMN, None) or self._end
        numbers = np.unique(column_rows("task_index", rows.column("task_index"), ())).tolist()
        if unknown := [n for n in numbers if n not in self._tasks]:
            raise FormatError(
                f"{self.display}: episode {i} has task {unknown[0]}, which is not in meta/tasks.parquet"
            )
        tasks = {str(n): self._tasks[n] for n in numbers}
        metadata = {**_parse_metadata(others.pop(METADATA_COLUMN, None)), **others, "tasks": tasks}
        if len(tasks) == 1:
            metadata["task"] = next(iter(tasks.values()))
        if i == 0:
            metadata["dataset"] = {"lerobot": {k: v for k, v in self._info.about.items() if k not in _COUNTS}}
        return end, metadata


def _parse_metadata(text: Any) -> dict[str, Any]:
    """Parse the metadata that an export wrote; an empty dict if there are none."""
    try:
        return dict(json.loads(text or "{}"))
    except (TypeError, ValueError) as error:
        raise FormatError(f"meta/episodes: '{METADATA_COLUMN}' is not a JSON object: {error}") from error
