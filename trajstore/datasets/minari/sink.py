"""Stores as Minari datasets, in HDF5."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trajstore.datasets import hdf5
from trajstore.datasets.fields import length_of, readable_arrays
from trajstore.datasets.minari.files import FIELD_ATTRIBUTE, HEADS, METADATA_ATTRIBUTE
from trajstore.datasets.minari.spaces import derived, parse
from trajstore.datasets.plain import restored
from trajstore.datasets.ports import Episode, without_end
from trajstore.datasets.unfinished import Unfinished, emptied
from trajstore.errors import DataError
from trajstore.schema import Array
from trajstore.storage.atomic_files import sync_file

_VERSION = "0.5.4"  # of the layout; the first that may keep images as they are
_ID = re.compile(r"([-_\w][-_\w/]*[-_\w]+/)?[-_\w]+?-v\d+\Z")
Json = str | Mapping[str, Any] | None  # as text, or what it stands for
_SPACES = {head: f"{head}_space" for head in HEADS}
_GIVEN = (*_SPACES.values(), "env_spec")


def open_sink(
    path: str | os.PathLike[str],
    *,
    dataset_id: str | None = None,
    observation_space: Json = None,
    action_space: Json = None,
    env_spec: Json = None,
    drop_last: bool = False,
) -> MinariSink:
    """Begin a dataset, or go on with one that was not finished.

    Args:
        path: Its directory. For ``minari.load_dataset`` to find it, that is the id below Minari's root.
        dataset_id: ``name-v0``, or with a namespace ``group/name-v0``; by default the name of the directory.
        observation_space: What ``minari.serialization.serialize_space`` makes of the space. By default that of
            the dataset that the store was imported from, or the widest that the fields allow.
        action_space: The same, of actions.
        env_spec: What ``EnvSpec.to_json`` makes of the environment's.
        drop_last: Leave out the last step of episodes that have no final observation. Otherwise they are refused.
    """
    name = Path(path).name if dataset_id is None else dataset_id
    if not _ID.match(name):
        raise DataError(f"dataset_id: expected a name such as 'walker-v0' or 'group/walker-v0', got {name!r}")
    texts = {"observation_space": observation_space, "action_space": action_space, "env_spec": env_spec}
    given = {k: json.dumps(v) if isinstance(v, Mapping) else v for k, v in texts.items()}
    for space in _SPACES.values():
        if given[space] is not None:
            parse(given[space], space)
    about = {"format": "minari", "dataset_id": name, "drop_last": drop_last, **given}
    hdf5.library()
    return MinariSink(Unfinished.begin(path, about), about)


class MinariSink:
    """Episodes in files of their own, until all are there.

    A process that dies while it writes an HDF5 file may leave one that nobody can open.
    """

    def __init__(self, unfinished: Unfinished, options: Mapping[str, Any]) -> None:
        self._unfinished = unfinished
        self._options = options
        self._places: dict[str, str] = {}
        self._parts = unfinished.place / "parts"
        self._parts.mkdir(exist_ok=True)

    @property
    def display(self) -> str:
        return str(self._unfinished.target)

    def done(self) -> Sequence[str]:
        return [record["key"] for record in self._unfinished.records]

    def kept(self, episode: Episode) -> Episode:
        """All of it, or all but its last step, of which the observation becomes the final one."""
        arrays = readable_arrays(episode.steps)
        _check_fields(arrays)
        if _has_final(arrays):
            return episode
        n_steps = length_of(arrays)
        if not self._options["drop_last"]:
            raise DataError(
                "there is no final observation; drop_last=True leaves out the last step of such episodes"
            )
        if n_steps < 2:
            raise DataError("its one step has no final observation, so that nothing is left of it; use where=")
        steps = {path: a[: n_steps - (_head(path) != "observation")] for path, a in arrays.items()}
        return without_end(episode, steps)

    def write(self, episode: Episode) -> None:
        records, episode = self._unfinished.records, self.kept(episode)
        arrays = readable_arrays(episode.steps)
        facts = records[0]["facts"] if records else self._facts(arrays, episode.metadata)
        if self._places.keys() != arrays.keys():  # spaces of images are long
            self._places = _places(facts, arrays)
        n_steps = len(arrays["reward"])
        with hdf5.library().File(self._part(len(records)), "w") as file:
            group = file.create_group(f"episode_{len(records)}", track_order=True)
            _put_arrays(group, arrays, self._places)
            _put_ends(group, episode, n_steps)
            _put_metadata(group, {**episode.metadata, "id": len(records), "total_steps": n_steps})
        sync_file(self._part(len(records)))
        self._unfinished.note([{"key": episode.key, "n_steps": n_steps, **({} if records else {"facts": facts})}])

    def finish(self) -> None:
        records = self._unfinished.records
        if not records:
            raise DataError(f"{self.display}: there are no episodes to write")
        data = emptied(self._unfinished.place / "whole") / "data"
        data.mkdir()
        with hdf5.library().File(data / "main_data.hdf5", "w", track_order=True) as whole:
            for i in range(len(records)):
                with hdf5.library().File(self._part(i), "r") as part:
                    part.copy(f"episode_{i}", whole)
        about = {
            **records[0]["facts"],
            "total_episodes": len(records),
            "total_steps": sum(record["n_steps"] for record in records),
            "dataset_size": round((data / "main_data.hdf5").stat().st_size / 1e6, 1),
        }
        (data / "metadata.json").write_text(json.dumps(about))
        self._unfinished.publish_directory("whole")

    def abandon(self) -> None:
        self._unfinished.abandon()  # every episode that was written is on disk

    def _part(self, i: int) -> Path:
        return self._parts / f"{i:08d}.hdf5"

    def _facts(self, arrays: Mapping[str, Array], metadata: Mapping[str, Any]) -> dict[str, Any]:
        """What holds for the dataset: given, or known of the one that was imported, or read off the data."""
        known = _imported(metadata)
        given = {name: self._options[name] for name in _GIVEN if self._options[name] is not None}
        spaces = {name: known.get(name) or derived(arrays, head) for head, name in _SPACES.items()}
        spaces |= {n: derived(arrays, head) for head, n in _SPACES.items() if not _is_of(spaces[n], head, arrays)}
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


def _imported(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Facts of the Minari dataset that a store was made of."""
    facts = metadata.get("dataset")
    known = facts.get("minari") if isinstance(facts, Mapping) else None
    return dict(known) if isinstance(known, Mapping) else {}


