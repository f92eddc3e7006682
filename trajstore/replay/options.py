"""Options of a buffer: their defaults, their checks, and their JSON form in checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal, TypedDict, cast

import torch

from trajstore.arguments import check_positive, unknown_options
from trajstore.distributed.rank_group import check_ranks, torch_ranks
from trajstore.errors import DataError
from trajstore.replay.pacing import SamplesPerInsert
from trajstore.replay.retention import PART, Retention
from trajstore.sampling.priorities.priority_options import Linear, Priorities
from trajstore.sampling.windows import Windows


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What a buffer was made with; see `ReplayBuffer`. Checkpoints keep it, so a resume needs only the URL."""

    capacity: int | Retention | None = None
    device: str = "cpu"
    cache_bytes: int | str = "1GiB"
    host_cache_bytes: int | str | None = None
    sample: Windows = field(default_factory=Windows)
    priorities: Priorities | None = None
    samples_per_insert: SamplesPerInsert | None = None
    statistics: bool | tuple[str, ...] = False
    seed: int = 0
    name: str = "buffer"
    commit_steps: int | None = None
    commit_seconds: float | None = 10.0
    buffer_bytes: int | str = "64MiB"
    grace_s: float = 10.0
    rank: int | None = None
    world_size: int | None = None
    share: Literal["partition", "whole"] = "partition"
    rank_timeout_s: float = 300.0
    through: Literal["torch", "store"] | None = None
    attend_s: float | None = None
    checkpoint_seconds: float | None = None
    keep_checkpoints: int | None = None
    pack: bool = False
    as_tensordict: bool = False
    compiled: bool = True


class PartitionChanges(TypedDict, total=False):
    """Options by name that the Ray actors of one buffer share: `ReplayOptions` but name, rank and world size."""

    capacity: int | Retention | None
    device: str | torch.device
    cache_bytes: int | str
    host_cache_bytes: int | str | None
    sample: Windows
    priorities: Priorities | None
    samples_per_insert: SamplesPerInsert | None
    statistics: bool | Sequence[str]
    seed: int
    commit_steps: int | None
    commit_seconds: float | None
    buffer_bytes: int | str
    grace_s: float
    share: Literal["partition", "whole"]
    rank_timeout_s: float
    through: Literal["torch", "store"] | None
    attend_s: float | None
    checkpoint_seconds: float | None
    keep_checkpoints: int | None
    pack: bool
    as_tensordict: bool
    compiled: bool


class RejoinChanges(PartitionChanges, total=False):
    """Options by name, as `ReplayBuffer.rejoin` takes them: all of `ReplayOptions` but rank and world size."""

    name: str


class OptionChanges(RejoinChanges, total=False):
    """Options by name, as `ReplayBuffer.resume` takes them: those of `ReplayOptions`."""

    rank: int | None
    world_size: int | None


def with_ranks(options: Mapping[str, object]) -> OptionChanges:
    """Add the rank and world size of torch.distributed, where it is in use and neither is given."""
    if options.get("rank") is not None or options.get("world_size") is not None:
        return cast(OptionChanges, options)
    rank, size = torch_ranks() or (None, None)
    return cast(OptionChanges, {**options, "rank": rank, "world_size": size})


def check_options(base: ReplayOptions, changes: Mapping[str, object]) -> ReplayOptions:
    """Apply changes to options, and check the result.

    Raises:
        TypeError: An option does not exist, or has the wrong type.
        ValueError: A value is out of range.
    """
    names = {f.name for f in fields(ReplayOptions)}
    if unknown := changes.keys() - names:
        raise unknown_options(unknown, names)
    changed = replace(base, **cast(Mapping[str, Any], changes))
    _check_kinds(changed)
    statistics = changed.statistics if isinstance(changed.statistics, bool) else tuple(changed.statistics)
    changed = replace(changed, device=str(changed.device), statistics=statistics)
    _check_capacity(changed)
    return changed


