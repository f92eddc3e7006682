"""Read the metadata of a LeRobot dataset of version 3: features, file paths, episodes and tasks."""

from __future__ import annotations

import re
import string
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from trajstore.datasets.arrow_tables import column_rows, import_pyarrow, open_parquet
from trajstore.datasets.json_files import load_json_object
from trajstore.datasets.skip_names import check_skip, is_skipped
from trajstore.errors import FormatError
from trajstore.schema import Array, check_name

# Columns that follow from a row's position; checked, not stored.
INDEX_COLUMNS = ("episode_index", "frame_index", "index")
DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
EPISODES_PATH = "meta/episodes/chunk-000/file-000.parquet"
TASKS_PATH = "meta/tasks.parquet"
# Columns that trajstore adds to the table of episodes.
END_COLUMN, METADATA_COLUMN = "trajstore/end", "trajstore/metadata"
# Entry that trajstore adds to a feature: its shape is (1,). LeRobot writes () and (1,) the same way.
HAS_AXIS_KEY = "trajstore_has_axis"
_NUMBER_FORMAT = re.compile(r"(0?[1-9]d)?\Z")  # a larger width could fill the memory


@dataclass(frozen=True, slots=True)
class Feature:
    """One feature of the dataset.

    Attributes:
        name: Its name in the dataset, with dots.
        kind: ``image``, ``video``, or the name of its dtype.
        shape: Shape of one value; for images height, width, channels.
    """

    name: str
    kind: str
    shape: tuple[int, ...]

    @property
    def path(self) -> str:
        """Path of the field in the store."""
        return field_path(self.name)


@dataclass(frozen=True, slots=True)
class Info:
    """The contents of ``meta/info.json``.

    Attributes:
        root: Directory of the dataset.
        fps: Steps per second.
        features: All features except the index columns.
        about: The whole file, as parsed.
    """

    root: Path
    fps: float
    features: tuple[Feature, ...]
    about: Mapping[str, Any]

    @staticmethod
    def load(root: Path) -> Info:
        """Read and check the file.

        Raises:
            FormatError: It has another version, or is malformed.
        """
        about = load_json_object(root / "meta" / "info.json")
        version = about.get("codebase_version")
        if not isinstance(version, str) or not version.startswith("v3."):
            raise FormatError(
                f"{root}: expected a LeRobot dataset of version v3, got {version!r:.80}; convert it first"
            )
        fps, features = about.get("fps"), about.get("features")
        if not isinstance(fps, (int, float)) or not fps > 0 or not isinstance(features, dict):
            raise FormatError(
                f"{root}/meta/info.json: expected fps and features, got {fps!r:.80}, {features!r:.80}"
            )
        found = tuple(_feature(root, name, f) for name, f in features.items() if name not in INDEX_COLUMNS)
        return Info(root, float(fps), found, about)

    def data_file(self, chunk: int, file: int) -> Path:
        return self._file("data_path", DATA_PATH, chunk_index=chunk, file_index=file)

    def video_file(self, name: str, chunk: int, file: int) -> Path:
        return self._file("video_path", VIDEO_PATH, video_key=name, chunk_index=chunk, file_index=file)

    def _file(self, name: str, default: str, **values: Any) -> Path:
        template = self.about.get(name) or default
        path = PurePosixPath(template.format(**values)) if _is_safe_template(template, values) else None
        if path is None or path.is_absolute() or ".." in path.parts:
            raise FormatError(
                f"{self.root}/meta/info.json: {name}: expected a relative path without '..', such as {default},"
                f" got {template!r:.200}"
            )
        return self.root / path


def _is_safe_template(template: object, values: Mapping[str, Any]) -> bool:
    """Return whether a template only has known values, each as it is or as a number of a few digits."""
    try:
        parts = [part[1:] for part in string.Formatter().parse(str(template)) if part[1] is not None]
    except ValueError:
        return False
    return isinstance(template, str) and all(
        name in values and _NUMBER_FORMAT.match(form or "") and conversion is None
        for name, form, conversion in parts
    )


def field_path(name: str) -> str:
    return name.replace(".", "/")


def _feature(root: Path, name: str, about: Any) -> Feature:
    shape = about.get("shape") if isinstance(about, dict) else None
    if not isinstance(shape, list) or not all(type(n) is int and n > 0 for n in shape):
        raise FormatError(f"{root}: feature '{name}': expected dtype and shape, got {about!r:.200}")
    kind = str(about.get("dtype"))
    if kind in ("image", "video"):
        shape = _with_channels_last(shape, about.get("names"))
    return Feature(name, kind, () if shape == [1] and about.get(HAS_AXIS_KEY) is not True else tuple(shape))


