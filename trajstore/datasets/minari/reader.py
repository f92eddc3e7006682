"""Read Minari datasets from their files."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from trajstore.datasets.episode_arrays import infer_schema
from trajstore.datasets.interfaces import Episode
from trajstore.datasets.json_files import load_json_object
from trajstore.datasets.minari.hdf5_episodes import Hdf5Episodes
from trajstore.datasets.minari.raw_episodes import HEADS, MinariEpisodes, RawEpisode
from trajstore.datasets.minari.spaces import parse_space
from trajstore.datasets.minari.table_episodes import TableEpisodes
from trajstore.datasets.skip_names import check_skip
from trajstore.errors import DataError, EpisodeNotFoundError, FormatError, StoreNotFoundError
from trajstore.schema import Array, Schema, nest

_COUNTS = ("total_episodes", "total_steps", "dataset_size")  # an export counts again


def open_reader(path: str | os.PathLike[str], *, skip: Collection[str] = ()) -> MinariReader:
    """Open a dataset for reading.

    Args:
        path: Its directory, or the directory ``data`` in it.
        skip: Fields, groups or attributes of episodes to leave out, by their names in the store (``info``) or in
            the dataset (``infos``). ``dataset`` leaves out metadata.json, which is long if the spaces are large.

    Raises:
        StoreNotFoundError: There is no metadata.json.
        FormatError: It is not a Minari dataset, or it is malformed.
        MissingExtraError: h5py or pyarrow is not installed.
    """
    place = Path(path).absolute()
    place = place if (place / "metadata.json").is_file() else place / "data"
    if not (place / "metadata.json").is_file():
        raise StoreNotFoundError(f"{path}: expected a Minari dataset, got no metadata.json there or in data/")
    about = load_json_object(place / "metadata.json")
    facts = {} if "dataset" in skip else {name: value for name, value in about.items() if name not in _COUNTS}
    episodes = _open_episodes(place, about, [*skip, *map(_store_path, skip)])
    try:
        check_skip(str(place), skip, _iter_skippable_names(episodes), _store_path)
        return MinariReader(place, about.get("total_episodes"), facts, episodes)
    except BaseException:
        episodes.close()
        raise


def _iter_skippable_names(episodes: MinariEpisodes) -> Iterator[str]:
    """Yield every name that can be left out."""
    yield "dataset"
    yield from itertools.chain.from_iterable(map(episodes.names, episodes.keys()))


def _store_path(path: str) -> str:
    """Return the path in the store of a field with this path in Minari's files."""
    head, *names = path.split("/")
    heads = {"observations": "observation", "actions": "action", "infos": "info", "rewards": "reward"}
    return "/".join([heads.get(head, head), *(name.removeprefix("_index_") for name in names)])


def _open_episodes(place: Path, about: Mapping[str, Any], skip: Collection[str]) -> MinariEpisodes:
    leaves = {head: parse_space(about.get(f"{head}_space"), f"{place}: {head}_space") for head in HEADS}
    kind, is_jpeg = about.get("data_format", "hdf5"), bool(about.get("jpeg_encoding", True))
    if kind == "hdf5":
        return Hdf5Episodes(place, leaves, is_jpeg, skip)
    if kind in ("arrow", "parquet"):
        return TableEpisodes(place, kind, leaves, is_jpeg, skip)
    raise FormatError(f"{place}: expected data of format hdf5, arrow or parquet, got {kind!r:.80}")


class MinariReader:
    """Reads the episodes of a dataset. Their keys are Minari's names of them."""

    def __init__(self, place: Path, n_episodes: object, facts: Mapping[str, Any], episodes: MinariEpisodes) -> None:
        self._place = place
        self._facts = facts
        self._episodes = episodes
        if n_episodes != len(self.keys()):
            raise FormatError(f"{place}: metadata.json says {n_episodes!r:.80} episodes, got {len(self.keys())}")

    @property
    def display(self) -> str:
        return str(self._place)

    @cached_property
    def schema(self) -> Schema:
        if not self.keys():
            raise DataError(f"{self._place} holds no episodes")
        return infer_schema(self.read(self.keys()[0]).steps)

    def keys(self) -> Sequence[str]:
        return self._keys

    @cached_property
    def _keys(self) -> list[str]:
        return list(self._episodes.keys())

    def read(self, key: str) -> Episode:
        if key not in self._key_set:
            raise EpisodeNotFoundError(f"{self._place} has no episode '{key}'")
        raw = self._episodes.read(key)
        try:
            ends = _read_ends(raw)
            _check_lengths(raw)
        except DataError as error:
            raise DataError(f"{self._place}: episode '{key}': {error}") from error
        # A store records one end; of both, terminated.
        metadata = {**raw.metadata, **({"truncated": True} if all(ends) else {})}
        if self._facts and key == self.keys()[0]:
            metadata["dataset"] = {"minari": self._facts}
        return Episode(key, nest(raw.fields), *ends, metadata)

    @cached_property
    def _key_set(self) -> set[str]:
        return set(self.keys())

    def close(self) -> None:
        self._episodes.close()


def _read_ends(raw: RawEpisode) -> tuple[bool, bool]:
    """Return whether the episode terminated at its last step, and whether it was truncated there."""
    if not raw.n_steps:
        raise DataError(
            "the episode has no steps; expected at least one. Remove it from the dataset, or from a copy, first"
        )
    for name, flags in raw.ends.items():
        _check_rows(name, flags, raw.n_steps)
        if flags[:-1].any():
            raise DataError(f"{name} at step {int(np.argmax(flags))} of {len(flags)}; expected at the last only")
    return bool(raw.ends["terminated"][-1]), bool(raw.ends["truncated"][-1])


def _check_lengths(raw: RawEpisode) -> None:
    for path, rows in raw.fields.items():
        head = path.partition("/")[0]
        if head in HEADS or path == "reward":
            _check_rows(f"field '{path}'", rows, raw.n_steps + (head == "observation"))


def _check_rows(what: str, rows: Array, n: int) -> None:
    if len(rows) != n:
        raise DataError(f"{what}: expected {n} rows, got {len(rows)}")