def _check_kinds(options: ReplayOptions) -> None:
    for name, kinds in (
        ("sample", (Windows,)),
        ("priorities", (Priorities, type(None))),
        ("samples_per_insert", (SamplesPerInsert, type(None))),
        ("statistics", (bool, list, tuple)),
        ("pack", (bool,)),
    ):
        if not isinstance(getattr(options, name), kinds):
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise TypeError(f"{name}: expected {expected}, got {getattr(options, name)!r:.80}")
    check_ranks(options.rank, options.world_size)
    if not _is_seconds(options.grace_s):
        raise ValueError(f"grace_s: expected seconds, at least 0, got {options.grace_s!r}")
    _check_checkpoints(options)


def _is_seconds(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


def _check_checkpoints(options: ReplayOptions) -> None:
    if options.share not in ("partition", "whole"):
        raise ValueError(f"share: expected 'partition' or 'whole', got {options.share!r}")
    if options.through not in (None, "torch", "store"):
        raise ValueError(f"through: expected 'torch', 'store' or None, got {options.through!r}")
    for name, is_optional in (("rank_timeout_s", False), ("attend_s", True), ("checkpoint_seconds", True)):
        value = getattr(options, name)
        if not (value is None and is_optional) and not (_is_seconds(value) and value > 0):
            raise ValueError(f"{name}: expected a positive number of seconds, got {value!r}")
    if options.keep_checkpoints is not None:
        check_positive("keep_checkpoints", options.keep_checkpoints)


def _shortest_episode(windows: Windows) -> int:
    """Steps of the shortest episode that has a window."""
    outside = (windows.burn_in + windows.bootstrap) * windows.stride if windows.strict_context else 0
    return 1 + outside + (windows.reach if windows.boundary in ("strict", "cross") else 0)


def raised_capacity(capacity: int | Retention | None, windows: Windows) -> int | Retention | None:
    """The capacity, raised where it is too low for a window."""
    limits, needed = Retention.of(capacity), _shortest_episode(windows)
    if limits.steps is None or limits.steps - limits.steps // PART >= needed:
        return capacity
    steps = needed + needed // (PART - 1) + 1
    return steps if isinstance(capacity, int) else replace(limits, steps=steps)


def _check_capacity(options: ReplayOptions) -> None:
    """Refuse a capacity that is too low for a window."""
    retention, needed = Retention.of(options.capacity), _shortest_episode(options.sample)
    for limits in (retention, retention.per_stream or Retention()):
        if limits.steps is not None and limits.steps - limits.steps // PART < needed:
            raise ValueError(f"capacity: expected at least the {needed} steps of a window, got {limits.steps}")


_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (Windows, Priorities, Linear, Retention)}


def to_json(value: Any) -> Any:
    """An option as JSON. Of a function only the name is stored: it has to be given again."""
    if isinstance(value, SamplesPerInsert):
        return {"type": "SamplesPerInsert", **value.options}
    if is_dataclass(value) and not isinstance(value, type):
        return {"type": type(value).__name__} | {f.name: to_json(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if callable(value):
        return {"type": "function", "name": getattr(value, "__qualname__", repr(value))}
    return value


def from_json(data: Mapping[str, Any], given: OptionChanges) -> ReplayOptions:
    """Saved options, except those that are given again.

    Raises:
        DataError: A saved option is a function, which can't be stored, and is not given.
    """
    names = {f.name for f in fields(ReplayOptions)} & data.keys()
    return ReplayOptions(**{name: _value(data[name], name) for name in names - given.keys()})


def _value(data: Any, where: str) -> Any:
    if isinstance(data, list):
        return tuple(_value(item, where) for item in data)
    if not isinstance(data, Mapping):
        return data
    values = {name: _value(value, f"{where}.{name}") for name, value in data.items() if name != "type"}
    if data.get("type") == "function":
        raise DataError(
            f"option '{where}' was the function {data.get('name')!r}, which a checkpoint cannot hold; pass it again"
        )
    if data.get("type") == "SamplesPerInsert":
        return SamplesPerInsert(**values)
    if data.get("type") not in _KINDS:
        raise DataError(f"option '{where}': expected one of {', '.join(_KINDS)}, got {data.get('type')!r}")
    return _KINDS[data["type"]](**values)
