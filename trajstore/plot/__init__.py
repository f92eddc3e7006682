"""Plots of what a store or a buffer holds, drawn with matplotlib.

They need the extra ``plot``: ``pip install 'trajstore[plot]'``. Each function takes a `Store`, a `Snapshot`, a
`ReplayBuffer` or a `Reader`, those about episodes also an `EpisodeTable`. It draws on ``ax``, or on a new figure,
and returns the axes; a notebook shows what the last line of a cell returns. ``axes.figure.savefig("x.png")`` saves
the figure. pyplot and its settings are not touched.

- Episodes: `returns`, `lengths`, `column`.
- Sampling: `priorities`, `effective_sample_size`, `coverage`, `ages`.
- Fields: `rewards`, `actions`, `distribution`.
- Frames: `frames`; `save_video` writes a GIF or an MP4.
- `storage`, and `overview`, which draws several of these.
"""

from trajstore.plot.episode_plots import column, lengths, returns
from trajstore.plot.field_plots import actions, distribution, rewards
from trajstore.plot.frame_strips import frames
from trajstore.plot.overview_figure import overview
from trajstore.plot.sampling_plots import ages, coverage, effective_sample_size, priorities
from trajstore.plot.storage_plot import storage
from trajstore.plot.videos import save_video

__all__ = [
    "actions",
    "ages",
    "column",
    "coverage",
    "distribution",
    "effective_sample_size",
    "frames",
    "lengths",
    "overview",
    "priorities",
    "returns",
    "rewards",
    "save_video",
    "storage",
]


def __dir__() -> list[str]:
    return sorted(__all__)
