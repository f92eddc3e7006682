"""robomimic's HDF5 files: one group per demonstration.

An export stores what robomimic has no place for as JSON, in an attribute ``trajstore`` of a demonstration or of the
group of all demonstrations.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from trajstore.datasets import hdf5
from trajstore.datasets.episode_comparison import end_name
from trajstore.datasets.field_mapping import FieldMapping
from trajstore.datasets.hdf5_output import Hdf5Output, Hdf5Writer
from trajstore.datasets.interfaces import Episode
from trajstore.datasets.json_values import as_mapping, from_json_value
from trajstore.datasets.skip_names import check_skip
from trajstore.errors import DataError, FormatError
from trajstore.schema import Array, Schema, flatten, nest

FIELD_MAPPING = FieldMapping("obs", "next_obs", {"actions": "action", "rewards": "reward"}, unnamed="flat")
_TRAJSTORE_ATTRIBUTE = "trajstore"
_LENGTH_ATTRIBUTE = "num_samples"


def open_reader(
    path: str | os.PathLike[str], *, skip: Collection[str] = (), keep_next: bool = False
) -> RobomimicReader:
    """Open a file for reading.

    Args:
        path: The file.
        skip: Arrays, groups, masks (``mask/<name>``) and attributes to leave out, by their names in the file.
        keep_next: Keep ``next_obs`` as separate fields, even where they differ from the observations of the
            following step.

    Raises:
        FormatError: It is not a robomimic file, or it is damaged.
        DataError: A store cannot hold something in it.
    """
    file = hdf5.open_file(path)
    try:
        data = hdf5.get_child(file, "data")
        demos = sorted((name for name in data if not FIELD_MAPPING.is_skipped(name, skip)), key=_split_number)
        masks = _read_masks(file, frozenset(data), skip)
        schema = _read_schema(data, demos, skip, keep_next)
        check_skip(file.filename, skip, _iter_skippable_names(file, demos, skip))
    except BaseException:
        file.close()
        raise
    return RobomimicReader(file, schema, demos, masks, skip, keep_next)


def _iter_skippable_names(file: Any, demos: Sequence[str], skip: Collection[str]) -> Iterator[str]:
    """Yield every name that can be left out. Arrays and attributes may exist in some demonstrations only."""
    data = file["data"]
    yield from hdf5.iter_names(hdf5.get_child(data, demos[0]), skip)
    yield from data.attrs
    if hdf5.has_child(file, "mask"):
        yield "mask"
        yield from (f"mask/{name}" for name in (() if "mask" in skip else file["mask"]))
    yield from data
    for demo in demos:
        yield from hdf5.get_child(data, demo).attrs
        yield from hdf5.iter_names(hdf5.get_child(data, demo), skip)


def _split_number(name: str) -> tuple[str, int]:
    """Split a name into text and number, so that ``demo_10`` is sorted after ``demo_9``."""
    match = re.fullmatch(r"(.*?)([0-9]{0,18})", name, re.DOTALL)
    assert match is not None
    return match[1], int(match[2] or -1)


def _read_masks(file: Any, demos: frozenset[str], skip: Collection[str]) -> dict[str, list[str]]:
    """Return the demonstrations that each mask lists."""
    if not hdf5.has_child(file, "mask") or "mask" in skip:
        return {}
    group = hdf5.get_child(file, "mask")
    masks: dict[str, list[str]] = {}
    for name in group:
        if f"mask/{name}" in skip:
            continue
        node = hdf5.get_child(group, name)
        listed = hdf5.read_metadata_value(node, f"mask/{name}")
        if not _is_list_of_names(listed):
            raise FormatError(f"{hdf5.location(node)}: expected names of demonstrations; leave it out with skip")
        if unknown := [demo for demo in listed if demo not in demos]:
            raise FormatError(
                f"{hdf5.location(node)} lists '{unknown[0]}', which does not exist;"
                f" leave it out with skip=['mask/{name}']"
            )
        masks[name] = listed
    return masks


def _read_schema(data: Any, demos: Sequence[str], skip: Collection[str], keep_next: bool) -> Schema:
    if not demos:
        raise FormatError(f"{hdf5.location(data)} holds no demonstrations")
    return FIELD_MAPPING.schema(hdf5.location(data), _step_arrays(data, demos[0], skip), keep_next=keep_next)


def _step_arrays(data: Any, demo: str, skip: Collection[str]) -> dict[str, Any]:
    found = hdf5.step_arrays(hdf5.get_child(data, demo), skip)
    return {path: array for path, array in found.items() if not FIELD_MAPPING.is_skipped(path, skip)}


class RobomimicReader:
    """Reads the demonstrations of a file, in the order of their numbers."""

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
        demo = hdf5.get_child(self._file["data"], key)
        arrays = _step_arrays(self._file["data"], key, self._skip)
        n_steps = _count_steps(demo, arrays)
        rows = {path: hdf5.read_rows(array, 0, n_steps) for path, array in arrays.items()}
        try:
            steps = FIELD_MAPPING.to_store_fields(rows, keep_next=self._keep_next)
        except DataError as error:
            raise DataError(f"{self.display}: {key}: {error}") from error
        exported = _read_trajstore_attribute(demo)
        end = exported.get("end") or _end_from_dones(rows)
        metadata = {**exported.get("metadata", {}), **self._metadata(demo, key)}
        return Episode(key, nest(steps), end == "terminated", end == "truncated", metadata)

    def _metadata(self, demo: Any, key: str) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        if attributes := hdf5.read_attributes(demo, {*self._skip, _LENGTH_ATTRIBUTE, _TRAJSTORE_ATTRIBUTE}):
            metadata["attributes"] = attributes
        if masks := [name for name, listed in self._masks.items() if key in listed]:
            metadata["masks"] = masks
        if key == self._demos[0]:
            metadata["dataset"] = self._dataset_facts()
        return metadata

    def _dataset_facts(self) -> dict[str, Any]:
        data = self._file["data"]
        attributes = hdf5.read_attributes(data, {*self._skip, "total", _TRAJSTORE_ATTRIBUTE})
        return {**_read_trajstore_attribute(data), "attributes": attributes, "masks": list(self._masks)}

    def close(self) -> None:
        self._file.close()


def _count_steps(demo: Any, arrays: Mapping[str, Any]) -> int:
    n_steps = demo.attrs.get(_LENGTH_ATTRIBUTE, len(next(iter(arrays.values()), ())))
    if not isinstance(n_steps, (int, np.integer)):
        raise FormatError(
            f"{hdf5.location(demo)}: attribute '{_LENGTH_ATTRIBUTE}': expected a number, got {n_steps!r:.60}"
        )
    hdf5.check_row_counts(arrays, int(n_steps))
    return int(n_steps)


def _end_from_dones(rows: Mapping[str, Array]) -> str:
    """Return the end that ``dones`` states.

    Like robomimic's algorithms, this treats a step that is done as the last one.
    """
    dones = rows.get("dones")
    return "terminated" if dones is not None and len(dones) and np.any(dones[-1]) else "cut"


def _read_trajstore_attribute(node: Any) -> dict[str, Any]:
    text = node.attrs.get(_TRAJSTORE_ATTRIBUTE)
    if text is None:
        return {}
    try:
        exported = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise FormatError(
            f"{hdf5.location(node)}: attribute '{_TRAJSTORE_ATTRIBUTE}' is not JSON: {error}"
        ) from error
    if not isinstance(exported, dict) or not isinstance(exported.get("metadata", {}), dict):
        raise FormatError(
            f"{hdf5.location(node)}: attribute '{_TRAJSTORE_ATTRIBUTE}' is not in the form that an export writes"
        )
    return exported


def open_writer(path: str | os.PathLike[str]) -> RobomimicWriter:
    """Start a file, or continue an unfinished one."""
    return RobomimicWriter(Hdf5Output.begin(path, "robomimic"))


class RobomimicWriter(Hdf5Writer):
    """Writes a file. The episodes become ``demo_0``, ``demo_1`` and so on."""

    def write(self, episode: Episode) -> None:
        arrays = FIELD_MAPPING.to_dataset_arrays(flatten(episode.steps))
        n_steps = len(next(iter(arrays.values())))
        if "dones" not in arrays:
            arrays["dones"] = np.zeros(n_steps, np.int64)
            arrays["dones"][-1] = episode.terminated
        is_first = not len(self._episodes)
        self._episodes.write(episode.key, lambda group: _write_group(group, episode, arrays, n_steps, is_first))

    def _join(self, whole: Any) -> None:
        data, total = whole.create_group("data"), 0
        masks: dict[str, list[str]] = {}
        for i, episode in enumerate(self._episodes):
            episode.copy(episode["demo"], data, name=f"demo_{i}")
            total += int(episode["demo"].attrs[_LENGTH_ATTRIBUTE])
            about = json.loads(episode.attrs["about"])
            _write_dataset_facts(data, about["dataset"])
            known = about["dataset"].get("masks")
            for name in (*(known if _is_list_of_names(known) else ()), *about["masks"]):
                masks.setdefault(name, [])
            for name in about["masks"]:
                masks[name].append(f"demo_{i}")
        data.attrs["total"] = total
        for name, demos in masks.items():
            whole[f"mask/{name}"] = np.array(demos, "S")


def _write_group(group: Any, episode: Episode, arrays: Mapping[str, Array], n_steps: int, is_first: bool) -> None:
    metadata = dict(episode.metadata)
    facts = _pop_mapping(metadata, "dataset") if is_first else {}
    masks = metadata.pop("masks") if _is_list_of_names(metadata.get("masks")) else []
    group.attrs["about"] = json.dumps({"dataset": facts, "masks": masks})
    demo = group.create_group("demo")
    _write_attributes(demo, _pop_mapping(metadata, "attributes"))
    demo.attrs[_LENGTH_ATTRIBUTE] = n_steps
    demo.attrs[_TRAJSTORE_ATTRIBUTE] = json.dumps({"end": end_name(episode), "metadata": metadata})
    for path, values in arrays.items():
        demo[path] = values


def _pop_mapping(metadata: dict[str, Any], name: str) -> dict[str, Any]:
    """Remove and return a mapping that an import made; anything else stays in the metadata."""
    return as_mapping(metadata.pop(name)) if isinstance(metadata.get(name), Mapping) else {}


def _write_dataset_facts(data: Any, facts: Mapping[str, Any]) -> None:
    """Write the attributes of the group of all demonstrations."""
    _write_attributes(data, as_mapping(facts.get("attributes")))
    if others := {name: value for name, value in facts.items() if name not in ("attributes", "masks")}:
        data.attrs[_TRAJSTORE_ATTRIBUTE] = json.dumps(others)


def _write_attributes(node: Any, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        try:
            node.attrs[name] = from_json_value(value)
        except (TypeError, ValueError) as error:
            raise DataError(f"attribute '{name}': HDF5 can't hold {value!r:.60}: {error}") from error


def _is_list_of_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)
