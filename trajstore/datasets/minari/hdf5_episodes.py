"""Read the HDF5 file of a Minari dataset: one group per episode."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trajstore.datasets import hdf5
from trajstore.datasets.images import decode_images
from trajstore.datasets.minari.raw_episodes import ENDS, HEADS, RawEpisode
from trajstore.datasets.minari.spaces import SpaceLeaf
from trajstore.datasets.skip_names import is_skipped
from trajstore.errors import FormatError
from trajstore.schema import Array, check_name

# Attributes that an export adds: the path of a field stored among the infos, and metadata without an HDF5 type.
FIELD_ATTRIBUTE = "trajstore_field"
METADATA_ATTRIBUTE = "trajstore_metadata"
_EPISODE = re.compile(r"episode_(0|[1-9][0-9]{0,17})\Z")


class Hdf5Episodes:
    """Implements `MinariEpisodes`."""

    def __init__(
        self, place: Path, leaves: Mapping[str, Sequence[SpaceLeaf]], is_jpeg: bool, skip: Collection[str]
    ) -> None:
        self._file = hdf5.open_file(place / "main_data.hdf5")
        self._store_paths: dict[str, str] = {}  # by path in the file
        self._image_shapes: dict[str, tuple[int, ...]] = {}  # of encoded images, by path in the file
        self._skip = [*skip, *(f"infos{name.removeprefix('info')}" for name in skip if is_skipped(name, ["info"]))]
        self._skip += ["rewards"] if is_skipped("reward", skip) else []
        for head, leaf in ((head, leaf) for head, every in leaves.items() for leaf in every):
            name, path = leaf.path(head), leaf.path(HEADS[head], "_index_{}")
            if is_skipped(name, skip):
                self._skip.append(path)
                continue
            self._store_paths[path] = name
            if is_jpeg and leaf.is_image:
                self._image_shapes[path] = leaf.shape or ()

    def keys(self) -> Sequence[str]:
        return sorted(filter(_EPISODE.match, self._file), key=lambda name: int(name.removeprefix("episode_")))

    def names(self, key: str) -> Iterator[str]:
        group = hdf5.get_child(self._file, key)
        yield from (path for path in hdf5.iter_names(group, self._skip) if path not in ENDS)
        yield from group.attrs

    def read(self, key: str) -> RawEpisode:
        group = hdf5.get_child(self._file, key)
        found = hdf5.step_arrays(group, [*self._skip, *self._image_shapes, *ENDS])
        ends = {flag: _read_flags(hdf5.get_child(group, name), name) for name, flag in ENDS.items()}
        fields = {self._store_path(path, array): _read_all(array) for path, array in found.items()}
        for path, shape in self._image_shapes.items():
            fields[self._store_paths[path]] = decode_images(
                self._store_paths[path], _read_encoded_images(group, path), shape, "JPEG"
            )
        return RawEpisode(fields, ends, _read_metadata(group, self._skip))

    def close(self) -> None:
        self._file.close()

    def _store_path(self, path: str, array: Any) -> str:
        """Return the path of an array's field in the store."""
        if path in self._store_paths or path == "rewards":
            return self._store_paths.get(path, "reward")
        if not path.startswith("infos/"):
            raise FormatError(
                f"{hdf5.location(array)}: expected {', '.join(self._store_paths)} and infos;"
                f" leave it out with skip=['{path}']"
            )
        name = array.attrs.get(FIELD_ATTRIBUTE, f"info{path.removeprefix('infos')}")
        return "/".join(check_name(part, "field name") for part in str(name).split("/"))


def _read_all(array: Any) -> Array:
    return hdf5.read_rows(array, 0, len(array))


def _read_flags(array: Any, path: str) -> Array:
    hdf5.check_array(array, path)
    if array.ndim != 1:
        raise FormatError(f"{hdf5.location(array)}: expected one flag per step, got shape {array.shape}")
    return _read_all(array)


def _read_encoded_images(group: Any, path: str) -> Any:
    """Return the bytes of an array's images, one per step."""
    for name in path.split("/"):
        if not isinstance(group, hdf5.import_h5py().Group):
            raise FormatError(f"{hdf5.location(group)}: expected a group, got an array")
        group = hdf5.get_child(group, name)
    if not isinstance(group, hdf5.import_h5py().Dataset) or group.ndim != 1:
        raise FormatError(f"{hdf5.location(group)}: expected one image per step")
    hdf5.check_size(group)
    return group[()]


def _read_metadata(group: Any, skip: Collection[str]) -> dict[str, Any]:
    known = hdf5.read_attributes(group, skip)
    text = known.pop(METADATA_ATTRIBUTE, "{}")
    try:
        return {**known, **json.loads(text)}
    except (TypeError, ValueError, RecursionError) as error:
        raise FormatError(f"{hdf5.location(group)}: attribute {METADATA_ATTRIBUTE} is not JSON: {error}") from error
