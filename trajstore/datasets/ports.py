"""What stands between a dataset of another library and a store: episodes, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from trajstore.schema import Schema, nest

Progress = Callable[[int, int], None]  # episodes done, episodes in all


@dataclass(frozen=True, slots=True)
class Episode:
    """One episode on its way in or out.

    Attributes:
        key: Its name, unique in its dataset and the same at every visit.
        steps: Arrays of T rows by field, nested; fields with a final value may have T + 1.
        terminated: It ended in a terminal state.
        truncated: It was stopped from outside. With neither, the recording was cut.
        metadata: Values of declared episode columns, and anything else that JSON can hold. What holds for the
            dataset as a whole stands under ``dataset``, in its first episode only.
    """

    key: str
    steps: Mapping[str, Any]
    terminated: bool = False
    truncated: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)


def without_end(episode: Episode, steps: Mapping[str, Any]) -> Episode:
    """The same with fewer steps, by their paths: it was cut before its end."""
    metadata = {name: value for name, value in episode.metadata.items() if name != "truncated"}
    return Episode(episode.key, nest(steps), metadata=metadata)


class Source(Protocol):
    """A dataset of another library, open for reading. No more than the episode asked for is read."""

    @property
    def display(self) -> str:
        """Where it is, without credentials."""

    @property
    def schema(self) -> Schema:
        """Of the store that it becomes, without the column for the key."""

    def keys(self) -> Sequence[str]:
        """The names of its episodes, in their order."""

    def read(self, key: str) -> Episode: ...

    def close(self) -> None: ...


class Sink(Protocol):
    """A dataset of another library, being written. Until `finish` returns there is none under its name."""

    @property
    def display(self) -> str: ...

    def done(self) -> Sequence[str]:
        """Keys of the episodes that an earlier run, which did not finish, wrote whole; in their order."""

    def kept(self, episode: Episode) -> Episode:
        """What is written of an episode: all, but for what an option leaves out on purpose.

        Raises:
            DataError: It has no place there as it is, and no option says what to leave out.
        """

    def write(self, episode: Episode) -> None: ...

    def finish(self) -> None:
        """Put it under its name."""

    def abandon(self) -> None:
        """Close files and keep what is there, so that the next run goes on with it; without episodes, nothing."""
