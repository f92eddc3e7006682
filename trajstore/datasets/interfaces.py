"""The interfaces of a dataset format: an episode, a dataset reader and a dataset writer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from trajstore.schema import Schema, nest

Progress = Callable[[int, int], None]  # called with the episodes done and the total


@dataclass(frozen=True, slots=True)
class Episode:
    """One episode that is imported or exported.

    Attributes:
        key: Its name: unique in its dataset, and the same in every run.
        steps: Arrays of T rows by field, nested. Fields with a final value may have T + 1 rows.
        terminated: It ended in a terminal state.
        truncated: It was stopped from outside. If neither flag is set, the recording was cut.
        metadata: Values of the declared episode columns, and any other JSON values. Facts about the whole dataset
            are under ``dataset`` in the first episode, and only there.
    """

    key: str
    steps: Mapping[str, Any]
    terminated: bool = False
    truncated: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)


def cut_before_end(episode: Episode, steps: Mapping[str, Any]) -> Episode:
    """Return the episode with these steps (arrays by path) instead of its own, ended by a cut."""
    metadata = {name: value for name, value in episode.metadata.items() if name != "truncated"}
    return Episode(episode.key, nest(steps), metadata=metadata)


class DatasetReader(Protocol):
    """Reads a dataset of another library, one episode at a time."""

    @property
    def display(self) -> str:
        """Path or URL of the dataset, without credentials."""

    @property
    def schema(self) -> Schema:
        """Schema of the store that the dataset becomes, without the column for the key."""

    def keys(self) -> Sequence[str]:
        """Return the names of the episodes, in the order of the dataset."""

    def read(self, key: str) -> Episode: ...

    def close(self) -> None: ...


class DatasetWriter(Protocol):
    """Writes a dataset of another library. The dataset appears under its name when `finish` returns."""

    @property
    def display(self) -> str:
        """Path of the dataset."""

    def written_keys(self) -> Sequence[str]:
        """Return the keys of the episodes that an earlier, unfinished run wrote completely, in order."""

    def trim(self, episode: Episode) -> Episode:
        """Return what `write` keeps of an episode: everything except what an option drops.

        Raises:
            DataError: The format cannot hold the episode, and no option drops the part that does not fit.
        """

    def write(self, episode: Episode) -> None: ...

    def finish(self) -> None:
        """Complete the dataset and move it to its name."""

    def suspend(self) -> None:
        """Close files and keep the written episodes for the next run. Without any, remove everything."""
