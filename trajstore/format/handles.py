"""Names of episodes and steps that never change."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from trajstore.schema import Array

if TYPE_CHECKING:
    pass


class EpisodeKey(NamedTuple):
    """Names an episode for ever: the stream that recorded it and its number there."""

    stream: str
    episode: int


class Handle(NamedTuple):
    """Names one step for ever."""

    stream: str
    episode: int
    t: int


class Handles(NamedTuple):
    """Names many steps of one stream for ever; ``episode`` and ``t`` are int64 arrays."""

    stream: str
    episode: Array
    t: Array