def _with_channels_last(shape: list[int], names: Any) -> list[int]:
    """Return the shape in the order in which images are stored, whatever order the dataset states."""
    first = names[0] if isinstance(names, list) and names else "channel" if shape[-1] > 4 >= shape[0] else "height"
    return [*shape[1:], shape[0]] if len(shape) == 3 and str(first).startswith("channel") else shape


def select_features(info: Info, skip: Collection[str], *, videos: bool) -> list[Feature]:
    """Return the features that become fields. ``skip`` may spell groups with dots or slashes."""
    check_skip(str(info.root), skip, (feature.name for feature in info.features), field_path)
    paths = [field_path(name) for name in skip]
    kept = [f for f in info.features if not is_skipped(f.path, paths) and (videos or f.kind != "video")]
    for feature in kept:
        for part in feature.path.split("/"):
            check_name(part, f"{info.root}: part of feature name in '{feature.name}'")
    return kept


class EpisodeLocations:
    """The table ``meta/episodes``: where the rows and video frames of each episode are.

    Attributes:
        start: First row of each episode, counted over the whole dataset.
        stop: Row after the last one of each episode.
        chunk: Number of the directory of each episode's data file.
        file: Number of each episode's data file.
    """

    def __init__(self, info: Info) -> None:
        pa = import_pyarrow()
        files = sorted((info.root / "meta" / "episodes").glob("*/*.parquet"))
        opened = [open_parquet(file) for file in files]
        if not opened:
            raise FormatError(f"{info.root}/meta/episodes: expected Parquet files, got none")
        names = [name for name in opened[0].schema_arrow.names if not name.startswith("stats/")]
        self._root = info.root
        self._columns: dict[str, Array] = {}
        self._table = pa.concat_tables([file.read(columns=names) for file in opened])
        self.start, self.stop = self.column("dataset_from_index"), self.column("dataset_to_index")
        self.chunk, self.file = self.column("data/chunk_index"), self.column("data/file_index")
        self._check(info)

    def __len__(self) -> int:
        return len(self.start)

    def column(self, name: str) -> Array:
        if name not in self._columns:
            if name not in self._table.column_names:
                raise FormatError(f"{self._root}/meta/episodes: the column '{name}' is missing")
            what = f"{self._root}/meta/episodes: '{name}'"
            self._columns[name] = column_rows(what, self._table.column(name), ())
        return self._columns[name]

    def other_columns(self, i: int) -> dict[str, Any]:
        """Return the metadata of an episode: the columns that do not describe its location."""
        known = (*INDEX_COLUMNS, "length", "dataset_from_index", "dataset_to_index", "tasks")
        row = self._table.slice(i, 1).to_pylist()[0]
        return {k: v for k, v in row.items() if k not in known and not k.startswith(("data/", "videos/", "meta/"))}

    def file_start(self, i: int) -> int:
        """Return the first row, counted over the whole dataset, of the file that holds an episode."""
        is_in_file = (self.chunk == self.chunk[i]) & (self.file == self.file[i])
        return int(self.start[is_in_file].min())

    def _check(self, info: Info) -> None:
        numbers, n = self.column("episode_index"), info.about.get("total_episodes")
        if n != len(self) or numbers.tolist() != list(range(len(self))):
            raise FormatError(
                f"{self._root}: meta/info.json says {n!r:.80} episodes, meta/episodes has {len(self)}, numbered"
                f" {numbers[:5].tolist()}...; was the dataset finalized?"
            )
        if (self.stop - self.start != self.column("length")).any() or (self.stop <= self.start).any():
            raise FormatError(
                f"{self._root}/meta/episodes: the lengths differ from dataset_to_index - dataset_from_index"
            )


def load_tasks(root: Path) -> dict[int, str]:
    """Return the tasks by number."""
    table = open_parquet(root / TASKS_PATH).read()
    numbers = column_rows(f"{root}/{TASKS_PATH}: 'task_index'", table.column("task_index"), ())
    texts = [name for name in table.column_names if import_pyarrow().types.is_string(table.schema.field(name).type)]
    texts += [
        name for name in table.column_names if import_pyarrow().types.is_large_string(table.schema.field(name).type)
    ]
    if len(texts) != 1:
        raise FormatError(f"{root}/{TASKS_PATH}: expected one column of text, got {table.column_names}")
    return dict(zip(numbers.tolist(), table.column(texts[0]).to_pylist(), strict=True))
