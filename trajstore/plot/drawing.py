"""Axes to draw on, and what all plots share: colours, labels, figures that notebooks show."""

from __future__ import annotations

import functools
import io
import textwrap
from typing import TYPE_CHECKING, Any

from trajstore.errors import MissingExtraError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The colours of Okabe and Ito, which colour-blind people tell apart.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
GREY, LIGHT, BLACK = "#7f7f7f", "#d0d0d0", "#222222"
COLOUR_MAP = "viridis"
_SIZE = (7.2, 3.6)  # inches
_DPI = 110
_MAX_LINE = 50  # characters of text inside axes


def import_matplotlib(module: str = "matplotlib") -> Any:
    """Import matplotlib, or one of its modules.

    Raises:
        MissingExtraError: It is not installed.
    """
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError("trajstore.plot needs matplotlib: pip install 'trajstore[plot]'") from error


@functools.cache
def _classes() -> tuple[type[Figure], type[Axes]]:
    """A Figure and an Axes that notebooks show as a picture, without pyplot and its global state."""
    figure_class: Any = import_matplotlib("matplotlib.figure").Figure
    axes_class: Any = import_matplotlib("matplotlib.axes").Axes

    class ShownFigure(figure_class):  # type: ignore[misc]
        def _repr_png_(self) -> bytes:
            out = io.BytesIO()
            self.savefig(out, format="png")
            return out.getvalue()

    class ShownAxes(axes_class):  # type: ignore[misc]
        def _repr_png_(self) -> bytes | None:
            return self.figure._repr_png_() if isinstance(self.figure, ShownFigure) else None

    return ShownFigure, ShownAxes


def new_figure(width: float = _SIZE[0], height: float = _SIZE[1]) -> Figure:
    """A figure of this size in inches."""
    figure: Figure = _classes()[0](figsize=(width, height), dpi=_DPI, layout="constrained")
    return figure


def new_axes(figure: Figure, *place: Any) -> Axes:
    """Axes at a place of a figure, as ``Figure.add_subplot`` takes it."""
    axes: Axes = figure.add_subplot(*place, axes_class=_classes()[1])
    return axes


def axes_or_new(ax: Axes | None, width: float = _SIZE[0], height: float = _SIZE[1]) -> Axes:
    """The given axes, or those of a new figure."""
    if ax is not None:
        import_matplotlib()
        return ax
    return new_axes(new_figure(width, height))


def finish(ax: Axes, title: str, xlabel: str, ylabel: str) -> Axes:
    """Write title and labels, and take away what tells nothing."""
    ax.set_title(plain(title), loc="left", fontsize="medium")
    ax.set_xlabel(plain(xlabel))
    ax.set_ylabel(plain(ylabel))
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def legend(ax: Axes) -> None:
    """Name what is drawn, between the title and the axes, where nothing is covered."""
    _raise_title(ax, 1)
    ax.legend(
        frameon=False, fontsize="small", loc="lower left", bbox_to_anchor=(0.0, 0.99), ncols=6, markerscale=1.6,
        borderaxespad=0.2, borderpad=0.1, columnspacing=1.2, handlelength=1.2, handletextpad=0.5,
    )  # fmt: skip


def note(ax: Axes, text: str) -> None:
    """Write a remark between the title and the axes."""
    _raise_title(ax, 1 + text.count("\n"))
    ax.annotate(
        plain(text), (0.0, 1.0), (0, 4), xycoords="axes fraction", textcoords="offset points",
        ha="left", va="bottom", color=GREY, fontsize="small",
    )  # fmt: skip


def _raise_title(ax: Axes, n_lines: int) -> None:
    ax.set_title(ax.get_title(loc="left"), loc="left", fontsize="medium", pad=7 + 12 * n_lines)


def say(ax: Axes, text: str) -> None:
    """Write in the middle of axes that have nothing to show."""
    wrapped = "\n".join(textwrap.wrap(plain(text), _MAX_LINE, break_long_words=True))
    ax.text(0.5, 0.5, wrapped, transform=ax.transAxes, ha="center", va="center", color=GREY)
    ax.set_xticks([])
    ax.set_yticks([])


def plain(text: str) -> str:
    """Text in which matplotlib sees no formulas, and terminals no control characters."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text).replace(
        "$", r"\$"
    )


def thousands(axis: Any) -> None:
    """Write the numbers of an axis as 10,000, or as 1.5M."""
    ticker = import_matplotlib("matplotlib.ticker")
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: short_number(value)))


def short_number(value: float) -> str:
    """A number as 950, 10,000, 1.5M or 2G."""
    for size, letter in ((1e9, "G"), (1e6, "M")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def percent(axis: Any) -> None:
    ticker = import_matplotlib("matplotlib.ticker")
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{100 * value:.3g} %"))


def bytes_text(n: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.3g} {unit}"
        n /= 1024
    return f"{n:.3g} TiB"
