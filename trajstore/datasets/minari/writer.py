"""Write Minari datasets in HDF5."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trajstore.datasets import hdf5
from trajstore.datasets.episode_arrays import count_steps, readable_arrays
from trajstore.datasets.interfaces import Episode, cut_before_end
from trajstore.datasets.json_values import from_json_value
from trajstore.datasets.minari.hdf5_episodes import FIELD_ATTRIBUTE, METADATA_ATTRIBUTE
from trajstore.datasets.minari.raw_episodes import HEADS
from trajstore.datasets.minari.spaces import parse_space, widest_space
from trajstore.datasets.partial_output import PartialOutput, make_empty_directory
from trajstore.errors import DataError
from trajstore.schema import Array
from trajstore.storage.atomic_files import sync_file

_VERSION = "0.5.4"  # of Minari; the first whose datasets may hold images without encoding
_ID = re.compile(r"([-_\w][-_\w/]*[-_\w]+/)?[-_\w]+?-v\d+\Z")
Json = str | Mapping[str, Any] | None  # JSON text, or the object
_SPACES = {head: f"{head}_space" for head in HEADS}
_JSON_OPTIONS = (*_SPACES.values(), "env_spec")


def open_writer(
    path: str | os.PathLike[str],
    *,
    dataset_id: str | None = None,
    observation_space: Json = None,
    action_space: Json = None,
    env_spec: Json = None,
    drop_last: bool = False,
) -> MinariWriter:
    """Start a dataset, or continue an unfinished one.

    Args:
        path: Its directory. ``minari.load_dataset`` only finds it at ``<Minari's root>/<dataset_id>``.
        dataset_id: ``name-v0``, or ``group/name-v0`` with a namespace. By default the name of the directory.
        observation_space: The result of ``minari.serialization.serialize_space``. By default the space of the
            dataset that the store was imported from, or else the widest space that holds the fields.
        action_space: The same for actions.
        env_spec: The result of ``EnvSpec.to_json``. By default that of the dataset that the store came from.
        drop_last: Leave out the last step of episodes without a final observation. Otherwise they are refused.

    Raises:
        DataError: The dataset id is malformed.
        FormatError: A space is malformed.
    """
    name = Path(path).name if dataset_id is None else dataset_id
    if not _ID.match(name):
        raise DataError(f"dataset_id: expected a name such as 'walker-v0' or 'group/walker-v0', got {name!r}")
    texts = {"observation_space": observation_space, "action_space": action_space, "env_spec": env_spec}
    given = {k: json.dumps(v) if isinstance(v, Mapping) else v for k, v in texts.items()}
    for space in _SPACES.values():
        if given[space] is not None:
            parse_space(given[space], space)
    about = {"format": "minari", "dataset_id": name, "drop_last": drop_last, **given}
    hdf5.import_h5py()
    return MinariWriter(PartialOutput.begin(path, about), about)


class MinariWriter:
    """Writes each episode to a separate HDF5 file, and joins the files at the end.

    A process that dies while it writes an HDF5 file may leave a file that cannot be opened.
    """

    def __init__(self, output: PartialOutput, options: Mapping[str, Any]) -> None:
        self._output = output
        self._options = options
        self._array_names: dict[str, str] = {}
        self._episode_files = output.directory / "parts"
        self._episode_files.mkdir(exist_ok=True)

    @property
    def display(self) -> str:
        return str(self._output.target)

    def written_keys(self) -> Sequence[str]:
        return [record["key"] for record in self._output.records]

    def trim(self, episode: Episode) -> Episode:
        """Return the episode, or if it has no final observation, the episode without its last step.

        The observation of the dropped step becomes the final observation.
        """
        arrays = readable_arrays(episode.steps)
        _check_fields(arrays)
        if _has_final(arrays):
            return episode
        n_steps = count_steps(arrays)
        if not self._options["drop_last"]:
            raise DataError(
                "the episode has no final observation; drop_last=True leaves out the last step of such episodes"
            )
        if n_steps < 2:
            raise DataError("the episode's only step has no final observation; leave the episode out with where=")
        steps = {path: a[: n_steps - (_head(path) != "observation")] for path, a in arrays.items()}
        return cut_before_end(episode, steps)

    def write(self, episode: Episode) -> None:
        records, episode = self._output.records, self.trim(episode)
        arrays = readable_arrays(episode.steps)
        facts = records[0]["facts"] if records else self._make_facts(arrays, episode.metadata)
        if self._array_names.keys() != arrays.keys():  # parsing the spaces of images takes long
            self._array_names = _array_names(facts, arrays)
        n_steps = len(arrays["reward"])
        with hdf5.import_h5py().File(self._episode_file(len(records)), "w") as file:
            group = file.create_group(f"episode_{len(records)}", track_order=True)
            _write_arrays(group, arrays, self._array_names)
            _write_ends(group, episode, n_steps)
            _write_metadata(group, {**episode.metadata, "id": len(records), "total_steps": n_steps})
        sync_file(self._episode_file(len(records)))
        self._output.add_records(
            [{"key": episode.key, "n_steps": n_steps, **({} if records else {"facts": facts})}]
        )

    def finish(self) -> None:
        records = self._output.records
        if not records:
            raise DataError(f"{self.display}: no episodes to write")
        data = make_empty_directory(self._output.directory / "whole") / "data"
        data.mkdir()
        with hdf5.import_h5py().File(data / "main_data.hdf5", "w", track_order=True) as whole:
            for i in range(len(records)):
                with hdf5.import_h5py().File(self._episode_file(i), "r") as file:
                    file.copy(f"episode_{i}", whole)
        about = {
            **records[0]["facts"],
            "total_episodes": len(records),
            "total_steps": sum(record["n_steps"] for record in records),
            "dataset_size": round((data / "main_data.hdf5").stat().st_size / 1e6, 1),
        }
        (data / "metadata.json").write_text(json.dumps(about))
        self._output.publish_directory("whole")

    def suspend(self) -> None:
        self._output.suspend()  # every written episode is already on disk

    def _episode_file(self, i: int) -> Path:
        return self._episode_files / f"{i:08d}.hdf5"

    def _make_facts(self, arrays: Mapping[str, Array], metadata: Mapping[str, Any]) -> dict[str, Any]:
        """Return the contents of metadata.json: from options, else the imported dataset, else the data."""
        known = _imported_facts(metadata)
        given = {name: self._options[name] for name in _JSON_OPTIONS if self._options[name] is not None}
        spaces = {name: known.get(name) or widest_space(arrays, head) for head, name in _SPACES.items()}
        spaces |= {
            n: widest_space(arrays, head)
            for head, n in _SPACES.items()
            if not _space_has_fields(spaces[n], head, arrays)
        }
        own = {"data_format": "hdf5", "jpeg_encoding": False, "minari_version": _VERSION}
        return {**known, **spaces, **given, **own, "dataset_id": self._options["dataset_id"]}


def _head(path: str) -> str:
    return path.partition("/")[0]


def _check_fields(arrays: Mapping[str, Array]) -> None:
    missing = {*HEADS, "reward"} - {_head(path) for path in arrays}
    if missing or "reward" not in arrays:
        raise DataError(f"expected fields observation, action and reward, got {', '.join(arrays)}")


def _has_final(arrays: Mapping[str, Array]) -> bool:
    return all(len(rows) > len(arrays["reward"]) for path, rows in arrays.items() if _head(path) == "observation")


def _imported_facts(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of the Minari dataset that the store was imported from, if any."""
    facts = metadata.get("dataset")
    known = facts.get("minari") if isinstance(facts, Mapping) else None
    return dict(known) if isinstance(known, Mapping) else {}


