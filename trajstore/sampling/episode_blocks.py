"""Blocks of whole episodes, for values that depend on all later steps of an episode, such as returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from trajstore.arguments import check_positive
from trajstore.errors import DataError
from trajstore.format.spans import expand_counts
from trajstore.sampling.batches.batch_assembler import BatchAssembler, WindowKind
from trajstore.sampling.batches.batch_plan import BatchPlan
from trajstore.sampling.index.entry_rows import EntryRows
from trajstore.sampling.index.index_entries import HAS_FINAL, TERMINATED
from trajstore.sampling.window_starts import DrawnWindows
from trajstore.sampling.windows import Windows
from trajstore.schema import Array, Schema, observation_paths, selected_paths

SEGMENT_END, HAS_NEXT = "segment_end", "has_next"


def block_windows(schema: Schema, fields: Iterable[str] | None) -> Windows:
    """The windows of blocks: single steps, with next values of the chosen observations.

    Rewards that arrive with the next observation have a next value as well.

    Raises:
        DataError: A chosen field has a name that blocks use for something else.
    """
    chosen = selected_paths(schema, None if fields is None else tuple(fields))
    for path in chosen:
        if path.split("/")[0] in (SEGMENT_END, HAS_NEXT):
            raise DataError(
                f"field '{path}': blocks hold something else under that name; leave it out with fields="
            )
    after = [path for path in chosen if schema[path].final] or observation_paths(chosen)
    if schema.reward_alignment == "observation" and schema.reward in chosen and schema.reward not in after:
        after.append(schema.reward)
    return Windows(fields=chosen, next_fields=after, squeeze=True)


class EpisodeBlockDraws:
    """Draws all steps that are present at the start, in order of arrival, in blocks of whole episodes.

    Episodes that are evicted before their turn are skipped and counted. Steps that come later are left out.

    Args:
        assembler: Has the index and the kinds of window.
        windows: Single steps; see `block_windows`.
        block_steps: The most steps in a block, unless one episode alone has more.
        max_bytes: The most bytes that a block takes.

    Attributes:
        kind: The kind of window.
        n_skipped: Steps that were skipped because they had been evicted.

    Raises:
        NotReadyError: There are no steps.
        DataError: One episode takes more than ``max_bytes``.
    """

    def __init__(self, assembler: BatchAssembler, windows: Windows, block_steps: int, max_bytes: int) -> None:
        check_positive("block_steps", block_steps)
        self._assembler = assembler
        self.kind = assembler.kind(windows)
        self.n_skipped = self._n_drawn = 0
        index = assembler.index
        lengths = index.lengths(index.first, index.n)
        if not lengths.sum():
            raise assembler.no_windows(windows, "")
        columns = (index.stream.host, index.episode.host, index.t_base.host)
        stream, episode, first_t = (column[index.first : index.n].astype(np.int64) for column in columns)
        self._streams = list(index.numbers)
        self._episodes = np.stack([stream, episode, first_t, first_t + lengths])
        row_bytes = max(1, _step_bytes(assembler.schema, windows))
        self._check_longest(lengths, row_bytes, max_bytes)
        self._stops = _block_stops(np.cumsum(lengths), min(block_steps, max(1, max_bytes // row_bytes)))

    def _check_longest(self, lengths: Array, row_bytes: int, max_bytes: int) -> None:
        at = int(lengths.argmax())
        n_bytes = int(lengths[at]) * row_bytes
        if n_bytes > max_bytes:
            stream, episode = self._streams[self._episodes[0, at]], self._episodes[1, at]
            raise DataError(
                f"episode {episode} of stream '{stream}' has {lengths[at]} steps, which take {n_bytes} bytes, and"
                f" blocks hold whole episodes of at most {max_bytes}; name fewer fields with fields=, such as"
                f" ['reward'], or raise max_block_bytes"
            )

    @property
    def n_batches(self) -> int:
        """Number of blocks, if no episode is evicted before its turn."""
        return len(self._stops)

    def draw(self) -> tuple[WindowKind, DrawnWindows] | None:
        """The steps of the next block; None at the end."""
        while self._n_drawn < len(self._stops):
            self._n_drawn += 1
            entry, position = self._steps(*self._blocks(self._n_drawn - 1, self._n_drawn))
            if len(entry):
                device = self._assembler.device
                return self.kind, DrawnWindows(*(torch.from_numpy(a).to(device) for a in (entry, position)))
        return None

    def _steps(self, stream: Array, episode: Array, first_t: Array, stop_t: Array) -> tuple[Array, Array]:
        """Index entries and positions of the steps of these episodes that are still present."""
        index = self._assembler.index
        entry = self._entries(stream, episode)
        base = np.where(entry >= 0, index.t_base.host[entry], stop_t) if index.n else stop_t
        n_left = (stop_t - np.maximum(base, first_t)).clip(0)
        self.n_skipped += int((stop_t - first_t - n_left).sum())
        owner, number = expand_counts(n_left)
        return entry[owner], number + (np.maximum(base, first_t) - base)[owner]

    def _entries(self, stream: Array, episode: Array) -> Array:
        """Index entries of episodes; -1 for evicted ones."""
        index = self._assembler.index
        numbers = np.array([index.numbers.get(name, -1) for name in self._streams], np.int64)
        entries: Array = index.find(numbers[stream], episode)
        return entries

    @property
    def is_in_order(self) -> bool:
        """Always: blocks come in order of arrival."""
        return True

    @property
    def position(self) -> int:
        """The number of the next block."""
        return self._n_drawn

    def steps_between(self, start: int, stop: int) -> int:
        """Number of steps of the blocks from one to before another."""
        _, _, first, end = self._blocks(start, stop)
        return int((end - first).sum())

    def rows_ahead(self, position: int, n: int) -> tuple[EntryRows, int] | None:
        """The rows of blocks of about ``n`` steps from a block on, and the number of the block after them."""
        if position >= len(self._stops):
            return None
        stop = position + 1
        while stop < len(self._stops) and self.steps_between(position, stop + 1) <= n:
            stop += 1
        stream, episode, _, _ = self._blocks(position, stop)
        entry = self._entries(stream, episode)
        entry = entry[entry >= 0]
        logical = self._assembler.index.logical.host
        return EntryRows(entry, np.zeros_like(entry), logical[entry + 1] - logical[entry]), stop

    def _blocks(self, start: int, stop: int) -> Array:
        """The episodes of blocks ``[start, stop)``."""
        first, end = (int(self._stops[i - 1]) if i else 0 for i in (start, stop))
        return self._episodes[:, first:end]

    def state_dict(self) -> dict[str, Any]:
        episodes = torch.from_numpy(np.append(self._episodes, [_blocks_of(self._stops)], 0))
        return {"streams": self._streams, "episodes": episodes, "n": self._n_drawn, "n_skipped": self.n_skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        episodes = state["episodes"].numpy()
        self._streams, self._episodes = list(state["streams"]), episodes[:4]
        self._stops = np.cumsum(np.bincount(episodes[4]))
        self._n_drawn, self.n_skipped = int(state["n"]), int(state["n_skipped"])

    def stats(self) -> dict[str, Any]:
        return {"n_skipped": self.n_skipped}


def _step_bytes(schema: Schema, windows: Windows) -> int:
    assert windows.fields is not None
    return sum(schema[path].row_bytes for path in (*windows.fields, *windows.next_fields))


def _block_stops(sums: Array, n: int) -> Array:
    """Where blocks of at most ``n`` steps end, or of one longer episode; ``sums`` counts the steps of episodes."""
    stops: list[int] = []
    before = 0
    while not stops or stops[-1] < len(sums):
        start = stops[-1] if stops else 0
        stops.append(max(start + 1, int(np.searchsorted(sums, before + n, side="right"))))
        before = int(sums[stops[-1] - 1])
    return np.array(stops)


def _blocks_of(stops: Array) -> Array:
    """The number of the block that each episode belongs to."""
    return np.repeat(np.arange(len(stops)), np.diff(stops, prepend=0))


def with_segment_marks(plan: BatchPlan, assembler: BatchAssembler, drawn: DrawnWindows) -> BatchPlan:
    """The plan of a block, with the marks that sums over episodes need.

    ``segment_end`` is True at the last step of each episode in the block, ended or not. ``has_next`` is True where
    the observation after the step is known, or the step terminated its episode.
    """
    index, entry = assembler.index, drawn.entry
    segment_end = torch.ones_like(entry, dtype=torch.bool)
    segment_end[:-1] = entry[1:] != entry[:-1]
    flags = index.flags.device[entry]
    n = index.logical.device[entry + 1] - index.logical.device[entry] - (flags & HAS_FINAL)
    leads_on = HAS_FINAL if assembler.schema.reward_alignment == "observation" else HAS_FINAL | TERMINATED
    has_next = (drawn.start < n - 1) | ((flags & leads_on) != 0)
    marks = {SEGMENT_END: segment_end[:, None], HAS_NEXT: has_next[:, None]}
    return replace(plan, known={**plan.known, **marks})
