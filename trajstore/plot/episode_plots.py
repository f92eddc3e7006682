"""Plots of episodes: returns, lengths and other columns, over time, steps or policy versions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from trajstore.errors import DataError
from trajstore.format.episode_table import EpisodeTable
from trajstore.plot.drawing import (
    BLACK,
    BLUE,
    GREY,
    LIGHT,
    ORANGE,
    axes_or_new,
    finish,
    import_matplotlib,
    legend,
    say,
    thousands,
)
from trajstore.plot.sources import table_of
from trajstore.schema import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from trajstore.plot.sources import TableSource

_MAX_POINTS = 3000  # more episodes are drawn as bins
_BINS = 300
_MAX_GROUPS = 200
_COLOURS = {"terminated": BLUE, "truncated": ORANGE}
_OVER = ("steps", "episodes", "time")
_VERSION = "policy_version"
_DAY = 86400.0


def returns(data: TableSource, *, over: str = "steps", window: int | None = None, ax: Axes | None = None) -> Axes:
    """Draw the return of each episode, and a rolling median of those that have ended.

    Thousands of episodes are drawn as their median and the range from the 10th to the 90th percentile.

    Args:
        data: A store, snapshot, episode table, buffer (its committed episodes) or reader. ``store.history()`` also
            has the evicted episodes.
        over: The horizontal axis: ``"steps"`` collected, ``"episodes"``, ``"time"``, ``"policy_version"``, or a
            numeric column of the episode table.
        window: Episodes in the rolling median; by default a fiftieth of all, and at least 5.
        ax: Where to draw; by default a new figure.

    Raises:
        DataError: The data has no such column, or no policy versions.
    """
    return _draw(table_of(data), "return", "Return", over, window, ax)


def lengths(data: TableSource, *, over: str = "steps", window: int | None = None, ax: Axes | None = None) -> Axes:
    """Draw the length of each episode in steps, and a rolling median; see `returns`."""
    ax = _draw(table_of(data), "length", "Length in steps", over, window, ax)
    thousands(ax.yaxis)
    return ax


def column(
    data: TableSource, name: str, *, over: str = "steps", window: int | None = None, ax: Axes | None = None
) -> Axes:
    """Draw a numeric column of the episode table, such as ``"priority.mean"``; see `returns`."""
    return _draw(table_of(data), name, name, over, window, ax)


@dataclass(frozen=True, slots=True)
class _Positions:
    """Where episodes stand on the horizontal axis."""

    x: Array
    label: str
    is_grouped: bool = False
    is_time: bool = False


def _draw(table: EpisodeTable, name: str, title: str, over: str, window: int | None, ax: Axes | None) -> Axes:
    if window is not None and window < 1:
        raise ValueError(f"window: expected at least 1 episode, got {window}")
    y, at = _numbers(table, name), _positions(table, over)
    ax = axes_or_new(ax)
    finish(ax, f"{title} of {len(table):,} episodes", at.label, title.lower())
    known = np.flatnonzero(np.isfinite(y) & np.isfinite(at.x))
    if not len(known):
        say(ax, "no episodes" if not len(table) else f"no episode has a {name}")
        return ax
    known = known[np.argsort(at.x[known], kind="stable")]
    x, y = at.x[known], y[known]
    ends = table["end"][known]
    if len(known) <= _MAX_POINTS:
        _draw_points(ax, ends, x, y)
    _draw_middle(ax, x[ends != "open"], y[ends != "open"], at, window)
    _set_scale(ax, at)
    if len(known) < len(table):
        finish(ax, f"{title} of {len(known):,} of {len(table):,} episodes", ax.get_xlabel(), title.lower())
    legend(ax)
    return ax


def _draw_middle(ax: Axes, x: Array, y: Array, at: _Positions, window: int | None) -> None:
    """The medians of episodes that have ended: of those that are open, return and length are not known yet."""
    if not len(x):
        return
    if at.is_grouped or 2 * len(np.unique(x)) < len(x):
        _draw_groups(ax, x, y)
    else:
        _draw_trend(ax, x, y, window)


def _numbers(table: EpisodeTable, name: str) -> Array:
    try:
        values = table[name]
    except KeyError as error:
        raise DataError(str(error.args[0])) from error
    if values.dtype.kind not in "biuf":
        raise DataError(f"episode column '{name}': expected numbers, got {values.dtype}")
    numbers: Array = np.ma.filled(values.astype(np.float64), np.nan)
    return numbers


def _positions(table: EpisodeTable, over: str) -> _Positions:
    if over == _VERSION and over not in table.columns:
        if f"{_VERSION}.mean" not in table.summaries:
            raise DataError(
                "no policy versions are stored; set buffer.policy_version while collecting, and flush() the buffer"
            )
        versions = np.floor(_numbers(table, f"{_VERSION}.mean"))
        return _Positions(np.where(versions < 0, np.nan, versions), "policy version", is_grouped=True)
    if over not in _OVER:
        return _Positions(_numbers(table, over), over, is_grouped=True)
    times = table["time"]
    if over == "time":
        return _Positions(times, "time (UTC)", is_time=True)
    order = np.argsort(times, kind="stable")
    counts = table["length"][order] if over == "steps" else np.ones(len(order), np.int64)
    x = np.empty(len(order), np.float64)
    x[order] = np.cumsum(counts)
    return _Positions(x, "steps collected" if over == "steps" else "episodes collected")


def _draw_points(ax: Axes, ends: Array, x: Array, y: Array) -> None:
    size, alpha = float(np.clip(4000 / len(x), 12, 36)), float(np.clip(100 / len(x), 0.45, 0.85))
    for end in sorted(set(ends.tolist())):
        chosen = ends == end
        colour = _COLOURS.get(end, GREY)
        ax.scatter(x[chosen], y[chosen], s=size, alpha=alpha, linewidths=0, color=colour, label=end, zorder=2)


def _draw_trend(ax: Axes, x: Array, y: Array, window: int | None) -> None:
    """A rolling median of few episodes; of many, medians and percentiles of bins with equally many episodes."""
    if len(x) <= _MAX_POINTS:
        size = min(len(y), max(5, len(y) // 50) if window is None else window)
        ax.plot(x, rolling_median(y, size), color=BLACK, linewidth=1.8, label=f"median of {size}", zorder=3)
        return
    size = max(len(x) // _BINS, window or 1)
    edges = np.arange(0, len(x), size)
    _draw_quantiles(ax, x, y, edges, f"median of {size:,}")


def _draw_groups(ax: Axes, x: Array, y: Array) -> None:
    """Medians and percentiles by value of x; neighbouring values are joined if there are many."""
    distinct = np.unique(x)
    if len(distinct) > _MAX_GROUPS:
        cuts = np.linspace(distinct[0], distinct[-1], _MAX_GROUPS + 1)[:-1]
        distinct = cuts[np.unique(np.searchsorted(cuts, x, side="right") - 1)]
    _draw_quantiles(ax, x, y, np.searchsorted(x, distinct, side="left"), "median")


def _draw_quantiles(ax: Axes, x: Array, y: Array, edges: Array, label: str) -> None:
    """The median, and the range of the middle 80 %, of the parts of sorted data that begin at the edges."""
    stops = np.append(edges[1:], len(x))
    parts = [np.percentile(y[a:b], (10, 50, 90)) for a, b in zip(edges.tolist(), stops.tolist(), strict=True)]
    low, middle, high = np.array(parts).T
    centre = np.array([x[(a + b) // 2] for a, b in zip(edges.tolist(), stops.tolist(), strict=True)])
    ax.fill_between(centre, low, high, color=LIGHT, alpha=0.7, linewidth=0, label="10 % to 90 %", zorder=1)
    marker: dict[str, Any] = {"marker": "o", "markersize": 3.5} if len(centre) <= 40 else {}
    ax.plot(centre, middle, color=BLACK, linewidth=1.8, label=label, zorder=3, **marker)


def rolling_median(values: Array, size: int) -> Array:
    """The median of each value and its neighbours, ``size`` values in all; fewer at the ends."""
    half = size // 2
    padded = np.concatenate([np.full(half, np.nan), values, np.full(size - 1 - half, np.nan)])
    median: Array = np.nanmedian(np.lib.stride_tricks.sliding_window_view(padded, size), axis=1)
    return median


def _set_scale(ax: Axes, at: _Positions) -> None:
    ticker: Any = import_matplotlib("matplotlib.ticker")
    if not at.is_time:
        if at.is_grouped:
            ax.xaxis.set_major_locator(ticker.MaxNLocator(9, integer=True))
        thousands(ax.xaxis)
        return
    low, high = ax.get_xlim()
    ax.xaxis.set_major_locator(ticker.MaxNLocator(6))
    if high - low >= 5 * _DAY:
        ax.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: _time_text(value, "D")))
        return
    form = "s" if high - low < 600 else "m"
    day = _time_text(low, "D")
    is_one_day = day == _time_text(high, "D")
    ax.set_xlabel(f"time (UTC), {day}" if is_one_day else at.label)

    def label(value: float, _: Any) -> str:
        date, _, time = _time_text(value, form).partition("T")
        return time if is_one_day else f"{date}\n{time}"

    ax.xaxis.set_major_formatter(ticker.FuncFormatter(label))


def _time_text(seconds: float, unit: str) -> str:
    if not 0 <= seconds < 1 << 37:
        return f"{seconds:g}"
    return str(np.datetime64(int(seconds), "s").astype(f"datetime64[{unit}]"))
