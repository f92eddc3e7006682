"""Fields of a store as features of a LeRobot dataset, and what is counted of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from trajstore.datasets.arrow_tables import library
from trajstore.datasets.images import encoded
from trajstore.datasets.lerobot.layout import COLUMN_KEY, path_of
from trajstore.datasets.plain import plain, restored
from trajstore.errors import DataError
from trajstore.replay.statistics import RunningStatistics
from trajstore.schema import Array, Field, Schema, nest

_MAX_AXES = 5
_IMAGE_NAMES = ["height", "width", "channels"]
_ONE = {"shape": [1], "names": None}
_BOOKKEEPING = {
    "timestamp": {"dtype": "float32", **_ONE},
    **{name: {"dtype": "int64", **_ONE} for name in ("frame_index", "episode_index", "index", "task_index")},
}


def name_of(path: str) -> str:
    """What a field is called there: groups are told by dots."""
    if "." in path:
        raise DataError(f"field '{path}': LeRobot's dots stand for groups; leave it out with fields=")
    return path.replace("/", ".")


def is_image(dtype: str, shape: tuple[int, ...]) -> bool:
    return dtype == "uint8" and len(shape) == 3 and shape[-1] == 3


class Facts:
    """What holds for all episodes of a dataset.

    Attributes:
        fps: Steps a second.
        robot_type: As it was given.
        names: Of the parts of features, where the dataset that the store is of had any.
        fields: Dtype and shape of fields, by path.
        tasks: Their numbers, in the order they came.
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
            Schema(nest({path: Field(dtype, _counted(dtype, shape)) for path, (dtype, shape) in fields.items()}))
        )

    @staticmethod
    def of(arrays: Mapping[str, Array], options: Mapping[str, Any], metadata: Mapping[str, Any]) -> Facts:
        """Of the first episode.

        Raises:
            DataError: A field has no place there, or the steps a second are not known.
        """
        known = _imported(metadata)
        fps = known.get("fps") if options["fps"] is None else options["fps"]
        if not isinstance(fps, (int, float)) or not fps > 0:
            raise DataError(f"fps: expected how many steps there are in a second, got {fps!r}")
        fields = {path: (rows.dtype.name, rows.shape[1:]) for path, rows in arrays.items()}
        names = {path_of(n): f.get("names") for n, f in known.get("features", {}).items() if isinstance(f, Mapping)}
        for path, (dtype, shape) in fields.items():
            _check(path, dtype, shape)
        return Facts(fps, options["robot_type"] or known.get("robot_type"), names, fields, {})

    def check(self, arrays: Mapping[str, Array]) -> None:
        """Refuse an episode that differs from the first."""
        for path in {**self.fields, **arrays}:
            first = self.fields.get(path)
            now = (arrays[path].dtype.name, arrays[path].shape[1:]) if path in arrays else None
            if first != now:
                raise DataError(f"field '{path}': expected {first} as in the first episode, got {now}")

    def count(self, arrays: Mapping[str, Array]) -> None:
        shapes = {path: _counted(*self.fields[path]) for path in arrays}
        self._statistics.update({path: rows.reshape(-1, *shapes[path]) for path, rows in arrays.items()})

    def features(self) -> dict[str, Any]:
        """As meta/info.json has them."""
        own = {name_of(p): self._feature(p) for p in self.fields if p not in _BOOKKEEPING}
        return own | _BOOKKEEPING

    def _feature(self, path: str) -> dict[str, Any]:
        dtype, shape = self.fields[path]
        if is_image(dtype, shape):
            return {"dtype": "image", "shape": list(shape), "names": _IMAGE_NAMES}
        about = {"dtype": dtype, "shape": list(shape) or [1], "names": self.names.get(path)}
        return about | ({COLUMN_KEY: True} if shape == (1,) else {})

    def statistics(self) -> dict[str, Any]:
        """As meta/stats.json has them: of images by channel, from 0 to 1."""
        return {name_of(path): self._counts(path, found) for path, found in self._statistics.result().items()}

    def _counts(self, path: str, found: Mapping[str, Any]) -> dict[str, Any]:
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
            "statistics": {p: {name: plain(p, a) for name, a in part.items()} for p, part in state.items()},
        }

    @staticmethod
    def from_json(state: Mapping[str, Any]) -> Facts:
        fields = {path: (dtype, tuple(shape)) for path, (dtype, shape) in state["fields"].items()}
        facts = Facts(state["fps"], state["robot_type"], state["names"], fields, dict(state["tasks"]))
        counted = state["statistics"]
        facts._statistics.load_state_dict(
            {p: {n: restored(a) for n, a in part.items()} for p, part in counted.items()}
        )
        return facts


def _imported(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """Facts of the LeRobot dataset that a store was made of."""
    facts = metadata.get("dataset")
    known = facts.get("lerobot") if isinstance(facts, Mapping) else None
    return known if isinstance(known, Mapping) else {}


def _check(path: str, dtype: str, shape: tuple[int, ...]) -> None:
    name_of(path)
    expected = _BOOKKEEPING.get(path)
    if expected is not None and (dtype, shape) != (expected["dtype"], ()):
        raise DataError(
            f"field '{path}': LeRobot has {expected['dtype']} by that name, got {dtype}; leave it out with fields="
        )
    if len(shape) > _MAX_AXES:
        raise DataError(
            f"field '{path}': expected at most {_MAX_AXES} axes, got {len(shape)}; leave it out with fields="
        )


def _counted(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[-1:] if is_image(dtype, shape) else shape


def as_column(rows: Array) -> Any:
    """An Arrow array: images as PNG, others as numbers or lists of them."""
    pa = library()
    if is_image(rows.dtype.name, rows.shape[1:]):
        data = pa.array([encoded(image) for image in rows], pa.binary())
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