def _is_of(space: str, head: str, arrays: Mapping[str, Array]) -> bool:
    """Whether a space has these fields."""
    paths = [part.path(head) for part in parse(space, f"{head}_space")]
    return sorted(paths) == sorted(path for path in arrays if _head(path) == head)


def _places(facts: Mapping[str, Any], arrays: Mapping[str, Array]) -> dict[str, str]:
    """Where our fields stand: as their spaces say, and all others among the infos."""
    places = {path: f"infos/{path.removeprefix('info/')}" for path in arrays} | {"reward": "rewards"}
    for head, name in _SPACES.items():
        if not _is_of(facts[name], head, arrays):
            raise DataError(f"{name} has other parts than the fields: {facts[name]:.200}")
        places |= {part.path(head): part.path(HEADS[head], "_index_{}") for part in parse(facts[name], name)}
    if len(set(places.values())) < len(places):
        raise DataError(f"several fields would have one name there: {', '.join(sorted(places.values()))}")
    return places


def _put_arrays(group: Any, arrays: Mapping[str, Array], places: Mapping[str, str]) -> None:
    for path, rows in arrays.items():
        # Minari appends to arrays that can grow.
        array = group.create_dataset(places[path], data=rows, chunks=True, maxshape=(None, *rows.shape[1:]))
        if places[path].startswith("infos/") and _head(path) != "info":
            array.attrs[FIELD_ATTRIBUTE] = path


def _put_ends(group: Any, episode: Episode, n_steps: int) -> None:
    is_truncated = episode.truncated or episode.metadata.get("truncated") is True
    for name, is_set in (("terminations", episode.terminated), ("truncations", is_truncated)):
        flags = np.zeros(n_steps, bool)
        flags[-1] = is_set
        group.create_dataset(name, data=flags, chunks=True, maxshape=(None,))


def _put_metadata(group: Any, metadata: Mapping[str, Any]) -> None:
    """Numbers and text as attributes, anything else as JSON in one of them."""
    exact = {name: restored(value) for name, value in metadata.items() if name not in ("dataset", "truncated")}
    plain = {
        k: v for k, v in exact.items() if isinstance(v, (bool, int, float, str, np.ndarray)) and not _has_nul(v)
    }
    if others := {name: metadata[name] for name in exact if name not in plain}:
        plain[METADATA_ATTRIBUTE] = json.dumps(others)
    for name, value in plain.items():
        try:
            group.attrs[name] = value
        except (OSError, RuntimeError, TypeError, ValueError, OverflowError) as error:
            raise DataError(f"metadata '{name}' can't be an attribute of HDF5: {error}") from error


def _has_nul(value: Any) -> bool:
    """Whether it is text that HDF5 would cut off."""
    return isinstance(value, str) and "\0" in value
