"""Which step of the store stands at which position of which row."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from trajstore.format.spans import expand_ranges
from trajstore.sampling.index_entries import GONE
from trajstore.schema import Array

_ROW, _STREAM, _EPISODE, _SHIFT, _BEGIN, _LAST, _STRETCH = range(7)  # of episodes; t is position - shift
_STRETCH_ROW, _STRETCH_FIRST, _STRETCH_STOP = range(3)


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps of a store in order of arrival, episode after episode, and what is known of each; ``[n]`` each."""

    row: Array
    stream: Array
    episode: Array
    t: Array
    recorded: Array  # the position that it was recorded with
    position: Array  # that which it has now
    is_first: Array
    is_last: Array

    def take(self, chosen: Array) -> Steps:
        return Steps(*(getattr(self, name)[chosen] for name in self.__slots__))

    def laid(self, first: int, is_anew: bool) -> Steps:
        """The same; those of rows with gaps, or of all rows, follow each other from a first position on."""
        position = self.position.copy()
        for row in np.unique(self.row):
            at = np.flatnonzero(self.row == row)
            if is_anew or (np.diff(np.sort(position[at])) != 1).any():
                position[at] = first + np.arange(len(at))
        return replace(self, position=position)


@dataclass(frozen=True, slots=True)
class Starts:
    """Where windows may start: in stretches of rows, so many from some position on."""

    row: Array
    first: Array
    sums: Array

    @property
    def total(self) -> int:
        return int(self.sums[-1]) if len(self.sums) else 0

    def at(self, number: Array) -> tuple[Array, Array]:
        """Row and position of the starts of these numbers."""
        at = np.searchsorted(self.sums, number, side="right")
        before = np.append(0, self.sums)[at]
        return self.row[at], self.first[at] + number - before


NO_STARTS = Starts(*np.zeros((3, 0), np.int64))


@dataclass(frozen=True, slots=True)
class Parts:
    """Windows cut where episodes end, first all first parts; ``[n]`` each.

    A part holds the steps ``start`` to ``stop`` of its window, which stand in a row from a position on.
    """

    window: Array
    start: Array
    stop: Array
    row: Array
    position: Array

    def joints(self, n: int, length: int) -> tuple[Array, Array]:
        """Where steps of later parts belong in ``n`` windows, and where they are: places in ``[parts, length]``."""
        owner, step = expand_ranges(self.start[n:], self.stop[n:])
        from_ = (n + owner) * length + step - self.start[n:][owner]
        return self.window[n:][owner] * length + step, from_


class _Table:
    """Rows of integers that are added at the end and given numbers."""

    def __init__(self, n_columns: int) -> None:
        self._data = np.empty((64, n_columns), np.int64)
        self.n = 0

    @property
    def data(self) -> Array:
        return self._data[: self.n]

    def add(self, *columns: Array) -> Array:
        new = np.stack(np.broadcast_arrays(*columns), 1)
        stop = self.n + len(new)
        if stop > len(self._data):
            grown = np.empty((2 * stop, new.shape[1]), np.int64)
            grown[: self.n] = self.data
            self._data = grown
        self._data[self.n : stop] = new
        ids = np.arange(self.n, stop)
        self.n = stop
        return ids

    def keep(self, chosen: Array) -> Array:
        """Drop all others; returns the new numbers by old ones, -1 for those that went and, last, for -1."""
        number = np.append(np.where(chosen, np.cumsum(chosen) - 1, -1), -1)
        kept = self.data[chosen]
        self._data[: len(kept)] = kept
        self.n = len(kept)
        return number


