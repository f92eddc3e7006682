"""LeRobot datasets of version 3: Parquet files of steps, images in them, and videos beside them."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from trajstore.datasets.arrow_tables import dtype_of, library, open_parquet, rows_of, whole
from trajstore.datasets.fields import field_of
from trajstore.datasets.images import decoded
from trajstore.datasets.lerobot import video as lerobot_video
from trajstore.datasets.lerobot.layout import (
    BOOKKEEPING,
    END_COLUMN,
    METADATA_COLUMN,
    Episodes,
    Feature,
    Info,
    chosen,
    load_tasks,
)
from trajstore.datasets.ports import Episode
from trajstore.errors import DataError, EpisodeNotFoundError, FormatError
from trajstore.schema import Array, Field, Schema, nest

End = Literal["cut", "truncated", "terminated"]
_REWARDS = ("next/reward", "reward")
_COUNTS = ("total_episodes", "total_frames", "total_tasks", "splits")


def open_source(
    path: str | os.PathLike[str],
    *,
    skip: Collection[str] = (),
    videos: bool = True,
    end: End = "cut",
) -> LeRobotSource:
    """Open a dataset.

    Args:
        path: Its directory, with ``meta``, ``data`` and ``videos`` in it.
        skip: Features to leave out, or groups of them (``observation.images``).
        videos: Decode frames of videos; False leaves out all features that are videos.
        end: How episodes ended, which a LeRobot dataset does not say.

    Raises:
        MissingExtraError: pyarrow is not installed; or, where there are videos, PyAV.
    """
    if end not in ("cut", "truncated", "terminated"):
        raise ValueError(f"end: expected 'cut', 'truncated' or 'terminated', got {end!r}")
    info = Info.load(Path(path).absolute())
    features = chosen(info, skip, videos=videos)
    if any(feature.kind == "video" for feature in features):
        lerobot_video.library()
    return LeRobotSource(info, features, Episodes(info), load_tasks(info.root), end)


class LeRobotSource:
    """The episodes of a dataset; its keys are their numbers."""

    def __init__(
        self, info: Info, features: Sequence[Feature], episodes: Episodes, tasks: Mapping[int, str], end: End
    ) -> None:
        self._info = info
        self._features = features
        self._episodes = episodes
        self._tasks = tasks
        self._end = end
        self._opened: tuple[Path, Any] | None = None
        self._cached: tuple[tuple[Path, int, int], Any] | None = None  # row groups may hold many episodes

    @property
    def display(self) -> str:
        return str(self._info.root)

    @cached_property
    def schema(self) -> Schema:
        kinds = self._file(self._data_file(0)).schema_arrow
        fields = {feature.path: self._field(feature, kinds) for feature in self._features}
        reward = next((path for path in _REWARDS if path in fields and not fields[path].shape), None)
        return Schema(nest(fields), episode={"task": str}, reward=reward)

    def keys(self) -> Sequence[str]:
        return [str(i) for i in range(len(self._episodes))]

    def read(self, key: str) -> Episode:
        if not key.isdecimal() or int(key) >= len(self._episodes):
            raise EpisodeNotFoundError(f"{self.display} has no episode '{key}'")
        i = int(key)
        try:
            rows = self._rows(i)
            steps = {feature.path: self._values(feature, rows, i) for feature in self._features}
            end, metadata = self._about(i, rows)
        except DataError as error:
            raise DataError(f"{self.display}: episode '{key}': {error}") from error
        return Episode(key, nest(steps), end == "terminated", end == "truncated", metadata)

    def close(self) -> None:
        if self._opened is not None:
            self._opened[1].close()
        self._opened = self._cached = None

    # ---- rows

    def _field(self, feature: Feature, kinds: Any) -> Field:
        if feature.kind in ("image", "video"):
            return field_of(feature.path, "uint8", feature.shape)
        if feature.name not in kinds.names:
            raise FormatError(
                f"{self.display}: feature '{feature.name}' is not in the data; skip=['{feature.name}']"
            )
        try:
            dtype = dtype_of(f"{self.display}: feature '{feature.name}'", kinds.field(feature.name).type)
        except DataError as error:
            raise DataError(f"{error}; leave it out with skip=['{feature.name}']") from error
        return field_of(feature.path, dtype.name, feature.shape)

    def _values(self, feature: Feature, rows: Any, i: int) -> Array:
        if feature.kind == "video":
            return self._frames(feature, i)
        column = whole(rows.column(feature.name))
        if feature.kind == "image":
            images = (image.as_py() for image in column.field("bytes"))
            return decoded(feature.path, images, feature.shape, "PNG")
        return rows_of(f"field '{feature.path}'", column, feature.shape)

    def _frames(self, feature: Feature, i: int) -> Array:
        about = {n: self._episodes.column(f"videos/{feature.name}/{n}")[i] for n in ("chunk_index", "file_index")}
        start_s = float(self._episodes.column(f"videos/{feature.name}/from_timestamp")[i])
        path = self._info.video_file(feature.name, int(about["chunk_index"]), int(about["file_index"]))
        return lerobot_video.frames(path, start_s, self._length(i), self._info.fps, feature.shape)

    def _length(self, i: int) -> int:
        return int(self._episodes.stop[i] - self._episodes.start[i])

    def _rows(self, i: int) -> Any:
        """The rows of an episode; that they are its own is checked."""
        first = int(self._episodes.start[i]) - self._episodes.file_start(i)
        rows = self._table(self._data_file(i), first, first + self._length(i))
        start, n = int(self._episodes.start[i]), self._length(i)
        expected = {
            "episode_index": np.full(n, i),
            "frame_index": np.arange(n),
            "index": np.arange(start, start + n),
        }
        for name in BOOKKEEPING:
            if not np.array_equal(rows_of(name, rows.column(name), ()), expected[name]):
                raise FormatError(f"{self._data_file(i)}: '{name}' of episode {i} is not what meta/episodes says")
        return rows

    def _table(self, path: Path, start: int, stop: int) -> Any:
        """Rows of a file; no more of it is read than the row groups that they are in."""
        metadata = self._file(path).metadata
        edges = np.cumsum([0, *(metadata.row_group(g).num_rows for g in range(metadata.num_row_groups))])
        if stop > edges[-1]:
            raise FormatError(f"{path}: expected at least {stop} rows as meta/episodes says, got {edges[-1]}")
        low, high = int(np.searchsorted(edges, start, "right")) - 1, int(np.searchsorted(edges, stop))
        if self._cached is None or self._cached[0] != (path, low, high):
            self._cached = (path, low, high), self._row_groups(path, range(low, high))
        return self._cached[1].slice(start - edges[low], stop - start)

    def _row_groups(self, path: Path, groups: range) -> Any:
        wanted = dict.fromkeys([*BOOKKEEPING, "task_index", *(f.name for f in self._features if f.kind != "video")])
        there = self._file(path).schema_arrow.names
        if missing := [name for name in wanted if name not in there]:
            raise FormatError(f"{path}: expected a column '{missing[0]}', got {', '.join(there)}")
        try:
            return self._file(path).read_row_groups(groups, columns=list(wanted))
        except (library().ArrowException, OSError) as error:
            raise FormatError(f"{path}: rows can't be read: {error}") from error

    def _data_file(self, i: int) -> Path:
        return self._info.data_file(int(self._episodes.chunk[i]), int(self._episodes.file[i]))

    def _file(self, path: Path) -> Any:
        if self._opened is None or self._opened[0] != path:
            self.close()
            self._opened = path, open_parquet(path)
        return self._opened[1]

    # ---- what is known of an episode

    def _about(self, i: int, rows: Any) -> tuple[str, dict[str, Any]]:
        others = self._episodes.others(i)
        end = others.pop(END_COLUMN, None) or self._end
        numbers = np.unique(rows_of("task_index", rows.column("task_index"), ())).tolist()
        if unknown := [n for n in numbers if n not in self._tasks]:
            raise FormatError(
                f"{self.display}: episode {i} has task {unknown[0]}, which meta/tasks.parquet has not"
            )
        tasks = {str(n): self._tasks[n] for n in numbers}
        metadata = {**_parsed(others.pop(METADATA_COLUMN, None)), **others, "tasks": tasks}
        if len(tasks) == 1:
            metadata["task"] = next(iter(tasks.values()))
        if i == 0:
            metadata["dataset"] = {"lerobot": {k: v for k, v in self._info.about.items() if k not in _COUNTS}}
        return end, metadata


def _parsed(text: Any) -> dict[str, Any]:
    """Metadata of ours, where there are any."""
    try:
        return dict(json.loads(text or "{}"))
    except (TypeError, ValueError) as error:
        raise FormatError(f"meta/episodes: '{METADATA_COLUMN}' is not a JSON object: {error}") from error
