"""Plots of sampling: priorities, effective sample size, what was drawn how often, and how old it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from trajstore.errors import DataError
from trajstore.format.episode_table import EpisodeTable
from trajstore.plot.drawing import (
    BLACK,
    BLUE,
    GREY,
    ORANGE,
    axes_or_new,
    finish,
    legend,
    note,
    percent,
    say,
    thousands,
)
from trajstore.plot.sources import (
    drawn_handles,
    rows_of_handles,
    step_priorities,
    stream_ids,
    table_of,
)
from trajstore.schema import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from trajstore.plot.sources import Drawn, Source, TableSource

_BINS = 60
_MAX_CURVE = 1000  # points of a curve
_UNITS = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
_VERSION = "policy_version"


def priorities(data: Source, *, ax: Axes | None = None) -> Axes:
    """Draw a histogram of the priorities of all steps, on logarithmic axes.

    Args:
        data: A buffer or reader with priorities, or a store or snapshot that has stored ones.
        ax: Where to draw; by default a new figure.

    Raises:
        ValueError: The buffer or reader has no priorities.
        DataError: The store has none.
    """
    values = _finite(step_priorities(data))
    ax = axes_or_new(ax)
    finish(ax, f"Priorities of {len(values):,} steps", "priority", "steps")
    if not len(values):
        say(ax, "no steps")
        return ax
    positive = values[values > 0]
    if len(positive):
        low, high = float(positive.min()), float(positive.max())
        spread = max(high / low, 1.5) ** 0.02
        ax.hist(positive, bins=np.geomspace(low / spread, high * spread, _BINS + 1).tolist(), color=BLUE)
        ax.set(xscale="log", yscale="log")
        middle = float(np.median(positive))
        ax.axvline(middle, color=BLACK, linewidth=1, linestyle="--")
        n_zero = len(values) - len(positive)
        zeros = f"; {n_zero:,} steps with priority 0, never drawn" if n_zero else ""
        note(ax, f"median {middle:.3g}, largest {high:.3g}{zeros}")
    else:
        say(ax, "all priorities are 0")
    return ax


def effective_sample_size(
    data: Source, *, alpha: float | None = None, eps: float | None = None, ax: Axes | None = None
) -> Axes:
    """Draw which share of the draws goes to which share of the steps, the most likely steps first.

    The title has the effective sample size: the number of steps that, drawn uniformly, would give batches as varied
    as these priorities do.

    Args:
        data: As in `priorities`.
        alpha: The exponent of priorities; by default that of the buffer, or 0.6.
        eps: What is added to priorities; by default that of the buffer, or 1e-6.
        ax: Where to draw; by default a new figure.

    Raises:
        ValueError: The buffer or reader has no priorities.
        DataError: The store has none.
    """
    values = _finite(step_priorities(data)).astype(np.float64)
    options = _priority_options(data)
    alpha = (0.6 if options is None else options.alpha) if alpha is None else alpha
    eps = (1e-6 if options is None else options.eps) if eps is None else eps
    mass = np.where(values > 0, (values + eps) ** alpha, 0.0)
    ax = axes_or_new(ax, 4.6, 4.2)
    finish(ax, "Effective sample size", "share of the steps, most likely first", "share of the draws")
    if not mass.sum():
        say(ax, "no steps")
        return ax
    share = np.sort(mass)[::-1] / mass.sum()
    size = 1 / float((share**2).sum())
    chosen = np.unique(np.linspace(0, len(share), min(_MAX_CURVE, len(share)) + 1).astype(np.int64))
    sums = np.concatenate([[0.0], np.cumsum(share)])[chosen]
    ax.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle="--", label="uniform")
    ax.plot(chosen / len(share), sums, color=BLUE, linewidth=2, label=f"priorities, alpha {alpha:g}")
    percent(ax.xaxis)
    percent(ax.yaxis)
    ax.set(xlim=(0, 1), ylim=(0, 1.02))
    ax.set_title(
        f"Effective sample size {size:,.0f} of {len(values):,} steps ({100 * size / len(values):.2g} %)",
        loc="left", fontsize="medium",
    )  # fmt: skip
    ax.legend(frameon=False, fontsize="small", loc="lower right")
    return ax


def coverage(data: TableSource, drawn: Drawn, *, n_bins: int = 100, ax: Axes | None = None) -> Axes:
    """Draw how often each part of the data was drawn, from the oldest steps to the newest.

    Args:
        data: What the batches were drawn from.
        drawn: The batches, or their ``index``: keep ``batch["index"]`` of the batches of a while. A window counts
            once, at its first step.
        n_bins: Parts of the data, with equally many steps.
        ax: Where to draw; by default a new figure.

    Raises:
        DataError: ``drawn`` is something else.
    """
    table, handles = table_of(data), drawn_handles(drawn)
    ax = axes_or_new(ax)
    finish(ax, f"Coverage of {len(handles):,} draws", "steps, oldest to newest", "draws per step")
    position, n_steps = _positions(table, _streams_of(data, table), handles)
    known = position[position >= 0]
    if not n_steps or not len(handles):
        say(ax, "no steps" if not n_steps else "nothing was drawn")
        return ax
    n_bins = min(n_bins, n_steps)
    edges = np.linspace(0, n_steps, n_bins + 1)
    counts, _ = np.histogram(known, edges)
    ax.bar(edges[:-1], counts / np.diff(edges), np.diff(edges), align="edge", color=BLUE)
    mean = len(known) / n_steps
    ax.axhline(mean, color=BLACK, linewidth=1, linestyle="--")
    ax.set(xlim=(0, n_steps), ylim=(0, 1.05 * max(counts.max() * n_bins / n_steps, mean) or 1))
    thousands(ax.xaxis)
    n_once = len(np.unique(known))
    lost = len(handles) - len(known)
    gone = f"\n{lost:,} draws of steps that are evicted or not committed" if lost else ""
    once = f"{100 * n_once / n_steps:.1f} % of {n_steps:,} steps were drawn at least once"
    note(ax, f"mean {mean:.3g}; {once}{gone}")
    return ax


def ages(
    data: TableSource,
    drawn: Drawn | None = None,
    *,
    by: str = "time",
    n_bins: int = 50,
    ax: Axes | None = None,
) -> Axes:
    """Draw a histogram of the age of steps, and of drawn steps if batches are given.

    Args:
        data: A store, snapshot, episode table, buffer (its committed steps) or reader.
        drawn: Batches, or their ``index``; see `coverage`.
        by: ``"time"``: how long before the newest episode an episode ended. ``"policy_version"``: how many policy
            versions behind the newest its steps are, on average over the episode.
        n_bins: Bins of the histogram.
        ax: Where to draw; by default a new figure.

    Raises:
        DataError: The data has no policy versions, or ``drawn`` is something else.
    """
    table = table_of(data)
    age, unit = _ages(table, by)
    ax = axes_or_new(ax)
    finish(ax, f"Age of {int(table['length'].sum()):,} steps", f"age in {unit}", "share of the steps")
    known = np.isfinite(age)
    if not known.any() or not table["length"][known].sum():
        say(ax, "no steps")
        return ax
    edges = _age_edges(float(age[known].max()), n_bins, is_whole=by != "time")
    _draw_shares(ax, age[known], table["length"][known], edges, BLUE, "stored")
    if drawn is not None:
        rows = rows_of_handles(table, _streams_of(data, table), drawn_handles(drawn))
        of_drawn = age[rows[rows >= 0]]
        of_drawn = of_drawn[np.isfinite(of_drawn)]
        if len(of_drawn):
            _draw_shares(ax, of_drawn, np.ones(len(of_drawn)), edges, ORANGE, "drawn")
    percent(ax.yaxis)
    ax.set_xlim(edges[0], edges[-1])
    if drawn is not None:
        legend(ax)
    return ax


def _finite(values: Array) -> Array:
    finite: Array = values[np.isfinite(values)]
    return finite


def _priority_options(data: object) -> Any:
    sampler = getattr(getattr(data, "reader", data), "priority_sampler", None)
    return getattr(sampler, "options", None)


def _streams_of(data: object, table: EpisodeTable) -> list[str]:
    return table.stream_names if isinstance(data, EpisodeTable) else stream_ids(data)


def _positions(table: EpisodeTable, streams: list[str], handles: Array) -> tuple[Array, int]:
    """Where drawn steps stand among all steps from the oldest episode to the newest; -1 if they are not there."""
    lengths, order = table["length"], np.argsort(table["time"], kind="stable")
    start = np.empty(len(table), np.int64)
    start[order] = np.cumsum(lengths[order]) - lengths[order]
    rows = rows_of_handles(table, streams, handles)
    found = np.full(len(handles), -1, np.int64)
    chosen = rows >= 0
    t = handles[chosen, 2] - table.first_t[rows[chosen]]
    is_stored = (t >= 0) & (t < lengths[rows[chosen]])
    found[chosen] = np.where(is_stored, start[rows[chosen]] + t, -1)
    return found, int(lengths.sum())


def _ages(table: EpisodeTable, by: str) -> tuple[Array, str]:
    if by == "time":
        times = table["time"]
        age = times.max(initial=-np.inf) - times
        size, unit = next((u for u in _UNITS if age.max(initial=0) >= 2 * u[0]), _UNITS[-1])
        return age / size, unit
    if by != _VERSION:
        raise ValueError(f"by: expected 'time' or 'policy_version', got {by!r}")
    name = _VERSION if _VERSION in table.columns else f"{_VERSION}.mean"
    if name not in (*table.columns, *table.summaries):
        raise DataError(
            "no policy versions are stored; set buffer.policy_version while collecting, and flush() the buffer"
        )
    versions = np.ma.filled(table[name].astype(np.float64), np.nan)
    versions = np.where(versions < 0, np.nan, versions)
    return (np.nanmax(versions) if np.isfinite(versions).any() else 0.0) - versions, "policy versions"


def _age_edges(largest: float, n_bins: int, *, is_whole: bool) -> Array:
    if not is_whole:
        return np.linspace(0, largest or 1.0, n_bins + 1)
    width = max(1, int(np.ceil((largest + 1) / n_bins)))
    return np.arange(0, largest + 1 + width, width) - 0.5


def _draw_shares(ax: Axes, values: Array, weights: Array, edges: Array, colour: str, label: str) -> None:
    counts, _ = np.histogram(values, edges, weights=weights)
    share = counts / weights.sum()
    ax.stairs(share, edges, fill=True, color=colour, alpha=0.35)
    ax.stairs(share, edges, color=colour, linewidth=1.4, label=label)
