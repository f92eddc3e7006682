"""Several plots of a store in one figure."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from trajstore.errors import CorruptionError, DataError
from trajstore.plot.drawing import finish, new_axes, new_figure, say
from trajstore.plot.episode_plots import lengths, returns
from trajstore.plot.field_plots import actions, rewards
from trajstore.plot.sampling_plots import ages
from trajstore.plot.sources import snapshot_of
from trajstore.plot.storage_plot import storage

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from trajstore.plot.sources import Source


def overview(data: Source, *, max_steps: int = 50_000) -> Figure:
    """Draw returns, lengths, ages, rewards, actions and storage in one figure.

    What the data does not have, or what is damaged, is left empty, with the reason.

    Args:
        data: A store, snapshot, buffer (its committed steps) or reader.
        max_steps: Steps to read for the distributions.
    """
    snapshot = snapshot_of(data)
    figure = new_figure(12.0, 9.0)
    drawings: list[tuple[str, Callable[..., Any]]] = [
        ("Returns", partial(returns, snapshot)),
        ("Lengths", partial(lengths, snapshot)),
        ("Rewards", partial(rewards, snapshot, max_steps=max_steps)),
        ("Actions", partial(actions, snapshot, max_steps=max_steps)),
        ("Age of steps", partial(ages, snapshot)),
        ("Storage", partial(storage, snapshot)),
    ]
    for place, (title, draw) in enumerate(drawings, 1):
        _draw_or_say(new_axes(figure, 3, 2, place), title, draw)
    return figure


def _draw_or_say(ax: Axes, title: str, draw: Callable[..., Any]) -> None:
    try:
        draw(ax=ax)
    except (DataError, CorruptionError) as error:
        finish(ax, title, "", "")
        say(ax, str(error).split("; ")[0])
