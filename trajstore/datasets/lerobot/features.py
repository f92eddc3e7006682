"""The features of a LeRobot dataset that is written, and their statistics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from trajstore.datasets.arrow_tables import import_pyarrow
from trajstore.datasets.images import encode_png
from trajstore.datasets.json_values import from_json_value, to_json_value
from trajstore.datasets.lerobot.metadata_reader import HAS_AXIS_KEY, field_path
from trajstore.errors import DataError
from trajstore.replay.statistics import RunningStatistics
from trajstore.schema import Array, Field, Schema, nest

_MAX_AXES = 5
_IMAGE_NAMES = ["height", "width", "channels"]
_SCALAR = {"shape": [1], "names": None}
_BOOKKEEPING = {
    "timestamp": {"dtype": "float32", **_SCALAR},
    **{name: {"dtype": "int64", **_SCALAR} for name in ("frame_index", "episode_index", "index", "task_index")},
}


def feature_name(path: str) -> str:
    """Return the feature name of a field; dots separate groups.

    Raises:
        DataError: The path has a dot.
    """
    if "." in path:
        raise DataError(f"field '{path}': LeRobot uses dots for groups; leave it out with fields=")
    return path.replace("/", ".")


def is_image(dtype: str, shape: tuple[int, ...]) -> bool:
    return dtype == "uint8" and len(shape) == 3 and shape[-1] == 3


class DatasetFacts:
    """What all episodes of a dataset share.

    Attributes:
        fps: Steps per second.
        robot_type: The given text, if any.
        names: Names of the elements of features, by path, if the store was imported from a LeRobot dataset.
        fields: Dtype and shape of the fields, by path.
        tasks: Number of each task, in order of appearance.
    """

    def __init__(
        self,
        fps: float,
        robot_type: str | None,
        names: Mapping[str, Any],
        fields: Mapping[str, tuple[str, tuple[int, ...]]],
        tasks: dict[str, int],
    ) -> None:
        self.fps = fps
        self.robot_type = robot_type
        self.names = names
        self.fields = fields
        self.tasks = tasks
        self._statistics = RunningStatistics(
            Schema(
                nest(
                    {path: Field(dtype, _statistics_shape(dtype, shape)) for path, (dtype, shape) in fields.items()}
                )
            )
        )

    @staticmethod
    def of(arrays: Mapping[str, Array], options: Mapping[str, Any], metadata: Mapping[str, Any]) -> DatasetFacts:
        """Create the facts from the arrays and metadata of the first episode.

        Raises:
            DataError: LeRobot cannot hold a field, or the number of steps per second is unknown.
        """
        known = _imported_facts(metadata)
        fps = known.get("fps") if options["fps"] is None else options["fps"]
        if not isinstance(fps, (int, float)) or not fps > 0:
            raise DataError(f"fps: expected the number of steps per second, got {fps!r}")
        fields = {path: (rows.dtype.name, rows.shape[1:]) for path, rows in arrays.items()}
        names = {
            field_path(n): f.get("names") for n, f in known.get("features", {}).items() if isinstance(f, Mapping)
        }
        for path, (dtype, shape) in fields.items():
            _check(path, dtype, shape)
        return DatasetFacts(fps, options["robot_type"] or known.get("robot_type"), names, fields, {})

    def check_same_fields(self, arrays: Mapping[str, Array]) -> None:
        """Refuse an episode whose fields differ from those of the first one."""
        for path in {**self.fields, **arrays}:
            first = self.fields.get(path)
            now = (arrays[path].dtype.name, arrays[path].shape[1:]) if path in arrays else None
            if first != now:
                raise DataError(f"field '{path}': expected {first} as in the first episode, got {now}")

    def update_statistics(self, arrays: Mapping[str, Array]) -> None:
        shapes = {path: _statistics_shape(*self.fields[path]) for path in arrays}
        self._statistics.update({path: rows.reshape(-1, *shapes[path]) for path, rows in arrays.items()})

    def features(self) -> dict[str, Any]:
        """Return the features in the form of meta/info.json."""
        own = {feature_name(p): self._feature(p) for p in self.fields if p not in _BOOKKEEPING}
        return own | _BOOKKEEPING

    def _feature(self, path: str) -> dict[str, Any]:
        dtype, shape = self.fields[path]
        if is_image(dtype, shape):
            return {"dtype": "image", "shape": list(shape), "names": _IMAGE_NAMES}
        about = {"dtype": dtype, "shape": list(shape) or [1], "names": self.names.get(path)}
        return about | ({HAS_AXIS_KEY: True} if shape == (1,) else {})

    def statistics(self) -> dict[str, Any]:
        """Return the statistics in the form of meta/stats.json. Images have values per channel, scaled to 0..1."""
        return {
            feature_name(path): self._field_statistics(path, found)
            for path, found in self._statistics.result().items()
        }

    def _field_statistics(self, path: str, found: Mapping[str, Any]) -> dict[str, Any]:
        dtype, shape = self.fields[path]
        if is_image(dtype, shape):
            n = int(found["count"].max()) // math.prod(shape[:2])
            scaled = {
                k: (found[k].astype(float) / 255)[:, None, None].tolist() for k in ("min", "max", "mean", "std")
            }
            return {**scaled, "count": [n]}
        whole = shape or (1,)
        n = int(found["count"].max()) // (math.prod(shape) if found["is_reduced"] else 1)
        values = {k: np.broadcast_to(found[k], whole).astype(float).tolist() for k in ("min", "max", "mean", "std")}
        return {**values, "count": [n]}

    def to_json(self) -> dict[str, Any]:
        state = self._statistics.state_dict()
        return {
            "fps": self.fps,
            "robot_type": self.robot_type,
            "names": self.names,
            "fields": self.fields,
            "tasks": self.tasks,
            "statistics": {p: {name: to_json_value(p, a) for name, a in part.items()} for p, part in state.items()},
        }

    @staticmethod
    def from_json(state: Mapping[str, Any]) -> DatasetFacts:
        fields = {path: (dtype, tuple(shape)) for path, (dtype, shape) in state["fields"].items()}
        facts = DatasetFacts(state["fps"], state["robot_type"], state["names"], fields, dict(state["tasks"]))
        statistics = state["statistics"]
        facts._statistics.load_state_dict(
            {p: {n: from_json_value(a) for n, a in part.items()} for p, part in statistics.items()}
        )
        return facts


def _imported_facts(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the facts of the LeRobot dataset that the store was imported from, if any."""
    facts = metadata.get("dataset")
    known = facts.get("lerobot") if isinstance(facts, Mapping) else None
    return known if isinstance(known, Mapping) else {}


