"""robomimic's HDF5 files: a group for every demonstration.

What robomimic has no place for stands in an attribute `trajstore` of a demonstration, or of all of them, as JSON.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from trajstore.datasets import hdf5
from trajstore.datasets.comparing import end_of
from trajstore.datasets.field_names import Layout
from trajstore.datasets.fields import check_skip
from trajstore.datasets.plain import mapping, restored
from trajstore.datasets.ports import Episode
from trajstore.errors import DataError, FormatError
from trajstore.schema import Array, Schema, flatten, nest

LAYOUT = Layout("obs", "next_obs", {"actions": "action", "rewards": "reward"}, alone="flat")
_OURS = "trajstore"
_LENGTH = "num_samples"


def open_source(
    path: str | os.PathLike[str], *, skip: Collection[str] = (), keep_next: bool = False
) -> RobomimicSource:
    """Open a file to read.

    Args:
        path: Of the file.
        skip: Arrays, groups, masks (``mask/<name>``) and attributes to leave out, as they are called in the file.
        keep_next: Keep ``next_obs`` as fields of their own, also where they are not what comes next.

    Raises:
        FormatError: It is no file of robomimic's, or damaged.
        DataError: Something in it can't be stored.
    """
    file = hdf5.opened(path)
    try:
        data = hdf5.child(file, "data")
        demos = sorted((name for name in data if not _is_skipped(name, skip)), key=_by_number)
        masks = _masks(file, frozenset(data), skip)
        schema = _schema(data, demos, skip, keep_next)
        check_skip(file.filename, skip, _names(file, demos, skip))
    except BaseException:
        file.close()
        raise
    return RobomimicSource(file, schema, demos, masks, skip, keep_next)


def _names(file: Any, demos: Sequence[str], skip: Collection[str]) -> Iterator[str]:
    """What can be left out; arrays and attributes may be in some demonstrations only."""
    data = file["data"]
    yield from hdf5.names(hdf5.child(data, demos[0]), skip)
    yield from data.attrs
    if hdf5.has(file, "mask"):
        yield "mask"
        yield from (f"mask/{name}" for name in (() if "mask" in skip else file["mask"]))
    yield from data
    for demo in demos:
        yield from hdf5.child(data, demo).attrs
        yield from hdf5.names(hdf5.child(data, demo), skip)


def _is_skipped(path: str, skip: Collection[str]) -> bool:
    return LAYOUT.is_skipped(path, skip)


def _by_number(name: str) -> tuple[str, int]:
    match = re.fullmatch(r"(.*?)([0-9]{0,18})", name, re.DOTALL)
    assert match is not None
    return match[1], int(match[2] or -1)


def _masks(file: Any, demos: frozenset[str], skip: Collection[str]) -> dict[str, list[str]]:
    """By name of a mask, the demonstrations it lists."""
    if not hdf5.has(file, "mask") or "mask" in skip:
        return {}
    group = hdf5.child(file, "mask")
    masks: dict[str, list[str]] = {}
    for name in group:
        if f"mask/{name}" in skip:
            continue
        node = hdf5.child(group, name)
        listed = hdf5.small_value(node, f"mask/{name}")
        if not _are_names(listed):
            raise FormatError(f"{hdf5.place(node)}: expected names of demonstrations; leave it out with skip")
        if unknown := [demo for demo in listed if demo not in demos]:
            raise FormatError(
                f"{hdf5.place(node)} lists '{unknown[0]}', which is not there;"
                f" leave it out with skip=['mask/{name}']"
            )
        masks[name] = listed
    return masks


def _schema(data: Any, demos: Sequence[str], skip: Collection[str], keep_next: bool) -> Schema:
    if not demos:
        raise FormatError(f"{hdf5.place(data)} holds no demonstrations")
    return LAYOUT.schema(hdf5.place(data), _arrays(data, demos[0], skip), keep_next=keep_next)


def _arrays(data: Any, demo: str, skip: Collection[str]) -> dict[str, Any]:
    found = hdf5.arrays(hdf5.child(data, demo), skip)
    return {path: array for path, array in found.items() if not _is_skipped(path, skip)}


class RobomimicSource:
    """The demonstrations of a file, in the order of their numbers."""

    def __init__(
        self,
        file: Any,
        schema: Schema,
        demos: Sequence[str],
        masks: Mapping[str, Sequence[str]],
        skip: Collection[str],
        keep_next: bool,
    ) -> None:
        self.schema = schema
        self.display = str(file.filename)
        self._file = file
        self._demos = list(demos)
        self._masks = {name: frozenset(listed) for name, listed in masks.items()}
        self._skip = skip
        self._keep_next = keep_next

    def keys(self) -> Sequence[str]:
        return self._demos

    def read(self, key: str) -> Episode:
        demo = hdf5.child(self._file["data"], key)
        arrays = _arrays(self._file["data"], key, self._skip)
        n_steps = _n_steps(demo, arrays)
        rows = {path: hdf5.rows(array, 0, n_steps) for path, array in arrays.items()}
        try:
            steps = LAYOUT.joined(rows, keep_next=self._keep_next)
        except DataError as error:
            raise DataError(f"{self.display}: {key}: {error}") from error
        ours = _own_attribute(demo)
        end = ours.get("end") or _end(rows)
        metadata = {**ours.get("metadata", {}), **self._metadata(demo, key)}
        return Episode(key, nest(steps), end == "terminated", end == "truncated", metadata)

    def _metadata(self, demo: Any, key: str) -> dict[str, Any]:
        about: dict[str, Any] = {}
        if own := hdf5.attributes(demo, {*self._skip, _LENGTH, _OURS}):
            about["attributes"] = own
        if masks := [name for name, listed in self._masks.items() if key in listed]:
            about["masks"] = masks
        if key == self._demos[0]:
            about["dataset"] = self._facts()
        return about

    def _facts(self) -> dict[str, Any]:
        data = self._file["data"]
        own = hdf5.attributes(data, {*self._skip, "total", _OURS})
        return {**_own_attribute(data), "attributes": own, "masks": list(self._masks)}

    def close(self) -> None:
        self._file.close()


def _n_steps(demo: Any, arrays: Mapping[str, Any]) -> int:
    n_steps = demo.attrs.get(_LENGTH, len(next(iter(arrays.values()), ())))
    if not isinstance(n_steps, (int, np.integer)):
        raise FormatError(f"{hdf5.place(demo)}: attribute '{_LENGTH}': expected a number, got {n_steps!r:.60}")
    for path, array in arrays.items():
        if len(array) != n_steps:
            raise DataError(
                f"{hdf5.place(array)}: expected {n_steps} rows, one a step, got {len(array)};"
                f" leave it out with skip=['{path}']"
            )
    return int(n_steps)


def _end(rows: Mapping[str, Array]) -> str:
    """As robomimic's own algorithms take it: nothing comes after a step that is done."""
    dones = rows.get("dones")
    return "terminated" if dones is not None and len(dones) and np.any(dones[-1]) else "cut"


