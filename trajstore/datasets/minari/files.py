"""The HDF5 file of a Minari dataset: one group an episode."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trajstore.datasets import hdf5
from trajstore.datasets.fields import is_skipped
from trajstore.datasets.images import decoded
from trajstore.datasets.minari.spaces import Part
from trajstore.errors import FormatError
from trajstore.schema import Array, check_name

HEADS = {"observation": "observations", "action": "actions"}  # ours, theirs
ENDS = {"terminations": "terminated", "truncations": "truncated"}
# Attributes of ours: the name of a field that stands among the infos, and metadata that HDF5 has no types for.
FIELD_ATTRIBUTE = "trajstore_field"
METADATA_ATTRIBUTE = "trajstore_metadata"
_EPISODE = re.compile(r"episode_(0|[1-9][0-9]{0,17})\Z")


@dataclass(frozen=True, slots=True)
class Raw:
    """An episode as the files have it.

    Attributes:
        fields: Rows by the path of the field, whole observations included.
        ends: Flags of every step: ``terminated`` and ``truncated``.
        metadata: What else is known, as JSON.
    """

    fields: dict[str, Array]
    ends: dict[str, Array]
    metadata: dict[str, Any]

    @property
    def n_steps(self) -> int:
        return len(self.ends["terminated"])


class Episodes(Protocol):
    """Where the episodes of a dataset are."""

    def keys(self) -> Sequence[str]: ...

    def names(self, key: str) -> Iterator[str]:
        """What can be left out of an episode."""

    def read(self, key: str) -> Raw: ...

    def close(self) -> None: ...


class Hdf5Episodes:
    """Implements `Episodes`."""

    def __init__(
        self, place: Path, parts: Mapping[str, Sequence[Part]], is_jpeg: bool, skip: Collection[str]
    ) -> None:
        self._file = hdf5.opened(place / "main_data.hdf5")
        self._names: dict[str, str] = {}  # theirs to ours
        self._images: dict[str, tuple[int, ...]] = {}  # shapes of those that are encoded
        self._skip = [*skip, *(f"infos{name.removeprefix('info')}" for name in skip if is_skipped(name, ["info"]))]
        self._skip += ["rewards"] if is_skipped("reward", skip) else []
        for head, part in ((head, part) for head, every in parts.items() for part in every):
            name, path = part.path(head), part.path(HEADS[head], "_index_{}")
            if is_skipped(name, skip):
                self._skip.append(path)
                continue
            self._names[path] = name
            if is_jpeg and part.is_image:
                self._images[path] = part.shape or ()

    def keys(self) -> Sequence[str]:
        return sorted(filter(_EPISODE.match, self._file), key=lambda name: int(name.removeprefix("episode_")))

    def names(self, key: str) -> Iterator[str]:
        group = hdf5.child(self._file, key)
        yield from (path for path in hdf5.names(group, self._skip) if path not in ENDS)
        yield from group.attrs

    def read(self, key: str) -> Raw:
        group = hdf5.child(self._file, key)
        found = hdf5.arrays(group, [*self._skip, *self._images, *ENDS])
        ends = {ours: _flags(hdf5.child(group, theirs), theirs) for theirs, ours in ENDS.items()}
        fields = {self._name(path, array): _all(array) for path, array in found.items()}
        for path, shape in self._images.items():
            fields[self._names[path]] = decoded(self._names[path], _encoded(group, path), shape, "JPEG")
        return Raw(fields, ends, _metadata(group, self._skip))

    def close(self) -> None:
        self._file.close()

    def _name(self, path: str, array: Any) -> str:
        """What a field is called here."""
        if path in self._names or path == "rewards":
            return self._names.get(path, "reward")
        if not path.startswith("infos/"):
            raise FormatError(f"{hdf5.place(array)}: expected {', '.join(self._names)} and infos; skip=['{path}']")
        name = array.attrs.get(FIELD_ATTRIBUTE, f"info{path.removeprefix('infos')}")
        return "/".join(check_name(part, "field name") for part in str(name).split("/"))


def _all(array: Any) -> Array:
    return hdf5.rows(array, 0, len(array))


def _flags(array: Any, path: str) -> Array:
    hdf5.check_array(array, path)
    if array.ndim != 1:
        raise FormatError(f"{hdf5.place(array)}: expected one flag a step, got shape {array.shape}")
    return _all(array)


def _encoded(group: Any, path: str) -> Any:
    """Images as bytes, one a step."""
    for name in path.split("/"):
        if not isinstance(group, hdf5.library().Group):
            raise FormatError(f"{hdf5.place(group)}: expected a group, got an array")
        group = hdf5.child(group, name)
    if not isinstance(group, hdf5.library().Dataset) or group.ndim != 1:
        raise FormatError(f"{hdf5.place(group)}: expected one image a step")
    hdf5.check_size(group)
    return group[()]


def _metadata(group: Any, skip: Collection[str]) -> dict[str, Any]:
    known = hdf5.attributes(group, skip)
    text = known.pop(METADATA_ATTRIBUTE, "{}")
    try:
        return {**known, **json.loads(text)}
    except (TypeError, ValueError, RecursionError) as error:
        raise FormatError(f"{hdf5.place(group)}: attribute {METADATA_ATTRIBUTE} is not JSON: {error}") from error
