"""Nested figures as a flat dict of numbers."""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# Keyed by stream, so every session adds a name.
_LEFT_OUT = {"storage/marks"}


def flatten(stats: Mapping[str, Any] | Sequence[Mapping[str, Any]], *, prefix: str = "") -> dict[str, float]:
    """Make one flat dict of the numbers in ``stats()`` of a buffer, reader, mixture or iterator.

    Args:
        stats: The figures. A sequence holds those of several ranks, as `trajstore.ray.RayReplayBuffer.stats`
            returns them; their names begin with ``rank0/``, ``rank1/``, ...
        prefix: Begins every name, followed by ``/``.

    Returns:
        Numbers by name. The keys of nested figures are joined by ``/``: ``stats["cache"]["hits"]`` is
        ``"cache/hits"``. True is 1.0 and False 0.0. Text, None, and the marks by stream, whose names change from
        run to run, are left out.

    Raises:
        TypeError: A value is none of these.

    >>> flatten({"n_steps": 3, "cache": {"hits": 2, "is_compiled": True}, "transport": "obstore"}, prefix="replay")
    {'replay/n_steps': 3.0, 'replay/cache/hits': 2.0, 'replay/cache/is_compiled': 1.0}
    """
    start = f"{prefix}/" if prefix else ""
    if isinstance(stats, Mapping):
        return {start + name: number for name, number in _numbers(stats, "")}
    return {
        f"{start}rank{one.get('rank', place)}/{name}": number
        for place, one in enumerate(stats)
        for name, number in _numbers(one, "")
    }


def _numbers(stats: Mapping[str, Any], start: str) -> Iterator[tuple[str, float]]:
    for key, value in stats.items():
        name = f"{start}{key}"
        if name in _LEFT_OUT or value is None or isinstance(value, str):
            continue
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{name}/")
        else:
            yield name, _number(value, name)


def _number(value: Any, name: str) -> float:
    if isinstance(value, numbers.Real) or getattr(value, "shape", None) == ():
        return float(value)
    raise TypeError(
        f"figure {name!r}: expected a number, text, None or a mapping of these, got {type(value).__name__}"
    )