def _own_attribute(node: Any) -> dict[str, Any]:
    text = node.attrs.get(_OURS)
    if text is None:
        return {}
    try:
        own = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise FormatError(f"{hdf5.place(node)}: attribute '{_OURS}' is not JSON: {error}") from error
    if not isinstance(own, dict) or not isinstance(own.get("metadata", {}), dict):
        raise FormatError(f"{hdf5.place(node)}: attribute '{_OURS}' is not as an export writes it")
    return own


def open_sink(path: str | os.PathLike[str]) -> RobomimicSink:
    """Begin a file, or go on with one that is not finished."""
    return RobomimicSink(hdf5.Parts.begin(path, "robomimic"))


class RobomimicSink:
    """A file on its way; episodes become ``demo_0`` and so on."""

    def __init__(self, parts: hdf5.Parts) -> None:
        self._parts = parts

    @property
    def display(self) -> str:
        return self._parts.display

    def done(self) -> Sequence[str]:
        return self._parts.done()

    def kept(self, episode: Episode) -> Episode:
        return episode

    def write(self, episode: Episode) -> None:
        arrays = LAYOUT.split(flatten(episode.steps))
        n_steps = len(next(iter(arrays.values())))
        if "dones" not in arrays:
            arrays["dones"] = np.zeros(n_steps, np.int64)
            arrays["dones"][-1] = episode.terminated
        is_first = not len(self._parts)
        self._parts.write(episode.key, lambda group: _fill(group, episode, arrays, n_steps, is_first))

    def finish(self) -> None:
        self._parts.finish(self._join)

    def _join(self, whole: Any) -> None:
        data, total = whole.create_group("data"), 0
        masks: dict[str, list[str]] = {}
        for i, episode in enumerate(self._parts):
            episode.copy(episode["demo"], data, name=f"demo_{i}")
            total += int(episode["demo"].attrs[_LENGTH])
            about = json.loads(episode.attrs["about"])
            _describe(data, about["dataset"])
            known = about["dataset"].get("masks")
            for name in (*(known if _are_names(known) else ()), *about["masks"]):
                masks.setdefault(name, [])
            for name in about["masks"]:
                masks[name].append(f"demo_{i}")
        data.attrs["total"] = total
        for name, demos in masks.items():
            whole[f"mask/{name}"] = np.array(demos, "S")

    def abandon(self) -> None:
        self._parts.abandon()


def _fill(group: Any, episode: Episode, arrays: Mapping[str, Array], n_steps: int, is_first: bool) -> None:
    metadata = dict(episode.metadata)
    facts = _taken(metadata, "dataset") if is_first else {}
    masks = metadata.pop("masks") if _are_names(metadata.get("masks")) else []
    group.attrs["about"] = json.dumps({"dataset": facts, "masks": masks})
    demo = group.create_group("demo")
    _put_attributes(demo, _taken(metadata, "attributes"))
    demo.attrs[_LENGTH] = n_steps
    demo.attrs[_OURS] = json.dumps({"end": end_of(episode), "metadata": metadata})
    for path, values in arrays.items():
        demo[path] = values


def _taken(metadata: dict[str, Any], name: str) -> dict[str, Any]:
    """Metadata that robomimic has a place for, if they are what an import makes of them."""
    return mapping(metadata.pop(name)) if isinstance(metadata.get(name), Mapping) else {}


def _describe(data: Any, facts: Mapping[str, Any]) -> None:
    """Write what holds for all demonstrations."""
    _put_attributes(data, mapping(facts.get("attributes")))
    if more := {name: value for name, value in facts.items() if name not in ("attributes", "masks")}:
        data.attrs[_OURS] = json.dumps(more)


def _put_attributes(node: Any, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        try:
            node.attrs[name] = restored(value)
        except (TypeError, ValueError) as error:
            raise DataError(f"attribute '{name}': HDF5 can't hold {value!r:.60}: {error}") from error


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)
