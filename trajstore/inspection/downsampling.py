"""Shorten a long time series to so few points that a plot looks the same.

Each of many equal stretches of the series keeps its lowest and its highest value, so no peak is lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from trajstore.errors import DataError
from trajstore.format.handles import EpisodeKey
from trajstore.schema import Array
from trajstore.store.snapshot import Snapshot

MIN_POINTS = 4
_BLOCK_BYTES = 8 << 20  # read and decoded at a time


@dataclass(frozen=True, slots=True)
class Series:
    """Points of a time series: ``values[i]`` at step ``steps[i]``, in order of time."""

    steps: Array
    values: Array


@dataclass(frozen=True, slots=True)
class EpisodeSeries:
    """Time series of one field of an episode.

    Attributes:
        n_steps: Values that the episode has, each with all components.
        components: The components that were asked for, as positions in a flattened value.
        n_components: How many components a value has.
        series: A series for each of them; steps are counted from the first one that is still stored.
    """

    n_steps: int
    components: tuple[int, ...]
    n_components: int
    series: tuple[Series, ...]


def downsample(values: Array, n_points: int) -> Series:
    """At most ``n_points`` points of a series, with the first and last point, and the extremes of each stretch.

    NaN counts as an extreme only where a stretch holds nothing else.

    Args:
        values: One value a step: numbers or truth values.
        n_points: How many points to keep at most, at least 4. A shorter series is kept whole.

    Raises:
        DataError: ``values`` has more than one axis, or ``n_points`` is too small.
    """
    if values.ndim != 1:
        raise DataError(f"downsample: expected one axis, got an array of shape {values.shape}")
    if n_points < MIN_POINTS:
        raise DataError(f"downsample: expected at least {MIN_POINTS} points, got {n_points}")
    n = len(values)
    if n <= n_points:
        return Series(np.arange(n), values.copy())
    kept = _extremes(values, -(-n // ((n_points - 2) // 2)))
    steps = np.unique(np.concatenate([[0], kept, [n - 1]]))
    return Series(steps, values[steps])


def _extremes(values: Array, size: int) -> Array:
    """Positions of the lowest and the highest value of each stretch of ``size`` values."""
    padding = np.full(-len(values) % size, values[-1], values.dtype)
    stretches = np.concatenate([values, padding]).reshape(-1, size)
    start = np.arange(len(stretches)) * size
    if values.dtype.kind == "f":
        is_nan = np.isnan(stretches)
        lowest = np.where(is_nan, np.inf, stretches).argmin(1)
        highest = np.where(is_nan, -np.inf, stretches).argmax(1)
    else:
        lowest, highest = stretches.argmin(1), stretches.argmax(1)
    # Padding repeats the last value, so its first position counts.
    kept: Array = np.minimum(np.concatenate([start + lowest, start + highest]), len(values) - 1)
    return kept


def episode_series(
    snapshot: Snapshot,
    episode: int | EpisodeKey | tuple[str, int],
    path: str,
    *,
    n_points: int = 1000,
    components: tuple[int, ...] | None = None,
    max_components: int = 16,
) -> EpisodeSeries:
    """Time series of a field of an episode, for a plot. Memory is bounded, however long the episode is.

    Args:
        snapshot: What to read.
        episode: Its row in the episode table, or its key.
        path: A field, or a derived column of numbers.
        n_points: Points that each series has at most.
        components: Positions in a flattened value, such as (0, 3); None: the first ``max_components``.
        max_components: Series that are made at most.

    Raises:
        DataError: The field or a component does not exist.
        EpisodeNotFoundError: The snapshot does not show the episode.
    """
    shape, row_bytes, n_values = _value_facts(snapshot, episode, path)
    n_components = int(np.prod(shape, dtype=np.int64))
    chosen = tuple(range(min(n_components, max_components))) if components is None else components
    if wrong := [c for c in chosen if not 0 <= c < n_components]:
        raise DataError(f"'{path}': no component {wrong[0]}; it has {n_components}, counted from 0")
    kept: list[list[Series]] = [[] for _ in chosen]
    n_blocks = max(1, -(-n_values * row_bytes // _BLOCK_BYTES))
    # Blocks keep more points each than the whole may have: their extremes contain those of the final stretches.
    n_kept = max(MIN_POINTS, min(n_points, -(-8 * n_points // n_blocks)))
    for start, block in _blocks(snapshot, episode, path, -(-n_values // n_blocks)):
        for series, component in zip(kept, chosen, strict=True):
            points = downsample(np.ascontiguousarray(block.reshape(len(block), -1)[:, component]), n_kept)
            series.append(Series(points.steps + start, points.values))
    joined = tuple(_joined(parts, n_points) for parts in kept)
    return EpisodeSeries(n_values, chosen, n_components, joined)


def _value_facts(
    snapshot: Snapshot, episode: int | EpisodeKey | tuple[str, int], path: str
) -> tuple[tuple[int, ...], int, int]:
    """Shape and bytes of one value, and how many the episode has."""
    table = snapshot.episodes
    i = int(episode) if isinstance(episode, (int, np.integer)) else table.find(EpisodeKey(*episode))
    n_rows, has_final = table.n_rows(i), table.has_final(i)
    if snapshot.schema is not None and path in snapshot.schema:
        spec = snapshot.schema[path]
        return spec.shape, spec.row_bytes, n_rows - (has_final and not spec.final)
    if path in snapshot.columns.names:
        state = next(iter(snapshot.columns.states(path).values()))
        return state.shape, 8 * int(np.prod(state.shape, dtype=np.int64)), n_rows - has_final
    known = ", ".join([*(snapshot.schema or ()), *snapshot.columns.names])
    raise DataError(f"no field or derived column '{path:.80}'; there are {known or 'none'}")


def _blocks(
    snapshot: Snapshot, episode: int | EpisodeKey | tuple[str, int], path: str, n_rows: int
) -> Iterator[tuple[int, Array]]:
    """Values of the episode, in blocks of about so many steps, each with the step that it starts at."""
    table = snapshot.episodes
    i = int(episode) if isinstance(episode, (int, np.integer)) else table.find(EpisodeKey(*episode))
    n_steps = table.n_rows(i) - table.has_final(i)
    is_field = snapshot.schema is not None and path in snapshot.schema
    for start in range(0, max(n_steps, 1), max(n_rows, 1)):
        stop = min(start + max(n_rows, 1), n_steps)
        read = snapshot.read_episode(
            i, fields=[path] if is_field else [], columns=() if is_field else [path], start=start, stop=stop
        )
        for name in path.split("/"):
            read = read[name]
        values: Array = read  # type: ignore[assignment]
        if len(values):
            yield start, values


def _joined(parts: list[Series], n_points: int) -> Series:
    if not parts:
        return Series(np.empty(0, np.int64), np.empty(0))
    steps, values = (np.concatenate([getattr(part, name) for part in parts]) for name in ("steps", "values"))
    points = downsample(values, n_points)
    return Series(steps[points.steps], points.values)
