"""Appended steps that have no place in the stream yet: host arrays in order of arrival."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trajstore.format.spans import EpisodeValues
from trajstore.host_memory import FEW_BYTES, HostMemory
from trajstore.schema import Array, Schema

_FIRST_ENDS = 64
_LINE = 64  # bytes: columns start at a line of the processor's cache
ROW_OVERHEAD_BYTES = 48  # `episode`, `env` and `dropped` of a row, and the memory that placing it needs


@dataclass(slots=True)
class EpisodeEnds:
    """The ends of episodes that one call reported: integers for one episode, arrays for several."""

    n: int
    episode: int | Array
    env: int | Array
    end: int | Array
    has_final: bool
    values: EpisodeValues  # the same for each of the episodes


def staged_rows(buffer_bytes: int, row_bytes: int) -> int:
    """Rows that each of a buffer's two stagings holds: the most that one call may append."""
    return max(1, buffer_bytes // 2 // (row_bytes + ROW_OVERHEAD_BYTES))


def bytes_for_rows(n: int, row_bytes: int) -> int:
    """The smallest buffer that takes ``n`` rows in one call."""
    return 2 * n * (row_bytes + ROW_OVERHEAD_BYTES)


class Staging:
    """A bounded block of appended rows, reused once its rows are durable.

    Attributes:
        capacity: The most rows it can hold.
        n: Rows staged.
        n_text: Bytes of text that came with the ends of episodes.
        columns: By field path, the staged values; rows past ``n`` are undefined.
        addresses: By field path, the memory address of its first row.
        episode: By row, the number of its episode.
        env: By row, its environment.
        dropped: By row, whether its episode was aborted, so that the row is not stored.
        any_dropped: Whether any staged row is dropped.
        reported_ends: Ends of episodes, one entry for each call that ended some.
        n_ends: Number of episodes that ended.
    """

    def __init__(self, schema: Schema, capacity: int) -> None:
        self.capacity = capacity
        self.n = 0
        self.n_text = 0
        # Allocated whole: the system gives out memory as it is touched, and growing would copy.
        starts = np.cumsum([0, *(-(-capacity * s.row_bytes // _LINE) * _LINE for s in schema.fields.values())])
        self._memory = HostMemory(int(starts[-1]))
        self.columns: dict[str, Array] = {}
        for first, (path, spec) in zip(starts.tolist(), schema.fields.items(), strict=False):
            stop = first + capacity * spec.row_bytes
            self._memory.use_huge_pages(first + FEW_BYTES, stop)
            values = self._memory.array[first:stop]
            self.columns[path] = values.view(spec.storage_dtype).reshape(capacity, *spec.shape)
        self.addresses = {path: _address(column) for path, column in self.columns.items()}
        self.episode = np.empty(capacity, np.int64)
        self.env = np.empty(capacity, np.int64)
        self.dropped = np.empty(capacity, bool)
        self.any_dropped = False
        self.reported_ends: list[EpisodeEnds] = []
        self.n_ends = 0
        self._n_end_calls = 0
        self._end_rows = np.empty((_FIRST_ENDS, 5), np.int64)

    @property
    def room(self) -> int:
        return self.capacity - self.n

    @property
    def is_empty(self) -> bool:
        return self.n == 0 and not self.reported_ends

    def clear(self) -> None:
        """Forget all rows. A staging that was not even half full gives its memory back."""
        if 2 * self.n < self.capacity:
            self._memory.discard(0, len(self._memory.array))
        self.n = self.n_text = 0
        self.any_dropped = False
        self.reported_ends.clear()
        self.n_ends = 0

    def reserve(self, n: int) -> slice:
        """Take the next ``n`` rows, for which the caller made room; return where they are."""
        where = slice(self.n, self.n + n)
        self.dropped[where] = False
        self.n += n
        return where

    def add_row(self, episode: int, env: int) -> None:
        """Count the next row, whose values are in place already."""
        at = self.n
        self.episode[at], self.env[at], self.dropped[at] = episode, env, False
        self.n = at + 1

    def extend(self, rows: dict[str, Array], episode: Array, env: Array) -> None:
        """Append rows, one for each entry of ``episode`` and ``env``."""
        where = self.reserve(len(episode))
        for path, values in rows.items():
            self.columns[path][where] = values
        self.episode[where], self.env[where] = episode, env

    def end(self, ends: EpisodeEnds) -> None:
        """Note that episodes ended."""
        self.reported_ends.append(ends)
        self.n_text += len(ends.values.text) * ends.n
        stop = self.n_ends + ends.n
        if stop > len(self._end_rows):
            grown = np.empty((2 * stop, 5), np.int64)
            grown[: self.n_ends] = self._end_rows[: self.n_ends]
            self._end_rows = grown
        facts = (self._n_end_calls, ends.episode, ends.env, ends.end, ends.has_final)
        for column, values in enumerate(facts):
            self._end_rows[self.n_ends : stop, column] = values
        self._n_end_calls += 1
        self.n_ends = stop

    def ends(self, first: int = 0) -> Array:
        """Ends from number ``first`` on, in order of time: a copy, rows of (call, episode, env, end, has_final)."""
        return self._end_rows[first : self.n_ends].copy()

    def drop(self, episode: int) -> int:
        """Mark the staged rows of an episode as dropped; return their number."""
        rows = np.flatnonzero(self.episode[: self.n] == episode)
        self.dropped[rows] = True
        self.any_dropped = self.any_dropped or bool(len(rows))
        return len(rows)

    def find(self, episode: int, position: int) -> int | None:
        """The row of an episode's staged step at ``position``, counted from its first staged step."""
        rows = np.flatnonzero(self.episode[: self.n] == episode)
        return int(rows[position]) if 0 <= position < len(rows) else None


def _address(column: Array) -> int:
    address: int = column.__array_interface__["data"][0]
    return address
