"""The options of `trajstore.ReplayBuffer` that the drop-ins accept as keyword arguments and pass on to it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, Literal, TypedDict

from trajstore.replay.options import ReplayOptions
from trajstore.replay.pacing import SamplesPerInsert
from trajstore.sampling.priorities.priority_options import Priorities
from trajstore.storage import DiskCache

_STORE_OPTIONS = {"storage_options", "fsync", "disk_cache"}


class ReplayOptionsDict(TypedDict, total=False):
    """Options of `trajstore.ReplayBuffer` that every drop-in accepts; `trajstore.ReplayBuffer` describes them."""

    cache_bytes: int | str
    host_cache_bytes: int | str | None
    samples_per_insert: SamplesPerInsert | None
    statistics: bool | tuple[str, ...]
    name: str
    commit_steps: int | None
    commit_seconds: float | None
    buffer_bytes: int | str
    grace_s: float
    rank: int | None
    world_size: int | None
    share: Literal["partition", "whole"]
    rank_timeout_s: float
    through: Literal["torch", "store"] | None
    attend_s: float | None
    checkpoint_seconds: float | None
    keep_checkpoints: int | None
    pack: bool
    compiled: bool
    storage_options: Mapping[str, Any] | None
    fsync: bool
    disk_cache: DiskCache | None


class SamplingOptionsDict(ReplayOptionsDict, total=False):
    """`ReplayOptionsDict` and the sampling options that some drop-ins leave to their user."""

    priorities: Priorities | None
    as_tensordict: bool


def check_options(constructor: Callable[..., Any], given: Iterable[str], own: Mapping[str, str]) -> None:
    """Refuse options that a drop-in sets itself, and options that do not exist.

    Drop-ins call this in their constructor, because some of them create the `trajstore.ReplayBuffer` later.

    Args:
        constructor: The drop-in's constructor; an error lists its parameters.
        given: Names of the options that are passed on to `trajstore.ReplayBuffer`.
        own: Options that the drop-in sets itself, each with advice for the user.

    Raises:
        TypeError: An option is not accepted.
    """
    for name in given:
        if name in own:
            raise TypeError(f"{name}: this buffer sets it itself; {own[name]}")
    parameters = inspect.signature(constructor).parameters.values()
    named = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.name != "self"]
    passed_on = {f.name for f in fields(ReplayOptions)} | _STORE_OPTIONS
    passed_on -= {*own, *named}
    if unknown := sorted(set(given) - passed_on):
        raise TypeError(
            f"unknown options {unknown}; accepted are {', '.join(named)}, and the options of trajstore.ReplayBuffer"
            f" {', '.join(sorted(passed_on))}"
        )
