"""An episode as Minari's files hold it, and the interface of the classes that read those files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trajstore.schema import Array

HEADS = {"observation": "observations", "action": "actions"}  # group in the store: group in the dataset
ENDS = {"terminations": "terminated", "truncations": "truncated"}  # array in the dataset: flag in the store


@dataclass(frozen=True, slots=True)
class RawEpisode:
    """An episode before its end and its lengths are checked.

    Attributes:
        fields: Rows by path of the field. Observations have T + 1 rows.
        ends: The flags ``terminated`` and ``truncated`` of every step.
        metadata: Everything else that the dataset states, as JSON values.
    """

    fields: dict[str, Array]
    ends: dict[str, Array]
    metadata: dict[str, Any]

    @property
    def n_steps(self) -> int:
        return len(self.ends["terminated"])


class MinariEpisodes(Protocol):
    """Reads the episodes of a dataset from files of one kind."""

    def keys(self) -> Sequence[str]: ...

    def names(self, key: str) -> Iterator[str]:
        """Yield every name of an episode that can be left out."""

    def read(self, key: str) -> RawEpisode: ...

    def close(self) -> None: ...