def _check(path: str, dtype: str, shape: tuple[int, ...]) -> None:
    feature_name(path)
    expected = _BOOKKEEPING.get(path)
    if expected is not None and (dtype, shape) != (expected["dtype"], ()):
        raise DataError(f"field '{path}': LeRobot's is {expected['dtype']}, got {dtype}; leave it out with fields=")
    if len(shape) > _MAX_AXES:
        raise DataError(
            f"field '{path}': expected at most {_MAX_AXES} axes, got {len(shape)}; leave it out with fields="
        )


def _statistics_shape(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[-1:] if is_image(dtype, shape) else shape


def to_arrow_column(rows: Array) -> Any:
    """Convert rows to an Arrow array: images become PNGs, other rows numbers or lists of numbers."""
    pa = import_pyarrow()
    if is_image(rows.dtype.name, rows.shape[1:]):
        data = pa.array([encode_png(image) for image in rows], pa.binary())
        return pa.StructArray.from_arrays([data, pa.nulls(len(rows), pa.string())], ["bytes", "path"])
    column = pa.array(np.ascontiguousarray(rows).reshape(-1))
    shape: tuple[int, ...] = rows.shape[1:]
    if shape in ((), (1,)):
        return column
    if len(shape) == 1:
        return pa.FixedSizeListArray.from_arrays(column, shape[0])
    for size in reversed(shape):
        column = pa.ListArray.from_arrays(np.arange(0, len(column) + 1, size, dtype=np.int32), column)
    return column
