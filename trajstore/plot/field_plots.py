"""Plots of what fields hold: distributions of rewards, actions and other fields."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trajstore.errors import DataError
from trajstore.plot.drawing import (
    BLACK,
    BLUE,
    COLOUR_MAP,
    axes_or_new,
    finish,
    import_matplotlib,
    note,
    percent,
    plain,
    say,
)
from trajstore.plot.sources import sampled_values, snapshot_of
from trajstore.schema import Array, Schema
from trajstore.store.snapshot import Snapshot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from trajstore.plot.sources import Source

_BINS = 60
_MAX_BARS = 40  # distinct values that have a bar each
_MAX_ELEMENTS = 64  # elements of a vector that have a column each
_MAX_BYTES = 256 << 20


def distribution(data: Source, field: str, *, max_steps: int = 100_000, ax: Axes | None = None) -> Axes:
    """Draw how the values of a field are distributed.

    Few distinct values have a bar each, other numbers a histogram. A vector has a column of colours for each of its
    elements, at most 64 of them; larger values, such as frames, have one histogram of all elements.

    Args:
        data: A store, snapshot, buffer (its committed steps) or reader.
        field: Path of the field.
        max_steps: Steps to read, from evenly spread places in the data.
        ax: Where to draw; by default a new figure.

    Raises:
        KeyError: The field does not exist.
    """
    snapshot = snapshot_of(data)
    row_bytes = snapshot.schema[field].row_bytes if snapshot.schema and field in snapshot.schema else 1
    n_read = max(1, min(max_steps, _MAX_BYTES // row_bytes))
    values, n_steps = sampled_values(snapshot, field, n_read)
    ax = axes_or_new(ax)
    which = f"{n_steps:,} steps" if len(values) == n_steps else f"{len(values):,} of {n_steps:,} steps"
    title = f"{field}, {which}"
    if not len(values):
        finish(ax, title, field, "share of the steps")
        say(ax, "no steps")
        return ax
    rows = values.reshape(len(values), -1)
    if rows.shape[1] == 1 or rows.shape[1] > _MAX_ELEMENTS:
        return _draw_numbers(ax, rows.reshape(-1), title, field)
    return _draw_elements(ax, rows, title, field)


def rewards(data: Source, *, max_steps: int = 100_000, ax: Axes | None = None) -> Axes:
    """Draw how rewards are distributed; see `distribution`.

    Raises:
        DataError: The schema names no reward.
    """
    return distribution(data, _reward(snapshot_of(data)), max_steps=max_steps, ax=ax)


def actions(data: Source, *, field: str | None = None, max_steps: int = 100_000, ax: Axes | None = None) -> Axes:
    """Draw how actions are distributed; see `distribution`.

    Args:
        data: A store, snapshot, buffer or reader.
        field: Path of the field; by default ``action``, or the only field below it.
        max_steps: Steps to read.
        ax: Where to draw.

    Raises:
        DataError: There is no field of this name, or several.
    """
    chosen = _action(snapshot_of(data).schema) if field is None else field
    return distribution(data, chosen, max_steps=max_steps, ax=ax)


def _reward(snapshot: Snapshot) -> str:
    schema = snapshot.schema
    if schema is not None and schema.reward is None:
        raise DataError("the schema names no reward; name the field with plot.distribution(data, field)")
    return "reward" if schema is None or schema.reward is None else schema.reward


def _action(schema: Schema | None) -> str:
    if schema is None:
        return "action"
    found = [path for path in schema if path.split("/")[0] in ("action", "actions")]
    if len(found) != 1:
        raise DataError(
            f"expected one field that holds actions, found {', '.join(found) or 'none'}; name it: field=..., one of"
            f" {', '.join(schema)}"
        )
    return found[0]


def _draw_numbers(ax: Axes, values: Array, title: str, label: str) -> Axes:
    finish(ax, title, label, "share")
    finite = values[np.isfinite(values)] if values.dtype.kind == "f" else values
    if not len(finite):
        say(ax, "all values are NaN or infinite")
        return ax
    n_other = len(values) - len(finite)
    remarks = [f"{n_other:,} values are NaN or infinite"] if n_other else []
    distinct, counts = _few_distinct(finite)
    if len(distinct):
        _draw_bars(ax, distinct, counts / len(values))
    else:
        is_whole = finite.dtype.kind in "iu"
        remarks.append(_draw_histogram(ax, finite.astype(np.float64), len(values), is_whole=is_whole))
    if remarks:
        note(ax, "; ".join(remarks))
    percent(ax.yaxis)
    return ax


def _few_distinct(values: Array) -> tuple[Array, Array]:
    """The distinct values and their counts; nothing if they are many."""
    none = values[:0], np.empty(0, np.int64)
    if len(np.unique(values[:: max(1, len(values) // 10_000)])) > _MAX_BARS:
        return none
    distinct, counts = np.unique(values, return_counts=True)
    return (distinct, counts) if len(distinct) <= _MAX_BARS else none


def _draw_bars(ax: Axes, values: Array, share: Array) -> None:
    """A bar for each value, labelled by the value; bars stand side by side, however far apart the values are."""
    ax.bar(np.arange(len(values)), share, width=0.8, color=BLUE)
    every = max(1, len(values) // 20)
    ticks = np.arange(0, len(values), every)
    if len(values) < 4:  # bars as wide as usual
        ax.set_xlim(-2.0, len(values) + 1.0)
    labels = [plain(str(value) if values.dtype.kind == "b" else f"{value:.4g}") for value in values[ticks]]
    ax.set_xticks(ticks, labels)
    if share.min() < share.max() / 100:
        ax.set_yscale("log")
    if len(values) <= 8:
        for i, part in enumerate(share):
            text = f"{100 * part:.3g} %"
            ax.annotate(text, (i, part), (0, 2), textcoords="offset points", ha="center", fontsize="small")
        ax.margins(y=0.12)


def _draw_histogram(ax: Axes, values: Array, n: int, *, is_whole: bool) -> str:
    """Draw a histogram, and return what to say about it."""
    counts, edges = np.histogram(values, _whole_bins(values) if is_whole else _BINS)
    ax.stairs(counts / n, edges, fill=True, color=BLUE)
    if counts.max() > 200 * max(1.0, float(np.median(counts))):
        ax.set_yscale("log")
    middle = float(np.median(values))
    ax.axvline(middle, color=BLACK, linewidth=1, linestyle="--")
    return f"median {middle:.3g}, from {values.min():.3g} to {values.max():.3g}"


def _whole_bins(values: Array) -> Array | int:
    """Edges of bins that hold equally many whole numbers each; others would show gaps that are not there."""
    low, high = values.min(), values.max()
    if max(abs(low), abs(high)) >= 2.0**52:  # halves can't be told from whole numbers
        return _BINS
    width = np.ceil((high - low + 1) / _BINS)
    edges: Array = np.arange(low, high + width + 1, width) - 0.5
    return edges


def _draw_elements(ax: Axes, rows: Array, title: str, label: str) -> Axes:
    """A column of colours for each element of a vector: where its values lie."""
    numbers = rows.astype(np.float64)
    finite = np.isfinite(numbers)
    if not finite.any():
        say(finish(ax, title, f"element of {label}", "value"), "all values are NaN or infinite")
        return ax
    low, high = np.percentile(numbers[finite], (0.1, 99.9))
    edges = np.linspace(low, high if high > low else low + 1.0, _BINS + 1)
    clipped = np.clip(numbers, edges[0], edges[-1])
    shares = np.stack(
        [np.histogram(clipped[finite[:, i], i], edges)[0] / len(rows) for i in range(rows.shape[1])], axis=1
    )
    colours = import_matplotlib("matplotlib.colors")
    floor = max(1.0 / len(rows), 1e-5)
    mesh = ax.pcolormesh(
        np.arange(rows.shape[1] + 1) - 0.5, edges, np.ma.masked_less(shares, floor),
        cmap=COLOUR_MAP, norm=colours.LogNorm(floor, 1.0), rasterized=True,
    )  # fmt: skip
    bar = ax.figure.colorbar(mesh, ax=ax, pad=0.02)
    percent(bar.ax.yaxis)
    bar.set_label("share of the steps")
    ax.set_xticks(np.arange(0, rows.shape[1], max(1, rows.shape[1] // 16)))
    outside = 100 * float((numbers[finite] != clipped[finite]).mean())
    finish(ax, title, f"element of {label}", "value")
    if outside:
        note(ax, f"{outside:.2g} % of the values lie beyond the ends")
    return ax
