"""Which windows of a batch that was drawn earlier can no longer be read."""

from __future__ import annotations

import numpy as np
import torch

from trajstore.sampling.batches.batch_assembler import WindowKind
from trajstore.sampling.index.episode_index import EpisodeIndex
from trajstore.schema import Array


def evicted_windows(index: EpisodeIndex, kind: WindowKind, handles: Array, first_t: Array) -> Array:
    """Whether each window needs steps that the index no longer has.

    Args:
        index: The episodes that can be sampled.
        kind: The kind of windows.
        handles: ``[batch, 3]``: stream number, episode and t of each window's start.
        first_t: ``[batch]``: the first t that each window's episode had when the window was drawn.
    """
    spec = kind.windows
    before = min([0, *(step for _, steps in spec.stacks for step in steps)]) - spec.burn_in * spec.stride
    first = np.maximum(handles[:, 2] + before, first_t)
    evicted: Array = ~index.has_steps_from(handles[:, 0], handles[:, 1], first)
    if kind.starts.chains is not None:  # such a window continues in other episodes, which may be evicted too
        kind.starts.update()
        entry = index.find(handles[~evicted, 0], handles[~evicted, 1])
        start = handles[~evicted, 2] - index.t_base.host[entry]
        evicted[~evicted] = ~kind.starts.has_start(entry, start)
    return evicted


def are_goals_evicted(index: EpisodeIndex, goals: torch.Tensor | None) -> bool:
    """Whether a step that gives a goal in hindsight is no longer in the index; stream -1 means no goal."""
    if goals is None:
        return False
    handles = goals.cpu().numpy()
    return not index.has_steps_from(*handles[handles[:, 0] >= 0].T).all()
