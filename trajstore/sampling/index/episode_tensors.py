"""The sampleable episodes as tensors: arithmetic from episodes and positions to rows, without I/O."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import torch

from trajstore.cache.growable_array import GrowableArray
from trajstore.sampling.index.episode_numbers import EpisodeNumberMap
from trajstore.sampling.index.index_entries import GONE, HAS_FINAL
from trajstore.schema import Array


class EpisodeTensors:
    """One entry for each episode, and one for each span of rows; what draws and plans read.

    Entries stand in order of arrival. Rows are numbered through all entries in that order (*logical* rows), so one
    prefix sum says how long an episode is and which span holds a row.

    Attributes:
        first: The first entry in use; the episodes of earlier entries were evicted.
        n: Number of entries, unused ones before `first` included.
        step_base: Value before the first element of `step_sums`. It is not 0 after evictions, which take steps
            off the front and leave later sums as they are.
        logical: First logical row of each entry, and one more element: the number of logical rows.
        step_sums: Steps of all entries up to and including each entry, plus `step_base`.
        t_base: Time index of the first step that each episode still has.
        env: Environment that recorded each episode, on the rank that recorded it.
        shown_env: Environment that batches report. It differs from `env` for episodes of other ranks.
        numbers: Stream numbers by stream id.
        newest: Largest episode number seen, by stream number.
        rank: Rank of this session.
        kernels, growth_kernels: Compiled loops that read and that extend the index, for the CPU.
    """

    def __init__(
        self, device: torch.device, kernels: ModuleType | None = None, growth_kernels: ModuleType | None = None
    ) -> None:
        self.device = device
        self.kernels = kernels
        self.growth_kernels = growth_kernels
        self.first = self.n = self.step_base = 0
        self.logical = GrowableArray(np.int64, device)
        self.step_sums = GrowableArray(np.int64, device)
        self.flags = GrowableArray(np.uint8, device)
        self.stream = GrowableArray(np.int32, device)
        self.episode = GrowableArray(np.int64, device)
        self.t_base = GrowableArray(np.int64, device)
        self.env = GrowableArray(np.int32, device)
        self.shown_env = GrowableArray(np.int32, device)
        self.span_logical = GrowableArray(np.int64, device)
        self.span_row = GrowableArray(np.int64, device)
        self.span_source = GrowableArray(np.int32, device)
        self.logical.rewrite(0, np.zeros(1, np.int64))
        self.numbers: dict[str, int] = {}
        self.newest = np.empty(0, np.int64)
        self.rank = 0
        self._first_span = 0
        self._entries: list[EpisodeNumberMap] = []  # by stream number: the entry of each episode, or -1
        self._source_ranks = GrowableArray(np.int64, device)  # by stream number: the rank that recorded it

    @property
    def is_simple(self) -> bool:
        """Whether every episode is a single span, so that span i belongs to entry i."""
        return self.span_row.n == self.n and self._first_span == self.first

    @property
    def n_rows(self) -> int:
        return int(self.logical.host[self.n])

    @property
    def n_episodes(self) -> int:
        return self.n - self.first

    @property
    def n_steps(self) -> int:
        return int(self.step_sums.host[self.n - 1]) - self.step_base if self.n else 0

    @property
    def nbytes(self) -> int:
        """Memory on the device, and that of the entry tables on the host."""
        arrays = (self.logical, self.step_sums, self.flags, *self._columns())
        tables = sum(table.nbytes for table in self._entries)
        return sum(a.nbytes for a in arrays) + tables + self.span_nbytes

    @property
    def span_nbytes(self) -> int:
        return sum(a.nbytes for a in (self.span_logical, self.span_row, self.span_source))

    def _columns(self) -> tuple[GrowableArray, ...]:
        return self.stream, self.episode, self.t_base, self.env, self.shown_env

    def _span_columns(self) -> tuple[GrowableArray, ...]:
        return self.span_logical, self.span_row, self.span_source

    def lengths(self, start: int = 0, stop: int | None = None) -> Array:
        """Number of steps of the entries from ``start`` to ``stop``, on the host; 0 for evicted ones."""
        stop = self.n if stop is None else stop
        rows = np.diff(self.logical.host[start : stop + 1])
        lengths: Array = rows - (self.flags.host[start:stop] & HAS_FINAL)
        return lengths

    def lengths_of(self, entry: Array) -> Array:
        """Number of steps of these entries, on the host."""
        rows = self.logical.host[entry + 1] - self.logical.host[entry]
        lengths: Array = rows - (self.flags.host[entry] & HAS_FINAL)
        return lengths

    def find(self, stream: Array, episode: Array) -> Array:
        """Entries of episodes by stream number and episode number; -1 for episodes that are not in the index."""
        if len(stream) and 0 <= stream[0] < len(self._entries) and (stream == stream[0]).all():
            entries: Array = self._entries[stream[0]].get(episode)  # the common case
            return entries
        found = np.full(len(stream), -1)
        for number in np.unique(stream):
            if 0 <= number < len(self._entries):
                chosen = np.flatnonzero(stream == number)
                found[chosen] = self._entries[number].get(episode[chosen])
        return found

    def has_steps_from(self, stream: Array, episode: Array, t: Array) -> Array:
        """Whether each episode is in the index and has kept all of its steps from ``t`` on."""
        entry = self.find(stream, episode)
        found = entry >= 0
        found[found] = self.t_base.host[entry[found]] <= t[found]
        return found

    def entries_of(self, stream: int) -> EpisodeNumberMap:
        """The entry of each episode of a stream, or -1."""
        return self._entries[stream]

    def source_ranks(self) -> torch.Tensor:
        """The rank that recorded each stream, by stream number; a session without ranks is rank 0."""
        missing = len(self.numbers) - self._source_ranks.n
        if missing > 0:  # no snapshot shows these yet, so this session writes them
            self._source_ranks.rewrite(self._source_ranks.n, np.full(missing, self.rank))
        return self._source_ranks.device

    def first_shown_rows(self) -> dict[str, int]:
        """By stream: the first row that belongs to an episode of the index, `GONE` if none does.

        Reads all spans.
        """
        first = np.full(len(self.numbers) + 1, GONE)
        spans = slice(self._first_span, None)
        np.minimum.at(first, self.span_source.host[spans], self.span_row.host[spans])
        return {name: int(first[n + 1]) for name, n in self.numbers.items()}

    def shown_spans(self) -> tuple[Array, Array, Array, Array]:
        """First logical row, number of rows, first row and source of every span that an episode has."""
        logical, row, source = (column.host[self._first_span :] for column in self._span_columns())
        return logical, np.diff(np.append(logical, self.n_rows)), row, source

    def addresses(self) -> tuple[int, ...]:
        """Memory addresses of the arrays of episodes and spans, the number of spans, and `is_simple`.

        Valid until the next change; in the order that `program_loops` expects.
        """
        episodes = self.logical, self.flags, self.t_base, self.stream, self.episode
        arrays = (array.data_ptr for array in (*episodes, *self._span_columns()))
        return *arrays, self.span_row.n, self.is_simple

    def kernel_arrays(self) -> tuple[Any, ...]:
        """Arrays of episodes and spans that the compiled loops read, on the host."""
        episodes = self.logical.host, self.flags.host, self.t_base.host, self.stream.host, self.episode.host
        return *episodes, self.span_logical.host, self.span_row.host, self.span_source.host, self.is_simple