class Rows:
    """A ring of steps for every environment, each with a position that rises for ever.

    A *stretch* is a part of a row whose steps followed each other: windows lie within one. An episode that ended
    with LAST is followed by the next one that begins with FIRST; where the recording broke off, a stretch ends.

    Attributes:
        length: Steps that a row keeps.
        stop: By row, the position of its next step.
        first: By row, the position of the oldest step it keeps.
    """

    def __init__(self, n_rows: int, length: int, first: int = 0) -> None:
        self.length = length
        self.stop, self.first = np.full((2, n_rows), first)
        self._episode_at = np.full((n_rows, length), -1)  # by row and place in the ring
        self._episodes, self._stretches = _Table(7), _Table(3)
        self._open = np.full(n_rows, -1)  # by row: the episode that goes on
        self._stretch = np.full(n_rows, -1)
        self._in_order: Array | None = None  # the stretches by row and position, where that is known
        self._has_ended = np.zeros(n_rows, bool)  # its newest step is a LAST
        self.n_over = 0  # steps that rows have given up and the store may still have

    def __len__(self) -> int:
        return len(self.stop)

    @property
    def sizes(self) -> Array:
        """Steps by row."""
        sizes: Array = self.stop - self.first
        return sizes

    def is_open(self, row: Array) -> Array:
        open_: Array = self._open[row] >= 0
        return open_

    def add(self, row: Array, stream: int, handles: tuple[Array, Array], is_first: Array, is_last: Array) -> None:
        """Put a step at the end of each of some rows."""
        (episode, t), position = handles, self.stop[row]
        begins = is_first | (self._open[row] < 0)
        if begins.any():
            is_broken = begins & ~(is_first & self._has_ended[row])
            broken = row[is_broken]
            self._stretch[broken] = self._stretches.add(broken, position[is_broken], position[is_broken])
            self._in_order = None
            new, at = row[begins], position[begins]
            facts = (episode[begins], at - t[begins], at, at, self._stretch[new])
            self._open[new] = self._episodes.add(new, np.full(len(new), stream), *facts)
        owner = self._open[row]
        self._episodes.data[owner, _LAST] = position
        self._stretches.data[self._stretch[row], _STRETCH_STOP] = position + 1
        self._episode_at[row, position % self.length] = owner
        self._has_ended[row] = is_last
        self._open[row[is_last]] = -1
        self._advance(row, position + 1)

    def _advance(self, row: Array, stop: Array) -> None:
        first = np.maximum(self.first[row], stop - self.length)
        self.n_over += int((first - self.first[row]).sum())
        self.stop[row], self.first[row] = stop, first

    def end(self, row: int) -> None:
        """Note that the episode of a row got no LAST and is over: what comes begins another."""
        self._open[row] = -1

    def clear(self, row: Array) -> None:
        """Give up all steps of rows; positions go on."""
        self.n_over += int(self.sizes[row].sum())
        self.first[row] = self.stop[row]

    # ---- finding steps

    def has(self, row: Array, position: Array) -> Array:
        """Whether rows keep steps at positions."""
        found: Array = (position >= self.first[row]) & (position < self.stop[row])
        return found

    def handles(self, row: Array, position: Array) -> Array:
        """Stream, episode and t of steps that are here, ``[..., 3]``."""
        episode = self._of(row, position)
        return np.stack([episode[..., _STREAM], episode[..., _EPISODE], position - episode[..., _SHIFT]], -1)

    def begins(self, row: Array, position: Array) -> Array:
        """The position at which the episode of a step began, which may be gone."""
        begin: Array = self._of(row, position)[..., _BEGIN]
        return begin

    def ends(self, row: Array, position: Array) -> Array:
        """The position of the newest step of its episode."""
        end: Array = self._of(row, position)[..., _LAST]
        return end

    def _of(self, row: Array, position: Array) -> Array:
        episodes: Array = self._episodes.data[self._episode_at[row, position % self.length]]
        return episodes

    # ---- windows

    def starts(self, length: int, low: Array) -> Starts:
        """Starts of windows of so many steps, from a position of each row on, by row and position.

        In an order that does not depend on which row was stepped when: it is the same after resuming.
        """
        if self._in_order is None:
            self._in_order = np.argsort(self._stretches.data[:, _STRETCH_ROW], kind="stable")
        row, first, stop = self._stretches.data[self._in_order].T
        first = np.maximum(first, low[row])
        return Starts(row, first, np.cumsum((stop - length + 1 - first).clip(0)))

    def is_start(self, row: Array, position: Array, length: int) -> Array:
        """Whether a window of so many steps may start at steps that are here."""
        stretch = self._of(row, position)[..., _STRETCH]
        found: Array = position + length <= self._stretches.data[stretch, _STRETCH_STOP]
        return found

    def parts(self, row: Array, position: Array, length: int) -> Parts:
        """Windows of so many steps, in parts that lie in one episode each."""
        window, start, found = np.arange(len(row)), np.zeros(len(row), np.int64), []
        while len(window):
            stop = start + self.ends(row, position) + 1 - position
            found.append((window, start, np.minimum(stop, length), row, position))
            goes_on = stop < length
            position = (position + stop - start)[goes_on]
            window, start, row = window[goes_on], stop[goes_on], row[goes_on]
        return Parts(*map(np.concatenate, zip(*found, strict=True)))

    # ---- what is over

    def forget(self) -> tuple[Array, Array, Array]:
        """Stream, episode and first t that is left (`GONE`: none) of episodes that lost steps; forgets those."""
        episodes, stretches = self._episodes.data, self._stretches.data
        low, is_open = self.first[episodes[:, _ROW]], np.zeros(len(episodes), bool)
        is_open[self._open[self._open >= 0]] = True
        is_gone = (episodes[:, _LAST] < low) & ~is_open
        lost = episodes[episodes[:, _BEGIN] < low]
        floor = np.where(is_gone, GONE, low - episodes[:, _SHIFT])[episodes[:, _BEGIN] < low]
        is_used = stretches[:, _STRETCH_STOP] > self.first[stretches[:, _STRETCH_ROW]]
        is_used[episodes[~is_gone, _STRETCH]] = True
        is_used[self._stretch[self._stretch >= 0]] = True
        number, stretch = self._episodes.keep(~is_gone), self._stretches.keep(is_used)
        self._episode_at, self._open = number[self._episode_at], number[self._open]
        self._stretch, self._in_order = stretch[self._stretch], None
        self._episodes.data[:, _STRETCH] = stretch[self._episodes.data[:, _STRETCH]]
        self.n_over = 0
        return lost[:, _STREAM], lost[:, _EPISODE], floor

    # ---- what was recorded before

    @classmethod
    def of(cls, n_rows: int, length: int, steps: Steps, unused: int) -> Rows:
        """Rows with the steps of a store; those that have none begin with an unused position."""
        rows = cls(n_rows, length, unused)
        for row in np.unique(steps.row).tolist():
            at = np.flatnonzero(steps.row == row)
            rows._lay(row, steps.take(at[np.argsort(steps.position[at])]))
        return rows

    def _lay(self, row: int, steps: Steps) -> None:
        """Fill a row with steps whose positions follow each other."""
        position, stop = steps.position, int(steps.position[-1]) + 1
        begins = np.append(True, (np.diff(steps.stream) != 0) | (np.diff(steps.episode) != 0))
        is_broken = begins & ~(steps.is_first & np.append(False, steps.is_last[:-1]))
        stops = np.append(position[:-1][begins[1:]], position[-1])
        breaks = np.append(position[:-1][is_broken[1:]], position[-1]) + 1
        stretch = self._stretches.add(np.full(len(breaks), row), position[is_broken], breaks)
        of = stretch[np.cumsum(is_broken) - 1][begins]
        shift = position - steps.t
        # Where rows were dealt out anew, the positions before a headless episode are those of others.
        begin = np.where(position == steps.recorded, shift, position)
        facts = (column[begins] for column in (steps.stream, steps.episode, shift, begin))
        owner = self._episodes.add(steps.row[begins], *facts, stops, of)[np.cumsum(begins) - 1]
        kept = position >= stop - self.length
        self._episode_at[row, position[kept] % self.length] = owner[kept]
        self._has_ended[row], self._stretch[row] = steps.is_last[-1], stretch[-1]
        self.stop[row], self.first[row] = stop, max(int(position[0]), stop - self.length)
        self.n_over += int((~kept).sum())
