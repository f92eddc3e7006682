"""Permanent names of episodes and steps: they never change and are never reused."""

from __future__ import annotations

from typing import NamedTuple

from trajstore.schema import Array


class EpisodeKey(NamedTuple):
    """The permanent name of an episode: the stream that recorded it and its number in that stream."""

    stream: str
    episode: int


class Handle(NamedTuple):
    """The permanent name of one step."""

    stream: str
    episode: int
    t: int


class Handles(NamedTuple):
    """The permanent names of many steps of one stream; ``episode`` and ``t`` are int64 arrays."""

    stream: str
    episode: Array
    t: Array