def _space_has_fields(space: str, head: str, arrays: Mapping[str, Array]) -> bool:
    """Return whether the leaves of a space are exactly the fields of a group."""
    paths = [leaf.path(head) for leaf in parse_space(space, f"{head}_space")]
    return sorted(paths) == sorted(path for path in arrays if _head(path) == head)


def _array_names(facts: Mapping[str, Any], arrays: Mapping[str, Array]) -> dict[str, str]:
    """Return the name of each field in the file: from its space, or among the infos."""
    names = {path: f"infos/{path.removeprefix('info/')}" for path in arrays} | {"reward": "rewards"}
    for head, name in _SPACES.items():
        if not _space_has_fields(facts[name], head, arrays):
            raise DataError(f"{name} does not have the same parts as the fields: {facts[name]:.200}")
        names |= {leaf.path(head): leaf.path(HEADS[head], "_index_{}") for leaf in parse_space(facts[name], name)}
    if len(set(names.values())) < len(names):
        raise DataError(f"several fields would have the same name there: {', '.join(sorted(names.values()))}")
    return names


def _write_arrays(group: Any, arrays: Mapping[str, Array], names: Mapping[str, str]) -> None:
    for path, rows in arrays.items():
        # Minari appends to these arrays, so they must be resizable.
        array = group.create_dataset(names[path], data=rows, chunks=True, maxshape=(None, *rows.shape[1:]))
        if names[path].startswith("infos/") and _head(path) != "info":
            array.attrs[FIELD_ATTRIBUTE] = path


def _write_ends(group: Any, episode: Episode, n_steps: int) -> None:
    is_truncated = episode.truncated or episode.metadata.get("truncated") is True
    for name, is_set in (("terminations", episode.terminated), ("truncations", is_truncated)):
        flags = np.zeros(n_steps, bool)
        flags[-1] = is_set
        group.create_dataset(name, data=flags, chunks=True, maxshape=(None,))


def _write_metadata(group: Any, metadata: Mapping[str, Any]) -> None:
    """Write numbers and text as attributes, and everything else as JSON in one attribute."""
    exact = {
        name: from_json_value(value) for name, value in metadata.items() if name not in ("dataset", "truncated")
    }
    plain = {
        k: v for k, v in exact.items() if isinstance(v, (bool, int, float, str, np.ndarray)) and not _has_nul(v)
    }
    if others := {name: metadata[name] for name in exact if name not in plain}:
        plain[METADATA_ATTRIBUTE] = json.dumps(others)
    for name, value in plain.items():
        try:
            group.attrs[name] = value
        except (OSError, RuntimeError, TypeError, ValueError, OverflowError) as error:
            raise DataError(f"metadata '{name}' can't be stored as an HDF5 attribute: {error}") from error


def _has_nul(value: Any) -> bool:
    """Return whether a value is text that HDF5 would cut off at a NUL."""
    return isinstance(value, str) and "\0" in value
