"""What a LeRobot dataset of version 3 says of itself: features, files, episodes and tasks."""

from __future__ import annotations

import re
import string
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from trajstore.datasets.arrow_tables import library, open_parquet, rows_of
from trajstore.datasets.fields import check_skip, is_skipped
from trajstore.datasets.json_files import load_object
from trajstore.errors import FormatError
from trajstore.schema import Array, check_name

# Numbers of rows that follow from where a row stands.
BOOKKEEPING = ("episode_index", "frame_index", "index")
DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
EPISODES_PATH = "meta/episodes/chunk-000/file-000.parquet"
TASKS_PATH = "meta/tasks.parquet"
# Columns of ours in the table of episodes.
END_COLUMN, METADATA_COLUMN = "trajstore/end", "trajstore/metadata"
# Of a feature, an entry of ours: its single values have an axis, which LeRobot does not tell from none.
COLUMN_KEY = "trajstore_has_axis"
_FORMAT = re.compile(r"(0?[1-9]d)?\Z")  # others may be as wide as memory


@dataclass(frozen=True, slots=True)
class Feature:
    """One feature.

    Attributes:
        name: What it is called there, with dots.
        kind: ``image`` or ``video``; otherwise the name of its dtype.
        shape: Of one value; of images height, width and channels.
    """

    name: str
    kind: str
    shape: tuple[int, ...]

    @property
    def path(self) -> str:
        """Of our field."""
        return path_of(self.name)


@dataclass(frozen=True, slots=True)
class Info:
    """``meta/info.json``."""

    root: Path
    fps: float
    features: tuple[Feature, ...]
    about: Mapping[str, Any]

    @staticmethod
    def load(root: Path) -> Info:
        """Read it, trusting nothing in it.

        Raises:
            FormatError: It is of another version, or malformed.
        """
        about = load_object(root / "meta" / "info.json")
        version = about.get("codebase_version")
        if not isinstance(version, str) or not version.startswith("v3."):
            raise FormatError(f"{root}: expected a LeRobot dataset of version v3, got {version!r:.80}; convert it")
        fps, features = about.get("fps"), about.get("features")
        if not isinstance(fps, (int, float)) or not fps > 0 or not isinstance(features, dict):
            raise FormatError(
                f"{root}/meta/info.json: expected fps and features, got {fps!r:.80}, {features!r:.80}"
            )
        found = tuple(_feature(root, name, f) for name, f in features.items() if name not in BOOKKEEPING)
        return Info(root, float(fps), found, about)

    def data_file(self, chunk: int, file: int) -> Path:
        return self._file("data_path", DATA_PATH, chunk_index=chunk, file_index=file)

    def video_file(self, name: str, chunk: int, file: int) -> Path:
        return self._file("video_path", VIDEO_PATH, video_key=name, chunk_index=chunk, file_index=file)

    def _file(self, name: str, default: str, **values: Any) -> Path:
        template = self.about.get(name) or default
        path = PurePosixPath(template.format(**values)) if _is_plain(template, values) else None
        if path is None or path.is_absolute() or ".." in path.parts:
            raise FormatError(
                f"{self.root}/meta/info.json: {name}: expected a path below it, such as {default},"
                f" got {template!r:.200}"
            )
        return self.root / path


def _is_plain(template: object, values: Mapping[str, Any]) -> bool:
    """Whether a template has none but known values, written as they are or as numbers of a few digits."""
    try:
        parts = [part[1:] for part in string.Formatter().parse(str(template)) if part[1] is not None]
    except ValueError:
        return False
    return isinstance(template, str) and all(
        name in values and _FORMAT.match(form or "") and conversion is None for name, form, conversion in parts
    )


def path_of(name: str) -> str:
    return name.replace(".", "/")


def _feature(root: Path, name: str, about: Any) -> Feature:
    shape = about.get("shape") if isinstance(about, dict) else None
    if not isinstance(shape, list) or not all(type(n) is int and n > 0 for n in shape):
        raise FormatError(f"{root}: feature '{name}': expected dtype and shape, got {about!r:.200}")
    kind = str(about.get("dtype"))
    if kind in ("image", "video"):
        shape = _with_channels_last(shape, about.get("names"))
    return Feature(name, kind, () if shape == [1] and about.get(COLUMN_KEY) is not True else tuple(shape))


def _with_channels_last(shape: list[int], names: Any) -> list[int]:
    """Images are stored so, whatever the order that the dataset states."""
    first = names[0] if isinstance(names, list) and names else "channel" if shape[-1] > 4 >= shape[0] else "height"
    return [*shape[1:], shape[0]] if len(shape) == 3 and str(first).startswith("channel") else shape


def chosen(info: Info, skip: Collection[str], *, videos: bool) -> list[Feature]:
    """Features that become fields; ``skip`` may name them with dots."""
    check_skip(str(info.root), skip, (feature.name for feature in info.features), path_of)
    paths = [path_of(name) for name in skip]
    kept = [f for f in info.features if not is_skipped(f.path, paths) and (videos or f.kind != "video")]
    for feature in kept:
        for part in feature.path.split("/"):
            check_name(part, f"{info.root}: part of feature name in '{feature.name}'")
    return kept


class Episodes:
    """``meta/episodes``: where the rows and the frames of each episode are."""

    def __init__(self, info: Info) -> None:
        pa = library()
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
                raise FormatError(f"{self._root}/meta/episodes: expected a column '{name}', which is not there")
            what = f"{self._root}/meta/episodes: '{name}'"
            self._columns[name] = rows_of(what, self._table.column(name), ())
        return self._columns[name]

    def others(self, i: int) -> dict[str, Any]:
        """What else the table says of an episode."""
        known = (*BOOKKEEPING, "length", "dataset_from_index", "dataset_to_index", "tasks")
        row = self._table.slice(i, 1).to_pylist()[0]
        return {k: v for k, v in row.items() if k not in known and not k.startswith(("data/", "videos/", "meta/"))}

    def file_start(self, i: int) -> int:
        """The number of the first row in the file that holds an episode."""
        is_there = (self.chunk == self.chunk[i]) & (self.file == self.file[i])
        return int(self.start[is_there].min())

    def _check(self, info: Info) -> None:
        numbers, n = self.column("episode_index"), info.about.get("total_episodes")
        if n != len(self) or numbers.tolist() != list(range(len(self))):
            raise FormatError(
                f"{self._root}: meta/info.json says {n!r:.80} episodes, meta/episodes has {len(self)}, numbered"
                f" {numbers[:5].tolist()}...; was the dataset finalized?"
            )
        if (self.stop - self.start != self.column("length")).any() or (self.stop <= self.start).any():
            raise FormatError(f"{self._root}/meta/episodes: lengths do not fit where episodes begin and end")


def load_tasks(root: Path) -> dict[int, str]:
    """Tasks by their numbers."""
    table = open_parquet(root / TASKS_PATH).read()
    numbers = rows_of(f"{root}/{TASKS_PATH}: 'task_index'", table.column("task_index"), ())
    texts = [name for name in table.column_names if library().types.is_string(table.schema.field(name).type)]
    texts += [name for name in table.column_names if library().types.is_large_string(table.schema.field(name).type)]
    if len(texts) != 1:
        raise FormatError(f"{root}/{TASKS_PATH}: expected one column of text, got {table.column_names}")
    return dict(zip(numbers.tolist(), table.column(texts[0]).to_pylist(), strict=True))
