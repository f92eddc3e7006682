"""Minari datasets, read from their files."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from trajstore.datasets.fields import check_skip, schema_of
from trajstore.datasets.json_files import load_object
from trajstore.datasets.minari.files import HEADS, Episodes, Hdf5Episodes, Raw
from trajstore.datasets.minari.spaces import parse
from trajstore.datasets.minari.tables import TableEpisodes
from trajstore.datasets.ports import Episode
from trajstore.errors import DataError, EpisodeNotFoundError, FormatError, StoreNotFoundError
from trajstore.schema import Array, Schema, nest

_COUNTS = ("total_episodes", "total_steps", "dataset_size")


def open_source(path: str | os.PathLike[str], *, skip: Collection[str] = ()) -> MinariSource:
    """Open a dataset.

    Args:
        path: Its directory, or ``data`` in it.
        skip: Fields to leave out, or groups of them, by the name that they get (``info``) or have (``infos``);
            ``dataset``: what metadata.json says, which is long where the spaces are. Attributes of episodes too.
    """
    place = Path(path).absolute()
    place = place if (place / "metadata.json").is_file() else place / "data"
    if not (place / "metadata.json").is_file():
        raise StoreNotFoundError(f"{path}: expected a Minari dataset, got no metadata.json there or in data/")
    about = load_object(place / "metadata.json")
    facts = {} if "dataset" in skip else {name: value for name, value in about.items() if name not in _COUNTS}
    episodes = _episodes(place, about, [*skip, *map(_ours, skip)])
    try:
        check_skip(str(place), skip, _names(episodes), _ours)
        return MinariSource(place, about.get("total_episodes"), facts, episodes)
    except BaseException:
        episodes.close()
        raise


def _names(episodes: Episodes) -> Iterator[str]:
    """What can be left out."""
    yield "dataset"
    yield from itertools.chain.from_iterable(map(episodes.names, episodes.keys()))


def _ours(path: str) -> str:
    """What a field is called here that has this name in Minari's files."""
    head, *names = path.split("/")
    heads = {"observations": "observation", "actions": "action", "infos": "info", "rewards": "reward"}
    return "/".join([heads.get(head, head), *(name.removeprefix("_index_") for name in names)])


def _episodes(place: Path, about: Mapping[str, Any], skip: Collection[str]) -> Episodes:
    parts = {head: parse(about.get(f"{head}_space"), f"{place}: {head}_space") for head in HEADS}
    kind, is_jpeg = about.get("data_format", "hdf5"), bool(about.get("jpeg_encoding", True))
    if kind == "hdf5":
        return Hdf5Episodes(place, parts, is_jpeg, skip)
    if kind in ("arrow", "parquet"):
        return TableEpisodes(place, kind, parts, is_jpeg, skip)
    raise FormatError(f"{place}: expected data of format hdf5, arrow or parquet, got {kind!r:.80}")


class MinariSource:
    """The episodes of a dataset; its keys are those that Minari counts them by."""

    def __init__(self, place: Path, n_episodes: object, facts: Mapping[str, Any], episodes: Episodes) -> None:
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
        return schema_of(self.read(self.keys()[0]).steps)

    def keys(self) -> Sequence[str]:
        return self._keys

    @cached_property
    def _keys(self) -> list[str]:
        return list(self._episodes.keys())

    def read(self, key: str) -> Episode:
        if key not in self._known:
            raise EpisodeNotFoundError(f"{self._place} has no episode '{key}'")
        raw = self._episodes.read(key)
        try:
            ends = _ends(raw)
            _check_lengths(raw)
        except DataError as error:
            raise DataError(f"{self._place}: episode '{key}': {error}") from error
        metadata = {**raw.metadata, **({"truncated": True} if all(ends) else {})}  # a store keeps terminated
        if self._facts and key == self.keys()[0]:
            metadata["dataset"] = {"minari": self._facts}
        return Episode(key, nest(raw.fields), *ends, metadata)

    @cached_property
    def _known(self) -> set[str]:
        return set(self.keys())

    def close(self) -> None:
        self._episodes.close()


def _ends(raw: Raw) -> tuple[bool, bool]:
    """Whether the last step terminated the episode, and whether it was truncated there."""
    if not raw.n_steps:
        raise DataError(
            "it has no steps; expected one at least. Take it out of the dataset, or out of a copy, first"
        )
    for name, flags in raw.ends.items():
        _check_rows(name, flags, raw.n_steps)
        if flags[:-1].any():
            raise DataError(f"{name} at step {int(np.argmax(flags))} of {len(flags)}; expected only at the last")
    return bool(raw.ends["terminated"][-1]), bool(raw.ends["truncated"][-1])


def _check_lengths(raw: Raw) -> None:
    for path, rows in raw.fields.items():
        head = path.partition("/")[0]
        if head in HEADS or path == "reward":
            _check_rows(f"field '{path}'", rows, raw.n_steps + (head == "observation"))


def _check_rows(what: str, rows: Array, n: int) -> None:
    if len(rows) != n:
        raise DataError(f"{what}: expected {n} rows, got {len(rows)}")
