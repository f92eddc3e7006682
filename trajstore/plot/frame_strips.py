"""A strip of frames of an episode."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from trajstore.arguments import check_positive
from trajstore.format.handles import EpisodeKey
from trajstore.plot.drawing import axes_or_new
from trajstore.plot.images import Layout, image_field, n_frames, read_image, row_of
from trajstore.plot.sources import snapshot_of
from trajstore.schema import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from trajstore.plot.sources import Source

_GAP = 0.04  # of the width of a frame
_WIDTH = 9.0  # inches


def frames(
    data: Source,
    episode: int | EpisodeKey | tuple[str, int] = 0,
    *,
    field: str | None = None,
    n: int = 8,
    start: int = 0,
    stop: int | None = None,
    layout: Layout | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw frames of an episode side by side, evenly spread, the first and the last among them.

    Args:
        data: A store, snapshot, buffer (its committed steps) or reader.
        episode: Its row in the episode table, or its key.
        field: Path of the field that holds frames; by default the first that does.
        n: Number of frames.
        start: First step, counted from the first step that is still stored.
        stop: Step after the last; the end of the episode by default.
        layout: The order of the axes, such as ``"CHW"``; found out from the shape by default. Of a stack of frames
            (``K``), the newest is drawn.
        ax: Where to draw; by default a new figure.

    Raises:
        EpisodeNotFoundError: The data does not show this episode.
        DataError: No field holds frames, or this one does not.
        IndexError: The episode does not have these steps.
    """
    check_positive("n", n)
    snapshot = snapshot_of(data)
    path, order = image_field(snapshot, field, layout)
    start, stop = checked_range(n_frames(snapshot, episode, path), start, stop)
    chosen = np.unique(np.linspace(start, stop - 1, min(n, stop - start)).round().astype(np.int64)).tolist()
    first_t = int(snapshot.episodes.first_t[row_of(snapshot, episode)])
    images = [read_image(snapshot, episode, path, order, t) for t in chosen]
    height, width = images[0].shape[:2] if images else (1, 1)
    ax = axes_or_new(ax, _WIDTH, 0.75 + _WIDTH / max(len(images), 4) * height / width)
    for i, image in enumerate(images):
        left = i * (1 + _GAP) * width
        ax.imshow(
            image, extent=(left, left + width, height, 0), cmap="gray", vmin=0, vmax=255, interpolation="nearest"
        )
        ax.text(
            left + width / 2, height * 1.03, f"t = {chosen[i] + first_t}", ha="center", va="top", fontsize="small"
        )
    ax.set(xlim=(0, max(width, (len(images) * (1 + _GAP) - _GAP) * width)), ylim=(height, 0))
    ax.set_axis_off()
    ax.set_title(_title(snapshot.episodes.row(row_of(snapshot, episode)), path), loc="left", fontsize="medium")
    return ax


def checked_range(n: int, start: int, stop: int | None) -> tuple[int, int]:
    """Frames to read, of an episode that has ``n``.

    Raises:
        IndexError: The episode does not have them.
    """
    end = n if stop is None else stop
    if not 0 <= start < end <= n:
        raise IndexError(f"expected frames 0 <= start < stop <= {n}, got {start} and {end}")
    return start, end


def _title(row: dict[str, Any], path: str) -> str:
    has_return = math.isfinite(row["return"])  # NaN where the steps have no reward
    about = f"{row['length']} steps, " + (f"return {row['return']:.4g}, " if has_return else "")
    return f"{path}, episode {row['episode']} ({about}{row['end']})"


def resize(image: Array, height: int, width: int) -> Array:
    """An image of this size: pixels are repeated or left out."""
    rows = np.arange(height) * image.shape[0] // height
    columns = np.arange(width) * image.shape[1] // width
    resized: Array = image[rows][:, columns]
    return resized
